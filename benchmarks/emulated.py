"""A cluster on one machine: hosts are network namespaces with shaped links, racks have uplinks. Needs root on Linux.

Each host has a veth pair to a switch namespace with a bridge per rack; the bridges meet in a core bridge. A token
bucket at either end of a pair limits each direction. Nothing of the machine's own network is touched, and whatever is
made lies in namespaces whose names tell the owner's pid and start time: the next run removes those of owners that are
gone.

    python -m benchmarks.emulated --clean
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from wsync.topology import Domain, DomainKind, Host, Nic, NicKind, Source, Topology

PREFIX = "wsemu"
SUBNET = "10.77.0"
GBIT = 1e9 / 8
BURST_S, MIN_BURST_NBYTES = 0.002, 128 << 10
"""A bucket holds so much of its rate, and two of the largest packets that a veth hands over at once."""
STOP_S = 5.0
COMMAND_S = 20.0
RAY_S = 90.0


class EmulatedHost(msgspec.Struct, frozen=True):
    name: str
    gbit_per_s: float
    """Of its link, in each direction."""
    rack: str = ""


class EmulatedRack(msgspec.Struct, frozen=True):
    name: str
    uplink_gbit_per_s: float


@functools.cache
def why_not() -> str:
    """Why there can be no emulated cluster here; empty if there can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, this is {sys.platform}"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"{_owner()}-try"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "name", "try0", "type", "veth", "peer", "name", "try1")
        _shape(name, "try0", 1.0, "add")
    except RuntimeError as exc:
        return str(exc)
    finally:
        _remove(name)
    return ""


