"""Captured text of `ibstat`, `ibv_devinfo` and `fi_info -p efa`, as reports from machines that are not at hand have it.

On a live machine `nics` reads what these tools read themselves. Devices are told by their names and PCI addresses,
never by GUIDs: those of EFA are all zero.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from wsync.discovery.hardware import identify_nic
from wsync.discovery.reading import built
from wsync.discovery.skus import GBIT
from wsync.errors import ProbeError
from wsync.topology import Host, Nic, NicKind, Source, Topology

_KINDS = {"InfiniBand": NicKind.INFINIBAND, "Ethernet": NicKind.ROCE}
_PCI_VENDOR = {0x02C9: 0x15B3}
"""Verbs report the vendor of the GUID where they have one."""

_Port = tuple[str, int, Mapping[str, str], Mapping[str, str]]
"""Name of the device, number of the port, what is said of the device, what of the port."""


def read_ibstat(text: str, *, host_id: str) -> Topology:
    """The ports of `ibstat`. Where it broke off with an ibpanic, those before that are read and the rest is noted."""
    body, panic, rest = text.partition("ibpanic:")
    notes = [f"{host_id}: ibstat broke off ({rest.strip():.120}): devices are missing"] if panic else []
    if panic and "Link layer:" not in body[body.rfind("CA '") :]:
        body = body[: max(body.rfind("CA '"), 0)]
    nics = []
    for name, number, device, said in _ports(body, r"CA '(\S+)'", r"Port (\d+):"):
        is_up = _said(said, "State", name) == "Active"
        layer = _said(said, "Link layer", name)
        rate = _said(said, "Rate", name)
        if layer not in _KINDS or not re.fullmatch(r"\d{1,6}(\.\d{1,3})?", rate):
            raise ProbeError(f"ibstat: {name} has link layer '{layer:.40}' and rate '{rate:.40}'", hint="run it anew")
        if not is_up:
            notes.append(f"{host_id}/{name} is not active: its rate is not believed")
        nic = Nic.told(
            Source.DRIVER,
            **_names(name, number, device.get("Number of ports", "1"), host_id),
            host_id=host_id,
            kind=_KINDS[layer],
            nbytes_per_s=float(rate) * GBIT if is_up else 0.0,
            is_up=is_up,
        )
        nics.append(nic)
    return _of_host("ibstat", host_id, nics, notes)


def read_ibv_devinfo(text: str, *, host_id: str) -> Topology:
    """The ports of `ibv_devinfo`, which does not tell their rates."""
    nics = []
    for name, number, device, said in _ports(text, r"hca_id:\s*(\S+)", r"port:\s*(\d+)"):
        ids = [_said(device, key, name) for key in ("vendor_id", "vendor_part_id")]
        if not re.fullmatch(r"0x[0-9a-f]{1,6}", ids[0]) or not re.fullmatch(r"\d{1,6}", ids[1]):
            raise ProbeError(
                f"ibv_devinfo: {name} is of vendor '{ids[0]:.40}', part '{ids[1]:.40}'", hint="run it anew"
            )
        vendor = int(ids[0], 16)
        pci_id = f"{_PCI_VENDOR.get(vendor, vendor):04x}:{int(ids[1]):04x}"
        model = identify_nic(pci_id)
        layer = _said(said, "link_layer", name)
        nic = Nic.told(
            Source.DRIVER,
            **_names(name, number, device.get("phys_port_cnt", "1"), host_id),
            host_id=host_id,
            kind=model.kind if model and model.kind else _KINDS.get(layer),
            pci_id=pci_id,
            is_up=_said(said, "state", name).startswith("PORT_ACTIVE "),
        )
        nics.append(nic)
    return _of_host("ibv_devinfo", host_id, nics, [])


def read_fi_info(text: str, *, host_id: str) -> Topology:
    """The EFA devices of `fi_info -p efa`: those of its domains, which may each have several endpoint types.

    The fabric is not looked at: it has been `EFA-` with an address, `efa` and `efa-direct` over the years.
    """
    nics: dict[str, Nic] = {}
    for block in re.split(r"^provider:", text, flags=re.MULTILINE)[1:]:
        said = dict(_pairs(block))
        if block.split("\n", 1)[0].strip() != "efa":
            continue
        name = re.sub(r"-(rdm|dgrm)$", "", _said(said, "domain", "a provider efa"))
        if not re.fullmatch(r"\S+", name):
            raise ProbeError(f"fi_info: an EFA device is named '{name:.40}'", hint="run it anew")
        nics[name] = Nic.told(
            Source.DRIVER,
            nic_id=f"{host_id}/{name}",
            host_id=host_id,
            kind=NicKind.EFA,
            name=name,
            pci=_pci_of_name(name),
        )
    return _of_host("fi_info", host_id, list(nics.values()), [])


def _ports(text: str, device: str, port: str) -> Iterator[_Port]:
    """Ports in text whose devices and ports each begin with a line of that form."""
    for name, head in _blocks(text, device):
        parts = list(_blocks(head, port))
        if not parts:
            raise ProbeError(f"{name} has no ports", hint="give the whole output")
        before = re.split(rf"^\s*{port}\s*$", head, maxsplit=1, flags=re.MULTILINE)[0]
        for number, lines in parts:
            yield name, int(number), dict(_pairs(before)), dict(_pairs(lines))


def _blocks(text: str, begin: str) -> Iterator[tuple[str, str]]:
    parts = re.split(rf"^\s*{begin}\s*$", text, flags=re.MULTILINE)[1:]
    return zip(parts[::2], parts[1::2], strict=True)


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            yield key.strip(), value.strip()


def _said(pairs: Mapping[str, str], key: str, name: str) -> str:
    if key not in pairs:
        raise ProbeError(f"nothing is said of '{key}' of {name}", hint="give the whole output")
    return pairs[key]


def _names(name: str, number: int, num_ports: str, host_id: str) -> dict[str, str]:
    """As `nics` names ports: by the number only where a device has several."""
    whole = name if num_ports == "1" else f"{name}:{number}"
    return {"nic_id": f"{host_id}/{whole}", "name": whole}


def _pci_of_name(name: str) -> str:
    """`rdmap16s27` is at 0000:10:1b.0: the names that udev gives are the address in decimals."""
    found = re.fullmatch(r"rdma(?:P(\d{1,5}))?p(\d{1,3})s(\d{1,2})(?:f(\d))?", name)
    if found is None:
        return ""
    domain, bus, slot, function = (int(number or 0) for number in found.groups())
    return f"{domain:04x}:{bus:02x}:{slot:02x}.{function}"


def _of_host(tool: str, host_id: str, nics: list[Nic], notes: list[str]) -> Topology:
    if not nics and not notes:
        raise ProbeError(f"no device in the output of {tool}", hint="give the whole output")
    return built(f"the output of {tool}", hosts=(Host(host_id=host_id),), nics=tuple(nics), notes=tuple(notes))
