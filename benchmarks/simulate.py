"""What routes promise: the planner against the bound and a linear program, the simulator against the planner.

    python -m benchmarks.simulate [--quick] [--json FILE]

Everything here is computed for machines that are not there (`recipes/topologies`); only planning times are measured.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from benchmarks._bench import Claim, Options, main, median
from wsync.discovery.machines import Machines
from wsync.engine.fabric import Fabric
from wsync.engine.routes import Lane, Routing, route
from wsync.forecast import Job, placed
from wsync.simulation import simulate_routing

SIM_4096, SIM_NVL72, NVL72_SPEEDUP = "sim_4096_vs_bound", "sim_nvl72_vs_bound", "sim_nvl72_vs_one_pull_per_replica"
PLAN_4096, SIM_PLAN, LP = "plan_4096_s", "sim_vs_predicted", "planner_vs_lp"
NAMES = (SIM_4096, SIM_NVL72, NVL72_SPEEDUP, SIM_PLAN, PLAN_4096, LP)
ROOT = Path(__file__).parents[1]
TOPOLOGIES = ROOT / "recipes" / "topologies"
MIB = 1 << 20


def h100(options: Options) -> tuple[Fabric, list[Lane]]:
    """70B in bfloat16 from 64 ranks to replicas of TP8 on HGX H100 hosts, one holder per host."""
    num_replicas = 32 if options.is_quick else 512
    topology = Machines.load(TOPOLOGIES / "hgx-h100.toml").topology({"hgx-h100": 8 + num_replicas})
    return placed(topology, Job(nbytes=140 * 10**9, num_ranks=64, num_workers=8, num_replicas=num_replicas))


def nvl72() -> tuple[Fabric, list[Lane], Job]:
    """671B in bfloat16 from one rack to nine replicas of TP8 in another, one holder per device."""
    topology = Machines.load(TOPOLOGIES / "gb200-nvl72.toml").topology({"gb200-nvl72": 36})
    job = Job(nbytes=1342 * 10**9, num_ranks=72, num_workers=8, num_replicas=9, in_device_memory=True)
    return *placed(topology, job), job


def measure(options: Options) -> Iterator[Claim]:
    if options.wants(PLAN_4096):
        yield plan_4096(options)
    ratios: list[float] = []
    if options.wants(SIM_4096, SIM_PLAN):
        fabric, lanes = h100(options)
        routing = route(fabric, lanes, chunk_nbytes=64 * MIB)
        simulated = simulate_routing(fabric, routing).time_s
        ratios.append(simulated / routing.predicted_s)
        yield claim(SIM_4096, simulated, routing)
    if options.wants(SIM_NVL72, NVL72_SPEEDUP, SIM_PLAN) and not options.is_quick:
        fabric, lanes, job = nvl72()
        routing = route(fabric, lanes, chunk_nbytes=16 * MIB)
        simulated = simulate_routing(fabric, routing).time_s
        ratios.append(simulated / routing.predicted_s)
        yield claim(SIM_NVL72, simulated, routing)
        naive_s = job.nbytes / (job.num_workers * 50e9)
        yield Claim.at_least(NVL72_SPEEDUP, simulated, "s", naive_s, naive_s / simulated, 8.0)
    if ratios:
        worst = max(ratios, key=lambda ratio: abs(ratio - 1))
        yield Claim.reported(SIM_PLAN, worst, "x", 1.0, worst)
    if options.wants(LP):
        yield from planner_vs_lp(options)


def claim(name: str, simulated_s: float, routing: Routing) -> Claim:
    bound_s = routing.bound.time_s
    return Claim.at_most(name, simulated_s, "s", bound_s, simulated_s / bound_s, 1.15)


def plan_4096(options: Options) -> Claim:
    """Routes for 4,096 workers with a holder each: 512 replicas of TP8, 64 ranks, 512 lanes."""
    topology = Machines.load(TOPOLOGIES / "hgx-h100.toml").topology({"hgx-h100": 520})
    job = Job(nbytes=140 * 10**9, num_ranks=64, num_workers=8, num_replicas=512, in_device_memory=True)
    samples = []
    for _ in range(1 if options.is_quick else 3):
        started = time.perf_counter()
        fabric, lanes = placed(topology, job)
        route(fabric, lanes)
        samples.append(time.perf_counter() - started)
    seconds = median(samples)
    return Claim.at_most(PLAN_4096, seconds, "s", 2.0, seconds / 2.0, 1.0)


def planner_vs_lp(options: Options) -> Iterator[Claim]:
    """The predicted time by the least time, worst of small topologies of the kinds that `tests/property` draws."""
    sys.path.insert(0, str(ROOT / "tests" / "property"))
    try:
        drawn = importlib.import_module("test_route_bounds")
        program = importlib.import_module("broadcast_lp")
    except ModuleNotFoundError as exc:
        sys.stderr.write(f"{LP} is not measured: {exc.name} is not installed; wsync[test] has what it needs\n")
        return
    finally:
        sys.path.pop(0)
    worst = (1.0, 1.0)
    for number in range(30 if options.is_quick else 300):
        random = Random(f"{options.seed}/{number}")
        if random.random() < 0.7:
            topology, nodes = drawn.hosts_in_racks(random, random.randint(2, 7))
        else:
            topology, nodes = drawn.devices_in_islands(random, random.randint(2, 3), 2, span=random.randint(1, 2))
        fabric, lanes = Fabric(topology, nodes), drawn.some_lanes(random, nodes, to_all=True)
        planned, least = route(fabric, lanes).predicted_s, program.least_time(fabric, lanes)
        if planned * worst[1] > worst[0] * least:
            worst = (planned, least)
    planned, least = worst
    yield Claim.at_most(LP, planned, "s", least, planned / least, 1.10)


if __name__ == "__main__":
    sys.exit(main("simulate", NAMES, measure))
