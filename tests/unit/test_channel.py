"""The coordinator's state of one channel: what it orders after every event, without clock or sockets."""

from __future__ import annotations

import random
from typing import Any

import pytest

from wsync.engine.channel import Channel
from wsync.engine.membership import HolderRecord, View
from wsync.engine.planner import Planner
from wsync.engine.progress import HopWatch
from wsync.engine.protocol import (
    Abort,
    Announce,
    AskHave,
    ChannelReport,
    Committed,
    Flight,
    Known,
    Prepare,
    Progress,
    Pull,
    ReplicaReport,
    Seal,
    SlotReport,
    TrainerReport,
)
from wsync.errors import ChannelError, StaleView
from wsync.manifest import Manifest, TensorSpec
from wsync.status import HolderPhase, ReplicaPhase, VersionPhase
from wsync.topology import Host, Nic, NicKind, Topology

LARGE = Manifest((TensorSpec("w", "uint8", (256 << 20,)),))
MANIFEST = Manifest((TensorSpec("w", "uint8", (3 * 4096,)),))
DIGEST = MANIFEST.digest()
DIGESTS = (11, 22, 33)
UID = 7
TIMEOUT_S = 100.0


class Scene:
    """A channel with a trainer on holder T and replicas on other holders; `orders` are those of the last step."""

    def __init__(self, *hosts: str) -> None:
        self.planner = Planner()
        self.channel = Channel("policy", self.planner)
        self.view = View()
        self.now = 0.0
        self.join("T")
        self.channel.register_trainer("T", TrainerReport("trainer", "i1"), MANIFEST, 0, self.view)
        for host in hosts:
            self.replica(host)
        self.reconcile()

    def join(self, holder: str) -> None:
        self.view = self.view.joined(HolderRecord(holder, f"host-{holder}", "i", 1, {"tcp": holder.encode()}))

    def replica(self, holder: str, *, committed: int = 0, name: str = "") -> None:
        if self.view.holder(holder) is None:
            self.join(holder)
        self.channel.register_replica(holder, ReplicaReport(name or f"replica-{holder}", "i1", committed, UID))

    def lose(self, holder: str) -> None:
        self.view = self.view.left(holder)
        self.channel.holder_lost(holder)

    def reconcile(self) -> list[tuple[str, Any]]:
        self.orders = self.channel.reconcile(self.view, self.now, TIMEOUT_S)
        assert self.channel.reconcile(self.view, self.now, TIMEOUT_S) == [], "once more orders nothing"
        return self.orders

    def announce(self, number: int, *, replaces: int = 0, kept: tuple[int, ...] = ()) -> None:
        message = Announce("policy", "i1", number, UID, 10 * number, 3 * 4096, 4096, DIGEST, replaces, kept)
        self.channel.announce("T", message)

    def publish(self, number: int, **options: Any) -> None:
        self.announce(number, **options)
        self.channel.sealed("T", number, UID, DIGESTS)

    def staged(self, number: int, *holders: str) -> None:
        for holder in holders:
            self.channel.staged(holder, number, UID, 3 * 4096, 0.5)

    def pulls(self) -> dict[str, list[str]]:
        """Holders that were told to pull, with their sources."""
        return {to: [s.holder_id for s in m.sources] for to, m in self.orders if isinstance(m, Pull)}

    def sent(self, kind: type) -> list[tuple[str, int]]:
        return [(to, m.version) for to, m in self.orders if isinstance(m, kind)]

    def phase(self, number: int) -> VersionPhase:
        return self.channel.status(number, self.view).phase


