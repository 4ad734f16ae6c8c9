"""One coordinator per job without Ray: the record in the job's folder decides, also when one was only slow."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from wsync.auth import new_token
from wsync.config import Config
from wsync.engine import wire as wires
from wsync.engine.coordinator import PURPOSE, Coordinator
from wsync.engine.process import JobCoordinator
from wsync.engine.session import CoordinatorRecord, lock_file, read_record, took_lock, write_record
from wsync.errors import ConnectError

TOKEN = new_token()


async def until(is_true: object, timeout_s: float = 10.0) -> None:
    assert callable(is_true)
    async with asyncio.timeout(timeout_s):
        while not is_true():
            await asyncio.sleep(0.01)


def test_one_that_was_replaced_in_the_record_ends_and_its_host_goes_to_the_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = Config(job="a")
        slow = JobCoordinator(config, str(tmp_path), TOKEN)
        former = await slow.resolve()
        assert await slow.resolve() == former
        assert slow.carried is not None
        other = Coordinator(config, TOKEN)
        other.start()
        running = asyncio.create_task(other.run())
        write_record(tmp_path / "coordinator.json", CoordinatorRecord(*other.address, TOKEN))
        await until(lambda: slow.carried is None)
        await slow.wait_unused()
        assert await slow.resolve() == other.address
        with pytest.raises(ConnectError):
            await wires.connect(former, TOKEN, purpose=PURPOSE, peer="the former one", timeout_s=5.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())


def test_a_host_that_waits_for_the_lock_goes_on_serving_meanwhile(tmp_path: Path) -> None:
    """Else it could not answer the one that has the lock and asks whether it is alive."""

    async def scenario() -> None:
        job = JobCoordinator(Config(job="a"), str(tmp_path), TOKEN)
        path = tmp_path / "coordinator.lock"
        with lock_file(path) as fd:
            assert took_lock(fd, path, 0.0)
            waiting = asyncio.create_task(job.resolve())
            for _ in range(20):
                await asyncio.sleep(0.01)
            assert not waiting.done()
        assert (await waiting)[1] > 0
        record = read_record(tmp_path / "coordinator.json", CoordinatorRecord)
        assert record is not None
        assert (record.host, record.port) == await job.resolve()

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(scenario())


def test_a_lock_that_nobody_gives_back_is_named_at_the_deadline(tmp_path: Path) -> None:
    async def scenario() -> None:
        job = JobCoordinator(Config(job="a", heartbeat_s=0.02, lost_after_s=0.05), str(tmp_path), TOKEN)
        path = tmp_path / "coordinator.lock"
        with lock_file(path) as fd:
            assert took_lock(fd, path, 0.0)
            with pytest.raises(ConnectError, match=r"coordinator\.lock is locked"):
                await job.resolve()

    asyncio.run(scenario())
