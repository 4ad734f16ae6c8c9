"""Every accelerator of the hardware table, found through its vendor's own source, and against the table of facts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from _nvml_library import NvmlLibrary
from _samples import facts
from test_discovery_amd import tree, write
from test_discovery_neuron import listed
from test_discovery_nvidia import gpu, pairs

from wsync.discovery import gaudi, kfd, lpu, neuron, nvidia, tpu
from wsync.discovery.hardware import identify, sku_named
from wsync.discovery.skus import SKUS, DevicePath, Sku
from wsync.topology import DomainKind, Topology

P = DevicePath
A100 = (P.CUDA_IPC, P.NCCL, P.NVSHMEM, P.UCX, P.LIBFABRIC)
H100 = (*A100, P.NVLS, P.SHARP)
PCIE = (P.PCIE_P2P, P.NCCL, P.UCX)
AMD = (P.HIP_IPC, P.RCCL, P.UCX)
TPU = (P.ICI, P.DCN)
TRN = (P.NEURON_CC, P.LIBFABRIC)
GAUDI = (P.HCCL, P.UCX)
GIB = 2.0**30

EXPECTED = {
    # SKU: PCI ids, domain, most members of one, links, bytes/s of a link, paths. 0 is unknown.
    "A100-SXM4-40GB": ("10de:20b0", DomainKind.NVLINK, 8, 12, 25e9, A100),
    "A100-SXM4-80GB": ("10de:20b2", DomainKind.NVLINK, 8, 12, 25e9, A100),
    "A100-PCIe-40GB": ("10de:20f1", None, 0, 0, 0, PCIE),
    "A100-PCIe-80GB": ("10de:20b5", None, 0, 0, 0, PCIE),
    "H100-SXM5": ("10de:2330", DomainKind.NVLINK, 8, 18, 26.562e9, H100),
    "H100-PCIe": ("10de:2331", None, 0, 0, 0, PCIE),
    "H100-NVL": ("10de:2321", None, 0, 0, 0, PCIE),
    "H200-SXM": ("10de:2335", DomainKind.NVLINK, 8, 18, 26.562e9, H100),
    "H200-NVL": ("10de:233b", None, 0, 0, 0, PCIE),
    "B200-SXM": ("10de:2901", DomainKind.NVLINK, 8, 18, 53.125e9, H100),
    "B300-SXM": ("10de:3182", DomainKind.NVLINK, 8, 18, 53.125e9, H100),
    "GB200": ("10de:2941", DomainKind.NVLINK, 72, 18, 53.125e9, (*H100, P.CUDA_FABRIC)),
    "GB300": ("10de:31c2 10de:31c3", DomainKind.NVLINK, 72, 18, 53.125e9, (*H100, P.CUDA_FABRIC)),
    "RTX-PRO-6000-BSE": ("10de:2bb5", None, 1, 0, 0, (P.PCIE_P2P, P.CUDA_IPC, P.NCCL, P.UCX, P.LIBFABRIC)),
    "L40S": ("10de:26b9", None, 1, 0, 0, PCIE),
    "L4": ("10de:27b8", None, 1, 0, 0, (P.NCCL, P.UCX_TCP)),
    "MI300X": ("1002:74a1 1002:74b5 1002:74a9 1002:74bd", DomainKind.XGMI, 8, 7, 64e9, AMD),
    "MI308X": ("1002:74a2", DomainKind.XGMI, 8, 7, 0, AMD),
    "MI325X": ("1002:74a5 1002:74b9", DomainKind.XGMI, 8, 7, 64e9, AMD),
    "MI350X": ("1002:75a0", DomainKind.XGMI, 8, 7, 76.8e9, AMD),
    "MI355X": ("1002:75a3", DomainKind.XGMI, 8, 7, 76.8e9, AMD),
    "MI350P": ("1002:75a8", None, 0, 0, 0, AMD),
    "TPU-v2": ("1ae0:0027", DomainKind.ICI, 256, 4, 62.5e9, TPU),
    "TPU-v3": ("1ae0:0027", DomainKind.ICI, 1024, 4, 100e9, TPU),
    "TPU-v4": ("1ae0:005e", DomainKind.ICI, 4096, 6, 50e9, TPU),
    "TPU-v5e": ("1ae0:0063", DomainKind.ICI, 256, 4, 50e9, TPU),
    "TPU-v5p": ("1ae0:0062", DomainKind.ICI, 8960, 6, 100e9, TPU),
    "TPU-v6e": ("1ae0:006f", DomainKind.ICI, 256, 4, 100e9, TPU),
    "TPU7x": ("1ae0:0076", DomainKind.ICI, 9216, 6, 100e9, TPU),
    "Trn1": ("1d0f:7164", DomainKind.NEURONLINK, 16, 4, 96 * GIB, TRN),
    "Trn1n": ("1d0f:7164", DomainKind.NEURONLINK, 16, 4, 192 * GIB, TRN),
    "Trn2": ("1d0f:7364", DomainKind.NEURONLINK, 16, 4, 256e9, TRN),
    "Trn2u": ("1d0f:7364", DomainKind.NEURONLINK, 64, 4, 256e9, TRN),
    "Trn3-Gen1": ("1d0f:7564", DomainKind.NEURONLINK, 64, 0, 0, TRN),
    "Trn3-Gen2": ("1d0f:7565", DomainKind.NEURONLINK, 144, 0, 0, TRN),
    "Gaudi2": ("1da3:1020", DomainKind.GAUDI, 8, 21, 12.5e9, GAUDI),
    "Gaudi3": ("1da3:1060", DomainKind.GAUDI, 8, 21, 25e9, GAUDI),
    "Gaudi3-PCIe": ("1da3:1063", DomainKind.GAUDI, 4, 18, 25e9, GAUDI),
    "GroqChip-1": ("1de0:0000", None, 0, 0, 0, ()),
    "Groq-LP30": ("", None, 256, 96, 14e9, ()),
}


@pytest.mark.parametrize("row", SKUS, ids=lambda row: row.sku)
def test_each_row_has_identifiers_domain_rate_and_paths(row: Sku) -> None:
    pci_ids, kind, size, num_links, rate, paths = EXPECTED[row.sku]
    assert (row.pci_ids, row.scale_up, row.domain_size) == (tuple(pci_ids.split()), kind, size)
    assert (row.num_links, row.link_nbytes_per_s) == (num_links, pytest.approx(rate))
    assert set(row.paths) == set(paths)
    assert bool(row.paths) or row.reason.startswith("identified, no transport")


def test_the_table_has_no_row_more_or_less() -> None:
    assert [row.sku for row in SKUS if row.sku not in EXPECTED] == []
    assert len(SKUS) == len(EXPECTED)


def host_of(row: Sku, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Topology:
    """What the probe of its vendor says of a host with two of them, or with four where chips come in fours."""
    name, instance_type = (row.names or ("",))[0], f"{(row.instance_types or ('',))[0]}48xlarge"
    sysfs = tmp_path / "sys"
    for i in range(4 if row.vendor == "google" else 2):
        folder = sysfs / f"bus/pci/devices/0000:{0x40 + i:02x}:00.0"
        folder.mkdir(parents=True)
        for file, text in zip(("vendor", "device"), row.pci_ids[0].split(":"), strict=True):
            (folder / file).write_text(f"0x{text}\n")
        (folder / "numa_node").write_text("0\n")
    match row.vendor:
        case "nvidia":
            from wsync.discovery.nvml import NvLink

            links = (NvLink(remote="switch", nbytes_per_s=row.link_nbytes_per_s),) * row.num_links
            said = {"name": name, "pci_id": row.pci_ids[0], "memory_nbytes": row.memory_nbytes, "links": links or None}
            status = {"nvlink_status": 0 if links else 5}
            NvmlLibrary([gpu(i, **said) for i in range(2)], pairs(2, **status)).install(monkeypatch)
            return nvidia.probe("h")
        case "amd":
            rate = int(row.link_nbytes_per_s / 1e6)
            files = tree(device_id=int(row.pci_ids[0][5:], 16), rates=(rate, rate), hive=0x77 if row.scale_up else 0)
            write(tmp_path / "kfd", files)
            return kfd.read_kfd(tmp_path / "kfd", host_id="h")
        case "google":
            variables = {"TPU_ACCELERATOR_TYPE": name, "TPU_TOPOLOGY": "2x2", "TPU_WRAP": "false,false,false"}
            return tpu.probe("h", variables=variables, sysfs=sysfs, metadata=lambda key: None)
        case "aws":
            peers = [[1, 1, 1, 1], [0, 0, 0, 0]]
            text = json.dumps([listed(i, peers[i], memory_size=row.memory_nbytes) for i in range(2)])
            pci_ids = {f"0000:{0x40 + i:02x}:00.0": row.pci_ids[0] for i in range(2)}
            return neuron.read_neuron_ls(text, host_id="h", instance_type=instance_type, pci_ids=pci_ids)
        case "intel":
            text = "\n".join(f"{i}, {i}, 0000:{0x40 + i:02x}:00.0, u{i}, {name}, 131072 MiB" for i in range(2))
            return gaudi.read_hl_smi(text, host_id="h")
        case _:
            return lpu.probe("h", sysfs=sysfs)


@pytest.mark.parametrize("sku", [row.sku for row in SKUS if row.pci_ids])
def test_each_is_recognised_through_its_vendors_source(
    sku: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device, paths and rate; a domain of what is there where the source tells of one."""
    row = next(row for row in SKUS if row.sku == sku)
    found = host_of(row, tmp_path, monkeypatch)
    assert {device.sku for device in found.devices} == {sku}
    assert {device.paths for device in found.devices} == {tuple(path.value for path in row.paths)}
    assert {device.link_nbytes_per_s for device in found.devices} == {row.link_nbytes_per_s}
    untold = {"Gaudi3-PCIe"}  # Whether a bridge joins the cards is not to be read anywhere.
    assert {domain.kind for domain in found.domains} == ({row.scale_up} - {None} if sku not in untold else set())
    for domain in found.domains:
        assert domain.members == tuple(device.device_id for device in found.devices)


