"""Tcp: reaches anywhere. The holder serves its slots from one thread per connection, straight from their memory.

The accepting side is here, the reading side in `tcp_client`, the frames in `tcp_wire`. A request for bytes that
are not there yet is held back until they are (long poll), so cut-through needs no further message.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import threading
import time

import msgspec

from wsync.errors import ConfigError, ConnectError, ErrorContext, RemoteFault, TransferTimeout
from wsync.memory import Slot
from wsync.transports.base import Capabilities, Op, Peer, Read
from wsync.transports.gate import Gate, shut
from wsync.transports.offers import MAX_KEY_NBYTES, Offer, Offers
from wsync.transports.ops import Deadlines, TimedOp
from wsync.transports.tcp_client import TcpOp, TcpPeer
from wsync.transports.tcp_wire import (
    FAULT,
    MAX_READ_NBYTES,
    MAX_TEXT_NBYTES,
    NOT_YET,
    OK,
    REQUEST,
    RESPONSE,
    Endpoint,
    tune,
)

_SLICE_S = 0.02  # how often a held-back request looks whether its key was withdrawn
_GRACE_S = 2.0  # for a send to end after its connection was shut down


class TcpTransport:
    """Serves slots at `listen` (an IPv4 or IPv6 address of this host), reads from others over `connections` each.

    `refused` counts the connections that did not prove to know the token. Raises `ConfigError` for an address
    that cannot be listened at.
    """

    capabilities = Capabilities(
        memory_kinds=("host",),
        reach="network",
        is_one_sided=False,
        needs_peer_progress=True,
        posts_synchronously=False,
        detects_death=True,
    )

    def __init__(self, token: str, *, listen: str = "127.0.0.1", connections: int = 2, name: str = "tcp") -> None:
        if connections < 1:
            raise ConfigError(f"connections must be at least 1, not {connections}")
        self.name = name
        self._token = token
        self._connections = connections
        self._offers = Offers()
        self._incarnation = secrets.token_bytes(16)
        listener = _listen(listen)
        host, port = listener.getsockname()[:2]
        self._endpoint = Endpoint(host, port, self._incarnation.hex())
        self._gate = Gate(listener, token, "data", self._serve)
        self._lock = threading.Lock()
        self._peers: set[TcpPeer] = set()
        self._deadlines = Deadlines(_expire, "wsync-tcp-deadlines")
        self._is_closed = False

    @property
    def refused(self) -> int:
        return self._gate.refused

    @property
    def num_leases(self) -> int:
        """Reads of others that are being served now."""
        return self._offers.num_users

    # --- serving
    def offer(self, key: str, slot: Slot, version: int) -> None:
        self._offers.add(key, slot, version)

    def withdraw(self, key: str, timeout_s: float) -> None:
        """Sends in progress may end within the timeout; then their connections are shut down."""
        self._offers.withdraw(key)
        for connection in self._offers.wait_unused(key, timeout_s):
            assert isinstance(connection, _Connection)
            shut(connection.sock)
        left = self._offers.wait_unused(key, _GRACE_S)
        if left:
            raise TransferTimeout(
                f"sends of {key!r} do not end",
                hint="its memory must not be reused",
                context=ErrorContext(phase="withdraw", peers=tuple(str(connection) for connection in left)),
            )

    def export(self) -> bytes:
        return msgspec.msgpack.encode(self._endpoint)

    def _serve(self, sock: socket.socket) -> None:
        tune(sock)
        sock.sendall(self._incarnation)
        connection = _Connection(sock)
        while (request := connection.next_request()) is not None:
            self._answer(connection, request)

    def _answer(self, connection: _Connection, request: _Request) -> None:
        deadline = time.monotonic() + request.patience_s
        try:
            if request.nbytes > MAX_READ_NBYTES:
                raise RemoteFault(f"a request for {request.nbytes} bytes exceeds {MAX_READ_NBYTES}")
            offer = self._offers.borrow(request.key, connection, request.patience_s)
        except RemoteFault as fault:
            return connection.respond(request.op_id, FAULT, fault.problem)
        if offer is None:
            return connection.respond(request.op_id, NOT_YET)
        try:
            offer.check_range(request.offset, request.nbytes)
            if not _wait_ready(offer, request, deadline):
                return connection.respond(request.op_id, NOT_YET)
            connection.send(request, offer.slot.data)
        except RemoteFault as fault:
            return connection.respond(request.op_id, FAULT, fault.problem)
        finally:
            self._offers.give_back(offer, connection)

    # --- reading
    def connect(self, endpoint: bytes, *, peer: str, timeout_s: float) -> TcpPeer:
        try:
            where = msgspec.msgpack.decode(endpoint, type=Endpoint)
        except msgspec.DecodeError as exc:
            raise ConnectError(f"the endpoint of {peer} is none of tcp's: {exc}") from exc
        connected = TcpPeer(peer, where, self._token, self._connections)
        connected.open(timeout_s)
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._peers.add(connected)
        if is_closed:
            connected.close("was closed here")
            raise ConnectError(f"cannot connect to {peer}: this transport is closed")
        return connected

    def post_read(self, peer: Peer, reads: list[Read], *, timeout_s: float) -> Op:
        assert isinstance(peer, TcpPeer)
        op = peer.post(reads, timeout_s)
        self._deadlines.watch(op)
        return op

    def cancel(self, op: Op) -> None:
        assert isinstance(op, TcpOp)
        if not op.is_done:
            op.source.abandon(op, op.cancelled())

    def forget(self, peer: Peer) -> None:
        assert isinstance(peer, TcpPeer)
        with self._lock:
            self._peers.discard(peer)
        peer.close("was closed here")

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            peers = list(self._peers)
        for peer in peers:
            self.forget(peer)
        self._offers.close()
        self._gate.close()
        self._deadlines.close()


def _expire(op: TimedOp) -> None:
    assert isinstance(op, TcpOp)
    op.source.abandon(op, op.overdue())


class _Request(msgspec.Struct, frozen=True):
    op_id: int
    key: str
    offset: int
    nbytes: int
    patience_s: float


class _Connection:
    """An authenticated client. Receives its requests and sends the answers, from one thread."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._name = "{}:{}".format(*sock.getpeername())
        self._header = memoryview(bytearray(REQUEST.size))

    def __str__(self) -> str:
        return self._name

    def next_request(self) -> _Request | None:
        """Block until one is there. None when the client has gone or sent what is no request."""
        if not self._receive(self._header):
            return None
        op_id, key_nbytes, offset, nbytes, patience_ms = REQUEST.unpack(self._header)
        if not 0 < key_nbytes <= MAX_KEY_NBYTES:
            self.respond(op_id, FAULT, f"a key has 1 to {MAX_KEY_NBYTES} bytes, not {key_nbytes}")
            return None
        key = bytearray(key_nbytes)
        if not self._receive(memoryview(key)):
            return None
        try:
            return _Request(op_id, key.decode(), offset, nbytes, patience_ms / 1000)
        except UnicodeDecodeError:
            self.respond(op_id, FAULT, "a key is utf-8")
            return None

    def _receive(self, view: memoryview) -> bool:
        return self.sock.recv_into(view, 0, socket.MSG_WAITALL) == len(view)

    def respond(self, op_id: int, status: int, text: str = "") -> None:
        body = text.encode()[:MAX_TEXT_NBYTES]
        self.sock.sendall(RESPONSE.pack(op_id, status, len(body)) + body)

    def send(self, request: _Request, block: memoryview) -> None:
        with block[request.offset : request.offset + request.nbytes] as view:
            header = RESPONSE.pack(request.op_id, OK, request.nbytes)
            sent = self.sock.sendmsg([header, view])
            if sent < len(header):
                self.sock.sendall(header[sent:])
                sent = len(header)
            sent -= len(header)
            while sent < request.nbytes:
                with view[sent:] as rest:
                    sent += self.sock.send(rest)


