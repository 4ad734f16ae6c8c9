"""What a JAX process reads of arrays on a mesh of four virtual devices."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import numpy as np
import pytest

from wsync.errors import ConfigError, ManifestMismatch
from wsync.integrations.jax import HeldArrays, read_arrays

HAS_JAX = importlib.util.find_spec("jax") is not None
needs_jax = pytest.mark.skipif(not HAS_JAX, reason="jax is not installed")
if "jax" not in sys.modules:
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def assemble(held: HeldArrays) -> dict[str, np.ndarray[Any, Any]]:
    whole: dict[str, np.ndarray[Any, Any]] = {}
    written: dict[str, np.ndarray[Any, Any]] = {}
    for piece in held.holding.pieces:
        spec, local = held.holding.tensors[piece.tensor], held.holding.locals[piece.place.local]
        box = tuple(slice(o, o + e) for o, e in zip(piece.region.offset, piece.region.extent, strict=True))
        tensor = whole.setdefault(spec.name, np.zeros(spec.shape, held.locals[local.name].dtype))
        tensor[box] = held.locals[local.name]
        count = written.setdefault(spec.name, np.zeros(spec.shape, int))
        count[box] += 1
    assert all((count == 1).all() for count in written.values())
    return whole


def placed(value: Any, *spec: Any) -> Any:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("dp", "tp"))
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))


@pytest.mark.skipif(HAS_JAX, reason="jax is installed")
def test_without_jax_the_extra_is_named() -> None:
    with pytest.raises(ConfigError, match=r"wsync\[jax\]"):
        read_arrays({"w": 1})


@needs_jax
@pytest.mark.parametrize(
    ("spec", "num_locals"), [((), 1), (("dp",), 2), (("dp", "tp"), 4), ((None, "dp"), 2), ((("dp", "tp"), None), 4)]
)
def test_every_named_sharding_is_read_once_from_the_shards(spec: tuple[Any, ...], num_locals: int) -> None:
    import jax.numpy as jnp

    full = jnp.arange(32, dtype=jnp.bfloat16).reshape(8, 4)
    held = read_arrays({"w": placed(full, *spec), "s": placed(jnp.float32(2.5))})
    assert len(held.locals) == num_locals + 1
    whole = assemble(held)
    assert whole["w"].tobytes() == np.asarray(full).tobytes()
    assert whole["s"].shape == ()
    assert {spec.name: spec.dtype for spec in held.holding.tensors} == {"w": "bfloat16", "s": "float32"}


@needs_jax
def test_a_tie_is_one_array_under_two_names_and_empty_arrays_are_declared() -> None:
    import jax.numpy as jnp

    embed = placed(jnp.arange(8.0), "dp")
    held = read_arrays({"embed": embed, "head": embed, "copy": embed + 0, "none": jnp.zeros((0, 3))})
    assert {spec.name: spec.alias_of for spec in held.holding.tensors} == {
        "copy": "", "embed": "", "none": "", "head": "embed",
    }  # fmt: skip
    assert list(read_arrays({"a": embed, "b": embed}, names=["b"]).locals) == ["b@0", "b@1"]


@needs_jax
def test_what_has_no_bytes_is_refused_by_name() -> None:
    import jax.numpy as jnp

    gone = placed(jnp.arange(8.0), "dp")
    gone.delete()
    with pytest.raises(ManifestMismatch, match="'w' has been deleted or donated"):
        read_arrays({"w": gone})
    with pytest.raises(ManifestMismatch, match="'w' is a ndarray, not a JAX array"):
        read_arrays({"w": np.zeros(2)})


@needs_jax
def test_case_A37_an_unreduced_array_is_refused_by_name() -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        one = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, PartitionSpec(None, "dp")))
        other = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, PartitionSpec("dp", None)))
        summand = PartitionSpec(None, None, unreduced={"dp"})
        partial = jax.jit(lambda a, b: jnp.einsum("ij,jk->ik", a, b, out_sharding=summand))(one, other)
    with pytest.raises(ManifestMismatch, match="'w' is unreduced"):
        read_arrays({"w": partial})
