"""Cases that need no second process: what is agreed before a byte moves, and what live tensors are read as."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from wsync.engine.lanes import LanePlanner, plan_lanes
from wsync.engine.tensors import live_tensors
from wsync.errors import ManifestMismatch
from wsync.holding import Holding, HoldingBuilder, Region
from wsync.manifest import Manifest, TensorSpec, check_agreement, lane_of
from wsync.memory import Slot

MODELS = Path(__file__).parents[3] / "shared" / "data" / "models"
"""Real checkpoints' names and shapes, where a checkout has them beside it."""

FP8 = [TensorSpec("w.weight", "float8_e4m3fn", (256, 256)), TensorSpec("w.weight_scale_inv", "float32", (2, 2))]


def holding_of(specs: Iterable[TensorSpec]) -> Holding:
    """Every tensor whole, in a local of its own name; an alias has none."""
    built = HoldingBuilder()
    for spec in specs:
        built.tensor(spec.name, spec.dtype, spec.shape, spec.alias_of)
        if not spec.alias_of:
            built.local(spec.name, spec.dtype, spec.shape)
            built.piece(spec.name, Region.whole(spec.shape), spec.name, (0,) * len(spec.shape))
    return built.build()


def moved_names(trainer: Holding, wanted: Holding) -> list[str]:
    plan = plan_lanes({0: trainer}, {wanted.digest(): wanted})
    return [fragment.tensor for lane in plan.lanes for fragment in lane.fragments]


def test_case_A02_a_tied_model_s_alias_is_covered_and_moves_once() -> None:
    """Qwen3-0.6B: of 311 names lm_head is an alias, for which the receiver has no slot; and an untied mtp.lm_head."""
    path = MODELS / "manifests" / "qwen3_0_6b.tsv"
    if not path.exists():
        pytest.skip("no real manifest of Qwen3-0.6B beside this checkout")
    specs = []
    for line in path.read_text().splitlines()[1:]:
        name, dtype, dims, kind = line.split("\t")
        if kind in ("param", "alias"):
            alias_of = "model.embed_tokens.weight" if kind == "alias" else ""
            specs.append(TensorSpec(name, dtype, tuple(int(size) for size in dims.split("x")), alias_of))
    assert len(specs) == 311
    assert [spec.name for spec in specs if spec.alias_of] == ["lm_head.weight"]
    extra = TensorSpec("mtp.lm_head.weight", "bfloat16", (151936, 1024))
    trainer = holding_of([*specs, extra])
    wanted = holding_of([*(spec for spec in specs if not spec.alias_of), extra])
    plan = plan_lanes({0: trainer}, {wanted.digest(): wanted})
    assert plan.unwanted == ()
    assert sorted(moved_names(trainer, wanted)) == sorted(spec.name for spec in wanted.tensors)
    assert plan.nbytes == sum(spec.nbytes for spec in wanted.tensors)
    without = holding_of(spec for spec in specs if not spec.alias_of)
    assert plan_lanes({0: trainer}, {without.digest(): without}).unwanted == ("mtp.lm_head.weight",)


@pytest.mark.parametrize("lacking", [0, 1])
def test_case_A19_weight_and_scale_are_wanted_together(lacking: int) -> None:
    """fp8 [256, 256] with a scale [2, 2]: the one that the trainer does not send is named, nothing is planned."""
    sent = [FP8[1 - lacking]]
    name = FP8[lacking].name
    assert sorted(moved_names(holding_of(FP8), holding_of(FP8))) == [spec.name for spec in FP8]
    with pytest.raises(ManifestMismatch, match=f"wanted, but held by no trainer rank: {name}"):
        moved_names(holding_of(sent), holding_of(FP8))
    with pytest.raises(ManifestMismatch, match=f"tensors that the trainer does not publish: {name}"):
        check_agreement(Manifest(tuple(sent)), Manifest(tuple(FP8)), channel="policy")


def test_case_A21_a_slot_that_was_reinterpreted_in_place_is_another_manifest() -> None:
    """e4m3fn, then fnuz, in the same parameter over the same memory."""
    torch = pytest.importorskip("torch")
    slot = torch.nn.Parameter(torch.zeros(4).to(torch.float8_e4m3fn), requires_grad=False)
    former = live_tensors({"w": slot}, None, is_target=True)
    assert former.manifest.tensors[0].dtype == "float8_e4m3fn"
    slot.data = slot.data.view(torch.float8_e4m3fnuz)
    now = live_tensors({"w": slot}, None, is_target=True, former=former)
    assert now.manifest.tensors[0].dtype == "float8_e4m3fnuz"


def test_case_A25_weights_that_were_verified_can_be_released() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.ones(6, 4)
    live_tensors({"w": weight}, None, is_target=True).digests()
    weight.untyped_storage().resize_(0)
    assert weight.untyped_storage().nbytes() == 0


