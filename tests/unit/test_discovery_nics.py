"""NICs: verbs devices and Ethernet from sysfs, and from captured text of the InfiniBand and libfabric tools."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from _samples import sample
from _sysfs import Sysfs, port
from hypothesis import given
from hypothesis import strategies as st

from wsync.discovery import nics
from wsync.discovery.ib_text import read_fi_info, read_ibstat, read_ibv_devinfo
from wsync.discovery.nics import read_nics
from wsync.errors import ProbeError
from wsync.topology import Nic, NicKind, Source, Topology

CX7 = "15b3:1021"
GBIT = 1e9 / 8


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path)


def cx7(sysfs: Sysfs, name: str, bus: str, *, numa_node: int = 0, files: dict[str, str] | None = None) -> Path:
    """A ConnectX-7 of one port on a bus of its own below the root complex."""
    function = sysfs.function(
        "pci0000:00", f"0000:00:{bus}.0", f"0000:{bus}:00.0", pci_id=CX7, numa_node=numa_node, driver="mlx5_core"
    )
    sysfs.rdma(name, function, files or port())
    return function


def by_name(topology: Topology) -> dict[str, Nic]:
    return {nic.name: nic for nic in topology.nics}


def test_an_infiniband_port_is_read_with_all_its_facts(sysfs: Sysfs) -> None:
    function = cx7(sysfs, "mlx5_0", "1a", numa_node=1)
    sysfs.interface("ibp26s0", function, operstate="down", speed="-1")
    (nic,) = read_nics(sysfs.root, host_id="h").nics
    assert nic == Nic.told(
        Source.SYSFS,
        nic_id="h/mlx5_0",
        host_id="h",
        kind=NicKind.INFINIBAND,
        name="mlx5_0",
        netdev="ibp26s0",
        pci="0000:1a:00.0",
        pci_id=CX7,
        numa_node=1,
        rail=0,
        nbytes_per_s=50e9,
        is_up=True,
    )


def test_a_roce_port_takes_its_interface_from_the_gid_table(sysfs: Sysfs) -> None:
    """Representors of virtual functions are interfaces of the same device."""
    function = cx7(sysfs, "mlx5_0", "1a", files={**port("Ethernet"), "gid_attrs/ndevs/0": "eth2"})
    for name in ("eth2", "eth2_rep0", "eth2_rep1"):
        sysfs.interface(name, function, operstate="up", speed="400000")
    (nic,) = read_nics(sysfs.root, host_id="h").nics
    assert (nic.kind, nic.netdev) == (NicKind.ROCE, "eth2")


def test_of_several_interfaces_without_a_gid_table_none_is_taken(sysfs: Sysfs) -> None:
    function = cx7(sysfs, "mlx5_0", "1a", files=port("Ethernet"))
    for name in ("eth2", "eth2_rep0"):
        sysfs.interface(name, function, operstate="up", speed="400000")
    (nic,) = read_nics(sysfs.root, host_id="h").nics
    assert nic.netdev == ""


def test_both_ports_of_a_device_are_nics(sysfs: Sysfs) -> None:
    function = sysfs.function("pci0000:00", "0000:00:05.0", pci_id="15b3:101b", driver="mlx5_core")
    sysfs.rdma("mlx5_0", function, port(rate="200 Gb/sec (4X HDR)"), port("Ethernet", rate="100 Gb/sec (4X EDR)"))
    found = by_name(read_nics(sysfs.root, host_id="h"))
    assert {name: (nic.kind, nic.nbytes_per_s) for name, nic in found.items()} == {
        "mlx5_0:1": (NicKind.INFINIBAND, 25e9),
        "mlx5_0:2": (NicKind.ROCE, 12.5e9),
    }


def test_trap_08_a_port_is_up_by_its_state_and_rails_are_in_pci_order(sysfs: Sysfs) -> None:
    """The names are those of a real host: their order is not that of the buses, and all IPoIB interfaces are down."""
    buses = {"mlx5_0": 26, "mlx5_10": 204, "mlx5_11": 220, "mlx5_3": 60, "mlx5_4": 77, "mlx5_5": 94, "mlx5_6": 156}
    buses |= {"mlx5_9": 188}
    for name, bus in buses.items():
        function = cx7(sysfs, name, f"{bus:02x}", numa_node=bus // 128)
        sysfs.interface(f"ibp{bus}s0", function, operstate="down", speed="-1")
    front = sysfs.function("pci0000:00", "0000:00:1b.0", "0000:1b:00.0", pci_id="15b3:101d", driver="mlx5_core")
    sysfs.rdma("mlx5_1", front, port("Ethernet", rate="100 Gb/sec (4X EDR)"))
    found = by_name(read_nics(sysfs.root, host_id="h"))
    rails = sorted((nic for nic in found.values() if nic.rail >= 0), key=lambda nic: nic.rail)
    assert [nic.name for nic in rails] == sorted(buses, key=lambda name: buses[name])
    assert [nic.rail for nic in rails] == list(range(8))
    assert all(nic.is_up for nic in rails)
    assert found["mlx5_1"].rail == -1


def test_trap_08_rails_follow_numa_nodes_before_addresses(sysfs: Sysfs) -> None:
    """PCI domains of Azure are numbered without regard to the socket."""
    for name, domain, node in (("mlx5_0", "0103", 1), ("mlx5_1", "0101", 1), ("mlx5_2", "0107", 0)):
        function = sysfs.function(f"pci{domain}:00", f"{domain}:00:00.0", pci_id="15b3:101e", numa_node=node)
        sysfs.rdma(name, function, port())
    found = by_name(read_nics(sysfs.root, host_id="h"))
    assert {name: nic.rail for name, nic in found.items()} == {"mlx5_2": 0, "mlx5_1": 1, "mlx5_0": 2}


def test_a_port_that_is_down_keeps_its_rail_and_has_no_rate(sysfs: Sysfs) -> None:
    for number, state in enumerate(("4: ACTIVE", "1: DOWN", "4: ACTIVE")):
        cx7(sysfs, f"mlx5_{number}", f"1{number}", files=port(state=state, rate="10 Gb/sec (4X SDR)"))
    topology = read_nics(sysfs.root, host_id="h")
    assert [(nic.rail, nic.is_up, nic.nbytes_per_s) for nic in topology.nics] == [
        (0, True, 1.25e9),
        (1, False, 0.0),
        (2, True, 1.25e9),
    ]
    assert topology.notes == ("h/mlx5_1 is not active: its rate is not believed",)


@pytest.mark.parametrize("state", ["1: DOWN", "2: INIT", "3: ARMED", "5: ACTIVE_DEFER"])
def test_only_an_active_port_is_up(sysfs: Sysfs, state: str) -> None:
    cx7(sysfs, "mlx5_0", "1a", files=port(state=state))
    assert read_nics(sysfs.root, host_id="h").nics[0].is_up is False


def test_the_fabric_is_the_model_that_carries_most(sysfs: Sysfs) -> None:
    """The front end may be RoCE as well, and may lie between the others on the bus."""
    for number in (1, 3, 4):
        cx7(sysfs, f"mlx5_{number}", f"1{number}", files=port("Ethernet"))
    front = sysfs.function("pci0000:00", "0000:00:12.0", "0000:12:00.0", pci_id="15b3:a2dc")
    sysfs.rdma("mlx5_2", front, port("Ethernet"))
    assert [(nic.name, nic.rail) for nic in read_nics(sysfs.root, host_id="h").nics] == [
        ("mlx5_2", -1),
        ("mlx5_1", 0),
        ("mlx5_3", 1),
        ("mlx5_4", 2),
    ]


def test_where_two_sets_carry_the_same_no_rails_are_told(sysfs: Sysfs) -> None:
    cx7(sysfs, "mlx5_0", "1a")
    cx7(sysfs, "mlx5_1", "2a", files=port("Ethernet"))
    topology = read_nics(sysfs.root, host_id="h")
    assert [nic.rail for nic in topology.nics] == [-1, -1]
    assert "which of them is the fabric is not known" in topology.notes[0]


def test_trap_09_efa_is_told_by_its_driver_without_interfaces(sysfs: Sysfs) -> None:
    """In a pod: verbs devices with GUIDs of zero and an unspecified link layer, and no interface but the pod's veth."""
    for bus in ("90", "10"):
        function = sysfs.function(f"pci0000:{bus}", f"0000:{bus}:1b.0", pci_id="1d0f:efa0", driver="efa", numa_node=0)
        name = f"rdmap{int(bus, 16)}s27"
        sysfs.rdma(name, function, port("Unspecified", rate="100 Gb/sec (4X EDR)"))
        sysfs.write(f"sys/class/infiniband/{name}/node_guid", "0000:0000:0000:0000")
    sysfs.interface("eth0", None, operstate="up", speed="10000")
    topology = read_nics(sysfs.root, host_id="h")
    assert [(nic.nic_id, nic.kind, nic.pci, nic.rail, nic.nbytes_per_s) for nic in topology.nics] == [
        ("h/rdmap16s27", NicKind.EFA, "0000:10:1b.0", 0, 12.5e9),
        ("h/rdmap144s27", NicKind.EFA, "0000:90:1b.0", 1, 12.5e9),
    ]
    assert topology.notes == ()


