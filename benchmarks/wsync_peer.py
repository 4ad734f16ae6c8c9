"""wsync itself as a peer: one trainer, N replicas, plain processes on one machine.

Processes with the same host name share a holder; bytes between holders of different names cross tcp, which is how
remote replicas are had on one machine. As with every peer, each round has new bytes, and outside of the timed part
every replica compares its tensors with an independent reference and asserts that they have changed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import msgspec
import torch

import wsync
from benchmarks._child import SPAWN, Child, call_all, stop_all
from benchmarks._leftovers import marked, wait_until_gone
from benchmarks.peers import Setup
from benchmarks.shapes import Weights

CHANNEL = "policy"
TIMEOUT_S = 60.0
POLL_S = 0.005
LINGER_S = 5.0
"""A holder outlives a replica that leaves and joins again."""
UNIT = 5000
"""Squares in a unit of work, which needs the interpreter all the time."""


class Published(msgspec.Struct, frozen=True):
    """What the trainer's process saw of one publish; times of the shared clock."""

    version: int
    started: float
    returned: float

    @property
    def pause_s(self) -> float:
        return self.returned - self.started


class Installed(msgspec.Struct, frozen=True):
    """What a replica's process saw of one commit."""

    version: int
    ended: float
    pause_s: float


class Spin(msgspec.Struct, frozen=True):
    """A loop of units of work in the trainer's process, and what that process had for it."""

    count: int
    seconds: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """Units per second of the clock."""
        return self.count / self.seconds

    @property
    def cpu_rate(self) -> float:
        """Units per second of the process's own CPU time: what other programs take from the core does not count."""
        return self.count / self.cpu_s


class WsyncBroadcast:
    """Rounds of publish and commit. `hosts` names the host of each replica; the trainer is on `home`.

    With `cores` the trainer's process has the first of these cores, holders and replicas have the second.
    After a round `published` and `installed` tell what its processes saw.
    """

    def __init__(self, setup: Setup, hosts: Sequence[str], *, cores: tuple[int, int] | None = None) -> None:
        self._setup = setup
        self._hosts = tuple(hosts)
        self._cores = cores
        self._round = 0
        self._others = marked()
        self._children: list[Child] = []
        self.first_s = 0.0
        self.published = Published(0, 0.0, 0.0)
        self.installed: list[Installed] = []

    def start(self) -> None:
        """Start all processes, join, and bring the first version to everybody."""
        job = f"bench-{os.getpid()}-{time.monotonic_ns()}"
        pinned = self._cores[1:] if self._cores else ()
        configs = [wsync.Config(job=job, host=host, linger_s=LINGER_S) for host in ("home", *self._hosts)]
        alarm, self._alarm = SPAWN.Pipe(duplex=False)
        self._children.append(Child(_Trainer, self._setup, configs[0], alarm, cores=pinned))
        self._children += [Child(_Replica, self._setup, config, cores=pinned) for config in configs[1:]]
        self._trainer, *self._replicas = self._children
        call_all(self._children, "ready")
        alarm.close()
        join_s: float = self._trainer.call("join") + max(call_all(self._replicas, "join"))
        if self._cores:
            self._trainer.call("pin", self._cores[0])
        self.first_s = join_s + self.round()

    def round(self) -> float:
        """Seconds from the start of publish to the end of the last replica's commit."""
        return self._run("install")

    def polled_round(self) -> float:
        """The same where replicas ask every 5 ms and commit then; `installed` has the time of the one call that did."""
        return self._run("install_polled")

    def staged_s(self) -> float:
        """Of the last round, from the start of publish to the last replica's version being staged on its host."""
        return max(each.ended - each.pause_s for each in self.installed) - self.published.started

    def transfer_s(self) -> float:
        """Of the last round, the longest transfer to another host, from its order to pull to its last digest."""
        return float(self._trainer.call("transfer_s"))

    def joining_round(self) -> float:
        """Seconds of the transfer to a host that joins when the version is whole: nothing but holder to holder."""
        self._prepare()
        call_all(self._replicas, "leave")
        published: Published = self._trainer.call("publish", self._round)
        self._trainer.call("wait_sealed")
        call_all(self._replicas, "join")
        for replica in self._replicas:
            replica.send("install", published.version)
        self._check(published, [replica.result() for replica in self._replicas])
        return self.transfer_s()

    def _run(self, install: str) -> float:
        self._prepare()
        for replica in self._replicas:
            replica.send(install, self.published.version + 1)
        published: Published = self._trainer.call("publish", self._round)
        self._check(published, [replica.result() for replica in self._replicas])
        return max(each.ended for each in self.installed) - published.started

    def serve_and_spin(self) -> Spin:
        """A round in which the trainer's process computes from the end of publish to the last commit."""
        self._prepare()
        for replica in self._replicas:
            replica.send("install", self.published.version + 1)
        self._trainer.send("publish_and_spin", self._round)
        installed = [replica.result() for replica in self._replicas]
        self._alarm.send_bytes(b"done")
        published, spin = self._trainer.result()
        self._check(published, installed)
        return spin

    def spin(self, seconds: float) -> Spin:
        """The same loop with nothing to serve."""
        return self._trainer.call("spin", seconds)

    def _prepare(self) -> None:
        self._round += 1
        self._trainer.call("fill", self._round)
        call_all(self._replicas, "remember")

    def _check(self, published: Published, installed: list[Installed]) -> None:
        self.published, self.installed = published, installed
        if any(each.version != published.version for each in installed):
            raise AssertionError(f"replicas have {[each.version for each in installed]}, not {published.version}")
        call_all(self._replicas, "check", self._round)
        self._trainer.call("wait_committed", len(self._replicas))

    def stop(self) -> None:
        """Leave the job and wait until its holders have gone."""
        stop_all(self._children[::-1])
        wait_until_gone(self._others)


