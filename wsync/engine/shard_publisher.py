"""A trainer rank's side of a sharded channel: each rank publishes the lanes that the plan gives it.

Ranks speak with the coordinator, never with each other: no collective runs, and none can be out of order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from wsync.config import Config
from wsync.engine import protocol
from wsync.engine.link import Closing
from wsync.engine.publisher import Publisher
from wsync.engine.session import checked_channel, default_member_id
from wsync.engine.shard_link import Locals, ShardLink
from wsync.engine.shards import lane_channel
from wsync.errors import (
    ChannelError,
    CommitError,
    ConfigError,
    ErrorContext,
    MembershipError,
    PublishError,
    TransferTimeout,
)
from wsync.holding import Holding
from wsync.status import ReplicaPhase, VersionStatus

_POLL_S = 0.02
_GRACE_S = 2.5
"""For the holder's answer, which asks the coordinator."""


def check_casts(holding: Holding) -> None:
    """Raise ConfigError for a local that would be cast otherwise than from one floating type to another."""
    for piece in holding.pieces:
        spec, local = holding.tensors[piece.tensor], holding.locals[piece.place.local]
        if spec.dtype != local.dtype and not ("float" in spec.dtype and "float" in local.dtype):
            raise ConfigError(
                f"'{spec.name}' lies in {local.dtype} and would be cast to {spec.dtype}",
                hint="publish it as it is: only floating types are cast",
            )


class ShardPublisher(Closing):
    """Rank `rank` of the `num_ranks` that together publish a channel.

    `holding` says what this rank has of which tensors, `locals_` has the live memory of it: `read_state` of
    `wsync.integrations.sharded` makes both from a module with DTensors, FSDP, ZeRO-3 or Megatron parameters. They are
    read at every `publish`; where a framework replaces tensor objects, pass a function that returns the present ones.

    After the constructor has returned the coordinator knows this rank. The plan is made when all ranks and a worker
    have joined. Raises ChannelError when the rank is published already or the ranks are counted differently.
    """

    def __init__(
        self,
        channel: str,
        holding: Holding,
        locals_: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        *,
        rank: int,
        num_ranks: int,
        member_id: str = "",
        config: Config | None = None,
    ) -> None:
        self.channel = checked_channel(channel)
        self.config = config or Config()
        if not 0 <= rank < num_ranks:
            raise ConfigError(f"rank {rank} is none of {num_ranks} ranks")
        check_casts(holding)
        self._locals = Locals(holding, locals_)
        self.rank, self.num_ranks = rank, num_ranks
        self.member_id = member_id or f"{default_member_id('trainer')}-{rank}"
        self._plan_id: str | None = None
        self._all_lanes: tuple[tuple[str, int], ...] = ()
        self._serial = 0
        self._publishers: dict[str, Publisher] = {}
        self._is_closed = False
        self._link = ShardLink(self.channel, self.member_id, self.config, holding, rank=rank, num_ranks=num_ranks)

    def publish(self, step: int, *, timeout_s: float = 60.0) -> ShardPublication:
        """Snapshot this rank's lanes as a part of the next version. When this returns, training may go on.

        The version exists when every rank has published it with the same `step`; ranks may call at different times.
        A second version waits here until the first one has left this rank. Raises MembershipError naming the ranks
        that have not joined by the time-out, PublishError when the ranks disagree about the step: the version is then
        dropped, and the next one can be published.
        """
        if self._is_closed:
            raise PublishError(f"the publisher of '{self.channel}' is closed", hint="create a new one")
        started = time.monotonic()
        deadline = started + timeout_s
        self._locals.refresh()
        if self._plan_id is None:
            self._follow(self._link.lanes(timeout_s))
        self._serial += 1
        opened = self._link.ask(
            lambda left: protocol.OpenRound(
                self.channel, self.rank, self._link.incarnation, self._serial, step, self._plan_id or "", left
            ),
            timeout_s=max(0.0, deadline - time.monotonic()),
        )
        assert isinstance(opened, protocol.RoundOpened)
        if opened.plan_id != self._plan_id:
            self._follow(self._link.lanes(max(0.0, deadline - time.monotonic()), plan_id=opened.plan_id))
        self._link.highest = max(self._link.highest, opened.version)
        nbytes = 0
        for publisher in self._publishers.values():
            left = max(0.0, deadline - time.monotonic())
            nbytes += publisher.publish(step, timeout_s=left, version=opened.version).nbytes
        return ShardPublication(self, opened.version, step, time.monotonic() - started, nbytes, self._all_lanes)

    def _follow(self, planned: protocol.LanesPlanned) -> None:
        """Have a publisher for each lane of the plan, and no other."""
        views = self._locals.views(planned.mine)
        self._plan_id = None  # until all of it is there
        for lane_id in [lane_id for lane_id in self._publishers if lane_id not in views]:
            self._publishers.pop(lane_id).close()
        self._locals.follow(views)
        for lane_id, (lane, fragments, _) in views.items():
            if lane_id not in self._publishers:
                self._publishers[lane_id] = Publisher(
                    lane_channel(self.channel, lane_id),
                    fragments,
                    on_busy="wait",
                    wire_dtypes={spec.name: spec.dtype for spec in lane.manifest.tensors},
                    member_id=self.member_id,
                    config=self.config,
                )
        self._plan_id, self._all_lanes = planned.plan_id, planned.all_lanes

    def close(self) -> None:
        """Leave. What is packed goes on to the workers. Idempotent."""
        self._is_closed = True
        for publisher in self._publishers.values():
            publisher.close()
        self._link.close()


