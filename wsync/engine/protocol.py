"""Messages between members, holders and the coordinator, and their frames. Pure.

A frame is ``length u32, number of descriptors u8`` (little endian) and a msgpack envelope. An envelope with
an id is a request or the reply to it; id 0 is a notice. Nothing is ever pickled. Members speak with their host's
holder over its unix socket, holders with the coordinator over tcp; both use these frames.

A version has a number, and a uid: two runs of a job that know nothing of each other may give one number twice, and
their bytes must not meet. Whatever speaks of a version's bytes names both.

One update, message by message:

    trainer -> holder        ReserveSlot, PackedTo ..., Packed
    holder  -> coordinator   Announce, Sealed
    coordinator -> holders   Pull (to each receiver), Seal
    holder  -> coordinator   Staged
    replica -> holder        LeaseVersion, ReleaseVersion
    holder  -> coordinator   Committed
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from wsync.engine.lanes import ShardLane
from wsync.errors import ErrorRecord, WsyncError
from wsync.holding import Holding
from wsync.manifest import Manifest
from wsync.status import ReplicaStatus, VersionStatus
from wsync.topology import Topology

HEADER = struct.Struct("<IB")
MAX_FRAME_NBYTES = 256 << 20
MAX_DESCRIPTORS = 4

OnBusy = Literal["wait", "skip", "supersede"]
WaitPhase = Literal["staged", "committed"]


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


# --- replies that carry nothing, and errors
class Done(Message, frozen=True):
    pass


class Failure(Message, frozen=True):
    error: ErrorRecord


# --- member -> its holder
class AttachTrainer(Message, frozen=True):
    channel: str
    member_id: str
    incarnation: str
    manifest: Manifest
    last_version: int
    """The newest version of the channel that this trainer knows of; its numbers go on from there."""
    published: int
    """The newest version that it has published itself, 0 for none."""


class AttachReplica(Message, frozen=True):
    channel: str
    member_id: str
    incarnation: str
    last_version: int
    last_uid: int


class Attached(Message, frozen=True):
    """`manifest` is what the channel publishes now, or None before its trainer has come."""

    manifest: Manifest | None
    highest_version: int


class ReserveSlot(Message, frozen=True):
    """`version` and `uid` are what it must get, when others share them; 0: the next number, and a new uid."""

    step: int
    on_busy: OnBusy
    timeout_s: float
    version: int = 0
    uid: int = 0


class SlotReserved(Message, frozen=True):
    """`version` 0: skipped, an earlier version is still on its way."""

    version: int
    slot_id: int


class FetchSlot(Message, frozen=True):
    """Answered with `Done` and the slot's descriptor; writable only for the channel's trainer."""

    slot_id: int


class PackedTo(Message, frozen=True):
    """The first `nbytes` of the lane are in place."""

    version: int
    nbytes: int


class Packed(Message, frozen=True):
    version: int


class LeaseVersion(Message, frozen=True):
    """The newest whole version in ``[min_version, max_version]`` (0: no end), or else `also_version` (0: none) if its
    uid is not `but_uid`. Waits for one until the time-out.
    """

    min_version: int
    max_version: int
    timeout_s: float
    also_version: int = 0
    but_uid: int = 0


class VersionLeased(Message, frozen=True):
    """`version` 0: there is none; `kept` lists the whole versions of this host."""

    version: int
    uid: int
    step: int
    slot_id: int
    manifest_digest: str
    kept: tuple[int, ...]


class ReleaseVersion(Message, frozen=True):
    """Give a lease back. `error` names why the version was not committed."""

    version: int
    uid: int
    is_committed: bool
    pause_s: float
    error: str


class HashRanges(Message, frozen=True):
    """xxh3-64 of ranges ``(offset, nbytes)`` of a whole version in this host's slot."""

    version: int
    uid: int
    ranges: tuple[tuple[int, int], ...]


class RangeHashes(Message, frozen=True):
    hashes: tuple[int, ...]


