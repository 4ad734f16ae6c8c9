"""What the two sharded members have in common: they describe their holding, learn their lanes, and see them as views.

A lane travels over a channel of its own, with a `Publisher` at its source rank and a `Replica` in each of its workers.
Their tensors are the lane's fragments: strided views of the member's locals, so that packing and installing need to
know nothing of layouts.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from wsync.config import Config
from wsync.engine import protocol
from wsync.engine.lanes import Locator, ShardLane
from wsync.engine.link import GRACE_S, Link
from wsync.engine.protocol import Message
from wsync.engine.session import find_holder
from wsync.engine.tensors import copy_into, dtype_name, is_equal, is_released, memory_of, strided_view
from wsync.errors import ConfigError, ErrorContext, ManifestMismatch, MembershipError, PeerLost
from wsync.holding import Holding
from wsync.manifest import TensorSpec


class ShardLink:
    """A member's word with the coordinator about its shards. Keeps the newest version that the member knows of."""

    def __init__(
        self, channel: str, member_id: str, config: Config, holding: Holding, *, rank: int, num_ranks: int
    ) -> None:
        self.channel, self.member_id = channel, member_id
        self.highest = 0
        self.incarnation = secrets.token_hex(8)
        self._holding, self._rank, self._num_ranks = holding, rank, num_ranks
        self._link = Link(
            lambda timeout_s: find_holder(config, timeout_s),
            self._attach,
            is_writer=False,
            join_timeout_s=config.join_timeout_s,
        )
        self._link.on_attached = self._attached
        self._link.connect(time.monotonic() + config.join_timeout_s)

    def _attach(self) -> Message:
        return protocol.AttachShard(
            self.channel,
            protocol.ShardReport(
                self.member_id, self.incarnation, self._rank, self._num_ranks, self._holding, self.highest
            ),
        )

    def _attached(self, reply: Message) -> None:
        assert isinstance(reply, protocol.Attached)
        if self._rank >= 0:
            self.highest = max(self.highest, reply.highest_version)

    def ask(self, make: Callable[[float], Message], *, timeout_s: float, grace_s: float = GRACE_S) -> Message:
        """The reply to `make(seconds left)`, which may be asked again: a holder that dies meanwhile is replaced."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                return self._link.ask(make(left), timeout_s=left, grace_s=grace_s)
            except PeerLost:
                if left <= 0:
                    raise

    def lanes(self, timeout_s: float, *, plan_id: str = "", grace_s: float = GRACE_S) -> protocol.LanesPlanned:
        """This member's lanes. Raises MembershipError naming the trainer ranks that have not joined by the time-out."""
        reply = self.ask(
            lambda left: protocol.AwaitLanes(self.channel, self.incarnation, plan_id, left),
            timeout_s=timeout_s,
            grace_s=grace_s,
        )
        assert isinstance(reply, protocol.LanesPlanned)
        if reply.missing_ranks:
            raise MembershipError(
                f"trainer ranks {list(reply.missing_ranks)} of '{self.channel}' have not joined",
                hint="every rank must create its publisher",
                context=ErrorContext(channel=self.channel, phase="plan", elapsed_s=timeout_s),
            )
        return reply

    def close(self) -> None:
        self._link.close()


LaneViews = tuple[ShardLane, dict[str, Any], list[tuple[TensorSpec, Any]]]
"""A lane, its fragments by their names in its manifest, and the further places of those that lie there repeatedly."""


class Locals:
    """The live memory of a holding; a function instead of a mapping is asked anew: some frameworks replace tensors."""

    def __init__(self, holding: Holding, source: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> None:
        self._holding, self._source = holding, source
        self._locator = Locator(holding)
        self._lanes: dict[str, LaneViews] = {}
        self._tensors: list[Any] = []
        """In the order of the holding's locals."""
        self._memory: list[tuple[object, ...]] | None = None
        self.refresh()

    def refresh(self) -> bool:
        """Whether the memory is where it was. If not, all views are made anew, in the same dicts. Raises as the
        constructor for locals that do not suit the holding any more.
        """
        given = self._source() if callable(self._source) else self._source
        tensors = [given.get(spec.name) for spec in self._holding.locals]
        memory = list(map(memory_of, tensors))
        if memory == self._memory:
            return True
        check_locals(self._holding, given)
        self._tensors, self._memory = tensors, memory
        for lane, fragments, further in self._lanes.values():
            _, found, further[:] = self._views(lane)
            fragments.update(found)
        return False

    def _views(self, lane: ShardLane) -> LaneViews:
        found: dict[str, Any] = {}
        further: list[tuple[TensorSpec, Any]] = []
        for spec, (places, extent) in zip(lane.manifest.tensors, self._locator.views(lane), strict=True):
            first, *others = (strided_view(self._tensors[place.local], place, extent) for place in places)
            found[spec.name] = first
            further += [(spec, other) for other in others]
        return lane, found, further

    def views(self, lanes: Iterable[ShardLane]) -> dict[str, LaneViews]:
        """By lane id: the fragments as live views. Those that are followed already are the same dicts."""
        return {lane.lane_id: self._lanes.get(lane.lane_id) or self._views(lane) for lane in lanes}

    def follow(self, views: Mapping[str, LaneViews]) -> None:
        """From now on keep these views up to date, and no others."""
        self._lanes = dict(views)

    def unequal(self) -> list[str]:
        """Names of fragments that lie in this member's memory more than once, and are not the same everywhere."""
        return [
            spec.name
            for _, fragments, further in self._lanes.values()
            for spec, view in further
            if not is_equal(view, fragments[spec.name], spec.dtype)
        ]

    def spread(self) -> None:
        """Copy fragments that lie in this member's memory more than once from their first place to the others."""
        for _, fragments, further in self._lanes.values():
            for spec, view in further:
                copy_into(view, fragments[spec.name])


def check_locals(holding: Holding, locals_: Mapping[str, Any]) -> None:
    """Raise unless every local of the holding is there, of its shape and dtype."""
    for spec in holding.locals:
        local = locals_.get(spec.name)
        if local is None:
            raise ConfigError(f"local '{spec.name}' of the holding is not among the tensors that were given")
        dtype = dtype_name(local.dtype)
        if tuple(local.shape) != spec.shape or dtype != spec.dtype:
            raise ManifestMismatch(
                f"local '{spec.name}' is {dtype} {list(local.shape)}, its holding says {spec.dtype} {list(spec.shape)}",
                hint="describe the tensors that there are",
            )
        if is_released(local):
            raise ManifestMismatch(
                f"the memory of local '{spec.name}' has been released",
                hint="weights must be back while they are published or installed",
            )
