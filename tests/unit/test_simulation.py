"""Routes simulated by the engine's own transfers: in the predicted time, every byte once, the same run every time."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsync.engine.clock import simulate
from wsync.engine.fabric import Fabric, Node
from wsync.engine.routes import Lane, route
from wsync.errors import ConnectError, RemoteFault, TransferTimeout
from wsync.simulation import Simulated, simulate_routing
from wsync.topology import Domain, DomainKind, Host, Nic, NicKind, Topology
from wsync.transports.base import Op, Read
from wsync.transports.sim import NOTHING, SimSlot, SimTransport
from wsync.transports.sim_net import Network

GBIT = 1e9 / 8
W = 64 << 20


def ethernet(*rates: float, racks: tuple[tuple[int, ...], ...] = (), uplink: float = 0.0) -> Fabric:
    hosts = tuple(Host(host_id=f"h{i}") for i in range(len(rates)))
    nics = tuple(
        Nic(nic_id=f"h{i}/nic", host_id=f"h{i}", kind=NicKind.ETHERNET, nbytes_per_s=rate)
        for i, rate in enumerate(rates)
    )
    domains = tuple(
        Domain(domain_id=f"r{i}", kind=DomainKind.RACK, members=tuple(f"h{h}" for h in r), uplink_nbytes_per_s=uplink)
        for i, r in enumerate(racks)
    )
    topology = Topology(hosts=hosts, nics=nics, domains=domains)
    return Fabric(topology, [Node(host.host_id, host.host_id) for host in hosts])


def run(fabric: Fabric, *lanes: Lane) -> tuple[Simulated, float, float]:
    """What is simulated, predicted and the bound."""
    routing = route(fabric, lanes)
    return simulate_routing(fabric, routing), routing.predicted_s, routing.bound.time_s


def test_a_chain_takes_one_transfer_and_a_chunk_per_hop() -> None:
    fabric = ethernet(*[GBIT] * 8)
    simulated, predicted, bound = run(fabric, Lane("all", W, "h0", tuple(f"h{i}" for i in range(1, 8))))
    assert bound < simulated.time_s < 1.10 * bound
    assert simulated.time_s == pytest.approx(predicted, rel=0.01)
    assert simulated.num_failed_hops == 0
    assert {name: nbytes for name, nbytes in simulated.link_nbytes.items() if name.endswith("ip.in")} == {
        f"h{i}/ip.in": W for i in range(1, 8)
    }


def test_a_slow_receiver_is_late_alone() -> None:
    simulated, _, _ = run(ethernet(GBIT, GBIT / 4, GBIT, GBIT / 2), Lane("all", W, "h0", ("h1", "h2", "h3")))
    for host, rate in (("h1", GBIT / 4), ("h2", GBIT), ("h3", GBIT / 2)):
        assert simulated.receiver_s[host] == pytest.approx(W / rate, rel=0.05)


def test_bytes_cross_an_uplink_once() -> None:
    fabric = ethernet(*[GBIT] * 6, racks=((0, 2, 4), (1, 3, 5)), uplink=GBIT / 2)
    simulated, _, bound = run(fabric, Lane("all", W, "h0", tuple(f"h{i}" for i in range(1, 6))))
    assert simulated.link_nbytes["r1/uplink.in"] == W
    assert simulated.time_s < 1.10 * bound


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1))
def test_any_routes_take_the_predicted_time_and_every_run_is_the_same(seed: int) -> None:
    random = Random(seed)
    rates = [random.choice((1e8, 2.5e8, 1e9)) for _ in range(random.randint(2, 7))]
    racks: list[list[int]] = [[], []]
    for host in range(len(rates)):
        random.choice(racks).append(host)
    fabric = ethernet(*rates, racks=tuple(tuple(rack) for rack in racks if rack), uplink=random.choice((0.0, 2e8)))
    names = list(fabric.nodes)
    lanes = []
    for number in range(random.randint(1, 3)):
        origin = random.choice(names)
        others = [name for name in names if name != origin]
        wanted = tuple(sorted(random.sample(others, random.randint(1, len(others)))))
        lanes.append(Lane(f"lane{number}", random.randint(1, 1 << 28), origin, wanted))
    simulated, predicted, bound = run(fabric, *lanes)
    assert 0.999 * bound <= simulated.time_s <= 1.10 * predicted
    assert run(fabric, *lanes)[0] == simulated


def reading(slot: SimSlot, *, timeout_s: float = 5.0) -> tuple[SimTransport, SimTransport, Op]:
    """Two holders on a network of 100 bytes/s, and a read of the second chunk of what the first offers."""
    network, world = Network({"wire": 100.0}), dict[str, SimTransport]()
    one, two = (SimTransport(name, world, lambda *_: network.connect(["wire"])) for name in ("one", "two"))
    one.offer("key", slot, 1)
    peer = two.connect(one.export(), peer="one", timeout_s=1.0)
    return one, two, two.post_read(peer, [Read("key", 100, NOTHING)], timeout_s=timeout_s)


def test_a_read_waits_for_its_chunk_and_then_for_the_network() -> None:
    import asyncio

    async def main() -> float:
        slot = SimSlot(150, 100)
        _, _, op = reading(slot)
        await asyncio.sleep(2.0)
        assert not op.is_done
        slot.mark_ready([1])
        await asyncio.wrap_future(op.future)
        return asyncio.get_running_loop().time()

    assert simulate(main())[0] == pytest.approx(2.5)


def test_a_read_ends_by_its_deadline_by_cancelling_and_with_its_peer() -> None:
    import asyncio

    async def main() -> None:
        _, _, op = reading(SimSlot(150, 100))
        with pytest.raises(TransferTimeout, match="one has not delivered"):
            await asyncio.wrap_future(op.future)
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)
        _, two, op = reading(SimSlot(150, 100))
        two.cancel(op)
        with pytest.raises(ConnectError, match="cancelled"):
            await asyncio.wrap_future(op.future)
        _, two, op = reading(SimSlot(150, 100, is_whole=True))
        two.close()
        with pytest.raises(ConnectError, match="closed"):
            await asyncio.wrap_future(op.future)
        one, two, _ = reading(SimSlot(150, 100, is_whole=True))
        one.withdraw("key", 1.0)
        peer = two.connect(b"one", peer="one", timeout_s=1.0)
        with pytest.raises(RemoteFault, match="does not offer key any more"):
            await asyncio.wrap_future(two.post_read(peer, [Read("key", 0, NOTHING)], timeout_s=5.0).future)
        one.close()
        with pytest.raises(ConnectError, match="one has gone"):
            two.connect(b"one", peer="one", timeout_s=1.0)

    simulate(main())
