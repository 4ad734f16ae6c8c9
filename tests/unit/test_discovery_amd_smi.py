"""AMD through the Python library of ROCm: devices, hives, partitions, and what is refused of its answers."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest
from _amdsmi_library import PCIE, XGMI, AmdsmiLibrary, Processor, asic
from test_discovery_amd import tree, write

from wsync.discovery import amd
from wsync.discovery.amd_smi import probe
from wsync.discovery.kfd import read_kfd
from wsync.errors import ProbeError
from wsync.topology import DomainKind, Source, Topology

HIVE = 0x1234ABCD5678EF01


def whole(index: int, **changes: Any) -> Processor:
    """As `tree` of the tests of KFD has it."""
    told = {
        "bdf": f"0000:{0x0C + 0x10 * index:02x}:00.0",
        "node_id": 1 + index,
        "asic": asic(serial=f"0x{0xABC0 + index:016X}"),
        "compute": "SPX",
        "memory": "NPS1",
        "hive": HIVE,
        "numa_node": index % 2,
        "vram": 206141652992,
        "hip_uuid": f"GPU-{0xABC0 + index:016x}",
    }
    return Processor(**(told | changes))


def mesh(size: int, kind: int = XGMI, hops: int = 1, rates: tuple[int, int] = (64000, 64000)) -> dict[Any, Any]:
    return {frozenset(pair): (kind, hops, *rates) for pair in combinations(range(size), 2)}


def cut(gpus: int, partitions: int, memory: str = "NPS4") -> list[Processor]:
    """The partitions of each GPU; the library has their number in the place of the PCI function."""
    return [
        whole(
            gpu,
            bdf=f"0000:{0x0C + 0x10 * gpu:02x}:00.{part}",
            node_id=1 + gpu * partitions + part,
            compute="CPX",
            memory=memory,
        )
        for gpu in range(gpus)
        for part in range(partitions)
    ]


def found(monkeypatch: pytest.MonkeyPatch, processors: list[Processor], links: dict[Any, Any]) -> Topology:
    library = AmdsmiLibrary(processors, links).install(monkeypatch)
    topology = probe("h")
    assert topology is not None
    assert (library.opened, library.closed) == (1, 1)
    return topology


def test_whole_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = found(monkeypatch, [whole(i) for i in range(8)], mesh(8))
    gpu = topology.devices[3]
    assert (gpu.device_id, gpu.index, gpu.vendor, gpu.sku, gpu.architecture) == ("h/gpu3", 3, "amd", "MI300X", "gfx942")
    assert (gpu.pci, gpu.pci_id, gpu.numa_node) == ("0000:3c:00.0", "1002:74a1", 1)
    assert (gpu.memory_nbytes, gpu.name, gpu.uuid) == (206141652992, "AMD Instinct MI300X", "GPU-000000000000abc3")
    assert (gpu.num_links, gpu.link_nbytes_per_s, gpu.partition_mode) == (7, 64e9, "SPX/NPS1")
    assert gpu.facts["memory_nbytes"] is Source.DRIVER
    (hive,) = topology.domains
    assert (hive.kind, hive.domain_id, hive.nbytes_per_s) == (DomainKind.XGMI, f"xgmi-{HIVE:016x}", 448e9)
    assert hive.members == tuple(f"h/gpu{i}" for i in range(8))
    link = topology.link("h/gpu2", "h/gpu5")
    assert link is not None
    assert (link.kind, link.nbytes_per_s, link.facts) == ("XGMI", 64e9, {"nbytes_per_s": Source.DRIVER})
    assert topology.notes == ()


def test_it_tells_the_same_ids_and_links_as_the_tree_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So that a host may be read by either."""
    for partitions, processors in ((1, [whole(i) for i in range(4)]), (4, cut(2, 4))):
        gpus = 4 if partitions == 1 else 2
        root = tmp_path / str(partitions)
        write(root, tree(gpus=gpus, partitions=partitions, dies=4))
        kernel = read_kfd(root, host_id="h")
        library = found(monkeypatch, processors, mesh(len(processors)))
        for which in ("device_id", "index", "pci", "pci_id", "uuid", "partition_of", "num_links", "sku", "paths"):
            told = [getattr(device, which) for device in library.devices]
            assert told == [getattr(device, which) for device in kernel.devices], which
        assert [link.ends for link in library.links] == [link.ends for link in kernel.links]
        assert [(d.domain_id, d.members) for d in library.domains] == [(d.domain_id, d.members) for d in kernel.domains]


def test_trap_12_processors_are_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = found(monkeypatch, cut(2, 4), mesh(8))
    wholes = [device for device in topology.devices if not device.partition_of]
    assert [(one.device_id, one.index, one.num_links, one.pci) for one in wholes] == [
        ("h/gpu0", -1, 1, "0000:0c:00.0"),
        ("h/gpu1", -1, 1, "0000:1c:00.0"),
    ]
    parts = [device for device in topology.devices if device.partition_of]
    assert [(one.device_id, one.index) for one in parts] == [(f"h/gpu{i // 4}/part{i % 4}", i) for i in range(8)]
    assert {(one.partition_mode, one.memory_nbytes, one.num_links) for one in parts} == {("CPX/NPS4", 0, 0)}
    assert topology.domains[0].members == tuple(one.device_id for one in parts)
    assert topology.domains[0].nbytes_per_s == 0, "partitions share their GPU's links"


