"""What the coordinator knows of a channel whose state is sharded: who holds and who wants what, and the rounds. Pure.

Trainer ranks and workers describe their holdings when they join. From these the lanes are planned; each lane is then a
channel of its own (`lane_channel`), with an origin, receivers, routes and recovery like any other. What is left to
this module is what the lanes of one version have in common: its number, its step, and that every rank takes part.

A version's number is given by a *round*: the first rank that publishes opens it, the others join it. Numbers are the
same in every lane, so that a worker commits the lanes of one number together or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import xxhash

from wsync.engine.lanes import ShardLane, ShardPlan
from wsync.engine.membership import View
from wsync.engine.protocol import OpenRound, RoundReport, ShardReport
from wsync.errors import ChannelError, ErrorContext, ManifestMismatch, PublishError
from wsync.holding import Holding
from wsync.status import ReplicaPhase, ReplicaStatus

NUM_REMEMBERED = 16
"""Plans that are kept for those who are late; how many versions one rank may be ahead of another."""
KEEP_CLASS_S = 60.0
"""How long the lanes of workers that have all left are kept: one that is started again finds its version."""

PlanKey = tuple[tuple[str, ...], tuple[str, ...]]
"""Digests of the trainer ranks' holdings, in order of rank, and of the wanted ones."""


def lane_channel(channel: str, lane_id: str) -> str:
    """The channel over which a lane travels."""
    return f"{channel}#{lane_id}"


def worker_name(member_id: str, incarnation: str) -> str:
    """What a worker is called in its lanes: ids may be shared, in one actor say."""
    return f"{member_id}-{incarnation[:6]}"


@dataclass
class _Member:
    holder_id: str
    report: ShardReport
    digest: str

    @property
    def identity(self) -> tuple[str, str]:
        return self.report.member_id, self.report.incarnation

    @property
    def name(self) -> str:
        return worker_name(*self.identity)


@dataclass
class Round:
    """A version of all ranks. `ranks` have joined it, each with (incarnation, serial); complete when all have."""

    version: int
    uid: int
    step: int
    plan_id: str
    num_ranks: int
    ranks: dict[int, tuple[str, int]] = field(default_factory=dict)
    error: str = ""

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.num_ranks) if rank not in self.ranks)

    @property
    def is_open(self) -> bool:
        return bool(self.missing) and not self.error


