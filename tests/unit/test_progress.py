"""Which hops are slow, from reports: only those whose source had more to send, and all versions of a hop together."""

from __future__ import annotations

import pytest

from wsync.engine.progress import HopWatch, Pulling

MIB = 1 << 20


def pulling(channel: str, num_ready: int, from_a: int, *, ahead: int = 1000, uid: int = 1, chunk: int = MIB) -> Pulling:
    return Pulling(channel, 1, uid, chunk, num_ready, {"A": from_a * MIB}, {"A": ahead})


def test_versions_that_share_a_hop_count_together() -> None:
    """One of two lanes stands still while the other has all of the connection: the hop is as fast as ever."""
    watch = HopWatch()
    watch.report("B", [pulling("c#1", 0, 0), pulling("c#2", 0, 0)], 0.0, {"A": 100.0 * MIB})
    (rate,) = watch.report("B", [pulling("c#1", 0, 0), pulling("c#2", 50, 50)], 0.5, {"A": 100.0 * MIB})
    assert (rate.source, rate.nbytes_per_s, rate.is_own) == ("A", 100.0 * MIB, True)
    assert not watch.is_slow("B", rate, 100.0 * MIB)


def test_a_receiver_that_waits_for_bytes_that_are_not_there_says_nothing_of_its_hop() -> None:
    watch = HopWatch()
    watch.report("B", [pulling("c", 10, 10, ahead=10)], 0.0, {"A": 100.0 * MIB})
    (rate,) = watch.report("B", [pulling("c", 11, 11, ahead=12)], 0.5, {"A": 100.0 * MIB})
    assert not rate.is_own


def test_a_span_is_as_long_as_some_chunks_should_take() -> None:
    watch = HopWatch()
    expected = {"A": 8.0 * MIB}
    assert watch.report("B", [pulling("c", 0, 0, chunk=8 * MIB)], 0.0, expected) == []
    assert watch.report("B", [pulling("c", 0, 0, chunk=8 * MIB)], 3.9, expected) == [], "four chunks take four seconds"
    (rate,) = watch.report("B", [pulling("c", 3, 24, chunk=8 * MIB)], 4.0, expected)
    assert rate.nbytes_per_s == pytest.approx(6 * MIB)


def test_a_version_that_ended_meanwhile_leaves_nothing_to_judge_by() -> None:
    watch = HopWatch()
    watch.report("B", [pulling("c#1", 0, 0), pulling("c#2", 0, 0)], 0.0, {"A": 1.0})
    assert watch.report("B", [pulling("c#2", 1, 1)], 9e9, {"A": 1.0}) == [], "what came of c#1 at last is unknown"
    (rate,) = watch.report("B", [pulling("c#2", 5, 5)], 9e9 + 1e8, {"A": 1.0})
    assert rate.is_own


def test_slow_means_for_some_spans_on_end_and_a_new_receiver_begins_anew() -> None:
    watch = HopWatch()
    verdicts = []
    for second, came in enumerate([0, 1, 2, 102, 103, 104]):
        for rate in watch.report("B", [pulling("c", came, came)], float(second), {"A": 100.0 * MIB}):
            verdicts.append(watch.is_slow("B", rate, 100.0 * MIB))
    assert verdicts == [False, True, False, False, True]
    watch.forget("B")
    assert watch.report("B", [pulling("c", 0, 0)], 9.0, {}) == []
    (rate,) = watch.report("B", [pulling("c", 1, 1)], 10.0, {"A": 100.0 * MIB})
    assert not watch.is_slow("B", rate, 100.0 * MIB), "slow spans of the one that has gone do not count"
