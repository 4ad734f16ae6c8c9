"""A topology for a reader: as text, in the spirit of `nvidia-smi topo -m`, and as one HTML page of its own."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

import msgspec

from wsync.paths import PathFinder
from wsync.topology import Device, Domain, Host, Nic, Record, Topology

SELF, UNKNOWN = "X", "?"


class Matrix(msgspec.Struct, frozen=True):
    """What is between each two of some things; rows and columns have the same names."""

    title: str
    names: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]


def facts_of(record: Record) -> str:
    """`field value (source)` for everything that is known of it, but its members."""
    sources = record.sources
    parts = [
        f"{name} {_value(getattr(record, name))} ({sources[name].value})"
        for name in record.known_fields()
        if name != "members"
    ]
    return ", ".join(parts) or "nothing is known of it"


def matrices(topology: Topology) -> list[Matrix]:
    """For each host the links between its devices and NICs; then the path of each pair of devices, and of hosts."""
    found: list[Matrix] = []
    for host in topology.hosts:
        names = _parts(topology, host)
        if len(names) > 1:
            found.append(_matrix(f"{host.host_id}: links", names, lambda a, b: _link(topology, a, b)))
    finder = PathFinder(topology)
    for what, names in (
        ("devices", [device.device_id for device in topology.devices]),
        ("hosts", [host.host_id for host in topology.hosts]),
    ):
        if len(names) > 1:
            found.append(_matrix(f"{what}: path", names, lambda a, b: _path(finder, a, b)))
    return found


def as_text(topology: Topology) -> str:
    """Hosts, devices, NICs and domains with their facts and who told them, the matrices, and the notes."""
    lines: list[str] = []
    for host in topology.hosts:
        lines.append(f"host {host.host_id}: {facts_of(host)}")
        devices, nics = topology.host_devices(host.host_id), topology.host_nics(host.host_id)
        lines += [f"  device {_short(device.device_id, host)}: {facts_of(device)}" for device in devices]
        lines += [f"  NIC {_short(nic.nic_id, host)}: {facts_of(nic)}" for nic in nics]
        if not devices:
            lines.append("  no accelerator was found")
        if not nics:
            lines.append("  no NIC was found")
    lines += [f"domain {d.domain_id} ({d.kind.value}): {', '.join(d.members)}; {facts_of(d)}" for d in topology.domains]
    for matrix in matrices(topology):
        lines += ["", matrix.title, *_table(matrix)]
    if topology.notes:
        lines += ["", "notes", *(f"  {note}" for note in topology.notes)]
    return "\n".join(lines) + "\n"


def as_html(topology: Topology) -> str:
    """The same as a page: hosts as boxes with what they have, domains by colour, then matrices and notes."""
    colours = {d.domain_id: f"hsl({137 * i % 360} 60% 50%)" for i, d in enumerate(topology.domains)}
    boxes = "".join(_box(topology, host, colours) for host in topology.hosts)
    domains = "".join(
        f'<li><i style="background:{colours[d.domain_id]}"></i>{_e(d.domain_id)} ({d.kind.value}), '
        f"{len(d.members)} members; {_e(facts_of(d))}</li>"
        for d in topology.domains
    )
    tables = "".join(_html_table(matrix) for matrix in matrices(topology))
    notes = "".join(f"<li>{_e(note)}</li>" for note in topology.notes)
    parts = [("Hosts", f'<div class="hosts">{boxes}</div>'), ("Domains", f"<ul>{domains}</ul>" if domains else "")]
    parts += [("Links and paths", tables), ("Notes", f"<ul>{notes}</ul>" if notes else "")]
    body = "".join(f"<h2>{title}</h2>{content}" for title, content in parts if content)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>wsync topology</title>'
        f"<style>{_STYLE}</style></head><body><h1>Topology</h1>{body}</body></html>\n"
    )


_STYLE = """
:root{color-scheme:light dark}body{font:14px/1.4 system-ui,sans-serif;margin:1.5rem}
.hosts{display:flex;flex-wrap:wrap;gap:1rem}.host{border:1px solid #888;border-radius:6px;padding:.6rem;max-width:36rem}
.host b{display:block}
.part{display:inline-block;border:2px solid #888;border-radius:4px;padding:.1rem .4rem;margin:.15rem}
.nic{border-style:dashed}li i{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}
table{border-collapse:collapse;margin:.5rem 0}th,td{border:1px solid #8886;padding:.15rem .5rem;text-align:center}
caption{text-align:left;font-weight:600}.table{overflow-x:auto}
""".strip()


def _box(topology: Topology, host: Host, colours: dict[str, str]) -> str:
    parts: list[str] = []
    for device in topology.host_devices(host.host_id):
        domain = next((d for d in topology.domains if d.is_scale_up and device.device_id in d.members), None)
        parts.append(_part(device, device.device_id, host, "part", domain, colours))
    for nic in topology.host_nics(host.host_id):
        parts.append(_part(nic, nic.nic_id, host, "part nic", None, colours))
    around = "".join(
        f'<i style="background:{colours[d.domain_id]}" title="{_e(d.domain_id)}">&nbsp;&nbsp;</i> '
        for d in topology.domains
        if host.host_id in d.members
    )
    inside = "".join(parts) or "no accelerator and no NIC was found"
    return f'<div class="host"><b title="{_e(facts_of(host))}">{around}{_e(host.host_id)}</b>{inside}</div>'


def _part(
    record: Device | Nic, name: str, host: Host, kind: str, domain: Domain | None, colours: dict[str, str]
) -> str:
    colour = f' style="border-color:{colours[domain.domain_id]}"' if domain else ""
    what = record.sku or record.name if isinstance(record, Device) else (record.kind.value if record.kind else "")
    label = f"{_short(name, host)} {what}".strip()
    return f'<span class="{kind}"{colour} title="{_e(facts_of(record))}">{_e(label)}</span>'


def _html_table(matrix: Matrix) -> str:
    head = "".join(f"<th>{_e(name)}</th>" for name in matrix.names)
    rows = "".join(
        f"<tr><th>{_e(name)}</th>{''.join(f'<td>{_e(cell)}</td>' for cell in row)}</tr>"
        for name, row in zip(matrix.names, matrix.cells, strict=True)
    )
    caption = f"<caption>{_e(matrix.title)}</caption>"
    return f'<div class="table"><table>{caption}<tr><td></td>{head}</tr>{rows}</table></div>'


def _matrix(title: str, names: Sequence[str], cell: Callable[[str, str], str]) -> Matrix:
    rows = tuple(tuple(SELF if a == b else cell(a, b) for b in names) for a in names)
    return Matrix(title, tuple(names), rows)


def _table(matrix: Matrix) -> list[str]:
    rows = [("", *matrix.names), *((name, *row) for name, row in zip(matrix.names, matrix.cells, strict=True))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _link(topology: Topology, a: str, b: str) -> str:
    link = topology.link(a, b)
    return link.kind if link else UNKNOWN


def _path(finder: PathFinder, a: str, b: str) -> str:
    paths = finder.between(a, b)
    return paths[0].name if paths else UNKNOWN


def _parts(topology: Topology, host: Host) -> list[str]:
    devices = [device.device_id for device in topology.host_devices(host.host_id)]
    return [*devices, *(nic.nic_id for nic in topology.host_nics(host.host_id))]


def _short(name: str, host: Host) -> str:
    return name.removeprefix(f"{host.host_id}/")


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return "/".join(str(item) for item in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _e(text: str) -> str:
    return html.escape(text, quote=True)
