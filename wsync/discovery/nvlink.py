"""NVLink domains: islands found pair by pair, and the fabric that a GPU says it is in. Pure; for all NVIDIA probes.

- A GPU that fell off the fabric is in no island, whatever its neighbours have.
- A fabric is believed if its state is completed, its status success and its UUID not zero, all three (`Fabric.key`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from wsync.topology import Device, Domain, DomainKind, Source

FABRIC_STATES = ("not supported", "not started", "in progress", "completed")


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """What a GPU says of its NVLink fabric; `state` as in `FABRIC_STATES`, `status` is `success` or an error."""

    state: str
    status: str = ""
    cluster_uuid: str = ""
    clique_id: int = 0

    @property
    def key(self) -> str:
        """`<ClusterUUID>.<CliqueId>` if it is to be believed, else empty.

        Drivers say "completed" with a zero UUID, or with a status that is an error: believing that would make one
        domain of all such hosts.
        """
        if self.state != "completed" or self.status != "success" or not self.cluster_uuid.strip("0-"):
            return ""
        return f"{self.cluster_uuid}.{self.clique_id}"

    @property
    def doubt(self) -> str:
        """Why it is not believed, empty if it is, or if the GPU knows no fabric."""
        if self.key or self.state == "not supported":
            return ""
        return f"fabric not believed: state {self.state}, status {self.status}, UUID {self.cluster_uuid or 'none'}"


def islands(members: Sequence[str], is_joined: Callable[[str, str], bool]) -> list[list[str]]:
    """Members in groups in each of which every pair is joined; each is in the first group that takes it."""
    found: list[list[str]] = []
    for member in members:
        home = next((island for island in found if all(is_joined(member, other) for other in island)), None)
        if home is None:
            found.append([member])
        else:
            home.append(member)
    return found


def nvlink_domains(
    devices: Sequence[Device], fabrics: Mapping[str, str], is_joined: Callable[[str, str], bool]
) -> tuple[tuple[Domain, ...], list[str]]:
    """NVLink domains of a host's GPUs, and what is to note.

    `fabrics` has the fabric's key per device id, empty without one. GPUs of different keys are never in one domain. A
    GPU that is joined to none of its key's other GPUs of this host, though these are joined, is in no domain.
    """
    notes: list[str] = []
    domains: list[Domain] = []
    by_id = {device.device_id: device for device in devices}

    def add(domain_id: str, members: list[str]) -> None:
        domain = Domain.told(Source.DRIVER, domain_id=domain_id, kind=DomainKind.NVLINK, members=tuple(members))
        rates = [by_id[m].num_links * by_id[m].link_nbytes_per_s for m in members]
        if all(rates):
            source = max((by_id[m].facts["link_nbytes_per_s"] for m in members), key=list(Source).index)
            rate = Domain.told(source, domain_id=domain_id, kind=DomainKind.NVLINK, nbytes_per_s=min(rates))
            domain = domain.joined(rate)
        domains.append(domain)

    num_local = 0
    for key in dict.fromkeys(fabrics[device.device_id] for device in devices):
        members = [device.device_id for device in devices if fabrics[device.device_id] == key]
        groups = islands(members, is_joined)
        joined = [group for group in groups if len(group) > 1]
        if key and joined:
            notes += [f"{g[0]} says that it is in fabric {key}, and has no NVLink there" for g in groups if len(g) == 1]
        if key and len(groups) == 1:
            joined = groups
        if key and len(joined) == 1:
            add(key, joined[0])
            continue
        if key:
            notes.append(f"fabric {key} not believed: its GPUs on this host are not all joined by NVLink")
        for group in joined:
            add(f"{devices[0].host_id}/nvlink{num_local}", group)
            num_local += 1
    return tuple(domains), notes
