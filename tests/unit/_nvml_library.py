"""A stand-in for libnvidia-ml.so, below nvidia-ml-py: the real Python library calls it as it would the driver's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pynvml

from wsync.discovery.nvml import FABRIC_STATES, Gpu, GpuPair

OK, INVALID, NOT_SUPPORTED, NOT_FOUND = 0, 2, 3, 6


class NvmlLibrary:
    """Says of each GPU what its record says; `errors` maps (function, GPU) to the error it gives, GPU -1 for all."""

    def __init__(self, gpus: list[Gpu], pairs: list[GpuPair], errors: dict[tuple[str, int], int] | None = None) -> None:
        self.gpus, self.errors = gpus, errors or {}
        self.pairs = {frozenset((pair.a, pair.b)): pair for pair in pairs}
        self.shutdowns = 0

    def install(self, monkeypatch: Any) -> NvmlLibrary:
        monkeypatch.setattr(pynvml, "nvmlLib", self)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return self

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not hasattr(type(self), f"_{name}"):
            raise AttributeError(name)

        def call(*args: Any) -> int:
            handle = _number(args[0]) if args else -1
            gpu = handle % 100 if handle >= 0 else -1
            error = self.errors.get((name, gpu), self.errors.get((name, -1), OK))
            return error or getattr(self, f"_{name}")(*args)

        return call

    def _nvmlInitWithFlags(self, flags: int) -> int:
        return OK

    def _nvmlShutdown(self) -> int:
        self.shutdowns += 1
        return OK

    def _nvmlErrorString(self, code: int) -> bytes:
        return f"error {code}".encode()

    def _nvmlDeviceGetCount_v2(self, out: Any) -> int:
        return _put(out, len(self.gpus))

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, out: Any) -> int:
        return _put_handle(out, index.value)

    def _nvmlDeviceGetPciInfo_v3(self, handle: Any, out: Any) -> int:
        gpu = self._gpu(handle)
        vendor, device = (int(part, 16) for part in gpu.pci_id.split(":"))
        out._obj.busId = f"0000{gpu.pci.upper()}".encode()
        out._obj.pciDeviceId = device << 16 | vendor
        return OK

    def _nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> int:
        buffer.value = self._told(handle).name.encode()
        return OK

    def _nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: Any) -> int:
        buffer.value = self._told(handle).uuid.encode()
        return OK

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, out: Any) -> int:
        out._obj.total = self._told(handle).memory_nbytes
        return OK

    def _nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        capability = self._gpu(handle).compute_capability
        return _put(major, capability[0]) or _put(minor, capability[1]) if capability else NOT_SUPPORTED

    def _nvmlDeviceGetMemoryAffinity(self, handle: Any, size: int, out: Any, scope: Any) -> int:
        for node in self._gpu(handle).numa_nodes:
            out._obj[node // 64] |= 1 << node % 64
        return OK

    def _nvmlDeviceGetNvLinkState(self, handle: Any, link: int, out: Any) -> int:
        links = self._gpu(handle).links
        if links is None:
            return NOT_SUPPORTED
        return _put(out, link < len(links)) if link < 18 else INVALID

    def _nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: int, out: Any) -> int:
        remote = self._gpu(handle).links[link].remote
        return _put(out, {"gpu": 0, "cpu": 1, "switch": 2, "": 0xFF}[remote])

    def _nvmlDeviceGetNvLinkRemotePciInfo_v2(self, handle: Any, link: int, out: Any) -> int:
        out._obj.busId = (self._gpu(handle).links[link].remote_pci or "FFFFFFFF:FF:FF.FF").encode()
        return OK

    def _nvmlDeviceGetFieldValues(self, handle: Any, count: Any, out: Any) -> int:
        for value in list(out._obj)[: count.value]:
            if value.fieldId == pynvml.NVML_FI_DEV_NVLINK_GET_SPEED:
                value.value.uiVal = int(self._gpu(handle).links[value.scopeId].nbytes_per_s / 1e6)
            else:
                value.nvmlReturn = NOT_SUPPORTED
        return OK

    def _nvmlDeviceGetGpuFabricInfoV(self, handle: Any, out: Any) -> int:
        fabric, answer = self._gpu(handle).fabric, out._obj
        if answer.version != pynvml.nvmlGpuFabricInfo_v2:
            return 25
        if fabric is None:
            return NOT_SUPPORTED
        answer.state = FABRIC_STATES.index(fabric.state)
        answer.status = OK if fabric.status == "success" else 15
        answer.cliqueId = fabric.clique_id
        answer.clusterUuid[:] = bytes.fromhex(fabric.cluster_uuid.replace("-", ""))
        return OK

    def _nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        return _put(current, self._gpu(handle).is_mig)

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, out: Any) -> int:
        return _put(out, 7)

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, out: Any) -> int:
        indexes = [mig.index for mig in self._gpu(handle).mig_devices]
        if index.value not in indexes:
            return NOT_FOUND
        return _put_handle(out, _number(handle) + 100 * (1 + indexes.index(index.value)))

    def _nvmlDeviceGetTopologyCommonAncestor(self, a: Any, b: Any, out: Any) -> int:
        return _put_or_none(out, self._pair(a, b).ancestor)

    def _nvmlDeviceGetP2PStatus(self, a: Any, b: Any, index: int, out: Any) -> int:
        pair = self._pair(a, b)
        return _put_or_none(out, {2: pair.nvlink_status, 0: pair.read_status}[index])

    def _gpu(self, handle: Any) -> Gpu:
        return self.gpus[_number(handle) % 100]

    def _told(self, handle: Any) -> Any:
        part = _number(handle) // 100
        return self._gpu(handle).mig_devices[part - 1] if part else self._gpu(handle)

    def _pair(self, a: Any, b: Any) -> GpuPair:
        return self.pairs[frozenset((_number(a), _number(b)))]


def _number(handle: Any) -> int:
    if isinstance(handle, ctypes.c_uint):
        return handle.value
    if not isinstance(handle, pynvml.c_nvmlDevice_t):
        return -1
    return (ctypes.cast(handle, ctypes.c_void_p).value or 0) - 1


def _put(out: Any, value: int) -> int:
    out._obj.value = int(value)
    return OK


def _put_or_none(out: Any, value: int | None) -> int:
    return NOT_SUPPORTED if value is None else _put(out, value)


def _put_handle(out: Any, number: int) -> int:
    ctypes.memmove(ctypes.addressof(out._obj), ctypes.byref(ctypes.c_void_p(number + 1)), 8)
    return OK
