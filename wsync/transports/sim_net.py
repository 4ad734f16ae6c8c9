"""A network for simulations: connections share resources max-min fairly, on the clock of the running event loop.

A connection sends one thing after another. Whenever one begins or ends to be busy, the rates of those that share
something with it, directly or through others, are found anew by progressive filling (Bertsekas and Gallager, Data
Networks, 6.5.2); all others go on as they are.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping

from wsync.errors import ConnectError

_DONE = 1e-6
"""Bytes: less is rounding."""


class Connection:
    """One way from a holder to another. Made by `Network.connect`."""

    def __init__(self, network: Network, resources: tuple[str, ...], overhead_s: float) -> None:
        self.resources = resources
        self.rate = 0.0
        """bytes/s now."""
        self.left = 0.0
        """Of what is being sent: bytes at `since`."""
        self.since = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.queue: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._network, self._overhead_s = network, overhead_s
        self._is_closed = False

    def send(self, nbytes: float) -> asyncio.Future[None]:
        """Ends when all bytes, and what was sent before them, are over. Cancel it to take it back."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_closed:
            done.set_exception(ConnectError("this simulated connection was closed"))
            return done
        self.queue.append((nbytes, done))
        done.add_done_callback(self._taken_back)
        if len(self.queue) == 1:
            self.left = nbytes
            self._network.busy(self)
        return done

    def close(self) -> None:
        """End everything that is not over yet with ConnectError. Idempotent."""
        self._is_closed = True
        waiting, self.queue = self.queue, deque()
        for _, done in waiting:
            if not done.done():
                done.set_exception(ConnectError("this simulated connection was closed"))
        if waiting:
            self._network.idle(self)

    def finished(self) -> None:
        """Its first sending is over: begin with the next."""
        _, done = self.queue.popleft()
        asyncio.get_running_loop().call_later(self._overhead_s, _arrived, done)
        self._next()

    def _taken_back(self, done: asyncio.Future[None]) -> None:
        if done.cancelled() and any(other is done for _, other in self.queue):
            is_first = self.queue[0][1] is done
            self.queue = deque((nbytes, other) for nbytes, other in self.queue if other is not done)
            if is_first:
                self._next()

    def _next(self) -> None:
        if self.queue:
            self.left, self.since = self.queue[0][0], asyncio.get_running_loop().time()
            self._network.schedule(self)
        else:
            self._network.idle(self)


class Network:
    """Capacities in bytes/s by resource; connections without a resource of known capacity take no time."""

    def __init__(self, capacity: Mapping[str, float]) -> None:
        self._capacity = dict(capacity)
        self._users: dict[str, dict[Connection, None]] = {}
        self.nbytes: dict[str, float] = {}
        """Resource -> bytes that have passed it. Up to date for what is over."""

    def connect(self, resources: Iterable[str], *, overhead_s: float = 0.0) -> Connection:
        return Connection(self, tuple(sorted(set(resources))), overhead_s)

    def learn(self, capacity: Mapping[str, float]) -> None:
        """Capacities of resources that have none yet."""
        self._capacity = {**capacity, **self._capacity}

    def set_capacity(self, resource: str, nbytes_per_s: float) -> None:
        """From now on; 0 stops whatever uses it."""
        self._capacity[resource] = nbytes_per_s
        self._share(self._users.get(resource, {}))

    def busy(self, connection: Connection) -> None:
        """It has something to send from now on."""
        connection.since = asyncio.get_running_loop().time()
        for resource in connection.resources:
            self._users.setdefault(resource, {})[connection] = None
        self._share([connection])

    def idle(self, connection: Connection) -> None:
        """It has nothing to send any more: others get its part."""
        self._unschedule(connection)
        connection.rate = 0.0
        neighbours: dict[Connection, None] = {}
        for resource in connection.resources:
            users = self._users[resource]
            users.pop(connection, None)
            neighbours |= users
        self._share(neighbours)

    def schedule(self, connection: Connection) -> None:
        """Set the timer for the end of what it sends now."""
        self._unschedule(connection)
        if connection.rate > 0 or connection.left <= _DONE:
            wait_s = connection.left / connection.rate if connection.left > _DONE else 0.0
            loop = asyncio.get_running_loop()
            connection.timer = loop.call_at(connection.since + wait_s, self._over, connection)

    def _over(self, connection: Connection) -> None:
        for resource in connection.resources:
            self.nbytes[resource] = self.nbytes.get(resource, 0.0) + connection.queue[0][0]
        connection.left, connection.timer = 0.0, None
        connection.finished()

    @staticmethod
    def _unschedule(connection: Connection) -> None:
        if connection.timer is not None:
            connection.timer.cancel()
            connection.timer = None

    def _share(self, changed: Iterable[Connection]) -> None:
        group = self._connected(changed)
        now = asyncio.get_running_loop().time()
        for connection in group:
            connection.left = max(0.0, connection.left - connection.rate * (now - connection.since))
            connection.since = now
        for connection, rate in self._fair(group).items():
            if rate != connection.rate or connection.timer is None:
                connection.rate = rate
                self.schedule(connection)

    def _connected(self, seeds: Iterable[Connection]) -> dict[Connection, None]:
        group: dict[Connection, None] = {}
        todo = [connection for connection in seeds if connection.queue]
        while todo:
            connection = todo.pop()
            if connection not in group:
                group[connection] = None
                for resource in connection.resources:
                    todo += [other for other in self._users[resource] if other not in group]
        return group

    def _fair(self, group: Mapping[Connection, None]) -> dict[Connection, float]:
        """Fill all equally; who meets a full resource stays as it is, the others go on."""
        rates: dict[Connection, float] = {}
        left = {r: self._capacity[r] for c in group for r in c.resources if r in self._capacity}
        open_: dict[str, dict[Connection, None]] = {r: dict(self._users[r]) for r in left}
        rates.update(dict.fromkeys((c for c in group if not left.keys() & set(c.resources)), float("inf")))
        while open_:
            narrowest = min(open_, key=lambda r: (left[r] / len(open_[r]), r))
            rate = left[narrowest] / len(open_[narrowest])
            for connection in open_[narrowest]:
                rates[connection] = rate
            for connection in list(open_[narrowest]):
                for resource in connection.resources:
                    if resource in open_:
                        left[resource] -= rate
                        open_[resource].pop(connection, None)
                        if not open_[resource]:
                            del open_[resource]
        return rates


def _arrived(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
