"""Live tensors of a member, behind one small interface: numpy here, torch in `wsync.integrations.torch`."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import xxhash

from wsync.errors import ConfigError, ManifestMismatch
from wsync.manifest import Lane, Manifest, TensorSpec
from wsync.memory import Slot

PROGRESS_NBYTES = 32 << 20
"""A packing trainer says how far it is about this often, so that the transfer starts before the packing ends."""


class LiveTensors(Protocol):
    """The tensors of a trainer or replica as they are now. Looked at anew for every update: users replace tensors."""

    manifest: Manifest

    def is_current(self, source: Any) -> bool:
        """Whether `source` still has these very tensors, in the same memory and of the same shapes."""
        ...

    def pack(self, slot: Slot, lane: Lane, progress: Callable[[int], None]) -> None:
        """Copy every tensor to its place in the slot, in logical order; `progress` is told the bytes done so far."""
        ...

    def install(self, slot: Slot, lane: Lane) -> None:
        """Copy from the slot into the tensors, in place; `lane` has a placement per tensor of `manifest`, in order."""
        ...

    def digests(self) -> list[int]:
        """xxh3-64 of each tensor's bytes in logical order, in the order of `manifest`."""
        ...


def live_tensors(
    source: Any, names: Sequence[str] | None, *, is_target: bool, former: LiveTensors | None = None
) -> LiveTensors:
    """The named tensors of a module, of a state dict, or of a mapping of numpy arrays; only `names` if given.

    `former` is what this returned last time: it is returned again if nothing has been replaced since.

    Raises ManifestMismatch or ConfigError naming the tensor that cannot take part.
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

        return TorchTensors(source, wanted, is_target=is_target)
    if isinstance(source, Mapping):
        return NumpyTensors(source, wanted, is_target=is_target)
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
        raise ManifestMismatch(f"declared names are not there: {', '.join(missing[:10])}")
    return [name for name in names if name in set(wanted)]


class NumpyTensors:
    """A mapping of names to numpy arrays. Arrays that are the very same memory are tied."""

    def __init__(self, source: Mapping[str, Any], wanted: tuple[str, ...] | None, *, is_target: bool) -> None:
        import numpy as np

        self._np = np
        self._wanted = wanted
        self._names = names = select(list(source), wanted)
        self._arrays = [source[name] for name in names]
        specs: list[TensorSpec] = []
        seen: dict[tuple[object, ...], str] = {}
        for name, value in zip(names, self._arrays, strict=True):
            if not isinstance(value, np.ndarray):
                raise ManifestMismatch(f"'{name}' is a {type(value).__name__}, not a numpy array or torch tensor")
            if is_target and not value.flags.writeable:
                raise ManifestMismatch(f"'{name}' is read-only, so that no version can be installed into it")
            if is_target and value.size and 0 in value.strides and max(value.shape, default=0) > 1:
                raise ManifestMismatch(f"'{name}' is expanded: several of its elements share memory", hint="copy it")
            pointer = value.__array_interface__["data"][0]
            identity = (pointer, value.shape, value.strides, value.dtype.str) if value.size else (name,)
            first = seen.setdefault(identity, name)
            specs.append(TensorSpec(name, value.dtype.name, tuple(value.shape), "" if first == name else first))
        self.manifest = Manifest(tuple(specs))

    def is_current(self, source: Mapping[str, Any]) -> bool:
        """The same array objects; numpy arrays do not move."""
        if self._wanted is None and len(source) != len(self._names):
            return False
        found = [source.get(name) for name in self._names]
        shapes = [spec.shape for spec in self.manifest.tensors]
        return all(map(operator.is_, found, self._arrays)) and [array.shape for array in self._arrays] == shapes

    def _view(self, slot: Slot, index: int, offset: int, nbytes: int) -> Any:
        array = self._arrays[index]
        flat = self._np.frombuffer(slot.data[offset : offset + nbytes], dtype=array.dtype)
        return flat.reshape(array.shape)

    def pack(self, slot: Slot, lane: Lane, progress: Callable[[int], None]) -> None:
        said = 0
        for index, (spec, place) in enumerate(zip(self.manifest.tensors, lane.placements, strict=True)):
            if spec.alias_of or not place.nbytes:
                continue
            self._np.copyto(self._view(slot, index, place.offset, place.nbytes), self._arrays[index])
            if place.offset + place.nbytes - said >= PROGRESS_NBYTES:
                said = place.offset + place.nbytes
                progress(said)

    def install(self, slot: Slot, lane: Lane) -> None:
        for index, (spec, place) in enumerate(zip(self.manifest.tensors, lane.placements, strict=True)):
            if not spec.alias_of and place.nbytes:
                self._np.copyto(self._arrays[index], self._view(slot, index, place.offset, place.nbytes))

    def digests(self) -> list[int]:
        return [xxhash.xxh3_64_intdigest(self._np.ascontiguousarray(array).tobytes()) for array in self._arrays]
