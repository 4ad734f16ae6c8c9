"""Names of trainers, adapters and engines: wrappers, LoRA, prefixes, and that nothing is dropped silently."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest

from wsync.errors import ManifestMismatch
from wsync.integrations.names import (
    Rules,
    match,
    match_base_layers,
    plain_name,
    plain_names,
    without_adapters,
)

MODELS = Path(__file__).parents[3] / "shared" / "data" / "models"
"""Real checkpoint indexes, where a checkout has them beside it."""

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
GEMMA3_LIVE = Rules(
    (
        ("language_model.model.", "model.language_model."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    )
)
QWEN2_VL_LIVE = Rules((("model.", "model.language_model."), ("visual.", "model.visual.")))


def index_of(folder: str) -> list[str]:
    path = MODELS / folder / "model.safetensors.index.json"
    if not path.exists():
        pytest.skip(f"no real index of {folder} beside this checkout")
    return list(json.loads(path.read_text())["weight_map"])


def test_case_A43_wrapper_prefixes_are_stripped_anywhere_in_any_order() -> None:
    for order in itertools.permutations(WRAPPERS):
        wrapped = f"{order[0]}.{order[1]}.model.layers.0.{order[2]}.mlp.{order[3]}.up_proj.weight"
        assert plain_name(wrapped) == "model.layers.0.mlp.up_proj.weight"
    # Only whole segments are wrappers.
    assert plain_name("submodule.module_list._orig_model.weight") == "submodule.module_list._orig_model.weight"


def test_case_A43_two_blocks_that_collapse_to_one_name_are_both_named() -> None:
    names = ["model.layers.0._orig_mod.weight", "model.layers.1.weight", "module.model.layers.0.weight"]
    with pytest.raises(ManifestMismatch) as caught:
        plain_names(names)
    assert f"'{names[0]}' and '{names[2]}'" in str(caught.value)
    assert plain_names(names[:2]) == {names[0]: "model.layers.0.weight", names[1]: names[1]}


def test_case_A41_one_filter_for_the_names_of_an_adapter() -> None:
    base = "base_model.model."
    kept = without_adapters(
        [
            base + "model.layers.0.q_proj.base_layer.weight",
            base + "model.layers.0.q_proj.lora_A.default.weight",
            base + "model.layers.0.q_proj.lora_B.default.weight",
            base + "model.norm.weight",
            base + "lm_head.original_module.weight",
            base + "lm_head.modules_to_save.default.weight",
            base + "lm_head.modules_to_save.ref.weight",
            base + "model.embed_tokens.token_adapter.base_layer.weight",
            base + "model.embed_tokens.token_adapter.trainable_tokens_delta.default",
        ]
    )
    assert kept.names == {
        base + "model.layers.0.q_proj.base_layer.weight": "model.layers.0.q_proj.weight",
        base + "model.norm.weight": "model.norm.weight",
        base + "lm_head.modules_to_save.default.weight": "lm_head.weight",
    }
    assert dict(kept.dropped) == {
        "lora_A": 1, "lora_B": 1, "original_module": 1, "modules_to_save.ref": 1, "token_adapter": 2,
    }  # fmt: skip


def test_case_A41_the_frozen_copy_never_wins_over_the_trained_one() -> None:
    names = ["lm_head.modules_to_save.default.weight", "lm_head.weight"]
    with pytest.raises(ManifestMismatch, match=r"'lm_head.modules_to_save.default.weight' and 'lm_head.weight'"):
        without_adapters(names)
    assert without_adapters(names[:1], adapter="other").names == {}


def test_case_A38_one_base_layer_segment_is_toggled_against_the_receivers_names() -> None:
    wanted = {
        f"model.layers.0.self_attn.{part}.base_layer.{leaf}"
        for part in ("qkv_proj", "o_proj")
        for leaf in ("weight", "bias")
    } | {"model.norm.weight", "model.layers.0.mlp.shared_expert.up_proj.base_layer.weight"}
    packed = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    attention = "model.layers.0.self_attn."
    sent = [
        attention + "q_proj.base_layer.weight",
        attention + "k_proj.weight",
        attention + "o_proj.weight",
        attention + "o_proj.bias",
        "model.layers.0.mlp.shared_expert.up_proj.weight",
        "model.norm.base_layer.weight",
    ]
    assert list(match_base_layers(sent, wanted, packed=packed).values()) == [
        attention + "q_proj.base_layer.weight",
        attention + "k_proj.base_layer.weight",
        attention + "o_proj.base_layer.weight",
        attention + "o_proj.base_layer.bias",
        "model.layers.0.mlp.shared_expert.up_proj.base_layer.weight",
        "model.norm.weight",
    ]
    with pytest.raises(ManifestMismatch, match=r"no place for 'model.layers.0.mlp.gate.weight'"):
        match_base_layers(["model.layers.0.mlp.gate.weight"], wanted)


def test_case_A38_never_two_segments_and_never_a_guess() -> None:
    with pytest.raises(ManifestMismatch, match=r"no place for 'a.b.weight'"):
        match_base_layers(["a.b.weight"], {"a.base_layer.b.base_layer.weight"})
    with pytest.raises(ManifestMismatch, match=r"'a.b.weight' can be 'a.b.weight' or 'a.b.base_layer.weight'"):
        match_base_layers(["a.b.weight"], {"a.b.weight", "a.b.base_layer.weight"})
    with pytest.raises(ManifestMismatch, match=r"'a.weight' and 'a.base_layer.weight' are the same tensor"):
        match_base_layers(["a.weight", "a.base_layer.weight"], {"a.base_layer.weight"})


def test_case_A44_two_classes_map_in_opposite_directions() -> None:
    """1658 names of which 1293 begin with model.language_model., as a live module has them."""
    live = [f"model.language_model.layers.{i}.weight" for i in range(1293)]
    live += [f"model.vision_tower.blocks.{i}.weight" for i in range(364)] + ["lm_head.weight"]
    checkpoint = GEMMA3_LIVE.inverse().rename(live)
    assert sum(name.startswith("language_model.model.") for name in checkpoint.values()) == 1293
    assert GEMMA3_LIVE.rename(checkpoint.values()) == {new: old for old, new in checkpoint.items()}
    # The other class has the same live names and other ones in its checkpoint.
    other = QWEN2_VL_LIVE.inverse().rename(live[:1293])
    assert other["model.language_model.layers.7.weight"] == "model.layers.7.weight"
    assert checkpoint["model.language_model.layers.7.weight"] == "language_model.model.layers.7.weight"


def test_case_A44_names_without_a_partner_are_reported() -> None:
    sent = ["model.layers.0.weight", "visual.blocks.0.weight", "lm_head.weight"]
    wanted = ["model.language_model.layers.0.weight", "lm_head.weight", "model.language_model.norm.weight"]
    found = match(sent, wanted, QWEN2_VL_LIVE)
    assert found.names == {"model.layers.0.weight": wanted[0], "lm_head.weight": "lm_head.weight"}
    assert found.unplaced == ("visual.blocks.0.weight",)
    assert found.unfed == ("model.language_model.norm.weight",)


def test_case_A44_rules_that_map_two_names_to_one_are_refused() -> None:
    with pytest.raises(ManifestMismatch, match=r"'a.x' and 'b.x' are the same tensor under these rules: 'b.x'"):
        Rules((("a.", "b."),)).rename(["a.x", "b.x"])


@pytest.mark.parametrize(("folder", "rules"), [("gemma3_27b_vlm", GEMMA3_LIVE), ("qwen2_vl_7b", QWEN2_VL_LIVE)])
def test_case_A44_real_indexes_map_one_to_one_and_back(folder: str, rules: Rules) -> None:
    names = index_of(folder)
    live = rules.rename(names)
    assert len(set(live.values())) == len(names)
    assert rules.inverse().rename(live.values()) == {new: old for old, new in live.items()}
    text_only = [name for name in live.values() if "visual" not in name and "vision" not in name]
    found = match(names, text_only, rules)
    assert len(found.names) == len(text_only)
    assert not found.unfed
    assert set(found.unplaced) == {name for name in names if "visual" in name or "vision" in name}


def test_case_A46_every_receiver_with_matching_names_is_a_destination() -> None:
    mtp = [f"model.mtp_layers.0.{part}.weight" for part in ("token_layernorm", "input_proj", "mlp.up_proj")]
    sent = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight", *mtp]
    check_drafter(sent, mtp)


def test_case_A46_the_real_mimo_index() -> None:
    sent = index_of("mimo_mtp")
    mtp = [name for name in sent if "mtp_layers.0." in name]
    assert len(mtp) == 16
    check_drafter(sent, mtp)


def check_drafter(sent: list[str], mtp: list[str]) -> None:
    shared = ["model.embed_tokens.weight", "lm_head.weight"]
    plain = list(plain_names(sent).values())
    target = match(plain, [name for name in sent if name not in mtp], Rules(()))
    draft = match(plain, shared + mtp, Rules(()))
    assert target.unplaced == tuple(mtp)
    assert not target.unfed
    assert sorted(draft.names) == sorted(shared + mtp)
    assert not draft.unfed
    assert not set(target.unplaced) & set(draft.unplaced)  # nothing is without a destination


def test_case_D02_names_are_matched_in_linear_time() -> None:
    def seconds(count: int) -> float:
        names = [f"model.layers.{i // 400}.mlp.experts.{i % 400}.up_proj.base_layer.weight" for i in range(count)]
        started = time.process_time()
        live = QWEN2_VL_LIVE.rename(plain_names(f"module.{name}" for name in names).values())
        matched = match(names, set(live.values()), QWEN2_VL_LIVE)
        base = match_base_layers(names, {name.replace(".base_layer", "") for name in names})
        assert len(matched.names) == len(base) == len(without_adapters(names).names) == count
        return time.process_time() - started

    seconds(2_221)  # warm
    small, large = min(seconds(2_221) for _ in range(3)), seconds(22_213)
    assert large < 2.0
    assert large < 30 * small
