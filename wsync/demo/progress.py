"""What the demo prints while it runs: a line for each thing that happens, with the tokens generated so far."""

from __future__ import annotations

import time
from typing import TextIO

from wsync.demo.records import Check, Record, Span


class Progress:
    """Counts what it observes, prints when told to or after ten silent seconds."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._start_s = self._last_s = time.monotonic()
        self._num_tokens = self._num_checks = 0
        self._newest: dict[str, int] = {}

    def say(self, text: str) -> None:
        """One line, with the time since the start."""
        self._last_s = time.monotonic()
        print(f"[{self._last_s - self._start_s:6.1f} s] {text}", file=self._out, flush=True)

    def observe(self, records: list[Record]) -> None:
        """Count them."""
        for record in records:
            if isinstance(record, Span):
                self._num_tokens += record.num_tokens
            elif isinstance(record, Check):
                self._num_checks += 1
                self._newest[record.replica] = record.version
        if time.monotonic() - self._last_s > 10:
            self.say(self.summary())

    def keep(self, names: tuple[str, ...]) -> None:
        """Only these replicas are there now."""
        self._newest = {name: version for name, version in self._newest.items() if name in names}

    def summary(self) -> str:
        """Which replica runs which version, and how much was done."""
        versions = " ".join(f"{name}:{version}" for name, version in sorted(self._newest.items())) or "none yet"
        return f"serving {versions}, {self._num_tokens} tokens, {self._num_checks} checks"
