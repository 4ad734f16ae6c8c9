"""What a recorded loader leaves as it is is refused by name, or declared and reported: never silently stale."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

from wsync.engine.overlap import check_wanted
from wsync.errors import ConfigError, ManifestMismatch
from wsync.integrations.recorder import record_loader
from wsync.manifest import TensorSpec

sys.path.insert(0, str(Path(__file__).parent.parent))
from _toy_engine import ToyEngine, checkpoint, specs

Weights = Iterable[tuple[str, torch.Tensor]]
Load = Callable[[nn.Module, torch.Tensor], object]

QKV = "layers.0.attn.qkv_proj.weight"
K = "layers.0.attn.k_proj.weight"
W = [TensorSpec("w", "float32", (8, 6))]


class One(nn.Module):
    """A parameter `p` of 8 x 6 in a module of its own, from which `step` takes the tensor `w`."""

    def __init__(self, step: Load, shape: tuple[int, ...] = (8, 6)) -> None:
        super().__init__()
        self.a = nn.Module()
        self.a.p = nn.Parameter(torch.full(shape, -1.0), requires_grad=False)
        self.step = step

    def load_weights(self, weights: Weights) -> None:
        for _, tensor in weights:
            self.step(self.a, tensor)


def refused(model: nn.Module, load_weights: Callable[[Weights], object], given: Iterable[TensorSpec]) -> str:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ManifestMismatch, match="leaves tensors of the engine as they are") as caught:
        record_loader(model, load_weights, given)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert caught.value.hint == "complete specs, or declare what may stay as it is: unwritten=[...]"
    return caught.value.problem.partition(" as they are: ")[2]


def test_a_tensor_that_is_left_out_of_specs_leaves_a_part_of_a_fused_one_and_is_refused() -> None:
    given = [spec for spec in specs() if spec.name != K]
    engine = ToyEngine(0, 2)
    assert refused(engine, engine.load_weights, given) == f"'{QKV}' (32 of 128 elements, the first in [8:12,0:8])"
    recording = record_loader(engine, engine.load_weights, given, unwritten=["layers.?.attn.qkv_proj.weight"])
    check_wanted(recording.holding)
    assert [(left.names, left.num_elements, left.num_total) for left in recording.unwritten] == [((QKV,), 32, 128)]
    assert f"stays as it is: {QKV}, 32 of 128 elements" in recording.report().splitlines()
    recording.load({n: t for n, t in checkpoint(1, specs()).items() if n != K})
    stays = engine.get_parameter(QKV) == -1
    assert stays[8:12].all()
    assert not stays[:8].any()
    assert not stays[12:].any()


def test_a_loader_that_copies_half_of_q_is_refused() -> None:
    engine = ToyEngine(0, 2)
    own = engine.layers[1].attn.qkv_proj

    def load(param: nn.Parameter, loaded: torch.Tensor, part: str) -> None:
        if part == "q":
            param.data[:4].copy_(loaded[:4])
        else:
            own.load(param, loaded, part)

    own.weight.weight_loader = load
    name = "layers.1.attn.qkv_proj.weight"
    assert refused(engine, engine.load_weights, specs()) == f"'{name}' (32 of 128 elements, the first in [4:8,0:8])"
    recording = record_loader(engine, engine.load_weights, specs(), unwritten=[name])
    assert f"stays as it is: {name}, 32 of 128 elements" in recording.report()


def test_what_is_written_by_nobody_is_refused_ten_by_name() -> None:
    engine = ToyEngine(0, 1)
    (embed,) = [spec for spec in specs() if spec.name == "embed_tokens.weight"]
    text = refused(engine, engine.load_weights, [embed])
    assert text.startswith("'layers.0.moe.experts.w13_weight' (768 of 768 elements), ")
    assert text.count(" elements)") == 10
    assert text.endswith(" elements) and 9 more")
    recording = record_loader(engine, engine.load_weights, [embed], unwritten=["norm.weight", "layers.*"])
    assert recording.report().count("stays as it is: ") == len(recording.unwritten) == 19


def test_rows_of_a_vocabulary_that_are_neither_loaded_nor_filled_are_declared() -> None:
    """Nobody but the user can know that they are padding, and not a part of the checkpoint that was forgotten."""

    def load(module: nn.Module, w: torch.Tensor) -> None:
        module.p.data[: len(w)].copy_(w)

    model = One(load, (64, 6))
    assert refused(model, model.load_weights, W) == "'a.p' (336 of 384 elements, the first in [8:64,0:6])"
    recording = record_loader(model, model.load_weights, W, unwritten=["a.p"])
    check_wanted(recording.holding)
    values = checkpoint(1, W)
    recording.load(values)
    assert torch.equal(model.a.p[:8], values["w"])
    assert (model.a.p[8:] == -1).all()


def test_a_tied_tensor_is_named_once_and_declared_by_any_of_its_names() -> None:
    model = One(lambda module, w: module.p[2:].copy_(w[2:]))
    model.head = nn.Module()
    model.head.p = model.a.p
    assert refused(model, model.load_weights, W) == "'a.p' = 'head.p' (12 of 48 elements, the first in [0:2,0:6])"
    for name in ("a.p", "head.p", "*"):
        recording = record_loader(model, model.load_weights, W, unwritten=[name])
        assert "stays as it is: a.p = head.p, 12 of 48 elements" in recording.report()
    assert record_loader(model, lambda weights: [model.a.p.copy_(w) for _, w in weights], W).unwritten == ()


def test_a_tensor_that_lies_in_another_one_is_named_itself() -> None:
    """The block of all three is a buffer that no checkpoint has; k is not loaded."""

    def load(module: nn.Module, w: torch.Tensor) -> None:
        module.q.copy_(w[:2])
        module.v.copy_(w[:2])

    model = One(load)
    model.a.p = None
    model.a.register_buffer("flat", torch.full((36,), -1.0), persistent=False)
    for number, name in enumerate("qkv"):
        part = model.a.flat[12 * number : 12 * number + 12].view(2, 6)
        setattr(model.a, name, nn.Parameter(part, requires_grad=False))
    assert refused(model, model.load_weights, W) == "'a.k' (12 of 12 elements)"
    recording = record_loader(model, model.load_weights, W, unwritten=["a.k"])
    assert [str(left) for left in recording.unwritten] == ["a.k, 12 of 12 elements"]
    model.a.register_parameter("all", nn.Parameter(model.a.flat, requires_grad=False))
    assert refused(model, model.load_weights, W) == "'a.all' = 'a.flat' (12 of 36 elements, the first in [12:24])"
    assert record_loader(model, model.load_weights, W, unwritten=["a.k"]).unwritten == recording.unwritten


def values_first(module: nn.Module, w: torch.Tensor) -> None:
    module.p[: int(w[0, 0]) * 0 + 4].copy_(w[:4])


COMPUTED: dict[str, tuple[Load, str]] = {
    "into a half": (lambda m, w: m.p[:4].copy_(w[:4] * 2), "24 of 48 elements, the first in [4:8,0:6]"),
    "into a half, cast": (lambda m, w: m.p[:, 3:].copy_(w[:, 3:].double()), "24 of 48 elements, the first in [0:8"),
    "into a half, as a result": (
        lambda m, w: torch.mul(w[:4], 2, out=m.p.data[4:]),
        "24 of 48 elements, the first in [0:4,0:6]",
    ),
    "a half, and all is scaled": (
        lambda m, w: m.p[:4].copy_(w[:4]) is m.p.mul_(2),
        "24 of 48 elements, the first in [4:8,0:6]",
    ),
    "added to what was there": (lambda m, w: m.p.add_(w), "48 of 48 elements"),
    "a half, bit by bit": (
        lambda m, w: m.p.data.view(torch.int32)[:4].copy_(w.view(torch.int32)[:4] ^ 1),
        "24 of 48 elements, the first in [4:8,0:6]",
    ),
    "a half, from scattered rows": (
        lambda m, w: m.p.view(4, 2, 6)[:, 0].copy_(w.view(2, 4, 6).sum(0)),
        "24 of 48 elements, the first in [1:2,0:6]",
    ),
    "zeros and a quarter": (
        lambda m, w: m.p[2:].zero_() is m.p[4:6].copy_(w[:2] * 2),
        "12 of 48 elements, the first in [0:2,0:6]",
    ),
    "zeros, and one is added": (lambda m, w: m.p.zero_() is m.p.add_(1), "48 of 48 elements"),
    "from nothing": (lambda m, w: m.p.normal_(), "48 of 48 elements"),
    "from what was there": (lambda m, w: m.p[:4].copy_(m.p[4:]), "24 of 48 elements, the first in [4:8,0:6]"),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPUTED)
def test_what_the_engines_own_loader_leaves_is_refused_too(name: str) -> None:
    step, text = COMPUTED[name]
    model = One(step)
    assert refused(model, model.load_weights, W).startswith(f"'a.p' ({text}")


def test_what_is_computed_from_nothing_stays_as_it_is_and_is_not_written_halfway() -> None:
    def load(module: nn.Module, w: torch.Tensor) -> None:
        module.p.copy_(w)
        module.ones.zero_().add_(1)

    model = One(load)
    model.a.ones = nn.Parameter(torch.ones(3), requires_grad=False)
    recording = record_loader(model, model.load_weights, W, unwritten=["a.ones"])
    assert [str(left) for left in recording.unwritten] == ["a.ones, 3 of 3 elements"]
    recording.load(checkpoint(1, W))
    assert (model.a.ones == 1).all()


def test_a_module_that_is_wholly_left_to_the_engines_loader_is_written_by_it() -> None:
    """All is computed or filled; a bias beside it, which nobody writes, is not excused by that."""

    def load(module: nn.Module, w: torch.Tensor) -> None:
        module.p[:4].copy_(w[:4] * 2)
        module.p[4:].fill_(1)
        torch.amax(w, 1, out=module.scale.data)
        module.sum.copy_(w.sum())

    model = One(load)
    model.a.sum = nn.Parameter(torch.tensor(-1.0), requires_grad=False)
    model.a.scale = nn.Parameter(torch.full((8,), -1.0), requires_grad=False)
    recording = record_loader(model, model.load_weights, W)
    assert recording.rewritten == ("a.p", "a.scale", "a.sum")
    assert recording.unwritten == recording.unseen == ()
    model.a.bias = nn.Parameter(torch.full((8,), -1.0), requires_grad=False)
    assert refused(model, model.load_weights, W) == "'a.bias' (8 of 8 elements)"


UNSEEN: dict[str, tuple[Load, int]] = {
    "indexed": (lambda m, w: m.p.index_copy_(0, torch.tensor([0, 1, 2]), w[:3]), 48),
    "in parts of elements": (lambda m, w: m.p.data.view(torch.int16)[:4].copy_(w.view(torch.int16)[:4]), 48),
    "values made up": (values_first, 24),
    "stopped for values": (lambda m, w: m.p[:4].copy_(torch.tensor(w[:4].tolist())), 48),
}


@pytest.mark.parametrize("name", UNSEEN)
@pytest.mark.parametrize("unwritten", [[], ["a.p"]])
def test_where_it_cannot_be_seen_what_the_engines_loader_writes_it_counts_as_written_and_is_said(
    name: str, unwritten: list[str]
) -> None:
    step, count = UNSEEN[name]
    model = One(step)
    recording = record_loader(model, model.load_weights, W, unwritten=unwritten)
    assert recording.fallback == ("w",)
    assert [str(left) for left in recording.unseen] == [f"a.p, {count} of 48 elements"]
    assert recording.unwritten == ()
    assert (
        f"into which it may write besides, which cannot be seen: 1\n  a.p, {count} of 48 elements" in recording.report()
    )


def test_made_up_values_excuse_what_is_written_with_them_only() -> None:
    model = One(values_first)
    model.b = nn.Module()
    model.b.p = nn.Parameter(torch.full((3,), -1.0), requires_grad=False)
    assert refused(model, model.load_weights, W) == "'b.p' (3 of 3 elements)"


def test_constants_count_and_reach_a_module_that_gets_nothing_else() -> None:
    def load_weights(weights: Weights) -> None:
        for _, tensor in weights:
            model.a.p.copy_(tensor)
        model.b.bias.zero_()

    model, told = One(lambda m, w: None), list[tuple[str, ...]]()
    model.b = nn.Module()
    model.b.register_buffer("bias", torch.full((3,), -1.0))
    recording = record_loader(model, load_weights, W, finalize=told.append)
    assert recording.unwritten == ()
    recording.load(checkpoint(1, W))
    assert not model.b.bias.any()
    assert told == [("a", "b")]


def test_persistent_buffers_count_and_others_do_not() -> None:
    model = One(lambda module, w: module.p.copy_(w))
    model.a.register_buffer("cache", torch.zeros(4), persistent=False)
    assert record_loader(model, model.load_weights, W).unwritten == ()
    model.a.register_buffer("scale", torch.zeros(()))
    model.a.register_buffer("none", torch.zeros(0))
    assert refused(model, model.load_weights, W) == "'a.scale' (1 of 1 elements)"


@pytest.mark.parametrize("is_whole", [True, False])
def test_memory_with_gaps_is_followed_as_well(is_whole: bool) -> None:
    model = One(lambda module, w: module.p[: 8 if is_whole else 5].copy_(w[: 8 if is_whole else 5]))
    model.a.p = nn.Parameter(torch.zeros(8, 16)[:, :6], requires_grad=False)
    if is_whole:
        recording = record_loader(model, model.load_weights, W)
        assert recording.fallback == ("w",)
        assert recording.unseen == ()
    else:
        assert refused(model, model.load_weights, W) == "'a.p' (18 of 48 elements, the first in [5:8,0:6])"


@pytest.mark.parametrize("rows", [2, 1])
def test_tensors_that_share_a_part_of_their_memory_are_followed_as_well(rows: int) -> None:
    def load(module: nn.Module, w: torch.Tensor) -> None:
        module.p.copy_(w[:4])
        module.q[4 - rows :].copy_(w[4 - rows : 4])

    model, memory = One(load), torch.full((6, 6), -1.0)
    model.a.p = nn.Parameter(memory[:4], requires_grad=False)
    model.a.q = nn.Parameter(memory[2:], requires_grad=False)
    if rows == 2:
        assert record_loader(model, model.load_weights, W).fallback == ("w",)
    else:
        assert refused(model, model.load_weights, W).startswith("'a.q' (6 of 24 elements")


def test_an_entry_that_matches_nothing_is_refused() -> None:
    model = One(lambda module, w: module.p.copy_(w))
    model.a.register_buffer("cache", torch.zeros(4), persistent=False)
    for wrong in ("b.*", "a.cache", "a"):
        with pytest.raises(ConfigError, match=f"'{wrong}', which is no parameter or persistent buffer; .*patterns"):
            record_loader(model, model.load_weights, W, unwritten=["a.p", wrong])
    model.a.weight = model.a.p
    with pytest.raises(ConfigError, match=r"instead of 'a.wieght' there is 'a.weight'"):
        record_loader(model, model.load_weights, W, unwritten=["a.wieght"])
    assert record_loader(model, model.load_weights, W, unwritten=["a.p"]).unwritten == ()
