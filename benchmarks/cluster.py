"""Broadcasts over real links of an emulated cluster, each beside the time that its slowest link needs.

    python -m benchmarks.cluster [--quick] [--json FILE] [--only CLAIM,...]

Hosts are network namespaces with shaped links (`benchmarks.emulated`), so this needs root. All bytes are real, new in
every round, and compared at every receiver; members are told the topology. 256 MiB (`--quick`: 32), and each figure is
the median of three rounds, from the start of publish to the last commit unless it says otherwise.

`chain_8x1gbit_vs_bound`: seven hosts at 1 Gbit/s. `bytes_into_host_over_needed`: of these, the one that got most.
`speedup_vs_PEER`: seconds of the peer by seconds of wsync there, in turns (`benchmarks._cluster_peers`). A peer that
cannot run is named on standard error, without a number.
`mixed_nics_vs_bound`: hosts at 1, 0.5 and 0.25 Gbit/s, each until its own commit by its own link.
`two_racks_vs_bound`: six hosts in two racks, by the uplink of half a host's rate.
`sim_vs_emulated`: the simulator's seconds for these three cases by the measured ones, the worst; the ratio is how far
that is from 1.
`sharded_4x4_vs_bound`: four ranks of a sharded trainer on two hosts to three replicas of two workers.
`degraded_path_recovers`: a link in a chain of six hosts drops to a tenth after a third of the time (768 MiB, `--quick`:
128); the worst of the other replicas by its undisturbed time.
`degraded_replanned_s`: from that drop until the coordinator says that the path is slow; not with `--quick`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

from benchmarks._bench import Claim, Options, main, median
from benchmarks._cluster_degraded import RECOVERS, REPLANNED, degraded
from benchmarks._cluster_peers import GOALS, speedups
from benchmarks._cluster_remote import ROUNDS, Broadcast, bound_s, cluster_of, nbytes_of
from benchmarks._cluster_shards import SHARDED, sharded
from benchmarks._cluster_sim import simulated_s
from benchmarks.emulated import EmulatedHost, EmulatedRack, why_not

CHAIN, ENTERED, MIXED, RACKS = (
    "chain_8x1gbit_vs_bound",
    "bytes_into_host_over_needed",
    "mixed_nics_vs_bound",
    "two_racks_vs_bound",
)
SIM = "sim_vs_emulated"
NAMES = (CHAIN, ENTERED, *GOALS, MIXED, RACKS, SIM, SHARDED, RECOVERS, REPLANNED)


def chain(options: Options, ratios: list[float]) -> Iterator[Claim]:
    """One trainer to seven hosts at 1 Gbit/s."""
    names = [f"h{number}" for number in range(8)]
    nbytes = nbytes_of(options)
    with cluster_of([EmulatedHost(name, 1.0) for name in names]) as cluster:
        broadcast = Broadcast(cluster, names, nbytes)
        broadcast.round()
        if options.wants(CHAIN, ENTERED, SIM):
            seconds, bound = median([broadcast.last() for _ in range(ROUNDS)]), bound_s(nbytes, 1.0)
            ratios.append(simulated_s(cluster.topology(), names, nbytes) / seconds)
            yield Claim.at_most(CHAIN, seconds, "s", bound, seconds / bound, 1.06)
            entered = broadcast.entered()
            worst = max(entered[name] for name in names[1:]) / nbytes
            yield Claim.at_most(ENTERED, worst, "x", 1.0, worst, 1.02)
        yield from speedups(options, cluster, names, nbytes, broadcast)


def mixed(options: Options, ratios: list[float]) -> Iterator[Claim]:
    """Receivers at 1, 0.5 and 0.25 Gbit/s, each against its own floor."""
    rates = {"h1": 0.25, "h2": 1.0, "h3": 0.5}
    names, nbytes = ["h0", *rates], nbytes_of(options)
    with cluster_of([EmulatedHost("h0", 1.0), *(EmulatedHost(name, rate) for name, rate in rates.items())]) as cluster:
        broadcast = Broadcast(cluster, names, nbytes)
        broadcast.round()
        rounds = [broadcast.round() for _ in range(ROUNDS)]
        ratios.append(
            simulated_s(cluster.topology(), names, nbytes) / median([max(times.values()) for times in rounds])
        )
    over = {name: median([times[name] for times in rounds]) / bound_s(nbytes, rate) for name, rate in rates.items()}
    worst = max(over, key=lambda name: over[name])
    bound = bound_s(nbytes, rates[worst])
    yield Claim.at_most(MIXED, over[worst] * bound, "s", bound, over[worst], 1.15)


def racks(options: Options, ratios: list[float]) -> Iterator[Claim]:
    """Three hosts in each of two racks with an uplink of half a host's link."""
    hosts = [EmulatedHost(f"h{number}", 1.0, f"r{number % 2}") for number in range(6)]
    names, nbytes = [host.name for host in hosts], nbytes_of(options)
    with cluster_of(hosts, [EmulatedRack("r0", 0.5), EmulatedRack("r1", 0.5)]) as cluster:
        broadcast = Broadcast(cluster, names, nbytes)
        broadcast.round()
        seconds, bound = median([broadcast.last() for _ in range(ROUNDS)]), bound_s(nbytes, 0.5)
        ratios.append(simulated_s(cluster.topology(), names, nbytes) / seconds)
    yield Claim.at_most(RACKS, seconds, "s", bound, seconds / bound, 1.15)


def measure(options: Options) -> Iterator[Claim]:
    if reason := why_not():
        raise SystemExit(f"no emulated cluster: {reason}")
    ratios: list[float] = []
    if options.wants(CHAIN, ENTERED, SIM, *GOALS):
        yield from chain(options, ratios)
    if options.wants(MIXED, SIM):
        yield from mixed(options, ratios)
    if options.wants(RACKS, SIM):
        yield from racks(options, ratios)
    if options.wants(SIM):
        worst = max(ratios, key=lambda ratio: abs(ratio - 1))
        yield Claim.at_most(SIM, worst, "x", 1.0, abs(worst - 1), 0.10)
    if options.wants(SHARDED):
        yield from sharded(options)
    if options.wants(RECOVERS, REPLANNED):
        yield from degraded(options)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts go away then, too
    sys.exit(main("cluster", NAMES, measure, packages=("numpy", "msgspec", "torch", "ray", "nixl-cu12")))