def test_a_version_goes_along_the_chain_and_is_staged() -> None:
    scene = Scene("A", "B")
    scene.announce(1)
    scene.reconcile()
    assert scene.phase(1) is VersionPhase.TRANSFERRING
    assert scene.pulls() == {"A": ["T"], "B": ["A", "T"]}
    assert scene.sent(Flight) == [("T", 1)]
    scene.channel.sealed("T", 1, UID, DIGESTS)
    scene.reconcile()
    assert scene.sent(Seal) == [("A", 1), ("B", 1)]
    scene.staged(1, "A")
    assert scene.reconcile() == []
    scene.staged(1, "B")
    scene.reconcile()
    assert scene.phase(1) is VersionPhase.STAGED
    assert [m for _, m in scene.orders if isinstance(m, Flight)] == [Flight("policy", 1, UID, False)]
    assert {h.nbytes_received for h in scene.channel.status(1, scene.view).holders} == {3 * 4096}


def test_without_replicas_a_version_is_staged_when_sealed() -> None:
    scene = Scene()
    scene.announce(1)
    scene.reconcile()
    assert scene.phase(1) is VersionPhase.TRANSFERRING
    scene.channel.sealed("T", 1, UID, DIGESTS)
    scene.reconcile()
    assert scene.phase(1) is VersionPhase.STAGED


def test_one_version_at_a_time_and_the_newest_that_waits_comes_next() -> None:
    scene = Scene("A")
    for number in (1, 2, 3, 4):
        scene.publish(number)
        scene.reconcile()
    assert [scene.phase(n) for n in (1, 2, 3, 4)] == [
        VersionPhase.TRANSFERRING,
        VersionPhase.SUPERSEDED,
        VersionPhase.SUPERSEDED,
        VersionPhase.PENDING,
    ]
    assert "version 3 took its place" in scene.channel.status(2, scene.view).error
    scene.staged(1, "A")
    scene.reconcile()
    assert (scene.phase(1), scene.phase(4)) == (VersionPhase.STAGED, VersionPhase.TRANSFERRING)
    assert scene.pulls() == {"A": ["T"]}
    assert {("T", 1), ("T", 4)} <= set(scene.sent(Flight))


def test_a_version_whose_slot_was_taken_is_superseded_at_once() -> None:
    scene = Scene("A")
    scene.publish(1)
    scene.reconcile()
    scene.publish(2, replaces=1)
    scene.reconcile()
    assert (scene.phase(1), scene.phase(2)) == (VersionPhase.SUPERSEDED, VersionPhase.TRANSFERRING)
    assert ("A", 1) in scene.sent(Abort)
    assert scene.pulls() == {"A": ["T"]}


def test_late_joiners_get_what_is_on_its_way_or_the_newest_staged_one() -> None:
    scene = Scene("A")
    scene.publish(1)
    scene.reconcile()
    scene.staged(1, "A")
    scene.reconcile()
    scene.replica("B")
    scene.reconcile()
    assert scene.pulls() == {"B": ["A", "T"]}, "from a receiver, not from the trainer"
    scene.publish(2)
    scene.reconcile()
    scene.replica("C")
    scene.reconcile()
    assert scene.pulls() == {"C": ["B", "A", "T"]}, "and nobody else gets another source"


def test_whoever_comes_late_is_routed_beside_the_others_until_they_are_routed_anew() -> None:
    scene = Scene("A", "B")
    scene.publish(1)
    scene.reconcile()
    for late in "CD":
        scene.replica(late)
        scene.reconcile()
        assert list(scene.pulls()) == [late]
    scene.lose("A")
    scene.reconcile()
    assert {to: names[0] for to, names in scene.pulls().items()} == {"B": "T", "C": "B", "D": "C"}
    scene.staged(1, "B", "C", "D")
    scene.reconcile()
    scene.publish(2)
    scene.reconcile()
    assert scene.pulls() == {"B": ["T"], "C": ["B", "T"], "D": ["C", "T", "B"]}, "the next version finds all there"


def ethernet(holder: str, nbytes_per_s: float) -> Topology:
    nic = Nic(nic_id=f"host-{holder}/nic", host_id=f"host-{holder}", kind=NicKind.ETHERNET, nbytes_per_s=nbytes_per_s)
    return Topology(hosts=(Host(host_id=f"host-{holder}"),), nics=(nic,))


