"""A chain of six hosts, one of whose links drops to a tenth in the middle of a version."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from benchmarks._bench import Claim, Options, median
from benchmarks._cluster_remote import MIB, ROUNDS, Broadcast, cluster_of
from benchmarks.emulated import EmulatedCluster, EmulatedHost
from wsync.memory import available_memory

RECOVERS, REPLANNED = "degraded_path_recovers", "degraded_replanned_s"
SLOW = "h3"
MEMORY_FACTOR = 19
"""Times the bytes: on each of six hosts the tensors and two slots, and what the processes need besides."""


def degraded(options: Options) -> Iterator[Claim]:
    """The others take little longer than without it; the coordinator soon says that it plans anew."""
    nbytes = (128 if options.is_quick else 768) * MIB
    if available_memory() < MEMORY_FACTOR * nbytes:
        needed = MEMORY_FACTOR * nbytes / 2**30
        sys.stderr.write(f"{RECOVERS} and {REPLANNED} are not measured: {needed:.1f} GiB of memory are not available\n")
        return
    hosts = [f"h{number}" for number in range(6)]
    with cluster_of([EmulatedHost(name, 1.0) for name in hosts]) as cluster:
        broadcast = Broadcast(cluster, hosts, nbytes)
        broadcast.round()
        rounds = [broadcast.round() for _ in range(ROUNDS)]
        undisturbed = {name: median([each[name] for each in rounds]) for name in hosts[1:]}
        times, replanned_s, watched_s = disturbed_round(cluster, broadcast, max(undisturbed.values()) / 3)
    worst = max(times, key=lambda name: times[name] / undisturbed[name])
    ratio = times[worst] / undisturbed[worst]
    if options.is_quick:  # too short for a hop to be found slow
        yield Claim.reported(RECOVERS, times[worst], "s", undisturbed[worst], ratio)
    else:
        yield Claim.at_most(RECOVERS, times[worst], "s", undisturbed[worst], ratio, 1.2)
    if options.is_quick:
        return
    if replanned_s is None:
        sys.stderr.write(f"{REPLANNED}: until the others had it, nobody said that a path to or from {SLOW} is slow\n")
        yield Claim(REPLANNED, watched_s, "s", 2.0, watched_s / 2.0, "<= 1", False)
    else:
        yield Claim.at_most(REPLANNED, replanned_s, "s", 2.0, replanned_s / 2.0, 1.0)


def disturbed_round(
    cluster: EmulatedCluster, broadcast: Broadcast, after_s: float
) -> tuple[dict[str, float], float | None, float]:
    """Publish to commit of the replicas that keep their links; and from the drop to the coordinator's new plan (None:
    there was none), and to when these replicas had committed.

    The slow host has its link back when the others have committed, and must end with the right bytes too.
    """
    started = broadcast.publish()
    time.sleep(max(0.0, started + after_s - time.monotonic()))
    cluster.degrade(SLOW, 0.1)
    dropped = time.monotonic()
    times = {host: broadcast.committed(host) for host in broadcast.replicas if host != SLOW}
    watched_s = time.monotonic() - dropped
    cluster.degrade(SLOW, 1.0)
    broadcast.committed(SLOW)
    broadcast.check()
    assert broadcast.job is not None
    said = broadcast.job.log.first(["is slow", SLOW], dropped)
    return times, None if said is None else said - dropped, watched_s
