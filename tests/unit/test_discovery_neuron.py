"""AWS Neuron: `neuron-ls -j`, the torus it tells, UltraServers, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from _samples import sample
from hypothesis import given
from hypothesis import strategies as st

from wsync.discovery.neuron import probe, read_neuron_ls
from wsync.errors import ProbeError
from wsync.topology import DomainKind, Source, Topology

GIB = 1 << 30


def listed(index: int, peers: Sequence[int] | None, **changes: Any) -> dict[str, Any]:
    return {
        "neuron_device": index,
        "bdf": f"{0x40 + index:02x}:00.0",
        "cpu_affinity": "0-47,96-143",
        "numa_node": str(index // 8),
        "connected_to": peers,
        "nc_count": 4,
        "logical_neuroncore_config": 2,
        "memory_size": 96 * GIB,
        "neuroncore_ids": [4 * index + i for i in range(4)],
        "neuron_processes": [{"pid": 7, "command": "python train.py", "neuron_runtime_version": "2.0.0"}],
        **changes,
    }


def torus() -> list[dict[str, Any]]:
    """Sixteen devices in four rings of four, both ways."""
    found = []
    for index in range(16):
        row, column = divmod(index, 4)
        steps = ((1, 0), (-1, 0), (0, 1), (0, -1))
        found.append(listed(index, [(row + y) % 4 * 4 + (column + x) % 4 for y, x in steps]))
    return found


TRN2 = {f"0000:{0x40 + i:02x}:00.0": "1d0f:7364" for i in range(16)}


def read(devices: Sequence[dict[str, Any]], **more: Any) -> Topology:
    return read_neuron_ls(json.dumps(devices), host_id="h", **more)


def test_a_torus_of_sixteen() -> None:
    found = read(torus(), instance_type="trn2.48xlarge", pci_ids=TRN2)
    device = found.devices[9]
    assert (device.device_id, device.index, device.vendor, device.sku) == ("h/neuron9", 9, "aws", "Trn2")
    assert (device.pci, device.pci_id, device.numa_node) == ("0000:49:00.0", "1d0f:7364", 1)
    assert (device.memory_nbytes, device.num_links, device.link_nbytes_per_s) == (96 * GIB, 4, 256e9)
    assert (device.facts["memory_nbytes"], device.facts["pci_id"]) == (Source.DRIVER, Source.SYSFS)
    assert len(found.links) == 32
    link = found.link("h/neuron0", "h/neuron12")
    assert link is not None
    assert (link.kind, link.nbytes_per_s) == ("NEURONLINK", 256e9)
    assert found.link("h/neuron0", "h/neuron5") is None
    (domain,) = found.domains
    assert (domain.kind, domain.domain_id) == (DomainKind.NEURONLINK, "h/neuronlink0")
    assert (len(domain.members), domain.nbytes_per_s) == (16, 1024e9)
    assert found.hosts[0].instance_type == "trn2.48xlarge"
    assert found.notes == ()


def test_without_pci_ids_the_devices_are_described_by_what_was_read() -> None:
    found = read(torus())
    assert {(one.sku, one.memory_nbytes, one.link_nbytes_per_s) for one in found.devices} == {("", 96 * GIB, 0)}
    assert found.domains[0].nbytes_per_s == 0
    assert any("no SKU" in note for note in found.notes)


def test_instances_of_an_ultraserver() -> None:
    found = read(torus(), instance_type="trn2u.48xlarge", pci_ids=TRN2, ultraserver_id="us-1")
    assert {one.sku for one in found.devices} == {"Trn2u"}
    inside, across = found.domains
    assert (inside.domain_id, inside.nbytes_per_s) == ("h/neuronlink0", 1024e9)
    assert (across.domain_id, across.kind, across.nbytes_per_s) == ("us-1", DomainKind.NEURONLINK, 256e9)
    assert found.domain_of("h/neuron0", DomainKind.NEURONLINK) is inside
    other = read_neuron_ls(json.dumps(torus()), host_id="h2", ultraserver_id="us-1")
    spanning = next(domain for domain in found.joined(other).domains if domain.domain_id == "us-1")
    assert len(spanning.members) == 32


def test_an_instance_of_an_ultraserver_that_nobody_names() -> None:
    found = read(torus(), instance_type="trn2u.48xlarge", pci_ids=TRN2)
    assert [domain.domain_id for domain in found.domains] == ["h/neuronlink0"]
    assert any("UltraServer" in note for note in found.notes)


def test_an_only_device_is_connected_to_null() -> None:
    alone = listed(0, None, numa_node="-1", bdf="0000:00:1E.0", memory_size=32 * GIB)
    found = read([alone], pci_ids={"0000:00:1e.0": "1d0f:7164"})
    (device,) = found.devices
    assert (device.sku, device.numa_node, device.num_links, device.pci) == ("Trn1", -1, 0, "0000:00:1e.0")
    assert (found.domains, found.links) == ((), ())


def test_islands_are_by_connection() -> None:
    found = read([listed(0, [1]), listed(1, [0]), listed(2, [5]), listed(5, [2]), listed(7, [])])
    assert [domain.members for domain in found.domains] == [("h/neuron0", "h/neuron1"), ("h/neuron2", "h/neuron5")]


def test_two_links_to_one_peer() -> None:
    found = read([listed(0, [1, 1]), listed(1, [0, 0])], pci_ids=TRN2)
    assert [link.nbytes_per_s for link in found.links] == [512e9]
    assert found.domains[0].nbytes_per_s == 512e9


def test_devices_that_a_container_was_not_given() -> None:
    found = read([listed(0, [1, 4]), listed(1, [0, 5])])
    assert len(found.links) == 1
    assert any("[4]" in note and "not visible" in note for note in found.notes)


def test_devices_without_connections_are_noted() -> None:
    found = read([listed(0, None), listed(1, [])])
    assert found.domains == ()
    assert any("no connections" in note for note in found.notes)


def test_none_are_nothing() -> None:
    assert read_neuron_ls("[]", host_id="h") == Topology()


@pytest.mark.parametrize(
    "devices",
    [
        [listed(0, [1]), listed(1, [])],
        [listed(0, [1, 1]), listed(1, [0])],
        [listed(0, [0])],
        [listed(0, None), listed(0, None)],
        [listed(-1, None)],
        [listed(0, None, memory_size="96 GB")],
        [listed(0, None, memory_size=0)],
        [listed(0, None, numa_node="first")],
        [listed(0, None, bdf="somewhere")],
        [listed(0, ["1"])],
        [{"neuron_device": 0}],
    ],
)
def test_broken_lists_are_refused(devices: list[dict[str, Any]]) -> None:
    with pytest.raises(ProbeError):
        read(devices)


@pytest.mark.parametrize("text", ["", "{}", '{"instance": {}, "devices": []}', "null", "[1]", "NEURON DEVICE | 0"])
def test_other_forms_are_refused(text: str) -> None:
    """The form that Neuron 2.34 brings has fields above the list; nobody has published it."""
    with pytest.raises(ProbeError, match=r"before Neuron 2\.34"):
        read_neuron_ls(text, host_id="h")


def test_every_cut_is_refused() -> None:
    text = json.dumps([listed(0, [1]), listed(1, [0])])
    for end in range(len(text)):
        with pytest.raises(ProbeError):
            read_neuron_ls(text[:end], host_id="h")


VALUES = st.one_of(st.none(), st.integers(-3, 3), st.text(max_size=8), st.lists(st.integers(-1, 3), max_size=3))


@given(st.data())
def test_any_list_is_read_or_refused(data: st.DataObject) -> None:
    devices = [listed(i, [1 - i]) for i in range(2)]
    for _ in range(data.draw(st.integers(0, 3))):
        device = data.draw(st.sampled_from(devices))
        device[data.draw(st.sampled_from(sorted(device)))] = data.draw(VALUES)
    for text in (json.dumps(devices), data.draw(st.text(max_size=40))):
        try:
            read_neuron_ls(text, host_id="h", ultraserver_id="u")
        except ProbeError:
            continue


def test_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert probe("h", sysfs=tmp_path) == Topology()
    folder = tmp_path / "bus/pci/devices/0000:40:00.0"
    folder.mkdir(parents=True)
    for name, text in (("vendor", "0x1d0f"), ("device", "0xefa2"), ("numa_node", "0")):
        (folder / name).write_text(text + "\n")
    assert probe("h", sysfs=tmp_path) == Topology(), "EFA is of the same vendor"
    (folder / "device").write_text("0x7364\n")
    with pytest.raises(ProbeError, match="no neuron-ls"):
        probe("h", sysfs=tmp_path)
    (tmp_path / "class/dmi/id").mkdir(parents=True)
    (tmp_path / "class/dmi/id/product_name").write_text("trn2u.48xlarge\n")
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin/neuron-ls"
    tool.write_text(f"#!/bin/sh\ntest \"$*\" = -j && echo '{json.dumps([listed(0, None)])}'\n")
    tool.chmod(0o755)
    found = probe("h", sysfs=tmp_path, ultraserver_id="us-1")
    assert [(one.sku, one.pci_id) for one in found.devices] == [("Trn2u", "1d0f:7364")]
    assert [domain.domain_id for domain in found.domains] == ["us-1"]
    tool.write_text("#!/bin/sh\necho 'level=fatal msg=\"no driver\"' >&2; exit 1\n")
    with pytest.raises(ProbeError, match="no driver"):
        probe("h", sysfs=tmp_path)


def test_the_real_output() -> None:
    """The vendor's page leaves the devices between the first and the last out; what it shows is read."""
    text = sample("neuron-ls-trn2n.rst.txt")
    shown = re.search(r"neuron-ls -j\n(  \[.*?\n  \])\n", text, flags=re.DOTALL)
    assert shown is not None
    with pytest.raises(ProbeError):
        read_neuron_ls(shown[1], host_id="h")
    found = read_neuron_ls(shown[1].replace("    ...\n", ""), host_id="h", pci_ids={"0000:cc:00.0": "1d0f:7364"})
    assert [(one.index, one.num_links, one.numa_node) for one in found.devices] == [(0, 4, 1), (15, 4, 1)]
    assert (found.devices[0].sku, found.devices[0].pci) == ("Trn2", "0000:cc:00.0")
    # The same page's table has all sixteen.
    rows = re.findall(
        r"^  \| (\d+) +\| 4 +\| [\d-]+ +\| 96 GB +\| ([\d, ]+?) +\| ([\d:a-f.]+) ", text, flags=re.MULTILINE
    )
    whole = [listed(int(row[0]), [int(peer) for peer in row[1].split(",")], bdf=row[2]) for row in rows]
    everything = read(whole)
    assert (len(everything.devices), len(everything.links), len(everything.domains[0].members)) == (16, 32, 16)
