"""Cases G01 and G04 for the control sockets: the coordinator's tcp port and the holder's unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from _members import eventually

from wsync.auth import ANSWER_NBYTES, HELLO_NBYTES, MAGIC, PROOF_NBYTES, ClientHandshake, new_token, recv_exactly
from wsync.config import Config
from wsync.engine import wire
from wsync.engine.coordinator import Coordinator
from wsync.engine.holder import Holder
from wsync.engine.link import HolderAddress, _Connection
from wsync.engine.protocol import HEADER, Attached, AttachReplica, Failure, HandBack, encode_frame
from wsync.manifest import Manifest, TensorSpec

MANIFEST = Manifest((TensorSpec("w", "uint8", (5,)),))


class Scene:
    """A coordinator and a holder that serve in a thread, and sockets to them."""

    def __init__(self) -> None:
        self.token = new_token()
        config = Config(job="control", host="H", linger_s=600.0, chunk_nbytes=4096)
        self.coordinator = Coordinator(config, self.token)
        self.holder = Holder(config, self.token, host="H", resolve=self._resolve)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(30.0)
        self._sockets: list[socket.socket] = []
        eventually(lambda: self.coordinator.num_holders == 1, "the holder has joined")

    async def _resolve(self) -> tuple[str, int]:
        return self.coordinator.address

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self.coordinator.start()
        self.holder.start()
        jobs: list[Coroutine[Any, Any, None]] = [self.coordinator.run(), self.holder.run()]
        tasks = [asyncio.create_task(job) for job in jobs]
        self._ready.set()
        await self._ended.wait()
        for task in tasks[::-1]:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(30.0)
        assert not self._thread.is_alive()

    def dial(self, where: str) -> socket.socket:
        if where == "holder":
            sock = socket.socket(socket.AF_UNIX)
            self._sockets.append(sock)
            sock.connect("\0" + self.holder.socket_name)
        else:
            sock = socket.create_connection(self.coordinator.address)
            self._sockets.append(sock)
        sock.settimeout(30.0)
        return sock

    def dial_authenticated(self, where: str) -> socket.socket:
        sock = self.dial(where)
        handshake = ClientHandshake(self.token, purpose(where))
        sock.sendall(handshake.answer(recv_exactly(sock, HELLO_NBYTES)))
        handshake.check(recv_exactly(sock, PROOF_NBYTES))
        return sock

    def check_refused(self, where: str, number: int) -> None:
        eventually(lambda: self.num_refused(where) >= number, f"{number} are counted")
        assert self.num_refused(where) == number

    def num_refused(self, where: str) -> int:
        if where == "holder":
            assert self.holder._listener is not None
            return self.holder._listener.num_refused
        return self.coordinator.num_refused

    def check_goes_on(self) -> None:
        """A member can attach: that takes the holder and the coordinator."""
        connection = _Connection(HolderAddress(self.holder.socket_name, self.token, "H"), 30.0)
        number = connection.send(AttachReplica("policy", "r", "i", 0, 0), is_request=True)
        answer = connection.receive(number, time.monotonic() + 30.0)
        assert answer is not None
        assert isinstance(answer[0], Attached)
        connection.close()
        assert self.coordinator.num_holders == 1


def purpose(where: str) -> str:
    return {"holder": "member", "coordinator": "coordinator"}[where]


@pytest.fixture
def scene() -> Iterator[Scene]:
    logging.getLogger("wsync").setLevel(logging.ERROR)
    scene = Scene()
    yield scene
    scene.close()


WHERE = pytest.mark.parametrize("where", ["coordinator", "holder"])


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def is_closed(sock: socket.socket) -> bool:
    """The other side has closed; whatever came before is skipped."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


