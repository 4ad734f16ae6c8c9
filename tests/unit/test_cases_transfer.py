"""Transfers that lie, fail or stall: `LanePull` over fake transports. Case A51."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import xxhash

from wsync.engine import executor
from wsync.engine.executor import LanePull, PeerTable
from wsync.engine.protocol import Source
from wsync.errors import ChecksumError, ConnectError, RemoteFault, TransferTimeout, TransportError
from wsync.memory import Slot
from wsync.transports.base import Capabilities, Op, Read

CHUNK = 4096
NUM_CHUNKS = 7
CANARY = 0xC5
RIGHT = bytes(range(256)) * (CHUNK * NUM_CHUNKS // 256)
DIGESTS = [xxhash.xxh3_64_intdigest(RIGHT[i : i + CHUNK]) for i in range(0, len(RIGHT), CHUNK)]

Serve = Callable[[str, Read, int], Exception | None]
"""Fills `read.into` or not; called with the source's name, the read, and how many reads there were before."""


class FakePeer:
    def __init__(self, name: str) -> None:
        self.name = name


class FakeTransport:
    """Does with a read what a test says, and calls it done."""

    name = "fake"
    capabilities = Capabilities(
        memory_kinds=("host",),
        reach="network",
        is_one_sided=True,
        needs_peer_progress=False,
        posts_synchronously=True,
        detects_death=True,
    )

    def __init__(self, serve: Serve) -> None:
        self.serve = serve
        self.reads: list[tuple[str, int]] = []
        self.unreachable: set[str] = set()

    def connect(self, endpoint: bytes, *, peer: str, timeout_s: float) -> FakePeer:
        if peer in self.unreachable:
            raise ConnectError(f"{peer} does not answer")
        return FakePeer(peer)

    def post_read(self, peer: FakePeer, reads: list[Read], *, timeout_s: float) -> Op:
        op = Op(peer.name)
        for read in reads:
            self.reads.append((peer.name, read.offset // CHUNK))
            op.finish(self.serve(peer.name, read, len(self.reads) - 1))
        return op

    def cancel(self, op: Op) -> None:
        op.finish(TransportError("cancelled"))

    def forget(self, peer: FakePeer) -> None:
        pass


def right(source: str, read: Read, turn: int) -> None:
    read.into[:] = RIGHT[read.offset : read.offset + len(read.into)]


@pytest.fixture
def slot() -> Iterator[Slot]:
    slot = Slot.reserve(len(RIGHT), CHUNK)
    slot.begin(5, 1)
    slot.data[:] = bytes([CANARY]) * len(RIGHT)
    yield slot
    slot.close()


def source(name: str) -> Source:
    return Source(name, name, {"fake": name.encode()})


def pull(
    slot: Slot, transport: FakeTransport, sources: str, *, digests: list[int] | None = None, patience_s: float = 1.0
) -> LanePull:
    """Run one transfer to its end. Sources of stripes are separated by bars."""

    async def run() -> LanePull:
        peers = PeerTable({"fake": transport}, "here")  # type: ignore[dict-item]
        lane_pull = LanePull(slot, "c@5", peers=peers, on_hop_failed=lambda *_: None)
        lane_pull.set_sources([tuple(map(source, names)) for names in sources.split("|")], patience_s)
        lane_pull.set_digests(DIGESTS if digests is None else digests)
        async with asyncio.timeout(60.0):
            await lane_pull.run()
        return lane_pull

    return asyncio.run(run())


def test_every_chunk_once_from_the_first_source(slot: Slot) -> None:
    transport = FakeTransport(right)
    assert pull(slot, transport, "ab").nbytes_received == len(RIGHT)
    assert bytes(slot.data) == RIGHT
    assert sorted(transport.reads) == [("a", chunk) for chunk in range(NUM_CHUNKS)]
    assert slot.missing() == []


def test_each_stripe_comes_from_its_own_source(slot: Slot) -> None:
    transport = FakeTransport(right)
    lane_pull = pull(slot, transport, "ac|b|ca")
    assert bytes(slot.data) == RIGHT
    assert sorted(transport.reads) == sorted((("a", "b", "c")[chunk % 3], chunk) for chunk in range(NUM_CHUNKS))
    assert lane_pull.nbytes_from == {"a": 3 * CHUNK, "b": 2 * CHUNK, "c": 2 * CHUNK}


class Slow(FakeTransport):
    """Reads from those in `held` do not end until they are cancelled or let go."""

    def __init__(self, held: str) -> None:
        super().__init__(right)
        self.held = set(held)
        self.waiting: list[Op] = []
        self.cancelled: list[str] = []

    def post_read(self, peer: FakePeer, reads: list[Read], *, timeout_s: float) -> Op:
        if peer.name not in self.held:
            return super().post_read(peer, reads, timeout_s=timeout_s)
        op = Op(peer.name)
        self.reads.append((peer.name, reads[0].offset // CHUNK))
        self.waiting.append(op)
        return op

    def cancel(self, op: Op) -> None:
        self.cancelled.append(op.peer)
        super().cancel(op)

    def forget(self, peer: FakePeer) -> None:
        for op in self.waiting:
            if op.peer == peer.name:
                op.finish(ConnectError("forgotten"))


def pull_anew(slot: Slot, transport: Slow, before: str, after: str) -> list[str]:
    """Sources are changed while all reads wait. Returns the sources that were blamed."""
    blamed: list[str] = []

    async def run() -> None:
        peers = PeerTable({"fake": transport}, "here")  # type: ignore[dict-item]
        lane_pull = LanePull(slot, "c@5", peers=peers, on_hop_failed=lambda name, _: blamed.append(name))
        lane_pull.set_sources([tuple(map(source, names)) for names in before.split("|")], 30.0)
        lane_pull.set_digests(DIGESTS)
        running = asyncio.create_task(lane_pull.run())
        async with asyncio.timeout(20.0):
            while len(transport.waiting) < NUM_CHUNKS:
                await asyncio.sleep(0.01)
            lane_pull.set_sources([tuple(map(source, names)) for names in after.split("|")], 30.0)
            await running

    asyncio.run(run())
    return blamed


def test_reads_at_a_source_that_is_not_the_first_any_more_are_taken_back(slot: Slot) -> None:
    transport = Slow("a")
    assert pull_anew(slot, transport, "ab", "ba") == [], "it is not to blame, others may read from it on"
    assert bytes(slot.data) == RIGHT
    assert transport.cancelled == ["a"] * NUM_CHUNKS
    assert sorted(transport.reads) == sorted((name, chunk) for chunk in range(NUM_CHUNKS) for name in "ab")


def test_reads_at_a_source_that_is_gone_end_and_stripes_may_change(slot: Slot) -> None:
    transport = Slow("a")
    assert pull_anew(slot, transport, "a", "b|c") == []
    assert bytes(slot.data) == RIGHT
    later = transport.reads[NUM_CHUNKS:]
    assert sorted(later) == sorted((("b", "c")[chunk % 2], chunk) for chunk in range(NUM_CHUNKS))


def test_reads_at_a_source_that_stays_the_first_go_on(slot: Slot) -> None:
    transport = Slow("a")

    async def run() -> None:
        peers = PeerTable({"fake": transport}, "here")  # type: ignore[dict-item]
        lane_pull = LanePull(slot, "c@5", peers=peers, on_hop_failed=lambda *_: None)
        lane_pull.set_sources([(source("a"), source("b"))], 30.0)
        lane_pull.set_digests(DIGESTS)
        running = asyncio.create_task(lane_pull.run())
        async with asyncio.timeout(20.0):
            while len(transport.waiting) < NUM_CHUNKS:
                await asyncio.sleep(0.01)
            lane_pull.set_sources([(source("a"), source("c"))], 30.0)
            await asyncio.sleep(0.1)
            for op, (_, chunk) in zip(transport.waiting, transport.reads, strict=True):
                slot.chunk_data(chunk)[:] = RIGHT[chunk * CHUNK : (chunk + 1) * CHUNK]
                op.finish(None)
            await running

    asyncio.run(run())
    assert len(transport.reads) == NUM_CHUNKS
    assert transport.cancelled == []


def test_a_silent_source_is_left_while_there_are_others(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "IMPATIENCE_S", 0.2)
    monkeypatch.setattr(executor, "LOOK_S", 0.05)
    transport = Slow("a")
    started = time.monotonic()
    pull(slot, transport, "ab", patience_s=30.0)
    assert bytes(slot.data) == RIGHT
    assert 0.2 < time.monotonic() - started < 10.0
    assert [name for name, _ in transport.reads].count("b") == NUM_CHUNKS


@pytest.mark.parametrize("sources", ["a", "ab", "abcdef"])
def test_case_A51_reads_that_write_nothing_end_in_a_checksum_error(slot: Slot, sources: str) -> None:
    transport = FakeTransport(lambda source, read, turn: None)
    with pytest.raises(ChecksumError, match=r"chunk \d of c@5 is wrong from every source"):
        pull(slot, transport, sources)
    assert bytes(slot.data) == bytes([CANARY]) * len(RIGHT)
    assert not slot.is_sealed
    assert slot.version == 5
    assert len(transport.reads) <= NUM_CHUNKS * (executor.MAX_REFETCHES + 1), "it does not ask for ever"


def test_case_A51_one_flipped_bit_is_fetched_again_from_another_source(slot: Slot) -> None:
    def flip(source: str, read: Read, turn: int) -> None:
        right(source, read, turn)
        if source == "a" and read.offset == 2 * CHUNK:
            read.into[100] ^= 1

    transport = FakeTransport(flip)
    pull(slot, transport, "ab")
    assert bytes(slot.data) == RIGHT
    assert transport.reads.count(("b", 2)) == 1
    assert len(transport.reads) == NUM_CHUNKS + 1, "nothing else is fetched again"


def test_a_source_that_was_wrong_once_may_be_right_later(slot: Slot) -> None:
    def flip(source: str, read: Read, turn: int) -> None:
        right(source, read, turn)
        if turn == 0:
            read.into[0] ^= 1

    pull(slot, FakeTransport(flip), "a")
    assert bytes(slot.data) == RIGHT


def test_a_wrong_number_of_digests_is_refused(slot: Slot) -> None:
    with pytest.raises(ChecksumError, match="sent 6 digests for 7 chunks"):
        pull(slot, FakeTransport(right), "a", digests=DIGESTS[:-1])


def test_sources_that_fail_are_left_for_those_that_deliver(slot: Slot) -> None:
    def serve(source: str, read: Read, turn: int) -> Exception | None:
        if source == "a":
            return RemoteFault("a has no such version")
        right(source, read, turn)
        return None

    transport = FakeTransport(serve)
    transport.unreachable = {"b"}
    pull(slot, transport, "abc")
    assert bytes(slot.data) == RIGHT


def test_nobody_delivers(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "STALL_S", 0.3)
    monkeypatch.setattr(executor, "COOLDOWN_S", 0.05)
    started = time.monotonic()
    with pytest.raises(TransferTimeout, match=r"no source delivers c@5: the disk is on fire .*route=a>b"):
        pull(slot, FakeTransport(lambda *_: RemoteFault("the disk is on fire")), "ab")
    assert time.monotonic() - started < 20.0
    with pytest.raises(TransferTimeout, match="none is known"):
        pull(slot, FakeTransport(right), "")


def test_a_host_that_no_transport_reaches_is_named(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "STALL_S", 0.1)
    monkeypatch.setattr(executor, "COOLDOWN_S", 0.05)
    transport: Any = FakeTransport(right)
    transport.capabilities = Capabilities(
        memory_kinds=("host",),
        reach="host",
        is_one_sided=True,
        needs_peer_progress=False,
        posts_synchronously=True,
        detects_death=True,
    )
    with pytest.raises(TransferTimeout, match="no transport reaches holder a"):
        pull(slot, transport, "a")
