"""What crosses a tcp data connection after the handshake.

    server -> client   incarnation                                               16 bytes, once
    client -> server   REQUEST op id, key length, offset, nbytes, patience ms    then the key, utf-8
    server -> client   RESPONSE op id, status, nbytes                            then nbytes of data, or of text (FAULT)

Requests of one connection are answered in their order.
"""

from __future__ import annotations

import socket
import struct

import msgspec

REQUEST = struct.Struct("!QHQQI")
RESPONSE = struct.Struct("!QBQ")
INCARNATION_NBYTES = 16
MAX_TEXT_NBYTES = 1024
MAX_READ_NBYTES = 1 << 30

OK, NOT_YET, FAULT = 0, 1, 2


class Endpoint(msgspec.Struct, frozen=True, tag="tcp", forbid_unknown_fields=True):
    """Where a holder listens, and which incarnation of it."""

    host: str
    port: int
    incarnation: str


def tune(sock: socket.socket) -> None:
    """Small frames go out at once, and a host that has vanished is noticed within half a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
