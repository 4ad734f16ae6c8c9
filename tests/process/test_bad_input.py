"""What users get wrong: a named error by a deadline, nothing half-applied, and everything works afterwards."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _members import SMALL, Child, Job, Spec, nbytes_of, reference
from test_cases import check_moved, with_coordinator

from wsync.errors import (
    ArenaError,
    AuthError,
    ChannelError,
    CommitError,
    ConfigError,
    ConnectError,
    ManifestMismatch,
    PublishError,
    TransferTimeout,
    WsyncError,
)

pytestmark = pytest.mark.process


def test_mismatches_are_named_and_leave_the_replica_as_it_was(job: Job) -> None:
    trainer, good, bad = job.trainer(), job.replica(), job.member()
    trainer.publish(1)
    wrong: list[tuple[Spec, str]] = [
        ([("w", "float32", (5, 37)), *SMALL[1:]], r"shapes differ \(trainer -> replica\): w \[37, 5\] -> \[5, 37\]"),
        ([("w", "float64", (37, 5)), *SMALL[1:]], r"dtypes differ \(trainer -> replica\): w float32 -> float64"),
        ([("W", "float32", (37, 5)), *SMALL[1:]], r"does not publish: W; the trainer publishes .* not have: w"),
        ([*SMALL, ("more", "uint8", (1,))], r"the replica has tensors that the trainer does not publish: more"),
        (SMALL[1:], r"the trainer publishes tensors that the replica does not have: w"),
    ]
    for spec, text in wrong:
        bad.make(spec, 0)
        with pytest.raises(ManifestMismatch, match=text):
            bad.open_replica("policy")
        assert bad.digest() == reference(spec, 0)
    assert good.wait_version(1) == 1
    check_moved(good, SMALL, 0, 1)
    assert trainer.wait_committed(1, num_replicas=1).replicas[0].member_id == good.get("replica.member_id")


def test_unknown_channel_is_named_within_the_timeout(job: Job) -> None:
    trainer, replica = job.trainer(), job.replica(channel="polcy")
    trainer.publish(1)
    with pytest.raises(ChannelError, match="nobody has published channel 'polcy'"):
        replica.wait_version(1, 0.5)
    assert replica.took_s < 8.0
    assert replica.commit_latest() == 0
    assert replica.digest() == reference(SMALL, 0)
    with pytest.raises(WsyncError, match="polcy"):
        replica.verify()


def test_no_coordinator_is_named_by_the_deadline(job: Job) -> None:
    with socket.socket() as closed:  # bound, and nobody listens
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        job.env |= {"WSYNC_ADDRESS": address, "WSYNC_TOKEN": "secret"}
        for what, timeout_s, num_warnings in (("open_publisher", 4.0, 0), ("open_replica", 6.0, 1)):
            member = job.member(join_timeout_s=timeout_s)
            member.make(SMALL, 1)
            # The holder may still be the first member's, which asks for four seconds, and is then asked twice.
            with pytest.raises(ConnectError, match=f"^no coordinator within [46] s: the coordinator at {address}"):
                getattr(member, what)("policy")
            assert member.took_s < timeout_s + 8.0
            warning = f"waiting for the coordinator at {address} (WSYNC_ADDRESS) since 5 s"
            assert member.log().count(warning) == num_warnings, member.log()
    for address, text in (("nowhere", "must be host:port"), ("127.0.0.1:x", "must be host:port")):
        job.env["WSYNC_ADDRESS"] = address
        member = job.member()
        member.make(SMALL, 1)
        with pytest.raises(ConfigError, match=text):
            member.open_publisher("policy")
    job.env |= {"WSYNC_ADDRESS": "127.0.0.1:1", "WSYNC_TOKEN": "", "WSYNC_TOKEN_FILE": "/nonexistent"}
    member = job.member()
    member.make(SMALL, 1)
    with pytest.raises(ConfigError, match="WSYNC_TOKEN_FILE=/nonexistent cannot be read"):
        member.open_publisher("policy")
    token_file = job.folder / "token"
    for text, mode, problem in (("", 0o600, "is empty"), ("secret" * 8, 0o644, "can be read by others")):
        token_file.write_text(text)
        token_file.chmod(mode)
        job.env["WSYNC_TOKEN_FILE"] = str(token_file)
        member = job.member()
        member.make(SMALL, 1)
        with pytest.raises(ConfigError, match=f"token {problem}"):
            member.open_publisher("policy")


def test_a_coordinator_serves_one_job_whatever_its_members_call_it(job: Job) -> None:
    with_coordinator(job)
    trainer = job.trainer(config={"job": "one"})
    replica = job.replica(config={"job": "another"})
    trainer.publish(1)
    assert replica.wait_version(1) == 1
    check_moved(replica, SMALL, 0, 1)


def test_nothing_is_started_for_a_token_without_an_address(job: Job) -> None:
    job.env["WSYNC_TOKEN"] = "secret"
    member = job.member()
    member.make(SMALL, 1)
    for what in ("open_publisher", "open_replica"):
        with pytest.raises(ConfigError, match="WSYNC_TOKEN is set, but WSYNC_ADDRESS is not"):
            getattr(member, what)("policy")
    assert not job.holder_pids()


def count_refused(child: Child) -> int:
    return child.coordinator.num_refused  # type: ignore[attr-defined, no-any-return]


def test_wrong_token_is_refused_counted_and_named(job: Job) -> None:
    coordinator, _ = with_coordinator(job)
    trainer = job.trainer()
    trainer.publish(1)
    assert coordinator.run(count_refused) == 0
    right = job.env["WSYNC_TOKEN"]
    job.env["WSYNC_TOKEN"] = "a wrong one"
    thief = job.member("B", join_timeout_s=30.0)
    thief.make(SMALL, 0)
    with pytest.raises(AuthError, match=r"refused our token.*WSYNC_TOKEN_FILE or WSYNC_TOKEN"):
        thief.open_replica("policy")
    assert thief.took_s < 12.0
    assert thief.digest() == reference(SMALL, 0)
    assert coordinator.run(count_refused) > 0
    job.env["WSYNC_TOKEN"] = right
    replica = job.replica(host="C")
    assert replica.wait_version(1) == 1
    check_moved(replica, SMALL, 0, 1)


def make_absurd(child: Child) -> None:
    """2**44 bytes that take no memory: one element seen very often."""
    import numpy as np

    child.tensors = {"huge": np.broadcast_to(np.zeros(1, np.uint8), (1 << 44,))}


def test_too_little_memory_is_named_and_reserves_nothing(job: Job) -> None:
    keeper, trainer = job.replica(), job.member()
    trainer.run(make_absurd)
    with pytest.raises(ArenaError, match=r"do(es)? not fit into \d+ bytes of (available memory|the cgroup limit)"):
        trainer.open_publisher("policy")
    trainer.make(SMALL, 1)
    trainer.open_publisher("policy")
    trainer.publish(1)
    assert keeper.wait_version(1) == 1
    check_moved(keeper, SMALL, 0, 1)


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one mebibyte."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_an_arena_on_a_full_disk_is_named(job: Job, tiny: Path) -> None:
    large: Spec = [("w", "uint8", (3 << 20,))]
    trainer = job.member(arena=str(tiny))
    trainer.make(large, 1)
    with pytest.raises(ArenaError, match=rf"do not fit into \d+ bytes of the arena directory '{tiny}'"):
        trainer.open_publisher("policy")
    assert list(tiny.iterdir()) == []
    trainer.close()
    trainer.make(SMALL, 1)
    trainer.open_publisher("policy")
    replica = job.replica(config={"arena": str(tiny)})
    trainer.publish(1)
    assert replica.wait_version(1) == 1
    check_moved(replica, SMALL, 0, 1)
    assert list(tiny.iterdir()) == [], "files of an arena have no names"


def test_an_arena_that_is_no_directory_is_named(job: Job) -> None:
    trainer = job.member(arena="/nonexistent/folder")
    trainer.make(SMALL, 1)
    with pytest.raises(ArenaError, match="the arena directory '/nonexistent/folder' cannot be used"):
        trainer.open_publisher("policy")


def test_use_after_close(job: Job) -> None:
    trainer, replica = job.trainer(), job.replica()
    trainer.publish(1)
    trainer.wait_staged(1)
    for member, what in ((trainer, "publisher"), (replica, "replica")):
        for _ in range(2):
            member.call(f"{what}.close")
    with pytest.raises(PublishError, match="the publisher of 'policy' is closed"):
        trainer.publish(2)
    with pytest.raises(CommitError, match="this replica of 'policy' is closed"):
        replica.commit_latest()
    with pytest.raises(WsyncError, match="closed"):
        replica.wait_version(1, 1.0)
    with pytest.raises(WsyncError, match="closed"):
        replica.verify()
    with pytest.raises(WsyncError, match="closed"):
        trainer.wait_staged(1)
    assert replica.digest() == reference(SMALL, 0)


def test_a_replica_that_never_commits_is_named(job: Job) -> None:
    trainer, replica, lazy = job.trainer(), job.replica(), job.replica(member_id="lazy-engine")
    trainer.publish(1)
    replica.wait_version(1)
    trainer.wait_staged(1)
    with pytest.raises(
        TransferTimeout, match=r"version 1 is not committed everywhere: .*lazy-engine \(staged\)"
    ) as got:
        trainer.wait_committed(1, 0.5)
    assert got.value.context.peers == ("lazy-engine",)
    assert isinstance(got.value, TimeoutError)
    assert trainer.took_s < 8.0
    assert trainer.wait_committed(1, num_replicas=1)
    for version in range(2, 6):
        trainer.publish(version, version)
        replica.wait_version(version)
    check_moved(replica, SMALL, 1, 5)
    assert lazy.digest() == reference(SMALL, 0)
    assert lazy.commit_latest() == 5


def test_nothing_to_publish_or_to_install_is_refused(job: Job) -> None:
    member = job.member()
    for what in ("open_publisher", "open_replica"):
        for spec, options in (((), {}), (SMALL, {"names": []})):
            member.make(spec, 1)
            with pytest.raises(WsyncError, match="no tensors"):
                getattr(member, what)("policy", **options)


def make_unusable(child: Child, what: str) -> None:
    import torch

    good = torch.ones(4)
    bad: Any = {
        "meta": lambda: torch.empty(4, device="meta"),
        "sparse": lambda: torch.eye(4).to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(good, 0.1, 0, torch.qint8),
        "list": lambda: [1.0, 2.0],
        "dtensor": make_dtensor,
    }[what]()
    child.tensors = {"good": good, "layer.bad": bad}


def make_dtensor() -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0]), [Shard(0)])


def test_tensors_without_whole_bytes_are_refused_by_name(job: Job) -> None:
    pytest.importorskip("torch")
    member = job.member(has_torch=True)
    texts = {
        "meta": "meta device",
        "sparse": "sparse",
        "quantized": "quantized",
        "list": "is a list",
        "dtensor": "only a shard",
    }
    for what, text in texts.items():
        member.run(make_unusable, what)
        for opening in ("open_publisher", "open_replica"):
            with pytest.raises(ManifestMismatch, match=rf"'layer\.bad'.*{text}"):
                getattr(member, opening)("policy")
    assert not job.holder_pids(), "nothing was started for them"


class NotAMapping:
    pass


def make_nonsense(child: Child) -> None:
    child.tensors = NotAMapping()


def make_read_only(child: Child) -> None:
    child.make(SMALL, 0)
    child.tensors["w"].flags.writeable = False


def test_other_things_than_tensors_are_refused(job: Job) -> None:
    member = job.member()
    member.run(make_nonsense)
    for what in ("open_publisher", "open_replica"):
        with pytest.raises(ConfigError, match="cannot read tensors from a NotAMapping"):
            getattr(member, what)("policy")
    member.run(make_read_only)
    with pytest.raises(ManifestMismatch, match="'w' is read-only"):
        member.open_replica("policy")
    member.make(SMALL, 0)
    with pytest.raises(ConfigError, match=r"auto_commit needs an nn\.Module"):
        member.open_replica("policy", auto_commit=True)


def publish_from_threads(child: Child, count: int) -> list[Any]:
    import threading

    found: list[Any] = []

    def publish() -> None:
        try:
            found.append(child.publisher.publish(7).version)
        except WsyncError as exc:
            found.append(exc)

    threads = [threading.Thread(target=publish) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return found


def test_publishing_from_two_threads_takes_turns(job: Job) -> None:
    trainer, replica = job.trainer(), job.replica()
    versions = trainer.run(publish_from_threads, 2)
    assert sorted(versions) == [1, 2]
    assert replica.wait_version(2) == 2
    check_moved(replica, SMALL, 0, 1)
    assert nbytes_of(SMALL) == replica.call("replica.rollback", 1).nbytes


@pytest.mark.parametrize("host", ["A", "B"])
def test_a_second_publisher_is_refused_until_the_first_has_left(job: Job, host: str) -> None:
    first, second = job.trainer(member_id="first"), job.member(host)
    second.make(SMALL, 2)
    with pytest.raises(ChannelError, match="already published by first"):
        second.open_publisher("policy")
    first.close()
    second.open_publisher("policy")
    assert second.publish(1) == 1
