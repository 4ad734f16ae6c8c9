"""The simulator's word on the links of an emulated cluster."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from benchmarks._cluster_remote import PAYLOAD
from wsync.config import Config
from wsync.engine.fabric import Fabric, Node
from wsync.engine.routes import Lane, route
from wsync.simulation import simulate_routing
from wsync.topology import Topology


def simulated_s(topology: Topology, hosts: Sequence[str], nbytes: int) -> float:
    """Seconds until all hosts have the bytes of the first, in chunks of the size that the engine takes."""
    fabric = Fabric(without_headers(topology), [Node(host, host) for host in hosts])
    routing = route(fabric, [Lane("all", nbytes, hosts[0], tuple(hosts[1:]))], chunk_nbytes=Config().chunk_nbytes)
    return simulate_routing(fabric, routing).time_s


def without_headers(topology: Topology) -> Topology:
    """The same with the rates that links have for bytes of tensors."""
    nics = (replace(nic, nbytes_per_s=nic.nbytes_per_s * PAYLOAD) for nic in topology.nics)
    domains = (replace(one, uplink_nbytes_per_s=one.uplink_nbytes_per_s * PAYLOAD) for one in topology.domains)
    return replace(topology, nics=tuple(nics), domains=tuple(domains))
