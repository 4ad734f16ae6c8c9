"""Real member processes for tests: each trainer or replica is a python process of its own, driven over a pipe.

`Job` is one job with a runtime folder of its own; `Job.member` starts a process; a `Member` passes calls on to the
`Child` that lives there and raises what that raised. Bytes are compared by sha256 with a seeded generator, which is
computed here and there without any code of wsync.

Members are forked from a `Nursery`, a process that has imported what they need and nothing else: one without torch,
one with it. Run as a script, this file is a nursery.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from wsync.config import Config

Spec = Sequence[tuple[str, str, tuple[int, ...]]]
"""`(name, dtype, shape)` of each tensor."""

SMALL: Spec = [("w", "float32", (37, 5)), ("b", "int64", (11,)), ("s", "float32", ())]
PATIENT_S = 60.0
_ITEMSIZE = {"bool": 1, "uint8": 1, "int8": 1, "bfloat16": 2, "float16": 2, "int16": 2, "float64": 8, "int64": 8}


def source_bytes(name: str, dtype: str, shape: tuple[int, ...], seed: int) -> bytes:
    """The bytes of a tensor in logical order; other seeds and other names give other bytes."""
    itemsize = 1 if dtype.startswith("float8") else _ITEMSIZE.get(dtype, 4)
    drawn = np.random.default_rng([seed, zlib.crc32(name.encode())]).bytes(math.prod(shape) * itemsize)
    return bytes(byte & 1 for byte in drawn) if dtype == "bool" else drawn


def sha(block: bytes) -> str:
    return hashlib.sha256(block).hexdigest()


def reference(spec: Spec, seed: int) -> dict[str, str]:
    """What every tensor must hash to, by name."""
    return {name: sha(source_bytes(name, dtype, shape, seed)) for name, dtype, shape in spec}


def nbytes_of(spec: Spec) -> int:
    """Bytes of the packed lane: each tensor begins at a multiple of 64."""
    return sum(-(-len(source_bytes(name, dtype, shape, 0)) // 64) * 64 for name, dtype, shape in spec)


def eventually(is_true: Callable[[], object], what: str, timeout_s: float = PATIENT_S) -> None:
    """Poll until it is true; fail with `what` at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)


# --- the child
def logical_bytes(tensor: Any) -> bytes:
    """Bytes of a numpy array or torch tensor in row-major order."""
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).tobytes()
    import torch

    if not tensor.numel():
        return b""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def make_tensors(spec: Spec, seed: int, *, kind: str = "numpy") -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, dtype, shape in spec:
        block = bytearray(source_bytes(name, dtype, shape, seed))
        if kind == "numpy":
            made[name] = np.frombuffer(block, dtype=dtype).reshape(shape)
        else:
            import torch

            flat = torch.frombuffer(block, dtype=torch.uint8) if block else torch.empty(0, dtype=torch.uint8)
            made[name] = flat.view(getattr(torch, dtype)).reshape(shape).clone()
    return made


