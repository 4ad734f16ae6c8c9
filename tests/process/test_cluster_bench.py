"""What benchmarks of an emulated cluster rest on: rounds that notice wrong bytes, times of log lines, clean ends."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import _cluster_peers as peers
from benchmarks._bench import Options
from benchmarks._cluster_remote import Broadcast, Job, Remote, TimedLines, call_all, cluster_of
from benchmarks._cluster_sim import simulated_s
from benchmarks.emulated import EmulatedCluster, EmulatedHost, why_not

pytestmark = [pytest.mark.process, pytest.mark.skipif(bool(why_not()), reason=f"no emulated cluster: {why_not()}")]

HOSTS = ("a", "b", "c")
NBYTES = 1 << 20


@pytest.fixture
def cluster() -> Iterator[EmulatedCluster]:
    with cluster_of([EmulatedHost(name, 1.0) for name in HOSTS]) as made:
        yield made
    assert not list(Path("/run/netns").glob(f"wsemu-{os.getpid()}-*"))


@pytest.mark.parametrize("kind", ["wsync", "direct"])
def test_a_round_gives_times_of_all_replicas_and_refuses_bytes_that_are_wrong_or_old(
    cluster: EmulatedCluster, kind: str
) -> None:
    broadcast = Broadcast(cluster, HOSTS, NBYTES, kind=kind)
    assert set(broadcast.round()) == {"b", "c"}
    assert broadcast.last() > 0
    broadcast.publish()
    for host in broadcast.replicas:
        broadcast.committed(host)
    broadcast.replicas["c"].call("fill", 99)
    with pytest.raises(AssertionError, match="round 3 is not what was published"):
        broadcast.check()
    broadcast._before = [broadcast._expected]
    broadcast.replicas["c"].call("fill", 3)
    with pytest.raises(AssertionError, match="has not changed"):
        broadcast.check()


def test_a_member_that_fails_or_ends_is_named(cluster: EmulatedCluster) -> None:
    broadcast = Broadcast(cluster, HOSTS, NBYTES, kind="direct")
    with pytest.raises(RuntimeError, match=r"b: TypeError: .*fill"):
        broadcast.replicas["b"].call("fill")
    with pytest.raises(RuntimeError, match=r"c: has ended"):
        Remote(cluster, "c", os.environ, "benchmarks._cluster_child", "nothing", "16").call("digest")


def test_workers_of_a_sharded_broadcast_compare_with_the_cut_of_the_whole(cluster: EmulatedCluster) -> None:
    job, module = Job(cluster, "a"), "benchmarks._cluster_shards_child"

    def member(kind: str, host: str, rank: int) -> Remote:
        return Remote(cluster, host, job.environment(host), module, kind, str(NBYTES), str(rank), "2")

    ranks = [member("trainer", host, rank) for rank, host in enumerate("ab")]
    workers = [member("worker", "c", rank) for rank in range(2)]
    for remote in [*ranks, *workers]:
        remote.call("join")
    for step in (1, 2):
        call_all(ranks, "fill", step)
        assert [version for version, _ in call_all(ranks, "publish", step)] == [step, step]
        call_all(workers, "install", step)
        call_all(workers, "check", step)
    with pytest.raises(RuntimeError, match="c: AssertionError: t00 differs from its reference"):
        workers[1].call("check", 1)


def test_a_peer_without_its_package_is_named_and_has_no_number(
    cluster: EmulatedCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("nixl") else find(name))
    ours = Broadcast(cluster, HOSTS, NBYTES)
    options = Options(only=frozenset({"speedup_vs_rdt_nixl", "speedup_vs_direct"}))
    claims = list(peers.speedups(options, cluster, HOSTS, NBYTES, ours))
    assert [claim.name for claim in claims] == ["speedup_vs_direct"]
    assert capsys.readouterr().err == "speedup_vs_rdt_nixl is not measured: not installed: nixl_cu12 or nixl_cu13\n"


def test_the_simulator_takes_the_links_for_what_they_carry(cluster: EmulatedCluster) -> None:
    nbytes = 1 << 30
    by_link = nbytes * 8 / 1e9 * 1514 / 1448
    assert by_link < simulated_s(cluster.topology(), HOSTS, nbytes) < 1.05 * by_link


def test_a_line_of_a_log_has_the_time_at_which_it_came(tmp_path: Path) -> None:
    say = "import time; print('h3 is slow', flush=True); time.sleep(0.3); print('h3 > h4 is slow', flush=True)"
    started = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", say], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        log = TimedLines(process.stdout, tmp_path / "log")
        process.wait()
        log.wait()
    first, second = log.first(["is slow", "h3"], started), log.first(["is slow", "h4"], started)
    assert first is not None
    assert second is not None
    assert second - first > 0.2
    assert log.first(["is slow", "h3"], first) == second
    assert log.first(["is slow"], second) is None
    assert (tmp_path / "log").read_text().endswith("h3 > h4 is slow\n")


def test_a_link_that_drops_midway_is_named_avoided_and_healed_with_the_right_bytes() -> None:
    hosts = ["a", "b", "c", "d"]
    with cluster_of([EmulatedHost(name, 0.2) for name in hosts]) as cluster:
        broadcast = Broadcast(cluster, hosts, 64 << 20)
        assert broadcast.job is not None
        undisturbed = min(broadcast.last() for _ in range(2))
        assert broadcast.job.log.first(["is slow"], 0.0) is None, "no false alarm"
        started = broadcast.publish()
        time.sleep(undisturbed / 3)
        cluster.degrade("b", 0.01)
        for host in "cd":
            assert broadcast.committed(host) < 3 * undisturbed, "not twenty times, as behind the slow link"
        cluster.degrade("b", 0.2)
        broadcast.committed("b")
        broadcast.check()
        assert broadcast.job.log.first(["is slow", "/b"], started) is not None
