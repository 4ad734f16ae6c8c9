"""Plans prove themselves: every receiver once, no cycle, and alternates that can have the bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsync.engine.planner import make_plan, recovery_order
from wsync.errors import PlanError
from wsync.plan import Plan, Route

HOLDERS = st.lists(st.integers(0, 40).map(lambda i: f"h{i}"), unique=True, max_size=20)


@given(HOLDERS)
def test_every_receiver_once_acyclic_with_valid_alternates(receivers: list[str]) -> None:
    plan = make_plan(100, origin="origin", receivers=receivers)
    assert [route.receiver for route in plan.routes] == receivers
    has_it = {"origin"}
    for route in plan.routes:
        assert route.sources[0] in has_it, "whoever is pulled from has the bytes before"
        assert len(set(route.sources)) == len(route.sources)
        assert set(route.sources) == has_it, "all who are ahead are alternates, and nobody who is behind"
        has_it.add(route.receiver)
    served = [route.sources[0] for route in plan.routes]
    assert len(set(served)) == len(served), "in a chain nobody sends the lane twice"
    assert plan.explain().count("->") == len(receivers)


@pytest.mark.parametrize(
    ("nbytes", "routes", "text"),
    [
        (-1, (), "-1 bytes"),
        (1, (Route("b", ("a",)), Route("b", ("a",))), "twice"),
        (1, (Route("a", ("a",)),), "twice"),
        (1, (Route("b", ()),), "no source"),
        (1, (Route("b", ("b",)),), "itself"),
        (1, (Route("b", ("a", "b")),), "itself"),
        (1, (Route("b", ("x",)),), "'x'"),
        (1, (Route("b", ("c",)), Route("c", ("b",))), "nothing has reached yet"),
        (1, (Route("b", ("c",)), Route("c", ("a",))), "nothing has reached yet"),
    ],
)
def test_wrong_plans_are_refused_when_built(nbytes: int, routes: tuple[Route, ...], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        Plan("a", nbytes, routes)


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
