"""wsync: asynchronous weight broadcast from training to inference actors. See README.md.

Public names only; they load on first use, so that importing wsync costs next to nothing and never
loads torch, ray, vllm, nixl or jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wsync.config import Config as Config
    from wsync.engine.publisher import Publication as Publication
    from wsync.engine.publisher import Publisher as Publisher
    from wsync.engine.replica import Replica as Replica
    from wsync.engine.shard_publisher import ShardPublisher as ShardPublisher
    from wsync.engine.shard_replica import ShardReplica as ShardReplica
    from wsync.errors import WsyncError as WsyncError

__version__ = "0.1.0"

_HOMES = {
    "Config": "wsync.config",
    "Publication": "wsync.engine.publisher",
    "Publisher": "wsync.engine.publisher",
    "Replica": "wsync.engine.replica",
    "ShardPublisher": "wsync.engine.shard_publisher",
    "ShardReplica": "wsync.engine.shard_replica",
    "WsyncError": "wsync.errors",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'wsync' has no attribute '{name}'")
