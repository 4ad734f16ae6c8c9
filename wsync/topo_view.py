"""A topology for a reader: as text, in the spirit of `nvidia-smi topo -m`, and as one HTML page of its own."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

import msgspec

from wsync.paths import PathFinder
from wsync.topology import Device, Host, Nic, Record, Topology

SELF, UNKNOWN = "X", "?"
LARGEST_MATRIX = 128
"""Rows; nobody reads more of them. Two racks of 72 devices are told in words only."""


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
    """For each host the links between its devices and NICs; then the path of each pair of devices, and of hosts.

    One that would have more than `LARGEST_MATRIX` rows has none, and its title says so.
    """
    found: list[Matrix] = []
    shown, _ = _hosts(topology)
    kinds: dict[frozenset[str], str] = {}
    for link in topology.links:
        kinds.setdefault(link.ends, link.kind)
    for host in shown:
        names = _parts(topology, host)
        if len(names) > 1:
            found.append(_matrix(f"{host.host_id}: links", names, lambda a, b: kinds.get(frozenset((a, b)), UNKNOWN)))
    finder = PathFinder(topology)
    for what, names in (
        ("devices", [device.device_id for device in topology.devices]),
        ("hosts", [host.host_id for host in shown]),
    ):
        if len(names) > 1:
            found.append(_matrix(f"{what}: path", names, lambda a, b: _path(finder, a, b)))
    return found


def as_text(topology: Topology) -> str:
    """Hosts, devices, NICs and domains with their facts and who told them, the matrices, and the notes."""
    lines: list[str] = []
    shown, bare = _hosts(topology)
    for host in shown:
        lines.append(f"host {host.host_id}: {facts_of(host)}")
        devices, nics = topology.host_devices(host.host_id), topology.host_nics(host.host_id)
        lines += [f"  device {_short(device.device_id, host)}: {facts_of(device)}" for device in devices]
        lines += [f"  NIC {_short(nic.nic_id, host)}: {facts_of(nic)}" for nic in nics]
        if not devices:
            lines.append("  no accelerator was found")
        if not nics:
            lines.append("  no NIC was found")
    if bare:
        lines.append(_bare(bare))
    lines += [f"domain {d.domain_id} ({d.kind.value}): {', '.join(d.members)}; {facts_of(d)}" for d in topology.domains]
    for matrix in matrices(topology):
        lines += ["", matrix.title, *_table(matrix)]
    if topology.notes:
        lines += ["", "notes", *(f"  {note}" for note in topology.notes)]
    return "\n".join(lines) + "\n"


def as_html(topology: Topology) -> str:
    """The same as a page: hosts as boxes, scale-up domains as boxes of one colour in them, then matrices and notes."""
    colours = {d.domain_id: f"hsl({137 * i % 360} 60% 50%)" for i, d in enumerate(topology.domains)}
    shown, bare = _hosts(topology)
    boxes = "".join(_box(topology, host, colours) for host in shown)
    others = f"<p>{_e(_bare(bare))}</p>" if bare else ""
    domains = "".join(
        f'<li><i style="background:{colours[d.domain_id]}"></i>{_e(d.domain_id)} ({d.kind.value}), '
        f"{len(d.members)} members; {_e(facts_of(d))}</li>"
        for d in topology.domains
    )
    tables = "".join(_html_table(matrix) for matrix in matrices(topology))
    notes = "".join(f"<li>{_e(note)}</li>" for note in topology.notes)
    parts = [
        ("Hosts", f'<div class="hosts">{boxes}</div>{others}'),
        ("Domains", f"<ul>{domains}</ul>" if domains else ""),
    ]
    parts += [("Links and paths", tables), ("Notes", f"<ul>{notes}</ul>" if notes else "")]
    body = "".join(f"<h2>{title}</h2>{content}" for title, content in parts if content)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>wsync topology</title>'
        f"<style>{_STYLE}</style></head><body><h1>Topology</h1>{body}</body></html>\n"
    )


_STYLE = """
:root{color-scheme:light dark}body{font:14px/1.4 system-ui,sans-serif;margin:1.5rem}
.hosts{display:flex;flex-wrap:wrap;gap:1rem}.host{border:1px solid #888;border-radius:6px;padding:.6rem;max-width:36rem}
.host b{display:block}.domain{border:2px solid;border-radius:6px;padding:.2rem;margin:.3rem 0}
.domain small{display:block}
.part{display:inline-block;border:2px solid #888;border-radius:4px;padding:.1rem .4rem;margin:.15rem}
.nic{border-style:dashed}li i,small i{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}
table{border-collapse:collapse;margin:.5rem 0}th,td{border:1px solid #8886;padding:.15rem .5rem;text-align:center}
caption{text-align:left;font-weight:600}.table{overflow-x:auto}
""".strip()


def _box(topology: Topology, host: Host, colours: dict[str, str]) -> str:
    """The host with its devices by scale-up domain, its NICs, and names of the racks, zones, ... that it is in."""
    around = "".join(
        f'<small><i style="background:{colours[d.domain_id]}"></i>{_e(d.domain_id)}</small> '
        for d in topology.domains
        if host.host_id in d.members
    )
    inside: list[str] = []
    for domain_id, devices in _by_domain(topology, host).items():
        parts = "".join(_part(device, device.device_id, host, "part") for device in devices)
        inside.append(_frame(domain_id, colours[domain_id], parts) if domain_id else parts)
    inside += [_part(nic, nic.nic_id, host, "part nic") for nic in topology.host_nics(host.host_id)]
    what = "".join(inside) or "no accelerator and no NIC was found"
    return f'<div class="host"><b title="{_e(facts_of(host))}">{_e(host.host_id)}</b>{around}{what}</div>'


def _frame(domain_id: str, colour: str, parts: str) -> str:
    return f'<div class="domain" style="border-color:{colour}"><small>{_e(domain_id)}</small>{parts}</div>'


def _by_domain(topology: Topology, host: Host) -> dict[str, list[Device]]:
    """The host's devices by id of their first scale-up domain; empty for those that are in none."""
    domains = [domain for domain in topology.domains if domain.is_scale_up]
    found: dict[str, list[Device]] = {}
    for device in topology.host_devices(host.host_id):
        name = next((domain.domain_id for domain in domains if device.device_id in domain.members), "")
        found.setdefault(name, []).append(device)
    return found


def _part(record: Device | Nic, name: str, host: Host, kind: str) -> str:
    what = record.sku or record.name if isinstance(record, Device) else (record.kind.value if record.kind else "")
    label = f"{_short(name, host)} {what}".strip()
    return f'<span class="{kind}" title="{_e(facts_of(record))}">{_e(label)}</span>'


def _html_table(matrix: Matrix) -> str:
    if not matrix.names:
        return f"<p>{_e(matrix.title)}</p>"
    head = "".join(f"<th>{_e(name)}</th>" for name in matrix.names)
    rows = "".join(
        f"<tr><th>{_e(name)}</th>{''.join(f'<td>{_e(cell)}</td>' for cell in row)}</tr>"
        for name, row in zip(matrix.names, matrix.cells, strict=True)
    )
    caption = f"<caption>{_e(matrix.title)}</caption>"
    return f'<div class="table"><table>{caption}<tr><td></td>{head}</tr>{rows}</table></div>'


def _matrix(title: str, names: Sequence[str], cell: Callable[[str, str], str]) -> Matrix:
    if len(names) > LARGEST_MATRIX:
        return Matrix(f"{title}: no table of {len(names)}, `wsync.paths.between` tells of any two", (), ())
    rows = tuple(tuple(SELF if a == b else cell(a, b) for b in names) for a in names)
    return Matrix(title, tuple(names), rows)


def _table(matrix: Matrix) -> list[str]:
    if not matrix.names:
        return []
    rows = [("", *matrix.names), *((name, *row) for name, row in zip(matrix.names, matrix.cells, strict=True))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _path(finder: PathFinder, a: str, b: str) -> str:
    paths = finder.between(a, b)
    return paths[0].name if paths else UNKNOWN


def _parts(topology: Topology, host: Host) -> list[str]:
    devices = [device.device_id for device in topology.host_devices(host.host_id)]
    return [*devices, *(nic.nic_id for nic in topology.host_nics(host.host_id))]


def _hosts(topology: Topology) -> tuple[list[Host], list[Host]]:
    """Those that are more than a name, and the others: a scheduler tells the names of all hosts of its cluster."""
    told = {*(device.host_id for device in topology.devices), *(nic.host_id for nic in topology.nics)}
    shown: list[Host] = []
    bare: list[Host] = []
    for host in topology.hosts:
        (shown if host.host_id in told or host.known_fields() else bare).append(host)
    return (shown, bare) if shown else (bare, [])


def _bare(hosts: list[Host]) -> str:
    names = ", ".join(host.host_id for host in hosts[:8])
    return (
        f"{len(hosts)} more hosts, of which only the name or the place is known: {names}{', ...' if hosts[8:] else ''}"
    )


def _short(name: str, host: Host) -> str:
    return name.removeprefix(f"{host.host_id}/")


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return "/".join(str(item) for item in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _e(text: str) -> str:
    return html.escape(text, quote=True)
