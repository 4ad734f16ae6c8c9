"""Recorded loaders around what engines do to their weights: ties, finalizing, odd memory, and what cannot be told."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from wsync.engine.overlap import check_wanted
from wsync.errors import ManifestMismatch
from wsync.integrations.recorder import CHECKPOINT, record_loader
from wsync.manifest import TensorSpec

sys.path.insert(0, str(Path(__file__).parent.parent))
from _toy_engine import ToyEngine, Variant, checkpoint, specs

Weights = Iterable[tuple[str, torch.Tensor]]


class Model(nn.Module):
    """Modules with a parameter `weight` each; `load_weights` copies what has a parameter's name into it."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            module = nn.Module()
            module.weight = nn.Parameter(torch.full(shape, -1.0), requires_grad=False)
            self.add_module(name, module)

    def load_weights(self, weights: Weights) -> None:
        params = dict(self.named_parameters(remove_duplicate=False))
        for name, tensor in weights:
            if name in params:
                params[name].data.copy_(tensor)

    def specs(self) -> list[TensorSpec]:
        named = self.named_parameters(remove_duplicate=False)
        return [TensorSpec(name, "float32", tuple(param.shape)) for name, param in named]


def tied(*, is_tied: bool) -> Model:
    model = Model(embed_tokens=(8, 4), lm_head=(8, 4))
    if is_tied:
        model.lm_head.weight = model.embed_tokens.weight
    return model


TIED = (TensorSpec("embed_tokens.weight", "float32", (8, 4)),)
ALIAS = TensorSpec("lm_head.weight", "float32", (8, 4), "embed_tokens.weight")


@pytest.mark.parametrize("is_tied", [True, False])
def test_case_A01_a_head_follows_the_embedding(is_tied: bool) -> None:
    """The second update names the embedding only; a head that was cloned has pieces of its own of it."""
    model = tied(is_tied=is_tied)
    recording = record_loader(model, model.load_weights, (*TIED, ALIAS))
    recording.load(checkpoint(1, (*TIED, ALIAS)))
    values = checkpoint(2, TIED)
    recording.load(values)
    assert torch.equal(model.embed_tokens.weight, values["embed_tokens.weight"])
    assert torch.equal(model.lm_head.weight, values["embed_tokens.weight"])
    same_memory = model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
    assert same_memory == is_tied
    names = recording.names
    assert (names["lm_head.weight"] == names["embed_tokens.weight"]) == is_tied
    assert len(recording.holding.locals) == 2 - is_tied
    assert len(recording.holding.tensors) == 1


def test_case_A02_an_alias_is_covered_and_another_head_is_not_one() -> None:
    engine = ToyEngine(0, 1)
    engine.mtp = nn.Module()
    engine.mtp.lm_head = Model(part=(150, 8)).part
    params = {"mtp.lm_head.weight": engine.mtp.lm_head.weight}

    def load_weights(weights: Weights) -> None:
        def rest() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if name in params:
                    params[name].copy_(tensor)
                else:
                    yield name, tensor

        engine.load_weights(rest())

    extra = TensorSpec("mtp.lm_head.weight", "float32", (150, 8))
    recording = record_loader(engine, load_weights, (*specs(), extra))
    assert recording.unused == recording.unwritten == ()
    names = [spec.name for spec in recording.holding.tensors]
    assert "mtp.lm_head.weight" in names
    assert "lm_head.weight" not in names


@pytest.mark.parametrize("skips_head", [True, False])
def test_case_A03_a_tie_that_the_checkpoint_has_not_is_named(skips_head: bool) -> None:
    model = tied(is_tied=True)
    separate = TensorSpec("lm_head.weight", "float32", (8, 4))

    def load_weights(weights: Weights) -> None:
        model.load_weights(item for item in weights if not (skips_head and item[0] == "lm_head.weight"))

    with pytest.raises(ManifestMismatch, match=r"'embed_tokens.weight' and 'lm_head.weight' are two tensors"):
        record_loader(model, load_weights, (*TIED, separate))
    untied = tied(is_tied=False)
    record_loader(untied, untied.load_weights, (*TIED, separate))


