"""NVIDIA through NVML: what of its answers is believed, and that the real nvidia-ml-py is asked the right questions."""

from __future__ import annotations

import sys
import types
from typing import Any

import msgspec
import pytest
from _nvml_library import NvmlLibrary
from hypothesis import given
from hypothesis import strategies as st

from wsync.discovery import nvml
from wsync.discovery.nvidia import probe, read_nvml
from wsync.discovery.nvlink import FABRIC_STATES, Fabric, islands
from wsync.discovery.nvml import Gpu, GpuPair, MigDevice, NvLink, NvmlReading, take_reading
from wsync.errors import ProbeError
from wsync.topology import Source, Topology

UUID = "3143b15b-c2cd-192b-28cc-9b5473fb5b93"
ZERO = "00000000-0000-0000-0000-000000000000"
SWITCHED = (NvLink(remote="switch", nbytes_per_s=26.562e9),) * 18


def gpu(index: int, **fields: Any) -> Gpu:
    said = {
        "pci": f"0000:{0x18 + index:02x}:00.0",
        "pci_id": "10de:2330",
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": f"GPU-{index}",
        "memory_nbytes": 81559 << 20,
        "compute_capability": (9, 0),
        "numa_nodes": (index // 4,),
        "links": SWITCHED,
    }
    return Gpu(index=index, **(said | fields))


def pairs(count: int, off: tuple[int, ...] = (), **fields: Any) -> list[GpuPair]:
    return [
        GpuPair(
            a=a, b=b, **({"ancestor": 50, "nvlink_status": 5 if {a, b} & set(off) else 0, "read_status": 0} | fields)
        )
        for a in range(count)
        for b in range(a + 1, count)
    ]


def read(gpus: list[Gpu], between: list[GpuPair]) -> Topology:
    return read_nvml(NvmlReading(gpus=tuple(gpus), pairs=tuple(between)), host_id="h")


def completed(**fields: Any) -> Fabric:
    return Fabric(**({"state": "completed", "status": "success", "cluster_uuid": UUID, "clique_id": 7} | fields))


def members(topology: Topology) -> dict[str, list[str]]:
    return {domain.domain_id: [m.split("/gpu")[1] for m in domain.members] for domain in topology.domains}


def test_an_hgx_box_is_one_domain_of_known_rate() -> None:
    topology = read([gpu(n) for n in range(8)], pairs(8))
    assert members(topology) == {"h/nvlink0": list("01234567")}
    assert topology.domains[0].nbytes_per_s == pytest.approx(18 * 26.562e9)
    device = topology.devices[5]
    assert (device.sku, device.architecture, device.numa_node, device.num_links) == ("H100-SXM5", "sm_90", 1, 18)
    assert device.facts["memory_nbytes"] is Source.DRIVER
    link = topology.link("h/gpu0", "h/gpu7")
    assert (link.kind, link.nbytes_per_s) == ("NV18", pytest.approx(478.1e9, rel=1e-3))
    assert len(topology.links) == 28
    assert topology.notes == ()


@pytest.mark.parametrize(
    "fabric",
    [
        completed(cluster_uuid=ZERO, clique_id=0),
        completed(status="insufficient resources"),
        completed(status="insufficient resources", cluster_uuid=ZERO),
        completed(state="in progress"),
        completed(state="not started", cluster_uuid=ZERO),
        completed(cluster_uuid=""),
    ],
)
def test_trap_04_a_fabric_is_believed_only_if_completed_and_success_and_not_zero(fabric: Fabric) -> None:
    topology = read([gpu(n, fabric=fabric) for n in range(2)], pairs(2))
    assert members(topology) == {"h/nvlink0": ["0", "1"]}
    assert sum(": fabric not believed" in note for note in topology.notes) == 2


@pytest.mark.parametrize("clique", [0, 4026, 0x7FFE])
def test_trap_05_the_domain_is_cluster_and_clique_whatever_the_clique_is(clique: int) -> None:
    topology = read([gpu(n, fabric=completed(clique_id=clique)) for n in range(4)], pairs(4))
    assert members(topology) == {f"{UUID}.{clique}": list("0123")}


def test_trap_05_two_cliques_of_one_rack_are_two_domains() -> None:
    gpus = [gpu(n, fabric=completed(clique_id=n // 2)) for n in range(4)]
    assert members(read(gpus, pairs(4))) == {f"{UUID}.0": ["0", "1"], f"{UUID}.1": ["2", "3"]}


def test_a_host_with_one_gpu_is_in_the_fabric_that_it_names() -> None:
    assert members(read([gpu(0, fabric=completed())], [])) == {f"{UUID}.7": ["0"]}
    assert members(read([gpu(0)], [])) == {}


@pytest.mark.parametrize("fabric", [None, completed()])
@pytest.mark.parametrize("links", [(), SWITCHED, None])
def test_trap_06_a_gpu_off_nvlink_is_in_no_island(fabric: Fabric | None, links: tuple[NvLink, ...] | None) -> None:
    gpus = [gpu(n, fabric=fabric, **({"links": links} if n == 2 else {})) for n in range(8)]
    topology = read(gpus, pairs(8, off=(2,)))
    assert list(members(topology).values()) == [list("0134567")]
    assert topology.link("h/gpu2", "h/gpu3").kind == "SYS"
    if links == ():
        assert "h/gpu2: none of the 18 NVLinks of a H100-SXM5 is up" in topology.notes


def test_trap_06_access_without_a_link_that_is_up_is_not_believed() -> None:
    gpus = [gpu(0), gpu(1), gpu(2, links=())]
    topology = read(gpus, pairs(3))
    assert members(topology) == {"h/nvlink0": ["0", "1"]}
    assert sum("not believed" in note for note in topology.notes) == 2


def test_a_fabric_whose_gpus_here_form_two_islands_is_not_believed() -> None:
    across = [pair for pair in pairs(4) if (pair.a < 2) != (pair.b < 2)]
    between = [msgspec.structs.replace(p, nvlink_status=5) if p in across else p for p in pairs(4)]
    topology = read([gpu(n, fabric=completed()) for n in range(4)], between)
    assert members(topology) == {"h/nvlink0": ["0", "1"], "h/nvlink1": ["2", "3"]}
    assert any("not all joined" in note for note in topology.notes)


def test_bridged_pairs_are_islands_of_their_own() -> None:
    def bridged(n: int) -> Gpu:
        return gpu(n, pci_id="10de:20f1", name="", links=(NvLink(remote="gpu", remote_pci=gpu(n ^ 1).pci),) * 12)

    between = [GpuPair(a=p.a, b=p.b, ancestor=40, nvlink_status=None) for p in pairs(4)]
    topology = read([bridged(n) for n in range(4)], between)
    assert members(topology) == {"h/nvlink0": ["0", "1"], "h/nvlink1": ["2", "3"]}
    assert topology.link("h/gpu0", "h/gpu1").kind == "NV12"
    assert topology.link("h/gpu0", "h/gpu2").kind == "NODE"
    assert topology.domains[0].nbytes_per_s == 0, "nobody told the rate of a link"


def test_links_to_a_switch_alone_do_not_join() -> None:
    topology = read([gpu(0), gpu(1)], pairs(2, nvlink_status=None))
    assert members(topology) == {}
    assert any("is not said" in note for note in topology.notes)


def test_links_whose_ends_a_virtual_machine_hides_count_where_the_driver_grants_access() -> None:
    hidden = (NvLink(nbytes_per_s=25e9),) * 12
    topology = read([gpu(n, links=hidden) for n in range(2)], pairs(2))
    assert topology.link("h/gpu0", "h/gpu1").kind == "NV12"
    assert members(read([gpu(n, links=hidden) for n in range(2)], pairs(2, off=(0,)))) == {}


def test_where_links_cannot_be_read_the_driver_is_believed_and_the_count_is_unknown() -> None:
    topology = read([gpu(0, links=None), gpu(1, links=None)], pairs(2))
    assert members(topology) == {"h/nvlink0": ["0", "1"]}
    link = topology.link("h/gpu0", "h/gpu1")
    assert (link.kind, link.nbytes_per_s, topology.devices[0].num_links) == ("NV", 0, 0)


def test_trap_02_of_several_numa_nodes_the_first_is_the_cpu() -> None:
    assert read([gpu(0, numa_nodes=(1, *range(19, 26)))], []).devices[0].numa_node == 1
    assert read([gpu(0, numa_nodes=())], []).devices[0].numa_node == -1


def test_trap_07_in_a_grace_tray_the_pci_domain_tells_the_numa_node_where_the_driver_does_not() -> None:
    said = {"pci": "0018:06:00.0", "pci_id": "10de:2941", "name": "NVIDIA GB200", "memory_nbytes": 189471 << 20}
    device = read([gpu(0, numa_nodes=(), **said)], []).devices[0]
    assert (device.numa_node, device.facts["numa_node"]) == (1, Source.TABLE)
    device = read([gpu(0, numa_nodes=(0,), **said)], []).devices[0]
    assert (device.numa_node, device.facts["numa_node"]) == (0, Source.DRIVER)


def test_mig_partitions_are_devices_of_their_own_and_share_no_nvlink() -> None:
    parts = tuple(
        MigDevice(index=n, name=f"NVIDIA H100 80GB HBM3 MIG {n}g.10gb", uuid=f"MIG-{n}", memory_nbytes=10 << 30)
        for n in (1, 3)
    )
    topology = read([gpu(0, is_mig=True, mig_devices=parts, fabric=completed()), gpu(1)], pairs(2))
    assert topology.domains == ()
    part = topology.devices[3]
    assert (part.device_id, part.partition_of, part.partition_mode) == ("h/gpu0/part3", "h/gpu0", "3g.10gb")
    assert (part.memory_nbytes, part.sku, part.memory_nbytes_per_s) == (10 << 30, "H100-SXM5", 0)
    assert topology.devices[0].partition_mode == "mig"


def test_pairs_without_peer_access_are_noted_in_one_sentence() -> None:
    topology = read([gpu(n, links=None) for n in range(3)], pairs(3, off=(0, 1, 2), read_status=1))
    (note,) = topology.notes
    assert note == "no peer-to-peer reads (chipset not supported): h/gpu0-h/gpu1, h/gpu0-h/gpu2, h/gpu1-h/gpu2"


def test_a_device_that_the_table_does_not_have_is_described_by_what_was_read() -> None:
    device = read([gpu(0, pci_id="10de:3000", name="NVIDIA R100", compute_capability=(11, 0))], []).devices[0]
    assert (device.sku, device.architecture, device.num_links) == ("", "sm_110", 18)
    assert device.link_nbytes_per_s == 26.562e9


@pytest.mark.parametrize("between", [[GpuPair(a=0, b=0)], [GpuPair(a=0, b=5)]])
def test_a_reading_that_contradicts_itself_is_refused(between: list[GpuPair]) -> None:
    with pytest.raises(ProbeError):
        read([gpu(0), gpu(1)], between)
    with pytest.raises(ProbeError):
        read([gpu(0), gpu(0)], [])


def test_what_nvml_says_arrives_as_it_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (MigDevice(index=4, name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", uuid="MIG-4", memory_nbytes=10 << 30),)
    gpus = [
        gpu(0, fabric=completed()),
        gpu(1, links=SWITCHED[:17], fabric=completed(cluster_uuid=ZERO, clique_id=0)),
        gpu(2, is_mig=True, mig_devices=parts),
        gpu(3, links=None, numa_nodes=(0, 3, 70), compute_capability=None),
        gpu(4, links=(NvLink(remote="gpu", remote_pci="0000:18:00.0", nbytes_per_s=25e9), NvLink(remote="cpu"))),
        gpu(5, links=(NvLink(),)),
    ]
    between = pairs(6, ancestor=None)
    library = NvmlLibrary(gpus, between).install(monkeypatch)
    reading = take_reading()
    assert reading == NvmlReading(gpus=tuple(gpus), pairs=tuple(between))
    assert library.shutdowns == 1
    assert probe("h") == read_nvml(reading, host_id="h")


def test_a_fabric_status_that_is_an_error_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    NvmlLibrary([gpu(0, fabric=completed(status="bad"))], []).install(monkeypatch)
    assert take_reading().gpus[0].fabric.status not in ("", "success")
    assert take_reading().gpus[0].fabric.key == ""


def test_a_lost_gpu_is_a_note_and_the_others_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {("nvmlDeviceGetMemoryInfo", 1): 15}
    NvmlLibrary([gpu(n) for n in range(3)], pairs(3), errors).install(monkeypatch)
    topology = probe("h")
    assert [device.index for device in topology.devices] == [0, 2]
    assert topology.notes == ("h: GPU 1 cannot be read (GPU is lost)",)


@pytest.mark.parametrize(
    "call", ["nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetMemoryAffinity", "nvmlDeviceGetP2PStatus"]
)
def test_a_driver_without_a_call_leaves_its_facts_unknown(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    NvmlLibrary([gpu(n, fabric=completed()) for n in range(2)], pairs(2), {(call, -1): 13}).install(monkeypatch)
    assert len(probe("h").devices) == 2


@pytest.mark.parametrize("code", [12, 9])  # library not found, driver not loaded
def test_no_driver_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, code: int) -> None:
    monkeypatch.setattr(nvml, "CONTROL_DEVICE", str(tmp_path / "nvidiactl"))
    NvmlLibrary([], [], {("nvmlInitWithFlags", -1): code}).install(monkeypatch)
    assert probe("h") == Topology()
    (tmp_path / "nvidiactl").touch()
    with pytest.raises(ProbeError, match="NVML cannot be started"):
        probe("h")


@pytest.mark.parametrize("call", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2"])
def test_a_driver_that_fails_is_a_named_error(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    NvmlLibrary([gpu(0)], [], {(call, -1): 18}).install(monkeypatch)  # driver and library of two versions
    with pytest.raises(ProbeError, match="NVML cannot be"):
        probe("h")


def test_without_the_python_library_the_probe_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(nvml, "CONTROL_DEVICE", str(tmp_path / "nvidiactl"))
    assert probe("h") == Topology()
    (tmp_path / "nvidiactl").touch()
    with pytest.raises(ProbeError, match="pip install nvidia-ml-py"):
        probe("h")


def test_an_old_python_library_without_fabric_records_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    NvmlLibrary([gpu(0, fabric=completed())], []).install(monkeypatch)
    old = types.ModuleType("pynvml")
    old.__dict__.update({k: v for k, v in vars(pynvml).items() if "FabricInfo" not in k})
    monkeypatch.setitem(sys.modules, "pynvml", old)
    assert take_reading().gpus[0].fabric is None


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.tuples(*[st.integers(0, n - 1)] * 2)))))
def test_islands_are_disjoint_and_every_pair_in_one_is_joined(case: tuple[int, set[tuple[int, int]]]) -> None:
    count, edges = case
    names = [str(n) for n in range(count)]
    joined = {frozenset((str(a), str(b))) for a, b in edges}
    found = islands(names, lambda a, b: frozenset((a, b)) in joined)
    assert sorted(name for island in found for name in island) == names
    assert all(frozenset((a, b)) in joined for island in found for a in island for b in island if a != b)


fabrics = st.builds(
    Fabric,
    state=st.sampled_from(FABRIC_STATES),
    status=st.sampled_from(["success", "insufficient resources"]),
    cluster_uuid=st.sampled_from([UUID, ZERO, ""]),
    clique_id=st.integers(0, 2),
)
links = st.lists(
    st.builds(
        NvLink,
        remote=st.sampled_from(["gpu", "switch", "cpu", ""]),
        remote_pci=st.sampled_from(["", *(gpu(n).pci for n in range(4))]),
        nbytes_per_s=st.sampled_from([0.0, 25e9, 50e9]),
    ),
    max_size=3,
).map(tuple)


@given(st.data())
def test_any_reading_gives_domains_whose_pairs_are_joined(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 4))
    gpus = [
        gpu(
            n,
            fabric=data.draw(st.none() | fabrics),
            links=data.draw(st.none() | links),
            pci_id=data.draw(st.sampled_from(["10de:2330", "10de:26b9", "10de:ffff"])),
            is_mig=data.draw(st.booleans()),
        )
        for n in range(count)
    ]
    statuses = st.sampled_from([None, 0, 5, 99])
    between = [
        GpuPair(a=p.a, b=p.b, ancestor=data.draw(st.sampled_from([None, 0, 50, 77])), nvlink_status=data.draw(statuses),
                read_status=data.draw(statuses))
        for p in pairs(count)
    ]  # fmt: skip
    topology = read(gpus, between)
    for domain in topology.domains:
        for a in domain.members:
            for b in domain.members:
                assert a == b or topology.link(a, b).kind.startswith("NV")
    in_one = [member for domain in topology.domains for member in domain.members]
    assert len(in_one) == len(set(in_one))
