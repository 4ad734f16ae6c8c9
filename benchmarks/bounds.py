"""What no broadcast through shared memory or a socket can beat, measured next to it.

`Memcpy`: one copy of the bytes. `UnavoidableCopies`: one pack and N commits in as many processes as a broadcast has.
`RawSockets`: the bytes over plain loopback TCP between two processes.

All are peers: `start()`, then `round() -> seconds` as often as wanted, then `stop()`.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np
import torch

from benchmarks._child import SPAWN, Child, call_all, stop_all
from benchmarks.shapes import Layout, Weights, nbytes_of

BLOCK_NBYTES = 4 << 20
_MADV_POPULATE_WRITE = 23


class Peer(Protocol):
    """Something that moves the bytes of one round, and can say how long that took."""

    def start(self) -> None:
        """Start its processes and warm its memory."""

    def round(self) -> float:
        """Move new bytes and check them, the check outside of the seconds that are returned."""

    def stop(self) -> None:
        """End its processes and free its memory."""


class Memcpy:
    """One copy of `nbytes` bytes by one thread between warm buffers, in pages as PyTorch allocates them."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._buffers: list[np.ndarray] = []

    def start(self) -> None:
        self._buffers = [torch.full((self._nbytes,), fill, dtype=torch.uint8).numpy() for fill in (1, 0)]

    def round(self) -> float:
        source, target = self._buffers
        source[::4096] += 1
        start = time.monotonic()
        np.copyto(target, source)
        return time.monotonic() - start

    def stop(self) -> None:
        self._buffers = []


class UnavoidableCopies:
    """The copies that a broadcast over shared memory cannot do without, in as many processes as it has.

    One process packs its tensors into a mapped memfd (one memcpy per tensor); when the pack has ended, every
    replica's process copies from its mapping into its tensors, all at once. Seconds from the start of the pack
    to the end of the last copy. All memory is warm.
    """

    def __init__(self, layout: Layout, seed: int, num_replicas: int, *, num_threads: int = 1) -> None:
        self._args = (layout, seed)
        self._num_replicas = num_replicas
        self._num_threads = num_threads
        self._round = 0
        self._children: list[Child] = []

    def start(self) -> None:
        fd = os.memfd_create("bench", os.MFD_CLOEXEC)
        os.posix_fallocate(fd, 0, nbytes_of(self._args[0]))
        path = f"/proc/{os.getpid()}/fd/{fd}"
        signals = [SPAWN.Pipe(duplex=False) for _ in range(self._num_replicas)]
        readers, writers = [reader for reader, _ in signals], [writer for _, writer in signals]
        self._children.append(Child(_Packer, *self._args, path, writers, self._num_threads))
        self._children += [Child(_Committer, *self._args, path, reader, self._num_threads) for reader in readers]
        self._trainer, *self._replicas = self._children
        call_all(self._children, "ready")
        os.close(fd)
        for end in (*readers, *writers):
            end.close()

    def round(self) -> float:
        self._round += 1
        self._trainer.call("fill", self._round)
        call_all(self._replicas, "remember")
        for replica in self._replicas:
            replica.send("commit")
        started = self._trainer.call("pack")
        ended = max(replica.result() for replica in self._replicas)
        call_all(self._replicas, "check", self._round)
        return ended - started

    def stop(self) -> None:
        stop_all(self._children)


class _Mapped(Weights):
    """Weights and, in the same order, their places in a shared mapping."""

    def __init__(self, layout: Layout, seed: int, path: str, num_threads: int) -> None:
        super().__init__(layout, seed)
        torch.set_num_threads(num_threads)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        mapping = mmap.mmap(fd, self.nbytes)
        os.close(fd)
        mapping.madvise(_MADV_POPULATE_WRITE)
        arena = np.frombuffer(mapping, dtype=np.uint8)
        self.live = self.bytes()
        self.packed: list[np.ndarray] = []
        offset = 0
        for array in self.live:
            self.packed.append(arena[offset : offset + array.nbytes])
            offset += array.nbytes

    def ready(self) -> None:
        """Return when the process has mapped everything."""