def test_case_A06_halves_that_finalize_swaps_are_right_after_every_update() -> None:
    """E=2, I=3, H=4; v1 twice, then v2 three times."""
    num_experts, half, hidden = 2, 3, 4
    model = Model(experts=(num_experts, 2 * half, hidden))
    wanted = [
        TensorSpec(f"experts.{e}.{n}_proj.weight", "float32", (half, hidden))
        for e in range(num_experts)
        for n in ("gate", "up")
    ]

    def load_weights(weights: Weights) -> None:
        for name, tensor in weights:
            start = half * ("up_proj" in name)
            model.experts.weight.data[int(name.split(".")[1]), start : start + half].copy_(tensor)

    def finalize(modules: tuple[str, ...]) -> None:
        assert modules == ("experts",)
        weight = model.experts.weight
        weight.copy_(torch.cat([weight[:, half:], weight[:, :half]], 1))

    recording = record_loader(model, load_weights, wanted, finalize=finalize)
    for seed in (1, 1, 2, 2, 2):
        values = checkpoint(seed, wanted)
        recording.load(values)
        for e in range(num_experts):
            up, gate = model.experts.weight[e, :half], model.experts.weight[e, half:]
            assert torch.equal(up, values[f"experts.{e}.up_proj.weight"])
            assert torch.equal(gate, values[f"experts.{e}.gate_proj.weight"])


class Quantized(Model):
    """After a load: the weight transposed, the scale [2, 2] repacked to [4], and a flag that refuses to do it twice."""

    def __init__(self) -> None:
        super().__init__(a=(4, 6))
        self.a.scale = nn.Parameter(torch.full((2, 2), -1.0), requires_grad=False)
        self.loadable = self.a.scale
        self.packed = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.is_final = False

    def finalize(self, modules: tuple[str, ...]) -> None:
        assert not self.is_final
        self.is_final = True
        self.a.weight.data = self.a.weight.data.t()
        self.packed.copy_(self.a.scale.t().flatten() * 2)
        self.a.scale = self.packed

    def restore(self, modules: tuple[str, ...]) -> None:
        if self.is_final:
            self.a.weight.data = self.a.weight.data.t()
            self.a.scale = self.loadable
            self.is_final = False


def test_case_A20_restore_load_finalize_equals_a_fresh_engine() -> None:
    model = Quantized()
    wanted = [TensorSpec("a.weight", "float32", (4, 6)), TensorSpec("a.scale", "float32", (2, 2))]
    recording = record_loader(  # finalize writes 'packed', the loader does not
        model, model.load_weights, wanted, restore=model.restore, finalize=model.finalize, unwritten=["packed"]
    )
    address = model.a.weight.data_ptr()
    for seed in (1, 2, 2, 3):
        recording.load(checkpoint(seed, wanted))
        fresh = Quantized()
        fresh.load_weights(checkpoint(seed, wanted).items())
        fresh.finalize(("a",))
        assert torch.equal(model.a.weight, fresh.a.weight)
        assert torch.equal(model.a.scale, fresh.a.scale)
        assert model.a.scale.shape == (4,)
        assert (model.a.weight.data_ptr(), model.a.scale.data_ptr()) == (address, model.packed.data_ptr())
    with pytest.raises(ManifestMismatch, match=r"'a\.\w+' is \[.*was recorded as.*restore"):
        _ = recording.locals


def test_case_A22_a_derived_tensor_is_refreshed_where_its_consumer_holds_it() -> None:
    model = Model(attention=(4, 6))
    model.attention.derived = model.attention.weight.t().contiguous()
    captured = model.attention.derived

    def finalize(modules: tuple[str, ...]) -> None:
        for path in modules:
            module = model.get_submodule(path)
            module.derived.copy_(module.weight.t())

    recording = record_loader(model, model.load_weights, model.specs(), finalize=finalize)
    for seed in (1, 2):
        values = checkpoint(seed, model.specs())
        recording.load(values)
        assert torch.equal(captured, values["attention.weight"].t())
        assert model.attention.derived.data_ptr() == captured.data_ptr()


def test_case_A47_finalize_runs_on_modules_that_received_data() -> None:
    model, told = Model(policy=(3, 2), draft=(3, 2)), list[tuple[str, ...]]()
    recording = record_loader(model, model.load_weights, model.specs(), restore=told.append, finalize=told.append)
    assert told == []
    values = checkpoint(1, model.specs())
    recording.load({"policy.weight": values["policy.weight"]})
    assert told == [("policy",)] * 2
    with recording.installing(["draft.weight"]) as live:
        assert told[2:] == [("draft",)]
        live["draft.weight"].zero_()
    assert told[2:] == [("draft",)] * 2
    with pytest.raises(ValueError, match="stop"), recording.installing():
        raise ValueError("stop")
    assert told[4:] == [("policy", "draft")], "what was not loaded is not finalized"


