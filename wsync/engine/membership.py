"""Who takes part: holders and their members, as numbered immutable views. Pure."""

from __future__ import annotations

from functools import cached_property

import msgspec

from wsync.engine.protocol import HolderHello, Source
from wsync.topology import Topology


class HolderRecord(msgspec.Struct, frozen=True):
    """One holder process. A restarted one has the same id and another incarnation."""

    holder_id: str
    host: str
    incarnation: str
    pid: int
    endpoints: dict[str, bytes]
    topology: Topology | None = None
    """What it knows of its host."""

    @classmethod
    def of(cls, hello: HolderHello) -> HolderRecord:
        return cls(hello.holder_id, hello.host, hello.incarnation, hello.pid, hello.endpoints, hello.topology)

    def source(self) -> Source:
        return Source(self.holder_id, self.host, self.endpoints)


class View(msgspec.Struct, frozen=True, dict=True):
    """A numbered membership: holders in the order in which they joined."""

    number: int = 0
    holders: tuple[HolderRecord, ...] = ()

    def holder(self, holder_id: str) -> HolderRecord | None:
        return self._by_id.get(holder_id)

    @cached_property
    def _by_id(self) -> dict[str, HolderRecord]:
        return {record.holder_id: record for record in self.holders}

    def joined(self, record: HolderRecord) -> View:
        """The view after `record` joined, in place of a former incarnation if there was one."""
        others = tuple(h for h in self.holders if h.holder_id != record.holder_id)
        return View(self.number + 1, (*others, record))

    def described(self, holder_id: str, topology: Topology) -> View:
        """The view in which that holder's host is known better."""
        records = (
            msgspec.structs.replace(record, topology=topology) if record.holder_id == holder_id else record
            for record in self.holders
        )
        return View(self.number + 1, tuple(records))

    def left(self, holder_id: str) -> View:
        return View(self.number + 1, tuple(h for h in self.holders if h.holder_id != holder_id))
