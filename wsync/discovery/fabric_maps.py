"""What a fabric's managers say of all hosts at once: `ibnetdiscover` of InfiniBand, and NetQ's list of NVLink trays."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping

import msgspec

from wsync.discovery.reading import Tier, built, decoded, domains_of, network_tiers
from wsync.discovery.skus import GBIT
from wsync.errors import ProbeError
from wsync.topology import DomainKind, Host, Nic, NicKind, Source, Topology

_SWITCH = re.compile(r'Switch\s+\d+\s+"S-([0-9a-f]{16})"\s*#\s*"([^"]*)".*')
_ADAPTER = re.compile(r'Ca\s+\d+\s+"H-[0-9a-f]{16}".*')
_PORT = re.compile(
    r'\[(\d+)\](?:\([0-9a-f]+\))?\s+"([SH])-([0-9a-f]{16})"\[\d+\](?:\([0-9a-f]+\))?\s*#\s*"([^"]*)"(.*)'
)
_OF_HOST = re.compile(r"(\S+) ((?:mlx5_|HCA-|ibp)\S*)")
_WIDTH = re.compile(r"\b(\d{1,2})x(SDR|DDR|QDR|FDR10|FDR|EDR|HDR|NDR|XDR)\b")
_LANE_GBIT = {"SDR": 2, "DDR": 4, "QDR": 8, "FDR10": 10, "FDR": 14, "EDR": 25, "HDR": 50, "NDR": 100, "XDR": 200}
"""Of one lane, as it is counted in the names of rates: `4xNDR` is 400 Gbit/s."""
_HEADS = ("vendid=", "devid=", "sysimgguid=", "switchguid=", "caguid=", "#")


class _Location(msgspec.Struct, rename="pascal"):
    chassis_serial_number: str = ""


class _Tray(msgspec.Struct, rename="pascal"):
    name: str
    health: str = ""
    location_info: _Location = msgspec.field(default_factory=_Location)
    domain_uuid: str = msgspec.field(default="", name="DomainUUID")


def read_ibnetdiscover(text: str, *, host_ids: Mapping[str, str] | None = None) -> Topology:
    """Hosts with their NICs and rates, and blocks: hosts that have a leaf switch in common, directly or through others.

    A NIC's rail is the place of its leaf, by name, among those of its block, where no host has two NICs at one leaf.
    `host_ids` are by the name that the fabric has of a host (`host HCA-1`, `host mlx5_0`); others keep that. Adapters
    whose description names no host are counted in a note. Raises ProbeError on a line of another form.
    """
    leaf, names = "", dict[str, str]()
    found: dict[str, dict[str, tuple[str, float]]] = defaultdict(dict)
    unnamed: Counter[str] = Counter()
    for line in text.splitlines():
        if switch := _SWITCH.fullmatch(line):
            leaf = switch[1]
            names[leaf] = f"{switch[2].split(';')[-1].split(':')[0] or leaf}"
        elif _ADAPTER.fullmatch(line):
            leaf = ""
        elif port := _PORT.fullmatch(line):
            if leaf and port[2] == "H":
                _note_adapter(port, leaf, found, unnamed)
        elif line.strip() and not line.startswith(_HEADS) and not line.startswith("["):
            raise ProbeError(f"ibnetdiscover has the line {line!r:.80}", hint="give the whole output of ibnetdiscover")
    if not names:
        raise ProbeError("ibnetdiscover names no switch", hint="give the whole output of ibnetdiscover")
    return _hosts_of(found, names, unnamed, host_ids or {})


def read_netq_nodes(text: str, *, host_ids: Mapping[str, str] | None = None) -> Topology:
    """Racks from NetQ's compute nodes, by the serial number of the chassis. `host_ids` are by node name.

    `DomainUUID` names the fabric of NVLink and not its cliques, so it makes no NVLink domain here: drivers tell that.
    """
    trays = decoded(text, list[_Tray], "NetQ's list of compute nodes")
    chains: list[tuple[str, list[Tier]]] = []
    notes: list[str] = []
    for tray in trays:
        host_id = (host_ids or {}).get(tray.name, tray.name)
        serial = tray.location_info.chassis_serial_number
        chains.append((host_id, [(DomainKind.RACK, serial)] if serial else []))
        if tray.health not in ("", "HEALTHY"):
            notes.append(f"{host_id}: NetQ says that its NVLink is {tray.health}")
    fabrics = sorted({tray.domain_uuid for tray in trays} - {""})
    notes += [f"NVLink fabric {name}: NetQ does not say which cliques it has; drivers do" for name in fabrics]
    hosts = tuple(Host(host_id=host_id) for host_id in dict.fromkeys(host_id for host_id, _ in chains))
    return built("NetQ", hosts=hosts, domains=domains_of(chains, Source.PLATFORM), notes=tuple(notes))


def _note_adapter(
    port: re.Match[str], leaf: str, found: dict[str, dict[str, tuple[str, float]]], unnamed: Counter[str]
) -> None:
    owner = _OF_HOST.fullmatch(port[4].strip())
    if owner is None:
        unnamed[port[4]] += 1
        return
    width = _WIDTH.search(port[5])
    rate = int(width[1]) * _LANE_GBIT[width[2]] * GBIT if width else 0.0
    if owner[2] in found[owner[1]]:
        raise ProbeError(f"ibnetdiscover: '{owner[0]}' is at two ports", hint="give each host a name of its own")
    found[owner[1]][owner[2]] = (leaf, rate)


def _hosts_of(
    found: Mapping[str, Mapping[str, tuple[str, float]]],
    names: Mapping[str, str],
    unnamed: Counter[str],
    host_ids: Mapping[str, str],
) -> Topology:
    nics: list[Nic] = []
    chains: list[tuple[str, list[Tier]]] = []
    for hosts_of_block in _blocks({name: {leaf for leaf, _ in nics_.values()} for name, nics_ in found.items()}):
        leaves = {leaf for name in hosts_of_block for leaf, _ in found[name].values()}
        order = sorted(leaves, key=lambda leaf: (names[leaf], leaf))
        has_rails = len(order) > 1 and all(
            len({leaf for leaf, _ in found[name].values()}) == len(found[name]) for name in hosts_of_block
        )
        for name in hosts_of_block:
            host_id = host_ids.get(name, name)
            for adapter, (leaf, rate) in found[name].items():
                nics.append(
                    Nic.told(
                        Source.PLATFORM,
                        nic_id=f"{host_id}/{adapter}",
                        host_id=host_id,
                        kind=NicKind.INFINIBAND,
                        name=adapter,
                        rail=order.index(leaf) if has_rails else -1,
                        nbytes_per_s=rate,
                        is_up=True,
                    )
                )
            chains.append((host_id, network_tiers(["+".join(names[leaf] for leaf in order)], has_rack=True)))
    notes = [f"{count} adapters are '{text}': no host is named" for text, count in sorted(unnamed.items())]
    hosts = tuple(Host(host_id=host_id) for host_id, _ in chains)
    domains = domains_of(chains, Source.PLATFORM)
    return built("ibnetdiscover", hosts=hosts, nics=tuple(nics), domains=domains, notes=tuple(notes))


def _blocks(leaves: Mapping[str, set[str]]) -> list[list[str]]:
    """Hosts that share leaves, in the order in which they were found."""
    at: dict[str, list[str]] = defaultdict(list)
    for host, those in leaves.items():
        for leaf in those:
            at[leaf].append(host)
    left, blocks = dict.fromkeys(leaves), []
    while left:
        todo, block = [next(iter(left))], set[str]()
        while todo:
            host = todo.pop()
            if host in left:
                del left[host]
                block.add(host)
                todo += [other for leaf in leaves[host] for other in at[leaf]]
        blocks.append([host for host in leaves if host in block])
    return blocks
