"""Routes on topologies whose best ones are known by hand, and the records that prove them."""

from __future__ import annotations

import pytest

from wsync.engine.fabric import Fabric, Limits, Node
from wsync.engine.route_trees import ORIGIN, Tree
from wsync.engine.routes import Lane, RoutedLane, Routing, route
from wsync.errors import PlanError
from wsync.topology import Device, Domain, DomainKind, Host, Nic, NicKind, Topology

GBIT = 1e9 / 8
W = 256 << 20


def ethernet(*rates: float, racks: tuple[tuple[int, ...], ...] = (), uplink: float = 0.0) -> Topology:
    hosts = tuple(Host(host_id=f"h{i}") for i in range(len(rates)))
    nics = tuple(
        Nic(nic_id=f"h{i}/nic", host_id=f"h{i}", kind=NicKind.ETHERNET, nbytes_per_s=rate)
        for i, rate in enumerate(rates)
    )
    domains = tuple(
        Domain(
            domain_id=f"rack{i}", kind=DomainKind.RACK, members=tuple(f"h{h}" for h in rack), uplink_nbytes_per_s=uplink
        )
        for i, rack in enumerate(racks)
    )
    return Topology(hosts=hosts, nics=nics, domains=domains)


def fabric_of(topology: Topology, limits: Limits | None = None) -> Fabric:
    return Fabric(topology, [Node(host.host_id, host.host_id) for host in topology.hosts], limits)


def hops(routing: Routing, lane: int = 0, stripe: int = 0) -> list[tuple[str, str]]:
    routed = routing.lanes[lane]
    return [(routed.parent(stripe, i), receiver) for i, receiver in enumerate(routed.trees[stripe].receivers)]


def test_equal_hosts_are_a_chain_in_the_time_of_one_transfer() -> None:
    others = tuple(f"h{i}" for i in range(1, 8))
    routing = route(fabric_of(ethernet(*[GBIT] * 8)), [Lane("all", W, "h0", others)])
    assert hops(routing) == list(zip(("h0", *others), others, strict=False))
    assert routing.bound.time_s == pytest.approx(W / GBIT)
    assert routing.ratio < 1.03
    assert routing.chunk_nbytes == 1 << 19
    assert routing.bound.formula.endswith("at 1.25e+08 bytes/s")


def test_slower_hosts_come_last_and_each_is_done_at_its_own_floor() -> None:
    rates = (GBIT, GBIT / 4, GBIT, GBIT / 2)
    routing = route(fabric_of(ethernet(*rates)), [Lane("all", W, "h0", ("h1", "h2", "h3"))])
    assert hops(routing) == [("h0", "h2"), ("h2", "h3"), ("h3", "h1")]
    for host, rate in zip(("h1", "h2", "h3"), rates[1:], strict=True):
        assert routing.receiver_s[host] == pytest.approx(W / rate, rel=0.02)


def test_bytes_cross_a_narrow_uplink_once() -> None:
    topology = ethernet(*[GBIT] * 6, racks=((0, 2, 4), (1, 3, 5)), uplink=GBIT / 2)
    routing = route(fabric_of(topology), [Lane("all", W, "h0", tuple(f"h{i}" for i in range(1, 6)))])
    crossing = [hop for hop in hops(routing) if int(hop[0][1]) % 2 != int(hop[1][1]) % 2]
    assert len(crossing) == 1
    assert routing.bound.time_s == pytest.approx(2 * W / GBIT)
    assert routing.ratio < 1.02
    assert routing.receiver_s["h2"] == pytest.approx(W / GBIT, rel=0.02)


def test_sources_with_bandwidth_to_spare_serve_everybody_themselves() -> None:
    topology = ethernet(*[10 * GBIT] * 2, *[GBIT] * 3)
    lanes = [Lane(f"from{i}", W, f"h{i}", ("h2", "h3", "h4")) for i in range(2)]
    routing = route(fabric_of(topology), lanes)
    assert hops(routing) == [("h0", "h2"), ("h0", "h3"), ("h0", "h4")]
    assert routing.bound.time_s == pytest.approx(2 * W / GBIT)
    assert routing.ratio < 1.01


def nvlink_domain(num_hosts: int, per_host: int, *, trainers: int) -> Fabric:
    """Hosts whose devices are one NVLink domain, and `trainers` more with one device each; a 50 GB/s NIC per device."""
    paths = ("cuda_ipc", "cuda_fabric", "ucx")
    hosts = [f"h{i}" for i in range(num_hosts)]
    places = [(host, i) for host in hosts for i in range(per_host)] + [(f"t{i}", 0) for i in range(trainers)]
    devices = [Device(device_id=f"{host}/gpu{i}", host_id=host, paths=paths) for host, i in places]
    nics = [
        Nic(nic_id=f"{host}/nic{i}", host_id=host, kind=NicKind.INFINIBAND, nbytes_per_s=50e9) for host, i in places
    ]
    inside = tuple(device.device_id for device in devices if device.host_id in hosts)
    domain = Domain(domain_id="nvl", kind=DomainKind.NVLINK, members=inside, nbytes_per_s=900e9)
    names = dict.fromkeys(device.host_id for device in devices)
    topology = Topology(
        hosts=tuple(Host(host_id=h) for h in names), devices=tuple(devices), nics=tuple(nics), domains=(domain,)
    )
    return Fabric(topology, [Node(device.device_id, device.host_id, device.device_id) for device in devices])


