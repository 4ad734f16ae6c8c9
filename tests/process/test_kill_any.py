"""Any one process is killed at a random moment of a transfer: no wrong byte, no hang, survivors go on."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from _members import Job, Member, Spec, eventually, nbytes_of, reference

from wsync.errors import WsyncError

SPEC: Spec = [("a", "int64", (600_000,)), ("b", "float32", (700_001,)), ("c", "int16", (900_003,))]
NUM_KILLS = int(os.environ.get("WSYNC_TEST_KILLS", "50"))
SEED = int(os.environ.get("WSYNC_TEST_SEED", "1"))
WAIT_S = 25.0
REPLICAS = {"R0": "A", "R1": "B", "R2": "B", "R3": "C"}


class Coordinator:
    """`wsync coordinator` as a process that can be killed and started again on its port."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._token_file = job.folder / "token"
        self.port = 0
        self.start()
        job.env |= {"WSYNC_ADDRESS": f"127.0.0.1:{self.port}", "WSYNC_TOKEN_FILE": str(self._token_file)}

    def start(self) -> None:
        with open(self._job.folder / "coordinator.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "wsync", "coordinator", *self._options()],
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._job.env,
            )
        assert self.process.stdout is not None
        address = self.process.stdout.readline().decode().strip()
        assert address.startswith("WSYNC_ADDRESS=127.0.0.1:"), (address, self._job.logs())
        self.port = int(address.rpartition(":")[2])

    def _options(self) -> list[str]:
        return ["--token-file", str(self._token_file), "--port", str(self.port)]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Fleet:
    """A trainer on host A, replicas on A, B (two) and C; every one of them can be killed and brought back."""

    def __init__(self, job: Job, coordinator: Coordinator) -> None:
        self.job = job
        self.coordinator = coordinator
        self.config = {"chunk_nbytes": 64 << 10}
        self.trainer = self._open_trainer()
        self.replicas = {name: self._open_replica(name) for name in REPLICAS}
        self.step = 0

    def _open_trainer(self) -> Member:
        return self.job.trainer(SPEC, member_id="T", config=self.config)

    def _open_replica(self, name: str) -> Member:
        return self.job.replica(SPEC, host=REPLICAS[name], member_id=name, config=self.config)

    def holder_pid(self, host: str) -> int:
        return self.job.holder_pid(host, address=("127.0.0.1", self.coordinator.port))

    def publish(self) -> int:
        self.step += 1
        return int(self.trainer.publish(self.step, self.step))

    def kill_during_publish(self, victim: str, delay_s: float) -> None:
        """The victim dies while a version is being packed or transferred, and comes back."""
        self.step += 1
        self.trainer.begin("publish", self.step, self.step)
        time.sleep(delay_s)
        if victim == "trainer":
            self.trainer.kill()
            self.trainer = self._open_trainer()
            return
        if victim == "coordinator":
            self.coordinator.kill()
            self.coordinator.start()
        elif victim in ("A", "B", "C"):
            self.job.kill(self.holder_pid(victim))
        else:
            self.replicas[victim].kill()
        self.trainer.end()  # a publish survives any of these
        if victim in REPLICAS:
            self.replicas[victim] = self._open_replica(victim)

    def check_all_follow(self) -> None:
        """The next version reaches every replica, byte for byte, and each had other bytes before."""
        before = {name: replica.digest() for name, replica in self.replicas.items()}
        version = self.publish()
        expected = reference(SPEC, self.step)
        for replica in self.replicas.values():
            replica.begin("wait_version", version, WAIT_S)
        for name, replica in self.replicas.items():
            assert replica.end() == version, name
        for name, replica in self.replicas.items():
            found = replica.digest()
            assert found == expected, f"{name} runs wrong bytes as version {version}"
            assert all(found[tensor] != before[name][tensor] for tensor in found), f"{name} did not change"
        status = self.trainer.wait_committed(version, WAIT_S, num_replicas=len(REPLICAS))
        received = {holder.host: holder.nbytes_received for holder in status.holders}
        assert received == {"B": nbytes_of(SPEC), "C": nbytes_of(SPEC)}, "each host receives every byte once"

    def check_fed_by_own_host(self, name: str) -> None:
        """A restarted replica gets the newest version from its host's holder: nothing crosses to the host again."""
        version = self.trainer.get("publisher.last_version")
        before = {holder.host: holder.nbytes_received for holder in self.trainer.status(version).holders}
        self.replicas[name].kill()
        self.replicas[name] = self._open_replica(name)
        assert not self.replicas[name].get("replica.is_ready"), "it may not serve before its first commit"
        assert self.replicas[name].wait_version(1, WAIT_S) == version
        assert self.replicas[name].digest() == reference(SPEC, self.step)
        after = {holder.host: holder.nbytes_received for holder in self.trainer.status(version).holders}
        assert after == before


@pytest.fixture
def fleet(job: Job) -> Iterator[Fleet]:
    coordinator = Coordinator(job)
    try:
        yield Fleet(job, coordinator)
    finally:
        coordinator.kill()


@pytest.mark.timeout(600)
def test_any_process_killed_at_a_random_moment(fleet: Fleet) -> None:
    rng = random.Random(SEED)
    fleet.check_all_follow()
    for number in range(NUM_KILLS):
        victim = rng.choice(["trainer", "coordinator", "A", "B", "C", *REPLICAS])
        delay_s = rng.random() * 0.12
        try:
            fleet.kill_during_publish(victim, delay_s)
            fleet.check_all_follow()
            if victim in REPLICAS:
                fleet.check_fed_by_own_host(victim)
        except (AssertionError, WsyncError) as exc:
            exc.add_note(f"kill {number} of {victim} after {delay_s:.3f} s, seed {SEED}")
            raise
    leftovers = [path.name for path in Path("/dev/shm").iterdir() if "wsync" in path.name]
    assert not leftovers, "wsync leaves no named shared memory"


def test_survivors_serve_while_the_trainers_host_is_gone(fleet: Fleet) -> None:
    """Trainer and its holder die together: the others stay on their version, and a newcomer gets it from its host."""
    fleet.check_all_follow()
    expected = reference(SPEC, fleet.step)
    holder = fleet.holder_pid("A")
    fleet.trainer.kill()
    fleet.replicas.pop("R0").kill()
    fleet.job.kill(holder)
    fleet.replicas["R1"].kill()
    fleet.replicas["R1"] = fleet._open_replica("R1")
    fleet.replicas["R1"].wait_version(1, WAIT_S)
    for name in ("R1", "R2", "R3"):
        assert fleet.replicas[name].digest() == expected, name
    eventually(lambda: fleet.replicas["R2"].commit_latest() == 0, "nothing newer exists")
