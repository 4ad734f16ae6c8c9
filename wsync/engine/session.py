"""Find this host's holder, or start it. Members call `find_holder`; where there is Ray, Ray keeps the holders.

Without Ray, a job is a folder that only its user can read: `coordinator.json` (address and token of the job)
and one record per host with the name of the holder's socket. A file lock decides who starts a holder, and which
holder carries the coordinator. `WSYNC_ADDRESS` with `WSYNC_TOKEN_FILE` or `WSYNC_TOKEN` names a coordinator that runs
elsewhere (`wsync coordinator`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from wsync.auth import authenticate_client, new_token, read_token
from wsync.config import Config
from wsync.engine.link import PURPOSE, HolderAddress
from wsync.errors import AuthError, ConfigError, ConnectError, ErrorContext, MembershipError

_Record = TypeVar("_Record", bound=msgspec.Struct)


class CoordinatorRecord(msgspec.Struct, frozen=True):
    """`coordinator.json`: the job's token, and where its coordinator is (`port` 0: there has been none yet)."""

    host: str
    port: int
    token: str


class HolderRecord(msgspec.Struct, frozen=True):
    """One host's record: the name of its holder's socket."""

    socket_name: str
    pid: int


class HolderOrder(msgspec.Struct, frozen=True):
    """What a new holder process is told on its standard input."""

    config: Config
    host: str
    folder: str
    token: str
    address: tuple[str, int] | None


def checked_channel(name: object) -> str:
    """The name of a channel. Raises ConfigError for one that cannot be used."""
    if not isinstance(name, str) or not 0 < len(name.encode()) <= 512:
        raise ConfigError(f"a channel is a name of 1 to 512 bytes, not {name!r}")
    return name


def default_member_id(role: str) -> str:
    """Unique on the machine, the same for an actor that Ray restarts."""
    ray = _running_ray()
    if ray is not None:
        from wsync.integrations.ray import actor_id

        name = actor_id()
        if name:
            return f"{role}-{name}"
    return f"{role}-{os.getpid()}-{secrets.token_hex(2)}"


def find_holder(config: Config, timeout_s: float) -> HolderAddress:
    """This host's holder; started if there is none. Raises ConnectError, ConfigError, AuthError."""
    named = named_coordinator()
    if _running_ray() is not None and named is None:
        from wsync.integrations.ray import find_holder as find_ray_holder

        return find_ray_holder(config, timeout_s)
    if config.listen == "node":
        raise ConfigError(
            "listening on 'node' needs Ray, which knows the node's address; here "
            + ("WSYNC_ADDRESS names a coordinator outside Ray" if named else "ray.init() has not been called"),
            hint='give an IP address of this machine in WSYNC_LISTEN or Config(listen="...")',
        )
    return _find_local_holder(config, named, timeout_s)


def _running_ray() -> object | None:
    ray = sys.modules.get("ray")
    return ray if ray is not None and getattr(ray, "is_initialized", lambda: False)() else None


def host_id(config: Config) -> str:
    """The declared host, or this kernel's boot id with the network namespace: emulated hosts on one machine differ."""
    if config.host != "auto":
        return config.host
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.stat("/proc/self/ns/net").st_ino
    return hashlib.blake2b(f"{boot_id}/{namespace}".encode(), digest_size=6).hexdigest()


def job_folder(config: Config) -> Path:
    """The job's folder, readable by its user only. Raises ConfigError when it belongs to somebody else."""
    base = os.environ.get("WSYNC_RUNTIME_DIR") or os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
    folder = Path(base) / f"wsync-{os.getuid()}" / config.job
    for part in (folder.parent, folder):
        part.mkdir(mode=0o700, exist_ok=True)
        found = part.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"{part} is open to other users", hint="set WSYNC_RUNTIME_DIR to a folder of yours with mode 0700"
            )
    return folder


@contextlib.contextmanager
def locked(path: Path, deadline: float) -> Iterator[None]:
    """Hold an exclusive lock on `path`. Raises ConnectError at the deadline."""
    with lock_file(path) as fd:
        while not took_lock(fd, path, deadline):
            time.sleep(0.01)
        yield


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[int]:
    """A descriptor for `took_lock`. Closing it gives the lock back."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def took_lock(fd: int, path: Path, deadline: float) -> bool:
    """Try once. Raises ConnectError when the lock is somebody else's and the deadline has passed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if time.monotonic() >= deadline:
            raise ConnectError(
                f"another process has been starting a holder for too long ({path.name} is locked)",
                context=ErrorContext(phase="join"),
            ) from None
        return False
    return True


