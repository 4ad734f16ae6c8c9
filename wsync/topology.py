"""What a cluster consists of, as far as anybody knows: devices, NICs, hosts, domains and links. Frozen records, pure.

Nothing here is guessed. A field that nobody has told is at its default and means "unknown"; each field that is told has
an entry in `facts`, which says who told it. Probes (`wsync.discovery`) make these records, one kind for all vendors, so
that nobody above them asks which vendor it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from wsync.errors import ConfigError


class Source(StrEnum):
    """Who told a fact. Where two disagree the one that comes first here is believed."""

    MEASURED = "measured"
    DECLARED = "declared"
    DRIVER = "driver"
    SYSFS = "sysfs"
    PLATFORM = "platform"
    TABLE = "table"


_RANK = {source: rank for rank, source in enumerate(Source)}


class DomainKind(StrEnum):
    """The first four join devices, the others hosts or smaller domains."""

    NVLINK = "nvlink"
    XGMI = "xgmi"
    NEURONLINK = "neuronlink"
    ICI = "ici"
    GAUDI = "gaudi"
    RACK = "rack"
    BLOCK = "block"
    ZONE = "zone"
    SITE = "site"


SCALE_UP = frozenset({DomainKind.NVLINK, DomainKind.XGMI, DomainKind.NEURONLINK, DomainKind.ICI, DomainKind.GAUDI})


class NicKind(StrEnum):
    INFINIBAND = "infiniband"
    ROCE = "roce"
    EFA = "efa"
    ETHERNET = "ethernet"


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of the records that carry facts."""

    facts: dict[str, Source] = {}

    @classmethod
    def told(cls, source: Source, /, **fields: Any) -> Self:
        """A record whose fields all come from `source`. Fields at their default (unknown) are no facts."""
        record = cls(**fields)
        facts = dict.fromkeys(record.known_fields(), source)
        return msgspec.structs.replace(record, facts=facts)

    def known_fields(self) -> list[str]:
        """Names of the fields that somebody told, in their order; identities are not facts."""
        return [
            field.name
            for field in _fields(type(self))
            if field.name != "facts" and not field.required and getattr(self, field.name) != field.default
        ]

    @property
    def sources(self) -> dict[str, Source]:
        """Who told each known field. A record without any facts was written by hand: it is declared."""
        return self.facts or dict.fromkeys(self.known_fields(), Source.DECLARED)

    def joined(self, other: Self) -> Self:
        """What both know; where they disagree, what the better source says (of equals, what is here already)."""
        changes: dict[str, Any] = {}
        facts, theirs = dict(self.sources), other.sources
        for name in other.known_fields():
            source = theirs[name]
            if name not in facts or _RANK[source] < _RANK[facts[name]]:
                changes[name], facts[name] = getattr(other, name), source
        return msgspec.structs.replace(self, **changes, facts=facts) if changes else self

    def __post_init__(self) -> None:
        strangers = set(self.facts) - {field.name for field in _fields(type(self))}
        if strangers:
            raise ConfigError(f"{self!r:.120} has a source for {sorted(strangers)}, which it does not have")
        if self.facts and (silent := [name for name in self.known_fields() if name not in self.facts]):
            raise ConfigError(f"nobody told {', '.join(silent)} of {self!r:.120}", hint="every fact has a source")


T = TypeVar("T", bound=Record)


@cache
def _fields(record: type[Record]) -> tuple[msgspec.structs.FieldInfo, ...]:
    # Reading a class's annotations takes far longer than all else about a record, and clusters have thousands.
    return msgspec.structs.fields(record)


class Host(Record, frozen=True, kw_only=True):
    """A machine (a node of the cluster). `instance_type` is the platform's name for its shape."""

    host_id: str
    platform: str = ""
    instance_type: str = ""
    instance_id: str = ""
    """The platform's own name of this machine, by which its answers about many machines call it."""
    num_numa_nodes: int = 0
    memory_nbytes: int = 0
    shm_nbytes: int = 0
    memlock_nbytes: int = 0
    """Memory that a process may lock, which RDMA needs; the largest possible value means unlimited."""


