"""Inproc: several holders in one process, for tests, examples and a trainer that serves itself."""

from __future__ import annotations

import secrets
import threading
from typing import ClassVar

from wsync.errors import ConnectError, ErrorContext, TransferTimeout
from wsync.memory import Slot
from wsync.transports.base import Capabilities, Op, Peer, Read
from wsync.transports.offers import Offer, Offers
from wsync.transports.puller import Puller, PullOp


class InprocTransport:
    """Finds the others of this process by a random endpoint, and copies from their slots in a thread per peer."""

    capabilities = Capabilities(
        memory_kinds=("host",),
        reach="process",
        is_one_sided=True,
        needs_peer_progress=False,
        posts_synchronously=False,
        detects_death=True,
    )
    _all: ClassVar[dict[bytes, InprocTransport]] = {}
    _all_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, *, name: str = "inproc") -> None:
        self.name = name
        self.offers = Offers()
        self.is_closed = False
        self._endpoint = secrets.token_bytes(16)
        self._peers: set[InprocPeer] = set()
        with self._all_lock:
            self._all[self._endpoint] = self

    @property
    def num_leases(self) -> int:
        """Readers inside our slots now."""
        return self.offers.num_users

    def offer(self, key: str, slot: Slot, version: int) -> None:
        self.offers.add(key, slot, version)

    def withdraw(self, key: str, timeout_s: float) -> None:
        self.offers.withdraw(key)
        left = self.offers.wait_unused(key, timeout_s)
        if left:
            raise TransferTimeout(
                f"{key!r} is still being read after {timeout_s:g} s",
                hint="its memory must not be reused",
                context=ErrorContext(phase="withdraw", peers=tuple(str(user) for user in left)),
            )

    def export(self) -> bytes:
        return self._endpoint

    def connect(self, endpoint: bytes, *, peer: str, timeout_s: float) -> InprocPeer:
        with self._all_lock:
            holder = self._all.get(endpoint)
        if holder is None or self.is_closed:
            raise ConnectError(
                f"cannot connect to {peer}: " + ("this transport is closed" if self.is_closed else "it has gone"),
                context=ErrorContext(phase="connect", peers=(peer,)),
            )
        connected = InprocPeer(peer, holder)
        with self._all_lock:
            self._peers.add(connected)
        return connected

    def post_read(self, peer: Peer, reads: list[Read], *, timeout_s: float) -> Op:
        assert isinstance(peer, InprocPeer)
        return peer.puller.post(reads, timeout_s)

    def cancel(self, op: Op) -> None:
        assert isinstance(op, PullOp)
        op.puller.cancel(op)

    def forget(self, peer: Peer) -> None:
        assert isinstance(peer, InprocPeer)
        with self._all_lock:
            self._peers.discard(peer)
        peer.puller.close("was closed here")

    def close(self) -> None:
        with self._all_lock:
            self.is_closed = True
            self._all.pop(self._endpoint, None)
            peers = list(self._peers)
        for peer in peers:
            self.forget(peer)
        self.offers.close()


class InprocPeer:
    """Another transport of this process; also the `Source` of its puller."""

    def __init__(self, name: str, holder: InprocTransport) -> None:
        self.name = name
        self._holder = holder
        self._borrowed: dict[str, Offer] = {}
        self.puller = Puller(name, self, "wsync-inproc-read")

    def __str__(self) -> str:
        return f"the reader of {self.name} in this process"

    @property
    def gone_why(self) -> str:
        return "is gone: its transport is closed" if self._holder.is_closed else ""

    def borrow(self, key: str) -> tuple[Slot, int] | None:
        if self._holder.is_closed:
            raise ConnectError(f"{self.name} is gone: its transport is closed")
        offer = self._holder.offers.borrow(key, self)
        if offer is None:
            return None
        self._borrowed[key] = offer
        return offer.slot, offer.version

    def give_back(self, key: str) -> None:
        self._holder.offers.give_back(self._borrowed.pop(key), self)