class ShardPublication:
    """One rank's part of a version. `nbytes` are those of this rank, `pause_s` is how long `publish` held it."""

    def __init__(
        self,
        publisher: ShardPublisher,
        version: int,
        step: int,
        pause_s: float,
        nbytes: int,
        lanes: tuple[tuple[str, int], ...],
    ) -> None:
        self.version, self.step, self.pause_s, self.nbytes = version, step, pause_s, nbytes
        self._publisher, self._lanes = publisher, lanes

    def wait_committed(self, timeout_s: float = 60.0) -> None:
        """Until every rank has published the version, and every worker runs it or a newer one.

        Raises PublishError when it was dropped, MembershipError naming the ranks that have not published it or when
        there is no worker, TransferTimeout naming the workers that lack it, CommitError when one could not install it.
        """
        deadline = time.monotonic() + timeout_s
        link, channel = self._publisher._link, self._publisher.channel
        context = ErrorContext(channel=channel, version=self.version, phase="committed")
        report = link.ask(
            lambda left: protocol.AwaitRound(channel, self.version, left), timeout_s=timeout_s, grace_s=_GRACE_S
        )
        assert isinstance(report, protocol.RoundReport)
        if report.error:
            raise PublishError(f"version {self.version} was dropped: {report.error}", context=context)
        if report.missing_ranks:
            raise MembershipError(
                f"trainer ranks {list(report.missing_ranks)} have not published version {self.version}",
                hint="every rank must call publish",
                context=context,
            )
        lanes = [lane_id for lane_id, _ in self._lanes if lane_id not in report.deserted]
        if not lanes:
            raise MembershipError(f"nobody receives version {self.version}", hint="start workers", context=context)
        for lane_id in lanes:
            status = self._await_lane(lane_id, deadline)
            replicas = status.replicas if status is not None else ()
            failed = [f"{r.member_id}: {r.error}" for r in replicas if r.phase is ReplicaPhase.FAILED]
            if failed:
                raise CommitError(
                    f"version {self.version} could not be installed: {'; '.join(failed)}", context=context
                )
            lacking = [r for r in replicas if r.phase is not ReplicaPhase.COMMITTED]
            if not replicas or lacking:
                self._check_packed(context)
                there = status.describe_replicas() if status is not None else "unknown"
                raise TransferTimeout(
                    f"version {self.version} is not committed everywhere: {there}",
                    hint="a staged worker commits when it calls commit_latest()",
                    context=context,
                )

    def _check_packed(self, context: ErrorContext) -> None:
        """Raise MembershipError naming the ranks that have joined the version and did not pack their lanes."""
        lacking = {rank for lane_id, rank in self._lanes if self._await_lane(lane_id, 0.0) is None}
        if lacking:
            raise MembershipError(
                f"trainer ranks {sorted(lacking)} have not packed their part of version {self.version}",
                hint="they may have ended while they published it; publish the next one",
                context=context,
            )

    def _await_lane(self, lane_id: str, deadline: float) -> VersionStatus | None:
        """Until the lane's workers have the version, or the deadline; None when the lane does not know it."""
        channel = lane_channel(self._publisher.channel, lane_id)
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                report = self._publisher._link.ask(
                    lambda left: protocol.AwaitVersion(channel, self.version, "committed", 0, left),
                    timeout_s=left,
                    grace_s=_GRACE_S,
                )
            except ChannelError:
                if left <= 0:
                    return None
                time.sleep(min(_POLL_S, left))
                continue
            assert isinstance(report, protocol.VersionReport)
            return report.status
