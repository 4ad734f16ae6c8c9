"""Learn from an engine's own loader which part of which checkpoint tensor it puts where.

`record_loader` runs `load_weights` once on tensors that have a name and a shape but no bytes. Views of them are
followed by their offsets and strides, copies into parameters are written down instead of done, and what comes out is a
`Holding`: what this worker wants, and where. Afterwards an update is a copy into the live parameters, in place.

A loader that computes (arithmetic, another dtype, repacking, a look at values) cannot be replayed by copying. What it
does so to goes the *fallback* way, module by module: those tensors are received whole, as `checkpoint:NAME`, and the
engine's loader runs on them. `Recording.report` says what goes which way, and why. Whatever is not understood counts
as computing. What fails on any values, such as a tensor of another shape than its parameter's, is refused by name.
So is what the loader leaves as it is: nobody would notice that its bytes are old in every version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from wsync.engine.tensors import dtype_name, strided_view
from wsync.errors import CommitError, ManifestMismatch
from wsync.holding import CHECKPOINT, Holding, HoldingBuilder, Place, Region
from wsync.integrations.failures import Loader, causes, fails_anyway, refusal
from wsync.integrations.pinned import Pinned, check_kept
from wsync.integrations.strided import Box, Memory
from wsync.integrations.traced import ValuesNeeded
from wsync.integrations.tracing import Trace
from wsync.integrations.unwritten import Unwritten, coverage, kept, matching
from wsync.manifest import TensorSpec

Hook = Callable[[tuple[str, ...]], object]
"""Called with the names of the modules that receive data."""

MAX_ATTEMPTS = 32


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A model and its own steps of a load. `restore` undoes what `finalize` did; both may be left out."""

    model: torch.nn.Module
    load_weights: Loader
    restore: Hook | None = None
    finalize: Hook | None = None