def test_trap_09_efa_is_told_by_its_pci_id_where_the_driver_is_not_to_be_seen(sysfs: Sysfs) -> None:
    function = sysfs.function("pci0000:10", "0000:10:1b.0", pci_id="1d0f:efa1")
    sysfs.rdma("rdmap16s27", function, port("Unspecified", rate="100 Gb/sec (4X EDR)"))
    assert read_nics(sysfs.root, host_id="h").nics[0].kind is NicKind.EFA


@pytest.mark.parametrize(
    ("pci_id", "rate", "expected"),
    [
        ("1d0f:efa1", "100 Gb/sec (4X EDR)", 12.5e9),
        ("1d0f:efa2", "100 Gb/sec (4X EDR)", 0.0),
        ("1d0f:efa3", "100 Gb/sec (4X EDR)", 0.0),
        ("1d0f:efa2", "200 Gb/sec (4X HDR)", 25e9),
        ("1d0f:efa3", "400 Gb/sec (4X NDR)", 50e9),
    ],
)
def test_the_rate_that_older_efa_drivers_say_of_every_device_is_not_believed(
    sysfs: Sysfs, pci_id: str, rate: str, expected: float
) -> None:
    function = sysfs.function("pci0000:10", "0000:10:1b.0", pci_id=pci_id, driver="efa")
    sysfs.rdma("rdmap16s27", function, port("Unspecified", rate=rate))
    topology = read_nics(sysfs.root, host_id="h")
    assert topology.nics[0].nbytes_per_s == expected
    assert ("older EFA drivers" in "".join(topology.notes)) == (expected == 0.0)