class EmulatedCluster:
    """A context manager: inside of it the hosts are there. `state` is a folder for logs and Ray's files, short of name.

    Raises RuntimeError with what `ip` or `tc` said when something cannot be made; nothing is left then either.
    """

    def __init__(self, hosts: Sequence[EmulatedHost], racks: Sequence[EmulatedRack] = (), *, state: Path) -> None:
        self.hosts = {host.name: host for host in hosts}
        self.racks = {rack.name: rack for rack in racks}
        strangers = {host.rack for host in hosts if host.rack} - self.racks.keys()
        if len(self.hosts) < len(hosts) or strangers or len(hosts) > 250:
            raise ValueError(f"up to 250 hosts of different names, in racks that are there: {sorted(strangers)}")
        if min([1.0, *(h.gbit_per_s for h in hosts), *(r.uplink_gbit_per_s for r in racks)]) <= 0:
            raise ValueError("every link has a rate above 0")
        self.state = state
        self._number = {name: number for number, name in enumerate(self.hosts, start=1)}
        self._processes: list[subprocess.Popen[Any]] = []
        self._raylets: list[subprocess.Popen[Any]] = []
        self._owner = _owner()
        self._switch = f"{self._owner}-sw"

    def __enter__(self) -> Self:
        clean_up()
        try:
            self._make()
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_down()

    def namespace(self, host: str) -> str:
        return f"{self._owner}-{self._number[host]}"

    def address(self, host: str) -> str:
        """IPv4 address, which only the other hosts reach."""
        return f"{SUBNET}.{self._number[host]}"

    def topology(self) -> Topology:
        """The hosts, links and uplinks that were asked for, as declared facts. Host ids are the hosts' names."""
        nics = [
            Nic.told(
                Source.DECLARED,
                nic_id=f"{host.name}/eth0",
                host_id=host.name,
                kind=NicKind.ETHERNET,
                name="eth0",
                netdev="eth0",
                nbytes_per_s=host.gbit_per_s * GBIT,
                is_up=True,
            )
            for host in self.hosts.values()
        ]
        domains = [
            Domain.told(
                Source.DECLARED,
                domain_id=rack.name,
                kind=DomainKind.RACK,
                members=tuple(host.name for host in self.hosts.values() if host.rack == rack.name),
                uplink_nbytes_per_s=rack.uplink_gbit_per_s * GBIT,
            )
            for rack in self.racks.values()
        ]
        hosts = tuple(Host(host_id=name) for name in self.hosts)
        return Topology(hosts=hosts, nics=tuple(nics), domains=tuple(domains))

    def popen(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on the host, in a session of its own. It is ended with the cluster."""
        command = ["ip", "netns", "exec", self.namespace(host), *argv]
        process = subprocess.Popen(command, start_new_session=True, **options)
        self._processes.append(process)
        return process

    def run(self, host: str, argv: Sequence[str], *, timeout_s: float) -> str:
        """What the command prints on the host. Raises RuntimeError when it fails or takes too long."""
        return _run("ip", "netns", "exec", self.namespace(host), *argv, timeout_s=timeout_s)

    def degrade(self, host: str, gbit_per_s: float) -> None:
        """From now on the host's link has this rate, in both directions."""
        _shape(self.namespace(host), "eth0", gbit_per_s, "change")
        _shape(self._switch, f"h{self._number[host]}", gbit_per_s, "change")

    def disconnect(self, host: str) -> None:
        _run("ip", "-n", self.namespace(host), "link", "set", "eth0", "down")

    def reconnect(self, host: str) -> None:
        _run("ip", "-n", self.namespace(host), "link", "set", "eth0", "up")

    @property
    def ray_address(self) -> str:
        return f"{self.address(next(iter(self.hosts)))}:6399"

    def start_ray(
        self, *, num_cpus: int = 2, object_store_nbytes: int = 200 << 20, environment: Mapping[str, str] | None = None
    ) -> None:
        """A head on the first host and a raylet on each other one, with labels `wsync.io/host` and `wsync.io/rack`.

        Their workers have `environment` as well.
        """
        ray = str(Path(sys.executable).with_name("ray"))
        for number, host in enumerate(self.hosts.values()):
            labels = f"wsync.io/host={host.name}" + (f",wsync.io/rack={host.rack}" if host.rack else "")
            place = (
                ["--head", "--port=6399", "--include-dashboard=false"]
                if number == 0
                else [f"--address={self.ray_address}"]
            )
            options = [
                f"--node-ip-address={self.address(host.name)}",
                f"--temp-dir={self.state / f'r{number}'}",
                f"--num-cpus={num_cpus}",
                f"--object-store-memory={object_store_nbytes}",
                f"--labels={labels}",
                "--disable-usage-stats",
                "--block",
            ]
            with (self.state / f"ray-{host.name}.log").open("wb") as log:
                started = self.popen(
                    host.name,
                    [ray, "start", *place, *options],
                    env={**ray_environment(), **(environment or {})},
                    stdout=log,
                    stderr=log,
                )
            self._raylets.append(started)
            if number == 0:
                self._wait_for_ray([host.name])
        self._wait_for_ray(list(self.hosts)[1:])

    def _wait_for_ray(self, hosts: Sequence[str]) -> None:
        deadline = time.monotonic() + RAY_S
        for host in hosts:
            log, started = self.state / f"ray-{host}.log", self._raylets[self._number[host] - 1]
            while "Ray runtime started" not in log.read_text(errors="replace"):
                if time.monotonic() > deadline or started.poll() is not None:
                    raise RuntimeError(f"Ray did not start on {host}: {log.read_text(errors='replace')[-400:]}")
                time.sleep(0.1)

    def _make(self) -> None:
        in_switch = ("ip", "-n", self._switch)
        _run("ip", "netns", "add", self._switch)
        bridges = {"": "core"} | {rack: f"br{number}" for number, rack in enumerate(self.racks)}
        for bridge in bridges.values():
            _run(*in_switch, "link", "add", "name", bridge, "type", "bridge")
            _run(*in_switch, "link", "set", bridge, "up")
        for number, rack in enumerate(self.racks.values()):
            up, down = f"up{number}", f"dn{number}"
            _run(*in_switch, "link", "add", "name", up, "type", "veth", "peer", "name", down)
            for name, bridge in ((up, bridges[rack.name]), (down, "core")):
                _run(*in_switch, "link", "set", name, "master", bridge, "up")
                _shape(self._switch, name, rack.uplink_gbit_per_s, "add")
        for name, host in self.hosts.items():
            space, port = self.namespace(name), f"h{self._number[name]}"
            _run("ip", "netns", "add", space)
            _run(
                "ip",
                "link",
                "add",
                "name",
                "eth0",
                "netns",
                space,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                self._switch,
            )
            _run(*in_switch, "link", "set", port, "master", bridges[host.rack], "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "eth0", "up")
            _shape(space, "eth0", host.gbit_per_s, "add")
            _shape(self._switch, port, host.gbit_per_s, "add")

    def _take_down(self) -> None:
        _end_groups(self._raylets[::-1], STOP_S)  # a `ray start --block` ends its own children
        _end_groups(self._processes[::-1], STOP_S)
        _remove_all([*(self.namespace(host) for host in self.hosts), self._switch])


def ray_environment() -> Mapping[str, str]:
    """What `ray start` and drivers on the emulated hosts need: joining raylets must be told that tokens are used."""
    return os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
    }


def clean_up() -> list[str]:
    """Remove the namespaces, and end the processes in them, of owners that are gone. Returns their names."""
    found = [name for name in _namespaces() if not _is_alive(name)]
    _remove_all(found)
    return found


def _owner() -> str:
    return f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}"


