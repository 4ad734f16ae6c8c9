"""Who pulls from whom: a pure function of a version, its origin and its receivers."""

from __future__ import annotations

from collections.abc import Sequence

from wsync.plan import Plan, Route


def make_plan(nbytes: int, *, origin: str, receivers: Sequence[str]) -> Plan:
    """One pipelined chain: each receiver pulls from the one before it, chunk by chunk, as soon as a chunk is there.

    The origin sends every byte once, whatever the number of receivers, and a byte enters each host once; the
    time is that of one transfer plus one chunk per hop. The alternates are the origin, then the receivers
    further up, nearest first: they are ahead, so a failed hop is replaced by one that has the bytes.
    """
    routes: list[Route] = []
    for place, receiver in enumerate(receivers):
        ahead = [receivers[i] for i in range(place - 1, -1, -1)]
        sources = [*ahead[:1], origin, *ahead[1:]]
        routes.append(Route(receiver, tuple(sources)))
    return Plan(origin, nbytes, tuple(routes))


def recovery_order(ready: dict[str, bytes], num_chunks: int) -> tuple[list[str], bool]:
    """After the origin is lost: receivers by how much they have, most first, and whether together they have it all.

    `ready` maps each living receiver to its ready bytes (empty: nothing).
    """
    order = sorted(ready, key=lambda holder: (-ready[holder].count(1), holder))
    covered = bytearray(num_chunks)
    for flags in ready.values():
        for chunk, flag in enumerate(flags[:num_chunks]):
            covered[chunk] |= flag
    return order, all(covered)