def described(*hosts: str, nbytes_per_s: float = 125e6) -> Scene:
    """All holders have NICs of that rate."""
    scene = Scene(*hosts)
    for holder in ("T", *hosts):
        scene.view = scene.view.described(holder, ethernet(holder, nbytes_per_s))
    return scene


def test_between_versions_the_next_ones_routes_are_made_and_its_chunks_chosen() -> None:
    scene = described("A", "B", "C")
    scene.channel.register_trainer("T", TrainerReport("trainer", "i1"), LARGE, 0, scene.view)
    scene.reconcile()
    assert scene.channel.look_ahead(scene.view, 0.0) == [], "somebody may still be coming"
    ((holder, order),) = scene.channel.look_ahead(scene.view, 0.1)
    assert (holder, type(order), order.nbytes) == ("T", Prepare, 256 << 20)
    assert 512 << 10 <= order.chunk_nbytes < 2 << 20, "small enough for a chain of three"
    assert scene.channel.look_ahead(scene.view, 0.2) == [], "told once"
    scene.replica("D")
    scene.reconcile()
    assert scene.channel.look_ahead(scene.view, 0.3) == []
    ((_, later),) = scene.channel.look_ahead(scene.view, 0.4)
    assert later.chunk_nbytes < order.chunk_nbytes, "the chain is longer by one"


class Flow(Scene):
    """A version of many chunks, moved by hand; every holder reports once per step of 0.25 s."""

    def __init__(self, *hosts: str, nbytes_per_s: float = 125e6) -> None:
        super().__init__(*hosts)
        for holder in ("T", *hosts):
            self.view = self.view.described(holder, ethernet(holder, nbytes_per_s))
        self.channel.register_trainer("T", TrainerReport("trainer", "i1"), LARGE, 0, self.view)
        message = Announce("policy", "i1", 1, UID, 10, 256 << 20, 1 << 20, LARGE.digest(), 0, ())
        self.channel.announce("T", message)
        self.channel.sealed("T", 1, UID, tuple(range(256)))
        self.reconcile()
        self.watch = HopWatch()
        self.parents = {to: names[0] for to, names in self.pulls().items()}
        self.chunks = dict.fromkeys(hosts, 0.0)
        self.came: dict[str, dict[str, int]] = {host: {} for host in hosts}

    def step(self, slow: dict[str, float]) -> list[tuple[str, str, float, float]]:
        """`slow` maps receivers to what they get; all others get as much as their parent has, at most 30 chunks."""
        self.now += 0.25
        found: list[tuple[str, str, float, float]] = []
        for host, parent in self.parents.items():
            there = 256.0 if parent == "T" else self.chunks[parent]
            num = max(0.0, min(slow.get(host, 30.0), there - self.chunks[host]))
            self.chunks[host] += num
            came = self.came[host]
            came[parent] = came.get(parent, 0) + int(num * (1 << 20))
            report = Progress("policy", 1, UID, int(self.chunks[host]), dict(came))
            part = self.channel.progress(host, report)
            assert part is not None
            expected = {source: self.planner.expected(source, host) for source in part.ahead}
            for rate in self.watch.report(host, [part], self.now, expected):
                self.planner.seen(rate.source, host, rate.nbytes_per_s)
                if self.watch.is_slow(host, rate, expected[rate.source]):
                    found.append((rate.source, host, rate.nbytes_per_s, expected[rate.source]))
        return found


def test_a_hop_far_below_its_prediction_is_named_and_nobody_behind_it() -> None:
    flow = Flow("A", "B", "C", "D")
    assert flow.parents == {"A": "T", "B": "A", "C": "B", "D": "C"}
    for _ in range(3):
        assert flow.step({}) == []
    found = [hop for _ in range(5) for hop in flow.step({"B": 3.0})]
    assert {hop[:2] for hop in found} == {("A", "B")}, "C and D only wait for B"
    assert found[0][2] == pytest.approx(4 * 3 * (1 << 20))
    assert found[0][3] == pytest.approx(125e6, rel=0.01)


