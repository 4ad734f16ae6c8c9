"""The trainer's side: `Publisher.publish` takes a snapshot of the live tensors and returns.

One copy in this process, a few small messages, no thread. Everything else happens in the host's holder.
"""

from __future__ import annotations

import operator
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from wsync.config import Config
from wsync.engine import protocol
from wsync.engine.link import Closing, Link, Pinned
from wsync.engine.protocol import Message, OnBusy, WaitPhase
from wsync.engine.session import checked_channel, default_member_id, find_holder
from wsync.engine.tensors import Tensors, live_tensors
from wsync.errors import (
    CommitError,
    ConfigError,
    ErrorContext,
    ManifestMismatch,
    MembershipError,
    PeerLost,
    PublishError,
    StaleView,
    TransferTimeout,
)
from wsync.manifest import Manifest, lane_of
from wsync.memory import Slot
from wsync.status import ReplicaPhase, VersionPhase, VersionStatus


class Publisher(Closing):
    """Publishes the versions of one channel. One publisher per channel at a time.

    `source` is an `nn.Module`, a state dict, or any mapping of names to torch tensors or numpy arrays; it is read anew
    at every `publish`, and must keep its names, shapes and dtypes. `names` restricts it to a declared part.
    `on_busy` says what `publish` does while an earlier version is still on its way: `supersede` packs the new one,
    which is sent next (of those that wait only the newest is sent), `wait` waits for it, `skip` publishes nothing.
    `wire_dtypes` names the tensors that are cast while they are packed, and to what.

    After the constructor has returned, the channel is known to the coordinator and this host has its slots. Raises
    ChannelError when another publisher of the channel lives, ArenaError when memory is lacking, ManifestMismatch for
    tensors that cannot be published, ConnectError when there is no coordinator.
    """

    def __init__(
        self,
        channel: str,
        source: Any,
        *,
        names: Sequence[str] | None = None,
        on_busy: OnBusy = "supersede",
        wire_dtypes: Mapping[str, str] | None = None,
        member_id: str = "",
        config: Config | None = None,
    ) -> None:
        self.channel = checked_channel(channel)
        if on_busy not in ("wait", "skip", "supersede"):
            raise ConfigError(f"on_busy must be wait, skip or supersede, not {on_busy!r}")
        self.config = config or Config()
        self.member_id = member_id or default_member_id("trainer")
        self._source, self._names, self._on_busy, self._wire_dtypes = source, names, on_busy, wire_dtypes
        self._live = live_tensors(source, names, is_target=False, wire_dtypes=wire_dtypes)
        self._manifest: Manifest = self._live.manifest
        self._lane = lane_of(self._manifest)
        self._incarnation = secrets.token_hex(8)
        self._last_version = 0
        self._sent: dict[int, tuple[int, int]] = {}
        """Step and uid of the last versions."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._link = Link(
            lambda timeout_s: find_holder(self.config, timeout_s),
            self._attach,
            is_writer=True,
            join_timeout_s=self.config.join_timeout_s,
        )
        self._link.hand_back = self._hand_back
        self._link.on_attached = self._attached
        self._link.connect(time.monotonic() + self.config.join_timeout_s)

    def _attach(self) -> Message:
        return protocol.AttachTrainer(
            self.channel,
            self.member_id,
            self._incarnation,
            self._manifest,
            self._last_version,
            max(self._sent, default=0),
        )

    def _attached(self, reply: Message) -> None:
        assert isinstance(reply, protocol.Attached)
        self._last_version = max(self._last_version, reply.highest_version)

    def _hand_back(self, slot: Slot) -> Message | None:
        step, uid = self._sent.get(slot.version, (0, 0))
        return protocol.HandBack(self.channel, step, self._manifest) if uid and uid == slot.uid else None

    @property
    def last_version(self) -> int:
        """The newest version of the channel that this publisher knows of; 0 before the first."""
        return self._last_version

    def publish(self, step: int, *, timeout_s: float = 60.0, version: int = 0, uid: int = 0) -> Publication:
        """Snapshot the live tensors as the next version. When this returns, training may change them.

        `step` is a label of yours, an integer that travels with the version. Where others share the version, `version`
        is its number (newer than all before; by default the next one) and `uid` what tells it from another of the same
        number (by default a new one).

        The bytes are then in a slot of this host's holder, which digests and sends them. A holder that dies meanwhile
        is replaced and the snapshot is taken again. Raises ManifestMismatch when the tensors are not those of the
        channel any more, TransferTimeout naming the readers when no slot becomes free, PublishError after `close`.
        """
        try:
            step = operator.index(step)
        except TypeError:
            raise ConfigError(f"step must be an integer, not {step!r}", hint="it is a label of yours") from None
        if not -(2**63) <= step < 2**63:
            raise ConfigError(f"step must fit into 64 bits, not {step}")
        with self._lock:
            if self._is_closed:
                raise PublishError(
                    f"the publisher of '{self.channel}' is closed",
                    hint="create a new Publisher",
                    context=ErrorContext(channel=self.channel, phase="publish"),
                )
            started = time.monotonic()
            deadline = started + timeout_s
            live = live_tensors(
                self._source, self._names, is_target=False, former=self._live, wire_dtypes=self._wire_dtypes
            )
            self._check_unchanged(live.manifest)
            self._live = live
            while True:
                holder = self._link.pin(timeout_s=max(0.1, deadline - time.monotonic()))
                try:
                    left = max(0.0, deadline - time.monotonic())
                    version, uid, nbytes = self._snapshot(holder, live, step, version, uid, left)
                    break
                except (PeerLost, StaleView):
                    if time.monotonic() >= deadline or not holder.is_broken:
                        raise
            if version:
                self._last_version = version
                self._sent = {v: s for v, s in self._sent.items() if v > version - 8} | {version: (step, uid)}
            return Publication(self, version, uid, step, time.monotonic() - started, nbytes)

    def _snapshot(
        self, holder: Pinned, live: Tensors, step: int, wanted_version: int, wanted_uid: int, timeout_s: float
    ) -> tuple[int, int, int]:
        """Version (0: skipped), uid and bytes of what is packed now."""
        wish = protocol.ReserveSlot(step, self._on_busy, timeout_s, wanted_version, wanted_uid)
        reply = holder.ask(wish, timeout_s=timeout_s)
        assert isinstance(reply, protocol.SlotReserved)
        version = reply.version
        if not version:
            return 0, 0, 0
        slot = holder.slot(reply.slot_id, timeout_s=10.0)
        if slot.version != version or slot.is_sealed:
            raise StaleView(
                f"the slot for version {version} holds version {slot.version}",
                context=ErrorContext(channel=self.channel, version=version, phase="publish"),
            )
        live.pack(slot, self._lane, lambda nbytes: holder.tell(protocol.PackedTo(version, nbytes)))
        holder.ask(protocol.Packed(version), timeout_s=10.0)
        return version, slot.uid, self._lane.nbytes

    def _check_unchanged(self, manifest: Manifest) -> None:
        if manifest == self._manifest:
            return
        then = {spec.name: spec for spec in self._manifest.tensors}
        now = {spec.name: spec for spec in manifest.tensors}
        changes = [f"{name} is gone" for name in then if name not in now]
        changes += [f"{name} is new" for name in now if name not in then]
        changes += [
            f"{name} was {list(spec.shape)} {spec.dtype} and is {list(now[name].shape)} {now[name].dtype}"
            for name, spec in then.items()
            if name in now and (now[name].shape, now[name].dtype) != (spec.shape, spec.dtype)
        ]
        raise ManifestMismatch(
            f"the tensors are not those that this publisher began with: "
            f"{', '.join(changes[:10]) or 'their order or ties have changed'}",
            hint="offloaded or partitioned parameters must be whole while publishing; for other tensors, close this "
            "publisher and create a new one",
            context=ErrorContext(channel=self.channel, phase="publish"),
        )

    def digests(self, version: int) -> dict[str, int]:
        """xxh3-64 of every tensor of a version that this host still has, by name, as `Replica.digests` gives."""
        lane = self._lane
        ranges = tuple((place.offset, place.nbytes) for place in lane.placements)
        _, uid = self._sent.get(version, (0, 0))
        reply = self._link.ask(protocol.HashRanges(version, uid, ranges), timeout_s=60.0)
        assert isinstance(reply, protocol.RangeHashes)
        return {place.name: value for place, value in zip(lane.placements, reply.hashes, strict=True)}

    def _await(self, wish: protocol.AwaitVersion) -> protocol.VersionReport:
        deadline = time.monotonic() + wish.timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                reply = self._link.ask(
                    msgspec.structs.replace(wish, timeout_s=left),
                    timeout_s=left + 2.0,
                )
            except PeerLost:
                if time.monotonic() >= deadline:
                    raise
                continue
            assert isinstance(reply, protocol.VersionReport)
            return reply

    def close(self) -> None:
        """Leave. Versions that are packed stay with the holder and go on to the replicas. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._link.close()


