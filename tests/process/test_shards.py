"""Sharded channels with real processes: several trainer ranks, workers that want other cuts, over shm and tcp.

Two tensors of two dtypes: trainer ranks hold rows, workers hold columns, fused into one local or transposed. The
reference is cut by plain numpy indexing.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from _members import Child, Job, Member, count_memfds, eventually

from wsync.errors import (
    ChannelError,
    ManifestMismatch,
    MembershipError,
    PublishError,
    TransferTimeout,
)
from wsync.holding import Holding, HoldingBuilder, Region

W, B = (12, 10), (12,)


def full(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"w": rng.standard_normal(W).astype(np.float32), "b": rng.integers(-(2**40), 2**40, B)}


def builder(w_dtype: str = "float32", w_shape: tuple[int, int] = W) -> HoldingBuilder:
    built = HoldingBuilder()
    built.tensor("w", w_dtype, w_shape)
    built.tensor("b", "int64", B)
    return built


def rows_of(rank: int, num_ranks: int) -> slice:
    """Uneven: the last rank has less."""
    size = -(-W[0] // num_ranks)
    return slice(min(W[0], rank * size), min(W[0], (rank + 1) * size))


def trainer_holding(rank: int, num_ranks: int, w_dtype: str = "float32") -> Holding:
    """Rows of both tensors."""
    built, rows = builder(w_dtype), rows_of(rank, num_ranks)
    count = rows.stop - rows.start
    built.local("w.shard", "float32", (count, W[1]))
    built.local("b.shard", "int64", (count,))
    if count:
        built.piece("w", Region((rows.start, 0), (count, W[1])), "w.shard", (0, 0))
        built.piece("b", Region((rows.start,), (count,)), "b.shard", (0,))
    return built.build()


def columns_of(rank: int, tp: int) -> slice:
    return slice(rank * W[1] // tp, (rank + 1) * W[1] // tp)


def worker_holding(rank: int, tp: int, w_dtype: str = "float32") -> Holding:
    """Columns of `w`, stored transposed below a row of padding; the whole of `b`, twice."""
    built, columns = builder(w_dtype), columns_of(rank, tp)
    count = columns.stop - columns.start
    built.local("wt", w_dtype, (count + 1, W[0]), [Region((0, 0), (1, W[0]))])
    built.piece("w", Region((0, columns.start), (W[0], count)), "wt", (1, 0), (1, 0))
    built.local("bb", "int64", (2, *B))
    for copy in range(2):
        built.piece("b", Region.whole(B), "bb", (copy, 0), (1,))
    return built.build()


# --- in the children
def fill(child: Child, seed: int) -> None:
    rows = rows_of(child.rank, child.num_ranks)  # type: ignore[attr-defined]
    for name, value in full(seed).items():
        child.tensors[f"{name}.shard"][...] = value[rows]


def open_trainer(child: Child, rank: int, num_ranks: int, w_dtype: str) -> None:
    from wsync import ShardPublisher

    child.rank, child.num_ranks = rank, num_ranks  # type: ignore[attr-defined]
    count = rows_of(rank, num_ranks).stop - rows_of(rank, num_ranks).start
    child.tensors = {"w.shard": np.zeros((count, W[1]), np.float32), "b.shard": np.zeros(count, np.int64)}
    holding = trainer_holding(rank, num_ranks, w_dtype)
    child.publisher = ShardPublisher(
        "policy", holding, child.tensors, rank=rank, num_ranks=num_ranks, config=child.config
    )


def publish(child: Child, step: int, seed: int, timeout_s: float = 20.0) -> int:
    fill(child, seed)
    publication = child.publisher.publish(step, timeout_s=timeout_s)
    child.publications[publication.version] = publication
    fill(child, 999)  # training goes on: the snapshot must not change any more
    return int(publication.version)


def open_worker(child: Child, rank: int, tp: int, w_dtype: str) -> None:
    from wsync import ShardReplica

    columns = columns_of(rank, tp)
    dtype = np.dtype(w_dtype)
    child.tensors = {"wt": np.full((columns.stop - columns.start + 1, W[0]), 7, dtype), "bb": np.full((2, *B), 7)}
    child.replica = ShardReplica("policy", worker_holding(rank, tp, w_dtype), child.tensors, config=child.config)


def sums(tensors: dict[str, Any]) -> dict[str, str]:
    return {name: hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest() for name, value in tensors.items()}


def expected(seed: int, rank: int, tp: int, w_dtype: str = "float32") -> dict[str, str]:
    """By plain indexing, without wsync."""
    source = full(seed)
    wt = source["w"].astype(w_dtype)[:, columns_of(rank, tp)].T
    padding = np.full((1, W[0]), 7, w_dtype)
    return sums({"wt": np.concatenate([padding, wt]), "bb": np.stack([source["b"]] * 2)})


# --- helpers of the tests
def trainers(job: Job, num_ranks: int, *, w_dtype: str = "float32", hosts: str = "A") -> list[Member]:
    members = [job.member(hosts[rank % len(hosts)]) for rank in range(num_ranks)]
    for rank, member in enumerate(members):
        member.run(open_trainer, rank, num_ranks, w_dtype)
    return members


def worker(job: Job, rank: int, tp: int, *, w_dtype: str = "float32", host: str = "A") -> Member:
    member = job.member(host)
    member.run(open_worker, rank, tp, w_dtype)
    return member


def publish_all(ranks: list[Member], step: int, seed: int) -> int:
    """All ranks publish; they may do so in any order."""
    versions = {member.run(publish, step, seed) for member in ranks}
    assert len(versions) == 1
    return versions.pop()


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_three_versions_to_two_engines_of_other_cuts(job: Job, num_ranks: int) -> None:
    """TP2 on another host and TP3 on the trainers', each worker with its own slices."""
    ranks = trainers(job, num_ranks, hosts="AB")
    workers = [(worker(job, rank, 2, host="C"), rank, 2) for rank in range(2)]
    workers += [(worker(job, rank, 3), rank, 3) for rank in range(3)]
    for seed in (1, 2, 3):
        version = publish_all(ranks, seed, seed)
        assert version == seed
        for member, rank, tp in workers:
            old = member.digest()
            assert member.wait_version(version) == version
            assert member.digest() == expected(seed, rank, tp)
            assert not set(member.digest().items()) & set(old.items())
            assert member.verify() == []
        ranks[0].wait_committed(version, 20.0)


