"""Asyncio side of the control connections: authenticated frames, requests and notices in both directions.

Holder and coordinator use it; members use the blocking `wsync.engine.link`.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from wsync.auth import ANSWER_NBYTES, HELLO_NBYTES, PROOF_NBYTES, ClientHandshake, ServerHandshake
from wsync.engine import protocol
from wsync.engine.protocol import Done, Failure, FrameBuffer, Message
from wsync.errors import (
    AuthError,
    ConnectError,
    ErrorContext,
    ErrorRecord,
    PeerLost,
    TransferTimeout,
    WsyncError,
)

logger = logging.getLogger("wsync")

HANDSHAKE_TIMEOUT_S = 5.0
_RECV_NBYTES = 1 << 18
_ANCILLARY_NBYTES = socket.CMSG_SPACE(protocol.MAX_DESCRIPTORS * array.array("i").itemsize)

Handler = Callable[["Wire", Message, list[int]], Awaitable[tuple[Message, list[int]] | Message | None]]
"""Called for every request and notice, with descriptors that it then owns. A request's handler returns the reply."""


class Wire:
    """One authenticated connection. Notices are handled in order; requests run as tasks of their own."""

    def __init__(self, sock: socket.socket, *, peer: str) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.peer = peer
        self.is_closed = False
        self._loop = asyncio.get_running_loop()
        self._buffer = FrameBuffer()
        self._next_id = 0
        self._replies: dict[int, asyncio.Future[Message]] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._send_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(self, message: Message, *, timeout_s: float) -> Message:
        """Send a request and return its reply. Raises the error that the peer answered, PeerLost, TransferTimeout."""
        self._next_id += 1
        request_id = self._next_id
        future: asyncio.Future[Message] = self._loop.create_future()
        self._replies[request_id] = future
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(protocol.encode_frame(request_id, message))
                reply = await future
        except TimeoutError as exc:
            raise TransferTimeout(
                f"{self.peer} has not answered {type(message).__name__}",
                context=ErrorContext(peers=(self.peer,), phase="control", elapsed_s=timeout_s),
            ) from exc
        finally:
            self._replies.pop(request_id, None)
        if isinstance(reply, Failure):
            raise reply.error.build()
        return reply

    async def notify(self, message: Message) -> None:
        """Send a notice. Raises PeerLost when the connection is gone."""
        await self._send(protocol.encode_frame(0, message))

    async def serve(self, handle: Handler) -> None:
        """Read until the peer closes or `close` is called; then every open call ends with PeerLost."""
        try:
            while True:
                payload, descriptors = await self._recv_frame()
                await self._dispatch(handle, payload, descriptors)
        except (OSError, EOFError, WsyncError, msgspec.DecodeError) as exc:
            if isinstance(exc, WsyncError | msgspec.DecodeError) and not self.is_closed:
                logger.warning("connection with %s closed: %s", self.peer, exc)
        finally:
            self.close()
            for task in list(self._tasks):
                task.cancel()

    async def _dispatch(self, handle: Handler, payload: bytes, descriptors: list[int]) -> None:
        request_id, is_reply, message = protocol.decode_payload(payload)
        if is_reply:
            future = self._replies.get(request_id)
            if future is not None and not future.done():
                future.set_result(message)
        elif request_id == 0:
            try:
                await handle(self, message, descriptors)
            except WsyncError as exc:  # nobody waits for an answer
                logger.warning("%s from %s: %s", type(message).__name__, self.peer, exc)
        else:
            task = self._loop.create_task(self._answer(handle, request_id, message, descriptors))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, handle: Handler, request_id: int, message: Message, descriptors: list[int]) -> None:
        handed: list[int] = []
        try:
            outcome = await handle(self, message, descriptors)
            if isinstance(outcome, tuple):
                reply, handed = outcome
            else:
                reply = outcome or Done()
        except WsyncError as exc:
            reply = Failure(ErrorRecord.of(exc))
        except Exception as exc:  # reported to the caller, and here
            logger.exception("%s failed", type(message).__name__)
            reply = Failure(ErrorRecord.of(exc))
        frame = protocol.encode_frame(request_id, reply, is_reply=True, num_descriptors=len(handed))
        with contextlib.suppress(PeerLost):
            await self._send(frame, handed)
        for fd in handed:
            os.close(fd)

    async def _send(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        try:
            async with self._send_lock:
                view = memoryview(frame)
                if descriptors:
                    view = view[await self._send_descriptors(view, descriptors) :]
                await self._loop.sock_sendall(self.sock, view)
        except (OSError, ValueError) as exc:
            self.close()
            raise PeerLost(f"{self.peer} has gone", context=ErrorContext(peers=(self.peer,))) from exc

    async def _send_descriptors(self, view: memoryview, descriptors: Sequence[int]) -> int:
        while True:
            try:
                return socket.send_fds(self.sock, [view], list(descriptors))
            except BlockingIOError:
                await asyncio.sleep(0.001)

    async def _recv_frame(self) -> tuple[bytes, list[int]]:
        while True:
            frame = self._buffer.take()
            if frame is not None:
                return frame
            received, descriptors = await self._recv_some()
            self._buffer.feed(received, descriptors)
            if not received:
                raise EOFError

    async def _recv_some(self) -> tuple[bytes, list[int]]:
        while True:
            try:
                received, ancillary, _, _ = self.sock.recvmsg(_RECV_NBYTES, _ANCILLARY_NBYTES, socket.MSG_CMSG_CLOEXEC)
                return received, descriptors_of(ancillary)
            except BlockingIOError:
                await self._readable()

    async def _readable(self) -> None:
        self._waiter = self._loop.create_future()
        self._loop.add_reader(self.sock.fileno(), self._wake_reader)
        try:
            await self._waiter
        finally:
            if not self.is_closed:  # once closed, the descriptor may be somebody else's already
                self._loop.remove_reader(self.sock.fileno())

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Close the connection; open calls end with PeerLost. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        for future in self._replies.values():
            if not future.done():
                future.set_exception(PeerLost(f"{self.peer} has gone", context=ErrorContext(peers=(self.peer,))))
        for fd in self._buffer.drop_descriptors():
            os.close(fd)
        self._loop.remove_reader(self.sock.fileno())
        self._wake_reader()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def descriptors_of(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """Descriptors in the ancillary data of a recvmsg; they are ours to close."""
    found = array.array("i")
    for level, kind, block in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(block[: len(block) - len(block) % found.itemsize])
    return list(found)


async def connect(address: str | tuple[str, int], token: str, *, purpose: str, peer: str, timeout_s: float) -> Wire:
    """Connect and authenticate. Raises ConnectError, AuthError."""
    loop = asyncio.get_running_loop()
    family = socket.AF_UNIX if isinstance(address, str) else (socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        async with asyncio.timeout(timeout_s):
            await loop.sock_connect(sock, address)
            handshake = ClientHandshake(token, purpose)
            await loop.sock_sendall(sock, handshake.answer(await _recv_exactly(loop, sock, HELLO_NBYTES)))
            try:
                proof = await _recv_exactly(loop, sock, PROOF_NBYTES)
            except EOFError as exc:
                raise AuthError(f"{peer} refused our token", hint="both must belong to the same job") from exc
            handshake.check(proof)
    except (OSError, EOFError) as exc:  # TimeoutError is an OSError
        sock.close()
        raise ConnectError(
            f"{peer} does not answer ({exc or type(exc).__name__})",
            hint="check that it runs and that the address is right",
            context=ErrorContext(peers=(peer,), phase="connect", elapsed_s=timeout_s),
        ) from exc
    except BaseException:
        sock.close()
        raise
    if family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Wire(sock, peer=peer)


async def _recv_exactly(loop: asyncio.AbstractEventLoop, sock: socket.socket, nbytes: int) -> bytes:
    block = bytearray()
    while len(block) < nbytes:
        got = await loop.sock_recv(sock, nbytes - len(block))
        if not got:
            raise EOFError("closed during the handshake")
        block += got
    return bytes(block)


class Listener:
    """Accepts connections, proves the token with each, and serves those that know it."""

    def __init__(self, sock: socket.socket, token: str, *, purpose: str) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.num_refused = 0
        self._token, self._purpose = token, purpose
        self._tasks: set[asyncio.Task[None]] = set()
        self._wires: set[Wire] = set()

    async def run(self, serve: Callable[[Wire], Awaitable[None]]) -> None:
        """Accept until cancelled; `serve` is called with each authenticated connection."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self.sock)
            except OSError as exc:  # out of descriptors, say: others must go on
                logger.warning("a connection could not be accepted: %s", exc)
                await asyncio.sleep(0.1)
                continue
            task = loop.create_task(self._welcome(sock, serve))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _welcome(self, sock: socket.socket, serve: Callable[[Wire], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                handshake = ServerHandshake(self._token, self._purpose)
                await loop.sock_sendall(sock, handshake.hello)
                proof = handshake.check(await _recv_exactly(loop, sock, ANSWER_NBYTES))
                await loop.sock_sendall(sock, proof)
        except (OSError, EOFError, AuthError) as exc:
            sock.close()
            self.num_refused += 1
            if self.num_refused == 1:
                logger.warning("refused a connection on the %s socket: %s (counted from now on)", self._purpose, exc)
            return
        except BaseException:
            sock.close()
            raise
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = Wire(sock, peer="a new connection")
        self._wires.add(wire)
        try:
            await serve(wire)
        finally:
            self._wires.discard(wire)
            wire.close()

    def close(self) -> None:
        """Stop listening and drop every connection."""
        self.sock.close()
        for task in list(self._tasks):
            task.cancel()
        for wire in list(self._wires):
            wire.close()
