"""The report as text."""

from __future__ import annotations

from wsync.demo.records import Kill
from wsync.demo.report import Report, Row

HEAD = (
    f"{'version':>7} {'replicas':>8} {'loss':>6} {'publish':>9} {'transfer':>9} {'commit':>9} "
    f"{'moved / needed':>17} {'bound':>8} {'ratio':>6} {'tokens':>7} {'gap':>8} {'checks':>6}"
)
MAX_PROBLEMS = 20


def render(report: Report) -> str:
    """Table, footer and verdict."""
    lines = [HEAD, *(_row(row) for row in report.rows), "", *_footer(report)]
    lines += [_kill(kill) for kill in report.kills]
    lines += ["", *_verdict(report)]
    return "\n".join(lines)


def _row(row: Row) -> str:
    moved = f"{row.nbytes_moved / 1e6:.0f} / {row.nbytes_needed / 1e6:.0f} MB"
    return (
        f"{row.version:>7} {row.num_replicas:>8} {row.loss:>6.2f} {_ms(row.publish_pause_s):>9} "
        f"{_ms(row.transfer_s):>9} {_ms(row.commit_pause_s):>9} {moved:>17} {_ms(row.bound_s):>8} {row.ratio:>6.1f} "
        f"{row.num_tokens:>7} {_ms(row.longest_gap_s):>8} {row.num_checks:>6}  {row.note}".rstrip()
    )


def _footer(report: Report) -> list[str]:
    rate = report.loopback_nbytes_per_s
    return [
        f"needed = {report.nbytes / 1e6:.1f} MB x receiving hosts: each byte enters a host once. "
        "moved = without what a killed holder had.",
        f"bound = {report.nbytes / 1e6:.1f} MB / {rate / 1e9:.2f} GB/s, a plain socket over loopback, "
        "measured on the idle machine.",
        "transfer = call of publish (bytes leave while it packs) to staged everywhere, while all replicas generate and "
        "the trainer trains on the same cores; a killed holder's restart included.",
        "commit and gap = longest pause of any replica, and longest time between two tokens but for the digests below.",
    ]


def _kill(kill: Kill) -> str:
    role = "a relaying holder" if kill.was_relaying else "a holder"
    when = "after" if kill.was_whole else "during"
    return (
        f"killed = version {kill.version}, {_ms(kill.after_s)} after publish, {when} its transfer: SIGKILL to {role} "
        f"(pid {kill.holder_pid}) and a replica (pid {kill.replica_pid}); "
        f"back as {kill.new_holder_pid} and {kill.new_replica_pid}."
    )


def _verdict(report: Report) -> list[str]:
    num_checks = sum(row.num_checks for row in report.rows)
    if report.holds:
        return [
            f"HOLDS: in {num_checks} checks of {report.num_tensors} tensors each (blake2b), every replica had exactly "
            "the trainer's snapshot of the version it ran,",
            "in place. None was ever mixed, none went back, and every version changed every tensor. "
            f"{report.model}, {report.elapsed_s:.0f} s.",
        ]
    more = len(report.problems) - MAX_PROBLEMS
    return [
        f"FAILS: {len(report.problems)} problems in {num_checks} checks. {report.elapsed_s:.0f} s.",
        *(f"- {problem}" for problem in report.problems[:MAX_PROBLEMS]),
        *([f"- and {more} more"] if more > 0 else []),
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
