"""The simulated clock and network: times known by hand, fair shares, changes on the way, the same run every time."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsync.engine.clock import NothingLeftToWaitFor, simulate
from wsync.errors import ConnectError
from wsync.transports.sim_net import Network


def test_an_hour_takes_no_hour_and_timers_keep_their_order() -> None:
    async def main() -> list[float]:
        order: list[float] = []

        async def after(seconds: float) -> None:
            await asyncio.sleep(seconds)
            order.append(asyncio.get_running_loop().time())

        await asyncio.gather(*(after(s) for s in (3600.0, 0.5, 7.25)))
        return order

    started = time.monotonic()
    assert simulate(main()) == ([0.5, 7.25, 3600.0], 3600.0)
    assert time.monotonic() - started < 60


def test_a_simulation_that_would_hang_says_so() -> None:
    async def main() -> None:
        await asyncio.sleep(2.0)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(NothingLeftToWaitFor, match="at 2 s"):
        simulate(main())


async def ended(network: Network, *sendings: tuple[str, float]) -> list[float]:
    """When each of these is over: resources separated by blanks, and bytes; all begin at once."""

    async def one(resources: str, nbytes: float) -> float:
        await network.connect(resources.split()).send(nbytes)
        return asyncio.get_running_loop().time()

    return list(await asyncio.gather(*(one(*sending) for sending in sendings)))


def test_what_shares_a_resource_gets_equal_parts_until_one_is_over() -> None:
    network = Network({"nic": 100.0})
    times, _ = simulate(ended(network, ("nic", 100.0), ("nic", 300.0)))
    assert times == pytest.approx([2.0, 4.0])
    assert network.nbytes == {"nic": 400.0}


def test_a_connection_that_is_narrow_elsewhere_leaves_its_part_to_the_others() -> None:
    network = Network({"out": 100.0, "slow": 10.0, "fast": 1000.0})
    times, _ = simulate(ended(network, ("out slow", 100.0), ("out fast", 900.0)))
    assert times == pytest.approx([10.0, 10.0])


def test_connections_that_share_nothing_do_not_touch_each_other() -> None:
    times, _ = simulate(ended(Network({"a": 10.0, "b": 20.0}), ("a", 100.0), ("b", 100.0)))
    assert times == pytest.approx([10.0, 5.0])


def test_what_no_known_resource_limits_takes_no_time() -> None:
    times, _ = simulate(ended(Network({"a": 10.0}), ("", 1e12), ("unknown", 1e12)))
    assert times == [0.0, 0.0]


def test_one_connection_sends_in_order_and_its_overhead_comes_on_top() -> None:
    async def main() -> list[float]:
        connection = Network({"a": 10.0}).connect(["a"], overhead_s=0.25)
        times = []
        for done in [connection.send(10.0), connection.send(20.0)]:
            await done
            times.append(asyncio.get_running_loop().time())
        return times

    assert simulate(main())[0] == pytest.approx([1.25, 3.25])


def test_a_rate_that_changes_on_the_way_counts_from_then_on() -> None:
    async def main() -> float:
        network = Network({"a": 100.0})
        done = network.connect(["a"]).send(1000.0)
        await asyncio.sleep(5.0)
        network.set_capacity("a", 10.0)
        await asyncio.sleep(10.0)
        network.set_capacity("a", 0.0)
        await asyncio.sleep(100.0)
        network.set_capacity("a", 400.0)
        await done
        return asyncio.get_running_loop().time()

    assert simulate(main())[0] == pytest.approx(5.0 + 10.0 + 100.0 + 400.0 / 400.0)


def test_what_is_taken_back_or_closed_gives_its_part_to_the_others() -> None:
    async def main() -> float:
        network = Network({"a": 100.0})
        first, second, third = (network.connect(["a"]) for _ in range(3))
        kept, cancelled, closed = first.send(1000.0), second.send(1000.0), third.send(1000.0)
        waiting = third.send(5.0)
        await asyncio.sleep(3.0)  # 100 bytes of each
        cancelled.cancel()
        await asyncio.sleep(2.0)  # 100 more of two
        third.close()
        for done in (closed, waiting, third.send(1.0)):
            with pytest.raises(ConnectError):
                await done
        await kept
        return asyncio.get_running_loop().time()

    assert simulate(main())[0] == pytest.approx(5.0 + 800.0 / 100.0)


@given(st.integers(0, 2**32 - 1))
def test_rates_are_max_min_fair_and_every_run_is_the_same(seed: int) -> None:
    """No resource is overfull; every connection has a full one on which nobody is faster. Checked on all rates."""
    rng = random.Random(seed)
    capacity = {f"r{i}": rng.choice((1.0, 5.0, 10.0, 40.0)) for i in range(rng.randint(1, 6))}
    wanted = [rng.sample(sorted(capacity), rng.randint(1, len(capacity))) for _ in range(rng.randint(1, 8))]
    sizes = [rng.uniform(1.0, 100.0) for _ in wanted]

    async def main() -> list[float]:
        network = Network(capacity)
        connections = [network.connect(resources) for resources in wanted]
        done = [connection.send(size) for connection, size in zip(connections, sizes, strict=True)]
        for connection in connections:
            through = {r: [c.rate for c in connections if r in c.resources] for r in connection.resources}
            assert all(sum(rates) <= capacity[r] * 1.000001 for r, rates in through.items())
            full = [rates for r, rates in through.items() if sum(rates) >= capacity[r] * 0.999999]
            assert any(connection.rate >= max(rates) * 0.999999 for rates in full)
        times = []
        for one in done:
            await one
            times.append(asyncio.get_running_loop().time())
        for resource, nbytes in network.nbytes.items():
            assert nbytes == pytest.approx(sum(s for s, r in zip(sizes, wanted, strict=True) if resource in r))
        return times

    assert simulate(main()) == simulate(main())
