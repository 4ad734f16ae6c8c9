"""Look-ups in the hardware table (`skus`): which SKU a device is, what that adds to it, and where the two disagree.

A device is identified by its PCI id, else by the exact name that its driver gives. One that the table does not have
stays unknown and is described by what was read of it: no look-up ever guesses from a likeness.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wsync.discovery.skus import DISAGREEMENTS, NICS, SKUS, DevicePath, Disagreement, NicModel, Sku
from wsync.topology import Device, Source

__all__ = [
    "DISAGREEMENTS",
    "NICS",
    "SKUS",
    "DevicePath",
    "Disagreement",
    "NicModel",
    "Sku",
    "conflicts",
    "described",
    "grace_numa_node",
    "identify",
    "identify_nic",
    "paths_of",
    "pci_id_of",
    "sku_named",
]

MEMORY_TOLERANCE = 0.1
"""Drivers keep some memory for themselves, and clouds and makers count in different units: that much is no conflict."""

_NOT_WITH_MIG = frozenset({DevicePath.CUDA_IPC, DevicePath.CUDA_FABRIC, DevicePath.PCIE_P2P, DevicePath.NVLS})
_GRACE_NUMA_NODES = {"0008": 0, "0009": 0, "0018": 1, "0019": 1}


def pci_id_of(vendor: int, device: int) -> str:
    """`10de:2330` of the two numbers."""
    return f"{vendor:04x}:{device:04x}"


def grace_numa_node(pci: str) -> int:
    """NUMA node of a device in a GB200 or GB300 tray by its PCI domain, -1 if it is in none of the known ones.

    There the PCI distance of GPU and NIC says nothing: clouds show pairs of one CPU as SYS or as NODE.
    """
    return _GRACE_NUMA_NODES.get(pci.split(":")[0], -1)


def sku_named(sku: str) -> Sku | None:
    return next((row for row in SKUS if row.sku == sku), None)


def paths_of(device: Device) -> tuple[DevicePath, ...] | None:
    """Paths that its SKU can use: empty if it has none (`Sku.reason`), None if the SKU is not known."""
    row = sku_named(device.sku)
    return None if row is None else row.paths


def identify(
    *, name: str = "", pci_id: str = "", instance_type: str = "", memory_nbytes: int = 0, num_links: int = 0
) -> Sku | None:
    """The SKU with that PCI id, else the one with exactly that name, else that of the instance type, else None.

    Where several rows share the PCI id, what else is given narrows them, in the order name, instance type, memory,
    links, each only as far as it leaves one; the plain row of what remains is returned. `conflicts` tells what does not
    fit.
    """
    by_pci: Callable[[Sku], bool] = lambda row: pci_id.lower() in row.pci_ids  # noqa: E731
    by_name: Callable[[Sku], bool] = lambda row: name in row.names  # noqa: E731
    by_instance: Callable[[Sku], bool] = lambda row: _is_instance(row, instance_type)  # noqa: E731
    rows = next((found for test in (by_pci, by_name, by_instance) if (found := [r for r in SKUS if test(r)])), [])
    for narrowing in (
        by_name,
        by_instance,
        lambda row: bool(memory_nbytes) and _is_near(memory_nbytes, row.memory_nbytes),
        lambda row: bool(num_links) and num_links == row.num_links,
    ):
        rows = [row for row in rows if narrowing(row)] or rows
    return rows[0] if rows else None


def conflicts(
    sku: Sku, *, name: str = "", pci_id: str = "", instance_type: str = "", memory_nbytes: int = 0, num_links: int = 0
) -> tuple[str, ...]:
    """One sentence for each reading that does not fit the row; readings that were not made are at their default."""
    found: list[str] = []
    for what, given, other in (
        ("name", name, identify(name=name)),
        ("PCI id", pci_id, identify(pci_id=pci_id)),
        ("instance type", instance_type, identify(instance_type=instance_type)),
    ):
        if other is not None and other is not sku and not set(other.pci_ids) & set(sku.pci_ids):
            found.append(f"taken for {sku.sku}, though its {what} '{given}' is that of {other.sku}")
    if memory_nbytes and sku.memory_nbytes and not _is_near(memory_nbytes, sku.memory_nbytes):
        found.append(f"has {memory_nbytes} bytes of memory, a {sku.sku} has {sku.memory_nbytes}")
    if num_links and sku.num_links and num_links != sku.num_links:
        found.append(f"has {num_links} scale-up links up, a {sku.sku} has {sku.num_links}")
    return tuple(found)


def described(device: Device, *, instance_type: str = "") -> tuple[Device, tuple[str, ...]]:
    """The device with what the table adds, as facts of `Source.TABLE`, and what there is to note of it.

    What was read stays as it is. A partition gets no size and no rate: the table knows only wholes; and NVIDIA's have
    no way to their peers. Whether links are up is never taken from the table.
    """
    whole = not device.partition_of
    read: dict[str, Any] = {"name": device.name, "pci_id": device.pci_id, "instance_type": instance_type}
    if whole:
        read |= {"memory_nbytes": device.memory_nbytes, "num_links": device.num_links}
    row = identify(**read)
    if row is None:
        known_by = device.pci_id or device.name or "neither a PCI id nor a name"
        return device, (f"{device.device_id}: no SKU of the table ({known_by}); described by what was read",)
    added: dict[str, Any] = {"vendor": row.vendor, "sku": row.sku, "architecture": row.architecture}
    lacks = _NOT_WITH_MIG if device.partition_of and row.vendor == "nvidia" else frozenset[DevicePath]()
    added["paths"] = tuple(path.value for path in row.paths if path not in lacks)
    if whole:
        for field in ("memory_nbytes", "memory_nbytes_per_s", "link_nbytes_per_s"):
            added[field] = getattr(row, field)
    extra = Device.told(Source.TABLE, device_id=device.device_id, host_id=device.host_id, **added)
    return device.joined(extra), tuple(f"{device.device_id}: {note}" for note in conflicts(row, **read))


def identify_nic(pci_id: str) -> NicModel | None:
    """The NIC with that PCI id, a whole vendor's where the table has no more; None if unknown."""
    pci_id = pci_id.lower()
    return next((row for row in NICS if pci_id in row.pci_ids or f"{pci_id.split(':')[0]}:" in row.pci_ids), None)


def _is_instance(row: Sku, instance_type: str) -> bool:
    return bool(row.instance_types) and instance_type.startswith(row.instance_types)


def _is_near(nbytes: int, table: int) -> bool:
    return abs(nbytes - table) <= MEMORY_TOLERANCE * table