class Child:
    """What a member process can be asked to do. Holds at most one publisher and one replica."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.spec: Spec = ()
        self.tensors: Any = {}
        self.kind = "numpy"
        self.publisher: Any = None
        self.replica: Any = None
        self.publications: dict[int, Any] = {}

    def make(self, spec: Spec, seed: int, kind: str = "numpy") -> None:
        self.spec, self.kind = spec, kind
        self.tensors = make_tensors(spec, seed, kind=kind)

    def refill(self, seed: int) -> None:
        """Other bytes in the same tensors, in place."""
        for name, value in make_tensors(self.spec, seed, kind=self.kind).items():
            if self.kind == "numpy":
                np.copyto(self.tensors[name].reshape(-1).view(np.uint8), value.reshape(-1).view(np.uint8))
            else:
                self.tensors[name].copy_(value)

    def open_publisher(self, channel: str, **options: Any) -> str:
        from wsync import Publisher

        self.publisher = Publisher(channel, self.tensors, **{"config": self.config, **options})
        return str(self.publisher.member_id)

    def open_replica(self, channel: str, **options: Any) -> str:
        from wsync import Replica

        self.replica = Replica(channel, self.tensors, **{"config": self.config, **options})
        return str(self.replica.member_id)

    def publish(self, step: int, seed: int | None = None, **options: Any) -> int:
        """Fill with `seed`, if given, and publish; the version."""
        if seed is not None:
            self.refill(seed)
        publication = self.publisher.publish(step, **options)
        self.publications[publication.version] = publication
        return int(publication.version)

    def publish_fast(self, seeds: Sequence[int]) -> list[int]:
        return [self.publish(seed, seed) for seed in seeds]

    def versions(self) -> list[int]:
        return sorted(self.publications)

    def status(self, version: int) -> Any:
        return self.publications[version].status()

    def wait_staged(self, version: int, timeout_s: float = PATIENT_S, **options: Any) -> Any:
        return self.publications[version].wait_staged(timeout_s, **options)

    def wait_committed(self, version: int, timeout_s: float = PATIENT_S, **options: Any) -> Any:
        return self.publications[version].wait_committed(timeout_s, **options)

    def commit_latest(self) -> int:
        """The version that was installed, 0 when there was nothing newer."""
        commit = self.replica.commit_latest()
        return commit.version if commit else 0

    def wait_version(self, min_version: int, timeout_s: float = PATIENT_S) -> int:
        return int(self.replica.wait_version(min_version, timeout_s=timeout_s).version)

    def rollback(self, version: int = 0) -> int:
        return int(self.replica.rollback(version).version)

    def verify(self, timeout_s: float = 60.0) -> list[str]:
        return list(self.replica.verify(timeout_s=timeout_s))

    def digest(self) -> dict[str, str]:
        """sha256 of every live tensor, made without wsync."""
        named = self.tensors if isinstance(self.tensors, dict) else self.tensors.state_dict()
        return {name: sha(logical_bytes(value)) for name, value in named.items()}

    def get(self, path: str) -> Any:
        """An attribute, such as `replica.is_ready`."""
        found: Any = self
        for part in path.split("."):
            found = getattr(found, part)
        return found

    def call(self, path: str, *args: Any, **options: Any) -> Any:
        return self.get(path)(*args, **options)

    def modules(self) -> set[str]:
        return {name for name in sys.modules if "." not in name}

    def memfds(self) -> int:
        return count_memfds(os.getpid())

    def close(self) -> None:
        for member in (self.publisher, self.replica):
            if member is not None:
                member.close()
        self.publisher = self.replica = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """A function of a test module, with this child as its first argument."""
        return function(self, *args)


def serve_calls(connection: Connection) -> None:
    config, paths = connection.recv()
    sys.path[:0] = [path for path in paths if path not in sys.path]
    child = Child(config)
    while True:
        try:
            name, args, options = connection.recv()
        except (EOFError, ConnectionError):
            break
        started = time.monotonic()
        try:
            reply: tuple[bool, Any] = (True, getattr(child, name)(*args, **options))
        except BaseException as exc:
            traceback.print_exc()
            exc.__traceback__ = None
            reply = (False, exc)
        connection.send((*reply, time.monotonic() - started))
    with contextlib.suppress(Exception):
        child.close()


# --- the parent
def count_memfds(pid: int) -> int:
    """Open descriptors and mappings of wsync's memory in a process, each inode once."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith("/memfd:wsync"):
                found.add(link.stat().st_ino)
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/memfd:wsync" in line:
            found.add(int(line.split()[4]))
    return len(found)


