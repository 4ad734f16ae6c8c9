"""Members, holders and the coordinator come, go, die and return; the bytes that replicas run stay right."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from _members import SMALL, Child, Job, Member, Spec, eventually, nbytes_of, reference
from test_cases import check_goes_on, check_moved, run_coordinator, with_coordinator

from wsync.errors import ChannelError, CommitError, PublishError, TransferTimeout
from wsync.status import HolderPhase, VersionPhase

pytestmark = pytest.mark.process

LARGE: Spec = [("a", "float32", (1024, 1024)), ("b", "float32", (2048, 1024)), ("c", "uint8", (999_999,))]
PATIENT = {"lost_after_s": 20.0, "heartbeat_s": 0.2}
"""A holder that a test stops for a while is not taken for lost."""


# --- publishing
def publish_and_overwrite(child: Child, step: int, seed: int) -> int:
    version = child.publish(step)
    child.refill(seed)
    return version


def test_training_may_change_weights_right_after_publish(job: Job) -> None:
    config = {"chunk_nbytes": 1 << 18}
    trainer = job.trainer(LARGE, 1, config=config)
    replicas = [job.replica(LARGE, 0, host=host, config=config) for host in "BC"]
    for seed in (1, 2, 3):
        version = trainer.run(publish_and_overwrite, seed, seed + 1)
        for replica in replicas:
            assert replica.wait_version(version) == version
            check_moved(replica, LARGE, seed - 1, seed)
    assert trainer.digest() == reference(LARGE, 4)


def test_hosts_relay_and_each_byte_enters_a_host_once(job: Job) -> None:
    trainer = job.trainer(LARGE, 1, config={"chunk_nbytes": 1 << 18})
    replicas = [job.replica(LARGE, 0, host=host, config={"chunk_nbytes": 1 << 18}) for host in "BBCC"]
    name = job.config.job
    for version in (1, 2):
        assert trainer.publish(version, version) == version
        for replica in replicas:
            replica.wait_version(version)
            check_moved(replica, LARGE, version - 1, version)
        status = trainer.wait_committed(version, num_replicas=4)
        holders = {holder.host: holder for holder in status.holders}
        assert holders.keys() == {"B", "C"}
        first = {host: holder.parents[0].removeprefix(f"{name}/") for host, holder in holders.items()}
        assert first in ({"B": "A", "C": "B"}, {"B": "C", "C": "B"}), "the second receiver is fed by the first"
        assert {holder.nbytes_received for holder in holders.values()} == {status.nbytes} == {nbytes_of(LARGE)}
        assert {holder.phase for holder in holders.values()} == {HolderPhase.WHOLE}
        assert status.phase is VersionPhase.STAGED


def test_newest_version_wins_and_superseded_ones_are_named(job: Job) -> None:
    trainer, replica = job.trainer(config=PATIENT), job.replica(host="B", config=PATIENT)
    assert trainer.publish(0) == 1
    replica.wait_version(1)
    trainer.wait_committed(1)
    slow = job.holder_pid("B")
    job.stop(slow)
    assert trainer.publish(2, 2) == 2
    eventually(lambda: trainer.status(2).phase is VersionPhase.TRANSFERRING, "version 2 is on its way")
    versions = trainer.publish_fast(range(3, 12))
    assert versions == list(range(3, 12))
    for version in versions[:-1]:
        with pytest.raises(PublishError, match=rf"version {version} is superseded: version \d+ took its place"):
            trainer.wait_staged(version, 20.0)
    assert trainer.status(11).phase is VersionPhase.PENDING
    assert replica.digest() == reference(SMALL, 1)
    job.resume(slow)
    assert replica.wait_version(11) == 11
    check_moved(replica, SMALL, 1, 11)
    assert trainer.wait_committed(11).version == 11
    assert trainer.wait_committed(5).phase is VersionPhase.SUPERSEDED, "all run a newer one"


def test_on_busy_skip_and_wait(job: Job) -> None:
    trainer, replica = job.trainer(config=PATIENT, on_busy="skip"), job.replica(host="B", config=PATIENT)
    keeper = job.replica(channel="other")  # the trainer's holder stays while it is away
    trainer.publish(1)
    replica.wait_version(1)
    trainer.wait_committed(1)
    slow = job.holder_pid("B")
    job.stop(slow)
    eventually(lambda: trainer.publish(2, 2) == 2, "version 1 is not on its way any more")
    eventually(lambda: trainer.publish(3, 3) == 0, "a version that is on its way makes the next one skipped")
    with pytest.raises(PublishError, match="skipped"):
        trainer.wait_staged(0)
    job.resume(slow)
    last = max(trainer.versions())
    assert replica.wait_version(last) == last
    trainer.wait_committed(last)
    trainer.close()
    trainer.open_publisher("policy", on_busy="wait")
    job.stop(slow)
    first = trainer.publish(4, 4)
    assert first == last + 1
    eventually(lambda: trainer.status(first).phase is VersionPhase.TRANSFERRING, "it is on its way")
    with pytest.raises(TransferTimeout, match="an earlier version of 'policy' is still on its way"):
        trainer.publish(5, 5, timeout_s=0.5)
    assert trainer.took_s < 10.0
    trainer.begin("publish", 6, 6)
    job.resume(slow)
    second = trainer.end()
    assert replica.wait_version(second) == second
    assert replica.digest() == reference(SMALL, 6)
    assert trainer.status(first).phase is VersionPhase.STAGED, "nothing was superseded"
    keeper.close()


def break_packing(child: Child) -> None:
    """The next snapshot fails half-way."""
    from wsync.engine.tensors import NumpyTensors

    whole = NumpyTensors.pack

    def half(self: NumpyTensors, slot: Any, *args: Any, **options: Any) -> None:
        NumpyTensors.pack = whole  # type: ignore[method-assign]
        slot.data[:8] = b"garbage!"
        raise RuntimeError("out of memory on the device")

    NumpyTensors.pack = half  # type: ignore[method-assign]


def test_a_snapshot_that_fails_is_dropped_and_the_next_one_works(job: Job) -> None:
    trainer, replica = job.trainer(), job.replica()
    trainer.publish(1)
    replica.wait_version(1)
    for _ in range(3):
        trainer.run(break_packing)
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.publish(2, 2)
        assert replica.commit_latest() == 0
        check_moved(replica, SMALL, 0, 1)
    version = trainer.publish(3, 3)
    assert replica.wait_version(version) == version
    check_moved(replica, SMALL, 1, 3)


# --- replicas
def test_rollback_leaves_the_bad_version_out_and_follows_the_next(job: Job) -> None:
    trainer, replica = job.trainer(), job.replica()
    with pytest.raises(CommitError, match="not kept on this host"):
        replica.rollback()
    for version in (1, 2):
        trainer.publish(version, version)
        replica.wait_version(version)
    check_moved(replica, SMALL, 1, 2)
    assert replica.rollback() == 1
    check_moved(replica, SMALL, 2, 1)
    assert replica.get("replica.version") == 1
    assert replica.commit_latest() == 0, "the version that was left is not installed again"
    check_moved(replica, SMALL, 2, 1)
    assert replica.verify() == []
    trainer.publish(3, 3)
    assert replica.wait_version(2) == 3
    check_moved(replica, SMALL, 1, 3)
    with pytest.raises(CommitError, match="version 1 is not kept"):
        replica.rollback(1)
    check_moved(replica, SMALL, 1, 3)


def test_late_joiners_are_fed_by_their_own_host_or_the_nearest(job: Job) -> None:
    trainer, first = job.trainer(), job.replica(host="B")
    for version in (1, 2):
        trainer.publish(version, version)
        first.wait_version(version)
    near, far = job.replica(host="B"), job.replica(host="C")
    assert near.commit_latest() == 2, "its host has it: nothing to wait for"
    assert far.wait_version(2) == 2
    for replica in (near, far):
        check_moved(replica, SMALL, 0, 2)
    status = trainer.wait_committed(2, num_replicas=3)
    holders = {holder.host: holder for holder in status.holders}
    assert {holder.nbytes_received for holder in holders.values()} == {nbytes_of(SMALL)}
    assert holders["C"].parents[0] == f"{job.config.job}/B", "not from the trainer's host"


def test_a_late_joiner_is_fed_after_the_trainer_has_left(job: Job) -> None:
    trainer, first = job.trainer(), job.replica(host="B")
    trainer.publish(1)
    first.wait_version(1)
    holder = job.holder_pid("A")
    trainer.close()
    eventually(lambda: not listens(job.folder, holder), "the trainer's holder leaves")
    late = job.replica(host="C")
    assert late.wait_version(1) == 1
    check_moved(late, SMALL, 0, 1)


def test_a_replica_may_come_before_the_trainer(job: Job) -> None:
    replica = job.replica(host="B")
    assert replica.commit_latest() == 0
    replica.begin("wait_version", 1)
    trainer = job.trainer()
    trainer.publish(1)
    assert replica.end() == 1
    check_moved(replica, SMALL, 0, 1)


def make_linear(child: Child, seed: int) -> None:
    import torch

    torch.manual_seed(seed)
    child.tensors = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))


def forward(child: Child) -> list[float]:
    import torch

    with torch.no_grad():
        return [float(x) for x in child.tensors(torch.ones(3))]


def test_auto_commit_installs_before_a_forward_pass(job: Job) -> None:
    pytest.importorskip("torch")
    trainer, replica = job.member(has_torch=True), job.member(has_torch=True)
    trainer.run(make_linear, 1)
    replica.run(make_linear, 2)
    trainer.open_publisher("policy")
    replica.open_replica("policy", auto_commit=True)
    old, right = replica.run(forward), trainer.run(forward)
    assert old != right
    trainer.publish(1)
    trainer.wait_staged(1)
    assert replica.run(forward) == right
    assert replica.digest() == trainer.digest()
    assert replica.get("replica.version") == 1
    trainer.run(make_linear, 3)
    replica.close()
    assert replica.run(forward) == right, "after close, forward passes are as they were"


def test_numpy_members_and_holders_load_no_torch(job: Job) -> None:
    trainer, replica = job.trainer(), job.replica()
    trainer.publish(1)
    replica.wait_version(1)
    check_moved(replica, SMALL, 0, 1)
    for member in (trainer, replica):
        assert not member.modules() & {"torch", "ray", "vllm", "jax"}
    assert "libtorch" not in Path(f"/proc/{job.holder_pid('A')}/maps").read_text()


def test_partial_replicas_follow_their_names(job: Job) -> None:
    trainer = job.trainer()
    new, old = reference(SMALL, 1), reference(SMALL, 0)
    for names in (["w"], ["s", "b"]):
        replica = job.member("B")
        replica.make(SMALL, 0)
        replica.open_replica("policy", names=names)
        if not trainer.versions():
            trainer.publish(1)
        replica.wait_version(1)
        assert replica.digest() == {name: new[name] if name in names else old[name] for name in old}
        assert replica.verify() == []


def test_a_partial_publisher_publishes_only_its_names(job: Job) -> None:
    trainer = job.trainer(names=["b"])
    replica = job.replica([("b", "int64", (11,))])
    trainer.publish(1)
    replica.wait_version(1)
    check_moved(replica, [("b", "int64", (11,))], 0, 1)


# --- trainers
def test_a_restarted_trainer_continues_the_version_numbers(job: Job) -> None:
    trainer, replica = job.trainer(), job.replica()
    assert [trainer.publish(seed, seed) for seed in (1, 2)] == [1, 2]
    replica.wait_version(2)
    trainer.close()
    trainer.open_publisher("policy")
    assert trainer.get("publisher.last_version") == 2
    assert trainer.publish(3, 3) == 3
    replica.wait_version(3)
    trainer.kill()
    again = job.trainer(seed=4, host="B")
    assert again.publish(4) == 4
    assert replica.wait_version(4) == 4
    check_moved(replica, SMALL, 3, 4)


def test_a_version_outlives_its_trainer(job: Job) -> None:
    trainer = job.trainer()
    trainer.publish(1)
    trainer.kill()
    replica = job.replica()
    assert replica.wait_version(1) == 1
    check_moved(replica, SMALL, 0, 1)


def attach_and_leave(child: Child, channel: str) -> None:
    """A trainer that dies while it joins: its message is sent, its reply never read."""
    import time

    from wsync.engine.link import _Connection
    from wsync.engine.protocol import AttachTrainer
    from wsync.engine.session import find_holder
    from wsync.engine.tensors import live_tensors

    connection = _Connection(find_holder(child.config, 30.0), 30.0)
    manifest = live_tensors(child.tensors, None, is_target=False).manifest
    connection.send(AttachTrainer(channel, "ghost", "incarnation", manifest, 0, 0), is_request=True)
    time.sleep(child.pause_s)  # type: ignore[attr-defined]
    connection.close()


def set_pause(child: Child, pause_s: float) -> None:
    child.pause_s = pause_s  # type: ignore[attr-defined]


def test_a_trainer_that_dies_while_joining_blocks_nobody(job: Job) -> None:
    spec: Spec = [("w", "uint8", (64 << 20,))]
    keeper = job.replica(channel="other")  # keeps the holder
    member = job.member()
    member.make(spec, 1)
    for turn, pause_s in enumerate((0.0, 0.001, 0.003, 0.01, 0.03)):
        member.run(set_pause, pause_s)
        member.run(attach_and_leave, f"policy{turn}")
        eventually(lambda turn=turn: opens(member, f"policy{turn}"), "the channel can be had", 20.0)  # type: ignore[misc]
        member.close()
    keeper.close()


def opens(member: Member, channel: str) -> bool:
    try:
        member.open_publisher(channel)
    except ChannelError:
        return False
    return True


# --- holders
def test_members_go_on_with_a_new_holder(job: Job) -> None:
    trainer, replica, far = job.trainer(), job.replica(), job.replica(host="B")
    trainer.publish(1)
    for member in (replica, far):
        member.wait_version(1)
    for turn, host in enumerate("AB", start=2):
        job.kill(job.holder_pid(host))
        version = trainer.publish(turn, turn)
        assert version == turn
        for member in (replica, far):
            assert member.wait_version(turn) == turn
            check_moved(member, SMALL, turn - 1, turn)
            assert member.verify() == []
        assert len(job.holder_pids()) == 2
    trainer.wait_committed(3, num_replicas=2)


def test_a_new_holder_adopts_the_slot_of_a_living_replica(job: Job) -> None:
    trainer, replica = job.trainer(), job.replica()
    trainer.publish(1)
    replica.wait_version(1)
    trainer.kill()
    job.kill(job.holder_pid("A"))
    join_again(replica)
    fresh = job.replica()
    assert fresh.get("replica.is_ready") is False
    assert fresh.wait_version(1) == 1
    check_moved(fresh, SMALL, 0, 1)
    assert replica.verify() == []
    far = job.replica(host="B")
    assert far.wait_version(1) == 1
    check_moved(far, SMALL, 0, 1)
    trainer = job.trainer(seed=2)
    assert trainer.publish(2) == 2, "numbers go on, although nobody of the former trainer is left"
    for member in (replica, fresh, far):
        assert member.wait_version(2) == 2
        check_moved(member, SMALL, 1, 2)


def join_again(replica: Member) -> None:
    """What an engine's loop does: it asks for a newer version at every step."""

    def is_attached() -> bool:
        return replica.commit_latest() == 0 and not replica.get("replica._link.is_broken")

    eventually(is_attached, "the replica has found the new holder")


