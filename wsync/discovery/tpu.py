"""Google TPUs from what the platform says of the slice: the metadata attribute `tpu-env`, or the environment on GKE.

A host knows the whole slice's type and shape, and has its own chips only, so each host tells its part of the ICI
domain. Which chip is at which place of the torus is for the TPU's own library to say, which is never loaded here.

Keys come with and without `TPU_` before them, and GKE sets both. The number in an accelerator type counts cores for
generations with two to a chip, else chips. Where nobody says which axes of the torus are closed, the rule of GKE's own
device plug-in holds: 3D slices on all axes if each is at least 4, 2D slices on those that are 16.
"""

from __future__ import annotations

import math
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from wsync.discovery.hardware import described, identify
from wsync.discovery.reading import built
from wsync.discovery.sources import SYSFS, number, pci_function, pci_functions
from wsync.errors import ProbeError
from wsync.topology import Device, Domain, DomainKind, Host, Source, Topology

VENDOR = "1ae0"
METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"
METADATA_TIMEOUT_S = 2.0
LARGEST_HOST = 8
"""Chips."""

Dims = tuple[int, int, int]


class Generation(msgspec.Struct, frozen=True):
    """`name` is the accelerator type before its number, which counts `cores_per_chip` for each chip."""

    name: str
    cores_per_chip: int
    num_axes: int
    gke_names: tuple[str, ...] = ()
    has_8_chip_hosts: bool = False


GENERATIONS = (
    Generation("v2", 2, 2),
    Generation("v3", 2, 2, ("tpu-v3-device", "tpu-v3-slice")),
    Generation("v4", 2, 3, ("tpu-v4-podslice",)),
    Generation("v5litepod", 1, 2, ("v5e", "v5lite", "tpu-v5-lite-podslice", "tpu-v5-lite-device"), True),
    Generation("v5p", 2, 3, ("tpu-v5p-slice",)),
    Generation("v6e", 1, 2, ("tpu-v6e-slice",), True),
    Generation("tpu7x", 2, 3, ("v7x",)),
)


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """A TPU slice: chips that ICI joins. 0, empty and None are unknown."""

    generation: Generation
    num_chips: int = 0
    dims: Dims | None = None
    chips_per_host: int = 0
    wrap: tuple[bool, bool, bool] | None = None

    @property
    def num_hosts(self) -> int:
        return self.num_chips // self.chips_per_host if self.chips_per_host else 0

    @property
    def num_ports(self) -> int:
        """ICI ports that a chip has, used or not: two for each axis of the torus."""
        return 2 * self.generation.num_axes

    def port_range(self) -> tuple[int, int]:
        """Fewest and most ports in use that a chip of the slice has; (0, 0) if shape or closed axes are unknown."""
        if self.dims is None or self.wrap is None:
            return 0, 0
        fewest = most = 0
        for length, is_closed in zip(self.dims, self.wrap, strict=True):
            if length > 1:
                fewest += 2 if is_closed else 1
                most += 2 if is_closed or length > 2 else 1
        return fewest, most


def parse_accelerator_type(text: str) -> tuple[Generation, int]:
    """Generation and number of chips of `v5p-128`, `tpu7x-8`, ...; 0 chips for a name without number, such as GKE's."""
    name, chips = text.strip().lower(), 0
    if found := re.fullmatch(r"([a-z0-9]+)-([0-9]{1,6})", name):
        name, chips = found[1], int(found[2])
    generation = next((one for one in GENERATIONS if name == one.name or name in one.gke_names), None)
    if generation is None:
        raise ProbeError(f"accelerator type '{text:.60}' is of no known TPU generation", hint="it looks like v6e-16")
    if found and (chips == 0 or chips % generation.cores_per_chip):
        raise ProbeError(f"accelerator type '{text:.60}' has no whole number of chips")
    return generation, chips // generation.cores_per_chip


