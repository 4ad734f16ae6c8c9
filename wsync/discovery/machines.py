"""Clusters from a few lines of TOML: so many hosts of these kinds, with what the hardware table knows of their devices.

For planning and simulating on machines that are not there. `recipes/topologies` has files for machines that can be had.
Every value in such a file says where it comes from; what the table says of a SKU is in the table alone.
"""

from __future__ import annotations

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
    """Hosts in the order of the file, `hosts` of them in each domain of that kind."""

    kind: DomainKind
    hosts: int
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
            if level.kind in SCALE_UP or level.hosts < 1 or level.uplink_nbytes_per_s < 0:
                raise ConfigError(
                    f"level {level.kind.value} of {level.hosts} hosts: a rack, block, zone or site of some"
                )
        values = list(self._values())
        for value in values:
            self._source(value)
        for key in self.sources:
            if not any(value == key or value.startswith(f"{key}.") for value in values):
                raise ConfigError(f"'{key}' has a source, but no value", hint=f"values are {', '.join(values)}")

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
        """All hosts, `counts` of a machine instead of what the file says. Ids are the same in every call."""
        counts = dict(counts or {})
        if unknown := sorted(counts.keys() - {machine.name for machine in self.machines}):
            raise ConfigError(f"no machine is named {', '.join(unknown)}", hint=f"there are {self._names()}")
        hosts: list[Host] = []
        devices: list[Device] = []
        nics: list[Nic] = []
        domains: list[Domain] = []
        for machine in self.machines:
            number = counts.get(machine.name, machine.count)
            if number < 0:
                raise ConfigError(f"{number} hosts of {machine.name}")
            row = _row(machine)
            ours = [f"{machine.name}-{index}" for index in range(number)]
            hosts += [self._host(machine, host_id) for host_id in ours]
            nics += [nic for host_id in ours for nic in self._nics(machine, host_id)]
            here = [_devices(machine, row, host_id) for host_id in ours]
            devices += [device for of_host in here for device in of_host]
            domains += _scale_up(machine, row, here)
        domains += self._levels([host.host_id for host in hosts])
        return Topology(hosts=tuple(hosts), devices=tuple(devices), nics=tuple(nics), domains=tuple(domains))

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
        yield from (f"levels.{level.kind.value}" for level in self.levels)

    def _source(self, value: str) -> Source:
        """Who told it: the entry for the longest part of its name."""
        parts = value.split(".")
        for length in range(len(parts), 0, -1):
            text = self.sources.get(".".join(parts[:length]))
            if text is not None:
                who, _, where = text.partition(":")
                if who not in set(Source) or not where.strip():
                    raise ConfigError(
                        f"the source of '{value}' is {text!r:.80}",
                        hint=f"'WHO: WHERE', with WHO of {', '.join(Source)}",
                    )
                return Source(who)
        raise ConfigError(f"'{value}' has no source", hint="name it, or what it is in, under [sources]")

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

    def _levels(self, host_ids: list[str]) -> Iterator[Domain]:
        for level in self.levels:
            source = self._source(f"levels.{level.kind.value}")
            for number, start in enumerate(range(0, len(host_ids), level.hosts)):
                yield Domain.told(
                    source,
                    domain_id=f"{level.kind.value}{number}",
                    kind=level.kind,
                    members=tuple(host_ids[start : start + level.hosts]),
                    uplink_nbytes_per_s=level.uplink_nbytes_per_s,
                )


def _check(machine: Machine) -> None:
    row = _row(machine)
    if not machine.name or "/" in machine.name or machine.count < 0 or machine.num_devices < 1:
        raise ConfigError(f"machine '{machine.name}': {machine.count} hosts of {machine.num_devices} devices each")
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
        if nics.count < 1 or not nics.nbytes_per_s > 0:
            raise ConfigError(f"machine '{machine.name}': {nics.count} NICs of {nics.nbytes_per_s:g} bytes/s")


def _row(machine: Machine) -> Sku:
    row = sku_named(machine.sku)
    if row is None:
        raise ConfigError(f"machine '{machine.name}': no SKU '{machine.sku}' in the hardware table (discovery/skus.py)")
    return row


def _devices(machine: Machine, row: Sku, host_id: str) -> list[Device]:
    prefix = _PREFIX.get(row.vendor, "gpu")
    return [
        Device.told(
            Source.TABLE,
            device_id=f"{host_id}/{prefix}{index}",
            host_id=host_id,
            index=index,
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
        for index in range(machine.num_devices)
    ]


def _scale_up(machine: Machine, row: Sku, hosts: list[list[Device]]) -> Iterator[Domain]:
    """Domains of `domain_hosts` hosts each; the last one may have fewer."""
    if row.scale_up is None:
        return
    for number, start in enumerate(range(0, len(hosts), machine.domain_hosts)):
        members = [device.device_id for host in hosts[start : start + machine.domain_hosts] for device in host]
        if len(members) > 1:
            yield Domain.told(
                Source.TABLE,
                domain_id=f"{machine.name}-{row.scale_up.value}{number}",
                kind=row.scale_up,
                members=tuple(members),
                nbytes_per_s=row.scale_up_nbytes_per_s,
            )
