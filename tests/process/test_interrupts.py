"""Interrupts (Ctrl-C, alarms) at any line of a commit: no wrong bytes, no lease or lock that stays taken."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from _members import SMALL, Child, Job, Member, eventually, make_tensors, reference
from test_commits import installing_worker
from test_shards import expected, publish_all, trainers, worker

from wsync.errors import CommitError, WsyncError


def interrupt_in(child: Child, path: str, call: str, error: type[BaseException], times: int = 1) -> None:
    """The method at `path` (of the replica's class) raises `error` so many times, during one call of the replica."""
    import wsync.engine.replica
    import wsync.engine.shard_replica

    owner, _, name = path.partition(".")
    kind = {"Replica": wsync.engine.replica.Replica, "ShardReplica": wsync.engine.shard_replica.ShardReplica}[owner]
    real, left = getattr(kind, name), [times]

    def method(*args: Any, **options: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise error("injected")
        return real(*args, **options)

    setattr(kind, name, method)
    try:
        getattr(child.replica, call)()
    finally:
        setattr(kind, name, real)


def publish_on(trainer: Member, replica: Member, first: int) -> None:
    """More versions than there are slots: a lease that nobody gives back would stop them."""
    for step in range(first, first + 4):
        assert trainer.publish(step, step, timeout_s=10.0) == step
        assert replica.wait_version(step) == step
        assert replica.digest() == reference(SMALL, step)


@pytest.mark.parametrize("where", ["Replica._is_news", "Replica._install", "Replica._agree", "Replica._release"])
def test_an_interrupted_commit_leaves_no_lease_behind(job: Job, where: str) -> None:
    trainer, replica = job.trainer(), job.replica()
    trainer.publish(1, 1)
    assert replica.wait_version(1) == 1
    trainer.publish(2, 2)
    trainer.wait_staged(2)
    with pytest.raises(KeyboardInterrupt):
        replica.run(interrupt_in, where, "commit_latest", KeyboardInterrupt)
    is_new = replica.digest() == reference(SMALL, 2)
    assert is_new == (replica.get("replica.version") == 2)
    assert is_new or replica.digest() == reference(SMALL, 1)
    publish_on(trainer, replica, 3)
    trainer.wait_committed(6)


def replace(child: Child) -> None:
    child.tensors.update(make_tensors(SMALL, 99))


@pytest.mark.parametrize("call", ["commit_latest", "verify"])
def test_replaced_tensors_are_not_taken_for_the_version_after_an_interrupt(job: Job, call: str) -> None:
    trainer, replica = job.trainer(), job.replica()
    trainer.publish(1, 1)
    assert replica.wait_version(1) == 1
    replica.run(replace)
    with pytest.raises(KeyboardInterrupt):
        replica.run(interrupt_in, "Replica._agree", call, KeyboardInterrupt)
    assert replica.get("replica.is_ready") is False
    eventually(lambda: replica.commit_latest() == 1, "it is installed again")
    assert replica.digest() == reference(SMALL, 1)
    publish_on(trainer, replica, 2)


def fail_installs(child: Child, times: int) -> None:
    from wsync.engine.tensors import NumpyTensors

    real, left = NumpyTensors.install, [times]

    def install(self: NumpyTensors, *args: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("injected")
        real(self, *args)

    NumpyTensors.install = install  # type: ignore[method-assign]
    try:
        child.replica.commit_latest()
    finally:
        NumpyTensors.install = real  # type: ignore[method-assign]


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_commit_that_cannot_be_restored_leaves_no_lease_behind(job: Job, times: int) -> None:
    trainer, replica = job.trainer(), job.replica()
    trainer.publish(1, 1)
    assert replica.wait_version(1) == 1
    trainer.publish(2, 2)
    trainer.wait_staged(2)
    with contextlib.suppress(WsyncError):
        replica.run(fail_installs, times)
    publish_on(trainer, replica, 3)


@pytest.mark.parametrize("where", ["Replica._install", "ShardReplica._is_whole", "ShardReplica._release_all"])
def test_an_interrupted_worker_leaves_no_lease_behind(job: Job, where: str) -> None:
    ranks, member = trainers(job, 2), worker(job, 0, 2)
    assert member.wait_version(publish_all(ranks, 1, 1)) == 1
    publish_all(ranks, 2, 2)
    time.sleep(0.5)
    with pytest.raises(KeyboardInterrupt):
        member.run(interrupt_in, where, "commit_latest", KeyboardInterrupt)
    if member.get("replica.is_ready"):
        assert member.digest() == expected(member.get("replica.version"), 0, 2)
    for step in (3, 4, 5, 6):
        assert member.wait_version(publish_all(ranks, step, step)) == step
        assert member.digest() == expected(step, 0, 2)


def interrupt_restore(child: Child) -> None:
    from wsync.engine.shard_replica import ShardReplica

    real = ShardReplica._restore

    def restore(*args: Any) -> bool:
        raise KeyboardInterrupt

    ShardReplica._restore = restore  # type: ignore[method-assign]
    try:
        fail_installs(child, 1)
    finally:
        ShardReplica._restore = real  # type: ignore[method-assign]


def test_an_interrupt_while_the_former_version_is_put_back(job: Job) -> None:
    ranks, member = trainers(job, 2), worker(job, 0, 2)
    assert member.wait_version(publish_all(ranks, 1, 1)) == 1
    publish_all(ranks, 2, 2)
    time.sleep(0.5)
    with pytest.raises(KeyboardInterrupt):
        member.run(interrupt_restore)
    assert member.get("replica.is_ready") is False
    for step in (3, 4, 5, 6):
        assert member.wait_version(publish_all(ranks, step, step)) == step
        assert member.digest() == expected(step, 0, 2)


def nesting(child: Child) -> Callable[[], Any]:
    @contextlib.contextmanager
    def installing() -> Any:
        if child.replica.version:
            child.replica.commit_latest()
        yield

    return installing


def test_a_commit_inside_of_a_commit_is_refused(job: Job) -> None:
    ranks, member = trainers(job, 2), installing_worker(job, nesting)
    assert member.wait_version(publish_all(ranks, 1, 1)) == 1
    publish_all(ranks, 2, 2)
    time.sleep(0.5)
    with pytest.raises(CommitError, match=r"do not commit in installing|the former version is in place"):
        member.commit_latest()
    assert (member.get("replica.version"), member.get("replica.is_ready")) == (1, True)
    assert member.digest() == expected(1, 0, 2)


def under_alarms(call: Callable[[random.Random], object], seed: int, seconds: float, delay_s: float) -> list[str]:
    """`call` over and over, interrupted after up to `delay_s` each time; what came out of it without a name."""
    rng, odd, is_armed = random.Random(seed), [], [False]
    num_calls = 0

    def alarm(*_: object) -> None:
        if is_armed[0]:  # another thread may get the signal, and this one hears of it late
            is_armed[0] = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, alarm)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(KeyboardInterrupt):  # also of an alarm that comes while it is turned off
            try:
                is_armed[0] = True
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0001, delay_s))
                for _ in range(100):
                    call(rng)
                    num_calls += 1
            except WsyncError:
                pass
            except Exception as exc:
                odd.append(repr(exc))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                is_armed[0] = False
    signal.signal(signal.SIGALRM, before)
    assert num_calls
    return odd


