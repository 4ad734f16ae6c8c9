"""A holder's connection to the coordinator: found again after every loss, with everything reported anew.

Notices keep their order. What is said while there is no connection is not queued up: the hello of the next connection
carries the whole state instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from wsync.config import Config
from wsync.engine import wire as wires
from wsync.engine.coordinator import PURPOSE
from wsync.engine.protocol import Beat, HolderHello, Message, Progress
from wsync.engine.wire import Handler, Wire
from wsync.errors import AuthError, ConnectError, ErrorContext, PeerLost, StaleView, TransferTimeout, WsyncError

logger = logging.getLogger("wsync")

MAX_REFUSED = 3
_LOOK_S = 0.25

Resolve = Callable[[], Awaitable[tuple[str, int]]]
"""Where the coordinator is now; may start it. Raises ConnectError and others by name."""


class Upstream:
    def __init__(
        self,
        config: Config,
        token: str,
        resolve: Resolve,
        hello: Callable[[], HolderHello],
        progress: Callable[[], tuple[Progress, ...]],
        handle: Handler,
    ) -> None:
        self._config, self._token = config, token
        self._resolve, self._hello, self._progress, self._handle = resolve, hello, progress, handle
        self._wire: Wire | None = None
        self._connected = asyncio.Event()
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._last_error = "not tried yet"
        self._num_refused = 0

    async def run(self) -> None:
        """Stay connected until cancelled."""
        pause_s = 0.02
        while True:
            try:
                await self._session()
                pause_s = 0.02
            except StaleView:  # we were replaced while we did not run
                raise
            except WsyncError as exc:
                self._last_error = exc.problem
                self._num_refused += isinstance(exc, AuthError)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)

    async def _session(self) -> None:
        address = await self._resolve()
        where = f"the coordinator at {address[0]}:{address[1]}"
        wire = await wires.connect(address, self._token, purpose=PURPOSE, peer=where, timeout_s=5.0)
        # Plain tasks, not a TaskGroup: that would turn our own cancellation into the PeerLost which it causes.
        tasks = [asyncio.create_task(wire.serve(self._handle))]
        try:
            while not self._outbox.empty():
                self._outbox.get_nowait()
            await wire.call(self._hello(), timeout_s=10.0)
            self._wire = wire
            self._num_refused = 0
            self._connected.set()
            tasks += [asyncio.create_task(self._send_outbox(wire)), asyncio.create_task(self._beat(wire))]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._wire = None
            self._connected.clear()
            wire.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_outbox(self, wire: Wire) -> None:
        while True:
            await wire.notify(await self._outbox.get())

    async def _beat(self, wire: Wire) -> None:
        progress: tuple[Progress, ...] = ()
        while True:
            # While bytes are moving the coordinator must see soon where they do not.
            await asyncio.sleep(self._config.heartbeat_s / (2 if progress else 1))
            progress = self._progress()
            try:
                await wire.call(Beat(progress), timeout_s=self._config.lost_after_s)
            except TransferTimeout:
                wire.close()  # it hangs: look for it, or its successor, again
                return

    def tell(self, message: Message) -> None:
        """A notice; after a loss of connection the next hello says it."""
        self._outbox.put_nowait(message)

    async def call(self, message: Message, *, timeout_s: float) -> Message:
        """A request, repeated over reconnects until the deadline. Raises ConnectError: why there is no coordinator.

        Raises AuthError as soon as it has refused us some times; once may be a coordinator that just ends.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + _LOOK_S)):
                    await self._connected.wait()
                wire = self._wire
                if wire is not None:
                    return await wire.call(message, timeout_s=max(0.05, deadline - loop.time()))
            except PeerLost:
                pass
            except TransferTimeout:
                raise
            except TimeoutError as exc:
                if self._num_refused >= MAX_REFUSED:
                    raise AuthError(
                        self._last_error,
                        hint="WSYNC_TOKEN_FILE or WSYNC_TOKEN must have the token that the coordinator has",
                        context=ErrorContext(phase="control"),
                    ) from exc
                if loop.time() < deadline:
                    continue
                raise ConnectError(
                    f"no coordinator within {timeout_s:g} s: {self._last_error}",
                    hint="check that it runs, and WSYNC_ADDRESS where it is set: `wsync coordinator` prints it",
                    context=ErrorContext(phase="control", elapsed_s=timeout_s),
                ) from exc
            with contextlib.suppress(TimeoutError):
                await asyncio.sleep(0.01)
