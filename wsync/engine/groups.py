"""Do both sides speak of the same tensors, and which tensors have the same layout on both? Pure.

The first step of planning. Names are matched through dictionaries, once per member that names them; layouts are
numbered, so that everything after this step costs per layout and not per tensor.
"""

from __future__ import annotations

import difflib
import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from wsync.errors import ManifestMismatch
from wsync.holding import Holding, Region
from wsync.manifest import TensorSpec

Owner = TypeVar("Owner")
Item = TypeVar("Item")
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


class _Chains(Generic[Item]):
    """Numbers for sequences: one for equal ones, 0 for the empty one. A number costs its holder no container."""

    def __init__(self) -> None:
        self.next: dict[tuple[int, Item], int] = {}
        self._last: list[tuple[int, Item]] = []

    def add(self, number: int, item: Item) -> int:
        """The number of the sequence `number` and then `item`."""
        longer = self.next.setdefault((number, item), len(self._last) + 1)
        if longer > len(self._last):
            self._last.append((number, item))
        return longer

    def items(self, number: int) -> list[Item]:
        found: list[Item] = []
        while number:
            number, item = self._last[number - 1]
            found.append(item)
        return found[::-1]


class Grouper:
    """Groups again and again: while the trainer is the same, only holdings that are wanted anew are read."""

    def __init__(self) -> None:
        self._regions: _Chains[Region] = _Chains()
        self._layouts: _Chains[Region] = _Chains()
        self._layout_of: dict[int, int] = {0: 0}
        self._held: Mapping[int, Holding] | None = None
        self._trainer: dict[str, TensorSpec] = {}
        self._holders: _Chains[tuple[int, int]] = _Chains()
        self._has: dict[str, int] = {}
        self._wants: dict[str, dict[str, int]] = {}

    def agree(self, held: Mapping[int, Holding], wanted: Mapping[str, Holding]) -> Agreement:
        """Raises `ManifestMismatch` naming every difference: of trainer ranks, or of the two sides."""
        if self._held is None or held != self._held:
            self._held = None  # until all of it is read
            self._read_trainer(held)
            self._held = dict(held)
        names = _Names(self._trainer)
        wants = {
            digest: self._wants.get(digest) or self._rows(holding, names.translated(holding))
            for digest, holding in sorted(wanted.items())
        }
        names.check()
        self._wants = wants
        return self._agreement()

    def _read_trainer(self, held: Mapping[int, Holding]) -> None:
        specs: dict[str, TensorSpec] = {}
        differing: dict[str, None] = {}
        rows: dict[int, dict[str, int]] = {}
        for rank, holding in sorted(held.items()):
            _check_own(holding)
            names: list[str] = []  # one string per tensor for all ranks: later look-ups need not compare it
            for spec in holding.tensors:
                known = specs.setdefault(spec.name, spec)
                if known is not spec and known != spec:
                    differing[spec.name] = None
                names.append(known.alias_of or known.name)
            rows[rank] = self._rows(holding, names)
        if differing:
            raise ManifestMismatch(
                f"trainer ranks differ: {some([_by_rank(name, held) for name in sorted(differing)])}",
                hint="every rank names a tensor with its whole shape, its dtype on the wire and the same ties",
            )
        self._holders = _Chains()
        self._trainer, self._has = specs, self._joined(rows, self._holders)
        self._wants = {}  # what a worker's names mean depends on the trainer's ties

    def _rows(self, holding: Holding, names: Sequence[str]) -> dict[str, int]:
        """The number of the layout of every tensor with elements. `names` has the trainer's name of each tensor."""
        first: dict[str, int] = {}
        index = [first.setdefault(name, i) for i, name in enumerate(names)]
        chains = [0] * len(names)
        known, add = self._regions.next, self._regions.add
        for piece in holding.pieces:
            i = index[piece.tensor]
            chains[i] = known.get((chains[i], piece.region)) or add(chains[i], piece.region)
        layout_of = self._layout_of
        for chain in set(chains).difference(layout_of):
            layout_of[chain] = self._normal(self._regions.items(chain))
        return {name: layout for name, i in first.items() if (layout := layout_of[chains[i]])}

    def _normal(self, regions: Iterable[Region]) -> int:
        """One number for all ways to list the same regions."""
        number = 0
        for region in sorted({region for region in regions if region.numel}):
            number = self._layouts.add(number, region)
        return number

    def _joined(self, rows: Mapping[Owner, Mapping[str, int]], chains: _Chains[tuple[Owner, int]]) -> dict[str, int]:
        """Who has which layout of each tensor, as a number."""
        joined: dict[str, int] = {}
        for owner, own in rows.items():
            memo: dict[tuple[int, int], int] = {}
            for name, layout in own.items():
                so_far = (joined.get(name, 0), layout)
                if so_far not in memo:
                    memo[so_far] = chains.add(so_far[0], (owner, layout))
                joined[name] = memo[so_far]
        return joined

    def _agreement(self) -> Agreement:
        receivers: _Chains[tuple[str, int]] = _Chains()
        wants = self._joined(self._wants, receivers)
        members: dict[tuple[str, int, int], list[str]] = {}
        for name in sorted(wants):
            members.setdefault((self._trainer[name].dtype, self._has.get(name, 0), wants[name]), []).append(name)
        groups = tuple(
            Group(dtype, self._owned(self._holders.items(has)), self._owned(receivers.items(asked)), tuple(tensors))
            for (dtype, has, asked), tensors in members.items()
        )
        ties = tuple(sorted((name, spec.alias_of) for name, spec in self._trainer.items() if spec.alias_of))
        unwanted = sorted(name for name, spec in self._trainer.items() if not spec.alias_of and name not in wants)
        return Agreement(groups, ties, tuple(unwanted))

    def _owned(self, owners: Iterable[tuple[Owner, int]]) -> tuple[tuple[Owner, Layout], ...]:
        return tuple((owner, tuple(self._layouts.items(layout))) for owner, layout in owners)