def test_a_cast_happens_once_at_the_source(job: Job) -> None:
    ranks = trainers(job, 2, w_dtype="float16")
    member = worker(job, 0, 2, w_dtype="float16")
    version = publish_all(ranks, 1, 5)
    assert member.wait_version(version) == version
    assert member.digest() == expected(5, 0, 2, "float16") != expected(4, 0, 2, "float16")


def test_a_newcomer_that_wants_what_others_have_needs_no_publish(job: Job) -> None:
    ranks = trainers(job, 2)
    first = worker(job, 0, 2, host="B")
    version = publish_all(ranks, 1, 1)
    first.wait_version(version)
    for member in ranks:
        member.kill()
    again = worker(job, 0, 2, host="B")
    assert again.wait_version(version) == version
    assert again.digest() == expected(1, 0, 2)
    other = worker(job, 0, 2, host="C")
    assert other.wait_version(version) == version
    assert other.digest() == expected(1, 0, 2)


def test_a_worker_of_a_new_kind_gets_the_next_version(job: Job) -> None:
    ranks = trainers(job, 2)
    first = worker(job, 0, 2)
    assert first.wait_version(publish_all(ranks, 1, 1)) == 1
    new = worker(job, 1, 3, host="B")
    assert new.commit_latest() == 0
    assert publish_all(ranks, 2, 2) == 2
    assert new.wait_version(2) == 2
    assert new.digest() == expected(2, 1, 3)
    assert first.wait_version(2) == 2
    assert first.digest() == expected(2, 0, 2)
    num_lanes = sum(member.run(count_lanes) for member in ranks)
    eventually(
        lambda: count_memfds(job.holder_pid("A")) == job.config.num_slots * num_lanes,
        "lanes of the former plan are freed",
    )


def count_lanes(child: Child) -> int:
    return len(child.publisher._publishers)


def test_a_rank_that_starts_again_goes_on_with_the_numbers(job: Job) -> None:
    ranks = trainers(job, 2)
    member = worker(job, 0, 2)
    assert member.wait_version(publish_all(ranks, 1, 1)) == 1
    ranks[0].run(publish, 2, 2)  # a version that the other rank never publishes
    ranks[1].kill()
    ranks[1] = job.member()
    ranks[1].run(open_trainer, 1, 2, "float32")
    with pytest.raises(PublishError, match="started anew"):
        ranks[0].wait_committed(2, 10.0)
    assert member.commit_latest() == 0
    version = publish_all(ranks, 3, 3)
    assert version == 3
    assert member.wait_version(version) == version
    assert member.digest() == expected(3, 0, 2)