def test_ethernet_is_what_has_hardware_and_is_no_rdma_port(sysfs: Sysfs) -> None:
    gvnic = sysfs.function("pci0000:00", "0000:00:0c.0", pci_id="1ae0:0042", numa_node=0)
    sysfs.interface("eth1", gvnic, operstate="up", speed="200000")
    virtio = sysfs.function("pci0000:00", "0000:00:03.0", pci_id="1af4:1041") / "virtio2"
    sysfs.interface("eth0", virtio, operstate="up", speed="-1")
    sysfs.write(str((virtio / "vendor").relative_to(sysfs.root)), "0x1af4")
    sysfs.write(str((virtio / "device").relative_to(sysfs.root)), "0x0001")
    for name in ("lo", "docker0", "veth7"):
        sysfs.interface(name, None, operstate="up")
    topology = read_nics(sysfs.root, host_id="h")
    assert [(n.name, n.kind, n.pci, n.pci_id, n.numa_node, n.nbytes_per_s, n.is_up) for n in topology.nics] == [
        ("eth0", NicKind.ETHERNET, "0000:00:03.0", "1af4:1041", -1, 0.0, True),
        ("eth1", NicKind.ETHERNET, "0000:00:0c.0", "1ae0:0042", 0, 25e9, True),
    ]
    assert all(nic.rail == -1 for nic in topology.nics)
    assert topology.notes == ()


