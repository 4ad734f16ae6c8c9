"""AMD GPUs: from their kernel driver's tree in sysfs (`kfd`), else from `amdsmi`, else from `rocm-smi --showtopo`.

The tree comes first because it needs no library and knows most; the library reads the same tree, with further sources
beside it, and may be absent.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

from wsync.discovery import amd_smi
from wsync.discovery.hardware import identify
from wsync.discovery.kfd import NODES, read_kfd
from wsync.discovery.reading import built
from wsync.discovery.sources import SYSFS, PciFunction, output_of, pci_functions
from wsync.errors import ProbeError
from wsync.topology import Device, Domain, DomainKind, Host, Link, Source, Topology

__all__ = ["probe", "read_kfd", "read_showtopo"]

VENDOR = "1002"
LARGEST_HIVE = 8
"""GPUs; more in one are partitions, of which the tool does not say whose they are."""

_TITLE = re.compile(r"=+ (\S.*\S) =+")
_NUMA = re.compile(r"GPU\[(\d+)\]\s*:\s*\(Topology\) Numa Node:\s*(-1|\d{1,4})")
_HINT = "give the whole output of 'rocm-smi --showtopo'"


def read_showtopo(text: str, *, host_id: str) -> Topology:
    """The GPUs of one host, how each two are joined, and their NUMA nodes, from the output of `rocm-smi --showtopo`.

    The tool names neither models nor rates. Raises ProbeError if the output is cut short, if a row of the table of
    links has not one cell for each GPU, or if the table contradicts itself.
    """
    sections = _sections(text)
    names, kinds = _table(sections.get("Link Type between two GPUs", []))
    numa_nodes: dict[str, int] = {}
    for line in sections.get("Numa Nodes", []):
        if found := _NUMA.fullmatch(line):
            name = f"GPU{found[1]}"
            if name not in names or name in numa_nodes:
                raise ProbeError(
                    f"rocm-smi: a NUMA node of {name}, which is not in the table or told twice", hint=_HINT
                )
            numa_nodes[name] = int(found[2])
    ids = {name: f"{host_id}/gpu{name.removeprefix('GPU')}" for name in names}
    devices = [
        Device.told(
            Source.DRIVER,
            device_id=ids[name],
            host_id=host_id,
            index=int(name.removeprefix("GPU")),
            vendor="amd",
            numa_node=numa_nodes.get(name, -1),
        )
        for name in names
    ]
    links = [
        Link.told(Source.DRIVER, a=ids[a], b=ids[b], kind=kinds[a, b])
        for a, b in combinations(names, 2)
        if kinds[a, b] in ("XGMI", "PCIE")
    ]
    unknown = sorted({kind for kind in kinds.values() if kind not in ("XGMI", "PCIE")})
    notes = [f"{host_id}: rocm-smi calls links between GPUs {kind}, which says nothing" for kind in unknown]
    domains = tuple(_islands(host_id, [device.device_id for device in devices], links))
    for domain in domains:
        if len(domain.members) > LARGEST_HIVE:
            notes.append(
                f"{domain.domain_id}: {len(domain.members)} members are partitions, rocm-smi does not say of which"
            )
    return built(
        "rocm-smi",
        hosts=(Host(host_id=host_id),),
        devices=tuple(devices),
        domains=domains,
        links=tuple(links),
        notes=tuple(notes),
    )


def probe(host_id: str, *, sysfs: Path = SYSFS) -> Topology:
    """The GPUs of this machine: from KFD, else from `amdsmi`, else from `rocm-smi`; nothing where there are none."""
    if (sysfs / NODES).is_dir():
        return read_kfd(sysfs, host_id=host_id)
    known = [function for function in pci_functions(VENDOR, sysfs=sysfs) if identify(pci_id=function.pci_id)]
    if not known:
        return Topology()
    told = amd_smi.probe(host_id)
    if told is not None and told.devices:
        return told
    tool = shutil.which("rocm-smi")
    if tool is None:
        raise ProbeError(
            f"{known[0].address} is an AMD GPU, but there is neither {sysfs / NODES} nor amdsmi nor rocm-smi",
            hint="load the amdgpu driver, or give the container /dev/kfd and /sys",
        )
    return _identified(read_showtopo(output_of(tool, "--showtopo"), host_id=host_id), known)


def _identified(told: Topology, functions: Sequence[PciFunction]) -> Topology:
    """With the PCI id that all GPUs of the bus have: the tool names neither that nor which is at which address.

    Left as it is where they have several, or where the tool tells of partitions.
    """
    ids = {function.pci_id for function in functions}
    if len(ids) > 1 or len(functions) != len(told.devices):
        return told
    (pci_id,) = ids
    seen = [Device.told(Source.SYSFS, device_id=d.device_id, host_id=d.host_id, pci_id=pci_id) for d in told.devices]
    return told.joined(Topology(hosts=told.hosts, devices=tuple(seen)))


def _sections(text: str) -> dict[str, list[str]]:
    """Lines below each ruled title. The last title is the end of the log: without it something is missing."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in (line.strip() for line in text.splitlines()):
        if found := _TITLE.fullmatch(line):
            if found[1] in sections:
                raise ProbeError(f"rocm-smi: two parts are named '{found[1]:.60}'", hint=_HINT)
            lines = sections[found[1]] = []
        elif line:
            lines.append(line)
    if next(reversed(sections), "") != "End of ROCm SMI Log":
        raise ProbeError("rocm-smi: the output has no end", hint=_HINT)
    return sections


