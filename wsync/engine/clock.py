"""A virtual clock: an event loop whose time jumps to the next timer whenever nothing else is left to do.

The engine's coroutines run on it unchanged, a simulated hour takes no hour, and the same start gives the same run to
the last event. Nothing outside of the process is waited for: no sockets, no threads.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from wsync.errors import WsyncError

T = TypeVar("T")


class NothingLeftToWaitFor(WsyncError):
    """Every task of a simulation waits, and no timer would ever wake one: on a real clock this would hang."""


class _NoFiles(selectors.BaseSelector):
    """Registers nothing; waiting for files moves the clock instead."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, fd, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeftToWaitFor(
                f"at {self.now:g} s of the simulation every task waits for another one",
                hint="the tasks' stacks say for what",
            )
        self.now += max(0.0, timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on a virtual clock that begins at 0."""

    def __init__(self) -> None:
        self._files = _NoFiles()
        super().__init__(self._files)
        self._clock_resolution = 1e-12

    def time(self) -> float:
        return self._files.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """At once and here: there is no other thread, and what would block one takes no simulated time."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as exc:
            done.set_exception(exc)
        return done

    def _write_to_self(self) -> None:
        """Nobody sleeps who would have to be woken."""


def simulate(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Run `main` on a virtual clock. Returns its result and the simulated seconds that it took.

    Raises what it raises, and NothingLeftToWaitFor where it would hang for ever. Tasks that are left are cancelled.
    The garbage collector rests meanwhile: millions of short-lived objects without cycles are what it is worst at.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            result = runner.run(main)
            return result, runner.get_loop().time()
    finally:
        if was_enabled:
            gc.enable()
