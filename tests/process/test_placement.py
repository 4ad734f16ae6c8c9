"""Placement groups on a real Ray cluster of four nodes in two racks and two NVLink domains."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.ray,
    pytest.mark.process,
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]

DRIVER = """
import importlib, json
from wsync.demo import cluster
from wsync.errors import ConfigError
from wsync.integrations.placement import GPU_DOMAIN, HOST, RACK, group_inside, groups_across

with cluster.private_folder():
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    nodes = importlib.import_module("ray.cluster_utils").Cluster()
    try:
        for number in range(4):
            labels = {HOST: f"h{number}", RACK: f"rack{number % 2}", GPU_DOMAIN: f"nvl{number // 2}"}
            small = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}
            nodes.add_node(wait=False, labels=labels, **small)
        ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
        nodes.wait_for_nodes(60)
        by_id = {node["NodeID"]: node["Labels"] for node in ray.nodes()}

        @ray.remote(num_cpus=1)
        def where():
            return ray.get_runtime_context().get_node_id()

        def places(group, label):
            assert group.wait(60), "not placed"
            at = [PlacementGroupSchedulingStrategy(group, i) for i in range(len(group.bundle_specs))]
            asked = [where.options(scheduling_strategy=strategy).remote() for strategy in at]
            return [by_id[node][label] for node in ray.get(asked, timeout=60)]

        def refused(call, *args, **options):
            try:
                call(*args, **options)
            except ConfigError as exc:
                return str(exc)

        replica = group_inside([{"CPU": 1}] * 3)
        inside = places(replica, GPU_DOMAIN)
        too_large = group_inside([{"CPU": 1}] * 5)
        result = {
            "inside": inside,
            "nodes": places(replica, HOST),
            "too_large": too_large.wait(3),
            "unknown": refused(group_inside, [{"CPU": 1}], label="wsync.io/nothing"),
        }
        for group in (replica, too_large):
            ray.util.remove_placement_group(group)
        groups = groups_across([[{"CPU": 1}], [{"CPU": 1}] * 2, [{"CPU": 1}] * 2])
        result["across"] = [places(group, RACK) for group in groups]
        for group in groups:
            ray.util.remove_placement_group(group)
        print(json.dumps(result))
    finally:
        with cluster.deadline(60, "cleaning up"):
            ray.shutdown()
            nodes.shutdown()
"""


def test_a_replica_is_inside_one_domain_and_groups_are_across_racks() -> None:
    done = subprocess.run([sys.executable, "-c", DRIVER], capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(set(found["inside"])) == 1
    assert len(set(found["nodes"])) == 2, "three bundles of one CPU need both hosts of a domain"
    assert found["too_large"] is False, "no domain has five CPUs, and none is left"
    assert found["across"] == [["rack0"], ["rack1", "rack1"], ["rack0", "rack0"]]
    assert found["unknown"].startswith("no node has the label wsync.io/nothing")
