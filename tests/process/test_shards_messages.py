"""What the members of a sharded channel are told: who is missing, refused or gone, by names that their users know."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _members import Child, Job, Member, eventually, logical_bytes, sha
from test_cases import with_coordinator
from test_shards import expected, open_misfit, open_trainer, publish, publish_all, trainers, worker, worker_holding
from test_shards_faults import restart_coordinator

from wsync.errors import ChannelError, ManifestMismatch, MembershipError, PublishError, TransferTimeout
from wsync.status import ReplicaPhase, VersionPhase

HASH = re.compile(r"[0-9a-f]{12}")
README = Path(__file__).parents[2] / "README.md"


def name_of(member: Member) -> str:
    return str(member.get("replica.member_id"))


def test_a_worker_with_a_new_layout_is_told_that_one_more_publish_is_needed(job: Job) -> None:
    ranks, first = trainers(job, 2), worker(job, 0, 2)
    assert first.wait_version(publish_all(ranks, 1, 1)) == 1
    new = worker(job, 1, 3, host="B")
    with pytest.raises(TransferTimeout, match=r"layout.* new to 'policy'.*version 1.*one more publish") as told:
        new.wait_version(1, 0.5)
    assert "check that every trainer rank publishes" not in str(told.value)
    with pytest.raises(TransferTimeout, match="check that every trainer rank publishes"):
        first.wait_version(2, 0.5)
    assert new.wait_version(publish_all(ranks, 2, 2)) == 2
    assert new.digest() == expected(2, 1, 3)


def test_what_a_worker_lacks_is_named_by_ranks_and_tensors(job: Job) -> None:
    ranks, member = trainers(job, 3), worker(job, 0, 2)
    ranks[1].run(publish, 1, 1)
    with pytest.raises(TransferTimeout, match=r"trainer ranks 0, 2 \(tensors b, w\)") as told:
        member.wait_version(1, 1.5)
    assert not HASH.search(str(told.value))


def test_a_trainer_is_told_which_workers_were_refused_and_why(job: Job) -> None:
    ranks, misfit = trainers(job, 2), job.member()
    misfit.run(open_misfit)
    publish_all(ranks, 1, 1)
    refused = rf"version 1; refused: {name_of(misfit)}.*'w' float32 \[12, 10\] -> float32 \[12, 11\]"
    with pytest.raises(ManifestMismatch, match=refused) as told:
        ranks[0].wait_committed(1, 10.0)
    assert not HASH.search(str(told.value))
    assert ranks[0].took_s < 5.0
    good = worker(job, 0, 2)
    version = publish_all(ranks, 2, 2)
    assert good.wait_version(version) == version
    with pytest.raises(ManifestMismatch, match=name_of(misfit)):
        ranks[1].wait_committed(version, 10.0)
    phases = {replica.member_id.rpartition("-")[0]: replica for replica in ranks[0].status(version).replicas}
    assert phases[name_of(good)].phase is ReplicaPhase.COMMITTED
    assert phases[name_of(misfit)].phase is ReplicaPhase.FAILED
    assert "'w'" in phases[name_of(misfit)].error
    misfit.kill()
    eventually(lambda: len(ranks[0].status(version).replicas) == 1, "the misfit has left")
    assert ranks[0].wait_committed(version, 10.0).count(ReplicaPhase.COMMITTED) == 1


def test_a_worker_that_exits_without_close_is_named(job: Job) -> None:
    ranks, member = trainers(job, 2), worker(job, 0, 2)
    name = name_of(member)
    assert member.wait_version(publish_all(ranks, 1, 1)) == 1
    publish_all(ranks, 2, 2)
    ranks[0].begin("wait_committed", 2, 20.0)
    os.kill(member.pid, signal.SIGKILL)
    gone = rf"no worker is left that receives version 2: {name}.* has left"
    with pytest.raises(MembershipError, match=gone):
        ranks[0].end()
    assert ranks[0].took_s < 8.0
    publish_all(ranks, 3, 3)
    with pytest.raises(MembershipError, match=gone.replace("2", "3", 1)):
        ranks[1].wait_staged(3, 10.0)
    again = worker(job, 0, 2)
    again.wait_version(3)
    assert ranks[0].wait_committed(3, 10.0).count(ReplicaPhase.COMMITTED) == 1


def test_a_worker_that_lost_its_holder_is_waited_for(job: Job) -> None:
    ranks, member = trainers(job, 2), worker(job, 0, 2, host="B")
    assert member.wait_version(publish_all(ranks, 1, 1)) == 1
    publish_all(ranks, 2, 2)
    ranks[0].begin("wait_committed", 2, 20.0)
    job.kill(job.holder_pid("B"))
    time.sleep(1.0)
    assert ranks[0].is_busy()
    assert member.wait_version(2) == 2
    assert member.digest() == expected(2, 0, 2)
    assert ranks[0].end().count(ReplicaPhase.COMMITTED) == 1
    job.kill(job.holder_pid("B"))
    eventually(lambda: not ranks[0].status(2).count(ReplicaPhase.COMMITTED), "the coordinator knows of it")
    with pytest.raises(MembershipError, match=rf"no worker is left .* lost with their holders: {name_of(member)}"):
        ranks[0].wait_committed(2, 1.0)
    assert 0.9 < ranks[0].took_s < 4.0


def exit_while_packing(child: Child, step: int) -> None:
    from wsync.engine.tensors import NumpyTensors

    NumpyTensors.pack = lambda *args: os._exit(1)  # type: ignore[assignment, method-assign]
    child.publisher.publish(step)


def test_a_version_whose_origin_ended_while_it_packed_is_aborted(job: Job) -> None:
    ranks, member = trainers(job, 2), worker(job, 0, 2)
    assert member.wait_version(publish_all(ranks, 1, 1)) == 1
    ranks[0].run(publish, 2, 2)
    with pytest.raises(AssertionError, match="the member has ended"):
        ranks[1].run(exit_while_packing, 2)
    with pytest.raises(PublishError, match="version 2 is aborted: "):
        ranks[0].wait_committed(2, 10.0)
    assert ranks[0].took_s < 5.0
    assert ranks[0].status(2).phase is VersionPhase.ABORTED
    assert member.commit_latest() == 0
    assert member.digest() == expected(1, 0, 2)


def test_no_worker_at_all_and_one_that_never_commits_are_told_apart(job: Job) -> None:
    ranks = trainers(job, 2)
    publish_all(ranks, 1, 1)
    with pytest.raises(MembershipError, match="no worker receives version 1: none had joined"):
        ranks[0].wait_committed(1, 5.0)
    member = worker(job, 0, 2)
    publish_all(ranks, 2, 2)
    with pytest.raises(TransferTimeout, match=rf"{name_of(member)}.* \(joining\)"):
        ranks[0].wait_committed(2, 0.5)
    assert member.wait_version(2) == 2


def warn_soon(child: Child) -> None:
    from wsync.engine import replica, shard_link

    replica.WARN_AFTER_S = shard_link.WARN_AFTER_S = 0.3


def test_publish_says_whom_it_waits_for(job: Job) -> None:
    first, member = job.member(), worker(job, 0, 2)
    first.run(warn_soon)
    first.run(open_trainer, 0, 2, "float32")
    first.begin("run", publish, 1, 1)
    told = "trainer ranks [1] of 'policy' have not joined"
    eventually(lambda: told in first.log(), "it is logged", 10.0)
    assert first.is_busy()
    second = job.member()
    second.run(open_trainer, 1, 2, "float32")
    second.run(publish, 1, 1)
    assert first.end() == 1
    second.close()
    first.begin("run", publish, 2, 2)
    eventually(lambda: first.log().count(told) == 2, "it is logged for a rank that has left", 10.0)
    assert first.is_busy()
    second.run(open_trainer, 1, 2, "float32")
    assert second.run(publish, 2, 2) == first.end() == 2
    assert member.wait_version(2) == 2
    assert member.digest() == expected(2, 0, 2)


def test_a_replica_says_that_it_waits(job: Job) -> None:
    replica = job.replica(channel="policy")
    replica.run(warn_soon)
    replica.begin("wait_version", 1, 20.0)
    eventually(lambda: "waits for version 1 of 'policy', for 20 s more" in replica.log(), "it is logged", 10.0)
    job.trainer(channel="policy").publish(1, 1)
    assert replica.end() == 1


def test_a_new_coordinator_that_waits_for_holders_does_not_cut_the_time_out_short(job: Job) -> None:
    coordinator, _ = with_coordinator(job)
    ranks, member = trainers(job, 2), worker(job, 0, 2, host="B")
    assert member.wait_version(publish_all(ranks, 1, 1)) == 1
    restart_coordinator(job, coordinator)
    for rank in ranks:
        rank.run(warn_soon)
        rank.begin("run", publish, 2, 2)
    assert [rank.end() for rank in ranks] == [2, 2]
    assert member.wait_version(2) == 2
    assert member.digest() == expected(2, 0, 2)


def test_a_version_that_is_stuck_is_told_without_the_names_of_lanes(job: Job) -> None:
    ranks, member = trainers(job, 1), worker(job, 0, 2, host="B")
    assert member.wait_version(publish_all(ranks, 1, 1)) == 1
    job.stop(job.holder_pid("B"))
    ranks[0].run(publish, 2, 2)
    with pytest.raises(TransferTimeout, match="rank 0: an earlier version of 'policy' is still on its way") as told:
        ranks[0].run(publish, 3, 3, 0.5)
    assert told.value.context.channel == "policy"
    assert "on_busy" not in str(told.value)
    assert not HASH.search(str(told.value))


def repr_of(child: Child, version: int) -> str:
    return repr(child.publications[version])


def test_a_sharded_publication_has_what_a_publication_has(job: Job) -> None:
    ranks, far, near = trainers(job, 2), worker(job, 0, 2, host="B"), worker(job, 1, 2)
    ranks[0].run(publish, 7, 1)
    status = ranks[0].status(1)
    assert (status.channel, status.version, status.step) == ("policy", 1, 7)
    assert (status.phase, status.error) == (VersionPhase.PENDING, "trainer ranks [1] have not published it")
    with pytest.raises(MembershipError, match=r"trainer ranks \[1\] have not published version 1"):
        ranks[0].wait_staged(1, 0.3)
    ranks[1].run(publish, 7, 1)
    assert {member.wait_version(1) for member in (far, near)} == {1}
    publish_all(ranks, 8, 2)
    status = ranks[1].wait_staged(2, 20.0)
    assert {replica.phase for replica in status.replicas} == {ReplicaPhase.STAGED}
    assert {replica.host for replica in status.replicas} == {"A", "B"}
    assert [holder.host for holder in status.holders] == ["B"]
    assert status.nbytes >= 12 * 10 * 4 + 12 * 8
    far.wait_version(2)
    with pytest.raises(TransferTimeout, match=rf"not committed everywhere: .*{name_of(near)}.* \(staged\)"):
        ranks[0].wait_committed(2, 0.3)
    near.wait_version(2)
    status = ranks[0].wait_committed(2, 20.0)
    assert (status.phase, status.step) == (VersionPhase.STAGED, 8)
    assert [replica.phase for replica in status.replicas] == [ReplicaPhase.COMMITTED] * 2
    text = ranks[0].run(repr_of, 2)
    assert re.fullmatch(r"ShardPublication\(version=2, step=8, nbytes=\d+, pause_s=[\d.e-]+\)", text)


def test_a_publication_shows_what_it_is(job: Job) -> None:
    trainer = job.trainer()
    trainer.publish(7)
    text = trainer.run(repr_of, 1)
    assert re.fullmatch(r"Publication\(version=1, step=7, nbytes=\d+, pause_s=[\d.e-]+\)", text)


# --- the declared layout of README.md
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 16, 2, 64, 1024
ROWS = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}


def projections(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {f"attn.{p}_proj.weight": rng.standard_normal((n, HIDDEN)).astype(np.float32) for p, n in ROWS.items()}


def declared_example() -> str:
    """The only block of README.md that declares a layout."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (found,) = (str(text) for text in blocks if "kv_heads" in text)
    return found


