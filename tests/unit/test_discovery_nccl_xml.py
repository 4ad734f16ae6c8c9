"""Topology files of NCCL and RCCL: PCI tree, links of GPUs, and what the files of clouds leave out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from _samples import sample
from hypothesis import given
from hypothesis import strategies as st

from wsync.discovery.nccl_xml import probe, read_nccl_xml
from wsync.errors import ProbeError
from wsync.topology import Device, DomainKind, Host, Nic, NicKind, Source, Topology

CLOUD = """
<system version="1">
  <cpu numaid="0" affinity="ffff" arch="x86_64" vendor="AuthenticAMD" familyid="25" modelid="1">
    <pci busid="ffff:ff:01.0" class="0x060400" vendor="0xffff" device="0xffff" link_width="16">
      <pci busid="0004:00:00.0" class="0x030200" vendor="0x10de" device="0x2330" link_width="16"/>
      <pci busid="0103:00:00.0" class="0x020700" vendor="0x0000" device="0x0000"/>
    </pci>
    <pci busid="ffff:ff:02.0" class="0x060400">
      <pci busid="0003:00:00.0" class="0x030200"/>
      <pci busid="0104:00:00.0" class="0x020000" vendor="0x1d0f" device="0xefa1"/>
    </pci>
  </cpu>
  <cpu numaid="1">
    <pci busid="ffff:ff:03.0" class="0x060400">
      <pci busid="0001:00:00.0" class="0x030200"/>
    </pci>
  </cpu>
