"""The trainer's side of a channel in a holder: a version is digested and served as it is packed, and then sealed.

A trainer reserves a slot, says how far it has packed, and is done. Digests are made here, outside of the trainer's
process. A chunk is served right after it was hashed, while it is still in the processor's cache.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from dataclasses import dataclass, field

from wsync.engine import protocol
from wsync.engine.protocol import SlotReserved
from wsync.engine.services import HolderServices
from wsync.engine.staging import HeldSlot, SlotPhase, Staging
from wsync.engine.tensors import MAX_THREADS
from wsync.errors import ErrorContext, PublishError, StaleView, TransferTimeout

OVERLAPS = (os.cpu_count() or 1) > MAX_THREADS
EARLY_NBYTES = 16 << 20
"""Chunks are served and hashed while the trainer still packs. A snapshot uses up to `MAX_THREADS` cores: on a machine
with no more the trainer would only wait longer for its cores (measured on two: by a half), so there only so much is
served early: it keeps a slow link busy meanwhile."""

logger = logging.getLogger("wsync")


@dataclass(eq=False)
class _Packing:
    """The version that the trainer packs: the first `num_packed` chunks are in place, a task digests them."""

    held: HeldSlot
    num_packed: int = 0
    is_packed: bool = False
    is_dropped: bool = False
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    digesting: asyncio.Task[None] | None = None


class Origin:
    """One per channel and holder. At most one version is being packed at a time; earlier ones may still be digested."""

    def __init__(self, staging: Staging, services: HolderServices) -> None:
        self._staging, self._services = staging, services
        self._packings: dict[int, _Packing] = {}

    async def reserve(
        self, incarnation: str, manifest_digest: str, nbytes: int, wish: protocol.ReserveSlot
    ) -> SlotReserved:
        """A slot of `nbytes` for the next version, announced to the coordinator. Version 0: skipped."""
        staging = self._staging
        self.drop_unpacked("its trainer gave it up and publishes another")
        deadline = asyncio.get_running_loop().time() + wish.timeout_s
        if staging.is_flying and wish.on_busy == "skip":
            return SlotReserved(0, 0)
        while staging.is_flying and wish.on_busy == "wait":
            if not await staging.changes.wait(deadline):
                raise TransferTimeout(
                    f"an earlier version of '{staging.channel}' is still on its way",
                    hint="raise timeout_s, or use on_busy='supersede'",
                    context=ErrorContext(channel=staging.channel, phase="publish", elapsed_s=wish.timeout_s),
                )
        version = wish.version or staging.highest + 1
        if version <= staging.highest:
            raise self._too_old(version)
        uid = wish.uid or secrets.randbits(63)
        unsent = {held.version for held in staging.slots if held.is_unsent}
        held = await staging.take(
            version,
            uid,
            nbytes,
            staging.chunk_nbytes,
            SlotPhase.PACKING,
            max(0.0, deadline - asyncio.get_running_loop().time()),
        )
        held.version = version = max(version, staging.highest + 1)  # it may have heard of others meanwhile
        if wish.version and version != wish.version:
            held.phase = SlotPhase.FREE
            raise self._too_old(wish.version)
        staging.highest = version
        staging.begin(held, wish.step, manifest_digest)
        packing = self._packings[version] = _Packing(held)
        packing.digesting = self._services.spawn(self._digest(packing))
        kept = tuple(other.version for other in staging.slots if other.is_filled and other is not held)
        self._services.tell(
            protocol.Announce(
                channel=staging.channel,
                incarnation=incarnation,
                version=version,
                uid=uid,
                step=wish.step,
                nbytes=held.slot.nbytes,
                chunk_nbytes=held.slot.chunk_nbytes,
                manifest_digest=held.manifest_digest,
                replaces=max(unsent - set(kept), default=0),
                kept=kept,
            )
        )
        return SlotReserved(version, held.slot_id)

    def _too_old(self, version: int) -> PublishError:
        return PublishError(
            f"version {version} of '{self._staging.channel}' comes after version {self._staging.highest}",
            hint="publish the next one",
            context=ErrorContext(channel=self._staging.channel, version=version, phase="publish"),
        )

    def packed_to(self, version: int, nbytes: int) -> None:
        """The first `nbytes` are in place: digest and serve the whole chunks among them."""
        packing = self._current(version)
        slot = packing.held.slot
        num_packed = slot.num_chunks if nbytes >= slot.nbytes else max(0, nbytes) // slot.chunk_nbytes
        if not (OVERLAPS or packing.is_packed):
            num_packed = min(num_packed, -(-EARLY_NBYTES // slot.chunk_nbytes))
        if num_packed > packing.num_packed:
            packing.num_packed = num_packed
            packing.grown.set()

    def packed(self, version: int) -> None:
        """Everything is in place; the version goes on without its trainer from here."""
        packing = self._current(version)
        packing.is_packed = True
        self.packed_to(version, packing.held.slot.nbytes)
        packing.grown.set()

    def _current(self, version: int) -> _Packing:
        packing = self._packings.get(version)
        if packing is None or packing.is_dropped:
            raise StaleView(
                f"version {version} of '{self._staging.channel}' is not being packed any more",
                context=ErrorContext(channel=self._staging.channel, version=version, phase="publish"),
            )
        return packing

    async def _digest(self, packing: _Packing) -> None:
        """Digest chunks as they are packed; when all are, seal the version."""
        held, done = packing.held, 0
        try:
            while not (packing.is_packed and done == held.slot.num_chunks):
                await packing.grown.wait()
                packing.grown.clear()
                if packing.is_dropped:
                    return
                upto = packing.num_packed
                await self._services.digest_and_serve(held.slot, range(done, upto))
                done = upto
        except Exception as exc:
            logger.exception("version %d of '%s' could not be digested", held.version, self._staging.channel)
            self._services.tell(
                protocol.Abandon(self._staging.channel, held.version, held.uid, f"digesting failed: {exc}")
            )
            raise
        finally:
            self._packings.pop(held.version, None)
        if not packing.is_dropped:
            self._staging.complete(held)
            self._services.tell(
                protocol.Sealed(self._staging.channel, held.version, held.uid, tuple(held.slot.digests))
            )

    def drop_unpacked(self, reason: str) -> None:
        """A half-packed version ends, when its trainer has left or publishes anew; a packed one stays."""
        for packing in list(self._packings.values()):
            if not packing.is_packed and not packing.is_dropped:
                held = packing.held
                self._services.tell(protocol.Abandon(self._staging.channel, held.version, held.uid, reason))
                self.abort(held)

    def abort(self, held: HeldSlot) -> None:
        """Drop a version that is here; who is installing it goes on."""
        packing = self._packings.get(held.version)
        packing = packing if packing is not None and packing.held is held else None
        if packing is not None:
            packing.is_dropped = True
            packing.grown.set()
        digesting = packing.digesting if packing is not None else None
        if held.phase is SlotPhase.WHOLE:
            held.phase = SlotPhase.BLOCKED  # from now on, whenever it is emptied
        self._services.spawn(self._discard(held, held.version, held.uid, digesting))

    async def _discard(self, held: HeldSlot, version: int, uid: int, digesting: asyncio.Task[None] | None) -> None:
        if digesting is not None:  # it still writes digests into the slot
            await asyncio.wait([digesting])
        await self._staging.discard(held, version, uid)
