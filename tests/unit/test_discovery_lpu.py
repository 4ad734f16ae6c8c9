"""Groq LPUs by PCI id: identified, no transport. And what sysfs says of PCI functions, for all who ask there."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsync.discovery.hardware import paths_of
from wsync.discovery.lpu import probe
from wsync.discovery.sources import numa_node_of, number, pci_functions
from wsync.errors import ProbeError
from wsync.topology import Source, Topology


def function(root: Path, name: str, *, vendor: str = "0x1de0", device: str = "0x0000", numa_node: str = "1") -> Path:
    folder = root / "bus/pci/devices" / name
    folder.mkdir(parents=True)
    for file, text in (("vendor", vendor), ("device", device), ("numa_node", numa_node)):
        (folder / file).write_text(text + "\n")
    return folder


def test_identified_no_transport(tmp_path: Path) -> None:
    function(tmp_path, "0000:c1:00.0")
    function(tmp_path, "0000:3d:00.0", numa_node="-1")
    function(tmp_path, "0000:00:02.0", vendor="0x8086")
    found = probe("h", sysfs=tmp_path)
    assert [(one.device_id, one.pci, one.numa_node) for one in found.devices] == [
        ("h/lpu0", "0000:3d:00.0", -1),
        ("h/lpu1", "0000:c1:00.0", 1),
    ]
    lpu = found.devices[0]
    assert (lpu.vendor, lpu.sku, lpu.pci_id, lpu.facts["pci_id"]) == ("groq", "GroqChip-1", "1de0:0000", Source.SYSFS)
    assert paths_of(lpu) == ()
    assert (found.domains, found.links) == ((), ())
    assert sum("no transport" in note for note in found.notes) == 2


def test_a_new_lpu_is_identified_by_its_vendor(tmp_path: Path) -> None:
    function(tmp_path, "0000:c1:00.0", device="0x0030")
    found = probe("h", sysfs=tmp_path)
    assert [(one.vendor, one.sku) for one in found.devices] == [("groq", "")]
    assert any("no transport is known" in note for note in found.notes)


def test_no_lpu_and_no_bus(tmp_path: Path) -> None:
    assert probe("h", sysfs=tmp_path) == Topology()
    function(tmp_path, "0000:00:02.0", vendor="0x10de", device="0x2330")
    assert probe("h", sysfs=tmp_path) == Topology()


@pytest.mark.parametrize("file", ["vendor", "device", "numa_node"])
@pytest.mark.parametrize("text", ["", "groq", "0x", "0x1de0 0x0000", "-2"])
def test_a_broken_bus_is_refused(tmp_path: Path, file: str, text: str) -> None:
    folder = function(tmp_path, "0000:c1:00.0")
    (folder / file).write_text(text)
    if (file, text) == ("numa_node", ""):
        assert probe("h", sysfs=tmp_path).devices[0].numa_node == -1
        return
    with pytest.raises(ProbeError, match=file):
        probe("h", sysfs=tmp_path)


def test_addresses_with_long_domains(tmp_path: Path) -> None:
    """Guests of Azure have domains of more than four digits."""
    function(tmp_path, "10000:01:00.0")
    function(tmp_path, "9000:00:00.0")
    assert [one.address for one in pci_functions("1de0", sysfs=tmp_path)] == ["9000:00:00.0", "10000:01:00.0"]


@given(st.one_of(st.text(max_size=24), st.text(alphabet="019٣५_ +-", max_size=24)))
def test_numbers_are_decimal_or_refused(text: str) -> None:
    try:
        value = number(text, "it", largest=10**6)
    except ProbeError:
        return
    assert 0 <= value <= 10**6
    assert set(text) <= set("0123456789")


def test_numa_nodes() -> None:
    assert [numa_node_of(text, "it") for text in ("", "-1", "0", "12")] == [-1, -1, 0, 12]
    with pytest.raises(ProbeError):
        numa_node_of("N/A", "it")
