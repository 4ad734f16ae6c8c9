"""No process outlives a benchmark: all that it starts inherit a mark in their environment."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import uuid
from pathlib import Path

_VARIABLE = "WSYNC_BENCH_RUN"
GONE_TIMEOUT_S = 20.0


def mark() -> None:
    """Mark this process's future children and theirs."""
    os.environ[_VARIABLE] = uuid.uuid4().hex


def marked() -> set[int]:
    """Processes that descend from this one, by their mark; without this one and multiprocessing's own."""
    wanted = f"{_VARIABLE}={os.environ.get(_VARIABLE, 'none')}".encode()
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                pid = int(folder.name)
                if "resource_tracker" not in _command(pid):
                    found.add(pid)
        except OSError:  # it has ended, or is not ours to see
            continue
    return found - {os.getpid()}


def wait_until_gone(others: set[int], timeout_s: float = GONE_TIMEOUT_S) -> None:
    """Wait until no marked process is left but `others`. Those that do not leave are ended, by their ids."""
    deadline = time.monotonic() + timeout_s
    while left := marked() - others:
        if time.monotonic() > deadline:
            for pid in left:
                sys.stderr.write(f"ended a process that had not left within {timeout_s} s: {_command(pid)}\n")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