def open_whole_trainer(child: Child, rank: int) -> None:
    """Each of two ranks has every other projection whole."""
    import torch

    from wsync import ShardPublisher
    from wsync.integrations.sharded import read_state

    names = list(projections(0))[rank::2]
    child.tensors = {name: torch.zeros(ROWS[name[5]], HIDDEN) for name in names}
    held = read_state(child.tensors, dtypes=dict.fromkeys(names, "bfloat16"))
    child.publisher = ShardPublisher("policy", held.holding, held.locals, rank=rank, num_ranks=2, config=child.config)


def publish_projections(child: Child, seed: int) -> int:
    import torch

    for name, tensor in child.tensors.items():
        tensor.copy_(torch.from_numpy(projections(seed)[name]))
    return int(child.publisher.publish(seed).version)


def run_example(child: Child, rank: int) -> None:
    scope: dict[str, Any] = {"rank": rank}
    exec(compile(declared_example(), "README.md", "exec"), scope)
    child.replica, child.tensors = scope["replica"], scope["weights"]


def fused(seed: int, rank: int) -> str:
    """This worker's query, key and value heads one after another; float32 rounded to the nearest even bfloat16."""
    parts = [value[rank * len(value) // 2 : (rank + 1) * len(value) // 2] for value in projections(seed).values()]
    bits = np.concatenate(parts).view(np.uint32).astype(np.uint64)
    return sha(logical_bytes(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)))


def test_the_declared_layout_of_the_readme(job: Job) -> None:
    job.env |= {"WSYNC_JOB": job.config.job, "WSYNC_HOST": "A"}
    ranks = [job.member(has_torch=True) for _ in range(2)]
    for rank, member in enumerate(ranks):
        member.run(open_whole_trainer, rank)
    workers = [job.member(has_torch=True) for _ in range(2)]
    for rank, member in enumerate(workers):
        member.run(run_example, rank)
    for seed in (1, 2):
        assert {member.run(publish_projections, seed) for member in ranks} == {seed}
        for rank, member in enumerate(workers):
            old = member.digest()
            assert member.wait_version(seed) == seed
            assert member.digest() == {"attn.qkv_proj": fused(seed, rank)} != old
            assert member.verify() == []


def test_a_refused_worker_is_told_each_time_it_asks(job: Job) -> None:
    ranks, misfit = trainers(job, 2), job.member()
    misfit.run(open_misfit)
    for _ in range(3):
        with pytest.raises(ManifestMismatch, match=r"'w'.*12, 11"):
            misfit.commit_latest()
    publish_all(ranks, 1, 1)
    with pytest.raises(ManifestMismatch, match=r"'w'.*12, 11"):
        misfit.commit_latest()
    assert misfit.get("replica.is_ready") is False


def test_whole_tensors_and_shards_are_not_taken_for_one_another(job: Job) -> None:
    ranks = trainers(job, 2)
    for open_other in (job.replica, job.trainer):
        with pytest.raises(ChannelError, match=r"channel 'policy' is published in shards.*use ShardPublisher and"):
            open_other()
    job.trainer(channel="whole")
    early = job.replica(channel="early")
    early.begin("wait_version", 1, 3.0)
    misfit = job.member()
    with pytest.raises(ChannelError, match=r"channel 'whole' is published by trainer-.* as whole tensors.*Replica"):
        misfit.run(open_shard_worker, "whole")
    there = r"nobody has published channel 'early'.*published in this job: policy, whole"
    with pytest.raises(ChannelError, match=there):
        early.end()
    waiting = job.member()
    waiting.run(open_shard_worker, "later")
    waiting.begin("wait_version", 1, 20.0)
    job.trainer(channel="later")
    with pytest.raises(ChannelError, match=r"channel 'later' is published by trainer-.* as whole tensors.*Replica"):
        waiting.end()
    assert waiting.took_s < 10.0
    for rank in ranks:
        rank.close()
    assert job.trainer().publish(1, 1) >= 1, "the channel is free when its ranks have left"


def open_shard_worker(child: Child, channel: str) -> None:
    from wsync import ShardReplica

    child.tensors = {"wt": np.zeros((6, 12), np.float32), "bb": np.zeros((2, 12), np.int64)}
    child.replica = ShardReplica(channel, worker_holding(0, 2), child.tensors, config=child.config)
