"""A recorded loader: an update by copying equals the engine's own load_weights, and what computes is never copied."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

from wsync.engine.overlap import check_wanted
from wsync.holding import Holding
from wsync.integrations.recorder import CHECKPOINT, Recording, record_loader
from wsync.manifest import TensorSpec

sys.path.insert(0, str(Path(__file__).parent.parent))
from _toy_engine import SIZES, ToyEngine, Variant, checkpoint, specs

RANKS = [(0, 1), (0, 2), (1, 2), (0, 4), (1, 4), (3, 4)]
VARIANTS = [
    Variant(),
    Variant(head="separate", experts="transposed"),
    Variant(head="copy", norm="plus_one"),
]


def raw(model: nn.Module) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in live(model)}


def live(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def pointers(model: nn.Module) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    return {name: (id(tensor), tensor.data_ptr(), tensor.stride()) for name, tensor in live(model)}


def reference(rank: tuple[int, int], variant: Variant, seed: int) -> dict[str, bytes]:
    engine = ToyEngine(*rank, variant)
    engine.load_weights(checkpoint(seed, specs(variant)).items())
    return raw(engine)


def record(engine: ToyEngine) -> Recording:
    return record_loader(engine, engine.load_weights, specs(engine.variant))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("rank", RANKS, ids=str)
def test_an_update_equals_the_engines_own_load_in_place(rank: tuple[int, int], variant: Variant) -> None:
    engine = ToyEngine(*rank, variant)
    before, addresses = raw(engine), pointers(engine)
    recording = record(engine)
    check_wanted(recording.holding)
    assert raw(engine) == before
    assert pointers(engine) == addresses
    for seed in (1, 1, 2, 2, 1):
        recording.load(checkpoint(seed, specs(variant)))
        assert raw(engine) == reference(rank, variant, seed)
        assert pointers(engine) == addresses
    assert all(raw(engine)[name] != old for name, old in before.items())
    assert recording.unwritten == recording.unseen == ()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("rank", RANKS, ids=str)
def test_the_holding_agrees_with_tagged_elements(rank: tuple[int, int], variant: Variant) -> None:
    """The oracle: every element of the checkpoint has a number, and the engine's own load carries them, 7 bits a time
    (whole numbers up to 256 are exact in bfloat16, also with one added)."""
    engine = ToyEngine(*rank, variant)
    recording = record(engine)
    wanted = specs(variant)
    numbers, total = {}, 1
    for spec in wanted:
        count = torch.Size(spec.shape).numel()
        numbers[spec.name] = torch.arange(total, total + count).reshape(spec.shape)
        total += count
        if spec.alias_of:
            numbers[spec.name] = numbers[spec.alias_of]
    seen = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in live(engine)}
    for shift in range(0, total.bit_length(), 7):
        fresh = ToyEngine(*rank, variant)
        digits = {n: ((number >> shift) & 127).to(torch.float32) for n, number in numbers.items()}
        dtypes = {spec.name: getattr(torch, spec.dtype) for spec in wanted}
        fresh.load_weights([(n, digit.to(dtypes[n])) for n, digit in digits.items()])
        for name, tensor in live(fresh):
            seen[name] += tensor.to(torch.int64) << shift
    found = mapped(recording.holding, numbers)
    for name in recording.recorded:
        assert torch.equal(found[name], seen[name]), name
    assert set(recording.recorded) | set(recording.rewritten) == set(recording.names.values())


def mapped(holding: Holding, numbers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Element numbers by local, read from the pieces one element at a time; 0 where it is padding."""
    found = {local.name: torch.full(local.shape, -1, dtype=torch.int64) for local in holding.locals}
    for local in holding.locals:
        for box in local.padding:
            found[local.name][tuple(slice(o, o + e) for o, e in zip(box.offset, box.extent, strict=True))] = 0
    for piece in holding.pieces:
        source = numbers[holding.tensors[piece.tensor].name]
        target = found[holding.locals[piece.place.local].name]
        for index in torch.cartesian_prod(*map(torch.arange, piece.region.extent)).reshape(
            piece.region.numel, len(piece.region.extent)
        ):
            place = list(piece.place.start)
            for step, dim, stride in zip(index.tolist(), piece.place.dims, piece.place.steps, strict=True):
                place[dim] += step * stride
            assert target[tuple(place)] == -1, "an element is written twice"
            target[tuple(place)] = source[
                tuple(o + i for o, i in zip(piece.region.offset, index.tolist(), strict=True))
            ]
    return found


