"""The slots of one channel on one host: which version lies where, who reads it, and which slot the next one gets.

Invariants:
- the newest whole version is never overwritten, except an unsent one by its own trainer (newest wins);
- a slot is reused only when no lease is left; a lease ends when it is released or its member's connection closes,
  never because time has passed;
- before a slot is reused, every transport has confirmed that nobody reads it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import xxhash

from wsync.config import DEFAULT_CHUNK_NBYTES, Config
from wsync.engine.changes import Changes
from wsync.engine.protocol import SlotReport
from wsync.errors import ErrorContext, TransferTimeout
from wsync.memory import Slot, check_room
from wsync.transports.base import Transport

logger = logging.getLogger("wsync")
_slot_ids = itertools.count(secrets.randbits(40))  # no two holders use the same
WITHDRAW_TIMEOUT_S = 10.0


class SlotPhase(StrEnum):
    FREE = "free"
    PACKING = "packing"
    PULLING = "pulling"
    WHOLE = "whole"
    VACATING = "vacating"  # the transports let go of it
    BLOCKED = "blocked"  # nobody gets it any more, but somebody still reads it; emptied before it is reused


_FILLED = (SlotPhase.PACKING, SlotPhase.PULLING, SlotPhase.WHOLE)


@dataclass(eq=False)
class HeldSlot:
    """A slot and what the holder knows of the version in it."""

    slot: Slot
    slot_id: int = field(default_factory=lambda: next(_slot_ids))
    phase: SlotPhase = SlotPhase.FREE
    version: int = 0
    uid: int = 0
    chunk_nbytes: int = 0
    """Of the version; the slot itself is cut anew when it begins."""
    step: int = 0
    manifest_digest: str = ""
    is_origin: bool = False
    is_flying: bool = False
    """Its transfer to the other hosts has begun and not ended."""
    has_flown: bool = False
    lessees: list[str] = field(default_factory=list)

    @property
    def is_filled(self) -> bool:
        """It holds a version, or receives one."""
        return self.phase in _FILLED

    @property
    def is_unsent(self) -> bool:
        """A version of this host's trainer whose transfer has not begun."""
        return self.is_origin and not self.is_flying and not self.has_flown

    def report(self) -> SlotReport:
        is_whole = self.phase is SlotPhase.WHOLE
        return SlotReport(
            version=self.version,
            uid=self.uid,
            step=self.step,
            nbytes=self.slot.nbytes,
            chunk_nbytes=self.slot.chunk_nbytes,
            manifest_digest=self.manifest_digest,
            is_origin=self.is_origin,
            is_whole=is_whole,
            digests=tuple(self.slot.digests) if is_whole else (),
        )


