"""The trainer's side of a holder: when chunks are served, and what is sealed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import xxhash

from wsync.config import Config
from wsync.engine import origin as origins
from wsync.engine import protocol
from wsync.engine.origin import Origin
from wsync.engine.services import HolderServices
from wsync.engine.staging import HeldSlot, Staging
from wsync.errors import StaleView

CHUNK = 4096
NBYTES = 10 * CHUNK + 100
Script = Callable[[Origin, HeldSlot, list[protocol.Message]], Awaitable[None]]


def run(script: Script) -> None:
    """`script` with an origin that has reserved a slot for version 1, and the notices that it has sent."""

    async def main() -> None:
        told: list[protocol.Message] = []
        config = Config(chunk_nbytes=CHUNK)
        services = HolderServices(config, told.append)
        staging = Staging("policy", config, [])
        origin = Origin(staging, services)
        try:
            wish = protocol.ReserveSlot(7, "supersede", 10.0)
            reserved = await origin.reserve("i", "digest", NBYTES, wish)
            held = next(held for held in staging.slots if held.slot_id == reserved.slot_id)
            await script(origin, held, told)
        finally:
            for task in services.tasks:
                task.cancel()
            await asyncio.gather(*services.tasks, return_exceptions=True)
            services.digest_threads.shutdown()
            staging.close()

    asyncio.run(main())


async def until(is_true: Callable[[], object]) -> None:
    async with asyncio.timeout(10.0):
        while not is_true():
            await asyncio.sleep(0.001)


def fill(held: HeldSlot, seed: int) -> None:
    held.slot.data[:] = bytes((seed + index) % 251 for index in range(NBYTES))


def sealed(told: list[protocol.Message]) -> list[protocol.Sealed]:
    return [message for message in told if isinstance(message, protocol.Sealed)]


def test_chunks_are_served_while_the_rest_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins, "OVERLAPS", True)

    async def script(origin: Origin, held: HeldSlot, told: list[protocol.Message]) -> None:
        fill(held, 3)
        origin.packed_to(1, 4 * CHUNK + 50)
        await until(lambda: held.slot.missing() == list(range(4, 11)))
        assert not sealed(told), "a version is sealed only when all of it is packed"
        origin.packed(1)
        await until(lambda: sealed(told))
        assert held.slot.missing() == []

    run(script)


def test_a_small_machine_serves_when_the_snapshot_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins, "OVERLAPS", False)

    async def script(origin: Origin, held: HeldSlot, told: list[protocol.Message]) -> None:
        fill(held, 3)
        origin.packed_to(1, NBYTES - 1)
        await asyncio.sleep(0)
        assert len(held.slot.missing()) == 11
        origin.packed(1)
        await until(lambda: sealed(told))

    run(script)


def test_the_seal_has_the_digest_of_every_chunk() -> None:
    async def script(origin: Origin, held: HeldSlot, told: list[protocol.Message]) -> None:
        fill(held, 5)
        origin.packed(1)
        await until(lambda: sealed(told))
        block = bytes(held.slot.data)
        expected = tuple(xxhash.xxh3_64_intdigest(block[i : i + CHUNK]) for i in range(0, NBYTES, CHUNK))
        assert sealed(told)[0] == protocol.Sealed("policy", 1, held.uid, expected)
        assert held.uid == held.slot.uid != 0
        assert held.slot.is_sealed

    run(script)


def test_a_version_that_is_still_hashed_is_kept() -> None:
    """The next publish may come before the last one is hashed: that one is on its way, and must not be given up."""

    async def script(origin: Origin, held: HeldSlot, told: list[protocol.Message]) -> None:
        fill(held, 5)
        origin.packed(1)
        reserved = await origin.reserve("i", "digest", NBYTES, protocol.ReserveSlot(8, "supersede", 10.0))
        assert reserved.version == 2
        announced = [message for message in told if isinstance(message, protocol.Announce)]
        assert announced[-1].kept == (1,)
        await until(lambda: sealed(told))
        origin.packed(2)
        await until(lambda: len(sealed(told)) == 2)
        assert not [message for message in told if isinstance(message, protocol.Abandon)]

    run(script)


def test_a_given_up_version_is_abandoned_by_the_next() -> None:
    """A publish that failed half-way must not block the next one, and must not be sealed."""

    async def script(origin: Origin, held: HeldSlot, told: list[protocol.Message]) -> None:
        reserved = await origin.reserve("i", "digest", NBYTES, protocol.ReserveSlot(8, "supersede", 10.0))
        assert reserved.version == 2
        abandoned = [message.version for message in told if isinstance(message, protocol.Abandon)]
        assert abandoned == [1]
        with pytest.raises(StaleView):
            origin.packed(1)
        origin.packed(2)
        await until(lambda: sealed(told))
        assert [message.version for message in sealed(told)] == [2]

    run(script)
