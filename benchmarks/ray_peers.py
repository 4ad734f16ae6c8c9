"""Three ways of Ray to bring a trainer actor's weights to replica actors, each as fast as it goes.

`object_store`: one `ray.put` of numpy views per 64 MiB bucket, sent on as soon as it is there; replicas get without
a copy and copy in place. `gloo`: Ray Direct Transport by task argument (it has no in-place receive and no
`ray.put`), one reference for all tensors, then a copy in place. `nixl`: Ray Direct Transport by `ray.put` and
`set_target_for_ref`, one reference for all tensors, memory registered once, received in place.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import numpy as np
import ray
import ray.experimental
import torch
from ray.experimental.collective import create_collective_group

from benchmarks.shapes import Layout, Weights, buckets_of, nbytes_of

BUCKET_NBYTES = 64 << 20


class Member:
    """Both kinds of actor: tensors, their bytes, and the time."""

    def __init__(self, layout: Layout, seed: int, num_threads: int, way: str) -> None:
        torch.set_num_threads(num_threads)
        self.weights = Weights(layout, seed)
        self.live = list(self.weights.tensors.values())
        if way != "object_store":
            ray.experimental.wait_tensor_freed(torch.empty(1))  # creates Ray's RDT state before two threads can
        if way == "nixl":
            for tensor in self.live:
                ray.experimental.register_nixl_memory(tensor)

    def ready(self) -> int:
        """The actor's process, once it is there."""
        return os.getpid()


class Trainer(Member):
    """The source. `fill` gives it new bytes."""

    started = 0.0

    def fill(self, round_: int) -> None:
        self.weights.fill(round_)

    def start_time(self) -> float:
        return self.started

    def put_and_send(self, replicas: list[Any]) -> tuple[float, list[float]]:
        """Object store: put bucket after bucket, each on its way while the next is put."""
        views = self.weights.bytes()
        started = time.monotonic()
        answers = []
        for group in buckets_of([view.nbytes for view in views], BUCKET_NBYTES):
            ref = ray.put([views[index] for index in group])
            answers += [replica.load_views.remote(group, [ref]) for replica in replicas]
            del ref
        return started, ray.get(answers)

    def put_and_pull(self, replicas: list[Any]) -> tuple[float, list[float]]:
        """NIXL: one reference to all tensors, pulled by all replicas at once."""
        started = time.monotonic()
        ref = ray.put(self.live, _tensor_transport="NIXL")
        return started, ray.get([replica.pull.remote([ref]) for replica in replicas])


class GlooTrainer(Trainer):
    """The source where Ray Direct Transport goes by gloo."""

    @ray.method(tensor_transport="gloo")
    def send(self) -> list[torch.Tensor]:
        """The tensors themselves, as an RDT object."""
        self.started = time.monotonic()
        return self.live


class Replica(Member):
    """A receiver. Each way in returns when all bytes are in its tensors, with the time at which they were."""

    def remember(self) -> None:
        self.weights.remember()

    def check(self, round_: int) -> None:
        self.weights.check(round_)

    def load_views(self, group: list[int], refs: list[Any]) -> float:
        views = self.weights.bytes()
        for index, given in zip(group, ray.get(refs[0]), strict=True):
            np.copyto(views[index], given)
        return time.monotonic()

    def load_tensors(self, tensors: list[torch.Tensor]) -> float:
        torch._foreach_copy_(self.live, tensors)
        return time.monotonic()

    def pull(self, refs: list[Any]) -> float:
        ray.experimental.set_target_for_ref(refs[0], self.live)
        given = ray.get(refs[0])
        ended = time.monotonic()
        if any(ours.data_ptr() != theirs.data_ptr() for ours, theirs in zip(self.live, given, strict=True)):
            raise AssertionError("NIXL has not received in place")
        return ended


class RayDriver:
    """Starts a Ray on this machine for one way, runs rounds on it, and ends it."""

    def __init__(self, way: str, layout: Layout, seed: int) -> None:
        self._way = way
        self._layout = layout
        self._seed = seed
        self._round = 0
        self._folder = tempfile.TemporaryDirectory(prefix="wb-", ignore_cleanup_errors=True)

    def start(self, num_replicas: int, num_threads: int) -> None:
        """Start Ray and the actors. Returns when all of them are there."""
        self._init()
        options: dict[str, Any] = {"num_cpus": 1}
        if self._way != "object_store":
            options["enable_tensor_transport"] = True
        trainer: Any = ray.remote(**options)(GlooTrainer if self._way == "gloo" else Trainer)
        replica: Any = ray.remote(**options)(Replica)
        args = (self._layout, self._seed, num_threads, self._way)
        self._trainer = trainer.options(**self._place(0)).remote(*args)
        self._replicas = [replica.options(**self._place(1 + n)).remote(*args) for n in range(num_replicas)]
        actors = [self._trainer, *self._replicas]
        ray.get([actor.ready.remote() for actor in actors])
        if self._way == "gloo":
            create_collective_group(actors, backend="gloo")

    def _place(self, rank: int) -> dict[str, Any]:
        """Options of the trainer's actor (rank 0) or a replica's that say where it runs."""
        return {}

    def _init(self) -> None:
        folder = os.path.join(self._folder.name, "ray")
        os.mkdir(folder)
        os.environ["RAY_TMPDIR"] = self._folder.name
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            object_store_memory=3 * nbytes_of(self._layout) if self._way == "object_store" else 128 << 20,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
            configure_logging=False,
        )

    def round(self) -> float:
        self._round += 1
        ray.get(self._trainer.fill.remote(self._round))
        ray.get([replica.remember.remote() for replica in self._replicas])
        if self._way == "gloo":
            ref = self._trainer.send.remote()
            ends = ray.get([replica.load_tensors.remote(ref) for replica in self._replicas])
            started = ray.get(self._trainer.start_time.remote())
        else:
            move = self._trainer.put_and_send if self._way == "object_store" else self._trainer.put_and_pull
            started, ends = ray.get(move.remote(self._replicas))
        ray.get([replica.check.remote(self._round) for replica in self._replicas])
        return max(ends) - started

    def close(self) -> None:
        """End Ray, whether or not it had started."""
        ray.shutdown()
        self._folder.cleanup()