def test_routes_avoid_a_slow_hop_and_the_others_go_on_without_it() -> None:
    flow = Flow("A", "B", "C", "D")
    for _ in range(3):
        flow.step({})
    found = [hop for _ in range(5) for hop in flow.step({"B": 3.0})]
    flow.planner.slow(*found[0][:3])
    flow.reconcile()
    first = {to: names[0] for to, names in flow.pulls().items()}
    assert first == {"C": "A", "D": "C", "B": "D"}, "B comes last, A goes on as it did"


def test_a_hop_without_a_known_rate_is_never_called_slow() -> None:
    flow = Flow("A", "B", nbytes_per_s=0.0)
    assert [hop for _ in range(9) for hop in flow.step({"B": 1.0})] == []


def test_the_last_replica_of_a_host_leaves_mid_transfer() -> None:
    scene = Scene("A", "B")
    scene.publish(1)
    scene.reconcile()
    scene.channel.member_gone("replica-A", "another incarnation")
    assert scene.reconcile() == []
    scene.channel.member_gone("replica-A", "i1")
    scene.reconcile()
    assert scene.sent(Abort) == [("A", 1)]
    assert scene.pulls() == {"B": ["T"]}
    scene.staged(1, "B")
    scene.reconcile()
    assert scene.phase(1) is VersionPhase.STAGED
    scene.replica("A")
    scene.reconcile()
    assert scene.pulls() == {"A": ["B", "T"]}


def test_a_lost_receiver_is_routed_around_and_fed_when_it_is_back() -> None:
    scene = Scene("A", "B", "C")
    scene.publish(1)
    scene.reconcile()
    scene.lose("B")
    scene.reconcile()
    assert scene.pulls() == {"C": ["A", "T"]}
    scene.staged(1, "A", "C")
    scene.reconcile()
    assert scene.phase(1) is VersionPhase.STAGED
    scene.replica("B")
    scene.reconcile()
    assert list(scene.pulls()) == ["B"]


def test_origin_lost_before_it_was_sealed_aborts() -> None:
    scene = Scene("A", "B")
    scene.publish(1)
    scene.reconcile()
    scene.staged(1, "A", "B")
    scene.reconcile()
    scene.announce(2)
    scene.reconcile()
    scene.lose("T")
    scene.reconcile()
    assert scene.phase(2) is VersionPhase.ABORTED
    assert sorted(scene.sent(Abort)) == [("A", 2), ("B", 2)]
    assert scene.channel.newest_staged(scene.view) == 1
    assert scene.channel.trainer is None
    scene.replica("C")
    scene.reconcile()
    assert list(scene.pulls()) == ["C"]
    assert set(scene.pulls()["C"]) == {"A", "B"}


def test_origin_lost_but_one_receiver_is_whole() -> None:
    scene = Scene("A", "B")
    scene.publish(1)
    scene.reconcile()
    assert scene.pulls()["B"] == ["A", "T"]
    scene.staged(1, "A")
    scene.lose("T")
    assert scene.reconcile() == [], "B has a source that lives"
    scene.staged(1, "B")
    scene.reconcile()
    assert scene.phase(1) is VersionPhase.STAGED


def test_origin_lost_and_the_receivers_have_everything_together() -> None:
    scene = Scene("A", "B")
    scene.publish(1)
    scene.reconcile()
    scene.lose("T")
    scene.reconcile()
    assert sorted(scene.sent(AskHave)) == [("A", 1), ("B", 1)]
    scene.channel.have("A", 1, UID, b"\x01\x00\x00")
    assert scene.reconcile() == []
    scene.channel.have("B", 1, UID, b"\x00\x01\x01")
    scene.reconcile()
    assert scene.pulls() == {"A": ["B"], "B": ["A"]}
    assert all(m.is_sealed and m.digests == DIGESTS for _, m in scene.orders if isinstance(m, Pull))
    scene.staged(1, "A", "B")
    scene.reconcile()
    assert scene.phase(1) is VersionPhase.STAGED