def test_of_two_tpus_with_one_pci_id_the_platform_tells_the_generation() -> None:
    assert identify(pci_id="1ae0:0027", name="v2") is sku_named("TPU-v2")
    assert identify(pci_id="1ae0:0027", name="v3") is sku_named("TPU-v3")
    assert identify(pci_id="1ae0:0027", instance_type="ct3-hightpu-4t") is sku_named("TPU-v3")
    assert identify(name="tpu-v4-podslice") is identify(pci_id="1ae0:005e") is sku_named("TPU-v4")


WORDS = {
    "CUDA IPC": P.CUDA_IPC,
    r"\bNCCL": P.NCCL,
    "NVSHMEM": P.NVSHMEM,
    "UCX(?!-TCP)": P.UCX,
    "UCX-TCP": P.UCX_TCP,
    "EFA": P.LIBFABRIC,
    "NVLS": P.NVLS,
    "SHARP": P.SHARP,
    "fabric handles": P.CUDA_FABRIC,
    "PCIe P2P": P.PCIE_P2P,
    "HIP IPC": P.HIP_IPC,
    "RCCL": P.RCCL,
    r"\bICI\b": P.ICI,
    "DCN": P.DCN,
    "Neuron CC": P.NEURON_CC,
    "HCCL": P.HCCL,
}
KINDS = {
    "NVLink": DomainKind.NVLINK,
    "xGMI": DomainKind.XGMI,
    "ICI": DomainKind.ICI,
    "NeuronLink": DomainKind.NEURONLINK,
    "GbE": DomainKind.GAUDI,
}
UNITS = {"MiB": 1 << 20, "GiB": 1 << 30, "GB": 1 << 30, "KB": 1 << 10, "B": 1}
VARIANTS = r"\((?:PCIe|NVL|MI350P|add-in)[^)]*\)"


