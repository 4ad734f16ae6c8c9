"""What the checks of the conformance kit are made of: memory with canaries, pairs of holders, expectations."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from wsync.auth import new_token
from wsync.errors import TransportError
from wsync.transports.base import Op, Peer, Read
from wsync.transports.testing_child import Make, filled_slot, seeded

CHUNK = 64 << 10
NBYTES = 16 * CHUNK - 1000  # the last chunk is short
PROMPT_S = 1.0  # for what must happen at once, on a busy machine
PATIENT_S = 20.0


class Target:
    """Memory to read into, every byte of which differs from what is expected there."""

    def __init__(self, expected: bytes) -> None:
        self._expected = np.frombuffer(expected, np.uint8)
        self._canary = ~self._expected
        self._memory = self._canary.copy()
        self.view = memoryview(self._memory.data)

    def check_right(self) -> None:
        wrong = np.flatnonzero(self._memory != self._expected)
        assert not len(wrong), f"{len(wrong)} bytes are wrong, the first at {wrong[0]}"

    def reset(self) -> None:
        self._memory[:] = self._canary

    def check_untouched(self) -> None:
        assert (self._memory == self._canary).all(), "memory was written after the operation had ended"


class Pair:
    """A holder with one slot, all of it ready and offered as `k` unless told otherwise, and a reader of it."""

    def __init__(self, make: Make, stack: contextlib.ExitStack, *, num_ready: int = -1, nbytes: int = NBYTES) -> None:
        self.token = new_token()
        self.slot = filled_slot(nbytes, CHUNK, seed=1)
        stack.callback(self.slot.close)
        self.holder, self.reader = make(self.token), make(self.token)
        stack.callback(self.holder.close)
        stack.callback(self.reader.close)
        self.slot.mark_ready(range(self.slot.num_chunks if num_ready < 0 else num_ready))
        self.holder.offer("k", self.slot, 1)
        self.source = seeded(nbytes, 1)
        self.peer = self.connect()

    def connect(self) -> Peer:
        return self.reader.connect(self.holder.export(), peer="holder", timeout_s=5.0)

    def post(self, target: Target, *, key: str = "k", offset: int = 0, timeout_s: float = PATIENT_S) -> Op:
        return self.reader.post_read(self.peer, [Read(key, offset, target.view)], timeout_s=timeout_s)

    def whole(self) -> Target:
        return Target(self.source)

    def check_usable(self) -> None:
        """One ready chunk can be read."""
        target = Target(self.source[:CHUNK])
        self.post(target).wait(PATIENT_S)
        target.check_right()


def expect(kind: type[TransportError], op: Op, peer: str, *, within_s: float) -> None:
    """The operation ends with an error of this kind that names the peer, and in time."""
    started_s = time.monotonic()
    with raises(kind, peer):
        op.wait(within_s)
    took_s = time.monotonic() - started_s
    assert op.is_done, f"the operation has not ended after {took_s:.3f} s"


@contextlib.contextmanager
def raises(kind: type[TransportError], peer: str) -> Iterator[None]:
    """Like the one of pytest, without pytest."""
    text = None
    try:
        yield
    except kind as exc:
        text = str(exc)
    assert text is not None, f"no {kind.__name__} was raised"
    assert peer in text, f"{text!r} does not name {peer!r}"


def eventually(is_so: Callable[[], bool], what: str | Callable[[], str], timeout_s: float = 5.0) -> None:
    """Poll until it is so. Raises `AssertionError` at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, what if isinstance(what, str) else what()
        time.sleep(0.002)


def handles() -> tuple[int, int, int]:
    """Open descriptors, mapped slots and threads of wsync in this process."""
    num_fds = len(os.listdir("/proc/self/fd"))
    with open("/proc/self/maps") as lines:
        num_maps = sum("memfd:wsync" in line for line in lines)
    return num_fds, num_maps, sum(thread.name.startswith("wsync-") for thread in threading.enumerate())
