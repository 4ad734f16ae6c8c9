"""A transport for simulations: reads wait for their chunk and then take the time that the simulated network takes.

No bytes are moved and no memory is used, so that a broadcast of terabytes to thousands of holders can be simulated by
the engine's own code. For the loop of `wsync.engine.clock` only: one thread, one clock.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable

import xxhash

from wsync.errors import ConnectError, ErrorContext, RemoteFault, TransferTimeout
from wsync.transports.base import Capabilities, Op, Peer, Read
from wsync.transports.sim_net import Connection

NOTHING = memoryview(b"")
DIGEST = xxhash.xxh3_64_intdigest(NOTHING)
"""Of every chunk: there are no bytes."""

Connect = Callable[[str, str], Connection]
"""(source, receiver) -> a new connection of the simulated network. Raises ConnectError where there is no path."""


class SimSlot:
    """What the executor and the transport need of `wsync.memory.Slot`, without its memory."""

    def __init__(self, nbytes: int, chunk_nbytes: int, *, is_whole: bool = False) -> None:
        self.nbytes, self.chunk_nbytes = nbytes, chunk_nbytes
        self.num_chunks = -(-nbytes // chunk_nbytes)
        self.digests = [DIGEST] * self.num_chunks
        self.ready = bytearray(b"\1" * self.num_chunks if is_whole else self.num_chunks)
        self._waiting: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        offset = chunk * self.chunk_nbytes
        return offset, min(self.chunk_nbytes, self.nbytes - offset)

    def chunk_data(self, chunk: int) -> memoryview:
        return NOTHING

    def mark_ready(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            self.ready[chunk] = 1
            for call in self._waiting.pop(chunk, ()):
                call()

    def unmark_ready(self, chunk: int) -> None:
        self.ready[chunk] = 0

    def when_ready(self, chunk: int, call: Callable[[], None]) -> None:
        """Call it when the chunk is there: at once, or later."""
        if self.ready[chunk]:
            call()
        else:
            self._waiting[chunk].append(call)


class SimPeer:
    """A connected holder."""

    def __init__(self, name: str, transport: SimTransport, connection: Connection) -> None:
        self.name, self.transport, self.connection = name, transport, connection
        self._deadlines: dict[Op, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def ops(self) -> list[Op]:
        """Those that have not ended."""
        return list(self._deadlines)

    def add(self, op: Op, timeout_s: float) -> None:
        """It ends by then. One timer does for all: there are many reads, and hardly ever one that is late."""
        self._deadlines[op] = asyncio.get_running_loop().time() + timeout_s
        op.add_done_callback(lambda: self._ended(op))
        if self._timer is None:
            self._look()

    def _ended(self, op: Op) -> None:
        self._deadlines.pop(op, None)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        for op in [op for op, deadline in self._deadlines.items() if deadline <= loop.time()]:
            op.finish(TransferTimeout(f"{self.name} has not delivered a chunk in time"))
        next_ = min(self._deadlines.values(), default=None)
        self._timer = loop.call_at(next_, self._look) if next_ is not None else None


class SimTransport:
    """One holder's. All of a simulation are in one `world`, by the ids of their holders."""

    name = "sim"
    capabilities = Capabilities(
        memory_kinds=("host", "device"),
        reach="network",
        is_one_sided=False,
        needs_peer_progress=True,
        posts_synchronously=False,
        detects_death=True,
    )

    def __init__(self, holder_id: str, world: dict[str, SimTransport], connect: Connect) -> None:
        self.holder_id = holder_id
        self._world, self._connect = world, connect
        self._offers: dict[str, SimSlot] = {}
        self._withdrawn: set[str] = set()
        self._wanted: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)
        self._peers: dict[SimPeer, None] = {}
        world[holder_id] = self

    def offer(self, key: str, slot: SimSlot, version: int) -> None:
        self._offers[key] = slot
        for call in self._wanted.pop(key, ()):
            call()

    def withdraw(self, key: str, timeout_s: float) -> None:
        self._offers.pop(key, None)
        self._withdrawn.add(key)

    def export(self) -> bytes:
        return self.holder_id.encode()

    def connect(self, endpoint: bytes, *, peer: str, timeout_s: float) -> SimPeer:
        there = self._world.get(endpoint.decode())
        if there is None:
            raise ConnectError(f"{peer} has gone", context=ErrorContext(phase="connect", peers=(peer,)))
        connected = SimPeer(peer, there, self._connect(there.holder_id, self.holder_id))
        self._peers[connected] = None
        return connected

    def post_read(self, peer: Peer, reads: list[Read], *, timeout_s: float) -> Op:
        assert isinstance(peer, SimPeer)
        (read,) = reads
        op = Op(peer.name)
        peer.add(op, timeout_s)
        peer.transport._serve(read, peer, op)
        return op

    def _serve(self, read: Read, peer: SimPeer, op: Op) -> None:
        slot = self._offers.get(read.key)
        if read.key in self._withdrawn:
            op.finish(RemoteFault(f"{self.holder_id} does not offer {read.key} any more"))
        elif slot is None:
            self._wanted[read.key].append(lambda: self._serve(read, peer, op))
        else:
            chunk = read.offset // slot.chunk_nbytes
            slot.when_ready(chunk, lambda: self._send(slot.chunk_range(chunk)[1], peer, op))

    @staticmethod
    def _send(nbytes: int, peer: SimPeer, op: Op) -> None:
        if op.is_done:
            return
        sent = peer.connection.send(nbytes)

        def take_back() -> None:
            sent.cancel()

        def over(sent: asyncio.Future[None]) -> None:
            if not sent.cancelled():
                op.finish(sent.exception())

        op.add_done_callback(take_back)
        sent.add_done_callback(over)

    def cancel(self, op: Op) -> None:
        op.finish(ConnectError(f"the read from {op.peer} was cancelled"))

    def forget(self, peer: Peer) -> None:
        assert isinstance(peer, SimPeer)
        self._peers.pop(peer, None)
        for op in peer.ops:
            op.finish(ConnectError(f"the connection to {peer.name} was closed"))
        peer.connection.close()

    def close(self) -> None:
        self._world.pop(self.holder_id, None)
        for peer in list(self._peers):
            self.forget(peer)