def hammer(child: Child, seed: int, seconds: float) -> list[str]:
    replica = child.replica
    calls = (replica.commit_latest, replica.verify, replica.digests, lambda: replica.is_ready)
    return under_alarms(lambda rng: rng.choice(calls)(), seed, seconds, 0.004)


@pytest.mark.parametrize("seed", [1, 2])
def test_alarms_at_random_moments_stop_nobody(job: Job, seed: int) -> None:
    trainer, replica = job.trainer(host="A"), job.replica(host="B")
    replica.begin("run", hammer, seed, 6.0)
    step = 0
    while replica.is_busy():
        step += 1
        assert trainer.publish(step, step, timeout_s=20.0) == step
        time.sleep(0.05)
        if step == 40:
            job.kill(job.holder_pid("B"))
    assert replica.end() == [], "errors without a name"
    publish_on(trainer, replica, step + 1)
    assert replica.verify() == []


def hammer_joins(child: Child, seconds: float) -> list[str]:
    """Joining again is begun, over and over; the joining itself does nothing."""
    link = child.replica._link
    link.connect = lambda _: None
    odd = under_alarms(lambda _: link.rejoin_behind(), 3, seconds, 0.001)
    del link.connect
    return odd


def test_an_alarm_while_joining_again_is_begun_is_just_that(job: Job) -> None:
    trainer, replica = job.trainer(), job.replica()
    trainer.publish(1, 1)
    assert replica.wait_version(1) == 1
    assert replica.run(hammer_joins, 4.0) == [], "errors without a name"
    job.kill(job.holder_pid("A"))
    publish_on(trainer, replica, 2)
