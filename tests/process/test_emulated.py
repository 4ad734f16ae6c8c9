"""The emulated cluster: links as fast as asked for, changes at once, and nothing left behind, even by a crash."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.emulated import EmulatedCluster, EmulatedHost, EmulatedRack, clean_up, ray_environment, why_not
from wsync.topology import DomainKind, Source

pytestmark = [pytest.mark.process, pytest.mark.skipif(bool(why_not()), reason=f"no emulated cluster: {why_not()}")]

NBYTES = 12 << 20
RECEIVE = """
import socket, sys, threading
server = socket.create_server(("0.0.0.0", 5000)); print("ready", flush=True)
def take(connection):
    left = int(sys.argv[2])
    while left: left -= len(connection.recv(min(left, 1 << 20)))
    connection.sendall(b"x")
for _ in range(int(sys.argv[1])): threading.Thread(target=take, args=(server.accept()[0],)).start()
"""
SEND = """
import socket, sys, time
s = socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[3])); start = time.monotonic()
s.sendall(bytes(int(sys.argv[2]))); s.recv(1); print(time.monotonic() - start)
"""


@pytest.fixture
def state() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="wse", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def two(gbit_per_s: float = 0.2) -> list[EmulatedHost]:
    return [EmulatedHost("a", gbit_per_s), EmulatedHost("b", gbit_per_s)]


def transfers(cluster: EmulatedCluster, *pairs: tuple[str, str], nbytes: int = NBYTES) -> list[float]:
    """Seconds of each transfer (from, to); all begin together."""
    receivers = {}
    for to in dict.fromkeys(to for _, to in pairs):
        count = str(sum(to == other for _, other in pairs))
        argv = [sys.executable, "-u", "-c", RECEIVE, count, str(nbytes)]
        receivers[to] = cluster.popen(to, argv, stdout=subprocess.PIPE, text=True)
    for receiver in receivers.values():
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
    senders = []
    for source, to in pairs:
        argv = [sys.executable, "-c", SEND, cluster.address(to), str(nbytes), "20"]
        senders.append(cluster.popen(source, argv, stdout=subprocess.PIPE, text=True))
    times = [float(sender.communicate(timeout=60)[0]) for sender in senders]
    for receiver in receivers.values():
        receiver.communicate(timeout=10)
    return times


def bound(gbit_per_s: float, nbytes: int = NBYTES) -> float:
    return nbytes * 8 / (gbit_per_s * 1e9)


def ours() -> list[str]:
    folder = Path("/run/netns")
    mark = f"wsemu-{os.getpid()}-"
    return [path.name for path in folder.iterdir() if path.name.startswith(mark)] if folder.is_dir() else []


def test_a_link_has_its_rate_and_a_change_of_it_counts_at_once(state: Path) -> None:
    with EmulatedCluster(two(), state=state) as cluster:
        (seconds,) = transfers(cluster, ("a", "b"))
        assert 0.9 < seconds / bound(0.2) < 1.5
        cluster.degrade("b", 0.05)
        (seconds,) = transfers(cluster, ("a", "b"), nbytes=NBYTES // 4)
        assert 0.8 < seconds / bound(0.05, NBYTES // 4) < 1.5
    assert ours() == []


def test_each_direction_has_the_whole_rate_and_flows_at_one_end_share_it(state: Path) -> None:
    hosts = [*two(), EmulatedHost("c", 0.2)]
    with EmulatedCluster(hosts, state=state) as cluster:
        both = transfers(cluster, ("a", "b"), ("b", "a"))
        assert max(both) / bound(0.2) < 1.6
        fanned = transfers(cluster, ("a", "b"), ("a", "c"))
        assert 1.7 < max(fanned) / bound(0.2) < 3.0
        joined = transfers(cluster, ("a", "c"), ("b", "c"))
        assert 1.7 < max(joined) / bound(0.2) < 3.0


def test_an_uplink_narrows_what_crosses_it_and_nothing_else(state: Path) -> None:
    hosts = [EmulatedHost("a", 0.4, "left"), EmulatedHost("b", 0.4, "left"), EmulatedHost("c", 0.4, "right")]
    racks = [EmulatedRack("left", 0.1), EmulatedRack("right", 0.4)]
    with EmulatedCluster(hosts, racks, state=state) as cluster:
        (inside,) = transfers(cluster, ("a", "b"))
        assert 0.9 < inside / bound(0.4) < 1.8
        (across,) = transfers(cluster, ("a", "c"), nbytes=NBYTES // 2)
        assert 0.9 < across / bound(0.1, NBYTES // 2) < 1.4
        topology = cluster.topology()
    assert [(d.domain_id, d.kind, d.members, d.uplink_nbytes_per_s) for d in topology.domains] == [
        ("left", DomainKind.RACK, ("a", "b"), 0.1e9 / 8),
        ("right", DomainKind.RACK, ("c",), 0.4e9 / 8),
    ]
    assert [(nic.host_id, nic.nbytes_per_s) for nic in topology.nics] == [("a", 5e7), ("b", 5e7), ("c", 5e7)]
    assert topology.nics[0].facts["nbytes_per_s"] is Source.DECLARED


def test_a_host_can_be_cut_off_and_come_back(state: Path) -> None:
    with EmulatedCluster(two(), state=state) as cluster:
        ping = [sys.executable, "-c", SEND, cluster.address("b"), "1", "1"]
        cluster.disconnect("b")
        with pytest.raises(RuntimeError, match=r"timed out|unreachable|No route"):
            cluster.run("a", ping, timeout_s=20)
        cluster.reconnect("b")
        (seconds,) = transfers(cluster, ("a", "b"), nbytes=1000)
        assert seconds < 10


def test_processes_that_are_left_end_with_the_cluster(state: Path) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    with EmulatedCluster(two(), state=state) as cluster:
        left = cluster.popen("a", [sys.executable, "-c", deaf], stdout=subprocess.PIPE, text=True)
        assert left.stdout is not None
        assert left.stdout.readline() == "up\n"
        escaped = ["setsid", "--fork", sys.executable, "-c", "import time; time.sleep(600)"]
        cluster.popen("b", escaped, stdout=subprocess.DEVNULL).wait(20)
        (child,) = subprocess.check_output(["ip", "netns", "pids", cluster.namespace("b")], text=True).split()
    assert left.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{child}").exists() or Path(f"/proc/{child}/cmdline").read_bytes() == b""
    assert ours() == []


def test_a_cluster_that_cannot_be_made_leaves_nothing(state: Path) -> None:
    with pytest.raises(RuntimeError, match="tbf"), EmulatedCluster([EmulatedHost("a", 1e-10)], state=state):
        pass
    assert ours() == []
    with pytest.raises(ValueError, match="rate above 0"):
        EmulatedCluster([EmulatedHost("a", -1.0)], state=state)
    with pytest.raises(ValueError, match="nowhere"):
        EmulatedCluster([EmulatedHost("a", 1.0, "nowhere")], state=state)


def test_what_a_killed_run_left_is_removed_and_a_living_one_is_left_alone(state: Path) -> None:
    run = f"""