class Device(Record, frozen=True, kw_only=True):
    """An accelerator, or a partition of one (`partition_of` names the whole). `index` is its number on its host.

    `name` is what the driver calls it, `sku` what the hardware table calls that. A name that the table does not have is
    no error: the device is then described by what could be read.
    """

    device_id: str
    host_id: str
    index: int = -1
    vendor: str = ""
    name: str = ""
    uuid: str = ""
    """What the driver tells it by, on this host and elsewhere."""
    sku: str = ""
    architecture: str = ""
    memory_nbytes: int = 0
    memory_nbytes_per_s: float = 0.0
    pci: str = ""
    """Address, `dddd:bb:dd.f`."""
    pci_id: str = ""
    """Vendor and device, `10de:2330`."""
    numa_node: int = -1
    num_links: int = 0
    """Scale-up links that are up."""
    link_nbytes_per_s: float = 0.0
    """Of one of them, per direction."""
    partition_of: str = ""
    partition_mode: str = ""
    paths: tuple[str, ...] = ()
    """Ways by which its memory can be reached, or moved by software that is to be had (names of `DevicePath`); empty:
    none is known.
    """


class Nic(Record, frozen=True, kw_only=True):
    """A network port. `rail` numbers those that are on one plane of the fabric in all hosts."""

    nic_id: str
    host_id: str
    kind: NicKind | None = None
    name: str = ""
    netdev: str = ""
    pci: str = ""
    pci_id: str = ""
    numa_node: int = -1
    rail: int = -1
    nbytes_per_s: float = 0.0
    """Per direction."""
    is_up: bool | None = None


class Domain(Record, frozen=True, kw_only=True):
    """Things that reach one another faster than what is outside: devices of a scale-up fabric, hosts of a rack, ...

    `members` are device ids in a scale-up domain, else host ids or ids of smaller domains.
    """

    domain_id: str
    kind: DomainKind
    members: tuple[str, ...] = ()
    nbytes_per_s: float = 0.0
    """Of one member to the others, per direction."""
    uplink_nbytes_per_s: float = 0.0
    """Of the whole domain to what is outside, per direction; unknown for scale-up domains, which have none."""

    @property
    def is_scale_up(self) -> bool:
        return self.kind in SCALE_UP

    def joined(self, other: Self) -> Self:
        """As of all records; but equally good sources each see the members of their own host: all of these are in."""
        both = super().joined(other)
        if self.sources.get("members") != other.sources.get("members"):
            return both
        return msgspec.structs.replace(both, members=tuple(dict.fromkeys((*self.members, *other.members))))


class Link(Record, frozen=True, kw_only=True):
    """Two devices or NICs that are joined, in either order, and how: `NV18`, `PIX`, `SYS`, `XGMI`, ..."""

    a: str
    b: str
    kind: str
    nbytes_per_s: float = 0.0
    """Per direction."""
    overhead_s: float = 0.0
    """Of one operation."""

    @property
    def ends(self) -> frozenset[str]:
        return frozenset((self.a, self.b))


