"""This machine, by all probes together. One that fails costs its own facts and leaves a note, never those of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from wsync.discovery import (
    amd,
    gaudi,
    host,
    hwloc,
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
from wsync.topology import Host, Topology

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
    take("NCCL's file", lambda: nccl_xml.probe(host_id, known=found, root=root))
    take("hwloc's file", lambda: hwloc.probe(host_id, known=found))
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
