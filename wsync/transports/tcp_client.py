"""The reading side of tcp: one peer, a queue of reads, and a few connections that work it off.

A read is cut into units. A connection takes one, asks for it, receives it straight into the caller's memory,
and asks for the next as soon as the answer begins. So at most one unit waits on a connection for bytes that are
not there yet; after a moment's patience it goes back to the end of the queue, and cannot hold up others for long.

`TcpPeer.lock` guards all state here; operations are ended outside it, because their callbacks are the caller's.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Iterable

from wsync.errors import AuthError, ConnectError, ErrorContext, RemoteFault, TransportError
from wsync.transports.base import Read
from wsync.transports.gate import HANDSHAKE_S, handshake_client, recv_by, shut
from wsync.transports.ops import TimedOp, flat, without_frames
from wsync.transports.tcp_wire import (
    FAULT,
    INCARNATION_NBYTES,
    MAX_TEXT_NBYTES,
    NOT_YET,
    OK,
    REQUEST,
    RESPONSE,
    Endpoint,
    tune,
)

UNIT_NBYTES = 4 << 20
_PATIENCE_S = 0.1
_REST_S = 1.0  # before a connection that could not be opened tries again, while others work
_PATIENCE_QUEUED_S = 0.02  # when others wait for the connection


class TcpOp(TimedOp):
    """`num_left` units are not in place yet; `num_taken` of them are on a connection."""

    def __init__(self, source: TcpPeer, reads: list[Read], timeout_s: float) -> None:
        super().__init__(source.name, reads, timeout_s)
        self.source = source
        self.error: TransportError | None = None
        self.num_left = 0
        self.num_taken = 0


class _Unit:
    """A part of a read: `into` is filled from `offset` of `key`."""

    __slots__ = ("has_retried", "id", "into", "is_started", "key", "offset", "op")

    def __init__(self, op: TcpOp, key: bytes, offset: int, into: memoryview) -> None:
        self.op = op
        self.key = key
        self.offset = offset
        self.into = into
        self.id = 0
        self.is_started = False
        self.has_retried = False


class TcpPeer:
    """A holder to read from. Connections that broke are opened again by the next read."""

    def __init__(self, name: str, endpoint: Endpoint, token: str, num_connections: int) -> None:
        self.name = name
        self.endpoint = endpoint
        self.token = token
        self.lock = threading.RLock()
        self.closed_why = ""
        self._queued = threading.Condition(self.lock)
        self.released = threading.Condition(self.lock)
        self._rested = threading.Condition(self.lock)
        self._queue: deque[_Unit] = deque()
        self._connections = [_Connection(self, number) for number in range(num_connections)]

    def open(self, timeout_s: float) -> None:
        """Open the first connection now. Raises `ConnectError`, `AuthError`."""
        self._connections[0].open(time.monotonic() + timeout_s)
        for connection in self._connections:
            connection.thread.start()

    def post(self, reads: list[Read], timeout_s: float) -> TcpOp:
        op = TcpOp(self, reads, timeout_s)
        units = [
            _Unit(op, read.key.encode(), read.offset + at, into[at : at + UNIT_NBYTES])
            for read in reads
            for into in (flat(read),)
            for at in range(0, len(into), UNIT_NBYTES)
        ]
        op.num_left = len(units)
        with self.lock:
            if self.closed_why:
                op.error = op.lost(self.closed_why)
            else:
                self._queue.extend(units)
                self._queued.notify(len(units))
        self.settle([op])
        return op

    def abandon(self, op: TcpOp, error: TransportError) -> None:
        """End an operation early by shutting down the connections that it is on; the others on them start again.

        After return it has ended and its memory is left alone.
        """
        with self.lock:
            self._fail(op, error)
            for connection in self._connections:
                if any(unit.op is op for unit in connection.pending):
                    connection.shut()
            while any(c.receiving is not None and c.receiving.op is op for c in self._connections):
                self.released.wait()
        op.finish(op.error)

    def close(self, why: str) -> None:
        """After return all operations have ended and no connection is left. Idempotent."""
        with self.lock:
            self.closed_why = self.closed_why or why
            ended = self._fail_queued(None)
            for connection in self._connections:
                connection.shut()
            self._queued.notify_all()
            self._rested.notify_all()
        self.settle(ended)
        for connection in self._connections:
            if connection.thread.is_alive() and connection.thread is not threading.current_thread():
                connection.thread.join()

    # --- for the connections
    def take(self, connection: _Connection, *, is_waiting: bool) -> _Unit | None:
        """The next unit, now pending on the connection. None when closed, or when nothing is queued and not waiting."""
        with self.lock:
            while not self._queue and is_waiting and not self.closed_why:
                self._queued.wait()
            if self.closed_why or not self._queue:
                return None
            unit = self._queue.popleft()
            unit.op.num_taken += 1
            connection.pending.append(unit)
            return unit

    def release(self, connection: _Connection, unit: _Unit, error: TransportError | None = None) -> None:
        """The unit is in place, or its operation has failed."""
        with self.lock:
            connection.pending.remove(unit)
            unit.op.num_taken -= 1
            if error is None:
                unit.op.num_left -= 1
                unit.op.nbytes_done += len(unit.into)
            else:
                self._fail(unit.op, error)
        self.settle([unit.op])

    def put_back(self, connection: _Connection, unit: _Unit, *, is_first: bool) -> None:
        """The unit has to be asked for again."""
        with self.lock:
            connection.pending.remove(unit)
            unit.op.num_taken -= 1
            unit.is_started = False
            if unit.op.error is None and not self.closed_why:
                self._queue.insert(0 if is_first else len(self._queue), unit)
                self._queued.notify()
            elif self.closed_why:
                self._fail(unit.op, unit.op.lost(self.closed_why))
        self.settle([unit.op])

    def patience_s(self, op: TcpOp) -> float:
        limit = _PATIENCE_QUEUED_S if self._queue else _PATIENCE_S
        return max(0.0, min(limit, op.deadline_s - time.monotonic()))

    def leave_to_others(self, connection: _Connection, unit: _Unit) -> bool:
        """For a connection that cannot be opened: if another one is, that does the work, and this one pauses."""
        with self.lock:
            if self.closed_why or not any(other.is_open for other in self._connections):
                return False
        self.put_back(connection, unit, is_first=True)
        with self.lock:
            self._rested.wait_for(lambda: self.closed_why, _REST_S)
        return True

    def unreachable(self, cause: BaseException) -> None:
        """Nobody can be connected to: whatever is queued fails now rather than one by one."""
        with self.lock:
            ended = self._fail_queued(cause)
        self.settle(ended)

    def settle(self, ops: Iterable[TcpOp]) -> None:
        """Finish those operations that nothing works on any more."""
        for op in ops:
            with self.lock:
                is_over = op.num_taken == 0 and (op.error is not None or op.num_left == 0)
            if is_over:
                op.finish(op.error)

    def _fail(self, op: TcpOp, error: TransportError) -> None:
        if op.error is None:
            op.error = error
            self._queue = deque(unit for unit in self._queue if unit.op is not op)

    def _fail_queued(self, cause: BaseException | None) -> list[TcpOp]:
        ops = list({unit.op: None for unit in self._queue})
        for op in ops:
            self._fail(op, op.lost(self.closed_why or "cannot be opened again", cause))
        return ops


class _Connection:
    """One socket and the thread that receives from it."""

    def __init__(self, peer: TcpPeer, number: int) -> None:
        self.pending: deque[_Unit] = deque()
        """Units that were asked for, in the order of their answers."""
        self.thread = threading.Thread(target=self._run, name=f"wsync-tcp-read-{number}", daemon=True)
        self.receiving: _Unit | None = None
        """The unit whose memory is being written; no new one once the connection was shut down."""
        self._peer = peer
        self._sock: socket.socket | None = None
        self._is_open = False
        self._is_shut = False
        self._num_requests = 0
        self._header = memoryview(bytearray(RESPONSE.size))

    def open(self, deadline_s: float) -> None:
        """Connect and authenticate. Raises `ConnectError`, `AuthError`."""
        peer, where = self._peer, self._peer.endpoint
        started_s = time.monotonic()
        try:
            family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM)
            with peer.lock:
                self._sock, self._is_shut = sock, bool(peer.closed_why)
            sock.settimeout(max(0.001, deadline_s - time.monotonic()))
            sock.connect((where.host, where.port))
            tune(sock)
            handshake_client(sock, peer.token, "data", deadline_s)
            incarnation = recv_by(sock, INCARNATION_NBYTES, deadline_s).hex()
            if incarnation != where.incarnation:
                raise ConnectError("another incarnation listens there now", hint="connect to its new endpoint")
            sock.settimeout(None)
            self._is_open = True
        except (OSError, ConnectError, AuthError) as exc:
            self.close()
            text = exc.problem if isinstance(exc, TransportError) else str(exc)
            raise (AuthError if isinstance(exc, AuthError) else ConnectError)(
                f"cannot connect to {peer.name} at {where.host}:{where.port}: {text}",
                hint=getattr(exc, "hint", "") or "see whether it still runs and is reachable from here",
                context=ErrorContext(phase="connect", peers=(peer.name,), elapsed_s=time.monotonic() - started_s),
            ) from without_frames(exc)

    @property
    def is_open(self) -> bool:
        return self._is_open and not self._is_shut

    def shut(self) -> None:
        """Wake the thread; what it does on the socket fails. The caller holds the peer's lock."""
        if self._sock is not None:
            self._is_shut = True
            shut(self._sock)

    def close(self) -> None:
        with self._peer.lock:  # nobody may shut down a descriptor that is closed, and perhaps used again
            sock, self._sock, self._is_open = self._sock, None, False
        if sock is not None:
            sock.close()

    def _run(self) -> None:
        while self._work():
            pass
        self.close()

    def _work(self) -> bool:
        """Wait for a unit, and go on until nothing is pending. A frame of its own: an idle thread holds no unit."""
        unit = self._peer.take(self, is_waiting=True)
        if unit is None:
            return False
        try:
            if self._sock is None:
                self.open(min(time.monotonic() + HANDSHAKE_S, unit.op.deadline_s))
            self._ask(unit)
            while self.pending:
                self._receive()
        except (ConnectError, AuthError) as exc:
            self._give_up(unit, exc)
        except (OSError, ValueError) as exc:  # ValueError: the caller has released the memory
            self._lost(exc)
        return True

    def _ask(self, unit: _Unit) -> None:
        assert self._sock is not None
        self._num_requests += 1
        unit.id = self._num_requests
        patience_ms = int(self._peer.patience_s(unit.op) * 1000)
        header = REQUEST.pack(unit.id, len(unit.key), unit.offset, len(unit.into), patience_ms)
        self._sock.sendall(header + unit.key)

    def _receive(self) -> None:
        """Receive the answer to the first pending unit; ask for the next one as soon as its data begins."""
        unit = self.pending[0]
        self._fill(self._header)
        op_id, status, nbytes = RESPONSE.unpack(self._header)
        if op_id != unit.id or status not in (OK, NOT_YET, FAULT):
            raise ConnectionError("the answer is not one to the request")
        if nbytes != len(unit.into) if status == OK else nbytes > MAX_TEXT_NBYTES:
            raise ConnectionError(f"the answer has {nbytes} bytes, not {len(unit.into)}")
        if status == OK:
            unit.is_started = True
            following = self._peer.take(self, is_waiting=False)
            if following is not None:
                self._ask(following)
            self._receive_into(unit)
            self._peer.release(self, unit)
            return
        text = memoryview(bytearray(nbytes))
        self._fill(text)
        if status == NOT_YET:
            self._peer.put_back(self, unit, is_first=False)
        else:
            problem = f"{self._peer.name} answered: {str(text, errors='replace')}"
            self._peer.release(self, unit, RemoteFault(problem, context=unit.op.context()))

    def _receive_into(self, unit: _Unit) -> None:
        with self._peer.lock:
            if self._is_shut:  # what the kernel has received before could still be read
                raise ConnectionAbortedError("shut down here")
            self.receiving = unit
        try:
            self._fill(unit.into)
        finally:
            with self._peer.lock:
                self.receiving = None
                self._peer.released.notify_all()

    def _fill(self, view: memoryview) -> None:
        assert self._sock is not None
        at = 0
        while at < len(view):
            with view[at:] as rest:
                got = self._sock.recv_into(rest, 0, socket.MSG_WAITALL)
            if got == 0:
                raise ConnectionResetError("closed by the peer")
            at += got

    def _give_up(self, unit: _Unit, exc: TransportError) -> None:
        if unit.op.is_overdue:
            self._peer.release(self, unit, unit.op.overdue())
        elif self._is_shut:  # by a cancel or a close, which has given the unit its error
            self._peer.put_back(self, unit, is_first=True)
        elif not self._peer.leave_to_others(self, unit):
            self._peer.release(self, unit, type(exc)(exc.problem, hint=exc.hint, context=unit.op.context("connect")))
            self._peer.unreachable(exc)

    def _lost(self, exc: OSError | ValueError) -> None:
        is_ours = self._is_shut
        self.close()
        for unit in reversed(list(self.pending)):
            if unit.op.is_overdue:
                self._peer.release(self, unit, unit.op.overdue())
            elif is_ours or not (unit.is_started or unit.has_retried):
                unit.has_retried = unit.has_retried or not is_ours
                self._peer.put_back(self, unit, is_first=True)
            else:
                self._peer.release(self, unit, unit.op.lost("broke", exc))