</system>
"""


def dump(*gpus: tuple[str, str], tail: str = "") -> str:
    """A dump of one socket: GPUs (bus id, links) each below a switch of its own, below a common one."""
    rows = "".join(
        f'<pci busid="0000:{10 + dev}:00.0" class="0x060400">'
        f'<pci busid="{pci}" class="0x030200" vendor="0x10de" device="0x2901">'
        f'<gpu dev="{dev}" sm="100" rank="{dev}" gdr="1">{links}</gpu></pci></pci>'
        for dev, (pci, links) in enumerate(gpus)
    )
    return f'<system><cpu numaid="0"><pci busid="0000:05:00.0" class="0x060400">{rows}{tail}</pci></cpu></system>'


def nvlink(target: str, count: int, tclass: str = "0x030200") -> str:
    return f'<nvlink target="{target}" count="{count}" tclass="{tclass}"/>'


def kinds(topology: Topology) -> dict[str, str]:
    return {"-".join(sorted((link.a, link.b))): link.kind for link in topology.links}


DEEP = '<pci busid="0000:01:00.0">'
A, B, C = "0000:1a:00.0", "0000:2a:00.0", "0000:3a:00.0"


def test_trap_13_the_file_of_a_cloud_has_the_tree_that_the_guest_does_not_see() -> None:
    topology = read_nccl_xml(CLOUD, host_id="h")
    assert [(d.device_id, d.pci, d.pci_id, d.numa_node) for d in topology.devices] == [
        ("h/gpu0", "0001:00:00.0", "", 1),
        ("h/gpu1", "0003:00:00.0", "", 0),
        ("h/gpu2", "0004:00:00.0", "10de:2330", 0),
    ]
    assert [(n.nic_id, n.kind, n.pci_id, n.numa_node) for n in topology.nics] == [
        ("h/0103:00:00.0", NicKind.INFINIBAND, "", 0),
        ("h/0104:00:00.0", NicKind.EFA, "1d0f:efa1", 0),
    ]
    assert kinds(topology) == {
        "h/gpu0-h/gpu1": "SYS",
        "h/gpu0-h/gpu2": "SYS",
        "h/gpu1-h/gpu2": "PHB",
        "h/0103:00:00.0-h/gpu0": "SYS",
        "h/0104:00:00.0-h/gpu0": "SYS",
        "h/0103:00:00.0-h/gpu1": "PHB",
        "h/0104:00:00.0-h/gpu1": "PIX",
        "h/0103:00:00.0-h/gpu2": "PIX",
        "h/0104:00:00.0-h/gpu2": "PHB",
    }
    assert topology.domains == ()
    assert all(device.index == -1 for device in topology.devices), "the file does not number them"


def test_trap_13_the_tree_is_believed_before_sysfs_and_all_else_after_the_driver() -> None:
    found = read_nccl_xml(dump((A, nvlink(B, 18)), (B, nvlink(A, 18))), host_id="h").devices[0]
    ids = {"device_id": "h/gpu0", "host_id": "h"}
    live = Device.told(Source.SYSFS, **ids, numa_node=3).joined(Device.told(Source.DRIVER, **ids, num_links=17))
    both = live.joined(found)
    assert (both.numa_node, both.num_links) == (0, 17)


def test_a_dump_has_links_per_pair_and_their_island() -> None:
    topology = read_nccl_xml(dump((A, nvlink(B, 12)), (B, nvlink(A, 12)), (C, "")), host_id="h")
    assert [(device.index, device.num_links) for device in topology.devices] == [(0, 12), (1, 12), (2, 0)]
    assert kinds(topology) == {"h/gpu0-h/gpu1": "NV12", "h/gpu0-h/gpu2": "PXB", "h/gpu1-h/gpu2": "PXB"}
    (domain,) = topology.domains
    assert (domain.domain_id, domain.kind, domain.members) == ("h/nvlink0", DomainKind.NVLINK, ("h/gpu0", "h/gpu1"))


@pytest.mark.parametrize("target", ["0000:c4:00.0", "fffffff:ffff:ff"])
def test_through_switches_a_pair_has_what_the_poorer_one_has(target: str) -> None:
    """In virtual machines the switches are not there, and the target is no address."""
    to = {count: nvlink(target, count, "0x068000") for count in (18, 17)}
    topology = read_nccl_xml(dump((A, to[18]), (B, to[17]), (C, "")), host_id="h")
    assert kinds(topology)["h/gpu0-h/gpu1"] == "NV17"
    assert [domain.members for domain in topology.domains] == [("h/gpu0", "h/gpu1")]
    several = nvlink("0000:c4:00.0", 4, "0x068000") + nvlink("0000:c5:00.0", 5, "0x068000")
    assert kinds(read_nccl_xml(dump((A, several), (B, several)), host_id="h")) == {"h/gpu0-h/gpu1": "NV9"}


def test_a_link_to_what_is_no_gpu_of_the_file_is_not_believed() -> None:
    topology = read_nccl_xml(dump((A, nvlink("0000:99:00.0", 2)), (B, "")), host_id="h")
    assert topology.domains == ()
    assert topology.notes == ("h: nvlink to 0000:99:00.0, which is no GPU of the file, is not believed",)


def test_xgmi_links_make_an_island() -> None:
    links = {
        pci: "".join(f'<xgmi target="{peer}" count="1"/>' for peer in (A, B, C) if peer != pci) for pci in (A, B, C)
    }
    topology = read_nccl_xml(dump(*links.items()), host_id="h")
    assert set(kinds(topology).values()) == {"XGMI"}
    assert [(d.domain_id, d.kind, len(d.members)) for d in topology.domains] == [("h/xgmi0", DomainKind.XGMI, 3)]


def test_nics_of_a_dump_have_name_and_rate() -> None:
    net = '<nic><net name="{name}" dev="0" speed="{speed}" port="1" gdr="1"/></nic>'
    tail = f'<pci busid="0000:07:00.0" class="0x020700" vendor="0x15b3" device="0x1021">{net}</pci>'
    text = dump((A, ""), tail=tail.format(name="mlx5_0", speed="400000"))
    text = text.replace("</cpu>", net.format(name="eth0", speed="10000") + "</cpu>")
    topology = read_nccl_xml(text, host_id="h")
    assert [(n.nic_id, n.name, n.kind, n.pci, n.nbytes_per_s) for n in topology.nics] == [
        ("h/mlx5_0", "mlx5_0", NicKind.INFINIBAND, "0000:07:00.0", 50e9),
        ("h/eth0", "eth0", None, "", 1.25e9),
    ]
    assert kinds(topology) == {"h/gpu0-h/mlx5_0": "PXB"}


def test_the_probe_reads_the_named_file_in_known_ids(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = Topology(
        hosts=(Host(host_id="h"),),
        devices=(Device(device_id="h/gpu5", host_id="h", pci="0004:00:00.0"),),
        nics=(Nic(nic_id="h/mlx5_0", host_id="h", pci="0103:00:00.0"),),
    )
    (tmp_path / "topo.xml").write_text(CLOUD)
    monkeypatch.setenv("NCCL_TOPO_FILE", str(tmp_path / "topo.xml"))
    topology = known.joined(probe("h", known=known))
    assert kinds(topology)["h/gpu5-h/mlx5_0"] == "PIX"
    assert topology.devices[0].pci_id == "10de:2330"


def test_of_devices_that_a_container_was_not_given_the_probe_says_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last of the file's GPUs is the only one here, and its number is that of another one in the file."""
    known = Topology(
        hosts=(Host(host_id="h"),),
        devices=(
            Device(device_id="h/gpu0", host_id="h", pci="0004:00:00.0"),
            Device(device_id="h/gpu0/part0", host_id="h", pci="0004:00:00.0", partition_of="h/gpu0"),
        ),
        nics=(Nic(nic_id="h/mlx5_0", host_id="h", pci="0103:00:00.0"),),
    )
    (tmp_path / "topo.xml").write_text(CLOUD)
    monkeypatch.setenv("NCCL_TOPO_FILE", str(tmp_path / "topo.xml"))
    topology = probe("h", known=known)
    assert [(device.device_id, device.pci) for device in topology.devices] == [("h/gpu0", "0004:00:00.0")]
    assert [nic.nic_id for nic in topology.nics] == ["h/mlx5_0"]
    assert kinds(topology) == {"h/gpu0-h/mlx5_0": "PIX"}
    assert topology.notes == (
        "NCCL's file: no device or NIC of h is the one at 0001:00:00.0, 0003:00:00.0, 0104:00:00.0",
    )
    nothing = Topology(hosts=(Host(host_id="h"),))
    assert probe("h", known=nothing) == read_nccl_xml(CLOUD, host_id="h"), "the file is all that there is"


