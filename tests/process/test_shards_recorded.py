"""An engine whose loader was recorded, fed by a sharded trainer: equal to the engine's own load_weights, at TP 1, 2, 4.

The trainer's two ranks hold the checkpoint by rows; workers are real processes on two hosts.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest
from _members import Child, Job, logical_bytes

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent.parent))
from _toy_engine import ToyEngine, Variant, checkpoint, specs

from wsync.errors import CommitError
from wsync.holding import HoldingBuilder
from wsync.layouts import block

NUM_RANKS = 2
VARIANTS = [Variant(), Variant(head="separate", experts="transposed"), Variant(head="copy", norm="plus_one")]


def rows(count: int, rank: int) -> slice:
    half = count // 2
    return slice(0, half) if rank == 0 else slice(half, count)


def open_rank(child: Child, rank: int, variant: Variant) -> None:
    from wsync import ShardPublisher
    from wsync.arrangements import Arrangement, Run

    built, child.tensors = HoldingBuilder(), {}
    child.rank, child.variant = rank, variant  # type: ignore[attr-defined]
    for name, tensor in checkpoint(0, specs(variant)).items():
        spec = next(spec for spec in specs(variant) if spec.name == name)
        if spec.alias_of:
            built.tensor(name, spec.dtype, spec.shape, spec.alias_of)
            continue
        mine = rows(len(tensor), rank)
        extent = mine.stop - mine.start
        cut = Arrangement((len(tensor),), extent, (Run(0, mine.start, extent, 0),))
        block((name,), (cut, *spec.shape[1:])).add(built, name, spec.dtype)
        child.tensors[name] = tensor[mine].clone()
    child.publisher = ShardPublisher(
        "policy", built.build(), child.tensors, rank=rank, num_ranks=NUM_RANKS, config=child.config
    )


def publish(child: Child, seed: int) -> int:
    for name, tensor in checkpoint(seed, specs(child.variant)).items():  # type: ignore[attr-defined]
        if name in child.tensors:
            child.tensors[name].copy_(tensor[rows(len(tensor), child.rank)])  # type: ignore[attr-defined]
    publication = child.publisher.publish(seed)
    child.publications[publication.version] = publication
    return int(publication.version)


def open_engine(child: Child, rank: int, size: int, variant: Variant) -> str:
    from wsync import ShardReplica
    from wsync.integrations.recorder import record_loader

    engine = ToyEngine(rank, size, variant)
    child.tensors = engine
    recording = record_loader(engine, engine.load_weights, specs(variant))
    child.recording = recording  # type: ignore[attr-defined]
    child.replica = ShardReplica(
        "policy", recording.holding, lambda: recording.locals, installing=recording.installing, config=child.config
    )
    return recording.report()


def fail_once(child: Child, name: str) -> None:
    """The next load of a parameter fails."""
    param = child.tensors.get_parameter(name)
    own = param.weight_loader

    def weight_loader(*_: Any) -> None:
        param.weight_loader = own
        raise RuntimeError("out of luck")

    param.weight_loader = weight_loader


def pointers(child: Child) -> list[int]:
    return [tensor.data_ptr() for tensor in child.tensors.state_dict().values()]


def nbytes_wanted(child: Child) -> tuple[int, int]:
    """Of this worker, and of the whole checkpoint."""
    recording = child.recording  # type: ignore[attr-defined]
    return recording.holding.nbytes, sum(spec.nbytes for spec in recording.specs if not spec.alias_of)


def expected(rank: int, size: int, variant: Variant, seed: int) -> dict[str, str]:
    engine = ToyEngine(rank, size, variant)
    engine.load_weights(checkpoint(seed, specs(variant)).items())
    return {
        name: hashlib.sha256(logical_bytes(value)).hexdigest() for name, value in engine.state_dict().items()
    }  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_recorded_engine_equals_its_own_loader(job: Job, variant: Variant) -> None:
    ranks = [job.member(has_torch=True) for _ in range(NUM_RANKS)]
    for rank, member in enumerate(ranks):
        member.run(open_rank, rank, variant)
    kinds = [(0, 1), (0, 2), (1, 2), (0, 4), (2, 4)]  # rank 3 of 4 would have padding only of the vocabulary
    workers: list[Any] = [job.member("AB"[index % 2], has_torch=True) for index in range(len(kinds))]
    for member, kind in zip(workers, kinds, strict=True):
        report = member.run(open_engine, *kind, variant)
        assert ("norm" in report) == (variant.norm != "plain")
        if kind == (2, 4) and variant.norm == "plain":
            wanted, whole = member.run(nbytes_wanted)
            assert wanted < 0.6 * whole
    addresses = [member.run(pointers) for member in workers]
    for seed in (1, 2, 3):
        assert {member.run(publish, seed) for member in ranks} == {seed}
        for member, kind in zip(workers, kinds, strict=True):
            old = member.digest()
            assert member.wait_version(seed) == seed
            assert member.digest() == expected(*kind, variant, seed)
            assert not set(member.digest().items()) & set(old.items())
    assert [member.run(pointers) for member in workers] == addresses


def test_a_loader_that_fails_in_a_commit_is_named_and_nothing_is_reported_as_installed(job: Job) -> None:
    variant, name = Variant(norm="plus_one"), "layers.1.input_norm.weight"
    ranks = [job.member(has_torch=True) for _ in range(NUM_RANKS)]
    for rank, member in enumerate(ranks):
        member.run(open_rank, rank, variant)
    worker = job.member(has_torch=True)
    worker.run(open_engine, 0, 1, variant)
    assert {member.run(publish, 1) for member in ranks} == {1}
    assert worker.wait_version(1) == 1
    worker.run(fail_once, name)
    assert {member.run(publish, 2) for member in ranks} == {2}
    with pytest.raises(CommitError, match=f"load_weights fails on {name}: RuntimeError: out of luck"):
        worker.wait_version(2)
    assert (worker.get("replica.version"), worker.get("replica.is_ready")) == (1, True)
    assert worker.digest() == expected(0, 1, variant, 1)
    with pytest.raises(CommitError, match=f"version 2 could not be installed: .*{name}"):
        ranks[0].wait_committed(2)
    assert worker.wait_version(2) == 2
    assert worker.digest() == expected(0, 1, variant, 2)