def parse_topology(text: str) -> Dims:
    """`4x4x8` or `2x4`, whose third axis is 1."""
    found = re.fullmatch(r"([1-9][0-9]{0,3})x([1-9][0-9]{0,3})(?:x([1-9][0-9]{0,3}))?", text.strip().lower())
    if found is None:
        raise ProbeError(f"topology '{text:.60}' is no shape of a slice", hint="it looks like 4x4x8 or 2x4")
    return int(found[1]), int(found[2]), int(found[3] or 1)


def read_tpu_env(text: str, *, host_id: str, pci_ids: Sequence[str] = (), slice_name: str = "") -> Topology:
    """The host's part of its slice from the text of `tpu-env`: lines `KEY: 'value'`. Raises ProbeError.

    `pci_ids` are those of the chips that were counted on this host, if somebody counted.
    """
    pairs: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = re.fullmatch(r"\s*([A-Za-z][A-Za-z0-9_]*)\s*:\s*(?:'([^']*)'|\"([^\"]*)\"|([^'\"]*))\s*", line)
        if found is None or found[1] in pairs:
            raise ProbeError(f"tpu-env: {line!r:.80} is no line of its own, KEY: 'value'")
        pairs[found[1]] = next(value for value in (*found.groups()[1:], "") if value is not None).strip()
    name = slice_name or ("" if pairs.get("NODE_ID", "").isdigit() else pairs.get("NODE_ID", ""))
    return _read(pairs, "tpu-env", host_id=host_id, pci_ids=pci_ids, slice_name=name, notes=[])


def read_variables(variables: Mapping[str, str], *, host_id: str, pci_ids: Sequence[str] = ()) -> Topology:
    """The host's part of its slice from a process's environment; nothing without `TPU_ACCELERATOR_TYPE`."""
    if not variables.get("TPU_ACCELERATOR_TYPE"):
        return Topology()
    notes: list[str] = []
    pairs = {key: value for key, value in variables.items() if key.startswith("TPU_")}
    if pairs.get("TPU_VISIBLE_CHIPS") or pairs.get("TPU_VISIBLE_DEVICES"):
        # Who gives a process some of the chips also writes their bounds over those of the host.
        notes.append(
            f"{host_id}: this process sees some of the host's chips, so bounds in its environment are not believed"
        )
        for key in ("TPU_CHIPS_PER_HOST_BOUNDS", "TPU_HOST_BOUNDS"):
            pairs.pop(key, None)
    hosts = [name.strip() for name in pairs.get("TPU_WORKER_HOSTNAMES", "").split(",") if name.strip()]
    name = pairs.get("TPU_NAME") or (hosts[0] if len(hosts) > 1 else "")
    return _read(pairs, "environment", host_id=host_id, pci_ids=pci_ids, slice_name=name, notes=notes)


def read_metadata(key: str) -> str | None:
    """That attribute of this instance from GCE's metadata server; None if it has none or if there is no such server."""
    request = urllib.request.Request(METADATA + key, headers={"Metadata-Flavor": "Google"})
    # Never through a proxy: the server is the hypervisor.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=METADATA_TIMEOUT_S) as answer:
            return str(answer.read(1 << 20).decode(errors="replace"))
    except (OSError, urllib.error.URLError):
        return None


def probe(
    host_id: str,
    *,
    variables: Mapping[str, str] | None = None,
    sysfs: Path = SYSFS,
    metadata: Callable[[str], str | None] = read_metadata,
) -> Topology:
    """The TPU chips of this machine and its slice: from the environment, else from the metadata server.

    The server is asked only where the PCI bus has TPUs. Raises ProbeError if these are there and nobody says of which
    slice.
    """
    chips = [function.pci_id for function in pci_functions(VENDOR, sysfs=sysfs) if identify(pci_id=function.pci_id)]
    found = read_variables(os.environ if variables is None else variables, host_id=host_id, pci_ids=chips)
    if not found.devices and chips:
        text = metadata("tpu-env")
        if text is None:
            raise ProbeError(
                f"{host_id} has {len(chips)} TPU chips; neither environment nor metadata server says of which slice",
                hint="set TPU_ACCELERATOR_TYPE, TPU_TOPOLOGY and TPU_WORKER_ID",
            )
        found = read_tpu_env(text, host_id=host_id, pci_ids=chips, slice_name=metadata("instance-id") or "")
    return found.joined(_places(found, sysfs)) if found.devices else found


