"""What a commit does to the live memory when it is interrupted, looked at meanwhile, or when the engine moves it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from _members import SMALL, Child, Job, Member, eventually, make_tensors, reference
from test_shards import B, W, expected, publish_all, trainers, worker, worker_holding
from test_shards_faults import fail_install

from wsync.errors import ChannelError, CommitError


# --- a sharded worker whose commits run inside of something
def open_installing(child: Child, make: Callable[[Child], Any]) -> None:
    from wsync import ShardReplica

    child.tensors = {"wt": np.full((W[1] // 2 + 1, W[0]), 7, np.float32), "bb": np.full((2, *B), 7)}
    installing = make(child)
    child.replica = ShardReplica(
        "policy", worker_holding(0, 2), lambda: child.tensors, installing=installing, config=child.config
    )


def moved(child: Child) -> None:
    """Every local is another array from now on, with other bytes."""
    for name, array in child.tensors.items():
        child.tensors[name] = np.full_like(array, -3)
    child.tensors["wt"][0] = 7  # padding


def moving(child: Child) -> Any:
    @contextlib.contextmanager
    def installing() -> Iterator[None]:
        moved(child)
        yield

    return installing


def moving_afterwards(child: Child) -> Any:
    """As an engine that keeps its weights elsewhere and in another form while it runs."""
    raw = child.tensors

    @contextlib.contextmanager
    def installing() -> Iterator[None]:
        child.tensors = raw
        yield
        child.tensors = {"wt": np.ascontiguousarray(raw["wt"].T), "bb": raw["bb"] + 1}

    return installing


def suppressing(child: Child) -> Any:
    return lambda: contextlib.suppress(Exception)


def raising(child: Child) -> Any:
    """From the second commit on, before or after the weights are written."""
    counts = [0]
    child.raise_at = ""  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def installing() -> Iterator[None]:
        counts[0] += 1
        if child.raise_at == "enter":  # type: ignore[attr-defined]
            raise ValueError("no repacking today")
        yield
        if child.raise_at == "exit":  # type: ignore[attr-defined]
            child.raise_at = ""  # type: ignore[attr-defined]
            raise ValueError("no repacking today")

    return installing


def installing_worker(job: Job, make: Callable[[Child], Any]) -> Member:
    member = job.member()
    member.run(open_installing, make)
    return member


def test_memory_that_the_engine_renews_for_a_commit_gets_the_version(job: Job) -> None:
    ranks, member = trainers(job, 2), installing_worker(job, moving)
    for step in (1, 2):
        assert member.wait_version(publish_all(ranks, step, step)) == step
        assert member.digest() == expected(step, 0, 2)
        assert member.get("replica.is_ready") is True
        assert member.verify() == []
    member.run(moved)
    assert member.get("replica.is_ready") is False
    assert {name.partition("[")[0] for name in member.verify()} == {"w", "b"}
    assert member.commit_latest() == 2, "it is installed again"
    assert member.digest() == expected(2, 0, 2)
    assert member.get("replica.is_ready") is True


def look_raw(child: Child) -> dict[str, str]:
    from test_shards import sums

    return sums({"wt": child.tensors["wt"].T, "bb": child.tensors["bb"] - 1})


def test_an_engine_that_keeps_its_weights_in_another_form_is_ready(job: Job) -> None:
    ranks, member = trainers(job, 2), installing_worker(job, moving_afterwards)
    for step in (1, 2, 3):
        assert member.wait_version(publish_all(ranks, step, step)) == step
        assert member.get("replica.is_ready") is True
        assert member.commit_latest() == 0
        assert member.run(look_raw) == expected(step, 0, 2)


def test_a_failure_that_installing_suppresses_is_a_failure(job: Job) -> None:
    ranks, member = trainers(job, 3), installing_worker(job, suppressing)
    assert member.wait_version(publish_all(ranks, 1, 1)) == 1
    publish_all(ranks, 2, 2)
    time.sleep(0.5)
    for number in (0, 1, 2):
        with pytest.raises(CommitError, match=r"installing\(\) does not let the error pass.*in place"):
            member.run(fail_install, number)
        assert (member.get("replica.version"), member.get("replica.is_ready")) == (1, True)
        assert member.digest() == expected(1, 0, 2)
        assert member.verify() == []
    assert member.wait_version(2) == 2
    assert member.digest() == expected(2, 0, 2)


def set_raise_at(child: Child, where: str) -> None:
    child.raise_at = where  # type: ignore[attr-defined]


def test_what_installing_raises_is_a_named_error(job: Job) -> None:
    ranks, member = trainers(job, 2), installing_worker(job, raising)
    assert member.wait_version(publish_all(ranks, 1, 1)) == 1
    publish_all(ranks, 2, 2)
    time.sleep(0.5)
    for where in ("enter", "exit"):
        member.run(set_raise_at, where)
        with pytest.raises(CommitError, match=r"version 2 could not be installed: ValueError: no repacking.*in place"):
            member.commit_latest()
        assert (member.get("replica.version"), member.get("replica.is_ready")) == (1, True)
        assert member.digest() == expected(1, 0, 2)
    assert member.commit_latest() == 2
    assert member.digest() == expected(2, 0, 2)


# --- interrupts and onlookers
def interrupt_after(child: Child, number: int, is_kept: bool) -> None:
    """An interrupt as the `number`-th lane has just been installed. If not `is_kept` the former version is gone."""
    from wsync.engine.replica import Replica

    real, count = Replica._install, [0]

    def install(self: Replica, *args: Any) -> Any:
        commit = real(self, *args)
        count[0] += 1
        if count[0] == number:
            if is_kept:
                Replica._install = real  # type: ignore[method-assign]
            raise KeyboardInterrupt
        return commit

    Replica._install = install  # type: ignore[method-assign]
    if not is_kept:
        child.replica._restore = lambda exc: False
    try:
        child.replica.commit_latest()
    finally:
        Replica._install = real  # type: ignore[method-assign]
        child.replica.__dict__.pop("_restore", None)


def test_an_interrupt_between_two_lanes_mixes_nothing(job: Job) -> None:
    ranks, member = trainers(job, 3), worker(job, 0, 2)
    assert member.wait_version(publish_all(ranks, 1, 1)) == 1
    publish_all(ranks, 2, 2)
    time.sleep(0.5)
    for number in (1, 2, 3):
        with pytest.raises(KeyboardInterrupt):
            member.run(interrupt_after, number, True)
        assert (member.get("replica.version"), member.get("replica.is_ready")) == (1, True)
        assert member.digest() == expected(1, 0, 2)
        assert member.verify() == []
    with pytest.raises(KeyboardInterrupt):
        member.run(interrupt_after, 1, False)
    assert member.get("replica.is_ready") is False
    assert member.verify(), "a lane with another version than the worker's is a difference"
    assert member.commit_latest() == 2
    assert member.digest() == expected(2, 0, 2)


def commit_watched(child: Child, after: int, look: Callable[[Child], bool]) -> tuple[int, bool]:
    """Another thread does `look` after `after` installs of the commit. The version, and what it saw."""
    from wsync.engine.tensors import NumpyTensors

    real, count, seen = NumpyTensors.install, [0], []

    def install(self: NumpyTensors, *args: Any) -> None:
        real(self, *args)
        count[0] += 1
        if count[0] == after:
            thread = threading.Thread(target=lambda: seen.append(look(child)))
            thread.start()
            thread.join(10.0)

    NumpyTensors.install = install  # type: ignore[method-assign]
    try:
        return child.commit_latest(), seen[0]
    finally:
        NumpyTensors.install = real  # type: ignore[method-assign]


def move_and_look(child: Child) -> bool:
    moved(child)
    return bool(child.replica.is_ready)


@pytest.mark.parametrize("after", [1, 2, 3])
def test_memory_that_moves_during_a_commit_is_seen_by_an_onlooker(job: Job, after: int) -> None:
    ranks, member = trainers(job, 3), installing_worker(job, plain)
    assert member.wait_version(publish_all(ranks, 1, 1)) == 1
    publish_all(ranks, 2, 2)
    time.sleep(0.5)
    version, was_ready = member.run(commit_watched, after, move_and_look)
    assert (version, was_ready) == (2, False)
    assert member.digest() != expected(2, 0, 2)
    assert member.get("replica.is_ready") is False
    assert member.commit_latest() == 2
    assert member.get("replica.is_ready") is True
    assert member.digest() == expected(2, 0, 2)


def plain(child: Child) -> Any:
    return contextlib.nullcontext


def lose_and_look(child: Child) -> bool:
    """The memory goes, is looked at, and comes back at the same address with other bytes."""
    name = next(iter(child.tensors))
    array = child.tensors[name]
    child.tensors[name] = np.zeros_like(array)
    is_ready = bool(child.replica.is_ready)
    array[...] = 0
    child.tensors[name] = array
    return is_ready


def test_memory_that_was_seen_released_during_a_commit_is_installed_again(job: Job) -> None:
    trainer, replica = job.trainer(), job.replica()
    trainer.publish(1, 1)
    assert replica.wait_version(1) == 1
    trainer.publish(2, 2)
    trainer.wait_staged(2)
    assert replica.run(commit_watched, 1, lose_and_look) == (2, False)
    assert replica.digest() != reference(SMALL, 2)
    assert replica.get("replica.is_ready") is False
    assert replica.commit_latest() == 2
    assert replica.digest() == reference(SMALL, 2)
    assert replica.get("replica.is_ready") is True


def replace_arrays(child: Child) -> None:
    child.tensors.update(make_tensors(SMALL, 77))


@pytest.mark.parametrize("how", ["commit_latest", "wait_version", "is_ready first"])
def test_what_was_rolled_back_is_not_installed_again_when_the_tensors_move(job: Job, how: str) -> None:
    trainer, replica = job.trainer(), job.replica()
    for step in (1, 2):
        trainer.publish(step, step)
        assert replica.wait_version(step) == step
    assert replica.rollback() == 1
    assert replica.digest() == reference(SMALL, 1)
    replica.run(replace_arrays)
    if how == "is_ready first":
        assert replica.get("replica.is_ready") is False
    assert (replica.wait_version(1) if how == "wait_version" else replica.commit_latest()) == 1
    assert replica.digest() == reference(SMALL, 1), "the version that it runs, not the one that was left behind"
    assert replica.get("replica.is_ready") is True
    assert replica.commit_latest() == 0
    trainer.publish(3, 3)
    assert replica.wait_version(3) == 3
    assert replica.digest() == reference(SMALL, 3)


def test_a_closed_worker_and_a_version_that_is_gone_are_named_without_lanes(job: Job) -> None:
    ranks, member = trainers(job, 2), worker(job, 0, 2)
    with pytest.raises(ChannelError, match="no version of 'policy' has been installed here"):
        member.verify()
    assert member.wait_version(publish_all(ranks, 1, 1)) == 1
    for step in (2, 3, 4):
        publish_all(ranks, step, step)
    eventually(lambda: _names_its_loss(member), "version 1 is not on this host any more")
    member.call("replica.close")
    for call in (member.commit_latest, lambda: member.wait_version(5)):
        with pytest.raises(CommitError, match="this worker of 'policy' is closed"):
            call()


def _names_its_loss(member: Member) -> bool:
    try:
        return member.verify() != []
    except ChannelError as exc:
        return "version 1 of 'policy' is not on this host any more" in str(exc)
