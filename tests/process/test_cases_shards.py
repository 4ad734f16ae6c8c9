"""Cases of several trainer ranks, adapters, released weights and odd sizes, with real processes.

Members hold rows of tensors whose bytes `source_bytes` makes; what is right is cut from these without wsync.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _members import Child, Job, Member, Spec, logical_bytes, make_tensors, reference, sha, source_bytes

from wsync.engine import protocol
from wsync.errors import ManifestMismatch
from wsync.holding import Holding, HoldingBuilder, Region

pytestmark = pytest.mark.process

Part = tuple[str, str, tuple[int, ...], int, int]
"""A tensor's name, dtype and whole shape, and the first and last row of it that a member has."""

BOUND_S = 40.0


def holding_of(parts: Sequence[Part]) -> Holding:
    built = HoldingBuilder()
    for name, dtype, shape, begin, end in parts:
        zeros = (0,) * len(shape)
        built.tensor(name, dtype, shape)
        built.local(name, dtype, (end - begin, *shape[1:]))
        built.piece(name, Region((begin, *zeros[1:]), (end - begin, *shape[1:])), name, zeros)
    return built.build()


def whole(spec: Spec) -> list[Part]:
    return [(name, dtype, shape, 0, shape[0]) for name, dtype, shape in spec]


def share(spec: Spec, rank: int, num_ranks: int) -> list[Part]:
    return [(n, d, s, rank * s[0] // num_ranks, (rank + 1) * s[0] // num_ranks) for n, d, s in spec]


def expected(parts: Sequence[Part], seed: int) -> dict[str, str]:
    found = {}
    for name, dtype, shape, begin, end in parts:
        block = source_bytes(name, dtype, shape, seed)
        row = len(block) // shape[0]
        found[name] = sha(block[begin * row : end * row])
    return found


# --- in the children
def values(parts: Sequence[Part], seed: int, kind: str) -> dict[str, Any]:
    made = make_tensors([part[:3] for part in parts], seed, kind=kind)
    return {name: made[name][begin:end].copy() if kind == "numpy" else made[name][begin:end].clone()
            for name, _, _, begin, end in parts}  # fmt: skip


def open_rank(
    child: Child, parts: list[Part], rank: int, num_ranks: int, kind: str = "numpy", channel: str = "policy"
) -> None:
    from wsync import ShardPublisher

    locals_ = values(parts, 0, kind)
    publisher = ShardPublisher(channel, holding_of(parts), locals_, rank=rank, num_ranks=num_ranks, config=child.config)
    child.publisher = child.publisher or publisher
    opened = child.__dict__.setdefault("opened", {})
    opened[channel] = (publisher, parts, locals_, kind)


def open_worker(child: Child, parts: list[Part], kind: str = "numpy", channel: str = "policy") -> None:
    from wsync import ShardReplica

    child.tensors = values(parts, 0, kind)
    child.replica = ShardReplica(channel, holding_of(parts), child.tensors, config=child.config)


def publish(child: Child, seed: int, channel: str = "policy", timeout_s: float = 20.0) -> int:
    """The version; its step is the seed of its bytes."""
    publisher, parts, locals_, kind = child.opened[channel]  # type: ignore[attr-defined]
    for name, value in values(parts, seed, kind).items():
        locals_[name][...] = value
    publication = publisher.publish(seed, timeout_s=timeout_s)
    child.publications[publication.version] = publication
    return int(publication.version)


def close_others(child: Child) -> None:
    for publisher, *_ in child.opened.values():  # type: ignore[attr-defined]
        publisher.close()


# --- A19
FP8: Spec = [("w.weight", "float8_e4m3fn", (256, 256)), ("w.weight_scale_inv", "float32", (2, 2))]


def test_case_A19_a_weight_without_its_scale_changes_nothing(job: Job) -> None:
    """Refused before the first version, and when a later trainer forgets the scale: then the old pair stays."""
    pytest.importorskip("torch")
    forgetful, trainer, worker = (job.member(has_torch=True) for _ in range(3))
    forgetful.run(open_rank, whole(FP8[:1]), 0, 1, "torch")
    worker.run(open_worker, whole(FP8), "torch")
    assert forgetful.run(publish, 1) == 1
    lacking = r"wanted, but held by no trainer rank: w\.weight_scale_inv"
    with pytest.raises(ManifestMismatch, match=lacking):
        worker.wait_version(1, 10.0)
    assert worker.digest() == expected(whole(FP8), 0)
    assert worker.get("replica.is_ready") is False
    forgetful.close()
    trainer.run(open_rank, whole(FP8), 0, 1, "torch")
    version = trainer.run(publish, 2)
    assert worker.wait_version(version) == version
    assert worker.digest() == expected(whole(FP8), 2)
    trainer.close()
    again = job.member(has_torch=True)
    again.run(open_rank, whole(FP8[:1]), 0, 1, "torch")
    again.run(publish, 3)
    with pytest.raises(ManifestMismatch, match=lacking):
        worker.wait_version(version + 1, 10.0)
    assert worker.digest() == expected(whole(FP8), 2)
    assert worker.get("replica.version") == version


# --- A21
def view_as(child: Child, dtype: str) -> None:
    """What an engine does that converts in place: the same parameter, the same bytes, another dtype."""
    import torch

    for tensor in child.tensors.values():
        tensor.data = tensor.data.view(getattr(torch, dtype))


def with_converted_slot(job: Job) -> tuple[Member, Member]:
    """A trainer with two versions, and its worker, whose slot has been converted after the first."""
    pytest.importorskip("torch")
    parts = whole(FP8[:1])
    trainer, worker = job.member(has_torch=True), job.member(has_torch=True)
    trainer.run(open_rank, parts, 0, 1, "torch")
    worker.run(open_worker, parts, "torch")
    assert worker.wait_version(trainer.run(publish, 1)) == 1
    worker.run(view_as, "float8_e4m3fnuz")
    trainer.run(publish, 2)
    return trainer, worker


def test_case_A21_a_slot_of_another_dtype_is_refused_before_a_byte_moves(job: Job) -> None:
    _, worker = with_converted_slot(job)
    parts = whole(FP8[:1])
    with pytest.raises(ManifestMismatch, match=r"'w\.weight' is float8_e4m3fnuz .*says float8_e4m3fn "):
        worker.wait_version(2, 10.0)
    assert worker.digest() == expected(parts, 1)
    assert worker.get("replica.version") == 1
    worker.run(view_as, "float8_e4m3fn")
    assert worker.wait_version(2) == 2
    assert worker.digest() == expected(parts, 2)


def test_case_A21_a_commit_that_was_refused_does_not_stop_the_trainer(job: Job) -> None:
    trainer, worker = with_converted_slot(job)
    with pytest.raises(ManifestMismatch):
        worker.wait_version(2, 10.0)
    worker.run(view_as, "float8_e4m3fn")
    for version in (3, 4, 5):
        assert trainer.run(publish, version, "policy", 3.0) == version
        assert worker.wait_version(version) == version


# --- A23
def move(child: Child) -> None:
    """What offloading does to a trainer's or a worker's tensors: the same objects over other memory."""
    held = child.__dict__.get("opened", {}).get("policy")
    for tensor in (held[2] if held else child.tensors).values():
        tensor.data = tensor.data.clone()


@pytest.mark.parametrize("who", ["trainer", "worker"])
def test_case_A23_memory_that_was_replaced_is_followed_or_refused(job: Job, who: str) -> None:
    pytest.importorskip("torch")
    trainer, worker = job.member(has_torch=True), job.member(has_torch=True)
    trainer.run(open_rank, whole(SLEEPY), 0, 1, "torch")
    worker.run(open_worker, whole(SLEEPY), "torch")
    assert worker.wait_version(trainer.run(publish, 1)) == 1
    (trainer if who == "trainer" else worker).run(move)
    with contextlib.suppress(ManifestMismatch):
        worker.wait_version(trainer.run(publish, 2), 10.0)
    assert worker.digest() == expected(whole(SLEEPY), worker.get("replica.version"))


# --- A25
SLEEPY: Spec = [("w", "float32", (6, 4)), ("b", "float32", (6,))]


def release(child: Child) -> None:
    """What an engine that sleeps does: its weights are discarded."""
    for tensor in child.tensors.values():
        tensor.untyped_storage().resize_(0)


def allocate(child: Child) -> None:
    """Awake again: memory, but no weights."""
    for tensor in child.tensors.values():
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        tensor.zero_()


def tensor_sums(child: Child) -> dict[str, str]:
    """As `digest`, but the storages can be resized afterwards."""
    return {name: sha(logical_bytes(tensor.clone())) for name, tensor in child.tensors.items()}


def test_case_A25_released_weights_take_no_version_and_come_back_whole(job: Job) -> None:
    pytest.importorskip("torch")
    trainer, engine = job.trainer(SLEEPY, kind="torch"), job.replica(SLEEPY, kind="torch")
    assert engine.get("replica.is_ready") is False
    assert engine.wait_version(trainer.publish(1, seed=1)) == 1
    assert engine.get("replica.is_ready") is True
    engine.run(release)
    trainer.publish(2, seed=2)
    with pytest.raises(ManifestMismatch, match="the storage of 'w' has been freed"):
        engine.wait_version(2, 10.0)
    assert engine.get("replica.version") == 1
    engine.run(allocate)
    assert engine.wait_version(2) == 2
    assert engine.run(tensor_sums) == reference(SLEEPY, 2)
    engine.run(release)
    engine.run(allocate)
    assert engine.rollback(2) == 2, "the version that it runs, once more"
    assert engine.run(tensor_sums) == reference(SLEEPY, 2)
    engine.call("replica.close")
    engine.open_replica("policy")
    assert engine.get("replica.is_ready") is False, "who starts again is not ready before a commit"


@pytest.mark.parametrize("is_sharded", [False, True])
def test_case_A25_an_engine_whose_weights_were_released_is_not_ready(job: Job, is_sharded: bool) -> None:
    pytest.importorskip("torch")
    if is_sharded:
        trainer, engine = job.member(has_torch=True), job.member(has_torch=True)
        trainer.run(open_rank, whole(SLEEPY), 0, 1, "torch")
        engine.run(open_worker, whole(SLEEPY), "torch")
        trainer.run(publish, 1)
    else:
        trainer, engine = job.trainer(SLEEPY, kind="torch"), job.replica(SLEEPY, kind="torch")
        trainer.publish(1)
    assert engine.wait_version(1) == 1
    engine.run(release)
    assert engine.get("replica.is_ready") is False


# --- A39, A40, A42
LORA: Spec = [("lora_A", "int64", (2, 700)), ("lora_B", "int64", (700, 2))]
BASE: Spec = [("w", "int64", (700, 700))]
SCALE = 3


def open_engine(child: Child, base: Spec) -> None:
    """A base that is written once and an adapter that comes often, each on its own channel."""
    from wsync import Replica

    child.make(base, 0)
    child.base, child.tensors = child.tensors, make_tensors(LORA, 0)  # type: ignore[attr-defined]
    child.publisher = Replica("policy", child.base, config=child.config)  # type: ignore[attr-defined]
    child.replica = Replica("adapter/x", child.tensors, config=child.config)


def merged(child: Child) -> str:
    """The base and the adapter, added once, on a copy."""
    base = child.base["w"].astype(np.int64)  # type: ignore[attr-defined]
    return sha((base + SCALE * child.tensors["lora_B"] @ child.tensors["lora_A"]).tobytes())


def base_sums(child: Child) -> dict[str, str]:
    return {name: sha(logical_bytes(value)) for name, value in child.base.items()}  # type: ignore[attr-defined]


def right_sum(base: Spec, adapter_seed: int) -> str:
    """The sum, of bytes that never went through wsync."""
    made = make_tensors(base, 1) | make_tensors(LORA, adapter_seed)
    return sha((made["w"].astype(np.int64) + SCALE * made["lora_B"] @ made["lora_A"]).tobytes())


def is_mapped_apart(child: Child) -> bool:
    """No live tensor lies in a mapping of a slot."""
    slots = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:wsync" in line:
            slots.append([int(end, 16) for end in line.split()[0].split("-")])
    assert slots, "the process has mapped its slots"
    spans = [(t.__array_interface__["data"][0], t.nbytes) for t in child.tensors.values()]
    return not any(begin < at + size and at < end for at, size in spans for begin, end in slots)


def test_case_A39_an_adapter_is_applied_once_and_keeps_no_view_of_a_slot(job: Job) -> None:
    """lora_A and lora_B are far more than a chunk, so that they arrive apart; two slots are used in turn."""
    trainer = job.trainer(LORA, channel="adapter/x")
    engine = job.replica(LORA, channel="adapter/x", host="B")
    for version in (1, 2, 3, 4, 5):
        trainer.publish(version, seed=version)
        trainer.wait_staged(version)
        assert engine.digest() == reference(LORA, version - 1), "staged is not applied, not even half of it"
        assert engine.commit_latest() == version
        assert engine.digest() == reference(LORA, version)
        assert engine.commit_latest() == 0
        assert engine.run(is_mapped_apart)


@pytest.mark.parametrize("dtype", ["int64", "int8"])
def test_case_A40_A42_a_base_stays_as_it_is_under_ten_adapters(job: Job, dtype: str) -> None:
    """W + s * B @ A exactly once for each adapter; the base's bytes (int8: a quantized one) never change."""
    base: Spec = [("w", dtype, (700, 700))]
    trainer, tuner, engine = job.trainer(base), job.trainer(LORA, channel="adapter/x"), job.member("B")
    engine.run(open_engine, base)
    trainer.publish(1)
    assert engine.call("publisher.wait_version", 1).version == 1
    assert engine.run(base_sums) == reference(base, 1)
    for version in range(1, 11):
        tuner.publish(version, seed=10 + version)
        assert engine.wait_version(version) == version
        assert engine.run(merged) == right_sum(base, 10 + version)
        assert engine.run(base_sums) == reference(base, 1)


# --- A49
def fill_later(child: Child, seed: int) -> None:
    """A worker thread, as a gather on another stream: the buffer is there only when it has ended."""

    def fill() -> None:
        time.sleep(0.2)
        child.refill(seed)

    child.filling = threading.Thread(target=fill)  # type: ignore[attr-defined]
    child.filling.start()  # type: ignore[attr-defined]


def publish_when_filled(child: Child, step: int) -> int:
    child.filling.join()  # type: ignore[attr-defined]
    return child.publish(step)


def digests_of(child: Child, version: int) -> dict[str, int]:
    return dict(child.publisher.digests(version))


def test_case_A49_what_is_published_is_what_is_there_and_stays(job: Job) -> None:
    spec: Spec = [("w", "float32", (300, 40)), ("b", "int64", (11,))]
    trainer, replica = job.trainer(spec), job.replica(spec, host="B")
    assert replica.wait_version(trainer.publish(1)) == 1
    trainer.run(fill_later, 2)
    assert replica.wait_version(trainer.run(publish_when_filled, 2)) == 2
    assert replica.digest() == reference(spec, 2)
    digests = trainer.run(digests_of, 2)
    for version in (3, 4, 5, 6):  # a learning rate of 0
        assert replica.wait_version(trainer.publish(version)) == version
        assert replica.digest() == reference(spec, 2)
        assert trainer.run(digests_of, version) == digests
    assert trainer.run(fill_later, 7) is None
    assert replica.wait_version(trainer.run(publish_when_filled, 7)) == 7
    assert replica.digest() == reference(spec, 7) != reference(spec, 2)


# --- B01
ORDERS = (
    ("policy", "reduce", "critic", "gather"),
    ("reduce", "critic", "gather", "policy"),
    ("critic", "reduce", "policy", "gather"),
)


def join_gloo(child: Child, rank: int, num_ranks: int, store: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)


def step_in_order(child: Child, rank: int, seed: int) -> tuple[int, list[int]]:
    """The rank's own collectives and its publishes of two channels, in its own order."""
    import torch
    import torch.distributed as dist

    total, gathered = torch.tensor([rank + seed]), [torch.zeros(1, dtype=torch.int64) for _ in ORDERS]
    for what in ORDERS[rank]:
        if what == "reduce":
            dist.all_reduce(total)
        elif what == "gather":
            dist.all_gather(gathered, torch.tensor([rank * seed]))
        else:
            publish(child, seed, what)
    return int(total.item()), [int(one.item()) for one in gathered]


def test_case_B01_collectives_of_the_trainer_interleave_in_any_order(job: Job) -> None:
    """Three gloo ranks, each with another order of two collectives and two channels; nobody waits for anybody."""
    pytest.importorskip("torch")
    spec: Spec = [("w", "float32", (9, 5)), ("b", "float32", (5, 1))]
    ranks = [job.member(has_torch=True) for _ in ORDERS]
    for rank, member in enumerate(ranks):
        member.begin("run", join_gloo, rank, len(ranks), str(job.folder / "store"))
    for member in ranks:
        member.end(BOUND_S)
    for rank, member in enumerate(ranks):
        for channel in ("policy", "critic"):
            member.run(open_rank, share(spec, rank, len(ranks)), rank, len(ranks), "torch", channel)
    workers = {channel: job.member() for channel in ("policy", "critic")}
    for channel, worker in workers.items():
        worker.run(open_worker, whole(spec), "numpy", channel)
    for seed in (1, 2, 3):
        for rank, member in enumerate(ranks):
            member.begin("run", step_in_order, rank, seed)
        assert [member.end(BOUND_S) for member in ranks] == [(3 + 3 * seed, [0, seed, 2 * seed])] * 3
        for worker in workers.values():
            assert worker.wait_version(seed, BOUND_S) == seed
            assert worker.digest() == expected(whole(spec), seed)
    for member in ranks:
        member.run(close_others)


# --- B02, B03
def publish_all(ranks: Sequence[Member], seed: int) -> int:
    for member in ranks:
        member.begin("run", publish, seed)
    versions = {member.end(BOUND_S) for member in ranks}
    assert len(versions) == 1
    return int(versions.pop())


def test_case_B02_sidecars_that_only_rank_0_has_reach_who_wants_them(job: Job) -> None:
    tensor: Spec = [("w.weight", "uint8", (8, 4))]
    sidecars: Spec = [(f"w.weight.{name}", "uint8", (16,)) for name in ("absmax", "quant_map", "quant_state")]
    ranks = [job.member() for _ in range(3)]
    for rank, member in enumerate(ranks):
        member.run(open_rank, share(tensor, rank, 3) + (whole(sidecars) if rank == 0 else []), rank, 3)
    wants, plain, more = job.member(), job.member("B"), job.member()
    both: Spec = [*tensor, *sidecars]
    nested: Spec = [*tensor, ("w.weight.nested_absmax", "uint8", (16,))]
    wants.run(open_worker, whole(both))
    plain.run(open_worker, whole(tensor))
    more.run(open_worker, whole(nested))
    for seed in (1, 2):
        version = publish_all(ranks, seed)
        for worker, spec in ((wants, both), (plain, tensor)):
            assert worker.wait_version(version, BOUND_S) == version
            assert worker.digest() == expected(whole(spec), seed)
    with pytest.raises(ManifestMismatch, match=r"held by no trainer rank: w\.weight\.nested_absmax"):
        more.wait_version(1, 5.0)


def test_case_B03_ranks_may_list_their_buffers_in_any_order(job: Job) -> None:
    """[a(4), b(2)] on rank 0, [b(2), a(4)] on rank 1, each with rows of its own."""
    a, b = ("a", "float32", (4,)), ("b", "int64", (2,))
    ranks, worker = [job.member(), job.member()], job.member("B")
    ranks[0].run(open_rank, share([a, b], 0, 2), 0, 2)
    ranks[1].run(open_rank, share([b, a], 1, 2), 1, 2)
    worker.run(open_worker, whole([b, a]))
    for seed in (1, 2):
        assert worker.wait_version(publish_all(ranks, seed), BOUND_S) == seed
        assert worker.digest() == expected(whole([b, a]), seed)


# --- C06
MIB = 1 << 20


def chunks_of(child: Child, version: int) -> tuple[int, int]:
    """Size and number of the chunks of the slot that this host has of the version."""
    holder, leased = child.replica._lease(protocol.LeaseVersion(version, version, 1.0))
    slot = holder.slot(leased.slot_id, timeout_s=5.0)
    found = slot.chunk_nbytes, slot.num_chunks
    child.replica._release(holder, leased, is_committed=False, pause_s=0.0, error="")
    return found


def test_case_C06_tensors_larger_than_a_chunk_and_chunks_of_other_sizes(job: Job) -> None:
    """1.5 MB and 1 MB + 1 B in chunks of 1 MB, as the sender's host says; receivers would have smaller and larger."""
    spec: Spec = [("half_more", "uint8", (3 * MIB // 2,)), ("one_more", "uint8", (MIB + 1,)), ("s", "int8", (1,))]
    trainer = job.trainer(spec, config={"chunk_nbytes": MIB})
    replicas = [
        job.replica(spec, host=host, config={"chunk_nbytes": size})
        for host, size in (("B", 4096), ("C", 4 * MIB), ("D", MIB))
    ]
    for version in (1, 2):
        trainer.publish(version, seed=version)
        for replica in replicas:
            assert replica.wait_version(version) == version
            assert replica.digest() == reference(spec, version)
            assert replica.verify() == []
            assert replica.run(chunks_of, version) == (MIB, 3)
