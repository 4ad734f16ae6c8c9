"""Fetch one version into a slot: chunk by chunk from the first source that answers, with alternates and digests.

Chunks belong to stripes in turn (chunk % number of stripes), each with sources of its own; one stripe is the common
case. A few chunks are always asked for at once. A chunk is served on as soon as it is there; its digest is computed
right after and compared when the origin's digests are known. Whatever goes wrong with a source, the next one is
asked for what is missing, without waiting for anybody; nothing that arrived is fetched again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
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
"""A source that has delivered nothing for so long, and for a chunk at `SLOWEST_NBYTES_PER_S`, is left while there are
others."""
SLOWEST_NBYTES_PER_S = 4 << 20
LOOK_S = 0.25
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


Stripes = Sequence[tuple[Source, ...]]
"""Of each stripe: where its chunks come from, best first."""


class _Read:
    """A chunk that is being asked for."""

    __slots__ = ("_cancel", "is_recalled", "posted_at", "source")

    def __init__(self) -> None:
        self.source: Source | None = None
        self.posted_at = 0.0
        self.is_recalled = False
        self._cancel: Callable[[], None] | None = None

    def posted(self, cancel: Callable[[], None], now: float) -> None:
        self._cancel, self.posted_at = cancel, now

    def recall(self) -> None:
        """End it: its chunk is asked for again, and the source is not to blame."""
        self.is_recalled = True
        if self._cancel is not None:
            task = asyncio.ensure_future(asyncio.to_thread(self._cancel))
            task.add_done_callback(lambda t: t.cancelled() or t.exception())


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
        self.nbytes_from: Counter[str] = Counter()
        """Source -> bytes that it has delivered, right or wrong."""
        self._slot = slot
        self._key = key
        self._peers = peers
        self._on_hop_failed = on_hop_failed
        self._loop = asyncio.get_running_loop()
        self._stripes: Stripes = ((),)
        self._patience_s = 30.0
        self._cooling: dict[str, float] = {}
        self._cooldown_s: dict[str, float] = {}
        self._todo: list[deque[int]] = [deque(range(slot.num_chunks))]
        self._num_asked: list[int] = [0]
        """Of each stripe: chunks that are asked for now."""
        self._reads: dict[int, _Read] = {}
        self._delivered_at: dict[str, float] = {}
        self._num_open = slot.num_chunks
        self._came_from: dict[int, str] = {}
        self._distrusted: dict[int, list[str]] = {}
        self._digests: asyncio.Future[Sequence[int]] = self._loop.create_future()
        self._changes = Changes()
        self._last_progress = self._loop.time()
        self._last_error = ""
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    @property
    def nbytes_received(self) -> int:
        return self.nbytes_from.total()

    def set_sources(self, stripes: Stripes, patience_s: float) -> None:
        """From now on read each stripe from these, the first one first. Reads at those that were first end."""
        former, self._stripes, self._patience_s = self._stripes, stripes, patience_s
        self._cooling.clear()
        living = {source.holder_id for sources in stripes for source in sources}
        for holder_id in {source.holder_id for sources in former for source in sources} - living:
            self._forget(holder_id)  # ends the reads that still wait for it
        if self._timer is None and any(len(sources) > 1 for sources in stripes):
            self._timer = self._loop.call_later(LOOK_S, self._look)
        if len(stripes) != len(former):
            todo = sorted(chunk for chunks in self._todo for chunk in chunks)
            self._todo = [deque(chunk for chunk in todo if chunk % len(stripes) == s) for s in range(len(stripes))]
            self._num_asked = [sum(chunk % len(stripes) == s for chunk in self._reads) for s in range(len(stripes))]
        for chunk, read in list(self._reads.items())[::-1]:  # the last ones have not reached a connection yet
            was_first = read.source == _first(former[chunk % len(former)])
            if was_first and read.source != _first(stripes[chunk % len(stripes)]):
                read.recall()
        self._changes.wake()

    def _forget(self, holder_id: str) -> None:
        task = asyncio.ensure_future(self._peers.forget(holder_id))
        task.add_done_callback(lambda t: t.cancelled() or t.exception())

    def set_digests(self, digests: Sequence[int]) -> None:
        """What the chunks must hash to, from the origin."""
        if not self._digests.done():
            self._digests.set_result(digests)

    async def run(self) -> None:
        """Raises ChecksumError, or TransferTimeout after `STALL_S` without a byte from any source."""
        try:
            await self._run()
        finally:
            self._is_over = True

    async def _run(self) -> None:
        while True:
            # Plain tasks, not a TaskGroup: that mixes up our own cancellation and the errors of its tasks.
            window = range(min(max(WINDOW, 2 * len(self._stripes)), max(1, self._num_open)))
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
                self._todo[chunk % len(self._todo)].append(chunk)
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
            chunk = self._next()
            if chunk is None:
                await self._changes.wait(self._loop.time() + 1.0)
                continue
            read = self._reads[chunk] = _Read()
            is_done = False
            try:
                read.source = await self._pick(chunk)
                await self._fetch(chunk, read, read.source)
                is_done = True
            except TransportError as exc:
                if not read.is_recalled and read.source is not None:
                    self._fail(read.source, exc)
                elif read.source is None:
                    raise
            finally:
                del self._reads[chunk]
                stripe = chunk % len(self._todo)
                self._num_asked[stripe] -= 1
                if not is_done:
                    self._todo[stripe].appendleft(chunk)
            if is_done:
                self._num_open -= 1
                self._last_progress = self._loop.time()
            if not self._num_open or len(self._todo) > 1:
                self._changes.wake()

    def _next(self) -> int | None:
        """A chunk of the stripe that asks for the fewest now; no stripe may have all requests, or it stops the rest."""
        most = max(2, WINDOW // len(self._todo))
        open_ = [s for s, chunks in enumerate(self._todo) if chunks and self._num_asked[s] < most]
        if not open_:
            return None
        stripe = min(open_, key=lambda s: self._num_asked[s])
        self._num_asked[stripe] += 1
        return self._todo[stripe].popleft()

    async def _fetch(self, chunk: int, read: _Read, source: Source) -> None:
        transport, peer = await self._peers.peer(source)
        if read.is_recalled:
            raise TransportError(f"{source.holder_id} is not the first source any more")
        offset, nbytes = self._slot.chunk_range(chunk)
        into = self._slot.chunk_data(chunk)
        op = transport.post_read(peer, [Read(self._key, offset, into)], timeout_s=self._patience_s)
        read.posted(lambda: transport.cancel(op), self._loop.time())
        digest: list[int] = []
        try:
            # Hashed by the thread that received it, while it is in that core's cache.
            await _ended(op, lambda: digest.append(xxhash.xxh3_64_intdigest(into)))
        finally:
            if not op.is_done:  # we are cancelled: nothing may write into the slot any more
                await asyncio.shield(asyncio.to_thread(transport.cancel, op))
        self._delivered_at[source.holder_id] = self._loop.time()
        self._came_from[chunk] = source.holder_id
        self._cooldown_s.pop(source.holder_id, None)
        self.nbytes_from[source.holder_id] += nbytes
        self._slot.digests[chunk] = digest[0]
        self._slot.mark_ready([chunk])

    async def _pick(self, chunk: int) -> Source:
        """The first source that is not cooling down; waits for one."""
        while True:
            now = self._loop.time()
            sources = self._stripes[chunk % len(self._stripes)]
            distrusted = self._distrusted.get(chunk, [])
            trusted = [s for s in sources if s.holder_id not in distrusted] or list(sources)
            for source in trusted:
                if self._cooling.get(source.holder_id, 0.0) <= now:
                    return source
            if now - self._last_progress > STALL_S:
                names = tuple(source.holder_id for source in sources)
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
            await self._changes.wait(now + wait_s)

    def _look(self) -> None:
        """Leave sources that are silent while there are others. Called by a timer, as long as there are any."""
        self._timer = None
        if self._is_over:
            return
        now = self._loop.time()
        patience_s = IMPATIENCE_S + self._slot.chunk_nbytes / SLOWEST_NBYTES_PER_S
        for chunk, read in list(self._reads.items()):
            source = read.source
            if source is None or not read.posted_at or len(self._stripes[chunk % len(self._stripes)]) < 2:
                continue
            silent_s = now - max(read.posted_at, self._delivered_at.get(source.holder_id, 0.0))
            if silent_s > patience_s and self._cooling.get(source.holder_id, 0.0) <= now:
                self._fail(source, TransferTimeout(f"{source.holder_id} has delivered nothing for {silent_s:.1f} s"))
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def _fail(self, source: Source, error: TransportError) -> None:
        now = self._loop.time()
        self._last_error = str(error)
        if self._cooling.get(source.holder_id, 0.0) <= now:
            self._on_hop_failed(source.holder_id, error.problem)
            self._forget(source.holder_id)
            cooldown_s = self._cooldown_s.get(source.holder_id, COOLDOWN_S)
            self._cooldown_s[source.holder_id] = min(2 * cooldown_s, MAX_COOLDOWN_S)
            self._cooling[source.holder_id] = now + cooldown_s


def _first(sources: tuple[Source, ...]) -> Source | None:
    return sources[0] if sources else None


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