def corrupt_own_slot(child: Child) -> None:
    """Writes into the slot that the replica still maps, through its descriptor."""
    for slot in child.replica._link._connection.slots.values():
        fd = os.open(f"/proc/self/fd/{slot.fd}", os.O_RDWR)
        os.pwrite(fd, b"\xff" * 16, 0)
        os.close(fd)


def test_a_slot_that_was_changed_is_not_adopted(job: Job) -> None:
    trainer, replica = job.trainer(), job.replica()
    trainer.publish(1)
    replica.wait_version(1)
    trainer.kill()
    job.kill(job.holder_pid("A"))
    replica.run(corrupt_own_slot)
    join_again(replica)
    fresh = job.replica()
    with pytest.raises((TransferTimeout, ChannelError)):
        fresh.wait_version(1, 1.0)
    assert fresh.digest() == reference(SMALL, 0)
    with pytest.raises(ChannelError, match="version 1 of 'policy' is not on this host"):
        replica.verify()


def test_numbers_are_not_reused_when_only_a_replica_remembers_them(job: Job) -> None:
    trainer, replica = job.trainer(), job.replica()
    for version in (1, 2):
        trainer.publish(version, version)
        replica.wait_version(version)
    for version in (3, 4):  # their slots were those of 1 and 2
        trainer.publish(version, version)
        trainer.wait_staged(version)
    trainer.kill()
    job.kill(job.holder_pid("A"))
    join_again(replica)
    assert replica.get("replica.version") == 2
    trainer = job.trainer(seed=7)
    version = trainer.publish(7)
    assert version > 2
    assert replica.wait_version(version) == version
    check_moved(replica, SMALL, 2, 7)


