"""Intel Gaudi: the table of `hl-smi -Q`, that of CPU affinity, the mesh of a baseboard, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsync.discovery import sources
from wsync.discovery.gaudi import AFFINITY, QUERY, probe, read_hl_smi
from wsync.errors import ProbeError
from wsync.topology import DomainKind, Source, Topology

MODULES = (2, 0, 3, 1, 6, 4, 7, 5)
"""By index: the tool's order is not that of the board."""


def row(index: int, *, name: str = "HL-325L", memory: str = "131072 MiB") -> str:
    return f"{index}, {MODULES[index]}, 0000:{0x30 + index:02x}:00.0, 01P4-HL3090-{index:02}, {name}, {memory}"


def table(size: int = 8, **more: str) -> str:
    return "\n".join(row(index, **more) for index in range(size)) + "\n"


def affinity(size: int = 8) -> str:
    rows = (
        f"{module}       {'0-31, 64-95' if module < 4 else '32-63, 96-127'}    {module // 4}  "
        for module in range(size)
    )
    return (
        "\n".join(["modID   CPU Affinity    NUMA Affinity    ", "-----   ------------    -------------    ", *rows])
        + "\n"
    )


def test_a_baseboard_of_eight() -> None:
    pci_ids = {f"0000:{0x30 + index:02x}:00.0": "1da3:1060" for index in range(8)}
    found = read_hl_smi(table(), host_id="h", affinity=affinity(), pci_ids=pci_ids)
    card = found.devices[4]
    assert (card.device_id, card.index, card.vendor, card.name, card.sku) == (
        "h/gaudi4",
        4,
        "intel",
        "HL-325L",
        "Gaudi3",
    )
    assert (card.pci, card.pci_id, card.uuid) == ("0000:34:00.0", "1da3:1060", "01P4-HL3090-04")
    assert (card.memory_nbytes, card.facts["memory_nbytes"]) == (128 << 30, Source.DRIVER)
    assert [one.numa_node for one in found.devices] == [module // 4 for module in MODULES], "by module, not by index"
    assert {one.num_links for one in found.devices} == {0}, "whether links are up is not told"
    (domain,) = found.domains
    assert (domain.kind, domain.domain_id) == (DomainKind.GAUDI, "h/gaudi-links0")
    assert (len(domain.members), domain.nbytes_per_s) == (8, 525e9)
    assert domain.facts["members"] is Source.TABLE
    assert len(found.links) == 28
    link = found.link("h/gaudi0", "h/gaudi7")
    assert link is not None
    assert (link.kind, link.nbytes_per_s) == ("GAUDI", 75e9)
    assert found.notes == ()


def test_gaudi2_by_its_name() -> None:
    found = read_hl_smi(table(2, name="HL-225", memory="98304 MiB"), host_id="h")
    assert {one.sku for one in found.devices} == {"Gaudi2"}
    assert found.domains[0].nbytes_per_s == pytest.approx(37.5e9), "three of its links go to the one other card"
    assert {one.numa_node for one in found.devices} == {-1}


def test_add_in_cards_are_not_taken_for_a_baseboard() -> None:
    pci_ids = {f"0000:{0x30 + index:02x}:00.0": "1da3:1063" for index in range(2)}
    found = read_hl_smi(table(2, name="HL-338"), host_id="h", pci_ids=pci_ids)
    assert (found.domains, found.links) == ((), ())
    assert any("joined" in note for note in found.notes)


def test_an_unknown_card_is_described_by_what_was_read() -> None:
    found = read_hl_smi(table(2, name="HL-999"), host_id="h")
    assert {(one.sku, one.memory_nbytes) for one in found.devices} == {("", 128 << 30)}
    assert found.domains == ()
    assert sum("no SKU" in note for note in found.notes) == 2


def test_cards_of_two_kinds_are_not_taken_for_a_baseboard() -> None:
    found = read_hl_smi(table(1) + row(1, name="HL-225"), host_id="h")
    assert ([one.sku for one in found.devices], found.domains) == (["Gaudi3", "Gaudi2"], ())
    assert any("joined" in note for note in found.notes)


def test_one_card_is_no_domain() -> None:
    found = read_hl_smi(table(1), host_id="h")
    assert (len(found.devices), found.domains) == (1, ())


def test_no_cards_are_nothing() -> None:
    assert read_hl_smi("\n", host_id="h") == Topology()


def test_numa_nodes_that_the_tool_does_not_know() -> None:
    text = affinity(2).replace("    0  ", "    N/A  ", 1)
    assert "N/A" in text
    found = read_hl_smi(table(2), host_id="h", affinity=text)
    assert [one.numa_node for one in found.devices] == [-1, -1], "modules 2 and 0"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0, 2, ", "0, "),
        ("0, 2, ", "first, 2, "),
        ("0, 2, ", "0, -1, "),
        ("0, 2, ", "1, 2, "),
        ("131072 MiB", "131072"),
        ("131072 MiB", "128 GiB"),
        ("131072 MiB", "N/A"),
        ("0000:30:00.0", "30"),
        ("HL-325L", ""),
        ("0, 2, 0000", "index, module_id, bus_id, uuid, name, memory.total\n0, 2, 0000"),
        ("131072 MiB\n1, 0", "131072 MiB 1, 0"),
    ],
)
def test_broken_tables_are_refused(old: str, new: str) -> None:
    text = table(2)
    assert old in text
    with pytest.raises(ProbeError):
        read_hl_smi(text.replace(old, new, 1), host_id="h")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("modID   CPU Affinity", "modID   Affinity"),
        ("-----   ---", "0       0-3"),
        ("0-31, 64-95    0  ", "0-31, 64-95"),
        ("0       0-31", "0-31"),
        ("0       0-31", "1       0-31"),
        ("64-95    0", "64-950"),
    ],
)
def test_broken_affinity_is_refused(old: str, new: str) -> None:
    text = affinity(2)
    assert old in text
    with pytest.raises(ProbeError, match="topo"):
        read_hl_smi(table(2), host_id="h", affinity=text.replace(old, new, 1))


