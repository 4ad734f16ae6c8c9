"""Digests of tensors that do not depend on how they are cut, fused or laid out, and their comparison.

The digest of a tensor is the sum over its elements of a mixed 64-bit word of (index in the whole tensor, bits), modulo
2**64. So every member sums over what it has, wherever that lies, and the sums of a disjoint cover add up to the digest
of the whole: nothing is gathered. A value at another index gives another word, so that swapped halves, transposed
squares and shifted experts are seen. It detects faults; it is no protection against somebody who wants to deceive.

Digests are taken of the bits on the wire: a trainer's local of another dtype is cast first, as for publishing.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from wsync.engine.shard_link import check_locals
from wsync.engine.tensors import bits_of, strided_view
from wsync.errors import ConfigError, ManifestMismatch
from wsync.holding import Holding, Region
from wsync.manifest import TensorSpec
from wsync.sharding import row_strides

if TYPE_CHECKING:
    import numpy as np

    Words = np.ndarray[Any, np.dtype[np.uint64]]

_BLOCK_NUMEL = 1 << 20
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Multipliers of splitmix64, a mixing function whose every output bit depends on every input bit."""


class PartDigest(msgspec.Struct, frozen=True, array_like=True):
    region: Region
    value: int


class TensorDigest(msgspec.Struct, frozen=True):
    """What one member has of a tensor. `alias_of` names the tensor that it is tied to."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[PartDigest, ...]
    alias_of: str = ""

    def __post_init__(self) -> None:
        TensorSpec(self.name, self.dtype, self.shape)  # refuses dtypes and shapes that are none
        for part in self.parts:
            if not part.region.lies_in(self.shape):
                raise ManifestMismatch(f"region {part.region} of '{self.name}' does not lie in {list(self.shape)}")


class DigestReport(msgspec.Struct, frozen=True):
    """One member's digests, as a file of `save`. `version` is 0 where no version is meant."""

    member: str
    version: int
    tensors: tuple[TensorDigest, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        with open(path, "wb") as file:
            file.write(msgspec.json.encode(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DigestReport:
        """Raises ConfigError for a file that is none."""
        try:
            with open(path, "rb") as file:
                return msgspec.json.decode(file.read(), type=cls)
        except (OSError, msgspec.DecodeError) as exc:
            raise ConfigError(f"'{os.fspath(path)}' is no digest report: {exc}") from exc


class Difference(msgspec.Struct, frozen=True):
    """A tensor that is not what it should be, and why."""

    tensor: str
    problem: str

    def __str__(self) -> str:
        return f"{self.tensor}: {self.problem}"


Cuts = dict[str, tuple[tuple[int, ...], ...]]
"""Per tensor (tied ones are one) and dim: ascending positions where regions begin or end."""


def common_cuts(holdings: Iterable[Holding]) -> Cuts:
    """Where any of the holdings cuts each tensor. Members whose reports have the same cuts can always be compared."""
    found: dict[str, list[set[int]]] = {}
    for holding in holdings:
        for piece in holding.pieces:
            region, spec = piece.region, holding.tensors[piece.tensor]
            dims = found.setdefault(spec.alias_of or spec.name, [set() for _ in spec.shape])
            if len(dims) != len(spec.shape):
                raise ManifestMismatch(
                    f"'{spec.name}' has {len(dims)} dims in one holding, {len(spec.shape)} in another"
                )
            for dim, start, end in zip(dims, region.offset, region.end, strict=True):
                dim |= {start, end}
    return {name: tuple(tuple(sorted(dim)) for dim in dims) for name, dims in found.items()}


def digest_report(
    holding: Holding, locals_: Mapping[str, Any], *, member: str = "", version: int = 0, cuts: Cuts | None = None
) -> DigestReport:
    """Digests of everything that a holding has or wants, read from the live locals.

    An alias is reported under its own name too, so that a tie that only one side has shows. Tied tensors are one, no
    matter which of their names a piece has. `cuts` (`common_cuts` of all members) is needed where members of one side
    have regions that overlap in part. Raises as `check_locals` for locals that do not suit the holding.

    A NaN that is cast has bits that depend on how it lies in memory, for torch: a tensor with NaNs that a trainer casts
    may be named although it is right.
    """
    check_locals(holding, locals_)
    parts: dict[str, list[PartDigest]] = defaultdict(list)
    for piece in holding.pieces:
        spec, local = holding.tensors[piece.tensor], holding.locals[piece.place.local]
        root = spec.alias_of or spec.name
        for region in _cut(piece.region, (cuts or {}).get(root)):
            view = strided_view(locals_[local.name], piece.part(region), region.extent)
            parts[root].append(PartDigest(region, _digest(view, spec.dtype, region.offset, spec.shape)))
    tensors = [
        TensorDigest(spec.name, spec.dtype, spec.shape, tuple(parts[spec.alias_of or spec.name]), spec.alias_of)
        for spec in holding.tensors
    ]
    return DigestReport(member, version, tuple(tensors))


def _cut(region: Region, cuts: tuple[tuple[int, ...], ...] | None) -> Iterator[Region]:
    if not cuts or not region.numel:
        yield region
        return
    spans = [
        list(itertools.pairwise(sorted({start, end, *(at for at in dim if start < at < end)})))
        for start, end, dim in zip(region.offset, region.end, cuts, strict=True)
    ]
    for box in itertools.product(*spans):
        yield Region(tuple(start for start, _ in box), tuple(end - start for start, end in box))


def _digest(view: Any, dtype: str, offset: tuple[int, ...], shape: Sequence[int]) -> int:
    import numpy as np

    total = 0
    for block, at in _blocks(view, offset):
        words = bits_of(block, dtype)  # unsigned, (elements, words of an element)
        index = np.zeros((1,) * len(shape), np.uint64)
        for dim, (start, extent, stride) in enumerate(zip(at, block.shape, row_strides(shape), strict=True)):
            along = (np.arange(start, start + extent, dtype=np.uint64) * np.uint64(stride)).reshape(
                [-1 if d == dim else 1 for d in range(len(shape))]
            )
            index = index + along
        for word in range(words.shape[1]):
            salt = index.reshape(-1) * np.uint64(words.shape[1]) + np.uint64(word + 1)
            total += int(_mixed(words[:, word].astype(np.uint64), salt).sum(dtype=np.uint64))
    return total % (1 << 64)


def _mixed(words: Words, salt: Words) -> Words:
    import numpy as np

    first, second, third = (np.uint64(multiplier) for multiplier in _MIX)
    with np.errstate(over="ignore"):
        mixed = words + np.uint64(1)
        mixed *= second
        mixed ^= salt * first
        mixed ^= mixed >> np.uint64(30)
        mixed *= second
        mixed ^= mixed >> np.uint64(27)
        mixed *= third
        mixed ^= mixed >> np.uint64(31)
    return mixed


def _blocks(view: Any, offset: tuple[int, ...]) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """The view in pieces of bounded size along its first dims, each with its offset."""
    numel = math.prod(view.shape)
    if numel == 0:
        return
    if numel <= _BLOCK_NUMEL or not offset:
        yield view, offset
        return
    dim = next(d for d, extent in enumerate(view.shape) if extent > 1)
    step = max(1, view.shape[dim] * _BLOCK_NUMEL // numel)
    for start in range(0, view.shape[dim], step):
        block = view[(slice(None),) * dim + (slice(start, start + step),)]
        yield from _blocks(block, (*offset[:dim], offset[dim] + start, *offset[dim + 1 :]))


def check_complete(reports: Sequence[DigestReport], side: str) -> None:
    """Raise ConfigError when most tensors are incomplete: the report of a member seems to be missing.

    Where members map some tensors wrongly it is fewer, and `compare` names them.
    """
    shapes = {tensor.name: tensor.shape for report in reports for tensor in report.tensors}
    regions: dict[str, set[Region]] = {name: set() for name in shapes}
    for report in reports:
        for tensor in report.tensors:
            regions[tensor.name] |= {part.region for part in tensor.parts if part.region.numel}
    lacking = [
        name
        for name, shape in shapes.items()
        if sum(region.numel for region in regions[name]) < Region.whole(shape).numel
    ]
    if 2 * len(lacking) <= len(shapes):
        return
    member = "rank" if side == "trainer" else "worker"
    raise ConfigError(
        f"{len(lacking)} of {len(shapes)} tensors, '{min(lacking)}' for one, are incomplete in the {len(reports)} "
        f"reports of the {side}: the report of a {member} seems to be missing",
        hint=f"give the reports of all {member}s; if these are all, their holdings leave out parts of these tensors",
    )


def compare(trainers: Iterable[DigestReport], workers: Iterable[DigestReport]) -> list[Difference]:
    """Every tensor that differs between all trainer ranks and all workers of one replica, or is lacking on a side.

    Members of one side that have the same region must have it alike. Raises ConfigError for a side without any tensor,
    for reports of two versions, and for members of one side whose regions overlap in part.
    """
    ours, theirs = list(trainers), list(workers)
    for side, reports in (("trainer", ours), ("replica", theirs)):
        if not any(report.tensors for report in reports):
            raise ConfigError(
                f"the {len(reports)} reports of the {side} have no tensors: there is nothing to compare",
                hint="give the digest reports of all its members",
            )
    versions = {report.version for report in (*ours, *theirs) if report.version}
    if len(versions) > 1:
        raise ConfigError(f"reports of versions {sorted(versions)} cannot be compared", hint="take them of one version")
    differences: list[Difference] = []
    trained, served = _whole(ours, "trainer", differences), _whole(theirs, "replica", differences)
    faulty = {difference.tensor for difference in differences}
    both = trained.keys() & served.keys()
    ties = {t.name: t.alias_of for report in (*ours, *theirs) for t in report.tensors if t.alias_of}
    # A tie that only one side names (a recorded loader names none) has been compared under the other name.
    faulty |= {name for name, root in ties.items() if name not in both and root in both}
    for name in sorted({*trained, *served} - faulty):
        if name not in served:
            differences.append(Difference(name, "the replica does not have it"))
        elif name not in trained:
            differences.append(Difference(name, "the trainer does not have it"))
        elif trained[name][:2] != served[name][:2]:
            (dtype, shape, _), (their_dtype, their_shape, _) = trained[name], served[name]
            differences.append(
                Difference(name, f"{dtype} {list(shape)} in the trainer, {their_dtype} {list(their_shape)} here")
            )
        elif trained[name][2] != served[name][2]:
            differences.append(Difference(name, "the bytes differ"))
    return sorted(differences, key=lambda difference: difference.tensor)


_Whole = tuple[str, tuple[int, ...], int]


def _whole(reports: Sequence[DigestReport], side: str, differences: list[Difference]) -> dict[str, _Whole]:
    """Dtype, shape and digest of every tensor that the reports together have; what they lack is a difference."""
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    parts: dict[str, dict[Region, int]] = defaultdict(dict)
    faulty: set[str] = set()
    for report in reports:
        for tensor in report.tensors:
            if kinds.setdefault(tensor.name, (tensor.dtype, tensor.shape)) != (tensor.dtype, tensor.shape):
                differences.append(Difference(tensor.name, f"the {side}'s members disagree about its dtype or shape"))
                faulty.add(tensor.name)
            for part in tensor.parts:
                if parts[tensor.name].setdefault(part.region, part.value) != part.value:
                    differences.append(
                        Difference(
                            tensor.name, f"{part.region} differs between members of the {side} ({report.member})"
                        )
                    )
                    faulty.add(tensor.name)
    found: dict[str, _Whole] = {}
    for name, (dtype, shape) in kinds.items():
        if name in faulty:
            continue
        regions = [region for region in parts[name] if region.numel]
        if _overlap(regions):
            raise ConfigError(
                f"members of the {side} have regions of '{name}' that overlap in part: their digests do not add up",
                hint="make the reports with cuts=common_cuts(holdings of all members)",
            )
        if sum(region.numel for region in regions) != Region.whole(shape).numel:
            differences.append(Difference(name, f"the {side} does not have all of it"))
        else:
            found[name] = (dtype, shape, sum(parts[name].values()) % (1 << 64))
    return found


def _overlap(regions: Sequence[Region]) -> bool:
    """Whether two of the regions have an element in common; a sweep along the first dim."""
    if regions and not regions[0].offset:
        return len(regions) > 1
    live: list[Region] = []
    for region in sorted(regions):
        live = [other for other in live if other.end[0] > region.offset[0]]
        if any(other.intersect(region) for other in live):
            return True
        live.append(region)
    return False


def check(trainers: Iterable[DigestReport], workers: Iterable[DigestReport]) -> None:
    """Raise ManifestMismatch naming the tensors in which `compare` finds a difference."""
    differences = compare(trainers, workers)
    if differences:
        raise ManifestMismatch(
            f"{len(differences)} tensors differ: " + "; ".join(map(str, differences[:10])),
            hint="do not serve these weights; see which side maps them wrongly",
        )
