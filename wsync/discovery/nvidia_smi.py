"""NVIDIA GPUs and NICs from the text of `nvidia-smi`: the matrix of `topo -m`, and identities and fabrics of `-q`.

For hosts and captures where NVML itself cannot be asked (`nvidia`), which tells more. The matrix is believed whole or
not at all: a cell that is none, a row that is short or two halves that differ are a ProbeError.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence

import msgspec

from wsync.discovery.hardware import described
from wsync.discovery.nvlink import FABRIC_STATES, Fabric, nvlink_domains
from wsync.discovery.pci import address
from wsync.discovery.reading import built
from wsync.discovery.sources import output_of
from wsync.errors import ProbeError
from wsync.topology import Device, Host, Link, Nic, Source, Topology

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
CELL = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|PSB|NV[0-9]{1,3}")
GPU = re.compile(r"GPU([0-9]{1,4})")
NIC = re.compile(r"NIC[0-9]{1,4}|[a-z][a-z0-9_.-]{1,30}")
AFFINITIES = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
LEGEND = re.compile(r"^\s*(NIC[0-9]{1,4}):\s*(\S+)\s*$", re.MULTILINE)
FABRIC_FIELDS = {"state": "state", "status": "status", "cliqueid": "clique", "clusteruuid": "uuid"}
UNKNOWN = ("", "n/a")
SECTION = re.compile(r"^GPU ([0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])[ \t]*$", re.MULTILINE)
"""The head of what `-q` says of one GPU."""
DEVICE_ID = re.compile(r"0x([0-9A-Fa-f]{4})(10DE)")
"""Device and vendor in one number."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What `nvidia-smi -q` says that a GPU is."""

    pci: str
    pci_id: str = ""
    name: str = ""
    uuid: str = ""


_HINT = "give the whole, unwrapped output of the tool"


