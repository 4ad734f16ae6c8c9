"""Clusters from a few lines of TOML: so many hosts of these kinds, with what the hardware table knows of their devices.

For planning and simulating on machines that are not there. `recipes/topologies` has files for machines that can be had.
Every value in such a file says where it comes from; what the table says of a SKU is in the table alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from wsync.discovery.hardware import sku_named
from wsync.discovery.skus import Sku
from wsync.errors import ConfigError
from wsync.topology import SCALE_UP, Device, Domain, DomainKind, Host, Nic, NicKind, Source, Topology

_PREFIX = {"google": "tpu", "aws": "neuron", "intel": "gaudi", "groq": "lpu"}
_FORMAT = "recipes/topologies/README.md says how such a file is written"


class Nics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """So many ports of one kind in each host, one on each rail; `nbytes_per_s` of one, per direction."""

    kind: NicKind
    count: int
    nbytes_per_s: float


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of host. `domain_hosts` of them share a scale-up domain, if the SKU has one."""

    name: str
    count: int
    sku: str
    num_devices: int
    nics: tuple[Nics, ...]
    domain_hosts: int = 1
    num_numa_nodes: int = 0
    instance_type: str = ""


class Level(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts of `machines` (of all, if left out) in the order of the file, `hosts` of them in each domain of that kind.

    All of them are in one domain if `hosts` is left out: then it stays one, whatever their numbers are.
    """

    kind: DomainKind
    machines: tuple[str, ...] = ()
    hosts: int | None = None
    uplink_nbytes_per_s: float = 0.0


class Machines(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file. `sources`: dotted name of a value, or of all below it -> `platform: where it was read`."""

    title: str
    machines: tuple[Machine, ...]
    levels: tuple[Level, ...] = ()
    sources: dict[str, str] = {}

    def __post_init__(self) -> None:
        names = [machine.name for machine in self.machines]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"machines are named {names}: give each its own name")
        for machine in self.machines:
            _check(machine)
        for level in self.levels:
            _check_level(level, names)
        placed = Counter((level.kind, name) for level in self.levels for name in level.machines or names)
        for (kind, name), times in placed.items():
            if times > 1:
                raise ConfigError(f"hosts of {name} are in {times} levels of kind {kind.value}: they can be in one")
        values = list(self._values())
        for value in values:
            self._source(value)
        for key in sorted(self.sources.keys() - {self._told_by(value) for value in values}):
            raise ConfigError(f"'{key}' has a source, but no value of its own", hint=f"values are {', '.join(values)}")

    @classmethod
    def load(cls, path: Path) -> Machines:
        """Read a file. Raises ConfigError that names it for whatever is wrong with it."""
        try:
            return msgspec.toml.decode(path.read_bytes(), type=cls)
        except OSError as exc:
            raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{path}: {exc}", hint=_FORMAT) from exc
        except ConfigError as exc:
            raise ConfigError(f"{path}: {exc.problem}", hint=exc.hint or _FORMAT) from exc

    def topology(self, counts: Mapping[str, int] | None = None) -> Topology:
        """All hosts, `counts` of a machine instead of what the file says. Ids are the same in every call.

        Notes say which last domain or level is not full. Raises ConfigError for counts that are none.
        """
        counts = dict(counts or {})
        if unknown := sorted(counts.keys() - {machine.name for machine in self.machines}):
            raise ConfigError(f"no machine is named {', '.join(unknown)}", hint=f"there are {self._names()}")
        hosts: dict[str, list[Host]] = {}
        devices: list[Device] = []
        nics: list[Nic] = []
        domains: list[Domain] = []
        notes: list[str] = []
        for machine in self.machines:
            number = counts.get(machine.name, machine.count)
            if number < 0:
                raise ConfigError(f"{number} hosts of {machine.name}")
            row = _row(machine)
            ours = [f"{machine.name}-{index}" for index in range(number)]
            hosts[machine.name] = [self._host(machine, host_id) for host_id in ours]
            nics += [nic for host_id in ours for nic in self._nics(machine, host_id)]
            here = [self._devices(machine, row, host_id) for host_id in ours]
            devices += [device for of_host in here for device in of_host]
            domains += self._scale_up(machine, row, here)
            if row.scale_up is not None and (rest := number % machine.domain_hosts):
                notes.append(_partial(f"{row.scale_up.value} domain of {machine.name}", rest, machine.domain_hosts))
        for kind in dict.fromkeys(level.kind for level in self.levels):
            groups, said = self._groups(kind, {name: [host.host_id for host in hosts[name]] for name in hosts})
            domains += groups
            notes += said
        return Topology(
            hosts=tuple(host for of_machine in hosts.values() for host in of_machine),
            devices=tuple(devices),
            nics=tuple(nics),
            domains=tuple(domains),
            notes=tuple(notes),
        )

    def _names(self) -> str:
        return ", ".join(machine.name for machine in self.machines)

    def _values(self) -> Iterator[str]:
        """Dotted names of what the file states, but names and numbers of hosts, which are the reader's choice."""
        for machine in self.machines:
            at = f"machines.{machine.name}"
            yield from (f"{at}.{field}" for field in ("sku", "num_devices"))
            for field, unset in (("domain_hosts", 1), ("num_numa_nodes", 0), ("instance_type", "")):
                if getattr(machine, field) != unset:
                    yield f"{at}.{field}"
            yield from (f"{at}.nics.{nics.kind.value}" for nics in machine.nics)
        yield from dict.fromkeys(f"levels.{level.kind.value}" for level in self.levels)

    def _told_by(self, value: str) -> str:
        """The key under sources that tells it: the longest part of its name that has one."""
        parts = value.split(".")
        for length in range(len(parts), 0, -1):
            if (key := ".".join(parts[:length])) in self.sources:
                return key
        raise ConfigError(f"'{value}' has no source", hint="name it, or what it is in, under [sources]")

    def _source(self, value: str) -> Source:
        text = self.sources[self._told_by(value)]
        who, _, where = text.partition(":")
        if who not in set(Source) or not where.strip():
            raise ConfigError(
                f"the source of '{value}' is {text!r:.80}", hint=f"'WHO: WHERE', with WHO of {', '.join(Source)}"
            )
        return Source(who)

    def _host(self, machine: Machine, host_id: str) -> Host:
        facts = {
            name: getattr(machine, name)
            for name in ("num_numa_nodes", "instance_type")
            if getattr(machine, name) not in (0, "")
        }
        sources = {name: self._source(f"machines.{machine.name}.{name}") for name in facts}
        return Host(host_id=host_id, **facts, facts=sources)

    def _nics(self, machine: Machine, host_id: str) -> Iterator[Nic]:
        number = 0
        for nics in machine.nics:
            source = self._source(f"machines.{machine.name}.nics.{nics.kind.value}")
            for rail in range(nics.count):
                yield Nic.told(
                    source,
                    nic_id=f"{host_id}/nic{number}",
                    host_id=host_id,
                    kind=nics.kind,
                    name=f"nic{number}",
                    rail=rail if nics.kind is not NicKind.ETHERNET else -1,
                    nbytes_per_s=nics.nbytes_per_s,
                )
                number += 1

    def _devices(self, machine: Machine, row: Sku, host_id: str) -> list[Device]:
        """What the file says of them has its source, the rest is from the table."""
        at = f"machines.{machine.name}"
        ours = {"index": self._source(f"{at}.num_devices"), "sku": self._source(f"{at}.sku")}
        prefix = _PREFIX.get(row.vendor, "gpu")
        first = Device.told(
            Source.TABLE,
            device_id=f"{host_id}/{prefix}0",
            host_id=host_id,
            index=0,
            vendor=row.vendor,
            name=row.names[0] if row.names else "",
            sku=row.sku,
            architecture=row.architecture,
            memory_nbytes=row.memory_nbytes,
            memory_nbytes_per_s=row.memory_nbytes_per_s,
            pci_id=row.pci_ids[0] if row.pci_ids else "",
            num_links=row.num_links,
            link_nbytes_per_s=row.link_nbytes_per_s,
            paths=tuple(path.value for path in row.paths),
        )
        return [
            msgspec.structs.replace(
                first, device_id=f"{host_id}/{prefix}{index}", index=index, facts={**first.facts, **ours}
            )
            for index in range(machine.num_devices)
        ]

    def _scale_up(self, machine: Machine, row: Sku, hosts: list[list[Device]]) -> Iterator[Domain]:
        """Domains of `domain_hosts` hosts each; the last one may have fewer."""
        if row.scale_up is None:
            return
        field = "domain_hosts" if machine.domain_hosts > 1 else "num_devices"
        source = self._source(f"machines.{machine.name}.{field}")
        for number, start in enumerate(range(0, len(hosts), machine.domain_hosts)):
            members = [device.device_id for host in hosts[start : start + machine.domain_hosts] for device in host]
            if len(members) > 1:
                domain = Domain.told(
                    Source.TABLE,
                    domain_id=f"{machine.name}-{row.scale_up.value}{number}",
                    kind=row.scale_up,
                    members=tuple(members),
                    nbytes_per_s=row.scale_up_nbytes_per_s,
                )
                yield msgspec.structs.replace(domain, facts={**domain.facts, "members": source})

    def _groups(self, kind: DomainKind, host_ids: Mapping[str, list[str]]) -> tuple[list[Domain], list[str]]:
        """Domains of all levels of that kind, numbered through, and notes of those that are not full."""
        source = self._source(f"levels.{kind.value}")
        domains: list[Domain] = []
        notes: list[str] = []
        for level in self.levels:
            if level.kind is not kind:
                continue
            ours = [
                host
                for name, of_machine in host_ids.items()
                if name in (level.machines or host_ids)
                for host in of_machine
            ]
            size = level.hosts or max(1, len(ours))
            for start in range(0, len(ours), size):
                domains.append(
                    Domain.told(
                        source,
                        domain_id=f"{kind.value}{len(domains)}",
                        kind=kind,
                        members=tuple(ours[start : start + size]),
                        uplink_nbytes_per_s=level.uplink_nbytes_per_s,
                    )
                )
            if rest := len(ours) % size:
                notes.append(_partial(f"{kind.value} of {', '.join(level.machines or host_ids)}", rest, size))
        return domains, notes


