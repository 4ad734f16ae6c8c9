"""Maps of whole fabrics: InfiniBand's by ibnetdiscover, NVLink trays by NetQ; Slurm's in YAML."""

from __future__ import annotations

from pathlib import Path

import pytest
from _samples import sample

from wsync.discovery.fabric_maps import read_ibnetdiscover, read_netq_nodes
from wsync.discovery.slurm import probe, read_topology_conf, read_topology_yaml
from wsync.errors import ProbeError
from wsync.topology import DomainKind, NicKind

HEAD = """#
# Topology file: generated on Wed Aug  6 16:11:23 2025
#
# Initiated from node e09d730300156ff6 port e09d730300156ff6

vendid=0x2c9
devid=0xd2f2
sysimgguid=0x2c5eab0300b87b40
"""
SHARP = '[65]\t"H-2c5eab0300b87b50"[1](2c5eab0300b87b50) \t\t# "Mellanox Technologies Aggregation Node" lid 9 4xNDR'


def leaf(number: int, *ports: str) -> str:
    guid = f"2c5eab0300b8{number:04x}"
    lines = [
        f"switchguid=0x{guid}({guid})",
        f'Switch\t65 "S-{guid}"\t\t# "MF0;LEAF-{number:02d}:MQM9701/U1" enhanced port 0 lid 73 lmc 0',
    ]
    for place, text in enumerate(ports, start=1):
        kind, _, what = text.partition(" ")
        name = f"{kind}-e09d73030000{number:02x}{place:02x}"
        lines.append(f'[{place}]\t"{name}"[1]({name[2:]}) \t\t# "{what.split("|")[0]}" lid 6 {what.split("|")[1]}')
    return "\n".join([*lines, SHARP, "", ""])


ADAPTERS = """vendid=0x2c9
caguid=0xe09d730300000101
Ca	1 "H-e09d730300000101"		# "a HCA-1"
[1](e09d730300000101) 	"S-2c5eab0300b80001"[1]		# lid 6 lmc 0 "MF0;LEAF-01:MQM9701/U1" lid 73 4xNDR
"""
"""What the file has of the hosts' side: the same links once more."""


TWO_BLOCKS = HEAD + "\n".join(
    [
        leaf(2, "H a HCA-1|4xNDR", "H b HCA-1|4xNDR", "S MF0;SPINE-1:MQM9701/U1|4xNDR"),
        leaf(1, "H a HCA-2|4xNDR", "H b HCA-2|2xHDR", "H MT4129 ConnectX7   Mellanox Technologies|4xNDR"),
        leaf(3, "H c mlx5_0|4xEDR"),
        ADAPTERS,
    ]
)


def test_hosts_with_common_leaves_are_a_block_and_leaves_are_rails() -> None:
    topology = read_ibnetdiscover(TWO_BLOCKS)
    assert [host.host_id for host in topology.hosts] == ["a", "b", "c"]
    assert [(d.domain_id, d.kind, d.members) for d in topology.domains] == [
        ("block/LEAF-01+LEAF-02", DomainKind.BLOCK, ("a", "b")),
        ("block/LEAF-03", DomainKind.BLOCK, ("c",)),
    ]
    assert {nic.nic_id: (nic.rail, nic.nbytes_per_s) for nic in topology.nics} == {
        "a/HCA-1": (1, 50e9),
        "a/HCA-2": (0, 50e9),
        "b/HCA-1": (1, 50e9),
        "b/HCA-2": (0, 12.5e9),
        "c/mlx5_0": (-1, 12.5e9),
    }
    assert {nic.kind for nic in topology.nics} == {NicKind.INFINIBAND}
    assert topology.notes == (
        "1 adapters are 'MT4129 ConnectX7   Mellanox Technologies': no host is named",
        "3 adapters are 'Mellanox Technologies Aggregation Node': no host is named",
    )


def test_an_adapter_without_a_name_does_not_split_a_block() -> None:
    text = HEAD + leaf(1, "H a HCA-1|4xNDR", "H b HCA-1|4xNDR") + leaf(2, "H a HCA-2|4xNDR", "H who knows what|4xNDR")
    topology = read_ibnetdiscover(text, host_ids={"a": "node-a"})
    (block,) = topology.domains
    assert block.members == ("node-a", "b")
    assert {nic.nic_id: nic.rail for nic in topology.nics} == {"node-a/HCA-1": 0, "node-a/HCA-2": 1, "b/HCA-1": 0}


def test_two_nics_at_one_leaf_are_no_rails() -> None:
    text = HEAD + leaf(1, "H a HCA-1|4xNDR", "H a HCA-2|4xNDR") + leaf(2, "H a HCA-3|4xNDR")
    assert {nic.rail for nic in read_ibnetdiscover(text).nics} == {-1}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (HEAD + leaf(1, "H a HCA-1|4xNDR").replace("Switch\t65", "Swatch\t65"), "Swatch"),
        (HEAD + leaf(1, "H a HCA-1|4xNDR") + leaf(2, "H a HCA-1|4xNDR"), "'a HCA-1' is at two ports"),
    ],
    ids=["misspelled", "twice"],
)
def test_a_map_of_another_form_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ProbeError, match=problem):
        read_ibnetdiscover(text)


