"""This machine, by all probes together. One that fails costs its own facts and leaves a note, never those of others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from wsync.discovery import (
    amd,
    gaudi,
    host,
    kubernetes,
    lpu,
    nccl_xml,
    neuron,
    nics,
    nvidia,
    nvidia_smi,
    platform,
    slurm,
    tpu,
)
from wsync.discovery.hardware import described
from wsync.discovery.pci import with_ids_of
from wsync.errors import ConfigError, ProbeError
from wsync.topology import Domain, Host, Topology

Probe = Callable[[], Topology]


def detect(
    host_id: str, *, root: Path = Path("/"), is_offline: bool = False, labels: Mapping[str, str] | None = None
) -> Topology:
    """What is known of this machine, `host_id`, after asking everybody: drivers, sysfs, tools, files, its cloud.

    `is_offline`: no metadata service is asked. `labels` are those of its Kubernetes or Ray node, if it is one. Tools,
    libraries and the environment are this process's own; files are read below `root`. A probe that cannot read what it
    finds, or that contradicts those before it, is named in `notes`.
    """
    sysfs = root / "sys"
    found = Topology(hosts=(Host(host_id=host_id),))
    notes: list[str] = []

    def ask(name: str, probe: Probe) -> Topology:
        try:
            return probe()
        except ProbeError as exc:
            notes.append(f"{name}: {exc}")
            return Topology()

    def take(name: str, probe: Probe) -> bool:
        nonlocal found
        told = ask(name, probe)
        try:
            found = found.joined(with_ids_of(found, told))
        except ConfigError as exc:
            notes.append(f"{name} contradicts what is known already, and is not believed: {exc.problem}")
            return False
        return bool(told.devices)

    take("host", lambda: host.read_host(root, host_id=host_id))
    take("nics", lambda: nics.read_nics(root, host_id=host_id))
    if not take("nvidia", lambda: nvidia.probe(host_id)):
        take("nvidia-smi", lambda: nvidia_smi.probe(host_id))
    take("amd", lambda: amd.probe(host_id, sysfs=sysfs))
    take("neuron", lambda: neuron.probe(host_id, sysfs=sysfs))
    take("gaudi", lambda: gaudi.probe(host_id, sysfs=sysfs))
    take("lpu", lambda: lpu.probe(host_id, sysfs=sysfs))
    metadata = _silent if is_offline else tpu.read_metadata
    take("tpu", lambda: tpu.probe(host_id, sysfs=sysfs, metadata=metadata))
    take("NCCL's file", lambda: _seen(found, nccl_xml.probe(host_id, root=root)))
    if not is_offline:
        take("platform", lambda: platform.probe(host_id, root=root))
    take("slurm", lambda: slurm.probe(host_id))
    if labels:
        take("labels", lambda: kubernetes.read_node_labels(labels, host_id=host_id, known=found))
    found = _named(found, host_id)
    distant = ask("PCI distances", lambda: host.with_distances(found, root, host_id=host_id))
    found = distant if distant.hosts else found
    return msgspec.structs.replace(found, notes=tuple(dict.fromkeys((*found.notes, *notes))))


def _silent(key: str) -> str | None:
    return None


def _seen(known: Topology, told: Topology) -> Topology:
    """What a file says of the whole machine, in the ids of `known`, as far as it is of what is known to be here.

    A container is given some of the devices only, numbered anew. Where none is known of a kind (devices, NICs), or none
    with its PCI address, the file is all that there is and stays whole.
    """
    wholes = tuple(device for device in known.devices if not device.partition_of)
    at_devices, at_nics = Counter(d.pci for d in wholes if d.pci), Counter(n.pci for n in known.nics if n.pci)
    same = {(nic.nic_id, nic.pci) for nic in known.nics}
    listed = Counter(nic.pci for nic in told.nics)
    devices = tuple(d for d in told.devices if not at_devices or at_devices[d.pci] == 1)
    nics = tuple(
        n for n in told.nics if not at_nics or (n.nic_id, n.pci) in same or at_nics[n.pci] == listed[n.pci] == 1
    )
    hidden = [d.pci for d in told.devices if d not in devices] + [n.pci or n.name for n in told.nics if n not in nics]
    here = {*(device.device_id for device in devices), *(nic.nic_id for nic in nics)}
    note = (
        f"NCCL's file: no device or NIC of {told.hosts[0].host_id} is the one at {', '.join(hidden)}" if hidden else ""
    )
    told = msgspec.structs.replace(
        told,
        devices=devices,
        nics=nics,
        domains=_within(told.domains, here),
        links=tuple(link for link in told.links if link.ends <= here),
        notes=(*told.notes, *filter(None, (note,))),
    )
    return with_ids_of(Topology(hosts=known.hosts, devices=wholes, nics=known.nics), told)


def _within(domains: tuple[Domain, ...], here: set[str]) -> tuple[Domain, ...]:
    """The domains with those members only that are here; one alone is in no domain."""
    less = [msgspec.structs.replace(d, members=tuple(m for m in d.members if m in here)) for d in domains]
    return tuple(domain for domain in less if len(domain.members) > 1)


def _named(found: Topology, host_id: str) -> Topology:
    """With what the hardware table adds to devices of which no probe found the SKU."""
    here = next(known for known in found.hosts if known.host_id == host_id)
    pairs = [
        (device, ()) if device.sku else described(device, instance_type=here.instance_type) for device in found.devices
    ]
    notes = [note for _, more in pairs for note in more]
    return msgspec.structs.replace(
        found, devices=tuple(device for device, _ in pairs), notes=tuple(dict.fromkeys((*found.notes, *notes)))
    )
