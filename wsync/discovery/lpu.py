"""Groq LPUs, found by their PCI id: identified, no transport. No public driver or library tells more or moves bytes."""

from __future__ import annotations

from pathlib import Path

from wsync.discovery.hardware import described, identify
from wsync.discovery.sources import SYSFS, pci_functions
from wsync.topology import Device, Host, Source, Topology

VENDOR = "1de0"


def read_pci(sysfs: Path, *, host_id: str) -> Topology:
    """The LPUs in a sysfs tree, each with its address and NUMA node; there are no domains and no links among them."""
    devices: list[Device] = []
    notes: list[str] = []
    for index, function in enumerate(pci_functions(VENDOR, sysfs=sysfs)):
        read = Device.told(
            Source.SYSFS,
            device_id=f"{host_id}/lpu{index}",
            host_id=host_id,
            index=index,
            vendor="groq",
            pci=function.address,
            pci_id=function.pci_id,
            numa_node=function.numa_node,
        )
        device, more = described(read)
        row = identify(pci_id=function.pci_id)
        devices.append(device)
        notes += [*more, f"{device.device_id}: {row.reason if row else 'no transport is known for it'}"]
    return (
        Topology(hosts=(Host(host_id=host_id),), devices=tuple(devices), notes=tuple(notes)) if devices else Topology()
    )


def probe(host_id: str, *, sysfs: Path = SYSFS) -> Topology:
    """The LPUs of this machine; nothing where there are none."""
    return read_pci(sysfs, host_id=host_id)