def test_ranks_that_disagree_about_the_step_are_named(job: Job) -> None:
    ranks = trainers(job, 2)
    member = worker(job, 0, 2)
    ranks[0].run(publish, 1, 1)
    with pytest.raises(PublishError, match=r"rank 1 offers step 2 for version 1, ranks \[0\] offered step 1"):
        ranks[1].run(publish, 2, 2)
    with pytest.raises(PublishError, match="dropped"):
        ranks[0].wait_committed(1, 10.0)
    assert member.commit_latest() == 0
    assert member.wait_version(publish_all(ranks, 3, 3)) == 2
    assert member.digest() == expected(3, 0, 2)


def test_missing_ranks_are_named(job: Job) -> None:
    first = job.member()
    first.run(open_trainer, 0, 3, "float32")
    with pytest.raises(MembershipError, match=r"ranks \[1, 2\] of 'policy' have not joined"):
        first.run(publish, 1, 1, 0.5)
    member = worker(job, 0, 2)
    with pytest.raises(MembershipError, match=r"ranks \[1, 2\]"):
        member.wait_version(1, 0.5)
    assert member.commit_latest() == 0
    ranks = [first, job.member(), job.member()]
    for rank in (1, 2):
        ranks[rank].run(open_trainer, rank, 3, "float32")
    for rank in (0, 2):
        ranks[rank].run(publish, 1, 1)
    with pytest.raises(MembershipError, match=r"trainer ranks \[1\] have not published version 1"):
        first.wait_committed(1, 0.5)
    with pytest.raises(TransferTimeout, match="not staged"):
        member.wait_version(1, 0.5)
    assert member.commit_latest() == 0
    ranks[1].run(publish, 1, 1)
    assert member.wait_version(1) == 1
    assert member.digest() == expected(1, 0, 2)
    first.wait_committed(1, 10.0)
    extra = job.member()
    with pytest.raises(ChannelError, match="rank 1 of 'policy' is published by"):
        extra.run(open_trainer, 1, 3, "float32")
    with pytest.raises(ChannelError, match="counts 2 trainer ranks, rank 0 counts 3"):
        extra.run(open_trainer, 1, 2, "float32")


def open_misfit(child: Child) -> None:
    """Wants a wider `w` than there is."""
    from wsync import ShardReplica

    built = builder(w_shape=(12, 11))
    built.local("w", "float32", (12, 11))
    built.piece("w", Region.whole((12, 11)), "w", (0, 0))
    child.tensors = {"w": np.zeros((12, 11), np.float32)}
    child.replica = ShardReplica("policy", built.build(), child.tensors, config=child.config)


def test_case_A36_global_shapes_that_disagree_are_refused_and_stop_nobody(job: Job) -> None:
    ranks = trainers(job, 2)
    misfit = job.member()
    misfit.run(open_misfit)
    member = worker(job, 0, 2)
    version = publish_all(ranks, 1, 1)
    assert member.wait_version(version) == version
    assert member.digest() == expected(1, 0, 2)
    with pytest.raises(ManifestMismatch, match=r"'w'.*12, 11"):
        misfit.wait_version(1, 5.0)
    assert misfit.digest() == sums({"w": np.zeros((12, 11), np.float32)})


def test_kills_of_a_holder_and_a_worker(job: Job) -> None:
    ranks = trainers(job, 2)
    near, far = worker(job, 0, 2), worker(job, 1, 2, host="B")
    version = publish_all(ranks, 1, 1)
    for member in (near, far):
        member.wait_version(version)
    job.kill(job.holder_pid("B"))
    version = publish_all(ranks, 2, 2)
    assert far.wait_version(version) == version
    assert far.digest() == expected(2, 1, 2)
    near.kill()
    near = worker(job, 0, 2)
    assert near.wait_version(version) == version
    assert near.digest() == expected(2, 0, 2)
    version = publish_all(ranks, 3, 3)
    for member, rank in ((near, 0), (far, 1)):
        assert member.wait_version(version) == version
        assert member.digest() == expected(3, rank, 2)
