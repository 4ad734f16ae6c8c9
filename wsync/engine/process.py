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
from wsync.engine.session import CoordinatorRecord, HolderOrder, HolderRecord, locked, read_record, write_record
from wsync.errors import AuthError, ConnectError, StaleView


class JobCoordinator:
    """Finds the job's coordinator through its record; carries one in this process when the recorded one is gone."""

    def __init__(self, config: Config, folder: str, token: str) -> None:
        self._config, self._folder, self._token = config, Path(folder), token
        self.carried: Coordinator | None = None
        self._task: asyncio.Task[None] | None = None

    async def resolve(self) -> tuple[str, int]:
        path = self._folder / "coordinator.json"
        with locked(self._folder / "coordinator.lock", time.monotonic() + 1.0):
            record = read_record(path, CoordinatorRecord)
            if record is not None and record.port and await self._answers(record):
                return record.host, record.port
            if self.carried is None:
                self.carried = Coordinator(self._config, self._token)
                self.carried.start()
                self._task = asyncio.create_task(self.carried.run())
            host, port = self.carried.address
            write_record(path, CoordinatorRecord(host, port, self._token))
            return host, port

    async def _answers(self, record: CoordinatorRecord) -> bool:
        try:
            wire = await wires.connect(
                (record.host, record.port), self._token, purpose=PURPOSE, peer="the coordinator", timeout_s=1.0
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
        logging.getLogger("wsync").warning("leaving: %s", exc)
    return 0


def _log_level() -> str:
    level = os.environ.get("WSYNC_LOG", "WARNING").upper()
    return level if level in ("DEBUG", "INFO", "WARNING", "ERROR") else "WARNING"


if __name__ == "__main__":
    sys.exit(main())
