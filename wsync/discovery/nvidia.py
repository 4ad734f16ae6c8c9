"""NVIDIA GPUs through NVML: identity, memory, MIG partitions, NVLink pair by pair, and the fabric that spans hosts.

`take_reading` asks NVML and gives plain records; `read_nvml` decides what of them is believed.
"""

from __future__ import annotations

from collections.abc import Iterable

from wsync.discovery.hardware import described, grace_numa_node, sku_named
from wsync.discovery.nvlink import nvlink_domains
from wsync.discovery.nvml import Gpu, GpuPair, MigDevice, NvmlReading, take_reading
from wsync.discovery.reading import built
from wsync.errors import ProbeError
from wsync.topology import Device, Host, Link, Source, Topology

P2P_STATUS = (
    "ok",
    "chipset not supported",
    "GPU not supported",
    "IO hub topology not supported",
    "disabled by registry key",
    "not supported",
    "unknown",
)
ANCESTORS = {0: "PSB", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def probe(host_id: str) -> Topology:
    """The GPUs of this machine; an empty Topology where there is no NVIDIA driver.

    Raises ProbeError where there is one and NVML or its Python library cannot be used.
    """
    reading = take_reading()
    return Topology() if reading is None else read_nvml(reading, host_id=host_id)


def read_nvml(reading: NvmlReading, *, host_id: str) -> Topology:
    """What of the reading is believed; the rest is in the notes. Raises ProbeError where it contradicts itself."""
    notes = [f"{host_id}: {note}" for note in reading.notes]
    devices: dict[int, Device] = {}
    partitions: list[Device] = []
    for gpu in reading.gpus:
        if gpu.index in devices:
            raise ProbeError(f"NVML tells of GPU {gpu.index} of {host_id} twice")
        devices[gpu.index], more = _device(gpu, host_id)
        notes += more
        for mig in gpu.mig_devices:
            partition, more = _partition(mig, devices[gpu.index])
            partitions.append(partition)
            notes += more
    gpus = {gpu.index: gpu for gpu in reading.gpus}
    pairs: dict[frozenset[int], GpuPair] = {}
    for pair in reading.pairs:
        if pair.a == pair.b or pair.a not in gpus or pair.b not in gpus:
            raise ProbeError(f"NVML tells of a pair {pair.a}, {pair.b} of GPUs that {host_id} does not have")
        pairs[frozenset((pair.a, pair.b))] = pair
    counts: dict[frozenset[str], int | None] = {}
    for key, pair in pairs.items():
        is_joined, count, note = _nvlinks(gpus[pair.a], gpus[pair.b], pair)
        ends = frozenset(devices[index].device_id for index in key)
        if is_joined:
            counts[ends] = count
        if note:
            notes.append(f"{devices[pair.a].device_id} and {devices[pair.b].device_id}: {note}")
    fabrics = {devices[gpu.index].device_id: _fabric_key(gpu) for gpu in reading.gpus}
    domains, more = nvlink_domains(list(devices.values()), fabrics, lambda a, b: frozenset((a, b)) in counts)
    links = [_link(pair, devices, counts) for pair in pairs.values()]
    return built(
        f"NVML on {host_id}",
        hosts=(Host(host_id=host_id),),
        devices=(*devices.values(), *partitions),
        domains=domains,
        links=tuple(link for link in links if link is not None),
        notes=(*notes, *more, *_peer_notes(pairs.values(), devices)),
    )


def _device(gpu: Gpu, host_id: str) -> tuple[Device, list[str]]:
    device_id = f"{host_id}/gpu{gpu.index}"
    rates = {link.nbytes_per_s for link in gpu.links or ()}
    read = Device.told(
        Source.DRIVER,
        device_id=device_id,
        host_id=host_id,
        index=gpu.index,
        vendor="nvidia",
        name=gpu.name,
        uuid=gpu.uuid,
        architecture="sm_{}{}".format(*gpu.compute_capability) if gpu.compute_capability else "",
        memory_nbytes=gpu.memory_nbytes,
        pci=gpu.pci,
        pci_id=gpu.pci_id,
        numa_node=gpu.numa_nodes[0] if gpu.numa_nodes else -1,
        num_links=len(gpu.links or ()),
        link_nbytes_per_s=min(rates, default=0.0),
        partition_mode="mig" if gpu.is_mig else "",
    )
    device, found = described(read)
    notes = list(found)
    if device.sku in ("GB200", "GB300") and (node := grace_numa_node(device.pci)) >= 0:
        device = device.joined(Device.told(Source.TABLE, device_id=device_id, host_id=host_id, numa_node=node))
    row = sku_named(device.sku)
    if gpu.links == () and row is not None and row.num_links:
        notes.append(f"{device_id}: none of the {row.num_links} NVLinks of a {row.sku} is up")
    if len(rates) > 1:
        notes.append(f"{device_id}: its NVLinks have different rates; the lowest is taken")
    if gpu.fabric is not None and gpu.fabric.doubt:
        notes.append(f"{device_id}: {gpu.fabric.doubt}")
    return device, notes


def _partition(mig: MigDevice, whole: Device) -> tuple[Device, list[str]]:
    read = Device.told(
        Source.DRIVER,
        device_id=f"{whole.device_id}/part{mig.index}",
        host_id=whole.host_id,
        vendor=whole.vendor,
        name=mig.name,
        uuid=mig.uuid,
        memory_nbytes=mig.memory_nbytes,
        pci=whole.pci,
        pci_id=whole.pci_id,
        partition_of=whole.device_id,
        partition_mode=mig.profile,
    )
    device, notes = described(read)
    return device, list(notes)


def _fabric_key(gpu: Gpu) -> str:
    """A GPU all of whose NVLinks are down, or that is cut into partitions, reaches nobody through a fabric."""
    if gpu.fabric is None or gpu.is_mig or gpu.links == ():
        return ""
    return gpu.fabric.key


def _nvlinks(a: Gpu, b: Gpu, pair: GpuPair) -> tuple[bool, int | None, str]:
    """Whether NVLink joins the two, by how many links (None if nobody says), and what is to note."""
    if a.is_mig or b.is_mig:
        return False, None, ""
    direct = sum(link.remote_pci == b.pci for link in a.links or ())
    through = min(_to_switch(a), _to_switch(b))
    if pair.nvlink_status not in (None, 0):
        note = f"{direct} NVLinks between them, yet no access over NVLink" if direct else ""
        return False, None, note
    if direct:
        return True, direct, ""
    if pair.nvlink_status is None:
        note = "both have NVLinks to a switch; whether they reach one another is not said" if through else ""
        return False, None, note
    if a.links is None or b.links is None:
        return True, None, ""
    if through:
        return True, through, ""
    return False, None, "the driver grants access over NVLink, yet no NVLink between them is up: not believed"


def _to_switch(gpu: Gpu) -> int:
    return sum(link.remote in ("switch", "") for link in gpu.links or ())


def _link(pair: GpuPair, devices: dict[int, Device], counts: dict[frozenset[str], int | None]) -> Link | None:
    a, b = devices[pair.a], devices[pair.b]
    ends = frozenset((a.device_id, b.device_id))
    if ends not in counts:
        kind = ANCESTORS.get(-1 if pair.ancestor is None else pair.ancestor, "")
        return Link.told(Source.DRIVER, a=a.device_id, b=b.device_id, kind=kind) if kind else None
    count = counts[ends]
    if count is None:
        return Link.told(Source.DRIVER, a=a.device_id, b=b.device_id, kind="NV")
    slower = min(a, b, key=lambda device: device.link_nbytes_per_s)
    source = slower.facts.get("link_nbytes_per_s", Source.DRIVER)
    rate = count * slower.link_nbytes_per_s
    return Link.told(source, a=a.device_id, b=b.device_id, kind=f"NV{count}", nbytes_per_s=rate)


def _peer_notes(pairs: Iterable[GpuPair], devices: dict[int, Device]) -> list[str]:
    refused: dict[int, list[str]] = {}
    for pair in pairs:
        if pair.read_status not in (None, 0):
            refused.setdefault(pair.read_status, []).append(f"{devices[pair.a].device_id}-{devices[pair.b].device_id}")
    return [
        f"no peer-to-peer reads ({P2P_STATUS[status] if status < len(P2P_STATUS) else status}): {', '.join(names)}"
        for status, names in refused.items()
    ]
