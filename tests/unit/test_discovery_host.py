"""The host: NUMA nodes, memory and limits, the words for PCI distances, and ids by PCI address."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from _sysfs import Sysfs
from hypothesis import given
from hypothesis import strategies as st

from wsync.discovery import host
from wsync.discovery.host import UNLIMITED, read_host, with_distances
from wsync.discovery.pci import SYSFS_SLACK, Place, address, distance, place_of, with_ids_of
from wsync.errors import ProbeError
from wsync.topology import Device, Domain, DomainKind, Host, Link, Nic, Source, Topology

LIMITS = "Limit                     Soft Limit           Hard Limit           Units     \n"
MEMLOCK = "Max locked memory         {soft:<20} unlimited            bytes     \n"


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path)


def machine(sysfs: Sysfs, *, nodes: str = "0-1", soft: str = "8388608") -> Path:
    sysfs.write("sys/devices/system/node/has_cpu", nodes)
    sysfs.write("proc/meminfo", "MemTotal:       2113411212 kB\nMemFree:        1000 kB")
    sysfs.write("proc/self/limits", LIMITS + MEMLOCK.format(soft=soft))
    (sysfs.root / "dev/shm").mkdir(parents=True)
    return sysfs.root


def test_a_host_is_read_with_all_its_facts(sysfs: Sysfs) -> None:
    size = os.statvfs(machine(sysfs))
    (found,) = read_host(sysfs.root, host_id="h").hosts
    assert found == Host.told(
        Source.SYSFS,
        host_id="h",
        num_numa_nodes=2,
        memory_nbytes=2113411212 * 1024,
        shm_nbytes=size.f_blocks * size.f_frsize,
        memlock_nbytes=8388608,
    )


@pytest.mark.parametrize(("nodes", "expected"), [("0", 1), ("0-7", 8), ("0,2", 2), ("0-1,4,6-7", 5)])
def test_numa_nodes_with_processors_are_counted(sysfs: Sysfs, nodes: str, expected: int) -> None:
    machine(sysfs, nodes=nodes)
    sysfs.write("sys/devices/system/node/online", "0-33")  # the memory of four GPUs has nodes of its own
    assert read_host(sysfs.root, host_id="h").hosts[0].num_numa_nodes == expected


def test_memory_that_may_be_locked_without_limit_is_the_largest_value(sysfs: Sysfs) -> None:
    machine(sysfs, soft="unlimited")
    assert read_host(sysfs.root, host_id="h").hosts[0].memlock_nbytes == UNLIMITED == 2**63 - 1


def test_what_a_host_does_not_show_stays_unknown(tmp_path: Path) -> None:
    assert read_host(tmp_path, host_id="h") == Topology(hosts=(Host(host_id="h"),))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("sys/devices/system/node/has_cpu", "0-"),
        ("sys/devices/system/node/has_cpu", "all"),
        ("proc/meminfo", "MemTotal: much"),
        ("proc/self/limits", "Max locked memory  some  some  bytes"),
    ],
)
def test_a_file_that_is_not_the_kernels_is_refused(sysfs: Sysfs, path: str, text: str) -> None:
    machine(sysfs)
    sysfs.write(path, text)
    with pytest.raises(ProbeError, match=Path(path).parent.name):
        read_host(sysfs.root, host_id="h")


def test_this_machine_can_be_read() -> None:
    (found,) = host.probe("h").hosts
    assert found.memory_nbytes > 1 << 20
    assert found.memlock_nbytes > 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0000:1a:00.0", "0000:1a:00.0"),
        ("00000000:1A:00.0", "0000:1a:00.0"),
        ("1A:00.0", "0000:1a:00.0"),
        ("00000018:06:00.0", "0018:06:00.0"),
        ("10000:e1:00.1", "10000:e1:00.1"),
    ],
)
def test_an_address_has_one_form(text: str, expected: str) -> None:
    assert address(text) == expected


@given(st.text(alphabet="0123456789abcdefgABZ:. ", max_size=16))
def test_any_text_is_an_address_or_a_probe_error(text: str) -> None:
    try:
        found = address(text)
    except ProbeError:
        return
    assert address(found) == found


ROOT, PORT = "pci0000:00", "0000:00:01.0"
UPSTREAM, DOWN_A, DOWN_B = "0000:01:00.0", "0000:02:00.0", "0000:02:01.0"
SWITCH = (ROOT, PORT, UPSTREAM)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((*SWITCH, DOWN_A, "0000:03:00.0"), (*SWITCH, DOWN_B, "0000:04:00.0"), "PIX"),
        ((*SWITCH, DOWN_A, "0000:03:00.0"), (*SWITCH, DOWN_A, "0000:03:00.1"), "PIX"),
        (
            (*SWITCH, DOWN_A, "0000:03:00.0"),
            (*SWITCH, DOWN_B, "0000:05:00.0", "0000:06:00.0", "0000:07:00.0"),
            "PXB",
        ),
        ((*SWITCH, DOWN_A, "0000:03:00.0"), (ROOT, "0000:00:02.0", "0000:09:00.0"), "PHB"),
        ((ROOT, "0000:00:1b.0"), (ROOT, "0000:00:1c.0"), "PHB"),
    ],
)
def test_words_for_what_is_between_two_devices(a: tuple[str, ...], b: tuple[str, ...], expected: str) -> None:
    for one, other in ((a, b), (b, a)):
        assert distance(Place(one, 0), Place(other, 0), slack=SYSFS_SLACK) == expected


@pytest.mark.parametrize(("ours", "theirs", "expected"), [(0, 0, "NODE"), (0, 1, "SYS"), (0, -1, ""), (-1, -1, "")])
def test_between_root_complexes_the_numa_nodes_decide(ours: int, theirs: int, expected: str) -> None:
    a, b = Place(("pci0000:00", "0000:00:01.0"), ours), Place(("pci0000:80", "0000:80:01.0"), theirs)
    assert distance(a, b) == expected


def test_a_place_is_read_from_the_path_of_the_device(sysfs: Sysfs) -> None:
    sysfs.function(*SWITCH, DOWN_A, "0000:03:00.0", numa_node=1)
    link = sysfs.root / "sys/bus/pci/devices/0000:03:00.0"
    assert place_of(link) == Place((*SWITCH, DOWN_A, "0000:03:00.0"), 1)
    assert place_of(link, numa_node=0) == Place((*SWITCH, DOWN_A, "0000:03:00.0"), 0)
    assert place_of(sysfs.root) is None


def gpu(number: int, pci: str, **fields: int) -> Device:
    return Device(device_id=f"h/gpu{number}", host_id="h", pci=pci, **fields)


def nic(name: str, pci: str) -> Nic:
    return Nic(nic_id=f"h/{name}", host_id="h", pci=pci)


def test_links_are_made_of_the_pairs_that_have_none(sysfs: Sysfs) -> None:
    machine(sysfs)
    sysfs.function(*SWITCH, DOWN_A, "0000:03:00.0", numa_node=0)
    sysfs.function(*SWITCH, DOWN_B, "0000:04:00.0", numa_node=0)
    sysfs.function("pci0000:80", "0000:80:01.0", "0000:81:00.0", numa_node=1)
    topology = Topology(
        hosts=(Host(host_id="h"), Host(host_id="other")),
        devices=(
            gpu(0, "0000:03:00.0"),
            gpu(1, "0000:81:00.0"),
            gpu(2, ""),
            gpu(3, "0000:99:00.0"),
            Device(device_id="other/gpu0", host_id="other", pci="0000:04:00.0"),
        ),
        nics=(nic("mlx5_0", "0000:04:00.0"),),
        links=(Link(a="h/gpu1", b="h/gpu0", kind="NV18"),),
    )
    found = with_distances(topology, sysfs.root, host_id="h")
    assert [(link.a, link.b, link.kind) for link in found.links] == [
        ("h/gpu1", "h/gpu0", "NV18"),
        ("h/gpu0", "h/mlx5_0", "PIX"),
        ("h/gpu1", "h/mlx5_0", "SYS"),
    ]


def test_the_numa_node_of_a_record_counts_before_that_of_sysfs(sysfs: Sysfs) -> None:
    machine(sysfs)
    for domain in ("0001", "0002"):
        sysfs.function(f"pci{domain}:00", f"{domain}:00:00.0", numa_node=0)
    topology = Topology(
        hosts=(Host(host_id="h"),), devices=(gpu(0, "0001:00:00.0"), gpu(1, "0002:00:00.0", numa_node=1))
    )
    assert with_distances(topology, sysfs.root, host_id="h").links[0].kind == "SYS"


@pytest.mark.parametrize(("nodes", "kinds"), [("0", ["NODE"]), ("0-1", [])])
def test_an_unknown_numa_node_is_the_only_one_there_is_or_none(sysfs: Sysfs, nodes: str, kinds: list[str]) -> None:
    machine(sysfs, nodes=nodes)
    for domain in ("0001", "0002"):
        sysfs.function(f"pci{domain}:00", f"{domain}:00:00.0", numa_node=-1)
    topology = Topology(hosts=(Host(host_id="h"),), devices=(gpu(0, "0001:00:00.0"), gpu(1, "0002:00:00.0")))
    assert [link.kind for link in with_distances(topology, sysfs.root, host_id="h").links] == kinds


def test_ids_are_taken_over_by_pci_address_wherever_they_are_named() -> None:
    known = Topology(
        hosts=(Host(host_id="h"),),
        devices=(gpu(0, "0000:03:00.0"), gpu(1, "0000:04:00.0")),
        nics=(nic("mlx5_0", "0000:05:00.0"),),
    )
    found = Topology(
        hosts=(Host(host_id="h"),),
        devices=(gpu(1, "0000:03:00.0"), gpu(0, "0000:04:00.0")),
        nics=(nic("0000:05:00.0", "0000:05:00.0"), nic("eth0", "0000:06:00.0")),
        domains=(Domain(domain_id="d", kind=DomainKind.NVLINK, members=("h/gpu1",)),),
        links=(Link(a="h/gpu1", b="h/0000:05:00.0", kind="PIX"),),
    )
    renamed = with_ids_of(known, found)
    assert [(device.device_id, device.pci) for device in renamed.devices] == [
        ("h/gpu0", "0000:03:00.0"),
        ("h/gpu1", "0000:04:00.0"),
    ]
    assert [n.nic_id for n in renamed.nics] == ["h/mlx5_0", "h/eth0"]
    assert renamed.domains[0].members == ("h/gpu0",)
    assert (renamed.links[0].a, renamed.links[0].b) == ("h/gpu0", "h/mlx5_0")
    assert len(known.joined(renamed).devices) == 2


def test_ids_of_ports_and_partitions_that_share_an_address_stay() -> None:
    known = Topology(
        hosts=(Host(host_id="h"),), nics=(nic("mlx5_0:1", "0000:05:00.0"), nic("mlx5_0:2", "0000:05:00.0"))
    )
    found = Topology(hosts=(Host(host_id="h"),), nics=(nic("rdma0", "0000:05:00.0"),))
    assert with_ids_of(known, found) == found
    part = Device(device_id="h/gpu0/part1", host_id="h", pci="0000:03:00.0", partition_of="h/gpu0")
    parts = Topology(hosts=(Host(host_id="h"),), devices=(gpu(0, "0000:03:00.0"), part))
    assert with_ids_of(Topology(hosts=(Host(host_id="h"),), devices=(gpu(7, "0000:03:00.0"),)), parts) == parts
