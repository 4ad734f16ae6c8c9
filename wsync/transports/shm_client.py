"""The reading side of shm: a control socket to the holder, the slots mapped from it, and a `Puller` that copies."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import OrderedDict

import msgspec

from wsync.errors import ArenaError, AuthError, ConnectError, ErrorContext, RemoteFault, TransportError
from wsync.memory import Slot
from wsync.transports.gate import HANDSHAKE_S, check_same_user, handshake_client, shut
from wsync.transports.ops import without_frames
from wsync.transports.puller import Puller
from wsync.transports.shm_wire import (
    MAX_PACKET_NBYTES,
    Closed,
    Endpoint,
    Faulted,
    Open,
    Opened,
    ToHolder,
    ToReader,
    Withdrawn,
)

_MAX_IDLE_MAPS = 4  # slots kept mapped though no key of theirs is open: the next version is likely to be in one


class _Mapping:
    """A mapped slot and how many open keys are in it."""

    __slots__ = ("inode", "num_keys", "slot")

    def __init__(self, slot: Slot, inode: tuple[int, int]) -> None:
        self.slot = slot
        self.inode = inode
        self.num_keys = 0


class _Lease:
    """An open key. `is_in_use` while the puller looks at its slot."""

    __slots__ = ("is_in_use", "is_withdrawn", "mapping", "version")

    def __init__(self, mapping: _Mapping, version: int) -> None:
        self.mapping = mapping
        self.version = version
        self.is_in_use = False
        self.is_withdrawn = False


class ShmPeer:
    """A holder on this host, and the `Source` of its puller. `open` makes one."""

    def __init__(self, name: str, sock: socket.socket) -> None:
        self.name = name
        self._sock = sock
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        self._asked: set[str] = set()
        self._faults: dict[str, str] = {}
        self._maps: OrderedDict[tuple[int, int], _Mapping] = OrderedDict()
        self._gone_why = ""
        self.puller = Puller(name, self, "wsync-shm-read")
        self._listener = threading.Thread(target=self._listen, name="wsync-shm-listen", daemon=True)
        self._listener.start()

    @classmethod
    def open(cls, where: Endpoint, token: str, name: str, timeout_s: float) -> ShmPeer:
        """Connect and authenticate. Raises `ConnectError`, `AuthError`."""
        started_s = time.monotonic()
        deadline_s = started_s + min(timeout_s, HANDSHAKE_S)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _connect(sock, "\0" + where.socket, deadline_s)
            check_same_user(sock)
            handshake_client(sock, token, "shm", deadline_s)
            sock.settimeout(max(0.001, deadline_s - time.monotonic()))
            if sock.recv(MAX_PACKET_NBYTES) != where.incarnation.encode():
                raise ConnectError("another incarnation listens there")
            sock.settimeout(None)
            return cls(name, sock)
        except (OSError, ConnectError, AuthError) as exc:
            sock.close()
            text = exc.problem if isinstance(exc, TransportError) else str(exc)
            raise (AuthError if isinstance(exc, AuthError) else ConnectError)(
                f"cannot connect to {name} on this host: {text}",
                hint=getattr(exc, "hint", "") or "see whether it still runs",
                context=ErrorContext(phase="connect", peers=(name,), elapsed_s=time.monotonic() - started_s),
            ) from without_frames(exc)

    def close(self) -> None:
        """After return all operations have ended, and nothing is mapped or open. Idempotent."""
        self.puller.close("was closed here")
        with self._lock:
            self._gone_why = self._gone_why or "was closed here"
            shut(self._sock)
        if self._listener is not threading.current_thread():
            self._listener.join()
        with self._lock:
            self._leases.clear()
            for mapping in self._maps.values():
                mapping.slot.close()
            self._maps.clear()

    # --- for the puller
    @property
    def gone_why(self) -> str:
        return self._gone_why

    def borrow(self, key: str) -> tuple[Slot, int] | None:
        with self._lock:
            lease = self._leases.get(key)
            if lease is not None and not lease.is_withdrawn:
                lease.is_in_use = True
                return lease.mapping.slot, lease.version
            if lease is not None:
                raise RemoteFault(f"{self.name} has withdrawn {key!r}", hint="read a newer version")
            if key in self._faults:
                raise RemoteFault(f"{self.name} answered: {self._faults.pop(key)}", hint="read a newer version")
            if self._gone_why:
                raise ConnectError(f"{self.name} {self._gone_why}", hint="read from another holder")
            if key not in self._asked:
                self._asked.add(key)
                self._send(Open(key))
            return None

    def give_back(self, key: str) -> None:
        with self._lock:
            lease = self._leases[key]
            lease.is_in_use = False
            if lease.is_withdrawn:
                self._release(key)

    # --- what the holder says
    def _listen(self) -> None:
        """The listener's thread: until the holder or we are gone."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            while self._receive():
                self.puller.wake()
        with self._lock:
            self._gone_why = self._gone_why or "is gone: it closed its socket"
            self._sock.close()  # nobody may shut down a descriptor that is closed, and perhaps used again
        self.puller.wake()

    def _receive(self) -> bool:
        packet, fds, flags, _ = socket.recv_fds(self._sock, MAX_PACKET_NBYTES, 4, socket.MSG_CMSG_CLOEXEC)
        try:
            if not packet or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                return False
            message = msgspec.msgpack.decode(packet, type=ToReader)
            with self._lock:
                if isinstance(message, Opened) and len(fds) == 1:
                    self._asked.discard(message.key)
                    self._opened(message, fds.pop())
                elif isinstance(message, Faulted):
                    self._asked.discard(message.key)
                    self._faults[message.key] = message.problem
                elif isinstance(message, Withdrawn):
                    self._withdrawn(message.key)
            return True
        finally:
            for fd in fds:
                os.close(fd)

    def _opened(self, message: Opened, fd: int) -> None:
        stat = os.fstat(fd)
        inode = (stat.st_dev, stat.st_ino)
        mapping = self._maps.get(inode)
        if mapping is not None:
            os.close(fd)
        else:
            try:
                mapping = _Mapping(Slot.attach(fd, is_writable=False), inode)
            except ArenaError as exc:
                self._faults[message.key] = exc.problem
                self._send(Closed(message.key))
                return
            self._maps[inode] = mapping
        mapping.slot.refresh()
        mapping.num_keys += 1
        self._leases[message.key] = _Lease(mapping, message.version)

    def _withdrawn(self, key: str) -> None:
        lease = self._leases.get(key)
        if lease is not None:
            lease.is_withdrawn = True
            if not lease.is_in_use:
                self._release(key)

    def _release(self, key: str) -> None:
        """Let go of a key; its slot stays mapped for the next one, if not too many do."""
        mapping = self._leases.pop(key).mapping
        mapping.num_keys -= 1
        self._maps.move_to_end(mapping.inode)
        idle = [mapping for mapping in self._maps.values() if mapping.num_keys == 0]
        for mapping in idle[: max(0, len(idle) - _MAX_IDLE_MAPS)]:
            del self._maps[mapping.inode]
            mapping.slot.close()
        self._send(Closed(key))

    def _send(self, message: ToHolder) -> None:
        """Never blocks: a holder that is stopped answers nothing, and the operations have deadlines."""
        with contextlib.suppress(OSError):
            self._sock.send(msgspec.msgpack.encode(message), socket.MSG_DONTWAIT)


def _connect(sock: socket.socket, address: str, deadline_s: float) -> None:
    """Connect by the deadline, also when the holder's queue of connections is full for a moment."""
    while True:
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        try:
            sock.connect(address)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(0.005)
