"""A holder as a process of its own (`python -m wsync.engine.process`), started by the first member on a host.

It reads its order from standard input, says on standard output where it listens, and carries the job's
coordinator when there is none yet.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from wsync.config import Config
from wsync.engine import wire as wires
from wsync.engine.coordinator import PURPOSE, Coordinator
from wsync.engine.holder import Holder
from wsync.engine.session import (
    CoordinatorRecord,
    HolderOrder,
    HolderRecord,
    lock_file,
    read_record,
    took_lock,
    write_record,
)
from wsync.errors import AuthError, ConnectError, StaleView

logger = logging.getLogger("wsync")


LOOK_S = 0.25


class JobCoordinator:
    """Finds the job's coordinator through its record; carries one in this process when the recorded one is gone.

    The record decides. A coordinator that did not answer in time was replaced there; if it was only slow it sees that
    and ends, so that its holders find the new one. Otherwise a job would be two, and neither would know of the other.
    """

    def __init__(self, config: Config, folder: str, token: str) -> None:
        self._config, self._folder, self._token = config, Path(folder), token
        self.carried: Coordinator | None = None
        self._task: asyncio.Task[None] | None = None

    async def resolve(self) -> tuple[str, int]:
        path = self._folder / "coordinator.json"
        lock = self._folder / "coordinator.lock"
        deadline = time.monotonic() + 2 * self._config.lost_after_s
        with lock_file(lock) as fd:
            while not took_lock(fd, lock, deadline):
                await asyncio.sleep(0.01)  # whoever has the lock may wait for the answer of the one that we carry
            record = read_record(path, CoordinatorRecord)
            if record is not None and record.port and (self._is_ours(record) or await self._answers(record)):
                return record.host, record.port
            if self.carried is None:
                self.carried = Coordinator(self._config, self._token)
                self.carried.start()
                self._task = asyncio.create_task(self._carry(self.carried, path))
            host, port = self.carried.address
            write_record(path, CoordinatorRecord(host, port, self._token))
            return host, port

    def _is_ours(self, record: CoordinatorRecord) -> bool:
        return self.carried is not None and self.carried.address == (record.host, record.port)

    async def _carry(self, coordinator: Coordinator, path: Path) -> None:
        """Run it until the record names another one."""
        running = asyncio.create_task(coordinator.run())
        try:
            while not (await asyncio.wait([running], timeout=LOOK_S))[0]:
                record = read_record(path, CoordinatorRecord)
                if record is not None and record.port and not self._is_ours(record):
                    logger.warning("the coordinator here was slow to answer and has been replaced")
                    return
        finally:
            self.carried = None
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _answers(self, record: CoordinatorRecord) -> bool:
        """Refused at once where it has ended; one that is only slow has as long as a holder has."""
        try:
            wire = await wires.connect(
                (record.host, record.port),
                self._token,
                purpose=PURPOSE,
                peer="the coordinator",
                timeout_s=self._config.lost_after_s,
            )
        except (ConnectError, AuthError):
            return False
        wire.close()
        return True

    async def wait_unused(self) -> None:
        """Return when no other host's holder needs the coordinator that we carry."""
        while self.carried is not None and self.carried.num_holders:
            await asyncio.sleep(0.25)


async def serve(order: HolderOrder) -> None:
    """Run one holder until its host has no member any more."""
    job = JobCoordinator(order.config, order.folder, order.token)

    async def named() -> tuple[str, int]:
        assert order.address is not None
        return order.address

    holder = Holder(order.config, order.token, host=order.host, resolve=named if order.address else job.resolve)
    holder.start()
    sys.stdout.buffer.write(msgspec.json.encode(HolderRecord(holder.socket_name, os.getpid())) + b"\n")
    sys.stdout.buffer.flush()
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # whoever started us may be gone when we speak next
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await holder.run()
    await job.wait_unused()


def main() -> int:
    logging.basicConfig(format="%(asctime)s wsync holder %(process)d %(levelname)s %(message)s", level=_log_level())
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=HolderOrder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the user's process; we leave when it has left
    try:
        asyncio.run(serve(order))
    except asyncio.CancelledError:
        pass
    except StaleView as exc:
        logger.warning("leaving: %s", exc)
    return 0


def _log_level() -> str:
    level = os.environ.get("WSYNC_LOG", "WARNING").upper()
    return level if level in ("DEBUG", "INFO", "WARNING", "ERROR") else "WARNING"


if __name__ == "__main__":
    sys.exit(main())