def test_origin_lost_and_a_chunk_with_it() -> None:
    scene = Scene("A", "B")
    scene.publish(1)
    scene.reconcile()
    scene.lose("T")
    scene.reconcile()
    scene.channel.have("A", 1, UID, b"\x01\x00\x00")
    scene.channel.have("B", 1, UID, b"")
    scene.reconcile()
    assert scene.phase(1) is VersionPhase.ABORTED
    assert sorted(scene.sent(Abort)) == [("A", 1), ("B", 1)]
    assert scene.channel.newest_staged(scene.view) == 0


def test_a_late_receiver_is_left_behind_and_the_rest_goes_on() -> None:
    scene = Scene("A", "B")
    scene.publish(1)
    scene.reconcile()
    scene.staged(1, "A")
    scene.now = TIMEOUT_S - 1
    assert scene.reconcile() == []
    scene.now = TIMEOUT_S
    scene.reconcile()
    assert scene.sent(Abort) == [("B", 1)]
    assert scene.phase(1) is VersionPhase.STAGED
    phases = {r.member_id: r.phase for r in scene.channel.status(1, scene.view).replicas}
    assert phases == {"replica-A": ReplicaPhase.STAGED, "replica-B": ReplicaPhase.FAILED}
    scene.publish(2)
    scene.reconcile()
    assert set(scene.pulls()) == {"A", "B"}, "the next version is for everybody again"


def test_a_version_that_is_never_packed_is_aborted_by_its_deadline() -> None:
    scene = Scene("A")
    scene.announce(1)
    scene.reconcile()
    scene.now = TIMEOUT_S
    scene.reconcile()
    assert scene.phase(1) is VersionPhase.ABORTED
    assert {to for to, _ in scene.sent(Abort)} == {"A", "T"}


def test_a_failed_pull_is_told_and_does_not_hold_up_the_others() -> None:
    scene = Scene("A", "B")
    scene.publish(1)
    scene.reconcile()
    scene.channel.pull_failed("A", 1, UID, "no room")
    scene.staged(1, "B")
    scene.reconcile()
    status = scene.channel.status(1, scene.view)
    assert status.phase is VersionPhase.STAGED
    assert {h.host: (h.phase, h.error) for h in status.holders}["host-A"] == (HolderPhase.FAILED, "no room")
    assert {r.member_id: r.error for r in status.replicas} == {"replica-A": "no room", "replica-B": ""}


def test_commits_and_failures_are_kept_per_replica() -> None:
    scene = Scene("A", "B")
    scene.publish(1)
    scene.reconcile()
    scene.staged(1, "A", "B")
    scene.reconcile()
    scene.channel.committed(Committed("policy", "replica-A", 1, UID, 0.25, ""))
    scene.channel.committed(Committed("policy", "replica-B", 1, UID, 0.0, "broken"))
    scene.channel.committed(Committed("policy", "nobody", 1, UID, 0.0, ""))
    replicas = {r.member_id: r for r in scene.channel.status(1, scene.view).replicas}
    assert (replicas["replica-A"].phase, replicas["replica-A"].commit_pause_s) == (ReplicaPhase.COMMITTED, 0.25)
    assert (replicas["replica-B"].phase, replicas["replica-B"].error) == (ReplicaPhase.FAILED, "broken")


def test_one_trainer_at_a_time() -> None:
    scene = Scene("A")
    with pytest.raises(ChannelError, match="already published by trainer on T"):
        scene.channel.register_trainer("A", TrainerReport("other", "i9"), MANIFEST, 0, scene.view)
    scene.publish(1)
    scene.channel.register_trainer("T", TrainerReport("trainer", "i2"), MANIFEST, 1, scene.view)
    with pytest.raises(StaleView, match="another trainer now"):
        scene.announce(2)
    scene.channel.member_gone("trainer", "i1")
    assert scene.channel.trainer is not None
    scene.channel.member_gone("trainer", "i2")
    scene.channel.register_trainer("A", TrainerReport("other", "i9"), MANIFEST, 0, scene.view)
    assert scene.channel.highest == 1


