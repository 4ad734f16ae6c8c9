"""What a version consists of: the manifest, and where each tensor lies in a lane.

First record of the flow: a state dict becomes a `Manifest`, a manifest becomes a `Lane`
(`lane_of`), and a lane is what is packed, moved and installed. Pure: no tensors, no I/O.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import msgspec
import xxhash

from wsync.errors import ConfigError, ErrorContext, ManifestMismatch

ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
    "complex128": 16,
}  # fmt: skip
"""Bytes of one element, by dtype name (torch's and numpy's names, without a prefix)."""

ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes: a cache line, and wider than any dtype."""

MAX_TENSORS = 1 << 20
MAX_NBYTES = 1 << 46


class TensorSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """One named tensor. `alias_of` names the earlier tensor that has the very same storage.

    A torch or numpy dtype is taken for its name, and any sequence of whole numbers for a shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    alias_of: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ManifestMismatch(f"a tensor has an empty name, or none: {self.name!r}", hint="name every tensor")
        if type(self.dtype) is not str:
            msgspec.structs.force_setattr(self, "dtype", str(self.dtype).removeprefix("torch."))
        if type(self.shape) is not tuple or any(type(extent) is not int for extent in self.shape):
            msgspec.structs.force_setattr(self, "shape", _whole_numbers(self.name, self.shape))
        if self.dtype not in ITEMSIZE:
            raise ManifestMismatch(
                f"tensor '{self.name}' has dtype '{self.dtype}', which wsync does not know",
                hint=f"use one of {', '.join(sorted(ITEMSIZE))}",
            )
        if any(extent < 0 for extent in self.shape):
            raise ManifestMismatch(f"tensor '{self.name}' has a negative extent in its shape {self.shape}")
        if self.nbytes > MAX_NBYTES:
            raise ManifestMismatch(f"tensor '{self.name}' claims {self.nbytes} bytes, more than {MAX_NBYTES}")

    @classmethod
    def of(cls, entry: TensorSpec | tuple[str, object, Sequence[int]]) -> TensorSpec:
        """A spec, or a tuple (name, dtype, shape), as a spec. Raises ConfigError naming an entry that is neither."""
        if isinstance(entry, cls):
            return entry
        if not isinstance(entry, tuple) or len(entry) != 3 or not isinstance(entry[0], str):
            raise ConfigError(
                f"{entry!r:.200} describes no tensor",
                hint="give a TensorSpec, or a tuple (name, dtype, shape), for each",
            )
        name, dtype, shape = entry
        return cls(name, dtype, shape)  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in logical (row-major, gapless) order."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


def _whole_numbers(name: str, shape: object) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, shape))  # type: ignore[call-overload]
    except TypeError:
        raise ManifestMismatch(f"tensor '{name}' has {shape!r} for a shape", hint="give whole numbers") from None


class Manifest(msgspec.Struct, frozen=True):
    """The ordered tensors of a channel. Order is part of the identity.

    Names are unique, and an alias names an earlier tensor of the same dtype and shape
    which is not itself an alias.
    """

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if len(self.tensors) > MAX_TENSORS:
            raise ManifestMismatch(f"a manifest of {len(self.tensors)} tensors is larger than {MAX_TENSORS}")
        seen: dict[str, TensorSpec] = {}
        for spec in self.tensors:
            if spec.name in seen:
                raise ManifestMismatch(f"two tensors are named '{spec.name}'", hint="names must be unique")
            if spec.alias_of:
                target = seen.get(spec.alias_of)
                if target is None or target.alias_of:
                    raise ManifestMismatch(f"'{spec.name}' is tied to '{spec.alias_of}', which is no earlier tensor")
                if (target.dtype, target.shape) != (spec.dtype, spec.shape):
                    raise ManifestMismatch(f"'{spec.name}' and '{spec.alias_of}' are tied but differ in shape or dtype")
            seen[spec.name] = spec

    def digest(self) -> str:
        """128-bit xxh3 of the encoded manifest, as hex: equal digests mean equal manifests."""
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(self))

    def restrict(self, names: tuple[str, ...]) -> Manifest:
        """The declared part: only `names`, in this manifest's order. Raises for a name that is not here."""
        wanted = set(names)
        missing = sorted(wanted - {spec.name for spec in self.tensors})
        if missing:
            raise ManifestMismatch(f"declared names are not there: {_some(missing)}")
        kept: list[TensorSpec] = []
        first: dict[str, str] = {}  # the tensor that carries the bytes -> the first kept name for them
        for spec in self.tensors:
            if spec.name in wanted:
                root = spec.alias_of or spec.name
                alias_of = first.get(root, "")
                first.setdefault(root, spec.name)
                kept.append(TensorSpec(spec.name, spec.dtype, spec.shape, alias_of))
        return Manifest(tuple(kept))