def test_a_module_falls_back_as_a_whole_and_is_finalized() -> None:
    """Weight and scale of one module belong together; the other module is copied."""
    model, told = Model(a=(4, 6), b=(4, 6)), list[tuple[str, ...]]()
    model.a.scale = nn.Parameter(torch.ones(2), requires_grad=False)

    def load_weights(weights: Weights) -> None:
        for name, tensor in weights:
            model.get_parameter(name).data.copy_(tensor * 2 if name == "a.scale" else tensor)

    wanted = model.specs()
    recording = record_loader(model, load_weights, wanted, finalize=told.append)
    assert recording.fallback == ("a.scale", "a.weight")
    assert recording.recorded == ("b.weight",)
    assert recording.reasons == {"a.scale": "it is computed (mul)"}
    with recording.installing([CHECKPOINT + "a.scale", CHECKPOINT + "a.weight"]):
        for buffer in recording.buffers.values():
            buffer.fill_(3)
    assert told == [("a",)]
    assert (model.a.weight == 3).all()
    assert (model.a.scale == 6).all()
    assert (model.b.weight == -1).all()


def test_values_that_are_asked_for_concern_only_what_is_written_from_them() -> None:
    model = Model(**{f"m{i}": (3, 2) for i in range(3)})

    def load_weights(weights: Weights) -> None:
        for name, tensor in weights:
            if name.endswith("scale"):
                model.get_parameter(name.replace("scale", "weight"))[0].fill_(float(tensor) + 1)
            else:
                model.get_parameter(name).copy_(tensor)

    wanted = [*model.specs(), TensorSpec("m1.scale", "float32", ())]
    recording = record_loader(model, load_weights, wanted)
    assert recording.fallback == ("m1.scale", "m1.weight")
    assert recording.recorded == ("m0.weight", "m2.weight")
    for seed in (1, 2):
        values = checkpoint(seed, wanted)
        recording.load(values)
        assert (model.m1.weight[0] == values["m1.scale"] + 1).all()
        assert torch.equal(model.m1.weight[1:], values["m1.weight"][1:])


def test_a_tensor_that_stops_the_loader_is_left_to_it_and_restoring_is_then_refused() -> None:
    model = Model(a=(3, 2), b=(3, 2))

    def load_weights(weights: Weights) -> None:
        for name, tensor in weights:
            model.get_parameter(name).copy_(torch.tensor(tensor.tolist()) if name == "a.weight" else tensor)

    recording = record_loader(model, load_weights, model.specs())
    assert (recording.fallback, recording.recorded) == (("a.weight",), ("b.weight",))
    values = checkpoint(1, model.specs())
    recording.load(values)
    assert torch.equal(model.a.weight, values["a.weight"])
    with pytest.raises(ManifestMismatch, match=r"into which modules 'a.weight' is loaded"):
        record_loader(model, load_weights, model.specs(), finalize=print)


def test_what_waits_for_a_tensor_that_stops_the_loader_is_left_to_it_too() -> None:
    model, waiting = Model(a=(3, 2), b=(3, 2)), dict[str, torch.Tensor]()

    def load_weights(weights: Weights) -> None:
        for name, tensor in weights:
            if name == "a.scale":
                model.a.weight.copy_(waiting.pop("a.weight") * float(tensor.numpy()))
            elif name == "a.weight":
                waiting[name] = tensor
            else:
                model.get_parameter(name).copy_(tensor)

    wanted = [*model.specs(), TensorSpec("a.scale", "float32", ())]
    recording = record_loader(model, load_weights, wanted)
    assert (recording.fallback, recording.recorded) == (("a.scale", "a.weight"), ("b.weight",))
    values = checkpoint(1, wanted)
    recording.load(values)
    assert torch.equal(model.a.weight, values["a.weight"] * values["a.scale"])


def test_a_computed_tie_takes_both_of_its_modules_along() -> None:
    model = tied(is_tied=True)
    model.lm_head.bias = nn.Parameter(torch.zeros(8), requires_grad=False)

    def load_weights(weights: Weights) -> None:
        model.load_weights((name, tensor * 2 if name.endswith("weight") else tensor) for name, tensor in weights)

    recording = record_loader(model, load_weights, (*TIED, TensorSpec("lm_head.bias", "float32", (8,))))
    assert recording.fallback == ("embed_tokens.weight", "lm_head.bias")


