"""A holder in a process of its own, for checks that kill, stop or restart one; driven by lines on its stdin.

`ChildHolder` starts one and speaks to it. The token goes over stdin, because arguments are visible to everybody.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO, cast

import numpy as np

from wsync.errors import WsyncError
from wsync.memory import Slot
from wsync.transports.base import Op, Read, Transport

Make = Callable[[str], Transport]


def load(factory: str) -> Make:
    """The function behind `module:name`, which makes a transport from a token."""
    module, _, name = factory.partition(":")
    return cast(Make, getattr(importlib.import_module(module), name))


def seeded(nbytes: int, seed: int) -> bytes:
    """The bytes of a slot, the same in every process."""
    return np.random.default_rng(seed).bytes(nbytes)


def filled_slot(nbytes: int, chunk_nbytes: int, seed: int, version: int = 1) -> Slot:
    """A slot with seeded bytes of which no chunk is ready."""
    slot = Slot.reserve(nbytes, chunk_nbytes)
    slot.begin(version, channel_key=1)
    slot.data[:] = seeded(nbytes, seed)
    return slot


class ChildHolder:
    """A child with one slot. `endpoint` is what it exported; every command waits for the child's answer."""

    def __init__(self, factory: str, token: str, nbytes: int, chunk_nbytes: int, seed: int) -> None:
        command = [sys.executable, "-m", "wsync.transports.testing", "serve", factory]
        self.process = subprocess.Popen(
            [*command, str(nbytes), str(chunk_nbytes), str(seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._received = b""
        try:
            self.endpoint = bytes.fromhex(self.ask(token))
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, line: str, timeout_s: float = 30.0) -> str:
        """Send a command and return the child's answer. Raises `AssertionError` when it refuses or does not answer."""
        stdin, stdout = cast(IO[bytes], self.process.stdin), cast(IO[bytes], self.process.stdout)
        stdin.write(line.encode() + b"\n")
        stdin.flush()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            is_there, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            block = os.read(stdout.fileno(), 65536) if is_there else b""
            if not block:
                raise AssertionError(f"the child holder did not answer {line.split(' ')[0]!r}")
            self._received += block
        answer, self._received = self._received.split(b"\n", 1)
        status, _, text = answer.decode().partition(" ")
        if status != "ok":
            raise AssertionError(f"the child holder refused {line!r}: {text}")
        return text

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        """Send SIGSTOP; after return none of its threads runs, which the signal alone does not promise."""
        self.signal(signal.SIGSTOP)
        deadline = time.monotonic() + 30.0
        while any(state not in "tT" for state in self._thread_states()):
            if time.monotonic() > deadline:
                raise AssertionError("the child holder does not stop")
            time.sleep(0.001)

    def _thread_states(self) -> list[str]:
        folder = f"/proc/{self.pid}/task"
        states = []
        for thread in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError), open(f"{folder}/{thread}/stat") as stat:
                states.append(stat.read().rpartition(")")[2].split()[0])
        return states

    def close(self) -> None:
        """Kill it, whatever state it is in."""
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                cast(IO[bytes], stream).close()
        self.process.wait()

    def __enter__(self) -> ChildHolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Commands:
    """What the child does for each line. Methods are commands, their arguments the words of the line."""

    def __init__(self, transport: Transport, slot: Slot) -> None:
        self._transport = transport
        self._slot = slot
        self._into = memoryview(b"")
        self._op: Op | None = None

    def ready(self, first: str, last: str) -> str:
        """Chunks `[first, last)` are there."""
        self._slot.mark_ready(range(int(first), int(last)))
        return ""

    def offer(self, key: str) -> str:
        self._transport.offer(key, self._slot, self._slot.version)
        return ""

    def withdraw(self, key: str, timeout_s: str) -> str:
        self._transport.withdraw(key, float(timeout_s))
        return ""

    def replace(self, key: str, seed: str, new_key: str) -> str:
        """Put the next version into the same slot, whole."""
        self._transport.withdraw(key, 5.0)
        self._slot.begin(self._slot.version + 1, channel_key=1)
        self._slot.data[:] = seeded(self._slot.nbytes, int(seed))
        self._slot.mark_ready(range(self._slot.num_chunks))
        return self.offer(new_key)

    def read(self, endpoint: str, key: str, nbytes: str, timeout_s: str) -> str:
        """Start to read from the parent; a first byte is there when this returns, so the key is in use."""
        peer = self._transport.connect(bytes.fromhex(endpoint), peer="parent", timeout_s=5.0)
        self._transport.post_read(peer, [Read(key, 0, memoryview(bytearray(1)))], timeout_s=10.0).wait(10.0)
        self._into = memoryview(bytearray(int(nbytes)))
        self._op = self._transport.post_read(peer, [Read(key, 0, self._into)], timeout_s=float(timeout_s))
        return ""

    def outcome(self, seed: str) -> str:
        """How the read ended: `right`, `wrong`, or the error."""
        assert self._op is not None
        try:
            self._op.wait(30.0)
        except WsyncError as exc:
            return type(exc).__name__
        return "right" if self._into == seeded(len(self._into), int(seed)) else "wrong"


def serve(arguments: Sequence[str]) -> int:
    """The child's main: FACTORY NBYTES CHUNK_NBYTES SEED, the token as first line of stdin, then commands."""
    factory, nbytes, chunk_nbytes, seed = arguments
    transport = load(factory)(sys.stdin.readline().strip())
    slot = filled_slot(int(nbytes), int(chunk_nbytes), int(seed))
    commands = _Commands(transport, slot)
    print("ok", transport.export().hex(), flush=True)
    try:
        for line in sys.stdin:
            name, *words = line.split()
            if name == "exit":
                break
            try:
                print("ok", getattr(commands, name)(*words), flush=True)
            except WsyncError as exc:
                print("error", type(exc).__name__, exc.problem, flush=True)
    finally:
        transport.close()
    print("ok", flush=True)
    return 0
