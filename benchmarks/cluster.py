"""Broadcasts over real links of an emulated cluster, each beside the time that its slowest link needs.

    python -m benchmarks.cluster [--quick] [--json FILE] [--only CLAIM,...]

Hosts are network namespaces with shaped links (`benchmarks.emulated`), so this needs root; all bytes are real.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

from benchmarks._bench import Claim, Options, main, median
from benchmarks._cluster_degraded import RECOVERS, REPLANNED, degraded
from benchmarks._cluster_peers import GOALS, speedups
from benchmarks._cluster_remote import MIB, ROUNDS, Broadcast, bound_s, cluster_of
from benchmarks._cluster_shards import SHARDED, sharded
from benchmarks.emulated import EmulatedHost, EmulatedRack, why_not

CHAIN, ENTERED, MIXED, RACKS = (
    "chain_8x1gbit_vs_bound",
    "bytes_into_host_over_needed",
    "mixed_nics_vs_bound",
    "two_racks_vs_bound",
)
NAMES = (CHAIN, ENTERED, *GOALS, MIXED, RACKS, SHARDED, RECOVERS, REPLANNED)


def chain(options: Options) -> Iterator[Claim]:
    """One trainer to seven hosts at 1 Gbit/s."""
    nbytes = (32 if options.is_quick else 256) * MIB
    names = [f"h{number}" for number in range(8)]
    with cluster_of([EmulatedHost(name, 1.0) for name in names]) as cluster:
        broadcast = Broadcast(cluster, names, nbytes)
        broadcast.round()
        if options.wants(CHAIN, ENTERED):
            seconds, bound = median([broadcast.last() for _ in range(ROUNDS)]), bound_s(nbytes, 1.0)
            yield Claim.at_most(CHAIN, seconds, "s", bound, seconds / bound, 1.06)
            entered = broadcast.entered()
            worst = max(entered[name] for name in names[1:]) / nbytes
            yield Claim.at_most(ENTERED, worst, "x", 1.0, worst, 1.02)
        yield from speedups(options, cluster, names, nbytes, broadcast)


def mixed(options: Options) -> Iterator[Claim]:
    """Receivers at 1, 0.5 and 0.25 Gbit/s, each against its own floor."""
    nbytes = (32 if options.is_quick else 128) * MIB
    rates = {"h1": 0.25, "h2": 1.0, "h3": 0.5}
    with cluster_of([EmulatedHost("h0", 1.0), *(EmulatedHost(name, rate) for name, rate in rates.items())]) as cluster:
        broadcast = Broadcast(cluster, ["h0", *rates], nbytes)
        broadcast.round()
        rounds = [broadcast.round() for _ in range(ROUNDS)]
    ratios = {name: median([r[name] for r in rounds]) / bound_s(nbytes, rate) for name, rate in rates.items()}
    worst = max(ratios, key=lambda name: ratios[name])
    bound = bound_s(nbytes, rates[worst])
    yield Claim.at_most(MIXED, ratios[worst] * bound, "s", bound, ratios[worst], 1.15)


def racks(options: Options) -> Iterator[Claim]:
    """Three hosts in each of two racks with an uplink of half a host's link."""
    nbytes = (32 if options.is_quick else 128) * MIB
    hosts = [EmulatedHost(f"h{number}", 1.0, f"r{number % 2}") for number in range(6)]
    with cluster_of(hosts, [EmulatedRack("r0", 0.5), EmulatedRack("r1", 0.5)]) as cluster:
        broadcast = Broadcast(cluster, [host.name for host in hosts], nbytes)
        broadcast.round()
        seconds, bound = median([broadcast.last() for _ in range(ROUNDS)]), bound_s(nbytes, 0.5)
    yield Claim.at_most(RACKS, seconds, "s", bound, seconds / bound, 1.15)


def measure(options: Options) -> Iterator[Claim]:
    if reason := why_not():
        raise SystemExit(f"no emulated cluster: {reason}")
    if options.wants(CHAIN, ENTERED, *GOALS):
        yield from chain(options)
    if options.wants(MIXED):
        yield from mixed(options)
    if options.wants(RACKS):
        yield from racks(options)
    if options.wants(SHARDED):
        yield from sharded(options)
    if options.wants(RECOVERS, REPLANNED):
        yield from degraded(options)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts go away then, too
    sys.exit(main("cluster", NAMES, measure, packages=("numpy", "msgspec", "torch", "ray", "nixl-cu12")))