@pytest.mark.parametrize(("state", "is_up"), [("up", True), ("down", False), ("unknown", None), ("dormant", None)])
def test_the_speed_of_an_interface_counts_only_while_it_is_up(sysfs: Sysfs, state: str, is_up: bool | None) -> None:
    device = sysfs.function("pci0000:00", "0000:00:0c.0", pci_id="1ae0:0042")
    sysfs.interface("eth0", device, operstate=state, speed="1000")
    (nic,) = read_nics(sysfs.root, host_id="h").nics
    assert (nic.is_up, nic.nbytes_per_s) == (is_up, 1000 * GBIT / 1000 if is_up else 0.0)


def test_an_interface_whose_speed_the_kernel_refuses_to_tell_has_none(sysfs: Sysfs) -> None:
    device = sysfs.function("pci0000:00", "0000:00:0c.0")
    (sysfs.interface("eth0", device, operstate="up") / "speed").mkdir()  # reading it fails, as it does there
    (nic,) = read_nics(sysfs.root, host_id="h").nics
    assert nic.nbytes_per_s == 0.0


def test_the_parts_of_a_bond_that_carries_rdma_are_no_nics_of_their_own(sysfs: Sysfs) -> None:
    first, second = (sysfs.function("pci0000:00", f"0000:00:05.{n}", pci_id="15b3:a2dc") for n in (0, 1))
    sysfs.rdma("mlx5_bond_0", first, {**port("Ethernet"), "gid_attrs/ndevs/0": "bond0"})
    bond = sysfs.interface("bond0", None, operstate="up", speed="400000")
    for name, function in (("eth0", first), ("eth1", second)):
        folder = sysfs.interface(name, function, operstate="up", speed="200000")
        sysfs.link(str((folder / "master").relative_to(sysfs.root)), bond)
    assert [nic.name for nic in read_nics(sysfs.root, host_id="h").nics] == ["mlx5_bond_0"]


def test_a_container_that_shows_no_nic_is_told_so(sysfs: Sysfs) -> None:
    sysfs.interface("lo", None, operstate="unknown")
    sysfs.interface("eth0", None, operstate="up", speed="10000")
    topology = read_nics(sysfs.root, host_id="h")
    assert topology.nics == ()
    assert topology.notes == ("h shows no NIC: eth0 may have one outside the container",)


def test_without_any_nic_there_is_nothing(tmp_path: Path) -> None:
    assert read_nics(tmp_path, host_id="h") == Topology()


def test_the_nics_of_this_machine_can_be_read() -> None:
    for nic in nics.probe("h").nics:
        assert nic.pci
        assert nic.kind is not None


@pytest.mark.parametrize(
    ("file", "text"),
    [(file, text) for file in ("state", "rate") for text in ("", "4", "ACTIVE", "fast (4X)", "\x00")]
    + [("link_layer", "")],
)
def test_a_port_that_does_not_speak_the_kernels_form_is_refused(sysfs: Sysfs, file: str, text: str) -> None:
    cx7(sysfs, "mlx5_0", "1a", files={**port(), file: text})
    with pytest.raises(ProbeError, match=file):
        read_nics(sysfs.root, host_id="h")


def test_a_device_without_ports_is_refused(sysfs: Sysfs) -> None:
    sysfs.rdma("mlx5_0", sysfs.function("pci0000:00", "0000:00:05.0"))
    with pytest.raises(ProbeError, match="has no ports"):
        read_nics(sysfs.root, host_id="h")


def test_a_link_layer_that_nobody_knows_is_noted(sysfs: Sysfs) -> None:
    cx7(sysfs, "mlx5_0", "1a", files=port("Carrier pigeon"))
    topology = read_nics(sysfs.root, host_id="h")
    assert topology.nics[0].kind is None
    assert topology.notes == ("mlx5_0 has link layer 'Carrier pigeon', of which wsync knows nothing",)


