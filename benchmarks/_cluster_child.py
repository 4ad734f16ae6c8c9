"""One process of a broadcast on an emulated host: a command per line from standard input, an answer per line of JSON.

    python -m benchmarks._cluster_child KIND NBYTES

All kinds have the same commands: `join` once, then in each round `fill` and `publish` on rank 0 and `install` on the
others. Tensors are `NUM_TENSORS` equal parts, whose bytes any process can compute from a seed without wsync.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np

NUM_TENSORS = 16
TIMEOUT_S = 170.0
PORT = 7700


def part(seed: int, number: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of one tensor of a version."""
    return np.random.default_rng([seed, number]).integers(0, 256, nbytes, dtype=np.uint8)


class Member:
    """Tensors, and what they hash to."""

    def __init__(self, nbytes: int) -> None:
        self.whole = np.zeros(nbytes, np.uint8)
        self.tensors = {f"t{number:02d}": one for number, one in enumerate(np.split(self.whole, NUM_TENSORS))}

    def fill(self, seed: int) -> str:
        for number, tensor in enumerate(self.tensors.values()):
            np.copyto(tensor, part(seed, number, tensor.nbytes))
        return self.digest()

    def digest(self) -> str:
        return hashlib.blake2b(memoryview(self.whole), digest_size=16).hexdigest()


class WsyncMember(Member):
    """A trainer or a replica of one channel."""

    def join(self, rank: int, addresses: Sequence[str]) -> None:
        import wsync

        config = wsync.Config(transports=("tcp",))
        if rank == 0:
            self.publisher = wsync.Publisher("policy", self.tensors, config=config)
        else:
            self.replica = wsync.Replica("policy", self.tensors, config=config)

    def publish(self, step: int) -> tuple[int, float]:
        """The version, and when publish began."""
        started = time.monotonic()
        self.publication = self.publisher.publish(step=step)
        return self.publication.version, started

    def install(self, version: int) -> float:
        """When the version was committed."""
        self.replica.wait_version(version, timeout_s=TIMEOUT_S)
        return time.monotonic()

    def status(self, num_replicas: int) -> dict[str, Any]:
        """Of each receiving host: who it pulled from first, and the bytes that entered it."""
        self.publication.wait_committed(timeout_s=TIMEOUT_S, num_replicas=num_replicas)
        return {
            holder.host: [list(holder.parents), holder.nbytes_received] for holder in self.publication.status().holders
        }


class DirectMember(Member):
    """Rank 0 sends all bytes to everybody at once over one socket each; the others receive in place."""

    def join(self, rank: int, addresses: Sequence[str]) -> None:
        self._others = list(addresses[1:])
        self._sockets: list[socket.socket] = []
        if rank:
            self._server = socket.create_server((addresses[rank], PORT))

    def publish(self, step: int) -> tuple[int, float]:
        if not self._sockets:
            self._sockets = [socket.create_connection((to, PORT), TIMEOUT_S) for to in self._others]
        started = time.monotonic()
        senders = [threading.Thread(target=to.sendall, args=(memoryview(self.whole),)) for to in self._sockets]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        return step, started

    def install(self, version: int) -> float:
        if not self._sockets:
            self._sockets = [self._server.accept()[0]]
        left = memoryview(self.whole)
        while left:
            taken = self._sockets[0].recv_into(left)
            if not taken:
                raise ConnectionError("the sender has gone")
            left = left[taken:]
        return time.monotonic()


class GlooMember(Member):
    """`torch.distributed.broadcast` of one tensor."""

    num_parts = 1

    def join(self, rank: int, addresses: Sequence[str]) -> None:
        self._place = (rank, len(addresses), addresses[0])
        self._is_joined = False

    def publish(self, step: int) -> tuple[int, float]:
        started, _ = self._broadcast()
        return step, started

    def install(self, version: int) -> float:
        return self._broadcast()[1]

    def _broadcast(self) -> tuple[float, float]:
        import torch
        import torch.distributed as dist

        if not self._is_joined:
            rank, size, first = self._place
            torch.set_num_threads(1)
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://{first}:{PORT}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=TIMEOUT_S),
            )
            self._parts = torch.from_numpy(self.whole).chunk(self.num_parts)
            self._is_joined = True
        dist.barrier()
        started = time.monotonic()
        for work in [dist.broadcast(one, 0, async_op=True) for one in self._parts]:
            work.wait()
        return started, time.monotonic()


class GlooPartsMember(GlooMember):
    """The same of as many tensors as wsync has, all posted before the first is waited for."""

    num_parts = NUM_TENSORS


KINDS = {"wsync": WsyncMember, "direct": DirectMember, "gloo": GlooMember, "gloo_parts": GlooPartsMember}


def serve(target: object) -> None:
    """Answer commands until standard input ends. What others print goes to standard error."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            try:
                answer = {"result": getattr(target, name)(*arguments)}
            except Exception as exc:
                answer = {"error": f"{type(exc).__name__}: {exc}"}
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(KINDS[sys.argv[1]](int(sys.argv[2])))
