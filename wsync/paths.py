"""Which paths two devices, or two hosts, have between them: a pure function of the topology.

A path counts only if both ends have what it needs. Rates are those of the narrower end, per direction and unshared; 0
where nobody told one. The order is by how directly the bytes go, which is also by rate wherever rates are known.
"""

from __future__ import annotations

from collections import defaultdict
from enum import StrEnum

import msgspec

from wsync.errors import ConfigError
from wsync.topology import Device, Domain, DomainKind, Nic, NicKind, Topology


class Medium(StrEnum):
    """What a path goes through, so what it shares with others."""

    SCALE_UP = "scale_up"
    HOST = "host"
    """Inside of one machine: its memory or its PCIe."""
    RDMA = "rdma"
    IP = "ip"


class Path(msgspec.Struct, frozen=True):
    """A way from one end to the other. `name` is that of the transport, or of the vendor's mechanism it would use."""

    name: str
    medium: Medium
    nbytes_per_s: float
    why: str


_INSIDE = {
    DomainKind.NVLINK: (("cuda_ipc", True), ("cuda_fabric", False)),
    DomainKind.XGMI: (("hip_ipc", True),),
    DomainKind.ICI: (("ici", True), ("ici", False)),
    DomainKind.NEURONLINK: (("neuron_cc", True), ("neuron_cc", False)),
    DomainKind.GAUDI: (("hccl", True), ("hccl", False)),
}
"""By kind of scale-up domain: the path, and whether it is for devices of one host or of two."""
_RDMA_KINDS = {
    NicKind.INFINIBAND: ("ucx", "UCX over InfiniBand"),
    NicKind.ROCE: ("ucx", "UCX over RoCE"),
    NicKind.EFA: ("libfabric", "libfabric over EFA"),
}


