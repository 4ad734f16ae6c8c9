"""Routes for any topology: they reach everybody over paths that both ends have, in about the least time there is.

`WSYNC_EXAMPLES` says how many topologies are tried (200 if it is not set), a tenth of them against a linear program.
"""

from __future__ import annotations

import os
from random import Random

import pytest
from broadcast_lp import least_time
from hypothesis import given, settings
from hypothesis import strategies as st

from wsync.engine.fabric import Fabric, Limits, Node
from wsync.engine.routes import Lane, Routing, route
from wsync.errors import PlanError
from wsync.paths import PathFinder
from wsync.topology import Device, Domain, DomainKind, Host, Nic, NicKind, Topology

EXAMPLES = int(os.environ.get("WSYNC_EXAMPLES", "200"))
SEEDS = st.integers(0, 2**32 - 1)
RATES = (1e8, 2.5e8, 5e8, 1e9, 2e9)
TB = 10**12
"""Lanes so large that the first chunk's way through a tree does not count."""


def hosts_in_racks(random: Random, num_hosts: int) -> tuple[Topology, list[Node]]:
    """Hosts of different NIC rates, in up to three racks with or without a known uplink, two of them in a zone."""
    names = [f"h{i}" for i in range(num_hosts)]
    nics = [Nic(nic_id=f"{h}/nic", host_id=h, kind=NicKind.ETHERNET, nbytes_per_s=random.choice(RATES)) for h in names]
    racks: list[list[str]] = [[] for _ in range(random.randint(1, 3))]
    for host in names if random.random() < 0.7 else ():
        random.choice(racks).append(host)
    domains = [
        rack_of(f"r{i}", members, random.choice((0.0, 1e8, 7e8, 2e9))) for i, members in enumerate(racks) if members
    ]
    if len(domains) == 3 and random.random() < 0.7:
        inside = (domains[0].domain_id, domains[1].domain_id)
        domains.append(
            Domain(domain_id="z", kind=DomainKind.ZONE, members=inside, uplink_nbytes_per_s=random.choice((5e7, 1e9)))
        )
    topology = Topology(hosts=tuple(Host(host_id=h) for h in names), nics=tuple(nics), domains=tuple(domains))
    return topology, [Node(name, name) for name in names]


def rack_of(name: str, hosts: list[str], uplink: float) -> Domain:
    return Domain(domain_id=name, kind=DomainKind.RACK, members=tuple(hosts), uplink_nbytes_per_s=uplink)


def devices_in_islands(random: Random, num_hosts: int, per_host: int, *, span: int = 1) -> tuple[Topology, list[Node]]:
    """Hosts of one kind with devices that NVLink joins, inside of `span` hosts, and an RDMA NIC for each device."""
    hosts, devices, nics, domains = [], [], [], []
    rate = random.choice(RATES)
    paths = ("cuda_ipc", "cuda_fabric", "ucx") if random.random() < 0.8 else ("pcie_p2p", "ucx")
    for h in range(num_hosts):
        hosts.append(Host(host_id=f"h{h}"))
        for d in range(per_host):
            devices.append(Device(device_id=f"h{h}/gpu{d}", host_id=f"h{h}", paths=paths))
            nics.append(Nic(nic_id=f"h{h}/nic{d}", host_id=f"h{h}", kind=NicKind.INFINIBAND, nbytes_per_s=rate))
    for start in range(0, num_hosts, span):
        inside = [d.device_id for d in devices if start <= int(d.host_id[1:]) < start + span]
        domains.append(
            Domain(domain_id=f"nvl{start}", kind=DomainKind.NVLINK, members=tuple(inside), nbytes_per_s=9 * rate)
        )
    topology = Topology(hosts=tuple(hosts), devices=tuple(devices), nics=tuple(nics), domains=tuple(domains))
    return topology, [Node(device.device_id, device.host_id, device.device_id) for device in devices]


def some_lanes(random: Random, nodes: list[Node], *, to_all: bool) -> list[Lane]:
    names = [node.node_id for node in nodes]
    lanes = []
    for number in range(random.choice((1, 1, 2, 3))):
        origin = random.choice(names)
        others = [name for name in names if name != origin]
        wanted = others if to_all else sorted(random.sample(others, random.randint(1, len(others))))
        lanes.append(Lane(f"lane{number}", random.choice((1, 2, 5)) * TB, origin, tuple(wanted)))
    return lanes


def check(routing: Routing, fabric: Fabric, topology: Topology, lanes: list[Lane]) -> None:
    """Everybody is reached in every stripe, from somebody who has been, over a path that the topology has for them."""
    finder = PathFinder(topology)
    assert [routed.lane for routed in routing.lanes] == lanes
    for routed in routing.lanes:
        for stripe, tree in enumerate(routed.trees):
            reached = {routed.lane.origin}
            for place, receiver in enumerate(tree.receivers):
                source = routed.parent(stripe, place)
                assert source in reached
                assert receiver not in reached
                reached.add(receiver)
                ends = [fabric.nodes[name] for name in (source, receiver)]
                if ends[0].host_id != ends[1].host_id or ends[0].device_id:
                    places = [node.device_id or node.host_id for node in ends]
                    assert tree.paths[place] in {path.name for path in finder.between(*places)}
            assert reached == {routed.lane.origin, *routed.lane.receivers}


