"""What a tcp holder, and a reader, do when the other side is hostile or broken: refuse, count, and serve the others."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from wsync.auth import ANSWER_NBYTES, HELLO_NBYTES, PROOF_NBYTES, ClientHandshake, new_token
from wsync.errors import AuthError, ConfigError, ConnectError, RemoteFault
from wsync.transports import gate
from wsync.transports.base import Read
from wsync.transports.gate import handshake_client, handshake_server, recv_by
from wsync.transports.tcp import TcpTransport
from wsync.transports.tcp_wire import FAULT, INCARNATION_NBYTES, OK, REQUEST, RESPONSE, Endpoint
from wsync.transports.testing_child import filled_slot
from wsync.transports.testing_parts import CHUNK, PATIENT_S, Target, eventually, expect

NBYTES = 64 << 20


class Scene:
    """A holder with a slot, an honest reader of it, and sockets for the hostile ones."""

    def __init__(self) -> None:
        self.token = new_token()
        self.slot = filled_slot(NBYTES, CHUNK, seed=1)
        self.slot.mark_ready(range(self.slot.num_chunks))
        self.holder, self.reader = TcpTransport(self.token), TcpTransport(self.token)
        self.holder.offer("k", self.slot, 1)
        self.peer = self.reader.connect(self.holder.export(), peer="holder", timeout_s=5.0)
        self.where = msgspec.msgpack.decode(self.holder.export(), type=Endpoint)
        self._sockets: list[socket.socket] = []

    def dial(self) -> socket.socket:
        sock = socket.create_connection((self.where.host, self.where.port), timeout=PATIENT_S)
        self._sockets.append(sock)
        return sock

    def dial_authenticated(self) -> socket.socket:
        sock = self.dial()
        handshake_client(sock, self.token, "data", time.monotonic() + 5.0)
        recv_by(sock, INCARNATION_NBYTES, time.monotonic() + 5.0)
        sock.settimeout(PATIENT_S)
        return sock

    def check_others_go_on(self) -> None:
        target = Target(bytes(self.slot.data[:CHUNK]))
        self.reader.post_read(self.peer, [Read("k", 0, target.view)], timeout_s=PATIENT_S).wait(PATIENT_S)
        target.check_right()
        self.reader.forget(self.reader.connect(self.holder.export(), peer="holder", timeout_s=5.0))

    def check_refused(self, number: int) -> None:
        eventually(lambda: self.holder.refused == number, lambda: f"{self.holder.refused} is {number}")

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self.reader.close()
        self.holder.close()
        self.slot.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._command = f"touch {path}"

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self._command,)


def end(sock: socket.socket) -> socket.socket:
    """Nothing more comes from this side; the other may have closed already."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
    return sock


