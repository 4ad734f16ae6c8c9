"""A stand-in for `amdsmi`, the Python library of ROCm: the calls and answers of AMD's reference of its Python API."""

from __future__ import annotations

import sys
import types
from enum import IntEnum
from typing import Any

import msgspec

NOT_SUPPORTED = 2
XGMI, PCIE = 2, 1


class Processor(msgspec.Struct, frozen=True, kw_only=True):
    """What the library says of one processor; an answer of None is the error that it is not supported."""

    bdf: str
    node_id: int | str = "N/A"
    asic: dict[str, Any]
    compute: str | None = None
    memory: str | None = None
    hive: int | None = 0
    numa_node: int | None = 0
    vram: int | None = None
    hip_uuid: str | None = None


class AmdSmiException(Exception):
    pass


class AmdSmiLibraryException(AmdSmiException):
    def __init__(self, err_code: int) -> None:
        super().__init__(err_code)
        self.err_code = err_code

    def get_error_code(self) -> int:
        return self.err_code

    def __str__(self) -> str:
        return f"Error code:\n\t{self.err_code} | an error"


class AmdSmiLinkType(IntEnum):
    AMDSMI_LINK_TYPE_INTERNAL = 0
    AMDSMI_LINK_TYPE_PCIE = PCIE
    AMDSMI_LINK_TYPE_XGMI = XGMI
    AMDSMI_LINK_TYPE_NOT_APPLICABLE = 3
    AMDSMI_LINK_TYPE_UNKNOWN = 4


class AmdSmiMemoryType(IntEnum):
    VRAM = 0
    VIS_VRAM = 1
    GTT = 2


def asic(device_id: int = 0x74A1, serial: str = "0x000000000000ABC0", **changes: Any) -> dict[str, Any]:
    return {
        "market_name": "AMD Instinct MI300X",
        "vendor_id": "0x1002",
        "vendor_name": "Advanced Micro Devices Inc. [AMD/ATI]",
        "subvendor_id": "0x1002",
        "device_id": hex(device_id),
        "rev_id": "0x00",
        "asic_serial": serial,
        "oam_id": 0,
        "num_compute_units": 304,
        "target_graphics_version": "gfx942",
        "subsystem_id": "0x74A1",
        **changes,
    }


class AmdsmiLibrary(types.ModuleType):
    """`links` maps two processors to type, hops and rates; `errors` a call to the error that it gives."""

    AmdSmiException = AmdSmiException
    AmdSmiLibraryException = AmdSmiLibraryException
    AmdSmiLinkType = AmdSmiLinkType
    AmdSmiMemoryType = AmdSmiMemoryType

    def __init__(
        self,
        processors: list[Processor],
        links: dict[frozenset[int], tuple[int, int, int, int]] | None = None,
        errors: dict[str, int] | None = None,
    ) -> None:
        super().__init__("amdsmi")
        self.processors, self.links, self.errors = processors, links or {}, errors or {}
        self.opened = self.closed = 0

    def install(self, monkeypatch: Any) -> AmdsmiLibrary:
        monkeypatch.setitem(sys.modules, "amdsmi", self)
        return self

    def amdsmi_init(self) -> None:
        self._fail("amdsmi_init")
        self.opened += 1

    def amdsmi_shut_down(self) -> None:
        self.closed += 1

    def amdsmi_get_processor_handles(self) -> list[Any]:
        self._fail("amdsmi_get_processor_handles")
        return list(range(len(self.processors)))

    def amdsmi_get_gpu_device_bdf(self, handle: int) -> str:
        return self.processors[handle].bdf

    def amdsmi_get_gpu_asic_info(self, handle: int) -> dict[str, Any]:
        return self.processors[handle].asic

    def amdsmi_get_gpu_kfd_info(self, handle: int) -> dict[str, Any]:
        return {"kfd_id": 100 + handle, "node_id": self.processors[handle].node_id, "current_partition_id": 0}

    def amdsmi_get_gpu_compute_partition(self, handle: int) -> str:
        return self._told(self.processors[handle].compute)

    def amdsmi_get_gpu_memory_partition(self, handle: int) -> str:
        return self._told(self.processors[handle].memory)

    def amdsmi_get_gpu_enumeration_info(self, handle: int) -> dict[str, Any]:
        uuid = self._told(self.processors[handle].hip_uuid)
        return {"drm_render": 128 + handle, "drm_card": handle, "hsa_id": handle, "hip_id": handle, "hip_uuid": uuid}

    def amdsmi_get_gpu_memory_total(self, handle: int, kind: AmdSmiMemoryType) -> int:
        assert kind is AmdSmiMemoryType.VRAM
        return self._told(self.processors[handle].vram)

    def amdsmi_topo_get_numa_node_number(self, handle: int) -> int:
        return self._told(self.processors[handle].numa_node)

    def amdsmi_get_xgmi_info(self, handle: int) -> dict[str, int]:
        hive = self._told(self.processors[handle].hive)
        return {"xgmi_lanes": 16, "xgmi_hive_id": hive, "xgmi_node_id": handle, "index": 0}

    def amdsmi_topo_get_link_type(self, a: int, b: int) -> dict[str, int]:
        kind, hops, _, _ = self._told(self.links.get(frozenset((a, b))))
        return {"hops": hops, "type": kind}

    def amdsmi_get_minmax_bandwidth_between_processors(self, a: int, b: int) -> dict[str, int]:
        kind, _, slow, fast = self.links[frozenset((a, b))]
        if kind != XGMI:
            raise AmdSmiLibraryException(NOT_SUPPORTED)
        return {"min_bandwidth": slow, "max_bandwidth": fast}

    def _told(self, answer: Any) -> Any:
        if answer is None:
            raise AmdSmiLibraryException(NOT_SUPPORTED)
        return answer

    def _fail(self, call: str) -> None:
        if call in self.errors:
            raise AmdSmiLibraryException(self.errors[call])
