"""Typed events of the engine, and the bus that hands them to observers.

Metrics, logs and traces subscribe; with no subscriber an event costs one truth test.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class ViewChanged(msgspec.Struct, frozen=True, tag=True):
    number: int
    holders: tuple[str, ...]
    members: tuple[str, ...]


class PlanMade(msgspec.Struct, frozen=True, tag=True):
    channel: str
    version: int
    routes: tuple[str, ...]
    predicted_s: float = 0.0
    """0: unknown, like the bound, which no routes can beat."""
    bound_s: float = 0.0


class PathDegraded(msgspec.Struct, frozen=True, tag=True):
    """A hop delivers less than half of what was expected; the routes that use it are made anew."""

    channel: str
    version: int
    source: str
    receiver: str
    expected_nbytes_per_s: float
    nbytes_per_s: float


class Staged(msgspec.Struct, frozen=True, tag=True):
    channel: str
    version: int
    holder: str
    nbytes_received: int
    transfer_s: float


class Committed(msgspec.Struct, frozen=True, tag=True):
    channel: str
    version: int
    member: str
    pause_s: float


class Aborted(msgspec.Struct, frozen=True, tag=True):
    channel: str
    version: int
    reason: str


Event = ViewChanged | PlanMade | PathDegraded | Staged | Committed | Aborted


class EventBus:
    """Observers of one process. An observer must not block; it is called where the event happens."""

    def __init__(self) -> None:
        self._observers: list[Callable[[Event], None]] = []

    def subscribe(self, observer: Callable[[Event], None]) -> None:
        self._observers.append(observer)

    def emit(self, event: Event) -> None:
        for observer in self._observers:
            observer(event)