@given(st.fixed_dictionaries({name: st.text(max_size=24) for name in ("state", "rate", "link_layer", "speed")}))
def test_any_text_in_sysfs_gives_nics_or_a_probe_error(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, str]
) -> None:
    files = {name: text.encode("utf-8", "replace").decode() for name, text in files.items()}
    sysfs = Sysfs(tmp_path_factory.mktemp("sysfs"))
    device = sysfs.function("pci0000:00", "0000:00:0c.0", pci_id="1ae0:0042")
    sysfs.interface("eth0", device, operstate="up", speed=files.pop("speed"))
    cx7(sysfs, "mlx5_0", "1a", files={**port(), **files})
    try:
        topology = read_nics(sysfs.root, host_id="h")
    except ProbeError:
        return
    assert {nic.host_id for nic in topology.nics} == {"h"}


def test_sample_the_tree_of_an_h100_host_has_eight_ports_of_the_fabric(sysfs: Sysfs) -> None:
    for line in sample("sysfs-class-infiniband-h100.txt").splitlines():
        path, _, text = line.partition(" = ")
        sysfs.write(path.lstrip("/"), text)
    found = by_name(read_nics(sysfs.root, host_id="h"))
    assert len(found) == 9
    assert {nic.nbytes_per_s for nic in found.values() if nic.kind is NicKind.INFINIBAND} == {50e9}
    assert found["mlx5_bond_0"].kind is NicKind.ROCE
    assert all(nic.rail == -1 for nic in found.values()), "the capture has no PCI addresses: no order of rails"


IBSTAT = """\
CA 'mlx5_0'
\tCA type: MT4129
\tNumber of ports: 1
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 400
\t\tLink layer: InfiniBand
CA 'mlx5_1'
\tCA type: MT4129
\tNumber of ports: 1
\tPort 1:
\t\tState: Down
\t\tPhysical state: Disabled
\t\tRate: 40
\t\tLink layer: Ethernet
"""


def test_ibstat_is_read() -> None:
    topology = read_ibstat(IBSTAT, host_id="h")
    assert [(nic.nic_id, nic.kind, nic.nbytes_per_s, nic.is_up) for nic in topology.nics] == [
        ("h/mlx5_0", NicKind.INFINIBAND, 50e9, True),
        ("h/mlx5_1", NicKind.ROCE, 0.0, False),
    ]


@pytest.mark.parametrize("cut", ["CA 'mlx5_1'", "\tPort 1:\n\t\tState: Down", "\t\tRate: 40\n\t\tLink layer: Ethernet"])
def test_trap_09_ibstat_that_dies_is_read_as_far_as_it_came(cut: str) -> None:
    before = IBSTAT[: IBSTAT.index(cut)]
    dead = f"{before}ibpanic: [77] main: stat of IB device 'mlx5_1' failed: No such file or directory\n"
    topology = read_ibstat(dead, host_id="h")
    assert [nic.name for nic in topology.nics] == ["mlx5_0"]
    assert "ibstat broke off" in topology.notes[0]
    if before != IBSTAT[: IBSTAT.index("CA 'mlx5_1'")]:
        with pytest.raises(ProbeError):
            read_ibstat(before, host_id="h")


DEVINFO = """\
hca_id: {name}
\ttransport:\t\tInfiniBand (0)
\tnode_guid:\t\t0000:0000:0000:0000
\tvendor_id:\t\t{vendor}
\tvendor_part_id:\t\t{part}
\tphys_port_cnt:\t\t1
\t\tport:\t1
\t\t\tstate:\t\tPORT_ACTIVE (4)
\t\t\tlink_layer:\t{layer}
"""


