"""The slots that a transport serves, and who uses them now.

Shared by all transports: a key is offered, borrowed by readers (a connection, a process, a thread of ours),
and withdrawn. After a withdrawal nobody can borrow it, and `wait_unused` says when the last reader has let go.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable

from wsync.errors import ConfigError, RemoteFault
from wsync.memory import Slot

MAX_KEY_NBYTES = 1024
_MAX_WITHDRAWN = 4096


class Offer:
    """A slot as it was offered. `users` counts the borrows of each reader."""

    __slots__ = ("is_withdrawn", "key", "slot", "users", "version")

    def __init__(self, key: str, slot: Slot, version: int) -> None:
        self.key = key
        self.slot = slot
        self.version = version
        self.users: Counter[Hashable] = Counter()
        self.is_withdrawn = False

    def check_range(self, offset: int, nbytes: int) -> None:
        """Raises `RemoteFault` for a range that is not inside the slot."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.slot.nbytes:
            raise RemoteFault(f"[{offset}, {offset + nbytes}) is not inside {self.key!r} of {self.slot.nbytes} bytes")


class Offers:
    """All offers of one transport. `changed` guards them and is notified when an offer comes, goes or falls idle."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._offered: dict[str, Offer] = {}
        self._leaving: dict[str, Offer] = {}
        self._withdrawn: OrderedDict[str, None] = OrderedDict()
        self._is_closed = False

    def add(self, key: str, slot: Slot, version: int) -> Offer:
        """Serve the slot from now on. Raises `ConfigError` for a key that cannot be offered."""
        if not 0 < len(key.encode()) <= MAX_KEY_NBYTES:
            raise ConfigError(f"a key has 1 to {MAX_KEY_NBYTES} bytes, not {len(key.encode())}")
        with self.changed:
            if self._is_closed:
                raise ConfigError(f"{key!r} cannot be offered: this transport is closed")
            if key in self._offered or key in self._leaving:
                raise ConfigError(f"{key!r} is offered already", hint="a key names the same bytes for ever")
            self._withdrawn.pop(key, None)
            offer = self._offered[key] = Offer(key, slot, version)
            self.changed.notify_all()
            return offer

    def find(self, key: str) -> Offer | None:
        """The offer, or None while it may still come. Raises `RemoteFault` for a withdrawn key."""
        with self.changed:
            if self._is_closed:
                raise RemoteFault(f"{key!r} is not served any more: the holder's transport is closed")
            if key in self._withdrawn:
                raise RemoteFault(f"{key!r} has been withdrawn", hint="read a newer version")
            return self._offered.get(key)

    def borrow(self, key: str, user: Hashable, timeout_s: float = 0.0) -> Offer | None:
        """Wait for the key and use it until `give_back`. None when it has not come; `RemoteFault` when it has gone."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while (offer := self.find(key)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self.changed.wait(left)
            offer.users[user] += 1
            return offer

    def give_back(self, offer: Offer, user: Hashable) -> None:
        with self.changed:
            offer.users[user] -= 1
            if offer.users[user] <= 0:
                del offer.users[user]
                if not offer.users:
                    self._leaving.pop(offer.key, None)
                    self.changed.notify_all()

    def withdraw(self, key: str) -> Offer | None:
        """No new borrows from here on. Returns the offer while somebody uses it still."""
        with self.changed:
            offer = self._offered.pop(key, None)
            if offer is not None:
                offer.is_withdrawn = True
                if offer.users:
                    self._leaving[key] = offer
            self._withdrawn[key] = None
            while len(self._withdrawn) > _MAX_WITHDRAWN:
                self._withdrawn.popitem(last=False)
            self.changed.notify_all()
            return self._leaving.get(key)

    def wait_unused(self, key: str, timeout_s: float) -> list[Hashable]:
        """Wait until nobody uses a withdrawn key. Returns those who still do at the deadline."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while key in self._leaving and (left := deadline - time.monotonic()) > 0:
                self.changed.wait(left)
            return list(self._leaving[key].users) if key in self._leaving else []

    def close(self) -> None:
        """Withdraw everything."""
        with self.changed:
            for key in list(self._offered):
                self.withdraw(key)
            self._is_closed = True
            self.changed.notify_all()

    @property
    def num_users(self) -> int:
        """Readers that use an offer now, counted once per offer."""
        with self.changed:
            return sum(len(offer.users) for offer in (*self._offered.values(), *self._leaving.values()))
