"""Fetch one version into a slot: chunk by chunk from the first source that answers, with alternates and digests.

A few chunks are always asked for at once. A chunk is served on as soon as it is there; its digest is computed
right after and compared when the origin's digests are known. Whatever goes wrong with a source, the next one is
asked for what is missing, without waiting for anybody; nothing that arrived is fetched again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import xxhash

from wsync.engine.changes import Changes
from wsync.engine.protocol import Source
from wsync.errors import ChecksumError, ErrorContext, TransferTimeout, TransportError
from wsync.memory import Slot
from wsync.transports.base import Op, Peer, Read, Transport

WINDOW = 16
"""Chunks asked for at once: enough that the next request is there before the last one is answered."""
COOLDOWN_S, MAX_COOLDOWN_S = 0.5, 30.0
"""A source that failed is left for so long; twice as long each time, until it delivers again."""
IMPATIENCE_S = 3.0
"""How long a read waits at a source for a chunk that is not there, while there are others to ask."""
STALL_S = 30.0
MAX_REFETCHES = 3
CONNECT_TIMEOUT_S = 5.0


class PeerTable:
    """Connections of this holder to others, one per source and incarnation of it; shared by all transfers."""

    def __init__(self, transports: Mapping[str, Transport], host: str) -> None:
        self._transports = transports
        self._host = host
        self._peers: dict[str, tuple[bytes, Transport, Peer]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def peer(self, source: Source) -> tuple[Transport, Peer]:
        """A connected peer over the best transport that reaches it. Raises TransportError."""
        async with self._locks.setdefault(source.holder_id, asyncio.Lock()):
            transport = self._best(source)
            endpoint = source.endpoints[transport.name]
            known = self._peers.get(source.holder_id)
            if known is not None and known[0] == endpoint:
                return known[1], known[2]
            if known is not None:  # it restarted: the former incarnation's connections are dead
                await self._drop(source.holder_id)
            peer = await asyncio.to_thread(
                transport.connect, endpoint, peer=source.holder_id, timeout_s=CONNECT_TIMEOUT_S
            )
            self._peers[source.holder_id] = (endpoint, transport, peer)
            return transport, peer

    def _best(self, source: Source) -> Transport:
        for name, transport in self._transports.items():
            reaches = transport.capabilities.reach == "network" or source.host == self._host
            if name in source.endpoints and reaches:
                return transport
        raise TransportError(
            f"no transport reaches holder {source.holder_id}: it has {sorted(source.endpoints)}, we have "
            f"{sorted(self._transports)}",
            hint="allow tcp on both hosts",
        )

    async def _drop(self, holder_id: str) -> None:
        _, transport, peer = self._peers.pop(holder_id)
        await asyncio.to_thread(transport.forget, peer)

    async def forget(self, holder_id: str) -> None:
        """Drop the connection, so that the next use connects anew."""
        async with self._locks.setdefault(holder_id, asyncio.Lock()):
            if holder_id in self._peers:
                await self._drop(holder_id)


class LanePull:
    """One transfer. `run` returns when the slot holds every byte and every digest agrees."""

    def __init__(
        self,
        slot: Slot,
        key: str,
        *,
        peers: PeerTable,
        on_hop_failed: Callable[[str, str], None],
    ) -> None:
        self.nbytes_received = 0
        self._slot = slot
        self._key = key
        self._peers = peers
        self._on_hop_failed = on_hop_failed
        self._sources: tuple[Source, ...] = ()
        self._patience_s = 30.0
        self._cooling: dict[str, float] = {}
        self._cooldown_s: dict[str, float] = {}
        self._todo: deque[int] = deque(range(slot.num_chunks))
        self._num_open = slot.num_chunks
        self._came_from: dict[int, str] = {}
        self._distrusted: dict[int, list[str]] = {}
        self._digests: asyncio.Future[Sequence[int]] = asyncio.get_running_loop().create_future()
        self._changes = Changes()
        self._last_progress = time.monotonic()
        self._last_error = ""

    def set_sources(self, sources: tuple[Source, ...], patience_s: float) -> None:
        """From now on read from these, the first one first. Reads already posted go on."""
        living = {source.holder_id for source in sources}
        gone = [source.holder_id for source in self._sources if source.holder_id not in living]
        self._sources, self._patience_s = sources, patience_s
        self._cooling.clear()
        for holder_id in gone:  # ends the reads that still wait for it
            task = asyncio.ensure_future(self._peers.forget(holder_id))
            task.add_done_callback(lambda t: t.cancelled() or t.exception())
        self._changes.wake()

    def set_digests(self, digests: Sequence[int]) -> None:
        """What the chunks must hash to, from the origin."""
        if not self._digests.done():
            self._digests.set_result(digests)

    async def run(self) -> None:
        """Raises ChecksumError, or TransferTimeout after `STALL_S` without a byte from any source."""
        while True:
            # Plain tasks, not a TaskGroup: that mixes up our own cancellation and the errors of its tasks.
            window = range(min(WINDOW, max(1, len(self._todo))))
            fetching = [asyncio.create_task(self._fetch_chunks()) for _ in window]
            try:
                await asyncio.gather(*fetching)
            finally:
                for task in fetching:
                    task.cancel()
                await asyncio.gather(*fetching, return_exceptions=True)  # nobody writes into the slot any more
            wrong = self._compare(await self._digests)
            if not wrong:
                return
            for chunk in wrong:
                self._distrust(chunk)
            self._todo.extend(wrong)
            self._num_open = len(wrong)

    def _compare(self, digests: Sequence[int]) -> list[int]:
        if len(digests) != self._slot.num_chunks:
            raise ChecksumError(f"the origin sent {len(digests)} digests for {self._slot.num_chunks} chunks")
        return [
            chunk
            for chunk, (ours, theirs) in enumerate(zip(self._slot.digests, digests, strict=True))
            if ours != theirs
        ]

    def _distrust(self, chunk: int) -> None:
        bad = self._distrusted.setdefault(chunk, [])
        source = self._came_from[chunk]
        bad.append(source)
        self._on_hop_failed(source, f"chunk {chunk} does not have the digest of its origin")
        if len(bad) > MAX_REFETCHES:
            raise ChecksumError(
                f"chunk {chunk} of {self._key} is wrong from every source",
                context=ErrorContext(phase="verify", peers=tuple(sorted(set(bad)))),
            )
        self._slot.unmark_ready(chunk)

    async def _fetch_chunks(self) -> None:
        while self._num_open:
            if not self._todo:
                await self._changes.wait(asyncio.get_running_loop().time() + 1.0)
                continue
            chunk = self._todo.popleft()
            source = await self._pick(chunk)
            try:
                await self._fetch(chunk, source)
            except TransportError as exc:
                self._todo.appendleft(chunk)
                self._fail(source, exc)
            except BaseException:
                self._todo.appendleft(chunk)
                raise
            else:
                self._num_open -= 1
                self._last_progress = time.monotonic()
                if not self._num_open:
                    self._changes.wake()

    async def _fetch(self, chunk: int, source: Source) -> None:
        transport, peer = await self._peers.peer(source)
        offset, nbytes = self._slot.chunk_range(chunk)
        into = self._slot.chunk_data(chunk)
        patience_s = min(self._patience_s, IMPATIENCE_S) if len(self._sources) > 1 else self._patience_s
        op = transport.post_read(peer, [Read(self._key, offset, into)], timeout_s=patience_s)
        digest: list[int] = []
        try:
            # Hashed by the thread that received it, while it is in that core's cache.
            await _ended(op, lambda: digest.append(xxhash.xxh3_64_intdigest(into)))
        finally:
            if not op.is_done:  # we are cancelled: nothing may write into the slot any more
                await asyncio.shield(asyncio.to_thread(transport.cancel, op))
        self._came_from[chunk] = source.holder_id
        self._cooldown_s.pop(source.holder_id, None)
        self.nbytes_received += nbytes
        self._slot.digests[chunk] = digest[0]
        self._slot.mark_ready([chunk])

    async def _pick(self, chunk: int) -> Source:
        """The first source that is not cooling down; waits for one."""
        while True:
            now = time.monotonic()
            distrusted = self._distrusted.get(chunk, [])
            trusted = [s for s in self._sources if s.holder_id not in distrusted] or list(self._sources)
            for source in trusted:
                if self._cooling.get(source.holder_id, 0.0) <= now:
                    return source
            if now - self._last_progress > STALL_S:
                names = tuple(source.holder_id for source in self._sources)
                raise TransferTimeout(
                    f"no source delivers {self._key}: {self._last_error or 'none is known'}",
                    context=ErrorContext(
                        phase="transfer",
                        route=names,
                        elapsed_s=now - self._last_progress,
                        nbytes_done=self.nbytes_received,
                        nbytes_total=self._slot.nbytes,
                    ),
                )
            ends = [self._cooling[s.holder_id] for s in trusted if s.holder_id in self._cooling]
            wait_s = max(0.01, min(ends, default=now + 1.0) - now)
            await self._changes.wait(asyncio.get_running_loop().time() + wait_s)

    def _fail(self, source: Source, error: TransportError) -> None:
        self._last_error = str(error)
        if self._cooling.get(source.holder_id, 0.0) <= time.monotonic():
            self._on_hop_failed(source.holder_id, error.problem)
            forget = asyncio.ensure_future(self._peers.forget(source.holder_id))
            forget.add_done_callback(lambda t: t.cancelled() or t.exception())
            cooldown_s = self._cooldown_s.get(source.holder_id, COOLDOWN_S)
            self._cooldown_s[source.holder_id] = min(2 * cooldown_s, MAX_COOLDOWN_S)
            self._cooling[source.holder_id] = time.monotonic() + cooldown_s


async def _ended(op: Op, then: Callable[[], None]) -> None:
    """Wait for an operation; `then` runs in its thread when it has succeeded. Cancelling leaves it as it is."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def report() -> None:
        if not ended.done():
            ended.set_result(None)

    def finish() -> None:
        if op.future.exception() is None:
            then()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(report)

    op.add_done_callback(finish)
    await ended
    op.future.result()
