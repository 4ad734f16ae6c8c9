"""What the two sharded members have in common: they describe their holding, learn their lanes, and see them as views.

A lane travels over a channel of its own, with a `Publisher` at its source rank and a `Replica` in each of its workers.
Their tensors are the lane's fragments: strided views of the member's locals, so that packing and installing need to
know nothing of layouts.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

from wsync.config import Config
from wsync.engine import protocol
from wsync.engine.lanes import Locator, ShardLane
from wsync.engine.link import Link
from wsync.engine.protocol import Message
from wsync.engine.session import find_holder
from wsync.engine.tensors import strided_view
from wsync.errors import ConfigError, ErrorContext, ManifestMismatch, MembershipError
from wsync.holding import Holding

ASK_S = 5.0


class ShardLink:
    """A member's word with the coordinator about its shards. Keeps the newest version that the member knows of."""

    def __init__(
        self, channel: str, member_id: str, config: Config, holding: Holding, *, rank: int, num_ranks: int
    ) -> None:
        self.channel, self.member_id, self.config = channel, member_id, config
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

    def ask(self, message: Message, *, timeout_s: float) -> Message:
        """As `Link.ask`; also for questions about the lanes' own channels."""
        return self._link.ask(message, timeout_s=timeout_s)

    def lanes(self, timeout_s: float, *, plan_id: str = "") -> protocol.LanesPlanned:
        """This member's lanes. Raises MembershipError naming the trainer ranks that have not joined by the time-out."""
        wish = protocol.AwaitLanes(self.channel, self.member_id, plan_id, timeout_s)
        reply = self.ask(wish, timeout_s=timeout_s)
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


def lane_views(
    locator: Locator, holding: Holding, locals_: Mapping[str, Any], lane: ShardLane
) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    """The lane's fragments as views of the locals, by their names in the lane's manifest.

    Also the pairs (further view, first view) of fragments that lie in the member's memory more than once.
    """
    found: dict[str, Any] = {}
    copies: list[tuple[Any, Any]] = []
    for spec, (places, extent) in zip(lane.manifest.tensors, locator.views(lane), strict=True):
        first, *others = (strided_view(locals_[holding.locals[place.local].name], place, extent) for place in places)
        found[spec.name] = first
        copies += [(other, first) for other in others]
    return found, copies


def check_locals(holding: Holding, locals_: Mapping[str, Any]) -> None:
    """Raise unless every local of the holding is there, of its shape and dtype."""
    for spec in holding.locals:
        local = locals_.get(spec.name)
        if local is None:
            raise ConfigError(f"local '{spec.name}' of the holding is not among the tensors that were given")
        dtype = str(local.dtype).removeprefix("torch.")
        if tuple(local.shape) != spec.shape or dtype != spec.dtype:
            raise ManifestMismatch(
                f"local '{spec.name}' is {dtype} {list(local.shape)}, its holding says {spec.dtype} {list(spec.shape)}",
                hint="describe the tensors that there are",
            )