def test_numbers_are_never_below_what_anybody_has_seen() -> None:
    scene = Scene()
    scene.replica("A", committed=7)
    assert scene.channel.highest == 7
    report = ChannelReport("policy", 9, (), None, (), ())
    scene.channel.restore("A", report, scene.view)
    assert scene.channel.highest == 9
    scene.channel.register_trainer("T", TrainerReport("trainer", "i1"), MANIFEST, 12, scene.view)
    assert scene.channel.highest == 12


def slot(version: int, *, is_origin: bool, is_whole: bool, digests: tuple[int, ...] = DIGESTS) -> SlotReport:
    return SlotReport(version, UID, 10, 3 * 4096, 4096, DIGEST, is_origin, is_whole, digests if is_whole else ())


def test_a_new_coordinator_learns_from_the_holders_and_goes_on() -> None:
    channel, view = Channel("policy"), View()
    reports = {
        "T": ChannelReport(
            "policy", 5, (MANIFEST,), TrainerReport("trainer", "i1"), (), (slot(5, is_origin=True, is_whole=True),)
        ),
        "A": ChannelReport(
            "policy", 5, (), None, (ReplicaReport("a", "i", 4, UID),), (slot(5, is_origin=False, is_whole=True),)
        ),
        "B": ChannelReport(
            "policy", 5, (), None, (ReplicaReport("b", "i", 4, UID),), (slot(5, is_origin=False, is_whole=False),)
        ),
        "C": ChannelReport("policy", 4, (), None, (ReplicaReport("c", "i", 4, UID),), ()),
    }
    for order in (list(reports), list(reports)[::-1]):
        channel, view = Channel("policy"), View()
        for holder in order:
            view = view.joined(HolderRecord(holder, holder, "i", 1, {}))
        for holder in order:
            channel.restore(holder, reports[holder], view)
        orders = channel.reconcile(view, 0.0, TIMEOUT_S)
        assert channel.highest == 5
        assert channel.status(5, view).phase is VersionPhase.STAGED
        pulls = {to: m for to, m in orders if isinstance(m, Pull)}
        assert pulls.keys() == {"B", "C"}
        assert all(m.is_sealed and m.digests == DIGESTS for m in pulls.values())
        assert channel.reconcile(view, 0.0, TIMEOUT_S) == []
        assert channel.trainer is not None
        assert channel.manifests[channel.manifest_digest] == MANIFEST


def test_a_holder_that_comes_back_with_an_aborted_version_is_told_to_drop_it() -> None:
    scene = Scene("A")
    scene.announce(1)
    scene.reconcile()
    scene.lose("T")
    scene.reconcile()
    assert scene.phase(1) is VersionPhase.ABORTED
    scene.join("T")
    back = ChannelReport(
        "policy", 1, (MANIFEST,), TrainerReport("trainer", "i1"), (), (slot(1, is_origin=True, is_whole=True),)
    )
    scene.channel.restore("T", back, scene.view)
    scene.reconcile()
    is_dropped = ("T", 1) in scene.sent(Abort)
    assert is_dropped or scene.phase(1) is not VersionPhase.ABORTED, "else that host alone would serve it"


def test_an_adopted_slot_counts_unless_it_differs() -> None:
    scene = Scene("A", "B")
    scene.publish(1)
    scene.reconcile()
    scene.staged(1, "A", "B")
    scene.reconcile()
    scene.lose("A")
    scene.replica("A")
    scene.channel.adopted("A", slot(1, is_origin=False, is_whole=True, digests=(9, 9, 9)), MANIFEST)
    scene.reconcile()
    assert list(scene.pulls()) == ["A"], "other bytes are not taken for the version"
    scene.channel.adopted("A", slot(1, is_origin=False, is_whole=True), MANIFEST)
    assert scene.reconcile() == []