def _copy(targets: list[np.ndarray], sources: list[np.ndarray]) -> None:
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)


class _Packer(_Mapped):
    def __init__(self, layout: Layout, seed: int, path: str, signals: list[Connection], num_threads: int) -> None:
        super().__init__(layout, seed, path, num_threads)
        self._signals = signals

    def pack(self) -> float:
        started = time.monotonic()
        _copy(self.packed, self.live)
        for signal in self._signals:
            signal.send_bytes(b"go")
        return started


class _Committer(_Mapped):
    def __init__(self, layout: Layout, seed: int, path: str, signal: Connection, num_threads: int) -> None:
        super().__init__(layout, seed, path, num_threads)
        self._signal = signal

    def commit(self) -> float:
        self._signal.recv_bytes()
        _copy(self.live, self.packed)
        return time.monotonic()


class RawSockets:
    """The bytes of one version over `num_connections` loopback connections between two processes.

    One thread per connection and side, `sendall` from and `recv_into` warm buffers in 4 MiB blocks. Seconds from the
    first send to the last byte received.
    """

    def __init__(self, nbytes: int, num_connections: int) -> None:
        self._nbytes = nbytes
        self._num_connections = num_connections
        self._round = 0
        self._children: list[Child] = []

    def start(self) -> None:
        self._children.append(Child(_Receiver, self._nbytes, self._num_connections))
        port = self._children[0].call("port")
        self._children.append(Child(_Sender, self._nbytes, self._num_connections, port))
        self._receiver, self._sender = self._children
        self._receiver.send("accept")
        self._sender.call("connect")
        self._receiver.result()

    def round(self) -> float:
        self._round += 1
        self._sender.call("fill", self._round)
        self._receiver.send("receive")
        started = self._sender.call("send")
        ended, last = self._receiver.result()
        if set(last) != {self._round % 251}:
            raise AssertionError(f"round {self._round}: the bytes that came over the socket are not the new ones")
        return ended - started

    def stop(self) -> None:
        stop_all(self._children)


class _SocketSide:
    def __init__(self, nbytes: int, num_connections: int) -> None:
        self.buffer = np.full(nbytes, 255, dtype=np.uint8)
        share = -(-nbytes // num_connections)
        view = memoryview(self.buffer)
        self.parts = [view[start : start + share] for start in range(0, nbytes, share)]
        self.sockets: list[socket.socket] = []

    def run(self, move: Callable[[socket.socket, memoryview], None]) -> None:
        """Move every part over its connection, one thread each."""
        threads = [threading.Thread(target=move, args=pair) for pair in zip(self.sockets, self.parts, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class _Sender(_SocketSide):
    def __init__(self, nbytes: int, num_connections: int, port: int) -> None:
        super().__init__(nbytes, num_connections)
        self._port = port

    def connect(self) -> None:
        for _ in self.parts:
            self.sockets.append(socket.create_connection(("127.0.0.1", self._port)))
            self.sockets[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fill(self, round_: int) -> None:
        self.buffer[:] = round_ % 251

    def send(self) -> float:
        started = time.monotonic()
        self.run(_send)
        return started


class _Receiver(_SocketSide):
    def port(self) -> int:
        self._listener = socket.create_server(("127.0.0.1", 0))
        return int(self._listener.getsockname()[1])

    def accept(self) -> None:
        self.sockets = [self._listener.accept()[0] for _ in self.parts]
        self._listener.close()

    def receive(self) -> tuple[float, list[int]]:
        self.run(_receive)
        ended = time.monotonic()
        return ended, np.unique(self.buffer).tolist()


def _send(connection: socket.socket, part: memoryview) -> None:
    for start in range(0, len(part), BLOCK_NBYTES):
        connection.sendall(part[start : start + BLOCK_NBYTES])


def _receive(connection: socket.socket, part: memoryview) -> None:
    received = 0
    while received < len(part):
        count = connection.recv_into(part[received : received + BLOCK_NBYTES])
        if not count:
            raise ConnectionError("the sender has gone")
        received += count
