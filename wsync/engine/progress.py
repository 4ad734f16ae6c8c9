"""How fast the hops of one version are, from what its receivers report with their heartbeats. Pure.

A hop's own rate shows only while its source had something to send: it must have had, at the beginning of a span, more
than the receiver had at its end. Else the receiver waited for bytes that were not there, and somebody further up is
the slow one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

MIN_SPAN_S = 0.2
MIN_CHUNKS = 4
"""A span is long enough for so many chunks at the expected rate: they come one by one."""
SLOW, NUM_SLOW_SPANS = 0.5, 2
"""A hop is slow below this part of the expected rate, in so many spans on end."""


class HopRate(msgspec.Struct, frozen=True):
    """What came over a hop in one span. `is_own`: its source had more to send all the time."""

    source: str
    nbytes_per_s: float
    is_own: bool


@dataclass
class _Sample:
    at: float
    nbytes_from: Mapping[str, int]
    ahead: Mapping[str, int]


@dataclass
class Progress:
    """Of one version."""

    num_ready: dict[str, int] = field(default_factory=dict)
    """Holder -> chunks that it has said to have."""
    _last: dict[str, _Sample] = field(default_factory=dict)
    _num_slow: dict[tuple[str, str], int] = field(default_factory=dict)

    def begin(self, receiver: str) -> None:
        """It pulls from others now: what was before counts no more."""
        self._last.pop(receiver, None)
        self._num_slow = {pair: num for pair, num in self._num_slow.items() if pair[1] != receiver}

    def report(
        self,
        receiver: str,
        num_ready: int,
        nbytes_from: Mapping[str, int],
        ahead: Mapping[str, int],
        now: float,
        *,
        chunk_s: float,
    ) -> list[HopRate]:
        """What came over each hop since the last span, none while this one is still short.

        `nbytes_from` counts from the beginning of the version; `ahead` maps each source to the chunks it has now;
        `chunk_s` is how long a chunk should take.
        """
        self.num_ready[receiver] = num_ready
        last = self._last.setdefault(receiver, _Sample(now, dict(nbytes_from), dict(ahead)))
        span_s = now - last.at
        if span_s < max(MIN_SPAN_S, MIN_CHUNKS * chunk_s):
            return []
        self._last[receiver] = _Sample(now, dict(nbytes_from), dict(ahead))
        return [
            HopRate(
                source,
                (nbytes_from.get(source, 0) - last.nbytes_from.get(source, 0)) / span_s,
                last.ahead.get(source, 0) > num_ready,
            )
            for source in ahead
        ]

    def is_slow(self, receiver: str, rate: HopRate, expected_nbytes_per_s: float) -> bool:
        """Whether the hop has been too slow for long enough. Asked once for every rate."""
        pair = (rate.source, receiver)
        is_slow = rate.is_own and rate.nbytes_per_s < SLOW * expected_nbytes_per_s
        self._num_slow[pair] = self._num_slow.get(pair, 0) + 1 if is_slow else 0
        return self._num_slow[pair] >= NUM_SLOW_SPANS