@WHERE
def test_case_G01_pickles_are_never_loaded(scene: Scene, where: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    pickles = [pickle.dumps(Bomb(canary), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    assert b"mkdir" in pickles[2]
    for payload in pickles:
        sock = scene.dial(where)
        sock.sendall(payload.ljust(ANSWER_NBYTES, b"."))
        assert is_closed(sock)
        for framed in (payload, HEADER.pack(len(payload), 0) + payload):
            sock = scene.dial_authenticated(where)
            with contextlib.suppress(ConnectionError):
                sock.sendall(framed)
                sock.shutdown(socket.SHUT_WR)
            assert is_closed(sock)
    assert not canary.exists()
    scene.check_refused(where, len(pickles))
    scene.check_goes_on()


@WHERE
def test_case_G04_wrong_missing_or_foreign_tokens_are_refused_and_counted(scene: Scene, where: str) -> None:
    other = {"coordinator": "holder", "holder": "coordinator"}[where]
    attempts = [
        ClientHandshake("", purpose(where)),
        ClientHandshake(new_token(), purpose(where)),
        ClientHandshake(scene.token[:-1], purpose(where)),
        ClientHandshake(scene.token, purpose(other)),
        ClientHandshake(scene.token, "data"),
    ]
    for number, handshake in enumerate(attempts, start=1):
        sock = scene.dial(where)
        sock.sendall(handshake.answer(recv_exactly(sock, HELLO_NBYTES)))
        assert sock.recv(1) == b"", "not even a proof is given away"
        scene.check_refused(where, number)
    sock = scene.dial(where)
    sock.sendall(encode_frame(1, AttachReplica("policy", "thief", "i", 0, 0)).ljust(ANSWER_NBYTES, b"\0"))
    assert is_closed(sock)
    scene.check_refused(where, len(attempts) + 1)
    scene.check_goes_on()


@WHERE
def test_case_G04_a_recorded_handshake_is_worth_nothing(scene: Scene, where: str) -> None:
    sock = scene.dial(where)
    hello = recv_exactly(sock, HELLO_NBYTES)
    assert hello.startswith(MAGIC)
    handshake = ClientHandshake(scene.token, purpose(where))
    recorded = handshake.answer(hello)
    sock.sendall(recorded)
    handshake.check(recv_exactly(sock, PROOF_NBYTES))
    assert scene.token.encode() not in recorded
    for _ in range(3):
        thief = scene.dial(where)
        assert recv_exactly(thief, HELLO_NBYTES) != hello
        thief.sendall(recorded)
        assert thief.recv(1) == b""
    scene.check_refused(where, 3)
    scene.check_goes_on()


@WHERE
def test_case_G04_who_says_nothing_is_let_go(scene: Scene, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT_S", 0.2)
    silent = [scene.dial(where) for _ in range(20)]
    for number, sock in enumerate(silent):
        sock.sendall(b"x" * number)
    scene.check_goes_on()
    assert all(is_closed(sock) for sock in silent)
    scene.check_refused(where, len(silent))


@WHERE
def test_hostile_frames_end_their_connection_only(scene: Scene, where: str) -> None:
    good = encode_frame(1, AttachReplica("policy", "x", "i", 0, 0))
    hostile = [
        HEADER.pack((1 << 32) - 1, 0),
        HEADER.pack(10, 255) + bytes(10),
        HEADER.pack(0, 0),
        good[: HEADER.size] + bytes(len(good) - HEADER.size),
        HEADER.pack(100_003, 0) + b"\x93\x01\xc2" + b"\x91" * 100_000,
        os.urandom(3000),
    ]
    before = scene.num_refused(where)
    for frame in hostile:
        sock = scene.dial_authenticated(where)
        with contextlib.suppress(ConnectionError):
            sock.sendall(frame)
            sock.shutdown(socket.SHUT_WR)
        assert is_closed(sock)
    assert scene.num_refused(where) == before, "they knew the token"
    scene.check_goes_on()


def test_sockets_are_bound_to_the_chosen_interface_only(scene: Scene) -> None:
    assert scene.coordinator.address[0] == "127.0.0.1"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", scene.coordinator.address[1]), timeout=5.0)


def test_descriptors_that_are_no_slots_are_refused_and_closed(scene: Scene, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000)
    before = len(os.listdir("/proc/self/fd"))
    for what in ("", "f", "ff", "ffff", "s"):
        sock = scene.dial_authenticated("holder")
        fds = [os.open(path, os.O_RDWR) if kind == "f" else os.dup(sock.fileno()) for kind in what]
        message = HandBack("policy", 1, MANIFEST)
        socket.send_fds(sock, [encode_frame(0, message, num_descriptors=len(fds))], fds)
        for fd in fds:
            os.close(fd)
        sock.sendall(encode_frame(7, AttachReplica("policy", "r", "i", 0, 0)))
        assert recv_exactly(sock, HEADER.size)[0] > 0, "the connection goes on"
        sock.close()
    scene.check_goes_on()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, "no descriptor is left")
    assert path.read_bytes() == b"x" * 10_000


def test_who_has_not_attached_can_do_nothing(scene: Scene) -> None:
    from wsync.engine.protocol import FetchSlot, LeaseVersion, ReserveSlot

    connection = _Connection(HolderAddress(scene.holder.socket_name, scene.token, "H"), 30.0)
    for message in (FetchSlot(1), LeaseVersion(0, 0, 0.0), ReserveSlot(1, "wait", 1.0)):
        answer = connection.receive(connection.send(message, is_request=True), time.monotonic() + 30.0)
        assert answer is not None
        assert isinstance(answer[0], Failure)
        assert answer[0].error.kind == "StaleView"
        assert answer[1] == []
    connection.close()