@settings(max_examples=EXAMPLES, deadline=None)
@given(SEEDS)
def test_routes_of_any_topology_prove_themselves_and_never_beat_the_bound(seed: int) -> None:
    random = Random(seed)
    if random.random() < 0.5:
        topology, nodes = hosts_in_racks(random, random.randint(2, 64))
    else:
        topology, nodes = devices_in_islands(
            random, random.randint(1, 8), random.randint(2, 8), span=random.randint(1, 4)
        )
    fabric = Fabric(topology, nodes)
    lanes = some_lanes(random, nodes, to_all=False)
    routing = route(fabric, lanes)
    check(routing, fabric, topology, lanes)
    assert routing.predicted_s >= 0.999999 * routing.bound.time_s
    assert routing.predicted_s == max(routing.receiver_s.values(), default=0.0)
    assert (routing.predicted_s > 0) is (routing.bound.time_s > 0)
    assert (f"bound {routing.bound.time_s:.4g} s" in routing.explain()) is (routing.bound.time_s > 0)


@settings(max_examples=max(20, EXAMPLES // 10), deadline=None)
@given(SEEDS)
def test_routes_to_everybody_take_at_most_a_tenth_more_than_the_least_time(seed: int) -> None:
    random = Random(seed)
    if random.random() < 0.7:
        topology, nodes = hosts_in_racks(random, random.randint(2, 7))
    else:
        topology, nodes = devices_in_islands(random, random.randint(2, 3), 2, span=random.randint(1, 2))
    fabric = Fabric(topology, nodes)
    lanes = some_lanes(random, nodes, to_all=True)
    routing = route(fabric, lanes)
    least = least_time(fabric, lanes)
    assert routing.bound.time_s <= 1.000001 * least
    assert 0.999999 * least <= routing.predicted_s <= 1.10 * least


@settings(max_examples=EXAMPLES, deadline=None)
@given(SEEDS)
def test_forced_and_forbidden_paths_are_kept_or_refused_by_name(seed: int) -> None:
    random = Random(seed)
    topology, nodes = devices_in_islands(random, random.randint(2, 4), 2, span=random.randint(1, 2))
    names = [node.node_id for node in nodes]
    known = ["cuda_ipc", "cuda_fabric", "pcie_p2p", "shm", "nixl", "tcp"]
    forced = {tuple(random.sample(names, 2)): random.choice(known) for _ in range(random.randint(0, 6))}
    limits = Limits(forbidden=frozenset(random.sample(known, random.randint(0, 4))), forced=forced)
    fabric = Fabric(topology, nodes, limits)
    lanes = some_lanes(random, nodes, to_all=False)
    reachable = reached_at_all(fabric, lanes)
    if not all(reachable.values()):
        with pytest.raises(PlanError) as refused:
            route(fabric, lanes)
        assert any(name in str(refused.value) for name, is_reached in reachable.items() if not is_reached)
        return
    routing = route(fabric, lanes)
    check(routing, fabric, topology, lanes)
    for routed in routing.lanes:
        for stripe, tree in enumerate(routed.trees):
            for place, receiver in enumerate(tree.receivers):
                pair = (routed.parent(stripe, place), receiver)
                path = tree.paths[place]
                assert path == forced[pair] if pair in forced else path not in limits.forbidden


def reached_at_all(fabric: Fabric, lanes: list[Lane]) -> dict[str, bool]:
    """Receiver -> whether hops lead to it from its lane's origin through the lane's other receivers."""
    found: dict[str, bool] = {}
    for lane in lanes:
        reached = [lane.origin]
        for source in reached:
            reached += [r for r in lane.receivers if r not in reached and fabric.hop(source, r) is not None]
        for receiver in lane.receivers:
            found[receiver] = found.get(receiver, True) and receiver in reached
    return found


def test_a_bound_that_the_planner_missed_would_be_seen() -> None:
    """The program finds what is known by hand: five hosts, the slowest takes 1 TB at 100 MB/s."""
    rates = (1e9, 1e9, 5e8, 1e8, 1e9)
    nics = [
        Nic(nic_id=f"h{i}/nic", host_id=f"h{i}", kind=NicKind.ETHERNET, nbytes_per_s=r) for i, r in enumerate(rates)
    ]
    topology = Topology(hosts=tuple(Host(host_id=f"h{i}") for i in range(5)), nics=tuple(nics))
    fabric = Fabric(topology, [Node(f"h{i}", f"h{i}") for i in range(5)])
    lane = Lane("all", TB, "h0", ("h1", "h2", "h3", "h4"))
    assert least_time(fabric, [lane]) == pytest.approx(1e4)
