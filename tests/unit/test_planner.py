"""What the planner makes of a view: routes by what hosts say of themselves, beside what moves, around what is slow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsync.engine.membership import HolderRecord, View
from wsync.engine.planner import REMEMBERED_S, Planner, recovery_order
from wsync.engine.routes import Routing
from wsync.topology import Device, Domain, DomainKind, Host, Nic, NicKind, Topology

GBIT = 1e9 / 8
W = 256 << 20


def holder(name: str, gbit_per_s: float | None, *, rack: str = "", uplink_gbit_per_s: float = 0.0) -> HolderRecord:
    """On a host `host-NAME` with a NIC of that rate (0: unknown rate; None: nothing is known of the host)."""
    host = f"host-{name}"
    nic = Nic(nic_id=f"{host}/nic", host_id=host, kind=NicKind.ETHERNET, nbytes_per_s=(gbit_per_s or 0.0) * GBIT)
    domain = Domain(domain_id=rack, kind=DomainKind.RACK, members=(host,), uplink_nbytes_per_s=uplink_gbit_per_s * GBIT)
    topology = Topology(hosts=(Host(host_id=host),), nics=(nic,), domains=(domain,) if rack else ())
    return HolderRecord(name, host, "i", 1, {"shm": b"", "tcp": b""}, topology if gbit_per_s is not None else None)


def planner_of(*holders: HolderRecord, number: int = 1) -> Planner:
    planner = Planner()
    planner.see(View(number, holders), 0.0)
    return planner


def hops(routing: Routing) -> list[tuple[str, str]]:
    return list(routing.lanes[0].hops())


@pytest.mark.parametrize("gbit_per_s", [None, 0.0])
def test_where_nothing_is_known_of_rates_routes_are_a_chain_in_the_views_order(gbit_per_s: float | None) -> None:
    planner = planner_of(*(holder(name, gbit_per_s) for name in "TCAB"))
    routing = planner.route("c", W, ["T"], ["C", "A", "B"])
    assert hops(routing) == [("T", "C"), ("C", "A"), ("A", "B")]
    assert (routing.predicted_s, routing.chunk_nbytes) == (0.0, 8 << 20)
    assert routing.lanes[0].sources(8)["B"] == (("A", "T", "C"),)


def test_routes_follow_what_the_hosts_know() -> None:
    planner = planner_of(holder("T", 1), holder("A", 0.25), holder("B", 1), holder("C", 0.5))
    assert hops(planner.route("c", W, ["T"], ["A", "B", "C"])) == [("T", "B"), ("B", "C"), ("C", "A")]


def test_a_host_of_which_nothing_is_known_comes_last() -> None:
    planner = planner_of(holder("T", 1), holder("A", None), holder("B", 1), holder("C", 0.0), holder("D", 0.5))
    routing = planner.route("c", W, ["T"], ["A", "B", "C", "D"])
    assert hops(routing) == [("T", "B"), ("B", "D"), ("D", "A"), ("A", "C")], "it harms nobody if it is slow"
    assert routing.predicted_s == 0.0, "and nothing is promised"


def test_hosts_of_one_rack_say_so_each_for_itself_and_its_uplink_carries_each_byte_once() -> None:
    racks = {name: f"r{number % 2}" for number, name in enumerate("TABCDE")}
    planner = planner_of(*(holder(n, 1, rack=rack, uplink_gbit_per_s=0.5) for n, rack in racks.items()))
    routing = planner.route("c", W, ["T"], list("ABCDE"))
    assert sum(racks[a] != racks[b] for a, b in hops(routing)) == 1
    assert routing.ratio < 1.1


def test_a_route_is_made_once_and_replayed_until_the_view_changes() -> None:
    holders = [holder(name, 1) for name in "TAB"]
    planner = planner_of(*holders)
    first = planner.route("c", W, ["T"], ["A", "B"])
    assert planner.route("c", W, ["T"], ["A", "B"]) is first
    planner.see(View(1, tuple(holders)), 1.0)
    assert planner.route("c", W, ["T"], ["A", "B"]) is first
    planner.see(View(2, (*holders, holder("C", 1))), 2.0)
    assert planner.route("c", W, ["T"], ["A", "B"]) is not first


def test_whoever_comes_late_pulls_from_a_holder_with_bandwidth_to_spare() -> None:
    planner = planner_of(*(holder(name, 1) for name in "TABC"))
    planner.route("c", W, ["T"], ["A", "B"])
    late = planner.route("c", W, ["T", "A", "B"], ["C"], is_beside=True)
    assert hops(late) == [("B", "C")], "T and A send already"
    assert late.predicted_s == pytest.approx(W / GBIT, rel=0.02)
    planner.landed("c")
    assert hops(planner.route("c", W, ["T", "A", "B"], ["C"], is_beside=True)) == [("T", "C")], "now all are idle"


def test_lanes_of_a_sharded_channel_count_one_another_and_other_channels_do_not() -> None:
    planner = planner_of(*(holder(name, 1) for name in "TAB"))
    alone = planner.route("other", W, ["T"], ["A", "B"]).predicted_s
    assert planner.route("c#1", W, ["T"], ["A", "B"]).predicted_s == pytest.approx(alone)
    assert planner.route("c#2", W, ["T"], ["A", "B"]).predicted_s == pytest.approx(2 * alone, rel=0.02)
    planner.forget("c#1")
    assert planner.route("c#3", W, ["T"], ["A", "B"]).predicted_s == pytest.approx(2 * alone, rel=0.02), "c#2 is left"
    planner.forget("c#2")
    planner.forget("c#3")
    assert planner.route("c#4", W, ["T"], ["A", "B"]).predicted_s == pytest.approx(alone, rel=0.02)


def test_a_slow_hop_is_avoided_for_a_while_and_longer_each_time() -> None:
    view = View(1, tuple(holder(name, 1) for name in "TABCD"))
    planner, now = Planner(), 0.0
    for times in range(3):
        planner.see(view, now)
        assert hops(planner.route("c", W, ["T"], list("ABCD")))[1] == ("A", "B")
        epoch = planner.epoch
        planner.slow("A", "B", GBIT / 10)
        assert planner.epoch == epoch + 1
        planner.slow("A", "B", GBIT / 20)  # slower still while it is avoided: no new time
        now += REMEMBERED_S * 2**times - 1
        planner.see(view, now)
        assert hops(planner.route("c", W, ["T"], list("ABCD"))) == [("T", "A"), ("A", "C"), ("C", "D"), ("D", "B")]
        now += 2


def test_a_host_that_is_slow_from_everywhere_is_not_tried_from_one_after_the_other() -> None:
    planner = planner_of(*(holder(name, 1) for name in "TABCD"))
    planner.route("c", W, ["T"], list("ABCD"))
    for _ in range(2):
        parent = next(a for a, b in hops(planner.route("c", W, ["T"], list("ABCD"))) if b == "B")
        planner.slow(parent, "B", GBIT / 10)
    routing = planner.route("c", W, ["T"], list("ABCD"))
    parent = next(a for a, b in hops(routing) if b == "B")
    planner.seen("T", "A", GBIT)
    assert planner.expected(parent, "B") == pytest.approx(GBIT / 10), "so it is not found slow again"
    assert routing.receiver_s["D"] == pytest.approx(W / GBIT, rel=0.05), "the others are as fast as ever"


def test_what_is_expected_of_a_hop_is_its_share_and_no_more_than_any_hop_has_shown() -> None:
    planner = planner_of(*(holder(name, 1) for name in "TAB"))
    planner.route("c", W, ["T"], ["A", "B"])
    assert planner.expected("T", "A") == 0.0, "nothing has been seen yet"
    planner.seen("T", "A", 0.6 * GBIT)
    assert planner.expected("A", "B") == pytest.approx(0.6 * GBIT)
    planner.seen("A", "B", 5 * GBIT)
    assert planner.expected("A", "B") == pytest.approx(GBIT)
    planner.route("d", W, ["T"], ["A", "B"])
    assert planner.expected("A", "B") == pytest.approx(GBIT), "of both channels together"
    planner.route("e", W, ["A"], ["T"])
    assert planner.expected("A", "B") == pytest.approx(GBIT / 2), "another hop shares the link of A"
    planner.landed("e")
    assert planner.expected("A", "B") == pytest.approx(GBIT)
    assert planner.expected("B", "A") == 0.0
    assert planner.expected("A", "gone") == 0.0


def test_what_hosts_say_of_themselves_need_not_fit_together() -> None:
    def odd(name: str) -> HolderRecord:
        topology = Topology(
            hosts=(Host(host_id=f"host-{name}"),),
            devices=(Device(device_id="same", host_id=f"host-{name}"),) if name == "A" else (),
            nics=(Nic(nic_id="same", host_id=f"host-{name}"),) if name == "B" else (),
        )
        return HolderRecord(name, f"host-{name}", "i", 1, {"tcp": b""}, topology)

    planner = planner_of(*(odd(name) for name in "TAB"))
    assert hops(planner.route("c", W, ["T"], ["A", "B"])) == [("T", "A"), ("A", "B")]


def test_hosts_that_no_common_transport_joins_are_routed_all_the_same() -> None:
    """Whoever cannot be reached says so by name; the others get their bytes."""
    records = [HolderRecord(name, f"host-{name}", "i", 1, {"shm": b""}) for name in "TAB"]
    assert hops(planner_of(*records).route("c", W, ["T"], ["A", "B"])) == [("T", "A"), ("A", "B")]


@given(st.dictionaries(st.sampled_from("abcdef"), st.lists(st.booleans(), min_size=9, max_size=9).map(bytes)))
def test_recovery_begins_with_who_has_most(ready: dict[str, bytes]) -> None:
    order, is_covered = recovery_order(ready, 9)
    assert sorted(order) == sorted(ready)
    counts = [sum(ready[holder]) for holder in order]
    assert counts == sorted(counts, reverse=True)
    assert is_covered == all(any(flags[chunk] for flags in ready.values()) for chunk in range(9))


def test_recovery_of_nothing() -> None:
    assert recovery_order({}, 0) == ([], True)
    assert recovery_order({}, 1) == ([], False)
    assert recovery_order({"a": b""}, 1) == (["a"], False)
