"""Do both sides speak of the same tensors, and which tensors have the same layout on both? Pure.

The first step of planning. Names are matched through dictionaries, once per member that names them; layouts are
numbered, so that everything after this step costs per layout and not per tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from wsync.errors import ManifestMismatch
from wsync.holding import Holding, Region
from wsync.manifest import TensorSpec

Layout = tuple[Region, ...]
"""Distinct regions, none of them empty, ascending."""


class Group(msgspec.Struct, frozen=True):
    """Tensors of one dtype of which the same members have and want the same regions."""

    dtype: str
    held: tuple[tuple[int, Layout], ...]
    """By trainer rank, ascending; only ranks that have some of it."""
    wanted: tuple[tuple[str, Layout], ...]
    """By digest of the holding, ascending; only those that want some of it."""
    tensors: tuple[str, ...]
    """Ascending; the trainer's names, no aliases."""


class Agreement(msgspec.Struct, frozen=True):
    """What both sides have agreed to move."""

    groups: tuple[Group, ...]
    ties: tuple[tuple[str, str], ...]
    """(alias, tensor) of the trainer, ascending."""
    unwanted: tuple[str, ...]
    """Tensors that the trainer names and nobody wants, ascending."""


class Grouper:
    """Groups again and again: a holding that it has seen the last time is not read again."""

    def __init__(self) -> None:
        self._number: dict[tuple[Region, ...], int] = {}
        self._layouts: list[Layout] = []
        self._held: dict[int, tuple[Holding, dict[str, int]]] = {}
        self._wanted: dict[str, tuple[Holding, dict[str, int]]] = {}
        self._trainer: dict[str, TensorSpec] = {}

    def agree(self, held: Mapping[int, Holding], wanted: Mapping[str, Holding]) -> Agreement:
        """Raises `ManifestMismatch` naming every difference: of trainer ranks, or of the two sides."""
        trainer = _one_side(held)
        if trainer != self._trainer:
            self._trainer, self._wanted = trainer, {}  # what a worker's names mean depends on the trainer's ties
        self._held = {
            rank: self._kept(self._held.get(rank), holding) or (holding, self._rows(holding, _roots(holding)))
            for rank, holding in sorted(held.items())
        }
        names = _Names(trainer)
        self._wanted = {
            digest: self._kept(self._wanted.get(digest), holding)
            or (holding, self._rows(holding, names.translated(digest, holding)))
            for digest, holding in sorted(wanted.items())
        }
        names.check()
        return self._agreement(trainer)

    def _agreement(self, trainer: Mapping[str, TensorSpec]) -> Agreement:
        digests = list(self._wanted)
        wants: dict[str, list[int]] = {}
        for index, (_, rows) in enumerate(self._wanted.values()):
            for name, layout in rows.items():
                if self._layouts[layout]:
                    wants.setdefault(name, []).append(index << 32 | layout)
        has: dict[str, list[int]] = {name: [] for name in wants}
        for rank, (_, rows) in self._held.items():
            owner = rank << 32
            for name, layout in rows.items():
                if name in has:
                    has[name].append(owner | layout)
        members: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[str]] = {}
        for name in sorted(wants):
            members.setdefault((trainer[name].dtype, tuple(has[name]), tuple(wants[name])), []).append(name)
        groups: list[Group] = []
        for (dtype, holders, receivers), tensors in members.items():
            owned = [(number >> 32, self._layouts[number & 0xFFFFFFFF]) for number in holders]
            asked = [(digests[number >> 32], self._layouts[number & 0xFFFFFFFF]) for number in receivers]
            groups.append(Group(dtype, tuple(pair for pair in owned if pair[1]), tuple(asked), tuple(tensors)))
        ties = tuple(sorted((name, spec.alias_of) for name, spec in trainer.items() if spec.alias_of))
        unwanted = sorted(name for name, spec in trainer.items() if not spec.alias_of and name not in wants)
        return Agreement(tuple(groups), ties, tuple(unwanted))

    def _kept(
        self, last: tuple[Holding, dict[str, int]] | None, holding: Holding
    ) -> tuple[Holding, dict[str, int]] | None:
        return last if last is not None and (last[0] is holding or last[0] == holding) else None

    def _rows(self, holding: Holding, names: Sequence[str]) -> dict[str, int]:
        """The number of the layout of every tensor with pieces. `names` has the trainer's name of each tensor."""
        regions: dict[str, list[Region]] = {}
        for piece in holding.pieces:
            name = names[piece.tensor]
            if name in regions:
                regions[name].append(piece.region)
            else:
                regions[name] = [piece.region]
        return {name: self._numbered(tuple(found)) for name, found in regions.items()}

    def _numbered(self, regions: tuple[Region, ...]) -> int:
        number = self._number.get(regions)
        if number is None:
            layout = tuple(sorted({region for region in regions if region.numel}))
            number = self._number.get(layout)
            if number is None:
                number = self._number[layout] = len(self._layouts)
                self._layouts.append(layout)
            self._number[regions] = number
        return number