def test_the_probe_looks_where_nccl_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NCCL_TOPO_FILE", raising=False)
    assert probe("h", root=tmp_path) == Topology()
    file = tmp_path / "var/run/nvidia-topologyd/virtualTopology.xml"
    file.parent.mkdir(parents=True)
    file.write_text(CLOUD)
    assert len(probe("h", root=tmp_path).devices) == 3


def test_a_named_file_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_TOPO_FILE", str(tmp_path / "none.xml"))
    with pytest.raises(ProbeError, match=r"none\.xml cannot be read"):
        probe("h")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no topology file"),
        (CLOUD[:400], "no topology file"),
        ("<topology/>", "a <system> of <cpu>"),
        ("<system/>", "a <system> of <cpu>"),
        (CLOUD.replace('numaid="1"', 'numaid="one"'), "numaid 'one'"),
        (CLOUD.replace("0003:00:00.0", "GPU-3"), "'GPU-3' is no PCI address"),
        (CLOUD.replace("0003:00:00.0", "0004:00:00.0"), "a PCI address twice"),
        (dump((A, ""), (B, "")).replace('dev="1"', 'dev="0"'), "contradicts itself"),
        (CLOUD.replace("<cpu ", '<cpu host_hash="0x1" ', 1), "several hosts"),
        (dump((A, "")).replace('dev="0"', 'dev="first"'), "dev 'first'"),
        (dump((A, nvlink(B, 18))).replace('count="18"', 'count="all"'), "count 'all'"),
        (dump((A, nvlink("over there", 18))), "'over there' is no PCI address"),
        (dump((A, ""), tail='<nic/><pci busid="0000:07:00.0"><nic><net speed="fast"/></nic></pci>'), "speed 'fast'"),
        (f'<system><cpu numaid="0">{DEEP * 70}{"</pci>" * 70}</cpu></system>', "64 levels"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_one_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ProbeError, match=problem):
        read_nccl_xml(text, host_id="h")


PIECES = ["<system>", "</system>", '<cpu numaid="0">', "</cpu>", f'<pci busid="{A}" class="0x030200">', "</pci>"]
PIECES += ['<gpu dev="0">', "</gpu>", nvlink(A, 1), nvlink(B, 1), f'<pci busid="{B}" class="0x030200"/>', "<nic/>"]


@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=14).map("".join)))
def test_any_text_gives_a_topology_or_a_probe_error(text: str) -> None:
    try:
        assert isinstance(read_nccl_xml(text, host_id="h"), Topology)
    except ProbeError:
        pass


@given(st.lists(st.sampled_from(PIECES[4:]), max_size=8))
def test_any_tree_gives_a_topology_or_a_probe_error(pieces: list[str]) -> None:
    inside = "".join(pieces)
    text = f'<system><cpu numaid="0">{inside}{"</gpu>" * (inside.count("<gpu") - inside.count("</gpu"))}</cpu></system>'
    try:
        assert isinstance(read_nccl_xml(text, host_id="h"), Topology)
    except ProbeError:
        pass


@pytest.mark.parametrize(
    ("name", "num_nics", "links"),
    [
        ("azure-ndv4-nccl-topo.xml", 8, {"PIX": 4 * 5, "SYS": 6 * 4 + 64 - 16}),
        ("azure-ndv5-nccl-topo.xml", 8, {"PIX": 8, "PHB": 2 * 6 + 32 - 8, "SYS": 16 + 32}),
        ("aws-p4d-nccl-topo.xml", 4, {"PIX": 4 + 8, "PHB": 8 + 8, "SYS": 16 + 16}),
    ],
)
def test_sample_files_of_clouds(name: str, num_nics: int, links: dict[str, int]) -> None:
    topology = read_nccl_xml(sample(name), host_id="h")
    assert (len(topology.devices), len(topology.nics)) == (8, num_nics)
    assert Counter(link.kind for link in topology.links) == links
    assert {device.numa_node for device in topology.devices} <= {0, 1, 2, 3}


def test_sample_model_of_eight_mi300x_is_a_full_mesh() -> None:
    topology = read_nccl_xml(sample("rccl-topo-8p-gfx940.xml"), host_id="h")
    assert {(d.pci_id, d.architecture, d.num_links) for d in topology.devices} == {("1002:74a1", "gfx942", 7)}
    assert [len(domain.members) for domain in topology.domains] == [8]
    found = Counter(link.kind for link in topology.links)
    assert (found["XGMI"], found["PXB"]) == (28, 8)
    assert {(nic.kind, nic.nbytes_per_s) for nic in topology.nics} == {(NicKind.INFINIBAND, 50e9)}