def test_a_worker_wants_the_slices_that_it_consumes_and_no_others() -> None:
    recording = record(ToyEngine(1, 4))
    names = {spec.name for spec in recording.holding.tensors}
    assert "layers.0.moe.experts.1.gate_proj.weight" in names
    assert recording.unused == tuple(
        n for n in (s.name for s in specs()) if ".experts." in n and ".experts.1." not in n
    )
    wanted = sum(
        tensor.numel() * tensor.element_size()
        for tensor in {id(t): t for _, t in live(recording.engine.model)}.values()
    )
    padding = sum(box.numel * 2 for local in recording.holding.locals for box in local.padding)
    assert recording.holding.nbytes == wanted - padding


def test_padding_rows_are_named_and_stay_the_loaders() -> None:
    engine = ToyEngine(1, 2)
    recording = record(engine)
    (embed,) = [local for local in recording.holding.locals if local.name == "embed_tokens.weight"]
    rows = SIZES.vocab - 128
    assert [(box.offset, box.extent) for box in embed.padding] == [((rows, 0), (128 - rows, SIZES.hidden))]
    for seed in (1, 2):
        recording.load(checkpoint(seed, specs()))
        assert not engine.embed_tokens.weight[rows:].any()


def test_what_computes_falls_back_by_name_and_is_said() -> None:
    variant = Variant(norm="plus_one")
    recording = record(ToyEngine(0, 2, variant))
    names = ("layers.0.input_norm.weight", "layers.1.input_norm.weight")
    assert recording.fallback == recording.rewritten == names
    assert not set(names) & set(recording.recorded)
    assert {CHECKPOINT + name for name in names} < recording.locals.keys()
    assert "because it is computed (add): layers.0.input_norm.weight, layers.1.input_norm.weight" in recording.report()


# Small loaders into a parameter "p", step by step. A step is run if the tensors that it takes are given.

W = (TensorSpec("w", "float32", (8, 6)), TensorSpec("v", "float32", (8, 6)), TensorSpec("s", "float32", ()))
Load = Callable[..., object]


class Box(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1000)
        self.register_buffer("b", torch.full((3,), 7.0))
        self.register_buffer("h", torch.full((3,), 7.0, dtype=torch.bfloat16))
        self.other = nn.Module()
        self.other.q = nn.Parameter(torch.full((8, 6), 8.0))


def scratch(m: nn.Module, w: torch.Tensor, v: torch.Tensor) -> None:
    whole = torch.zeros(16, 6)
    whole[:8] = w
    whole[9:15] = v[1:7]
    m.p.copy_(whole)


def swapped(m: nn.Module, w: torch.Tensor) -> None:
    m.p.copy_(w)
    low = m.p[:4].clone()
    m.p[:4] = m.p[4:]
    m.p[4:] = low


def twice(m: nn.Module, w: torch.Tensor, v: torch.Tensor) -> None:
    m.p.copy_(w)
    m.p[2:5, 1:4] = v[:3, :3]


def through_list(m: nn.Module, w: torch.Tensor) -> None:
    for row in range(8):
        m.p[row] = torch.tensor([float(x) for x in w[row]])


