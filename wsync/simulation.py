"""Routes on a virtual clock: the engine's own transfers over a simulated network, with as many holders as wanted.

What a prediction leaves out is in here: windows of reads, chunks that wait for one another, shares of links that change
while others begin and end. What is not: the CPU of holders, and the time of digests.
"""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec

from wsync.engine.clock import simulate
from wsync.engine.executor import LanePull, PeerTable
from wsync.engine.fabric import Fabric
from wsync.engine.protocol import Source
from wsync.engine.routes import Routing
from wsync.errors import ConnectError
from wsync.memory import Slot
from wsync.transports.base import Transport
from wsync.transports.sim import SimSlot, SimTransport
from wsync.transports.sim_net import Connection, Network


class Simulated(msgspec.Struct, frozen=True):
    """What came out. Times in simulated seconds from the order to pull."""

    time_s: float
    receiver_s: dict[str, float]
    link_nbytes: dict[str, float]
    num_failed_hops: int


class _Holders:
    """One transport and one table of peers for each holder."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._world: dict[str, SimTransport] = {}
        self.network = Network({})
        self.transports = {node: SimTransport(node, self._world, self._connect) for node in fabric.nodes}
        self.peers = {
            node: PeerTable({"sim": cast(Transport, transport)}, node) for node, transport in self.transports.items()
        }

    def _connect(self, source: str, receiver: str) -> Connection:
        hop = self._fabric.hop(source, receiver)
        if hop is None:
            raise ConnectError(f"no path from {source} to {receiver}")
        self.network.learn({resource: self._fabric.capacity[resource] for resource in hop.resources})
        return self.network.connect(hop.resources, overhead_s=hop.overhead_s)


def simulate_routing(fabric: Fabric, routing: Routing) -> Simulated:
    """Send all lanes along their trees at once; returns when every receiver has every chunk."""
    result, time_s = simulate(_broadcast(fabric, routing))
    return msgspec.structs.replace(result, time_s=time_s)


async def _broadcast(fabric: Fabric, routing: Routing) -> Simulated:
    holders = _Holders(fabric)
    loop = asyncio.get_running_loop()
    done: dict[str, float] = {}
    failed: list[str] = []

    async def pull(receiver: str, lane: LanePull) -> None:
        await lane.run()
        done[receiver] = max(done.get(receiver, 0.0), loop.time())

    tasks = []
    for routed in routing.lanes:
        key, nbytes = routed.lane.key, routed.lane.nbytes
        whole = SimSlot(nbytes, routing.chunk_nbytes, is_whole=True)
        holders.transports[routed.lane.origin].offer(key, whole, 1)
        for receiver, stripes in routed.sources(0).items():
            slot = SimSlot(nbytes, routing.chunk_nbytes)
            holders.transports[receiver].offer(key, slot, 1)
            lane = LanePull(
                cast(Slot, slot),
                key,
                peers=holders.peers[receiver],
                on_hop_failed=lambda source, reason: failed.append(f"{source}: {reason}"),
            )
            lane.set_sources([(Source(parent, parent, {"sim": parent.encode()}),) for (parent,) in stripes], 3600.0)
            lane.set_digests(whole.digests)
            tasks.append(asyncio.create_task(pull(receiver, lane)))
    await asyncio.gather(*tasks)
    return Simulated(0.0, done, holders.network.nbytes, len(failed))
