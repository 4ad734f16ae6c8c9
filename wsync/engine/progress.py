"""How fast hops are, from what receivers report with their heartbeats. Pure.

A hop's own rate shows only while its source had something to send: of some version it must have had, at the beginning
of a span, more than the receiver had at its end. Else the receiver waited for bytes that were not there, and somebody
further up is the slow one. All that a receiver pulls from one source shares their connections, so it counts together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

MIN_SPAN_S = 0.2
MIN_CHUNKS = 4
"""A span is long enough for so many chunks at the expected rate: they come one by one."""
SLOW, NUM_SLOW_SPANS = 0.5, 2
"""A hop is slow below this part of the expected rate, in so many spans on end."""


class Pulling(msgspec.Struct, frozen=True):
    """How far a receiver is with one version. `nbytes_from` counts from its beginning, for each source."""

    channel: str
    version: int
    uid: int
    chunk_nbytes: int
    num_ready: int
    nbytes_from: Mapping[str, int]
    ahead: Mapping[str, int]
    """Each source that it was told to pull from first -> chunks that are there."""


class HopRate(msgspec.Struct, frozen=True):
    """What came over a hop in one span. `is_own`: its source had more to send all the time."""

    source: str
    nbytes_per_s: float
    is_own: bool


@dataclass
class _Sample:
    at: float
    pulling: Mapping[tuple[str, int], Pulling]


class HopWatch:
    """Of all receivers of a job."""

    def __init__(self) -> None:
        self._last: dict[str, _Sample] = {}
        self._num_slow: dict[tuple[str, str], int] = {}

    def forget(self, receiver: str) -> None:
        """It has gone, also as a source."""
        self._last.pop(receiver, None)
        self._num_slow = {pair: num for pair, num in self._num_slow.items() if receiver not in pair}

    def report(
        self, receiver: str, pulling: Sequence[Pulling], now: float, expected: Mapping[str, float]
    ) -> list[HopRate]:
        """What came over each hop since the last span, none while this one is short for the `expected` rates."""
        chunk_nbytes = max((part.chunk_nbytes for part in pulling), default=0)
        chunk_s = max((chunk_nbytes / rate for rate in expected.values() if rate), default=0.0)
        last = self._last.get(receiver)
        span_s = now - last.at if last is not None else 0.0
        if last is not None and span_s < max(MIN_SPAN_S, MIN_CHUNKS * chunk_s):
            return []
        sample = {(part.channel, part.uid): part for part in pulling}
        self._last[receiver] = _Sample(now, sample)
        if last is None or last.pulling.keys() - sample.keys():
            return []  # what came of a version that has ended meanwhile is unknown
        found: list[HopRate] = []
        for source in dict.fromkeys(source for part in pulling for source in part.ahead):
            nbytes, is_own = 0, False
            for key, part in sample.items():
                before = last.pulling.get(key)
                nbytes += part.nbytes_from.get(source, 0)
                if before is not None:
                    nbytes -= before.nbytes_from.get(source, 0)
                    is_own |= before.ahead.get(source, 0) > part.num_ready
            found.append(HopRate(source, nbytes / span_s, is_own))
        return found

    def is_slow(self, receiver: str, rate: HopRate, expected_nbytes_per_s: float) -> bool:
        """Whether the hop has been too slow for long enough. Asked once for every rate."""
        pair = (rate.source, receiver)
        is_slow = rate.is_own and rate.nbytes_per_s < SLOW * expected_nbytes_per_s
        self._num_slow[pair] = self._num_slow.get(pair, 0) + 1 if is_slow else 0
        return self._num_slow[pair] >= NUM_SLOW_SPANS