@pytest.mark.parametrize("text", ["", "# nothing\n", HEAD])
def test_a_map_without_a_switch_is_refused(text: str) -> None:
    with pytest.raises(ProbeError, match="names no switch"):
        read_ibnetdiscover(text)


def test_a_real_fabric_is_read_whole() -> None:
    topology = read_ibnetdiscover(sample("ibnetdiscover-example.txt"))
    assert (len(topology.hosts), len(topology.nics)) == (122, 473)
    assert {nic.nbytes_per_s for nic in topology.nics} == {50e9}
    assert all(len(block.members) > 1 for block in topology.domains)
    assert sum(len(block.members) for block in topology.domains) == 122


NODES = """[
 {"Name": "node1", "Health": "HEALTHY", "DomainUUID": "u", "LocationInfo": {"ChassisSerialNumber": "s1", "SlotID": 4}},
 {"Name": "node2", "Health": "UNHEALTHY", "DomainUUID": "u", "LocationInfo": {"ChassisSerialNumber": "s1"}},
 {"Name": "node3"}
]"""


def test_trays_of_one_chassis_are_a_rack_and_no_nvlink_domain_is_made_up() -> None:
    topology = read_netq_nodes(NODES, host_ids={"node2": "h2"})
    assert [(d.domain_id, d.kind, d.members) for d in topology.domains] == [
        ("rack/s1", DomainKind.RACK, ("node1", "h2"))
    ]
    assert [host.host_id for host in topology.hosts] == ["node1", "h2", "node3"]
    assert topology.notes == (
        "h2: NetQ says that its NVLink is UNHEALTHY",
        "NVLink fabric u: NetQ does not say which cliques it has; drivers do",
    )


def test_the_sample_of_netq_is_read() -> None:
    topology = read_netq_nodes(sample("netq-nmx-computeNodes.json"))
    assert [domain.members for domain in topology.domains] == [("node1", "node2")]


@pytest.mark.parametrize("text", ["", "{}", '[{"Health": "HEALTHY"}]', '[{"Name": 1}]'])
def test_an_answer_of_netq_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ProbeError, match="NetQ's list of compute nodes cannot be read"):
        read_netq_nodes(text)


YAML = """
- topology: blocks
  cluster_default: false
  block:
    block_sizes: [2]
    blocks:
      - block: b1
        nodes: n[1-2]
- topology: tree
  cluster_default: true
  tree:
    switches:
      - switch: top
        children: s[1-2]
      - switch: s1
        nodes: n[1-2]
      - switch: s2
        nodes: n3
"""
CONF = "SwitchName=top Switches=s[1-2]\nSwitchName=s1 Nodes=n[1-2]\nSwitchName=s2 Nodes=n3\n"


def test_yaml_says_what_the_lines_of_topology_conf_say() -> None:
    topology = read_topology_yaml(YAML)
    assert topology.domains == read_topology_conf(CONF).domains
    assert [host.host_id for host in topology.hosts] == ["n1", "n2", "n3"]
    assert topology.notes == ("topology 'blocks' of topology.yaml is not the default: not read",)


def test_without_a_default_the_first_counts_and_a_flat_one_has_no_domains() -> None:
    topology = read_topology_yaml(YAML.replace("cluster_default: true", "cluster_default: false"))
    assert [(d.kind, d.members) for d in topology.domains] == [(DomainKind.BLOCK, ("n1", "n2"))]
    assert read_topology_yaml("- topology: flat\n  flat: true\n").domains == ()
    assert read_topology_yaml("[]").domains == ()


def test_the_sample_of_yaml_is_read() -> None:
    topology = read_topology_yaml(sample("slurm-topology.yaml"))
    racks = {d.domain_id.rsplit("/", 1)[1]: d.members for d in topology.domains if d.kind is DomainKind.RACK}
    assert racks == {"lb-4tjxbt4s6ua": ("gpu-worker-1", "gpu-worker-2"), "none": ("cpu-worker-1", "cpu-worker-2")}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "topology.yaml cannot be read"),
        ("- tree: 7", "topology.yaml cannot be read"),
        ("topology: tree", "topology.yaml cannot be read"),
        ("- tree: {switches: [{switch: a, children: b}]}", "switch 'a' is above 'b', which is missing"),
        ("- tree: {switches: [{switch: a, children: a}]}", ""),
        ("- tree: {switches: [{switch: a, nodes: 'n[1-'}]}", "is no list of hosts"),
        ("- !!python/object/apply:os.system ['true']", "topology.yaml cannot be read"),
    ],
)
def test_yaml_of_another_form_is_refused(text: str, problem: str) -> None:
    if not problem:
        assert read_topology_yaml(text).domains == (), "a switch below itself without nodes places nobody"
        return
    with pytest.raises(ProbeError, match=problem):
        read_topology_yaml(text)


def test_the_newer_file_is_read_before_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    (tmp_path / "topology.conf").write_text("SwitchName=only Nodes=n3\n")
    assert [d.domain_id for d in probe("me").domains] == ["rack/only"]
    (tmp_path / "topology.yaml").write_text(YAML)
    assert [d.members for d in probe("me").domains if d.domain_id == "rack/top/s2"] == [("me",)]
