"""The demo's verdict fails for every fault that it is there to find."""

from __future__ import annotations

import msgspec
import pytest

from wsync.demo.records import Check, Failed, Joined, Kill, Record, Snapshot, Span
from wsync.demo.report import Evidence, Report, make_report
from wsync.demo.table import render

NAMES = ("embed", "norm", "head")


def digests(version: int) -> dict[str, str]:
    return {name: f"{name}@{version}" for name in NAMES}


def snapshot(version: int) -> Snapshot:
    return Snapshot(
        version=version,
        step=version,
        loss=3.0 - version / 10,
        digests=digests(version),
        publish_pause_s=0.05,
        transfer_s=0.3,
        nbytes=100_000_000,
        nbytes_moved=200_000_000,
        num_hosts=2,
    )


def check(replica: str, version: int, *, at_s: float | None = None, is_in_place: bool = True) -> Check:
    at_s = version * 10.0 if at_s is None else at_s
    return Check(replica, 1, at_s, "commit", version, digests(version), is_in_place, 0.02)


def span(replica: str, version: int, *, num_tokens: int = 5, num_torn: int = 0) -> Span:
    return Span(replica, 1, version * 10.0 + 5, version, num_tokens, 0.2, num_torn)


@pytest.fixture
def evidence() -> Evidence:
    records: list[Record] = [Joined("r0", 1, "n1", 0.0), Joined("r1", 1, "n2", 0.0)]
    for version in (1, 2, 3):
        for replica in ("r0", "r1"):
            records += [check(replica, version), span(replica, version)]
    kill = Kill(
        version=2,
        host="n1",
        holder_pid=10,
        replica_pid=11,
        after_s=0.15,
        was_relaying=True,
        was_whole=False,
        new_holder_pid=20,
        new_replica_pid=21,
    )
    return Evidence(
        model="tiny",
        seed=0,
        num_versions=3,
        loopback_nbytes_per_s=1e9,
        elapsed_s=30.0,
        snapshots=[snapshot(version) for version in (1, 2, 3)],
        fleets=dict.fromkeys((1, 2, 3), ("r0", "r1")),
        records=records,
        kills=[kill],
    )


def the_problem(evidence: Evidence) -> str:
    report = make_report(evidence)
    assert not report.holds
    assert "FAILS" in render(report)
    (problem,) = report.problems
    return problem


def test_sound_evidence_holds_and_shows_the_bound(evidence: Evidence) -> None:
    report = make_report(evidence)
    assert report.holds
    row = report.rows[1]
    assert (row.nbytes_needed, row.nbytes_moved) == (200_000_000, 200_000_000)
    assert row.bound_s == pytest.approx(0.1)
    assert row.ratio == pytest.approx(3.0)
    assert (row.num_tokens, row.num_checks, row.note) == (10, 2, "killed")
    text = render(report)
    assert "HOLDS" in text
    assert "a relaying holder (pid 10)" in text


def test_report_survives_json(evidence: Evidence) -> None:
    report = make_report(evidence)
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_a_wrong_digest_fails(evidence: Evidence) -> None:
    evidence.records.append(msgspec.structs.replace(check("r0", 3), digests={**digests(3), "norm": "else"}))
    assert "1 wrong and 0 missing of 3 tensors: norm" in the_problem(evidence)


def test_a_mixed_version_fails_and_names_the_other(evidence: Evidence) -> None:
    evidence.records.append(msgspec.structs.replace(check("r0", 3), digests={**digests(3), "norm": "norm@2"}))
    assert "1 are of version 2" in the_problem(evidence)


def test_a_tensor_that_was_not_checked_fails(evidence: Evidence) -> None:
    partly = {name: digest for name, digest in digests(3).items() if name != "head"}
    evidence.records.append(msgspec.structs.replace(check("r0", 3), digests=partly))
    assert "1 missing of 3 tensors: head" in the_problem(evidence)


def test_a_version_that_the_trainer_never_had_fails(evidence: Evidence) -> None:
    evidence.records.append(check("r0", 9))
    assert "version 9, seen in 1 checks" in the_problem(evidence)


def test_a_replica_that_missed_a_version_fails(evidence: Evidence) -> None:
    evidence.records = [r for r in evidence.records if not (isinstance(r, Check) and r == check("r1", 2))]
    assert the_problem(evidence) == "replica r1 never committed version 2"


def test_a_replica_that_did_not_generate_fails(evidence: Evidence) -> None:
    evidence.records = [r for r in evidence.records if not (isinstance(r, Span) and r == span("r1", 2))]
    assert the_problem(evidence) == "replica r1 generated nothing with version 2"


def test_going_back_fails_even_through_a_restart(evidence: Evidence) -> None:
    evidence.records.append(msgspec.structs.replace(check("r0", 2, at_s=40.0), pid=2))
    assert the_problem(evidence) == "replica r0 went from version 3 to 2"


def test_an_unchanged_tensor_fails_by_name(evidence: Evidence) -> None:
    same = {**digests(3), "norm": "norm@2"}
    evidence.snapshots[2] = msgspec.structs.replace(evidence.snapshots[2], digests=same)
    for index, record in enumerate(evidence.records):
        if isinstance(record, Check) and record.version == 3:
            evidence.records[index] = msgspec.structs.replace(record, digests=same)
    assert the_problem(evidence) == "version 3 did not change norm"


def test_a_moved_tensor_fails(evidence: Evidence) -> None:
    evidence.records.append(check("r0", 3, is_in_place=False))
    assert "moved to other addresses" in the_problem(evidence)


def test_weights_that_change_during_a_step_fail(evidence: Evidence) -> None:
    evidence.records.append(span("r0", 3, num_torn=1))
    assert the_problem(evidence) == "replica r0 at version 3: weights changed during 1 steps"


def test_a_replica_that_died_of_an_error_fails(evidence: Evidence) -> None:
    evidence.records.append(Failed("r1", 1, 50.0, "CommitError: no"))
    assert the_problem(evidence) == "replica r1 (pid 1) failed: CommitError: no"


def test_fewer_versions_than_asked_for_fail(evidence: Evidence) -> None:
    evidence.num_versions = 4
    assert the_problem(evidence) == "3 of 4 versions were published"


def test_a_repeated_version_number_fails(evidence: Evidence) -> None:
    evidence.snapshots.append(msgspec.structs.replace(snapshot(3), digests=digests(4)))
    evidence.num_versions = 4
    assert any("published version 3 after version 3" in problem for problem in make_report(evidence).problems)


def test_a_version_without_replicas_fails(evidence: Evidence) -> None:
    del evidence.fleets[2]
    assert the_problem(evidence) == "version 2 had no replicas"


def test_killing_nothing_fails(evidence: Evidence) -> None:
    evidence.kills = []
    assert the_problem(evidence) == "nothing was killed"


@pytest.mark.parametrize("part", ["holder", "replica"])
def test_a_killed_process_that_does_not_come_back_fails(evidence: Evidence, part: str) -> None:
    evidence.kills[0] = msgspec.structs.replace(evidence.kills[0], **{f"new_{part}_pid": 0})
    assert f"the {part} killed during version 2" in the_problem(evidence)


def test_an_error_fails_even_before_the_first_version() -> None:
    empty = Evidence(model="tiny", seed=0, num_versions=4, error="TransferTimeout: too late")
    report = make_report(empty)
    assert not report.holds
    assert report.problems[0] == "TransferTimeout: too late"
    assert "TransferTimeout: too late" in render(report)