def rounded(value: float) -> int:
    """bfloat16 bits of a finite float, to nearest, ties to even, in integers."""
    bits = int(np.float32(value).view(np.uint32))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_case_A26_A27_one_tensor_is_cast_once_and_another_stays_exact(dtype: str) -> None:
    """A router bias [512, 511, 510, 509] stays fp32 beside weights that travel as bfloat16."""
    torch = pytest.importorskip("torch")
    bias = torch.tensor([512.0, 511.0, 510.0, 509.0])
    weight = torch.cat([bias, torch.linspace(-3.0, 3.0, 501), 1 + torch.arange(64) / 512]).to(getattr(torch, dtype))
    source = {"bias": bias, "w": weight}
    live = live_tensors(source, None, is_target=False, wire_dtypes={"w": "bfloat16"})
    assert [spec.dtype for spec in live.manifest.tensors] == ["float32", "bfloat16"]
    lane = lane_of(live.manifest)
    slot = Slot.reserve(lane.nbytes, 4096)
    live.pack(slot, lane, lambda nbytes: None)
    packed = [bytes(slot.data[place.offset : place.offset + place.nbytes]) for place in lane.placements]
    slot.close()
    assert np.frombuffer(packed[0], np.float32).tolist() == [512.0, 511.0, 510.0, 509.0]
    assert np.frombuffer(packed[1], np.uint16).tolist() == [rounded(value) for value in weight.tolist()]
    assert [rounded(value) << 16 for value in bias.tolist()] == [
        int(np.float32(value).view(np.uint32)) for value in (512.0, 512.0, 510.0, 508.0)
    ]  # what a blanket cast would make of the bias


def test_case_B02_the_sidecars_of_a_real_index_are_on_rank_0_only() -> None:
    """Molmo 7B nf4: every quantized weight has three; the other ranks have never heard of them."""
    path = MODELS / "molmo7b_nf4_sidecars" / "model.safetensors.index.json"
    if not path.exists():
        pytest.skip("no real index of Molmo 7B nf4 beside this checkout")
    names = sorted(json.loads(path.read_text())["weight_map"])
    sidecars = [name for name in names if any(part in name for part in ("absmax", "quant_map", "quant_state"))]
    assert len(sidecars) == 336 == 3 * len({name.partition(".weight.")[0] for name in sidecars})

    def rank(first: int) -> Holding:
        built = HoldingBuilder()
        for name in names:
            is_sidecar = name in sidecar_set
            if is_sidecar and first:
                continue
            rows = 4 if is_sidecar else 2
            built.tensor(name, "uint8", (4, 2))
            built.local(name, "uint8", (rows, 2))
            built.piece(name, Region((0 if is_sidecar else first, 0), (rows, 2)), name, (0, 0))
        return built.build()

    sidecar_set = set(sidecars)
    held = {0: rank(0), 1: rank(2)}
    wanted = holding_of(TensorSpec(name, "uint8", (4, 2)) for name in names)
    plan = plan_lanes(held, {wanted.digest(): wanted})
    assert plan.nbytes == 8 * len(names)
    assert {f.tensor for lane in plan.of_source(1) for f in lane.fragments} == set(names) - sidecar_set
    with pytest.raises(ManifestMismatch, match="held by no trainer rank: ") as caught:
        plan_lanes({1: held[1]}, {wanted.digest(): wanted})
    assert sidecars[0] in str(caught.value)
    assert "and 326 more" in str(caught.value)


def test_case_D02_the_real_index_is_planned_in_under_a_second_and_once() -> None:
    """Qwen3.5-MoE: 22,213 names on both sides, two trainer ranks."""
    path = MODELS / "qwen3_5_moe_vlm" / "model.safetensors.index.json"
    if not path.exists():
        pytest.skip("no real index of Qwen3.5-MoE beside this checkout")
    names = list(json.loads(path.read_text())["weight_map"])
    assert len(names) == 22_213

    def rows(first: int, count: int) -> Holding:
        built = HoldingBuilder()
        for name in names:
            built.tensor(name, "bfloat16", (4, 2))
            built.local(name, "bfloat16", (count, 2))
            built.piece(name, Region((first, 0), (count, 2)), name, (0, 0))
        return built.build()

    held, wanted = {0: rows(0, 2), 1: rows(2, 2)}, rows(0, 4)
    planner, digest = LanePlanner(), wanted.digest()
    started = time.process_time()
    plan = planner.plan(held, {digest: wanted})
    assert time.process_time() - started < 1
    assert plan.nbytes == 22_213 * 16
    assert planner.plan(dict(held), {digest: wanted}) is plan