def test_parameters_that_share_a_part_of_their_memory_are_left_to_the_loader() -> None:
    model = Model(a=(4, 3), b=(4, 3), c=(2, 3))
    memory = torch.full((6, 3), -1.0)
    model.a.weight = nn.Parameter(memory[:4], requires_grad=False)
    model.b.weight = nn.Parameter(memory[2:], requires_grad=False)

    def load_weights(weights: Weights) -> None:
        for name, tensor in weights:
            rows = slice(2, 4) if name == "b.weight" else slice(None)
            model.get_parameter(name)[rows] = tensor[rows]

    recording = record_loader(model, load_weights, model.specs())
    assert (recording.fallback, recording.recorded) == (("a.weight", "b.weight"), ("c.weight",))
    assert recording.reasons == {"a.weight": "it shares a part of its memory with 'b.weight'"}
    values = checkpoint(1, model.specs())
    recording.load(values)
    assert torch.equal(memory, torch.cat([values["a.weight"], values["b.weight"][2:]]))


def test_a_loader_that_fails_by_itself_is_an_error() -> None:
    model = Model(a=(3, 2))

    def load_weights(weights: Weights) -> None:
        raise KeyError(dict(weights)["b.weight"])

    with pytest.raises(ManifestMismatch, match=r"cannot be recorded.*b\.weight"):
        record_loader(model, load_weights, model.specs())


def test_parameters_of_any_memory() -> None:
    """Transposed storage, two views of one storage, no dims, no elements; and what nobody writes or reads is named."""
    model = Model(a=(6, 4), q=(4, 3), k=(2, 3), none=(0, 3), left=(2, 2))
    model.a.weight = nn.Parameter(torch.full((4, 6), -1.0).t(), requires_grad=False)
    fused = torch.full((6, 3), -1.0)
    model.q.weight = nn.Parameter(fused[:4], requires_grad=False)
    model.k.weight = nn.Parameter(fused[4:], requires_grad=False)
    model.one = nn.Module()
    model.one.weight = nn.Parameter(torch.tensor(-1.0), requires_grad=False)
    wanted = [s for s in model.specs() if s.name != "left.weight"]
    given = [*wanted, TensorSpec("nobody", "float32", (2,))]
    recording = record_loader(model, model.load_weights, given, unwritten=["left.weight"])
    assert recording.fallback == ()
    assert recording.unused == ("nobody",)
    assert [str(left) for left in recording.unwritten] == ["left.weight, 4 of 4 elements"]
    values = checkpoint(1, wanted)
    recording.load(values)
    for name, value in values.items():
        assert torch.equal(model.get_parameter(name), value), name
    assert torch.equal(fused, torch.cat([values["q.weight"], values["k.weight"]]))


def test_an_update_that_lacks_a_part_or_has_another_shape_is_refused_before_anything_is_written() -> None:
    engine = ToyEngine(0, 2)
    recording = record_loader(engine, engine.load_weights, specs())
    before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    values = checkpoint(1, specs())
    lacking = {name: value for name, value in values.items() if name != "layers.0.attn.k_proj.bias"}
    with pytest.raises(ManifestMismatch, match=r"'layers.0.attn.k_proj.bias' is missing for 'layers.0.attn.qkv_proj.b"):
        recording.load(lacking)
    with pytest.raises(ManifestMismatch, match=r"'norm.weight' is \[8\] float32, recorded as \[8\] bfloat16"):
        recording.load(values | {"norm.weight": values["norm.weight"].float()})
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.state_dict().items())


def test_a_head_of_its_own_gets_its_own_tensor() -> None:
    engine = ToyEngine(0, 1, Variant(head="separate"))
    recording = record_loader(engine, engine.load_weights, specs(engine.variant))
    values = checkpoint(1, specs(engine.variant))
    recording.load(values)
    assert torch.equal(engine.lm_head.weight[:150], values["lm_head.weight"])
    assert not torch.equal(engine.lm_head.weight, engine.embed_tokens.weight)


def test_an_engine_that_lives_in_inference_mode() -> None:
    with torch.inference_mode():
        engine = ToyEngine(1, 2)
        fresh = ToyEngine(1, 2)

    def load_weights(weights: Weights) -> None:
        with torch.inference_mode():
            engine.load_weights(weights)

    recording = record_loader(engine, load_weights, specs())
    assert recording.fallback == ()
    values = checkpoint(1, specs())
    recording.load(values)
    with torch.inference_mode():
        fresh.load_weights(values.items())
    assert all(torch.equal(tensor, engine.state_dict()[name]) for name, tensor in fresh.state_dict().items())


