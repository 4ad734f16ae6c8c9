"""The holder: one light process per host that owns the host's slots, fills them, and serves them on.

Members attach over its unix socket. A trainer's version is digested here while it is packed; a version from another
host is pulled here by `wsync.engine.executor`; replicas lease what is whole. No torch, no thread in a member.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from wsync.config import Config
from wsync.engine import protocol
from wsync.engine.executor import PeerTable
from wsync.engine.link import PURPOSE
from wsync.engine.origin import Origin
from wsync.engine.protocol import Attached, Done, Message
from wsync.engine.receiver import Receiver
from wsync.engine.services import HolderServices, digests_agree, hash_ranges
from wsync.engine.staging import HeldSlot, SlotPhase, Staging
from wsync.engine.upstream import Resolve, Upstream
from wsync.engine.wire import Listener, Wire
from wsync.errors import (
    ArenaError,
    ChannelError,
    ConfigError,
    PublishError,
    StaleView,
    WsyncError,
)
from wsync.manifest import Manifest, lane_of
from wsync.memory import Slot
from wsync.topology import Topology
from wsync.transports.base import Transport

logger = logging.getLogger("wsync")

UPSTREAM_S = 0.3
"""How much longer than its own deadline the coordinator may take to answer."""


@dataclass(eq=False)
class _Member:
    """One attached process. It is gone when its connection closes, and its leases with it."""

    wire: Wire
    is_trainer: bool
    channel: _Channel
    member_id: str
    incarnation: str
    committed_version: int = 0
    committed_uid: int = 0
    published: int = 0
    lane_nbytes: int = 0
    shard: protocol.ShardReport | None = None
    leases: list[HeldSlot] = field(default_factory=list)

    def report(self) -> protocol.ReplicaReport:
        return protocol.ReplicaReport(self.member_id, self.incarnation, self.committed_version, self.committed_uid)

    def trainer_report(self) -> protocol.TrainerReport:
        return protocol.TrainerReport(self.member_id, self.incarnation, self.published)


@dataclass(eq=False)
class _Channel:
    """One channel on this host. The last manifest is the trainer's present one."""

    name: str
    staging: Staging
    origin: Origin
    receiver: Receiver
    manifests: dict[str, Manifest] = field(default_factory=dict)
    trainer: _Member | None = None
    replicas: list[_Member] = field(default_factory=list)
    shards: list[_Member] = field(default_factory=list)
    """Members that only describe themselves here; their lanes are channels of their own."""
    is_retired: bool = False

    def report(self) -> protocol.ChannelReport:
        trainer = self.trainer
        return protocol.ChannelReport(
            channel=self.name,
            highest_version=self.staging.highest,
            manifests=tuple(self.manifests.values()),
            trainer=trainer.trainer_report() if trainer else None,
            replicas=tuple(member.report() for member in self.replicas),
            slots=tuple(held.report() for held in self.staging.slots if held.is_filled),
            shards=tuple(member.shard for member in self.shards if member.shard is not None),
        )