def record_loader(
    model: torch.nn.Module,
    load_weights: Loader,
    specs: Iterable[TensorSpec | tuple[str, torch.dtype | str, Sequence[int]]],
    *,
    restore: Hook | None = None,
    finalize: Hook | None = None,
    unwritten: Iterable[str] = (),
) -> Recording:
    """Run `load_weights` on recording tensors, one per spec and in their order; returns what it did with them.

    A spec may also be a tuple (name, dtype, shape).

    The parameters must be as `load_weights` expects them: as they are before the engine finalizes them. They keep
    their bytes, memory and identity, and modules their attributes. `restore` and `finalize` are not called here but
    around every update (`Recording.installing`), for the modules that receive data and no others.

    `unwritten` has names, or patterns of `fnmatch`, of parameters and persistent buffers that may stay as they are, in
    whole or in part: padding that the loader neither loads nor fills, a frozen part. Every other element must be
    loaded, or filled with constants. Where the loader computes, what it writes counts by place: a copy or a result that
    is written (`out=`) as the elements that it is written to, arithmetic in place (`mul_`) as nothing, since it makes
    no old bytes new. Where the place cannot be told (indexed writes, other kernels, what is written while values are
    made up, and everything if the loader stops for lack of values), it counts as written: see `Recording.unseen`.

    Raises `ManifestMismatch` if `load_weights` cannot be run so, or ties what the checkpoint has as two tensors, or
    fails for another reason than that there are no values: naming the tensor, and the parameter where that is known.
    And if it leaves as they are, in whole or in part, tensors that are not `unwritten`: naming them. `ConfigError` for
    an entry of `unwritten` that matches nothing.
    """
    engine = Engine(model=model, load_weights=load_weights, restore=restore, finalize=finalize)
    wanted = tuple(map(TensorSpec.of, specs))
    allowed = matching(unwritten, kept(model))
    guessed: dict[str, str] = {}  # tensors whose values are asked for -> why; they are then made up
    unknown: dict[str, str] = {}  # tensors on which the loader fails even so
    error: Exception | None = None
    for _ in range(MAX_ATTEMPTS):
        trace, source = Trace(model), _Source(wanted, guessed, unknown)
        try:
            with trace.running():
                load_weights(source.tensors(trace))
        except Exception as exc:
            error, is_caught = exc, False
        else:
            is_caught = bool(trace.asked)  # with values it would have gone another way
            error = trace.asked[0] if trace.asked else None
        if error is None:
            for name, new in trace.rebound.items():
                check_kept(name, new, trace.layouts[name][0], trace.layouts[name][2])
            return _conclude(engine, wanted, trace, guessed, unknown, allowed)
        needed = next((exc for exc in causes(error) if isinstance(exc, ValuesNeeded)), None)
        is_told = is_caught and needed is not None and needed.sources
        if needed and source.is_exhausted and not is_told:  # all tensors are in hand: any of them may be meant
            trace = Trace(model)
            for memory in trace.live:
                memory.refuse(str(needed), (spec.alias_of or spec.name for spec in wanted))
                memory.touch(None)
            return _conclude(engine, wanted, trace, {}, {}, allowed)
        why = str(needed) if needed else f"the loader fails without values: {error}"
        found = (needed.sources if needed else ()) or {source.last}
        known = [spec for spec in wanted if spec.name not in unknown]
        if not is_caught and source.last and fails_anyway(error, model, load_weights, known, source.last):
            break
        # The layers of a model are alike: what fails in one of them fails in all.
        kinds = {_kind(name) for name in found}
        alike = {spec.name: why for spec in wanted if _kind(spec.name) in kinds and spec.name not in unknown}
        if not alike:
            break
        if alike.keys() <= guessed.keys():
            unknown |= alike
        else:
            guessed |= alike
    assert error is not None
    raise refusal(error, trace, wanted, source.last) from error


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What a loader did. Names of live tensors are those of the module."""

    engine: Engine
    specs: tuple[TensorSpec, ...]
    holding: Holding
    """What this worker wants: its locals are live tensors, and one `checkpoint:NAME` per tensor of the fallback."""
    names: Mapping[str, str]
    """Every name of a live tensor -> the name of the block that it is or lies in; tied tensors are one block."""
    recorded: tuple[str, ...]
    """Live blocks that an update writes by copying."""
    fallback: tuple[str, ...]
    """Checkpoint tensors that are wanted whole, for the engine's own loader."""
    rewritten: tuple[str, ...]
    """Live blocks into which the engine's loader puts them."""
    unwritten: tuple[Unwritten, ...]
    """Parameters and persistent buffers, or parts of them, that stay as they are; all of them were allowed to."""
    unseen: tuple[Unwritten, ...]
    """Those that the engine's loader may write, but in a way that does not tell which elements: counted as written."""
    unused: tuple[str, ...]
    """Checkpoint tensors that it does not read."""
    reasons: Mapping[str, str]
    """Of the fallback: a live block or a checkpoint tensor -> why."""
    layouts: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    """Shape, strides and dtype of live blocks."""
    constants: tuple[tuple[str, Box], ...]
    """What the loader writes besides, such as zeros into padding: (live block, place and value)."""
    buffers: Mapping[str, torch.Tensor]
    """The memory of the locals `checkpoint:NAME`, on the CPU."""

    @property
    def locals(self) -> dict[str, torch.Tensor]:
        """The live tensor or buffer of every local of the holding, to install into; of no dims becomes `[1]`.

        Raises `ManifestMismatch` if one has no longer the layout in which it was recorded.
        """
        return {local.name: self._local(local.name) for local in self.holding.locals}

    @contextlib.contextmanager
    def installing(self, received: Iterable[str] | None = None) -> Iterator[dict[str, torch.Tensor]]:
        """Around one update: restore; the block writes the locals named `received` (by default all), which it is
        given; the fallback and the loader's constants; finalize. Restore and finalize get the modules that receive
        data, by default also constants alone, and no others.

        If the block raises, nothing is finalized: the modules are then as a failed load leaves them. So they are when
        the engine's loader fails, which raises `CommitError` naming the tensors that it has in hand.
        """
        names = [local.name for local in self.holding.locals] if received is None else list(received)
        has_fallback = any(name.startswith(CHECKPOINT) for name in names)
        blocks = set(names) | (set(self.rewritten) if has_fallback else set())
        if received is None:
            blocks |= {block for block, _ in self.constants}
        touched = {_module(name) for name, block in self.names.items() if block in blocks}
        modules = tuple(path for path, _ in self.engine.model.named_modules() if path in touched)
        with torch.no_grad():
            if self.engine.restore:
                self.engine.restore(modules)
            yield {name: self._local(name) for name in names}
            for block, box in self.constants:
                if _module(block) in touched:
                    value = box.origin.value
                    value = _part(value, box.region) if isinstance(value, torch.Tensor) else value
                    place = Place(0, box.start, box.dims, box.steps)
                    _write(strided_view(self._local(block), place, box.region.extent), value)
            if has_fallback:
                self.load_fallback(self.buffers)
            if self.engine.finalize:
                self.engine.finalize(modules)

    def load_fallback(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Run the engine's loader on whole tensors, given by local name. What it rebinds is moved back in place.

        Raises `CommitError` naming the tensors that it has in hand when it fails.
        """
        wanted = [(spec.name, CHECKPOINT + (spec.alias_of or spec.name)) for spec in self.specs]
        wanted = [(name, local) for name, local in wanted if local in buffers]
        in_hand: list[str] = []

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, local in wanted:
                in_hand[:] = [name]
                yield name, buffers[local]
            in_hand[:] = [name for name, _ in wanted]

        pinned = Pinned(self.engine.model)
        with torch.no_grad():
            try:
                self.engine.load_weights(tensors())
            except Exception as exc:
                rest = f" and {len(in_hand) - 10} more" if len(in_hand) > 10 else ""
                raise CommitError(
                    f"load_weights fails on {', '.join(in_hand[:10])}{rest}: {type(exc).__name__}: {exc}",
                    hint="its modules are as a failed load leaves them: see what it cannot load, and commit again",
                ) from exc
            pinned.settle()

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Install checkpoint tensors of this process. Some are enough, if no local gets only a part of its tensors.

        Raises `ManifestMismatch` before anything is written if parts are missing or of another shape or dtype.
        """
        specs, names = self.holding.tensors, [local.name for local in self.holding.locals]
        given = [piece for piece in self.holding.pieces if specs[piece.tensor].name in tensors]
        touched = {names[piece.place.local] for piece in given}
        if any(name.startswith(CHECKPOINT) for name in touched):
            touched |= self.buffers.keys()
        for piece in self.holding.pieces:
            spec, local = specs[piece.tensor], names[piece.place.local]
            if local in touched and spec.name not in tensors:
                raise ManifestMismatch(f"'{spec.name}' is missing for '{local}'", hint="give all parts of a local")
        for spec in specs:
            found = tensors.get(spec.name)
            if found is not None and (tuple(found.shape), dtype_name(found.dtype)) != (spec.shape, spec.dtype):
                raise ManifestMismatch(
                    f"'{spec.name}' is {list(found.shape)} {dtype_name(found.dtype)}, recorded as {list(spec.shape)} "
                    f"{spec.dtype}"
                )
        is_all = len(given) == len(self.holding.pieces)
        with self.installing(None if is_all else touched) as live:
            for piece in given:
                target = strided_view(live[names[piece.place.local]], piece.place, piece.region.extent)
                _write(target, _part(tensors[specs[piece.tensor].name], piece.region))

    def report(self) -> str:
        """What goes which way, and why."""
        num_pieces = len(self.holding.pieces) - len(self.fallback)
        lines = [f"copied into place: {len(self.recorded)} parameters and buffers, in {num_pieces} pieces"]
        for title, found in (
            ("received whole for the engine's own loader", self.fallback),
            ("into which it writes", self.rewritten),
            ("into which it may write besides, which cannot be seen", self.unseen),
            ("read by nobody", self.unused),
        ):
            lines += [f"{title}: {len(found)}", *(f"  {name}" for name in found)] if found else []
        lines += [f"stays as it is: {left}" for left in self.unwritten]
        for why in dict.fromkeys(self.reasons.values()):
            lines.append(f"because {why}: {', '.join(name for name in self.reasons if self.reasons[name] == why)}")
        return "\n".join(lines)

    def _local(self, name: str) -> torch.Tensor:
        if name.startswith(CHECKPOINT):
            return self.buffers[name]
        module, _, leaf = name.rpartition(".")
        tensor: torch.Tensor = getattr(self.engine.model.get_submodule(module), leaf).detach()
        if (tuple(tensor.shape), tensor.stride(), tensor.dtype) != self.layouts[name]:
            shape, strides, dtype = self.layouts[name]
            raise ManifestMismatch(
                f"'{name}' is {list(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}, but was recorded as "
                f"{list(shape)} {dtype} with strides {strides}",
                hint="give record_loader the engine's restore step, which undoes its finalize",
            )
        return tensor if tensor.dim() else tensor.unsqueeze(0)


class _Source:
    """What the loader iterates over."""

    def __init__(self, specs: tuple[TensorSpec, ...], guessed: Mapping[str, str], unknown: Mapping[str, str]) -> None:
        self._specs, self._guessed, self._unknown = specs, guessed, unknown
        self.last = ""
        """The tensor that the loader has in hand."""
        self.is_exhausted = False

    def tensors(self, trace: Trace) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in self._specs:
            if spec.name not in self._unknown:
                self.last = spec.name
                trace.guessed = (spec.alias_of or spec.name) if spec.name in self._guessed else ""
                yield spec.name, trace.source(spec)
        self.last, self.is_exhausted, trace.guessed = "", True, ""


def _conclude(
    engine: Engine,
    specs: tuple[TensorSpec, ...],
    trace: Trace,
    guessed: dict[str, str],
    unknown: dict[str, str],
    allowed: frozenset[str],
) -> Recording:
    if unknown and (engine.restore or engine.finalize):
        raise ManifestMismatch(
            f"it cannot be found out into which modules '{min(unknown)}' is loaded: {unknown[min(unknown)]}",
            hint="restore and finalize run on modules that received data only: record without them, or leave it out",
        )
    by_name = {spec.name: spec for spec in specs}
    root = {spec.name: spec.alias_of or spec.name for spec in specs}
    _check_ties(trace, root)
    read = {name for memory in trace.live for name in memory.sources}
    whole = {root[name] for name in (*guessed, *unknown)} | trace.attribute_sources
    if unknown:  # the others that were not read may be waiting for them
        whole |= set(root.values()) - read
    bad, whole = _fallback(trace.live, whole)
    covered = coverage(trace, kept(engine.model), allowed, frozenset(bad), is_blind=bool(unknown))
    covered.check()
    builder, recorded, constants = HoldingBuilder(), [], []
    for memory in trace.live:
        name = memory.names[0]
        if memory in bad or memory.why:
            continue
        constants += [(name, box) for box in memory.boxes if not box.origin.names]
        if memory.sources:  # all of it may be padding, on the last ranks of a vocabulary
            recorded.append(name)
            _add_local(builder, memory, by_name)
    for name in sorted(whole):
        spec = by_name[name]
        builder.tensor(name, spec.dtype, spec.shape)
        builder.local(CHECKPOINT + name, spec.dtype, spec.shape)
        builder.piece(name, Region.whole(spec.shape), CHECKPOINT + name, (0,) * len(spec.shape))
    read |= whole
    return Recording(
        engine=engine,
        specs=specs,
        holding=builder.build(),
        names={name: memory.names[0] for name, memory in trace.names.items()},
        recorded=tuple(recorded),
        fallback=tuple(sorted(whole)),
        rewritten=tuple(memory.names[0] for memory in trace.live if memory in bad or memory.sources & whole),
        unwritten=covered.allowed,
        unseen=covered.unseen,
        unused=tuple(spec.name for spec in specs if root[spec.name] not in read and spec.nbytes),
        reasons={memory.names[0]: memory.why for memory in trace.live if memory in bad and memory.why}
        | trace.attributes | guessed | unknown,
        layouts=trace.layouts,
        constants=tuple(constants),
        buffers={CHECKPOINT + n: torch.empty(by_name[n].shape, dtype=getattr(torch, by_name[n].dtype)) for n in whole},
    )  # fmt: skip


def _fallback(live: list[Memory], whole: set[str]) -> tuple[list[Memory], set[str]]:
    """The memories that are not copied into, and the tensors that the engine's loader needs for them."""
    modules: set[str] = set()
    bad: list[Memory] = []
    while True:
        for memory in live:
            # Its loader would put the first of two writings back over the second.
            is_torn = memory.is_overwritten and bool(memory.sources & whole)
            if memory not in bad and memory.sources and (memory.why or is_torn):
                modules |= set(map(_module, memory.names))
        more = [m for m in live if m not in bad and m.sources and not modules.isdisjoint(map(_module, m.names))]
        if not more:
            return bad, whole
        bad += more
        whole = whole.union(*(memory.sources for memory in more))


def _add_local(builder: HoldingBuilder, memory: Memory, by_name: Mapping[str, TensorSpec]) -> None:
    name = memory.names[0]
    padding = list(memory.free)
    for box in memory.boxes:
        padding += [] if box.origin.names else box.cover(len(memory.layout.shape))
    builder.local(name, memory.dtype, memory.layout.shape, sorted(padding))
    for box in memory.boxes:
        if box.origin.names:
            spec = by_name[box.origin.names[0]]
            builder.tensor(spec.name, spec.dtype, spec.shape)
            builder.piece(spec.name, box.region, name, box.start, box.dims, box.steps)


def _check_ties(trace: Trace, root: Mapping[str, str]) -> None:
    """Tied in the engine means tied in the checkpoint: which of two tensors should it be otherwise?"""
    for memory in trace.live:
        separate = tuple(name for name in memory.names if root.get(name) == name)
        rivals = memory.rivals if len(memory.names) > 1 and memory.rivals else separate
        if len(rivals) > 1:
            raise ManifestMismatch(
                f"'{rivals[0]}' and '{rivals[1]}' are two tensors of the checkpoint, but the engine has one block of "
                f"memory for {' = '.join(memory.names)}",
                hint="publish the tie (alias_of), or untie the engine",
            )


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _kind(name: str) -> str:
    """A name without its numbers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _part(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor[tuple(slice(o, o + e) for o, e in zip(region.offset, region.extent, strict=True))]


def _write(target: torch.Tensor, value: object) -> None:
    # A tensor made under inference mode may only be written under it.
    with torch.inference_mode(target.is_inference()):
        if isinstance(value, torch.Tensor):
            target.copy_(value)
        else:
            target.fill_(value)  # type: ignore[call-overload]
