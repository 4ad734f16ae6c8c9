"""A worker's side of a sharded channel: it pulls the slices that it consumes, from whichever ranks hold them.

Lanes are followed one by one and committed together: either every lane of a version is installed, or none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from wsync.config import Config
from wsync.engine import protocol
from wsync.engine.link import GRACE_S, Closing, Pinned
from wsync.engine.overlap import check_wanted
from wsync.engine.replica import LATEST_GRACE_S, Commit, Replica
from wsync.engine.session import checked_channel, default_member_id
from wsync.engine.shard_link import Locals, ShardLink
from wsync.engine.shards import lane_channel
from wsync.errors import (
    CommitError,
    ConfigError,
    ConnectError,
    ErrorContext,
    ManifestMismatch,
    MembershipError,
    PeerLost,
    StaleView,
    TransferTimeout,
    WsyncError,
)
from wsync.holding import Holding

PLAN_CHECK_S = 1.0
"""How often a worker that has its lanes asks whether the plan has changed."""
MAX_PLAN_CHECK_S = 30.0
"""The same while the coordinator does not answer."""
_SLICE_S = 0.5

_Lease = tuple[Pinned, protocol.VersionLeased]


class ShardReplica(Closing):
    """One worker (one tensor-, pipeline- or expert-parallel rank) of an engine.

    `holding` says what it wants and where that goes, `locals_` has the live memory: every element of a local is
    written by exactly one piece or is padding, which stays as it is. A recorded loader (`integrations.recorder`), the
    layouts of `wsync.layouts` or `read_state` make a holding. Each commit runs inside of `installing()`, which may
    prepare the engine and refresh what it derives from its weights; with a recorded loader it is that of the recording.

    After the constructor has returned the coordinator knows this worker. A worker whose holding equals another's finds
    the newest version at once; one with a holding that is new gets its first version with the next publish.
    """

    def __init__(
        self,
        channel: str,
        holding: Holding,
        locals_: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        *,
        installing: Callable[[], AbstractContextManager[Any]] = nullcontext,
        member_id: str = "",
        config: Config | None = None,
    ) -> None:
        self.channel = checked_channel(channel)
        self.config = config or Config()
        self._installing = installing
        check_wanted(holding)
        self.member_id = member_id or default_member_id("worker")
        self._holding, self._locals = holding, Locals(holding, locals_)
        self._version, self._step = 0, 0
        self._is_torn, self._is_closed = False, False
        self._lock = threading.RLock()
        self._lanes: dict[str, Replica] = {}
        self._plan_id = ""
        self._check_plan_at, self._patience_s = 0.0, PLAN_CHECK_S
        if not holding.nbytes:
            raise ConfigError("the holding wants no element of any tensor", hint="leave this worker out")
        self._link = ShardLink(self.channel, self.member_id, self.config, holding, rank=-1, num_ranks=0)
        self._lane_member_id = f"{self.member_id}-{self._link.incarnation[:6]}"  # ids may be shared, in one actor say

    @property
    def version(self) -> int:
        """The version that all of the live memory has; 0 before the first commit."""
        return self._version

    @property
    def is_ready(self) -> bool:
        """Whether the worker may serve: it has committed a version, the last commit did not fail half-way, and the
        locals are still in the memory that it was written to.
        """
        try:
            self._look()
        except ManifestMismatch:
            return False
        return self._version > 0 and not self._is_torn

    def _look(self) -> None:
        """Locals that lie elsewhere than before do not have the version: it is to be installed again."""
        try:
            is_same = self._locals.refresh()
        except ManifestMismatch:
            self._is_torn = True
            raise
        self._is_torn = self._is_torn or not is_same

    def commit_latest(self) -> Commit | None:
        """Install the newest version of which every lane is staged on this host; None when there is nothing newer.

        Either the whole of it is installed when this returns, or nothing has changed and it raises, or `is_ready` is
        False. Never waits for a transfer.
        """
        with self._lock:
            self._look()
            try:
                commit = self._commit(self._floor(), time.monotonic(), grace_s=LATEST_GRACE_S) if self._lanes else None
                if commit is None and time.monotonic() >= self._check_plan_at:
                    self._follow(0.0, grace_s=LATEST_GRACE_S)
                    commit = self._commit(self._floor(), time.monotonic(), grace_s=LATEST_GRACE_S)
                return commit
            except (PeerLost, StaleView, TransferTimeout, ConnectError, MembershipError):
                return None

    def wait_version(self, min_version: int = 1, *, timeout_s: float = 60.0) -> Commit:
        """Wait until `min_version` or newer is staged in every lane, and install the newest such version.

        Raises MembershipError naming trainer ranks that have not joined, TransferTimeout naming the lanes that are not
        there at the deadline.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while True:
                self._look()
                if self._version >= min_version and not self._is_torn:
                    return Commit(self._version, self._step, 0.0, 0)
                try:
                    if not self._lanes:
                        self._follow(max(0.0, deadline - time.monotonic()))
                    least = max(self._floor(), min_version)
                    commit = self._commit(least, min(deadline, time.monotonic() + _SLICE_S))
                    if commit is None and time.monotonic() >= self._check_plan_at:
                        self._follow(0.0)
                except (PeerLost, StaleView):
                    commit = None
                except (ConnectError, MembershipError, TransferTimeout):  # the coordinator is away: the lanes are not
                    commit = None
                    if not self._lanes:
                        raise
                if commit is not None:
                    return commit
                if time.monotonic() >= deadline:
                    raise self._not_there(min_version, timeout_s)

    def _floor(self) -> int:
        return max(1, self._version) if self._is_torn else self._version + 1

    def _follow(self, timeout_s: float, *, grace_s: float = GRACE_S) -> None:
        """Have a replica for each lane of the present plan, and no other; all of them, or those from before."""
        if self._is_closed:
            raise CommitError(f"this worker of '{self.channel}' is closed", hint="create a new one")
        self._patience_s = min(MAX_PLAN_CHECK_S, 2 * self._patience_s)  # unless it is answered
        self._check_plan_at = time.monotonic() + self._patience_s
        planned = self._link.lanes(timeout_s, grace_s=grace_s)
        self._patience_s = PLAN_CHECK_S
        self._check_plan_at = time.monotonic() + PLAN_CHECK_S
        if planned.plan_id == self._plan_id:
            return
        views = self._locals.views(planned.mine)
        lanes = {lane_id: self._lanes[lane_id] for lane_id in views if lane_id in self._lanes}
        joined: list[Replica] = []
        try:
            for lane_id, (_, fragments, _) in views.items():
                if lane_id not in lanes:
                    name = lane_channel(self.channel, lane_id)
                    lanes[lane_id] = Replica(name, fragments, member_id=self._lane_member_id, config=self.config)
                    joined.append(lanes[lane_id])
        except BaseException:
            for lane in joined:
                lane.close()
            raise
        left = [lane for lane_id, lane in self._lanes.items() if lane_id not in lanes]
        self._locals.follow(views)
        self._lanes, self._plan_id = lanes, planned.plan_id
        for lane in left:
            lane.close()

    def _commit(self, min_version: int, deadline: float, *, grace_s: float = GRACE_S) -> Commit | None:
        leases = self._lease_all(min_version, deadline, grace_s)
        if leases is None:
            return None
        started = time.monotonic()
        version = next(iter(leases.values()))[1].version
        steps = {leased.step for _, leased in leases.values()}
        if len(steps) > 1:
            self._release_all(leases)
            raise CommitError(
                f"the lanes of version {version} are of steps {sorted(steps)}: they do not belong together",
                hint="publish the next version",
                context=ErrorContext(channel=self.channel, version=version, phase="commit"),
            )
        was_torn, self._is_torn = self._is_torn, True
        done: list[str] = []
        try:
            with self._installing():
                for lane_id, (holder, leased) in leases.items():
                    self._lanes[lane_id]._install(holder, leased)
                    done.append(lane_id)
                self._locals.spread()
        except BaseException as exc:
            self._is_torn = was_torn or not self._restore(done, exc)
            self._release_all(leases, error=str(exc))
            raise
        self._is_torn = False
        pause_s = time.monotonic() - started
        self._version, self._step = version, next(iter(leases.values()))[1].step
        self._link.highest = max(self._link.highest, version)
        self._release_all(leases, is_committed=True, pause_s=pause_s)
        return Commit(version, self._step, pause_s, self._holding.nbytes)

    def _lease_all(self, min_version: int, deadline: float, grace_s: float) -> dict[str, _Lease] | None:
        """Leases on one version in every lane, the newest that all have. None when there is none by the deadline."""
        if not self._lanes:
            return None
        leases: dict[str, _Lease] = {}
        wanted = max_version = 0
        try:
            while len(leases) < len(self._lanes):
                for lane_id, lane in self._lanes.items():
                    if lane_id in leases:
                        continue
                    left = max(0.0, deadline - time.monotonic())
                    held = lane._lease(wanted or min_version, max_version, timeout_s=left, grace_s=grace_s)
                    if held is None:
                        self._release_all(leases)
                        return None
                    leases[lane_id] = held
                    wanted = wanted or held[1].version
                    if held[1].version != wanted:
                        break
                versions = {leased.version for _, leased in leases.values()}
                if len(versions) > 1:
                    # One lane is ahead. If it still has the older version that is the one; else the others wait for it.
                    older = min(versions)
                    has_older = all(older in leased.kept or leased.version == older for _, leased in leases.values())
                    wanted, max_version = (older, older) if has_older else (max(versions), 0)
                    stale = {lane_id: h for lane_id, h in leases.items() if h[1].version != wanted}
                    self._release_all(stale)
                    leases = {lane_id: h for lane_id, h in leases.items() if lane_id not in stale}
        except BaseException:
            self._release_all(leases)
            raise
        return leases

    def _release_all(
        self, leases: Mapping[str, _Lease], *, is_committed: bool = False, pause_s: float = 0.0, error: str = ""
    ) -> None:
        for lane_id, (holder, leased) in leases.items():
            self._lanes[lane_id]._release(
                holder, leased.version, is_committed=is_committed, pause_s=pause_s, error=error
            )

    def _restore(self, done: list[str], cause: BaseException) -> bool:
        """Put the former version back into the lanes that had the new one already. The failing lane does so itself."""
        if not self._version:
            return False
        try:
            with self._installing():
                for lane_id in done:
                    lane = self._lanes[lane_id]
                    held = lane._lease(self._version, self._version, timeout_s=0.0)
                    if held is None:
                        return False
                    lane._install(*held)
                    lane._release(held[0], self._version, is_committed=True, pause_s=0.0, error="")
                self._locals.spread()
        except Exception as exc:
            cause.add_note(f"the former version could not be restored: {exc}")
            return False
        return not any(lane._is_torn for lane in self._lanes.values())

    def _not_there(self, min_version: int, timeout_s: float) -> TransferTimeout:
        lacking = [lane_id for lane_id, lane in self._lanes.items() if not _has(lane, min_version)]
        return TransferTimeout(
            f"version {min_version} of '{self.channel}' is not staged on this host (running {self._version}); lanes "
            f"that lack it: {', '.join(lacking) or 'none: no two lanes have the same version'}",
            hint="check that every trainer rank publishes",
            context=ErrorContext(channel=self.channel, version=min_version, phase="stage", elapsed_s=timeout_s),
        )

    def verify(self, *, timeout_s: float = 60.0) -> list[str]:
        """Names of the fragments whose live bytes differ from the version that this worker runs; empty when none do."""
        with self._lock:
            wrong = [name for lane in self._lanes.values() for name in lane.verify(timeout_s=timeout_s)]
            return wrong + self._locals.unequal()

    def close(self) -> None:
        """Leave; the live memory stays as it is. Idempotent."""
        with self._lock:
            self._is_closed = True
            for lane in self._lanes.values():
                lane.close()
            self._link.close()


def _has(lane: Replica, min_version: int) -> bool:
    """Whether the lane has that version or a newer one on this host."""
    try:
        held = lane._lease(min_version, 0, timeout_s=0.0)
    except WsyncError:
        return False
    if held is not None:
        lane._release(held[0], held[1].version, is_committed=False, pause_s=0.0, error="")
    return held is not None
