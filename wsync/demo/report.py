"""From records to table, verdict and JSON. Pure: no clock, no processes, no tensors.

The verdict is `holds` when the list of problems is empty; each kind of problem has a function here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import msgspec

from wsync.demo.records import Check, Failed, Kill, Record, Snapshot, Span


class Evidence(msgspec.Struct, kw_only=True):
    """Everything that the demo saw. `fleets` names the replicas that must have served each version."""

    model: str
    seed: int
    num_versions: int
    loopback_nbytes_per_s: float = 0.0
    elapsed_s: float = 0.0
    snapshots: list[Snapshot] = []
    fleets: dict[int, tuple[str, ...]] = {}
    records: list[Record] = []
    kills: list[Kill] = []
    error: str = ""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One version in the table. Pauses and gaps are the longest of all replicas."""

    version: int
    num_replicas: int
    loss: float
    publish_pause_s: float
    transfer_s: float
    commit_pause_s: float
    nbytes_moved: int
    nbytes_needed: int
    bound_s: float
    ratio: float
    num_tokens: int
    longest_gap_s: float
    num_checks: int
    note: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes."""

    holds: bool
    problems: tuple[str, ...]
    model: str
    seed: int
    nbytes: int
    num_tensors: int
    loopback_nbytes_per_s: float
    elapsed_s: float
    rows: tuple[Row, ...]
    kills: tuple[Kill, ...]


def make_report(evidence: Evidence) -> Report:
    """The verdict over all the evidence, and one row for each version that was published."""
    problems = tuple(_find_problems(evidence))
    snapshots = evidence.snapshots
    return Report(
        holds=not problems,
        problems=problems,
        model=evidence.model,
        seed=evidence.seed,
        nbytes=snapshots[-1].nbytes if snapshots else 0,
        num_tensors=len(snapshots[-1].digests) if snapshots else 0,
        loopback_nbytes_per_s=evidence.loopback_nbytes_per_s,
        elapsed_s=evidence.elapsed_s,
        rows=tuple(_make_row(evidence, snapshot) for snapshot in snapshots),
        kills=tuple(evidence.kills),
    )


def _make_row(evidence: Evidence, snapshot: Snapshot) -> Row:
    checks = [r for r in evidence.records if isinstance(r, Check) and r.version == snapshot.version]
    spans = [r for r in evidence.records if isinstance(r, Span) and r.version == snapshot.version]
    rate = evidence.loopback_nbytes_per_s
    bound_s = snapshot.nbytes / rate if rate else 0.0
    return Row(
        version=snapshot.version,
        num_replicas=len(evidence.fleets.get(snapshot.version, ())),
        loss=snapshot.loss,
        publish_pause_s=snapshot.publish_pause_s,
        transfer_s=snapshot.transfer_s,
        commit_pause_s=max((check.commit_pause_s for check in checks), default=0.0),
        nbytes_moved=snapshot.nbytes_moved,
        nbytes_needed=snapshot.nbytes * snapshot.num_hosts,
        bound_s=bound_s,
        ratio=snapshot.transfer_s / bound_s if bound_s else 0.0,
        num_tokens=sum(span.num_tokens for span in spans),
        longest_gap_s=max((span.longest_gap_s for span in spans), default=0.0),
        num_checks=len(checks),
        note="killed" if any(kill.version == snapshot.version for kill in evidence.kills) else "",
    )


def _find_problems(evidence: Evidence) -> Iterator[str]:
    if evidence.error:
        yield evidence.error
    yield from _check_versions(evidence)
    yield from _check_tensors(evidence)
    yield from _check_order(evidence)
    yield from _check_presence(evidence)
    yield from _check_kills(evidence)
    for record in evidence.records:
        if isinstance(record, Failed):
            yield f"replica {record.replica} (pid {record.pid}) failed: {record.error}"


def _check_versions(evidence: Evidence) -> Iterator[str]:
    """As many as asked for, rising, and each one different from the one before in every tensor."""
    if len(evidence.snapshots) != evidence.num_versions:
        yield f"{len(evidence.snapshots)} of {evidence.num_versions} versions were published"
    for before, after in zip(evidence.snapshots, evidence.snapshots[1:], strict=False):
        if after.version <= before.version:
            yield f"the trainer published version {after.version} after version {before.version}"
        same = [name for name, digest in after.digests.items() if before.digests.get(name) == digest]
        if same:
            yield f"version {after.version} did not change {_some(same)}"


def _check_tensors(evidence: Evidence) -> Iterator[str]:
    """At every check all live tensors are those of the version claimed, where they were, and still between checks."""
    versions = {snapshot.version: snapshot.digests for snapshot in evidence.snapshots}
    unknown: dict[int, int] = defaultdict(int)
    for record in evidence.records:
        if isinstance(record, Check):
            who = f"replica {record.replica} (pid {record.pid}) at version {record.version}, {record.moment}"
            expected = versions.get(record.version)
            if expected is None:
                unknown[record.version] += 1
            elif record.digests != expected:
                yield f"{who}: {_explain(record.digests, expected, versions)}"
            if not record.is_in_place:
                yield f"{who}: live tensors have moved to other addresses"
        elif isinstance(record, Span) and record.num_torn:
            who = f"replica {record.replica} at version {record.version}"
            yield f"{who}: weights changed during {record.num_torn} steps"
    for version, num_checks in unknown.items():
        yield f"version {version}, seen in {num_checks} checks: the trainer has no snapshot of it"


def _explain(digests: dict[str, str], expected: dict[str, str], versions: dict[int, dict[str, str]]) -> str:
    """Which tensors are wrong, and of which other version they are."""
    missing = [name for name in expected if name not in digests]
    wrong = [name for name in digests if digests[name] != expected.get(name)]
    text = f"{len(wrong)} wrong and {len(missing)} missing of {len(expected)} tensors: {_some(wrong + missing)}"
    for version, others in versions.items():
        num = sum(others.get(name) == digests[name] for name in wrong)
        if num:
            text += f"; {num} are of version {version}"
    return text


def _check_order(evidence: Evidence) -> Iterator[str]:
    """No replica ever goes back, not even through a restart."""
    newest: dict[str, int] = defaultdict(int)
    for record in sorted(evidence.records, key=lambda record: record.at_s):
        if isinstance(record, Check | Span):
            if record.version < newest[record.replica]:
                yield f"replica {record.replica} went from version {newest[record.replica]} to {record.version}"
            newest[record.replica] = max(newest[record.replica], record.version)


def _check_presence(evidence: Evidence) -> Iterator[str]:
    """Every replica of the fleet committed every version, and generated tokens with it."""
    for snapshot in evidence.snapshots:
        if not evidence.fleets.get(snapshot.version):
            yield f"version {snapshot.version} had no replicas"
        committed, served = set(), set()
        for record in evidence.records:
            if isinstance(record, Check) and record.version == snapshot.version:
                committed.add(record.replica)
            elif isinstance(record, Span) and record.version == snapshot.version and record.num_tokens:
                served.add(record.replica)
        for replica in evidence.fleets.get(snapshot.version, ()):
            if replica not in committed:
                yield f"replica {replica} never committed version {snapshot.version}"
            elif replica not in served:
                yield f"replica {replica} generated nothing with version {snapshot.version}"


def _check_kills(evidence: Evidence) -> Iterator[str]:
    """A holder and a replica were killed, and both came back."""
    if not evidence.kills:
        yield "nothing was killed"
    for kill in evidence.kills:
        if kill.new_holder_pid in (0, kill.holder_pid):
            yield f"the holder killed during version {kill.version} (pid {kill.holder_pid}) did not come back"
        if kill.new_replica_pid in (0, kill.replica_pid):
            yield f"the replica killed during version {kill.version} (pid {kill.replica_pid}) did not come back"


def _some(names: list[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")