class Nursery:
    """A process that forks members: it has imported numpy and wsync, and torch if `has_torch`."""

    _all: ClassVar[dict[bool, Nursery]] = {}

    def __init__(self, has_torch: bool) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), "torch" if has_torch else ""],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    @classmethod
    def of(cls, has_torch: bool) -> Nursery:
        """The nursery of that kind; started when it is needed first."""
        if has_torch not in cls._all:
            cls._all[has_torch] = Nursery(has_torch)
        return cls._all[has_torch]

    @classmethod
    def close_all(cls) -> None:
        while cls._all:
            cls._all.popitem()[1].close()

    def fork(self, env: dict[str, str], connection: int, log: int) -> int:
        """A new member process; its pid."""
        socket.send_fds(self._socket, [pickle.dumps(env)], [connection, log])
        return int.from_bytes(self._socket.recv(4), "little")

    def close(self) -> None:
        self._socket.close()
        self._process.wait(20.0)


def run_nursery(sock: socket.socket, has_torch: bool) -> None:
    import pytest  # noqa: F401  test modules need it

    import wsync.engine.publisher
    import wsync.engine.replica

    if has_torch:
        import wsync.integrations.torch  # noqa: F401
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever ends is gone at once
    while True:
        payload, (connection, log), _, _ = socket.recv_fds(sock, 1 << 18, 2)  # fails at the end of file
        pid = os.fork()
        if pid == 0:
            sock.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(pickle.loads(payload))
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            try:
                with Connection(connection) as opened:
                    serve_calls(opened)
            finally:
                sys.stderr.flush()
                os._exit(0)
        os.close(connection)
        os.close(log)
        sock.sendall(pid.to_bytes(4, "little"))


