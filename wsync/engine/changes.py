"""Waiting in an event loop until something has changed, for any number of waiters that each look for themselves."""

from __future__ import annotations

import asyncio


class Changes:
    """`wake` after every change; whoever waits then looks again. Used from one event loop only."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Something changed: whoever waits looks again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(self, deadline: float) -> bool:
        """Until the next change. False at the deadline (loop time)."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True