@given(st.data())
def test_any_text_is_read_or_refused(data: st.DataObject) -> None:
    for whole in (table(2), affinity(2)):
        at = data.draw(st.integers(0, len(whole)))
        text = whole[:at] + data.draw(st.text(max_size=20)) + whole[at + data.draw(st.integers(0, 20)) :]
        first, second = (text, "") if whole.startswith("0") else (table(2), text)
        try:
            read_hl_smi(first, host_id="h", affinity=second)
        except ProbeError:
            continue


def test_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert probe("h", sysfs=tmp_path) == Topology()
    for index in range(2):
        folder = tmp_path / f"bus/pci/devices/0000:{0x30 + index:02x}:00.0"
        folder.mkdir(parents=True)
        for name, text in (("vendor", "0x1da3"), ("device", "0x1060"), ("numa_node", "0")):
            (folder / name).write_text(text + "\n")
    with pytest.raises(ProbeError, match="no hl-smi"):
        probe("h", sysfs=tmp_path)
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin/hl-smi"
    answers = {" ".join(QUERY): table(2), " ".join(AFFINITY): affinity(8)}
    cases = "\n".join(f"'{asked}') echo '{answer.rstrip()}';;" for asked, answer in answers.items())
    tool.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}\n*) exit 2;;\nesac\n')
    tool.chmod(0o755)
    found = probe("h", sysfs=tmp_path)
    assert [(one.sku, one.pci_id, one.numa_node) for one in found.devices] == [("Gaudi3", "1da3:1060", 0)] * 2
    monkeypatch.setattr(sources, "TIMEOUT_S", 0.2)
    tool.write_text("#!/bin/sh\nexec /bin/sleep 20\n")
    with pytest.raises(ProbeError, match="no answer"):
        probe("h", sysfs=tmp_path)
