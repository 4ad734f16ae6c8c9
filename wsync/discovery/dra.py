"""What DRA drivers list in Kubernetes' ResourceSlices: GPUs (`gpu.nvidia.com`) and NICs (`dra.net`) of a node."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from wsync.discovery.hardware import described, grace_numa_node
from wsync.discovery.kubernetes import items_of
from wsync.discovery.pci import address
from wsync.discovery.reading import built, decoded
from wsync.errors import ProbeError
from wsync.topology import Device, Host, Nic, NicKind, Source, Topology

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
_UNITS["Ti"] = 1 << 40


class _Value(msgspec.Struct, frozen=True):
    text: str | None = msgspec.field(name="string", default=None)
    number: int | None = msgspec.field(name="int", default=None)
    flag: bool | None = msgspec.field(name="bool", default=None)


class _Quantity(msgspec.Struct, frozen=True):
    value: str


class _Traits(msgspec.Struct, frozen=True):
    attributes: dict[str, _Value] = {}
    capacity: dict[str, _Quantity] = {}

    def text(self, *names: str) -> str:
        """The first of these attributes that is a text; drivers may leave their own prefix away."""
        values = (self.attributes.get(name) for name in names)
        return next((value.text for value in values if value is not None and value.text), "")


class _SliceDevice(_Traits, frozen=True):
    name: str = ""
    basic: _Traits | None = None
    """Where API versions before v1 have the attributes."""


class _SliceSpec(msgspec.Struct, frozen=True, rename="camel"):
    driver: str
    node_name: str = ""
    devices: tuple[_SliceDevice, ...] = ()


class _Slice(msgspec.Struct, frozen=True):
    spec: _SliceSpec
    kind: str = "ResourceSlice"


def read_resource_slices(text: str, *, host_ids: Mapping[str, str] | None = None) -> Topology:
    """GPUs and NICs of ResourceSlices (`gpu.nvidia.com`, `dra.net`), one or a list; slices of other drivers are noted.

    `host_ids` are by node name. NICs without an RDMA device have their interface's name, or their PCI address.
    """
    hosts: dict[str, Host] = {}
    devices, nics, notes = [], [], []
    for item in items_of(text, "ResourceSlice"):
        spec = decoded(item, _Slice, "a ResourceSlice").spec
        host_id = (host_ids or {}).get(spec.node_name, spec.node_name)
        if not host_id:
            notes.append(f"a ResourceSlice of {spec.driver} is of no one node, not read")
            continue
        hosts[host_id] = Host(host_id=host_id)
        for entry in spec.devices:
            traits = entry.basic or entry
            if spec.driver == "gpu.nvidia.com" and traits.text("type") == "gpu":
                device, more = described(_gpu(entry.name, traits, host_id))
                devices.append(device)
                notes += more
            elif spec.driver == "dra.net" and (nic := _nic(traits, host_id)):
                nics.append(nic)
            elif spec.driver != "dra.net":
                notes.append(f"{host_id}: device '{entry.name}' of {spec.driver} is not read")
    return built(
        "a ResourceSlice", hosts=tuple(hosts.values()), devices=tuple(devices), nics=tuple(nics), notes=tuple(notes)
    )


def _gpu(name: str, traits: _Traits, host_id: str) -> Device:
    number = re.fullmatch(r"gpu-(\d{1,4})", name)
    if number is None:
        raise ProbeError(f"a GPU of gpu.nvidia.com is named '{name:.40}'", hint="gpu-0 or the like is expected")
    device_id = f"{host_id}/gpu{int(number[1])}"
    pci = traits.text("resource.kubernetes.io/pciBusID", "pciBusID")
    product = traits.text("productName")
    device = Device.told(
        Source.PLATFORM,
        device_id=device_id,
        host_id=host_id,
        index=int(number[1]),
        vendor="nvidia",
        name=product,
        uuid=traits.text("uuid"),
        memory_nbytes=_nbytes(traits.capacity["memory"].value) if "memory" in traits.capacity else 0,
        pci=address(pci) if pci else "",
    )
    if product not in ("NVIDIA GB200", "NVIDIA GB300"):
        return device
    numa_node = grace_numa_node(device.pci)  # which the driver does not tell
    return device.joined(Device.told(Source.TABLE, device_id=device_id, host_id=host_id, numa_node=numa_node))


def _nic(traits: _Traits, host_id: str) -> Nic | None:
    """None for interfaces without hardware of their own."""
    value = {name.removeprefix("dra.net/"): told for name, told in traits.attributes.items()}
    pci = traits.text("dra.net/pciAddress")
    if not pci or ("virtual" in value and value["virtual"].flag):
        return None
    name = traits.text("dra.net/rdmaDevice", "dra.net/ifName") or address(pci)
    numa_node = value["numaNode"].number if "numaNode" in value else None
    return Nic.told(
        Source.PLATFORM,
        nic_id=f"{host_id}/{name}",
        host_id=host_id,
        kind=_nic_kind(traits, is_rdma="rdma" in value and value["rdma"].flag is True),
        name=name,
        netdev=traits.text("dra.net/ifName"),
        pci=address(pci),
        numa_node=-1 if numa_node is None else max(numa_node, -1),
        is_up={"up": True, "down": False}.get(traits.text("dra.net/state")),
    )


def _nic_kind(traits: _Traits, *, is_rdma: bool) -> NicKind | None:
    """Pods see no interface of most RDMA devices, and without one only EFA tells what it is."""
    if is_rdma and "(EFA)" in traits.text("dra.net/pciDevice"):
        return NicKind.EFA
    encapsulation = traits.text("dra.net/encapsulation")
    if encapsulation == "infiniband":
        return NicKind.INFINIBAND
    if encapsulation == "ether":
        return NicKind.ROCE if is_rdma else NicKind.ETHERNET
    return None


def _nbytes(text: str) -> int:
    found = re.fullmatch(r"(\d{1,18})([a-zA-Z]{0,2})", text)
    if found is None or found[2] not in _UNITS:
        raise ProbeError(f"'{text:.40}' is no quantity of memory", hint="189471Mi or the like is expected")
    return int(found[1]) * _UNITS[found[2]]
