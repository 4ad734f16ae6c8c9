"""The hardware table: what is publicly known of each accelerator and NIC, as records. Looked up through `hardware`.

Every field is what the maker, a cloud or a driver states of one device; `verified` names the fields whose value was
read in a primary source or in the output of a real machine, the others are second hand. Live readings come before all
of them. Sizes in bytes, rates in bytes/s per direction.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from wsync.topology import DomainKind, NicKind

MIB, GIB = 1 << 20, 1 << 30
GBIT = 1e9 / 8


class DevicePath(StrEnum):
    """Ways by which an accelerator's memory can be reached by another one, or moved by software that is to be had."""

    CUDA_IPC = "cuda_ipc"
    CUDA_FABRIC = "cuda_fabric"
    """Fabric handles (MNNVL with IMEX): between hosts of one NVLink domain, where CUDA IPC does not reach."""
    PCIE_P2P = "pcie_p2p"
    NCCL = "nccl"
    NVLS = "nvls"
    NVSHMEM = "nvshmem"
    SHARP = "sharp"
    UCX = "ucx"
    """With RDMA from device memory (GPUDirect, dmabuf)."""
    UCX_TCP = "ucx_tcp"
    LIBFABRIC = "libfabric"
    """EFA."""
    HIP_IPC = "hip_ipc"
    RCCL = "rccl"
    ICI = "ici"
    """Inside one TPU slice and program only."""
    DCN = "dcn"
    NEURON_CC = "neuron_cc"
    HCCL = "hccl"


