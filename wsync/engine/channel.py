"""What the coordinator knows of one channel, and what it orders the holders to do. Pure: no clock, no sockets.

Every event updates the state; `reconcile` then compares what is with what should be and returns orders. It is
level-triggered: after a restart of the coordinator the same function finds from the holders' reports what is
missing, so there is no second recovery path.

Rules:
- one version at a time is on its way; the newest that waits comes next, older ones that wait are superseded;
- every holder with a replica of the channel gets the version that is on its way, or else the newest staged one;
- routes are made once for a version; whoever comes later is routed beside them, and they are made anew when a holder
  that others pull from is lost, or a hop turns out slow;
- a version that the present trainer neither gave nor counted on from is of a former run of the job, which has lived on
  where nobody could reach it: it is dropped wherever it is. Versions of one number are told apart by their uids;
- a version whose origin is lost goes on if the living holders have every chunk of it and its digests, and is
  aborted otherwise. Everybody then stays on the last one.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from wsync.engine.membership import View
from wsync.engine.planner import Planner, recovery_order
from wsync.engine.progress import Pulling
from wsync.engine.protocol import (
    Abort,
    Announce,
    AskHave,
    ChannelReport,
    Committed,
    Flight,
    Known,
    Message,
    Prepare,
    Progress,
    Pull,
    ReplicaReport,
    Seal,
    SlotReport,
    TrainerReport,
)
from wsync.engine.routes import Routing
from wsync.errors import ChannelError, ErrorContext, StaleView
from wsync.manifest import Manifest, lane_of
from wsync.status import HolderPhase, HolderStatus, ReplicaPhase, ReplicaStatus, VersionPhase, VersionStatus

Order = tuple[str, Message]
"""A message to a holder, by its id."""

Stripes = tuple[tuple[str, ...], ...]
"""Of each stripe of chunks: the holders to pull from, best first."""

PATIENCE_S = 30.0
RECOVERY_PATIENCE_S = 0.5
RETRY_S = 2.0
NUM_REMEMBERED = 16
MAX_SOURCES = 8
"""A receiver is told of one source and so many alternates, counted together."""
FORMER_RUN = "it is of a former run of the job"


@dataclass
class _Trainer:
    holder_id: str
    member_id: str
    incarnation: str
    published: int


@dataclass
class _Replica:
    holder_id: str
    incarnation: str
    committed_version: int = 0
    committed_uid: int = 0
    pauses: dict[int, float] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


@dataclass
class _Receiver:
    """A holder's part in a version. The origin has one too."""

    phase: HolderPhase = HolderPhase.PULLING
    nbytes_received: int = 0
    transfer_s: float = 0.0
    error: str = ""
    num_ready: int = 0  # chunks, as it said last
    stripes: Stripes = ()  # as ordered last
    is_late: bool = False  # it came when the others were on their way
    is_asked: bool = False
    ready: bytes | None = None  # its answer while the origin is lost
    retry_at: float | None = None  # after a failure: when it is asked again, if this is still the newest version


