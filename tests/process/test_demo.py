"""`wsync demo --tiny` from end to end: a Ray cluster of three nodes, kills, growth, shrinkage and the verdict."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import wsync
from wsync.demo.report import Report

# Looked for, not imported: whoever starts a cluster in this process must set Ray's environment before its import.
if not all(importlib.util.find_spec(name) for name in ("ray", "transformers")):
    pytest.skip("needs ray and transformers", allow_module_level=True)

CODE = """
import argparse, sys
from wsync.demo import add_arguments, main
parser = argparse.ArgumentParser()
add_arguments(parser)
sys.exit(main(parser.parse_args()))
"""


@pytest.mark.process
@pytest.mark.ray
@pytest.mark.timeout(240)
def test_the_tiny_demo_holds(tmp_path: Path) -> None:
    before = set(Path("/tmp").glob("wsd-*"))
    path = tmp_path / "report.json"
    command = [sys.executable, "-c", CODE, "--tiny", "--timeout-s", "180", "--json", str(path)]
    root = Path(wsync.__file__).parents[1]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=230, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    assert report.holds
    assert [row.num_replicas for row in report.rows] == [4, 4, 6, 3]
    assert len(report.kills) == 1
    assert all(row.num_tokens for row in report.rows)
    assert set(Path("/tmp").glob("wsd-*")) <= before
