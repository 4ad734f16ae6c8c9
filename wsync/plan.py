"""The plan of one version: which holder pulls from whom. Frozen, and it proves itself when built."""

from __future__ import annotations

import msgspec

from wsync.errors import PlanError


class Route(msgspec.Struct, frozen=True):
    """Where one holder gets a lane from: the first of `sources` that answers; the others are its alternates."""

    receiver: str
    sources: tuple[str, ...]


class Plan(msgspec.Struct, frozen=True):
    """Routes for every receiving holder of a version, in the order in which the bytes reach them.

    Invariants, checked when built: every receiver has exactly one route, nobody pulls from itself, all sources
    are the origin or other receivers, and the first choices form a tree whose root is the origin.
    """

    origin: str
    nbytes: int
    routes: tuple[Route, ...]

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise PlanError(f"a plan for {self.nbytes} bytes")
        reached = {self.origin}
        receivers = [route.receiver for route in self.routes]
        if len(set(receivers)) != len(receivers) or self.origin in receivers:
            raise PlanError(f"a holder would receive the lane twice: {receivers} from {self.origin}")
        members = reached | set(receivers)
        for route in self.routes:
            if not route.sources:
                raise PlanError(f"holder {route.receiver} has no source")
            strangers = set(route.sources) - members
            if strangers or route.receiver in route.sources:
                raise PlanError(f"holder {route.receiver} cannot pull from {sorted(strangers) or 'itself'}")
            if route.sources[0] not in reached:
                raise PlanError(f"holder {route.receiver} pulls from {route.sources[0]}, which nothing has reached yet")
            reached.add(route.receiver)

    def explain(self) -> str:
        """One line per hop, in the order of the bytes."""
        lines = [f"{self.nbytes} bytes from {self.origin} to {len(self.routes)} holders"]
        lines += [
            f"  {r.sources[0]} -> {r.receiver}   (alternates: {', '.join(r.sources[1:]) or '-'})" for r in self.routes
        ]
        return "\n".join(lines)
