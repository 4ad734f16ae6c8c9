"""AMD GPUs through `amdsmi`, the Python library of ROCm: for hosts whose tree of KFD is not to be read.

Its answers are dictionaries; they are believed where they are of the form that AMD's reference of the Python API gives,
and refused where they are not. What a GPU or this version of the library does not have stays unknown.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, TypeVar

import msgspec

from wsync.discovery.pci import address
from wsync.discovery.xgmi import PCIE, UNTOLD, XGMI, Edge, Node, Package, checked_modes, topology_of
from wsync.errors import ProbeError
from wsync.topology import Source, Topology

T = TypeVar("T")

SILENT = frozenset({2, 3, 10, 31, 40})
"""Codes of `amdsmi.h`: not supported, not yet implemented, no permission, not found, no data."""
_HEX = "0x[0-9a-fA-F]{1,16}"
_HINT = "see whether amd-smi works here, in this container"


class _Asic(msgspec.Struct, frozen=True):
    vendor_id: str
    device_id: str
    market_name: str = ""
    asic_serial: str = ""
    target_graphics_version: str = ""


class _Kfd(msgspec.Struct, frozen=True):
    node_id: int | str


class _Enumeration(msgspec.Struct, frozen=True):
    hip_uuid: str = ""


class _Xgmi(msgspec.Struct, frozen=True):
    xgmi_hive_id: int


class _Type(msgspec.Struct, frozen=True):
    hops: int
    type: int


class _Rates(msgspec.Struct, frozen=True):
    min_bandwidth: int
    max_bandwidth: int


class _Gpu(msgspec.Struct, frozen=True):
    """A processor of the library: a GPU or a partition of one."""

    handle: Any
    number: int
    """Of its node in KFD, which HIP's order is that of."""
    pci: str
    asic: _Asic

    @property
    def key(self) -> str:
        """The same for all partitions of one GPU: its serial number, else its address without the function."""
        return self.pci.rpartition(".")[0] if self.asic.asic_serial in UNTOLD else self.asic.asic_serial