def scattered(w: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(16, 6)
    whole[::2] = w
    return whole


def patched(w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    w[0] = v[0]
    return w


def changed_after(m: nn.Module, w: torch.Tensor) -> None:
    m.p.copy_(w)
    m.p[0].mul_(2)


COPIES: dict[str, tuple[tuple[int, ...], *tuple[Load, ...]]] = {
    "whole": ((8, 6), lambda m, w: m.p.copy_(w)),
    "assigned": ((8, 6), lambda m, w: m.p.__setitem__(..., w)),
    "transposed": ((6, 8), lambda m, w: m.p.data.copy_(w.t())),
    "transposed target": ((6, 8), lambda m, w: m.p.data.t().copy_(w)),
    "halves": ((16, 6), lambda m, w: m.p.data[8:].copy_(w), lambda m, v: m.p.data.chunk(2)[0].copy_(v)),
    "interleaved": ((16, 6), lambda m, w: m.p.data[0::2].copy_(w), lambda m, v: m.p.data[1::2].copy_(v)),
    "de-interleaved": ((4, 6), lambda m, w: m.p.copy_(w[1::2])),
    "per group": ((12, 6), lambda m, w: m.p.view(4, 3, 6)[:, :2].copy_(w.view(4, 2, 6))),
    "flattened": ((48,), lambda m, w: m.p.copy_(w.flatten())),
    "part of a flat block": ((30,), lambda m, w: m.p[5:25].copy_(w.view(-1)[9:29])),
    "unflattened": ((4, 2, 6), lambda m, w: m.p.copy_(w.view(4, 2, 6))),
    "other rows": ((6, 8), lambda m, w: m.p.copy_(w.reshape(6, 8))),
    "permuted heads": ((2, 6, 4), lambda m, w: m.p.copy_(w.unflatten(0, (2, 4)).permute(0, 2, 1))),
    "joined": ((8, 12), lambda m, w, v: m.p.copy_(torch.cat([w, v], dim=-1))),
    "stacked": ((8, 2, 6), lambda m, w, v: m.p.copy_(torch.stack([w, v], 1))),
    "padded": ((10, 7), lambda m, w: m.p.copy_(nn.functional.pad(w, (0, 1, 2, 0), value=3))),
    "picked": ((4, 6), lambda m, w: m.p.copy_(w.index_select(0, torch.tensor([6, 7, 1, 0])))),
    "indexed": ((8, 6), lambda m, w: m.p.copy_(w[torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])])),
    "repeated heads": ((16, 6), lambda m, w: m.p.copy_(w.repeat_interleave(2, 0))),
    "expanded": ((3, 8, 6), lambda m, w: m.p.copy_(w)),
    "cloned and put together": ((6, 8), lambda m, w: m.p.copy_(w.t().contiguous().view(6, 8).to("cpu"))),
    "data set": ((8, 6), lambda m, w: setattr(m.p, "data", w)),
    "parameter replaced": ((8, 6), lambda m, w: setattr(m, "p", nn.Parameter(w, requires_grad=False))),
    "buffer replaced": ((8, 6), lambda m, w: setattr(m, "b", w[0, :3]), lambda m, v: m.p.copy_(v)),
    "through scratch": ((16, 6), lambda m, w, v: scratch(m, w, v)),
    "halves swapped by the loader": ((8, 6), lambda m, w: swapped(m, w)),
    "written twice": ((8, 6), lambda m, w, v: twice(m, w, v)),
    "written over": ((8, 6), lambda m, w: m.p.copy_(w), lambda m, v: m.p.copy_(v)),
    "filled first": ((8, 6), lambda m: m.p.data.zero_(), lambda m, w: m.p[1:7, 2:].copy_(w[1:7, 2:])),
    "filled last": ((8, 6), lambda m, w: m.p.copy_(w), lambda m: m.p.data[6:].fill_(5)),
    "a constant": ((8, 6), lambda m, w: m.p[:5].copy_(w[:5]), lambda m: m.p[5:].copy_(torch.arange(6.0))),
    "a scalar": ((4,), lambda m, s: m.p.data[2].copy_(s), lambda m, w: m.p.data.__setitem__(3, w[7, 5])),
    "a scalar everywhere": ((4,), lambda m, s: m.p.data.fill_(s)),
    "many at once": ((8, 6), lambda m, w, v: torch._foreach_copy_([m.p.data, m.other.q.data], [w, v])),
    "a parameter copied": ((8, 6), lambda m, w: m.other.q.copy_(w), lambda m: m.p.copy_(m.other.q)),
    "every fourth": ((12,), lambda m, w: m.p.copy_(w.view(-1)[::4])),
    "a diagonal": ((6,), lambda m, w: m.p.copy_(w.diagonal())),
}  # fmt: skip
COMPUTES: dict[str, tuple[tuple[int, ...], *tuple[Load, ...]]] = {
    "added": ((8, 6), lambda m, w: m.p.copy_(1 + w)),
    "scaled": ((8, 6), lambda m, w, s: m.p.copy_(w * s)),
    "scaled afterwards": ((8, 6), lambda m, w: changed_after(m, w)),
    "summed up": ((8, 6), lambda m, w: m.p.copy_(w), lambda m, v: m.p.add_(v)),
    "source changed in place": ((8, 6), lambda m, w: m.p.copy_(w.mul_(3))),
    "into the result": ((8, 6), lambda m, w: torch.mul(w, 2, out=m.p.data)),
    "own values in between": ((8, 6), lambda m, w: m.other.q[:4].copy_(w[:4]), lambda m: m.p.copy_(m.other.q)),
    "through scattered scratch": ((16, 6), lambda m, w: m.p.copy_(scattered(w))),
    "cast by the copy": ((8, 6), lambda m, w: m.p.copy_(w), lambda m, v: m.h.copy_(v[0, :3])),
    "cast while joined": ((16, 6), lambda m, w, v: m.p.copy_(torch.cat([w.bfloat16(), v]))),
    "halves of elements": ((8, 6), lambda m, w: m.p.view(torch.int16)[:, :6].copy_(w.view(torch.int16)[:, 6:])),
    "source patched": ((8, 6), lambda m, w, v: m.p.copy_(patched(w, v))),
    "first of two writings computed elsewhere": (
        (8, 6),
        lambda m, w: m.other.q.copy_(w * 2),
        lambda m, w: m.p.copy_(w),
        lambda m, v: m.p[:4].copy_(v[:4]),
    ),
    "data set to computed": ((8, 6), lambda m, w: setattr(m.p, "data", w * 2)),
    "replaced by computed": ((8, 6), lambda m, w: setattr(m, "p", nn.Parameter(w * 2, requires_grad=False))),
    "cropped by padding": ((8, 5), lambda m, w: m.p.copy_(nn.functional.pad(w, (0, -1)))),
    "rounded": ((8, 6), lambda m, w: m.p.copy_(w.to(torch.bfloat16))),
    "bits": ((8, 6), lambda m, w: m.p.copy_((w.view(torch.int32) ^ 1).view(torch.float32))),
    "flipped": ((8, 6), lambda m, w: m.p.copy_(w.flip(0))),
    "permuted by values": ((8, 6), lambda m, w, v: m.p.copy_(w[v[:, 0].argsort()])),
    "sorted": ((8, 6), lambda m, w: m.p.copy_(w.sort(0).values)),
    "scattered": ((8, 6), lambda m, w: m.p.index_copy_(0, torch.arange(7, -1, -1), w)),
    "by a mask": ((8, 6), lambda m, w, v: m.p.copy_(torch.where(torch.eye(8, 6) > 0, w, v))),
    "a number": ((8, 6), lambda m, w: m.p.copy_(w), lambda m, s: m.b.fill_(float(s))),
    "a number decides": ((8, 6), lambda m, w, v, s: m.p.copy_(w if s > 0 else v)),
    "a list": ((8, 6), lambda m, w: through_list(m, w)),
    "numpy": ((8, 6), lambda m, w: m.p.copy_(torch.from_numpy(w.numpy() + 1))),
    "only some values": ((8, 6), lambda m, w: m.p.copy_(w[w[:, 0].abs() < 100])),
    "an attribute": ((8, 6), lambda m, v: m.p.copy_(v), lambda m, w: setattr(m, "kept", w.t().contiguous())),
    "derived from a parameter": ((6, 8), lambda m, w: m.other.q.copy_(w), lambda m: m.p.copy_(m.other.q.t() * 2)),
    "over a strided one": ((8, 6), lambda m, w: m.p[::2].copy_(w[:4]), lambda m, v: m.p[1:4].copy_(v[:3])),
}  # fmt: skip