def read_record(path: Path, kind: type[_Record]) -> _Record | None:
    """The record in a file, or None when there is none (or a torn one)."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def write_record(path: Path, record: msgspec.Struct) -> None:
    """Replace the file as a whole, mode 0600."""
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(record))
    fresh.rename(path)


def named_coordinator() -> tuple[tuple[str, int], str] | None:
    """Address and token from the environment. Raises ConfigError when they cannot be used: a token alone is of no use,
    and whoever misspells the address would be alone in a job of his own.
    """
    text = os.environ.get("WSYNC_ADDRESS", "")
    if not text:
        for name in ("WSYNC_TOKEN_FILE", "WSYNC_TOKEN"):
            if os.environ.get(name):
                raise ConfigError(
                    f"{name} is set, but WSYNC_ADDRESS is not: the token of which coordinator?",
                    hint="set WSYNC_ADDRESS to the host:port that `wsync coordinator` has printed, or unset " + name,
                )
        return None
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"WSYNC_ADDRESS must be host:port, not {text!r}")
    token = os.environ.get("WSYNC_TOKEN", "")
    token_file = os.environ.get("WSYNC_TOKEN_FILE", "")
    if not token and token_file:
        try:
            token = read_token(Path(token_file))
        except OSError as exc:
            raise ConfigError(f"WSYNC_TOKEN_FILE={token_file} cannot be read: {exc.strerror}") from exc
    if not token:
        raise ConfigError("WSYNC_ADDRESS needs the job's token", hint="set WSYNC_TOKEN_FILE (or WSYNC_TOKEN)")
    return (host.strip("[]"), int(port)), token


def _find_local_holder(config: Config, named: tuple[tuple[str, int], str] | None, timeout_s: float) -> HolderAddress:
    deadline = time.monotonic() + timeout_s
    folder, host = job_folder(config), host_id(config)
    name = hashlib.blake2b(f"{host}/{named[0] if named else ''}".encode(), digest_size=8).hexdigest()
    record_path = folder / f"holder-{name}.json"
    with locked(folder / f"holder-{name}.lock", deadline):
        token = named[1] if named else _job_token(folder, deadline)
        record = read_record(record_path, HolderRecord)
        if record is None or not _answers(record, token):
            order = HolderOrder(config, host, str(folder), token, named[0] if named else None)
            record = _start_holder(order, record_path.with_suffix(".log"), deadline)
            write_record(record_path, record)
        where = "at {}:{} (WSYNC_ADDRESS)".format(*named[0]) if named else f"of job '{config.job}' in {folder}"
        return HolderAddress(record.socket_name, token, host, f"the coordinator {where}")


def _job_token(folder: Path, deadline: float) -> str:
    path = folder / "coordinator.json"
    with locked(folder / "coordinator.lock", deadline):
        record = read_record(path, CoordinatorRecord)
        if record is None:
            record = CoordinatorRecord("", 0, new_token())
            write_record(path, record)
        return record.token


def _answers(record: HolderRecord, token: str) -> bool:
    """Raises ConnectError for a holder that hangs: a second one beside it would take its name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(2.0)
        try:
            sock.connect("\0" + record.socket_name)
            authenticate_client(sock, token, PURPOSE)
        except TimeoutError as exc:
            raise ConnectError(
                f"this host's holder (process {record.pid}) hangs",
                hint="continue it if it is stopped, or end it: the next call starts another",
                context=ErrorContext(phase="join"),
            ) from exc
        except (OSError, AuthError):
            return False
    return True


def _start_holder(order: HolderOrder, log_path: Path, deadline: float) -> HolderRecord:
    """A holder process of its own session: it outlives us, and leaves when its last member has gone."""
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "wsync.engine.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,  # not ours: whoever reads our standard error would wait for the holder to end
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            process.stdin.flush()
            line = _read_line(process.stdout.fileno(), deadline)
            return msgspec.json.decode(line, type=HolderRecord)
        except (OSError, TimeoutError, msgspec.DecodeError) as exc:
            process.kill()
            process.wait()
            raise MembershipError(
                f"this host's holder did not start ({exc or type(exc).__name__})",
                hint=f"its log {log_path} ends with: {_last_line(log_path)}",
                context=ErrorContext(phase="join"),
            ) from exc
        finally:
            _children.append(process)


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing"


_children: list[subprocess.Popen[bytes]] = []
"""Holders that this process started: kept, so that they are waited for when they end."""


def _read_line(fd: int, deadline: float) -> bytes:
    import select

    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            raise TimeoutError("it did not report in time")
        part = os.read(fd, 4096)
        if not part:
            raise OSError("it ended before it was ready")
        line += part
    return line
