"""What the two sharded members have in common: they describe their holding, learn their lanes, and see them as views.

A lane travels over a channel of its own, with a `Publisher` at its source rank and a `Replica` in each of its workers.
Their tensors are the lane's fragments: strided views of the member's locals, so that packing and installing need to
know nothing of layouts.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from wsync.config import Config
from wsync.engine import protocol
from wsync.engine.lanes import Locator, ShardLane
from wsync.engine.link import GRACE_S, WARN_AFTER_S, Link
from wsync.engine.protocol import Message
from wsync.engine.session import find_holder
from wsync.engine.tensors import check_arrays, copy_into, dtype_name, is_equal, is_released, memory_of, strided_view
from wsync.errors import ConfigError, ErrorContext, ManifestMismatch, MembershipError, PeerLost, WsyncError
from wsync.holding import Holding
from wsync.manifest import TensorSpec

logger = logging.getLogger("wsync")


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
        reply = self.ask_all(
            lambda left: protocol.AwaitLanes(self.channel, self.incarnation, plan_id, left),
            timeout_s=timeout_s,
            grace_s=grace_s,
        )
        assert isinstance(reply, protocol.LanesPlanned)
        return reply

    def ask_all(self, make: Callable[[float], Message], *, timeout_s: float, grace_s: float = GRACE_S) -> Message:
        """As `ask`, of what every trainer rank must have joined for. Raises MembershipError naming the ranks that have
        not by the time-out; one that is long names them in the log first.
        """
        deadline = time.monotonic() + timeout_s
        patience_s = min(timeout_s, WARN_AFTER_S)
        while True:
            reply = self.ask(make, timeout_s=patience_s, grace_s=grace_s)
            assert isinstance(reply, protocol.LanesPlanned | protocol.RoundOpened)
            if reply.missing_ranks:
                problem = f"trainer ranks {list(reply.missing_ranks)} of '{self.channel}' have not joined or have left"
            elif isinstance(reply, protocol.RoundOpened) and not reply.version:
                problem = f"the coordinator is new and waits for the holders that take part in '{self.channel}'"
            else:
                return reply
            patience_s = deadline - time.monotonic()
            if patience_s <= 0:
                raise MembershipError(
                    problem,
                    hint="start them, or start all ranks anew with the number that there is",
                    context=ErrorContext(channel=self.channel, phase="plan", elapsed_s=timeout_s),
                )
            logger.warning("%s: waiting for them, for %.0f s more", problem, patience_s)

    def close(self) -> None:
        self._link.close()


def of_channel(error: WsyncError, channel: str, *, hint: str = "", who: str = "") -> WsyncError:
    """A lane's error as one of the channel: users know nothing of lanes."""
    problem = re.sub(rf"{re.escape(channel)}#\w+", channel, who + error.problem)
    context = msgspec.structs.replace(error.context, channel=channel)
    return type(error)(problem, hint=hint or error.hint, context=context)


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

    def _given(self) -> Mapping[str, Any]:
        return self._source() if callable(self._source) else self._source

    def _memory_of(self, given: Mapping[str, Any]) -> list[tuple[object, ...]]:
        return [memory_of(given.get(spec.name)) for spec in self._holding.locals]

    def where(self) -> list[tuple[object, ...]] | None:
        """Something that changes when the memory is another; None while the locals are not as they were described, as
        in an engine that has finalized its weights.
        """
        try:
            return self._memory_of(self._given())
        except WsyncError:
            return None

    def refresh(self) -> None:
        """Where the memory has changed all views are made anew, in the same dicts. Raises as the constructor for locals
        that do not suit the holding any more.
        """
        given = self._given()
        memory = self._memory_of(given)
        if memory == self._memory:
            return
        check_locals(self._holding, given)
        self._memory = None  # until all views are there
        self._tensors = [given.get(spec.name) for spec in self._holding.locals]
        for lane, fragments, further in self._lanes.values():
            _, found, further[:] = self._views(lane)
            fragments.update(found)
        self._memory = memory

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
        _check_present(self._holding, self._tensors)
        return {lane.lane_id: self._lanes.get(lane.lane_id) or self._views(lane) for lane in lanes}

    @property
    def lanes(self) -> dict[str, ShardLane]:
        """Those that are followed, by lane id."""
        return {lane_id: lane for lane_id, (lane, _, _) in self._lanes.items()}

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
    """Raise ConfigError or ManifestMismatch unless every local of the holding is there, of its shape and dtype."""
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
    _check_present(holding, [locals_[spec.name] for spec in holding.locals])
    check_arrays(holding, locals_)


def _check_present(holding: Holding, tensors: Iterable[Any]) -> None:
    for spec, local in zip(holding.locals, tensors, strict=True):
        if is_released(local):
            raise ManifestMismatch(
                f"the memory of local '{spec.name}' has been released",
                hint="weights must be back while they are published or installed",
            )
