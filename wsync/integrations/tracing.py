"""Follow a loader's copies on tensors without bytes; used by `wsync.integrations.recorder`.

A `Traced` tensor is a view of a `Memory`: the offset and strides of a meta tensor say which element is which. While a
`Trace` runs, every torch operation passes through it. Views stay views, copies are written down, and nothing is
written into live memory. An operation that is not known to move elements unchanged marks its result as computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from wsync.engine.tensors import dtype_name
from wsync.holding import Region
from wsync.integrations.pinned import Pinned
from wsync.integrations.strided import Axis, Copy, Layout, Memory
from wsync.integrations.traced import (
    MOVES,
    PLAIN_OPTIONS,
    SHAPE_ONLY,
    ShapesDiffer,
    Traced,
    ValuesNeeded,
    bare,
    each,
    on_meta,
    remembering,
    tensors_in,
    written_by,
)
from wsync.manifest import ITEMSIZE, TensorSpec


class Trace:
    """One run of a loader on a module. Afterwards `live` says for each block of live memory what went into it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.live: list[Memory] = []
        self.names: dict[str, Memory] = {}
        """Every name of a live tensor -> the block that it is, or lies in."""
        self.layouts: dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = {}
        self.offsets: dict[str, int | None] = {}
        """Of a live tensor in its block, in elements; None where the block has elements of another size."""
        self.attributes: dict[str, str] = {}
        self.attribute_sources: set[str] = set()
        self.guessed = ""
        """The tensor whose turn it is, if its values are made up: all that is written meanwhile counts as computed."""
        self.asked: list[ValuesNeeded] = []
        """Every time that the loader asked for values, caught or not."""
        self.rebound: dict[str, torch.Tensor] = {}
        """Live tensors that get another's memory -> that, the last one."""
        self._model = model
        self._blocks: dict[int, list[tuple[int, int, Memory, torch.Tensor]]] = {}  # first byte, end, memory, its tensor
        self._origins: dict[str, Memory] = {}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        for name, tensor in sorted(named, key=lambda item: -item[1].numel()):
            self.layouts[name] = tuple(tensor.shape), tensor.stride(), tensor.dtype
            self._add_live(name, tensor.detach())

    def source(self, spec: TensorSpec) -> Traced:
        """The recording tensor of a checkpoint tensor; an alias is the same memory as what it is tied to."""
        root = spec.alias_of or spec.name
        dtype = getattr(torch, spec.dtype)
        origin = self._origins.setdefault(
            root, Memory(Layout.contiguous(spec.shape), spec.dtype, (root,), is_origin=True, sources={root})
        )
        return Traced(torch.empty(spec.shape, dtype=dtype, device="meta"), origin, torch.device("cpu"))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Trace what the block does; all that it does to the module is undone at the end."""
        pinned = Pinned(self._model)
        try:
            with torch.no_grad(), remembering() as self.asked, _Rebinding(self), _Operations(self):
                yield
            self._conclude(pinned)
        finally:
            pinned.undo()

    def rebind(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """A live tensor gets another's memory: for an update in place that is a copy."""
        memory = self._written_memory(old)
        if memory is not None and memory.names and old.shape == self.layouts[memory.names[0]][0]:
            self.rebound[memory.names[0]] = new
        if memory is not None and new.shape != old.shape:
            self._refuse(memory, f"it is replaced by one of shape {list(new.shape)}", self._sources([new]), old)
        elif memory is not None:
            self._copy(old, new)

    def is_live(self, tensor: torch.Tensor) -> bool:
        memory = self._memory(tensor)
        return memory is not None and bool(memory.names) and not memory.is_origin

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operation of the loader."""
        name = func._schema.name.rpartition("::")[2]
        written = written_by(func, args, kwargs)
        tensors = list(tensors_in((args, list(kwargs.values()))))
        read = [tensor for tensor in tensors if self._is_traced(tensor)]
        if written:
            if not read and not any(self._memory(tensor) for tensor in written):
                return func(*args, **kwargs)
            self._write(name, func, args, written)
            num_returns = len(func._schema.returns)
            return written[0] if num_returns == 1 else tuple(written) if num_returns else None
        if not read:
            return func(*args, **kwargs)
        first = tensors[0]
        if func.is_view or name == "_unsafe_view":
            if not isinstance(first, Traced):
                return func(*args, **kwargs)
            views = func(*bare(args), **kwargs)
            return each(views, lambda view: Traced(view, first.memory, first.device))
        if name in SHAPE_ONLY:
            return func(*bare(args), **kwargs | {"device": kwargs.get("device") or first.device})
        return self._compute(name, func, args, kwargs, read)

    def _compute(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], read: list[torch.Tensor]) -> Any:
        sources = self._sources(read)
        if name == "_local_scalar_dense" and self.guessed:
            return 1
        try:
            where = {"device": "meta"} if "device" in kwargs else {}
            outs = func(*on_meta(args), **on_meta(kwargs) | where)
        except Exception as exc:
            raise ValuesNeeded(sources, f"the loader looks at values ({name})") from exc
        if not list(tensors_in(outs)):
            raise ValuesNeeded(sources, f"the loader looks at values ({name})")
        device = torch.device(kwargs.get("device") or read[0].device)
        made = each(outs, lambda out: Traced(out, Memory(_layout(out), dtype_name(out.dtype)), device))
        move = MOVES.get(name) if kwargs.keys() <= PLAIN_OPTIONS else None
        parts = move(made, *args) if move else None
        if parts is None:
            for out in tensors_in(made):
                self._memory(out).refuse(f"it is computed ({name})", sources)  # type: ignore[union-attr]
            return made
        for target, origin in parts:
            self._copy(target, origin)
        return made

    def _write(self, name: str, func: Any, args: tuple[Any, ...], written: list[torch.Tensor]) -> None:
        if torch.Tag.inplace_view in func.tags and name != "detach_":
            raise ValuesNeeded(self._sources(tensors_in(args)), f"{name} changes the layout of a tensor in place")
        value = args[1] if len(args) > 1 else 0
        if name == "copy_" or (name == "fill_" and isinstance(value, torch.Tensor)):
            return self._copy(written[0], value)
        if name in ("fill_", "zero_"):
            return self._copy(written[0], value if name == "fill_" else 0)
        if name == "_foreach_copy_":
            for target, origin in zip(*args[:2], strict=True):
                self._copy(target, origin)
            return None
        sources = self._sources(tensors_in(args))
        changes_in_place = torch.Tag.pointwise in func.tags and name.endswith("_")
        is_whole = func._schema.overload_name.endswith("out")
        for tensor in written:
            memory = self._written_memory(tensor)
            if memory is not None:
                memory.refuse(f"it is computed ({name})", sources)
                if not changes_in_place:  # what was not written before is not made new by scaling it
                    memory.touch(self._footprint(memory, tensor) if is_whole else None)
        return None

    def _copy(self, target: torch.Tensor, origin: torch.Tensor | float) -> None:
        memory = self._written_memory(target)
        sources = self._sources(tensors_in(origin))
        shape = origin.shape if isinstance(origin, torch.Tensor) else ()
        if not _expands(shape, target.shape):
            names = memory.names if memory is not None and not memory.is_origin else ()
            raise ShapesDiffer(shape, target.shape, sources=sources, target=names[0] if names else "")
        if memory is None:
            return None
        if memory.why and not sources:
            return memory.touch(self._footprint(memory, target))
        if isinstance(origin, torch.Tensor) and origin.numel() == 1 and not self._is_traced(origin):
            origin = origin.item()
        if not isinstance(origin, torch.Tensor):
            source = Memory(Layout.contiguous(target.shape), dtype_name(target.dtype), is_origin=True, value=origin)
            view, offset = torch.empty(target.shape, dtype=target.dtype, device="meta"), 0
        elif self._is_traced(origin):
            source, view, offset = self._place(origin)
        else:
            view, offset = origin.detach().to(target.dtype).clone(memory_format=torch.contiguous_format), 0
            source = Memory(Layout.contiguous(view.shape), dtype_name(view.dtype), is_origin=True, value=view)
        _, target_view, target_offset = self._place(target)
        if memory.is_origin:
            why = "it is changed in place before it is loaded"
        elif (
            dtype_name(target.dtype) != memory.dtype
            or dtype_name(view.dtype) != source.dtype
            or view.is_conj()
            or view.is_neg()
        ):
            why = "it is copied through a view of another dtype"
        elif view.dtype != target.dtype:
            why = f"it is cast from {dtype_name(view.dtype)} to {dtype_name(target.dtype)}"
        else:
            strides = view.expand(target.shape).stride()
            axes = tuple(map(Axis, target_view.shape, strides, target_view.stride()))
            return memory.copy(source, Copy(axes, offset, target_offset))
        return self._refuse(memory, why, source.sources, target)

    def _refuse(self, memory: Memory, why: str, sources: Iterable[str], target: torch.Tensor) -> None:
        """A part of a memory is written, but not by copying."""
        memory.refuse(why, sources)
        memory.touch(self._footprint(memory, target))

    def _footprint(self, memory: Memory, target: torch.Tensor) -> Copy | None:
        """Which elements of its memory a tensor is; None where it is a view of elements of another size."""
        if target.element_size() != ITEMSIZE.get(memory.dtype):
            return None
        _, view, offset = self._place(target)
        return Copy(tuple(Axis(n, 0, s) for n, s in zip(view.shape, view.stride(), strict=True)), 0, offset)

    def _place(self, tensor: torch.Tensor) -> tuple[Memory, torch.Tensor, int]:
        """The memory of a tensor, a tensor with its shape and strides, and its offset in elements."""
        if isinstance(tensor, Traced):
            return tensor.memory, tensor.shadow, int(tensor.shadow.storage_offset())
        first, memory = next((first, memory) for first, _, memory, _ in self._found(tensor))
        return memory, tensor, int(tensor.storage_offset()) - first // tensor.element_size()

    def _memory(self, tensor: torch.Tensor) -> Memory | None:
        if isinstance(tensor, Traced):
            return tensor.memory
        return next((memory for _, _, memory, _ in self._found(tensor)), None)

    def _found(self, tensor: torch.Tensor) -> list[tuple[int, int, Memory, torch.Tensor]]:
        at = tensor.storage_offset() * tensor.element_size()
        return [block for block in self._blocks.get(_storage(tensor), ()) if block[0] <= at < block[1]]

    def _is_traced(self, tensor: torch.Tensor) -> bool:
        """Whether its elements come from the checkpoint, as far as is known."""
        memory = self._memory(tensor)
        return isinstance(tensor, Traced) or (memory is not None and memory.has_content)

    def _sources(self, tensors: Iterable[torch.Tensor]) -> set[str]:
        return {name for memory in map(self._memory, tensors) if memory is not None for name in memory.sources}

    def _written_memory(self, tensor: torch.Tensor) -> Memory | None:
        """The memory to write into; the loader's own scratch is followed from its first writing on."""
        memory = self._memory(tensor)
        if memory is None and not tensor.numel():
            return None
        if memory is None:
            base = tensor if tensor._base is None else tensor._base
            size = base.untyped_storage().nbytes() // base.element_size()
            if not _layout(base).is_dense or base.numel() != size or base.dtype != tensor.dtype:
                base = tensor.as_strided((size,), (1,), 0)
            memory = Memory(_layout(base), dtype_name(base.dtype))
            background = Memory(memory.layout, memory.dtype, is_origin=True, value=base)
            self._blocks.setdefault(_storage(base), []).append((0, base.nbytes, memory, base))
            axes = zip(memory.layout.shape, memory.layout.strides, strict=True)
            memory.copy(background, Copy(tuple(Axis(n, s, s) for n, s in axes), 0, 0))
        if self.guessed:
            memory.refuse("it depends on values", {self.guessed})
            memory.touch(None)
        return memory

    def _add_live(self, name: str, tensor: torch.Tensor) -> None:
        layout, size = _layout(tensor), tensor.element_size()
        first = int(tensor.storage_offset()) * size
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        self.offsets[name] = 0
        for begin, end, memory, whole in self._found(tensor):
            self.offsets[name] = (first - begin) // size if whole.element_size() == size else None
            if begin == first and self.layouts[name] == self.layouts[memory.names[0]]:
                memory.names = (*memory.names, name)
            elif first + reach * size > end or whole.element_size() != size:
                memory.refuse(f"it shares a part of its memory with '{name}'")
                memory.layout = Layout.contiguous([(max(end, first + reach * size) - begin) // whole.element_size()])
                memory.free = [Region.whole(memory.layout.shape)]
                blocks = self._blocks[_storage(tensor)]
                blocks[:] = [block for block in blocks if block[2] is not memory]
                blocks.append((begin, max(end, first + reach * size), memory, whole))
            self.names[name] = memory
            return
        memory = Memory(layout, dtype_name(tensor.dtype), (name,))
        self.names[name] = memory
        if tensor.numel():
            self.live.append(memory)
            self._blocks.setdefault(_storage(tensor), []).append((first, first + reach * size, memory, tensor))

    def _conclude(self, pinned: Pinned) -> None:
        """What the loader put into modules by setting attributes."""
        for path, key, old, new in pinned.changes():
            if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and self.is_live(old):
                self.rebind(old, new)
                continue
            sources = self._sources(tensors_in(new))
            if sources:
                self.attributes[f"{path}.{key}".lstrip(".")] = "it is an attribute that the loader sets"
                self.attribute_sources |= sources


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._trace.call(func, tuple(args), dict(kwargs or {}))
        except (ShapesDiffer, ValuesNeeded):
            raise
        except Exception as exc:  # of torch, maybe for lack of bytes; should the loader catch it
            traced = filter(self._trace._is_traced, tensors_in((args, list((kwargs or {}).values()))))
            if sources := self._trace._sources(traced):
                ValuesNeeded(sources, str(exc))
            raise


class _Rebinding(TorchFunctionMode):
    """Sees `tensor.data = other`, which is no operation."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__set__" and func.__self__ is torch.Tensor.data:
            if self._trace.is_live(args[0]):
                return self._trace.rebind(args[0], args[1])
            if isinstance(args[1], Traced) or isinstance(args[0], Traced):
                raise ValuesNeeded(
                    self._trace._sources(tensors_in(args)), "the memory of a tensor that is no parameter is set"
                )
        return func(*args, **(kwargs or {}))


def _layout(tensor: torch.Tensor) -> Layout:
    """A tensor of no dims has one of one element, so that a place in it has an index."""
    return Layout(tuple(tensor.shape), tensor.stride()) if tensor.dim() else Layout((1,), (1,))


def _expands(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether torch copies a tensor of that shape onto one of the target's."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(extent in (1, onto) for extent, onto in pairs)


def _storage(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return int(storage.data_ptr() or storage._cdata)