def _started(pid: int) -> str:
    """When the process began, in the kernel's ticks; empty if there is none: a pid alone may be somebody else's now."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _is_alive(name: str) -> bool:
    _, pid, started, _ = name.split("-")
    return _started(int(pid)) == started


def _namespaces() -> Iterator[str]:
    folder = Path("/run/netns")
    for name in sorted(path.name for path in folder.iterdir()) if folder.is_dir() else ():
        parts = name.split("-")
        if len(parts) == 4 and parts[0] == PREFIX and parts[1].isdigit():
            yield name


def _remove_all(names: Sequence[str]) -> None:
    """Remove as many as can be; then raise RuntimeError for those that could not."""
    failed = []
    for name in names:
        try:
            _remove(name)
        except RuntimeError as exc:
            failed.append(str(exc))
    if failed:
        raise RuntimeError("; ".join(failed))


def _remove(name: str) -> None:
    """End what runs in the namespace and remove it. One that is gone, or goes meanwhile by another run, is fine."""
    try:
        _end_namespace(name)
    except RuntimeError:
        if Path(f"/run/netns/{name}").exists():
            raise


def _end_namespace(name: str) -> None:
    if not Path(f"/run/netns/{name}").exists():
        return
    deadline = time.monotonic() + STOP_S
    while (pids := _run("ip", "netns", "pids", name).split()) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)
    _run("ip", "netns", "del", name)


def _end_groups(processes: list[subprocess.Popen[Any]], patience_s: float) -> None:
    """TERM, then KILL. What a process that has ended left behind is still in its namespace, and ends with that."""
    _signal_groups(processes, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    _signal_groups(processes, signal.SIGKILL)
    for process in processes:
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    processes.clear()


def _signal_groups(processes: Sequence[subprocess.Popen[Any]], number: signal.Signals) -> None:
    for process in processes:
        if process.poll() is None:  # the number of one that was waited for may be somebody else's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def _shape(namespace: str, device: str, gbit_per_s: float, verb: str) -> None:
    burst = max(MIN_BURST_NBYTES, int(gbit_per_s * GBIT * BURST_S))
    rate = f"{int(gbit_per_s * 1e9)}bit"
    _run(
        "tc",
        "-n",
        namespace,
        "qdisc",
        verb,
        "dev",
        device,
        "root",
        "tbf",
        "rate",
        rate,
        "burst",
        str(burst),
        "latency",
        "50ms",
    )


def _run(*argv: str, timeout_s: float = COMMAND_S) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise RuntimeError(f"'{' '.join(argv)}' gives no answer: {exc}") from exc
    if done.returncode:
        raise RuntimeError(f"'{' '.join(argv)}' failed: {done.stderr.strip()[-400:] or done.returncode}")
    return done.stdout


if __name__ == "__main__":
    if sys.argv[1:] != ["--clean"]:
        sys.exit("usage: python -m benchmarks.emulated --clean")
    print("\n".join(clean_up()) or "nothing was left")
