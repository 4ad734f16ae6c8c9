"""A trainer rank's side of a sharded channel: each rank publishes the lanes that the plan gives it.

Ranks speak with the coordinator, never with each other: no collective runs, and none can be out of order.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex

import msgspec

from wsync.config import Config
from wsync.engine import protocol
from wsync.engine.link import Closing
from wsync.engine.protocol import WaitPhase
from wsync.engine.publisher import Publisher
from wsync.engine.session import checked_channel, default_member_id
from wsync.engine.shard_link import Locals, ShardLink, of_channel
from wsync.engine.shards import lane_channel
from wsync.errors import (
    ChannelError,
    CommitError,
    ConfigError,
    ErrorContext,
    ManifestMismatch,
    MembershipError,
    PublishError,
    TransferTimeout,
    WsyncError,
)
from wsync.holding import Holding
from wsync.status import ReplicaPhase, VersionPhase, VersionStatus, merged_status

_POLL_S = 0.02
_SLICE_S = 0.5
"""How long a wait asks for one lane before it looks whether that still has workers."""
_REFUSED_HINT = "a worker's layout must suit what the trainer ranks hold: correct it, or close the worker"
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


def _whole(name: str, value: SupportsIndex) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(
            f"{name}={value!r} is no whole number", hint="a launcher's variable is text: int(...)"
        ) from None


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
        rank, num_ranks = _whole("rank", rank), _whole("num_ranks", num_ranks)
        if not 0 <= rank < num_ranks:
            raise ConfigError(f"rank {rank} is none of {num_ranks} ranks", hint="ranks count from 0")
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
        opened = self._link.ask_all(
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
            try:
                nbytes += publisher.publish(step, timeout_s=left, version=opened.version, uid=opened.uid).nbytes
            except WsyncError as exc:
                # What a lane's publisher offers is not to be had here.
                hint = "raise timeout_s; status() of the former publication names the workers that lack it"
                is_late = isinstance(exc, TransferTimeout)
                raise of_channel(exc, self.channel, who=f"rank {self.rank}: ", hint=hint if is_late else "") from exc
        pause_s = time.monotonic() - started
        return ShardPublication(self, opened, step, pause_s, nbytes, self._all_lanes)

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
        opened: protocol.RoundOpened,
        step: int,
        pause_s: float,
        nbytes: int,
        lanes: tuple[tuple[str, int], ...],
    ) -> None:
        self.version, self.step, self.pause_s, self.nbytes = opened.version, step, pause_s, nbytes
        self._publisher, self._uid, self._lanes = publisher, opened.uid, lanes

    def __repr__(self) -> str:
        return (
            f"ShardPublication(version={self.version}, step={self.step}, nbytes={self.nbytes}, "
            f"pause_s={self.pause_s:.3g})"
        )

    def status(self) -> VersionStatus:
        """What the coordinator knows of this version now, of the lanes of all ranks together.

        A worker is as far as the lane that it has least of; one that was refused has failed, with the reason. `nbytes`
        are those that all ranks send, each counted once however many receive it.
        """
        return self._status(self._round(0.0))

    def wait_staged(self, timeout_s: float = 60.0) -> VersionStatus:
        """Until every rank has published the version, and it is whole on the hosts of all workers. Raises as below."""
        return self._wait("staged", timeout_s)

    def wait_committed(self, timeout_s: float = 60.0) -> VersionStatus:
        """Until every rank has published the version, and every worker runs it or a newer one.

        A worker whose layout is newer than the version is not waited for, nor are those that leave while others stay.
        Raises PublishError when the version was dropped or aborted, MembershipError naming the ranks that have not
        published it or when no worker is left, TransferTimeout naming the workers that lack it, CommitError when one
        could not install it, ManifestMismatch (when the others have it) naming the workers that were refused, and why.
        """
        return self._wait("committed", timeout_s)

    def _wait(self, phase: WaitPhase, timeout_s: float) -> VersionStatus:
        started = time.monotonic()
        deadline = started + timeout_s
        report = self._round(timeout_s)
        waiting = [] if report.error or report.missing_ranks else self._present(report)
        while waiting:
            lane_id = waiting.pop(0)
            left = deadline - time.monotonic()
            until = time.monotonic() + max(0.0, min(_SLICE_S, left))
            lane = self._await_lane(lane_id, phase, until)
            if lane is not None and lane.is_reached:
                continue
            is_over = lane is not None and time.monotonic() < until  # it cannot come true any more
            waiting.append(lane_id)
            report = self._round(0.0)
            if is_over or left <= 0:
                break
            waiting = [lane_id for lane_id in waiting if lane_id not in report.deserted]
        context = ErrorContext(
            channel=self._publisher.channel, version=self.version, phase=phase, elapsed_s=time.monotonic() - started
        )
        self._check_published(report, context)
        status = self._status(report)
        if waiting:
            self._raise_lacking(waiting, report, status, context)
        if refused := _refused(report):
            raise ManifestMismatch(
                f"version {self.version} cannot be received by {refused}", hint=_REFUSED_HINT, context=context
            )
        return status

    def _check_published(self, report: protocol.RoundReport, context: ErrorContext) -> None:
        """Raise unless the version was published by all ranks, and there are workers that receive it."""
        if report.error:
            raise PublishError(f"version {self.version} was dropped: {report.error}", context=context)
        if report.missing_ranks:
            raise MembershipError(
                f"trainer ranks {list(report.missing_ranks)} have not published version {self.version}",
                hint="every rank must call publish",
                context=context,
            )
        if self._present(report):
            return
        if refused := _refused(report):
            raise ManifestMismatch(
                f"nobody receives version {self.version}; refused: {refused}", hint=_REFUSED_HINT, context=context
            )
        gone = ", ".join(f"{name} has left" for name in report.left)
        raise MembershipError(
            f"no worker is left that receives version {self.version}: {gone}"
            if self._lanes and gone
            else f"no worker receives version {self.version}: none had joined when it was published",
            hint="start workers, and publish again if their layout is new",
            context=context,
        )

    def _raise_lacking(
        self, waiting: Sequence[str], report: protocol.RoundReport, status: VersionStatus, context: ErrorContext
    ) -> NoReturn:
        if status.phase in (VersionPhase.SUPERSEDED, VersionPhase.ABORTED):
            raise PublishError(f"version {self.version} is {status.phase}: {status.error}", context=context)
        refused = {worker.member_id for worker in report.workers if worker.phase is ReplicaPhase.FAILED}
        failed = [r for r in status.replicas if r.phase is ReplicaPhase.FAILED and r.member_id not in refused]
        if failed:
            why = "; ".join(f"{replica.member_id}: {replica.error}" for replica in failed)
            raise CommitError(f"version {self.version} could not be installed: {why}", context=context)
        lanes = {lane_id: self._await_lane(lane_id, "staged", 0.0) for lane_id in waiting}
        if unpacked := {rank for lane_id, rank in self._lanes if lane_id in lanes and lanes[lane_id] is None}:
            raise MembershipError(
                f"trainer ranks {sorted(unpacked)} have not packed their part of version {self.version}",
                hint="they may have ended while they published it; publish the next one",
                context=context,
            )
        if report.lost and any(lane is not None and not lane.status.replicas for lane in lanes.values()):
            raise MembershipError(
                f"no worker is left that receives a part of version {self.version}: lost with their holders: "
                f"{', '.join(report.lost)}; others: {status.describe_replicas()}",
                hint="start them again",
                context=context,
            )
        raise TransferTimeout(
            f"version {self.version} is not {context.phase} everywhere: {status.describe_replicas()}",
            hint="a worker follows and commits when it calls commit_latest() or wait_version()",
            context=context,
        )

    def _present(self, report: protocol.RoundReport) -> list[str]:
        """The version's lanes that have workers, or may have them again."""
        return [lane_id for lane_id, _ in self._lanes if lane_id not in report.deserted]

    def _status(self, report: protocol.RoundReport) -> VersionStatus:
        lanes = [self._await_lane(lane_id, "staged", 0.0) for lane_id in self._present(report)]
        error = report.error
        if report.missing_ranks and not error:
            error = f"trainer ranks {list(report.missing_ranks)} have not published it"
        merged = merged_status([lane.status for lane in lanes if lane is not None], report.workers)
        phase = merged.phase
        if report.error:
            phase = VersionPhase.ABORTED
        elif (report.missing_ranks or None in lanes) and phase is not VersionPhase.ABORTED:
            phase = VersionPhase.PENDING
        return msgspec.structs.replace(
            merged,
            channel=self._publisher.channel,
            version=self.version,
            step=self.step,
            phase=phase,
            error=error or merged.error,
        )

    def _round(self, timeout_s: float) -> protocol.RoundReport:
        channel = self._publisher.channel
        report = self._publisher._link.ask(
            lambda left: protocol.AwaitRound(channel, self.version, left), timeout_s=timeout_s, grace_s=_GRACE_S
        )
        assert isinstance(report, protocol.RoundReport)
        return report

    def _await_lane(self, lane_id: str, phase: WaitPhase, deadline: float) -> protocol.VersionReport | None:
        """Until the lane's workers have the version, or the deadline; None when the lane does not know it."""
        channel = lane_channel(self._publisher.channel, lane_id)
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                report = self._publisher._link.ask(
                    lambda left: protocol.AwaitVersion(channel, self.version, self._uid, phase, 0, left),
                    timeout_s=left,
                    grace_s=_GRACE_S,
                )
            except ChannelError:
                if left <= 0:
                    return None
                time.sleep(min(_POLL_S, left))
                continue
            assert isinstance(report, protocol.VersionReport)
            return report


def _refused(report: protocol.RoundReport) -> str:
    return "; ".join(f"{w.member_id}: {w.error}" for w in report.workers if w.phase is ReplicaPhase.FAILED)
