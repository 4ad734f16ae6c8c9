"""Broadcasts over real links of an emulated cluster, each beside the time that its slowest link needs.

    python -m benchmarks.cluster [--quick] [--json FILE] [--only CLAIM,...]

Hosts are network namespaces with shaped links (`benchmarks.emulated`), so this needs root; all bytes are real.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks._bench import Claim, Options, main, median
from benchmarks.emulated import GBIT, EmulatedCluster, EmulatedHost, EmulatedRack, why_not

CHAIN, ENTERED, MIXED, RACKS = (
    "chain_8x1gbit_vs_bound",
    "bytes_into_host_over_needed",
    "mixed_nics_vs_bound",
    "two_racks_vs_bound",
)
NAMES = (CHAIN, ENTERED, MIXED, RACKS)
MIB = 1 << 20
ROUNDS = 3
PAYLOAD = 1448 / 1514
"""Of a full Ethernet frame: what TCP over IPv4 with time stamps leaves."""
ANSWER_S = 180.0


class Remote:
    """A member process on an emulated host."""

    def __init__(self, cluster: EmulatedCluster, host: str, environment: dict[str, str], *argv: str) -> None:
        log = (cluster.state / f"member-{host}.log").open("ab")
        command = [sys.executable, "-m", "benchmarks._cluster_child", *argv]
        with log:
            self._process = cluster.popen(
                host, command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.host = host

    def send(self, name: str, *arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"the member on {self.host} has ended"}
        if "error" in answer:
            raise RuntimeError(f"{self.host}: {answer['error']}")
        return answer["result"]

    def call(self, name: str, *arguments: Any) -> Any:
        self.send(name, *arguments)
        return self.result()


class Broadcast:
    """One trainer and replicas on emulated hosts. `round` sends a version and checks every byte of it."""

    def __init__(
        self, cluster: EmulatedCluster, trainer: str, replicas: Sequence[str], nbytes: int, chunk: int
    ) -> None:
        self._step = 0
        environment = self._start_coordinator(cluster, trainer)

        def member(host: str) -> Remote:
            here = {
                "WSYNC_HOST": host,
                "WSYNC_LISTEN": cluster.address(host),
                "WSYNC_RUNTIME_DIR": str(cluster.state / host),
            }
            (cluster.state / host).mkdir(exist_ok=True)
            return Remote(cluster, host, environment | here, str(nbytes), str(chunk))

        self.trainer = member(trainer)
        self.replicas = [member(host) for host in replicas]
        self.trainer.call("train")
        for replica in self.replicas:
            replica.call("follow")

    @staticmethod
    def _start_coordinator(cluster: EmulatedCluster, host: str) -> dict[str, str]:
        token = cluster.state / "token"
        argv = [
            sys.executable,
            "-m",
            "wsync",
            "coordinator",
            "--listen",
            cluster.address(host),
            "--token-file",
            str(token),
        ]
        process = cluster.popen(host, argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        named = dict(process.stdout.readline().strip().split("=", 1) for _ in range(2))
        return os.environ | named

    def round(self) -> dict[str, float]:
        """Seconds from the start of publish to the commit of each replica. Every byte is compared, and has changed."""
        self._step += 1
        before = [replica.call("digest") for replica in self.replicas]
        expected = self.trainer.call("fill", self._step)
        for replica in self.replicas:
            replica.send("install", self._step)
        version, started = self.trainer.call("publish", self._step)
        ended = [replica.result() for replica in self.replicas]
        after = [replica.call("digest") for replica in self.replicas]
        if version != self._step or set(after) != {expected} or expected in before:
            raise AssertionError(f"version {version} is not what was published, or has not changed")
        return {replica.host: end - started for replica, end in zip(self.replicas, ended, strict=True)}

    def entered(self) -> dict[str, int]:
        """Host -> bytes of the last version that entered it."""
        return {host: nbytes for host, (_, nbytes) in self.trainer.call("status", len(self.replicas)).items()}


@contextlib.contextmanager
def cluster_of(hosts: Sequence[EmulatedHost], racks: Sequence[EmulatedRack] = ()) -> Iterator[EmulatedCluster]:
    with (
        tempfile.TemporaryDirectory(prefix="wsc", ignore_cleanup_errors=True) as folder,
        EmulatedCluster(hosts, racks, state=Path(folder)) as cluster,
    ):
        yield cluster


def bound_s(nbytes: int, gbit_per_s: float) -> float:
    """Of bytes through one link, which also carries their headers."""
    return nbytes / (gbit_per_s * GBIT * PAYLOAD)


def chain(options: Options) -> Iterator[Claim]:
    """One trainer to seven hosts at 1 Gbit/s."""
    nbytes = (32 if options.is_quick else 256) * MIB
    names = [f"h{number}" for number in range(8)]
    with cluster_of([EmulatedHost(name, 1.0) for name in names]) as cluster:
        broadcast = Broadcast(cluster, names[0], names[1:], nbytes, MIB)
        broadcast.round()
        times = [max(broadcast.round().values()) for _ in range(ROUNDS)]
        entered = broadcast.entered()
    seconds, bound = median(times), bound_s(nbytes, 1.0)
    yield Claim.at_most(CHAIN, seconds, "s", bound, seconds / bound, 1.06)
    worst = max(entered[name] for name in names[1:]) / nbytes
    yield Claim.at_most(ENTERED, worst, "x", 1.0, worst, 1.02)


def mixed(options: Options) -> Iterator[Claim]:
    """Receivers at 1, 0.5 and 0.25 Gbit/s, each against its own floor."""
    nbytes = (32 if options.is_quick else 128) * MIB
    rates = {"h1": 0.25, "h2": 1.0, "h3": 0.5}
    with cluster_of([EmulatedHost("h0", 1.0), *(EmulatedHost(name, rate) for name, rate in rates.items())]) as cluster:
        broadcast = Broadcast(cluster, "h0", list(rates), nbytes, MIB)
        broadcast.round()
        rounds = [broadcast.round() for _ in range(ROUNDS)]
    ratios = {name: median([r[name] for r in rounds]) / bound_s(nbytes, rate) for name, rate in rates.items()}
    worst = max(ratios, key=lambda name: ratios[name])
    bound = bound_s(nbytes, rates[worst])
    yield Claim.at_most(MIXED, ratios[worst] * bound, "s", bound, ratios[worst], 1.15)


def racks(options: Options) -> Iterator[Claim]:
    """Three hosts in each of two racks with an uplink of half a host's link."""
    nbytes = (32 if options.is_quick else 128) * MIB
    hosts = [EmulatedHost(f"h{number}", 1.0, f"r{number % 2}") for number in range(6)]
    with cluster_of(hosts, [EmulatedRack("r0", 0.5), EmulatedRack("r1", 0.5)]) as cluster:
        broadcast = Broadcast(cluster, "h0", [host.name for host in hosts[1:]], nbytes, MIB)
        broadcast.round()
        times = [max(broadcast.round().values()) for _ in range(ROUNDS)]
    seconds, bound = median(times), bound_s(nbytes, 0.5)
    yield Claim.at_most(RACKS, seconds, "s", bound, seconds / bound, 1.15)


def measure(options: Options) -> Iterator[Claim]:
    if reason := why_not():
        raise SystemExit(f"no emulated cluster: {reason}")
    if options.wants(CHAIN, ENTERED):
        yield from chain(options)
    if options.wants(MIXED):
        yield from mixed(options)
    if options.wants(RACKS):
        yield from racks(options)


if __name__ == "__main__":
    sys.exit(main("cluster", NAMES, measure, packages=("numpy", "msgspec")))
