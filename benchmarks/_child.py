"""Processes of a benchmark: one object per spawned process, its methods called over a pipe.

A child ends when its parent does, whatever ends it: the pipe then closes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

SPAWN = multiprocessing.get_context("spawn")
TIMEOUT_S = 300.0


class Child:
    """A process that builds `factory(*args)` and then calls its methods, one at a time."""

    def __init__(self, factory: Callable[..., object], *args: object, cores: Sequence[int] = ()) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_serve, args=(theirs, factory, args, tuple(cores)), daemon=True)
        self._process.start()
        theirs.close()
        self._is_built = False

    def send(self, method: str, *args: object) -> None:
        """Start a call; `result` waits for it."""
        self._pipe.send((method, args))

    def result(self, timeout_s: float = TIMEOUT_S) -> Any:
        """What the oldest pending call returned. Raises what it raised, as text."""
        if not self._is_built:
            self._is_built = True
            self._receive(timeout_s)
        return self._receive(timeout_s)

    def call(self, method: str, *args: object, timeout_s: float = TIMEOUT_S) -> Any:
        self.send(method, *args)
        return self.result(timeout_s)

    def _receive(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"process {self._process.pid} has not answered within {timeout_s} s")
        try:
            is_ok, answer = self._pipe.recv()
        except EOFError:
            self._process.join(5)
            raise RuntimeError(f"a benchmark process ended with {self._process.exitcode}") from None
        if not is_ok:
            raise RuntimeError(f"in a benchmark process:\n{answer}")
        return answer

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the process: by closing its pipe, and if that does not do, by a signal."""
        self._pipe.close()
        self._process.join(timeout_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def call_all(children: Sequence[Child], method: str, *args: object) -> list[Any]:
    """Call a method in all processes at once and wait for all."""
    for child in children:
        child.send(method, *args)
    return [child.result() for child in children]


def stop_all(children: Sequence[Child]) -> None:
    """End all processes, the first ones first."""
    for child in children:
        child.stop()


def _serve(pipe: Connection, factory: Callable[..., object], args: tuple[object, ...], cores: tuple[int, ...]) -> None:
    if cores:
        os.sched_setaffinity(0, cores)
    target: object = None
    try:
        target = factory(*args)
        pipe.send((True, None))
        while True:
            method, arguments = pipe.recv()
            pipe.send((True, getattr(target, method)(*arguments)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send((False, traceback.format_exc()))
    finally:
        if close := getattr(target, "close", None):
            close()
