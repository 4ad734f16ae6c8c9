"""What hosts know of themselves decides who pulls from whom, in real processes; and it never costs the bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from _members import SMALL, Job, Spec, eventually, reference
from test_cases import check_moved

from wsync.status import HolderPhase, VersionStatus
from wsync.topology import Domain, DomainKind, Host, Nic, NicKind, Topology

pytestmark = pytest.mark.process

GBIT = 1e9 / 8
LARGE: Spec = [("a", "float32", (2048, 1024)), ("b", "float32", (2048, 1024))]


def declared(folder: Path, rates: dict[str, float], racks: dict[str, str] | None = None) -> str:
    """A topology file of hosts with those links, in Gbit/s, and racks with half a gigabit of uplink."""
    nics = [
        Nic(nic_id=f"{host}/eth0", host_id=host, kind=NicKind.ETHERNET, nbytes_per_s=rate * GBIT)
        for host, rate in rates.items()
    ]
    racks = racks or {}
    domains = [
        Domain(
            domain_id=rack,
            kind=DomainKind.RACK,
            members=tuple(host for host, at in racks.items() if at == rack),
            uplink_nbytes_per_s=0.5 * GBIT,
        )
        for rack in dict.fromkeys(racks.values())
    ]
    topology = Topology(hosts=tuple(Host(host_id=host) for host in rates), nics=tuple(nics), domains=tuple(domains))
    path = folder / "topology.json"
    path.write_text(topology.dump())
    return str(path)


def parents(status: VersionStatus) -> dict[str, str]:
    return {holder.host: holder.parents[0].rpartition("/")[2] for holder in status.holders}


def follow(job: Job, path: str, hosts: str, is_wanted: Callable[[dict[str, str]], bool]) -> None:
    """Versions until they go along such routes (hosts tell of themselves a moment after they joined); all right."""
    config = {"topology": path, "chunk_nbytes": 0}
    trainer = job.trainer(LARGE, 1, config=config)
    replicas = [job.replica(LARGE, 0, host=host, config=config) for host in hosts]
    seed, taken = 0, dict[str, str]()

    def is_so() -> bool:
        nonlocal seed, taken
        seed += 1
        version = trainer.publish(seed, seed)
        for replica in replicas:
            assert replica.wait_version(version) == version
            check_moved(replica, LARGE, seed - 1, seed)
        taken = parents(trainer.wait_committed(version, num_replicas=len(hosts)))
        return is_wanted(taken)

    eventually(is_so, lambda: f"{taken} become what is wanted")
    assert is_so(), "and stay so"


def test_a_slow_host_comes_last_and_slows_nobody(job: Job) -> None:
    path = declared(job.folder, {"A": 1.0, "B": 0.25, "C": 1.0, "D": 0.5})
    follow(job, path, "BCD", lambda taken: taken["C"] == "A" and taken["D"] in "AC" and "B" not in taken.values())


def test_an_uplink_between_racks_carries_each_byte_once(job: Job) -> None:
    racks = {"A": "left", "B": "right", "C": "left", "D": "right"}
    path = declared(job.folder, dict.fromkeys(racks, 1.0), racks)
    follow(job, path, "BCD", lambda taken: taken == {"C": "A", "B": "C", "D": "B"})


def test_a_topology_without_this_host_is_named_and_costs_no_bytes(job: Job) -> None:
    path = declared(job.folder, {"A": 1.0, "B": 1.0})
    trainer = job.trainer(config={"topology": path})
    replicas = [job.replica(host=host, config={"topology": path}) for host in "BC"]
    version = trainer.publish(1, 2)
    for replica in replicas:
        replica.wait_version(version)
        check_moved(replica, SMALL, 0, 2)
    status = trainer.wait_committed(version, num_replicas=2)
    assert {holder.phase for holder in status.holders} == {HolderPhase.WHOLE}
    eventually(lambda: "'C' is not in the topology" in job.logs(), "the host that is not in it says so")


@pytest.mark.parametrize(
    "text", ["", "{", '{"hosts": [{"host_id": 1}]}', '{"devices": [{"device_id": "d", "host_id": "A"}]}']
)
def test_a_file_that_is_no_topology_is_named_and_costs_no_bytes(job: Job, text: str) -> None:
    path = job.folder / "broken.json"
    path.write_text(text)
    trainer, replica = job.trainer(config={"topology": str(path)}), job.replica(host="B", config={"topology": "none"})
    replica.wait_version(trainer.publish(1, 2))
    assert replica.digest() == reference(SMALL, 2) != reference(SMALL, 0)
    eventually(lambda: f"{path} is no topology" in job.logs(), "the file is named")