class HandBack(Message, frozen=True):
    """A whole slot that outlived its holder, with its descriptor: the new holder adopts it after checking it.

    A notice, sent before the member attaches, so that nobody fetches what is already there.
    """

    channel: str
    step: int
    manifest: Manifest


# --- sharded channels: a member describes itself to its holder, the rest is passed on to the coordinator
class ShardReport(msgspec.Struct, frozen=True):
    """A trainer rank, or a worker (`rank` -1), and what it has or wants."""

    member_id: str
    incarnation: str
    rank: int
    num_ranks: int
    holding: Holding
    last_version: int

    @property
    def is_trainer(self) -> bool:
        return self.rank >= 0


class AttachShard(Message, frozen=True):
    channel: str
    shard: ShardReport


class RegisterShard(Message, frozen=True):
    channel: str
    shard: ShardReport


class AwaitLanes(Message, frozen=True):
    """The member's lanes in the present plan (or in `plan_id`), as soon as every trainer rank has joined."""

    channel: str
    incarnation: str
    plan_id: str
    timeout_s: float


class LanesPlanned(Message, frozen=True):
    """`mine` are the member's lanes, `all_lanes` are (lane id, source rank). `missing_ranks` must join first.

    `late_for` is the newest version if it was published before the plan had all of these lanes; 0 otherwise.
    """

    plan_id: str
    mine: tuple[ShardLane, ...]
    all_lanes: tuple[tuple[str, int], ...]
    missing_ranks: tuple[int, ...]
    late_for: int = 0


class OpenRound(Message, frozen=True):
    """Take part in a round; waits for ranks that are missing. `serial` counts a rank's calls: asked again, it is told
    the same round. `plan_id` is the plan that the rank has: it goes on with it if a new coordinator knows no workers.
    """

    channel: str
    rank: int
    incarnation: str
    serial: int
    step: int
    plan_id: str
    timeout_s: float


class RoundOpened(Message, frozen=True):
    """`version` 0: by the time-out `missing_ranks` had not come, or (if none is missing) a new coordinator was still
    waiting for the holders.
    """

    version: int
    uid: int
    plan_id: str
    missing_ranks: tuple[int, ...] = ()


class AwaitRound(Message, frozen=True):
    """Answered when every rank has published the version, when it was dropped, or at the time-out."""

    channel: str
    version: int
    timeout_s: float


class RoundReport(Message, frozen=True):
    """`deserted` are lanes whose workers have all left. `left` and `lost` name the last worker of each kind of which
    none lives: it has left itself, or was lost with its holder and may come back. `workers` are the living ones:
    FAILED if they were refused, else JOINING, whatever the lanes know.
    """

    missing_ranks: tuple[int, ...]
    error: str
    deserted: tuple[str, ...]
    workers: tuple[ReplicaStatus, ...] = ()
    left: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


# --- member or holder -> coordinator (holders pass it on)
class AwaitVersion(Message, frozen=True):
    """Answered when the version has reached `phase` on `num_replicas` (0: all, at least one), or at the time-out."""

    channel: str
    version: int
    uid: int
    phase: WaitPhase
    num_replicas: int
    timeout_s: float


class VersionReport(Message, frozen=True):
    """`is_reached` is False at the time-out, or when it cannot be reached any more."""

    status: VersionStatus
    is_reached: bool


class GetManifest(Message, frozen=True):
    channel: str
    digest: str


class ManifestFound(Message, frozen=True):
    manifest: Manifest


# --- holder -> coordinator
class TrainerReport(msgspec.Struct, frozen=True):
    """`published` is the newest version that it has published, 0 for none."""

    member_id: str
    incarnation: str
    published: int = 0


class ReplicaReport(msgspec.Struct, frozen=True):
    member_id: str
    incarnation: str
    committed_version: int
    committed_uid: int


class SlotReport(msgspec.Struct, frozen=True):
    """A version that a holder has or receives. `digests` are known to its origin and to whom it is sealed."""

    version: int
    uid: int
    step: int
    nbytes: int
    chunk_nbytes: int
    manifest_digest: str
    is_origin: bool
    is_whole: bool
    digests: tuple[int, ...]


