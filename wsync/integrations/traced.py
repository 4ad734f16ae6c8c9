"""Tensors without bytes that know where each of their elements comes from, and what torch operations do to them.

An operation is a view, or it moves elements unchanged and is a list of copies (`MOVES`), or it computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from wsync.errors import ManifestMismatch
from wsync.integrations.strided import Memory

SHAPE_ONLY = {"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"}
SHAPE_ONLY |= {"rand_like", "randn_like", "new_empty_strided"}

PLAIN_OPTIONS = {"dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format"}


_asked: ContextVar[list[ValuesNeeded]] = ContextVar("asked", default=[])  # noqa: B039 - of a look after a recording


@contextlib.contextmanager
def remembering() -> Iterator[list[ValuesNeeded]]:
    """What the block asks for, also where it catches the exception: it would not have come with values."""
    asked: list[ValuesNeeded] = []
    before = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(before)


class ShapesDiffer(RuntimeError):
    """The loader copies onto what has another shape. `sources` names the tensors that are copied, as far as is known,
    `target` the parameter.

    The text does not name them: it is the same for a tensor of the loader's own.
    """

    def __init__(
        self, shape: Iterable[int], target_shape: Iterable[int], *, sources: Iterable[str], target: str
    ) -> None:
        super().__init__(f"a tensor of shape {list(shape)} cannot be copied onto one of {list(target_shape)}")
        self.sources, self.target = tuple(sorted(sources)), target


class ValuesNeeded(Exception):
    """The loader asks for the values of `sources`, or does with them what cannot be followed without values."""

    def __init__(self, sources: Iterable[str], why: str) -> None:
        super().__init__(why)
        self.sources = frozenset(sources)
        _asked.get().append(self)


class Traced(torch.Tensor):
    """Elements of a `memory`; `shadow` is a meta tensor of the same shape, offset and strides."""

    shadow: torch.Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, shadow: torch.Tensor, memory: Memory, device: torch.device) -> Traced:
        made: Traced = torch.Tensor._make_wrapper_subclass(
            cls, shadow.shape, strides=shadow.stride(), storage_offset=shadow.storage_offset(),
            dtype=shadow.dtype, device=device,
        )  # fmt: skip
        made.shadow, made.memory = shadow, memory
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise ManifestMismatch("a recording tensor is used after the recording", hint="load_weights must not keep any")

    def _look(self, *_: Any, **__: Any) -> Any:
        raise ValuesNeeded(self.memory.sources, "the loader looks at values")

    numpy = tolist = data_ptr = __array__ = _look

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Traced({list(self.shape)}, {self.dtype})"


Parts = list[tuple[torch.Tensor, torch.Tensor | float]]
"""Copies into the result of an operation: (a view of it, from what)."""


def _moved_whole(out: Traced, tensor: torch.Tensor, *_: Any) -> Parts:
    return [(out, tensor)]


def _joined(out: Traced, tensors: list[torch.Tensor], dim: int = 0) -> Parts:
    tensors = [tensor for tensor in tensors if tensor.numel()]
    at, parts = 0, Parts()
    for tensor in tensors:
        parts.append((_narrow(out, dim, at, tensor.shape[dim]), tensor))
        at += tensor.shape[dim]
    return parts


def _stacked(out: Traced, tensors: list[torch.Tensor], dim: int = 0) -> Parts:
    return [(_like(out, out.shadow.select(dim, index)), tensor) for index, tensor in enumerate(tensors)]


def _padded(out: Traced, tensor: torch.Tensor, pad: list[int], value: float = 0) -> Parts | None:
    if min(pad) < 0:
        return None
    inside = out
    for num, before in enumerate(pad[::2]):
        dim = tensor.dim() - 1 - num
        inside = _narrow(inside, dim, before, tensor.shape[dim])
    return [(out, value), (inside, tensor)]


def _picked(out: Traced, tensor: torch.Tensor, dim: int, index: torch.Tensor) -> Parts | None:
    """Rows of a constant index, runs of neighbours at once."""
    if isinstance(index, Traced) or not isinstance(tensor, Traced) or index.dim() != 1 or index.dtype == torch.bool:
        return None
    rows = [int(row) % tensor.shape[dim] for row in index.tolist()]
    starts = [k for k, row in enumerate(rows) if k == 0 or row != rows[k - 1] + 1]
    return [
        (_narrow(out, dim, start, stop - start), _narrow(tensor, dim, rows[start], stop - start))
        for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True)
    ]


def _indexed(out: Traced, tensor: torch.Tensor, indices: list[torch.Tensor | None]) -> Parts | None:
    used = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    return _picked(out, tensor, *used[0]) if len(used) == 1 else None


MOVES: dict[str, Callable[..., Parts | None]] = {
    "clone": _moved_whole,
    "_to_copy": _moved_whole,
    "cat": _joined,
    "stack": _stacked,
    "constant_pad_nd": _padded,
    "index_select": _picked,
    "index": _indexed,
}
"""Operations that move elements unchanged, with the copies that they are."""


def _like(tensor: Traced, shadow: torch.Tensor) -> Traced:
    return Traced(shadow, tensor.memory, tensor.device)


def _narrow(tensor: Traced, dim: int, start: int, length: int) -> Traced:
    return _like(tensor, tensor.shadow.narrow(dim, start, length))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | set):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def each(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same lists and tuples, with their tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return type(value)(each(part, change) for part in value) if isinstance(value, list | tuple) else value


def bare(value: Any) -> Any:
    return each(value, lambda tensor: tensor.shadow if isinstance(tensor, Traced) else tensor)


def on_meta(value: Any) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, Traced):
            return tensor.shadow
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    return {key: each(part, change) for key, part in value.items()} if isinstance(value, dict) else each(value, change)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes into."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    found: list[torch.Tensor] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += tensors_in(value)
    return found