def _wait_ready(offer: Offer, request: _Request, deadline: float) -> bool:
    """Whether the range is there by the deadline. Raises `RemoteFault` when it never will be."""
    while True:
        if offer.is_withdrawn:
            raise RemoteFault(f"{request.key!r} has been withdrawn", hint="read a newer version")
        if offer.slot.version != offer.version:
            raise RemoteFault(f"the slot of {request.key!r} holds another version")
        left = min(_SLICE_S, deadline - time.monotonic())
        if offer.slot.wait_ready(request.offset, request.nbytes, offer.version, max(0.0, left)):
            return True
        if left <= 0:
            return False


def _listen(address: str) -> socket.socket:
    literal = address.removeprefix("[").removesuffix("]")
    try:
        parsed = ipaddress.ip_address(literal)
    except ValueError as exc:
        raise ConfigError(f"listen must be an IPv4 or IPv6 address, not {address!r}") from exc
    if parsed.is_unspecified:
        raise ConfigError(
            f"listen must name one interface, not all of them ({address})", hint="use this host's address for data"
        )
    family, kind, protocol, _, where = socket.getaddrinfo(literal, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.bind(where)
        listener.listen(1024)
    except OSError as exc:
        listener.close()
        raise ConfigError(
            f"cannot listen at {address}: {exc.strerror}", hint="listen must be an address of this host"
        ) from exc
    return listener
