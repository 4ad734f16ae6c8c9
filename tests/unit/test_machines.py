"""Topology files: those in recipes say what the hardware table says, and what is wrong with a file is named."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from wsync.discovery.hardware import sku_named
from wsync.discovery.machines import Machines
from wsync.errors import ConfigError
from wsync.paths import PathFinder
from wsync.topology import Device, DomainKind, NicKind, Source, Topology

FOLDER = Path(__file__).parents[2] / "recipes" / "topologies"
FILES = sorted(FOLDER.glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_recipes_has_devices_of_the_table_and_a_source_for_everything(path: Path, tmp_path: Path) -> None:
    machines = Machines.load(path)
    topology = machines.topology()
    assert len(topology.hosts) == sum(machine.count for machine in machines.machines)
    for device in topology.devices:
        row = sku_named(device.sku)
        assert row is not None
        assert (device.memory_nbytes, device.num_links) == (row.memory_nbytes, row.num_links)
        assert device.link_nbytes_per_s == row.link_nbytes_per_s
        assert device.paths == tuple(path.value for path in row.paths)
        assert not row.pci_ids or device.pci_id in row.pci_ids
    for domain in topology.domains:
        if domain.is_scale_up:
            row = sku_named(next(d.sku for d in topology.devices if d.device_id == domain.members[0]))
            assert row is not None
            assert domain.kind is row.scale_up
            assert 1 < len(domain.members) <= row.domain_size
    records = (*topology.hosts, *topology.devices, *topology.nics, *topology.domains)
    assert all(record.facts.keys() == set(record.known_fields()) for record in records)
    (tmp_path / "topology.json").write_text(topology.dump())
    assert Topology.load(tmp_path / "topology.json") == topology


EXPECTED = {
    "hgx-h100": (8, 50e9, "cuda_ipc", 478.1e9, "nixl"),
    "hgx-h200": (8, 50e9, "cuda_ipc", 478.1e9, "nixl"),
    "hgx-b200": (8, 50e9, "cuda_ipc", 956.2e9, "nixl"),
    "hgx-b300": (8, 100e9, "cuda_ipc", 956.2e9, "nixl"),
    "gb200-nvl72": (72, 50e9, "cuda_ipc", 956.2e9, "cuda_fabric"),
    "gb300-nvl72": (72, 100e9, "cuda_ipc", 956.2e9, "cuda_fabric"),
    "rtx-pro-6000": (0, 50e9, "pcie_p2p", 0.0, "nixl"),
    "mi300x": (8, 50e9, "hip_ipc", 448e9, "nixl"),
    "mi355x": (8, 50e9, "hip_ipc", 537.6e9, "nixl"),
    "tpu-v5e": (64, 12.5e9, "ici", 200e9, "ici"),
    "tpu-v5p": (64, 25e9, "ici", 600e9, "ici"),
    "tpu-v6e": (64, 25e9, "ici", 400e9, "ici"),
    "tpu-7x": (64, 25e9, "ici", 600e9, "ici"),
    "trn2": (16, 25e9, "neuron_cc", 1024e9, "nixl"),
    "trn3": (144, 100e9, "neuron_cc", 2199e9, "neuron_cc"),
    "gaudi3": (8, 25e9, "hccl", 525e9, "nixl"),
}
"""Devices in the first domain, rate of a NIC, path and rate inside of a host, path to the next host."""


@pytest.mark.parametrize("name", EXPECTED)
def test_domains_rates_and_paths_are_those_of_the_machine(name: str) -> None:
    num_members, nic_rate, inside, rate, outside = EXPECTED[name]
    topology = Machines.load(FOLDER / f"{name}.toml").topology()
    domains = [domain for domain in topology.domains if domain.is_scale_up]
    assert (len(domains[0].members) if domains else 0) == num_members
    assert topology.nics[0].nbytes_per_s == nic_rate
    finder = PathFinder(topology)
    first, second = topology.devices[:2]
    assert first.host_id == second.host_id
    path = finder.between(first.device_id, second.device_id)[0]
    assert (path.name, path.nbytes_per_s) == (inside, pytest.approx(rate, rel=1e-3))
    far = next(device for device in topology.devices if device.host_id != first.host_id)
    assert finder.between(first.device_id, far.device_id)[0].name == outside


def test_every_file_is_in_the_readme_and_nothing_else_is() -> None:
    named = re.findall(r"^\| \[(\S+\.toml)\]\(\1\) \| (.+) \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert named == [(path.name, Machines.load(path).title) for path in FILES]
    assert {path.stem for path in FILES} == {*EXPECTED, "mixed-cloud"}


def test_the_example_of_the_readme_is_one(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.+?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    topology = load(tmp_path, example).topology()
    assert len(topology.devices) == 64
    racks = [domain for domain in topology.domains if domain.kind is DomainKind.RACK]
    assert [rack.members for rack in racks] == [tuple(f"hgx-{i}" for i in range(s, s + 4)) for s in (0, 4)]
    assert racks[0].facts["uplink_nbytes_per_s"] is Source.MEASURED
    assert topology.nics[0].facts["nbytes_per_s"] is Source.DRIVER


def test_numbers_of_hosts_may_be_replaced() -> None:
    machines = Machines.load(FOLDER / "mixed-cloud.toml")
    topology = machines.topology({"train-h100": 2, "serve-l40s": 0})
    assert [host.host_id for host in topology.hosts][:3] == ["train-h100-0", "train-h100-1", "serve-mi300x-0"]
    assert {nic.kind for nic in topology.host_nics("train-h100-1")} == {NicKind.INFINIBAND, NicKind.ETHERNET}
    with pytest.raises(ConfigError, match="no machine is named train"):
        machines.topology({"train": 2})
    with pytest.raises(ConfigError, match="-1 hosts"):
        machines.topology({"train-h100": -1})


def test_a_zone_has_the_hosts_of_its_machines_whatever_their_numbers() -> None:
    topology = Machines.load(FOLDER / "mixed-cloud.toml").topology({"train-h100": 2, "serve-l40s": 0})
    zones = [domain for domain in topology.domains if domain.kind is DomainKind.ZONE]
    assert [zone.domain_id for zone in zones] == ["zone0", "zone1"]
    assert zones[0].members == ("train-h100-0", "train-h100-1")
    assert zones[1].members == tuple(f"serve-mi300x-{index}" for index in range(8))
    assert {zone.uplink_nbytes_per_s for zone in zones} == {25e9}
    assert topology.notes == ()


def test_a_last_domain_that_is_not_full_has_fewer_members_and_a_note() -> None:
    machines = Machines.load(FOLDER / "gb200-nvl72.toml")
    topology = machines.topology({"gb200-nvl72": 20})
    assert [len(domain.members) for domain in topology.domains if domain.is_scale_up] == [72, 8]
    assert topology.notes == (
        "the last nvlink domain of gb200-nvl72 has 2 of 18 hosts",
        "the last rack of gb200-nvl72 has 2 of 18 hosts",
    )
    assert machines.topology().notes == ()


def test_what_the_file_says_has_its_source_and_the_rest_is_from_the_table() -> None:
    topology = Machines.load(FOLDER / "tpu-v5p.toml").topology()
    assert topology.domains[0].facts == {"members": Source.DECLARED, "nbytes_per_s": Source.TABLE}
    facts = topology.devices[0].facts
    assert (facts["sku"], facts["index"]) == (Source.PLATFORM, Source.PLATFORM)
    assert {source for name, source in facts.items() if name not in ("sku", "index")} == {Source.TABLE}


def test_hundreds_of_hosts_take_less_than_two_seconds() -> None:
    machines = Machines.load(FOLDER / "hgx-h100.toml")
    began = time.process_time()
    topology = machines.topology({"hgx-h100": 512})
    assert time.process_time() - began < 2.0
    assert (len(topology.hosts), len(topology.devices), len(topology.nics)) == (512, 4096, 4096)
    assert topology.devices[-1].device_id == "hgx-h100-511/gpu7"


GOOD = """
title = "t"
[[machines]]
name = "m"
count = 2
sku = "H100-SXM5"
num_devices = 8
[[machines.nics]]
kind = "roce"
count = 1
nbytes_per_s = 1e9
[sources]
"machines.m" = "declared: here"
"""
RACK = '[[levels]]\nkind = "rack"\nhosts = 2\n{}\n[sources]\n"levels.rack" = "declared: here"'


def load(folder: Path, text: str) -> Machines:
    path = folder / "file.toml"
    path.write_text(text)
    return Machines.load(path)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("H100-SXM5", "H100", "no SKU 'H100'"),
        ("num_devices = 8", "num_devices = 0", "2 hosts of 0 devices"),
        ("num_devices = 8", "num_devices = 8\ndomain_hosts = 2", "has at most 8 in one"),
        ("count = 2", "count = -2", "-2 hosts"),
        ('name = "m"', 'name = "m/n"', "m/n"),
        ("nbytes_per_s = 1e9", "nbytes_per_s = -1.0", "-1 bytes/s"),
        ("nbytes_per_s = 1e9", "nbytes_per_s = nan", "nan bytes/s"),
        ("nbytes_per_s = 1e9", "nbytes_per_s = inf", "inf bytes/s"),
        ("num_devices = 8", "num_devices = 8\nnum_numa_nodes = -3", "-3 NUMA nodes"),
        ('kind = "roce"', 'kind = "token-ring"', "token-ring"),
        ("num_devices = 8", "num_devices = 8\ncolour = 1", "colour"),
        ('"machines.m" = "declared: here"', "", "'machines.m.sku' has no source"),
        ('"declared: here"', '"somebody: here"', "somebody: here"),
        ('"declared: here"', '"declared"', "'declared'"),
        ('"declared: here"', '"declared: here"\n"machines.x" = "declared: here"', "'machines.x' has a source, but no"),
        (
            '"declared: here"',
            '"declared: here"\n"machines.m.sku" = "table: here"\n"machines.m.num_devices" = "table: here"\n'
            '"machines.m.nics" = "table: here"',
            "'machines.m' has a source, but no value of its own",
        ),
        ("[sources]", '[[levels]]\nkind = "nvlink"\nhosts = 2\n[sources]', "level nvlink"),
        ("[sources]", '[[levels]]\nkind = "rack"\nhosts = 0\n[sources]', "rack of 0 hosts"),
        ("[sources]", RACK.format("machines = ['m', 'n']"), "no machine is named n"),
        ("[sources]", RACK.format("uplink_nbytes_per_s = nan"), "an uplink of nan"),
        ("[sources]", RACK.format("uplink_nbytes_per_s = -1.0"), "an uplink of -1"),
        ("[sources]", RACK.format("[[levels]]\nkind = 'rack'"), "hosts of m are in 2 levels of kind rack"),
        ("[sources]", RACK.format("").removesuffix('"levels.rack" = "declared: here"'), "'levels.rack' has no source"),
        ("title", "= title", "file.toml"),
    ],
)
def test_what_is_wrong_with_a_file_is_named_with_it(old: str, new: str, problem: str, tmp_path: Path) -> None:
    assert load(tmp_path, GOOD).topology().devices[0].__class__ is Device
    assert old in GOOD
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, GOOD.replace(old, new, 1))
    assert problem in str(refused.value)
    assert "file.toml" in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml cannot be read"):
        Machines.load(tmp_path / "nothing.toml")