def test_old_versions_are_forgotten_and_named() -> None:
    scene = Scene("A")
    for number in range(1, 41):
        scene.publish(number)
        scene.reconcile()
        scene.staged(number, "A")
        scene.reconcile()
    with pytest.raises(ChannelError, match="no version 3"):
        scene.channel.status(3, scene.view)
    assert len(scene.channel.versions) <= 20
    assert len(scene.channel.manifests) == 1


@pytest.mark.parametrize("seed", range(60))
def test_any_history_ends_with_everybody_on_the_newest_version(seed: int) -> None:
    """Random joins, losses and publishes; receivers obey their orders at random times. In the end all are staged."""
    rng = random.Random(seed)
    scene = Scene("A")
    holders, number = list("ABCDE"), 0
    waiting: dict[str, int] = {}

    def obey() -> None:
        for to, message in scene.orders:
            if isinstance(message, Pull):
                assert to not in [s.holder_id for s in message.sources]
                assert message.sources
                waiting[to] = message.version
            elif isinstance(message, Abort) and waiting.get(to) == message.version:
                del waiting[to]

    for _ in range(60):
        what = rng.choice(["publish", "join", "lose", "leave", "staged", "staged", "staged"])
        holder = rng.choice(holders)
        if what == "publish":
            number += 1
            scene.publish(number)
        elif what == "join":
            scene.replica(holder)
        elif what == "lose" and scene.view.holder(holder):
            scene.lose(holder)
            waiting.pop(holder, None)
        elif what == "leave":
            scene.channel.member_gone(f"replica-{holder}", "i1")
        elif what == "staged" and waiting:
            done = rng.choice(sorted(waiting))
            scene.staged(waiting.pop(done), done)
        scene.reconcile()
        obey()
    number += 1
    scene.publish(number)
    scene.replica("A")
    for _ in range(40):
        scene.reconcile()
        obey()
        for to in list(waiting):
            scene.staged(waiting.pop(to), to)
    scene.reconcile()
    status = scene.channel.status(number, scene.view)
    assert status.phase is VersionPhase.STAGED
    assert {r.phase for r in status.replicas} == {ReplicaPhase.STAGED}


def former(version: int, *, is_whole: bool = True) -> SlotReport:
    return SlotReport(version, 99, 10, 3 * 4096, 4096, DIGEST, False, is_whole, (4, 5, 6) if is_whole else ())


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_slot_of_a_former_run_is_dropped_and_filled_anew(is_whole: bool) -> None:
    scene = Scene("A")
    scene.publish(1)
    scene.reconcile()
    scene.staged(1, "A")
    scene.reconcile()
    scene.join("B")
    slots = (former(1, is_whole=is_whole),)
    scene.channel.restore(
        "B", ChannelReport("policy", 1, (), None, (ReplicaReport("b", "i", 0, 0),), slots), scene.view
    )
    orders = [message for to, message in scene.reconcile() if to == "B"]
    assert [type(message) for message in orders] == [Abort, Pull]
    assert (orders[0].version, orders[0].uid) == (1, 99)
    assert (orders[1].version, orders[1].uid, orders[1].digests) == (1, UID, DIGESTS)
    scene.channel.staged("B", 1, 99, 3 * 4096, 0.5)
    status = scene.channel.status(1, scene.view)
    assert {h.host: h.phase for h in status.holders}["host-B"] is HolderPhase.PULLING, "that was the former one"


