"""A worker's side of a sharded channel: it pulls the slices that it consumes, from whichever ranks hold them.

Lanes are followed one by one and committed together: either every lane of a version is installed, or none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from wsync.config import Config
from wsync.engine import protocol
from wsync.engine.groups import some
from wsync.engine.link import GRACE_S, Closing, Pinned
from wsync.engine.overlap import check_wanted
from wsync.engine.replica import LATEST_GRACE_S, Commit, Replica
from wsync.engine.session import checked_channel, default_member_id
from wsync.engine.shard_link import Locals, ShardLink, of_channel
from wsync.engine.shards import lane_channel, worker_name
from wsync.errors import (
    ChannelError,
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
from wsync.holding import CHECKPOINT, Holding

PLAN_CHECK_S = 1.0
"""How often a worker that has its lanes asks whether the plan has changed."""
MAX_PLAN_CHECK_S = 30.0
"""The same while the coordinator does not answer."""
_SLICE_S = 0.5
_PAUSE_S = 0.05

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
        loaded = [local.name.removeprefix(CHECKPOINT) for local in holding.locals if local.name.startswith(CHECKPOINT)]
        if loaded and installing is nullcontext:
            raise ConfigError(
                f"nobody would load {some(loaded)}: the holding leaves these tensors to the engine's own loader",
                hint="pass installing=recording.installing",
            )
        self.member_id = member_id or default_member_id("worker")
        self._holding, self._locals = holding, Locals(holding, locals_)
        self._version, self._uid, self._step = 0, 0, 0
        self._where: object = None
        """The locals' memory when the last commit ended."""
        self._is_torn, self._has_moved, self._is_closed = False, False, False  # as in a Replica
        self._is_committing = False
        self._lock = threading.RLock()
        self._lanes: dict[str, Replica] = {}
        self._plan_id = ""
        self._check_plan_at, self._patience_s = 0.0, PLAN_CHECK_S
        self._refusal: ManifestMismatch | None = None
        if not holding.nbytes:
            raise ConfigError("the holding wants no element of any tensor", hint="leave this worker out")
        self._link = ShardLink(self.channel, self.member_id, self.config, holding, rank=-1, num_ranks=0)
        self._lane_member_id = worker_name(self.member_id, self._link.incarnation)

    @property
    def version(self) -> int:
        """The version that all of the live memory has; 0 before the first commit."""
        return self._version

    @property
    def is_ready(self) -> bool:
        """Whether the worker may serve: it has committed a version, the last commit did not fail half-way, and the
        locals are still in the memory in which that commit left them. May be asked from any thread; never waits.
        """
        return self._version > 0 and not self._is_lost()

    def _is_lost(self) -> bool:
        """Whether the live memory does not have the version, which is then to be installed again."""
        if self._locals.where() != self._where:
            self._has_moved = True
        return self._is_torn or self._has_moved

    def commit_latest(self) -> Commit | None:
        """Install the newest version of which every lane is staged on this host; None when there is nothing newer.

        Either the whole of it is installed when this returns, or nothing has changed and it raises, or `is_ready` is
        False. Never waits for a transfer.
        """
        with self._lock:
            try:
                commit = self._commit(0, time.monotonic(), grace_s=LATEST_GRACE_S) if self._lanes else None
                if commit is None and time.monotonic() >= self._check_plan_at:
                    self._follow(0.0, grace_s=LATEST_GRACE_S)
                    commit = self._commit(0, time.monotonic(), grace_s=LATEST_GRACE_S)
                if commit is None and self._refusal is not None:
                    raise self._refusal
                return commit
            except (PeerLost, StaleView, TransferTimeout, ConnectError, MembershipError):
                return None

    def wait_version(self, min_version: int = 1, *, timeout_s: float = 60.0) -> Commit:
        """Wait until `min_version` or newer is staged in every lane, and install the newest such version.

        Raises MembershipError naming trainer ranks that have not joined, TransferTimeout naming the ranks and tensors
        that are not there at the deadline, or saying that this worker's layout is new and comes with the next publish.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while True:
                if self._version >= min_version and not self._is_lost():
                    return Commit(self._version, self._step, 0.0, 0)
                try:
                    if not self._lanes:
                        self._follow(max(0.0, deadline - time.monotonic()))
                    commit = self._commit(min_version, min(deadline, time.monotonic() + _SLICE_S))
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

    def _follow(self, timeout_s: float, *, grace_s: float = GRACE_S) -> None:
        """Have a replica for each lane of the present plan, and no other; all of them, or those from before."""
        if self._is_closed:
            raise self._closed()
        self._patience_s = min(MAX_PLAN_CHECK_S, 2 * self._patience_s)  # unless it is answered
        self._check_plan_at = time.monotonic() + self._patience_s
        try:
            planned = self._link.lanes(timeout_s, grace_s=grace_s)
            self._refusal = None
        except ManifestMismatch as exc:  # said again to everybody who asks, until there is another answer
            self._refusal = exc
        self._patience_s = PLAN_CHECK_S
        self._check_plan_at = time.monotonic() + PLAN_CHECK_S
        if self._refusal is not None:
            raise self._refusal
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

    def _closed(self) -> CommitError:
        return CommitError(f"this worker of '{self.channel}' is closed", hint="create a new one")

    def _commit(self, min_version: int, deadline: float, *, grace_s: float = GRACE_S) -> Commit | None:
        if self._is_committing:
            raise CommitError(
                f"version {self._version} of '{self.channel}' is being replaced", hint="do not commit in installing()"
            )
        try:
            self._is_committing = True
            return self._commit_leased(min_version, deadline, grace_s=grace_s)
        except Exception:
            raise
        except BaseException:  # interrupted, maybe with leases in no variable: the holder drops what it gave to us
            for lane in self._lanes.values():
                lane._link.give_up()
            raise
        finally:
            self._is_committing = False

    def _commit_leased(self, min_version: int, deadline: float, *, grace_s: float) -> Commit | None:
        leases = self._lease_all(min_version, deadline, grace_s)
        if leases is None:
            return None
        started = time.monotonic()
        leased = next(iter(leases.values()))[1]
        was_lost, is_begun = self._is_lost(), False
        self._is_torn, self._has_moved = True, False  # who sees it elsewhere from now on is right
        try:
            with self._writing(leased.version):
                is_begun = True
                for lane_id, held in leases.items():
                    self._lanes[lane_id]._install(*held)
            self._version, self._uid, self._step = leased.version, leased.uid, leased.step
            if not self._is_whole():
                raise CommitError(f"not every lane has version {leased.version}", hint="this is a fault in wsync")
            pause_s = time.monotonic() - started
            self._link.highest = max(self._link.highest, leased.version)
            self._is_torn = False
        except BaseException as exc:
            is_lost = not self._restore(exc) if is_begun else was_lost or self._locals.where() != self._where
            self._is_torn = is_lost
            self._release_all(leases, error=str(exc))
            hint = "commit another version before serving" if is_lost else "the former version is in place"
            if isinstance(exc, WsyncError):
                raise of_channel(exc, self.channel, hint=hint if isinstance(exc, CommitError) else "") from exc
            if not isinstance(exc, Exception):
                raise
            raise CommitError(
                f"version {leased.version} could not be installed: {type(exc).__name__}: {exc}",
                hint=hint,
                context=ErrorContext(channel=self.channel, version=leased.version, phase="commit"),
            ) from exc
        self._release_all(leases, is_committed=True, pause_s=pause_s)
        return Commit(leased.version, leased.step, pause_s, self._holding.nbytes)

    @contextmanager
    def _writing(self, version: int) -> Iterator[None]:
        """Around the installation of all lanes, in the memory that the engine has then. Raises what the block raises,
        even where `installing()` would not.
        """
        failure: BaseException | None = None
        where: object = None
        with self._installing():
            try:
                self._locals.refresh()
                where = self._locals.where()
                yield
                self._locals.spread()
            except BaseException as exc:
                failure = exc
                raise
        if failure is not None:
            raise CommitError(
                f"version {version} could not be installed, and installing() does not let the error pass: {failure}",
                context=ErrorContext(channel=self.channel, version=version, phase="commit"),
            ) from failure
        # An engine may keep its weights elsewhere when `installing()` has ended; else they must stay where they are.
        self._where = where if self._installing is nullcontext else self._locals.where()

    def _is_whole(self) -> bool:
        """Whether every lane has the worker's version."""
        wanted = (self._version, self._uid)
        return all((lane._version, lane._uid) == wanted and not lane._is_torn for lane in self._lanes.values())

    def _lease_all(self, min_version: int, deadline: float, grace_s: float) -> dict[str, _Lease] | None:
        """Leases on one version in every lane, the newest that all have and that is news. None if there is none by the
        deadline.

        Lanes whose versions have one number and different uids are of two runs of the job: the coordinator sorts that.
        """
        if self._is_closed:
            raise self._closed()
        if not self._lanes:
            return None
        leases: dict[str, _Lease] = {}
        wanted = max_version = 0
        # What has the present number and another uid is news, and what the memory has lost.
        present = (self._version, 0 if self._is_lost() else self._uid) if min_version <= self._version else ()
        least = max(min_version, self._version + 1)
        try:
            while len(leases) < len(self._lanes):
                for lane_id, lane in self._lanes.items():
                    if lane_id in leases:
                        continue
                    left = max(0.0, deadline - time.monotonic())
                    wish = protocol.LeaseVersion(wanted or least, max_version, left, *(() if wanted else present))
                    held = lane._lease(wish, grace_s=grace_s)
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
                elif len({leased.uid for _, leased in leases.values()}) > 1:
                    self._release_all(leases)
                    leases, wanted, max_version = {}, 0, 0
                    if time.monotonic() >= deadline:
                        return None
                    time.sleep(_PAUSE_S)
        except BaseException:
            self._release_all(leases)
            raise
        return leases

    def _release_all(
        self, leases: Mapping[str, _Lease], *, is_committed: bool = False, pause_s: float = 0.0, error: str = ""
    ) -> None:
        for lane_id, (holder, leased) in leases.items():
            self._lanes[lane_id]._release(holder, leased, is_committed=is_committed, pause_s=pause_s, error=error)

    def _restore(self, cause: BaseException) -> bool:
        """A commit failed half-way: put the worker's version into all lanes, if this host still has it whole."""
        if not self._version:
            return False
        try:
            with self._writing(self._version):
                for lane in self._lanes.values():
                    held = lane._lease(protocol.LeaseVersion(self._version, self._version, 0.0))
                    if held is not None:
                        try:
                            lane._install(*held)
                        finally:
                            lane._release(*held, is_committed=False, pause_s=0.0, error="")
        except Exception as exc:
            cause.add_note(f"the former version could not be restored: {exc}")
            return False
        return self._is_whole()

    def _not_there(self, min_version: int, timeout_s: float) -> TransferTimeout:
        context = ErrorContext(channel=self.channel, version=min_version, phase="stage", elapsed_s=timeout_s)
        try:
            late_for = self._link.lanes(0.0, grace_s=LATEST_GRACE_S).late_for
        except WsyncError:  # the coordinator is away
            late_for = 0
        if late_for >= min_version:
            return TransferTimeout(
                f"the layout of this worker, or of another one that came with it, is new to '{self.channel}': it is no "
                f"part of version {late_for}, which was published before",
                hint="one more publish is needed; it has the new layout",
                context=context,
            )
        known = self._locals.lanes
        lacking = [known[lane_id] for lane_id, lane in self._lanes.items() if not _has(lane, min_version)]
        ranks = sorted({lane.source for lane in lacking})
        tensors = sorted({tensor for lane in lacking for bundle in lane.bundles for tensor in bundle.tensors})
        what = f"what comes from trainer ranks {some(map(str, ranks))} (tensors {some(tensors, 3)}) is not there"
        return TransferTimeout(
            f"version {min_version} of '{self.channel}' is not staged on this host (running {self._version}): "
            + (what if lacking else "no version is there from all trainer ranks"),
            hint="check that every trainer rank publishes",
            context=context,
        )

    def verify(self, *, timeout_s: float = 60.0) -> list[str]:
        """Names of the fragments whose live bytes differ from the version that this worker runs; empty when none do.

        Of what the engine's own loader makes of tensors that were received for it, only what was received is compared.
        """
        with self._lock:
            if not self._version:
                raise ChannelError(f"no version of '{self.channel}' has been installed here", hint="commit one first")
            self._is_lost()
            self._locals.refresh()
            wrong: list[str] = []
            for lane in self._lanes.values():
                if not lane._version:
                    raise ChannelError(
                        f"version {self._version} cannot be compared: the trainer's layout has changed since",
                        hint="commit the next version first",
                        context=ErrorContext(channel=self.channel, version=self._version, phase="verify"),
                    )
                if (lane._version, lane._uid) != (self._version, self._uid):
                    wrong += list(lane._target)
                    continue
                try:
                    wrong += lane.verify(timeout_s=timeout_s)
                except WsyncError as exc:
                    raise of_channel(exc, self.channel) from exc
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
        held = lane._lease(protocol.LeaseVersion(min_version, 0, 0.0))
    except WsyncError:
        return False
    if held is not None:
        lane._release(*held, is_committed=False, pause_s=0.0, error="")
    return held is not None
