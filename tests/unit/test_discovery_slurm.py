"""Slurm's topology files, lists of hosts, and the address that a job is given."""

from __future__ import annotations

from pathlib import Path

import pytest
from _samples import sample
from hypothesis import given
from hypothesis import strategies as st

from wsync.discovery.slurm import MOST_NODES, hostlist, probe, read_topology_addr, read_topology_conf
from wsync.errors import ProbeError
from wsync.topology import DomainKind, Host, Topology

TREE = """\
# leaf switches, then the others
SwitchName=leaf1 Nodes=n[01-02]
SwitchName=leaf2 Nodes=n03 LinkSpeed=400
switchname=spine switches=leaf[1-2]
SwitchName=core \\
  Switches=spine
"""

BLOCKS = """\
BlockName=b1 Nodes=g[1-2],h7
BlockName=b2 Nodes=g3  # the second
BlockSizes=2,4
"""


def members(topology: Topology) -> dict[str, tuple[str, ...]]:
    return {domain.domain_id: domain.members for domain in topology.domains}


def test_a_tree_has_racks_of_hosts_and_blocks_of_racks() -> None:
    topology = read_topology_conf(TREE)
    assert [host.host_id for host in topology.hosts] == ["n01", "n02", "n03"]
    assert members(topology) == {
        "rack/core/spine/leaf1": ("n01", "n02"),
        "rack/core/spine/leaf2": ("n03",),
        "block/core/spine": ("rack/core/spine/leaf1", "rack/core/spine/leaf2"),
        "block/core": ("block/core/spine",),
    }
    rack = topology.domain_of("n03", DomainKind.RACK)
    assert rack is not None
    assert topology.domain_of(rack.domain_id, DomainKind.BLOCK) is not None


def test_blocks_are_blocks() -> None:
    assert members(read_topology_conf(BLOCKS)) == {"block/b1": ("g1", "g2", "h7"), "block/b2": ("g3",)}


def test_what_scontrol_shows_lists_the_nodes_of_upper_switches_too() -> None:
    text = (
        "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]\n"
        "SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n3\n"
        "SwitchName=top Level=1 LinkSpeed=1 Nodes=n[1-3] Switches=leaf[1-2]\n"
    )
    assert members(read_topology_conf(text)) == {
        "rack/top/leaf1": ("n1", "n2"),
        "rack/top/leaf2": ("n3",),
        "block/top": ("rack/top/leaf1", "rack/top/leaf2"),
    }


def test_hosts_are_named_as_the_caller_names_them() -> None:
    topology = read_topology_conf(BLOCKS, host_ids={"g1": "ray-node-1"})
    assert members(topology)["block/b1"] == ("ray-node-1", "g2", "h7")
    assert Host(host_id="ray-node-1") in topology.hosts


def test_above_a_switch_with_several_parents_nothing_is_told() -> None:
    text = TREE + "SwitchName=core2 Switches=spine\n"
    topology = read_topology_conf(text)
    assert set(members(topology)) == {"rack/spine/leaf1", "rack/spine/leaf2", "block/spine"}
    assert topology.notes == ("several switches are above 'spine': what is beyond is not read",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12],m", ["n08", "n09", "n10", "n12", "m"]),
        ("a[1-2]b[3-4]c", ["a1b3c", "a1b4c", "a2b3c", "a2b4c"]),
        ("switch.2.[9-10]", ["switch.2.9", "switch.2.10"]),
    ],
)
def test_lists_of_hosts(text: str, expected: list[str]) -> None:
    assert hostlist(text) == expected


@pytest.mark.parametrize("text", ["", "n[1-2", "n1-2]", "n[]", "n[2-1]", "n[a-b]", "n[1-2]]", "n,,m", "n[[1]]"])
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(ProbeError):
        hostlist(text)


