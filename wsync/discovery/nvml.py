"""What NVML says of the GPUs of this machine, as plain records: the calls of `nvidia-ml-py`, nothing judged."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from wsync.discovery.hardware import pci_id_of
from wsync.discovery.nvlink import FABRIC_STATES, Fabric
from wsync.discovery.pci import address
from wsync.errors import ProbeError

CONTROL_DEVICE = "/dev/nvidiactl"
"""There when the driver is."""


class NvLink(msgspec.Struct, frozen=True, kw_only=True):
    """An NVLink that is up. `remote` is `gpu`, `switch` or `cpu`; empty where NVML does not say what is at its end."""

    remote: str = ""
    remote_pci: str = ""
    nbytes_per_s: float = 0.0


class MigDevice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    name: str = ""
    uuid: str = ""
    memory_nbytes: int = 0

    @property
    def profile(self) -> str:
        """`1g.10gb` of `NVIDIA H100 80GB HBM3 MIG 1g.10gb`."""
        return self.name.partition(" MIG ")[2]


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as NVML tells of it. `links` is None where NVML says nothing of NVLinks, empty where none is up."""

    index: int
    pci: str
    pci_id: str = ""
    name: str = ""
    uuid: str = ""
    memory_nbytes: int = 0
    compute_capability: tuple[int, int] | None = None
    numa_nodes: tuple[int, ...] = ()
    links: tuple[NvLink, ...] | None = None
    fabric: Fabric | None = None
    is_mig: bool = False
    mig_devices: tuple[MigDevice, ...] = ()


class GpuPair(msgspec.Struct, frozen=True, kw_only=True):
    """Two GPUs by index. Numbers are NVML's own; None where it did not answer."""

    a: int
    b: int
    ancestor: int | None = None
    nvlink_status: int | None = None
    read_status: int | None = None


class NvmlReading(msgspec.Struct, frozen=True, kw_only=True):
    gpus: tuple[Gpu, ...]
    pairs: tuple[GpuPair, ...] = ()
    notes: tuple[str, ...] = ()


