"""Torch tensors as a source to publish from and a target to install into.

A module gives its parameters and persistent buffers, under the names of its `state_dict`. Tensors that are the very
same memory are tied. Nothing here runs a collective: a tensor that is only a shard is refused by name.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from wsync.engine.tensors import Extent, Memory, Tensors, check_separate, dtype_name, select
from wsync.errors import ManifestMismatch
from wsync.manifest import Manifest, TensorSpec

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class TorchTensors(Tensors):
    """The tensors of a module or mapping as they are now; see `wsync.engine.tensors.Tensors`."""

    def __init__(
        self,
        source: torch.nn.Module | Mapping[str, Any],
        wanted: tuple[str, ...] | None,
        *,
        is_target: bool,
        wire_dtypes: Mapping[str, str],
    ) -> None:
        super().__init__()
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
            dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
            identity = (tensor.data_ptr(), tensor.device, shape, tensor.stride(), dtype) if tensor.numel() else (name,)
            first = seen.setdefault(identity, name)
            wire_dtype = wire_dtypes.get(name, dtype)
            specs.append(TensorSpec(name, wire_dtype, shape, "" if first == name else first))
        self.manifest = Manifest(tuple(specs))
        if is_target:
            check_separate([extent for extent in map(_extent, specs, self._tensors) if extent is not None])
        self.raw = [
            _raw_bytes(tensor) if tensor.numel() and spec.dtype == dtype_name(tensor.dtype) else None
            for tensor, spec in zip(self._tensors, specs, strict=True)
        ]
        self._identities = _identities(self._sources)
        self._devices = {tensor.device for tensor in self._tensors if tensor.device.type != "cpu"}
        self.is_on_device = bool(self._devices)

    def is_current(self, source: torch.nn.Module | Mapping[str, Any]) -> bool:
        """Whether these are still the tensors of `source`: the same objects over the same memory."""
        named = source.state_dict(keep_vars=True) if isinstance(source, torch.nn.Module) else source
        if self._wanted is None and len(named) != len(self._names):
            return False
        found = [named.get(name) for name in self._names]
        if not all(map(operator.is_, found, self._sources)):
            return False
        return self._identities == _identities(self._sources)

    def store(self, index: int, block: Bytes) -> None:
        _typed(block, self.manifest.tensors[index]).copy_(self._tensors[index])

    def load(self, index: int, block: Bytes) -> None:
        tensor = self._tensors[index]
        # A tensor made under inference mode may only be written under it.
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(_typed(block, self.manifest.tensors[index]))

    def finish(self) -> None:
        for device in self._devices:
            torch.accelerator.synchronize(device)

    def digests(self) -> list[int]:
        return [_digest(tensor) for tensor in self._tensors]


def _identities(tensors: list[torch.Tensor]) -> tuple[list[Any], ...]:
    """They change when a tensor's data is replaced, resized, transposed or freed; cheap, as asked at every update.

    Columns rather than rows, which would be an object per tensor. The strides of a contiguous tensor say its shape,
    which torch makes an object of at some cost; others say it too.
    """
    kind = torch.Tensor
    is_contiguous = list(map(kind.is_contiguous, tensors))
    shapes = [tuple(tensor.shape) for tensor, is_so in zip(tensors, is_contiguous, strict=True) if not is_so]
    columns = [
        list(map(get, tensors)) for get in (kind.data_ptr, kind.numel, kind.stride, operator.attrgetter("dtype"))
    ]
    return (*columns, is_contiguous, shapes)


def _extent(spec: TensorSpec, tensor: torch.Tensor) -> Extent | None:
    if spec.alias_of or not tensor.numel():
        return None
    size = tensor.element_size()
    return spec.name, tensor.data_ptr(), tuple(tensor.shape), tuple(size * s for s in tensor.stride()), size


def _raw_bytes(tensor: torch.Tensor) -> Bytes | None:
    """The tensor's own memory as bytes, if that is its logical order. memcpy is faster than torch's typed copy."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    # Not Tensor.numpy(): that would forbid its owner to resize the storage for ever, as offloading does.
    return np.asarray(Memory(tensor.data_ptr(), (tensor.nbytes,), (1,), 1))


def _typed(block: Bytes, spec: TensorSpec) -> torch.Tensor:
    """Bytes of a slot as a tensor of that dtype and shape."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # replicas map slots read-only
        flat = torch.from_numpy(block)
    return flat.view(getattr(torch, spec.dtype)).view(spec.shape)


def _check(name: str, tensor: object, *, is_target: bool) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ManifestMismatch(f"'{name}' is a {type(tensor).__name__}, not a tensor", hint="leave it out with names=")
    if type(tensor).__name__ == "DTensor" or hasattr(tensor, "ds_shape") or hasattr(tensor, "_sharding_spec"):
        raise ManifestMismatch(
            f"'{name}' is only a shard of a tensor (DTensor, FSDP or ZeRO-3)",
            hint="publish it from every rank with wsync.ShardPublisher and integrations.sharded.read_state",
        )
    check_bytes(name, tensor)
    if is_target and tensor.numel() > 1 and torch._debug_has_internal_overlap(tensor) == 1:
        raise ManifestMismatch(f"'{name}' is expanded: several of its elements share memory", hint="clone it")


def check_bytes(name: str, tensor: torch.Tensor) -> None:
    """Raise ManifestMismatch unless the tensor has bytes that can be copied."""
    if tensor.device.type == "meta":
        raise ManifestMismatch(f"'{name}' is on the meta device and has no bytes", hint="materialize it first")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ManifestMismatch(f"'{name}' is sparse or quantized ({tensor.layout})", hint="publish its parts by name")
    reach = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if tensor.numel() and (tensor.storage_offset() + reach) * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ManifestMismatch(
            f"the storage of '{name}' has been freed", hint="offloaded weights must be back while they are published"
        )


def packed_bytes(tensor: torch.Tensor, dtype: str) -> Bytes:
    """A tensor's bytes as that dtype, in logical order."""
    flat = tensor.detach().to("cpu", getattr(torch, dtype)).resolve_conj().resolve_neg().contiguous()
    if not flat.numel():
        return np.empty(0, np.uint8)
    # A view of the live memory; our own copy is kept alive by numpy.
    raw = _raw_bytes(flat) if flat.data_ptr() == tensor.data_ptr() else None
    return raw if raw is not None else flat.reshape(-1).view(torch.uint8).numpy()


def _digest(tensor: torch.Tensor) -> int:
    return int(xxhash.xxh3_64_intdigest(packed_bytes(tensor, dtype_name(tensor.dtype)).data))