class PathFinder:
    """Answers for any pair of one topology. Building it reads the topology once."""

    def __init__(self, topology: Topology) -> None:
        self._hosts = {host.host_id for host in topology.hosts}
        self._devices = {device.device_id: device for device in topology.devices}
        self._nics: defaultdict[str, list[Nic]] = defaultdict(list)
        for nic in topology.nics:
            if nic.is_up is not False:
                self._nics[nic.host_id].append(nic)
        self._rates: dict[tuple[str, Medium], float] = {}
        self._num_devices: defaultdict[str, int] = defaultdict(int)
        for device in topology.devices:
            self._num_devices[device.host_id] += not device.partition_of
        self._domains: defaultdict[str, list[Domain]] = defaultdict(list)
        for domain in topology.domains:
            if domain.is_scale_up:
                for member in domain.members:
                    self._domains[member].append(domain)

    def between(self, a: str, b: str) -> tuple[Path, ...]:
        """Paths from `a` to `b`, two device ids or two host ids, best first; none from a thing to itself.

        Raises ConfigError for an id that is neither, or for one of each.
        """
        if a in self._devices and b in self._devices:
            return self._between_devices(self._devices[a], self._devices[b]) if a != b else ()
        if a in self._hosts and b in self._hosts:
            return self._between_hosts(a, b) if a != b else ()
        raise ConfigError(f"no path between '{a}' and '{b}'", hint="name two devices, or two hosts, of this topology")

    def domain(self, device_id: str) -> Domain | None:
        """The largest scale-up domain that has the device and whose mechanism the device's software has."""
        paths = set(self._devices[device_id].paths)
        usable = [
            domain for domain in self._domains[device_id] if paths & {name for name, _ in _INSIDE.get(domain.kind, ())}
        ]
        return max(usable, key=lambda domain: len(domain.members), default=None)

    def island(self, device_id: str) -> str:
        """What it has a faster way in than the network: its scale-up domain, as far as that reaches, or its host."""
        device, domain = self._devices[device_id], self.domain(device_id)
        if domain is None:
            return device.host_id
        leaves_host = any(name in device.paths for name, is_one_host in _INSIDE[domain.kind] if not is_one_host)
        return domain.domain_id if leaves_host else f"{domain.domain_id}@{device.host_id}"

    def scale_up_nbytes_per_s(self, device: Device, domain: Domain) -> float:
        """Of the device to the others of its domain, 0 if unknown: its links that are up, else what the domain says."""
        return device.num_links * device.link_nbytes_per_s or domain.nbytes_per_s

    def nic_kinds(self, host_id: str) -> frozenset[NicKind | None]:
        """Kinds of its NICs that are up."""
        return frozenset(nic.kind for nic in self._nics[host_id])

    def network_nbytes_per_s(self, host_id: str, medium: Medium) -> float:
        """Of all its NICs that carry it; 0 if there are none, or if one of them has no known rate."""
        known = self._rates.get((host_id, medium))
        if known is None:
            rates = [nic.nbytes_per_s for nic in self._carrying(host_id, medium)]
            known = self._rates[host_id, medium] = sum(rates) if all(rates) else 0.0
        return known

    def share_nbytes_per_s(self, device: Device) -> float:
        """RDMA bandwidth of its host for each of the host's devices, 0 if unknown."""
        return self.network_nbytes_per_s(device.host_id, Medium.RDMA) / max(1, self._num_devices[device.host_id])

    def _carrying(self, host_id: str, medium: Medium) -> list[Nic]:
        if medium is Medium.RDMA:
            return [nic for nic in self._nics[host_id] if nic.kind in _RDMA_KINDS]
        return [nic for nic in self._nics[host_id] if nic.kind is NicKind.ETHERNET or nic.netdev]

    def _between_devices(self, a: Device, b: Device) -> tuple[Path, ...]:
        both = set(a.paths) & set(b.paths)
        found = [path for domain in self._domains[a.device_id] for path in self._inside(domain, a, b, both)]
        if a.host_id == b.host_id:
            if "pcie_p2p" in both:
                found.append(Path("pcie_p2p", Medium.HOST, 0.0, "PCIe peer to peer"))
            found.append(Path("shm", Medium.HOST, 0.0, "through the memory of their host"))
            return tuple(found)
        rate = _narrower(self.share_nbytes_per_s(a), self.share_nbytes_per_s(b))
        for needs, why in self._rdma(a.host_id, b.host_id):
            if needs in both:
                found.append(Path("nixl", Medium.RDMA, rate, why))
        ip = self._ip(a.host_id, b.host_id)
        if "dcn" in both:
            found.append(Path("dcn", Medium.IP, ip.nbytes_per_s, "between slices, over the hosts' network"))
        return (*found, ip)

    def _inside(self, domain: Domain, a: Device, b: Device, both: set[str]) -> list[Path]:
        if b.device_id not in domain.members:
            return []
        rate = _narrower(self.scale_up_nbytes_per_s(a, domain), self.scale_up_nbytes_per_s(b, domain))
        is_one_host = a.host_id == b.host_id
        names = [name for name, for_one_host in _INSIDE.get(domain.kind, ()) if for_one_host is is_one_host]
        why = f"{domain.kind} domain {domain.domain_id}"
        return [Path(name, Medium.SCALE_UP, rate, why) for name in names if name in both]

    def _between_hosts(self, a: str, b: str) -> tuple[Path, ...]:
        rate = _narrower(*(self.network_nbytes_per_s(host, Medium.RDMA) for host in (a, b)))
        return (*(Path("nixl", Medium.RDMA, rate, why) for _, why in self._rdma(a, b)), self._ip(a, b))

    def _rdma(self, a: str, b: str) -> list[tuple[str, str]]:
        """What a device needs for it, and why it works, for each kind of RDMA NIC that both hosts have."""
        kinds = [self.nic_kinds(host) for host in (a, b)]
        return [what for kind, what in _RDMA_KINDS.items() if all(kind in have for have in kinds)]

    def _ip(self, a: str, b: str) -> Path:
        rate = _narrower(*(self.network_nbytes_per_s(host, Medium.IP) for host in (a, b)))
        return Path("tcp", Medium.IP, rate, "from host memory to host memory")


def between(topology: Topology, a: str, b: str) -> tuple[Path, ...]:
    """`PathFinder.between` for one pair."""
    return PathFinder(topology).between(a, b)


def _narrower(a: float, b: float) -> float:
    return min(a, b) if a and b else 0.0
