"""What a broadcast would take on machines that need not be there: `wsync plan`.

The model is taken as cut evenly: each of S trainer ranks has W / S bytes of it, each of the k workers of a replica
wants W / k, a k-th of what every rank has. Ranks and workers are put on the topology's devices in their order, ranks
first. What is predicted is the way from holder to holder, not the snapshot before it and the commit after it.
"""

from __future__ import annotations

import json
import re
import struct
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from wsync.engine.fabric import Fabric, Limits, Node
from wsync.engine.route_cost import load_of, plus
from wsync.engine.routes import Lane, RoutedLane, Routing, route
from wsync.errors import ConfigError
from wsync.simulation import Simulated, simulate_routing
from wsync.topology import Device, Topology

NUM_SLOTS = 2
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Who has the weights and who wants them. `in_device_memory`: a holder per device, else one per host."""

    nbytes: int
    num_ranks: int
    num_workers: int
    """Of one replica."""
    num_replicas: int
    in_device_memory: bool = False
    chunk_nbytes: int = 0
    """0: chosen for the routes."""

    def __post_init__(self) -> None:
        if min(self.nbytes, self.num_ranks, self.num_workers, self.num_replicas) < 1 or self.chunk_nbytes < 0:
            raise ConfigError(f"nothing to plan: {self!r}", hint="bytes, ranks, workers and replicas are 1 or more")


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Routes, and what they put on holders and links."""

    job: Job
    routing: Routing
    memory_nbytes: dict[str, int]
    """Holder -> bytes of its staging slots."""
    link_nbytes: dict[str, float]
    """Resource (one direction of something narrow) -> bytes through it."""
    link_s: dict[str, float]
    """Resource -> seconds that it is busy at its rate."""
    simulated: Simulated | None = None

    def as_text(self, *, has_routes: bool = False) -> str:
        """Predicted time, bound, ratio, memory and the busiest links; with all routes if wanted."""
        routing, job = self.routing, self.job
        largest = max(self.memory_nbytes.values())
        lines = [
            f"{job.nbytes} bytes, {job.num_ranks} ranks to {job.num_replicas} replicas of {job.num_workers} workers, "
            f"holders in {'device' if job.in_device_memory else 'host'} memory",
            *routing.promise(),
            *([f"simulated {self.simulated.time_s:.4g} s"] if self.simulated else []),
            f"{len(routing.lanes)} lanes in chunks of {routing.chunk_nbytes} bytes",
            f"memory: at most {largest} bytes of slots in one of {len(self.memory_nbytes)} holders",
        ]
        busiest = sorted(self.link_s, key=lambda name: (-self.link_s[name], name))[:8]
        if busiest:
            lines.append("busiest links:")
            lines += [f"  {name}: {self.link_nbytes[name]:.4g} bytes, {self.link_s[name]:.4g} s" for name in busiest]
        if has_routes:
            lines.append(routing.explain())
        return "\n".join(lines) + "\n"


def placed(topology: Topology, job: Job, limits: Limits | None = None) -> tuple[Fabric, list[Lane]]:
    """The job's holders on the topology's devices, and the lanes between them.

    Raises ConfigError where the topology has too few devices.
    """
    needed = job.num_ranks + job.num_workers * job.num_replicas
    devices = [device for device in topology.devices if not device.partition_of]
    if len(devices) < needed:
        raise ConfigError(
            f"{job.num_ranks} ranks and {job.num_replicas} x {job.num_workers} workers are {needed} devices, the "
            f"topology has {len(devices)}",
            hint="give the file more hosts (--hosts NAME=COUNT)",
        )
    ranks, workers = devices[: job.num_ranks], devices[job.num_ranks : needed]
    nodes = {_name(device, job): _node(device, job) for device in (*ranks, *workers)}
    return Fabric(topology, nodes.values(), limits), _lanes(ranks, workers, job)


def forecast(topology: Topology, job: Job, limits: Limits | None = None, *, is_simulated: bool = False) -> Forecast:
    """Plan the broadcast, and simulate it if wanted, which takes about 0.1 ms for every chunk and receiver.

    Raises ConfigError where the topology has too few devices, PlanError where no path leads.
    """
    fabric, lanes = placed(topology, job, limits)
    routing = route(fabric, lanes, chunk_nbytes=job.chunk_nbytes)
    same: defaultdict[int, list[RoutedLane]] = defaultdict(list)
    for routed in routing.lanes:
        same[id(routed.trees)].append(routed)
    load: dict[str, float] = {}
    for group in same.values():
        load = plus(load, load_of(fabric, [routed.lane for routed in group], group[0].trees))
    memory: defaultdict[str, int] = defaultdict(int)
    for lane in lanes:
        for holder in (lane.origin, *lane.receivers):
            memory[holder] += NUM_SLOTS * lane.nbytes
    busy = {name: nbytes / fabric.capacity[name] for name, nbytes in load.items()}
    return Forecast(
        job=job,
        routing=routing,
        memory_nbytes=dict(memory),
        link_nbytes=load,
        link_s=busy,
        simulated=simulate_routing(fabric, routing) if is_simulated else None,
    )


def model_nbytes(text: str) -> int:
    """Bytes of a model: `140GB`, a safetensors file or its index, or a folder of these. Raises ConfigError."""
    number = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([KMGT]i?B|B?)", text, re.IGNORECASE)
    if number:
        return int(float(number[1]) * _UNITS[number[2].upper()] + 0.5)
    path = Path(text)
    try:
        if path.is_dir():
            index = sorted(path.glob("*.safetensors.index.json"))
            files = index[:1] or sorted(path.glob("*.safetensors"))
            if not files:
                raise ConfigError(f"{path} has no safetensors file", hint="name a file, a folder of them, or a size")
            return sum(model_nbytes(str(file)) for file in files)
        if path.name.endswith(".index.json"):
            return int(json.loads(path.read_bytes())["metadata"]["total_size"])
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, 1 << 30)))
        return sum(
            end - start for name, t in header.items() if name != "__metadata__" for start, end in [t["data_offsets"]]
        )
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be read: {exc.strerror}", hint="give a file, or a size such as 140GB"
        ) from exc
    except (AttributeError, KeyError, TypeError, ValueError, struct.error) as exc:
        raise ConfigError(f"{path} is no safetensors file or index: {exc!r}") from exc


def _node(device: Device, job: Job) -> Node:
    return Node(_name(device, job), device.host_id, device.device_id if job.in_device_memory else "")


def _name(device: Device, job: Job) -> str:
    return device.device_id if job.in_device_memory else device.host_id


def _lanes(ranks: Sequence[Device], workers: Sequence[Device], job: Job) -> list[Lane]:
    """What each rank has for each worker of a replica, to the same worker of all replicas; same ends, one lane."""
    part = job.nbytes / (job.num_ranks * job.num_workers)
    sizes: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    for index in range(job.num_workers):
        holders = dict.fromkeys(_name(worker, job) for worker in workers[index :: job.num_workers])
        for rank in ranks:
            origin = _name(rank, job)
            receivers = tuple(holder for holder in holders if holder != origin)
            if receivers:
                sizes[origin, receivers] += part
    return [
        Lane(f"{origin}#{number}", round(nbytes), origin, receivers)
        for number, ((origin, receivers), nbytes) in enumerate(sizes.items())
    ]
