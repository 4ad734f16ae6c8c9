"""The interface that every transport has, and the records it speaks.

Pull first: the receiver names the bytes and where they go. A holder `offer`s a slot under a key; another
holder `connect`s to the endpoint that the first exported, and posts reads of ranges of that key into its own memory.

A transport never chooses a route, never retries elsewhere and knows no versions: a key is opaque to it,
and is never offered twice with different bytes. What it owes:

- A read of a range that is not there yet is answered as soon as the slot's ready bytes say so (long poll for
  served transports, following the ready bytes for one-sided ones). A key that is not offered *yet* is waited for too.
- Every operation ends by its deadline, with bytes or a named error; a dead peer ends it at once where
  `capabilities.detects_death`.
- After `cancel(op)`, `forget(peer)` or `close()` has returned, nothing writes into the memory of the operation.
- After `withdraw(key)` has returned, nobody reads the slot's memory through this transport.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import msgspec

from wsync.errors import TransferTimeout
from wsync.memory import Slot

Reach = Literal["process", "host", "network"]


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a transport can do, as facts for the planner and the capability table."""

    memory_kinds: tuple[str, ...]
    reach: Reach
    is_one_sided: bool
    """Reads need no help of the peer's process."""
    needs_peer_progress: bool
    """A stopped peer stops the read."""
    posts_synchronously: bool
    """`post_read` may copy before it returns."""
    detects_death: bool
    """A killed peer ends its reads at once, without waiting for their deadline."""


class Read:
    """One range to fetch: `len(into)` bytes at `offset` of the slot offered as `key`, into writable memory."""

    __slots__ = ("into", "key", "offset")

    def __init__(self, key: str, offset: int, into: memoryview) -> None:
        self.key = key
        self.offset = offset
        self.into = into


class Op:
    """A posted read. Ends once: with None (all bytes are in place) or with a `TransportError`."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.future: concurrent.futures.Future[None] = concurrent.futures.Future()

    @property
    def is_done(self) -> bool:
        return self.future.done()

    def wait(self, timeout_s: float) -> None:
        """Block until the bytes are in place. Raises the operation's error, or `TransferTimeout`."""
        try:
            self.future.result(timeout_s)
        except concurrent.futures.TimeoutError as exc:
            # A TransferTimeout of the operation itself is a TimeoutError too: pass it on as it is.
            if self.future.done():
                raise
            raise TransferTimeout(f"a read from {self.peer} has not ended after {timeout_s:g} s") from exc

    def add_done_callback(self, call: Callable[[], None]) -> None:
        """`call` runs in an unspecified thread when the operation has ended; it must neither wait nor forget a peer."""
        self.future.add_done_callback(lambda _: call())

    def finish(self, error: BaseException | None = None) -> None:
        """For transports: end the operation; the first call counts."""
        try:
            if error is None:
                self.future.set_result(None)
            else:
                self.future.set_exception(error)
        except concurrent.futures.InvalidStateError:
            pass


class Peer(Protocol):
    """A connected holder."""

    @property
    def name(self) -> str:
        """Who it is, for errors."""
        ...


@runtime_checkable
class Transport(Protocol):
    """All methods may be called from any thread. Calls with a timeout block at most that long."""

    name: str
    capabilities: Capabilities

    def offer(self, key: str, slot: Slot, version: int) -> None:
        """Serve `slot` under `key` for as long as it holds `version`. Ready bytes say which chunks are there."""
        ...

    def withdraw(self, key: str, timeout_s: float) -> None:
        """Stop serving: later reads get `RemoteFault`. Raises `TransferTimeout` naming readers that do not let go."""
        ...

    def export(self) -> bytes:
        """The endpoint to connect to; opaque outside this transport."""
        ...

    def connect(self, endpoint: bytes, *, peer: str, timeout_s: float) -> Peer:
        """Authenticate with the holder behind `endpoint`, called `peer` in errors. Raises ConnectError, AuthError."""
        ...

    def post_read(self, peer: Peer, reads: list[Read], *, timeout_s: float) -> Op:
        """Start to fetch the ranges. The memory belongs to the operation until it has ended."""
        ...

    def cancel(self, op: Op) -> None:
        """End an operation. Other operations on the same peer may fail with it; the peer can be connected to again."""
        ...

    def forget(self, peer: Peer) -> None:
        """Drop a connection; its operations end with `ConnectError`. Idempotent."""
        ...

    def close(self) -> None:
        """Drop everything: connections, listeners, threads. Idempotent."""
        ...
