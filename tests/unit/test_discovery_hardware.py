"""The hardware table: every accelerator is found by its identifiers, and nothing is guessed of one it does not have."""

from __future__ import annotations

import msgspec
import pytest

from wsync.discovery.hardware import (
    NICS,
    SKUS,
    DevicePath,
    conflicts,
    described,
    grace_numa_node,
    identify,
    identify_nic,
    paths_of,
    pci_id_of,
    sku_named,
)
from wsync.topology import Device, DomainKind, NicKind, Source

BY_IDENTIFIERS = [
    ("10de:20b0", "A100-SXM4-40GB", DomainKind.NVLINK, 8, 300e9),
    ("10de:20b2", "A100-SXM4-80GB", DomainKind.NVLINK, 8, 300e9),
    ("10de:2330", "H100-SXM5", DomainKind.NVLINK, 8, 478e9),
    ("10de:2335", "H200-SXM", DomainKind.NVLINK, 8, 478e9),
    ("10de:2901", "B200-SXM", DomainKind.NVLINK, 8, 956e9),
    ("10de:3182", "B300-SXM", DomainKind.NVLINK, 8, 956e9),
    ("10de:2941", "GB200", DomainKind.NVLINK, 72, 956e9),
    ("10de:31c2", "GB300", DomainKind.NVLINK, 72, 956e9),
    ("10de:31c3", "GB300", DomainKind.NVLINK, 72, 956e9),
    ("10de:2bb5", "RTX-PRO-6000-BSE", None, 1, 0),
    ("10de:26b9", "L40S", None, 1, 0),
    ("10de:27b8", "L4", None, 1, 0),
    ("1002:74a1", "MI300X", DomainKind.XGMI, 8, 448e9),
    ("1002:74b5", "MI300X", DomainKind.XGMI, 8, 448e9),
    ("1002:74a5", "MI325X", DomainKind.XGMI, 8, 448e9),
    ("1002:75a0", "MI350X", DomainKind.XGMI, 8, 537.6e9),
    ("1002:75a3", "MI355X", DomainKind.XGMI, 8, 537.6e9),
    ("1ae0:0063", "TPU-v5e", DomainKind.ICI, 256, 200e9),
    ("1ae0:0062", "TPU-v5p", DomainKind.ICI, 8960, 600e9),
    ("1ae0:006f", "TPU-v6e", DomainKind.ICI, 256, 400e9),
    ("1ae0:0076", "TPU7x", DomainKind.ICI, 9216, 600e9),
    ("1d0f:7164", "Trn1", DomainKind.NEURONLINK, 16, 384 * 2**30),
    ("1d0f:7364", "Trn2", DomainKind.NEURONLINK, 16, 1024e9),
    ("1d0f:7564", "Trn3-Gen1", DomainKind.NEURONLINK, 64, 2048 * 2**30),
    ("1d0f:7565", "Trn3-Gen2", DomainKind.NEURONLINK, 144, 2048 * 2**30),
    ("1da3:1020", "Gaudi2", DomainKind.GAUDI, 8, 262.5e9),
    ("1da3:1060", "Gaudi3", DomainKind.GAUDI, 8, 525e9),
    ("1de0:0000", "GroqChip-1", None, 0, 0),
]


@pytest.mark.parametrize(("pci_id", "sku", "kind", "size", "rate"), BY_IDENTIFIERS)
def test_each_accelerator_is_known_by_its_pci_id(
    pci_id: str, sku: str, kind: DomainKind | None, size: int, rate: float
) -> None:
    row = identify(pci_id=pci_id.upper())
    assert row is not None
    assert (row.sku, row.scale_up, row.domain_size) == (sku, kind, size)
    assert row.scale_up_nbytes_per_s == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize("row", SKUS, ids=lambda row: row.sku)
def test_rows_are_consistent(row) -> None:
    assert sku_named(row.sku) is row
    if row.num_links and row.link_nbytes_per_s and row.scale_up is not None:
        assert row.num_links * row.link_nbytes_per_s == pytest.approx(row.scale_up_nbytes_per_s, rel=1e-3)
    assert 0 <= row.planned_link_nbytes_per_s <= row.link_nbytes_per_s or not row.planned_link_nbytes_per_s
    for name in row.names:
        assert identify(name=name) is row
    for prefix in row.instance_types:
        assert identify(instance_type=f"{prefix}48xlarge") is row
        if row.pci_ids:
            assert identify(pci_id=row.pci_ids[0], instance_type=f"{prefix}48xlarge") is row
    assert conflicts(row, pci_id=row.pci_ids[0] if row.pci_ids else "", memory_nbytes=row.memory_nbytes) == ()


def test_names_are_of_one_row_and_pci_ids_of_one_chip() -> None:
    names = [name for row in SKUS for name in row.names]
    assert len(names) == len(set(names))
    shared = [row.sku for row in SKUS if row.pci_ids and identify(pci_id=row.pci_ids[0]) is not row]
    assert shared == ["TPU-v2", "Trn1n", "Trn2u"]


def test_instance_type_tells_chips_of_one_pci_id_apart() -> None:
    assert identify(pci_id="1d0f:7364", instance_type="trn2u.48xlarge").domain_size == 64
    assert identify(pci_id="1d0f:7364", instance_type="trn9.48xlarge").sku == "Trn2"


def test_pci_id_beats_the_name_and_the_conflict_is_told() -> None:
    row = identify(pci_id="10de:2330", name="NVIDIA GB200")
    assert row.sku == "H100-SXM5"
    (note,) = conflicts(row, pci_id="10de:2330", name="NVIDIA GB200")
    assert "'NVIDIA GB200' is that of GB200" in note


