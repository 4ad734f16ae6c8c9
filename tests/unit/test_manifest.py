"""Manifests prove themselves, lanes place every byte once, and sides that do not agree say why."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsync.errors import ConfigError, ManifestMismatch
from wsync.manifest import ALIGNMENT, ITEMSIZE, MAX_NBYTES, Manifest, TensorSpec, check_agreement, lane_of

SPECS = st.lists(
    st.tuples(st.sampled_from(sorted(ITEMSIZE)), st.lists(st.integers(0, 7), max_size=3), st.booleans()), max_size=12
)


def manifest_of(drawn: list[tuple[str, list[int], bool]]) -> Manifest:
    """Tensors t0, t1, ...; where the flag is set, tied to the first one of the same dtype and shape."""
    specs: list[TensorSpec] = []
    for i, (dtype, shape, is_tied) in enumerate(drawn):
        same = [s.name for s in specs if (s.dtype, list(s.shape)) == (dtype, shape) and not s.alias_of]
        specs.append(TensorSpec(f"t{i}", dtype, tuple(shape), same[0] if is_tied and same else ""))
    return Manifest(tuple(specs))


@given(SPECS)
def test_a_lane_places_every_tensor_aligned_and_no_byte_twice(drawn: list[tuple[str, list[int], bool]]) -> None:
    manifest = manifest_of(drawn)
    lane = lane_of(manifest)
    end = 0
    places = {place.name: place for place in lane.placements}
    for spec, place in zip(manifest.tensors, lane.placements, strict=True):
        assert (place.name, place.nbytes) == (spec.name, spec.nbytes)
        if spec.alias_of:
            assert place.offset == places[spec.alias_of].offset
            continue
        assert place.offset % ALIGNMENT == 0
        assert place.offset >= end
        assert place.offset - end < ALIGNMENT
        end = place.offset + place.nbytes
    assert end <= lane.nbytes < end + ALIGNMENT


@given(SPECS)
def test_a_manifest_survives_the_wire_and_has_one_digest(drawn: list[tuple[str, list[int], bool]]) -> None:
    manifest = manifest_of(drawn)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest)
    assert again == manifest
    assert again.digest() == manifest.digest()
    check_agreement(manifest, again, channel="c")
    if len(manifest.tensors) > 1 and not any(spec.alias_of for spec in manifest.tensors):
        assert Manifest(manifest.tensors[::-1]).digest() != manifest.digest()


@given(SPECS, st.data())
def test_a_restricted_manifest_keeps_order_bytes_and_ties(
    drawn: list[tuple[str, list[int], bool]], data: st.DataObject
) -> None:
    manifest = manifest_of(drawn)
    names = tuple(data.draw(st.sets(st.sampled_from([s.name for s in manifest.tensors])))) if drawn else ()
    part = manifest.restrict(names)
    assert [spec.name for spec in part.tensors] == [s.name for s in manifest.tensors if s.name in names]
    root = {spec.name: spec.alias_of or spec.name for spec in manifest.tensors}
    for one in part.tensors:
        for other in part.tensors:
            is_tied = (one.alias_of or one.name) == (other.alias_of or other.name)
            assert is_tied == (root[one.name] == root[other.name])
    check_agreement(manifest, part, channel="c", is_partial=True)


def test_a_restriction_names_what_is_not_there() -> None:
    with pytest.raises(ManifestMismatch, match="declared names are not there: b, c"):
        Manifest((TensorSpec("a", "int8", ()),)).restrict(("c", "a", "b"))


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([{"name": "", "dtype": "int8", "shape": []}], "empty name"),
        ([{"name": "a", "dtype": "int7", "shape": []}], "dtype 'int7', which wsync does not know"),
        ([{"name": "a", "dtype": "int8", "shape": [-1]}], "negative extent"),
        ([{"name": "a", "dtype": "int8", "shape": [-1, -1]}], "negative extent"),
        ([{"name": "a", "dtype": "int8", "shape": [1 << 40, 1 << 40]}], "claims"),
        ([{"name": "a", "dtype": "int8", "shape": [MAX_NBYTES + 1]}], "claims"),
        ([{"name": "a", "dtype": "int8", "shape": [1]}] * 2, "two tensors are named 'a'"),
        ([{"name": "a", "dtype": "int8", "shape": [1], "alias_of": "a"}], "tied to 'a', which is no earlier"),
        (
            [
                {"name": "a", "dtype": "int8", "shape": [1], "alias_of": "b"},
                {"name": "b", "dtype": "int8", "shape": [1], "alias_of": "a"},
            ],
            "'a' is tied to 'b', which is no earlier",
        ),
        (
            [
                {"name": "a", "dtype": "int8", "shape": [1]},
                {"name": "b", "dtype": "int8", "shape": [1], "alias_of": "a"},
                {"name": "c", "dtype": "int8", "shape": [1], "alias_of": "b"},
            ],
            "'c' is tied to 'b', which is no earlier",
        ),
        (
            [
                {"name": "a", "dtype": "int8", "shape": [1]},
                {"name": "b", "dtype": "int8", "shape": [2], "alias_of": "a"},
            ],
            "tied but differ",
        ),
        ([{"name": "a", "dtype": "int8", "shape": [1 << 70]}], "."),
        ([{"name": "a", "dtype": "int8", "shape": ["1"]}], "Expected `int`"),
        ([{"dtype": "int8", "shape": [1]}], "missing required field `name`"),
    ],
)
def test_hostile_manifests_are_refused_when_decoded(tensors: list[dict[str, object]], text: str) -> None:
    encoded = msgspec.json.encode({"tensors": tensors})
    with pytest.raises(msgspec.ValidationError, match=text):
        msgspec.json.decode(encoded, type=Manifest)


def test_agreement_names_every_difference_at_once() -> None:
    trainer = Manifest(
        (
            TensorSpec("a", "int8", (2,)),
            TensorSpec("b", "int8", (2,)),
            TensorSpec("c", "int8", (2,)),
            TensorSpec("d", "float32", (3,)),
        )
    )
    replica = Manifest(
        (
            TensorSpec("a", "int8", (2,)),
            TensorSpec("b", "int8", (2,), "a"),
            TensorSpec("d", "float16", (4,)),
            TensorSpec("e", "int8", ()),
        )
    )
    with pytest.raises(ManifestMismatch) as caught:
        check_agreement(trainer, replica, channel="policy")
    text = str(caught.value)
    for part in (
        "not publish: e",
        "does not have: c",
        "d [3] -> [4]",
        "d float32 -> float16",
        "separate in the trainer: b = a",
        "channel=policy",
    ):
        assert part in text
    with pytest.raises(ManifestMismatch) as caught:
        check_agreement(trainer, replica, channel="policy", is_partial=True)
    assert "does not have" not in str(caught.value)
    check_agreement(replica, Manifest((TensorSpec("b", "int8", (2,)),)), channel="policy", is_partial=True)


class Named:
    """As a torch dtype: its text is its name."""

    def __str__(self) -> str:
        return "torch.bfloat16"


@pytest.mark.parametrize("shape", [[2, 3], range(2, 4), (np.int64(2), np.int32(3)), np.array([2, 3])])
@pytest.mark.parametrize("dtype", [Named(), np.dtype("float32")])
def test_dtypes_are_taken_for_their_names_and_shapes_for_tuples(dtype: Any, shape: Any) -> None:
    for spec in (TensorSpec("w", dtype, shape), TensorSpec.of(("w", dtype, shape))):
        assert spec == TensorSpec("w", str(dtype).removeprefix("torch."), (2, 3))
        assert (type(spec.dtype), *map(type, (spec.shape, *spec.shape))) == (str, tuple, int, int)
        assert hash(spec) == hash(TensorSpec("w", spec.dtype, (2, 3)))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=TensorSpec) == spec


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("w", "float32", (2.5, 3)), r"'w' has \(2.5, 3\) for a shape"),
        (("w", "float32", 2), "'w' has 2 for a shape"),
        (("w", "float32", "23"), "'w' has '23' for a shape"),
        (("w", None, (2,)), "'w' has dtype 'None'"),
        (("w", np.float32, (2,)), "'w' has dtype '<class"),
        ((None, "float32", (2,)), "or none: None"),
    ],
)
def test_what_describes_no_tensor_is_refused_by_name(arguments: Any, text: str) -> None:
    with pytest.raises(ManifestMismatch, match=text):
        TensorSpec(*arguments)


def test_an_entry_that_is_no_spec_is_named() -> None:
    spec = TensorSpec("w", "float32", (2,))
    assert TensorSpec.of(spec) is spec
    for entry in ("w", ("w", "float32"), ("w", "float32", (2,), "v"), (2, "float32", (2,)), None):
        with pytest.raises(ConfigError, match="describes no tensor") as caught:
            TensorSpec.of(entry)  # type: ignore[arg-type]
        assert caught.value.problem.startswith(repr(entry))
