"""Members in real Ray actors: sync, async, the driver; coordinator and holders found by name and restarted by Ray."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from _members import eventually

pytestmark = [
    pytest.mark.ray,
    pytest.mark.process,
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]
NUM_ELEMENTS = 700_001


def weights(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """Every version has other values in every element."""
    return {
        "a": np.arange(NUM_ELEMENTS, dtype=np.int64) * 31 + step * 1_000_003,
        "b": np.full((33, 7), step, dtype=np.float32),
    }


def fingerprint(tensors: dict[str, np.ndarray[Any, Any]]) -> str:
    return hashlib.sha256(b"".join(tensors[name].tobytes() for name in sorted(tensors))).hexdigest()


class Trainer:
    def __init__(self) -> None:
        import wsync

        self.tensors = weights(0)
        self.publisher = wsync.Publisher("policy", self.tensors)

    def publish(self, step: int, num_replicas: int) -> int:
        for name, value in weights(step).items():
            self.tensors[name][...] = value
        publication = self.publisher.publish(step)
        for value in self.tensors.values():
            value[...] = 0  # training goes on at once
        publication.wait_committed(60.0, num_replicas=num_replicas)
        return int(publication.version)


class Server:
    def __init__(self) -> None:
        import wsync

        self.tensors = weights(0)
        self.replica = wsync.Replica("policy", self.tensors)

    def follow(self, version: int) -> tuple[int, str]:
        self.replica.wait_version(version, timeout_s=60.0)
        return self.replica.version, fingerprint(self.tensors)

    def pid(self) -> int:
        return os.getpid()


class AsyncServer:
    """A replica that commits between the steps of a coroutine, as an async engine does."""

    async def start(self) -> None:
        import wsync

        self.tensors = weights(0)
        self.replica = wsync.Replica("policy", self.tensors)

    async def follow(self, version: int) -> tuple[int, str]:
        while self.replica.version < version:
            await asyncio.sleep(0.005)
            self.replica.commit_latest()
        return self.replica.version, fingerprint(self.tensors)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    from wsync.demo import cluster

    with cluster.private_folder(), cluster.local_cluster(3, is_verbose=False) as node_ids:
        import ray.cloudpickle

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this module
        yield node_ids


def on(node_id: str, kind: type, **options: Any) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(kind).options(num_cpus=0, max_restarts=-1, scheduling_strategy=where, **options).remote()


def follow_next(trainer: Any, servers: list[Any], step: int, version: int) -> None:
    """The next version reaches every server, and is what the trainer had."""
    import ray

    followed = [server.follow.remote(version) for server in servers]
    assert ray.get(trainer.publish.remote(step, len(servers)), timeout=90) == version
    expected = fingerprint(weights(step))
    assert expected != fingerprint(weights(step - 1))
    assert ray.get(followed, timeout=90) == [(version, expected)] * len(servers)


def test_actors_of_three_nodes(nodes: list[str]) -> None:
    """One trainer, a sync and an async replica, on three nodes; then everything of wsync's own is killed once."""
    import ray

    import wsync.integrations.ray as wsync_ray

    trainer = on(nodes[0], Trainer)
    servers = [on(nodes[1], Server), on(nodes[2], AsyncServer)]
    ray.get(servers[1].start.remote(), timeout=90)
    follow_next(trainer, servers, 1, 1)
    places = wsync_ray.holders()
    assert sorted(place.node_id for place in places) == sorted(nodes), "one holder per node"

    os.kill(next(place.pid for place in places if place.node_id == nodes[1]), signal.SIGKILL)
    follow_next(trainer, servers, 2, 2)

    coordinator = ray.get_actor(wsync_ray.coordinator_name(), namespace=wsync_ray.NAMESPACE)
    os.kill(ray.get(coordinator.pid.remote(), timeout=30), signal.SIGKILL)
    follow_next(trainer, servers, 3, 3)

    os.kill(ray.get(servers[0].pid.remote(), timeout=30), signal.SIGKILL)

    def is_back() -> bool:
        try:
            return bool(ray.get(servers[0].follow.remote(3), timeout=60) == (3, fingerprint(weights(3))))
        except ray.exceptions.RayActorError:
            return False

    eventually(is_back, "Ray restarts the replica, which catches up")
    follow_next(trainer, servers, 4, 4)


def test_the_driver_is_a_member_too(nodes: list[str]) -> None:
    import wsync

    tensors = weights(0)
    with wsync.Publisher("from-driver", weights(5)) as publisher, wsync.Replica("from-driver", tensors) as replica:
        version = publisher.publish(5).version
        assert replica.wait_version(version, timeout_s=60.0).step == 5
        assert fingerprint(tensors) == fingerprint(weights(5)) != fingerprint(weights(0))
