"""Broadcasts on an emulated cluster, seen from the benchmark: processes on hosts, rounds, and the coordinator's log."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks._bench import Options
from benchmarks.emulated import GBIT, EmulatedCluster, EmulatedHost, EmulatedRack

MIB = 1 << 20
ROUNDS = 3
PAYLOAD = 1448 / 1514
"""Of a full Ethernet frame: what TCP over IPv4 with time stamps leaves."""
ANSWER_S = 180.0
CHILD = "benchmarks._cluster_child"


@contextlib.contextmanager
def cluster_of(hosts: Sequence[EmulatedHost], racks: Sequence[EmulatedRack] = ()) -> Iterator[EmulatedCluster]:
    with (
        tempfile.TemporaryDirectory(prefix="wsc", ignore_cleanup_errors=True) as folder,
        EmulatedCluster(hosts, racks, state=Path(folder)) as cluster,
    ):
        yield cluster


def nbytes_of(options: Options) -> int:
    """Of a version, unless a claim needs more."""
    return (32 if options.is_quick else 256) * MIB


def bound_s(nbytes: int, gbit_per_s: float) -> float:
    """Of bytes through one link, which also carries their headers."""
    return nbytes / (gbit_per_s * GBIT * PAYLOAD)


class Remote:
    """A process on an emulated host that answers commands (`benchmarks._cluster_child.serve`)."""

    def __init__(
        self, cluster: EmulatedCluster, host: str, environment: Mapping[str, str], module: str, *argv: str
    ) -> None:
        self._log = cluster.state / f"{module.rpartition('.')[2]}-{host}.log"
        command = [sys.executable, "-m", module, *argv]
        with self._log.open("ab") as log:
            self._process = cluster.popen(
                host, command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.host = host

    def send(self, name: str, *arguments: Any) -> None:
        """Start a command; `result` waits for it. One at a time."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            raise RuntimeError(f"{self.host}: no answer within {ANSWER_S:g} s")
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"has ended: {self._log.read_text(errors='replace')[-800:]}"}
        if "error" in answer:
            raise RuntimeError(f"{self.host}: {answer['error']}")
        return answer["result"]

    def call(self, name: str, *arguments: Any) -> Any:
        self.send(name, *arguments)
        return self.result()

    def stop(self) -> None:
        """End the process; the memory that it had is free when this returns."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def call_all(remotes: Sequence[Remote], name: str, *arguments: Any) -> list[Any]:
    """The same command in all processes at once."""
    for remote in remotes:
        remote.send(name, *arguments)
    return [remote.result() for remote in remotes]


class Job:
    """A coordinator, and what members on each host need in their environment: also the declared topology."""

    def __init__(self, cluster: EmulatedCluster, coordinator: str) -> None:
        self._cluster = cluster
        declared = cluster.state / "topology.json"
        declared.write_text(cluster.topology().dump())
        self._environment = os.environ | {"WSYNC_TOPOLOGY": str(declared)}
        command = [sys.executable, "-m", "wsync", "coordinator", "--listen", cluster.address(coordinator)]
        process = cluster.popen(
            coordinator,
            [*command, "--token-file", str(cluster.state / "token")],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        self.log = TimedLines(process.stderr, cluster.state / "coordinator.log")
        named = [line.strip().split("=", 1) for line in (process.stdout.readline() for _ in range(2)) if line]
        if len(named) != 2:
            raise RuntimeError(f"the coordinator has not started: {self.log.text()[-400:]}")
        self._environment |= dict(named)

    def environment(self, host: str) -> dict[str, str]:
        runtime = self._cluster.state / host
        runtime.mkdir(exist_ok=True)
        own = {"WSYNC_HOST": host, "WSYNC_LISTEN": self._cluster.address(host), "WSYNC_RUNTIME_DIR": str(runtime)}
        return self._environment | own


class TimedLines:
    """What a process writes, each line with the time at which it came. A copy goes to a file."""

    def __init__(self, stream: IO[str], path: Path) -> None:
        self._path = path
        self._lines: list[tuple[float, str]] = []
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[str]) -> None:
        with contextlib.suppress(ValueError, OSError), self._path.open("w") as copy:  # closed with the cluster
            for line in stream:
                self._lines.append((time.monotonic(), line))
                copy.write(f"{self._lines[-1][0]:.3f} {line}")
                copy.flush()

    def wait(self) -> None:
        """Until the process has said all."""
        self._thread.join()

    def text(self) -> str:
        return "".join(line for _, line in self._lines)

    def first(self, words: Sequence[str], after: float) -> float | None:
        """When the first line came that has all of the words; None if there is none."""
        found = (when for when, line in list(self._lines) if when > after and all(word in line for word in words))
        return next(found, None)


class Broadcast:
    """One trainer and replicas on emulated hosts, by wsync or another way (`benchmarks._cluster_child.KINDS`).

    In every round all bytes are new, and are compared at every replica by a digest.
    """

    spinning: Sequence[int] = ()

    def __init__(self, cluster: EmulatedCluster, hosts: Sequence[str], nbytes: int, *, kind: str = "wsync") -> None:
        self.job = Job(cluster, hosts[0]) if kind == "wsync" else None

        def member(host: str) -> Remote:
            environment = self.job.environment(host) if self.job else os.environ | {"GLOO_SOCKET_IFNAME": "eth0"}
            return Remote(cluster, host, environment, CHILD, kind, str(nbytes))

        self._members = [member(host) for host in hosts]
        self.trainer, *replicas = self._members
        self.replicas = {replica.host: replica for replica in replicas}
        addresses = [cluster.address(host) for host in hosts]
        for rank, remote in enumerate(self._members):  # in this order they also stand in the chain
            remote.call("join", rank, addresses)
        self._step = 0
        self._before = call_all(replicas, "digest")
        self._expected = ""
        self.started = 0.0

    def publish(self) -> float:
        """Begin a round. Returns when publish began, after which `committed` and then `check` are due."""
        self._step += 1
        self._expected = self.trainer.call("fill", self._step)
        for replica in self.replicas.values():
            replica.send("install", self._step)
        version, self.started = self.trainer.call("publish", self._step)
        if version != self._step:
            raise AssertionError(f"version {version} is not {self._step}")
        return self.started

    def committed(self, host: str) -> float:
        """Seconds from the start of publish to the commit of this replica, once it has committed."""
        return float(self.replicas[host].result()) - self.started

    def check(self) -> None:
        """Every replica has the bytes of this round, and had others before."""
        after = call_all(list(self.replicas.values()), "digest")
        if set(after) != {self._expected} or self._expected in self._before:
            raise AssertionError(f"round {self._step} is not what was published, or has not changed")
        self._before = after

    def round(self) -> dict[str, float]:
        """Seconds from the start of publish to the commit of each replica."""
        self.publish()
        times = {host: self.committed(host) for host in self.replicas}
        self.check()
        return times

    def last(self) -> float:
        """Seconds of a round to the last commit."""
        return max(self.round().values())

    def entered(self) -> dict[str, int]:
        """Host -> bytes of the last version that entered it."""
        return {host: nbytes for host, (_, nbytes) in self.trainer.call("status", len(self.replicas)).items()}

    def stop(self) -> None:
        for member in self._members:
            member.stop()