class Placement(msgspec.Struct, frozen=True):
    """Where the bytes of a tensor lie in a lane: `[offset, offset + nbytes)`."""

    name: str
    offset: int
    nbytes: int


class Lane(msgspec.Struct, frozen=True):
    """Tensors packed one after another: the unit that is broadcast.

    `placements` has one entry per tensor of the manifest, in its order; an alias has the place of
    the tensor that it is tied to. Gaps between tensors are zero, so that a lane has one digest.
    """

    placements: tuple[Placement, ...]
    nbytes: int


@functools.lru_cache(maxsize=64)
def lane_of(manifest: Manifest) -> Lane:
    """The lane of a manifest: each tensor aligned to `ALIGNMENT`, no bytes twice. Both sides compute it alike."""
    places: dict[str, Placement] = {}
    offset = 0
    for spec in manifest.tensors:
        if spec.alias_of:
            target = places[spec.alias_of]
            places[spec.name] = Placement(spec.name, target.offset, target.nbytes)
            continue
        places[spec.name] = Placement(spec.name, offset, spec.nbytes)
        offset += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return Lane(tuple(places.values()), offset)


def check_agreement(trainer: Manifest, replica: Manifest, *, channel: str, is_partial: bool = False) -> None:
    """Raise `ManifestMismatch` unless every tensor of the replica is written exactly once by the trainer's version.

    With `is_partial` the replica has declared that it follows only some names; tensors that only the
    trainer has are then fine. Names every difference (up to ten of a kind), so that one run shows all.
    """
    theirs = {spec.name: spec for spec in trainer.tensors}
    ours = {spec.name: spec for spec in replica.tensors}
    faults: list[str] = []
    lacking = [name for name in ours if name not in theirs]
    if lacking:
        faults.append(f"the replica has tensors that the trainer does not publish: {_some(lacking)}")
    extra = [name for name in theirs if name not in ours]
    if extra and not is_partial:
        faults.append(f"the trainer publishes tensors that the replica does not have: {_some(extra)}")
    both = [name for name in ours if name in theirs]
    shapes = [f"{n} {list(theirs[n].shape)} -> {list(ours[n].shape)}" for n in both if theirs[n].shape != ours[n].shape]
    if shapes:
        faults.append(f"shapes differ (trainer -> replica): {_some(shapes)}")
    dtypes = [f"{n} {theirs[n].dtype} -> {ours[n].dtype}" for n in both if theirs[n].dtype != ours[n].dtype]
    if dtypes:
        faults.append(f"dtypes differ (trainer -> replica): {_some(dtypes)}")
    untied = [
        f"{n} = {ours[n].alias_of}"
        for n in both
        if ours[n].alias_of in theirs and _root(theirs, n) != _root(theirs, ours[n].alias_of)
    ]
    if untied:
        faults.append(f"tied in the replica but separate in the trainer: {_some(untied)}")
    if faults:
        raise ManifestMismatch(
            "; ".join(faults),
            hint="give both sides the same tensors, or declare the part to follow with names=[...]",
            context=ErrorContext(channel=channel, phase="join"),
        )


def _root(specs: dict[str, TensorSpec], name: str) -> str:
    return specs[name].alias_of or name


def _some(names: list[str], most: int = 10) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