import pathlib, subprocess, sys, time
from benchmarks.emulated import EmulatedCluster, EmulatedHost
with EmulatedCluster([EmulatedHost("a", 0.2)], state=pathlib.Path({str(state)!r})) as cluster:
    left = cluster.popen("a", [sys.executable, "-c", "import time; time.sleep(600)"])
    print(cluster.namespace("a"), left.pid, flush=True)
    time.sleep(600)
"""
    root = Path(__file__).parents[2]
    runner = subprocess.Popen([sys.executable, "-c", run], cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert runner.stdout is not None
        namespace, pid = runner.stdout.readline().split()
        assert namespace not in clean_up(), "its owner lives"
        assert Path(f"/run/netns/{namespace}").exists()
        runner.kill()
        runner.wait()
        with EmulatedCluster(two(), state=state):
            assert not Path(f"/run/netns/{namespace}").exists()
            deadline = time.monotonic() + 10
            while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
                assert time.monotonic() < deadline, "the killed run's process goes on"
                time.sleep(0.01)
    finally:
        with contextlib.suppress(ProcessLookupError):
            runner.kill()
        runner.communicate()


def test_runs_that_clean_up_at_once_do_not_fail_one_another() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = [f"wsemu-{dead.pid}-1-{number}" for number in range(6)]  # no process of that start time is there
    for name in left:
        subprocess.run(["ip", "netns", "add", name], check=True)
    with ThreadPoolExecutor(3) as pool:
        found = [future.result() for future in [pool.submit(clean_up) for _ in range(3)]]
    assert {name for names in found for name in names} >= set(left)
    assert not any(Path(f"/run/netns/{name}").exists() for name in left)


def test_a_process_that_was_waited_for_gets_no_signal(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signalled: list[int] = []
    send = os.killpg

    def note(pid: int, number: int) -> None:
        signalled.append(pid)
        send(pid, number)

    monkeypatch.setattr(os, "killpg", note)
    with EmulatedCluster([EmulatedHost("a", 0.2)], state=state) as cluster:
        ended = cluster.popen("a", ["true"])
        ended.wait(20)
        running = cluster.popen("a", ["sleep", "600"])
    assert signalled == [running.pid]
    assert running.returncode == -signal.SIGTERM


def test_ray_that_ends_at_its_start_is_told_at_once(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(state / "python"))
    start = time.monotonic()
    with (
        pytest.raises(RuntimeError, match=r"Ray did not start on a: exec of .* failed"),
        EmulatedCluster([EmulatedHost("a", 0.2)], state=state) as cluster,
    ):
        cluster.start_ray()
    assert time.monotonic() - start < 30, "it waited out the time that a start may take"
    assert ours() == []


WHERE = """
import json, ray, sys
ray.init(address=sys.argv[1], _node_ip_address=sys.argv[2], log_to_driver=False)

@ray.remote(num_cpus=1)
def where():
    return ray.util.get_node_ip_address()

found = {}
for node in ray.nodes():
    labels = node["Labels"]
    there = where.options(label_selector={"wsync.io/host": labels["wsync.io/host"]})
    found[labels["wsync.io/host"]] = [labels["wsync.io/rack"], ray.get(there.remote())]
print(json.dumps(found))
"""


@pytest.mark.ray
def test_ray_runs_across_the_hosts_with_their_labels(state: Path) -> None:
    import json

    hosts = [EmulatedHost("a", 1.0, "left"), EmulatedHost("b", 1.0, "right")]
    racks = [EmulatedRack("left", 1.0), EmulatedRack("right", 1.0)]
    with EmulatedCluster(hosts, racks, state=state) as cluster:
        cluster.start_ray()
        argv = [sys.executable, "-c", WHERE, cluster.ray_address, cluster.address("a")]
        driver = cluster.popen(
            "a", argv, env=ray_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        out, err = driver.communicate(timeout=80)
        assert driver.returncode == 0, err[-2000:]
        found = json.loads(out.splitlines()[-1])
        assert found == {"a": ["left", cluster.address("a")], "b": ["right", cluster.address("b")]}
    assert ours() == []