class _Library:
    """The calls of `amdsmi`."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def ask(self, shape: type[T], call: str, *args: Any) -> T | None:
        """The answer, checked; None where the GPU, the driver or this version of the library does not have it."""
        function = getattr(self.library, call, None)
        if function is None:
            return None
        try:
            answer = function(*args)
        except self.library.AmdSmiLibraryException as error:
            if error.get_error_code() in SILENT:
                return None
            raise
        try:
            return msgspec.convert(answer, shape)
        except msgspec.ValidationError as error:
            raise ProbeError(f"{call} of amdsmi answers {answer!r:.120}: {error}", hint=_HINT) from error

    def need(self, shape: type[T], call: str, *args: Any) -> T:
        answer = self.ask(shape, call, *args)
        if answer is None:
            raise ProbeError(f"amdsmi has no answer to {call}", hint="a newer ROCm has it")
        return answer

    def link_types(self) -> dict[int, str]:
        """By the numbers of this version of the library, which others number differently."""
        enum = getattr(self.library, "AmdSmiLinkType", None)
        names = {"AMDSMI_LINK_TYPE_XGMI": XGMI, "AMDSMI_LINK_TYPE_PCIE": PCIE}
        if enum is None or not all(hasattr(enum, name) for name in names):
            raise ProbeError("this version of amdsmi does not name its types of links", hint="a newer ROCm does")
        return {int(getattr(enum, name)): kind for name, kind in names.items()}


def probe(host_id: str) -> Topology | None:
    """The GPUs that the library tells of; None where it is not to be had, or has no driver below it.

    Raises ProbeError where it answers in another form than its reference says.
    """
    with _opened() as amdsmi:
        if amdsmi is None:
            return None
        gpus = _gpus(amdsmi)
        if not gpus:
            return Topology()
        groups: dict[str, list[_Gpu]] = {}
        for gpu in gpus:
            groups.setdefault(gpu.key, []).append(gpu)
        packages = [_package(amdsmi, group) for group in groups.values()]
        return topology_of(packages, list(_edges(amdsmi, gpus)), host_id=host_id, source=Source.DRIVER)


@contextlib.contextmanager
def _opened() -> Iterator[_Library | None]:
    try:
        # It prints where it does not find its own library, and then cannot be imported.
        with contextlib.redirect_stdout(io.StringIO()):
            library = importlib.import_module("amdsmi")
            library.amdsmi_init()
    except Exception:
        # Whatever it is that is missing: the caller has other sources.
        yield None
        return
    try:
        yield _Library(library)
    except library.AmdSmiException as error:
        raise ProbeError(f"amdsmi cannot be read ({' '.join(str(error).split())})", hint=_HINT) from error
    finally:
        library.amdsmi_shut_down()


def _gpus(amdsmi: _Library) -> list[_Gpu]:
    """In the order of their nodes; in that of the library if it does not tell these."""
    handles = amdsmi.need(list[Any], "amdsmi_get_processor_handles")
    nodes = [amdsmi.ask(_Kfd, "amdsmi_get_gpu_kfd_info", handle) for handle in handles]
    told = [node.node_id for node in nodes if node is not None and isinstance(node.node_id, int)]
    numbers = told if len(set(told)) == len(handles) else list(range(len(handles)))
    gpus = [
        _Gpu(
            handle,
            number,
            address(amdsmi.need(str, "amdsmi_get_gpu_device_bdf", handle)),
            amdsmi.need(_Asic, "amdsmi_get_gpu_asic_info", handle),
        )
        for number, handle in zip(numbers, handles, strict=True)
    ]
    return sorted(gpus, key=lambda gpu: gpu.number)


def _package(amdsmi: _Library, group: Sequence[_Gpu]) -> Package:
    """A GPU of these nodes. Partitions are not asked for memory: nobody says whether they tell their own or all."""
    first = group[0]
    pci = min(gpu.pci for gpu in group)
    asked = ("amdsmi_get_gpu_compute_partition", "amdsmi_get_gpu_memory_partition")
    mode, memory_mode = checked_modes(pci, *(amdsmi.ask(str, call, first.handle) or "" for call in asked))
    is_partitioned = len(group) > 1 or mode not in ("", "SPX")
    kind = getattr(getattr(amdsmi.library, "AmdSmiMemoryType", None), "VRAM", None)
    memory = amdsmi.ask(int, "amdsmi_get_gpu_memory_total", first.handle, kind) if not is_partitioned else 0
    hive = amdsmi.ask(_Xgmi, "amdsmi_get_xgmi_info", first.handle)
    enumeration = amdsmi.ask(_Enumeration, "amdsmi_get_gpu_enumeration_info", first.handle)
    numa_node = amdsmi.ask(int, "amdsmi_topo_get_numa_node_number", first.handle)
    version, name = first.asic.target_graphics_version, first.asic.market_name
    return Package(
        nodes=tuple(Node(gpu.number) for gpu in group),
        pci=pci,
        pci_id=f"{_hex(first.asic.vendor_id)}:{_hex(first.asic.device_id)}",
        mode=mode,
        memory_mode=memory_mode,
        hive_id=hive.xgmi_hive_id if hive else 0,
        uuid=enumeration.hip_uuid if enumeration else "",
        name="" if name in UNTOLD else name,
        architecture=version if re.fullmatch("gfx[0-9a-f]{3,5}", version) else "",
        # The library has it as an unsigned number: none is the largest one.
        numa_node=numa_node if numa_node is not None and numa_node < 9999 else -1,
        memory_nbytes=memory or 0,
    )


def _hex(text: str) -> str:
    if not re.fullmatch(_HEX, text) or int(text, 16) > 0xFFFF:
        raise ProbeError(f"amdsmi says '{text:.40}', which is no PCI id", hint=_HINT)
    return f"{int(text, 16):04x}"


def _edges(amdsmi: _Library, gpus: Sequence[_Gpu]) -> Iterator[Edge]:
    """Of each two nodes of different GPUs that a link joins without another GPU between them."""
    kinds = amdsmi.link_types()
    for a, b in combinations(gpus, 2):
        if a.key == b.key:
            continue
        link = amdsmi.ask(_Type, "amdsmi_topo_get_link_type", a.handle, b.handle)
        kind = kinds.get(link.type, "") if link else ""
        if link is None or not kind or (kind == XGMI and link.hops > 1):
            continue
        # As KFD has them, in MB/s; the library tells them of xGMI alone.
        call = "amdsmi_get_minmax_bandwidth_between_processors"
        rates = amdsmi.ask(_Rates, call, a.handle, b.handle) if kind == XGMI else None
        yield Edge(kind, a.number, b.number, *(msgspec.structs.astuple(rates) if rates else (0, 0)))
