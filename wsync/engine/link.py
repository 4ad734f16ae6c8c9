"""A member's connection to its host's holder: blocking, thread-safe, and without a thread of its own.

Whoever waits for a reply reads the socket for all that wait; there is no reader thread, so that a training
loop or a decode loop shares its GIL with nobody. When the holder dies the link finds the next one (it
restarts with the host's first member, or by Ray), attaches again and hands back the slots that it still maps.
"""

from __future__ import annotations

import _thread
import array
import contextlib
import logging
import math
import os
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from wsync.auth import authenticate_client
from wsync.engine import protocol
from wsync.engine.protocol import FetchSlot, FrameBuffer, Message
from wsync.engine.wire import descriptors_of
from wsync.errors import AuthError, ConnectError, ErrorContext, PeerLost, TransferTimeout, WsyncError
from wsync.memory import Slot

logger = logging.getLogger("wsync")

WARN_AFTER_S = 5.0
"""Who waits so long for somebody says so in the log."""

PURPOSE = "member"
GRACE_S = 5.0
"""The holder answers by a request's deadline; one that has not answered so much later hangs."""
MAX_REFUSED = 3
_LOOK_S = 1.0
"""Who waits for another thread's reading looks for itself so often: an interrupted one wakes nobody."""
_RECV_NBYTES = 1 << 18
_ANCILLARY_NBYTES = socket.CMSG_SPACE(protocol.MAX_DESCRIPTORS * array.array("i").itemsize)


class Closing(ABC):
    """A member that leaves at the end of a `with` block."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class HolderAddress(msgspec.Struct, frozen=True):
    """Where a host's holder listens (an abstract unix socket name, without its NUL) and the job's token.

    `coordinator` says in words which coordinator the holder looks for.
    """

    socket_name: str
    token: str
    host: str
    coordinator: str = "the job's coordinator"


Locate = Callable[[float], HolderAddress]
"""Find or start this host's holder within so many seconds. Raises ConnectError and others by name."""


class _Connection:
    """One socket and the replies that came over it."""

    def __init__(self, address: HolderAddress, timeout_s: float) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(timeout_s)
        try:
            self.sock.connect("\0" + address.socket_name)
            authenticate_client(self.sock, address.token, PURPOSE)
        except AuthError:
            self.sock.close()
            raise
        except OSError as exc:
            self.sock.close()
            raise ConnectError(
                f"this host's holder does not answer ({exc})", context=ErrorContext(phase="connect")
            ) from exc
        self.sock.setblocking(True)
        self.slots: dict[int, Slot] = {}
        self.is_broken = False
        # Plain locks: the blocks and waits of a threading.Condition are Python code, and an interrupt between two of
        # its lines would leave its lock taken for good.
        self._lock = threading.Lock()
        self._waiters: list[threading.Lock] = []
        self._send_lock = threading.Lock()
        self._replies: dict[int, tuple[Message, list[int]]] = {}
        self._buffer = FrameBuffer()
        self._has_reader = False
        self._next_id = 0

    def send(self, message: Message, *, is_request: bool, descriptors: tuple[int, ...] = ()) -> int:
        with self._send_lock:
            if is_request:
                self._next_id += 1
            request_id = self._next_id if is_request else 0
            frame = memoryview(protocol.encode_frame(request_id, message, num_descriptors=len(descriptors)))
            try:
                if descriptors:
                    frame = frame[socket.send_fds(self.sock, [frame], list(descriptors)) :]
                self.sock.sendall(frame)
            except OSError as exc:
                self.give_up()
                raise PeerLost("this host's holder has gone") from exc
            except BaseException:  # interrupted, maybe in the middle of a frame
                self.give_up()
                raise
            return request_id

    def receive(self, request_id: int, deadline: float) -> tuple[Message, list[int]] | None:
        """The reply, or None at the deadline. Raises PeerLost when the holder has gone."""
        while True:
            waiter = threading.Lock()
            with self._lock:
                if request_id in self._replies:
                    return self._replies.pop(request_id)
                if self.is_broken:
                    raise PeerLost("this host's holder has gone")
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                is_reader, self._has_reader = not self._has_reader, True
                if not is_reader:
                    waiter.acquire()
                    self._waiters.append(waiter)
            if not is_reader:
                waiter.acquire(timeout=min(left, _LOOK_S))
                continue
            try:
                self._read_once(deadline)
            finally:
                with self._lock:
                    self._has_reader = False
                    self._wake()

    def _wake(self) -> None:
        while self._waiters:
            self._waiters.pop().release()

    def _read_once(self, deadline: float) -> None:
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        try:
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return
            received, ancillary, _, _ = self.sock.recvmsg(_RECV_NBYTES, _ANCILLARY_NBYTES, socket.MSG_CMSG_CLOEXEC)
            if not received:
                raise ConnectionResetError
            self._buffer.feed(received, descriptors_of(ancillary))
            while (frame := self._buffer.take()) is not None:
                request_id, is_reply, message = protocol.decode_payload(frame[0])
                if is_reply:
                    with self._lock:
                        self._replies[request_id] = (message, frame[1])
        except (OSError, WsyncError, msgspec.DecodeError) as exc:
            self.give_up()
            raise PeerLost("this host's holder has gone") from exc

    def give_up(self) -> None:
        """End the connection, for whoever uses it: the holder drops our leases when it sees that, also if it hung."""
        with self._lock:
            self.is_broken = True
            self._wake()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.give_up()
        for fd in self._buffer.drop_descriptors():
            os.close(fd)
        self.sock.close()
        for slot in self.slots.values():
            slot.close()
        self.slots.clear()


