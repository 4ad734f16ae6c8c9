"""The packets between a reader and the holder of a slot on one host; see `shm`."""

from __future__ import annotations

import msgspec

MAX_PACKET_NBYTES = 4096


class Endpoint(msgspec.Struct, frozen=True, tag="shm", forbid_unknown_fields=True):
    """The abstract unix socket of a holder, which incarnation of it, and on which host."""

    socket: str
    incarnation: str
    host: str


class _Packet(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    key: str


class Open(_Packet, frozen=True):
    """The reader wants to map the slot of this key."""


class Closed(_Packet, frozen=True):
    """The reader does not look at it any more."""


class Opened(_Packet, frozen=True):
    """Comes with the slot's descriptor; a lease until `Closed`."""

    version: int


class Faulted(_Packet, frozen=True):
    """The key cannot be had."""

    problem: str


class Withdrawn(_Packet, frozen=True):
    """The holder waits for `Closed`."""


ToHolder = Open | Closed
ToReader = Opened | Faulted | Withdrawn