def _partial(what: str, num_hosts: int, size: int) -> str:
    return f"the last {what} has {num_hosts} of {size} hosts"


def _check_level(level: Level, names: list[str]) -> None:
    if level.kind in SCALE_UP or (level.hosts is not None and level.hosts < 1):
        raise ConfigError(f"level {level.kind.value} of {level.hosts} hosts: a rack, block, zone or site of some")
    if not 0 <= level.uplink_nbytes_per_s < math.inf:
        raise ConfigError(f"level {level.kind.value} has an uplink of {level.uplink_nbytes_per_s:g} bytes/s")
    if unknown := sorted(set(level.machines) - set(names)):
        raise ConfigError(
            f"level {level.kind.value}: no machine is named {', '.join(unknown)}", hint=f"there are {', '.join(names)}"
        )


def _check(machine: Machine) -> None:
    row = _row(machine)
    if not machine.name or "/" in machine.name or machine.count < 0 or machine.num_devices < 1:
        raise ConfigError(f"machine '{machine.name}': {machine.count} hosts of {machine.num_devices} devices each")
    if machine.num_numa_nodes < 0:
        raise ConfigError(f"machine '{machine.name}' has {machine.num_numa_nodes} NUMA nodes")
    if machine.domain_hosts < 1 or machine.domain_hosts * machine.num_devices > max(
        1, row.domain_size, machine.num_devices
    ):
        raise ConfigError(
            f"machine '{machine.name}': a domain of {machine.domain_hosts} hosts with {machine.num_devices} devices, "
            f"{machine.sku} has at most {row.domain_size} in one"
        )
    kinds = [nics.kind for nics in machine.nics]
    if len(set(kinds)) < len(kinds):
        raise ConfigError(f"machine '{machine.name}' has two entries for NICs of one kind")
    for nics in machine.nics:
        if nics.count < 1 or not 0 < nics.nbytes_per_s < math.inf:
            raise ConfigError(f"machine '{machine.name}': {nics.count} NICs of {nics.nbytes_per_s:g} bytes/s")


def _row(machine: Machine) -> Sku:
    row = sku_named(machine.sku)
    if row is None:
        raise ConfigError(f"machine '{machine.name}': no SKU '{machine.sku}' in the hardware table (discovery/skus.py)")
    return row
