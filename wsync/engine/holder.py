"""The holder: one light process per host that owns the host's slots, fills them, and serves them on.

Members attach over its unix socket. A trainer's version is digested here while it is packed; a version from another
host is pulled here by `wsync.engine.executor`; replicas lease what is whole. No torch, no thread in a member.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import xxhash

from wsync.config import Config
from wsync.engine import protocol
from wsync.engine.executor import LanePull, PeerTable
from wsync.engine.link import PURPOSE
from wsync.engine.protocol import Attached, Done, Message
from wsync.engine.staging import HeldSlot, SlotPhase, Staging
from wsync.engine.upstream import Resolve, Upstream
from wsync.engine.wire import Listener, Wire
from wsync.errors import (
    ArenaError,
    ChannelError,
    ConfigError,
    ErrorContext,
    PublishError,
    StaleView,
    TransferTimeout,
    WsyncError,
)
from wsync.manifest import Manifest, lane_of
from wsync.memory import Slot
from wsync.transports.base import Transport

logger = logging.getLogger("wsync")


@dataclass(eq=False)
class _Member:
    """One attached process. It is gone when its connection closes, and its leases with it."""

    wire: Wire
    is_trainer: bool
    channel: _Channel
    member_id: str
    incarnation: str
    committed_version: int = 0
    leases: list[HeldSlot] = field(default_factory=list)

    def report(self) -> protocol.ReplicaReport:
        return protocol.ReplicaReport(self.member_id, self.incarnation, self.committed_version)


@dataclass(eq=False)
class _Channel:
    name: str
    staging: Staging
    highest: int = 0
    manifests: dict[str, Manifest] = field(default_factory=dict)
    trainer: _Member | None = None
    replicas: list[_Member] = field(default_factory=list)
    packing: _Packing | None = None
    pulls: dict[int, _Pull] = field(default_factory=dict)

    def report(self) -> protocol.ChannelReport:
        trainer = self.trainer
        return protocol.ChannelReport(
            channel=self.name,
            highest_version=self.highest,
            manifests=tuple(self.manifests.values()),
            trainer=protocol.TrainerReport(trainer.member_id, trainer.incarnation) if trainer else None,
            replicas=tuple(member.report() for member in self.replicas),
            slots=tuple(held.report() for held in self.staging.slots if held.phase is not SlotPhase.FREE),
        )


@dataclass(eq=False)
class _Packing:
    """The version that the trainer packs: chunks up to `num_marked` are served, a task digests them in order."""

    held: HeldSlot
    num_marked: int = 0
    is_packed: bool = False
    is_dropped: bool = False
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    digesting: asyncio.Task[None] | None = None

    def drop(self) -> None:
        self.is_dropped = True
        self.grown.set()


@dataclass(eq=False)
class _Pull:
    """A version that comes from another host: the coordinator's last order, and the transfer once a slot is there."""

    order: protocol.Pull
    digests: Sequence[int] | None = None
    lane_pull: LanePull | None = None
    task: asyncio.Task[None] | None = None

    def update(self) -> None:
        """Hand what is known to the transfer. Orders and digests may come before it has its slot."""
        if self.lane_pull is not None:
            self.lane_pull.set_sources(self.order.sources, self.order.patience_s)
            if self.digests is not None:
                self.lane_pull.set_digests(self.digests)

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


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
        self._transports: dict[str, Transport] = {}
        self._upstream = Upstream(config, token, resolve, self._hello, self._handle_order)
        self._digest_threads = ThreadPoolExecutor(2, thread_name_prefix="wsync-digest")
        self._listener: Listener | None = None
        self._tasks: set[asyncio.Task[None]] = set()
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
        alone = asyncio.create_task(self._wait_alone())
        try:
            done, _ = await asyncio.wait([*jobs, alone], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in [*jobs, alone, *self._tasks]:
                task.cancel()
            self._listener.close()
            await asyncio.gather(*jobs, alone, *self._tasks, return_exceptions=True)
            for transport in self._transports.values():
                await asyncio.to_thread(transport.close)
            self._digest_threads.shutdown(wait=True, cancel_futures=True)
            for channel in self._channels.values():
                channel.staging.close()

    async def _wait_alone(self) -> None:
        while self._members or time.monotonic() - self._last_left < self.config.linger_s:
            await asyncio.sleep(min(0.25, max(0.01, self.config.linger_s / 4)))

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
        )

    def _channel(self, name: str) -> _Channel:
        if name not in self._channels:
            self._channels[name] = _Channel(name, Staging(name, self.config, self._transports.values()))
        return self._channels[name]

    def _spawn(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- members
    async def _serve(self, wire: Wire) -> None:
        member: list[_Member] = []

        async def handle(wire: Wire, message: Message, fds: list[int]) -> tuple[Message, list[int]] | Message | None:
            if isinstance(message, protocol.HandBack):
                return await self._adopt(message, fds)
            for fd in fds:
                os.close(fd)
            if isinstance(message, protocol.AttachTrainer | protocol.AttachReplica):
                if member:
                    raise StaleView("this connection is attached already")
                attached, reply = await self._attach(wire, message)
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
        member = _Member(wire, is_trainer, channel, message.member_id, message.incarnation, message.last_version)
        register: Message
        if isinstance(message, protocol.AttachTrainer):
            report = protocol.TrainerReport(message.member_id, message.incarnation)
            register = protocol.RegisterTrainer(channel.name, report, message.manifest, message.last_version)
        else:
            register = protocol.RegisterReplica(channel.name, member.report())
        reply = await self._upstream.call(register, timeout_s=self.config.join_timeout_s)
        assert isinstance(reply, Attached)
        channel.highest = max(channel.highest, reply.highest_version)
        if isinstance(message, protocol.AttachTrainer):
            digest = message.manifest.digest()
            channel.manifests.pop(digest, None)  # the current one is the last
            channel.manifests[digest] = message.manifest
            channel.trainer = member
            try:
                await channel.staging.provide(lane_of(message.manifest).nbytes, self.config.chunk_nbytes)
            except WsyncError:
                self._detach(member)
                raise
        else:
            channel.replicas.append(member)
        wire.peer = f"{'trainer' if is_trainer else 'replica'} {message.member_id}"
        if wire.is_closed:
            self._detach(member)
        else:
            self._members.add(member)
        return member, reply

    def _detach(self, member: _Member) -> None:
        self._members.discard(member)
        self._last_left = time.monotonic()
        channel = member.channel
        if member in channel.replicas:
            channel.replicas.remove(member)
        if channel.trainer is member:
            channel.trainer = None
            if channel.packing is not None and not channel.packing.is_packed:
                self._drop_packing(channel, "its trainer left while packing")
        for held in member.leases:
            channel.staging.release(held, member.member_id)
        member.leases.clear()
        self._upstream.tell(protocol.MemberGone(channel.name, member.member_id, member.incarnation))

    async def _handle_member(self, member: _Member, message: Message) -> tuple[Message, list[int]] | Message | None:
        match message:
            case protocol.ReserveSlot():
                return await self._reserve(member, message)
            case protocol.FetchSlot(slot_id):
                return self._hand_over(member, slot_id)
            case protocol.PackedTo(version, nbytes):
                self._packed_to(self._packing(member, version), nbytes)
            case protocol.Packed(version):
                packing = self._packing(member, version)
                packing.is_packed = True
                self._packed_to(packing, packing.held.slot.nbytes)
            case protocol.LeaseVersion():
                return await self._lease(member, message)
            case protocol.ReleaseVersion():
                self._release(member, message)
            case protocol.HashRanges(version, ranges):
                return await self._hash_ranges(member.channel, version, ranges)
            case protocol.AwaitVersion(timeout_s=timeout_s):
                return await self._upstream.call(message, timeout_s=timeout_s + 2.0)
            case protocol.GetManifest(_, digest):
                return protocol.ManifestFound(await self._manifest(member.channel, digest))
            case _:
                raise StaleView(f"a member does not send {type(message).__name__}")
        return None

    # --- publishing
    async def _reserve(self, member: _Member, wish: protocol.ReserveSlot) -> Message:
        channel = member.channel
        if not member.is_trainer or channel.trainer is not member:
            raise PublishError("only the channel's trainer publishes", context=ErrorContext(channel=channel.name))
        if channel.packing is not None and not channel.packing.is_packed:
            raise PublishError(
                f"version {channel.packing.held.version} of '{channel.name}' is still being packed",
                hint="publish from one thread at a time",
                context=ErrorContext(channel=channel.name, version=channel.packing.held.version, phase="publish"),
            )
        deadline = asyncio.get_running_loop().time() + wish.timeout_s
        is_busy = any(held.is_flying for held in channel.staging.slots)
        if is_busy and wish.on_busy == "skip":
            return protocol.SlotReserved(0, 0)
        while wish.on_busy == "wait" and any(held.is_flying for held in channel.staging.slots):
            if not await channel.staging.wait_change(deadline):
                raise TransferTimeout(
                    f"an earlier version of '{channel.name}' is still on its way",
                    hint="raise timeout_s, or use on_busy='supersede'",
                    context=ErrorContext(channel=channel.name, phase="publish", elapsed_s=wish.timeout_s),
                )
        manifest = next(reversed(channel.manifests.values()))
        version = channel.highest + 1
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        unsent = {h.version for h in channel.staging.slots if h.is_origin and not h.has_flown and not h.is_flying}
        held = await channel.staging.take(
            version, lane_of(manifest).nbytes, self.config.chunk_nbytes, SlotPhase.PACKING, left
        )
        channel.highest = version
        channel.staging.begin(held, wish.step, manifest.digest())
        channel.packing = packing = _Packing(held)
        packing.digesting = asyncio.create_task(self._digest_packing(channel, packing))
        self._spawn(packing.digesting)
        kept = channel.staging.whole_versions()
        self._upstream.tell(
            protocol.Announce(
                channel=channel.name,
                incarnation=member.incarnation,
                version=version,
                step=wish.step,
                nbytes=held.slot.nbytes,
                chunk_nbytes=held.slot.chunk_nbytes,
                manifest_digest=held.manifest_digest,
                replaces=max(unsent - set(kept), default=0),
                kept=tuple(kept),
            )
        )
        return protocol.SlotReserved(version, held.slot_id)

    def _packing(self, member: _Member, version: int) -> _Packing:
        packing = member.channel.packing
        if packing is None or packing.held.version != version or packing.is_dropped:
            raise StaleView(
                f"version {version} of '{member.channel.name}' is not being packed any more",
                context=ErrorContext(channel=member.channel.name, version=version, phase="publish"),
            )
        return packing

    def _packed_to(self, packing: _Packing, nbytes: int) -> None:
        slot = packing.held.slot
        num_ready = slot.num_chunks if nbytes >= slot.nbytes else max(0, nbytes) // slot.chunk_nbytes
        if num_ready > packing.num_marked:
            slot.mark_ready(range(packing.num_marked, num_ready))
            packing.num_marked = num_ready
        packing.grown.set()

    async def _digest_packing(self, channel: _Channel, packing: _Packing) -> None:
        """Digest chunks as they are packed; when all are, seal the version."""
        slot, done = packing.held.slot, 0
        loop = asyncio.get_running_loop()
        while not (packing.is_packed and done == slot.num_chunks):
            await packing.grown.wait()
            packing.grown.clear()
            if packing.is_dropped:
                return
            upto = packing.num_marked
            await loop.run_in_executor(self._digest_threads, _digest_chunks, slot, range(done, upto))
            done = upto
        if packing.is_dropped:
            return
        held = packing.held
        channel.staging.complete(held)
        self._upstream.tell(protocol.Sealed(channel.name, held.version, tuple(slot.digests)))

    def _drop_packing(self, channel: _Channel, reason: str) -> None:
        packing, channel.packing = channel.packing, None
        if packing is None:
            return
        packing.drop()
        self._upstream.tell(protocol.Abandon(channel.name, packing.held.version, reason))
        self._spawn(asyncio.create_task(self._discard(channel, packing.held, packing.digesting)))

    async def _discard(self, channel: _Channel, held: HeldSlot, digesting: asyncio.Task[None] | None) -> None:
        if digesting is not None:  # it still writes digests into the slot
            await asyncio.wait([digesting])
        await channel.staging.discard(held)

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
            if held is not None:
                break
            if wish.timeout_s <= 0 or not await staging.wait_change(deadline):
                return protocol.VersionLeased(0, 0, 0, "", tuple(staging.whole_versions()))
        if member not in self._members:
            raise StaleView("this member has left")
        staging.lease(held, member.member_id)
        member.leases.append(held)
        kept = tuple(staging.whole_versions())
        return protocol.VersionLeased(held.version, held.step, held.slot_id, held.manifest_digest, kept)

    def _release(self, member: _Member, message: protocol.ReleaseVersion) -> None:
        for held in member.leases:
            if held.version == message.version:
                member.leases.remove(held)
                member.channel.staging.release(held, member.member_id)
                break
        if message.is_committed:
            member.committed_version = message.version
        if message.is_committed or message.error:
            self._upstream.tell(
                protocol.Committed(
                    member.channel.name, member.member_id, message.version, message.pause_s, message.error
                )
            )

    async def _hash_ranges(self, channel: _Channel, version: int, ranges: Sequence[tuple[int, int]]) -> Message:
        held = channel.staging.find(version)
        if held is None or held.phase is not SlotPhase.WHOLE:
            raise ChannelError(
                f"version {version} of '{channel.name}' is not on this host any more",
                hint=f"kept: {channel.staging.whole_versions()}",
            )
        if any(offset < 0 or nbytes < 0 or offset + nbytes > held.slot.nbytes for offset, nbytes in ranges):
            raise ConfigError("a range lies outside of the version")
        channel.staging.lease(held, "verify")
        try:
            loop = asyncio.get_running_loop()
            hashes = await loop.run_in_executor(self._digest_threads, _hash_ranges, held.slot, ranges)
        finally:
            channel.staging.release(held, "verify")
        return protocol.RangeHashes(hashes)

    async def _manifest(self, channel: _Channel, digest: str) -> Manifest:
        if digest not in channel.manifests:
            reply = await self._upstream.call(
                protocol.GetManifest(channel.name, digest), timeout_s=self.config.join_timeout_s
            )
            assert isinstance(reply, protocol.ManifestFound)
            channel.manifests = {digest: reply.manifest, **channel.manifests}  # the trainer's stays the last
        return channel.manifests[digest]

    async def _adopt(self, message: protocol.HandBack, fds: list[int]) -> Message:
        """Take over a slot that outlived our predecessor, if every chunk still has its digest."""
        if len(fds) != 1:
            raise ArenaError(f"a slot was handed back with {len(fds)} descriptors")
        fd = os.open(f"/proc/self/fd/{fds[0]}", os.O_RDWR | os.O_CLOEXEC)
        os.close(fds[0])
        slot = Slot.attach(fd, is_writable=True)
        channel = self._channel(message.channel)
        staging = channel.staging
        is_ours = slot.is_sealed and slot.channel_key == staging.channel_key(message.manifest_digest)
        if not is_ours or staging.find(slot.version) or len(staging.slots) >= self.config.num_slots:
            slot.close()
            return Done()
        loop = asyncio.get_running_loop()
        is_right = await loop.run_in_executor(self._digest_threads, _digests_agree, slot)
        if not is_right or staging.find(slot.version) or len(staging.slots) >= self.config.num_slots:
            slot.close()
            return Done()
        held = staging.adopt(slot, message.step, message.manifest_digest)
        channel.highest = max(channel.highest, slot.version)
        self._upstream.tell(protocol.Adopted(channel.name, held.report()))
        logger.info("adopted version %d of '%s' from a former holder", slot.version, channel.name)
        return Done()

    # --- orders of the coordinator
    async def _handle_order(self, wire: Wire, message: Message, descriptors: list[int]) -> Message | None:
        match message:
            case protocol.Pull():
                self._pull(message)
            case protocol.Seal(name, version, digests):
                pull = self._channel(name).pulls.get(version)
                if pull is not None:
                    pull.digests = digests
                    pull.update()
            case protocol.Abort(name, version, reason):
                self._abort(self._channel(name), version, reason)
            case protocol.Flight(name, version, is_flying):
                held = self._channel(name).staging.find(version)
                if held is not None:
                    held.is_flying, held.has_flown = is_flying, True
                    self._channel(name).staging.wake()
            case protocol.AskHave(name, version):
                held = self._channel(name).staging.find(version)
                ready = bytes(held.slot.ready) if held is not None else b""
                self._upstream.tell(protocol.Have(name, version, ready))
            case _:
                raise StaleView(f"a coordinator does not send {type(message).__name__}")
        return None

    def _pull(self, order: protocol.Pull) -> None:
        channel = self._channel(order.channel)
        channel.highest = max(channel.highest, order.version)
        held = channel.staging.find(order.version)
        if held is not None and held.phase is SlotPhase.WHOLE:
            self._upstream.tell(protocol.Staged(order.channel, order.version, 0, 0.0))
            return
        pull = channel.pulls.get(order.version)
        if pull is None:
            for older in [version for version in channel.pulls if version < order.version]:
                channel.pulls.pop(older).cancel()  # one version at a time: the coordinator has moved on
            pull = channel.pulls[order.version] = _Pull(order)
            pull.task = asyncio.create_task(self._run_pull(channel, pull))
            self._spawn(pull.task)
        pull.order = order
        if order.is_sealed:
            pull.digests = order.digests
        pull.update()

    async def _run_pull(self, channel: _Channel, pull: _Pull) -> None:
        order = pull.order
        started = time.monotonic()
        held: HeldSlot | None = None
        try:
            held = await channel.staging.take(
                order.version,
                order.nbytes,
                order.chunk_nbytes,
                SlotPhase.PULLING,
                self.config.transfer_timeout_s,
            )
            channel.staging.begin(held, order.step, order.manifest_digest)
            lane_pull = LanePull(
                held.slot,
                channel.staging.key(order.version),
                peers=self._peers,
                digest_threads=self._digest_threads,
                on_hop_failed=lambda source, error: logger.info(
                    "version %d of '%s': %s failed: %s", order.version, channel.name, source, error
                ),
            )
            pull.lane_pull = lane_pull
            pull.update()
            await lane_pull.run()
            await self._manifest(channel, order.manifest_digest)
            channel.staging.complete(held)
            took_s = time.monotonic() - started
            self._upstream.tell(protocol.Staged(channel.name, order.version, lane_pull.nbytes_received, took_s))
        except WsyncError as exc:
            self._upstream.tell(protocol.PullFailed(channel.name, order.version, str(exc)))
            await self._give_up(channel, order.version, held)
        except asyncio.CancelledError:
            await asyncio.shield(self._give_up(channel, order.version, held))
            raise
        finally:
            if channel.pulls.get(order.version) is pull:
                del channel.pulls[order.version]

    async def _give_up(self, channel: _Channel, version: int, held: HeldSlot | None) -> None:
        if held is not None and held.version == version and held.phase is SlotPhase.PULLING:
            await channel.staging.discard(held)

    def _abort(self, channel: _Channel, version: int, reason: str) -> None:
        if version in channel.pulls:
            channel.pulls.pop(version).cancel()
            return
        held, digesting = channel.staging.find(version), None
        if channel.packing is not None and channel.packing.held is held:
            digesting = channel.packing.digesting
            if held is not None and held.phase is SlotPhase.PACKING:
                channel.packing.drop()
                channel.packing = None
        if held is not None:
            logger.info("version %d of '%s' is dropped: %s", version, channel.name, reason)
            self._spawn(asyncio.create_task(self._discard(channel, held, digesting)))


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


def _digest_chunks(slot: Slot, chunks: range) -> None:
    for chunk in chunks:
        slot.digests[chunk] = xxhash.xxh3_64_intdigest(slot.chunk_data(chunk))


def _digests_agree(slot: Slot) -> bool:
    return all(
        slot.digests[chunk] == xxhash.xxh3_64_intdigest(slot.chunk_data(chunk)) for chunk in range(slot.num_chunks)
    )


def _hash_ranges(slot: Slot, ranges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(xxhash.xxh3_64_intdigest(slot.data[offset : offset + nbytes]) for offset, nbytes in ranges)
