"""The door of a transport: accepts connections and lets in those that know the job's token.

Every connection has one thread. Until it has authenticated it has five seconds in all, and only so many
may be on the doorstep; none of them can hold up the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

from wsync.auth import ANSWER_NBYTES, HELLO_NBYTES, PROOF_NBYTES, ClientHandshake, ServerHandshake
from wsync.errors import AuthError

HANDSHAKE_S = 5.0
MAX_WAITING = 64
_log = logging.getLogger("wsync")


class Gate:
    """Runs `serve(sock)` in a thread for each authenticated connection; closes the socket when that returns.

    `refused` counts the connections that did not authenticate. The gate owns `listener`.
    """

    def __init__(
        self, listener: socket.socket, token: str, purpose: str, serve: Callable[[socket.socket], None]
    ) -> None:
        self.refused = 0
        self._listener = listener
        self._token = token
        self._purpose = purpose
        self._serve = serve
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, socket.socket] = {}
        self._num_waiting = 0
        self._logged: set[str] = set()
        self._is_closed = False
        self._acceptor = threading.Thread(target=self._accept, name=f"wsync-{purpose}-accept", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._listener.accept()
            except OSError as exc:
                if self._is_closed:
                    return
                self._log_once(f"cannot accept connections: {exc}")
                time.sleep(0.05)  # out of descriptors, say: others have to close some first
                continue
            thread = threading.Thread(target=self._run, args=(sock,), name=f"wsync-{self._purpose}-serve", daemon=True)
            with self._lock:
                is_full = self._num_waiting >= MAX_WAITING
                if not is_full and not self._is_closed:
                    self._num_waiting += 1
                    self._threads[thread] = sock
                    thread.start()
                    continue
            sock.close()
            if is_full:
                self._refuse("too many connections that have not authenticated")

    def _run(self, sock: socket.socket) -> None:
        try:
            if self._admit(sock):
                with contextlib.suppress(OSError):  # the other side has gone
                    self._serve(sock)
        finally:
            with self._lock:  # nobody may shut down a descriptor that is closed, and perhaps used again
                self._threads.pop(threading.current_thread(), None)
            sock.close()

    def _admit(self, sock: socket.socket) -> bool:
        try:
            if sock.family == socket.AF_UNIX:
                check_same_user(sock)
            handshake_server(sock, self._token, self._purpose, time.monotonic() + HANDSHAKE_S)
            sock.settimeout(None)
            return True
        except AuthError as exc:
            self._refuse(exc.problem)
        except OSError:
            if not self._is_closed:
                self._refuse("a client that did not finish the handshake")
        finally:
            with self._lock:
                self._num_waiting -= 1
        return False

    def _refuse(self, kind: str) -> None:
        with self._lock:
            self.refused += 1
        self._log_once(f"refused: {kind}")

    def _log_once(self, text: str) -> None:
        with self._lock:
            is_new = text not in self._logged
            self._logged.add(text)
        if is_new:
            _log.warning("%s socket: %s (said once)", self._purpose, text)

    def close(self) -> None:
        """After return no connection is left and no thread serves. Idempotent."""
        self._is_closed = True
        shut(self._listener)
        with self._lock:
            threads = list(self._threads)
            for sock in self._threads.values():
                shut(sock)
        for thread in (self._acceptor, *threads):
            if thread is not threading.current_thread():
                thread.join()
        self._listener.close()


def check_same_user(sock: socket.socket) -> int:
    """The pid at the other end of a unix socket. Raises `AuthError` unless it runs as our user."""
    pid, uid = peer_credentials(sock)
    if uid != os.geteuid():
        raise AuthError(f"a process of another user (uid {uid}) was refused")
    return pid


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """`(pid, uid)` of the process at the other end of a unix socket."""
    pid, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def handshake_server(sock: socket.socket, token: str, purpose: str, deadline_s: float) -> None:
    """Accepting side, whole handshake by the deadline. Raises `AuthError`, `OSError`."""
    handshake = ServerHandshake(token, purpose)
    sock.settimeout(max(0.001, deadline_s - time.monotonic()))
    sock.sendall(handshake.hello)
    sock.sendall(handshake.check(recv_by(sock, ANSWER_NBYTES, deadline_s)))


def handshake_client(sock: socket.socket, token: str, purpose: str, deadline_s: float) -> None:
    """Connecting side, whole handshake by the deadline. Raises `AuthError`, `ConnectError`, `OSError`."""
    handshake = ClientHandshake(token, purpose)
    sock.sendall(handshake.answer(recv_by(sock, HELLO_NBYTES, deadline_s)))
    try:
        proof = recv_by(sock, PROOF_NBYTES, deadline_s)
    except ConnectionError as exc:
        raise AuthError(
            "the peer closed the connection instead of accepting the token",
            hint="both sides must have the token of the same job",
        ) from exc
    handshake.check(proof)


def recv_by(sock: socket.socket, nbytes: int, deadline_s: float) -> bytes:
    """Exactly `nbytes` bytes by the deadline, however slowly they drip. Raises `OSError`."""
    block = bytearray(nbytes)
    view = memoryview(block)
    while view:
        left = deadline_s - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left)
        got = sock.recv_into(view)
        if got == 0:
            raise ConnectionResetError("the peer closed the connection")
        view = view[got:]
    return bytes(block)


def shut(sock: socket.socket) -> None:
    """Wake whoever is blocked on the socket, and let nothing more in or out."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
