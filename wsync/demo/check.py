"""The independent check: digests and fingerprints of live tensors, by hashlib and torch alone.

Nothing here comes from wsync, so a fault in its digests, its packing or its mapping cannot hide itself.
"""

from __future__ import annotations

import hashlib

import torch


def digest_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """A blake2b digest of each tensor's bytes in row-major order, by name; tied tensors are read once."""
    found: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if place not in seen:
            seen[place] = hashlib.blake2b(_bytes_of(tensor), digest_size=16).hexdigest()
        found[name] = seen[place]
    return found


def fingerprint(tensors: dict[str, torch.Tensor]) -> tuple[int, ...]:
    """One integer sum per tensor: about ten times cheaper than the digests, enough to see that something moved."""
    return tuple(_sum_of(tensor.detach().contiguous().reshape(-1)) for tensor in tensors.values())


def addresses(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Where each tensor lives; equal before and after an update that is in place."""
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _sum_of(flat: torch.Tensor) -> int:
    nbytes = flat.numel() * flat.element_size()
    wide = nbytes % 8 == 0 and (flat.storage_offset() * flat.element_size()) % 8 == 0
    return int(flat.view(torch.int64 if wide else torch.uint8).sum(dtype=torch.int64).item())