class Holder:
    """Runs in an event loop of its own process (or Ray actor). `start`, then `run` until cancelled or left alone."""

    def __init__(self, config: Config, token: str, *, host: str, resolve: Resolve) -> None:
        self.config = config
        self.host = host
        self.holder_id = f"{config.job}/{host}"
        self.incarnation = secrets.token_hex(8)
        self.socket_name = f"wsync-{secrets.token_hex(16)}"
        self._token = token
        self._channels: dict[str, _Channel] = {}
        self._members: set[_Member] = set()
        self._num_joining = 0
        self._transports: dict[str, Transport] = {}
        self._topology: Topology | None = None
        self._upstream = Upstream(config, token, resolve, self._hello, self._progress, self._handle_order)
        self._services = HolderServices(config, self._upstream.tell)
        self._listener: Listener | None = None
        self._last_left = 0.0

    # --- life
    def start(self) -> None:
        """Open the unix socket and the transports. Raises ConfigError."""
        self._transports = make_transports(self.config, self._token, self.host)
        self._peers = PeerTable(self._transports, self.host)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind("\0" + self.socket_name)
        sock.listen(128)
        self._listener = Listener(sock, self._token, purpose=PURPOSE)
        self._last_left = time.monotonic()

    async def run(self) -> None:
        """Serve until cancelled, or until no member has been here for `linger_s`."""
        assert self._listener is not None
        jobs = [asyncio.create_task(self._listener.run(self._serve)), asyncio.create_task(self._upstream.run())]
        self._services.spawn(self._look_around())
        alone = asyncio.create_task(self._wait_alone())
        try:
            done, _ = await asyncio.wait([*jobs, alone], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in [*jobs, alone, *self._services.tasks]:
                task.cancel()
            self._listener.close()
            await asyncio.gather(*jobs, alone, *self._services.tasks, return_exceptions=True)
            for transport in self._transports.values():
                await asyncio.to_thread(transport.close)
            self._services.digest_threads.shutdown(wait=True, cancel_futures=True)
            for channel in self._channels.values():
                channel.staging.close()

    async def _wait_alone(self) -> None:
        while self._members or self._num_joining or time.monotonic() - self._last_left < self.config.linger_s:
            await asyncio.sleep(min(0.25, max(0.01, self.config.linger_s / 4)))

    async def _look_around(self) -> None:
        """Find out about this host while it works already: drivers and clouds may take seconds to answer."""
        if self.config.topology == "none":
            return
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Topology] = loop.create_future()

        def look() -> None:
            try:
                call, told = found.set_result, host_topology(self.config.topology, self.host)
            except Exception as exc:
                call, told = found.set_exception, exc  # type: ignore[assignment]
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(lambda: found.done() or call(told))

        # A thread that nobody waits for at the end: what it asks may not answer for long.
        threading.Thread(target=look, name="wsync-discovery", daemon=True).start()
        try:
            self._topology = await found
        except Exception as exc:
            logger.warning("nothing is known of host %s: %s", self.host, exc)
            return
        self._upstream.tell(protocol.Described(self._topology))

    def _progress(self) -> tuple[protocol.Progress, ...]:
        return tuple(
            protocol.Progress(
                channel.name,
                held.version,
                held.uid,
                bytes(held.slot.ready).count(1),
                channel.receiver.nbytes_from(held.version, held.uid),
            )
            for channel in self._channels.values()
            for held in channel.staging.slots
            if held.phase in (SlotPhase.PACKING, SlotPhase.PULLING)
        )

    def _hello(self) -> protocol.HolderHello:
        for channel in self._channels.values():
            for held in channel.staging.slots:
                if held.is_flying:  # a new coordinator does not know, and will not say when it has landed
                    held.is_flying, held.has_flown = False, True
        return protocol.HolderHello(
            holder_id=self.holder_id,
            host=self.host,
            incarnation=self.incarnation,
            pid=os.getpid(),
            endpoints={name: transport.export() for name, transport in self._transports.items()},
            channels=tuple(channel.report() for channel in self._channels.values()),
            topology=self._topology,
        )

    def _channel(self, name: str) -> _Channel:
        if name not in self._channels:
            staging = Staging(name, self.config, self._transports.values())
            receiver = Receiver(staging, self._services, self._peers, lambda digest: self._manifest(name, digest))
            self._channels[name] = _Channel(name, staging, Origin(staging, self._services), receiver)
        return self._channels[name]

    # --- members
    async def _serve(self, wire: Wire) -> None:
        member: list[_Member] = []

        async def handle(wire: Wire, message: Message, fds: list[int]) -> tuple[Message, list[int]] | Message | None:
            if isinstance(message, protocol.HandBack):
                return await self._adopt(message, fds)
            for fd in fds:
                os.close(fd)
            if isinstance(message, protocol.AttachTrainer | protocol.AttachReplica | protocol.AttachShard):
                if member:
                    raise StaleView("this connection is attached already")
                self._num_joining += 1
                try:
                    if isinstance(message, protocol.AttachShard):
                        attached, reply = await self._attach_shard(wire, message)
                    else:
                        attached, reply = await self._attach(wire, message)
                finally:
                    self._num_joining -= 1
                member.append(attached)
                return reply
            if not member:
                raise StaleView("a member must attach first")
            return await self._handle_member(member[0], message)

        try:
            await wire.serve(handle)
        finally:
            if member:
                self._detach(member[0])

    async def _attach(
        self, wire: Wire, message: protocol.AttachTrainer | protocol.AttachReplica
    ) -> tuple[_Member, Message]:
        channel = self._channel(message.channel)
        is_trainer = isinstance(message, protocol.AttachTrainer)
        channel.is_retired = False
        member = _Member(wire, is_trainer, channel, message.member_id, message.incarnation)
        if isinstance(message, protocol.AttachTrainer):
            member.published = message.published
        else:
            member.committed_version, member.committed_uid = message.last_version, message.last_uid
        try:
            reply = await self._register(member, message)
        except BaseException:
            self._detach(member)
            raise
        self._enter(member, "trainer" if is_trainer else "replica")
        return member, reply

    def _enter(self, member: _Member, role: str) -> None:
        member.wire.peer = f"{role} {member.member_id}"
        if member.wire.is_closed:
            self._detach(member)
        else:
            self._members.add(member)

    async def _attach_shard(self, wire: Wire, message: protocol.AttachShard) -> tuple[_Member, Message]:
        channel, shard = self._channel(message.channel), message.shard
        member = _Member(wire, False, channel, shard.member_id, shard.incarnation, shard=shard)
        channel.shards.append(member)
        try:
            register = protocol.RegisterShard(message.channel, shard)
            reply = await self._upstream.call(register, timeout_s=self.config.join_timeout_s)
        except BaseException:
            self._detach(member)
            raise
        self._enter(member, f"trainer rank {shard.rank}" if shard.is_trainer else "worker")
        return member, reply

    async def _register(self, member: _Member, message: protocol.AttachTrainer | protocol.AttachReplica) -> Message:
        channel = member.channel
        register: Message = protocol.RegisterReplica(channel.name, member.report())
        if isinstance(message, protocol.AttachTrainer):
            report = member.trainer_report()
            register = protocol.RegisterTrainer(channel.name, report, message.manifest, message.last_version)
        reply = await self._upstream.call(register, timeout_s=self.config.join_timeout_s)
        assert isinstance(reply, Attached)
        channel.staging.highest = max(channel.staging.highest, reply.highest_version)
        if isinstance(message, protocol.AttachTrainer):
            digest = message.manifest.digest()
            channel.manifests.pop(digest, None)
            channel.manifests[digest] = message.manifest
            channel.trainer = member
            member.lane_nbytes = lane_of(message.manifest).nbytes
            channel.staging.check_room(member.lane_nbytes, channel.staging.chunk_nbytes)
            self._services.spawn(self._provide(channel, member.lane_nbytes))
        else:
            channel.replicas.append(member)
            if reply.manifest is not None:
                self._services.spawn(self._provide(channel, lane_of(reply.manifest).nbytes))
        return reply

    async def _provide(self, channel: _Channel, nbytes: int) -> None:
        """Reserve the slots ahead of the first publish, which would otherwise pay for their page faults."""
        try:
            await channel.staging.provide(nbytes, channel.staging.chunk_nbytes)
        except WsyncError as exc:  # the publish that needs them says so again, to its caller
            logger.warning("slots of '%s' cannot be reserved yet: %s", channel.name, exc)

    def _detach(self, member: _Member) -> None:
        self._members.discard(member)
        self._last_left = time.monotonic()
        channel = member.channel
        if member in channel.replicas:
            channel.replicas.remove(member)
        if member in channel.shards:
            channel.shards.remove(member)
        if channel.is_retired:
            self._services.spawn(self._retire(channel))
        if channel.trainer is member:
            channel.trainer = None
            channel.origin.drop_unpacked("its trainer left while packing")
        for held in member.leases:
            channel.staging.release(held, member.member_id)
        member.leases.clear()
        self._upstream.tell(protocol.MemberGone(channel.name, member.member_id, member.incarnation))

    async def _retire(self, channel: _Channel) -> None:
        """Free what a lane without a future has here, unless a member still follows it."""
        await asyncio.sleep(0)  # whoever leaves has left then
        if channel.is_retired and channel.trainer is None and not channel.replicas:
            channel.receiver.abort_all()
            await channel.staging.drop_all()
            if channel.is_retired and not channel.staging.slots:
                self._channels.pop(channel.name, None)

    async def _handle_member(self, member: _Member, message: Message) -> tuple[Message, list[int]] | Message | None:
        match message:
            case protocol.ReserveSlot():
                if member.channel.trainer is not member:
                    raise PublishError(f"{member.member_id} is not the trainer of '{member.channel.name}'")
                digest = next(reversed(member.channel.manifests))
                reserved = await member.channel.origin.reserve(member.incarnation, digest, member.lane_nbytes, message)
                member.published = max(member.published, reserved.version)
                return reserved
            case protocol.FetchSlot(slot_id):
                return self._hand_over(member, slot_id)
            case protocol.PackedTo(version, nbytes):
                member.channel.origin.packed_to(version, nbytes)
            case protocol.Packed(version):
                member.channel.origin.packed(version)
            case protocol.LeaseVersion():
                return await self._lease(member, message)
            case protocol.ReleaseVersion():
                self._release(member, message)
            case protocol.HashRanges(version, uid, ranges):
                return await self._hash_ranges(member.channel, version, uid, ranges)
            case protocol.AwaitVersion(timeout_s=timeout_s):
                return await self._upstream.call(message, timeout_s=timeout_s + 2.0)
            case protocol.AwaitLanes(timeout_s=timeout_s) | protocol.AwaitRound(timeout_s=timeout_s):
                return await self._upstream.call(message, timeout_s=timeout_s + UPSTREAM_S)
            case protocol.OpenRound():
                return await self._open_round(member, message)
            case protocol.GetManifest(_, digest):
                return protocol.ManifestFound(await self._manifest(member.channel.name, digest))
            case _:
                raise StaleView(f"a member does not send {type(message).__name__}")
        return None

    async def _open_round(self, member: _Member, wish: protocol.OpenRound) -> Message:
        """Passed on; what it says of the newest version is kept, for a coordinator that may be new next time."""
        reply = await self._upstream.call(wish, timeout_s=wish.timeout_s + UPSTREAM_S)
        assert isinstance(reply, protocol.RoundOpened)
        if member.shard is not None:
            newest = max(member.shard.last_version, reply.version)
            member.shard = msgspec.structs.replace(member.shard, last_version=newest)
        return reply

    # --- reading
    def _hand_over(self, member: _Member, slot_id: int) -> tuple[Message, list[int]]:
        for held in member.channel.staging.slots:
            if held.slot_id == slot_id:
                fd = os.dup(held.slot.fd) if member.is_trainer else held.slot.reader_fd()
                return Done(), [fd]
        raise StaleView(f"this holder has no slot {slot_id} any more")

    async def _lease(self, member: _Member, wish: protocol.LeaseVersion) -> Message:
        staging = member.channel.staging
        deadline = asyncio.get_running_loop().time() + wish.timeout_s
        while True:
            held = staging.newest(wish.min_version, wish.max_version)
            if held is None and wish.also_version:
                held = staging.newest(wish.also_version, wish.also_version)
                held = held if held is not None and held.uid != wish.but_uid else None
            if held is not None:
                break
            if wish.timeout_s <= 0 or not await staging.changes.wait(deadline):
                return protocol.VersionLeased(0, 0, 0, 0, "", tuple(staging.whole_versions()))
        if member not in self._members:
            raise StaleView("this member has left")
        staging.lease(held, member.member_id)
        member.leases.append(held)
        kept = tuple(staging.whole_versions())
        return protocol.VersionLeased(held.version, held.uid, held.step, held.slot_id, held.manifest_digest, kept)

    def _release(self, member: _Member, message: protocol.ReleaseVersion) -> None:
        for held in member.leases:
            if (held.version, held.uid) == (message.version, message.uid):
                member.leases.remove(held)
                member.channel.staging.release(held, member.member_id)
                break
        if message.is_committed:
            member.committed_version, member.committed_uid = message.version, message.uid
        if message.is_committed or message.error:
            self._upstream.tell(
                protocol.Committed(
                    member.channel.name,
                    member.member_id,
                    message.version,
                    message.uid,
                    message.pause_s,
                    message.error,
                )
            )

    async def _hash_ranges(
        self, channel: _Channel, version: int, uid: int, ranges: Sequence[tuple[int, int]]
    ) -> Message:
        held = channel.staging.find(version, uid)
        if held is None or held.phase is not SlotPhase.WHOLE:
            raise ChannelError(
                f"version {version} of '{channel.name}' is not on this host any more",
                hint="another run of the job has given that number since: commit it"
                if version in channel.staging.whole_versions()
                else f"kept: {channel.staging.whole_versions()}",
            )
        if any(offset < 0 or nbytes < 0 or offset + nbytes > held.slot.nbytes for offset, nbytes in ranges):
            raise ConfigError("a range lies outside of the version")
        channel.staging.lease(held, "verify")
        try:
            hashes = await self._services.in_thread(hash_ranges, held.slot, ranges)
        finally:
            channel.staging.release(held, "verify")
        return protocol.RangeHashes(hashes)

    async def _manifest(self, channel_name: str, digest: str) -> Manifest:
        channel = self._channel(channel_name)
        if digest not in channel.manifests:
            reply = await self._upstream.call(
                protocol.GetManifest(channel.name, digest), timeout_s=self.config.join_timeout_s
            )
            assert isinstance(reply, protocol.ManifestFound)
            channel.manifests = {digest: reply.manifest, **channel.manifests}
        return channel.manifests[digest]

    async def _adopt(self, message: protocol.HandBack, fds: list[int]) -> Message:
        """Take over a slot that outlived our predecessor, if every chunk still has its digest."""
        try:
            if len(fds) != 1:
                raise ArenaError(f"a slot was handed back with {len(fds)} descriptors")
            fd = os.open(f"/proc/self/fd/{fds[0]}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as exc:
            raise ArenaError(f"a slot that was handed back cannot be opened: {exc.strerror}") from exc
        finally:
            for received in fds:
                os.close(received)
        slot = Slot.attach(fd, is_writable=True)
        channel = self._channel(message.channel)
        staging = channel.staging
        digest = message.manifest.digest()
        is_ours = slot.is_sealed and slot.channel_key == staging.channel_key(digest)
        is_right = is_ours and await self._services.in_thread(digests_agree, slot)
        if not is_right or not staging.has_room_to_adopt(slot.version):
            slot.close()
            return Done()
        if digest not in channel.manifests:
            channel.manifests = {digest: message.manifest, **channel.manifests}  # the trainer's stays the last
        held = staging.adopt(slot, message.step, digest)
        staging.highest = max(staging.highest, slot.version)
        self._upstream.tell(protocol.Adopted(channel.name, held.report(), message.manifest))
        logger.info("adopted version %d of '%s' from a former holder", slot.version, channel.name)
        return Done()

    # --- orders of the coordinator
    async def _handle_order(self, wire: Wire, message: Message, descriptors: list[int]) -> Message | None:
        match message:
            case protocol.Pull():
                self._channel(message.channel).receiver.pull(message)
            case protocol.Known(name, version):
                staging = self._channel(name).staging
                staging.highest = max(staging.highest, version)
            case protocol.Prepare(name, nbytes, chunk_nbytes):
                if chunk_nbytes and not self.config.chunk_nbytes:
                    self._channel(name).staging.chunk_nbytes = chunk_nbytes
                self._services.spawn(self._provide(self._channel(name), nbytes))
            case protocol.Seal(name, version, uid, digests):
                self._channel(name).receiver.seal(version, uid, digests)
            case protocol.Abort(name, version, uid, reason):
                logger.info("version %d of '%s' is dropped: %s", version, name, reason)
                held = self._channel(name).staging.find(version, uid)
                if not self._channel(name).receiver.abort(version, uid) and held is not None:
                    self._channel(name).origin.abort(held)
            case protocol.Flight(name, version, uid, is_flying):
                held = self._channel(name).staging.find(version, uid)
                if held is not None:
                    held.is_flying, held.has_flown = is_flying, True
                    self._channel(name).staging.changes.wake()
            case protocol.Retire(name):
                if name in self._channels:
                    self._channels[name].is_retired = True
                    self._services.spawn(self._retire(self._channels[name]))
            case protocol.AskHave(name, version, uid):
                held = self._channel(name).staging.find(version, uid)
                ready = bytes(held.slot.ready) if held is not None else b""
                self._upstream.tell(protocol.Have(name, version, uid, ready))
            case _:
                raise StaleView(f"a coordinator does not send {type(message).__name__}")
        return None


def host_topology(where: str, host_id: str) -> Topology:
    """What is known of one host: `auto` looks at this machine, else from the file `where`.

    Raises ConfigError for a file that is none, or does not have the host.
    """
    if where == "auto":
        from wsync.discovery.detect import detect

        return detect(host_id)
    return Topology.load(Path(where)).around(host_id)


def make_transports(config: Config, token: str, host: str) -> dict[str, Transport]:
    """The allowed transports that exist here, best first. Raises ConfigError for an unknown name."""
    made: dict[str, Transport] = {}
    for name in config.transports:
        if name == "shm":
            from wsync.transports.shm import ShmTransport

            made[name] = ShmTransport(token, host=host)
        elif name == "tcp":
            from wsync.transports.tcp import TcpTransport

            made[name] = TcpTransport(token, listen=config.listen, connections=config.tcp_connections)
        else:
            raise ConfigError(f"unknown transport '{name}'", hint="a holder knows shm and tcp")
    return made
