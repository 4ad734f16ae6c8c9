"""Mutual proof of the job's token, before the first byte of anything else.

Sans-I/O: each side builds and checks 32-byte blocks; blocking and asyncio callers move them.
Both sides prove that they know the token, over both nonces and the purpose of the connection, so that
a recorded handshake is worth nothing. The token itself never crosses the wire.

    server -> client   MAGIC + nonce_s                       40 bytes
    client -> server   nonce_c + HMAC(token, "client" ...)   64 bytes
    server -> client   HMAC(token, "server" ...)             32 bytes
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from pathlib import Path

from wsync.errors import AuthError, ConfigError, ConnectError

MAGIC = b"wsync/1\n"
HELLO_NBYTES = len(MAGIC) + 32
ANSWER_NBYTES = 64
PROOF_NBYTES = 32


def read_token(path: Path) -> str:
    """The token in a file that only its owner may read. Raises ConfigError naming the file, OSError if it is absent."""
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"{path} can be read by others", hint=f"chmod 600 {path}")
    token = path.read_text().strip()
    if not token:
        raise ConfigError(f"{path} is empty", hint="it must have the job's token: copy the coordinator's file")
    return token


def new_token() -> str:
    """A fresh job token: 256 bits, as hex."""
    return secrets.token_hex(32)


def _mac(token: str, side: bytes, purpose: bytes, nonce_s: bytes, nonce_c: bytes) -> bytes:
    text = b"\0".join((side, purpose, nonce_s.hex().encode(), nonce_c.hex().encode()))
    return hmac.new(token.encode(), text, hashlib.sha256).digest()


class ServerHandshake:
    """The accepting side. Send `hello`, feed the answer to `check`, send what it returns."""

    def __init__(self, token: str, purpose: str) -> None:
        self._token, self._purpose = token, purpose.encode()
        self._nonce_s = secrets.token_bytes(32)
        self.hello = MAGIC + self._nonce_s

    def check(self, answer: bytes) -> bytes:
        """The proof to send back. Raises `AuthError` for a client that does not know the token."""
        nonce_c, mac = answer[:32], answer[32:]
        if not hmac.compare_digest(mac, _mac(self._token, b"client", self._purpose, self._nonce_s, nonce_c)):
            raise AuthError("a client without this job's token was refused")
        return _mac(self._token, b"server", self._purpose, self._nonce_s, nonce_c)


class ClientHandshake:
    """The connecting side. Feed the hello to `answer`, send what it returns, feed the proof to `check`."""

    def __init__(self, token: str, purpose: str) -> None:
        self._token, self._purpose = token, purpose.encode()
        self._nonce_s = b""
        self._nonce_c = secrets.token_bytes(32)

    def answer(self, hello: bytes) -> bytes:
        if hello[: len(MAGIC)] != MAGIC:
            raise ConnectError("whatever listens there does not speak wsync/1", hint="check the address")
        self._nonce_s = hello[len(MAGIC) :]
        return self._nonce_c + _mac(self._token, b"client", self._purpose, self._nonce_s, self._nonce_c)

    def check(self, proof: bytes) -> None:
        expected = _mac(self._token, b"server", self._purpose, self._nonce_s, self._nonce_c)
        if not hmac.compare_digest(proof, expected):
            raise AuthError("the server does not know this job's token")


def authenticate_client(sock: socket.socket, token: str, purpose: str) -> None:
    """Connecting side on a blocking socket with a timeout set. Raises `AuthError`, `ConnectError`, `OSError`."""
    handshake = ClientHandshake(token, purpose)
    sock.sendall(handshake.answer(recv_exactly(sock, HELLO_NBYTES)))
    try:
        proof = recv_exactly(sock, PROOF_NBYTES)
    except ConnectionError as exc:
        raise AuthError(
            "the peer closed the connection instead of accepting the token",
            hint="both sides must have the token of the same job",
        ) from exc
    handshake.check(proof)


def recv_exactly(sock: socket.socket, nbytes: int) -> bytes:
    """Exactly `nbytes` bytes, or ConnectionError when the peer closes before."""
    block = bytearray(nbytes)
    view = memoryview(block)
    while view:
        got = sock.recv_into(view)
        if got == 0:
            raise ConnectionResetError("the peer closed the connection")
        view = view[got:]
    return bytes(block)
