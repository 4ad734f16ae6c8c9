"""Sharded channels when processes die, stop and restart: no version is ever mixed, and nobody is stuck afterwards."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
from _members import Child, Job, Member, count_memfds, eventually
from test_cases import with_coordinator
from test_shards import builder, expected, full, open_trainer, publish, publish_all, trainers, worker

from wsync.errors import (
    CommitError,
    ConfigError,
    ConnectError,
    MembershipError,
    PublishError,
    TransferTimeout,
    WsyncError,
)
from wsync.holding import HoldingBuilder, Region


def restart_coordinator(job: Job, coordinator: Member) -> Member:
    from test_cases import run_coordinator

    port = int(job.env["WSYNC_ADDRESS"].rpartition(":")[2])
    coordinator.kill()
    again = job.member()
    again.run(run_coordinator, port)
    return again


def test_a_new_coordinator_gives_no_number_twice(job: Job) -> None:
    """The holder that carries the coordinator dies between two ranks of a round: steps 2 and 3 are not mixed."""
    member = worker(job, 0, 2, host="A")
    ranks = [job.member("B"), job.member("A")]
    for rank, trainer in enumerate(ranks):
        trainer.run(open_trainer, rank, 2, "float32")
    assert member.wait_version(publish_all(ranks, 1, 1)) == 1
    ranks[0].run(publish, 2, 2)
    job.kill(job.holder_pid("A"))
    ranks[1].begin("run", publish, 3, 3)
    time.sleep(1.0)
    assert member.commit_latest() == 0
    assert member.digest() == expected(1, 0, 2)
    assert ranks[0].run(publish, 3, 3) == ranks[1].end() == 3, "version 2 is known to be taken"
    assert member.wait_version(3) == 3
    assert member.digest() == expected(3, 0, 2)


def test_numbers_go_on_after_a_restart_of_the_coordinator(job: Job) -> None:
    coordinator, _ = with_coordinator(job)
    ranks, member = trainers(job, 2, hosts="AB"), worker(job, 0, 2, host="C")
    for step in (1, 2, 3):
        assert member.wait_version(publish_all(ranks, step, step)) == step
    coordinator = restart_coordinator(job, coordinator)
    assert member.wait_version(publish_all(ranks, 4, 4)) == 4
    assert member.digest() == expected(4, 0, 2)
    ranks[0].wait_committed(4, 20.0)
    for rank in ranks:
        rank.close()
    restart_coordinator(job, coordinator)
    ranks = trainers(job, 3, hosts="AB")
    assert member.wait_version(publish_all(ranks, 5, 5)) == 5
    assert member.digest() == expected(5, 0, 2)


def fail_second_lane(child: Child) -> int:
    import wsync.engine.shard_replica as module

    real, count = module.Replica, [0]

    def replica(*args: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] == 2:
            module.Replica = real  # type: ignore[misc]
            raise ConfigError("injected")
        return real(*args, **options)

    module.Replica = replica  # type: ignore[misc, assignment]
    return child.commit_latest()


def test_lanes_that_were_followed_in_part_are_not_committed(job: Job) -> None:
    ranks, member = trainers(job, 2), worker(job, 0, 2)
    publish_all(ranks, 1, 1)
    with pytest.raises(ConfigError, match="injected"):
        member.run(fail_second_lane)
    assert member.get("replica.version") == 0
    assert member.wait_version(1) == 1
    assert member.digest() == expected(1, 0, 2)


def fail_spreading(child: Child) -> None:
    locals_ = child.replica._locals
    real = locals_.spread

    def spread() -> None:
        locals_.spread = real
        child.tensors["bb"][1, :3] = -1
        raise KeyboardInterrupt

    locals_.spread = spread
    child.replica.commit_latest()


def fail_install(child: Child, number: int) -> None:
    """The install of one lane writes something and fails."""
    from wsync.engine.tensors import NumpyTensors

    real, count = NumpyTensors.install, [0]

    def install(self: NumpyTensors, *args: Any) -> None:
        count[0] += 1
        if count[0] <= number:
            return real(self, *args)
        NumpyTensors.install = real  # type: ignore[method-assign]
        for array in self._arrays:
            array[...] = 3
        raise RuntimeError("the device fell off the bus")

    NumpyTensors.install = install  # type: ignore[method-assign]
    child.replica.commit_latest()


def test_a_commit_that_fails_half_way_leaves_the_former_version(job: Job) -> None:
    ranks, member = trainers(job, 3), worker(job, 0, 2)
    member.wait_version(publish_all(ranks, 1, 1))
    publish_all(ranks, 2, 2)
    time.sleep(0.5)
    for function, *args in ((fail_spreading,), (fail_install, 0), (fail_install, 1), (fail_install, 2)):
        with pytest.raises((KeyboardInterrupt, CommitError)):
            member.run(function, *args)
        assert member.get("replica.version") == 1
        assert member.get("replica.is_ready") is True
        assert member.digest() == expected(1, 0, 2)
        assert member.verify() == []
    assert member.wait_version(2) == 2
    assert member.digest() == expected(2, 0, 2)


def scribble(child: Child) -> None:
    child.tensors["bb"][1, 2] += 1


def test_verify_looks_at_every_place_of_a_region(job: Job) -> None:
    ranks, member = trainers(job, 2), worker(job, 0, 2)
    member.wait_version(publish_all(ranks, 1, 1))
    assert member.verify() == []
    member.run(scribble)
    assert [name.partition("[")[0] for name in member.verify()] == ["b"]


def open_named(child: Child, count: int) -> None:
    """The first rows of `w`, under an id that others have too."""
    from wsync import ShardReplica

    built = builder()
    built.local("w", "float32", (12, 10), [Region((count, 0), (12 - count, 10))] if count < 12 else [])
    built.piece("w", Region((0, 0), (count, 10)), "w", (0, 0))
    child.tensors = {"w": np.full((12, 10), 7, np.float32)}
    child.replica = ShardReplica("policy", built.build(), child.tensors, member_id="me", config=child.config)


def test_workers_with_the_same_name_are_told_apart(job: Job) -> None:
    ranks, members = trainers(job, 2), [job.member(), job.member()]
    for member, count in zip(members, (12, 4), strict=True):
        member.run(open_named, count)
    version = publish_all(ranks, 1, 1)
    for member, count in zip(members, (12, 4), strict=True):
        assert member.wait_version(version) == version
        rows = member.get("tensors")["w"]
        assert np.array_equal(rows[:count], full(1)["w"][:count])
        assert (rows[count:] == 7).all()
    ranks[0].wait_committed(version, 20.0)


def test_a_lost_step_does_not_cost_the_next_ones(job: Job) -> None:
    ranks, member = trainers(job, 2), worker(job, 0, 2)
    member.wait_version(publish_all(ranks, 1, 1))
    ranks[0].run(publish, 2, 2)  # the other rank misses it
    version = publish_all(ranks, 3, 3)
    assert member.wait_version(version) == version
    assert member.digest() == expected(3, 0, 2)
    with pytest.raises(PublishError, match="rank 1 offers step 3 for version 2"):
        ranks[0].wait_committed(2, 10.0)


def test_publishers_outlive_their_holder(job: Job) -> None:
    ranks, member = trainers(job, 2), worker(job, 0, 2, host="B")
    member.wait_version(publish_all(ranks, 1, 1))
    job.kill(job.holder_pid("A"))
    for rank in ranks:  # at the same time: the coordinator is a new one, and waits for both
        rank.begin("run", publish, 2, 2)
    (version,) = {rank.end() for rank in ranks}
    assert member.wait_version(version) == version
    assert member.digest() == expected(2, 0, 2)
    ranks[0].wait_committed(version, 20.0)


def test_ranks_that_lost_their_holder_need_not_come_at_the_same_time(job: Job) -> None:
    """The coordinator lives on another host, and knows them still."""
    member = worker(job, 0, 2, host="B")
    ranks = trainers(job, 2)
    member.wait_version(publish_all(ranks, 1, 1))
    job.kill(job.holder_pid("A"))
    version = publish_all(ranks, 2, 2)
    assert member.wait_version(version) == version
    assert member.digest() == expected(2, 0, 2)


def test_a_rank_that_restarts_is_waited_for(job: Job) -> None:
    ranks, member = trainers(job, 2), worker(job, 0, 2)
    member.wait_version(publish_all(ranks, 1, 1))
    ranks[1].kill()
    with pytest.raises(MembershipError, match=r"trainer ranks \[1\] of 'policy' have not joined or have left"):
        ranks[0].run(publish, 2, 2, 1.0)
    assert 0.9 < ranks[0].took_s < 5.0
    ranks[0].begin("run", publish, 2, 2)
    ranks[1] = job.member()
    ranks[1].run(open_trainer, 1, 2, "float32")
    version = ranks[1].run(publish, 2, 2)
    assert ranks[0].end() == version
    assert member.wait_version(version) == version
    assert member.digest() == expected(2, 0, 2)


def test_workers_that_left_are_not_waited_for(job: Job) -> None:
    ranks, member, other = trainers(job, 2), worker(job, 0, 2), worker(job, 2, 3, host="B")
    version = publish_all(ranks, 1, 1)
    for follower in (member, other):
        follower.wait_version(version)
    ranks[0].wait_committed(version, 20.0)
    other.kill()
    version = publish_all(ranks, 2, 2)
    member.wait_version(version)
    ranks[0].wait_committed(version, 10.0)
    assert member.digest() == expected(2, 0, 2)


def test_a_worker_commits_what_is_staged_while_the_coordinator_is_stopped(job: Job) -> None:
    coordinator, _ = with_coordinator(job)
    ranks, member = trainers(job, 2), worker(job, 0, 2)
    member.wait_version(publish_all(ranks, 1, 1))
    version = publish_all(ranks, 2, 2)
    time.sleep(0.5)
    job.stop(coordinator.pid)
    assert member.wait_version(version, 3.0) == version
    assert member.took_s < 2.0
    assert member.digest() == expected(2, 0, 2)
    time.sleep(1.1)
    for _ in range(3):
        assert member.commit_latest() == 0
        assert member.took_s < 1.5
    with pytest.raises((TransferTimeout, ConnectError), match="coordinator"):
        ranks[0].run(publish, 3, 3, 2.0)
    assert ranks[0].took_s < 5.0
    with pytest.raises((TransferTimeout, ConnectError), match="coordinator"):
        ranks[0].wait_committed(version, 2.0)
    assert ranks[0].took_s < 6.0
    job.resume(coordinator.pid)
    version = publish_all(ranks, 4, 4)
    assert member.wait_version(version) == version
    assert member.digest() == expected(4, 0, 2)


def join_only(child: Child, step: int) -> int:
    """Take part in the round and end before anything is packed."""
    import os

    from wsync.engine import protocol

    publisher = child.publisher
    publisher._link.ask(
        lambda left: protocol.OpenRound("policy", publisher.rank, publisher._link.incarnation, 99, step, "", left),
        timeout_s=5.0,
    )
    os._exit(1)


def test_a_rank_that_ended_before_it_packed_is_named(job: Job) -> None:
    ranks, member = trainers(job, 2), worker(job, 0, 2)
    member.wait_version(publish_all(ranks, 1, 1))
    ranks[0].run(publish, 2, 2)
    with pytest.raises(AssertionError, match="the member has ended"):
        ranks[1].run(join_only, 2)
    with pytest.raises(MembershipError, match=r"trainer ranks \[1\] have not packed their part of version 2"):
        ranks[0].wait_committed(2, 1.0)
    assert member.commit_latest() == 0
    assert member.digest() == expected(1, 0, 2)


def open_nothing(child: Child) -> None:
    from wsync import ShardReplica

    built = HoldingBuilder()
    built.tensor("w", "float32", (12, 10))
    child.replica = ShardReplica("policy", built.build(), {}, config=child.config)


def open_cast(child: Child) -> None:
    from wsync import ShardPublisher

    built = HoldingBuilder()
    built.tensor("w", "int8", (4,))
    built.local("w", "int64", (4,))
    built.piece("w", Region((0,), (4,)), "w", (0,))
    ShardPublisher("policy", built.build(), {"w": np.zeros(4, np.int64)}, rank=0, num_ranks=1, config=child.config)


def test_holdings_that_make_no_sense_are_refused(job: Job) -> None:
    with pytest.raises(ConfigError, match="wants no element"):
        job.member().run(open_nothing)
    with pytest.raises(ConfigError, match="'w' lies in int64 and would be cast to int8"):
        job.member().run(open_cast)


# --- many faults
N = 6


def open_stress_rank(child: Child, rank: int) -> None:
    """Tensors that are filled with the step: rank r has element r of each."""
    from wsync import ShardPublisher

    built = HoldingBuilder()
    child.tensors = {}
    for index in range(N):
        built.tensor(f"t{index}", "int64", (3, 4))
        built.local(f"t{index}", "int64", (1, 4))
        built.piece(f"t{index}", Region((rank, 0), (1, 4)), f"t{index}", (0, 0))
        child.tensors[f"t{index}"] = np.zeros((1, 4), np.int64)
    child.publisher = ShardPublisher(
        "policy", built.build(), child.tensors, rank=rank, num_ranks=3, config=child.config
    )


def publish_step(child: Child, step: int) -> bool:
    for value in child.tensors.values():
        value[...] = step
    try:
        child.publisher.publish(step, timeout_s=6.0)
    except WsyncError:
        return False
    finally:
        for value in child.tensors.values():
            value[...] = -step
    return True


def open_stress_worker(child: Child) -> None:
    from wsync import ShardReplica

    built = HoldingBuilder()
    child.tensors = {}
    for index in range(N):
        built.tensor(f"t{index}", "int64", (3, 4))
        built.local(f"t{index}", "int64", (4, 3))
        built.piece(f"t{index}", Region.whole((3, 4)), f"t{index}", (0, 0), (1, 0))
        child.tensors[f"t{index}"] = np.zeros((4, 3), np.int64)
    child.replica = ShardReplica("policy", built.build(), child.tensors, config=child.config)


def commit_and_look(child: Child) -> tuple[int, list[int]]:
    """The version after a commit, and all values that its tensors have."""
    try:
        child.replica.commit_latest()
    except WsyncError:
        pass
    if not child.replica.is_ready:
        return 0, []
    return child.replica.version, sorted({int(v) for value in child.tensors.values() for v in np.unique(value)})


@pytest.mark.parametrize("seed", [1, 2])
def test_random_kills_never_mix_two_steps(job: Job, seed: int) -> None:
    """Ranks in lockstep on two hosts, workers on three; a holder or a rank is killed every second or so."""
    rng = random.Random(seed)
    hosts = ["A", "A", "B"]
    ranks = [job.member(host) for host in hosts]
    for rank, member in enumerate(ranks):
        member.run(open_stress_rank, rank)
    workers = [job.member(host) for host in "ABC"]
    for member in workers:
        member.run(open_stress_worker)
    newest, step, num_commits, ends = {}, 0, 0, time.monotonic() + 20.0
    next_kill = time.monotonic() + 1.0

    def turn() -> None:
        nonlocal step, num_commits
        step += 1
        for member in ranks:
            member.begin("run", publish_step, step)
        for member in ranks:
            member.end()
        for number, member in enumerate(workers):
            version, values = member.run(commit_and_look)
            if version:
                assert len(values) == 1, (version, values)
                assert values[0] > 0
                assert version >= newest.get(number, (0, 0))[0]
                assert values[0] >= newest.get(number, (0, 0))[1]
                num_commits += version > newest.get(number, (0, 0))[0]
                newest[number] = (version, values[0])

    while time.monotonic() < ends:
        if time.monotonic() > next_kill:
            next_kill = time.monotonic() + rng.uniform(0.7, 2.0)
            if rng.random() < 0.6:
                host = rng.choice("ABC")
                pid = job.holder_pid(host)
                if pid in job.pids():
                    job.kill(pid)
            else:
                rank = rng.randrange(3)
                ranks[rank].kill()
                ranks[rank] = job.member(hosts[rank])
                ranks[rank].run(open_stress_rank, rank)
        turn()
    last = step
    eventually(lambda: turn() or all(newest.get(n, (0, 0))[1] > last for n in range(3)), "all workers go on", 40.0)
    assert num_commits > 10


def test_nothing_is_left_of_members_that_come_and_go(job: Job) -> None:
    ranks, member = trainers(job, 2), worker(job, 0, 2)
    member.wait_version(publish_all(ranks, 1, 1))
    before = count_memfds(job.holder_pid("A"))
    for step in range(2, 8):
        member.close()
        member.run(reopen)
        assert member.wait_version(publish_all(ranks, step, step)) == step
    assert member.digest() == expected(7, 0, 2)
    assert count_memfds(job.holder_pid("A")) == before


def reopen(child: Child) -> None:
    from test_shards import open_worker

    open_worker(child, 0, 2, "float32")