class ChannelReport(msgspec.Struct, frozen=True):
    channel: str
    highest_version: int
    manifests: tuple[Manifest, ...]
    trainer: TrainerReport | None
    replicas: tuple[ReplicaReport, ...]
    slots: tuple[SlotReport, ...]
    shards: tuple[ShardReport, ...] = ()


class HolderHello(Message, frozen=True):
    """First message of a holder, also after a reconnect: everything it has, so that the coordinator may be new.

    `topology` is what it knows of its host, once it knows.
    """

    holder_id: str
    host: str
    incarnation: str
    pid: int
    endpoints: dict[str, bytes]
    channels: tuple[ChannelReport, ...]
    topology: Topology | None = None


class Described(Message, frozen=True):
    """What the holder has found out about its host since its hello."""

    topology: Topology


class Progress(msgspec.Struct, frozen=True):
    """How far a holder is with a version that it packs or pulls: chunks that are there, bytes from each source."""

    channel: str
    version: int
    uid: int
    num_ready: int
    nbytes_from: dict[str, int] = {}


class Beat(Message, frozen=True):
    """Heartbeat, answered with `Done`. `progress` of every version that is not whole here."""

    progress: tuple[Progress, ...] = ()


class RegisterTrainer(Message, frozen=True):
    channel: str
    trainer: TrainerReport
    manifest: Manifest
    last_version: int


class RegisterReplica(Message, frozen=True):
    channel: str
    replica: ReplicaReport


class MemberGone(Message, frozen=True):
    channel: str
    member_id: str
    incarnation: str


class Announce(Message, frozen=True):
    """A version is being packed at this holder, which still has the whole versions `kept`.

    `replaces` is the unsent version whose slot it took, or 0.
    """

    channel: str
    incarnation: str
    version: int
    uid: int
    step: int
    nbytes: int
    chunk_nbytes: int
    manifest_digest: str
    replaces: int
    kept: tuple[int, ...]


class Abandon(Message, frozen=True):
    channel: str
    version: int
    uid: int
    reason: str


class Sealed(Message, frozen=True):
    channel: str
    version: int
    uid: int
    digests: tuple[int, ...]


class Staged(Message, frozen=True):
    channel: str
    version: int
    uid: int
    nbytes_received: int
    transfer_s: float


class Adopted(Message, frozen=True):
    """A holder has taken over a whole slot of its predecessor. Nobody else may know its manifest any more."""

    channel: str
    slot: SlotReport
    manifest: Manifest


class PullFailed(Message, frozen=True):
    channel: str
    version: int
    uid: int
    error: str


class Committed(Message, frozen=True):
    channel: str
    member_id: str
    version: int
    uid: int
    pause_s: float
    error: str


class Have(Message, frozen=True):
    """Ready bytes of a version that is still pulled, one per chunk; empty: nothing of it."""

    channel: str
    version: int
    uid: int
    ready: bytes


# --- coordinator -> holder
class Source(msgspec.Struct, frozen=True):
    holder_id: str
    host: str
    endpoints: dict[str, bytes]


class Pull(Message, frozen=True):
    """Fetch a version; a second `Pull` of it replaces the sources. `stripes` has, for each stripe of chunks (chunk %
    number of stripes), places in `sources`: the first that answers delivers.

    `patience_s` bounds how long a read waits at one source for a chunk that it does not have yet.
    """

    channel: str
    version: int
    uid: int
    step: int
    nbytes: int
    chunk_nbytes: int
    manifest_digest: str
    sources: tuple[Source, ...]
    stripes: tuple[tuple[int, ...], ...]
    patience_s: float
    digests: tuple[int, ...]
    is_sealed: bool


