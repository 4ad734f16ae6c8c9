"""What platforms say: metadata of clouds, labels of Kubernetes and Ray nodes, and the devices that DRA drivers list."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from _samples import sample
from _sysfs import Sysfs
from hypothesis import given
from hypothesis import strategies as st

from wsync.discovery import platform
from wsync.discovery.dra import read_resource_slices
from wsync.discovery.kubernetes import read_node_labels, read_nodes
from wsync.discovery.platform import (
    platform_of,
    probe,
    read_aws_identity,
    read_aws_instance_topology,
    read_azure_instance,
    read_gce_instance,
    read_oci_instance,
)
from wsync.errors import ProbeError
from wsync.topology import Device, DomainKind, Host, NicKind, Source, Topology


def members(topology: Topology) -> dict[str, tuple[str, ...]]:
    return {domain.domain_id: domain.members for domain in topology.domains}


def aws_instance(name: str, nodes: list[str] | None, block: str | None = "null") -> dict[str, Any]:
    return {
        "InstanceId": name,
        "InstanceType": "p5.48xlarge",
        "NetworkNodes": nodes,
        "CapacityBlockId": block,
        "ZoneId": "use1-az4",
        "AvailabilityZone": "us-east-1d",
    }


def aws_answer(*instances: dict[str, Any], **more: Any) -> str:
    return json.dumps({"Instances": instances, **more})


def test_network_nodes_of_aws_are_racks_and_blocks_below_the_zone() -> None:
    text = aws_answer(aws_instance("i-1", ["top", "mid", "low"]), aws_instance("i-2", ["top", "mid2", "low2"]))
    topology = read_aws_instance_topology(text, host_ids={"i-2": "two"})
    assert topology.hosts == tuple(
        Host.told(Source.PLATFORM, host_id=host, platform="aws", instance_type="p5.48xlarge", instance_id=name)
        for host, name in (("i-1", "i-1"), ("two", "i-2"))
    )
    assert members(topology) == {
        "rack/top/mid/low": ("i-1",),
        "block/top/mid": ("rack/top/mid/low",),
        "block/top": ("block/top/mid", "block/top/mid2"),
        "zone/us-east-1d": ("block/top",),
        "rack/top/mid2/low2": ("two",),
        "block/top/mid2": ("rack/top/mid2/low2",),
    }
    assert {domain.facts["members"] for domain in topology.domains} == {Source.PLATFORM}


@pytest.mark.parametrize("block", ["null", None, ""])
def test_trap_14_a_capacity_block_that_is_the_text_null_is_none(block: str | None) -> None:
    topology = read_aws_instance_topology(aws_answer(aws_instance("i-1", ["top", "low"], block)))
    assert set(members(topology)) == {"rack/top/low", "block/top", "zone/us-east-1d"}


def test_trap_14_instances_of_an_ultraserver_are_a_rack_and_network_nodes_are_blocks() -> None:
    answer = aws_answer(aws_instance("i-1", ["top", "low"], "cb-7"), aws_instance("i-2", ["top", "low"], "cb-7"))
    found = members(read_aws_instance_topology(answer))
    assert found["rack/cb-7"] == found["block/top/low"] == ("i-1", "i-2")
    assert "rack/top/low" not in found


@pytest.mark.parametrize("nodes", [None, []])
def test_trap_14_an_instance_that_is_not_running_has_no_network_nodes(nodes: list[str] | None) -> None:
    topology = read_aws_instance_topology(aws_answer(aws_instance("i-1", nodes)))
    assert members(topology) == {"zone/us-east-1d": ("i-1",)}
    assert topology.notes[0].startswith("i-1 is at no network node")


def test_a_list_of_instances_that_goes_on_says_so() -> None:
    assert "further pages" in read_aws_instance_topology(aws_answer(NextToken="abc")).notes[0]


AWS_IDENTITY = {
    "instanceId": "i-0aa",
    "instanceType": "p5en.48xlarge",
    "region": "us-east-1",
    "availabilityZone": "us-east-1d",
}
GCE = {
    "id": 4567890123456789012,
    "machineType": "projects/1/machineTypes/a4-highgpu-8g",
    "zone": "projects/1/zones/us-central1-b",
    "attributes": {"physical_host": "/b1/sb2/h3", "ssh-keys": "..."},
}
AZURE_COMPUTE = {"vmId": "02aa", "vmSize": "Standard_ND96isr_H100_v5", "location": "eastus", "zone": "1"}
OCI_INSTANCE = {
    "id": "ocid1.instance.oc1.iad.x",
    "shape": "BM.GPU.H200.8",
    "availabilityDomain": "Uocm:US-ASHBURN-AD-2",
    "canonicalRegionName": "us-ashburn-1",
}
OCI_RDMA = {
    "customerLocalBlock": "lb",
    "customerNetworkBlock": "nb",
    "customerHPCIslandId": "isl",
    "customerHostId": "hst",
}


def test_aws_metadata_tell_machine_and_zone() -> None:
    topology = read_aws_identity(json.dumps(AWS_IDENTITY), host_id="h")
    assert (topology.hosts[0].instance_type, topology.hosts[0].instance_id) == ("p5en.48xlarge", "i-0aa")
    assert members(topology) == {"zone/us-east-1d": ("h",), "site/us-east-1": ("zone/us-east-1d",)}


def test_trap_14_the_physical_host_of_gce_is_block_subblock_and_host() -> None:
    topology = read_gce_instance(json.dumps(GCE), host_id="h")
    host = topology.hosts[0]
    assert (host.platform, host.instance_type, host.instance_id) == ("gcp", "a4-highgpu-8g", "4567890123456789012")
    assert members(topology) == {
        "rack/b1/sb2": ("h",),
        "block/b1": ("rack/b1/sb2",),
        "zone/us-central1-b": ("block/b1",),
    }


@pytest.mark.parametrize("attributes", [{}, {"physical_host": ""}])
def test_trap_14_without_a_placement_policy_gce_tells_no_place(attributes: dict[str, str]) -> None:
    topology = read_gce_instance(json.dumps(GCE | {"attributes": attributes}), host_id="h")
    assert members(topology) == {"zone/us-central1-b": ("h",)}
    assert "no physical_host" in topology.notes[0]


@pytest.mark.parametrize("where", ["/b1/sb2", "/b1//h3", "b1", "/", "/a/b/c/d"])
def test_a_physical_host_of_another_form_is_refused(where: str) -> None:
    with pytest.raises(ProbeError, match="physical_host"):
        read_gce_instance(json.dumps(GCE | {"attributes": {"physical_host": where}}), host_id="h")


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({}, {"zone/eastus-1": ("h",)}),
        ({"placementGroupId": "pg"}, {"block/pg": ("h",), "zone/eastus-1": ("block/pg",)}),
        (
            {"placementGroupId": "pg", "interconnectGroupId": "ig", "interconnectSubgroupId": "is"},
            {"block/ig/is": ("h",), "block/ig": ("block/ig/is",), "zone/eastus-1": ("block/ig",)},
        ),
    ],
)
def test_trap_14_azure_has_groups_and_no_racks(groups: dict[str, str], expected: dict[str, tuple[str, ...]]) -> None:
    topology = read_azure_instance(json.dumps({"compute": AZURE_COMPUTE | groups}), host_id="h")
    assert topology.hosts[0].instance_type == "Standard_ND96isr_H100_v5"
    assert members(topology) == expected | {"site/eastus": ("zone/eastus-1",)}


def test_trap_14_oci_tells_the_rdma_network_alone_or_within_the_host() -> None:
    instance = json.dumps(OCI_INSTANCE)
    expected = {
        "rack/isl/nb/lb": ("h",),
        "block/isl/nb": ("rack/isl/nb/lb",),
        "block/isl": ("block/isl/nb",),
        "zone/US-ASHBURN-AD-2": ("block/isl",),
        "site/us-ashburn-1": ("zone/US-ASHBURN-AD-2",),
    }
    for host in (OCI_RDMA, {"rdmaTopologyData": OCI_RDMA, "networkBlockId": "other"}):
        assert members(read_oci_instance(instance, json.dumps(host), host_id="h")) == expected


def test_trap_14_oci_without_it_tells_network_block_and_rack() -> None:
    host = json.dumps({"networkBlockId": "nb", "rackId": "r7", "id": "x"})
    found = members(read_oci_instance(json.dumps(OCI_INSTANCE), host, host_id="h"))
    assert (found["rack/r7"], found["block/nb"]) == (("h",), ("h",))
    assert set(members(read_oci_instance(json.dumps(OCI_INSTANCE), "", host_id="h"))) == {
        "zone/US-ASHBURN-AD-2",
        "site/us-ashburn-1",
    }


def test_trap_14_hosts_of_a_gpu_memory_fabric_of_oci_are_a_rack() -> None:
    host = json.dumps({"rdmaTopologyData": OCI_RDMA | {"customerGpuMemoryFabric": "fab"}})
    found = members(read_oci_instance(json.dumps(OCI_INSTANCE), host, host_id="h"))
    assert (found["rack/fab"], found["block/isl/nb/lb"]) == (("h",), ("h",))


READERS: list[Callable[[str], Topology]] = [
    read_aws_instance_topology,
    lambda text: read_aws_identity(text, host_id="h"),
    lambda text: read_gce_instance(text, host_id="h"),
    lambda text: read_azure_instance(text, host_id="h"),
    lambda text: read_oci_instance(text, "", host_id="h"),
    lambda text: read_oci_instance(json.dumps(OCI_INSTANCE), text, host_id="h"),
    read_nodes,
    read_resource_slices,
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["Instances", "InstanceId", "compute", "id", "kind", "items", "spec", "metadata", "rackId"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
).map(json.dumps)


@pytest.mark.parametrize("reader", READERS)
@given(text=st.one_of(st.text(max_size=40), JSON))
def test_any_text_gives_a_topology_or_a_probe_error(reader: Callable[[str], Topology], text: str) -> None:
    try:
        assert isinstance(reader(text), Topology)
    except ProbeError:
        pass


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", ["<html>", "[]", '{"Instances": [', '"\ud800"', "[" * 5000])
def test_what_is_no_answer_is_refused(reader: Callable[[str], Topology], text: str) -> None:
    with pytest.raises(ProbeError, match="cannot be read"):
        reader(text)


def test_two_instances_of_one_name_are_refused() -> None:
    with pytest.raises(ProbeError, match="contradicts itself"):
        read_aws_instance_topology(aws_answer(aws_instance("i-1", ["a"]), aws_instance("i-1", ["b"])))


FIRMWARE = {
    "aws": {"sys_vendor": "Amazon EC2"},
    "gcp": {"sys_vendor": "Google"},
    "azure": {"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"},
    "oci": {"sys_vendor": "Supermicro", "chassis_asset_tag": "OracleCloud.com"},
    "": {"sys_vendor": "Supermicro", "chassis_asset_tag": "Default string"},
}


def machine(root: Path, cloud: str) -> Path:
    sysfs = Sysfs(root)
    for name, text in FIRMWARE[cloud].items():
        sysfs.write(f"sys/class/dmi/id/{name}", text)
    return root


class Service:
    """A metadata service with these answers by the ends of URLs; every request is kept."""

    def __init__(self, **answers: str) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str, Mapping[str, str]]] = []

    def __call__(self, method: str, url: str, headers: Mapping[str, str]) -> str:
        self.asked.append((method, url, headers))
        return next((text for part, text in self.answers.items() if part.replace("_", "-") in url), "")


@pytest.mark.parametrize("cloud", FIRMWARE)
def test_the_firmware_says_whose_machine_it_is(tmp_path: Path, cloud: str) -> None:
    assert platform_of(machine(tmp_path, cloud)) == cloud


@pytest.mark.parametrize(
    ("cloud", "service", "instance_type"),
    [
        ("aws", Service(token="secret", identity=json.dumps(AWS_IDENTITY)), "p5en.48xlarge"),
        ("gcp", Service(computeMetadata=json.dumps(GCE)), "a4-highgpu-8g"),
        ("azure", Service(**{"2025-11-11": json.dumps({"compute": AZURE_COMPUTE})}), "Standard_ND96isr_H100_v5"),
        ("azure", Service(**{"2021-02-01": json.dumps({"compute": AZURE_COMPUTE})}), "Standard_ND96isr_H100_v5"),
        ("oci", Service(**{"v2/instance": json.dumps(OCI_INSTANCE)}), "BM.GPU.H200.8"),
    ],
)
def test_the_probe_asks_the_service_of_its_cloud(
    tmp_path: Path, cloud: str, service: Service, instance_type: str
) -> None:
    (host,) = probe("h", root=machine(tmp_path, cloud), answer=service).hosts
    assert (host.platform, host.instance_type) == (cloud, instance_type)
    assert all(url.startswith("http://169.254.169.254/") for _, url, _ in service.asked)
    assert all(headers for _, _, headers in service.asked)


def test_the_token_of_aws_goes_with_the_question(tmp_path: Path) -> None:
    service = Service(token="secret", identity=json.dumps(AWS_IDENTITY))
    probe("h", root=machine(tmp_path, "aws"), answer=service)
    assert [(method, dict(headers)) for method, _, headers in service.asked] == [
        ("PUT", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}),
        ("GET", {"X-aws-ec2-metadata-token": "secret"}),
    ]


def test_a_machine_of_no_cloud_asks_nobody(tmp_path: Path) -> None:
    service = Service()
    assert probe("h", root=machine(tmp_path, ""), answer=service) == Topology()
    assert service.asked == []


def test_a_service_that_is_silent_is_refused_with_what_to_do(tmp_path: Path) -> None:
    def silent(method: str, url: str, headers: Mapping[str, str]) -> str:
        raise OSError("timed out")

    with pytest.raises(ProbeError, match="hop limit"):
        probe("h", root=machine(tmp_path, "aws"), answer=silent)


class Metadata(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        status = int(self.path.strip("/"))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(f"{self.headers['X-Question']}?".encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(("status", "text"), [(200, "who?"), (404, ""), (400, "")])
def test_what_a_service_does_not_have_is_an_empty_answer(status: int, text: str) -> None:
    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/{status}"
        assert platform._answer("PUT", url, {"X-Question": "who"}) == text
        thread.join()


def test_a_service_that_fails_or_is_not_there_is_an_os_error() -> None:
    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/503"
        with pytest.raises(OSError, match="503"):
            platform._answer("PUT", url, {"X-Question": "who"})
        thread.join()
    with pytest.raises(OSError, match="refused"):
        platform._answer("GET", url, {})


PLACES = {
    "topology.kubernetes.io/zone": "us-east-1d",
    "topology.kubernetes.io/region": "us-east-1",
    "node.kubernetes.io/instance-type": "p5.48xlarge",
}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (
            {"cloud.google.com/gce-topology-block": "b", "cloud.google.com/gce-topology-subblock": "s"},
            {"rack/b/s": ("h",), "block/b": ("rack/b/s",)},
        ),
        ({"topology.gke.io/cluster": "c", "topology.gke.io/rack": "r"}, {"rack/c/r": ("h",), "block/c": ("rack/c/r",)}),
        (
            {f"topology.k8s.aws/network-node-layer-{n}": f"n{n}" for n in (1, 2, 3)},
            {"rack/n1/n2/n3": ("h",), "block/n1/n2": ("rack/n1/n2/n3",), "block/n1": ("block/n1/n2",)},
        ),
        (
            {"topology.k8s.aws/network-node-layer-1": "n1", "topology.k8s.aws/ultraserver-id": "us"},
            {"block/n1": ("h",), "rack/us": ("h",)},
        ),
        (
            {
                "oci.oraclecloud.com/rdma.hpc_island_id": "i",
                "oci.oraclecloud.com/rdma.network_block_id": "n",
                "oci.oraclecloud.com/rdma.local_block_id": "l",
                "oci.oraclecloud.com/host.network_block_id": "y",
            },
            {"rack/i/n/l": ("h",), "block/i/n": ("rack/i/n/l",), "block/i": ("block/i/n",)},
        ),
        (
            {"oci.oraclecloud.com/host.rack_id": "r", "oci.oraclecloud.com/host.network_block_id": "y"},
            {"block/y": ("h",), "rack/r": ("h",)},
        ),
        ({"oci.oraclecloud.com/host.rack_id": "r"}, {"rack/r": ("h",)}),
        ({"ib/torset": "torset-3"}, {"rack/torset-3": ("h",)}),
        (
            {f"fabric.topograph.run/tier-{n}": f"t{n}" for n in (0, 2, 10)},
            {"rack/t10/t2/t0": ("h",), "block/t10/t2": ("rack/t10/t2/t0",), "block/t10": ("block/t10/t2",)},
        ),
        (PLACES, {"zone/us-east-1d": ("h",), "site/us-east-1": ("zone/us-east-1d",)}),
        ({"ib/torset": "", "kubernetes.io/arch": "arm64"}, {}),
    ],
)
def test_labels_of_each_platform_place_the_host(labels: dict[str, str], expected: dict[str, tuple[str, ...]]) -> None:
    assert members(read_node_labels(labels, host_id="h")) == expected


def test_labels_agree_with_the_list_of_instances() -> None:
    labels = PLACES | {f"topology.k8s.aws/network-node-layer-{n}": f"n{n}" for n in (1, 2)}
    listed = read_aws_instance_topology(aws_answer(aws_instance("i-2", ["n1", "n2"])))
    both = read_node_labels(labels, host_id="h").joined(listed)
    assert members(both)["rack/n1/n2"] == ("h", "i-2")
    assert members(both)["zone/us-east-1d"] == ("block/n1",)


CLIQUE = "8c9f0f6e-0d5e-4a0f-9d3a-0b1c2d3e4f50.32766"
GPUS = Topology(
    hosts=(Host(host_id="h"),),
    devices=(
        Device(device_id="h/gpu0", host_id="h"),
        Device(device_id="h/gpu1", host_id="h"),
        Device(device_id="h/gpu1/part0", host_id="h", partition_of="h/gpu1"),
    ),
)


@pytest.mark.parametrize("key", ["nvidia.com/gpu.clique", "ray.io/gpu-domain"])
def test_trap_15_the_clique_of_a_label_is_the_domain_of_the_devices(key: str) -> None:
    topology = read_node_labels({key: CLIQUE}, host_id="h", known=GPUS)
    (domain,) = topology.domains
    assert (domain.domain_id, domain.kind, domain.members) == (CLIQUE, DomainKind.NVLINK, ("h/gpu0", "h/gpu1"))
    assert domain.facts["members"] is Source.PLATFORM, "the driver knows better which GPU is on the fabric"


def test_trap_15_a_clique_without_known_devices_is_noted() -> None:
    topology = read_node_labels({"nvidia.com/gpu.clique": CLIQUE}, host_id="h")
    assert topology.domains == ()
    assert topology.notes == (f"h is labelled with nvlink domain '{CLIQUE}', but none of its devices is known",)


@pytest.mark.parametrize("clique", ["00000000-0000-0000-0000-000000000000.0", ".0", "0"])
def test_trap_04_a_clique_of_no_cluster_is_not_believed(clique: str) -> None:
    topology = read_node_labels({"nvidia.com/gpu.clique": clique}, host_id="h", known=GPUS)
    assert topology.domains == ()
    assert "not believed" in topology.notes[0]


def test_trap_16_labels_of_ray_tell_no_device() -> None:
    """Ray knows one accelerator type per node: a SKU is what drivers say, never that label."""
    labels = {"ray.io/accelerator-type": "GB200", "ray.io/tpu-slice-name": "slice-1", "ray.io/tpu-topology": "2x2x2"}
    assert read_node_labels(labels, host_id="h").devices == ()
    (domain,) = read_node_labels(labels, host_id="h", known=GPUS).domains
    assert (domain.domain_id, domain.kind) == ("slice-1/ici0", DomainKind.ICI)


def node(name: str, labels: dict[str, str], **spec: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "spec": spec}


def test_nodes_of_kubernetes_are_hosts() -> None:
    items = [
        node("n1", PLACES | {"ib/torset": "t"}, providerID="aws:///us-east-1d/i-0aa"),
        node("n2", {"ib/torset": "t"}, providerID="kind://docker/kind/n2"),
        {"kind": "Pod", "metadata": {"name": "p"}},
    ]
    topology = read_nodes(json.dumps({"kind": "List", "items": items}), host_ids={"n1": "one"})
    assert [(h.host_id, h.platform, h.instance_id, h.instance_type) for h in topology.hosts] == [
        ("one", "aws", "i-0aa", "p5.48xlarge"),
        ("n2", "", "", ""),
    ]
    assert members(topology)["rack/t"] == ("one", "n2")
    assert read_nodes(json.dumps(items[1])).hosts[0].host_id == "n2"


def test_hosts_of_one_clique_are_in_one_domain() -> None:
    labels = {"nvidia.com/gpu.clique": CLIQUE}
    known = Topology(
        hosts=(Host(host_id="n1"), Host(host_id="n2")),
        devices=tuple(Device(device_id=f"{name}/gpu0", host_id=name) for name in ("n1", "n2")),
    )
    text = json.dumps({"kind": "NodeList", "items": [node("n1", labels), node("n2", labels)]})
    assert members(read_nodes(text, known=known)) == {CLIQUE: ("n1/gpu0", "n2/gpu0")}


def attributes(**values: object) -> dict[str, dict[str, object]]:
    kinds = {bool: "bool", int: "int", str: "string"}
    return {name.replace("__", "/").replace("_", "."): {kinds[type(value)]: value} for name, value in values.items()}


def slices(driver: str, *devices: dict[str, Any], node_name: str = "n1") -> str:
    return json.dumps({"kind": "ResourceSlice", "spec": {"driver": driver, "nodeName": node_name, "devices": devices}})


def gpu_entry(name: str, **more: object) -> dict[str, Any]:
    told: dict[str, object] = {"type": "gpu", "productName": "NVIDIA GB200", "uuid": f"GPU-{name}"} | more
    return {"name": name, "attributes": attributes(**told), "capacity": {"memory": {"value": "189471Mi"}}}


def test_gpus_of_a_resource_slice_are_devices() -> None:
    text = slices("gpu.nvidia.com", gpu_entry("gpu-3", resource_kubernetes_io__pciBusID="0018:06:00.0"))
    (device,) = read_resource_slices(text, host_ids={"n1": "h"}).devices
    assert (device.device_id, device.index, device.name, device.pci, device.memory_nbytes) == (
        "h/gpu3",
        3,
        "NVIDIA GB200",
        "0018:06:00.0",
        198674743296,
    )


@pytest.mark.parametrize(("domain", "node"), [("0008", 0), ("0009", 0), ("0018", 1), ("0019", 1), ("0001", -1)])
def test_trap_07_the_numa_node_of_a_grace_gpu_is_that_of_its_pci_domain(domain: str, node: int) -> None:
    pci = f"{domain}:06:00.0"
    text = slices("gpu.nvidia.com", gpu_entry("gpu-0", resource_kubernetes_io__pciBusID=pci))
    (device,) = read_resource_slices(text).devices
    assert device.numa_node == node
    assert device.facts.get("numa_node") is (Source.TABLE if node >= 0 else None)
    other = slices(
        "gpu.nvidia.com", gpu_entry("gpu-0", productName="NVIDIA H200", resource_kubernetes_io__pciBusID=pci)
    )
    assert read_resource_slices(other).devices[0].numa_node == -1


def test_partitions_and_devices_of_other_drivers_are_noted() -> None:
    mig = read_resource_slices(slices("gpu.nvidia.com", gpu_entry("gpu-0-mig-1g", type="mig")))
    assert (mig.devices, mig.notes) == ((), ("n1: device 'gpu-0-mig-1g' of gpu.nvidia.com is not read",))
    other = read_resource_slices(slices("tpu.google.com", {"name": "tpu-0"}))
    assert other.notes == ("n1: device 'tpu-0' of tpu.google.com is not read",)
    shared = read_resource_slices(slices("gpu.nvidia.com", gpu_entry("gpu-0"), node_name=""))
    assert (shared.hosts, shared.notes) == ((), ("a ResourceSlice of gpu.nvidia.com is of no one node, not read",))


def test_the_form_of_api_versions_before_v1_is_read_too() -> None:
    entry = gpu_entry("gpu-0", pciBusID="0000:1a:00.0")
    text = slices("gpu.nvidia.com", {"name": "gpu-0", "basic": {k: entry[k] for k in ("attributes", "capacity")}})
    (device,) = read_resource_slices(text).devices
    assert (device.pci, device.memory_nbytes) == ("0000:1a:00.0", 198674743296)


@pytest.mark.parametrize(
    ("told", "name", "kind"),
    [
        (
            {"dra_net__rdmaDevice": "rdmap16s27", "dra_net__pciDevice": "Elastic Fabric Adapter (EFA)"},
            "rdmap16s27",
            "efa",
        ),
        ({"dra_net__rdmaDevice": "mlx5_0", "dra_net__encapsulation": "infiniband"}, "mlx5_0", "infiniband"),
        ({"dra_net__ifName": "rdma0", "dra_net__encapsulation": "ether"}, "rdma0", "roce"),
        ({"dra_net__ifName": "ens5", "dra_net__encapsulation": "ether", "dra_net__rdma": False}, "ens5", "ethernet"),
        ({"dra_net__rdmaDevice": "mlx5_0"}, "mlx5_0", None),
        ({}, "0000:10:1b.0", None),
    ],
)
def test_nics_of_a_resource_slice(told: dict[str, object], name: str, kind: str | None) -> None:
    common: dict[str, object] = {"dra_net__pciAddress": "0000:10:1b.0", "dra_net__numaNode": 1, "dra_net__rdma": True}
    text = slices("dra.net", {"name": "pci-0000-10-1b-0", "attributes": attributes(**(common | told))})
    (nic,) = read_resource_slices(text).nics
    assert (nic.nic_id, nic.kind, nic.pci, nic.numa_node) == (f"n1/{name}", kind, "0000:10:1b.0", 1)


def test_interfaces_without_hardware_of_their_own_are_no_nics() -> None:
    virtual = {"name": "v", "attributes": attributes(dra_net__virtual=True, dra_net__pciAddress="0000:10:1b.0")}
    veth = {"name": "w", "attributes": attributes(dra_net__ifName="veth7")}
    assert read_resource_slices(slices("dra.net", virtual, veth)).nics == ()


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (gpu_entry("first"), "'first'"),
        (gpu_entry("gpu-0", pciBusID="there"), "no PCI address"),
        (gpu_entry("gpu-0") | {"capacity": {"memory": {"value": "80 gigabytes"}}}, "no quantity"),
        (gpu_entry("gpu-0") | {"capacity": {"memory": {"value": "80Xi"}}}, "no quantity"),
        (gpu_entry("gpu-0") | {"attributes": {"type": "gpu"}}, "cannot be read"),
    ],
)
def test_a_device_of_another_form_is_refused(entry: dict[str, Any], problem: str) -> None:
    with pytest.raises(ProbeError, match=problem):
        read_resource_slices(slices("gpu.nvidia.com", entry))


def test_sample_list_of_aws_instances() -> None:
    topology = read_aws_instance_topology(sample("aws-describe-instance-topology.json"))
    assert len(topology.hosts) == 4
    found = members(topology)
    assert found["rack/nn-1example/nn-2example/nn-4example"] == ("i-1example", "i-2example")
    assert found["zone/us-west-2a"] == ("block/nn-1example",)


def test_sample_labels_of_eks_nodes() -> None:
    nodes = json.loads(sample("eks-node-topology-labels.json"))["Nodes"]
    topology = Topology()
    for entry in nodes:
        topology = topology.joined(read_node_labels(entry["Topology"], host_id=entry["InstanceId"]))
    zones = [domain for domain in topology.domains if domain.kind is DomainKind.ZONE]
    assert [len(zone.members) for zone in zones] == [1, 1]
    assert len(members(topology)["block/nn-4444444444example"]) == 2


def test_sample_rdma_topology_of_oci() -> None:
    topology = read_oci_instance(json.dumps(OCI_INSTANCE), sample("oci-imds-rdmaTopologyData.json"), host_id="h")
    kinds = [domain.kind for domain in topology.domains]
    assert kinds == [DomainKind.RACK, DomainKind.BLOCK, DomainKind.BLOCK, DomainKind.ZONE, DomainKind.SITE]


def test_sample_physical_host_of_gce() -> None:
    where = sample("gce-physical-host.txt").splitlines()[-1]
    topology = read_gce_instance(json.dumps(GCE | {"attributes": {"physical_host": where}}), host_id="h")
    assert "rack/CCCCCCC/BBBBBB" in members(topology)


def test_sample_labels_of_each_platform() -> None:
    yaml = pytest.importorskip("yaml")
    blocks = yaml.safe_load(sample("k8s-node-labels-topology.yaml"))
    found = {name: read_node_labels(labels, host_id="h", known=GPUS) for name, labels in blocks.items()}
    placed = {name for name, topology in found.items() if topology.domain_of("h", DomainKind.RACK)}
    assert placed == {"gke", "gke_old_daemon", "eks", "oke", "aks", "topograph"}
    assert {name for name, topology in found.items() if topology.domain_of("h/gpu0", DomainKind.NVLINK)} == {
        "nvidia",
        "topograph",
        "ray_node",
    }


@pytest.mark.parametrize(
    ("name", "sku", "nodes"),
    [
        ("gpu-oci-gb200", "NVIDIA GB200", [0, 0, 1, 1]),
        ("gpu-azure-gb300", "NVIDIA GB300", [0, 0, 1, 1]),
        ("gpu-aws", "NVIDIA A100-SXM4-40GB", [-1] * 8),
    ],
)
def test_sample_resource_slices_of_gpus(name: str, sku: str, nodes: list[int]) -> None:
    yaml = pytest.importorskip("yaml")
    text = json.dumps(yaml.safe_load(sample(f"k8s-resourceslice-{name}.yaml")), default=str)
    topology = read_resource_slices(text)
    assert {device.name for device in topology.devices} == {sku}
    assert {device.sku for device in topology.devices} == {sku.removeprefix("NVIDIA ")}
    assert all(device.paths and device.link_nbytes_per_s for device in topology.devices)
    assert [device.numa_node for device in topology.devices] == nodes
    assert topology.notes == ()


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("dranet-aws-efa", [NicKind.EFA] * 4 + [NicKind.ETHERNET] * 3),
        ("dranet-azure-gb300", [None] * 4),
        ("dranet-oci-gb200", [None] * 8),
    ],
)
def test_sample_resource_slices_of_nics(name: str, kinds: list[NicKind | None]) -> None:
    yaml = pytest.importorskip("yaml")
    text = json.dumps(yaml.safe_load(sample(f"k8s-resourceslice-{name}.yaml")), default=str)
    topology = read_resource_slices(text)
    assert sorted((nic.kind for nic in topology.nics), key=str) == sorted(kinds, key=str)
    assert {nic.numa_node for nic in topology.nics} == {0, 1}
