"""What the transports share about operations: deadlines, progress, and errors that say where they happened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from wsync.errors import ConfigError, ConnectError, ErrorContext, TransferTimeout, TransportError
from wsync.transports.base import Op, Read


class TimedOp(Op):
    """An operation with a deadline and a count of the bytes in place."""

    def __init__(self, peer: str, reads: list[Read], timeout_s: float) -> None:
        super().__init__(peer)
        self.started_s = time.monotonic()
        self.timeout_s = timeout_s
        self.deadline_s = self.started_s + timeout_s
        self.nbytes_total = sum(len(flat(read)) for read in reads)
        self.nbytes_done = 0

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() >= self.deadline_s

    def context(self, phase: str = "read") -> ErrorContext:
        return ErrorContext(
            phase=phase,
            peers=(self.peer,),
            elapsed_s=time.monotonic() - self.started_s,
            nbytes_done=self.nbytes_done,
            nbytes_total=self.nbytes_total,
        )

    def overdue(self) -> TransferTimeout:
        return TransferTimeout(
            f"{self.peer} has not delivered within {self.timeout_s:g} s",
            hint=f"see whether {self.peer} still runs and still receives these bytes itself",
            context=self.context(),
        )

    def lost(self, why: str, cause: BaseException | None = None) -> ConnectError:
        error = ConnectError(
            f"the connection to {self.peer} {why}" + (f" ({cause})" if cause else ""),
            hint=f"read from another holder, or connect again once {self.peer} is back",
            context=self.context(),
        )
        error.__cause__ = without_frames(cause)
        return error

    def cancelled(self) -> TransportError:
        return TransportError(f"a read from {self.peer} was cancelled", context=self.context())


def without_frames(error: BaseException | None) -> BaseException | None:
    """The error without its traceback, whose frames would keep the destination's memory mapped."""
    return error.with_traceback(None) if error is not None else None


def flat(read: Read) -> memoryview:
    """The destination as bytes. Raises `ConfigError` where nothing can be received into it."""
    view = read.into
    if view.readonly or not view.c_contiguous:
        raise ConfigError("a read needs writable, contiguous memory to receive into")
    return view if view.ndim == 1 and view.itemsize == 1 and view.format == "B" else view.cast("B")


class Deadlines:
    """One thread that calls `on_due(op)` for each operation that has not ended by its deadline."""

    def __init__(self, on_due: Callable[[TimedOp], None], name: str) -> None:
        self._on_due = on_due
        self._changed = threading.Condition()
        self._open: dict[TimedOp, None] = {}
        self._wakes_s = float("inf")
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, op: TimedOp) -> None:
        with self._changed:
            self._open[op] = None
            if op.deadline_s < self._wakes_s:
                self._changed.notify()
        op.add_done_callback(lambda: self._drop(op))

    def _drop(self, op: TimedOp) -> None:
        with self._changed:
            self._open.pop(op, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                now_s = time.monotonic()
                due = [op for op in self._open if op.deadline_s <= now_s]
                if not due:
                    self._wakes_s = min((op.deadline_s for op in self._open), default=float("inf"))
                    self._changed.wait(None if self._wakes_s == float("inf") else self._wakes_s - now_s)
                    continue
                for op in due:
                    del self._open[op]
            for op in due:
                self._on_due(op)
            del due

    def close(self) -> None:
        """After return the thread has gone. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()
