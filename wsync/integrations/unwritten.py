"""What a recorded loader leaves as it is: the elements of live tensors that no update writes.

Used by `wsync.integrations.recorder`, after a trace: bytes that nobody writes would be served as they are in every
version, and nothing that compares what was written would notice. So they are refused, unless they are declared.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch

from wsync.engine.groups import near, some
from wsync.errors import ConfigError, ManifestMismatch
from wsync.holding import Region
from wsync.integrations.strided import Axis, Box, Copy, Layout, Memory, NotBoxes, boxes_of, minus
from wsync.integrations.tracing import Trace
from wsync.sharding import row_strides


@dataclass(frozen=True)
class Unwritten:
    """A part of a parameter or persistent buffer that updates do not write, or all of it."""

    names: tuple[str, ...]
    """The tensor's names; several are tied."""
    num_elements: int
    num_total: int
    first: Region
    """A box of the tensor in which the first of them lie."""

    def __str__(self) -> str:
        return f"{' = '.join(self.names)}, {self.num_elements} of {self.num_total} elements"


@dataclass(frozen=True)
class Coverage:
    """What is left unwritten. Every element is named once, by a name that allows it if there is one."""

    lacking: tuple[Unwritten, ...]
    allowed: tuple[Unwritten, ...]
    unseen: tuple[Unwritten, ...]
    """Here the engine's own loader runs, and it cannot be told what it writes of them."""

    def check(self) -> None:
        """Raise ManifestMismatch naming what is left unwritten though it is not allowed."""
        if not self.lacking:
            return
        told = []
        for left in self.lacking:
            where = f", the first in {left.first}" if left.num_elements < left.num_total else ""
            names = " = ".join(f"'{name}'" for name in left.names)
            told.append(f"{names} ({left.num_elements} of {left.num_total} elements{where})")
        raise ManifestMismatch(
            f"load_weights leaves tensors of the engine as they are: {some(told)}",
            hint="complete specs, or declare what may stay as it is: unwritten=[...]",
        )


def kept(model: torch.nn.Module) -> frozenset[str]:
    """Names of parameters and persistent buffers: what must not be stale."""
    tensors = {
        *dict(model.named_parameters(remove_duplicate=False)),
        *dict(model.named_buffers(remove_duplicate=False)),
    }
    modules = model.named_modules(remove_duplicate=False)
    own = {f"{path}.{name}".lstrip(".") for path, module in modules for name in module._non_persistent_buffers_set}
    return frozenset(tensors - own)


def matching(patterns: Iterable[str], names: Collection[str]) -> frozenset[str]:
    """The names that are given, or match a pattern of `fnmatch`. Raises ConfigError for one that matches none."""
    found: set[str] = set()
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        matched = {pattern} & set(names) or set(fnmatch.filter(names, pattern))
        if not matched:
            raise ConfigError(
                f"unwritten= has '{pattern}', which is no parameter or persistent buffer",
                hint=near([pattern], names) or "give names of live tensors, or patterns such as 'lm_head.*'",
            )
        found |= matched
    return frozenset(found)


def coverage(
    trace: Trace, names: Collection[str], allowed: Collection[str], replayed: Collection[Memory], *, is_blind: bool
) -> Coverage:
    """What updates do not write of the tensors `names`.

    `replayed` are the memories into which the engine's own loader runs: what it writes there counts as the trace saw
    it. With `is_blind` it also runs on tensors that the trace could not follow, and may put these anywhere.
    """
    free = {
        # What is neither copied nor loaded by the engine stays as it was, whatever the loader computed there.
        memory: [Region.whole(memory.layout.shape)] if memory.why and memory not in replayed else list(memory.free)
        for memory in trace.live
    }
    lacking: list[Unwritten] = []
    stays: list[Unwritten] = []
    unseen: list[Unwritten] = []
    known = [name for name in trace.names if name in names]
    for name in sorted(known, key=lambda name: name not in allowed):
        memory, total = trace.names[name], math.prod(trace.layouts[name][0])
        missing = list(_missing(trace, name, free[memory])) if free.get(memory) else []
        count = sum(num_elements for num_elements, _ in missing)
        if not count:
            continue
        tied = memory.names if name in memory.names else (name,)
        left = Unwritten(tied, count, total, missing[0][1])
        is_unseen = is_blind or (memory.is_vague and memory in replayed)
        (unseen if is_unseen else stays if name in allowed else lacking).append(left)
        free[memory] = [] if name in memory.names else _without(trace, name, free[memory])
    return Coverage(tuple(lacking), tuple(stays), tuple(unseen))


def _boxes(trace: Trace, name: str) -> list[Box] | None:
    """A live tensor as boxes of itself, each with its place in the block in which it lies; None if it has no boxes."""
    shape, strides, _ = trace.layouts[name]
    memory, offset = trace.names[name], trace.offsets[name]
    if offset is None or not memory.layout.is_distinct:
        return None
    extents = shape or (1,)
    origin = Memory(Layout.contiguous(extents), memory.dtype, is_origin=True)
    axes = tuple(map(Axis, extents, row_strides(extents), strides or (1,)))
    try:
        return list(boxes_of(Copy(axes, 0, offset), origin, memory.layout))
    except NotBoxes:
        return None


def _missing(trace: Trace, name: str, free: list[Region]) -> Iterator[tuple[int, Region]]:
    """How many elements of a live tensor lie in the free boxes of its block, and in which box of the tensor."""
    boxes, shape = _boxes(trace, name), trace.layouts[name][0] or (1,)
    if boxes is None:
        if free:
            yield math.prod(shape), Region.whole(shape)
        return
    for box in boxes:
        for part in box.cover(len(trace.names[name].layout.shape)):
            for common in filter(None, map(part.intersect, free)):
                yield common.numel, box.part(common).region if box.is_plain else box.region


def _without(trace: Trace, name: str, free: list[Region]) -> list[Region]:
    for box in _boxes(trace, name) or ():
        for part in box.cover(len(trace.names[name].layout.shape)):
            free = [rest for region in free for rest in minus(region, part)]
    return free
