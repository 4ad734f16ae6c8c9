"""The coordinator: membership, and which version goes where. Soft state behind one authenticated tcp socket.

It holds no weights and sees no chunks; its load grows with holders and versions only. When it dies, transfers go
on without it; a new one learns everything from the holders, which connect to it and say what they have.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from wsync.config import Config
from wsync.engine import protocol
from wsync.engine.changes import Changes
from wsync.engine.channel import Channel, Order
from wsync.engine.lanes import LanePlanner, ShardPlan, plan_lanes
from wsync.engine.membership import HolderRecord, View
from wsync.engine.planner import Planner
from wsync.engine.progress import HopWatch
from wsync.engine.protocol import Done, HolderHello, Message
from wsync.engine.shards import Shards, lane_channel
from wsync.engine.wire import Listener, Wire
from wsync.errors import ChannelError, ConfigError, ErrorContext, PeerLost, StaleView, WsyncError
from wsync.events import Aborted, Committed, EventBus, PathDegraded, PlanMade, Staged, ViewChanged
from wsync.holding import Holding
from wsync.status import ReplicaPhase, VersionPhase, VersionStatus
from wsync.topology import Topology

logger = logging.getLogger("wsync")

PURPOSE = "coordinator"
SUCCESSION_S = 1.0


@dataclass
class _Session:
    """One holder's connection, and the messages that wait to be sent to it: a stopped holder blocks nobody."""

    wire: Wire
    record: HolderRecord
    last_heard: float
    outbox: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    sender: asyncio.Task[None] | None = None

    def close(self) -> None:
        if self.sender is not None:
            self.sender.cancel()
        self.wire.close()