def test_a_holder_leaves_by_itself_and_the_next_member_starts_another(job: Job) -> None:
    replica = job.replica()
    holder = job.holder_pid("A")
    replica.close()
    eventually(lambda: not job.holder_pids(), "the holder leaves")
    replica.open_replica("policy")
    assert job.holder_pid("A") != holder
    assert len(job.holder_pids()) == 1


def test_members_that_start_together_share_one_holder(job: Job) -> None:
    members = [job.member() for _ in range(6)]
    for member in members:
        member.begin("make", SMALL, 0)
    for member in members:
        member.end()
        member.begin("open_replica", "policy")
    for member in members:
        member.end()
    assert len(job.holder_pids()) == 1


def test_the_coordinator_stays_while_another_host_needs_it(job: Job) -> None:
    trainer, replica = job.trainer(), job.replica(host="B")
    trainer.publish(1)
    replica.wait_version(1)
    carrier = job.holder_pid("A")
    record = next(job.folder.rglob("coordinator.json")).read_bytes()
    trainer.close()
    eventually(lambda: not listens(job.folder, carrier), "its holder's socket closes")
    trainer.open_publisher("policy")
    assert trainer.publish(2, 2) == 2
    assert replica.wait_version(2) == 2
    check_moved(replica, SMALL, 1, 2)
    assert next(job.folder.rglob("coordinator.json")).read_bytes() == record, "nothing moved"
    assert carrier in job.pids()