@pytest.mark.parametrize("name", [*COPIES, *COMPUTES])
def test_a_loader_is_copied_or_run_and_the_result_is_its_own(name: str) -> None:
    shape, *steps = (COPIES | COMPUTES)[name]

    def loader(model: nn.Module) -> Callable[[Iterable[tuple[str, torch.Tensor]]], None]:
        def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            found = dict(weights)
            for step in steps:
                takes = list(inspect.signature(step).parameters)[1:]
                if found.keys() >= set(takes):
                    step(model, *(found[take] for take in takes))

        return load_weights

    model = Box(*shape)
    before, addresses, attributes = raw(model), pointers(model), dict(vars(model))
    recording = record_loader(model, loader(model), W, unwritten=["*"])
    check_wanted(recording.holding)
    assert raw(model) == before
    assert pointers(model) == addresses
    assert vars(model) == attributes
    assert bool(recording.fallback) == (name in COMPUTES), recording.report()
    for seed in (1, 2):
        values = checkpoint(seed, W)
        fresh = Box(*shape)
        with torch.no_grad():
            loader(fresh)({n: t.clone() for n, t in values.items()}.items())
        recording.load(values)
        assert raw(model) == raw(fresh) != before
        # The oracle: what the loader leaves as it is when it is run. No value is what was there before.
        untouched = dict(live(Box(*shape)))
        stays = {name: int((tensor == untouched[name]).sum()) for name, tensor in live(fresh)}
        for left in recording.unseen:
            del stays[left.names[0]]
        assert stays == dict.fromkeys(stays, 0) | {left.names[0]: left.num_elements for left in recording.unwritten}
        assert pointers(model) == addresses
        assert getattr(model, "kept", torch.zeros(1)).equal(getattr(fresh, "kept", torch.zeros(1)))