def test_memory_and_links_that_do_not_fit_are_told() -> None:
    row = sku_named("H100-SXM5")
    assert conflicts(row, memory_nbytes=80 << 30, num_links=18) == ()
    low, few = conflicts(row, memory_nbytes=40 << 30, num_links=17)
    assert "bytes of memory" in low
    assert "17 scale-up links" in few


@pytest.mark.parametrize("pci_id", ["10de:3000", "10de:3040", "10de:3021", "10de:2f95", "", "nonsense"])
def test_what_the_table_does_not_have_stays_unknown(pci_id: str) -> None:
    assert identify(pci_id=pci_id, name="NVIDIA H100", memory_nbytes=81559 << 20, num_links=18) is None


def test_an_unknown_device_is_described_by_what_was_read() -> None:
    read = Device.told(Source.DRIVER, device_id="h/gpu0", host_id="h", name="NVIDIA R100", memory_nbytes=1 << 38)
    device, notes = described(read)
    assert device == read
    assert len(notes) == 1
    assert paths_of(device) is None


def test_the_table_adds_only_what_was_not_read_and_says_so() -> None:
    read = Device.told(Source.DRIVER, device_id="h/gpu0", host_id="h", pci_id="10de:2330", memory_nbytes=80 << 30)
    device, notes = described(read)
    assert notes == ()
    assert device.memory_nbytes == 80 << 30
    assert (device.sku, device.facts["sku"]) == ("H100-SXM5", Source.TABLE)
    assert (device.memory_nbytes_per_s, device.facts["memory_nbytes_per_s"]) == (3.35e12, Source.TABLE)
    assert device.num_links == 0, "that links are up is never taken from a table"


def test_a_partition_gets_no_size_of_the_whole() -> None:
    read = Device.told(Source.DRIVER, device_id="h/gpu0/part0", host_id="h", pci_id="10de:2330", partition_of="h/gpu0")
    device, notes = described(read)
    assert notes == ()
    assert (device.sku, device.memory_nbytes, device.memory_nbytes_per_s) == ("H100-SXM5", 0, 0)


def test_groq_is_identified_and_has_no_transport() -> None:
    device, _ = described(Device.told(Source.SYSFS, device_id="h/lpu0", host_id="h", pci_id="1de0:0000"))
    assert device.vendor == "groq"
    assert paths_of(device) == ()
    assert sku_named(device.sku).reason.startswith("identified, no transport")


def test_paths_of_each_family() -> None:
    assert DevicePath.CUDA_FABRIC in sku_named("GB300").paths
    assert DevicePath.CUDA_FABRIC not in sku_named("B300-SXM").paths
    assert DevicePath.CUDA_IPC not in sku_named("L4").paths
    assert sku_named("TPU7x").paths == (DevicePath.ICI, DevicePath.DCN)
    assert DevicePath.LIBFABRIC in sku_named("Trn2").paths


@pytest.mark.parametrize(
    ("sku", "field", "is_verified"),
    [
        ("H100-SXM5", "memory_nbytes", True),
        ("H100-SXM5", "memory_nbytes_per_s", False),
        ("H200-SXM", "memory_nbytes", False),
        ("GB200", "memory_nbytes", True),
        ("MI300X", "link_nbytes_per_s", False),
        ("TPU-v6e", "scale_up_nbytes_per_s", True),
        ("TPU-v5p", "scale_up_nbytes_per_s", False),
        ("Groq-LP30", "memory_nbytes", False),
    ],
)
def test_second_hand_values_are_marked(sku: str, field: str, is_verified: bool) -> None:
    assert (field in sku_named(sku).verified) is is_verified


@pytest.mark.parametrize(
    ("pci_id", "model", "kind"),
    [
        ("15b3:101b", "ConnectX-6", None),
        ("15B3:1021", "ConnectX-7", None),
        ("15b3:101e", "mlx5Gen VF", None),
        ("1d0f:efa0", "EFA", NicKind.EFA),
        ("1d0f:efa4", "EFA", NicKind.EFA),
        ("1ae0:0042", "gVNIC", NicKind.ETHERNET),
        ("1dd8:1002", "Pensando", None),
        ("14e4:1760", "BCM57608", None),
    ],
)
def test_nics_are_known_by_their_pci_id(pci_id: str, model: str, kind: NicKind | None) -> None:
    row = identify_nic(pci_id)
    assert (row.model, row.kind) == (model, kind)


def test_unknown_nics_stay_unknown() -> None:
    assert identify_nic("1d0f:ec20") is None
    assert identify_nic("") is None
    assert len({pci_id for row in NICS for pci_id in row.pci_ids}) == sum(len(row.pci_ids) for row in NICS)


def test_pci_ids_are_written_as_everywhere() -> None:
    assert pci_id_of(0x10DE, 0x2330) == "10de:2330"
    assert pci_id_of(0x1AE0, 0x62) == "1ae0:0062"


@pytest.mark.parametrize(
    ("pci", "node"), [("0008:06:00.0", 0), ("0009:01:00.0", 0), ("0018:06:00.0", 1), ("0019:01:00.0", 1)]
)
def test_trap_07_pci_domains_of_a_grace_tray_tell_the_numa_node(pci: str, node: int) -> None:
    assert grace_numa_node(pci) == node
    assert grace_numa_node("0000:1b:00.0") == -1


def test_rows_travel_as_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(SKUS), type=tuple[type(SKUS[0]), ...]) == SKUS
