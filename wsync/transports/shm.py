"""Shm: holders on one host. A reader maps the slot itself and copies what its ready bytes say is there.

    reader -> holder   Open(key)                  may wait there until the key is offered
    holder -> reader   Opened(key, version)       with a read-only descriptor of the slot (SCM_RIGHTS)
                       Faulted(key, problem)      no such key any more
                       Withdrawn(key)             let go of it
    reader -> holder   Closed(key)

One packet each over an abstract unix socket, so nothing is left on disk. An open key is a lease: the holder's
`withdraw` returns when all readers have closed it or their sockets have gone. The reading side is `shm_client`.
"""

from __future__ import annotations

import os
import secrets
import socket
from array import array

import msgspec

from wsync.errors import ConfigError, ConnectError, ErrorContext, RemoteFault, TransferTimeout
from wsync.memory import Slot
from wsync.transports.base import Capabilities, Op, Peer, Read
from wsync.transports.gate import Gate, peer_credentials, shut
from wsync.transports.offers import MAX_KEY_NBYTES, Offer, Offers
from wsync.transports.puller import PullOp
from wsync.transports.shm_client import ShmPeer
from wsync.transports.shm_wire import (
    MAX_PACKET_NBYTES,
    Closed,
    Endpoint,
    Faulted,
    Opened,
    ToHolder,
    ToReader,
    Withdrawn,
)


class ShmTransport:
    """Serves slots to the processes of this user on `host`, an identity that differs between hosts.

    `refused` counts the connections that did not prove to know the token; `num_leases` the keys open at readers.
    A holder that is stopped opens no further keys, but what is open and ready can be read on.
    """

    capabilities = Capabilities(
        memory_kinds=("host",),
        reach="host",
        is_one_sided=True,
        needs_peer_progress=False,
        posts_synchronously=False,
        detects_death=True,
    )

    def __init__(self, token: str, *, host: str, name: str = "shm") -> None:
        if not host:
            raise ConfigError("shm needs the identity of this host")
        self.name = name
        self._token = token
        self._offers = Offers()
        self._peers: set[ShmPeer] = set()
        self._readers: dict[_Reader, None] = {}
        self._is_closed = False
        incarnation = secrets.token_hex(16)
        self._endpoint = Endpoint(f"wsync-{incarnation}", incarnation, host)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind("\0" + self._endpoint.socket)
        listener.listen(1024)
        self._gate = Gate(listener, token, "shm", self._serve)

    @property
    def refused(self) -> int:
        return self._gate.refused

    @property
    def num_leases(self) -> int:
        return self._offers.num_users

    # --- serving
    def offer(self, key: str, slot: Slot, version: int) -> None:
        with self._offers.changed:
            self._offers.add(key, slot, version)
            for reader in [reader for reader in self._readers if key in reader.awaited]:
                reader.awaited.discard(key)
                self._grant(reader, key)

    def withdraw(self, key: str, timeout_s: float) -> None:
        with self._offers.changed:
            offer = self._offers.withdraw(key)
            for reader in list(self._readers):
                if offer is not None and reader in offer.users:
                    reader.send(Withdrawn(key))
                elif key in reader.awaited:
                    reader.awaited.discard(key)
                    reader.send(Faulted(key, f"{key!r} has been withdrawn"))
        left = self._offers.wait_unused(key, timeout_s)
        if left:
            raise TransferTimeout(
                f"{key!r} is still mapped by readers after {timeout_s:g} s",
                hint="its memory must not be reused before they have closed it or have gone",
                context=ErrorContext(phase="withdraw", peers=tuple(str(reader) for reader in left)),
            )

    def export(self) -> bytes:
        return msgspec.msgpack.encode(self._endpoint)

    def _serve(self, sock: socket.socket) -> None:
        reader = _Reader(sock)
        with self._offers.changed:
            self._readers[reader] = None
        try:
            sock.send(self._endpoint.incarnation.encode())
            while (packet := sock.recv(MAX_PACKET_NBYTES)) and not self._is_closed:
                self._take(reader, packet)
        finally:
            with self._offers.changed:
                del self._readers[reader]
                for offer in list(reader.leases.values()):
                    self._offers.give_back(offer, reader)

    def _take(self, reader: _Reader, packet: bytes) -> None:
        try:
            message = msgspec.msgpack.decode(packet, type=ToHolder)
        except msgspec.DecodeError as exc:
            raise ConnectionAbortedError("a reader sent what is no request") from exc
        with self._offers.changed:
            if isinstance(message, Closed):
                offer = reader.leases.pop(message.key, None)
                if offer is not None:
                    self._offers.give_back(offer, reader)
            elif message.key not in reader.leases:
                self._grant(reader, message.key)

    def _grant(self, reader: _Reader, key: str) -> None:
        """Answer an Open now, or when the key is offered. The caller holds the lock, so that nothing comes between."""
        try:
            if len(key.encode()) > MAX_KEY_NBYTES:
                raise RemoteFault(f"a key has at most {MAX_KEY_NBYTES} bytes")
            offer = self._offers.borrow(key, reader)
        except RemoteFault as fault:
            reader.send(Faulted(key, fault.problem))
            return
        if offer is None:
            reader.awaited.add(key)
            return
        reader.leases[key] = offer
        fd = offer.slot.reader_fd()
        try:
            reader.send(Opened(key, offer.version), fd)
        finally:
            os.close(fd)

    # --- reading
    def connect(self, endpoint: bytes, *, peer: str, timeout_s: float) -> ShmPeer:
        try:
            where = msgspec.msgpack.decode(endpoint, type=Endpoint)
        except msgspec.DecodeError as exc:
            raise ConnectError(f"the endpoint of {peer} is none of shm's: {exc}") from exc
        if where.host != self._endpoint.host:
            raise ConnectError(
                f"{peer} is on host {where.host!r}, this is {self._endpoint.host!r}",
                hint="shm reaches this host only; use tcp",
                context=ErrorContext(phase="connect", peers=(peer,)),
            )
        connected = ShmPeer.open(where, self._token, peer, timeout_s)
        with self._offers.changed:
            is_closed = self._is_closed
            if not is_closed:
                self._peers.add(connected)
        if is_closed:
            connected.close()
            raise ConnectError(f"cannot connect to {peer}: this transport is closed")
        return connected

    def post_read(self, peer: Peer, reads: list[Read], *, timeout_s: float) -> Op:
        assert isinstance(peer, ShmPeer)
        return peer.puller.post(reads, timeout_s)

    def cancel(self, op: Op) -> None:
        assert isinstance(op, PullOp)
        op.puller.cancel(op)

    def forget(self, peer: Peer) -> None:
        assert isinstance(peer, ShmPeer)
        with self._offers.changed:
            self._peers.discard(peer)
        peer.close()

    def close(self) -> None:
        with self._offers.changed:
            self._is_closed = True
            peers = list(self._peers)
        for peer in peers:
            self.forget(peer)
        self._offers.close()
        self._gate.close()


class _Reader:
    """A connected reader, as its holder sees it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pid, _ = peer_credentials(sock)
        self.leases: dict[str, Offer] = {}
        self.awaited: set[str] = set()

    def __str__(self) -> str:
        return f"pid {self._pid}"

    def send(self, message: ToReader, fd: int = -1) -> None:
        """Never blocks. A reader whose socket is full does not read it: it is cut off."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))] if fd >= 0 else []
        try:
            self._sock.sendmsg([msgspec.msgpack.encode(message)], rights, socket.MSG_DONTWAIT)
        except OSError:
            shut(self._sock)
