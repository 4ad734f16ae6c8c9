"""The scenario on a cluster that is up: publish, kill, recover, grow, shrink.

A node for the trainer and two for the replicas, on one machine. wsync tells hosts apart by Ray node id, so the
bytes cross between three holders over tcp as they would between three machines.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import wsync
from wsync.demo.fleet import POLL_S, Fleet
from wsync.demo.progress import Progress
from wsync.demo.records import Kill, Snapshot
from wsync.demo.replica import ReplicaTask
from wsync.demo.report import Evidence
from wsync.demo.scenario import Scenario
from wsync.demo.trainer import Target, Trainer
from wsync.errors import ErrorContext, TransferTimeout
from wsync.integrations.ray import holders
from wsync.status import VersionStatus


class Demo:
    """One run on a cluster that is up; fills `evidence` as it goes, so that a failure leaves what was seen."""

    def __init__(
        self, scenario: Scenario, nodes: list[str], folder: Path, evidence: Evidence, progress: Progress
    ) -> None:
        self._scenario, self._evidence, self._progress = scenario, evidence, progress
        self._deadline_s = time.monotonic() + scenario.timeout_s
        self._config = wsync.Config(job=f"demo-{os.getpid()}", chunk_nbytes=1 << 20)
        self._trainer_node = nodes[0]
        strategy = NodeAffinitySchedulingStrategy(node_id=nodes[0], soft=False)
        actor: Any = ray.remote(Trainer).options(num_cpus=0, max_concurrency=4, scheduling_strategy=strategy)
        self._trainer = actor.remote(scenario.model, scenario.seed, self._config)
        prompts = ray.get(self._trainer.prompts.remote(), timeout=scenario.timeout_s)
        task = ReplicaTask(
            name="",
            model_name=scenario.model,
            seed=scenario.seed,
            config=self._config,
            prompts=tuple(tuple(prompt) for prompt in prompts),
            records_dir=str(folder / "records"),
            join_timeout_s=scenario.timeout_s,
            think_s=scenario.think_s,
        )
        self.fleet = Fleet(nodes[1:], task, self._deadline_s)
        self.fleet.observe = progress.observe
        evidence.records = self.fleet.records

    def play(self) -> None:
        """All the versions, one after the other. Raises the errors of wsync and Ray."""
        scenario = self._scenario
        self._progress.say(f"starting {scenario.sizes[0]} replicas on the other two nodes, with NaN for weights")
        self.fleet.grow(scenario.sizes[0])
        for number in range(1, scenario.num_versions + 1):
            if number == scenario.grow_at:
                self._grow()
            elif number == scenario.shrink_at:
                self._progress.say(f"shrinking to {scenario.sizes[2]} replicas")
                self.fleet.shrink(scenario.sizes[2])
                self._progress.keep(self.fleet.names)
            self._one_version(self._targets() if number == scenario.kill_at else [])
        self.fleet.shrink(0)
        self._await(self._trainer.close.remote())

    def _grow(self) -> None:
        size, version = self._scenario.sizes[1], self._evidence.snapshots[-1].version
        self._progress.say(f"growing to {size} replicas")
        self.fleet.grow(size)
        self.fleet.wait(lambda: self.fleet.behind(version), "growing", version)

    def _one_version(self, targets: list[Target]) -> None:
        """Publish; wait until the whole fleet serves the version; let it serve for a while."""
        timeout_s = max(1.0, self._deadline_s - time.monotonic())
        num_replicas = len(self.fleet.names) - bool(targets)
        snapshot: Snapshot
        kill: Kill | None
        snapshot, kill = self._await(self._trainer.publish.remote(num_replicas, targets, timeout_s))
        version = snapshot.version
        self._evidence.snapshots.append(snapshot)
        self._evidence.fleets[version] = self.fleet.names
        self._progress.say(
            f"version {version} of {self._scenario.num_versions}: loss {snapshot.loss:.2f}, staged for "
            f"{num_replicas} replicas in {snapshot.transfer_s:.2f} s"
        )
        if kill is not None:
            self._evidence.kills.append(kill)
            self._progress.say(f"killed holder {kill.holder_pid} and replica {kill.replica_pid} meanwhile")
        self.fleet.wait(lambda: self.fleet.behind(version), "committing", version)
        if kill is not None:
            self._evidence.kills[-1] = self._recover(kill)
        serve_until_s = time.monotonic() + self._scenario.serve_s
        self.fleet.wait(lambda: ["time"] if time.monotonic() < serve_until_s else [], "serving", version)
        status: VersionStatus = self._await(self._trainer.wait_committed.remote(len(self.fleet.names), timeout_s))
        nbytes_moved = sum(holder.nbytes_received for holder in status.holders)
        self._evidence.snapshots[-1] = msgspec.structs.replace(
            snapshot, nbytes_moved=nbytes_moved, num_hosts=len(status.holders)
        )
        self._progress.say(f"version {version}: committed by all {len(self.fleet.names)} replicas")

    def _targets(self) -> list[Target]:
        """Every receiving host's holder, each with a replica of another host."""
        replicas = {place.node: place.pid for name, place in self.fleet.places().items() if name in self.fleet.names}
        return [
            Target(holder.node_id, holder.pid, next(pid for node, pid in replicas.items() if node != holder.node_id))
            for holder in holders(self._config)
            if holder.node_id != self._trainer_node
        ]

    def _recover(self, kill: Kill) -> Kill:
        """Wait for the new processes in the place of the killed ones."""
        found: dict[str, int] = {}
        name = next(r.replica for r in self._evidence.records if r.pid == kill.replica_pid)

        def missing() -> list[str]:
            found["replica"] = self.fleet.places()[name].pid
            found["holder"] = next((p.pid for p in holders(self._config) if p.node_id == kill.host), kill.holder_pid)
            return [part for part in found if found[part] in (kill.replica_pid, kill.holder_pid)]

        self.fleet.wait(missing, "restarting", kill.version)
        self._progress.say(f"both are back: holder {found['holder']} and replica {found['replica']}")
        return msgspec.structs.replace(kill, new_holder_pid=found["holder"], new_replica_pid=found["replica"])

    def _await(self, reference: Any) -> Any:
        """The result of a call to the trainer; the fleet is watched meanwhile."""
        while not ray.wait([reference], timeout=POLL_S)[0]:
            self.fleet.poll()
            if time.monotonic() > self._deadline_s:
                context = ErrorContext(phase="demo", peers=("the trainer",), elapsed_s=self._scenario.timeout_s)
                raise TransferTimeout("the demo ran out of time", hint="run it with --verbose", context=context)
        return ray.get(reference)