class Sku(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One kind of accelerator. A field at its default is unknown, but for `paths`: see `reason`."""

    sku: str
    vendor: str
    names: tuple[str, ...] = ()
    """What its driver calls it, exactly; for TPUs the accelerator type before its number, and GKE's name."""
    pci_ids: tuple[str, ...] = ()
    """`vendor:device`, virtual functions included."""
    instance_types: tuple[str, ...] = ()
    """Beginnings of the names of the cloud machines that have it, where these tell it from others of one PCI id."""
    architecture: str = ""
    memory_nbytes: int = 0
    """As the driver reports it; where only a nominal size is known, its GB are counted as GiB."""
    memory_nbytes_per_s: float = 0.0
    scale_up: DomainKind | None = None
    num_links: int = 0
    link_nbytes_per_s: float = 0.0
    """Of one link, as the driver prints it."""
    planned_link_nbytes_per_s: float = 0.0
    """Of one link, as the vendor's own library (NCCL) plans with."""
    scale_up_nbytes_per_s: float = 0.0
    """Of all links of a device together."""
    domain_size: int = 0
    """Most devices that one scale-up domain has in common machines; 1 says that there is no scale-up fabric."""
    pcie_generation: int = 0
    paths: tuple[DevicePath, ...] = ()
    reason: str = ""
    """Why `paths` is empty: the device is identified, and there is no transport for it."""
    remarks: tuple[str, ...] = ()
    verified: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known = {field.name for field in msgspec.structs.fields(self)}
        for name in self.verified:
            assert name in known, f"{self.sku} has no '{name}' to verify"
            assert getattr(self, name), f"{self.sku}: '{name}' is verified, yet unknown"
        assert bool(self.paths) != bool(self.reason), f"{self.sku}: either paths, or a reason for there being none"


class NicModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One kind of NIC. `kind` is None where the port decides: InfiniBand or RoCE by its link layer, else Ethernet."""

    vendor: str
    model: str
    pci_ids: tuple[str, ...]
    """`vendor:device`, or `vendor:` for all devices of one."""
    kind: NicKind | None = None
    driver: str = ""
    is_virtual: bool = False


class Disagreement(msgspec.Struct, frozen=True):
    """What sources say differently of one thing; `sayings` are (what, who)."""

    about: str
    sayings: tuple[tuple[str, str], ...]


_P = DevicePath
_SXM_A100 = (_P.CUDA_IPC, _P.NCCL, _P.NVSHMEM, _P.UCX, _P.LIBFABRIC)
_SXM = (*_SXM_A100, _P.NVLS, _P.SHARP)
_PCIE = (_P.PCIE_P2P, _P.NCCL, _P.UCX)
_AMD = (_P.HIP_IPC, _P.RCCL, _P.UCX)
_BOARD = "the table has no NVLink facts for this board: read them live"


def _v(names: str) -> tuple[str, ...]:
    return tuple(names.split())


_A100 = Sku(
    sku="A100-SXM4-40GB",
    vendor="nvidia",
    names=("NVIDIA A100-SXM4-40GB",),
    pci_ids=("10de:20b0",),
    architecture="sm_80",
    memory_nbytes=40960 * MIB,
    memory_nbytes_per_s=1.56e12,
    scale_up=DomainKind.NVLINK,
    num_links=12,
    link_nbytes_per_s=25e9,
    planned_link_nbytes_per_s=20e9,
    scale_up_nbytes_per_s=300e9,
    domain_size=8,
    pcie_generation=4,
    paths=_SXM_A100,
    remarks=("16 in a domain on a2-megagpu",),
    verified=_v(
        "names pci_ids memory_nbytes num_links link_nbytes_per_s planned_link_nbytes_per_s scale_up_nbytes_per_s"
    ),
)
_H100 = Sku(
    sku="H100-SXM5",
    vendor="nvidia",
    names=("NVIDIA H100 80GB HBM3",),
    pci_ids=("10de:2330",),
    architecture="sm_90",
    memory_nbytes=81559 * MIB,
    memory_nbytes_per_s=3.35e12,
    scale_up=DomainKind.NVLINK,
    num_links=18,
    link_nbytes_per_s=26.562e9,
    planned_link_nbytes_per_s=20.6e9,
    scale_up_nbytes_per_s=478.1e9,
    domain_size=8,
    pcie_generation=5,
    paths=_SXM,
    remarks=("450 GB/s of NVLink as marketed",),
    verified=_v("pci_ids memory_nbytes num_links link_nbytes_per_s planned_link_nbytes_per_s scale_up_nbytes_per_s"),
)
_B200 = msgspec.structs.replace(
    _H100,
    sku="B200-SXM",
    names=("NVIDIA B200",),
    pci_ids=("10de:2901",),
    architecture="sm_100",
    memory_nbytes=183359 * MIB,
    memory_nbytes_per_s=8e12,
    link_nbytes_per_s=53.125e9,
    planned_link_nbytes_per_s=40.1e9,
    scale_up_nbytes_per_s=956.2e9,
    remarks=("900 GB/s of NVLink as marketed", "may be PCIe 6 capable"),
)
_GB200 = msgspec.structs.replace(
    _B200,
    sku="GB200",
    names=("NVIDIA GB200",),
    pci_ids=("10de:2941",),
    memory_nbytes=189471 * MIB,
    domain_size=72,
    pcie_generation=6,
    paths=(*_SXM, _P.CUDA_FABRIC),
    remarks=(
        "18 trays of 4 in a rack, split into cliques",
        "CUDA IPC ends at the tray: between trays fabric handles and IMEX",
        "joined to its CPU by NVLink-C2C",
    ),
    verified=(*_B200.verified, "names", "architecture"),
)
_A100_PCIE = Sku(
    sku="A100-PCIe-40GB",
    vendor="nvidia",
    names=("NVIDIA A100-PCIE-40GB",),
    pci_ids=("10de:20f1",),
    architecture="sm_80",
    pcie_generation=4,
    paths=_PCIE,
    remarks=(_BOARD,),
    verified=("pci_ids",),
)
_H100_PCIE = msgspec.structs.replace(
    _A100_PCIE,
    sku="H100-PCIe",
    names=("NVIDIA H100 PCIe",),
    pci_ids=("10de:2331",),
    architecture="sm_90",
    pcie_generation=5,
)
_L40S = Sku(
    sku="L40S",
    vendor="nvidia",
    names=("NVIDIA L40S",),
    pci_ids=("10de:26b9",),
    architecture="sm_89",
    memory_nbytes=46068 * MIB,
    memory_nbytes_per_s=864e9,
    domain_size=1,
    pcie_generation=4,
    paths=_PCIE,
    verified=_v("pci_ids memory_nbytes"),
)
_NVIDIA = (
    _A100,
    msgspec.structs.replace(
        _A100,
        sku="A100-SXM4-80GB",
        names=("NVIDIA A100-SXM4-80GB",),
        pci_ids=("10de:20b2",),
        memory_nbytes=81920 * MIB,
        memory_nbytes_per_s=2.04e12,
    ),
    _A100_PCIE,
    msgspec.structs.replace(_A100_PCIE, sku="A100-PCIe-80GB", names=("NVIDIA A100 80GB PCIe",), pci_ids=("10de:20b5",)),
    _H100,
    _H100_PCIE,
    msgspec.structs.replace(_H100_PCIE, sku="H100-NVL", names=("NVIDIA H100 NVL",), pci_ids=("10de:2321",)),
    msgspec.structs.replace(
        _H100,
        sku="H200-SXM",
        names=("NVIDIA H200",),
        pci_ids=("10de:2335",),
        memory_nbytes=143771 * MIB,
        memory_nbytes_per_s=4.8e12,
        remarks=("EC2 lists 144384 MiB of memory",),
        verified=_v("pci_ids num_links link_nbytes_per_s planned_link_nbytes_per_s scale_up_nbytes_per_s"),
    ),
    msgspec.structs.replace(_H100_PCIE, sku="H200-NVL", names=("NVIDIA H200 NVL",), pci_ids=("10de:233b",)),
    _B200,
    msgspec.structs.replace(
        _B200,
        sku="B300-SXM",
        names=("NVIDIA B300 SXM6 AC",),
        pci_ids=("10de:3182",),
        architecture="sm_103",
        memory_nbytes=275040 * MIB,
        pcie_generation=6,
        remarks=("900 GB/s of NVLink as marketed",),
    ),
    _GB200,
    msgspec.structs.replace(
        _GB200,
        sku="GB300",
        names=("NVIDIA GB300",),
        pci_ids=("10de:31c2", "10de:31c3"),
        architecture="sm_103",
        memory_nbytes=284208 * MIB,
    ),
    Sku(
        sku="RTX-PRO-6000-BSE",
        vendor="nvidia",
        names=("NVIDIA RTX PRO 6000 Blackwell Server Edition",),
        pci_ids=("10de:2bb5",),
        architecture="sm_120",
        memory_nbytes=98304 * MIB,
        memory_nbytes_per_s=1.6e12,
        domain_size=1,
        pcie_generation=5,
        paths=(_P.PCIE_P2P, _P.CUDA_IPC, _P.NCCL, _P.UCX, _P.LIBFABRIC),
        remarks=("EFA on g7e; no GPUDirect on GCP G4",),
        verified=_v("pci_ids memory_nbytes"),
    ),
    _L40S,
    msgspec.structs.replace(
        _L40S,
        sku="L4",
        names=("NVIDIA L4",),
        pci_ids=("10de:27b8",),
        memory_nbytes=23034 * MIB,
        memory_nbytes_per_s=300e9,
        paths=(_P.NCCL, _P.UCX_TCP),
    ),
)

_MI300X = Sku(
    sku="MI300X",
    vendor="amd",
    names=("AMD Instinct MI300X",),
    pci_ids=("1002:74a1", "1002:74b5", "1002:74a9", "1002:74bd"),
    architecture="gfx942",
    memory_nbytes=206141652992,
    memory_nbytes_per_s=5.3e12,
    scale_up=DomainKind.XGMI,
    num_links=7,
    link_nbytes_per_s=64e9,
    scale_up_nbytes_per_s=448e9,
    domain_size=8,
    pcie_generation=5,
    paths=_AMD,
    remarks=("one link to each of 7 peers",),
    verified=_v("names pci_ids architecture memory_nbytes"),
)
_MI350X = msgspec.structs.replace(
    _MI300X,
    sku="MI350X",
    names=("AMD Instinct MI350X",),
    pci_ids=("1002:75a0",),
    architecture="gfx950",
    memory_nbytes=288 * GIB,
    memory_nbytes_per_s=8e12,
    link_nbytes_per_s=76.8e9,
    scale_up_nbytes_per_s=537.6e9,
    verified=("pci_ids",),
)
_AMDS = (
    _MI300X,
    msgspec.structs.replace(
        _MI300X,
        sku="MI308X",
        names=("AMD Instinct MI308X",),
        pci_ids=("1002:74a2",),
        memory_nbytes_per_s=0.0,
        link_nbytes_per_s=0.0,
        scale_up_nbytes_per_s=0.0,
        verified=_v("pci_ids architecture memory_nbytes scale_up num_links domain_size"),
    ),
    msgspec.structs.replace(
        _MI300X,
        sku="MI325X",
        names=("AMD Instinct MI325X",),
        pci_ids=("1002:74a5", "1002:74b9"),
        memory_nbytes=256 * GIB,
        memory_nbytes_per_s=6e12,
        verified=_v("pci_ids architecture"),
    ),
    _MI350X,
    msgspec.structs.replace(_MI350X, sku="MI355X", names=("AMD Instinct MI355X",), pci_ids=("1002:75a3",)),
    msgspec.structs.replace(
        _MI350X,
        sku="MI350P",
        names=("AMD Instinct MI350P",),
        pci_ids=("1002:75a8",),
        memory_nbytes=0,
        memory_nbytes_per_s=0.0,
        scale_up=None,
        num_links=0,
        link_nbytes_per_s=0.0,
        scale_up_nbytes_per_s=0.0,
        domain_size=0,
        remarks=("only its PCI id is known: read the rest live",),
        verified=("pci_ids",),
    ),
)

_SLICE = "ICI exists inside one slice and program only; between slices it is DCN"
_V5E = Sku(
    sku="TPU-v5e",
    vendor="google",
    names=("v5litepod", "v5e", "tpu-v5-lite-podslice"),
    pci_ids=("1ae0:0063",),
    instance_types=("ct5lp-",),
    architecture="v5e",
    memory_nbytes=16 * GIB,
    memory_nbytes_per_s=800e9,
    scale_up=DomainKind.ICI,
    num_links=4,
    link_nbytes_per_s=400 * GBIT,
    scale_up_nbytes_per_s=1600 * GBIT,
    domain_size=256,
    paths=(_P.ICI, _P.DCN),
    remarks=("2D torus", _SLICE),
    verified=_v("pci_ids memory_nbytes memory_nbytes_per_s scale_up num_links scale_up_nbytes_per_s"),
)
# PCI ids: JAX's hardware_utils, where v2 and v3 have one. Memory and pods: docs.cloud.google.com/tpu/docs/v2, v3, v4.
# Of links these pages say nothing: v3 is from the book of JAX's authors on scaling, v2 and v4 from notes on papers of
# Google; and so is the memory of v2.
_V4 = msgspec.structs.replace(
    _V5E,
    sku="TPU-v4",
    names=("v4", "tpu-v4-podslice"),
    pci_ids=("1ae0:005e",),
    instance_types=("ct4p-",),
    architecture="v4",
    memory_nbytes=32 * GIB,
    memory_nbytes_per_s=1200e9,
    num_links=6,
    link_nbytes_per_s=400 * GBIT,
    scale_up_nbytes_per_s=2400 * GBIT,
    domain_size=4096,
    remarks=("3D torus", "the number after 'v4-' counts cores, two to a chip", _SLICE),
    verified=_v("pci_ids memory_nbytes memory_nbytes_per_s scale_up domain_size"),
)
_V3 = msgspec.structs.replace(
    _V4,
    sku="TPU-v3",
    names=("v3", "tpu-v3-device", "tpu-v3-slice"),
    pci_ids=("1ae0:0027",),
    instance_types=("ct3-", "ct3p-"),
    architecture="v3",
    memory_nbytes_per_s=900e9,
    num_links=4,
    link_nbytes_per_s=100e9,
    scale_up_nbytes_per_s=400e9,
    domain_size=1024,
    remarks=("2D torus", "the number after 'v3-' counts cores, two to a chip", _SLICE),
)
_TPUS = (
    _V3,
    msgspec.structs.replace(
        _V3,
        sku="TPU-v2",
        names=("v2",),
        instance_types=(),
        architecture="v2",
        memory_nbytes=16 * GIB,
        memory_nbytes_per_s=700e9,
        link_nbytes_per_s=500 * GBIT,
        scale_up_nbytes_per_s=2000 * GBIT,
        domain_size=256,
        remarks=("2D torus", "of the PCI id of TPU v3", "the number after 'v2-' counts cores, two to a chip", _SLICE),
        verified=_v("pci_ids domain_size"),
    ),
    _V4,
    _V5E,
    msgspec.structs.replace(
        _V5E,
        sku="TPU-v5p",
        names=("v5p", "tpu-v5p-slice"),
        pci_ids=("1ae0:0062",),
        instance_types=("ct5p-",),
        architecture="v5p",
        memory_nbytes=95 * GIB,
        memory_nbytes_per_s=2.77e12,
        num_links=6,
        link_nbytes_per_s=800 * GBIT,
        scale_up_nbytes_per_s=4800 * GBIT,
        domain_size=8960,
        remarks=("3D torus", "the number after 'v5p-' counts cores, two to a chip", _SLICE),
        verified=_v("pci_ids memory_nbytes domain_size"),
    ),
    msgspec.structs.replace(
        _V5E,
        sku="TPU-v6e",
        names=("v6e", "tpu-v6e-slice"),
        pci_ids=("1ae0:006f",),
        instance_types=("ct6e-",),
        architecture="v6e",
        memory_nbytes=32 * GIB,
        memory_nbytes_per_s=1600e9,
        link_nbytes_per_s=800 * GBIT,
        scale_up_nbytes_per_s=3200 * GBIT,
    ),
    msgspec.structs.replace(
        _V5E,
        sku="TPU7x",
        names=("tpu7x", "v7x"),
        pci_ids=("1ae0:0076",),
        instance_types=("tpu7x-",),
        architecture="v7x",
        memory_nbytes=192 * GIB,
        memory_nbytes_per_s=7.4e12,
        num_links=6,
        link_nbytes_per_s=100e9,
        scale_up_nbytes_per_s=600e9,
        domain_size=9216,
        remarks=("3D torus", "two TensorCores to a chip", _SLICE),
        verified=_v("names pci_ids memory_nbytes domain_size"),
    ),
)

_TRN1 = Sku(
    sku="Trn1",
    vendor="aws",
    pci_ids=("1d0f:7164",),
    instance_types=("trn1.",),
    architecture="trn1",
    memory_nbytes=32 * GIB,
    memory_nbytes_per_s=820.0 * GIB,
    scale_up=DomainKind.NEURONLINK,
    num_links=4,
    link_nbytes_per_s=96.0 * GIB,
    scale_up_nbytes_per_s=384.0 * GIB,
    domain_size=16,
    paths=(_P.NEURON_CC, _P.LIBFABRIC),
    remarks=("2D torus",),
    verified=_v("pci_ids memory_nbytes memory_nbytes_per_s scale_up scale_up_nbytes_per_s"),
)
_TRN2 = msgspec.structs.replace(
    _TRN1,
    sku="Trn2",
    pci_ids=("1d0f:7364",),
    instance_types=("trn2.",),
    architecture="trn2",
    memory_nbytes=103079215104,
    memory_nbytes_per_s=2.9e12,
    link_nbytes_per_s=256e9,
    scale_up_nbytes_per_s=1024e9,
    verified=(*_TRN1.verified, "domain_size"),
)
_TRN3 = msgspec.structs.replace(
    _TRN1,
    sku="Trn3-Gen1",
    pci_ids=("1d0f:7564",),
    instance_types=(),
    architecture="trn3",
    memory_nbytes=144 * GIB,
    memory_nbytes_per_s=4.9e12,
    num_links=0,
    link_nbytes_per_s=0.0,
    scale_up_nbytes_per_s=2048.0 * GIB,
    domain_size=64,
    pcie_generation=6,
    remarks=("all to all through NeuronSwitch-v1",),
    verified=(*_TRN1.verified, "domain_size"),
)
_NEURON = (
    _TRN1,
    msgspec.structs.replace(
        _TRN1,
        sku="Trn1n",
        instance_types=("trn1n.",),
        link_nbytes_per_s=192.0 * GIB,
        scale_up_nbytes_per_s=768.0 * GIB,
    ),
    _TRN2,
    msgspec.structs.replace(
        _TRN2,
        sku="Trn2u",
        instance_types=("trn2u.",),
        domain_size=64,
        remarks=("2D torus in an instance, 256 GB/s per chip between the four of an UltraServer",),
    ),
    _TRN3,
    msgspec.structs.replace(_TRN3, sku="Trn3-Gen2", pci_ids=("1d0f:7565",), domain_size=144),
)

_GAUDI2 = Sku(
    sku="Gaudi2",
    vendor="intel",
    names=("HL-225",),
    pci_ids=("1da3:1020",),
    architecture="gaudi2",
    memory_nbytes=102106132480,
    memory_nbytes_per_s=2.45e12,
    scale_up=DomainKind.GAUDI,
    num_links=21,
    link_nbytes_per_s=100 * GBIT,
    scale_up_nbytes_per_s=2100 * GBIT,
    domain_size=8,
    pcie_generation=4,
    paths=(_P.HCCL, _P.UCX),
    remarks=("three further ports on the chip, of the same rate, are its network",),
    verified=_v("pci_ids memory_nbytes num_links link_nbytes_per_s scale_up_nbytes_per_s"),
)
_GAUDI3 = msgspec.structs.replace(
    _GAUDI2,
    sku="Gaudi3",
    names=("HL-325L",),
    pci_ids=("1da3:1060",),
    architecture="gaudi3",
    memory_nbytes=128 * GIB,
    memory_nbytes_per_s=3.7e12,
    link_nbytes_per_s=200 * GBIT,
    scale_up_nbytes_per_s=4200 * GBIT,
    pcie_generation=5,
    remarks=(*_GAUDI2.remarks, "three links to each peer"),
)
_GAUDIS = (
    _GAUDI2,
    _GAUDI3,
    # PCI id: Intel's driver. Four cards with six links between each two: its library HCL, HLS3PCIE.
    msgspec.structs.replace(
        _GAUDI3,
        sku="Gaudi3-PCIe",
        names=("HL-338",),
        pci_ids=("1da3:1063",),
        num_links=18,
        scale_up_nbytes_per_s=3600 * GBIT,
        domain_size=4,
        remarks=("six links to each of three peers, where a bridge joins four cards",),
        verified=_v("names pci_ids num_links domain_size"),
    ),
)

_NO_TRANSPORT = "identified, no transport: no public driver, NCCL, UCX or NIXL surface for it was found"
_GROQ = (
    Sku(sku="GroqChip-1", vendor="groq", pci_ids=("1de0:0000",), reason=_NO_TRANSPORT, verified=("pci_ids",)),
    Sku(
        sku="Groq-LP30",
        vendor="groq",
        memory_nbytes=500_000_000,
        memory_nbytes_per_s=150e12,
        num_links=96,
        link_nbytes_per_s=112 * GBIT,
        scale_up_nbytes_per_s=1.25e12,
        domain_size=256,
        reason=_NO_TRANSPORT,
        remarks=("known from the press only", "its chip-to-chip links are scheduled by the compiler"),
    ),
)

SKUS: tuple[Sku, ...] = (*_NVIDIA, *_AMDS, *_TPUS, *_NEURON, *_GAUDIS, *_GROQ)
"""Of several that share a PCI id, the plain one comes first."""

NICS: tuple[NicModel, ...] = (
    NicModel(vendor="nvidia", model="ConnectX-6", pci_ids=("15b3:101b",), driver="mlx5_core"),
    NicModel(vendor="nvidia", model="ConnectX-6 VF", pci_ids=("15b3:101c",), driver="mlx5_core", is_virtual=True),
    NicModel(vendor="nvidia", model="ConnectX-7", pci_ids=("15b3:1021",), driver="mlx5_core"),
    NicModel(vendor="nvidia", model="mlx5Gen VF", pci_ids=("15b3:101e",), driver="mlx5_core", is_virtual=True),
    NicModel(vendor="nvidia", model="ConnectX-8", pci_ids=("15b3:1023",), driver="mlx5_core"),
    NicModel(vendor="nvidia", model="ConnectX-9", pci_ids=("15b3:1025",), driver="mlx5_core"),
    NicModel(vendor="nvidia", model="BlueField-3", pci_ids=("15b3:a2dc",), driver="mlx5_core"),
    NicModel(
        vendor="aws",
        model="EFA",
        pci_ids=tuple(f"1d0f:efa{generation}" for generation in range(5)),
        kind=NicKind.EFA,
        driver="efa",
    ),
    NicModel(vendor="google", model="gVNIC", pci_ids=("1ae0:0042",), kind=NicKind.ETHERNET, driver="gve"),
    NicModel(vendor="amd", model="Pensando", pci_ids=("1dd8:",), driver="ionic"),
    NicModel(vendor="broadcom", model="BCM57608", pci_ids=("14e4:1760",), driver="bnxt_en"),
    NicModel(vendor="broadcom", model="BCM57708", pci_ids=("14e4:1780",), driver="bnxt_en"),
)

DISAGREEMENTS: tuple[Disagreement, ...] = (
    Disagreement(
        "network of p6e-gb200.36xlarge",
        (
            ("3,200 Gb/s", "karpenter's table"),
            ("4 x 400 Gb/s", "AWS's EKS example, and 28.8 Tb/s per 72 GPUs"),
        ),
    ),
    Disagreement(
        "network of Azure ND GB300 v6",
        (("4 x 400 Gb/s", "Azure's skill text"), ("4 x 800 Gb/s", "a live node: ib_write_bw 449 Gb/s on one")),
    ),
    Disagreement("network of a3-megagpu-8g", (("1,600 Gb/s", "GCP's page"), ("1,800 Gb/s", "GCP's page, newer"))),
    Disagreement("network of a3-edgegpu-8g", (("600 Gb/s", "GCP's page"), ("800 Gb/s", "GCP's page, newer"))),
    Disagreement(
        "an ICI link of TPU v4, per direction",
        (("400 Gb/s", "notes on Google's papers"), ("45 GB/s", "the book of JAX's authors on scaling")),
    ),
    Disagreement("memory of H200", (("144384 MiB", "EC2"), ("143771 MiB", "NVML, second hand"))),
)
