"""What `benchmarks.broadcast` compares wsync with: other ways to bring a trainer's weights to replicas on one machine.

Every peer moves all tensors of a layout from one trainer to N replicas, in place into tensors that exist on both
sides, with new bytes in every round. Seconds are from the moment at which the trainer starts to the moment at which
the last replica has all bytes in its tensors, by the clock that the processes share. Outside of that time every
replica compares its tensors with an independent reference and asserts that they have changed.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from benchmarks._child import Child, call_all, stop_all
from benchmarks.bounds import Peer
from benchmarks.shapes import Layout, Weights, buckets_of

BUCKET_NBYTES = 64 << 20
ROOT = Path(__file__).resolve().parent.parent
NIXL_ALIAS = ROOT / "benchmarks" / "nixl_alias"
RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_memory_monitor_refresh_ms": "0",  # it ends actors when other processes use much memory
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "UCX_NET_DEVICES": "lo",
    # Ray receives gloo tensors into new memory every time; the allocator shall at least keep its pages.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
}


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What all peers of one comparison have in common."""

    layout: Layout
    seed: int
    num_replicas: int
    num_threads: int = 1
    """Threads of PyTorch in each process."""


class TorchGlooBroadcast:
    """`torch.distributed.broadcast` with gloo over loopback, one process per member.

    `is_flat` packs the tensors into flat buckets of 64 MiB, broadcasts those and unpacks them; else every tensor is
    broadcast from and to where it lies, all posted before the first is waited for.
    """

    def __init__(self, setup: Setup, *, is_flat: bool) -> None:
        self._setup = setup
        self._is_flat = is_flat
        self._round = 0
        self._members: list[Child] = []

    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="wsync-bench-")
        store = os.path.join(self._folder.name, "store")
        ranks = range(self._setup.num_replicas + 1)
        self._members = [Child(_GlooMember, self._setup, rank, store, self._is_flat) for rank in ranks]
        call_all(self._members, "barrier")

    def round(self) -> float:
        self._round += 1
        trainer, *replicas = self._members
        trainer.call("fill", self._round)
        call_all(replicas, "remember")
        (started, _), *spans = call_all(self._members, "broadcast")
        call_all(replicas, "check", self._round)
        return max(ended for _, ended in spans) - started

    def stop(self) -> None:
        stop_all(self._members)
        self._folder.cleanup()


class _GlooMember(Weights):
    def __init__(self, setup: Setup, rank: int, store: str, is_flat: bool) -> None:
        super().__init__(setup.layout, setup.seed)
        torch.set_num_threads(setup.num_threads)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=setup.num_replicas + 1,
            timeout=timedelta(seconds=60),
        )
        self._rank = rank
        self._is_flat = is_flat
        self._pieces = self.flat()
        self._groups = buckets_of([piece.nbytes for piece in self._pieces], BUCKET_NBYTES)
        sizes = [sum(self._pieces[index].nbytes for index in group) for group in self._groups]
        self._buckets = [torch.zeros(size if is_flat else 0, dtype=torch.uint8) for size in sizes]

    def barrier(self) -> None:
        dist.barrier()

    def broadcast(self) -> tuple[float, float]:
        """Receive from rank 0, or send as rank 0. Returns when it started and ended."""
        dist.barrier()
        started = time.monotonic()
        if self._is_flat:
            self._broadcast_buckets()
        else:
            for work in [dist.broadcast(piece, 0, async_op=True) for piece in self._pieces]:
                work.wait()
        return started, time.monotonic()

    def _broadcast_buckets(self) -> None:
        works = []
        for group, bucket in zip(self._groups, self._buckets, strict=True):
            if self._rank == 0:
                torch._foreach_copy_(self._split(bucket, group), [self._pieces[index] for index in group])
            works.append(dist.broadcast(bucket, 0, async_op=True))
        for group, bucket, work in zip(self._groups, self._buckets, works, strict=True):
            work.wait()
            if self._rank:
                torch._foreach_copy_([self._pieces[index] for index in group], self._split(bucket, group))

    def _split(self, bucket: torch.Tensor, group: list[int]) -> list[torch.Tensor]:
        return list(bucket.split([self._pieces[index].nbytes for index in group]))

    def close(self) -> None:
        dist.destroy_process_group()


def ray_driver(way: str, layout: Layout, seed: int) -> object:
    """A `RayDriver`, in whose process Ray is imported under the environment that it needs."""
    path = os.pathsep.join(filter(None, (str(ROOT), str(NIXL_ALIAS), os.environ.get("PYTHONPATH", ""))))
    os.environ.update(RAY_ENVIRONMENT, PYTHONPATH=path)
    from benchmarks.ray_peers import RayDriver

    return RayDriver(way, layout, seed)


class RayPeer:
    """A way of Ray's, on a Ray of its own that a child process starts and ends. See `benchmarks.ray_peers`."""

    def __init__(self, setup: Setup, way: str) -> None:
        self._setup = setup
        self._way = way
        self._drivers: list[Child] = []

    def start(self) -> None:
        setup = self._setup
        self._drivers.append(Child(ray_driver, self._way, setup.layout, setup.seed))
        self._drivers[0].call("start", setup.num_replicas, setup.num_threads)

    def round(self) -> float:
        return float(self._drivers[0].call("round"))

    def stop(self) -> None:
        stop_all(self._drivers)


PEERS: dict[str, dict[str, Callable[[Setup], Peer]]] = {
    "ray_object_store": {"": lambda setup: RayPeer(setup, "object_store")},
    "rdt_gloo": {"": lambda setup: RayPeer(setup, "gloo")},
    "rdt_nixl": {"": lambda setup: RayPeer(setup, "nixl")},
    "torch_gloo_broadcast": {
        "tensors": lambda setup: TorchGlooBroadcast(setup, is_flat=False),
        "buckets": lambda setup: TorchGlooBroadcast(setup, is_flat=True),
    },
}
"""Peers by name, each with its variants; a comparison quotes the fastest variant."""
