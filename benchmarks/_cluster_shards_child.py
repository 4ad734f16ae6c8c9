"""One rank of a sharded trainer, or one worker of a replica, on an emulated host.

    python -m benchmarks._cluster_shards_child trainer|worker NBYTES RANK NUM_RANKS

Tensors are matrices of 32 bits. A trainer's rank has a run of rows of each, as FSDP cuts them; a worker has half of
the rows of every other tensor and half of the columns of the rest, as tensor parallelism does. What a worker must
have is cut from the whole tensors by plain indexing.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

import wsync
from benchmarks._cluster_child import NUM_TENSORS, TIMEOUT_S, part, serve
from wsync.holding import Holding, HoldingBuilder, Region

COLUMNS = 1024
Matrix = np.ndarray[Any, np.dtype[np.int32]]
Slices = tuple[slice, slice]


class Shards:
    """The parts of all tensors that a process has."""

    def __init__(self, nbytes: int, rank: int, num_ranks: int) -> None:
        self.rows = nbytes // NUM_TENSORS // COLUMNS // 4
        self.rank, self.num_ranks = rank, num_ranks
        self.names = [f"t{number:02d}" for number in range(NUM_TENSORS)]
        self.tensors: dict[str, Matrix] = {}
        for number, name in enumerate(self.names):
            rows, columns = self.held(number)
            self.tensors[name] = np.zeros((rows.stop - rows.start, columns.stop - columns.start), np.int32)
        self.config = wsync.Config(transports=("shm", "tcp"))

    def held(self, number: int) -> Slices:
        raise NotImplementedError

    def run_of(self, extent: int) -> slice:
        """This rank's share of a dim."""
        return slice(self.rank * extent // self.num_ranks, (self.rank + 1) * extent // self.num_ranks)

    def holding(self) -> Holding:
        builder = HoldingBuilder()
        for number, (name, tensor) in enumerate(self.tensors.items()):
            rows, columns = self.held(number)
            builder.tensor(name, "int32", (self.rows, COLUMNS))
            builder.local(name, "int32", tensor.shape)
            builder.piece(name, Region((rows.start, columns.start), tensor.shape), name, (0, 0))
        return builder.build()

    def whole(self, number: int, seed: int) -> Matrix:
        return part(seed, number, self.rows * COLUMNS * 4).view(np.int32).reshape(self.rows, COLUMNS)


class TrainerRank(Shards):
    def held(self, number: int) -> Slices:
        return self.run_of(self.rows), slice(0, COLUMNS)

    def join(self) -> None:
        self.publisher = wsync.ShardPublisher(
            "policy", self.holding(), self.tensors, rank=self.rank, num_ranks=self.num_ranks, config=self.config
        )

    def fill(self, seed: int) -> None:
        for number, tensor in enumerate(self.tensors.values()):
            np.copyto(tensor, self.whole(number, seed)[self.held(number)])

    def publish(self, step: int) -> tuple[int, float]:
        """The version, and when publish began."""
        started = time.monotonic()
        version = self.publisher.publish(step, timeout_s=TIMEOUT_S).version
        return version, started


class Worker(Shards):
    def held(self, number: int) -> Slices:
        if number % 2:
            return slice(0, self.rows), self.run_of(COLUMNS)
        return self.run_of(self.rows), slice(0, COLUMNS)

    def join(self) -> None:
        self.replica = wsync.ShardReplica("policy", self.holding(), self.tensors, config=self.config)

    def install(self, version: int) -> float:
        """When the version was committed."""
        self.replica.wait_version(version, timeout_s=TIMEOUT_S)
        return time.monotonic()

    def check(self, seed: int) -> None:
        """Raises AssertionError unless every tensor is that of the seed, and none is still that of the seed before."""
        for number, (name, tensor) in enumerate(self.tensors.items()):
            if not np.array_equal(tensor, self.whole(number, seed)[self.held(number)]):
                raise AssertionError(f"{name} differs from its reference")
            if np.array_equal(tensor, self.whole(number, seed - 1)[self.held(number)]):
                raise AssertionError(f"{name} has not changed")


if __name__ == "__main__":
    kind = {"trainer": TrainerRank, "worker": Worker}[sys.argv[1]]
    serve(kind(*(int(given) for given in sys.argv[2:5])))