class _Nvml:
    """The calls of `nvidia-ml-py`; `ask` answers None where the GPU, the driver or the library does not have it."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self._silent = tuple(
            getattr(library, f"NVML_ERROR_{name}")
            for name in ("NOT_SUPPORTED", "INVALID_ARGUMENT", "NO_PERMISSION", "NOT_FOUND", "FUNCTION_NOT_FOUND")
        )

    def ask(self, call: str, *args: Any) -> Any:
        function = getattr(self.library, call, None)
        if function is None:
            return None
        try:
            return function(*args)
        except self.library.NVMLError as error:
            if error.value in self._silent:
                return None
            raise

    def text(self, call: str, *args: Any) -> str:
        answer = self.ask(call, *args)
        return answer.decode() if isinstance(answer, bytes) else answer or ""


def take_reading() -> NvmlReading | None:
    """All that NVML says, or None where there is no NVIDIA driver. A GPU that cannot be read is a note."""
    with _opened() as nvml:
        if nvml is None:
            return None
        gpus: dict[int, tuple[Gpu, Any]] = {}
        notes: list[str] = []
        for index in range(nvml.library.nvmlDeviceGetCount()):
            try:
                handle = nvml.library.nvmlDeviceGetHandleByIndex(index)
                gpus[index] = _ask_gpu(nvml, index, handle), handle
            except nvml.library.NVMLError as error:
                notes.append(f"GPU {index} cannot be read ({error})")
        pairs = [_ask_pair(nvml, a, b, gpus[a][1], gpus[b][1]) for a in gpus for b in gpus if a < b]
        return NvmlReading(gpus=tuple(gpu for gpu, _ in gpus.values()), pairs=tuple(pairs), notes=tuple(notes))


@contextlib.contextmanager
def _opened() -> Iterator[_Nvml | None]:
    is_there = os.path.exists(CONTROL_DEVICE)
    try:
        library = importlib.import_module("pynvml")
    except Exception as error:
        if is_there:
            raise ProbeError(
                f"there is an NVIDIA driver and its library for Python cannot be used ({error})",
                hint="pip install nvidia-ml-py, or wsync[gpu]",
            ) from error
        yield None
        return
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        absent = (library.NVML_ERROR_LIBRARY_NOT_FOUND, library.NVML_ERROR_DRIVER_NOT_LOADED)
        if error.value in absent and not is_there:
            yield None
            return
        raise ProbeError(
            f"NVML cannot be started ({error})", hint="see whether nvidia-smi works here, in this container"
        ) from error
    try:
        yield _Nvml(library)
    except library.NVMLError as error:
        raise ProbeError(f"NVML cannot be read ({error})", hint="see whether nvidia-smi works here") from error
    finally:
        library.nvmlShutdown()


def _ask_gpu(nvml: _Nvml, index: int, handle: Any) -> Gpu:
    pci = nvml.library.nvmlDeviceGetPciInfo(handle)
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
    mode = nvml.ask("nvmlDeviceGetMigMode", handle)
    is_mig = bool(mode and mode[0])
    return Gpu(
        index=index,
        pci=_address(pci),
        pci_id=pci_id_of(pci.pciDeviceId & 0xFFFF, pci.pciDeviceId >> 16),
        name=nvml.text("nvmlDeviceGetName", handle),
        uuid=nvml.text("nvmlDeviceGetUUID", handle),
        memory_nbytes=0 if memory is None else memory.total,
        compute_capability=nvml.ask("nvmlDeviceGetCudaComputeCapability", handle),
        numa_nodes=_ask_numa_nodes(nvml, handle),
        links=_ask_links(nvml, handle),
        fabric=_ask_fabric(nvml, handle),
        is_mig=is_mig,
        mig_devices=tuple(_ask_mig_devices(nvml, handle)) if is_mig else (),
    )


def _address(pci: Any) -> str:
    return address(pci.busId.decode() if isinstance(pci.busId, bytes) else pci.busId)


def _ask_numa_nodes(nvml: _Nvml, handle: Any) -> tuple[int, ...]:
    words = nvml.ask("nvmlDeviceGetMemoryAffinity", handle, 4, 0) or ()
    width = 8 * ctypes.sizeof(ctypes.c_ulong)
    return tuple(width * i + bit for i, word in enumerate(words) for bit in range(width) if word >> bit & 1)


def _ask_links(nvml: _Nvml, handle: Any) -> tuple[NvLink, ...] | None:
    states = [nvml.ask("nvmlDeviceGetNvLinkState", handle, n) for n in range(nvml.library.NVML_NVLINK_MAX_LINKS)]
    if all(state is None for state in states):
        return None
    return tuple(_ask_link(nvml, handle, n) for n, state in enumerate(states) if state)


def _ask_link(nvml: _Nvml, handle: Any, number: int) -> NvLink:
    library = nvml.library
    remotes = {
        library.NVML_NVLINK_DEVICE_TYPE_GPU: "gpu",
        library.NVML_NVLINK_DEVICE_TYPE_SWITCH: "switch",
        library.NVML_NVLINK_DEVICE_TYPE_IBMNPU: "cpu",
    }
    remote = remotes.get(nvml.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, number), "")
    pci = nvml.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, number) if remote in ("gpu", "") else None
    remote_pci = ""
    with contextlib.suppress(ProbeError):  # Virtual machines hide the switches behind addresses that are none.
        remote_pci = "" if pci is None else _address(pci)
    return NvLink(
        remote=remote,
        remote_pci=remote_pci,
        nbytes_per_s=_ask_link_rate(nvml, handle, number),
    )


def _ask_link_rate(nvml: _Nvml, handle: Any, number: int) -> float:
    """NVML gives it in 10^6 bytes/s, `nvidia-smi nvlink -s` in 10^9."""
    library = nvml.library
    fields = [(library.NVML_FI_DEV_NVLINK_GET_SPEED, number), (library.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, 0)]
    for field in nvml.ask("nvmlDeviceGetFieldValues", handle, fields) or ():
        if field.nvmlReturn == library.NVML_SUCCESS and field.value.uiVal:
            return float(field.value.uiVal) * 1e6
    return 0.0


def _ask_fabric(nvml: _Nvml, handle: Any) -> Fabric | None:
    library = nvml.library
    record = getattr(library, "c_nvmlGpuFabricInfo_v2_t", None)
    if record is None:
        return None
    answer = record()
    answer.version = library.nvmlGpuFabricInfo_v2
    if nvml.ask("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(answer)) is None:
        return None
    is_success = answer.status == library.NVML_SUCCESS
    return Fabric(
        state=FABRIC_STATES[answer.state] if answer.state < len(FABRIC_STATES) else str(answer.state),
        status="success" if is_success else str(library.NVMLError(answer.status)).lower(),
        cluster_uuid=str(uuid.UUID(bytes=bytes(answer.clusterUuid))),
        clique_id=answer.cliqueId,
    )


def _ask_mig_devices(nvml: _Nvml, handle: Any) -> Iterator[MigDevice]:
    for index in range(nvml.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        mig = nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        if mig is None:
            continue
        memory = nvml.ask("nvmlDeviceGetMemoryInfo", mig)
        yield MigDevice(
            index=index,
            name=nvml.text("nvmlDeviceGetName", mig),
            uuid=nvml.text("nvmlDeviceGetUUID", mig),
            memory_nbytes=0 if memory is None else memory.total,
        )


def _ask_pair(nvml: _Nvml, a: int, b: int, handle_a: Any, handle_b: Any) -> GpuPair:
    return GpuPair(
        a=a,
        b=b,
        ancestor=nvml.ask("nvmlDeviceGetTopologyCommonAncestor", handle_a, handle_b),
        nvlink_status=nvml.ask("nvmlDeviceGetP2PStatus", handle_a, handle_b, nvml.library.NVML_P2P_CAPS_INDEX_NVLINK),
        # The library's own NVML_P2P_CAPS_INDEX_READ is a tuple by a slip.
        read_status=nvml.ask("nvmlDeviceGetP2PStatus", handle_a, handle_b, 0),
    )
