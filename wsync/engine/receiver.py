"""The receiving side of a channel in a holder: orders of the coordinator become transfers into slots."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from wsync.engine import protocol
from wsync.engine.executor import LanePull, PeerTable
from wsync.engine.services import HolderServices
from wsync.engine.staging import HeldSlot, SlotPhase, Staging
from wsync.errors import WsyncError

logger = logging.getLogger("wsync")


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
            sources = self.order.sources
            stripes = [tuple(sources[place] for place in stripe) for stripe in self.order.stripes]
            self.lane_pull.set_sources(stripes, self.order.patience_s)
            if self.digests is not None:
                self.lane_pull.set_digests(self.digests)

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class Receiver:
    """One per channel and holder. `fetch_manifest` makes sure that members can read what arrived."""

    def __init__(
        self,
        staging: Staging,
        services: HolderServices,
        peers: PeerTable,
        fetch_manifest: Callable[[str], Awaitable[object]],
    ) -> None:
        self._staging, self._services, self._peers = staging, services, peers
        self._fetch_manifest = fetch_manifest
        self._pulls: dict[int, _Pull] = {}

    def pull(self, order: protocol.Pull) -> None:
        """Begin to fetch a version, or go on with other sources."""
        staging = self._staging
        staging.highest = max(staging.highest, order.version)
        held = staging.find(order.version, order.uid)
        if held is not None and held.phase is SlotPhase.WHOLE:
            self._services.tell(protocol.Staged(order.channel, order.version, order.uid, 0, 0.0))
            return
        pull = self._find(order.version, order.uid)
        if pull is None:
            for older in [version for version in self._pulls if version <= order.version]:
                self._pulls.pop(older).cancel()  # one version at a time: the coordinator has moved on
            pull = self._pulls[order.version] = _Pull(order)
            pull.task = self._services.spawn(self._run(pull))
        pull.order = order
        if order.is_sealed:
            pull.digests = order.digests
        pull.update()

    def _find(self, version: int, uid: int) -> _Pull | None:
        pull = self._pulls.get(version)
        return pull if pull is not None and pull.order.uid == uid else None

    def seal(self, version: int, uid: int, digests: Sequence[int]) -> None:
        """What the chunks of a version must hash to."""
        pull = self._find(version, uid)
        if pull is not None:
            pull.digests = digests
            pull.update()

    def abort(self, version: int, uid: int) -> bool:
        """Drop a transfer. False when there is none."""
        pull = self._find(version, uid)
        if pull is None:
            return False
        self._pulls.pop(version).cancel()
        return True

    def nbytes_from(self, version: int, uid: int) -> dict[str, int]:
        """What each source has delivered of a version that is being pulled."""
        pull = self._find(version, uid)
        return dict(pull.lane_pull.nbytes_from) if pull is not None and pull.lane_pull is not None else {}

    def abort_all(self) -> None:
        for version, pull in list(self._pulls.items()):
            self.abort(version, pull.order.uid)

    async def _run(self, pull: _Pull) -> None:
        order, started = pull.order, time.monotonic()
        held: HeldSlot | None = None
        try:
            held = await self._staging.take(
                order.version,
                order.uid,
                order.nbytes,
                order.chunk_nbytes,
                SlotPhase.PULLING,
                self._services.config.lost_after_s,  # who has no slot must not hold up the others; it is asked again
            )
            self._staging.begin(held, order.step, order.manifest_digest)
            pull.lane_pull = LanePull(
                held.slot,
                self._staging.key(order.version, order.uid),
                peers=self._peers,
                on_hop_failed=lambda source, error: logger.info(
                    "version %d of '%s': %s failed: %s", order.version, order.channel, source, error
                ),
            )
            pull.update()
            await pull.lane_pull.run()
            await self._fetch_manifest(order.manifest_digest)
            self._staging.complete(held)
            took_s = time.monotonic() - started
            nbytes = pull.lane_pull.nbytes_received
            self._services.tell(protocol.Staged(order.channel, order.version, order.uid, nbytes, took_s))
        except asyncio.CancelledError:
            await asyncio.shield(self._give_up(order, held))
            raise
        except Exception as exc:
            if not isinstance(exc, WsyncError):
                logger.exception("version %d of '%s' could not be fetched", order.version, order.channel)
            self._services.tell(protocol.PullFailed(order.channel, order.version, order.uid, str(exc)))
            await self._give_up(order, held)
        finally:
            if self._pulls.get(order.version) is pull:
                del self._pulls[order.version]

    async def _give_up(self, order: protocol.Pull, held: HeldSlot | None) -> None:
        if held is not None and held.phase is SlotPhase.PULLING:
            await self._staging.discard(held, order.version, order.uid)
