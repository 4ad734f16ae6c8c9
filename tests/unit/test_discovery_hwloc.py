"""The XML files of hwloc: NUMA nodes, the PCI tree, names of GPUs and NICs in the numbers of hwloc 2 and 3."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from _samples import sample
from hypothesis import given
from hypothesis import strategies as st

from wsync.discovery.hwloc import probe, read_hwloc
from wsync.errors import ProbeError
from wsync.topology import Device, Host, Link, Nic, NicKind, Source, Topology

TYPES = {"2.0": (1, 2, 3), "3.0": (12, 16, 32)}
"""Of OS devices: GPU, network, OpenFabrics."""


def bridge(busid: str, inside: str) -> str:
    return (
        f'<object type="Bridge" bridge_type="1-1" pci_busid="{busid}" bridge_pci="0000:[01-ff]"'
        f' pci_type="0604 [1000:c010] [1000:a096] b0">{inside}</object>'
    )


def device(busid: str, kind: str, pci_id: str, inside: str = "") -> str:
    vendor, number = pci_id.split(":")
    text = f"{kind} [{vendor}:{number}] [{vendor}:0001] a1"
    info = '<info name="PCIVendor" value="v"/>'
    return f'<object type="PCIDev" pci_busid="{busid}" pci_type="{text}">{info}{inside}</object>'


def os_device(name: str, kind: int, **infos: str) -> str:
    inside = "".join(f'<info name="{key}" value="{value}"/>' for key, value in infos.items())
    return f'<object type="OSDev" name="{name}" osdev_type="{kind}">{inside}</object>'


def package(node: int, inside: str) -> str:
    cpus = f"0x{0xFF << 8 * node:08x}"
    return (
        f'<object type="Package" os_index="{node}" cpuset="{cpus}">'
        f'<object type="NUMANode" os_index="{node}" cpuset="{cpus}" local_memory="1000000"/>'
        f'<object type="L3Cache" cpuset="{cpus}"><object type="Core"><object type="PU" os_index="{node}"/></object>'
        f"</object>{inside}</object>"
    )


def document(inside: str, *, version: str = "2.0") -> str:
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n'
        f'<topology version="{version}"><object type="Machine" os_index="0" cpuset="0x0000ffff">{inside}</object>'
        '<support name="discovery.pu"/></topology>'
    )


def machine(buses: Sequence[int], nic: str = "mlx5_{}", *, version: str = "2.0", indexes: bool = True) -> str:
    """Two sockets, each with a switch of two GPUs and two NICs, in turn, and a display of the board."""
    gpu_type, network, verbs = TYPES[version]
    sockets = []
    for node in (0, 1):
        leaves = []
        for i in (2 * node, 2 * node + 1):
            infos = {"GPUVendor": "NVIDIA Corporation", "GPUModel": "NVIDIA H100 80GB HBM3", "NVIDIAUUID": f"GPU-{i}"}
            driver = os_device(f"nvml{3 - i}", gpu_type, **infos) if indexes else ""
            port = os_device(f"ib{i}", network, Address="00:01") + os_device(nic.format(i), verbs, Port1State="4")
            gpu = device(f"0000:{buses[i]:02x}:00.0", "0302", "10de:2330", driver)
            leaves += [bridge(f"0000:{node}2:{2 * i:02x}.0", gpu)]
            ports = device(f"0000:{buses[i] + 0x30:02x}:00.0", "0207", "15b3:1021", port)
            leaves += [bridge(f"0000:{node}2:{2 * i + 1:02x}.0", ports)]
        switch = bridge(f"0000:{node}0:01.0", bridge(f"0000:{node}1:00.0", "".join(leaves)))
        board = device("0000:03:00.0", "0300", "1a03:2000") if node == 0 else ""
        root = f'<object type="Bridge" bridge_type="0-1" depth="0" bridge_pci="0000:[{node}0-{node}f]">'
        sockets.append(package(node, f"{root}{switch}{board}</object>"))
    return document("".join(sockets), version=version)


def kinds(topology: Topology) -> dict[tuple[str, ...], str]:
    return {tuple(sorted(link.ends)): link.kind for link in topology.links}


BUSES = (0x18, 0x2A, 0x3A, 0x5D)


@pytest.mark.parametrize("version", ["2.0", "3.0"])
def test_a_machine_of_two_sockets(version: str) -> None:
    found = read_hwloc(machine(BUSES, version=version), host_id="h")
    (host,) = found.hosts
    assert (host.num_numa_nodes, host.memory_nbytes, host.facts["memory_nbytes"]) == (2, 2000000, Source.PLATFORM)
    assert [(d.device_id, d.index, d.pci, d.numa_node) for d in found.devices] == [
        ("h/gpu3", 3, "0000:18:00.0", 0),
        ("h/gpu2", 2, "0000:2a:00.0", 0),
        ("h/gpu1", 1, "0000:3a:00.0", 1),
        ("h/gpu0", 0, "0000:5d:00.0", 1),
    ]
    gpu = found.devices[0]
    assert (gpu.name, gpu.sku, gpu.uuid, gpu.pci_id) == ("NVIDIA H100 80GB HBM3", "H100-SXM5", "GPU-0", "10de:2330")
    assert (gpu.facts["numa_node"], gpu.facts["pci"]) == (Source.DECLARED, Source.PLATFORM)
    assert [(n.nic_id, n.netdev, n.kind, n.numa_node) for n in found.nics] == [
        (f"h/mlx5_{i}", f"ib{i}", NicKind.INFINIBAND, i // 2) for i in range(4)
    ]
    links = kinds(found)
    assert (links["h/gpu3", "h/mlx5_0"], links["h/gpu3", "h/mlx5_1"]) == ("PIX", "PIX")
    assert (links["h/gpu2", "h/gpu3"], links["h/gpu1", "h/gpu2"]) == ("PIX", "SYS")
    assert links["h/gpu3", "h/mlx5_2"] == "SYS"
    assert found.notes == ()


def test_without_a_driver_in_the_file_gpus_go_by_address() -> None:
    found = read_hwloc(machine(BUSES, indexes=False), host_id="h")
    assert [(d.device_id, d.index, d.sku) for d in found.devices] == [(f"h/gpu{i}", -1, "H100-SXM5") for i in range(4)]


@pytest.mark.parametrize(
    ("pci_id", "kind", "name", "sku"),
    [
        ("10de:1db8", "0302", "gpu0", ""),
        ("1002:74a1", "1200", "gpu0", "MI300X"),
        ("1ae0:0063", "0880", "tpu0", "TPU-v5e"),
        ("1d0f:7364", "0880", "neuron0", "Trn2"),
        ("1da3:1060", "1200", "gaudi0", "Gaudi3"),
    ],
)
def test_accelerators_of_each_vendor(pci_id: str, kind: str, name: str, sku: str) -> None:
    found = read_hwloc(document(device("0000:10:00.0", kind, pci_id)), host_id="h")
    assert [(one.device_id, one.sku) for one in found.devices] == [(f"h/{name}", sku)]
    assert found.devices[0].numa_node == -1


def test_a_display_is_an_accelerator_if_a_driver_for_them_has_it() -> None:
    amd = device("0000:10:00.0", "0380", "1002:1234", os_device("rsmi0", 1))
    board = device("0000:11:00.0", "0300", "1a03:2000", os_device("card1", 1))
    found = read_hwloc(document(amd + board), host_id="h")
    assert [(one.device_id, one.index) for one in found.devices] == [("h/gpu0", 0)]


def test_nics_without_verbs_are_ethernet_and_without_names_go_by_address() -> None:
    both = os_device("enp1s0f0", 2) + os_device("enp1s0f1", 2)
    several = os_device("ens5", 2) + os_device("rdmap0s6", 3) + os_device("rdmap0s7", 3)
    inside = (
        device("0000:10:00.0", "0200", "8086:1521", both)
        + device("0000:11:00.0", "0200", "1d0f:efa1", os_device("rdmap16s27", 3))
        + device("0000:12:00.0", "0200", "15b3:1021", several)
        + device("0000:13:00.0", "0207", "15b3:1021")
        + device("0000:14:00.0", "0280", "8086:7a70", os_device("wlan0", 2))
    )
    found = read_hwloc(document(inside), host_id="h")
    assert [(nic.name, nic.netdev, nic.kind) for nic in found.nics] == [
        ("enp1s0f0", "enp1s0f0", NicKind.ETHERNET),
        ("enp1s0f1", "enp1s0f1", NicKind.ETHERNET),
        ("rdmap16s27", "", NicKind.EFA),
        ("rdmap0s6", "", None),
        ("rdmap0s7", "", None),
        ("", "", NicKind.INFINIBAND),
    ]
    assert found.nics[-1].nic_id == "h/0000:13:00.0"


def test_nodes_of_gpu_memory_are_not_of_the_host_and_are_nobodys_node() -> None:
    """A GB200 tray: the memory of its GPUs has nodes without processors."""
    extra = '<object type="NUMANode" os_index="2" cpuset="0x0" local_memory="500"/>'
    text = document(package(0, extra + device("0008:06:00.0", "0302", "10de:2941")))
    found = read_hwloc(text, host_id="h")
    assert (found.hosts[0].num_numa_nodes, found.hosts[0].memory_nbytes) == (1, 1000000)
    assert found.devices[0].numa_node == 0


def test_below_an_object_of_several_nodes_the_node_is_unknown() -> None:
    node = '<object type="NUMANode" os_index="{0}" cpuset="0x000000f{0}" local_memory="5"/>'
    gpus = device("0000:10:00.0", "0302", "10de:2330") + device("0000:11:00.0", "0302", "10de:2330")
    cached = f'<object type="MemCache">{node.format(1)}</object>'
    found = read_hwloc(document(node.format(0) + cached + gpus), host_id="h")
    assert [one.numa_node for one in found.devices] == [-1, -1]
    assert found.links == (), "two root complexes, and nobody knows of which node"
    inner = f'<object type="Group">{node.format(2)}{gpus}</object>'
    found = read_hwloc(document(node.format(0) + cached + inner), host_id="h")
    assert [one.numa_node for one in found.devices] == [2, 2]
    assert [link.kind for link in found.links] == ["NODE"]


def test_the_probe_reads_a_named_file_alone_and_in_known_ids(tmp_path: Path) -> None:
    assert probe("h", variables={}) == Topology()
    file = tmp_path / "machine.xml"
    file.write_text(machine(BUSES))
    variables = {"HWLOC_XMLFILE": str(file)}
    assert probe("h", variables=variables) == read_hwloc(file.read_text(), host_id="h")
    known = Topology(
        hosts=(Host(host_id="h"),),
        devices=(
            Device(device_id="h/gpu0", host_id="h", pci="0000:18:00.0"),
            Device(device_id="h/gpu1", host_id="h", pci="0000:3a:00.0"),
        ),
        nics=(Nic(nic_id="h/net1", host_id="h", pci="0000:48:00.0"),),
        links=(Link(a="h/gpu0", b="h/gpu1", kind="NV18"),),
    )
    found = probe("h", known=known, variables=variables)
    assert [(one.device_id, one.pci) for one in found.devices] == [
        ("h/gpu0", "0000:18:00.0"),
        ("h/gpu1", "0000:3a:00.0"),
    ]
    assert kinds(found) == {("h/gpu0", "h/net1"): "PIX", ("h/gpu1", "h/net1"): "SYS"}
    (note,) = found.notes
    assert note.startswith("hwloc's file: no device or NIC of h is the one at 0000:2a:00.0, 0000:5d:00.0")
    with pytest.raises(ProbeError, match=r"none\.xml cannot be read"):
        probe("h", variables={"HWLOC_XMLFILE": str(tmp_path / "none.xml")})


DEEP = '<object type="Bridge" bridge_type="1-1" pci_busid="0000:01:00.0" pci_type="0604 [1000:c010] [1000:a096] b0">'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no file of hwloc"),
        (machine(BUSES)[:900], "no file of hwloc"),
        ("<system/>", "version 2 or 3"),
        ('<topology><object type="System"/></topology>', "version 2 or 3"),
        (document("").replace('version="2.0"', ""), "version 2 or 3"),
        (document("").replace("Machine", "System"), "version 2 or 3"),
        (machine(BUSES).replace("0000:18:00.0", "here"), "'here' is no PCI address"),
        (machine(BUSES).replace("0000:18:00.0", "0000:2a:00.0"), "one PCI address"),
        (machine(BUSES).replace("0302 [10de:2330]", "GPU"), "has pci_type 'GPU"),
        (machine(BUSES).replace('os_index="1" cpuset="0x0000ff00" l', 'os_index="x" cpuset="0x1" l'), "NUMA node"),
        (machine(BUSES).replace('local_memory="1000000"', 'local_memory="much"'), "local_memory"),
        (machine(BUSES).replace("nvml3", "nvml2"), "contradicts itself"),
        (document(DEEP * 70 + "</object>" * 70), "64 levels"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_one_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ProbeError, match=problem):
        read_hwloc(text, host_id="h")


PIECES = ['<object type="Package">', '<object type="Group">', "</object>", device("0000:01:00.0", "0302", "10de:2330")]
PIECES += [device("0000:02:00.0", "0207", "15b3:1021"), '<object type="NUMANode" os_index="0" cpuset="0x1"/>', DEEP]


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.text(max_size=20))
def test_any_tree_gives_a_topology_or_a_probe_error(pieces: list[str], text: str) -> None:
    inside = "".join(pieces)
    opened = inside.count("<object") - inside.count("</object") - inside.count("/>") + inside.count('value="v"/>')
    for whole in (document(inside + "</object>" * opened), text, document(text)):
        try:
            assert isinstance(read_hwloc(whole, host_id="h"), Topology)
        except ProbeError:
            pass


def test_the_real_dgx_2() -> None:
    found = read_hwloc(sample("hwloc-nvidiaDGX2.xml"), host_id="h")
    (host,) = found.hosts
    assert (host.num_numa_nodes, host.memory_nbytes) == (2, 810234351616 + 811737923584)
    assert [(d.device_id, d.index, d.numa_node) for d in found.devices] == [(f"h/gpu{i}", i, i // 8) for i in range(16)]
    assert {(d.pci_id, d.name, d.sku) for d in found.devices} == {("10de:1db8", "Tesla V100-SXM3-32GB-H", "")}
    assert found.devices[0].uuid == "GPU-d3977428-7a30-086b-2e20-5c1eeed647c6"
    assert found.nics == (), "the file was written without them"
    # As `nvidia-smi topo -m` would show it without NVLink: pairs below one switch, fours below two, eights by socket.
    assert Counter(link.kind for link in found.links) == {"PIX": 8, "PXB": 4 * 4, "NODE": 2 * 16, "SYS": 64}
    assert kinds(found)["h/gpu0", "h/gpu1"] == "PIX"
    assert found.domains == ()
    assert all("no SKU of the table (10de:1db8)" in note for note in found.notes)
