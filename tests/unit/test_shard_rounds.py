"""Rounds and members of a sharded channel, without clock or sockets."""

from __future__ import annotations

import pytest

from wsync.engine.lanes import plan_lanes
from wsync.engine.membership import HolderRecord, View
from wsync.engine.protocol import OpenRound, ShardReport
from wsync.engine.shards import KEEP_CLASS_S, NUM_REMEMBERED, Round, Shards
from wsync.errors import ChannelError, ManifestMismatch, PublishError
from wsync.holding import Holding, HoldingBuilder, Region
from wsync.status import (
    HolderPhase,
    HolderStatus,
    ReplicaPhase,
    ReplicaStatus,
    VersionPhase,
    VersionStatus,
    merged_status,
)

VIEW = View().joined(HolderRecord("A", "host-A", "i", 1, {})).joined(HolderRecord("B", "host-B", "i", 2, {}))


def holding(start: int, stop: int) -> Holding:
    built = HoldingBuilder()
    built.tensor("w", "float32", (4,))
    built.local("w", "float32", (stop - start,))
    built.piece("w", Region((start,), (stop - start,)), "w", (0,))
    return built.build()


class Scene:
    """Two ranks of two rows each, on one holder."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.shards = Shards("policy")
        self.serial = 0
        for rank in range(num_ranks):
            self.rank(rank)

    def rank(self, rank: int, incarnation: str = "i1", *, num_ranks: int = 2, last_version: int = 0) -> None:
        half = holding(2 * rank, 2 * rank + 2)
        report = ShardReport(f"trainer-{rank}", incarnation, rank, num_ranks, half, last_version)
        self.shards.register("A", report, VIEW)

    def worker(self, incarnation: str, start: int, stop: int, holder: str = "B") -> None:
        report = ShardReport("worker", incarnation, -1, 0, holding(start, stop), 0)
        self.shards.register(holder, report, VIEW)

    def plan(self) -> None:
        wanted = self.shards.to_plan()
        assert wanted is not None
        key, held, classes = wanted
        self.shards.planned(key, plan_lanes(held, classes), {})

    def open(
        self, rank: int, step: int, *, incarnation: str = "i1", serial: int = 0, known: int = 0, plan_id: str = ""
    ) -> Round:
        self.serial += 1
        wish = OpenRound("policy", rank, incarnation, serial or self.serial, step, plan_id, 1.0)
        return self.shards.open_round(wish, known_version=known)


def refuse_all(scene: Scene, why: str) -> None:
    wanted = scene.shards.to_plan()
    assert wanted is not None
    scene.shards.planned(wanted[0], plan_lanes(wanted[1], {}), dict.fromkeys(wanted[2], why))


def test_the_ranks_of_a_step_get_one_number() -> None:
    scene = Scene()
    assert scene.open(0, 7).version == 1
    assert scene.open(0, 8).version == 2
    first = scene.open(1, 7)
    assert (first.version, first.missing, first.is_open) == (1, (), False)
    assert scene.open(1, 8).version == 2
    assert scene.open(1, 9).version == scene.open(0, 9).version == 3


def test_asking_again_gives_the_same_round() -> None:
    scene = Scene()
    assert scene.open(0, 1, serial=5).version == scene.open(0, 1, serial=5).version == 1
    assert scene.open(0, 1, serial=6).version == 2


def test_numbers_are_newer_than_all_that_anybody_knows() -> None:
    scene = Scene(1)
    scene.rank(1, last_version=4)
    assert scene.open(0, 1).version == 5
    assert scene.open(1, 1).version == 5
    assert scene.open(0, 2, known=9).version == 10


def test_a_rank_that_went_past_a_round_drops_it() -> None:
    scene = Scene()
    lost, kept = scene.open(0, 2), scene.open(0, 3)
    assert scene.open(1, 3) is kept
    assert lost.error == "trainer rank 1 offers step 3 for version 1, ranks [0] offered step 2"
    assert not kept.error


def test_a_step_that_nobody_else_offers_drops_what_waits() -> None:
    scene = Scene()
    lost = scene.open(0, 2)
    with pytest.raises(PublishError, match=r"rank 1 offers step 9 for version 1"):
        scene.open(1, 9)
    assert lost.error
    assert scene.open(1, 3).version == scene.open(0, 3).version == 2


def test_a_rank_that_starts_anew_drops_open_rounds_and_one_that_joins_again_does_not() -> None:
    scene = Scene()
    done, lost = scene.open(0, 1), scene.open(0, 2)
    scene.open(1, 1)
    scene.shards.holder_lost("A")
    scene.rank(1)
    assert not lost.error
    scene.rank(1, "i2")
    assert "rank 1 was started anew" in lost.error
    assert not done.error
    with pytest.raises(PublishError, match="has been replaced"):
        scene.open(1, 2)
    assert scene.open(1, 3, incarnation="i2").version == scene.open(0, 3).version == 3


def test_a_rank_cannot_run_away() -> None:
    scene = Scene()
    for step in range(NUM_REMEMBERED):
        scene.open(0, step)
    with pytest.raises(PublishError, match=rf"rank 0 is {NUM_REMEMBERED} versions ahead of ranks \[1\]"):
        scene.open(0, 99)
    assert scene.open(1, 0).version == 1
    assert scene.open(0, 99).version == NUM_REMEMBERED + 1


def test_ranks_that_do_not_fit_are_refused() -> None:
    scene = Scene(1)
    assert scene.shards.missing_ranks == (1,)
    assert scene.shards.to_plan() is None
    report = ShardReport("other", "i9", 0, 2, holding(0, 2), 0)
    with pytest.raises(ChannelError, match="rank 0 of 'policy' is published by trainer-0 already"):
        scene.shards.register("B", report, VIEW)
    with pytest.raises(ChannelError, match="counts 3 trainer ranks, rank 0 counts 2"):
        scene.rank(1, num_ranks=3)
    scene.shards.gone("trainer-0", "i1")
    scene.rank(1, num_ranks=3)
    assert scene.shards.missing_ranks == (0, 2)


def test_lanes_belong_to_holdings_and_not_to_names() -> None:
    scene = Scene()
    scene.worker("a", 0, 4)
    scene.worker("b", 0, 2)
    scene.plan()
    assert scene.shards.to_plan() is None
    plan, of_a = scene.shards.lanes_of("a", "")
    _, of_b = scene.shards.lanes_of("b", "")
    assert {lane.source for lane in of_a} == {0, 1}
    assert [lane.source for lane in of_b] == [0]
    assert scene.shards.lanes_of("i1", plan.plan_id)[1]
    with pytest.raises(ChannelError, match="has not joined"):
        scene.shards.lanes_of("c", "")
    with pytest.raises(ChannelError, match="no plan"):
        scene.shards.lanes_of("a", "another")


def test_a_refused_class_is_told_why() -> None:
    scene = Scene()
    scene.worker("a", 0, 4)
    refuse_all(scene, "'w' is too wide")
    with pytest.raises(ManifestMismatch, match="'w' is too wide"):
        scene.shards.lanes_of("a", "")


def test_lanes_of_workers_that_left_are_kept_for_a_while() -> None:
    scene = Scene()
    scene.worker("a", 0, 4)
    scene.worker("b", 0, 2)
    scene.plan()
    assert scene.shards.deserted_lanes() == ()
    former = {lane.lane_id for lane in scene.shards.plan.lanes}  # type: ignore[union-attr]
    scene.shards.gone("worker", "b")
    scene.shards.forget_deserted(10.0)
    assert scene.shards.to_plan() is None
    assert scene.shards.can_answer("a")
    scene.worker("b2", 0, 2)
    scene.shards.forget_deserted(20.0 + KEEP_CLASS_S)
    assert scene.shards.to_plan() is None, "it came back"
    scene.shards.gone("worker", "b2")
    scene.shards.forget_deserted(100.0)
    scene.shards.forget_deserted(101.0 + KEEP_CLASS_S)
    scene.plan()
    present = {lane.lane_id for lane in scene.shards.plan.lanes}  # type: ignore[union-attr]
    opened = scene.open(0, 1)
    assert scene.shards.retired_lanes(opened) == set(), "a rank may still use them"
    opened = scene.open(1, 1)
    assert scene.shards.retired_lanes(opened) == former - present != set()
    assert scene.shards.retired_lanes(opened) == set()


def test_ranks_go_on_with_their_plan_while_a_new_coordinator_knows_no_worker() -> None:
    scene = Scene()
    scene.plan()
    assert scene.open(0, 1, plan_id="of-before").plan_id == "of-before"
    scene.worker("a", 0, 4)
    scene.plan()
    assert scene.open(0, 2, plan_id="of-before").plan_id == scene.shards.plan.plan_id  # type: ignore[union-attr]


def test_a_layout_that_came_after_the_newest_version_is_late_for_it() -> None:
    scene = Scene()
    scene.worker("a", 0, 4)
    scene.plan()
    assert scene.shards.late_for(scene.shards.lanes_of("a", "")[1]) == 0, "nothing has been published"
    scene.open(0, 1)
    scene.open(1, 1)
    assert scene.shards.late_for(scene.shards.lanes_of("a", "")[1]) == 0
    scene.worker("b", 0, 1)
    scene.plan()
    assert scene.shards.late_for(scene.shards.lanes_of("b", "")[1]) == 1
    assert scene.shards.late_for(scene.shards.lanes_of("a", "")[1]) == 1, "what they share is a lane of its own now"
    assert scene.open(0, 2).version == scene.open(1, 2).version == 2
    assert scene.shards.late_for(scene.shards.lanes_of("b", "")[1]) == 0


def test_a_report_names_workers_that_are_refused_or_have_gone() -> None:
    scene = Scene()
    scene.worker("a123456789", 0, 4)
    refuse_all(scene, "'w' is too wide")
    assert scene.open(0, 1).version == 1
    report = scene.shards.report(1, VIEW)
    assert report.missing_ranks == (1,)
    assert report.workers == (ReplicaStatus("worker-a12345", "host-B", ReplicaPhase.FAILED, error="'w' is too wide"),)
    scene.shards.gone("worker", "another")
    assert scene.shards.report(1, VIEW) == report
    scene.shards.gone("worker", "a123456789")
    assert scene.shards.report(1, VIEW).workers == ()
    assert (scene.shards.report(1, VIEW).left, scene.shards.report(1, VIEW).lost) == (("worker-a12345",), ())
    scene.worker("b", 0, 4)
    assert scene.shards.report(1, VIEW).left == (), "another one has taken its place"
    scene.shards.holder_lost("B")
    assert (scene.shards.report(1, VIEW).left, scene.shards.report(1, VIEW).lost) == ((), ("worker-b",))
    scene.shards.forget_deserted(10.0)
    scene.shards.forget_deserted(11.0 + KEEP_CLASS_S)
    assert scene.shards.report(1, VIEW).lost == ()


def lane(phase: VersionPhase, replicas: dict[str, ReplicaPhase], received: int, error: str = "") -> VersionStatus:
    holders = (HolderStatus("host-B", HolderPhase.PULLING, received, 0.5, (f"A{received}",)),)
    known = tuple(ReplicaStatus(name, "host-B", phase, received / 10) for name, phase in replicas.items())
    return VersionStatus("policy#lane", 3, 7, phase, 100, error, holders, known)


def test_lanes_of_one_version_are_as_far_as_the_least() -> None:
    lanes = [
        lane(VersionPhase.STAGED, {"a": ReplicaPhase.COMMITTED, "b": ReplicaPhase.STAGED}, 1),
        lane(VersionPhase.TRANSFERRING, {"a": ReplicaPhase.COMMITTED, "b": ReplicaPhase.PULLING}, 2),
    ]
    workers = [
        ReplicaStatus("a", "host-B", ReplicaPhase.JOINING),
        ReplicaStatus("b", "host-B", ReplicaPhase.FAILED, error="too wide"),
        ReplicaStatus("c", "host-B", ReplicaPhase.JOINING),
    ]
    merged = merged_status(lanes, workers)
    assert (merged.phase, merged.nbytes, merged.error) == (VersionPhase.TRANSFERRING, 200, "")
    assert merged.holders == (HolderStatus("host-B", HolderPhase.PULLING, 3, 0.5, ("A1", "A2")),)
    assert merged.replicas == (
        ReplicaStatus("a", "host-B", ReplicaPhase.COMMITTED, 0.2),
        ReplicaStatus("b", "host-B", ReplicaPhase.FAILED, 0.2, "too wide"),
        ReplicaStatus("c", "host-B", ReplicaPhase.JOINING),
    )
    assert merged_status(lanes[:1], workers[:1]).replicas[1].phase is ReplicaPhase.STAGED
    lost = lane(VersionPhase.ABORTED, {}, 0, "its origin was lost")
    assert (merged_status([*lanes, lost], ()).phase, merged_status([lost], ()).error) == (lost.phase, lost.error)
    assert merged_status([], ()).phase is VersionPhase.PENDING