def test_a_scale_up_domain_takes_each_byte_in_once_through_all_its_nics() -> None:
    """Nine replicas of one device each in a domain of nine, nine trainers that hold a ninth each."""
    fabric = nvlink_domain(9, 1, trainers=9)
    workers = tuple(f"h{i}/gpu0" for i in range(9))
    lanes = [Lane(f"part{i}", 10**10, f"t{i}/gpu0", workers) for i in range(9)]
    routing = route(fabric, lanes)
    assert routing.bound.time_s == pytest.approx(9e10 / (9 * 50e9))
    assert routing.ratio < 1.05
    one_pull_per_replica_s = 9e10 / 50e9
    assert one_pull_per_replica_s / routing.predicted_s > 8.5
    for lane in range(9):
        entries = [receiver for s in range(9) for source, receiver in hops(routing, lane, s) if source[0] == "t"]
        assert sorted(entries) == sorted(workers)
        paths = {path for tree in routing.lanes[lane].trees for path in tree.paths}
        assert paths == {"nixl", "cuda_fabric"}


def test_source_and_receivers_in_one_domain_never_use_a_nic() -> None:
    fabric = nvlink_domain(2, 2, trainers=0)
    lane = Lane("all", 9 * 10**11, "h0/gpu0", ("h0/gpu1", "h1/gpu0", "h1/gpu1"))
    routing = route(fabric, [lane])
    assert {path for tree in routing.lanes[0].trees for path in tree.paths} == {"cuda_ipc", "cuda_fabric"}
    assert routing.predicted_s == pytest.approx(1.0, rel=0.05)
    assert routing.ratio <= 1.05


def test_where_no_rate_is_known_nothing_is_promised() -> None:
    routing = route(fabric_of(ethernet(0.0, 0.0, 0.0)), [Lane("all", W, "h0", ("h1", "h2"))])
    assert routing.bound.time_s == 0
    assert routing.bound.formula == ""
    assert routing.ratio == 0
    assert {receiver for _, receiver in hops(routing)} == {"h1", "h2"}


def test_a_hop_that_was_measured_slow_is_not_in_the_middle_of_a_chain() -> None:
    topology = ethernet(*[GBIT] * 5)
    slow = {(f"h{a}", f"h{b}"): GBIT / 10 for a in range(5) for b in range(5) if a != b and 2 in (a, b)}
    routing = route(fabric_of(topology, Limits(measured=slow)), [Lane("all", W, "h0", ("h1", "h2", "h3", "h4"))])
    assert "h2" not in [source for source, _ in hops(routing)]
    assert all(routing.receiver_s[h] < 1.1 * W / GBIT for h in ("h1", "h3", "h4"))


def test_a_receiver_that_nothing_reaches_is_named() -> None:
    limits = Limits(allowed=frozenset({"shm"}))
    with pytest.raises(PlanError, match="h1, h2"):
        route(fabric_of(ethernet(GBIT, GBIT, GBIT), limits), [Lane("all", W, "h0", ("h1", "h2"))])


def test_a_holder_on_an_unknown_host_is_named() -> None:
    with pytest.raises(PlanError, match="holder x is on 'h9'"):
        Fabric(ethernet(GBIT), [Node("x", "h9")])


LANE = Lane("all", W, "o", ("a", "b"))


@pytest.mark.parametrize(
    ("receivers", "parents", "problem"),
    [
        (("a", "b"), (ORIGIN,), "2 receivers, 1 parents"),
        (("a", "b"), (1, ORIGIN), "a pulls from place 1, which nothing has reached yet"),
        (("a", "b"), (ORIGIN, 1), "b pulls from place 1, which nothing has reached yet"),
        (("a", "b"), (ORIGIN, -2), "b pulls from place -2"),
        (("a", "a"), (ORIGIN, 0), "twice"),
    ],
)
def test_what_is_not_a_tree_is_refused(receivers: tuple[str, ...], parents: tuple[int, ...], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        Tree(receivers, parents, ("tcp",) * len(receivers))


@pytest.mark.parametrize(
    ("lane", "trees"),
    [
        (LANE, ()),
        (LANE, (Tree(("a",), (ORIGIN,), ("tcp",)),)),
        (LANE, (Tree(("a", "b"), (ORIGIN, 0), ("tcp",) * 2), Tree(("a", "c"), (ORIGIN, 0), ("tcp",) * 2))),
        (Lane("all", W, "a", ("a", "b")), (Tree(("a", "b"), (ORIGIN, 0), ("tcp",) * 2),)),
        (Lane("all", W, "o", ("a", "a")), (Tree(("a",), (ORIGIN,), ("tcp",)),)),
    ],
)
def test_trees_that_do_not_reach_everybody_once_are_refused(lane: Lane, trees: tuple[Tree, ...]) -> None:
    with pytest.raises(PlanError, match="lane all"):
        RoutedLane(lane, trees)