def _read(
    pairs: Mapping[str, str], what: str, *, host_id: str, pci_ids: Sequence[str], slice_name: str, notes: list[str]
) -> Topology:
    told = slice_of(pairs, what)
    if len(pci_ids) > told.num_chips:
        raise ProbeError(f"{what}: a slice of {told.num_chips} chips, yet {len(pci_ids)} are on {host_id} alone")
    if pci_ids and told.chips_per_host not in (0, len(pci_ids)):
        notes.append(f"{host_id}: {what} says {told.chips_per_host} chips per host, {len(pci_ids)} are here")
    told = msgspec.structs.replace(told, chips_per_host=len(pci_ids) or told.chips_per_host)
    worker = number(_value(pairs, "WORKER_ID", what) or "0", f"{what}: WORKER_ID", largest=99999)
    if told.num_hosts and worker >= told.num_hosts:
        raise ProbeError(f"{what}: worker {worker} of a slice of {told.num_hosts} hosts")
    if not told.chips_per_host:
        notes.append(f"{host_id}: {what} does not say how many chips of the slice are on one host")
    fewest, most = told.port_range()
    devices: list[Device] = []
    for index in range(told.chips_per_host):
        device = Device.told(
            Source.PLATFORM,
            device_id=f"{host_id}/tpu{index}",
            host_id=host_id,
            index=index,
            vendor="google",
            name=told.generation.name,
            num_links=fewest if fewest == most else 0,
        )
        if pci_ids:
            seen = Device.told(Source.SYSFS, device_id=device.device_id, host_id=host_id, pci_id=pci_ids[index])
            device = device.joined(seen)
        device, more = described(device)
        devices.append(device)
        notes += more
    return built(
        what,
        hosts=(Host.told(Source.PLATFORM, host_id=host_id, platform="gcp"),),
        devices=tuple(devices),
        domains=_domain(told, devices, host_id, slice_name, notes),
        notes=tuple(notes),
    )


def slice_of(pairs: Mapping[str, str], what: str) -> Slice:
    """What the keys of `what` say of the slice; a ProbeError where they contradict one another."""
    generation, num_chips = parse_accelerator_type(_value(pairs, "ACCELERATOR_TYPE", what) or "nothing")
    topology = _value(pairs, "TOPOLOGY", what)
    on_host, hosts = (_bounds(pairs, key, what) for key in ("CHIPS_PER_HOST_BOUNDS", "HOST_BOUNDS"))
    both = (on_host[0] * hosts[0], on_host[1] * hosts[1], on_host[2] * hosts[2]) if on_host and hosts else None
    dims = parse_topology(topology) if topology else both
    for shape in (dims, both):
        if shape and num_chips and math.prod(shape) != num_chips:
            raise ProbeError(f"{what}: {num_chips} chips of {generation.name} do not make a shape {_text(shape)}")
    if dims and both and math.prod(dims) != math.prod(both):
        raise ProbeError(f"{what}: topology {_text(dims)}, but host and chip bounds make {_text(both)}")
    if dims and generation.num_axes == 2 and dims[2] != 1:
        raise ProbeError(f"{what}: {generation.name} has no third axis, as {_text(dims)} would need")
    num_chips = num_chips or (math.prod(dims) if dims else 0)
    if not num_chips:
        raise ProbeError(f"{what}: neither a number of chips nor a topology", hint="TPU_TOPOLOGY says it on GKE")
    per_host = math.prod(on_host) if on_host else _chips_per_host(generation, num_chips)
    if per_host > LARGEST_HOST or (per_host and num_chips % per_host):
        raise ProbeError(f"{what}: {num_chips} chips are no whole number of hosts of {per_host}")
    wrap = _wrap(pairs, what) or (_gke_wrap(generation, dims) if dims else None)
    return Slice(generation=generation, num_chips=num_chips, dims=dims, chips_per_host=per_host, wrap=wrap)