def listens(folder: Path, pid: int) -> bool:
    """Whether a holder with that pid is in the records and its socket can be connected to."""
    import msgspec

    for path in folder.rglob("holder-*.json"):
        record = msgspec.json.decode(path.read_bytes())
        if record["pid"] == pid:
            with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
                sock.connect("\0" + record["socket_name"])
                return True
    return False


# --- the coordinator
def test_a_coordinator_that_restarts_learns_everything_again(job: Job) -> None:
    coordinator, (_, port) = with_coordinator(job)
    trainer, near, far = job.trainer(), job.replica(), job.replica(host="B")
    used = {trainer.publish(1, 1)}
    for replica in (near, far):
        replica.wait_version(1)
    for turn in (2, 3):
        coordinator.kill()
        during = trainer.publish(10 * turn, 10 * turn)  # a snapshot needs no coordinator
        assert during not in used
        used.add(during)
        assert near.wait_version(during) == during, "nor does a replica on the same host"
        coordinator = job.member()
        assert coordinator.run(run_coordinator, port)[1] == port
        assert far.wait_version(during) == during
        assert far.digest() == reference(SMALL, 10 * turn) == near.digest()
    trainer.wait_committed(during, num_replicas=2)
    coordinator.kill()
    trainer.kill()
    coordinator = job.member()
    coordinator.run(run_coordinator, port)
    again = job.trainer(seed=77, host="B")
    version = again.publish(5)
    assert version > max(used)
    for replica in (near, far):
        assert replica.wait_version(version) == version
        check_moved(replica, SMALL, 30, 77)