def is_closed(sock: socket.socket) -> bool:
    """Whether the holder ends the connection, with whatever it sends before."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def answer_to(sock: socket.socket) -> tuple[int, str]:
    """Status and text of the next answer that carries no data."""
    deadline_s = time.monotonic() + PATIENT_S
    _, status, nbytes = RESPONSE.unpack(recv_by(sock, RESPONSE.size, deadline_s))
    text = recv_by(sock, nbytes, deadline_s).decode()
    sock.settimeout(PATIENT_S)
    return status, text


def test_case_G01_pickle_is_never_loaded(scene: Scene, tmp_path: Path) -> None:
    payload = pickle.dumps(Canary(tmp_path / "canary"))
    pickle.loads(pickle.dumps(Canary(tmp_path / "works")))
    assert (tmp_path / "works").exists()
    for bomb in (payload, payload * 100, struct.pack("!I", len(payload)) + payload):
        sock = scene.dial()
        sock.sendall(bomb)
        assert is_closed(sock)
    scene.check_refused(3)
    for bomb in (payload * 3, REQUEST.pack(1, len(payload), 0, 1, 0) + payload):
        sock = scene.dial_authenticated()
        sock.sendall(bomb)
        assert is_closed(end(sock))
    scene.check_others_go_on()
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("listen", ["0.0.0.0", "::", "[::]", "", "localhost", "192.0.2.1"])
def test_case_G01_binds_to_one_interface(listen: str) -> None:
    with pytest.raises(ConfigError, match="listen"):
        TcpTransport(new_token(), listen=listen)


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.2", "::1", "[::1]"])
def test_listens_where_it_is_told(listen: str) -> None:
    token = new_token()
    try:
        holder = TcpTransport(token, listen=listen)
    except ConfigError:
        pytest.skip("this host has no such address")
    reader = TcpTransport(token)
    try:
        assert msgspec.msgpack.decode(holder.export(), type=Endpoint).host == listen.strip("[]")
        reader.connect(holder.export(), peer="holder", timeout_s=5.0)
    finally:
        reader.close()
        holder.close()


def test_case_G04_wrong_token(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    stranger = TcpTransport(new_token())
    try:
        with caplog.at_level(logging.WARNING, logger="wsync"):
            for _ in range(3):
                with pytest.raises(AuthError, match="holder"):
                    stranger.connect(scene.holder.export(), peer="holder", timeout_s=5.0)
            scene.check_refused(3)
        assert sum("refused" in record.message for record in caplog.records) == 1  # once per kind
    finally:
        stranger.close()
    scene.check_others_go_on()


def test_case_G04_no_token(scene: Scene) -> None:
    sock = scene.dial()
    sock.sendall(REQUEST.pack(1, 1, 0, 16, 1000) + b"k" + bytes(ANSWER_NBYTES))
    recv_by(sock, HELLO_NBYTES, time.monotonic() + 5.0)
    assert is_closed(sock)
    scene.check_refused(1)
    scene.check_others_go_on()


def test_case_G04_replayed_handshake(scene: Scene) -> None:
    def talk(answer: Callable[[bytes], bytes]) -> tuple[bytes, socket.socket]:
        sock = scene.dial()
        sent = answer(recv_by(sock, HELLO_NBYTES, time.monotonic() + 5.0))
        sock.sendall(sent)
        return sent, sock

    recorded, sock = talk(ClientHandshake(scene.token, "data").answer)
    recv_by(sock, PROOF_NBYTES, time.monotonic() + 5.0)
    _, sock = talk(lambda _: recorded)
    assert is_closed(sock)
    scene.check_refused(1)
    _, sock = talk(ClientHandshake(scene.token, "control").answer)  # recorded on a connection of another purpose
    assert is_closed(sock)
    scene.check_refused(2)
    scene.check_others_go_on()


def test_half_a_handshake(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "HANDSHAKE_S", 0.2)
    sockets = [scene.dial() for _ in range(5)]
    for sock in sockets:
        sock.sendall(b"half")
    scene.check_others_go_on()
    assert all(is_closed(sock) for sock in sockets)
    scene.check_refused(5)


def test_too_many_unauthenticated(scene: Scene) -> None:
    sockets = [scene.dial() for _ in range(gate.MAX_WAITING)]
    for sock in sockets:
        recv_by(sock, HELLO_NBYTES, time.monotonic() + 5.0)
    with pytest.raises(ConnectError, match="holder"):
        scene.reader.connect(scene.holder.export(), peer="holder", timeout_s=5.0)
    target = Target(bytes(scene.slot.data[:CHUNK]))
    scene.reader.post_read(scene.peer, [Read("k", 0, target.view)], timeout_s=PATIENT_S).wait(PATIENT_S)
    target.check_right()
    for sock in sockets:
        sock.close()
    scene.check_refused(gate.MAX_WAITING + 1)
    scene.check_others_go_on()


@pytest.mark.parametrize(
    "frame",
    [
        REQUEST.pack(7, 0, 0, 1, 0),
        REQUEST.pack(7, 1025, 0, 1, 0),
        REQUEST.pack(7, 65535, 0, 1, 0) + b"k" * 65535,
        REQUEST.pack(7, 2, 0, 1, 0) + b"\xff\xfe",
    ],
    ids=["no key", "long key", "very long key", "no utf-8"],
)
def test_malformed_frame(scene: Scene, frame: bytes) -> None:
    sock = scene.dial_authenticated()
    sock.sendall(frame)
    assert is_closed(sock)
    scene.check_others_go_on()


def test_half_a_frame(scene: Scene) -> None:
    halves = [REQUEST.pack(1, 1, 0, 16, 0)[:9], REQUEST.pack(1, 4, 0, 16, 0) + b"k", b""]
    for half in halves:
        scene.dial_authenticated().sendall(half)
    scene.check_others_go_on()
    for half in halves:
        sock = scene.dial_authenticated()
        sock.sendall(half)
        assert is_closed(end(sock))
    scene.check_others_go_on()


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, (1 << 30) + 1), (0, (1 << 64) - 1), ((1 << 64) - 1, 1), (0, NBYTES + 1), (NBYTES, 1)],
)
def test_oversized_request(scene: Scene, offset: int, nbytes: int) -> None:
    sock = scene.dial_authenticated()
    sock.sendall(REQUEST.pack(7, 1, offset, nbytes, 60_000) + b"k")
    status, text = answer_to(sock)
    assert status == FAULT
    assert text
    sock.sendall(REQUEST.pack(8, 1, 0, 16, 60_000) + b"k")  # the connection is still good
    assert recv_by(sock, RESPONSE.size, time.monotonic() + 5.0) == RESPONSE.pack(8, OK, 16)
    scene.check_others_go_on()


def test_withdraw_cuts_off_a_reader_that_does_not_read(scene: Scene) -> None:
    sock = scene.dial_authenticated()
    sock.sendall(REQUEST.pack(1, 1, 0, NBYTES, 60_000) + b"k")
    recv_by(sock, RESPONSE.size + 1, time.monotonic() + 5.0)  # the send is in progress
    scene.holder.withdraw("k", 0.2)
    assert scene.holder.num_leases == 0
    sock.settimeout(PATIENT_S)
    assert is_closed(sock)


class FakeHolder:
    """Accepts readers that know the token, and answers every request with `reply(op_id)` and the end."""

    def __init__(self, token: str, reply: Callable[[int], bytes]) -> None:
        self._token = token
        self._reply = reply
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = msgspec.msgpack.encode(Endpoint("127.0.0.1", self._listener.getsockname()[1], "00" * 16))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock:
                try:
                    handshake_server(sock, self._token, "data", time.monotonic() + 5.0)
                    sock.sendall(bytes(16))
                    header = recv_by(sock, REQUEST.size + 1, time.monotonic() + 5.0)
                    sock.sendall(self._reply(REQUEST.unpack_from(header)[0]))
                except OSError:
                    continue

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@pytest.mark.parametrize(
    "reply",
    [
        lambda op_id: RESPONSE.pack(op_id, OK, CHUNK) + bytes(CHUNK // 2),
        lambda op_id: RESPONSE.pack(op_id + 1, OK, CHUNK) + bytes(CHUNK),
        lambda op_id: RESPONSE.pack(op_id, OK, 2 * CHUNK) + bytes(2 * CHUNK),
        lambda op_id: RESPONSE.pack(op_id, FAULT, 1 << 40),
        lambda op_id: RESPONSE.pack(op_id, 99, CHUNK) + bytes(CHUNK),
        lambda op_id: RESPONSE.pack(op_id, OK, CHUNK)[:5],
        lambda op_id: b"",
    ],
    ids=["half the bytes", "another operation", "too many bytes", "long text", "no status", "half a header", "nothing"],
)
def test_reader_survives_a_broken_holder(reply: Callable[[int], bytes]) -> None:
    token = new_token()
    fake, reader = FakeHolder(token, reply), TcpTransport(token, connections=1)
    try:
        peer = reader.connect(fake.endpoint, peer="fake", timeout_s=5.0)
        memory = memoryview(bytearray(b"c" * (CHUNK + 100)))
        op = reader.post_read(peer, [Read("k", 0, memory[:CHUNK])], timeout_s=PATIENT_S)
        expect(ConnectError, op, "fake", within_s=PATIENT_S / 2)
        assert memory[CHUNK:] == b"c" * 100
    finally:
        reader.close()
        fake.close()


def test_fault_text_is_data(scene: Scene) -> None:
    token = new_token()
    fake = FakeHolder(token, lambda op_id: RESPONSE.pack(op_id, FAULT, 4) + b"\xff{}%")
    reader = TcpTransport(token, connections=1)
    try:
        peer = reader.connect(fake.endpoint, peer="fake", timeout_s=5.0)
        op = reader.post_read(peer, [Read("k", 0, memoryview(bytearray(8)))], timeout_s=PATIENT_S)
        expect(RemoteFault, op, "fake", within_s=PATIENT_S)
    finally:
        reader.close()
        fake.close()


def test_another_incarnation_at_the_same_port(scene: Scene) -> None:
    former = Endpoint(scene.where.host, scene.where.port, "00" * 16)
    with pytest.raises(ConnectError, match="incarnation"):
        scene.reader.connect(msgspec.msgpack.encode(former), peer="holder", timeout_s=5.0)
    scene.check_others_go_on()


@pytest.mark.parametrize("endpoint", [b"", b"garbage", msgspec.msgpack.encode({"type": "tcp"}), b"\xc1" * 40])
def test_endpoint_that_is_none(endpoint: bytes) -> None:
    reader = TcpTransport(new_token())
    try:
        with pytest.raises(ConnectError, match="holder"):
            reader.connect(endpoint, peer="holder", timeout_s=5.0)
    finally:
        reader.close()