class Shards:
    """State of one sharded channel at the coordinator."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.highest = 0
        self.plan: ShardPlan | None = None
        self.plans: dict[str, ShardPlan] = {}
        self.rounds: dict[int, Round] = {}
        self._trainers: dict[int, _Member] = {}
        self._incarnations: dict[int, str] = {}
        self._workers: dict[str, _Member] = {}
        """By incarnation: members may share an id."""
        self._classes: dict[str, Holding] = {}
        self._deserted_at: dict[str, float] = {}
        self._absent: dict[str, tuple[str, bool]] = {}
        """Of each class the last worker that has gone, and whether with its holder: then it may come back."""
        self._refused: dict[str, str] = {}
        self._planned: PlanKey | None = None
        self._used_lanes: set[str] = set()

    # --- members
    def register(self, holder_id: str, report: ShardReport, view: View) -> None:
        """Raises `ChannelError` for a rank that lives already, or that counts the ranks otherwise than the others."""
        self.highest = max(self.highest, report.last_version)
        member = _Member(holder_id, report, report.holding.digest())
        if not report.is_trainer:
            self._workers[report.incarnation] = member
            self._classes[member.digest] = report.holding
            self._deserted_at.pop(member.digest, None)
            self._absent.pop(member.digest, None)
            return
        context = ErrorContext(channel=self.name, phase="join")
        for rank, other in self._trainers.items():
            is_itself = (rank, other.report.member_id) == (report.rank, report.member_id)
            if is_itself or not view.holder(other.holder_id):
                continue
            if other.report.num_ranks != report.num_ranks:
                raise ChannelError(
                    f"rank {report.rank} of '{self.name}' counts {report.num_ranks} trainer ranks, rank {rank} counts "
                    f"{other.report.num_ranks}",
                    hint="all ranks must be started with the same number; ranks of a former run must be closed first",
                    context=context,
                )
            if rank == report.rank:
                raise ChannelError(
                    f"rank {rank} of '{self.name}' is published by {other.report.member_id} already",
                    hint="close that publisher first, or give each process its own rank",
                    context=context,
                )
        if report.num_ranks != len(self._trainers):
            self._trainers = {r: m for r, m in self._trainers.items() if m.report.num_ranks == report.num_ranks}
        self._trainers[report.rank] = member
        former = self._incarnations.get(report.rank, report.incarnation)
        self._incarnations[report.rank] = report.incarnation
        if former != report.incarnation:
            self._drop_rounds(report.rank)

    def _drop_rounds(self, rank: int) -> None:
        """A rank is new: it has not packed what it joined before, and does not know the rounds that wait for it."""
        for entry in self.rounds.values():
            if entry.is_open:
                entry.error = f"trainer rank {rank} was started anew before every rank had published it"

    def gone(self, member_id: str, incarnation: str) -> None:
        """A message about a former incarnation changes nothing. Classes are kept: their workers may come back."""
        gone = (member_id, incarnation)
        self._trainers = {rank: m for rank, m in self._trainers.items() if m.identity != gone}
        self._lose([m for m in self._workers.values() if m.identity == gone], with_holder=False)

    def holder_lost(self, holder_id: str) -> None:
        """Its workers have gone with it. Trainer ranks join again with their next publish, and are kept until then."""
        self._lose([m for m in self._workers.values() if m.holder_id == holder_id], with_holder=True)

    def _lose(self, workers: Iterable[_Member], *, with_holder: bool) -> None:
        for worker in workers:
            del self._workers[worker.report.incarnation]
            self._absent[worker.digest] = worker.name, with_holder

    # --- the plan
    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Trainer ranks that have not joined; rank 0 when none has."""
        num_ranks = next((member.report.num_ranks for member in self._trainers.values()), 1)
        return tuple(rank for rank in range(num_ranks) if rank not in self._trainers)

    def is_published(self, view: View) -> bool:
        """Whether a trainer rank is there."""
        return any(view.holder(member.holder_id) for member in self._trainers.values())

    def can_answer(self, incarnation: str) -> bool:
        """Whether the member's lanes are known, or can be planned: a worker like others needs no trainer for that."""
        worker = self._workers.get(incarnation)
        is_planned = worker is not None and self._planned is not None and worker.digest in self._planned[1]
        return is_planned or not self.missing_ranks

    def to_plan(self) -> tuple[PlanKey, Mapping[int, Holding], Mapping[str, Holding]] | None:
        """What a new plan has to be made of; None while ranks are missing, or when the present one is of this."""
        if self.missing_ranks:
            return None
        held = {rank: self._trainers[rank].report.holding for rank in sorted(self._trainers)}
        key = (tuple(self._trainers[rank].digest for rank in sorted(held)), tuple(sorted(self._classes)))
        if key == self._planned:
            return None
        return key, held, dict(self._classes)

    def planned(self, key: PlanKey, plan: ShardPlan | None, refused: Mapping[str, str]) -> None:
        """The plan for `key`; `refused` says which classes could not be served, and why."""
        self._planned, self.plan, self._refused = key, plan, dict(refused)
        if plan is not None:
            self._used_lanes |= {lane.lane_id for lane in plan.lanes}
            self.plans.pop(plan.plan_id, None)
            self.plans[plan.plan_id] = plan
            while len(self.plans) > NUM_REMEMBERED:
                del self.plans[next(iter(self.plans))]

    def lanes_of(self, incarnation: str, plan_id: str) -> tuple[ShardPlan, tuple[ShardLane, ...]]:
        """The plan (the present one, or `plan_id`) and the member's lanes in it.

        Raises ManifestMismatch for a member whose holding does not go with the others, ChannelError for a stranger.
        """
        plan = self.plans.get(plan_id) if plan_id else self.plan
        worker = self._workers.get(incarnation)
        rank = next((r for r, member in self._trainers.items() if member.report.incarnation == incarnation), -1)
        if worker is None and rank < 0:
            raise ChannelError(f"this member has not joined '{self.name}'", hint="join again")
        problem = self._refused.get(worker.digest if worker is not None else "")
        if problem:
            raise ManifestMismatch(problem, context=ErrorContext(channel=self.name, phase="plan"))
        if plan is None:
            raise ChannelError(f"'{self.name}' has no plan {plan_id or 'yet'}", hint="join again")
        return plan, plan.of_receiver(worker.digest) if worker is not None else plan.of_source(rank)

    def late_for(self, lanes: Iterable[ShardLane]) -> int:
        """The newest version if it was published by a plan that lacks one of these lanes; 0 otherwise."""
        newest = max((version for version, entry in self.rounds.items() if not entry.error), default=0)
        plan = self.plans.get(self.rounds[newest].plan_id) if newest else None
        known = {lane.lane_id for lane in plan.lanes} if plan is not None else {lane.lane_id for lane in lanes}
        return newest if any(lane.lane_id not in known for lane in lanes) else 0

    def deserted_lanes(self) -> tuple[str, ...]:
        """Lanes of the remembered plans that no worker wants: all have left. Workers that were lost with their holder
        may come back: they follow their lanes before they speak with us again.
        """
        living = {member.digest for member in self._workers.values()}
        living |= {digest for digest, (_, with_holder) in self._absent.items() if with_holder}
        lanes = {lane.lane_id: lane for plan in self.plans.values() for lane in plan.lanes}
        return tuple(lane_id for lane_id, lane in lanes.items() if not living.intersection(lane.receivers))

    def forget_deserted(self, now: float) -> None:
        """Classes whose workers have all left some time ago are not planned for any more."""
        living = {member.digest for member in self._workers.values()}
        self._deserted_at = {d: self._deserted_at.get(d, now) for d in self._classes if d not in living}
        for digest, since in list(self._deserted_at.items()):
            if now - since > KEEP_CLASS_S:
                del self._classes[digest], self._deserted_at[digest]
                self._absent.pop(digest, None)

    # --- rounds
    def open_round(self, wish: OpenRound, *, known_version: int) -> Round:
        """The round in which this rank's next version takes part; opened if it is the first. All ranks have joined.

        A round that the rank has gone past is dropped. `known_version` is the newest that any lane has. Raises
        PublishError when the other ranks wait with another step: that version is dropped whole.
        """
        rank, incarnation, step = wish.rank, wish.incarnation, wish.step
        member = self._trainers.get(rank)
        context = ErrorContext(channel=self.name, phase="publish")
        if member is None or member.report.incarnation != incarnation:
            raise PublishError(f"rank {rank} of '{self.name}' has been replaced", context=context)
        for entry in self.rounds.values():
            if entry.ranks.get(rank) == (incarnation, wish.serial) and not entry.error:
                return entry
        waiting = [entry for entry in self.rounds.values() if entry.is_open and rank not in entry.ranks]
        joined = next((entry for entry in waiting if entry.step == step), None)
        for entry in waiting:
            if joined is None or entry.version < joined.version:
                entry.error = (
                    f"trainer rank {rank} offers step {step} for version {entry.version}, ranks "
                    f"{sorted(entry.ranks)} offered step {entry.step}"
                )
        if joined is None and waiting:
            raise PublishError(
                waiting[0].error, hint="all ranks must publish the same steps in the same order", context=context
            )
        if joined is None:
            joined = self._new_round(wish, member.report.num_ranks, known_version)
        joined.ranks[rank] = (incarnation, wish.serial)
        return joined

    def _new_round(self, wish: OpenRound, num_ranks: int, known_version: int) -> Round:
        behind = [entry for entry in self.rounds.values() if entry.is_open]
        if len(behind) >= NUM_REMEMBERED:
            raise PublishError(
                f"trainer rank {wish.rank} is {len(behind)} versions ahead of ranks {list(behind[0].missing)}",
                hint="every rank must publish every step",
                context=ErrorContext(channel=self.name, phase="publish"),
            )
        self.highest = max(self.highest, known_version) + 1
        plan_id = self.plan.plan_id if self.plan is not None else ""
        if not self._workers and wish.plan_id:
            plan_id = wish.plan_id
        entry = self.rounds[self.highest] = Round(self.highest, self._uid(wish.step), wish.step, plan_id, num_ranks)
        over = [version for version, other in self.rounds.items() if not other.is_open]
        for version in over[: max(0, len(self.rounds) - 2 * NUM_REMEMBERED)]:
            del self.rounds[version]
        return entry

    def report(self, version: int, view: View) -> RoundReport:
        """What there is to say of a version but for its lanes."""
        entry = self.rounds.get(version)  # None: it was complete, or we are new
        workers: list[ReplicaStatus] = []
        for worker in self._workers.values():
            record, why = view.holder(worker.holder_id), self._refused.get(worker.digest, "")
            phase = ReplicaPhase.FAILED if why else ReplicaPhase.JOINING
            workers.append(ReplicaStatus(worker.name, record.host if record else worker.holder_id, phase, error=why))
        living = {worker.digest for worker in self._workers.values()}
        absent = [last for digest, last in self._absent.items() if digest not in living]
        left, lost = (tuple(name for name, with_holder in absent if with_holder == kind) for kind in (False, True))
        missing, error = (entry.missing, entry.error) if entry is not None else ((), "")
        return RoundReport(missing, error, self.deserted_lanes(), tuple(workers), left, lost)

    def _uid(self, step: int) -> int:
        """Of the version `highest`, made of what makes it: another coordinator would give it the same one, and ranks
        that were started anew get another.
        """
        ranks = [self._trainers[rank].report.incarnation for rank in sorted(self._trainers)]
        return xxhash.xxh3_64_intdigest("\0".join([self.name, str(self.highest), str(step), *ranks]).encode()) >> 1

    def retired_lanes(self, entry: Round) -> set[str]:
        """Lanes that nobody will use again, once: every rank has published by the present plan, which lacks them."""
        if entry.missing or self.plan is None or entry.plan_id != self.plan.plan_id:
            return set()
        present = {lane.lane_id for lane in self.plan.lanes}
        retired, self._used_lanes = self._used_lanes - present, present
        return retired
