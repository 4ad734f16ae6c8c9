"""What readers share: files that may be missing, answers of a known shape, topologies of names that others gave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from wsync.errors import ConfigError, ProbeError
from wsync.topology import Domain, DomainKind, Source, Topology

T = TypeVar("T")

Tier = tuple[DomainKind, str]
"""A level that a host is in, and its name there."""

_NETWORK = (DomainKind.RACK, DomainKind.BLOCK)


def text_of(path: Path) -> str:
    """The file's text without blanks around it; empty where it is missing or the kernel refuses to tell.

    Drivers answer a read of a value that they do not have (the speed of a port that is down) with an error.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def decoded(text: str | bytes, shape: type[T], what: str) -> T:
    """The JSON text as a `shape`; fields that it does not have are passed over. Raises ProbeError."""
    try:
        return msgspec.json.decode(text, type=shape)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise ProbeError(f"{what} cannot be read: {exc}", hint="give the whole answer, as JSON") from exc


def built(what: str, **parts: Any) -> Topology:
    """The topology of these parts. Names that contradict each other are a ProbeError: they come from `what`."""
    try:
        return Topology(**parts)
    except ConfigError as exc:
        raise ProbeError(f"{what} contradicts itself: {exc.problem}", hint=exc.hint) from exc


def network_tiers(names: Sequence[str], *, has_rack: bool = False) -> list[Tier]:
    """Tiers of a network from the lowest up. The lowest is called rack, unless the platform names racks itself."""
    lowest = DomainKind.BLOCK if has_rack else DomainKind.RACK
    return [(DomainKind.BLOCK if above else lowest, name) for above, name in enumerate(filter(None, names))]


def domains_of(chains: Iterable[tuple[str, Sequence[Tier]]], source: Source) -> tuple[Domain, ...]:
    """Domains of (host, its tiers from the innermost outward). A host may have several such chains.

    Names of racks and blocks need to be unique in their parent only: the id has the whole path. Those of zones and
    sites are unique as they are.
    """
    members: dict[Tier, dict[str, None]] = {}
    for host_id, tiers in chains:
        inner = host_id
        for depth, (kind, name) in enumerate(tiers):
            path = [outer for outer_kind, outer in tiers[depth:] if outer_kind in _NETWORK][::-1]
            domain_id = f"{kind}/{'/'.join(path) if kind in _NETWORK else name}"
            members.setdefault((kind, domain_id), {})[inner] = None
            inner = domain_id
    return tuple(
        Domain.told(source, domain_id=domain_id, kind=kind, members=tuple(inside))
        for (kind, domain_id), inside in members.items()
    )
