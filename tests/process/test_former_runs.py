"""A job that begins anew while a host of its former run cannot be reached: both runs give the same numbers.

The bytes of two runs never meet, and the host that comes back ends with those of the present run.
"""

from __future__ import annotations

import time

from _members import SMALL, Job, Member, eventually, reference
from test_cases import with_coordinator
from test_shards import expected, publish, publish_all, trainers, worker
from test_shards_faults import restart_coordinator

from wsync.status import ReplicaPhase


def cut_off(job: Job, host: str, member: Member) -> list[int]:
    """Its holder and its member stand still: nobody hears of them until `job.resume`."""
    pids = [job.holder_pid(host, address=address_of(job)), member.pid]
    for pid in pids:
        job.stop(pid)
    return pids


def address_of(job: Job) -> tuple[str, int]:
    host, _, port = job.env["WSYNC_ADDRESS"].rpartition(":")
    return host, int(port)


def end(job: Job, members: list[Member], hosts: str) -> None:
    holders = [job.holder_pid(host, address=address_of(job)) for host in hosts]
    for member in members:
        member.kill()
    for pid in holders:
        job.kill(pid)


def test_half_a_version_of_a_former_run_is_not_completed_by_the_new_one(job: Job) -> None:
    coordinator, _ = with_coordinator(job)
    ranks, member = trainers(job, 2, hosts="AB"), worker(job, 0, 2, host="C")
    assert member.wait_version(publish_all(ranks, 1, 1)) == 1
    ranks[0].run(publish, 2, 2)
    eventually(lambda: "lanes of version 2" in member.run(staged_lanes, 2), "rank 0's part of version 2 is on host C")
    stopped = cut_off(job, "C", member)
    end(job, ranks, "AB")
    restart_coordinator(job, coordinator)
    ranks, other = trainers(job, 2, hosts="AB"), worker(job, 0, 2, host="D")
    for step, seed in ((1, 11), (2, 12)):
        assert publish_all(ranks, step, seed) == step, "nobody who remembers can be reached"
    assert other.wait_version(2) == 2
    assert other.digest() == expected(12, 0, 2)
    for pid in stopped:
        job.resume(pid)
    seen = set()
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        member.commit_latest()
        seen.add((member.get("replica.version"), tuple(sorted(member.digest().items()))))
    right = {(number, tuple(sorted(expected(seed, 0, 2).items()))) for number, seed in ((1, 1), (2, 12))}
    assert seen <= right, "a mixture of both runs"
    assert publish_all(ranks, 3, 13) == 3
    assert member.wait_version(3) == 3
    assert member.digest() == expected(13, 0, 2)
    assert member.verify() == []


def staged_lanes(child: object, version: int) -> str:
    """Which of the worker's lanes have the version on this host."""
    from wsync.engine.shard_replica import _has

    lanes = child.replica._lanes.values()  # type: ignore[attr-defined]
    count = sum(_has(lane, version) for lane in lanes)
    return f"{count} lanes of version {version}" if 0 < count < len(lanes) else ""


def test_a_whole_version_of_a_former_run_gives_way_to_the_new_one(job: Job) -> None:
    coordinator, _ = with_coordinator(job)
    trainer, replica = job.trainer(host="A"), job.replica(host="C")
    trainer.publish(1, 1)
    assert replica.wait_version(1) == 1
    trainer.publish(2, 2)
    trainer.wait_staged(2)
    assert replica.commit_latest() == 2
    assert replica.digest() == reference(SMALL, 2)
    stopped = cut_off(job, "C", replica)
    end(job, [trainer], "A")
    restart_coordinator(job, coordinator)
    trainer, other = job.trainer(host="A"), job.replica(host="D")
    for step, seed in ((1, 11), (2, 12)):
        assert trainer.publish(step, seed) == step
    assert other.wait_version(2) == 2
    for pid in stopped:
        job.resume(pid)
    eventually(lambda: replica.commit_latest() == 2, "the present run's version 2 takes the place of the former run's")
    assert replica.digest() == reference(SMALL, 12)
    assert replica.verify() == []
    assert trainer.wait_committed(2, num_replicas=2).count(ReplicaPhase.COMMITTED) == 2


def test_a_higher_number_of_a_former_run_does_not_spread(job: Job) -> None:
    coordinator, _ = with_coordinator(job)
    trainer, replica = job.trainer(host="A"), job.replica(host="C")
    for step in (1, 2, 3):
        trainer.publish(step, step)
        assert replica.wait_version(step) == step
    stopped = cut_off(job, "C", replica)
    end(job, [trainer], "A")
    restart_coordinator(job, coordinator)
    trainer, other = job.trainer(host="A"), job.replica(host="D")
    assert trainer.publish(1, 11) == 1
    assert other.wait_version(1) == 1
    for pid in stopped:
        job.resume(pid)
    eventually(lambda: trainer.get("publisher.last_version") >= 1 and replica.commit_latest() == 0, "host C is back")
    late = job.replica(host="E")
    assert late.wait_version(1) == 1
    for member in (other, late):
        member.commit_latest()
        assert (member.get("replica.version"), member.digest()) == (1, reference(SMALL, 11))
    version = trainer.publish(4, 14)
    assert version == 4, "the number that the former run reached is known now"
    for member in (replica, other, late):
        assert member.wait_version(4) == 4
        assert member.digest() == reference(SMALL, 14)