def test_what_the_trainers_host_has_is_the_version_also_if_a_former_run_reports_first() -> None:
    channel, view = Channel("policy"), View()
    for holder in ("B", "T", "A"):
        view = view.joined(HolderRecord(holder, holder, "i", 1, {}))
    slots = (former(5), former(7))
    channel.restore("B", ChannelReport("policy", 7, (MANIFEST,), None, (ReplicaReport("b", "i", 7, 99),), slots), view)
    trainer, slots = TrainerReport("trainer", "i1", 5), (slot(5, is_origin=True, is_whole=True),)
    channel.restore("T", ChannelReport("policy", 5, (MANIFEST,), trainer, (), slots), view)
    channel.restore("A", ChannelReport("policy", 5, (), None, (ReplicaReport("a", "i", 0, 0),), (former(6),)), view)
    orders = channel.reconcile(view, 0.0, TIMEOUT_S)
    dropped = {(to, message.version, message.uid) for to, message in orders if isinstance(message, Abort)}
    assert dropped == {("B", 5, 99), ("B", 7, 99), ("A", 6, 99)}
    assert {(to, message.version, message.uid) for to, message in orders if isinstance(message, Pull)} == {
        ("A", 5, UID),
        ("B", 5, UID),
    }
    assert channel.highest == 7, "the next number is new to everybody"


def test_a_commit_of_a_former_run_does_not_count() -> None:
    scene = Scene("A")
    scene.publish(1)
    scene.channel.register_replica("A", ReplicaReport("replica-A", "i1", 1, 99))
    scene.reconcile()
    assert [r.phase for r in scene.channel.status(1, scene.view).replicas] == [ReplicaPhase.PULLING]
    scene.channel.committed(Committed("policy", "replica-A", 1, UID, 0.1, ""))
    assert [r.phase for r in scene.channel.status(1, scene.view).replicas] == [ReplicaPhase.COMMITTED]


def test_a_trainer_that_was_replaced_meanwhile_takes_no_version_from_the_job() -> None:
    """Cut off with version 1; another trainer publishes 2 and 3 and leaves; then it is back and counts on from 1."""
    scene = Scene("A")
    scene.publish(1)
    scene.staged(1, "A")
    scene.reconcile()
    scene.lose("T")
    scene.join("U")
    scene.channel.register_trainer("U", TrainerReport("other", "i2"), MANIFEST, 1, scene.view)
    for number in (2, 3):
        message = Announce("policy", "i2", number, 20 + number, 0, 3 * 4096, 4096, DIGEST, 0, ())
        scene.channel.announce("U", message)
        scene.channel.sealed("U", number, 20 + number, DIGESTS)
        scene.reconcile()
        scene.channel.staged("A", number, 20 + number, 3 * 4096, 0.5)
        scene.reconcile()
    scene.channel.member_gone("other", "i2")
    scene.join("T")
    trainer, slots = TrainerReport("trainer", "i1", 1), (slot(1, is_origin=True, is_whole=True),)
    scene.channel.restore("T", ChannelReport("policy", 1, (MANIFEST,), trainer, (), slots), scene.view)
    orders = scene.reconcile()
    assert not [message for _, message in orders if isinstance(message, Abort)]
    assert scene.channel.newest_staged(scene.view) == 3
    assert ("T", Known("policy", 3)) in orders
    with pytest.raises(StaleView, match="version 2 of 'policy' was given already"):
        scene.announce(2)  # said before it was told
    with pytest.raises(ChannelError, match="version 2 of 'policy' was dropped: another trainer has given that number"):
        scene.channel.status(2, scene.view, uid=UID)
    assert scene.channel.status(2, scene.view, uid=22).phase is VersionPhase.STAGED


def test_a_trainer_that_does_not_know_of_a_former_run_yet_takes_its_numbers() -> None:
    scene = Scene("A")
    scene.join("B")
    report = ChannelReport("policy", 2, (), None, (ReplicaReport("b", "i", 2, 99),), (former(1), former(2)))
    scene.channel.restore("B", report, scene.view)
    scene.publish(1)
    orders = scene.reconcile()
    dropped = {(to, message.version, message.uid) for to, message in orders if isinstance(message, Abort)}
    assert dropped == {("B", 1, 99), ("B", 2, 99)}
    assert {(to, message.uid) for to, message in orders if isinstance(message, Pull)} == {("A", UID), ("B", UID)}
    assert ("T", Known("policy", 2)) in orders