def test_without_serial_numbers_partitions_go_by_address_and_without_nodes_by_the_librarys_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processors = [msgspec.structs.replace(one, asic=asic(serial="N/A"), node_id="N/A") for one in cut(2, 4)]
    topology = found(monkeypatch, processors, {})
    assert [d.partition_of for d in topology.devices if d.partition_of] == ["h/gpu0"] * 4 + ["h/gpu1"] * 4
    assert [d.index for d in topology.devices if d.partition_of] == list(range(8))


def test_nodes_give_the_order_and_not_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = found(monkeypatch, [whole(0, node_id=7), whole(1, node_id=3)], mesh(2))
    assert [(device.device_id, device.pci) for device in topology.devices] == [
        ("h/gpu0", "0000:1c:00.0"),
        ("h/gpu1", "0000:0c:00.0"),
    ]


def test_what_a_gpu_does_not_tell_stays_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = {"compute": None, "memory": None, "hive": None, "numa_node": None, "vram": None, "hip_uuid": None}
    bare = asic(market_name="N/A", target_graphics_version="gfx0", asic_serial="N/A")
    topology = found(monkeypatch, [whole(0, asic=bare, **silent), whole(1, numa_node=2**32 - 1, memory="N/A")], {})
    gpu, other = topology.devices
    assert (gpu.partition_mode, gpu.numa_node, gpu.uuid, gpu.name) == ("", -1, "", "")
    assert (gpu.sku, gpu.facts["memory_nbytes"]) == ("MI300X", Source.TABLE)
    assert (other.numa_node, other.partition_mode) == (-1, "SPX")
    assert (topology.links, topology.domains[0].members if topology.domains else ()) == ((), ("h/gpu1",))


def test_a_link_that_passes_another_gpu_is_none_and_pcie_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    links = mesh(3, hops=2) | {
        frozenset((0, 1)): (XGMI, 1, 50000, 200000),
        frozenset((1, 2)): (PCIE, 2, 0, 0),
    }
    topology = found(monkeypatch, [whole(i) for i in range(3)], links)
    assert [(link.a, link.b, link.kind, link.nbytes_per_s) for link in topology.links] == [
        ("h/gpu0", "h/gpu1", "XGMI", 200e9),
        ("h/gpu1", "h/gpu2", "PCIE", 0),
    ]
    assert (topology.devices[0].num_links, topology.devices[0].link_nbytes_per_s) == (4, 50e9)
    assert topology.notes[-1] == f"h/gpu2: in hive {HIVE:016x}, but with no xGMI link to the others"


@pytest.mark.parametrize(
    ("processor", "says"),
    [
        (whole(0, asic={"market_name": "AMD Instinct MI300X"}), "amdsmi_get_gpu_asic_info"),
        (whole(0, asic=asic(vendor_id="N/A")), "'N/A', which is no PCI id"),
        (whole(0, asic=asic(device_id=0x74A1) | {"device_id": 29857}), "amdsmi_get_gpu_asic_info"),
        (whole(0, bdf="N/A"), "no PCI address"),
        (whole(0, compute="OPX"), "OPX"),
        (whole(0, memory="NPS16"), "NPS16"),
        (whole(0, hive="none"), "amdsmi_get_xgmi_info"),
    ],
)
def test_answers_of_another_form_are_refused(monkeypatch: pytest.MonkeyPatch, processor: Processor, says: str) -> None:
    library = AmdsmiLibrary([processor]).install(monkeypatch)
    with pytest.raises(ProbeError, match=says):
        probe("h")
    assert library.closed == 1


def test_an_error_of_the_library_is_refused_and_one_at_its_start_means_that_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    AmdsmiLibrary([whole(0)], errors={"amdsmi_get_processor_handles": 12}).install(monkeypatch)
    with pytest.raises(ProbeError, match=r"amdsmi cannot be read \(Error code: 12 \| an error\)"):
        probe("h")
    AmdsmiLibrary([whole(0)], errors={"amdsmi_init": 34}).install(monkeypatch)
    assert probe("h") is None


def test_a_version_that_does_not_name_its_links_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = AmdsmiLibrary([whole(0)]).install(monkeypatch)
    library.AmdSmiLinkType = None  # type: ignore[misc,assignment]
    with pytest.raises(ProbeError, match="types of links"):
        probe("h")


def test_no_library_or_no_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert probe("h") is None
    monkeypatch.delitem(sys.modules, "amdsmi")
    (tmp_path / "amdsmi.py").write_text("print('Unable to find libamd_smi.so')\n{}['libamd_smi.so']\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert probe("h") is None
    assert capsys.readouterr().out == ""
    assert found(monkeypatch, [], {}) == Topology()


def test_the_library_is_asked_where_there_is_no_tree_and_before_the_tool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    files = tree(gpus=2)
    write(tmp_path / "pci", {name: text for name, text in files.items() if name.startswith("bus/")})
    AmdsmiLibrary([whole(0), whole(1)], mesh(2)).install(monkeypatch)
    told = amd.probe("h", sysfs=tmp_path / "pci")
    assert [device.facts["pci"] for device in told.devices] == [Source.DRIVER] * 2
    write(tmp_path / "kfd", files)
    told = amd.probe("h", sysfs=tmp_path / "kfd")
    assert [device.facts["pci"] for device in told.devices] == [Source.SYSFS] * 2
    assert amd.probe("h", sysfs=tmp_path / "empty") == Topology(), "nothing is loaded where there is no such GPU"