def test_trap_09_devices_are_told_apart_without_guids() -> None:
    efa = {"vendor": "0x1d0f", "part": 61344, "layer": "Unspecified"}
    text = "".join(DEVINFO.format(name=name, **efa) for name in ("rdmap16s27", "rdmap32s27"))
    text += DEVINFO.format(name="mlx5_2", vendor="0x02c9", part=4129, layer="Ethernet")
    topology = read_ibv_devinfo(text, host_id="h")
    assert [(nic.nic_id, nic.kind, nic.pci_id, nic.is_up) for nic in topology.nics] == [
        ("h/rdmap16s27", NicKind.EFA, "1d0f:efa0", True),
        ("h/rdmap32s27", NicKind.EFA, "1d0f:efa0", True),
        ("h/mlx5_2", NicKind.ROCE, CX7, True),
    ]


@pytest.mark.parametrize("fabric", ["efa-direct", "EFA-fe80::1844:31ff:fe01:2203", "efa"])
def test_trap_10_the_fabric_of_fi_info_may_be_any_of_three(fabric: str) -> None:
    text = "".join(
        f"provider: efa\n    fabric: {fabric}\n    domain: {domain}\n    type: FI_EP_RDM\n    protocol: FI_PROTO_EFA\n"
        for domain in ("rdmap16s27-rdm", "rdmap16s27-dgrm", "rdmap160s27-rdm")
    )
    topology = read_fi_info(text, host_id="h")
    assert [(nic.nic_id, nic.kind, nic.pci) for nic in topology.nics] == [
        ("h/rdmap16s27", NicKind.EFA, "0000:10:1b.0"),
        ("h/rdmap160s27", NicKind.EFA, "0000:a0:1b.0"),
    ]


READERS = [read_ibstat, read_ibv_devinfo, read_fi_info]
WORDS = ["CA 'a'", "Port 1:", "State: Active", "Rate: 1", "Rate: x", "Link layer: Ethernet", "ibpanic:", "hca_id: a"]
WORDS += ["port: 1", "vendor_id: 0x2", "vendor_part_id: 9", "state: PORT_ACTIVE (4)", "link_layer: X", "provider: efa"]
WORDS += ["domain: d-rdm", "domain: ", "\x00", "provider: tcp"]


@pytest.mark.parametrize("reader", READERS)
@given(text=st.one_of(st.text(max_size=80), st.lists(st.sampled_from(WORDS), max_size=12).map("\n".join)))
def test_any_text_of_a_tool_gives_nics_or_a_probe_error(reader: object, text: str) -> None:
    assert callable(reader)
    try:
        topology = reader(text, host_id="h")
    except ProbeError:
        return
    assert isinstance(topology, Topology)


def test_sample_ibstat_of_two_hosts() -> None:
    roce, _, infiniband = sample("ibstat-variants.txt").partition("# B.")
    with pytest.raises(ProbeError, match="mlx5_10"):  # that capture is cut off within its second device
        read_ibstat(roce, host_id="h")
    (nic,) = read_ibstat(roce[: roce.index("CA 'mlx5_10'")], host_id="h").nics
    assert (nic.kind, nic.nbytes_per_s) == (NicKind.ROCE, 25e9)
    broken = read_ibstat(infiniband, host_id="h")
    assert [(nic.name, nic.kind) for nic in broken.nics] == [("mlx5_7", NicKind.INFINIBAND)]
    assert "mlx5_8" in broken.notes[0]


def test_sample_ibv_devinfo_of_a_roce_host() -> None:
    roce = sample("ibv_devinfo-roce-and-efa.txt").partition("# EFA")[0]
    (nic,) = read_ibv_devinfo(roce, host_id="h").nics
    assert (nic.name, nic.kind, nic.pci_id, nic.is_up) == ("mlx5_2", NicKind.ROCE, CX7, True)


def test_sample_fi_info_of_three_generations() -> None:
    generations = re.split(r"^#.*\n", sample("fi_info-p-efa.txt"), flags=re.MULTILINE)
    found = [[nic.name for nic in read_fi_info(text, host_id="h").nics] for text in generations]
    assert found == [["rdmap16s27"], ["rdmap16s27", "rdmap32s27"], ["rdmap0s31"]]
