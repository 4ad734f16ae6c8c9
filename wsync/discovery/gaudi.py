"""Intel Gaudi through `hl-smi`, and the PCI ids of its cards from sysfs.

The tool numbers cards twice: `index`, which the records have, and `module_id`, the place on the baseboard, which the
affinity table has. It does not say which cards the links join: domain and links come from the hardware table, for cards
of which a baseboard joins every one to every other.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from wsync.discovery.hardware import Sku, described, identify
from wsync.discovery.pci import address
from wsync.discovery.reading import built
from wsync.discovery.sources import SYSFS, number, output_of, pci_functions
from wsync.errors import ProbeError
from wsync.topology import Device, Domain, DomainKind, Host, Link, Source, Topology

VENDOR = "1da3"
QUERY = ("-Q", "index,module_id,bus_id,uuid,name,memory.total", "-f", "csv,noheader")
AFFINITY = ("topo", "-c", "-N")
ADD_IN_CARDS = frozenset({"Gaudi3-PCIe"})
"""In a PCIe slot, not on a baseboard: the tool does not say which of them a bridge joins."""

_HINT = f"give the whole output of 'hl-smi {' '.join(QUERY)}'"
_ROW = re.compile(r"(\d{1,3})\s+(\d+(?:-\d+)?(?:,\s*\d+(?:-\d+)?)*)\s+(\d{1,4}|N/A)")


def read_hl_smi(text: str, *, host_id: str, affinity: str = "", pci_ids: Mapping[str, str] | None = None) -> Topology:
    """The cards of one host from the output of `hl-smi` with `QUERY`, and with `AFFINITY` where that is at hand.

    `pci_ids` are by PCI address. Raises ProbeError if a row is not of the form that `QUERY` asks for, or if two rows
    are of one card.
    """
    numa_nodes = _numa_nodes(affinity) if affinity else {}
    devices: list[Device] = []
    rows: list[Sku | None] = []
    notes: list[str] = []
    for line in text.splitlines():
        if not line.strip():
            continue
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 6:
            raise ProbeError(f"hl-smi: {line!r:.80} has {len(fields)} fields, 6 were asked for", hint=_HINT)
        index, module, bus, uuid, name, memory = fields
        size = re.fullmatch(r"([0-9]{1,9}) MiB", memory)
        if size is None or not name:
            raise ProbeError(f"hl-smi: {line!r:.80} is no card with its memory in MiB", hint=_HINT)
        pci = address(bus)
        card = number(index, "hl-smi: index", largest=9999)
        read = Device.told(
            Source.DRIVER,
            device_id=f"{host_id}/gaudi{card}",
            host_id=host_id,
            index=card,
            vendor="intel",
            name=name,
            uuid=uuid,
            memory_nbytes=int(size[1]) << 20,
            pci=pci,
            numa_node=numa_nodes.get(number(module, "hl-smi: module_id", largest=9999), -1),
        )
        pci_id = (pci_ids or {}).get(pci, "")
        seen = Device.told(Source.SYSFS, device_id=read.device_id, host_id=host_id, pci_id=pci_id)
        device, more = described(read.joined(seen))
        devices.append(device)
        rows.append(None if device.sku in ADD_IN_CARDS else identify(name=name, pci_id=pci_id))
        notes += more
    if not devices:
        return Topology()
    domains, links = _mesh(host_id, devices, rows, notes)
    return built(
        "hl-smi",
        hosts=(Host(host_id=host_id),),
        devices=tuple(devices),
        domains=domains,
        links=links,
        notes=tuple(notes),
    )


def probe(host_id: str, *, sysfs: Path = SYSFS) -> Topology:
    """The cards of this machine; nothing where the PCI bus has none."""
    found = pci_functions(VENDOR, sysfs=sysfs)
    if not any(identify(pci_id=function.pci_id) for function in found):
        return Topology()
    tool = shutil.which("hl-smi")
    if tool is None:
        raise ProbeError(
            f"{found[0].address} is a Gaudi, but there is no hl-smi", hint="install habanalabs-firmware-tools"
        )
    return read_hl_smi(
        output_of(tool, *QUERY),
        host_id=host_id,
        affinity=output_of(tool, *AFFINITY),
        pci_ids={function.address: function.pci_id for function in found},
    )


def _numa_nodes(text: str) -> dict[int, int]:
    """NUMA node by module id, from a table of module, CPUs (a list with blanks in it) and node below a ruled head."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if (
        len(lines) < 2
        or lines[0].split() != ["modID", "CPU", "Affinity", "NUMA", "Affinity"]
        or set(lines[1]) - set("- ")
    ):
        raise ProbeError(
            "hl-smi topo: no table of modID, CPU Affinity and NUMA Affinity", hint="run 'hl-smi topo -c -N'"
        )
    nodes: dict[int, int] = {}
    for line in lines[2:]:
        row = _ROW.fullmatch(line)
        if row is None or int(row[1]) in nodes:
            raise ProbeError(f"hl-smi topo: {line!r:.80} is no row of its own", hint="run 'hl-smi topo -c -N'")
        nodes[int(row[1])] = -1 if row[3] == "N/A" else int(row[3])
    return nodes


def _mesh(
    host_id: str, devices: Sequence[Device], rows: Sequence[Sku | None], notes: list[str]
) -> tuple[tuple[Domain, ...], tuple[Link, ...]]:
    """Each card joined to each other by an equal share of its links."""
    if len(devices) < 2:
        return (), ()
    row = rows[0]
    if row is None or any(other is not row for other in rows) or not 1 < len(devices) <= row.domain_size:
        notes.append(f"{host_id}: hl-smi does not say whether its {len(devices)} Gaudi cards are joined")
        return (), ()
    pair = row.scale_up_nbytes_per_s / (row.domain_size - 1)
    members = tuple(device.device_id for device in devices)
    domain = Domain.told(
        Source.TABLE,
        domain_id=f"{host_id}/gaudi-links0",
        kind=DomainKind.GAUDI,
        members=members,
        nbytes_per_s=pair * (len(members) - 1),
    )
    links = (Link.told(Source.TABLE, a=a, b=b, kind="GAUDI", nbytes_per_s=pair) for a, b in combinations(members, 2))
    return (domain,), tuple(links)
