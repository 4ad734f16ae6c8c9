"""One-sided reads: a thread that copies out of a mapped slot as its ready bytes come.

Used by `shm` (slots of another process) and `inproc`. What differs is the `Source`: how a key becomes a slot.
The thread sleeps while nothing is to be done, polls in growing steps while bytes are awaited, and never spins.
"""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np

from wsync.errors import ConnectError, RemoteFault, TransportError
from wsync.memory import Slot
from wsync.transports.base import Read
from wsync.transports.ops import TimedOp, flat

_PIECE_NBYTES = 8 << 20  # a cancel, a withdrawal or a deadline waits for one piece at most
_POLL_MIN_S = 20e-6
_POLL_MAX_S = 1e-3


class Source(Protocol):
    """Where a puller finds its slots. Called from its thread only."""

    def borrow(self, key: str) -> tuple[Slot, int] | None:
        """The slot and the version it was offered with, kept until `give_back`; None while it may still come.

        Raises `RemoteFault` for a key that is gone, `ConnectError` when the peer is.
        """
        ...

    def give_back(self, key: str) -> None: ...

    @property
    def gone_why(self) -> str:
        """Why nothing more will become ready, or nothing."""
        ...


class PullOp(TimedOp):
    """`at` bytes of the first of `reads` are in place, and all of those that were before it."""

    def __init__(self, puller: Puller, reads: list[Read], timeout_s: float) -> None:
        super().__init__(puller.peer, reads, timeout_s)
        self.puller = puller
        self.reads = [(read.key, read.offset, flat(read)) for read in reads if len(read.into)]
        self.at = 0
        self.is_copying = False


class Puller:
    """The operations on one peer and the thread that copies for them, oldest first but not waiting for the oldest."""

    def __init__(self, peer: str, source: Source, name: str) -> None:
        self.peer = peer
        self._source = source
        self._changed = threading.Condition()
        self._ops: dict[PullOp, None] = {}
        self._closed_why = ""
        self._has_news = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, reads: list[Read], timeout_s: float) -> PullOp:
        op = PullOp(self, reads, timeout_s)
        with self._changed:
            error = op.lost(self._closed_why) if self._closed_why else None
            if error is None and op.reads:
                self._ops[op] = None
                self.wake()
                return op
        op.finish(error)
        return op

    def wake(self) -> None:
        """Something may go on now; do not sleep it out."""
        with self._changed:
            self._has_news = True
            self._changed.notify_all()

    def cancel(self, op: PullOp) -> None:
        """After return the operation has ended and its memory is left alone."""
        with self._changed:
            self._ops.pop(op, None)
            while op.is_copying and threading.current_thread() is not self._thread:
                self._changed.wait()
            op.reads.clear()
        op.finish(op.cancelled())

    def close(self, why: str) -> None:
        """After return all operations have ended and the thread has gone. Idempotent."""
        with self._changed:
            self._closed_why = self._closed_why or why
            self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        delay_s = _POLL_MIN_S
        while self._wait(delay_s):
            delay_s = _POLL_MIN_S if self._pass() else min(2 * delay_s, _POLL_MAX_S)
        with self._changed:
            left = list(self._ops)
            self._ops.clear()
        for op in left:
            op.reads.clear()
            op.finish(op.lost(self._closed_why))

    def _wait(self, delay_s: float) -> bool:
        """Until there is something to do, or to look at again. False when closed."""
        with self._changed:
            if self._ops and not self._has_news:
                self._changed.wait(delay_s)
            while not self._ops and not self._closed_why:
                self._changed.wait()
            self._has_news = False
            return not self._closed_why

    def _pass(self) -> bool:
        """One piece of every operation. Whether any got on."""
        with self._changed:
            ops = list(self._ops)
        has_moved = False
        for op in ops:
            try:
                has_moved = self._advance(op) or has_moved
            except TransportError as error:
                self._end(op, error)
            except ValueError as exc:  # the caller has released the memory
                self._end(op, TransportError(f"a read from {self.peer} cannot be copied: {exc}", context=op.context()))
        return has_moved

    def _advance(self, op: PullOp) -> bool:
        with self._changed:
            if op not in self._ops or self._closed_why:
                return False
            if op.is_overdue:
                raise op.overdue()
            op.is_copying = True
            key, offset, into = op.reads[0]
        try:
            copied = self._copy(op, key, offset, into)
        finally:
            with self._changed:
                op.is_copying = False
                self._changed.notify_all()
        if copied:
            self._account(op, copied)
        return copied > 0

    def _copy(self, op: PullOp, key: str, offset: int, into: memoryview) -> int:
        """Copy what is ready, at most a piece. The number of bytes."""
        try:
            borrowed = self._source.borrow(key)
        except (RemoteFault, ConnectError) as exc:
            raise type(exc)(exc.problem, hint=exc.hint, context=op.context()) from None
        if borrowed is None:
            return 0
        slot, version = borrowed
        try:
            if offset < 0 or offset + len(into) > slot.nbytes:
                raise RemoteFault(
                    f"[{offset}, {offset + len(into)}) is not inside {key!r} of {slot.nbytes} bytes",
                    context=op.context(),
                )
            _check_version(op, key, slot, version)
            nbytes = _ready_nbytes(slot, offset + op.at, len(into) - op.at)
            if nbytes == 0:
                if self._source.gone_why:
                    raise op.lost(self._source.gone_why)
                return 0
            start = offset + op.at
            # numpy copies without the GIL, a slice assignment would not.
            np.copyto(np.frombuffer(into, np.uint8, nbytes, op.at), np.frombuffer(slot.data, np.uint8, nbytes, start))
            _check_version(op, key, slot, version)
            return nbytes
        finally:
            self._source.give_back(key)

    def _account(self, op: PullOp, nbytes: int) -> None:
        with self._changed:
            if op not in self._ops:
                return
            op.at += nbytes
            op.nbytes_done += nbytes
            if op.at == len(op.reads[0][2]):
                op.reads.pop(0)
                op.at = 0
            is_over = not op.reads
        if is_over:
            self._end(op, None)

    def _end(self, op: PullOp, error: TransportError | None) -> None:
        with self._changed:
            if op not in self._ops:
                return
            del self._ops[op]
            op.reads.clear()
        op.finish(error)


def _check_version(op: PullOp, key: str, slot: Slot, version: int) -> None:
    if slot.version != version:
        raise RemoteFault(
            f"the slot of {key!r} has gone to another version while it was read",
            hint="read a newer version",
            context=op.context(),
        )


def _ready_nbytes(slot: Slot, offset: int, nbytes: int) -> int:
    """How many bytes from `offset` are ready without a gap, at most a piece."""
    nbytes = min(nbytes, _PIECE_NBYTES)
    chunk = offset // slot.chunk_nbytes
    end = offset
    while end < offset + nbytes and slot.ready[chunk]:
        chunk += 1
        end = chunk * slot.chunk_nbytes
    return min(end - offset, nbytes)