class Coordinator:
    """Serves one job. `run` until cancelled; `address` is known after `start`."""

    def __init__(self, config: Config, token: str, events: EventBus | None = None) -> None:
        self.config = config
        self.view = View()
        self.events = events or EventBus()
        self.address: tuple[str, int] = ("", 0)
        self._token = token
        self._listener: Listener | None = None
        self._channels: dict[str, Channel] = {}
        self._shards: dict[str, Shards] = {}
        self._planner = Planner()
        self._hops = HopWatch()
        self._planning = asyncio.Lock()
        self._planners: dict[str, LanePlanner] = {}
        self._sessions: dict[str, _Session] = {}
        self._changes = Changes()
        self._incarnations: dict[str, list[str]] = {}
        """Of each holder, oldest first: one that was replaced while it was stopped must not come back."""
        self._quiet_until = 0.0

    def start(self, port: int = 0) -> None:
        """Bind and listen on `config.listen`. Raises `ConfigError` when the address cannot be had."""
        sock = listening_socket(self.config.listen, port)
        self.address = sock.getsockname()[:2]
        self._listener = Listener(sock, self._token, purpose=PURPOSE)

    @property
    def num_refused(self) -> int:
        """Connections without the token so far."""
        return self._listener.num_refused if self._listener else 0

    @property
    def num_holders(self) -> int:
        return len(self._sessions)

    async def run(self) -> None:
        """Serve until cancelled."""
        assert self._listener is not None
        watch = asyncio.create_task(self._watch())
        try:
            await self._listener.run(self._serve)
        finally:
            watch.cancel()
            self._listener.close()

    # --- connections
    async def _serve(self, wire: Wire) -> None:
        session: list[_Session] = []

        async def handle(wire: Wire, message: Message, descriptors: list[int]) -> Message | None:
            if isinstance(message, HolderHello):
                session[:] = [self._welcome(wire, message)]
                return Done()
            if not session:
                raise StaleView("a holder must introduce itself first")
            session[0].last_heard = asyncio.get_running_loop().time()
            return await self._handle(session[0], message)

        try:
            await wire.serve(handle)
        finally:
            if session:
                self._lose(session[0], "its connection closed")

    def _welcome(self, wire: Wire, hello: HolderHello) -> _Session:
        now = asyncio.get_running_loop().time()
        known = self._incarnations.setdefault(hello.holder_id, [])
        if hello.incarnation in known[:-1]:
            raise StaleView(
                f"holder {hello.holder_id} has been replaced by a newer one",
                context=ErrorContext(peers=(hello.holder_id,), phase="join"),
            )
        if hello.incarnation not in known:
            known.append(hello.incarnation)
        former = self._sessions.get(hello.holder_id)
        if former is not None:
            self._lose(former, "it came back")
        has_history = any(r.highest_version or r.trainer or r.replicas or r.slots or r.shards for r in hello.channels)
        if has_history and not self._channels:  # a channel that a first member is just joining has none
            # We are new and the job is not: give the other holders time to report before judging what is missing.
            self._quiet_until = now + self.config.lost_after_s
        wire.peer = f"holder {hello.holder_id}"
        session = _Session(wire, HolderRecord.of(hello), now)
        self._sessions[hello.holder_id] = session
        self.view = self.view.joined(session.record)
        session.sender = asyncio.create_task(self._send_outbox(session))
        for report in hello.channels:
            self._channel(report.channel).restore(hello.holder_id, report, self.view)
            for shard in report.shards:
                with contextlib.suppress(ChannelError):
                    self._sharded(report.channel).register(hello.holder_id, shard, self.view)
        self._view_changed()
        self._reconcile()
        return session

    async def _send_outbox(self, session: _Session) -> None:
        with contextlib.suppress(PeerLost):
            while True:
                await session.wire.notify(await session.outbox.get())

    def _lose(self, session: _Session, reason: str) -> None:
        holder_id = session.record.holder_id
        session.close()
        if self._sessions.get(holder_id) is not session:
            return
        del self._sessions[holder_id]
        self._hops.forget(holder_id)
        self.view = self.view.left(holder_id)
        logger.info("holder %s left: %s", holder_id, reason)
        for channel in self._channels.values():
            channel.holder_lost(holder_id)
        for shards in self._shards.values():
            shards.holder_lost(holder_id)
        self._view_changed()
        self._reconcile()

    async def _watch(self) -> None:
        """Deadlines: silent holders have gone, late transfers are ended."""
        while True:
            await asyncio.sleep(self.config.heartbeat_s / 2)
            now = asyncio.get_running_loop().time()
            for session in list(self._sessions.values()):
                if now - session.last_heard > self.config.lost_after_s:
                    self._lose(session, f"silent for {self.config.lost_after_s:g} s")
            self._reconcile()
            if now >= self._quiet_until:
                for channel in self._channels.values():
                    self._send(channel.look_ahead(self.view, now))

    # --- messages
    async def _handle(self, session: _Session, message: Message) -> Message | None:
        match message:
            case protocol.Beat(progress):
                self._progress(session.record.holder_id, progress)
                return Done()
            case protocol.Described(topology):
                self._describe(session, topology)
                return None
            case protocol.AwaitVersion():
                return await self._await_version(message)
            case protocol.GetManifest():
                return self._manifest(message)
            case protocol.RegisterTrainer() | protocol.RegisterShard():
                return await self._register_trainer(session.record.holder_id, message)
            case protocol.AwaitLanes():
                return await self._await_lanes(message)
            case protocol.OpenRound():
                return await self._open_round(message)
            case protocol.AwaitRound():
                return await self._await_round(message)
            case _:
                reply = self._change(session.record.holder_id, message)
                self._reconcile()
                return reply

    def _describe(self, session: _Session, topology: Topology) -> None:
        session.record = msgspec.structs.replace(session.record, topology=topology)
        self.view = self.view.described(session.record.holder_id, topology)
        self._view_changed()

    def _progress(self, holder_id: str, reports: tuple[protocol.Progress, ...]) -> None:
        """What hops carry; one that carries far too little is avoided from now on."""
        now = asyncio.get_running_loop().time()
        self._planner.see(self.view, now)
        told = ((self._channels.get(report.channel), report) for report in reports)
        parts = [channel.progress(holder_id, report) for channel, report in told if channel is not None]
        pulling = [part for part in parts if part is not None]
        expected = {s: self._planner.expected(s, holder_id) for part in pulling for s in part.ahead}
        slow = []
        for rate in self._hops.report(holder_id, pulling, now, expected):
            self._planner.seen(rate.source, holder_id, rate.nbytes_per_s)
            if self._hops.is_slow(holder_id, rate, expected[rate.source]):
                slow.append(rate)
        for rate in slow:
            logger.warning(
                "the path from %s to %s is slow: %.4g bytes/s instead of %.4g; routes are made anew",
                rate.source,
                holder_id,
                rate.nbytes_per_s,
                expected[rate.source],
            )
            self._planner.slow(rate.source, holder_id, rate.nbytes_per_s)
            for part in pulling:
                if rate.source in part.ahead:
                    hop = (rate.source, holder_id, expected[rate.source], rate.nbytes_per_s)
                    self.events.emit(PathDegraded(part.channel, part.version, *hop))
        if slow:
            self._reconcile()

    async def _register_trainer(
        self, holder_id: str, message: protocol.RegisterTrainer | protocol.RegisterShard
    ) -> Message | None:
        """A trainer that has just left or died on another host may be known here for a moment longer: wait for that."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SUCCESSION_S
        while True:
            try:
                reply = self._change(holder_id, message)
            except ChannelError:
                if not await self._changes.wait(deadline):
                    raise
            else:
                self._reconcile()
                return reply

    def _change(self, holder_id: str, message: Message) -> Message | None:
        logger.debug("from %s: %s", holder_id, message)
        channel = self._channel(getattr(message, "channel", ""))
        match message:
            case protocol.RegisterTrainer(name, report, manifest, last_version):
                self._check_kind(name, is_sharded=False)
                channel.register_trainer(holder_id, report, manifest, last_version, self.view)
                return protocol.Attached(manifest, channel.highest)
            case protocol.RegisterReplica(name, replica):
                self._check_kind(name, is_sharded=False)
                channel.register_replica(holder_id, replica)
                return protocol.Attached(channel.manifests.get(channel.manifest_digest), channel.highest)
            case protocol.RegisterShard(name, shard):
                self._check_kind(name, is_sharded=True)
                shards = self._sharded(name)
                shards.register(holder_id, shard, self.view)
                return protocol.Attached(None, shards.highest)
            case protocol.MemberGone(name, member_id, incarnation):
                channel.member_gone(member_id, incarnation)
                if name in self._shards:
                    self._shards[name].gone(member_id, incarnation)
            case protocol.Announce():
                self._announce(channel, holder_id, message)
            case protocol.Abandon(_, version, uid, reason):
                channel.abandon(version, uid, reason)
            case protocol.Sealed(_, version, uid, digests):
                channel.sealed(holder_id, version, uid, digests)
            case protocol.Staged(name, version, uid, nbytes_received, transfer_s):
                channel.staged(holder_id, version, uid, nbytes_received, transfer_s)
                self.events.emit(Staged(name, version, holder_id, nbytes_received, transfer_s))
            case protocol.Adopted(_, slot, manifest):
                channel.adopted(holder_id, slot, manifest)
            case protocol.PullFailed(_, version, uid, error):
                channel.pull_failed(holder_id, version, uid, error)
                logger.warning(
                    "holder %s could not fetch version %d of '%s': %s", holder_id, version, channel.name, error
                )
            case protocol.Committed(name, member_id, version, _, pause_s, error):
                channel.committed(message)
                if not error:
                    self.events.emit(Committed(name, version, member_id, pause_s))
            case protocol.Have(_, version, uid, ready):
                channel.have(holder_id, version, uid, ready)
            case _:
                raise StaleView(f"a holder does not send {type(message).__name__}")
        return None

    def _announce(self, channel: Channel, holder_id: str, message: protocol.Announce) -> None:
        try:
            channel.announce(holder_id, message)
        except StaleView as exc:
            abort = protocol.Abort(message.channel, message.version, message.uid, exc.problem)
            self._send([(holder_id, abort)])

    def _channel(self, name: str) -> Channel:
        if name not in self._channels:
            self._channels[name] = Channel(name, self._planner)
        return self._channels[name]

    def _sharded(self, name: str) -> Shards:
        if name not in self._shards:
            self._shards[name] = Shards(name)
        return self._shards[name]

    def _manifest(self, message: protocol.GetManifest) -> Message:
        found = self._channel(message.channel).manifests.get(message.digest)
        if found is None:
            self._check_kind(message.channel, is_sharded=False)
            names = [name for name, channel in self._channels.items() if channel.manifests and "#" not in name]
            names += [name for name, shards in self._shards.items() if shards.is_published(self.view)]
            raise ChannelError(
                f"channel '{message.channel}' has no manifest {message.digest}",
                hint=f"published in this job: {', '.join(sorted(names)) or 'no channel yet'}",
            )
        return protocol.ManifestFound(found)

    def _check_kind(self, name: str, *, is_sharded: bool) -> None:
        """Raise `ChannelError` when somebody publishes the channel in the other way."""
        channel, shards = self._channels.get(name), self._shards.get(name)
        if is_sharded and channel is not None and channel.trainer is not None:
            raise ChannelError(
                f"channel '{name}' is published by {channel.trainer.member_id} as whole tensors",
                hint="use Publisher and Replica, or another channel",
            )
        if not is_sharded and shards is not None and shards.is_published(self.view):
            raise ChannelError(
                f"channel '{name}' is published in shards",
                hint="use ShardPublisher and ShardReplica, or another channel",
            )

    # --- orders and waits
    def _reconcile(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._quiet_until:
            self._changes.wake()
            return
        for channel in self._channels.values():
            before = {n: v.phase for n, v in channel.versions.items()}
            self._send(channel.reconcile(self.view, now, self.config.transfer_timeout_s))
            for number, routing in channel.plans:
                logger.info("version %d of '%s': %s", number, channel.name, routing.explain())
                routes = tuple(f"{source}>{receiver}" for lane in routing.lanes for source, receiver in lane.hops())
                made = PlanMade(channel.name, number, routes, routing.predicted_s, routing.bound.time_s)
                self.events.emit(made)
            channel.plans.clear()
            for number, version in channel.versions.items():
                if version.phase is VersionPhase.ABORTED and before.get(number) is not VersionPhase.ABORTED:
                    logger.warning("version %d of '%s' is aborted: %s", number, channel.name, version.error)
                    self.events.emit(Aborted(channel.name, number, version.error))
        self._changes.wake()

    def _send(self, orders: list[Order]) -> None:
        for holder_id, message in orders:
            logger.debug("to %s: %s", holder_id, message)
            session = self._sessions.get(holder_id)
            if session is not None:
                session.outbox.put_nowait(message)

    def _view_changed(self) -> None:
        holders = tuple(record.holder_id for record in self.view.holders)
        members = tuple(member for channel in self._channels.values() for member in channel.replicas)
        self.events.emit(ViewChanged(self.view.number, holders, members))

    # --- sharded channels
    async def _plan(self, shards: Shards) -> None:
        """Bring the plan up to date, in a thread: a large model takes seconds."""
        async with self._planning:
            wanted = shards.to_plan()
            if wanted is not None:
                key, held, classes = wanted
                planner = self._planners.setdefault(shards.name, LanePlanner())
                plan, refused = await asyncio.to_thread(_plan_what_fits, planner, held, classes)
                shards.planned(key, plan, refused)
                self._changes.wake()

    async def _await_lanes(self, wish: protocol.AwaitLanes) -> Message:
        shards = self._sharded(wish.channel)
        deadline = asyncio.get_running_loop().time() + wish.timeout_s
        while not shards.can_answer(wish.incarnation):
            self._check_kind(wish.channel, is_sharded=True)
            if not await self._changes.wait(deadline):
                return protocol.LanesPlanned("", (), (), shards.missing_ranks)
        await self._plan(shards)
        plan, mine = shards.lanes_of(wish.incarnation, wish.plan_id)
        all_lanes = tuple((lane.lane_id, lane.source) for lane in plan.lanes)
        return protocol.LanesPlanned(plan.plan_id, mine, all_lanes, (), shards.late_for(mine))

    async def _open_round(self, wish: protocol.OpenRound) -> Message:
        shards = self._sharded(wish.channel)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wish.timeout_s
        while shards.missing_ranks or loop.time() < self._quiet_until:
            if not await self._changes.wait(deadline):  # `_watch` wakes us when the quiet is over
                return protocol.RoundOpened(0, 0, "", shards.missing_ranks)
        shards.forget_deserted(loop.time())
        await self._plan(shards)
        lanes = lane_channel(wish.channel, "")
        known = max((c.highest for name, c in self._channels.items() if name.startswith(lanes)), default=0)
        opened = shards.open_round(wish, known_version=known)
        for lane_id in shards.retired_lanes(opened):
            retire = protocol.Retire(lane_channel(wish.channel, lane_id))
            self._send([(holder_id, retire) for holder_id in self._sessions])
            self._channels.pop(retire.channel, None)
            self._planner.forget(retire.channel)
        self._changes.wake()
        return protocol.RoundOpened(opened.version, opened.uid, opened.plan_id)

    async def _await_round(self, wish: protocol.AwaitRound) -> Message:
        shards = self._sharded(wish.channel)
        deadline = asyncio.get_running_loop().time() + wish.timeout_s
        while True:
            report = shards.report(wish.version, self.view)
            if report.error or not report.missing_ranks or not await self._changes.wait(deadline):
                return report

    async def _await_version(self, wish: protocol.AwaitVersion) -> Message:
        if wish.channel not in self._channels:
            raise ChannelError(
                f"there is no channel '{wish.channel}'",
                hint=f"known: {', '.join(sorted(self._channels)) or 'none'}",
                context=ErrorContext(channel=wish.channel),
            )
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wish.timeout_s
        while True:
            status = self._channels[wish.channel].status(wish.version, self.view, uid=wish.uid)
            verdict = is_reached(status, wish)
            if verdict is not None:
                return protocol.VersionReport(status, verdict)
            if not await self._changes.wait(deadline):
                return protocol.VersionReport(status, False)


def _plan_what_fits(
    planner: LanePlanner, held: Mapping[int, Holding], classes: Mapping[str, Holding]
) -> tuple[ShardPlan | None, dict[str, str]]:
    """The lanes for all classes that can be served, and why the others cannot. Refusing one does not stop the rest."""
    try:
        return planner.plan(held, classes), {}
    except WsyncError as exc:
        if len(classes) == 1:
            return planner.plan(held, {}), dict.fromkeys(classes, exc.problem)
    refused: dict[str, str] = {}
    for digest, holding in classes.items():
        try:
            plan_lanes(held, {digest: holding})
        except WsyncError as exc:
            refused[digest] = exc.problem
    return planner.plan(held, {d: h for d, h in classes.items() if d not in refused}), refused


def is_reached(status: VersionStatus, wish: protocol.AwaitVersion) -> bool | None:
    """Whether the wish has come true, cannot come true any more (False), or is still open (None)."""
    phases = {ReplicaPhase.COMMITTED} if wish.phase == "committed" else {ReplicaPhase.COMMITTED, ReplicaPhase.STAGED}
    num_there = status.count(*phases)
    num_failed = status.count(ReplicaPhase.FAILED)
    wanted = wish.num_replicas or max(1, len(status.replicas))
    if num_there >= wanted:
        return True
    if status.phase in (VersionPhase.SUPERSEDED, VersionPhase.ABORTED):
        return False
    if not wish.num_replicas and num_failed and num_there + num_failed >= len(status.replicas):
        return False
    return None


def listening_socket(listen: str, port: int = 0) -> socket.socket:
    """A listening tcp socket on that address only. Raises `ConfigError` when it cannot be had."""
    host = listen.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(256)
    except OSError as exc:
        sock.close()
        raise ConfigError(
            f"cannot listen on {listen}:{port} ({exc.strerror or exc})",
            hint="choose another port" if exc.errno == errno.EADDRINUSE else "set listen to an address of this machine",
        ) from exc
    return sock
