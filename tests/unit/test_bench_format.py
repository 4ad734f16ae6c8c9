"""The output format of the benchmarks: a claim knows whether it holds, and a report says it twice alike."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from benchmarks._bench import (
    Claim,
    Host,
    Options,
    Report,
    describe_host,
    format_table,
    interleaved,
    main,
    parse_options,
)

NAMES = ("pause", "speed", "size")
HOST = Host(cpu="a cpu", cores=2, memory_gib=24.0, kernel="Linux 6.1")


def claims(_: Options) -> Iterable[Claim]:
    yield Claim.at_most("pause", 0.11, "s", 0.1, 1.1, 1.3)
    yield Claim.at_least("speed", 5.0, "GB/s", 5.5, 0.909, 0.8)
    yield Claim.reported("size", 12.0, "B")


def too_slow(_: Options) -> Iterable[Claim]:
    yield Claim.at_most("pause", 0.2, "s", 0.1, 2.0, 1.3)


def test_a_claim_holds_exactly_up_to_its_goal() -> None:
    assert Claim.at_most("pause", 1.3, "s", 1.0, 1.3, 1.3).ok
    assert not Claim.at_most("pause", 1.4, "s", 1.0, 1.4, 1.3).ok
    assert Claim.at_least("speed", 0.8, "GB/s", 1.0, 0.8, 0.8).ok
    assert not Claim.at_least("speed", 0.7, "GB/s", 1.0, 0.7, 0.8).ok
    assert Claim.reported("size", 1.0, "B").ok


def test_the_file_and_the_table_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    assert main("demo", NAMES, claims, packages=("msgspec", "no-such-package"), argv=["--json", str(path)]) == 0
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    assert set(msgspec.json.decode(path.read_bytes())) == {"bench", "host", "versions", "seed", "claims"}
    assert capsys.readouterr().out == format_table(report)
    assert report.bench == "demo"
    assert report.seed == 0
    assert set(report.versions) == {"python", "msgspec"}
    assert [claim.name for claim in report.claims] == list(NAMES)


def test_every_claim_has_all_fields_in_the_file() -> None:
    encoded = msgspec.to_builtins(Claim.reported("size", 1.0, "B"))
    assert list(encoded) == ["name", "value", "unit", "bound", "ratio", "goal", "ok"]


def test_the_table_is_aligned() -> None:
    lines = format_table(Report("demo", HOST, {"python": "3.11"}, 7, tuple(claims(Options())))).splitlines()
    assert lines[0] == "demo: a cpu, 2 cores, 24 GiB, Linux 6.1"
    assert lines[1] == "python 3.11; seed 7"
    table = lines[2:]
    assert len(table) == 1 + len(NAMES)
    assert len({line.index(unit) for line, unit in zip(table, ("unit", "s  ", "GB/s", "B  "), strict=True)}) == 1
    assert table[1].endswith("yes")
    assert table[3].endswith("-")


def test_a_missed_goal_is_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("demo", NAMES, too_slow, argv=[]) == 1
    assert capsys.readouterr().out.rstrip().endswith("NO")


def test_only_leaves_the_other_claims_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("demo", NAMES, claims, argv=["--only", "speed"]) == 0
    out = capsys.readouterr().out
    assert "speed" in out
    assert "pause" not in out


def test_an_unknown_claim_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse_options("demo", NAMES, ["--only", "speed,spede"])
    assert exit_.value.code == 2
    assert "no such claim: spede" in capsys.readouterr().err


def test_wants_follows_only_and_the_default() -> None:
    assert Options().wants("pause")
    assert not Options().wants("pause", by_default=False)
    assert Options(only=frozenset({"pause"})).wants("pause", "speed", by_default=False)
    assert not Options(only=frozenset({"pause"})).wants("speed")


def test_the_host_is_described_without_naming_it() -> None:
    host = describe_host()
    assert host.cores >= 1
    assert host.memory_gib > 0
    assert all("/" not in str(value) for value in (host.memory_gib, host.kernel))


def test_rounds_are_interleaved_and_warmups_dropped() -> None:
    calls: list[str] = []

    def side(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    samples = interleaved({"a": lambda: side("a"), "b": lambda: side("b")}, rounds=2, warmups=1)
    assert calls == ["a", "b"] * 3
    assert samples == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