@pytest.mark.parametrize("text", ["n[0-999999999]", f"n[1-{MOST_NODES + 1}]", "n[1-999][1-999]", "n[0-65535],m"])
def test_a_list_that_stands_for_more_than_a_cluster_is_refused(text: str) -> None:
    with pytest.raises(ProbeError, match="more than 65536 hosts"):
        hostlist(text)
    assert len(hostlist(f"n[1-{MOST_NODES}]")) == MOST_NODES


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("SwitchName=s1 Nodes=n1 Colour=red", "Colour=red"),
        ("SwitchName=s1 Nodes=n1 Nodes=n2", "Nodes=n2"),
        ("SwitchName=s1 Nodes=", "Nodes="),
        ("SwitchName= Nodes=n1", "SwitchName= "),
        ("Include other.conf", "Include other.conf"),
        ("NodeName=n1", "NodeName=n1"),
        ("- topology: tree", "topology: tree"),
        ("SwitchName=s1 Switches=s2", "'s2', which is missing"),
        ("SwitchName=s1 Nodes=n1\nSwitchName=s2 Switches=s1,s3\nSwitchName=s3 Switches=s2", "below itself"),
        ("SwitchName=block/b Nodes=n1,rack/block/b", "contradicts itself"),
    ],
)
def test_lines_that_are_no_topology_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ProbeError, match=problem):
        read_topology_conf(text)


def test_a_job_knows_the_switches_above_its_node() -> None:
    topology = read_topology_addr("core.spine1.leaf2.n03", "switch.switch.switch.node", host_id="h")
    assert members(topology) == {
        "rack/core/spine1/leaf2": ("h",),
        "block/core/spine1": ("rack/core/spine1/leaf2",),
        "block/core": ("block/core/spine1",),
    }
    assert members(read_topology_addr("b7.n03", "block.node", host_id="h")) == {"block/b7": ("h",)}
    assert members(read_topology_addr("n03", "node", host_id="h")) == {}


@pytest.mark.parametrize(
    ("where", "pattern"),
    [
        ("s1.n03", "node"),
        ("s1.n03.example.org", "switch.node"),
        ("s1.", "switch.node"),
        ("s1.n03", "switch.rack"),
        ("n03", ""),
    ],
)
def test_an_address_that_does_not_fit_its_pattern_is_refused(where: str, pattern: str) -> None:
    with pytest.raises(ProbeError, match="SLURM_TOPOLOGY_ADDR"):
        read_topology_addr(where, pattern, host_id="h")


def test_the_probe_reads_the_file_beside_slurm_conf_else_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    assert probe("h") == Topology()
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "leaf1.n01")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.node")
    assert members(probe("h")) == {"rack/leaf1": ("h",)}
    (tmp_path / "topology.conf").write_text(TREE)
    monkeypatch.setenv("SLURMD_NODENAME", "n01")
    assert members(probe("h"))["rack/core/spine/leaf1"] == ("h", "n02")


def test_a_topology_file_that_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    (tmp_path / "topology.conf").write_bytes(b"\xff\xfe")
    with pytest.raises(ProbeError, match=r"topology\.conf cannot be read"):
        probe("h")


WORDS = [
    "SwitchName=",
    "BlockName=",
    "Nodes=",
    "Switches=",
    "a",
    "b",
    "[1-3]",
    ",",
    " ",
    "\n",
    "#",
    "\\\n",
    "BlockSizes=2",
]


@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(WORDS), max_size=16).map("".join)))
def test_any_text_gives_a_topology_or_a_probe_error(text: str) -> None:
    try:
        assert isinstance(read_topology_conf(text), Topology)
    except ProbeError:
        pass


def test_sample_tree() -> None:
    topology = read_topology_conf(sample("slurm-topology-tree.conf"))
    assert len(topology.hosts) == 12 * 8
    kinds = [domain.kind for domain in topology.domains]
    assert (kinds.count(DomainKind.RACK), kinds.count(DomainKind.BLOCK)) == (12, 6 + 1)
    assert members(topology)["rack/switch.3.1/switch.2.5/switch.1.10"] == tuple(f"srv520{n}" for n in range(1, 9))


def test_sample_blocks() -> None:
    topology = read_topology_conf(sample("slurm-topology-block.conf"))
    assert len(topology.hosts) == 12 * 8
    assert members(topology)["block/rack31"] == tuple(f"srv310{n}" for n in range(1, 9))


def test_sample_yaml_is_refused_and_not_misread() -> None:
    with pytest.raises(ProbeError):
        read_topology_conf(sample("slurm-topology.yaml"))
