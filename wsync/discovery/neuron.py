"""AWS Trainium and Inferentia through `neuron-ls -j`, and the PCI ids of the devices from sysfs.

Neuron 2.34 ends this form of the output in favour of `--output-format json`, whose form is not published: that is
refused, not guessed at. Which UltraServer a host belongs to is not the tool's to say; the platform knows it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated

import msgspec

from wsync.discovery.hardware import described, identify
from wsync.discovery.pci import address
from wsync.discovery.reading import built, decoded
from wsync.discovery.sources import SYSFS, numa_node_of, output_of, pci_functions
from wsync.errors import ProbeError
from wsync.topology import Device, Domain, DomainKind, Host, Link, Source, Topology

VENDOR = "1d0f"
BETWEEN_INSTANCES = {"Trn2u": 256e9}
"""NeuronLink of one chip to the other instances of its UltraServer, bytes/s per direction, as AWS states it."""

_Index = Annotated[int, msgspec.Meta(ge=0, le=9999)]


class _Listed(msgspec.Struct, frozen=True):
    """A device as `neuron-ls -j` lists it; `numa_node` is text there, and `connected_to` null for an only one."""

    neuron_device: _Index
    bdf: str
    connected_to: list[_Index] | None
    memory_size: Annotated[int, msgspec.Meta(gt=0, le=2**63 - 1)]
    numa_node: str = "-1"


def read_neuron_ls(
    text: str,
    *,
    host_id: str,
    instance_type: str = "",
    ultraserver_id: str = "",
    pci_ids: Mapping[str, str] | None = None,
) -> Topology:
    """The devices of one host from the output of `neuron-ls -j`, joined as it says; `pci_ids` are by PCI address.

    With `ultraserver_id` they are also members of that domain, which spans hosts. Raises ProbeError where the text is
    no such output, where two devices have one number, or where they disagree on whether they are joined.
    """
    listed = decoded(text, list[_Listed], "the output of 'neuron-ls -j' (before Neuron 2.34)")
    if not listed:
        return Topology()
    by_index = {one.neuron_device: one for one in listed}
    devices: list[Device] = []
    notes: list[str] = []
    for one in listed:
        me, peers = one.neuron_device, set(one.connected_to or ())
        for peer in sorted(peers & set(by_index)):
            if peer == me or _count(by_index, me, peer) != _count(by_index, peer, me):
                raise ProbeError(f"neuron-ls: {me} is connected to {peer}, but not {peer} as often to it")
        pci = address(one.bdf)
        read = Device.told(
            Source.DRIVER,
            device_id=f"{host_id}/neuron{me}",
            host_id=host_id,
            index=me,
            vendor="aws",
            memory_nbytes=one.memory_size,
            pci=pci,
            numa_node=numa_node_of(one.numa_node, "neuron-ls: numa_node"),
            num_links=len(one.connected_to or ()),
        )
        pci_id = (pci_ids or {}).get(pci, "")
        seen = Device.told(Source.SYSFS, device_id=read.device_id, host_id=host_id, pci_id=pci_id)
        device, more = described(read.joined(seen), instance_type=instance_type)
        devices.append(device)
        notes += more
        if hidden := peers - set(by_index):
            notes.append(f"{device.device_id}: connected to {sorted(hidden)}, which are not visible here")
    if len(devices) > 1 and not any(device.num_links for device in devices):
        notes.append(f"{host_id}: neuron-ls names no connections of its {len(devices)} devices")
    return built(
        "neuron-ls",
        hosts=(Host.told(Source.PLATFORM, host_id=host_id, instance_type=instance_type),),
        devices=tuple(devices),
        domains=(*_islands(host_id, devices, by_index), *_ultraserver(host_id, devices, ultraserver_id, notes)),
        links=tuple(_links(devices, by_index)),
        notes=tuple(notes),
    )


def probe(host_id: str, *, ultraserver_id: str = "", sysfs: Path = SYSFS) -> Topology:
    """The devices of this machine; nothing where the PCI bus has none."""
    found = {function.address: function.pci_id for function in pci_functions(VENDOR, sysfs=sysfs)}
    known = [pci for pci, pci_id in found.items() if identify(pci_id=pci_id)]
    if not known:
        return Topology()
    tool = shutil.which("neuron-ls") or shutil.which("/opt/aws/neuron/bin/neuron-ls")
    if tool is None:
        raise ProbeError(f"{known[0]} is a Neuron device, but there is no neuron-ls", hint="install aws-neuronx-tools")
    return read_neuron_ls(
        output_of(tool, "-j"),
        host_id=host_id,
        instance_type=_instance_type(sysfs),
        ultraserver_id=ultraserver_id,
        pci_ids=found,
    )


def _instance_type(sysfs: Path) -> str:
    """What EC2 writes into the firmware's product name; empty on anything else."""
    try:
        text = (sysfs / "class/dmi/id/product_name").read_text(errors="replace").strip()
    except OSError:
        return ""
    return text if text.startswith(("trn", "inf")) else ""


def _count(by_index: Mapping[int, _Listed], a: int, b: int) -> int:
    """How many links `a` has to `b`."""
    return (by_index[a].connected_to or []).count(b)


def _links(devices: Sequence[Device], by_index: Mapping[int, _Listed]) -> Iterator[Link]:
    """Two devices may be joined by several links: the rate is that of all of them."""
    for a, b in combinations(devices, 2):
        if num_links := _count(by_index, a.index, b.index):
            rate = num_links * a.link_nbytes_per_s
            yield Link.told(Source.TABLE, a=a.device_id, b=b.device_id, kind="NEURONLINK", nbytes_per_s=rate)


def _islands(host_id: str, devices: Sequence[Device], by_index: Mapping[int, _Listed]) -> Iterator[Domain]:
    """Devices that reach one another over NeuronLink, through others if need be."""
    left = {device.index: device for device in devices}
    count = 0
    for start in sorted(left):
        island: dict[int, Device] = {}
        border = [start]
        while border:
            index = border.pop()
            if index in left:
                island[index] = left.pop(index)
                border += by_index[index].connected_to or ()
        if len(island) > 1:
            rates = [d.num_links * d.link_nbytes_per_s for d in island.values()]
            yield _domain(f"{host_id}/neuronlink{count}", [island[i] for i in sorted(island)], min(rates))
            count += 1


def _ultraserver(host_id: str, devices: Sequence[Device], ultraserver_id: str, notes: list[str]) -> Iterator[Domain]:
    rates = {BETWEEN_INSTANCES.get(device.sku, 0.0) for device in devices}
    if ultraserver_id:
        yield _domain(ultraserver_id, devices, min(rates))
    elif rates != {0.0}:
        notes.append(
            f"{host_id}: is an instance of an UltraServer, but nobody says of which: only its own links are known"
        )


def _domain(domain_id: str, devices: Sequence[Device], nbytes_per_s: float) -> Domain:
    """The members as the driver tells them, with the rate of the hardware table."""
    members = tuple(device.device_id for device in devices)
    read = Domain.told(Source.DRIVER, domain_id=domain_id, kind=DomainKind.NEURONLINK, members=members)
    rate = Domain.told(Source.TABLE, domain_id=domain_id, kind=DomainKind.NEURONLINK, nbytes_per_s=nbytes_per_s)
    return read.joined(rate)
