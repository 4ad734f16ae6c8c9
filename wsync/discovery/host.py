"""The machine itself: NUMA nodes, memory, what a process may lock and share, and what is between its devices on PCI."""

from __future__ import annotations

import os
import re
from itertools import combinations
from pathlib import Path

import msgspec

from wsync.discovery.pci import SYSFS_SLACK, Place, distance, place_of
from wsync.discovery.reading import built, text_of
from wsync.errors import ProbeError
from wsync.topology import Host, Link, Source, Topology

UNLIMITED = 2**63 - 1


def probe(host_id: str) -> Topology:
    return read_host(Path("/"), host_id=host_id)


def read_host(root: Path, *, host_id: str) -> Topology:
    """The host whose /sys, /proc and /dev are below `root`. What is not there stays unknown.

    NUMA nodes are those with processors: GB200 has further ones for the memory of its GPUs. The limit of locked memory
    is that of this process (`root`/proc/self).
    """
    host = Host.told(
        Source.SYSFS,
        host_id=host_id,
        num_numa_nodes=len(_numa_nodes(root)),
        memory_nbytes=_memory_nbytes(root),
        shm_nbytes=_shm_nbytes(root),
        memlock_nbytes=_memlock_nbytes(root),
    )
    return built(f"'{host_id}'", hosts=(host,))


def with_distances(topology: Topology, root: Path, *, host_id: str) -> Topology:
    """The topology with a link for each pair of this host's devices, or device and NIC, that has none.

    `root` has this host's /sys. The link says what is between the two on PCI (`pci.distance`); pairs of which that is
    not known get none. The NUMA node is that of the records where they have one: a platform's file may know better than
    a guest's sysfs.
    """
    only_node = _numa_nodes(root) == [0]
    devices, nics = topology.host_devices(host_id), topology.host_nics(host_id)
    places: dict[str, Place] = {}
    for name, pci, numa_node in [
        *((device.device_id, device.pci, device.numa_node) for device in devices),
        *((nic.nic_id, nic.pci, nic.numa_node) for nic in nics),
    ]:
        path = root / "sys/bus/pci/devices" / pci
        place = place_of(path, numa_node=numa_node) if pci and path.exists() else None
        if place is not None:
            places[name] = Place(place.path, 0) if only_node and place.numa_node < 0 else place
    joined = {link.ends for link in topology.links}
    pairs = [(a.device_id, b.device_id) for a, b in combinations(devices, 2)]
    pairs += [(device.device_id, nic.nic_id) for device in devices for nic in nics]
    links = []
    for a, b in pairs:
        if a in places and b in places and frozenset((a, b)) not in joined:
            kind = distance(places[a], places[b], slack=SYSFS_SLACK)
            links += [Link(a=a, b=b, kind=kind)] if kind else []
    return msgspec.structs.replace(topology, links=(*topology.links, *links))


def _numa_nodes(root: Path) -> list[int]:
    nodes = root / "sys/devices/system/node"
    text = text_of(nodes / "has_cpu") or text_of(nodes / "online")
    found: list[int] = []
    for part in text.split(",") if text else ():
        ends = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part)
        if ends is None:
            raise ProbeError(f"{nodes} lists the nodes '{text:.40}'", hint="a list like 0-1,4 is expected there")
        found += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return found


def _memory_nbytes(root: Path) -> int:
    text = text_of(root / "proc/meminfo")
    found = re.search(r"^MemTotal: +(\d{1,15}) kB$", text, re.MULTILINE)
    if text and found is None:
        raise ProbeError(f"{root / 'proc/meminfo'} has no line MemTotal in kB", hint="is it the kernel's file?")
    return int(found[1]) * 1024 if found else 0


def _shm_nbytes(root: Path) -> int:
    try:
        size = os.statvfs(root / "dev/shm")
    except OSError:
        return 0
    return size.f_blocks * size.f_frsize


def _memlock_nbytes(root: Path) -> int:
    text = text_of(root / "proc/self/limits")
    found = re.search(r"^Max locked memory +(\d{1,20}|unlimited) ", text, re.MULTILINE)
    if text and found is None:
        raise ProbeError(f"{root / 'proc/self/limits'} has no limit of locked memory", hint="is it the kernel's file?")
    if found is None:
        return 0
    return UNLIMITED if found[1] == "unlimited" else min(int(found[1]), UNLIMITED)