class Prepare(Message, frozen=True):
    """A trainer has come: reserve slots of `nbytes` now, so that the first version need not wait for memory.

    Its own holder is told in chunks of which size the next versions travel best; 0: unknown.
    """

    channel: str
    nbytes: int
    chunk_nbytes: int = 0


class Known(Message, frozen=True):
    """To the trainer's holder: somebody remembers this version, so the next ones must be newer."""

    channel: str
    version: int


class Seal(Message, frozen=True):
    channel: str
    version: int
    uid: int
    digests: tuple[int, ...]


class Abort(Message, frozen=True):
    """Nobody gets this version any more. Its slot is free as soon as those who install it are done."""

    channel: str
    version: int
    uid: int
    reason: str


class Flight(Message, frozen=True):
    """To the origin: whether its version is on its way, so that its slot is not taken."""

    channel: str
    version: int
    uid: int
    is_flying: bool


class Retire(Message, frozen=True):
    """No plan has this lane any more: free its memory as soon as no member follows it."""

    channel: str


class AskHave(Message, frozen=True):
    channel: str
    version: int
    uid: int


def _concrete(kind: type[Message]) -> list[type[Message]]:
    return list(kind.__subclasses__())


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    id: int
    is_reply: bool
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)
_bodies: msgspec.msgpack.Decoder[Message] | None = None


def _body_decoder() -> msgspec.msgpack.Decoder[Message]:
    global _bodies
    if _bodies is None:
        union: object = _concrete(Message)[0]
        for kind in _concrete(Message)[1:]:
            union = union | kind
        _bodies = msgspec.msgpack.Decoder(union)
    return _bodies


def encode_frame(request_id: int, message: Message, *, is_reply: bool = False, num_descriptors: int = 0) -> bytes:
    """The bytes of one frame."""
    body = msgspec.Raw(_encoder.encode(message))
    payload = _encoder.encode(Envelope(request_id, is_reply, body))
    if len(payload) > MAX_FRAME_NBYTES:
        raise WsyncError(
            f"a {type(message).__name__} message of {len(payload)} bytes is larger than {MAX_FRAME_NBYTES}"
        )
    return HEADER.pack(len(payload), num_descriptors) + payload


def decode_payload(payload: bytes | bytearray | memoryview) -> tuple[int, bool, Message]:
    """`(id, is_reply, message)` of one payload. Raises `msgspec.DecodeError` (also for unknown messages and fields)."""
    try:
        envelope = _envelopes.decode(payload)
        return envelope.id, envelope.is_reply, _body_decoder().decode(envelope.body)
    except RecursionError:
        raise msgspec.DecodeError("nested too deeply") from None


class FrameBuffer:
    """Sans-I/O frame reader: feed bytes and descriptors, take whole frames. A frame too large is a `WsyncError`."""

    def __init__(self, max_nbytes: int = MAX_FRAME_NBYTES) -> None:
        self._bytes = bytearray()
        self._descriptors: list[int] = []
        self._max_nbytes = max_nbytes

    def feed(self, received: bytes | memoryview, descriptors: list[int]) -> None:
        self._bytes += received
        self._descriptors += descriptors

    def take(self) -> tuple[bytes, list[int]] | None:
        """`(payload, descriptors)` of the next whole frame, or None."""
        if len(self._bytes) < HEADER.size:
            return None
        nbytes, num_descriptors = HEADER.unpack_from(self._bytes)
        if nbytes > self._max_nbytes or num_descriptors > MAX_DESCRIPTORS:
            raise WsyncError(f"a frame of {nbytes} bytes and {num_descriptors} descriptors is refused")
        end = HEADER.size + nbytes
        if len(self._bytes) < end:
            return None
        payload = bytes(memoryview(self._bytes)[HEADER.size : end])
        del self._bytes[:end]
        taken, self._descriptors = self._descriptors[:num_descriptors], self._descriptors[num_descriptors:]
        return payload, taken

    def drop_descriptors(self) -> list[int]:
        """Descriptors that came without their frame; the caller closes them."""
        dropped, self._descriptors = self._descriptors, []
        return dropped