class _Names:
    """What the wanted names are called by the trainer, and everything on which the sides disagree."""

    def __init__(self, trainer: Mapping[str, TensorSpec]) -> None:
        self._trainer = trainer
        self._lacking: dict[str, None] = {}
        self._differing: dict[str, None] = {}
        self._differs_in_shape = False
        self._untied: dict[str, None] = {}

    def translated(self, holding: Holding) -> list[str]:
        """The trainer's tensor for each tensor of a wanted holding, so that a payload has one name."""
        _check_own(holding)
        roots = [spec.alias_of or spec.name for spec in holding.tensors]
        theirs: dict[str, str] = {}
        lacking: set[str] = set()
        for spec, root in zip(holding.tensors, roots, strict=True):
            known = self._trainer.get(spec.name)
            if known is None:
                lacking.add(root)
                continue
            if known.shape != spec.shape or known.dtype != spec.dtype:
                self._differing[f"'{spec.name}' {_kind(known)} -> {_kind(spec)}"] = None
                self._differs_in_shape |= known.shape != spec.shape
            name = known.alias_of or known.name
            if theirs.setdefault(root, name) != name:
                self._untied[f"'{theirs[root]}' = '{name}'"] = None
        lacking.difference_update(theirs)
        if lacking:
            wanted = {roots[piece.tensor] for piece in holding.pieces}
            self._lacking.update(dict.fromkeys(sorted(lacking & wanted)))
        return [theirs.get(root, root) for root in roots]

    def check(self) -> None:
        faults = [
            f"{problem}: {some(list(names))}"
            for problem, names in (
                ("wanted, but held by no trainer rank", self._lacking),
                ("tensors differ (trainer -> wanted)", self._differing),
                ("tied where they are wanted, but separate tensors of the trainer", self._untied),
            )
            if names
        ]
        if faults:
            raise ManifestMismatch("; ".join(faults), hint="; ".join(self._hints()))

    def _hints(self) -> Iterator[str]:
        if self._lacking:
            yield near(self._lacking, self._trainer) or "publish what is wanted, or leave it out where it is wanted"
        if self._differing and not self._differs_in_shape:
            yield "publish in the dtype that is wanted (read_state(..., dtypes=...)), or want it as it travels"
        if self._differs_in_shape or self._untied:
            yield "give both sides the same shapes, dtypes and ties"


def _by_rank(name: str, held: Mapping[int, Holding]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, holding in sorted(held.items()):
        for spec in holding.tensors:
            if spec.name == name:
                ranks.setdefault(_kind(spec), []).append(str(rank))
    return f"'{name}' is " + " and ".join(f"{kind} on rank {some(on)}" for kind, on in ranks.items())


def _kind(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}" + (f" tied to '{spec.alias_of}'" if spec.alias_of else "")


def _check_own(holding: Holding) -> None:
    """Its names are unique, and it ties tensors only to those that can have the payload."""
    names = {spec.name: spec for spec in holding.tensors}
    if len(names) < len(holding.tensors):
        twice = [name for name, count in Counter(spec.name for spec in holding.tensors).items() if count > 1]
        raise ManifestMismatch(f"a holding names tensors twice: {some(twice)}")
    for spec in holding.tensors:
        if not spec.alias_of:
            continue
        root = names.get(spec.alias_of)
        if root is None or root.alias_of or (root.dtype, root.shape) != (spec.dtype, spec.shape):
            raise ManifestMismatch(
                f"'{spec.name}' is {_kind(spec)}, which is no tensor of the same holding, dtype and shape",
                hint="tie a tensor to one that has the payload itself",
            )


def near(names: Iterable[str], known: Iterable[str]) -> str:
    """Of each of the first three names that are not there: what is there and looks like it. Empty if nothing does."""
    parts = {other: set(other.split(".")) for other in known}
    told: list[str] = []
    for name in itertools.islice(names, 3):
        own = set(name.split("."))
        # difflib compares slowly: only those that differ in the fewest parts, and in length the least.
        likely = heapq.nsmallest(200, parts, key=lambda other: (len(own ^ parts[other]), abs(len(name) - len(other))))
        found = difflib.get_close_matches(name, likely)
        if found:
            told.append(f"instead of '{name}' there is " + " or ".join(f"'{other}'" for other in found))
    return "; ".join(told)


def some(names: Iterable[str], most: int = 10) -> str:
    """The first of them, and how many more there are."""
    listed = list(names)
    rest = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + rest
