"""The least time in which lanes can be broadcast, as a linear program. Knows hops and capacities, no trees.

For each lane a rate on every hop, and for each of its receivers a flow of the lane's whole rate within these. Where
everybody but the origin is a receiver that is the exact optimum (Edmonds' branchings); else no broadcast is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from wsync.engine.fabric import Fabric
from wsync.engine.routes import Lane


class _Rows:
    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.limits: list[float] = []

    def add(self, row: dict[int, float], limit: float) -> None:
        self.entries += [(len(self.limits), column, value) for column, value in row.items()]
        self.limits.append(limit)

    def matrix(self, width: int) -> coo_array:
        rows, columns, values = zip(*self.entries, strict=True)
        return coo_array((values, (rows, columns)), shape=(len(self.limits), width))


def least_time(fabric: Fabric, lanes: Sequence[Lane]) -> float:
    """Seconds, 0 if nothing limits."""
    hops = {(a, b): hop for a, b in permutations(fabric.nodes, 2) if (hop := fabric.hop(a, b)) is not None}
    pairs = list(hops)
    unit = max(lane.nbytes for lane in lanes)
    scale = max(fabric.capacity.values(), default=1.0)
    width = 1
    at_most, equal = _Rows(), _Rows()
    used: dict[str, dict[int, float]] = {}
    for lane in lanes:
        wanted = lane.nbytes / unit
        rate = {pair: width + i for i, pair in enumerate(pairs)}
        width += len(pairs)
        for pair, hop in hops.items():
            for resource in hop.resources:
                used.setdefault(resource, {})[rate[pair]] = 1.0
        for receiver in lane.receivers:
            flow = {pair: width + i for i, pair in enumerate(pairs)}
            width += len(pairs)
            for pair in pairs:
                at_most.add({flow[pair]: 1.0, rate[pair]: -1.0}, 0.0)
            for node in fabric.nodes:
                if node != lane.origin:
                    row = {flow[pair]: (pair[1] == node) - (pair[0] == node) + 0.0 for pair in pairs if node in pair}
                    equal.add(row | ({0: -wanted} if node == receiver else {}), 0.0)
    for resource, row in used.items():
        at_most.add(row, fabric.capacity[resource] / scale)
    goal = np.zeros(width)
    goal[0] = -1.0
    found = linprog(
        goal,
        at_most.matrix(width),
        at_most.limits,
        equal.matrix(width),
        equal.limits,
        bounds=[(0, 1e6)] + [(0, None)] * (width - 1),
    )
    assert found.status == 0, found.message
    return 0.0 if found.x[0] >= 1e6 else unit / (scale * found.x[0])
