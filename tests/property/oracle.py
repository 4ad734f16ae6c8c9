"""What every receiver must have in the end, found the slow way: every tensor whole, every element by its index.

Shares no code with the planner, nor with what reads its plans: it knows records and numpy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from wsync.holding import Holding, Piece

Memory = Sequence[np.ndarray]
"""One array per local of a holding."""
Wholes = Mapping[str, np.ndarray]


def elements(piece: Piece) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(index in the tensor, index in the local) of every element of a piece."""
    for step in itertools.product(*(range(extent) for extent in piece.region.extent)):
        local = list(piece.place.start)
        for d, i in enumerate(step):
            local[piece.place.dims[d]] += i * piece.place.steps[d]
        yield tuple(o + i for o, i in zip(piece.region.offset, step, strict=True)), tuple(local)


def payload(holding: Holding, piece: Piece) -> str:
    """The tensor that a piece is of, ties followed."""
    spec = holding.tensors[piece.tensor]
    return spec.alias_of or spec.name


def gather(held: Mapping[int, Holding], memory: Mapping[int, Memory], dtypes: Mapping[str, np.dtype]) -> Wholes:
    """Every tensor of the trainer, whole, on the wire's dtype. `dtypes` is by dtype name of a tensor."""
    wholes: dict[str, np.ndarray] = {}
    for rank, holding in held.items():
        for spec in holding.tensors:
            wholes.setdefault(spec.alias_of or spec.name, np.zeros(spec.shape, dtypes[spec.dtype]))
        for piece in holding.pieces:
            for index, local in elements(piece):
                wholes[payload(holding, piece)][index] = memory[rank][piece.place.local][local]
    return wholes


def fill(holding: Holding, memory: Memory, wholes: Wholes, ties: Mapping[str, str]) -> None:
    """Write what a receiver wants into its locals. `ties` are the trainer's, alias to tensor."""
    for piece in holding.pieces:
        spec = holding.tensors[piece.tensor]
        names = [spec.name, *(s.name for s in holding.tensors if spec.name in (s.name, s.alias_of)), spec.alias_of]
        name = next(name for name in (ties.get(name, name) for name in names) if name in wholes)
        for index, local in elements(piece):
            memory[piece.place.local][local] = wholes[name][index]


def is_written_once(holding: Holding) -> bool:
    """Whether every element of every local is written exactly once, or is padding and never written."""
    written = [np.zeros(local.shape, int) for local in holding.locals]
    for piece in holding.pieces:
        for _, local in elements(piece):
            written[piece.place.local][local] += 1
    for local, count in zip(holding.locals, written, strict=True):
        padding = np.zeros(local.shape, bool)
        for region in local.padding:
            padding[tuple(slice(o, o + e) for o, e in zip(region.offset, region.extent, strict=True))] = True
        if (count != np.where(padding, 0, 1)).any():
            return False
    return True
