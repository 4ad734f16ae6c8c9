"""`wsync demo` from its options to its exit status."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
import traceback
from pathlib import Path

import msgspec

from wsync.demo.cluster import deadline, local_cluster, private_folder
from wsync.demo.loopback import measure_loopback
from wsync.demo.progress import Progress
from wsync.demo.report import Evidence, make_report
from wsync.demo.scenario import NUM_NODES, Scenario, make_scenario, require
from wsync.demo.table import render
from wsync.errors import WsyncError

GRACE_S = 10.0
"""The scenario watches the deadline itself; this long after it, the alarm rings."""


def main(args: argparse.Namespace) -> int:
    """Run and judge, with progress, table and verdict on stdout. Returns 1 when it does not hold or on any error."""
    start_s = time.monotonic()
    try:
        scenario = make_scenario(args)
        require(scenario)
    except WsyncError as error:
        print(f"wsync demo: {error}", file=sys.stderr)
        return 1
    evidence = Evidence(model=scenario.model, seed=scenario.seed, num_versions=scenario.num_versions)
    try:
        with deadline(scenario.timeout_s + GRACE_S, "demo"):
            _run(scenario, evidence)
    except (Exception, KeyboardInterrupt) as error:  # reported: it is the first problem of the verdict
        evidence.error = brief(error)
        if scenario.is_verbose:
            traceback.print_exc()
    evidence.elapsed_s = time.monotonic() - start_s
    report = make_report(evidence)
    print("\n" + render(report), flush=True)
    if args.json:
        Path(args.json).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return 0 if report.holds else 1


def brief(error: BaseException) -> str:
    """Kind and cause on one line: Ray puts the remote traceback into the text, with the cause in its last line."""
    if isinstance(error, SystemError) and error.__cause__ is not None:
        error = error.__cause__  # what a signal handler raised inside native code
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[-1:]])


def _run(scenario: Scenario, evidence: Evidence) -> None:
    progress = Progress(sys.stdout)
    evidence.loopback_nbytes_per_s = measure_loopback()
    # Ray prints what its nodes say about killed processes to the driver's stdout, whatever log_to_driver is.
    quiet = contextlib.nullcontext() if scenario.is_verbose else contextlib.redirect_stdout(io.StringIO())
    with quiet, private_folder() as folder:
        from wsync.demo.play import Demo  # ray reads its settings when it is imported

        progress.say(f"starting a Ray cluster of {NUM_NODES} nodes on this machine")
        with local_cluster(NUM_NODES, is_verbose=scenario.is_verbose) as nodes:
            progress.say(f"loading {scenario.model} in the trainer")
            demo = Demo(scenario, nodes, folder, evidence, progress)
            try:
                demo.play()
            finally:
                demo.fleet.poll()