# Any program of views and moves: recorded, it gives what it gives when it is run.

Step = Callable[[torch.Tensor], torch.Tensor]


@st.composite
def programs(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[str, int, int]]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    step = st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 5), st.integers(0, 5))
    return shape, draw(st.lists(step, max_size=6))


STEPS: dict[str, Callable[[torch.Tensor, int, int], torch.Tensor]] = {
    "narrow": lambda t, a, b: narrowed(t, a % t.dim(), b % t.shape[a % t.dim()]),
    "step": lambda t, a, b: t.transpose(0, a % t.dim())[b % t.shape[a % t.dim()] :: 2].transpose(0, a % t.dim()),
    "swap": lambda t, a, b: t.transpose(a % t.dim(), b % t.dim()),
    "flat": lambda t, a, b: t.reshape(-1),
    "fold": lambda t, a, b: t.reshape(2, -1) if t.numel() % 2 == 0 else t.reshape(-1, t.shape[-1]),
    "fold 3": lambda t, a, b: t.reshape(-1, 3) if t.numel() % 3 == 0 else t,
    "own": lambda t, a, b: t.contiguous().clone(),
    "twice": lambda t, a, b: torch.cat([t, t], a % t.dim()) if t.numel() < 200 else t,
    "new dim": lambda t, a, b: t.unsqueeze(a % t.dim()),
    "expand": lambda t, a, b: t.unsqueeze(0).expand(2, *t.shape) if t.numel() < 200 else t,
    "pad": lambda t, a, b: nn.functional.pad(t, (a % 3, b % 3), value=7.0),
    "roll": lambda t, a, b: torch.cat([t[t.shape[0] // 2 :], t[: t.shape[0] // 2]]),
    "pick": lambda t, a, b: t[torch.arange(t.shape[0] - 1, -1, -1)],
    "scratch": lambda t, a, b: torch.zeros(t.shape[0] + 2, *t.shape[1:]).narrow(0, 1, t.shape[0]).copy_(t),
    "over": lambda t, a, b: over(t, a),
}  # fmt: skip


def narrowed(t: torch.Tensor, dim: int, start: int) -> torch.Tensor:
    return t.narrow(dim, start, 1 + (t.shape[dim] - 1 - start) // 2)


def over(t: torch.Tensor, at: int) -> torch.Tensor:
    made = t.clone()
    made[at % t.shape[0]] = t[0]
    return made


@given(programs(), st.sampled_from(["plain", "transposed", "part", "flat"]))
def test_any_program_of_moves_gives_what_it_gives_when_run(
    program: tuple[tuple[int, ...], list[tuple[str, int, int]]], target: str
) -> None:
    shape, steps = program
    spec = TensorSpec("w", "float32", shape)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        for name, a, b in steps:
            tensor = STEPS[name](tensor, a, b)
        return tensor

    result = moved(torch.zeros(shape))
    extent = {"part": (result.shape[0] + 3, *result.shape[1:]), "flat": (result.numel(),)}.get(target, result.shape)
    model, fresh = Model(a=tuple(extent)), Model(a=tuple(extent))
    if target == "transposed":
        for each in (model, fresh):
            turned = torch.full(tuple(extent)[::-1], -1.0).permute(*reversed(range(len(extent))))
            each.a.weight = nn.Parameter(turned, requires_grad=False)

    def loader(into: Model) -> Callable[[Weights], None]:
        def load_weights(weights: Weights) -> None:
            for _, tensor in weights:
                weight = into.a.weight.data
                weight = weight[2:-1] if target == "part" else weight.view(result.shape) if target == "flat" else weight
                weight.copy_(moved(tensor))

        return load_weights

    # Of a part five rows at most are written by nobody: of the engine's layout, not of the loader's doing.
    recording = record_loader(model, loader(model), [spec], unwritten=["a.weight"] if target == "part" else [])
    check_wanted(recording.holding)
    assert sum(left.num_elements for left in recording.unwritten) == model.a.weight.numel() - result.numel()
    address = model.a.weight.data_ptr()
    for seed in (1, 2):
        values = checkpoint(seed, [spec])
        recording.load(values)
        loader(fresh)(values.items())
        assert torch.equal(model.a.weight, fresh.a.weight), recording.report()
    assert model.a.weight.data_ptr() == address