class _Names:
    """What the wanted names are called by the trainer, and everything on which the sides disagree."""

    def __init__(self, trainer: Mapping[str, TensorSpec]) -> None:
        self._trainer = trainer
        self._lacking: dict[str, None] = {}
        self._differing: dict[str, None] = {}
        self._untied: dict[str, None] = {}

    def translated(self, digest: str, holding: Holding) -> list[str]:
        """The trainer's tensor for each tensor of a wanted holding, so that a payload has one name."""
        tied: dict[str, set[str]] = {}
        roots = _roots(holding)
        for spec, root in zip(holding.tensors, roots, strict=True):
            theirs = self._trainer.get(spec.name)
            if theirs is None:
                continue
            if (theirs.dtype, theirs.shape) != (spec.dtype, spec.shape):
                self._differing[f"'{spec.name}' {_kind(theirs)} -> {_kind(spec)} of {digest[:12]}"] = None
            tied.setdefault(root, set()).add(theirs.alias_of or theirs.name)
        for names in tied.values():
            if len(names) > 1:
                self._untied[" = ".join(f"'{name}'" for name in sorted(names))] = None
        missing = {root for root in roots if root not in tied}
        if missing:
            wanted = {roots[piece.tensor] for piece in holding.pieces}
            self._lacking.update(dict.fromkeys(sorted(missing & wanted)))
        return [min(tied[root]) if root in tied else root for root in roots]

    def check(self) -> None:
        faults = [
            f"{problem}: {_some(list(names))}"
            for problem, names in (
                ("wanted, but held by no trainer rank", self._lacking),
                ("tensors differ (trainer -> wanted)", self._differing),
                ("tied where they are wanted, but separate tensors of the trainer", self._untied),
            )
            if names
        ]
        if faults:
            raise ManifestMismatch("; ".join(faults), hint="give both sides the same names, shapes, dtypes and ties")


def _one_side(held: Mapping[int, Holding]) -> dict[str, TensorSpec]:
    """All tensors of the trainer; its ranks may name different ones, but must agree on those that several name."""
    specs: dict[str, TensorSpec] = {}
    differing: dict[str, None] = {}
    for holding in held.values():
        for spec in holding.tensors:
            other = specs.setdefault(spec.name, spec)
            if other is not spec and other != spec:
                differing[spec.name] = None
    if differing:
        raise ManifestMismatch(
            f"trainer ranks differ: {_some([_by_rank(name, held) for name in sorted(differing)])}",
            hint="every rank names a tensor with its whole shape, its dtype on the wire and the same ties",
        )
    return specs


def _by_rank(name: str, held: Mapping[int, Holding]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, holding in sorted(held.items()):
        for spec in holding.tensors:
            if spec.name == name:
                ranks.setdefault(_kind(spec), []).append(str(rank))
    return f"'{name}' is " + " and ".join(f"{kind} on rank {_some(on)}" for kind, on in ranks.items())


def _kind(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}" + (f" tied to '{spec.alias_of}'" if spec.alias_of else "")


def _roots(holding: Holding) -> list[str]:
    """The tensor that has the payload of each tensor: itself, or the one it is tied to."""
    names = {spec.name: spec for spec in holding.tensors}
    if len(names) < len(holding.tensors):
        twice = [name for name, count in Counter(spec.name for spec in holding.tensors).items() if count > 1]
        raise ManifestMismatch(f"a holding names tensors twice: {_some(twice)}")
    for spec in holding.tensors:
        if not spec.alias_of:
            continue
        root = names.get(spec.alias_of)
        if root is None or root.alias_of or (root.dtype, root.shape) != (spec.dtype, spec.shape):
            raise ManifestMismatch(
                f"'{spec.name}' {_kind(spec)}, which is no tensor of the same holding, dtype and shape",
                hint="tie a tensor to one that has the payload itself",
            )
    return [spec.alias_of or spec.name for spec in holding.tensors]


def _some(names: Iterable[str], most: int = 10) -> str:
    listed = list(names)
    rest = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + rest
