"""One member on an emulated host: reads a command per line from standard input, answers each with a line of JSON.

Its tensors are `NUM_TENSORS` equal parts of a seeded block, which both sides can compute without wsync.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import numpy as np

import wsync

NUM_TENSORS = 16
TIMEOUT_S = 120.0


def block(nbytes: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a version."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def digest(tensors: dict[str, np.ndarray[Any, Any]]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        found.update(tensors[name])
    return found.hexdigest()


class Member:
    """A trainer or a replica of one channel."""

    def __init__(self, nbytes: int, chunk_nbytes: int) -> None:
        size = nbytes // NUM_TENSORS
        self.tensors = {f"t{number:02d}": np.zeros(size, np.uint8) for number in range(NUM_TENSORS)}
        self.config = wsync.Config(chunk_nbytes=chunk_nbytes, transports=("tcp",))

    def train(self) -> None:
        self.publisher = wsync.Publisher("policy", self.tensors, config=self.config)

    def follow(self) -> None:
        self.replica = wsync.Replica("policy", self.tensors, config=self.config)

    def fill(self, seed: int) -> str:
        parts = np.split(block(sum(t.nbytes for t in self.tensors.values()), seed), NUM_TENSORS)
        for tensor, part in zip(self.tensors.values(), parts, strict=True):
            np.copyto(tensor, part)
        return digest(self.tensors)

    def publish(self, step: int) -> tuple[int, float]:
        """The version, and when publish began."""
        started = time.monotonic()
        self.publication = self.publisher.publish(step=step)
        return self.publication.version, started

    def install(self, version: int) -> float:
        """When the version was committed."""
        self.replica.wait_version(version, timeout_s=TIMEOUT_S)
        return time.monotonic()

    def digest(self) -> str:
        return digest(self.tensors)

    def status(self, num_replicas: int) -> dict[str, Any]:
        """Of each receiving host: who it pulled from first, and the bytes that entered it."""
        self.publication.wait_committed(timeout_s=TIMEOUT_S, num_replicas=num_replicas)
        return {
            holder.host: [list(holder.parents), holder.nbytes_received] for holder in self.publication.status().holders
        }


def main() -> None:
    member = Member(int(sys.argv[1]), int(sys.argv[2]))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"result": getattr(member, name)(*arguments)}
        except Exception as exc:
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