def _chips_per_host(generation: Generation, num_chips: int) -> int:
    """4 or all, but for 8 chips of a generation that has hosts of 4 and of 8: unknown."""
    return 0 if generation.has_8_chip_hosts and num_chips == 8 else min(num_chips, 4)


def _gke_wrap(generation: Generation, dims: Dims) -> tuple[bool, bool, bool] | None:
    if generation.num_axes == 3:
        closed = all(length >= 4 for length in dims)
        return closed, closed, closed
    return (dims[0] == 16, dims[1] == 16, False) if generation.has_8_chip_hosts else None


def _value(pairs: Mapping[str, str], key: str, what: str) -> str:
    """The key's value in either spelling; empty if it has none."""
    found = {pairs[name] for name in (key, f"TPU_{key}") if pairs.get(name)}
    if len(found) > 1:
        raise ProbeError(f"{what}: {key} and TPU_{key} are {' and '.join(sorted(found)):.80}")
    return found.pop() if found else ""


def _bounds(pairs: Mapping[str, str], key: str, what: str) -> Dims | None:
    text = _value(pairs, key, what)
    if not text:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,3}),([1-9][0-9]{0,3}),([1-9][0-9]{0,3})", text.replace(" ", ""))
    if found is None:
        raise ProbeError(f"{what}: {key} is '{text:.60}'", hint="it looks like 2,2,1")
    return int(found[1]), int(found[2]), int(found[3])


def _wrap(pairs: Mapping[str, str], what: str) -> tuple[bool, bool, bool] | None:
    text = (_value(pairs, "WRAP", what) or _value(pairs, "TOPOLOGY_WRAP", what)).lower()
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 3 or set(parts) - {"true", "false"}:
        raise ProbeError(f"{what}: WRAP is '{text:.60}'", hint="it looks like true,true,true")
    return parts[0] == "true", parts[1] == "true", parts[2] == "true"


def _domain(told: Slice, devices: list[Device], host_id: str, slice_name: str, notes: list[str]) -> tuple[Domain, ...]:
    """The host's members of the slice, with the rate of the chip that has the fewest neighbours."""
    if told.num_chips == 1 or not devices:
        return ()
    is_local = told.num_hosts == 1
    if not is_local and not slice_name:
        notes.append(f"{host_id}: is in a slice of {told.num_hosts} hosts without a name: only its own part is known")
    domain_id = f"{host_id}/ici0" if is_local or not slice_name else f"{slice_name}/ici0"
    read = Domain.told(
        Source.PLATFORM,
        domain_id=domain_id,
        kind=DomainKind.ICI,
        members=tuple(device.device_id for device in devices),
    )
    rate = told.port_range()[0] * devices[0].link_nbytes_per_s
    return (read.joined(Domain.told(Source.TABLE, domain_id=domain_id, kind=DomainKind.ICI, nbytes_per_s=rate)),)


def _places(found: Topology, sysfs: Path) -> Topology:
    """PCI addresses of the chips that the driver numbers (`/sys/class/accel`); newer ones are handed out unnumbered."""
    devices = []
    for device in found.devices:
        link = sysfs / f"class/accel/accel{device.index}/device"
        if function := pci_function(link.resolve().name if link.exists() else "", sysfs=sysfs):
            place = Device.told(
                Source.SYSFS,
                device_id=device.device_id,
                host_id=device.host_id,
                pci=function.address,
                pci_id=function.pci_id,
                numa_node=function.numa_node,
            )
            devices.append(place)
    return Topology(hosts=found.hosts, devices=tuple(devices))


def _text(dims: Dims) -> str:
    return "x".join(str(length) for length in dims)