class Topology(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """All that is known. Ids are unique, and everything that a record names is there; checked when built."""

    hosts: tuple[Host, ...] = ()
    devices: tuple[Device, ...] = ()
    nics: tuple[Nic, ...] = ()
    domains: tuple[Domain, ...] = ()
    links: tuple[Link, ...] = ()
    notes: tuple[str, ...] = ()
    """What a probe could not read or did not believe, and why."""

    def __post_init__(self) -> None:
        known: dict[str, str] = {}
        for what, ids in (
            ("host", [h.host_id for h in self.hosts]),
            ("device", [d.device_id for d in self.devices]),
            ("NIC", [n.nic_id for n in self.nics]),
            ("domain", [d.domain_id for d in self.domains]),
        ):
            for name in ids:
                if name in known:
                    raise ConfigError(f"'{name}' is a {known[name]} and a {what}", hint="ids are unique")
                known[name] = what
        for device in self.devices:
            _check(known, device.device_id, device.host_id, "host")
            if device.partition_of:
                _check(known, device.device_id, device.partition_of, "device")
        for nic in self.nics:
            _check(known, nic.nic_id, nic.host_id, "host")
        for domain in self.domains:
            for member in domain.members:
                _check(known, domain.domain_id, member, *(("device",) if domain.is_scale_up else ("host", "domain")))
        for link in self.links:
            for end in (link.a, link.b):
                _check(known, f"link {link.kind}", end, "device", "NIC")

    @classmethod
    def load(cls, path: Path) -> Topology:
        """Read what `dump` wrote. Raises ConfigError for anything else."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as exc:
            raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{path} is no topology: {exc}", hint="`wsync topo --json FILE` writes one") from exc

    def dump(self) -> str:
        """All of it as JSON text."""
        return msgspec.json.format(msgspec.json.encode(self)).decode() + "\n"

    def host_devices(self, host_id: str) -> tuple[Device, ...]:
        return tuple(device for device in self.devices if device.host_id == host_id)

    def host_nics(self, host_id: str) -> tuple[Nic, ...]:
        return tuple(nic for nic in self.nics if nic.host_id == host_id)

    def domain_of(self, member: str, kind: DomainKind) -> Domain | None:
        """The domain of that kind that has the device, host or domain as a member; the first of several."""
        return next((d for d in self.domains if d.kind is kind and member in d.members), None)

    def link(self, a: str, b: str) -> Link | None:
        return next((link for link in self.links if link.ends == {a, b}), None)

    def joined(self, *others: Topology) -> Topology:
        """What all know. Records of one id become one; a domain's members are those of the best source, or sources."""
        every = (self, *others)
        return Topology(
            hosts=_joined((host for part in every for host in part.hosts), lambda host: host.host_id),
            devices=_joined((device for part in every for device in part.devices), lambda device: device.device_id),
            nics=_joined((nic for part in every for nic in part.nics), lambda nic: nic.nic_id),
            domains=_joined((domain for part in every for domain in part.domains), lambda domain: domain.domain_id),
            links=_joined((link for part in every for link in part.links), lambda link: (link.ends, link.kind)),
            notes=tuple(dict.fromkeys(note for part in every for note in part.notes)),
        )

    def around(self, host_id: str) -> Topology:
        """The host with its devices and NICs, and the domains that it is in, without their other members.

        Raises ConfigError for a host that is not here.
        """
        host = next((host for host in self.hosts if host.host_id == host_id), None)
        if host is None:
            raise ConfigError(
                f"host '{host_id}' is not in the topology",
                hint=f"WSYNC_HOST names one of {', '.join(sorted(h.host_id for h in self.hosts)[:8]) or 'no hosts'}",
            )
        devices, nics = self.host_devices(host_id), self.host_nics(host_id)
        here = {host_id, *(device.device_id for device in devices)}
        while found := {d.domain_id for d in self.domains if here & set(d.members)} - here:
            here |= found
        ends = here | {nic.nic_id for nic in nics}
        return Topology(
            hosts=(host,),
            devices=devices,
            nics=nics,
            domains=tuple(
                msgspec.structs.replace(domain, members=tuple(member for member in domain.members if member in here))
                for domain in self.domains
                if domain.domain_id in here
            ),
            links=tuple(link for link in self.links if link.ends <= ends),
        )


def _check(known: Mapping[str, str], who: str, name: str, *kinds: str) -> None:
    if known.get(name) not in kinds:
        raise ConfigError(f"'{who}' names '{name}', which is no {' or '.join(kinds)} here")


def _joined(records: Iterable[T], key: Callable[[T], object]) -> tuple[T, ...]:
    found: dict[object, T] = {}
    for record in records:
        mine = found.get(key(record))
        found[key(record)] = record if mine is None else mine.joined(record)
    return tuple(found.values())