class Link:
    """What a member says to its holder, whichever process that is at the moment.

    `attach` is the message that introduces the member, made anew for each holder. `hand_back` yields, for each
    slot that the member still maps, the message to offer it to a new holder with.
    """

    def __init__(
        self,
        locate: Locate,
        attach: Callable[[], Message],
        *,
        is_writer: bool,
        join_timeout_s: float,
    ) -> None:
        self._locate = locate
        self._attach = attach
        self.is_writer = is_writer
        self._join_timeout_s = join_timeout_s
        self._lock = threading.RLock()
        self._connection: _Connection | None = None
        self._is_closed = False
        self._warn_at = math.inf
        self._is_rejoining = False
        self.hand_back: Callable[[Slot], Message | None] = lambda _: None
        self.on_attached: Callable[[Message], None] = lambda _: None
        self.host = ""

    @property
    def is_broken(self) -> bool:
        """The connection was lost; the next use joins again."""
        connection = self._connection
        return connection is None or connection.is_broken

    def rejoin_behind(self) -> None:
        """Join again in a thread that lives only for that, for a caller that must not wait."""
        if self._is_closed or self._is_rejoining:
            return
        self._is_rejoining = True
        try:
            # Thread.start waits in Python code for the thread: an interrupt there ends as "release unlocked lock".
            _thread.start_new_thread(self._rejoin, ())
        except BaseException:
            self._is_rejoining = False
            raise

    def _rejoin(self) -> None:
        try:
            self.connect(time.monotonic() + self._join_timeout_s)
        except WsyncError as exc:
            logger.warning("this host's holder cannot be joined again: %s", exc)
        finally:
            self._is_rejoining = False

    def connect(self, deadline: float) -> None:
        """Be attached to a living holder, or raise by the deadline. Nothing happens when the link is whole."""
        with self._lock:
            self._connected(deadline)

    def _connected(self, deadline: float) -> _Connection:
        with self._lock:
            if self._is_closed:
                raise ConnectError("this publisher or replica is closed", hint="create a new one")
            if self._connection is not None and not self._connection.is_broken:
                return self._connection
            former, self._connection = self._connection, None
            try:
                self._connection = self._join(deadline, former)
            finally:
                if former is not None:
                    former.close()
            return self._connection

    def _join(self, deadline: float, former: _Connection | None) -> _Connection:
        pause_s, num_refused, self._warn_at = 0.01, 0, time.monotonic() + WARN_AFTER_S
        while True:
            try:
                return self._join_once(deadline, former)
            except AuthError:  # also what a holder looks like that is killed in the middle of the handshake
                num_refused += 1
                if num_refused >= MAX_REFUSED:
                    raise
                time.sleep(0.05)
            except (ConnectError, PeerLost) as exc:  # it died in between, or is not up yet
                left = deadline - time.monotonic()
                if left <= 0:
                    if isinstance(exc, ConnectError):
                        raise
                    raise ConnectError(
                        f"could not join within the deadline: {exc.problem}", hint=exc.hint, context=exc.context
                    ) from exc
                time.sleep(min(pause_s, left))
                pause_s = min(2 * pause_s, 0.25)

    def _join_once(self, deadline: float, former: _Connection | None) -> _Connection:
        left = max(0.1, deadline - time.monotonic())
        address = self._locate(left)
        connection = _Connection(address, min(left, 5.0))
        try:
            if former is not None:
                self._return_slots(connection, former)
            # The holder knows why it takes long, and says so when it gives up.
            reply = self._ask(connection, self._attach(), deadline + GRACE_S, waits_for=address.coordinator)
        except BaseException:
            connection.close()
            raise
        self.host = address.host
        self.on_attached(reply)
        return connection

    def _return_slots(self, connection: _Connection, former: _Connection) -> None:
        for slot in former.slots.values():
            message = self.hand_back(slot) if slot.is_sealed else None
            if message is not None:
                connection.send(message, is_request=False, descriptors=(slot.fd,))

    def _ask(self, connection: _Connection, message: Message, deadline: float, *, waits_for: str = "") -> Message:
        request_id = connection.send(message, is_request=True)
        what = type(message).__name__
        reply, descriptors = self._answer(connection, request_id, what, deadline, waits_for=waits_for)
        for fd in descriptors:
            os.close(fd)
        return reply

    def _answer(
        self, connection: _Connection, request_id: int, what: str, deadline: float, *, waits_for: str = ""
    ) -> tuple[Message, list[int]]:
        try:
            answer = None
            if waits_for:
                answer = connection.receive(request_id, min(deadline, self._warn_at))
                if answer is None and time.monotonic() >= self._warn_at:
                    logger.warning("waiting for %s since %g s (at most join_timeout_s)", waits_for, WARN_AFTER_S)
                    self._warn_at = math.inf
            answer = answer or connection.receive(request_id, deadline)
        except BaseException:
            connection.give_up()  # interrupted: what the holder grants later nobody would give back
            raise
        if answer is None:
            connection.give_up()  # a late answer could be a lease that nobody gives back
            raise TransferTimeout(
                f"this host's holder has not answered {what} in time",
                hint="it is joined again at the next call",
                context=ErrorContext(peers=("holder",), phase="control"),
            )
        if isinstance(answer[0], protocol.Failure):
            raise answer[0].error.build()
        return answer

    def pin(self, *, timeout_s: float) -> Pinned:
        """The present connection, for requests that belong together: no other holder may answer one of them."""
        return Pinned(self, self._connected(time.monotonic() + min(self._join_timeout_s, timeout_s)))

    def ask(self, message: Message, *, timeout_s: float, grace_s: float = GRACE_S) -> Message:
        """One request and its reply. Raises PeerLost when the holder dies meanwhile; the caller knows what to repeat.

        The holder answers within `timeout_s`; `grace_s` more is the deadline for a holder that hangs.
        """
        return self.pin(timeout_s=timeout_s + grace_s).ask(message, timeout_s=timeout_s, grace_s=grace_s)

    def give_up(self) -> None:
        """End the present connection; the next use joins again."""
        connection = self._connection
        if connection is not None:
            connection.give_up()

    def close(self) -> None:
        """Leave: the holder sees the connection close and drops leases at once. Idempotent."""
        self._is_closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class Pinned:
    """One connection of a link. Raises PeerLost once that holder has gone, also when the link has joined the next."""

    def __init__(self, link: Link, connection: _Connection) -> None:
        self._link, self._connection = link, connection

    @property
    def is_broken(self) -> bool:
        return self._connection.is_broken

    def ask(self, message: Message, *, timeout_s: float, grace_s: float = GRACE_S) -> Message:
        """As `Link.ask`."""
        return self._link._ask(self._connection, message, time.monotonic() + timeout_s + grace_s)

    def tell(self, message: Message) -> None:
        """A notice."""
        self._connection.send(message, is_request=False)

    def slot(self, slot_id: int, *, timeout_s: float) -> Slot:
        """The mapped slot; mapped once and kept for as long as the holder lives."""
        slot = self._connection.slots.get(slot_id)
        if slot is None:
            request_id = self._connection.send(FetchSlot(slot_id), is_request=True)
            deadline = time.monotonic() + timeout_s
            _, descriptors = self._link._answer(self._connection, request_id, "FetchSlot", deadline)
            slot = Slot.attach(descriptors[0], is_writable=self._link.is_writer)
            slot.prefault()
            self._connection.slots[slot_id] = slot
        return slot
