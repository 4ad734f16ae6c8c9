"""Faults that were found by trying to break it, each with the right outcome."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from _members import SMALL, Child, Job, Member, _state, eventually, reference


def commit_and_stop_within(child: Child) -> int:
    """`commit_latest`, stopped by SIGSTOP where it has its lease and begins to copy."""
    live = child.replica._live
    install = live.install

    def stop_first(*args: Any) -> None:
        live.install = install
        os.kill(os.getpid(), signal.SIGSTOP)
        install(*args)

    live.install = stop_first
    return child.commit_latest()


def stop_within_commit(job: Job, replica: Member) -> None:
    replica.begin("run", commit_and_stop_within)
    eventually(lambda: _state(replica.pid) == "T", "the replica stops within its commit")
    job.stopped.add(replica.pid)


def test_a_slot_that_is_reused_under_a_commit_is_noticed(job: Job) -> None:
    """The holder dies during a commit; its successor adopts the slot from the trainer and gives it to others."""
    trainer, replica = job.trainer(), job.replica()
    trainer.publish(1, 1)
    replica.wait_version(1)
    trainer.publish(2, 2)
    trainer.wait_staged(2)
    stop_within_commit(job, replica)
    job.kill(job.holder_pid("A"))
    last = [trainer.publish(step, step) for step in (3, 4, 5)][-1]
    job.resume(replica.pid)
    version = replica.end()
    assert version == last, "the torn tensors are replaced by the newest version at once"
    assert replica.get("replica.is_ready")
    assert replica.digest() == reference(SMALL, 5) != reference(SMALL, 2)
    assert replica.verify() == []


def test_a_stopped_reader_holds_up_only_its_own_host(job: Job) -> None:
    """Host B has no slot while its replica is stopped within a commit; host C behind it in the chain goes on."""
    trainer, stopped, other = job.trainer(), job.replica(host="B"), job.replica(host="C")
    trainer.publish(1, 1)
    for replica in (stopped, other):
        replica.wait_version(1)
    trainer.publish(2, 2)
    trainer.wait_staged(2)
    other.wait_version(2)
    stop_within_commit(job, stopped)
    started = time.monotonic()
    for step in (3, 4, 5):
        version = trainer.publish(step, step)
        assert other.wait_version(version, 30.0) == version
        assert other.digest() == reference(SMALL, step)
    assert time.monotonic() - started < 60.0
    job.resume(stopped.pid)
    assert stopped.end() == 2
    assert stopped.wait_version(5, 30.0) == 5, "it gets the newest version when it has a slot again"
    assert stopped.digest() == reference(SMALL, 5)


def race_commits(child: Child, seconds: float) -> tuple[int, int]:
    """Several threads commit; how often the version went back, and the last one."""
    deadline, went_back, last = time.monotonic() + seconds, 0, 0

    def commit() -> None:
        while time.monotonic() < deadline:
            child.replica.commit_latest()

    threads = [threading.Thread(target=commit) for _ in range(4)]
    for thread in threads:
        thread.start()
    while time.monotonic() < deadline:
        version = child.replica.version
        went_back += version < last
        last = version
    for thread in threads:
        thread.join()
    return went_back, last


def test_threads_that_commit_at_once_never_take_a_version_back(job: Job) -> None:
    trainer, replica = job.trainer(), job.replica()
    trainer.publish(1, 1)
    replica.wait_version(1)
    replica.begin("run", race_commits, 3.0)
    step = 1
    while replica.is_busy():
        step += 1
        trainer.publish(step, step)
    went_back, last = replica.end()
    assert went_back == 0
    assert last > 1
    assert replica.wait_version(trainer.get("publisher.last_version")) > 1
    assert replica.digest() == reference(SMALL, step)


def interrupt_wait(child: Child) -> str:
    """A KeyboardInterrupt in the middle of `wait_version`."""
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer.start()
    try:
        child.replica.wait_version(1000, timeout_s=20.0)
    except KeyboardInterrupt:
        return "interrupted"
    return "went on"


def test_an_interrupted_wait_leaves_no_lease_behind(job: Job) -> None:
    trainer, replica = job.trainer(), job.replica()
    trainer.publish(1, 1)
    replica.wait_version(1)
    assert replica.run(interrupt_wait) == "interrupted"
    for step in range(2, 8):
        version = trainer.publish(step, step, timeout_s=10.0)
    assert replica.wait_version(version) == version
    assert replica.digest() == reference(SMALL, 7)
