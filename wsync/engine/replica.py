"""The inference side: a `Replica` follows a channel and installs its versions in place, at step boundaries of yours.

The bytes are fetched and checked by the host's holder while inference goes on. The only work in this process is the
commit: one copy from the mapped slot into the live tensors, whose storages, pointers and strides never change.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from wsync.config import Config
from wsync.engine import protocol
from wsync.engine.link import GRACE_S, Closing, Link, Pinned
from wsync.engine.protocol import Message
from wsync.engine.session import checked_channel, default_member_id, find_holder
from wsync.engine.tensors import Tensors, live_tensors
from wsync.errors import (
    ChannelError,
    CommitError,
    ConfigError,
    ErrorContext,
    ManifestMismatch,
    PeerLost,
    StaleView,
    TransferTimeout,
    WsyncError,
)
from wsync.manifest import Lane, Manifest, Placement, check_agreement, lane_of
from wsync.memory import Slot

LATEST_GRACE_S = 0.5
"""`commit_latest` waits so long at most for its holder's word; a holder that takes longer is left and joined again."""


class Commit(msgspec.Struct, frozen=True):
    """One installed version. `pause_s` is how long the live tensors were being written."""

    version: int
    step: int
    pause_s: float
    nbytes: int


class Replica(Closing):
    """Follows one channel with the live tensors of `target`.

    `target` is an `nn.Module`, a state dict or a mapping of names to torch tensors or numpy arrays. Without `names` it
    must have exactly the channel's tensors; with `names` it follows only these. `auto_commit` installs a new version
    by itself right before a forward pass of the module begins (target must be an `nn.Module`).

    After the constructor has returned, this host receives the channel's versions, beginning with the newest. Raises
    ManifestMismatch naming every difference when the channel's tensors are known already, ConnectError when there is no
    coordinator. A replica is not ready to serve (`is_ready`) before its first commit.
    """

    def __init__(
        self,
        channel: str,
        target: Any,
        *,
        names: Sequence[str] | None = None,
        auto_commit: bool = False,
        member_id: str = "",
        config: Config | None = None,
    ) -> None:
        self.channel = checked_channel(channel)
        self.config = config or Config()
        self.member_id = member_id or default_member_id("replica")
        self._target, self._names = target, tuple(names) if names is not None else None
        self._incarnation = secrets.token_hex(8)
        self._version, self._floor = 0, 0
        self._is_torn = False
        self._is_closed = False
        self._steps: dict[int, tuple[int, str]] = {}
        self._manifests: dict[str, Manifest] = {}
        self._agreed: tuple[str, Manifest, Lane] | None = None
        self._lock = threading.RLock()
        self._hook: Any = None
        self._live = live_tensors(target, self._names, is_target=True)
        if auto_commit and not hasattr(target, "register_forward_pre_hook"):
            raise ConfigError("auto_commit needs an nn.Module, whose forward passes are its step boundaries")
        self._link = Link(
            lambda timeout_s: find_holder(self.config, timeout_s),
            lambda: protocol.AttachReplica(self.channel, self.member_id, self._incarnation, self._version),
            is_writer=False,
            join_timeout_s=self.config.join_timeout_s,
        )
        self._link.hand_back = self._hand_back
        self._link.on_attached = self._attached
        self._link.connect(time.monotonic() + self.config.join_timeout_s)
        try:
            for manifest in self._manifests.values():
                check_agreement(manifest, self._live.manifest, channel=channel, is_partial=self._names is not None)
        except ManifestMismatch:
            self._link.close()
            raise
        if auto_commit:
            self._hook = target.register_forward_pre_hook(lambda *_: self.commit_latest() and None)

    def _attached(self, reply: Message) -> None:
        assert isinstance(reply, protocol.Attached)
        if reply.manifest is not None:
            self._manifests = {reply.manifest.digest(): reply.manifest}

    def _hand_back(self, slot: Slot) -> Message | None:
        if slot.version not in self._steps:
            return None
        step, manifest_digest = self._steps[slot.version]
        manifest = self._manifests.get(manifest_digest)
        return protocol.HandBack(self.channel, step, manifest) if manifest is not None else None

    @property
    def version(self) -> int:
        """The version that the live tensors have, whole and in every tensor; 0 before the first commit."""
        return self._version

    @property
    def is_ready(self) -> bool:
        """Whether the replica may serve: it has committed a version, the last commit did not fail half-way, and the
        live tensors are still in the memory that it was written to. Weights that were released are not.
        """
        self._look()
        return self._version > 0 and not self._is_torn

    def _look(self) -> None:
        """Tensors that lie elsewhere than before do not have the version: it is to be installed again."""
        if not self._live.is_current(self._target):
            self._is_torn = self._is_torn or self._version > 0

    def commit_latest(self) -> Commit | None:
        """Install the newest version that is staged on this host; None when there is nothing newer.

        Call it between two steps of inference, from the thread that runs them. Either every tensor has the new version
        when this returns, or none has changed and it raises: ManifestMismatch, CommitError. Never waits for a transfer
        or for a holder: while this host's holder is being replaced it returns None.
        """
        if self._link.is_broken and not self._is_closed:
            self._link.rejoin_behind()
            return None
        try:
            commit = self._commit(self._next_version(), 0, timeout_s=0.0, grace_s=LATEST_GRACE_S)
            if commit is None and not self._is_torn:  # a commit looks for itself
                self._look()
                if self._is_torn:
                    commit = self._commit(self._next_version(), 0, timeout_s=0.0, grace_s=LATEST_GRACE_S)
            return commit
        except (PeerLost, StaleView, TransferTimeout):
            return None

    def wait_version(self, min_version: int = 1, *, timeout_s: float = 60.0) -> Commit:
        """Wait until `min_version` or newer is staged on this host, and install the newest.

        Returns at once when the live tensors have it already. Raises TransferTimeout naming the channel's state at the
        deadline, ChannelError when nobody publishes the channel.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if self._version >= min_version:
                self._look()
            if self._version >= min_version and not self._is_torn:
                return Commit(self._version, self._steps.get(self._version, (0, ""))[0], 0.0, 0)
            left = max(0.0, deadline - time.monotonic())
            try:
                commit = self._commit(max(self._next_version(), min_version), 0, timeout_s=left)
            except (PeerLost, StaleView):
                commit = None
            if commit is not None:
                return commit
            if time.monotonic() >= deadline:
                raise self._not_there(min_version, timeout_s)

    def _next_version(self) -> int:
        """The oldest version that is news. After a commit that failed half-way the present one is news too."""
        return max(1, self._version) if self._is_torn else self._floor + 1

    def _not_there(self, min_version: int, timeout_s: float) -> WsyncError:
        context = ErrorContext(channel=self.channel, version=min_version, phase="stage", elapsed_s=timeout_s)
        if not self._manifests:
            try:
                self._link.ask(protocol.GetManifest(self.channel, ""), timeout_s=1.0)
            except ChannelError as exc:
                return ChannelError(
                    f"nobody has published channel '{self.channel}'", hint=exc.hint or "check its name", context=context
                )
            except WsyncError as exc:
                return exc
        if self._version < min_version <= self._floor:
            return TransferTimeout(
                f"version {min_version} of '{self.channel}' was rolled back here (running {self._version}), and no "
                "newer one has come",
                hint=f"publish a newer one, or call rollback({min_version}) to install it again",
                context=context,
            )
        return TransferTimeout(
            f"version {min_version} of '{self.channel}' is not staged on this host (running {self._version})",
            hint="check that the trainer publishes and what Publication.status() says",
            context=context,
        )

    def rollback(self, version: int = 0) -> Commit:
        """Install a kept older version again (0: the one before the present). Newer ones than the present are followed.

        The version left behind is not installed again by `commit_latest`. Raises CommitError listing the kept
        versions when it is not on this host any more: its slot is reused when the version after next arrives.
        """
        if not version and self._version < 2:
            raise CommitError(
                f"a version before {self._version} is not kept on this host: there was none",
                context=ErrorContext(channel=self.channel, phase="rollback"),
            )
        with self._lock:
            newest = version or self._version - 1
            commit = self._commit(version or 1, newest, timeout_s=0.0) if newest > 0 else None
        if commit is None:
            raise CommitError(
                f"version {version or 'before ' + str(self._version)} is not kept on this host",
                hint="keep more versions with Config(num_slots=3) or higher",
                context=ErrorContext(channel=self.channel, version=version, phase="rollback"),
            )
        return commit

    def _commit(
        self, min_version: int, max_version: int, *, timeout_s: float, grace_s: float = GRACE_S
    ) -> Commit | None:
        held = self._lease(min_version, max_version, timeout_s=timeout_s, grace_s=grace_s)
        if held is None:
            return None
        holder, leased = held
        with self._lock:
            if not max_version and leased.version < self._next_version():  # another thread was faster
                self._release(holder, leased.version, is_committed=False, pause_s=0.0, error="")
                return None
            try:
                return self._install_and_release(holder, leased)
            except CommitError as exc:
                commit = self._reinstall(exc) if self._is_torn else None
                if commit is None:
                    raise
                return commit

    def _lease(
        self, min_version: int, max_version: int, *, timeout_s: float, grace_s: float = GRACE_S
    ) -> tuple[Pinned, protocol.VersionLeased] | None:
        """A lease on the newest whole version in the range, to be installed or released by the caller."""
        if self._is_closed:
            raise CommitError(f"this replica of '{self.channel}' is closed", hint="create a new Replica")
        wish = protocol.LeaseVersion(min_version, max_version, timeout_s)
        holder = self._link.pin(timeout_s=timeout_s + grace_s)
        leased = holder.ask(wish, timeout_s=timeout_s, grace_s=grace_s)
        assert isinstance(leased, protocol.VersionLeased)
        return (holder, leased) if leased.version else None

    def _install_and_release(self, holder: Pinned, leased: protocol.VersionLeased) -> Commit:
        try:
            commit = self._install(holder, leased)
        except PeerLost:
            raise
        except BaseException as exc:
            self._release(holder, leased.version, is_committed=False, pause_s=0.0, error=str(exc))
            raise
        self._release(holder, leased.version, is_committed=True, pause_s=commit.pause_s, error="")
        return commit

    def _reinstall(self, cause: CommitError) -> Commit | None:
        """The tensors are torn, so nothing can be served: take the newest version, from whichever holder is next."""
        deadline = time.monotonic() + self.config.join_timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                holder = self._link.pin(timeout_s=left)
                leased = holder.ask(protocol.LeaseVersion(self._next_version(), 0, left), timeout_s=left)
                assert isinstance(leased, protocol.VersionLeased)
                return self._install_and_release(holder, leased) if leased.version else None
            except (PeerLost, StaleView):
                continue
            except WsyncError as exc:
                cause.add_note(f"and no other version could be installed: {exc}")
                return None
        return None

    def _install(self, holder: Pinned, leased: protocol.VersionLeased) -> Commit:
        live = self._current()
        lane = self._agree(leased.manifest_digest, live.manifest)
        slot = holder.slot(leased.slot_id, timeout_s=10.0)
        self._check_slot(slot, leased.version)
        started = time.monotonic()
        self._is_torn = True  # until every tensor is written
        try:
            live.install(slot, lane)
            # A holder that died has forgotten our lease, and its successor may have given the slot to another version.
            self._check_slot(slot, leased.version)
        except BaseException as exc:
            self._restore(live, exc, leased.version)
            raise CommitError(
                f"version {leased.version} could not be installed: {exc}",
                hint="the former version is in place" if not self._is_torn else "commit another version before serving",
                context=ErrorContext(channel=self.channel, version=leased.version, phase="commit"),
            ) from exc
        self._is_torn = False
        pause_s = time.monotonic() - started
        self._version = leased.version
        self._floor = max(self._floor, leased.version)
        self._steps[leased.version] = (leased.step, leased.manifest_digest)
        self._steps = {v: s for v, s in self._steps.items() if v in leased.kept or v == leased.version}
        return Commit(leased.version, leased.step, pause_s, lane.nbytes)

    def _check_slot(self, slot: Slot, version: int) -> None:
        if slot.version != version or not slot.is_sealed:
            raise CommitError(
                f"the slot of version {version} has gone to version {slot.version}",
                context=ErrorContext(channel=self.channel, version=version, phase="commit"),
            )

    def _current(self) -> Tensors:
        former = self._live
        try:
            self._live = live_tensors(self._target, self._names, is_target=True, former=former)
        except WsyncError:
            self._is_torn = self._is_torn or self._version > 0
            raise
        self._is_torn = self._is_torn or (self._live is not former and self._version > 0)
        return self._live

    def _restore(self, live: Tensors, cause: BaseException, failed_version: int) -> None:
        """A commit failed half-way: put the former version back from its slot, if this host still has it."""
        if not self._version or self._version == failed_version:
            return
        try:
            holder = self._link.pin(timeout_s=GRACE_S)
            leased = holder.ask(protocol.LeaseVersion(self._version, self._version, 0.0), timeout_s=0.0)
            assert isinstance(leased, protocol.VersionLeased)
            if leased.version == self._version:
                lane = self._agree(leased.manifest_digest, live.manifest)  # of that version, which may lie otherwise
                slot = holder.slot(leased.slot_id, timeout_s=10.0)
                self._check_slot(slot, leased.version)
                live.install(slot, lane)
                self._check_slot(slot, leased.version)
                self._is_torn = False
                self._release(holder, leased.version, is_committed=False, pause_s=0.0, error="")
        except Exception as exc:
            cause.add_note(f"the former version could not be restored either: {exc}")

    def _agree(self, manifest_digest: str, ours: Manifest) -> Lane:
        """The channel's lane with a placement for each of our tensors, in our order. Raises ManifestMismatch."""
        if self._agreed is not None and self._agreed[0] == manifest_digest and self._agreed[1] == ours:
            return self._agreed[2]
        theirs = self._manifests.get(manifest_digest)
        if theirs is None:
            reply = self._link.ask(protocol.GetManifest(self.channel, manifest_digest), timeout_s=30.0)
            assert isinstance(reply, protocol.ManifestFound)
            theirs = reply.manifest
            self._manifests = {manifest_digest: theirs}
        check_agreement(theirs, ours, channel=self.channel, is_partial=self._names is not None)
        places = {place.name: place for place in lane_of(theirs).placements}
        lane = Lane(tuple(places[spec.name] for spec in ours.tensors), lane_of(theirs).nbytes)
        self._agreed = (manifest_digest, ours, lane)
        return lane

    def _release(self, holder: Pinned, version: int, *, is_committed: bool, pause_s: float, error: str) -> None:
        try:
            holder.ask(protocol.ReleaseVersion(version, is_committed, pause_s, error), timeout_s=5.0)
        except (PeerLost, TransferTimeout):
            pass  # the holder has gone and the lease with it; the next one learns our version when we attach

    def digests(self) -> dict[str, int]:
        """xxh3-64 of every live tensor's bytes in logical order, by name."""
        live = self._current()
        return dict(zip((spec.name for spec in live.manifest.tensors), live.digests(), strict=True))

    def verify(self, *, timeout_s: float = 60.0) -> list[str]:
        """Names of the live tensors that differ from the version that this replica runs; empty when all are equal.

        Compares with the bytes in this host's slot, whose digests were checked against the trainer's. Raises
        ChannelError when the version is not on this host any more, TransferTimeout when its holder does not answer.
        """
        with self._lock:
            live = self._current()
            lane = self._agree(self._steps[self._version][1] if self._version else "", live.manifest)
            places: Sequence[Placement] = lane.placements
            ranges = tuple((place.offset, place.nbytes) for place in places)
            reply = self._link.ask(protocol.HashRanges(self._version, ranges), timeout_s=timeout_s)
            assert isinstance(reply, protocol.RangeHashes)
            return [
                place.name
                for place, theirs, ours in zip(places, reply.hashes, live.digests(), strict=True)
                if theirs != ours
            ]

    def close(self) -> None:
        """Leave the channel; the live tensors stay as they are. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._hook is not None:
                self._hook.remove()
                self._hook = None
            self._link.close()
