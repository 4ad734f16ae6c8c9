"""Other ways to bring a trainer's bytes to seven hosts, each in turns with wsync on the same links.

Every way moves the same bytes into memory that the receivers have, new ones in every round, and every receiver's are
compared. `direct`: every receiver takes all bytes from the trainer, over sockets. `torch_gloo_broadcast`: as one tensor
or as several, whichever is faster. `ray_object_store`, `rdt_nixl`: see `benchmarks.ray_peers`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks._bench import Claim, Options, interleaved, median
from benchmarks._cluster_remote import ROUNDS, Broadcast, Remote
from benchmarks.emulated import EmulatedCluster, ray_environment

ROOT = Path(__file__).resolve().parent.parent
GOALS = {
    "speedup_vs_direct": 5.0,
    "speedup_vs_torch_gloo_broadcast": 2.0,
    "speedup_vs_ray_object_store": 2.0,
    "speedup_vs_rdt_nixl": 5.0,
}
NEEDS = {
    "speedup_vs_torch_gloo_broadcast": ("torch",),
    "speedup_vs_ray_object_store": ("ray", "torch"),
    "speedup_vs_rdt_nixl": ("ray", "torch", "nixl_cu12|nixl_cu13"),
}


class Way(Protocol):
    spinning: Sequence[int]
    """Processes that take a core also while they wait. The hosts share this machine's, so wsync would lack it."""

    def last(self) -> float: ...
    def stop(self) -> None: ...


class PeerFailed(RuntimeError):
    """What a peer did, so that wsync's own failures are not taken for it."""


def speedups(
    options: Options, cluster: EmulatedCluster, hosts: Sequence[str], nbytes: int, ours: Broadcast
) -> Iterator[Claim]:
    """wsync, which stays up, against each way that can run. The others are named on standard error, without numbers."""
    tried_ray: list[str] = []

    def by_ray(way: str) -> RayWay:
        if not tried_ray:
            tried_ray.append(way)
            cluster.start_ray(num_cpus=1, object_store_nbytes=2 * nbytes + (128 << 20), environment=RAY_ENVIRONMENT)
        return RayWay(cluster, hosts, nbytes, way)

    def by(kind: str) -> Broadcast:
        return Broadcast(cluster, hosts, nbytes, kind=kind)

    ways: dict[str, tuple[Callable[[], Way], ...]] = {
        "speedup_vs_direct": (lambda: by("direct"),),
        "speedup_vs_torch_gloo_broadcast": (lambda: by("gloo"), lambda: by("gloo_parts")),
        "speedup_vs_ray_object_store": (lambda: by_ray("object_store"),),
        "speedup_vs_rdt_nixl": (lambda: by_ray("nixl"),),
    }
    for name, variants in ways.items():
        if not options.wants(name):
            continue
        try:
            if missing := missing_packages(name):
                raise PeerFailed(f"not installed: {missing}")
            total, theirs = fastest(ours, variants)
        except PeerFailed as exc:
            sys.stderr.write(f"{name} is not measured: {exc}\n")
            continue
        yield Claim.at_least(name, total, "s", theirs, theirs / total, GOALS[name])


def fastest(ours: Broadcast, variants: Sequence[Callable[[], Way]]) -> tuple[float, float]:
    """Seconds of wsync and of the peer, in the rounds of the peer's fastest variant."""
    found = []
    for make in variants:
        with running(make) as way:
            took = interleaved({"ours": lambda way=way: ours_alone(ours, way), "theirs": way.last}, rounds=ROUNDS)
        found.append((median(took["ours"]), median(took["theirs"])))
    return min(found, key=lambda pair: pair[1])


def ours_alone(ours: Broadcast, way: Way) -> float:
    """A round of wsync, while what spins is stopped."""
    for pid in way.spinning:
        os.kill(pid, signal.SIGSTOP)
    try:
        return ours.last()
    finally:
        for pid in way.spinning:
            os.kill(pid, signal.SIGCONT)


def missing_packages(name: str) -> str:
    """What the peer needs and is not installed, by name; empty if it can run."""
    missing = [
        needed.replace("|", " or ")
        for needed in NEEDS.get(name, ())
        if all(importlib.util.find_spec(package) is None for package in needed.split("|"))
    ]
    return ", ".join(missing)


@contextlib.contextmanager
def running(make: Callable[[], Way]) -> Iterator[Way]:
    """The peer, up inside of this. What goes wrong in it is raised as `PeerFailed`."""
    with failing():
        way = make()
    try:
        yield Guarded(way)
    finally:
        way.stop()


@contextlib.contextmanager
def failing() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, AssertionError) as exc:
        raise PeerFailed(str(exc)) from exc


class Guarded:
    """A way whose failures are `PeerFailed`."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self.spinning = way.spinning

    def last(self) -> float:
        with failing():
            return self._way.last()

    def stop(self) -> None:
        self._way.stop()


RAY_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(
        filter(None, (str(ROOT), str(ROOT / "benchmarks" / "nixl_alias"), os.environ.get("PYTHONPATH", "")))
    ),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "UCX_TLS": "tcp",  # the hosts share a kernel, and UCX would go by its memory
    "UCX_NET_DEVICES": "eth0",
}


class RayWay:
    """One of `benchmarks.ray_peers`, on the cluster's Ray."""

    def __init__(self, cluster: EmulatedCluster, hosts: Sequence[str], nbytes: int, way: str) -> None:
        first = hosts[0]
        argv = [way, str(nbytes), cluster.ray_address, cluster.address(first), ",".join(hosts)]
        environment = {**ray_environment(), **RAY_ENVIRONMENT}
        self._driver = Remote(cluster, first, environment, "benchmarks._cluster_ray", *argv)
        actors = self._driver.call("join")
        self.spinning = actors if way == "nixl" else ()

    def last(self) -> float:
        return float(self._driver.call("round"))

    def stop(self) -> None:
        self._driver.stop()