class Staging:
    """All slots of a channel on this host. Used from the holder's event loop only."""

    def __init__(self, channel: str, config: Config, transports: Iterable[Transport]) -> None:
        self.channel = channel
        self.slots: list[HeldSlot] = []
        self.highest = 0
        """The newest version of the channel that this host has heard of."""
        self.chunk_nbytes = config.chunk_nbytes or DEFAULT_CHUNK_NBYTES
        """For the next version of this host's trainer."""
        self._config = config
        self._transports = list(transports)
        self._lock = asyncio.Lock()
        self.changes = Changes()

    def key(self, version: int, uid: int) -> str:
        """Under which a version of this channel is offered and read."""
        return f"{self.channel}@{version}.{uid:x}"

    def channel_key(self, manifest_digest: str) -> int:
        return int(xxhash.xxh3_64_intdigest(f"{self.channel}\0{manifest_digest}".encode()))

    def find(self, version: int, uid: int) -> HeldSlot | None:
        return next((h for h in self.slots if (h.version, h.uid) == (version, uid) and h.is_filled), None)

    def whole_versions(self) -> list[int]:
        return sorted(h.version for h in self.slots if h.phase is SlotPhase.WHOLE)

    def newest(self, min_version: int, max_version: int) -> HeldSlot | None:
        """The newest whole version in the range (`max_version` 0: no upper end)."""
        fitting = [
            h
            for h in self.slots
            if h.phase is SlotPhase.WHOLE and h.version >= min_version and (not max_version or h.version <= max_version)
        ]
        return max(fitting, key=lambda h: h.version, default=None)

    @property
    def is_flying(self) -> bool:
        """A version of this host's trainer is on its way to other hosts."""
        return any(held.is_flying for held in self.slots)

    def check_room(self, nbytes: int, chunk_nbytes: int) -> None:
        """Raise ArenaError at once when the slots that are missing do not fit; reserving them takes seconds."""
        fitting = [held for held in self.slots if held.slot.fits(nbytes, chunk_nbytes)]
        num_missing = max(0, self._config.num_slots - len(fitting))
        check_room(nbytes, chunk_nbytes, num_slots=num_missing, arena=self._config.arena)

    async def provide(self, nbytes: int, chunk_nbytes: int) -> None:
        """Reserve what is missing of this channel's slots now: no update pays for page faults. Raises ArenaError."""
        async with self._lock:
            await self._drop_unfit(nbytes, chunk_nbytes)
            while len(self.slots) < self._config.num_slots:
                slot = await self._reserve(nbytes, chunk_nbytes)
                if len(self.slots) < self._config.num_slots:  # one may have been adopted meanwhile
                    self.slots.append(HeldSlot(slot))
                else:
                    slot.close()

    async def _reserve(self, nbytes: int, chunk_nbytes: int) -> Slot:
        reserving = asyncio.ensure_future(
            asyncio.to_thread(Slot.reserve, nbytes, chunk_nbytes, arena=self._config.arena)
        )
        try:
            return await asyncio.shield(reserving)
        except asyncio.CancelledError:  # whoever asked has left; the thread cannot be stopped
            reserving.add_done_callback(_close_reserved)
            raise

    async def take(
        self, version: int, uid: int, nbytes: int, chunk_nbytes: int, phase: SlotPhase, timeout_s: float
    ) -> HeldSlot:
        """A slot that now belongs to `version`, empty. Raises ArenaError, TransferTimeout naming the readers.

        The time-out is for slots in use; reserving new ones takes as long as it takes.
        """
        await self.provide(nbytes, chunk_nbytes)
        async with self._lock:
            deadline = asyncio.get_running_loop().time() + timeout_s
            while True:
                await self._drop_unfit(nbytes, chunk_nbytes)
                held = self._choose(nbytes, chunk_nbytes)
                if held is not None:
                    break
                if not await self.changes.wait(deadline):
                    raise self._nothing_free(version, timeout_s)
            await self._vacate(held)
            held.phase, held.version, held.uid, held.chunk_nbytes = phase, version, uid, chunk_nbytes
            held.is_origin, held.is_flying, held.has_flown = phase is SlotPhase.PACKING, False, False
            return held

    def _choose(self, nbytes: int, chunk_nbytes: int) -> HeldSlot | None:
        newest = self.newest(0, 0)
        candidates = [
            held
            for held in self.slots
            if held.slot.fits(nbytes, chunk_nbytes) and self._is_idle(held) and (held is not newest or held.is_unsent)
        ]
        return min(candidates, key=lambda h: (h.phase is not SlotPhase.FREE, h.version), default=None)

    async def _drop_unfit(self, nbytes: int, chunk_nbytes: int) -> None:
        """The channel's manifest has changed: slots of another size go as soon as nobody needs them."""
        newest = self.newest(0, 0)
        for held in list(self.slots):
            fits = held.slot.fits(nbytes, chunk_nbytes)
            if not fits and self._is_idle(held) and held is not newest:
                await self._vacate(held)
                self.slots.remove(held)
                held.slot.close()

    def _is_idle(self, held: HeldSlot) -> bool:
        is_at_rest = held.phase in (SlotPhase.FREE, SlotPhase.WHOLE, SlotPhase.BLOCKED)
        return is_at_rest and not held.lessees and not held.is_flying

    async def _vacate(self, held: HeldSlot) -> None:
        """After this nobody reads the slot. Raises TransferTimeout naming the readers that do not let go."""
        if held.phase is SlotPhase.FREE:
            return
        held.phase = SlotPhase.VACATING
        try:
            for transport in self._transports:
                await asyncio.to_thread(transport.withdraw, self.key(held.version, held.uid), WITHDRAW_TIMEOUT_S)
        except BaseException:
            held.phase = SlotPhase.BLOCKED
            raise
        held.phase = SlotPhase.FREE

    def _nothing_free(self, version: int, timeout_s: float) -> TransferTimeout:
        readers = tuple(sorted({name for held in self.slots for name in held.lessees}))
        flying = [str(held.version) for held in self.slots if held.is_flying]
        why = f"slots are being read by {', '.join(readers)}" if readers else "no slot is free"
        if flying:
            why += f"; on its way: version {', '.join(flying)}"
        return TransferTimeout(
            f"no room for version {version} of '{self.channel}': {why}",
            hint="let the replicas finish their commit, or set num_slots higher",
            context=ErrorContext(
                channel=self.channel, version=version, phase="stage", peers=readers, elapsed_s=timeout_s
            ),
        )

    def begin(self, held: HeldSlot, step: int, manifest_digest: str) -> None:
        """The slot starts to fill: offer it, so that a chunk is served on as soon as it is there."""
        held.step, held.manifest_digest = step, manifest_digest
        key = self.channel_key(manifest_digest)
        held.slot.begin(held.version, key, uid=held.uid, chunk_nbytes=held.chunk_nbytes)
        self._offer(held)

    def _offer(self, held: HeldSlot) -> None:
        for transport in self._transports:
            transport.offer(self.key(held.version, held.uid), held.slot, held.version)

    def complete(self, held: HeldSlot) -> None:
        """Every chunk is there and has its digest: members may lease it."""
        held.slot.seal()
        held.phase = SlotPhase.WHOLE
        self.changes.wake()

    async def discard(self, held: HeldSlot, version: int, uid: int) -> None:
        """If the version is still in the slot, nobody gets it from now on; who installs it already goes on."""
        if (held.version, held.uid) != (version, uid):
            return
        held.is_flying = False
        if held.lessees or not (held.is_filled or held.phase is SlotPhase.BLOCKED):
            held.phase = SlotPhase.BLOCKED if held.is_filled else held.phase
            self.changes.wake()
            return
        try:
            await self._vacate(held)
        except TransferTimeout as exc:
            logger.warning("version %d of '%s': %s", held.version, self.channel, exc)
        self.changes.wake()

    def has_room_to_adopt(self, version: int) -> bool:
        """Whether a whole slot of that version would be welcome; a free one gives way to it."""
        if any(held.version == version and held.is_filled for held in self.slots):
            return False
        free = next((held for held in self.slots if held.phase is SlotPhase.FREE), None)
        if len(self.slots) >= self._config.num_slots and free is not None:
            self.slots.remove(free)
            free.slot.close()
        return len(self.slots) < self._config.num_slots

    def adopt(self, slot: Slot, step: int, manifest_digest: str) -> HeldSlot:
        """Take over a whole slot of the former holder. The caller has checked its digests."""
        held = HeldSlot(slot, phase=SlotPhase.WHOLE, version=slot.version, uid=slot.uid, step=step)
        held.chunk_nbytes = slot.chunk_nbytes
        held.manifest_digest = manifest_digest
        held.has_flown = True
        self.slots.append(held)
        self._offer(held)
        self.changes.wake()
        return held

    def lease(self, held: HeldSlot, member_id: str) -> None:
        held.lessees.append(member_id)

    def release(self, held: HeldSlot, member_id: str) -> None:
        if member_id in held.lessees:
            held.lessees.remove(member_id)
        self.changes.wake()

    async def drop_all(self) -> None:
        """Free every slot that nobody uses."""
        async with self._lock:
            for held in list(self.slots):
                if self._is_idle(held):
                    await self._vacate(held)
                    self.slots.remove(held)
                    held.slot.close()

    def close(self) -> None:
        for held in list(self.slots):
            self.slots.remove(held)
            held.slot.close()


def _close_reserved(reserving: asyncio.Future[Slot]) -> None:
    if not reserving.cancelled() and reserving.exception() is None:
        reserving.result().close()
