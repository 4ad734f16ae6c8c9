"""The one output format of all benchmarks, their command line, and how a number is taken.

A benchmark is a function `Options -> list[Claim]`, and `main` is all that its script calls:

    python -m benchmarks.NAME [--quick] [--json FILE] [--seed N] [--only CLAIM,...]

prints the claims as a table, writes the same as JSON, and exits with 1 when a claim misses its goal.
Every number comes from the run that prints it: the median of interleaved rounds (`interleaved`), so that
a busy spell of the machine falls on both sides of a ratio.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

ROUNDS = 5


class Claim(msgspec.Struct, frozen=True):
    """One measured figure. `ratio` is what the goal speaks of; `bound` is what the value is compared with."""

    name: str
    value: float
    unit: str
    bound: float | None
    ratio: float | None
    goal: str
    """`<= 1.3`, `>= 0.8`, or empty when the claim is only reported."""
    ok: bool

    @classmethod
    def at_most(cls, name: str, value: float, unit: str, bound: float, ratio: float, goal: float) -> Claim:
        """A claim that holds when `ratio` is at most `goal`."""
        return cls(name, value, unit, bound, ratio, f"<= {goal:g}", ratio <= goal)

    @classmethod
    def at_least(cls, name: str, value: float, unit: str, bound: float, ratio: float, goal: float) -> Claim:
        """A claim that holds when `ratio` is at least `goal`."""
        return cls(name, value, unit, bound, ratio, f">= {goal:g}", ratio >= goal)

    @classmethod
    def reported(
        cls, name: str, value: float, unit: str, bound: float | None = None, ratio: float | None = None
    ) -> Claim:
        """A figure without a goal."""
        return cls(name, value, unit, bound, ratio, "", True)


class Host(msgspec.Struct, frozen=True):
    """The machine, without anything that names it."""

    cpu: str
    cores: int
    """Cores that this process may use."""
    memory_gib: float
    kernel: str


class Report(msgspec.Struct, frozen=True):
    """What a benchmark writes."""

    bench: str
    host: Host
    versions: dict[str, str]
    seed: int
    claims: tuple[Claim, ...]

    @property
    def is_ok(self) -> bool:
        return all(claim.ok for claim in self.claims)


class Options(msgspec.Struct, frozen=True):
    """The command line of a run."""

    is_quick: bool = False
    seed: int = 0
    only: frozenset[str] = frozenset()
    json_path: str = ""

    def wants(self, *names: str, by_default: bool = True) -> bool:
        """Whether the run shall measure any of these claims."""
        return any(name in self.only for name in names) if self.only else by_default


def parse_options(bench: str, names: Sequence[str], argv: Sequence[str] | None = None) -> Options:
    """The options of `bench`, whose claims are `names`. Exits with a message for a claim that it does not have."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{bench}", epilog=f"claims: {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="fewer bytes and rounds, to see that it runs")
    parser.add_argument("--json", default="", metavar="FILE", help="write the report there as well")
    parser.add_argument("--seed", type=int, default=0, help="of the weights' bytes")
    parser.add_argument("--only", default="", metavar="CLAIM,...", help="measure only these claims")
    given = parser.parse_args(argv)
    only = frozenset(name for name in given.only.split(",") if name)
    if unknown := sorted(only - set(names)):
        parser.error(f"no such claim: {', '.join(unknown)} (choose from {', '.join(names)})")
    return Options(given.quick, given.seed, only, given.json)


def main(
    bench: str,
    names: Sequence[str],
    measure: Callable[[Options], Iterable[Claim]],
    *,
    packages: Sequence[str] = (),
    argv: Sequence[str] | None = None,
) -> int:
    """Run a benchmark and publish its report. Returns the exit status: 1 if a claim misses its goal.

    `packages` are the distributions whose versions the figures depend on.
    """
    options = parse_options(bench, names, argv)
    claims = tuple(claim for claim in measure(options) if options.wants(claim.name))
    report = Report(bench, describe_host(), describe_versions(packages), options.seed, claims)
    sys.stdout.write(format_table(report))
    if options.json_path:
        Path(options.json_path).write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return 0 if report.is_ok else 1


def format_table(report: Report) -> str:
    """The report for a reader, one claim a line, columns aligned."""
    host = report.host
    versions = " ".join(f"{name} {version}" for name, version in report.versions.items())
    head = f"{report.bench}: {host.cpu}, {host.cores} cores, {host.memory_gib:g} GiB, {host.kernel}\n"
    head += f"{versions}; seed {report.seed}\n"
    rows = [("claim", "value", "unit", "bound", "ratio", "goal", "ok")]
    for claim in report.claims:
        verdict = ("yes" if claim.ok else "NO") if claim.goal else "-"
        ratio = "-" if claim.ratio is None else f"{claim.ratio:.3f}"
        rows.append((claim.name, _number(claim.value), claim.unit, _number(claim.bound), ratio, claim.goal, verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    is_left = (True, False, True, False, False, True, True)
    lines = [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, is_left, strict=True)
        ).rstrip()
        for row in rows
    ]
    return head + "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def describe_host() -> Host:
    """CPU, cores, memory and kernel of this machine."""
    cpu = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as lines:
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kernel = f"{platform.system()} {platform.release()}"
    return Host(cpu, len(os.sched_getaffinity(0)), round(memory / 2**30, 1), kernel)


def describe_versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of Python and of these distributions; those that are not installed are left out."""
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def interleaved(
    sides: Mapping[str, Callable[[], float]], *, rounds: int = ROUNDS, warmups: int = 1
) -> dict[str, list[float]]:
    """Call every side once per round, in order, `rounds` times. Returns what each returned; warm-ups are dropped."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(warmups + rounds):
        for name, side in sides.items():
            sample = side()
            if index >= warmups:
                samples[name].append(sample)
    return samples


def median(samples: Sequence[float]) -> float:
    """The median of one side's rounds."""
    return statistics.median(samples)
