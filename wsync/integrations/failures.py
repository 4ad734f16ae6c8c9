"""Why a loader fails while it is recorded: for lack of values, which is no fault, or as it would on any checkpoint.

Used by `wsync.integrations.recorder`, which leaves the first kind to the loader itself and refuses the second by name.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from wsync.errors import ManifestMismatch
from wsync.integrations.traced import ShapesDiffer, ValuesNeeded
from wsync.integrations.tracing import Trace
from wsync.manifest import TensorSpec

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what it was raised from or after, the first one last. Loaders put their own around others."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def fails_anyway(
    error: Exception, model: torch.nn.Module, load_weights: Loader, specs: Sequence[TensorSpec], last: str
) -> bool:
    """Whether the loader, which raised `error` with the tensor `last` in hand, raises just that there when tensors have
    values too: zeros. If it does otherwise, values matter, and nothing is known of the true ones.

    It runs on tensors of its own, and nothing that it writes into the model through torch is done. Code that writes
    past torch is not run: it asks for bytes first, and that is no such error.
    """
    story = _story(error)
    if not story:
        return False
    trace, is_past = Trace(model), False

    def zeros() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal is_past
        for spec in specs:
            trace.guessed = spec.alias_of or spec.name  # so that copies of zeros are not kept
            yield spec.name, torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device="cpu")
            if spec.name == last:
                break
        is_past = True

    try:
        with trace.running():
            load_weights(zeros())
    except Exception as again:
        found = _story(again)
        return (
            not is_past
            and [kind for kind, _ in found] == [kind for kind, _ in story]
            and all(text in ("", again_text) for (_, text), (_, again_text) in zip(story, found, strict=True))
        )
    return False


def refusal(error: Exception, trace: Trace, specs: Iterable[TensorSpec], last: str) -> ManifestMismatch:
    """Names the tensors on which the loader fails, and where it puts them, as far as is known."""
    found: tuple[str, ...] = (last,) if last else ()
    target, shown = last, next((exc for exc in causes(error) if not isinstance(exc, ValuesNeeded)), error)
    for differ in causes(error):
        if isinstance(differ, ShapesDiffer):
            found, target = differ.sources or found, differ.target or target
    why = str(shown) or "".join(line.line or "" for line in traceback.extract_tb(shown.__traceback__)[-1:])
    why = why if isinstance(shown, ShapesDiffer | ValuesNeeded) else f"{type(shown).__name__}: {why}"
    named = [f"'{spec.name}' {spec.dtype} {list(spec.shape)}" for spec in specs if spec.name in found]
    onto = f" for '{target}' {list(trace.layouts[target][0])}" if named and target in trace.layouts else ""
    return ManifestMismatch(
        f"load_weights cannot be recorded: it fails{' on ' + ', '.join(named) if named else ''}{onto}: {why}",
        hint="specs and engine must be of one model: correct the specs or the engine's configuration, and leave out "
        "tensors for which it has no place; or lay out the engine by hand",
    )


def _story(error: Exception) -> list[tuple[type, str]]:
    """What was raised; empty where values or bytes were asked for."""
    chain = list(causes(error))
    remarks = [exc for exc in chain if isinstance(exc, ValuesNeeded)]
    # What torch says of tensors without bytes.
    if any(exc.__cause__ is None for exc in remarks) or any(re.search("data pointer|storage", str(e)) for e in chain):
        return []
    # An operation that fails on shapes alone may say so in other words.
    return [(type(exc), "" if remarks else str(exc)) for exc in chain if exc not in remarks]