@dataclass
class _Version:
    uid: int
    step: int
    nbytes: int
    chunk_nbytes: int
    manifest_digest: str
    origin: str = ""
    phase: VersionPhase = VersionPhase.PENDING
    is_announced: bool = False
    """By its trainer to this coordinator; else a holder said that it has it."""
    is_sealed: bool = False
    digests: tuple[int, ...] = ()
    error: str = ""
    deadline: float = 0.0
    epoch: int | None = None  # the planner's when it was routed
    holders: dict[str, _Receiver] = field(default_factory=dict)

    @property
    def num_chunks(self) -> int:
        return -(-self.nbytes // self.chunk_nbytes)

    @property
    def is_over(self) -> bool:
        return self.phase in (VersionPhase.SUPERSEDED, VersionPhase.ABORTED)


class Channel:
    """State of one channel at the coordinator. Methods that change it return nothing; then call `reconcile`."""

    def __init__(self, name: str, planner: Planner | None = None) -> None:
        self.name = name
        self._planner = planner or Planner()
        self.highest = 0
        self.manifests: dict[str, Manifest] = {}
        self.manifest_digest = ""
        self.trainer: _Trainer | None = None
        self.replicas: dict[str, _Replica] = {}
        self.versions: dict[int, _Version] = {}
        self.plans: list[tuple[int, Routing]] = []
        self._orders: list[Order] = []
        self._num_changes = 0
        self._ahead: object = None
        self._is_planned_ahead = False
        self._told_chunks: tuple[str, str, int, int] | None = None

    # --- members
    def register_trainer(
        self, holder_id: str, report: TrainerReport, manifest: Manifest, last_version: int, view: View
    ) -> None:
        """Raises `ChannelError` while another trainer of the channel lives."""
        present = self.trainer
        if present is not None and present.member_id != report.member_id and view.holder(present.holder_id):
            raise ChannelError(
                f"channel '{self.name}' is already published by {present.member_id} on {present.holder_id}",
                hint="close that publisher first, or use another channel",
                context=ErrorContext(channel=self.name, phase="join", peers=(present.member_id,)),
            )
        self.trainer = _Trainer(holder_id, report.member_id, report.incarnation, report.published)
        if report.published:
            self._disown_from(report.published + 1)
        self.manifest_digest = manifest.digest()
        self.manifests[self.manifest_digest] = manifest
        self.highest = max(self.highest, last_version)
        prepare = Prepare(self.name, lane_of(manifest).nbytes)
        self._orders += [(h, prepare) for h in {replica.holder_id for replica in self.replicas.values()} - {holder_id}]

    def register_replica(self, holder_id: str, report: ReplicaReport) -> None:
        former = self.replicas.get(report.member_id)
        entry = _Replica(holder_id, report.incarnation, report.committed_version, report.committed_uid)
        self._num_changes += 1
        if former is not None and former.incarnation == report.incarnation:
            entry.pauses, entry.errors = former.pauses, former.errors
        self.replicas[report.member_id] = entry
        self._remember(report.committed_version)

    def _remember(self, number: int) -> None:
        """Somebody knows this version: the trainer's next one must be newer."""
        if number > self.highest:
            self.highest = number
            if self.trainer is not None:
                self._orders.append((self.trainer.holder_id, Known(self.name, number)))

    def member_gone(self, member_id: str, incarnation: str) -> None:
        """A message about a former incarnation changes nothing."""
        if self.trainer and (self.trainer.member_id, self.trainer.incarnation) == (member_id, incarnation):
            self.trainer = None
        replica = self.replicas.get(member_id)
        if replica and replica.incarnation == incarnation:
            self._num_changes += 1
            del self.replicas[member_id]

    def committed(self, report: Committed) -> None:
        replica = self.replicas.get(report.member_id)
        if replica is None:
            return
        if report.error:
            replica.errors[report.version] = report.error
        else:
            replica.committed_version, replica.committed_uid = report.version, report.uid
            replica.pauses[report.version] = report.pause_s

    # --- versions
    def announce(self, holder_id: str, message: Announce) -> None:
        """Raises `StaleView` for a trainer that has been replaced meanwhile."""
        if self.trainer is None or self.trainer.incarnation != message.incarnation:
            raise StaleView(
                f"channel '{self.name}' has another trainer now",
                context=ErrorContext(channel=self.name, version=message.version, phase="publish"),
            )
        known = self.versions.get(message.version)
        if known is not None and known.uid == message.uid:
            return
        if known is not None and known.is_announced:
            self._orders.append((holder_id, Known(self.name, self.highest)))
            raise StaleView(
                f"version {message.version} of '{self.name}' was given already",
                context=ErrorContext(channel=self.name, version=message.version, phase="publish"),
            )
        self.highest = max(self.highest, message.version)
        self.trainer.published = message.version
        self._disown_from(message.version)
        for number, version in self.versions.items():
            if version.phase is VersionPhase.PENDING or number == message.replaces:
                self._end(number, VersionPhase.SUPERSEDED, f"version {message.version} took its place")
            receiver = version.holders.get(holder_id)
            if receiver is not None and receiver.phase is HolderPhase.WHOLE and number not in message.kept:
                del version.holders[holder_id]
        entry = _Version(
            message.uid, message.step, message.nbytes, message.chunk_nbytes, message.manifest_digest, origin=holder_id
        )
        entry.is_announced = True
        entry.holders[holder_id] = _Receiver()
        self.versions[message.version] = entry
        self._forget_old()

    def _disown_from(self, number: int) -> None:
        """The trainer counts from here: what others said of such numbers is of a run that it knew nothing of."""
        for other in [n for n, version in self.versions.items() if n >= number and not version.is_announced]:
            self._disown(other)

    def _disown(self, number: int) -> None:
        version = self.versions.pop(number)
        self._orders += [(h, Abort(self.name, number, version.uid, FORMER_RUN)) for h in version.holders]

    def _find(self, number: int, uid: int) -> _Version | None:
        version = self.versions.get(number)
        return version if version is not None and version.uid == uid else None

    def abandon(self, number: int, uid: int, reason: str) -> None:
        version = self._find(number, uid)
        if version is not None and not version.is_sealed:
            self._end(number, VersionPhase.ABORTED, reason)

    def sealed(self, holder_id: str, number: int, uid: int, digests: tuple[int, ...]) -> None:
        """The origin has digested every chunk: tell those who pull what the chunks must hash to."""
        version = self._find(number, uid)
        if version is None or version.is_over or version.origin != holder_id:
            return
        version.is_sealed, version.digests = True, digests
        version.holders.setdefault(holder_id, _Receiver()).phase = HolderPhase.WHOLE
        for other, receiver in version.holders.items():
            if receiver.phase is HolderPhase.PULLING:
                self._orders.append((other, Seal(self.name, number, uid, digests)))

    def staged(self, holder_id: str, number: int, uid: int, nbytes_received: int, transfer_s: float) -> None:
        version = self._find(number, uid)
        if version is None:
            return
        receiver = version.holders.setdefault(holder_id, _Receiver())
        receiver.phase = HolderPhase.WHOLE
        if nbytes_received:  # 0: it had the version already
            receiver.nbytes_received, receiver.transfer_s = nbytes_received, transfer_s

    def pull_failed(self, holder_id: str, number: int, uid: int, error: str) -> None:
        version = self._find(number, uid)
        if version is not None and holder_id in version.holders:
            receiver = version.holders[holder_id]
            receiver.phase, receiver.error = HolderPhase.FAILED, error

    def progress(self, holder_id: str, report: Progress) -> Pulling | None:
        """How far a holder is. Returns what it pulls, and how far its sources are with it; None if it does not."""
        version = self._find(report.version, report.uid)
        receiver = version.holders.get(holder_id) if version is not None else None
        if version is None or receiver is None:
            return None
        receiver.num_ready = report.num_ready
        if receiver.phase is not HolderPhase.PULLING or holder_id == version.origin:
            return None
        ahead = {source: self._num_ready(version, source) for source in _parents(receiver)}
        return Pulling(
            self.name,
            report.version,
            report.uid,
            version.chunk_nbytes,
            report.num_ready,
            report.nbytes_from,
            ahead,
        )

    @staticmethod
    def _num_ready(version: _Version, holder_id: str) -> int:
        holder = version.holders.get(holder_id)
        if holder is None:
            return 0
        return version.num_chunks if holder.phase is HolderPhase.WHOLE else holder.num_ready

    def have(self, holder_id: str, number: int, uid: int, ready: bytes) -> None:
        version = self._find(number, uid)
        if version is not None and holder_id in version.holders:
            version.holders[holder_id].ready = ready

    def adopted(self, holder_id: str, report: SlotReport, manifest: Manifest) -> None:
        """A restarted holder has a whole slot again."""
        self.manifests.setdefault(report.manifest_digest, manifest)
        self.manifest_digest = self.manifest_digest or report.manifest_digest
        self._restore_slot(holder_id, report)

    # --- holders
    def restore(self, holder_id: str, report: ChannelReport, view: View) -> None:
        """What a holder says of the channel when it (re)connects. The coordinator may know nothing else."""
        self._remember(report.highest_version)
        for manifest in report.manifests:
            self.manifests[manifest.digest()] = manifest
        for replica in report.replicas:
            self.register_replica(holder_id, replica)
        if report.trainer is not None and report.manifests:
            with contextlib.suppress(ChannelError):  # a second trainer: the present one stays
                self.register_trainer(holder_id, report.trainer, report.manifests[-1], report.highest_version, view)
                if report.highest_version < self.highest:
                    self._orders.append((holder_id, Known(self.name, self.highest)))
        for slot in report.slots:
            self._restore_slot(holder_id, slot)
        if not self.manifest_digest and report.manifests:
            self.manifest_digest = report.manifests[-1].digest()

    def _restore_slot(self, holder_id: str, report: SlotReport) -> None:
        self._remember(report.version)
        version = self.versions.get(report.version)
        is_trainers = self.trainer is not None and self.trainer.holder_id == holder_id
        if version is not None and version.uid != report.uid and is_trainers and not version.is_announced:
            self._disown(report.version)  # a holder of a former run was faster
            version = None
        problem = self._problem_with(report, version, is_trainers=is_trainers)
        if problem:
            self._orders.append((holder_id, Abort(self.name, report.version, report.uid, problem)))
            return
        if version is None:
            version = _Version(report.uid, report.step, report.nbytes, report.chunk_nbytes, report.manifest_digest)
            self.versions[report.version] = version
        if report.is_origin:
            version.origin = holder_id
        if report.digests and not version.is_sealed:
            version.is_sealed, version.digests = True, report.digests
        receiver = version.holders.setdefault(holder_id, _Receiver())
        receiver.stripes = ()
        receiver.phase = HolderPhase.WHOLE if report.is_whole else HolderPhase.PULLING
        if report.is_whole and version.phase is VersionPhase.PENDING:
            version.phase = VersionPhase.STAGED

    def _problem_with(self, report: SlotReport, version: _Version | None, *, is_trainers: bool) -> str:
        """Why nobody may be given that slot; empty if it is what is known as this version."""
        if version is None:
            # Nobody has it but its origin, unless we ordered it: we would know of it.
            announced = max((n for n, known in self.versions.items() if known.is_announced), default=0)
            counted = max(announced, self.trainer.published if self.trainer is not None else 0)
            return FORMER_RUN if 0 < counted < report.version and not is_trainers else ""
        if version.uid != report.uid:
            return FORMER_RUN
        if version.is_over:  # it was given up while this holder was away
            return version.error
        is_wrong = report.is_whole and version.is_sealed and version.digests != report.digests
        return "its bytes are not those of the version" if is_wrong else ""

    def holder_lost(self, holder_id: str) -> None:
        """A holder has gone with its members and whatever it held."""
        if self.trainer and self.trainer.holder_id == holder_id:
            self.trainer = None
        for member_id in [m for m, r in self.replicas.items() if r.holder_id == holder_id]:
            del self.replicas[member_id]
        for number, version in self.versions.items():
            receiver = version.holders.get(holder_id)
            if receiver is not None and receiver.phase is not HolderPhase.FAILED:
                receiver.phase = HolderPhase.LOST
            if version.origin == holder_id and not version.is_sealed and not version.is_over:
                self._end(number, VersionPhase.ABORTED, f"its origin {holder_id} was lost before it was whole")

    # --- what should be
    def reconcile(self, view: View, now: float, transfer_timeout_s: float) -> list[Order]:
        """Orders that bring the holders to where they should be. Calling it again without an event orders nothing."""
        self._planner.see(view, now)
        while True:
            self._start_next(now, transfer_timeout_s)
            number = self._on_its_way() or self.newest_staged(view)
            if number:
                self._retry(number, now)
                self._feed(number, view)
            if not self._finish(now):
                orders, self._orders = self._orders, []
                return [order for order in orders if view.holder(order[0])]

    def _on_its_way(self) -> int:
        return max((n for n, v in self.versions.items() if v.phase is VersionPhase.TRANSFERRING), default=0)

    def newest_staged(self, view: View) -> int:
        """The newest version that some living holder has whole, 0 when there is none."""
        whole = [
            number
            for number, version in self.versions.items()
            if version.phase is VersionPhase.STAGED
            and any(r.phase is HolderPhase.WHOLE and view.holder(h) for h, r in version.holders.items())
        ]
        return max(whole, default=0)

    def _start_next(self, now: float, transfer_timeout_s: float) -> None:
        if self._on_its_way():
            return
        pending = [number for number, version in self.versions.items() if version.phase is VersionPhase.PENDING]
        if pending:
            version = self.versions[max(pending)]
            version.phase = VersionPhase.TRANSFERRING
            version.deadline = now + transfer_timeout_s
            self._orders.append((version.origin, Flight(self.name, max(pending), version.uid, True)))

    def _retry(self, number: int, now: float) -> None:
        """A host that failed may fetch the newest version later, when nobody waits for it."""
        version = self.versions[number]
        for receiver in version.holders.values():
            if receiver.phase is not HolderPhase.FAILED:
                receiver.retry_at = None
            elif receiver.retry_at is None:
                receiver.retry_at = now + RETRY_S
            elif now >= receiver.retry_at and version.phase is VersionPhase.STAGED:
                receiver.phase, receiver.stripes, receiver.retry_at = HolderPhase.PULLING, (), None

    def _feed(self, number: int, view: View) -> None:
        """Order a `Pull` for every holder that needs the version and has no source, or gets another one."""
        version = self.versions[number]
        wanting = {replica.holder_id for replica in self.replicas.values()}
        for holder in view.holders:
            if holder.holder_id in wanting:
                receiver = version.holders.setdefault(holder.holder_id, _Receiver())
                if receiver.phase is HolderPhase.LOST:  # it is back, empty
                    version.holders[holder.holder_id] = _Receiver()
        for other, receiver in version.holders.items():
            if receiver.phase is HolderPhase.PULLING and other != version.origin and other not in wanting:
                receiver.phase = HolderPhase.LOST  # its last replica has left
                reason = "no replica on this host wants it any more"
                self._orders.append((other, Abort(self.name, number, version.uid, reason)))
        living = {h: r for h, r in version.holders.items() if view.holder(h)}
        pulling = [h for h, r in living.items() if r.phase is HolderPhase.PULLING and h != version.origin]
        if not pulling:
            self._planner.landed(self.name)
            return
        usable = {h for h, r in living.items() if r.phase in (HolderPhase.PULLING, HolderPhase.WHOLE)}
        whole = [h for h in usable if version.holders[h].phase is HolderPhase.WHOLE and h != version.origin]
        roots = sorted(whole) + [version.origin] * (version.origin in usable)
        if roots:
            self._route(number, view, pulling, usable, roots)
        else:
            self._recover(number, view, pulling)

    def _route(self, number: int, view: View, pulling: list[str], usable: set[str], roots: list[str]) -> None:
        """Routes for those who have none, or for all where one that was routed has lost its source."""
        version = self.versions[number]
        routed = [h for h in pulling if version.holders[h].stripes]
        lost = [h for h in routed if not usable.issuperset(names[0] for names in version.holders[h].stripes)]
        new = [h for h in pulling if h not in routed]
        is_first = version.epoch is None
        if is_first or lost or version.epoch != self._planner.epoch:
            main = [h for h in pulling if is_first or not version.holders[h].is_late]
            new = [h for h in pulling if h not in main]
            if main:
                self._send_along(number, view, main, roots, is_beside=False)
            version.epoch = self._planner.epoch
        if new:
            for h in new:
                version.holders[h].is_late = True
            ahead = [h for h in pulling if h not in new]
            self._send_along(number, view, new, [*ahead[: -MAX_SOURCES // 2 : -1], *roots], is_beside=True)

    def _send_along(self, number: int, view: View, receivers: list[str], roots: list[str], *, is_beside: bool) -> None:
        version = self.versions[number]
        routing = self._planner.route(self.name, version.nbytes, roots, receivers, is_beside=is_beside)
        if not is_beside and version.origin in roots:
            self._prefer_chunks(version.origin, version.nbytes, routing.chunk_nbytes)
        changed = False
        for receiver, stripes in routing.lanes[0].sources(MAX_SOURCES).items():
            with_roots = tuple(tuple(dict.fromkeys((*names, *roots)))[:MAX_SOURCES] for names in stripes)
            changed |= self._order_pull(number, receiver, with_roots, view, PATIENCE_S)
        if changed:
            self.plans.append((number, routing))

    def look_ahead(self, view: View, now: float) -> list[Order]:
        """Between versions, once nobody has come or gone since the last call: make the next one's routes.

        The trainer's holder is told in which chunks they want it.
        """
        self._planner.see(view, now)
        trainer = self.trainer
        if trainer is None or self._on_its_way():
            return []
        ahead = (view.number, self._planner.epoch, self._num_changes, trainer.incarnation, self.manifest_digest)
        if ahead != self._ahead:
            self._ahead, self._is_planned_ahead = ahead, False
            return []
        if self._is_planned_ahead:
            return []
        self._is_planned_ahead = True
        wanting = {replica.holder_id for replica in self.replicas.values()} - {trainer.holder_id}
        receivers = [h.holder_id for h in view.holders if h.holder_id in wanting]
        if not receivers:
            return []
        nbytes = lane_of(self.manifests[self.manifest_digest]).nbytes
        routing = self._planner.route(self.name, nbytes, [trainer.holder_id], receivers)
        self._planner.landed(self.name)
        self._prefer_chunks(trainer.holder_id, nbytes, routing.chunk_nbytes)
        orders, self._orders = self._orders, []
        return orders

    def _prefer_chunks(self, holder_id: str, nbytes: int, chunk_nbytes: int) -> None:
        """Tell the trainer's holder once in which chunks its next versions should come."""
        told = (holder_id, self.trainer.incarnation if self.trainer else "", nbytes, chunk_nbytes)
        if told != self._told_chunks:
            self._told_chunks = told
            self._orders.append((holder_id, Prepare(self.name, nbytes, chunk_nbytes)))

    def _recover(self, number: int, view: View, pulling: list[str]) -> None:
        """The origin is lost and nobody is whole: ask who has what, then let them complete each other, or abort."""
        version = self.versions[number]
        if not version.is_sealed:
            self._end(number, VersionPhase.ABORTED, "its origin was lost before its digests were known")
            return
        silent = [h for h in pulling if version.holders[h].ready is None]
        if silent:
            asking = [h for h in silent if not version.holders[h].is_asked]
            self._orders += [(h, AskHave(self.name, number, version.uid)) for h in asking]
            for h in asking:
                version.holders[h].is_asked = True
            return
        order, is_covered = recovery_order({h: version.holders[h].ready or b"" for h in pulling}, version.num_chunks)
        if not is_covered:
            self._end(number, VersionPhase.ABORTED, "its origin was lost and the other hosts do not have all of it")
            return
        # A chain, the one that has most before the others; it gets from them what it lacks.
        for place, holder_id in enumerate(order):
            others = [*order[max(0, place - 1) : place], *order[:1], *order[: max(0, place - 1)][::-1]]
            sources = tuple(dict.fromkeys(others)) if place else tuple(order[1:])
            self._order_pull(number, holder_id, (sources,), view, RECOVERY_PATIENCE_S)

    def _order_pull(self, number: int, holder_id: str, stripes: Stripes, view: View, patience_s: float) -> bool:
        version = self.versions[number]
        receiver = version.holders[holder_id]
        if receiver.stripes == stripes:
            return False
        receiver.stripes = stripes
        records = {name: view.holder(name) for names in stripes for name in names}
        sources = {name: record.source() for name, record in records.items() if record is not None}
        places = {name: place for place, name in enumerate(sources)}
        pull = Pull(
            channel=self.name,
            version=number,
            uid=version.uid,
            step=version.step,
            nbytes=version.nbytes,
            chunk_nbytes=version.chunk_nbytes,
            manifest_digest=version.manifest_digest,
            sources=tuple(sources.values()),
            stripes=tuple(tuple(places[name] for name in names if name in places) for names in stripes),
            patience_s=patience_s,
            digests=version.digests,
            is_sealed=version.is_sealed,
        )
        self._orders.append((holder_id, pull))
        return True

    def _finish(self, now: float) -> bool:
        """End the transfer that is complete, or late. True when the next may start."""
        number = self._on_its_way()
        if not number:
            return False
        version = self.versions[number]
        for holder_id, receiver in version.holders.items():
            if now >= version.deadline and receiver.phase is HolderPhase.PULLING:
                receiver.phase, receiver.error = HolderPhase.FAILED, "left behind: not staged by its deadline"
                self._orders.append((holder_id, Abort(self.name, number, version.uid, receiver.error)))
        if any(receiver.phase is HolderPhase.PULLING for receiver in version.holders.values()):
            return False
        if not version.is_sealed:
            self._end(number, VersionPhase.ABORTED, "it was not packed by its deadline")
            return True
        version.phase = VersionPhase.STAGED
        self._planner.landed(self.name)
        self._orders.append((version.origin, Flight(self.name, number, version.uid, False)))
        return True

    def _end(self, number: int, phase: VersionPhase, reason: str) -> None:
        version = self.versions[number]
        if version.is_over:
            return
        for holder_id, receiver in version.holders.items():
            if receiver.phase is HolderPhase.PULLING or holder_id == version.origin:
                self._orders.append((holder_id, Abort(self.name, number, version.uid, reason)))
        if version.phase is VersionPhase.TRANSFERRING:
            self._planner.landed(self.name)
        version.phase, version.error = phase, reason

    def _forget_old(self) -> None:
        for number in sorted(self.versions)[:-NUM_REMEMBERED]:
            if self.versions[number].phase is not VersionPhase.TRANSFERRING:
                del self.versions[number]
        used = {version.manifest_digest for version in self.versions.values()} | {self.manifest_digest}
        self.manifests = {digest: m for digest, m in self.manifests.items() if digest in used}
        for replica in self.replicas.values():
            replica.pauses = {n: s for n, s in replica.pauses.items() if n in self.versions}
            replica.errors = {n: e for n, e in replica.errors.items() if n in self.versions}

    # --- what is
    def status(self, number: int, view: View, *, uid: int = 0) -> VersionStatus:
        """Raises `ChannelError` for a version that is not remembered, or whose uid is not the one that is given."""
        version = self.versions.get(number)
        if version is not None and uid not in (0, version.uid):
            raise ChannelError(
                f"version {number} of '{self.name}' was dropped: another trainer has given that number",
                hint="publish the next version",
                context=ErrorContext(channel=self.name, version=number),
            )
        if version is None:
            raise ChannelError(
                f"channel '{self.name}' has no version {number}",
                hint=f"the last {NUM_REMEMBERED} are remembered; the newest is {self.highest}",
                context=ErrorContext(channel=self.name, version=number),
            )
        hosts = {record.holder_id: record.host for record in view.holders}
        holders = tuple(
            HolderStatus(hosts.get(h, h), r.phase, r.nbytes_received, r.transfer_s, _parents(r), r.error)
            for h, r in version.holders.items()
            if h != version.origin
        )
        replicas = tuple(
            ReplicaStatus(
                member_id,
                hosts.get(replica.holder_id, replica.holder_id),
                self._replica_phase(replica, number, version),
                replica.pauses.get(number, 0.0),
                replica.errors.get(number, "") or _receiver_error(version, replica.holder_id),
            )
            for member_id, replica in self.replicas.items()
        )
        return VersionStatus(
            self.name, number, version.step, version.phase, version.nbytes, version.error, holders, replicas
        )

    def _replica_phase(self, replica: _Replica, number: int, version: _Version) -> ReplicaPhase:
        committed = replica.committed_version
        if committed > number or (committed == number and replica.committed_uid == version.uid):
            return ReplicaPhase.COMMITTED
        receiver = version.holders.get(replica.holder_id)
        if number in replica.errors or (receiver is not None and receiver.phase is HolderPhase.FAILED):
            return ReplicaPhase.FAILED
        if receiver is None:
            return ReplicaPhase.JOINING
        return ReplicaPhase.STAGED if receiver.phase is HolderPhase.WHOLE else ReplicaPhase.PULLING


def _parents(receiver: _Receiver) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names[0] for names in receiver.stripes))


def _receiver_error(version: _Version, holder_id: str) -> str:
    receiver = version.holders.get(holder_id)
    return receiver.error if receiver is not None else ""
