"""The demo's parts that need neither Ray nor an engine."""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

import pytest

import wsync.demo
from wsync.demo.records import Joined, RecordReader, RecordWriter, Span
from wsync.demo.scenario import Scenario, make_scenario, require
from wsync.errors import ConfigError, TransferTimeout


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    wsync.demo.add_arguments(parser)
    return parser.parse_args(words)


def test_importing_the_demo_loads_neither_torch_nor_ray() -> None:
    code = "import sys, wsync.demo; sys.exit(bool({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    root = Path(wsync.demo.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False, timeout=60).returncode == 0


def test_the_check_shares_no_code_with_wsync() -> None:
    source = Path(wsync.demo.__file__).with_name("check.py").read_text()
    modules = {
        name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert modules == {"__future__", "hashlib", "torch"}


@pytest.mark.parametrize("num_versions", range(4, 20))
def test_kill_growth_and_shrinkage_happen_in_this_order(num_versions: int) -> None:
    scenario = Scenario(model="tiny", num_versions=num_versions)
    assert 2 <= scenario.kill_at < scenario.grow_at < scenario.shrink_at <= num_versions


def test_too_few_versions_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 4"):
        make_scenario(options("--tiny", "--versions", "3"))


def test_defaults() -> None:
    assert make_scenario(options()).num_versions == 8
    assert make_scenario(options("--tiny")).model == "tiny"
    assert make_scenario(options("--model", "qwen3-0.6b")).needed_nbytes < 18e9
    assert make_scenario(options()).needed_nbytes < 10e9
    require(make_scenario(options("--tiny")))


def test_main_reports_bad_options_without_starting_anything(capsys: pytest.CaptureFixture[str]) -> None:
    assert wsync.demo.main(options("--tiny", "--versions", "1")) == 1
    assert "at least 4" in capsys.readouterr().err


def test_an_unfinished_line_is_read_when_it_is_finished(tmp_path: Path) -> None:
    writer, reader = RecordWriter(tmp_path, "r0", 7), RecordReader(tmp_path)
    first, second = Joined("r0", 7, "n1", 1.0), Span("r0", 7, 2.0, 1, 3, 0.1, 0)
    writer.write(first)
    assert reader.poll() == [first]
    writer.write(second)
    writer.close()
    path = tmp_path / "r0-7.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    assert reader.poll() == []
    path.write_bytes(whole)
    assert reader.poll() == [second]
    assert reader.poll() == []


def test_the_deadline_ends_a_wait_that_has_none() -> None:
    from wsync.demo.cluster import deadline

    waiting = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with pytest.raises(TransferTimeout, match="out of time"), deadline(0.2, "test"):
            waiting.wait()
    finally:
        waiting.kill()
        waiting.wait()


def test_loopback_is_measured() -> None:
    from wsync.demo.loopback import measure_loopback

    assert measure_loopback(0.05) > 1e6
