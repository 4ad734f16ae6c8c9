"""Live tensors of a member, and how their bytes get into a slot and out of it.

`Tensors` does the copying for all kinds of tensors; numpy arrays are here, torch is in `wsync.integrations.torch`.
This is all the work that wsync does in a trainer's or replica's process, so it is done with every core that the process
may use: it is stopped meanwhile anyway. The threads live for one snapshot or one commit.
"""

from __future__ import annotations

import operator
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import xxhash

from wsync.engine.groups import near, some
from wsync.errors import ConfigError, ManifestMismatch
from wsync.holding import Holding, Place
from wsync.manifest import ITEMSIZE, Lane, Manifest, TensorSpec
from wsync.memory import Slot

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    # Number of the tensor, its memory (a memoryview where it is small), where it lies in the lane.
    _Move = tuple[int, Bytes | memoryview | None, int, int]

MAX_THREADS = 4
"""More do not copy faster: a few cores fill the memory bus."""
PIECE_NBYTES = 8 << 20
SHARED_NBYTES = 256 << 10
"""Smaller copies are left to one thread, through memoryviews: there the call costs more than the bytes, and those have
the cheapest one."""


def progress_nbytes(lane: Lane) -> int:
    """How often a packing trainer says how far it is: the transfer overlaps, and saying so costs nothing."""
    return min(64 << 20, max(4 << 20, lane.nbytes // 16))


def live_tensors(
    source: Any,
    names: Sequence[str] | None,
    *,
    is_target: bool,
    former: Tensors | None = None,
    wire_dtypes: Mapping[str, str] | None = None,
) -> Tensors:
    """The named tensors of a module, of a state dict, or of a mapping of numpy arrays; only `names` if given.

    `wire_dtypes` names those that travel in another dtype than their own: they are cast when they are packed, with
    round to nearest even. `former` is what this returned last time: it is returned again if nothing has been replaced
    since. Raises ManifestMismatch or ConfigError naming the tensor that cannot take part.
    """
    if former is not None and former.is_current(source):
        return former
    wanted = tuple(names) if names is not None else None
    torch = sys.modules.get("torch")
    if torch is not None and (
        isinstance(source, torch.nn.Module)
        or (isinstance(source, Mapping) and any(isinstance(value, torch.Tensor) for value in source.values()))
    ):
        from wsync.integrations.torch import TorchTensors

        return TorchTensors(source, wanted, is_target=is_target, wire_dtypes=wire_dtypes or {})
    if isinstance(source, Mapping):
        return NumpyTensors(source, wanted, is_target=is_target, wire_dtypes=wire_dtypes or {})
    raise ConfigError(
        f"cannot read tensors from a {type(source).__name__}",
        hint="pass an nn.Module, a state dict, or a mapping of names to torch tensors or numpy arrays",
    )


def select(names: Sequence[str], wanted: tuple[str, ...] | None) -> list[str]:
    """`names`, or the declared part of them in the same order. Raises for none, and for a declared one not there."""
    if not names or (wanted is not None and not wanted):
        raise ManifestMismatch("there are no tensors to publish or to install", hint="check the mapping, and names=")
    if wanted is None:
        return list(names)
    missing = sorted(set(wanted) - set(names))
    if missing:
        raise ManifestMismatch(
            f"declared names are not there: {some(missing)}",
            hint=near(missing, names) or "names are those of the source, without the prefixes of wrappers",
        )
    return [name for name in names if name in set(wanted)]


class Tensors(ABC):
    """The tensors of a trainer or replica as they are now. Looked at anew for every update: users replace tensors.

    `raw` has, per tensor of `manifest`, its memory as bytes where that is its logical order, else None.
    """

    manifest: Manifest
    raw: list[Bytes | None]
    is_on_device = False
    """Copies may end later than the call that makes them; `finish` waits for them."""

    def __init__(self) -> None:
        self._moves: tuple[Lane | None, list[_Move]] = (None, [])

    @abstractmethod
    def is_current(self, source: Any) -> bool:
        """Whether `source` still has these very tensors, in the same memory and of the same shapes."""

    @abstractmethod
    def store(self, index: int, block: Bytes) -> None:
        """Copy tensor `index` into `block` in logical order."""

    @abstractmethod
    def load(self, index: int, block: Bytes) -> None:
        """Copy `block`, in logical order, into tensor `index`, keeping its strides."""

    @abstractmethod
    def digests(self) -> list[int]:
        """xxh3-64 of each tensor's bytes in logical order, in the order of `manifest`."""

    def finish(self) -> None:  # noqa: B027 - most tensors are not on a device
        """After this all copies between host and devices have ended."""

    def pack(self, slot: Slot, lane: Lane, progress: Callable[[int], None]) -> None:
        """Copy every tensor to its place in the slot; `progress` is told the bytes done so far, now and then."""
        import numpy as np

        into, step, said = np.frombuffer(slot.data, np.uint8), progress_nbytes(lane), 0
        with _Copier() as copier:
            for index, raw, offset, end in self._moves_of(lane):
                if raw is None:
                    self.store(index, into[offset:end])
                elif isinstance(raw, memoryview):
                    slot.data[offset:end] = raw
                else:
                    for start in range(offset, end, step):
                        stop = min(end, start + step)
                        copier.copy(into[start:stop], raw[start - offset : stop - offset])
                        if stop < end and not self.is_on_device:
                            copier.join()
                            progress(stop)
                if end - said >= step and not self.is_on_device:
                    copier.join()
                    said = end
                    progress(said)
            copier.join()
        self.finish()

    def install(self, slot: Slot, lane: Lane) -> None:
        """Copy from the slot into the tensors, in place; `lane` has a placement per tensor of `manifest`, in order."""
        import numpy as np

        source = np.frombuffer(slot.data, np.uint8)
        with _Copier() as copier:
            for index, raw, offset, end in self._moves_of(lane):
                if raw is None:
                    self.load(index, source[offset:end])
                elif isinstance(raw, memoryview):
                    raw[:] = slot.data[offset:end]
                else:
                    copier.copy(raw, source[offset:end])
            copier.join()
        self.finish()

    def _moves_of(self, lane: Lane) -> list[_Move]:
        """Everything to copy for a lane, in its order."""
        if self._moves[0] is not lane:
            pairs = zip(self.manifest.tensors, lane.placements, strict=True)
            moves: list[_Move] = []
            for index, (spec, place) in enumerate(pairs):
                if place.nbytes and not spec.alias_of:
                    raw: Bytes | memoryview | None = self.raw[index]
                    if raw is not None and place.nbytes < SHARED_NBYTES:
                        raw = memoryview(raw)  # type: ignore[arg-type]  # numpy says it is a Buffer from 3.12 on
                    moves.append((index, raw, place.offset, place.offset + place.nbytes))
            self._moves = (lane, sorted(moves, key=operator.itemgetter(2)))
        return self._moves[1]


def dtype_name(dtype: object) -> str:
    """The name of a torch or numpy dtype, as in a `TensorSpec`."""
    return str(dtype).removeprefix("torch.")


def strided_view(local: Any, place: Place, extent: tuple[int, ...]) -> Any:
    """The region of `extent` at `place` as a view of a live local, a torch tensor or numpy array."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(local, torch.Tensor):
        offset, strides = place.strided(local.stride())
        return local.detach().as_strided(extent, strides, local.storage_offset() + offset)
    import numpy as np

    start = local[(*(slice(at, None) for at in place.start), ...)]
    return np.lib.stride_tricks.as_strided(start, extent, place.strided(local.strides)[1])


def bits_of(view: Any, dtype: str) -> Any:
    """The elements of a torch or numpy view as `dtype` (cast if need be), in logical order, as unsigned words.

    A numpy array of shape (elements, words of an element): one word of the element's size, two of 8 bytes for larger.
    Raises ConfigError for a numpy view that cannot be cast so.
    """
    import numpy as np

    itemsize = ITEMSIZE[dtype]
    if hasattr(view, "detach"):
        from wsync.integrations.torch import packed_bytes

        flat = packed_bytes(view, dtype)
    else:
        wire = _wire_dtype("what is compared", view, dtype)
        flat = np.ascontiguousarray(view.astype(wire, copy=False)).reshape(-1).view(np.uint8)
    word = np.dtype(f"u{min(8, itemsize)}")
    return flat.view(word).reshape(-1, max(1, itemsize // 8))


def memory_of(local: Any) -> tuple[object, ...]:
    """Changes when a torch or numpy local comes to lie elsewhere, or otherwise; empty for what is neither."""
    if hasattr(local, "data_ptr"):
        return local.data_ptr(), local.stride(), local.dtype, local.shape
    if hasattr(local, "__array_interface__"):
        return local.__array_interface__["data"][0], local.strides, local.dtype, local.shape
    return ()


def is_equal(one: Any, other: Any, dtype: str) -> bool:
    """Whether two views have the same bits."""
    return bool((bits_of(one, dtype) == bits_of(other, dtype)).all())


def is_released(local: Any) -> bool:
    """Whether a torch tensor has elements and no storage for them, as offloading leaves it."""
    return hasattr(local, "untyped_storage") and bool(local.numel()) and not local.untyped_storage().nbytes()


def copy_into(target: Any, source: Any) -> None:
    """Copy a view onto another of the same shape, torch or numpy."""
    if hasattr(target, "copy_"):
        target.copy_(source)
    else:
        target[...] = source


class _Copier:
    """Collects large copies and shares them among threads, which numpy lets run at once."""

    def __init__(self) -> None:
        import numpy as np

        self._copyto = np.copyto
        self._num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._pool: ThreadPoolExecutor | None = None
        self._large: list[tuple[Bytes, Bytes]] = []

    def copy(self, target: Bytes, source: Bytes) -> None:
        """Copied when `join` returns."""
        for start in range(0, len(target), PIECE_NBYTES):
            self._large.append((target[start : start + PIECE_NBYTES], source[start : start + PIECE_NBYTES]))

    def join(self) -> None:
        """After this everything is copied."""
        pairs, self._large = self._large, []
        if len(pairs) < 2 or self._num_threads == 1:
            self._copy_all(pairs)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads - 1, thread_name_prefix="wsync-copy")
        parts = [pairs[number :: self._num_threads] for number in range(self._num_threads)]
        others = [self._pool.submit(self._copy_all, part) for part in parts[1:]]
        try:
            self._copy_all(parts[0])
        finally:
            wait(others)  # also when interrupted: nobody may write into a slot that has been given up
        for other in others:
            other.result()

    def _copy_all(self, pairs: list[tuple[Bytes, Bytes]]) -> None:
        for target, source in pairs:
            self._copyto(target, source)

    def __enter__(self) -> _Copier:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()


class Memory:
    """A block of memory for numpy, which neither copies nor frees it; its owner must be kept alive."""

    def __init__(self, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
        kind = "|u1" if itemsize == 1 else f"|V{itemsize}"
        self.__array_interface__ = {
            "data": (pointer, False),
            "shape": shape,
            "strides": strides,
            "typestr": kind,
            "version": 3,
        }


Extent = tuple[str, int, tuple[int, ...], tuple[int, ...], int]
"""Name, pointer, shape, strides in bytes, and itemsize of a tensor's memory."""


def check_separate(extents: Sequence[Extent]) -> None:
    """Raise ManifestMismatch unless no byte belongs to two elements: each can then be written on its own.

    Tensors that are one another's aliases are given once. Slices of one storage may interleave, but not overlap.
    """
    import numpy as np

    spans: list[tuple[int, int, Extent]] = []
    for extent in extents:
        name, pointer, shape, strides, itemsize = extent
        if 0 in shape:
            continue
        reach = itemsize
        for stride, count in sorted((abs(stride), count) for stride, count in zip(strides, shape, strict=True)):
            if count > 1 and stride < reach:
                raise ManifestMismatch(f"'{name}' is expanded: several of its elements share memory", hint="copy it")
            reach += stride * (count - 1)
        low = pointer + sum(min(0, stride * (count - 1)) for stride, count in zip(strides, shape, strict=True))
        spans.append((low, low + reach, extent))
    spans.sort(key=lambda span: span[:2])
    open_spans: list[tuple[int, int, Extent]] = []
    for span in spans:
        open_spans = [other for other in open_spans if other[1] > span[0]]
        for other in open_spans:
            ours, theirs = (np.asarray(Memory(*extent[1:])) for extent in (span[2], other[2]))
            try:
                is_shared = np.shares_memory(ours, theirs, max_work=1_000_000)  # type: ignore[arg-type]
            except np.exceptions.TooHardError:
                is_shared = True
            if is_shared:
                raise ManifestMismatch(
                    f"'{other[2][0]}' and '{span[2][0]}' share memory without being the same tensor",
                    hint="leave one of them out with names=",
                )
        open_spans.append(span)


def check_arrays(holding: Holding, locals_: Mapping[str, Any]) -> None:
    """Raise ConfigError naming a tensor that lies in a numpy local and that numpy cannot cast to its dtype."""
    arrays = [not hasattr(locals_[spec.name], "detach") for spec in holding.locals]
    if not any(arrays):
        return
    for piece in holding.pieces:
        spec, local = holding.tensors[piece.tensor], holding.locals[piece.place.local]
        if arrays[piece.place.local] and spec.dtype != local.dtype:
            _wire_dtype(f"'{spec.name}'", locals_[local.name], spec.dtype)


def _wire_dtype(what: str, array: Any, dtype: str) -> np.dtype[Any]:
    import numpy as np

    try:
        wire = np.dtype(dtype)
    except TypeError:  # bfloat16, float8_*
        wire = None
    if wire is None or not np.can_cast(array.dtype, wire, "same_kind"):
        raise ConfigError(
            f"{what} is a numpy array of {array.dtype}, which numpy cannot cast to {dtype}",
            hint="give a torch tensor of it, or publish it as it is",
        )
    return wire


class NumpyTensors(Tensors):
    """A mapping of names to numpy arrays. Arrays that are the very same memory are tied."""

    def __init__(
        self,
        source: Mapping[str, Any],
        wanted: tuple[str, ...] | None,
        *,
        is_target: bool,
        wire_dtypes: Mapping[str, str],
    ) -> None:
        import numpy as np

        super().__init__()
        self._np = np
        self._wanted = wanted
        self._names = names = select(list(source), wanted)
        self._arrays = [source[name] for name in names]
        specs: list[TensorSpec] = []
        seen: dict[tuple[object, ...], str] = {}
        for name, value in zip(names, self._arrays, strict=True):
            if not isinstance(value, np.ndarray):
                raise ManifestMismatch(f"'{name}' is a {type(value).__name__}, not a numpy array or torch tensor")
            if isinstance(value, np.ma.MaskedArray) or not value.dtype.isnative:
                raise ManifestMismatch(f"'{name}' is masked, or not in this machine's byte order", hint="convert it")
            if is_target and not value.flags.writeable:
                raise ManifestMismatch(f"'{name}' is read-only, so that no version can be installed into it")
            pointer = value.__array_interface__["data"][0]
            identity = (pointer, value.shape, value.strides, value.dtype.str) if value.size else (name,)
            first = seen.setdefault(identity, name)
            dtype = wire_dtypes.get(name, value.dtype.name)
            specs.append(TensorSpec(name, dtype, tuple(value.shape), "" if first == name else first))
        self.manifest = Manifest(tuple(specs))
        named = zip(specs, self._arrays, strict=True)
        self._wire = [_wire_dtype(f"'{spec.name}'", array, spec.dtype) for spec, array in named]
        self._identities = [(array.shape, array.strides, array.dtype) for array in self._arrays]
        if is_target:
            check_separate(
                [
                    (spec.name, array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)
                    for spec, array in zip(specs, self._arrays, strict=True)
                    if not spec.alias_of
                ]
            )
        self.raw = [
            array.reshape(-1).view(np.uint8)
            if array.flags.c_contiguous and array.size and array.dtype == wire
            else None
            for array, wire in zip(self._arrays, self._wire, strict=True)
        ]

    def is_current(self, source: Mapping[str, Any]) -> bool:
        """The same array objects; numpy arrays do not move."""
        if self._wanted is None and len(source) != len(self._names):
            return False
        found = [source.get(name) for name in self._names]
        if not all(map(operator.is_, found, self._arrays)):
            return False
        return self._identities == [(array.shape, array.strides, array.dtype) for array in self._arrays]

    def store(self, index: int, block: Bytes) -> None:
        self._np.copyto(self._typed(index, block), self._arrays[index], casting="same_kind")

    def load(self, index: int, block: Bytes) -> None:
        self._np.copyto(self._arrays[index], self._typed(index, block))

    def _typed(self, index: int, block: Bytes) -> Any:
        return block.view(self._wire[index]).reshape(self._arrays[index].shape)

    def digests(self) -> list[int]:
        return [xxhash.xxh3_64_intdigest(self._np.ascontiguousarray(array).tobytes()) for array in self._arrays]
