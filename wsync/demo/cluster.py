"""A Ray cluster of several nodes on this machine, which leaves nothing behind.

Its files, its token and its memory settings are its own: it neither joins a cluster that runs here nor lets one in.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import wsync
from wsync.errors import ConfigError, ErrorContext, TransferTimeout

NODE_LABEL = "wsync-demo-node"
STORE_NBYTES = 100 << 20
CLEANUP_S = 60.0
SOURCE = str(Path(wsync.__file__).parent.parent)


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that is removed afterwards, and an environment in which Ray keeps everything there.

    Raises `ConfigError` when ray is imported already: it has read its settings then.
    """
    if "ray" in sys.modules:
        raise ConfigError("ray is in use in this process already", hint="run `wsync demo` from a shell")
    # Unix sockets lie below: their paths may have 107 characters, so the user's own TMPDIR may be too long.
    folder = Path(tempfile.mkdtemp(prefix="wsd-", dir="/tmp" if os.path.isdir("/tmp") else None))
    environment = {
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, (SOURCE, os.environ.get("PYTHONPATH", "")))),
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        (folder / "ray").mkdir()
        (folder / "records").mkdir()
        yield folder
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def local_cluster(num_nodes: int, *, is_verbose: bool) -> Iterator[list[str]]:
    """A running cluster that this process is connected to; yields its node ids, head first. For a `private_folder`."""
    ray: Any = importlib.import_module("ray")  # parts of it are not typed
    cluster: Any = importlib.import_module("ray.cluster_utils").Cluster()
    try:
        for number in range(num_nodes):
            cluster.add_node(
                wait=False,
                num_cpus=4,
                object_store_memory=STORE_NBYTES,
                include_dashboard=False,
                labels={NODE_LABEL: str(number)},
            )
        level = logging.INFO if is_verbose else logging.ERROR
        ray.init(address=cluster.address, log_to_driver=is_verbose, logging_level=level)
        cluster.wait_for_nodes(60)
        nodes = sorted(ray.nodes(), key=lambda node: int(node["Labels"][NODE_LABEL]))
        yield [node["NodeID"] for node in nodes]
    finally:
        with deadline(CLEANUP_S, "cleaning up"):
            ray.shutdown()
            cluster.shutdown()


@contextmanager
def deadline(timeout_s: float, phase: str) -> Iterator[None]:
    """`TransferTimeout` in this thread when the block takes longer, whatever it waits for; once more every 5 s.

    Python delivers signals to the main thread only: elsewhere the waits inside must have deadlines of their own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        context = ErrorContext(phase=phase, elapsed_s=timeout_s)
        raise TransferTimeout("the demo ran out of time", hint="give it more with --timeout-s", context=context)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, timeout_s, 5.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