def _table(lines: Sequence[str]) -> tuple[list[str], dict[tuple[str, str], str]]:
    """Names of the GPUs and the kind of link between each two, in both orders."""
    rows = [line.split() for line in lines if not line.startswith("WARNING")]
    names = rows[0] if rows else []
    if not names or len(set(names)) < len(names) or not all(re.fullmatch("GPU[0-9]{1,4}", name) for name in names):
        raise ProbeError("rocm-smi: no table of the link types between GPUs", hint=_HINT)
    if [row[0] for row in rows[1:]] != names or any(len(row) != len(names) + 1 for row in rows[1:]):
        raise ProbeError("rocm-smi: the table of link types is not square", hint=_HINT)
    kinds: dict[tuple[str, str], str] = {}
    for row in rows[1:]:
        for name, cell in zip(names, row[1:], strict=True):
            if name == row[0]:
                if cell != "0":
                    raise ProbeError(f"rocm-smi: {name} is linked to itself by {cell:.20}", hint=_HINT)
                continue
            if cell not in ("XGMI", "PCIE", "XXXX", "N/A"):
                raise ProbeError(f"rocm-smi: {row[0]} and {name} are linked by '{cell:.20}'", hint=_HINT)
            if kinds.get((name, row[0]), cell) != cell:
                raise ProbeError(f"rocm-smi: {row[0]} and {name} disagree on their link", hint=_HINT)
            kinds[row[0], name] = cell
    return names, kinds


def _islands(host_id: str, device_ids: Sequence[str], links: Sequence[Link]) -> Iterator[Domain]:
    """GPUs that reach one another over xGMI, through others if need be."""
    peers: dict[str, set[str]] = {device_id: set() for device_id in device_ids}
    for link in links:
        if link.kind == "XGMI":
            peers[link.a].add(link.b)
            peers[link.b].add(link.a)
    left = dict.fromkeys(device_ids)
    count = 0
    while left:
        border, island = [next(iter(left))], set()
        while border:
            device_id = border.pop()
            if device_id in left:
                del left[device_id]
                island.add(device_id)
                border += peers[device_id]
        if len(island) > 1:
            members = tuple(device_id for device_id in device_ids if device_id in island)
            yield Domain.told(Source.DRIVER, domain_id=f"{host_id}/xgmi{count}", kind=DomainKind.XGMI, members=members)
            count += 1