class Publication:
    """One published version. `version` is 0 and `is_skipped` true when `on_busy="skip"` published nothing.

    `pause_s` is how long `publish` held the trainer, `nbytes` the bytes of the snapshot.
    """

    def __init__(self, publisher: Publisher, version: int, uid: int, step: int, pause_s: float, nbytes: int) -> None:
        self.version, self.step, self.pause_s, self.nbytes = version, step, pause_s, nbytes
        self._publisher, self._uid = publisher, uid

    def __repr__(self) -> str:
        return (
            f"Publication(version={self.version}, step={self.step}, nbytes={self.nbytes}, pause_s={self.pause_s:.3g})"
        )

    @property
    def is_skipped(self) -> bool:
        return self.version == 0

    def status(self) -> VersionStatus:
        """What the coordinator knows of this version now."""
        return self._report("staged", num_replicas=0, timeout_s=0.0).status

    def wait_staged(self, timeout_s: float = 60.0, *, num_replicas: int = 0) -> VersionStatus:
        """Until the version is whole on the hosts of `num_replicas` replicas (0: of all, at least one)."""
        return self._wait("staged", timeout_s, num_replicas)

    def wait_committed(self, timeout_s: float = 60.0, *, num_replicas: int = 0) -> VersionStatus:
        """Until `num_replicas` replicas (0: all, at least one) run this version or a newer one.

        Raises TransferTimeout naming the replicas that lack it, MembershipError when there are fewer replicas than
        asked for, CommitError when a replica could not install it, PublishError when it was superseded or aborted.
        """
        return self._wait("committed", timeout_s, num_replicas)

    def _report(self, phase: WaitPhase, *, num_replicas: int, timeout_s: float) -> protocol.VersionReport:
        if self.is_skipped:
            raise PublishError("this publication was skipped: an earlier version was still on its way")
        return self._publisher._await(
            protocol.AwaitVersion(self._publisher.channel, self.version, self._uid, phase, num_replicas, timeout_s)
        )

    def _wait(self, phase: WaitPhase, timeout_s: float, num_replicas: int) -> VersionStatus:
        started = time.monotonic()
        report = self._report(phase, num_replicas=num_replicas, timeout_s=timeout_s)
        status = report.status
        if report.is_reached:
            return status
        there = status.describe_replicas()
        missing = [r for r in status.replicas if r.phase is not ReplicaPhase.COMMITTED]
        context = ErrorContext(
            channel=status.channel,
            version=self.version,
            phase=phase,
            peers=tuple(replica.member_id for replica in missing),
            elapsed_s=time.monotonic() - started,
        )
        if status.phase in (VersionPhase.SUPERSEDED, VersionPhase.ABORTED):
            raise PublishError(f"version {self.version} is {status.phase}: {status.error}", context=context)
        if len(status.replicas) < (num_replicas or 1):
            raise MembershipError(
                f"expected {num_replicas or 1} replicas, present {len(status.replicas)}: {there}",
                hint="start the missing replicas, or ask for fewer",
                context=context,
            )
        failed = [f"{r.member_id}: {r.error}" for r in status.replicas if r.phase is ReplicaPhase.FAILED]
        if failed:
            raise CommitError(f"version {self.version} could not be installed: {'; '.join(failed)}", context=context)
        raise TransferTimeout(
            f"version {self.version} is not {phase} everywhere: {there}",
            hint="a staged replica commits when it calls commit_latest()",
            context=context,
        )
