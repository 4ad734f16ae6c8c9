"""What the actors of the demo note down. The report judges these records and nothing else.

Replicas append theirs to a file, one JSON line each, so that a killed process loses at most its last line.
All times are CLOCK_MONOTONIC, which the processes of one machine share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec


class Joined(msgspec.Struct, frozen=True, tag=True):
    """A replica's process is attached and asks for its first version."""

    replica: str
    pid: int
    node: str
    at_s: float


class Check(msgspec.Struct, frozen=True, tag=True):
    """Digests of all the live tensors of a replica that says it runs `version`."""

    replica: str
    pid: int
    at_s: float
    moment: Literal["commit", "step"]
    version: int
    digests: dict[str, str]
    is_in_place: bool
    commit_pause_s: float = 0.0


class Span(msgspec.Struct, frozen=True, tag=True):
    """Tokens generated since the last span. `num_torn`: steps during which the live weights changed."""

    replica: str
    pid: int
    at_s: float
    version: int
    num_tokens: int
    longest_gap_s: float
    num_torn: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A replica's loop ended by an error."""

    replica: str
    pid: int
    at_s: float
    error: str


Record = Joined | Check | Span | Failed


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One version as the trainer had it when it published, and how its transfer went."""

    version: int
    step: int
    loss: float
    digests: dict[str, str]
    publish_pause_s: float
    transfer_s: float
    """From the call of publish until the version was staged for every replica (for the killed one: without it)."""
    nbytes: int
    nbytes_moved: int = 0
    num_hosts: int = 0


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """What was killed during a version, `after_s` after publish had returned.

    `was_relaying`: another host was pulling from this holder. `was_whole`: it had the whole version by then.
    """

    version: int
    host: str
    holder_pid: int
    replica_pid: int
    after_s: float
    was_relaying: bool
    was_whole: bool
    new_holder_pid: int = 0
    new_replica_pid: int = 0


class RecordWriter:
    """Appends records to the file of one process."""

    def __init__(self, folder: Path, replica: str, pid: int) -> None:
        self._file = open(folder / f"{replica}-{pid}.jsonl", "ab", buffering=0)  # noqa: SIM115

    def write(self, record: Record) -> None:
        self._file.write(msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        self._file.close()


class RecordReader:
    """Follows the files of a folder. `poll` returns what was added since; an unfinished line waits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._decoder = msgspec.json.Decoder(Record)

    def poll(self) -> list[Record]:
        """New records of all files, in the order of their time."""
        found: list[Record] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            start = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(start)
                block = file.read()
            whole = block[: block.rfind(b"\n") + 1]
            self._offsets[path] = start + len(whole)
            found += [self._decoder.decode(line) for line in whole.splitlines()]
        return sorted(found, key=lambda record: record.at_s)
