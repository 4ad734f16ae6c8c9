"""Keep a module's attributes, and the memory of its tensors, where they are while a loader runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from wsync.errors import ManifestMismatch


class Pinned:
    """The attributes of a module's parts as they are now, to be put back: the tensors among them with their memory."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._saved: list[tuple[str, dict[Any, Any], dict[Any, Any]]] = []  # path, what was saved, its copy
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # object, its memory
        for path, module in model.named_modules():
            attributes = vars(module)
            self._saved.append((path, attributes, dict(attributes)))
            self._saved += [(path, part, dict(part)) for part in attributes.values() if type(part) is dict]
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and id(tensor) not in self._tensors:
                    self._tensors[id(tensor)] = (tensor, tensor.detach())
                    self._saved.append((path, vars(tensor), dict(vars(tensor))))

    def changes(self) -> Iterator[tuple[str, Any, Any, Any]]:
        """(path, key, old, new) of every attribute that is set otherwise now."""
        for path, now, saved in self._saved:
            for key, value in now.items():
                if key not in saved or saved[key] is not value:
                    yield path, key, saved.get(key), value
                elif isinstance(value, list | set | tuple):
                    yield path, key, None, value

    def undo(self) -> None:
        for _, now, saved in self._saved:
            if now.keys() != saved.keys() or any(now[key] is not value for key, value in saved.items()):
                now.clear()
                now.update(saved)

    def settle(self) -> None:
        """Move what was really loaded into new memory or new objects back to where it was."""
        for path, now, saved in self._saved:
            for key, old in saved.items():
                new = now.get(key)
                if id(old) not in self._tensors or not isinstance(new, torch.Tensor):
                    continue
                memory = self._tensors[id(old)][1]
                if new is old and _same(new, memory):
                    continue
                check_kept(f"{path}.{key}".lstrip("."), new, memory.shape, memory.dtype)
                if not _same(new, memory):
                    memory.copy_(new)
                old.data = memory
                now[key] = old


def check_kept(name: str, new: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ManifestMismatch unless a parameter has the shape and dtype that it had."""
    if new.shape != shape or new.dtype != dtype:
        raise ManifestMismatch(
            f"load_weights makes '{name}' a {list(new.shape)} {new.dtype}, it was {list(shape)} {dtype}",
            hint="an update must keep the layout of parameters: correct the specs or the engine's configuration, or "
            "give record_loader a restore step",
        )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)
