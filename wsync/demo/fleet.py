"""The replicas of the demo as seen from the driver: start, stop, and what they have written down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from wsync.demo.records import Check, Failed, Joined, Record, RecordReader, Span
from wsync.demo.replica import ReplicaTask, ServingReplica
from wsync.errors import ErrorContext, PeerLost, TransferTimeout

POLL_S = 0.1
STOP_S = 60.0
MIN_TOKENS = 4


class Fleet:
    """Replicas by name, spread in turn over `nodes`. One process uses it, from one thread."""

    def __init__(self, nodes: list[str], task: ReplicaTask, deadline_s: float) -> None:
        self.records: list[Record] = []
        self.observe: Callable[[list[Record]], None] = lambda records: None
        self._nodes = nodes
        self._task = task
        self._deadline_s = deadline_s
        self._reader = RecordReader(Path(task.records_dir))
        self._actors: dict[str, Any] = {}  # ray.actor.ActorHandle
        self._num_started = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The replicas that should be serving."""
        return tuple(self._actors)

    def grow(self, num_replicas: int) -> None:
        """Start replicas until there are so many; returns when all have joined, before they have a version."""
        while len(self._actors) < num_replicas:
            name = f"r{self._num_started}"
            node = self._nodes[self._num_started % len(self._nodes)]
            strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            actor = ray.remote(ServingReplica).options(num_cpus=0, max_restarts=-1, scheduling_strategy=strategy)
            self._actors[name] = actor.remote(msgspec.structs.replace(self._task, name=name))
            self._num_started += 1
        self.wait(lambda: [name for name in self.names if name not in self.places()], "joining")

    def shrink(self, num_replicas: int) -> None:
        """Stop the oldest replicas in good order until so many are left."""
        while len(self._actors) > num_replicas:
            name, actor = next(iter(self._actors.items()))
            has_ended = ray.get(actor.stop.remote(STOP_S), timeout=STOP_S + 10)
            ray.kill(actor, no_restart=True)
            del self._actors[name]
            self.poll()
            if not has_ended:
                raise PeerLost(f"replica {name} did not stop", context=ErrorContext(phase="stopping", elapsed_s=STOP_S))

    def poll(self) -> None:
        """Read what the replicas have written since."""
        fresh = self._reader.poll()
        self.records += fresh
        self.observe(fresh)

    def places(self) -> dict[str, Joined]:
        """The newest process of every replica that has ever joined."""
        return {record.replica: record for record in self.records if isinstance(record, Joined)}

    def behind(self, version: int) -> list[str]:
        """Replicas that have not yet committed `version` or generated a few tokens with it."""
        checked = {r.replica for r in self.records if isinstance(r, Check) and r.version == version}
        num_tokens = dict.fromkeys(self.names, 0)
        for record in self.records:
            if isinstance(record, Span) and record.version == version and record.replica in num_tokens:
                num_tokens[record.replica] += record.num_tokens
        return [name for name, num in num_tokens.items() if num < MIN_TOKENS or name not in checked]

    def wait(self, missing: Callable[[], Iterable[str]], phase: str, version: int = 0) -> None:
        """Poll until nobody is missing. Raises `TransferTimeout` with their names, `PeerLost` when one has failed."""
        start_s = time.monotonic()
        while True:
            self.poll()
            self._raise_failures(phase, version)
            names = tuple(missing())
            if not names:
                return
            if time.monotonic() > self._deadline_s:
                context = ErrorContext(version=version, phase=phase, peers=names, elapsed_s=time.monotonic() - start_s)
                raise TransferTimeout("the demo waited in vain", hint="run it with --verbose", context=context)
            time.sleep(POLL_S)

    def _raise_failures(self, phase: str, version: int) -> None:
        failed = [record for record in self.records if isinstance(record, Failed)]
        if failed:
            context = ErrorContext(version=version, phase=phase, peers=tuple(record.replica for record in failed))
            raise PeerLost("a replica has stopped serving", hint=failed[0].error, context=context)
