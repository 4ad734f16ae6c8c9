"""A loader that fails on any values is refused by name when it is recorded; one that only lacks values is not."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

from wsync import ShardReplica
from wsync.errors import CommitError, ConfigError, ManifestMismatch
from wsync.integrations.recorder import CHECKPOINT, record_loader
from wsync.manifest import TensorSpec

Weights = Iterable[tuple[str, torch.Tensor]]
Step = Callable[["Engine", str, torch.Tensor], object]

SPECS = (TensorSpec("v", "float32", (8, 6)), TensorSpec("w", "float32", (9, 6)), TensorSpec("n", "int64", ()))


class Engine(nn.Module):
    """`v` fits its parameter, `w` has one row too many for its own and for `low`. `step` loads what is not `v`."""

    def __init__(self, step: Step, *, has_all_first: bool = False) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.full((8, 6), -1.0), requires_grad=False)
        self.w = nn.Parameter(torch.full((8, 6), -1.0), requires_grad=False)
        self.low = nn.Parameter(torch.full((8, 6), -1.0, dtype=torch.bfloat16), requires_grad=False)
        self.step, self.has_all_first, self.kept = step, has_all_first, dict[str, torch.Tensor]()

    def load_weights(self, weights: Weights) -> None:
        self.kept = {}
        for name, tensor in list(weights) if self.has_all_first else weights:
            if name == "v":
                self.v.data.copy_(tensor)
            else:
                self.step(self, name, tensor)


def only_w(load: Callable[[Engine, torch.Tensor], object]) -> Step:
    return lambda engine, name, tensor: load(engine, tensor) if name == "w" else None


def wrapped(load: Callable[[Engine, torch.Tensor], object]) -> Step:
    def step(engine: Engine, name: str, tensor: torch.Tensor) -> None:
        try:
            only_w(load)(engine, name, tensor)
        except Exception as exc:
            raise RuntimeError(f"cannot load {name}") from exc

    return step


def checked(engine: Engine, w: torch.Tensor) -> None:
    assert engine.w.shape == w.shape, f"{engine.w.shape} {w.shape}"
    engine.w.copy_(w)


def bare(engine: Engine, w: torch.Tensor) -> None:
    if w.shape != engine.w.shape:
        raise AssertionError


def unmatched(engine: Engine, w: torch.Tensor) -> None:
    if engine.w.shape != w.shape:
        raise RuntimeError("size mismatch")


def into(target: str) -> Callable[[Engine, torch.Tensor], object]:
    return lambda engine, w: engine.get_parameter(target).data.copy_(w)


ONTO = r"'w' float32 \[9, 6\] for '{}' \[8, 6\]: "
CANNOT = r"a tensor of shape \[9, 6\] cannot be copied onto one of \[8, 6\]"

FAILS: dict[str, tuple[Step, str]] = {
    "copied": (only_w(into("w")), ONTO.format("w") + CANNOT),
    "assigned": (only_w(lambda e, w: e.w.__setitem__(..., w)), ONTO.format("w") + "RuntimeError: The expanded size"),
    "copied into another one": (only_w(into("v")), ONTO.format("v") + CANNOT),
    "cast": (only_w(into("low")), ONTO.format("low") + CANNOT),
    "many at once": (only_w(lambda e, w: torch._foreach_copy_([e.w.data], [w])), ONTO.format("w") + CANNOT),
    "computed before": (only_w(lambda e, w: e.w.copy_(w * 2)), ONTO.format("w") + CANNOT),
    "a part": (only_w(lambda e, w: e.w[:3].copy_(w[:4])), ONTO.format("w") + r".*\[4, 6\] .* \[3, 6\]"),
    "wrapped": (wrapped(into("w")), ONTO.format("w") + "RuntimeError: cannot load w"),
    "its own assertion": (only_w(checked), ONTO.format("w") + "AssertionError: torch.Size"),
    "its own assertion without a text": (only_w(bare), ONTO.format("w") + "AssertionError: raise Asse"),
    "its own error": (only_w(unmatched), ONTO.format("w") + "RuntimeError: size mismatch"),
    "narrowed": (only_w(lambda e, w: e.w.copy_(w.narrow(0, 4, 8))), ONTO.format("w") + "RuntimeError: .*size"),
    "viewed": (only_w(lambda e, w: e.w.view(2, 24).copy_(w.view(2, 24))), ONTO.format("w") + "RuntimeError: shape"),
    "joined": (only_w(lambda e, w: e.w.copy_(torch.cat([w, w[:, 1:]]))), ONTO.format("w") + ".*Sizes of tensors"),
    "added": (only_w(lambda e, w: e.w.copy_(w + torch.zeros(8, 1))), ONTO.format("w") + "RuntimeError: .*broadcast"),
    "no place for it": (only_w(lambda e, w: e.get_parameter("u").copy_(w)), ONTO.format("w") + "AttributeError"),
    "an unknown name": (only_w(lambda e, w: dict(e.named_buffers())["u"].copy_(w)), ONTO.format("w") + "KeyError: 'u'"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILS)
def test_what_fails_on_any_values_is_refused_by_name(name: str) -> None:
    step, text = FAILS[name]
    engine = Engine(step)
    before, attributes = {n: t.clone() for n, t in engine.state_dict().items()}, dict(vars(engine))
    with pytest.raises(ManifestMismatch, match="it fails on " + text) as caught:
        record_loader(engine, engine.load_weights, SPECS)
    assert caught.value.__cause__ is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.state_dict().items())
    assert vars(engine) == attributes


def test_shapes_are_named_too_where_the_loader_has_all_tensors_first() -> None:
    engine = Engine(only_w(into("w")), has_all_first=True)
    with pytest.raises(ManifestMismatch, match=ONTO.format("w") + CANNOT):
        record_loader(engine, engine.load_weights, SPECS)


def test_an_engine_that_has_too_much_is_refused_as_one_that_has_too_little() -> None:
    engine = Engine(only_w(into("w")))
    with pytest.raises(ManifestMismatch, match=r"'w' float32 \[7, 6\] for 'w' \[8, 6\]"):
        record_loader(engine, engine.load_weights, [TensorSpec("w", "float32", (7, 6))])


def test_a_row_that_is_spread_is_the_loaders_business() -> None:
    engine = Engine(only_w(into("w")))
    recording = record_loader(engine, engine.load_weights, [TensorSpec("w", "float32", (1, 6))], unwritten=["v", "low"])
    recording.load({"w": torch.arange(6.0).reshape(1, 6)})
    assert torch.equal(engine.w, torch.arange(6.0).expand(8, 6))


@pytest.mark.parametrize(
    ("new", "text"),
    [
        (lambda w: w, r"makes 'w' a \[9, 6\] torch.float32, it was \[8, 6\] torch.float32"),
        (lambda w: w[:8].bfloat16(), r"makes 'w' a \[8, 6\] torch.bfloat16, it was \[8, 6\] torch.float32"),
    ],
)
@pytest.mark.parametrize("is_data", [True, False])
def test_a_parameter_that_gets_another_layout_is_refused(
    new: Callable[[torch.Tensor], torch.Tensor], text: str, is_data: bool
) -> None:
    def load(engine: Engine, w: torch.Tensor) -> None:
        if is_data:
            engine.w.data = new(w)
        else:
            engine.w = nn.Parameter(new(w), requires_grad=False)

    engine = Engine(only_w(load))
    with pytest.raises(ManifestMismatch, match=text):
        record_loader(engine, engine.load_weights, SPECS)


def test_a_parameter_that_gets_its_layout_back_is_not() -> None:
    def load(engine: Engine, w: torch.Tensor) -> None:
        engine.w.data = w
        engine.w.data = w[:8]

    engine = Engine(only_w(load))
    recording = record_loader(engine, engine.load_weights, SPECS, unwritten=["low"])
    values = {"v": torch.rand(8, 6), "w": torch.rand(9, 6)}
    recording.load(values)
    assert torch.equal(engine.w, values["w"][:8])


# Loaders that do not fail on true values. What they need values for is left to them.


def numbered(engine: Engine, name: str, tensor: torch.Tensor) -> None:
    """Copies as many rows as the second tensor says."""
    engine.kept[name] = tensor
    if name == "n":
        engine.w.copy_(engine.kept["w"][: int(tensor)])


def positive(engine: Engine, w: torch.Tensor) -> None:
    if not w.tolist()[0][0] > 0:
        raise ValueError("not positive")
    engine.w.copy_(w[:8])


def plain(engine: Engine, w: torch.Tensor) -> None:
    if type(w) is not torch.Tensor:
        raise TypeError("no tensor that a kernel can read")
    engine.w.copy_(w[:8] * 2)


def suspicious(engine: Engine, w: torch.Tensor) -> None:
    """Takes what is no plain tensor as one that is wrong, and zeros too, for another reason."""
    plain(engine, w)
    positive(engine, w)


def foreign(engine: Engine, w: torch.Tensor) -> None:
    """Reads and writes memory past torch, as kernels do."""
    bits = torch.utils.dlpack.from_dlpack(torch._C._to_dlpack(w))
    torch.utils.dlpack.from_dlpack(torch._C._to_dlpack(engine.w)).numpy()[:] = bits[:8].numpy()


def tried(engine: Engine, w: torch.Tensor) -> None:
    try:
        engine.w.copy_(w)
    except RuntimeError:
        engine.w.copy_(w[:8])


def resized(engine: Engine, w: torch.Tensor) -> None:
    engine.w.data.resize_(8, 6).copy_(w[:8])


SUCCEEDS: dict[str, tuple[Step, bool]] = {
    "rows that a value counts": (numbered, True),
    "values are checked": (only_w(positive), True),
    "values are checked, and it says where": (wrapped(positive), True),
    "plain tensors only": (only_w(plain), True),
    "plain tensors with values that are checked": (only_w(suspicious), True),
    "foreign code": (only_w(foreign), True),
    "foreign code, and it says where": (wrapped(foreign), True),
    "tried otherwise": (only_w(tried), False),
    "resized": (only_w(resized), True),
}


@pytest.mark.parametrize("name", SUCCEEDS)
def test_what_lacks_values_only_is_left_to_the_loader(name: str) -> None:
    step, is_fallback = SUCCEEDS[name]
    engine, fresh = Engine(step), Engine(step)
    before = {n: t.clone() for n, t in engine.state_dict().items()}
    recording = record_loader(engine, engine.load_weights, SPECS, unwritten=["low"])
    assert ("w" in recording.fallback) == is_fallback, recording.report()
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.state_dict().items())
    for seed in (1, 2):
        torch.manual_seed(seed)
        values = {"v": torch.rand(8, 6) + 1, "w": torch.rand(9, 6) + 1, "n": torch.tensor(8)}
        recording.load(values)
        fresh.load_weights((name, value.clone()) for name, value in values.items())
        assert torch.equal(engine.w, fresh.w)
        assert torch.equal(engine.v, fresh.v)
        assert not torch.equal(engine.w, before["w"])


def test_a_loader_that_has_all_tensors_first_and_says_where_it_lacks_values_gets_all_of_them() -> None:
    engine = Engine(wrapped(positive), has_all_first=True)
    recording = record_loader(engine, engine.load_weights, SPECS)
    assert recording.fallback == ("n", "v", "w")
    values = {"v": torch.rand(8, 6), "w": torch.rand(9, 6) + 1, "n": torch.tensor(8)}
    recording.load(values)
    assert torch.equal(engine.v, values["v"])
    assert torch.equal(engine.w, values["w"][:8])


@pytest.mark.parametrize("has_all_first", [True, False])
def test_a_fallback_that_fails_names_what_it_had_in_hand_and_is_not_finalized(has_all_first: bool) -> None:
    engine, told = Engine(only_w(positive), has_all_first=has_all_first), list[tuple[str, ...]]()
    finalize = told.append if has_all_first else None
    recording = record_loader(engine, engine.load_weights, SPECS, finalize=finalize)
    for name in recording.fallback:
        recording.buffers[CHECKPOINT + name].zero_()
    names = "v, w, n" if has_all_first else "w"
    with (
        pytest.raises(CommitError, match=rf"load_weights fails on {names}: ValueError: not positive") as caught,
        recording.installing(),
    ):
        pass
    assert isinstance(caught.value.__cause__, ValueError)
    assert told == []


@pytest.mark.parametrize(
    "specs",
    [
        [("v", "float32", (8, 6))],
        [("v", torch.float32, torch.Size([8, 6]))],
        [TensorSpec("v", torch.float32, [8, 6])],  # type: ignore[arg-type]
    ],
)
def test_specs_may_be_tuples(specs: list[TensorSpec | tuple[str, torch.dtype | str, tuple[int, ...]]]) -> None:
    engine = Engine(only_w(into("w")))
    recording = record_loader(engine, engine.load_weights, specs, unwritten=["w", "low"])
    assert recording.specs == (TensorSpec("v", "float32", (8, 6)),)
    assert recording.recorded == ("v",)


@pytest.mark.parametrize("entry", ["v", ("v", "float32"), ("v", torch.zeros(2)), (1, "float32", (2,)), None, b"v"])
def test_an_entry_that_is_no_spec_is_named(entry: object) -> None:
    engine = Engine(only_w(into("w")))
    with pytest.raises(ConfigError, match="describes no tensor") as caught:
        record_loader(engine, engine.load_weights, [SPECS[0], entry])  # type: ignore[list-item]
    assert repr(entry)[:20] in str(caught.value)


class Catching(nn.Module):
    """Its loader takes another way for what it takes to be no real tensor."""

    def __init__(self, look: Callable[[torch.Tensor], float]) -> None:
        super().__init__()
        self.look = look
        self.p = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
        self.q = nn.Parameter(torch.zeros(2), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            try:
                scale = self.look(tensor) if name == "p" else 1.0
            except Exception:
                scale = 1.0
            getattr(self, name).copy_(tensor if scale <= 1 else tensor.clamp(-1, 1))


LOOKS: dict[str, Callable[[torch.Tensor], float]] = {
    "item": lambda tensor: float(tensor.abs().max()),
    "numpy": lambda tensor: float(tensor.numpy().max()),
    "list": lambda tensor: max(map(max, tensor.tolist())),
    "where": lambda tensor: float(len(tensor.nonzero())),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_at_values_whose_failure_the_loader_catches_counts_as_one(name: str) -> None:
    recorded, own = Catching(LOOKS[name]), Catching(LOOKS[name])
    values = {"p": torch.full((2, 2), 5.0), "q": torch.tensor([2.0, 3.0])}
    recording = record_loader(recorded, recorded.load_weights, [("p", "float32", (2, 2)), ("q", "float32", (2,))])
    assert "p" in recording.fallback, recording.report()
    recording.load(values)
    own.load_weights(iter(values.items()))
    assert torch.equal(recorded.p, own.p), "as the engine's own loader has it"
    assert torch.equal(recorded.p, torch.ones(2, 2))
    assert torch.equal(recorded.q, values["q"])


def test_a_worker_whose_loader_nobody_would_run_is_refused() -> None:
    recorded = Catching(LOOKS["item"])
    recording = record_loader(recorded, recorded.load_weights, [("p", "float32", (2, 2)), ("q", "float32", (2,))])
    with pytest.raises(ConfigError, match=r"nobody would load p, q: .*pass installing=recording\.installing"):
        ShardReplica("policy", recording.holding, lambda: recording.locals)
