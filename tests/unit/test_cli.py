"""The `wsync` command: what it refuses, and with which exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from wsync.cli import main


@pytest.mark.parametrize(
    ("arguments", "level", "text"),
    [
        ([], "", "the following arguments are required: command"),
        (["coordinator"], "", "required: --token-file"),
        (["verify", "--trainer", "a.json"], "", "required: --replica"),
        (["verify", "--trainer", "a.json", "--replica", "b.json"], "loud", "WSYNC_LOG must be a level such as INFO"),
    ],
)
def test_wrong_usage_has_exit_status_2(
    arguments: list[str], level: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WSYNC_LOG", level)
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("level", ["", "debug", "WARNING"])
def test_a_named_error_of_reports_is_no_difference(
    level: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("WSYNC_LOG", level)
    absent = str(tmp_path / "absent.json")
    assert main(["verify", "--trainer", absent, "--replica", absent]) == 2
    assert f"wsync verify: ConfigError: '{absent}' is no digest report" in capsys.readouterr().err


def test_a_coordinator_that_cannot_start_has_exit_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    token.write_text("")
    token.chmod(0o600)
    assert main(["coordinator", "--token-file", str(token)]) == 1
    assert f"wsync coordinator: ConfigError: {token} is empty" in capsys.readouterr().err
