"""Reads a holding element by element with numpy, for the tests of layouts. Knows places, and nothing of layouts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from wsync.holding import Holding, HoldingBuilder, Place, Region
from wsync.layouts import Block

OWN = -1
"""What a member's own rows hold."""

Array = NDArray[np.int64]


def numbered(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Tensors whose elements are all different."""
    tensors: dict[str, Array] = {}
    begin = 0
    for name, shape in shapes.items():
        tensors[name] = np.arange(begin, begin + int(np.prod(shape)), dtype=np.int64).reshape(shape)
        begin += tensors[name].size
    return tensors


def view(local: Array, place: Place, region: Region) -> Array:
    offset, strides = place.strided([stride // local.itemsize for stride in local.strides])
    flat = local.reshape(-1)[offset:]
    return as_strided(flat, region.extent, [stride * local.itemsize for stride in strides])


def box(array: Array, region: Region) -> Array:
    return array[tuple(slice(o, o + e) for o, e in zip(region.offset, region.extent, strict=True))]


def fill(holding: Holding, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The locals that the holding describes. Checks that every element is written once or is declared padding."""
    locals_ = [np.full(spec.shape, OWN, dtype=np.int64) for spec in holding.locals]
    counts = [np.zeros(spec.shape, dtype=np.int64) for spec in holding.locals]
    for piece in holding.pieces:
        spec = holding.tensors[piece.tensor]
        assert tensors[spec.name].shape == spec.shape, spec
        view(locals_[piece.place.local], piece.place, piece.region)[...] = box(tensors[spec.name], piece.region)
        view(counts[piece.place.local], piece.place, piece.region)[...] += 1
    for spec, count in zip(holding.locals, counts, strict=True):
        for own in spec.padding:
            box(count, own)[...] += 1
        assert (count == 1).all(), f"{spec.name} is not covered once: {count}"
    return {spec.name: local for spec, local in zip(holding.locals, locals_, strict=True)}


def gather(holding: Holding, locals_: Mapping[str, Array], into: dict[str, Array]) -> None:
    """Write all that the holding has into whole tensors; what is there already must be the same."""
    for piece in holding.pieces:
        spec, local = holding.tensors[piece.tensor], holding.locals[piece.place.local]
        there = box(into.setdefault(spec.name, np.full(spec.shape, OWN, dtype=np.int64)), piece.region)
        here = view(locals_[local.name], piece.place, piece.region)
        assert ((there == OWN) | (there == here)).all(), f"two holders of {spec.name} {piece.region} differ"
        there[...] = here


def holding_of(**blocks: Block) -> Holding:
    builder = HoldingBuilder()
    for name, one in blocks.items():
        one.add(builder, name, "int64")
    return builder.build()


def local_of(one: Block, tensors: Mapping[str, Array]) -> Array:
    return fill(holding_of(local=one), tensors)["local"]