def test_the_host_that_carries_the_coordinator_dies(job: Job) -> None:
    trainer = job.trainer(host="B")  # the first holder carries it
    far, near = job.replica(host="C"), job.replica(host="B")
    trainer.publish(1)
    far.wait_version(1), near.wait_version(1)
    job.kill(job.holder_pid("B"))
    check_goes_on(trainer, far, 10)
    newest = far.get("replica.version")
    assert near.wait_version(newest) == newest
    assert near.digest() == far.digest()


def test_the_holder_that_carries_the_coordinator_hangs_for_a_while(job: Job) -> None:
    trainer = job.trainer(host="A", config={"join_timeout_s": 10.0})
    other, far = job.trainer(host="B", channel="other"), job.replica(host="C", channel="other")
    other.publish(1)
    far.wait_version(1)
    job.stop(job.holder_pid("A"))
    assert other.publish(2, 2) == 2
    assert far.wait_version(2) == 2, "the others elect another coordinator"
    check_moved(far, SMALL, 1, 2)
    job.resume(job.holder_pid("A"))
    late = job.replica(host="C")
    trainer.publish(1)
    assert late.wait_version(1) == 1, "all are with the same coordinator again"
    check_moved(late, SMALL, 0, 1)


@pytest.mark.parametrize("lost_after_s", [20.0, 2.0])
def test_a_coordinator_that_is_slow_while_a_host_joins_does_not_make_two_jobs(job: Job, lost_after_s: float) -> None:
    """It is waited for, or replaced where it has been silent for too long; either way it is not a second one."""
    config = {"lost_after_s": lost_after_s, "join_timeout_s": 20.0}
    trainer = job.trainer(host="A", config=config)
    path = next(job.folder.rglob("coordinator.json"))
    record, carrier = path.read_bytes(), job.holder_pid("A")
    job.stop(carrier)
    far = job.member("B", **config)
    far.make(SMALL, 0)
    far.begin("open_replica", "policy")
    with contextlib.suppress(AssertionError):
        eventually(lambda: path.read_bytes() != record, "another coordinator", timeout_s=4.0)
    assert (path.read_bytes() == record) is (lost_after_s == 20.0)
    job.resume(carrier)
    far.end()
    for version in (1, 2):
        assert trainer.publish(version, version) == version
        assert far.wait_version(version) == version
        check_moved(far, SMALL, version - 1, version)