def probe(host_id: str) -> Topology:
    """What the tool prints on this machine; an empty Topology where there is no such tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Topology()
    matrix, query = output_of(tool, "topo", "-m"), output_of(tool, "-q")
    return read_topo(matrix, host_id=host_id, fabrics=read_fabrics(query), identities=read_identities(query))


def read_topo(
    text: str, *, host_id: str, fabrics: Sequence[Fabric] = (), identities: Sequence[Identity] = ()
) -> Topology:
    """GPUs, NICs, their links and NVLink islands from the text of `nvidia-smi topo -m`.

    `fabrics` and `identities` have what each GPU says of its fabric and of itself, in order (`read_fabrics`,
    `read_identities`); without fabrics islands end at the host.
    Where the matrix shows all NICs equally far from GPUs of different NUMA nodes, as it does in GB200 trays, these
    cells say nothing and are left out.
    """
    lines = [ANSI.sub("", line) for line in text.splitlines()]
    start = next((n for n, line in enumerate(lines) if _is_header(line)), None)
    if start is None:
        raise ProbeError(f"no matrix of 'nvidia-smi topo -m' in what {host_id} says", hint=_HINT)
    names, affinities = _columns(lines[start])
    rows = [_row(line, names, affinities, at) for at, line in enumerate(lines[start + 1 : start + 1 + len(names)])]
    _check(names, rows)
    legend = dict(LEGEND.findall("\n".join(lines[start:])))
    cells = {name: row[0] for name, row in zip(names, rows, strict=True)}
    devices = {
        name: _device(host_id, int(match[1]), row[1])
        for name, row in zip(names, rows, strict=True)
        if (match := GPU.fullmatch(name))
    }
    nics = {name: _nic(host_id, legend.get(name, name)) for name in names if name not in devices}
    for told in (fabrics, identities):
        if told and len(told) != len(devices):
            raise ProbeError(f"{host_id} has {len(devices)} GPUs in 'topo -m' and {len(told)} in '-q'", hint=_HINT)
    known_by: list[str] = []
    for name, identity in zip(list(devices), identities, strict=False):
        devices[name], said = _identified(devices[name], identity)
        known_by += said
    nameless = [name for name in nics if name.startswith("NIC") and name not in legend]
    notes = [f"{host_id}/{name}: the NIC legend does not name it" for name in nameless]
    is_blind = _is_blind(devices, nics, cells, names)
    if is_blind:
        notes.append(f"{host_id}: 'topo -m' shows all NICs equally far from all GPUs: go by NUMA node and PCI domain")
    ids = {name: device.device_id for name, device in devices.items()} | {n: nic.nic_id for n, nic in nics.items()}
    links = [
        Link.told(Source.DRIVER, a=ids[a], b=ids[b], kind=cells[a][j])
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if i < j and not (is_blind and (a in devices) != (b in devices))
    ]
    joined = {link.ends for link in links if link.kind.startswith("NV")}
    by_gpu = list(devices.values())
    keys = dict.fromkeys((device.device_id for device in by_gpu), "")
    for device, fabric in zip(by_gpu, fabrics, strict=False):
        keys[device.device_id] = fabric.key
        notes += [f"{device.device_id}: {fabric.doubt}"] if fabric.doubt else []
    domains, more = nvlink_domains(by_gpu, keys, lambda a, b: frozenset((a, b)) in joined)
    return built(
        f"'nvidia-smi topo -m' of {host_id}",
        hosts=(Host(host_id=host_id),),
        devices=tuple(by_gpu),
        nics=tuple(nics.values()),
        domains=domains,
        links=tuple(links),
        notes=(*known_by, *notes, *more),
    )


def read_identities(text: str) -> tuple[Identity, ...]:
    """What each GPU is, in order, from the text of `nvidia-smi -q`; empty if it has no sections of GPUs."""
    parts = SECTION.split(ANSI.sub("", text))
    return tuple(_identity(pci, section) for pci, section in zip(parts[1::2], parts[2::2], strict=True))


def _identity(pci: str, section: str) -> Identity:
    said = dict(re.findall(r"^\s*(Product Name|GPU UUID|Device Id)\s*:[ \t]*(.*?)\s*$", section, re.MULTILINE))
    said = {name: "" if value.lower() in UNKNOWN else value for name, value in said.items()}
    numbers = DEVICE_ID.fullmatch(said.get("Device Id", ""))
    return Identity(
        pci=address(pci),
        pci_id=f"{numbers[2]}:{numbers[1]}".lower() if numbers else "",
        name=said.get("Product Name", ""),
        uuid=said.get("GPU UUID", ""),
    )


def _identified(device: Device, identity: Identity) -> tuple[Device, tuple[str, ...]]:
    told = Device.told(
        Source.DRIVER, device_id=device.device_id, host_id=device.host_id, **msgspec.structs.asdict(identity)
    )
    return described(device.joined(told))


def read_fabrics(text: str) -> tuple[Fabric, ...]:
    """What each GPU says of its fabric, in order, from the text of `nvidia-smi -q` or `-q -x`; empty if none does.

    Raises ProbeError where a block is cut short or its numbers are none.
    """
    text = ANSI.sub("", text)
    blocks = re.findall(r"<fabric>(.*?)(?:</fabric>|\Z)", text, re.DOTALL)
    if blocks:
        return tuple(_fabric(re.findall(r"<(\w+)>([^<]*)</\1>", block)) for block in blocks)
    blocks = re.findall(r"^[ \t]*Fabric[ \t]*\n((?:[ \t]+[A-Za-z ]+?[ \t]*:[^\n]*(?:\n|\Z))*)", text, re.MULTILINE)
    return tuple(_fabric(re.findall(r"^\s*([A-Za-z ]+?)\s*:[ \t]*(.*?)\s*$", block, re.MULTILINE)) for block in blocks)


def _fabric(pairs: Sequence[tuple[str, str]]) -> Fabric:
    said = {FABRIC_FIELDS[name.lower()]: value.strip() for name, value in pairs if name.lower() in FABRIC_FIELDS}
    if missing := [name for name in FABRIC_FIELDS.values() if name not in said]:
        raise ProbeError(f"a fabric block of 'nvidia-smi -q' says nothing of its {', '.join(missing)}", hint=_HINT)
    state = said["state"].lower()
    if state in UNKNOWN:
        return Fabric(state=FABRIC_STATES[0])
    if state not in FABRIC_STATES:
        raise ProbeError(f"'{said['state']:.40}' is no state of a fabric", hint=_HINT)
    clique, cluster = said["clique"].lower(), said["uuid"].lower()
    if clique not in UNKNOWN and not re.fullmatch(r"[0-9]{1,10}", clique):
        raise ProbeError(f"'{clique:.40}' is no clique of a fabric", hint=_HINT)
    if cluster not in UNKNOWN and not re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", cluster):
        raise ProbeError(f"'{cluster:.60}' is no UUID of a fabric", hint=_HINT)
    if clique in UNKNOWN or cluster in UNKNOWN:
        return Fabric(state=state, status=said["status"].lower())
    return Fabric(state=state, status=said["status"].lower(), cluster_uuid=cluster, clique_id=int(clique))


def _is_header(line: str) -> bool:
    words = line.split()
    return bool(words and GPU.fullmatch(words[0])) and (len(words) == 1 or not CELL.fullmatch(words[1]))


def _columns(header: str) -> tuple[list[str], list[str]]:
    """Names of the devices and of the columns that follow them."""
    affinities = sorted((name for name in AFFINITIES if name in header), key=header.index)
    named = header
    for name in affinities:
        named = named.replace(name, "", 1)
    names = named.split()
    if strangers := [name for name in names if not (GPU.fullmatch(name) or NIC.fullmatch(name))]:
        raise ProbeError(f"'{strangers[0]:.40}' is no column of 'nvidia-smi topo -m'", hint=_HINT)
    return names, affinities


def _row(line: str, names: Sequence[str], affinities: Sequence[str], at: int) -> tuple[list[str], int]:
    """Cells of the matrix and the NUMA node, -1 if the row does not say it."""
    # The tool parts columns by tabs, and empty cells are seen; once pasted, by blanks, and they are not.
    parts = [part.strip() for part in line.split("\t")] if "\t" in line else line.split()
    label, cells, rest = parts[0] if parts else "", parts[1 : 1 + len(names)], parts[1 + len(names) :]
    if label != names[at]:
        raise ProbeError(f"row {at} of 'nvidia-smi topo -m' is '{label:.40}', not {names[at]}", hint=_HINT)
    for cell in cells:
        if not CELL.fullmatch(cell):
            raise ProbeError(f"'{cell:.40}' in the row of {label} is no connection; are cells merged?", hint=_HINT)
    if len(cells) != len(names):
        raise ProbeError(f"the row of {label} has {len(cells)} of {len(names)} cells", hint=_HINT)
    if len(rest) == len(affinities) + 1 > 1 and not rest[-2]:
        del rest[-2]  # The tool's rows have one more tab than its head, before the last column.
    if len(rest) > len(affinities) or any(CELL.fullmatch(cell) for cell in rest):
        raise ProbeError(f"the row of {label} has more cells than the head", hint=_HINT)
    # Without tabs an empty cell leaves no trace: of a short rest nobody knows which is which.
    is_placed = "\t" in line or len(rest) == len(affinities)
    by_title = dict(zip(affinities, rest, strict=False)) if is_placed else {}
    return cells, _first_node(by_title.get("NUMA Affinity", ""))


def _first_node(text: str) -> int:
    """Of `0`, `0-1` or `0,3-9,11-17` the first: the others are memory of devices."""
    if text.lower() in UNKNOWN:
        return -1
    match = re.fullmatch(r"([0-9]{1,5})([-,][0-9]{1,5})*", text)
    if match is None:
        raise ProbeError(f"'{text:.40}' is no list of NUMA nodes", hint=_HINT)
    return int(match[1])


def _check(names: Sequence[str], rows: Sequence[tuple[list[str], int]]) -> None:
    if len(rows) != len(names):
        raise ProbeError(f"the matrix ends after {len(rows)} of {len(names)} rows", hint=_HINT)
    for i, (cells, _) in enumerate(rows):
        for j, cell in enumerate(cells):
            if (cell == "X") != (i == j):
                raise ProbeError(f"'{cell}' between {names[i]} and {names[j]}: X is for itself only", hint=_HINT)
            if cell != rows[j][0][i]:
                raise ProbeError(f"{names[i]} and {names[j]} are {cell} one way and {rows[j][0][i]} back", hint=_HINT)


def _device(host_id: str, index: int, numa_node: int) -> Device:
    return Device.told(
        Source.DRIVER,
        device_id=f"{host_id}/gpu{index}",
        host_id=host_id,
        index=index,
        vendor="nvidia",
        numa_node=numa_node,
    )


def _nic(host_id: str, name: str) -> Nic:
    return Nic.told(Source.DRIVER, nic_id=f"{host_id}/{name}", host_id=host_id, name=name)


def _is_blind(
    devices: dict[str, Device], nics: dict[str, Nic], cells: dict[str, list[str]], names: Sequence[str]
) -> bool:
    nodes = {device.numa_node for device in devices.values()} - {-1}
    kinds = {cells[gpu][j] for gpu in devices for j, name in enumerate(names) if name in nics}
    return len(nodes) > 1 and len(kinds) == 1
