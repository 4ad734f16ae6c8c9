"""The inference side: a `Replica` follows a channel and installs its versions in place, at step boundaries of yours.

The bytes are fetched and checked by the host's holder while inference goes on. The only work in this process is the
commit: one copy from the mapped slot into the live tensors, whose storages, pointers and strides never change.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from wsync.config import Config
from wsync.engine import protocol
from wsync.engine.link import GRACE_S, WARN_AFTER_S, Closing, Link, Pinned
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

logger = logging.getLogger("wsync")

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
        self._version, self._uid, self._floor = 0, 0, 0
        self._is_torn = False
        """Not every tensor has the version. Changed by commits only, under the lock."""
        self._has_moved = False
        """The tensors were seen elsewhere than where the version was written. A commit forgets it before it looks."""
        self._is_closed = False
        self._installed: dict[int, protocol.VersionLeased] = {}
        self._manifests: dict[str, Manifest] = {}
        self._agreed: tuple[str, Manifest, Lane] | None = None
        self._lock = threading.RLock()
        self._hook: Any = None
        self._live = live_tensors(target, self._names, is_target=True)
        if auto_commit and not hasattr(target, "register_forward_pre_hook"):
            raise ConfigError("auto_commit needs an nn.Module, whose forward passes are its step boundaries")
        self._link = Link(
            lambda timeout_s: find_holder(self.config, timeout_s),
            lambda: protocol.AttachReplica(self.channel, self.member_id, self._incarnation, self._version, self._uid),
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
        leased = self._installed.get(slot.version)
        if leased is None or leased.uid != slot.uid:
            return None
        manifest = self._manifests.get(leased.manifest_digest)
        return protocol.HandBack(self.channel, leased.step, manifest) if manifest is not None else None

    @property
    def version(self) -> int:
        """The version that the live tensors have, whole and in every tensor; 0 before the first commit."""
        return self._version

    @property
    def is_ready(self) -> bool:
        """Whether the replica may serve: it has committed a version, the last commit did not fail half-way, and the
        live tensors are still in the memory that it was written to. Weights that were released are not. May be asked
        from any thread; never waits.
        """
        return self._version > 0 and not self._is_lost()

    def _is_lost(self) -> bool:
        """Whether the live tensors do not have the version, which is then to be installed again."""
        if not self._live.is_current(self._target):
            self._has_moved = True
        return self._is_torn or self._has_moved

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
            commit = self._commit(self._news(0.0), grace_s=LATEST_GRACE_S)
            if commit is None and self._is_lost():  # a commit looks for itself
                commit = self._commit(self._news(0.0), grace_s=LATEST_GRACE_S)
            return commit
        except (PeerLost, StaleView, TransferTimeout):
            return None

    def wait_version(self, min_version: int = 1, *, timeout_s: float = 60.0) -> Commit:
        """Wait until `min_version` or newer is staged on this host, and install the newest.

        Returns at once when the live tensors have it already. Raises TransferTimeout naming the channel's state at the
        deadline, ChannelError when nobody publishes the channel.
        """
        deadline = time.monotonic() + timeout_s
        warn_at = time.monotonic() + WARN_AFTER_S
        while True:
            version = self._version
            if version >= min_version and not self._is_lost():
                installed = self._installed.get(version)
                return Commit(version, installed.step if installed is not None else 0, 0.0, 0)
            now = time.monotonic()
            try:
                commit = self._commit(self._news(max(0.0, min(deadline, warn_at) - now), min_version))
            except (PeerLost, StaleView):
                commit = None
            if commit is not None:
                return commit
            now = time.monotonic()
            if now >= deadline:
                raise self._not_there(min_version, timeout_s)
            if now >= warn_at:
                warn_at = deadline
                text = "%s waits for version %d of '%s', for %.0f s more"
                logger.warning(text, self.member_id, min_version, self.channel, deadline - now)

    def _news(self, timeout_s: float, min_version: int = 1) -> protocol.LeaseVersion:
        """The wish for a version that is news: newer than all so far, or of the present number if the tensors have lost
        it, or if another run of the job gave it.
        """
        present = self._version if self._version >= min_version else 0
        intact = 0 if self._is_torn or self._has_moved else self._uid
        return protocol.LeaseVersion(max(self._floor + 1, min_version), 0, timeout_s, present, intact)

    def _is_news(self, leased: protocol.VersionLeased) -> bool:
        is_intact = leased.uid == self._uid and not (self._is_torn or self._has_moved)
        return leased.version > self._floor or (leased.version == self._version and not is_intact)

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
            commit = self._commit(protocol.LeaseVersion(version or 1, newest, 0.0)) if newest > 0 else None
        if commit is None:
            raise CommitError(
                f"version {version or 'before ' + str(self._version)} is not kept on this host",
                hint="keep more versions with Config(num_slots=3) or higher",
                context=ErrorContext(channel=self.channel, version=version, phase="rollback"),
            )
        return commit

    def _commit(self, wish: protocol.LeaseVersion, *, grace_s: float = GRACE_S) -> Commit | None:
        try:
            return self._commit_leased(wish, grace_s=grace_s)
        except Exception:
            raise
        except BaseException:  # interrupted, maybe with a lease in no variable: the holder drops what it gave to us
            self._link.give_up()
            raise

    def _commit_leased(self, wish: protocol.LeaseVersion, *, grace_s: float) -> Commit | None:
        held = self._lease(wish, grace_s=grace_s)
        if held is None:
            return None
        holder, leased = held
        with self._lock:
            if not wish.max_version and not self._is_news(leased):  # another thread was faster
                self._release(holder, leased, is_committed=False, pause_s=0.0, error="")
                return None
            try:
                return self._install_and_release(holder, leased)
            except CommitError as exc:
                commit = self._reinstall(exc) if self._is_torn else None
                if commit is None:
                    raise
                return commit

    def _lease(
        self, wish: protocol.LeaseVersion, *, grace_s: float = GRACE_S
    ) -> tuple[Pinned, protocol.VersionLeased] | None:
        """A lease on a whole version, to be installed or released by the caller."""
        if self._is_closed:
            raise CommitError(f"this replica of '{self.channel}' is closed", hint="create a new Replica")
        holder = self._link.pin(timeout_s=wish.timeout_s + grace_s)
        leased = holder.ask(wish, timeout_s=wish.timeout_s, grace_s=grace_s)
        assert isinstance(leased, protocol.VersionLeased)
        return (holder, leased) if leased.version else None

    def _install_and_release(self, holder: Pinned, leased: protocol.VersionLeased) -> Commit:
        try:
            commit = self._install(holder, leased)
        except PeerLost:
            raise
        except BaseException as exc:
            self._release(holder, leased, is_committed=False, pause_s=0.0, error=str(exc))
            raise
        self._release(holder, leased, is_committed=True, pause_s=commit.pause_s, error="")
        return commit

    def _reinstall(self, cause: CommitError) -> Commit | None:
        """The tensors are torn, so nothing can be served: take the newest version, from whichever holder is next."""
        deadline = time.monotonic() + self.config.join_timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                held = self._lease(self._news(left))
                return self._install_and_release(*held) if held is not None else None
            except (PeerLost, StaleView):
                continue
            except WsyncError as exc:
                cause.add_note(f"and no other version could be installed: {exc}")
                return None
        return None

    def _install(self, holder: Pinned, leased: protocol.VersionLeased) -> Commit:
        former, was_lost = self._live, self._is_torn or self._has_moved
        self._is_torn = True  # until every tensor is written, or it is known that none was touched
        self._has_moved = False  # who sees them elsewhere from now on is right, whatever is written here
        try:
            live = self._current()
            lane = self._agree(leased.manifest_digest, live.manifest)
            slot = holder.slot(leased.slot_id, timeout_s=10.0)
            self._check_slot(slot, leased)
        except Exception:
            self._is_torn = was_lost or self._live is not former
            raise
        started = time.monotonic()
        try:
            live.install(slot, lane)
            # A holder that died has forgotten our lease, and its successor may have given the slot to another version.
            self._check_slot(slot, leased)
        except BaseException as exc:
            self._restore(live, exc, leased)
            raise CommitError(
                f"version {leased.version} could not be installed: {exc}",
                hint="the former version is in place" if not self._is_torn else "commit another version before serving",
                context=ErrorContext(channel=self.channel, version=leased.version, phase="commit"),
            ) from exc
        pause_s = time.monotonic() - started
        self._installed[leased.version] = leased
        self._installed = {v: it for v, it in self._installed.items() if v in leased.kept or v == leased.version}
        self._version, self._uid = leased.version, leased.uid
        self._floor = max(self._floor, leased.version)
        self._is_torn = False  # last: an interrupt before leaves a replica that is not ready
        return Commit(leased.version, leased.step, pause_s, lane.nbytes)

    def _check_slot(self, slot: Slot, leased: protocol.VersionLeased) -> None:
        if (slot.version, slot.uid) != (leased.version, leased.uid) or not slot.is_sealed:
            raise CommitError(
                f"the slot of version {leased.version} has gone to version {slot.version}",
                context=ErrorContext(channel=self.channel, version=leased.version, phase="commit"),
            )

    def _current(self) -> Tensors:
        """The live tensors as they are now. Called under the lock."""
        try:
            self._live = live_tensors(self._target, self._names, is_target=True, former=self._live)
        except WsyncError:
            self._has_moved = True
            raise
        return self._live

    def _look(self) -> Tensors:
        """As `_current`, where nothing is installed into them."""
        self._is_lost()
        former, live = self._live, self._current()
        self._has_moved = self._has_moved or live is not former
        return live

    def _restore(self, live: Tensors, cause: BaseException, failed: protocol.VersionLeased) -> None:
        """A commit failed half-way: put the former version back from its slot, if this host still has it."""
        if not self._version or (self._version, self._uid) == (failed.version, failed.uid):
            return
        try:
            held = self._lease(protocol.LeaseVersion(self._version, self._version, 0.0))
            if held is None:
                return
            holder, leased = held
            try:
                if (leased.version, leased.uid) == (self._version, self._uid):
                    lane = self._agree(
                        leased.manifest_digest, live.manifest
                    )  # of that version, which may lie otherwise
                    slot = holder.slot(leased.slot_id, timeout_s=10.0)
                    self._check_slot(slot, leased)
                    live.install(slot, lane)
                    self._check_slot(slot, leased)
                    self._is_torn = False
            finally:
                self._release(holder, leased, is_committed=False, pause_s=0.0, error="")
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

    def _release(
        self, holder: Pinned, leased: protocol.VersionLeased, *, is_committed: bool, pause_s: float, error: str
    ) -> None:
        try:
            holder.ask(protocol.ReleaseVersion(leased.version, leased.uid, is_committed, pause_s, error), timeout_s=5.0)
        except (PeerLost, TransferTimeout):
            pass  # the holder has gone and the lease with it; the next one learns our version when we attach

    def digests(self) -> dict[str, int]:
        """xxh3-64 of every live tensor's bytes in logical order, by name."""
        with self._lock:
            live = self._look()
        return dict(zip((spec.name for spec in live.manifest.tensors), live.digests(), strict=True))

    def verify(self, *, timeout_s: float = 60.0) -> list[str]:
        """Names of the live tensors that differ from the version that this replica runs; empty when all are equal.

        Compares with the bytes in this host's slot, whose digests were checked against the trainer's. Raises
        ChannelError when the version is not on this host any more, TransferTimeout when its holder does not answer.
        """
        with self._lock:
            live = self._look()
            installed = self._installed.get(self._version)
            lane = self._agree(installed.manifest_digest if installed is not None else "", live.manifest)
            places: Sequence[Placement] = lane.placements
            ranges = tuple((place.offset, place.nbytes) for place in places)
            reply = self._link.ask(protocol.HashRanges(self._version, self._uid, ranges), timeout_s=timeout_s)
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
