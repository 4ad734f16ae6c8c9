"""Torch tensors as a source to publish from and a target to install into.

A module gives its parameters and persistent buffers, under the names of its `state_dict`. Tensors that are the very
same memory are tied. Nothing here runs a collective: a tensor that is only a shard is refused by name.
"""

from __future__ import annotations

import operator
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash

from wsync.engine.tensors import PROGRESS_NBYTES, select
from wsync.errors import ManifestMismatch
from wsync.manifest import Lane, Manifest, TensorSpec
from wsync.memory import Slot

_views: weakref.WeakKeyDictionary[Slot, tuple[tuple[Manifest, Lane], list[torch.Tensor]]] = weakref.WeakKeyDictionary()


class TorchTensors:
    """The tensors of a module or mapping as they are now; see `wsync.engine.tensors.LiveTensors`."""

    def __init__(
        self, source: torch.nn.Module | Mapping[str, Any], wanted: tuple[str, ...] | None, *, is_target: bool
    ) -> None:
        named = source.state_dict(keep_vars=True) if isinstance(source, torch.nn.Module) else source
        self._wanted = wanted
        self._names = names = select(list(named), wanted)
        self._sources = [named[name] for name in names]
        self._tensors: list[torch.Tensor] = []
        specs: list[TensorSpec] = []
        seen: dict[tuple[object, ...], str] = {}
        for name, tensor in zip(names, self._sources, strict=True):
            _check(name, tensor, is_target=is_target)
            tensor = tensor.detach()
            self._tensors.append(tensor)
            dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
            identity = (tensor.data_ptr(), tensor.device, shape, tensor.stride(), dtype) if tensor.numel() else (name,)
            first = seen.setdefault(identity, name)
            specs.append(TensorSpec(name, dtype, shape, "" if first == name else first))
        self.manifest = Manifest(tuple(specs))
        self._identities = [(tensor.data_ptr(), tensor.shape) for tensor in self._sources]

    def is_current(self, source: torch.nn.Module | Mapping[str, Any]) -> bool:
        """Whether these are still the tensors of `source`: the same objects over the same memory."""
        named = source.state_dict(keep_vars=True) if isinstance(source, torch.nn.Module) else source
        if self._wanted is None and len(named) != len(self._names):
            return False
        found = [named.get(name) for name in self._names]
        return all(map(operator.is_, found, self._sources)) and self._identities == [
            (tensor.data_ptr(), tensor.shape) for tensor in self._sources
        ]

    def pack(self, slot: Slot, lane: Lane, progress: Callable[[int], None]) -> None:
        """Copies in groups of about `PROGRESS_NBYTES`; a large contiguous tensor is copied piece by piece."""
        into, live, end, said = [], [], 0, 0
        places = lane.placements
        with torch.no_grad():
            for view, tensor, spec, place in zip(
                self._lane_views(slot, lane), self._tensors, self.manifest.tensors, places, strict=True
            ):
                if spec.alias_of or not place.nbytes:
                    continue
                for target, source, stop in _pieces(view, tensor, place.offset, place.nbytes):
                    into.append(target)
                    live.append(source)
                    end = stop
                    if end - said >= PROGRESS_NBYTES:
                        torch._foreach_copy_(into, live)
                        into, live, said = [], [], end
                        progress(end)
            if into:
                torch._foreach_copy_(into, live)
            _finish_device_copies(self._tensors)

    def install(self, slot: Slot, lane: Lane) -> None:
        pairs = [
            (tensor, view)
            for tensor, view, spec in zip(
                self._tensors, self._lane_views(slot, lane), self.manifest.tensors, strict=True
            )
            if not spec.alias_of and tensor.numel()
        ]
        # A tensor made under inference mode may only be written under it; others may be written under both.
        mode = torch.inference_mode() if any(t.is_inference() for t, _ in pairs) else torch.no_grad()
        with mode:
            if pairs:
                torch._foreach_copy_([tensor for tensor, _ in pairs], [view for _, view in pairs])
            _finish_device_copies(self._tensors)

    def digests(self) -> list[int]:
        return [_digest(tensor) for tensor in self._tensors]

    def _lane_views(self, slot: Slot, lane: Lane) -> list[torch.Tensor]:
        """The slot as tensors of our dtypes and shapes; made once per slot."""
        wanted = (self.manifest, lane)
        cached = _views.get(slot)
        if cached is not None and cached[0] == wanted:
            return cached[1]
        if slot.nbytes:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*not writable.*")  # replicas map slots read-only
                whole = torch.frombuffer(slot.data, dtype=torch.uint8)
        else:
            whole = torch.empty(0, dtype=torch.uint8)
        views = [
            whole[place.offset : place.offset + place.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, place in zip(self._tensors, lane.placements, strict=True)
        ]
        _views[slot] = (wanted, views)
        return views


def _pieces(
    view: torch.Tensor, tensor: torch.Tensor, offset: int, nbytes: int
) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """`(slot part, live part, end offset in the lane)`: one, or several for a large contiguous tensor."""
    if nbytes <= 2 * PROGRESS_NBYTES or not tensor.is_contiguous():
        return [(view, tensor, offset + nbytes)]
    flat_view, flat = view.view(-1), tensor.view(-1)
    step = PROGRESS_NBYTES // tensor.element_size()
    starts = range(0, flat.numel(), step)
    return [
        (flat_view[i : i + step], flat[i : i + step], offset + min(flat.numel(), i + step) * tensor.element_size())
        for i in starts
    ]


def _check(name: str, tensor: object, *, is_target: bool) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ManifestMismatch(f"'{name}' is a {type(tensor).__name__}, not a tensor", hint="leave it out with names=")
    if type(tensor).__name__ == "DTensor" or hasattr(tensor, "ds_shape") or hasattr(tensor, "_sharding_spec"):
        raise ManifestMismatch(
            f"'{name}' is only a shard of a tensor (DTensor, FSDP or ZeRO-3)",
            hint="publish whole tensors: gather it first, for example with get_model_state_dict(full_state_dict=True)",
        )
    if tensor.device.type == "meta":
        raise ManifestMismatch(f"'{name}' is on the meta device and has no bytes", hint="materialize it first")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ManifestMismatch(f"'{name}' is sparse or quantized ({tensor.layout})", hint="publish its parts by name")
    if is_target and tensor.numel() > 1 and torch._debug_has_internal_overlap(tensor) == 1:
        raise ManifestMismatch(f"'{name}' is expanded: several of its elements share memory", hint="clone it")


def _finish_device_copies(tensors: list[torch.Tensor]) -> None:
    """Copies between host and device may be asynchronous; after this the slot, or the tensors, have all bytes."""
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.accelerator.synchronize(device)


def _digest(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return int(xxhash.xxh3_64_intdigest(b""))
    flat = tensor.to("cpu").contiguous().view(-1).view(torch.uint8)
    return int(xxhash.xxh3_64_intdigest(flat.numpy().data))