def fact_rows() -> list[list[str]]:
    lines = facts("topology.md").partition("## 1. HARDWARE TABLE")[2].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in rows if len(row) == 9 and not row[0].startswith(("SKU", "-"))]


def pci_ids_in(text: str) -> list[str]:
    """`10de:20b0` and those of the same vendor that follow it as four digits alone."""
    found, vendor = [], ""
    for word in re.findall(r"(?<![\w.:])(?:[0-9a-f]{4}:)?[0-9a-f]{4}\b(?!:)", re.sub("`[^`]*`", "", text)):
        vendor = word.partition(":")[0] if ":" in word else vendor
        found += [f"{vendor}:{word[-4:]}"] if vendor else []
    return found


def test_every_row_of_the_facts_is_recognised_with_its_domain_rate_memory_and_paths() -> None:
    paths: set[DevicePath] = set()
    by_name: dict[str, tuple[set[DevicePath], float, DomainKind | None]] = {}
    seen = 0
    for title, identifiers, memory, _, scale_up, size, _, _, transports in fact_rows():
        for pci_id in pci_ids_in(identifiers):
            assert identify(pci_id=pci_id) is not None, f"{title}: {pci_id}"
        told = {path for word, path in WORDS.items() if re.search(word, transports.replace("not legacy CUDA IPC", ""))}
        alike = re.match(r"as (\w+)", transports)
        if alike and alike[1] in by_name:
            paths = by_name[alike[1]][0]
        elif transports.startswith(("same", "as above", "+")):
            paths = paths | told
        else:
            paths = told
        kind = next((kind for word, kind in KINDS.items() if word in scale_up), None)
        rate = 0.0
        if alike := re.match(r"as (\w+)", scale_up):
            _, rate, kind = by_name[alike[1]]
        elif links := re.match(r"\S+ (\d+)x([\d.]+)(GbE| GB/s bidir)", scale_up.replace("21x", "x 21x")):
            rate = int(links[1]) * float(links[2]) * (1e9 / 8 if links[3] == "GbE" else 1e9 / 2)
        elif amount := re.search(r"(?:=>? |/dir => )(\d+)", scale_up):
            rate = float(amount[1]) * 1e9
        elif amount := re.search(r"([\d,.]+) (Gb/s|TB/s bidir)", scale_up):
            rate = float(amount[1].replace(",", "")) * (1e9 / 8 if amount[2] == "Gb/s" else 1e12 / 2)
        elif amount := re.search(r"([\d,]+)(?: / [\d,]+)? (GB|GiB)/s", scale_up):
            rate = float(amount[1].replace(",", "")) * (1e9 if amount[2] == "GB" else GIB)
        by_name[title.split()[0]] = paths, rate, kind
        mains = pci_ids_in(re.sub(VARIANTS, "", identifiers))
        for pci_id in mains:
            row = identify(pci_id=pci_id)
            assert row is not None
            assert row.scale_up == kind, f"{title}: {row.sku}"
            assert row.scale_up_nbytes_per_s == pytest.approx(rate if kind else 0, rel=0.01), f"{title}: {row.sku}"
            assert set(row.paths) == (set() if row.vendor == "groq" else paths), f"{title}: {row.sku}"
            if kind and (most := re.findall(r"\d+", size.replace(",", ""))):
                assert row.domain_size in [int(number) for number in most], f"{title}: {row.sku}"
            sizes = [
                int(number) * UNITS[unit]
                for numbers, unit in re.findall(r"((?:\d+ / )?\d{2,}) (MiB|GiB|GB|KB|B)\b", memory)
                for number in numbers.split(" / ")
            ]
            assert not sizes or row.memory_nbytes in sizes or title.startswith("H200"), f"{title}: {row.sku}"
            seen += 1
    assert seen > 30