class Member:
    """A member process. Any method of `Child` can be called on it, and raises what it raised there."""

    def __init__(self, config: Config, env: dict[str, str], log_path: Path, *, has_torch: bool) -> None:
        self.log_path = log_path
        self.took_s = 0.0
        """How long the last call took in the child."""
        self._connection, theirs = Pipe()
        with theirs, open(log_path, "wb") as log:
            self.pid = Nursery.of(has_torch).fork(env, theirs.fileno(), log.fileno())
        self._connection.send((config, [path for path in sys.path if path]))

    def begin(self, name: str, *args: Any, **options: Any) -> None:
        """Start a call without waiting for it."""
        self._connection.send((name, args, options))

    def end(self, timeout_s: float = PATIENT_S + 20.0) -> Any:
        """The outcome of the call that was begun."""
        assert self._connection.poll(timeout_s), f"no answer within {timeout_s:g} s; its log: {self.log()}"
        try:
            is_ok, outcome, self.took_s = self._connection.recv()
        except (EOFError, ConnectionError):
            raise AssertionError(f"the member has ended; its log: {self.log()}") from None
        if not is_ok:
            raise outcome
        return outcome

    def is_busy(self) -> bool:
        """The call that was begun has not ended yet."""
        return not self._connection.poll(0)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or not hasattr(Child, name):
            raise AttributeError(name)

        def call(*args: Any, **options: Any) -> Any:
            self.begin(name, *args, **options)
            return self.end()

        return call

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL, and gone when this returns."""
        os.kill(self.pid, signal.SIGKILL)
        eventually(self.has_ended, f"member {self.pid} ends")

    def has_ended(self) -> bool:
        return _state(self.pid) in "ZX"

    def leave(self) -> None:
        """The child closes what it has open and ends."""
        self._connection.close()

    def reap(self) -> bool:
        """Wait until it has left; False when it had to be killed."""
        self.leave()
        try:
            eventually(self.has_ended, "it leaves", 20.0)
        except AssertionError:
            self.kill()
            return False
        return True


class Job:
    """One job: its members, its runtime folder and the holders that they start. `close` proves that all ended."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="wst-"))
        self.config = Config(job=self.folder.name, host="A", linger_s=0.4, chunk_nbytes=4096, join_timeout_s=60.0)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("WSYNC_", "XDG_RUNTIME", "RAY_"))}
        self.env |= {"WSYNC_RUNTIME_DIR": str(self.folder), "OMP_NUM_THREADS": "1", "WSYNC_LOG": "INFO"}
        self.members: list[Member] = []
        self.stopped: set[int] = set()

    def member(self, host: str = "A", *, has_torch: bool = False, **settings: Any) -> Member:
        """A new member process on (an emulated) `host`; `settings` are fields of its Config."""
        import msgspec

        config = msgspec.structs.replace(self.config, host=host, **settings)
        log_path = self.folder / f"member-{len(self.members)}.log"
        started = Member(config, self.env, log_path, has_torch=has_torch)
        self.members.append(started)
        return started

    def trainer(self, spec: Spec = SMALL, seed: int = 1, *, channel: str = "policy", **options: Any) -> Member:
        """A member that has opened a publisher; keyword arguments as for `replica`."""
        return self._opened("open_publisher", spec, seed, channel, options)

    def replica(self, spec: Spec = SMALL, seed: int = 0, *, channel: str = "policy", **options: Any) -> Member:
        """A member that has opened a replica. `host`, `kind` and `config` say where, of what and how."""
        return self._opened("open_replica", spec, seed, channel, options)

    def _opened(self, what: str, spec: Spec, seed: int, channel: str, options: dict[str, Any]) -> Member:
        kind = options.pop("kind", "numpy")
        member = self.member(options.pop("host", "A"), has_torch=kind == "torch", **options.pop("config", {}))
        member.make(spec, seed, kind)
        getattr(member, what)(channel, **options)
        return member

    # --- its processes
    def pids(self) -> dict[int, str]:
        """Our living members, and every process that has our runtime folder in its environment; with command lines."""
        wanted = f"WSYNC_RUNTIME_DIR={self.folder}".encode()
        found = {member.pid: "member" for member in self.members if not member.has_ended()}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def holder_pids(self) -> set[int]:
        return {pid for pid, command in self.pids().items() if "wsync.engine.process" in command}

    def holder_pid(self, host: str, *, address: tuple[str, int] | None = None) -> int:
        """The pid in the host's record."""
        import msgspec

        name = hashlib.blake2b(f"{host}/{address or ''}".encode(), digest_size=8).hexdigest()
        record = next(self.folder.glob(f"wsync-*/*/holder-{name}.json"))
        return int(msgspec.json.decode(record.read_bytes())["pid"])

    def files(self) -> set[str]:
        """Names in the runtime folder, without our own logs."""
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.parent != self.folder}

    def stop(self, pid: int) -> None:
        """SIGSTOP; `close` continues it."""
        assert pid in self.pids(), "not a process of this job"
        self.stopped.add(pid)
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: _state(pid) == "T", f"{pid} stops")

    def resume(self, pid: int) -> None:
        self.stopped.discard(pid)
        os.kill(pid, signal.SIGCONT)

    def kill(self, pid: int) -> None:
        """SIGKILL a process of this job, and gone when this returns."""
        assert pid in self.pids(), "not a process of this job"
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: _state(pid) in "ZX", f"{pid} ends")

    def logs(self) -> str:
        """What members and holders wrote, for a failure's report."""
        paths: Iterable[Path] = sorted(self.folder.rglob("*.log"))
        texts = {path.name: path.read_text(errors="replace")[-3000:] for path in paths}
        return "\n".join(f"--- {name}\n{text}" for name, text in texts.items() if text)

    def close(self) -> None:
        """All members leave; then every holder must leave by itself. Raises AssertionError naming those that stay."""
        for pid in list(self.stopped):
            with contextlib.suppress(ProcessLookupError):
                self.resume(pid)
        for member in self.members:
            member.leave()
        stuck = [member.pid for member in self.members if not member.reap()]
        try:
            eventually(lambda: not self.pids(), "every holder leaves by itself", 25.0)
            assert not stuck, "members did not leave"
        except AssertionError:
            stayed = self.pids()
            for pid in stayed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"processes stayed behind: holders {stayed}, members {stuck}") from None
        finally:
            self.report = self.logs()
            shutil.rmtree(self.folder, ignore_errors=True)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


if __name__ == "__main__":
    import _members

    with socket.socket(fileno=int(sys.argv[1])) as ordered, contextlib.suppress(ValueError):
        _members.run_nursery(ordered, sys.argv[2] == "torch")