class _Trainer(Weights):
    def __init__(self, setup: Setup, config: wsync.Config, alarm: Connection) -> None:
        super().__init__(setup.layout, setup.seed)
        torch.set_num_threads(setup.num_threads)
        self._config = config
        self._alarm = alarm
        self._publisher: wsync.Publisher | None = None

    def ready(self) -> None:
        """Return when the process is there."""

    def join(self) -> float:
        started = time.monotonic()
        self._publisher = wsync.Publisher(CHANNEL, self.tensors, config=self._config)
        return time.monotonic() - started

    def pin(self, core: int) -> None:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {core})

    def publish(self, step: int) -> Published:
        assert self._publisher is not None
        started = time.monotonic()
        self._publication = self._publisher.publish(step=step)
        return Published(self._publication.version, started, time.monotonic())

    def wait_committed(self, num_replicas: int) -> None:
        self._publication.wait_committed(timeout_s=TIMEOUT_S, num_replicas=num_replicas)

    def transfer_s(self) -> float:
        return max(holder.transfer_s for holder in self._publication.status().holders)

    def wait_sealed(self) -> None:
        """Return when this host's holder has hashed the version."""
        assert self._publisher is not None
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(wsync.WsyncError):
                self._publisher.digests(self._publication.version)
                return
            time.sleep(POLL_S)
        raise TimeoutError(f"version {self._publication.version} was not sealed within {TIMEOUT_S} s")

    def publish_and_spin(self, step: int) -> tuple[Published, Spin]:
        published = self.publish(step)
        spin = self.spin(TIMEOUT_S)
        self._alarm.recv_bytes()
        return published, spin

    def spin(self, most_s: float) -> Spin:
        """Compute until the alarm, or for `most_s`."""
        started, cpu, count = time.monotonic(), time.process_time(), 0
        while not self._alarm.poll() and time.monotonic() < started + most_s:
            sum(number * number for number in range(UNIT))
            count += 1
        return Spin(count, time.monotonic() - started, time.process_time() - cpu)

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


class _Replica(Weights):
    def __init__(self, setup: Setup, config: wsync.Config) -> None:
        super().__init__(setup.layout, setup.seed)
        torch.set_num_threads(setup.num_threads)
        self._config = config
        self._replica: wsync.Replica | None = None

    def ready(self) -> None:
        """Return when the process is there."""

    def join(self) -> float:
        started = time.monotonic()
        self._replica = wsync.Replica(CHANNEL, self.tensors, config=self._config)
        return time.monotonic() - started

    def leave(self) -> None:
        assert self._replica is not None
        self._replica.close()

    def install(self, version: int) -> Installed:
        assert self._replica is not None
        commit = self._replica.wait_version(version, timeout_s=TIMEOUT_S)
        return Installed(commit.version, time.monotonic(), commit.pause_s)

    def install_polled(self, version: int) -> Installed:
        assert self._replica is not None
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            started = time.monotonic()
            commit = self._replica.commit_latest()
            ended = time.monotonic()
            if commit is not None and commit.version >= version:
                return Installed(commit.version, ended, ended - started)
            time.sleep(POLL_S)
        raise TimeoutError(f"version {version} was not staged within {TIMEOUT_S} s")

    def close(self) -> None:
        if self._replica is not None:
            self._replica.close()
