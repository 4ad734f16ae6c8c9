"""What a JAX process holds of a mapping of arrays: its addressable shards, as a `Holding` and arrays in host memory.

JAX says of each shard which box of the array it is, so every sharding can be read, `NamedSharding` of any mesh among
them. Arrays of JAX never change: read them anew for every version. Nothing here runs a collective.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from wsync.engine.tensors import select
from wsync.errors import ConfigError, ManifestMismatch
from wsync.holding import Holding, HoldingBuilder, Region

if TYPE_CHECKING:
    import numpy as np


class HeldArrays(NamedTuple):
    """What this process has. `locals` are by local name: views of JAX's own memory on the CPU, else copies on the host.

    An array of which this process has no element is not in its holding.
    """

    holding: Holding
    locals: dict[str, np.ndarray[Any, Any]]


def read_arrays(arrays: Mapping[str, Any], *, names: Iterable[str] | None = None) -> HeldArrays:
    """What this process has of the named `jax.Array`s; `names` declares a part of them.

    Of several devices of this process with the same box, one is read. An array under two names is a tie. An array
    travels in its own dtype: cast it in JAX if another is wanted.

    Raises ManifestMismatch naming an array that cannot be published, ConfigError when JAX is not installed.
    """
    try:
        jax: Any = importlib.import_module("jax")
    except ImportError:
        raise ConfigError("JAX is not installed", hint="pip install 'wsync[jax]'") from None
    import numpy as np

    builder = HoldingBuilder()
    locals_: dict[str, np.ndarray[Any, Any]] = {}
    first: dict[int, str] = {}
    for name in select(list(arrays), tuple(names) if names is not None else None):
        array = arrays[name]
        if not isinstance(array, jax.Array):
            raise ManifestMismatch(f"'{name}' is a {type(array).__name__}, not a JAX array", hint="use names=")
        _check(name, array)
        shape, dtype = tuple(array.shape), str(array.dtype)
        shards = {_region(shard.index, shape): shard for shard in reversed(array.addressable_shards)}
        if array.size and not any(region.numel for region in shards):
            continue
        carrier = first.setdefault(id(array), name) if array.size else name
        builder.tensor(name, dtype, shape, "" if carrier == name else carrier)
        if carrier != name or not array.size:
            continue
        for number, region in enumerate(sorted(shards)):
            local = name if len(shards) == 1 else f"{name}@{number}"
            locals_[local] = np.asarray(shards[region].data)
            builder.local(local, dtype, region.extent)
            builder.piece(name, region, local, (0,) * len(shape))
    return HeldArrays(builder.build(), locals_)


def _region(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    bounds = [part.indices(extent)[:2] for part, extent in zip(index, shape, strict=True)]
    return Region(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


def _check(name: str, array: Any) -> None:
    if array.is_deleted():
        raise ManifestMismatch(
            f"'{name}' has been deleted or donated", hint="publish the arrays that the training step returned"
        )
    if getattr(getattr(array.sharding, "spec", None), "unreduced", None):
        raise ManifestMismatch(
            f"'{name}' is unreduced ({array.sharding.spec}): a shard is a summand, not a part of its values",
            hint="reduce it before it is published",
        )
