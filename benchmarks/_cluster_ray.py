"""The driver of Ray's ways across emulated hosts, which runs on the first of them; `Driver` is what it answers for.

python -m benchmarks._cluster_ray WAY NBYTES RAY_ADDRESS OWN_ADDRESS HOST,...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import ray

from benchmarks._cluster_child import NUM_TENSORS, serve
from benchmarks.ray_peers import RayDriver
from benchmarks.shapes import ITEMSIZE, Layout

ROW = 2048


def layout_of(nbytes: int) -> Layout:
    """As many tensors and bytes as all other broadcasts on the cluster have."""
    rows = nbytes // NUM_TENSORS // ITEMSIZE // ROW
    return tuple((f"t{number:02d}", (rows, ROW)) for number in range(NUM_TENSORS))


class Driver(RayDriver):
    """The trainer's actor on the first host, a replica's on each other one."""

    def __init__(self, way: str, nbytes: int, ray_address: str, own_address: str, hosts: Sequence[str]) -> None:
        super().__init__(way, layout_of(nbytes), 0)
        self._addresses = (ray_address, own_address)
        self._hosts = hosts

    def join(self) -> list[int]:
        """The processes of the actors, once all are there."""
        self.start(len(self._hosts) - 1, 1)
        return list(ray.get([actor.ready.remote() for actor in (self._trainer, *self._replicas)]))

    def _place(self, rank: int) -> dict[str, Any]:
        return {"label_selector": {"wsync.io/host": self._hosts[rank]}}

    def _init(self) -> None:
        address, own = self._addresses
        ray.init(address=address, _node_ip_address=own, log_to_driver=False, configure_logging=False)


if __name__ == "__main__":
    driver = Driver(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5].split(","))
    try:
        serve(driver)
    finally:
        driver.close()
