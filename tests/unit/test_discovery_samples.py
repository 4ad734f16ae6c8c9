"""The check-list of discovery: which test has each captured sample and each trap; and samples of no one probe."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from _nvml_library import NvmlLibrary
from _samples import FOLDER, facts, sample
from _sysfs import Sysfs, port
from test_discovery_nvidia import SWITCHED, gpu, pairs

from wsync.discovery import nvidia
from wsync.discovery.ib_text import read_ibv_devinfo
from wsync.discovery.kubernetes import read_node_labels
from wsync.discovery.nics import read_nics
from wsync.discovery.nvidia_smi import read_topo
from wsync.discovery.nvlink import Fabric
from wsync.discovery.nvml import NvLink
from wsync.discovery.slurm import hostlist
from wsync.errors import ProbeError
from wsync.topology import Device, DomainKind, Host, NicKind, Topology

TESTS = Path(__file__).parent
CHECKS = {
    "aws-describe-instance-topology.json": "platform:test_sample_list_of_aws_instances",
    "aws-p4d-nccl-topo.xml": "nccl_xml:test_sample_files_of_clouds",
    "azure-ndv4-nccl-topo.xml": "nccl_xml:test_sample_files_of_clouds",
    "azure-ndv5-nccl-topo.xml": "nccl_xml:test_sample_files_of_clouds",
    "eks-node-topology-labels.json": "platform:test_sample_labels_of_eks_nodes",
    "fi_info-p-efa.txt": "nics:test_sample_fi_info_of_three_generations",
    "gce-physical-host.txt": "platform:test_sample_physical_host_of_gce",
    "hwloc-nvidiaDGX2.xml": "hwloc:test_the_real_dgx_2",
    "ibdev2netdev-h100-imbue.txt": "samples:test_trap_08_the_real_names_of_an_h100_host",
    "ibnetdiscover-example.txt": "fabric_maps:test_a_real_fabric_is_read_whole",
    "ibstat-variants.txt": "nics:test_sample_ibstat_of_two_hosts",
    "ibv_devinfo-roce-and-efa.txt": "samples:test_trap_09_the_real_fragment_of_efa",
    "k8s-node-labels-topology.yaml": "platform:test_sample_labels_of_each_platform",
    "k8s-resourceslice-dranet-aws-efa.yaml": "platform:test_sample_resource_slices_of_nics",
    "k8s-resourceslice-dranet-azure-gb300.yaml": "platform:test_sample_resource_slices_of_nics",
    "k8s-resourceslice-dranet-oci-gb200.yaml": "platform:test_sample_resource_slices_of_nics",
    "k8s-resourceslice-gpu-aws.yaml": "platform:test_sample_resource_slices_of_gpus",
    "k8s-resourceslice-gpu-azure-gb300.yaml": "platform:test_sample_resource_slices_of_gpus",
    "k8s-resourceslice-gpu-oci-gb200.yaml": "platform:test_sample_resource_slices_of_gpus",
    "kfd-topology-mi308x-8.txt": "amd:test_the_real_kfd_tree",
    "netq-nmx-computeNodes.json": "fabric_maps:test_the_sample_of_netq_is_read",
    "neuron-ls-trn2n.rst.txt": "neuron:test_the_real_output",
    "nvidia-smi-q-fabric-fragments.txt": "nvidia_smi:test_trap_04_the_real_fabric_blocks",
    "nvidia-smi-topo-azure-gb300.md.txt": "nvidia_smi:test_trap_07_the_real_table_of_azure_tells_nodes_apart",
    "nvidia-smi-topo-b200-gpu2-off-nvlink.PARTIAL.txt": "nvidia_smi:test_trap_06_the_real_box_with_a_gpu_off_nvlink",
    "nvidia-smi-topo-gb200-numa-lists.PARTIAL.txt": "nvidia_smi:test_trap_02_the_real_numa_lists",
    "nvidia-smi-topo-gb200-nvl72-oci-ansi.txt": "samples:test_the_links_of_real_captures",
    "nvidia-smi-topo-hgx-h100-8nic.txt": "samples:test_the_links_of_real_captures",
    "nvidia-smi-topo-pcie-4x-rtx6000ada.txt": "samples:test_the_links_of_real_captures",
    "nvidia-smi-topo-pcie-6gpu-ansi.txt": "samples:test_the_links_of_real_captures",
    "nvml-mock-profile-gb200.yaml": "samples:test_the_profile_of_a_gb200_through_the_real_library",
    "oci-imds-rdmaTopologyData.json": "platform:test_sample_rdma_topology_of_oci",
    "rccl-topo-8p-gfx940.xml": "nccl_xml:test_sample_model_of_eight_mi300x_is_a_full_mesh",
    "rocm-smi-showtopo-mi308x-8.txt": "amd:test_the_real_showtopo",
    "slurm-topology-block.conf": "slurm:test_sample_blocks",
    "slurm-topology-tree.conf": "slurm:test_sample_tree",
    "slurm-topology.yaml": "fabric_maps:test_the_sample_of_yaml_is_read",
    "sysfs-class-infiniband-h100.txt": "nics:test_sample_the_tree_of_an_h100_host_has_eight_ports_of_the_fabric",
    "topograph-model-nvl72.yaml": "samples:test_the_model_of_four_racks_by_the_labels_that_topograph_gives",
    "tpu-env-variants.txt": "tpu:test_the_real_variants",
}
"""By sample: the module (`test_discovery_...`) and the test that reads it and knows what is right."""
INDEX = "INDEX.tsv"


def known_in(module: str) -> set[str]:
    tree = ast.parse((TESTS / f"test_discovery_{module}.py").read_text())
    return {one.name for one in tree.body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")}


def test_every_sample_has_its_test() -> None:
    for name, check in CHECKS.items():
        module, _, test = check.partition(":")
        assert test in known_in(module), f"{name}: {check}"
    if not FOLDER.is_dir():
        pytest.skip("the captured outputs are not part of the repository")
    assert {path.name for path in FOLDER.iterdir()} - {INDEX} == set(CHECKS)


def test_every_trap_has_its_test() -> None:
    modules = [path.stem.removeprefix("test_discovery_") for path in TESTS.glob("test_discovery_*.py")]
    tested = {found[1] for name in modules for test in known_in(name) if (found := re.match(r"test_trap_(\d\d)", test))}
    listed = re.findall(r"^(\d+)\. ", facts("topology.md").partition("### 2.4")[2].partition("---")[0], re.MULTILINE)
    assert len(listed) == 16
    assert {f"{int(number):02}" for number in listed} == tested


@pytest.mark.parametrize(
    ("name", "between_gpus", "to_nics"),
    [
        ("gb200-nvl72-oci-ansi", {"NV18": 6}, {}),
        ("hgx-h100-8nic", {"NV18": 28}, {"PIX": 8, "NODE": 24, "SYS": 32}),
        ("pcie-4x-rtx6000ada", {"NODE": 2, "SYS": 4}, {"NODE": 8, "SYS": 8}),
        ("pcie-6gpu-ansi", {"PIX": 3, "NODE": 4, "SYS": 8}, {}),
    ],
)
def test_the_links_of_real_captures(name: str, between_gpus: dict[str, int], to_nics: dict[str, int]) -> None:
    found = read_topo(sample(f"nvidia-smi-topo-{name}.txt"), host_id="h")
    gpus = {device.device_id for device in found.devices}
    assert Counter(link.kind for link in found.links if link.ends <= gpus) == between_gpus
    assert Counter(link.kind for link in found.links if len(link.ends & gpus) == 1) == to_nics


def test_trap_08_the_real_names_of_an_h100_host(tmp_path: Path) -> None:
    """Of `ibdev2netdev`: all InfiniBand interfaces are down, and no order of names is that of the buses."""
    sysfs = Sysfs(tmp_path)
    rows = re.findall(
        r"^(\S+) +port +1 +==> +((ib|en)p(\d+)s0(?:f(\d))?\S*) +\((\w+)\)$",
        sample("ibdev2netdev-h100-imbue.txt"),
        re.MULTILINE,
    )
    assert len(rows) == 12
    for name, netdev, kind, bus, function, state in rows:
        is_fabric = kind == "ib"
        place = f"0000:{int(bus):02x}:00.{function or 0}"
        pci_id = "15b3:1021" if is_fabric else "15b3:101d"
        folder = sysfs.function(
            "pci0000:00",
            f"0000:00:{int(bus):02x}.{function or 0}",
            place,
            pci_id=pci_id,
            numa_node=int(bus) // 128,
        )
        active = "4: ACTIVE" if is_fabric or state == "Up" else "1: DOWN"
        rate = "400 Gb/sec (4X NDR)" if is_fabric else "100 Gb/sec (4X EDR)"
        sysfs.rdma(name, folder, port("InfiniBand" if is_fabric else "Ethernet", active, rate))
        sysfs.interface(netdev, folder, operstate=state.lower(), speed="-1")
    found = read_nics(tmp_path, host_id="h")
    rails = sorted((nic for nic in found.nics if nic.rail >= 0), key=lambda nic: nic.rail)
    assert [nic.netdev for nic in rails] == [f"ibp{bus}s0" for bus in (26, 60, 77, 94, 156, 188, 204, 220)]
    assert {(nic.kind, nic.is_up, nic.nbytes_per_s) for nic in rails} == {(NicKind.INFINIBAND, True, 50e9)}
    assert {nic.name: nic.is_up for nic in found.nics if nic.rail < 0} == {
        "mlx5_1": True,
        "mlx5_2": False,
        "mlx5_7": True,
        "mlx5_8": False,
    }


def test_trap_09_the_real_fragment_of_efa() -> None:
    """It has neither name nor ports in the tool's form: refused as it is, known by its part once it has them."""
    fragment = sample("ibv_devinfo-roce-and-efa.txt").partition("# EFA")[2].partition("\n")[2]
    with pytest.raises(ProbeError):
        read_ibv_devinfo(fragment, host_id="h")
    identity = "\n".join(line for line in fragment.splitlines() if "port 1" not in line)
    text = f"hca_id: rdmap16s27\n{identity}\n\tport:\t1\n\t\tstate:\tPORT_ACTIVE (4)\n\t\tlink_layer:\tUnspecified\n"
    (nic,) = read_ibv_devinfo(text, host_id="h").nics
    assert (nic.name, nic.kind, nic.pci_id, nic.is_up) == ("rdmap16s27", NicKind.EFA, "1d0f:efa0", True)


def test_the_profile_of_a_gb200_through_the_real_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's own stand-in for a tray: its clique is 0, and its PCI id is none that a GB200 has."""
    yaml = pytest.importorskip("yaml")
    profile = yaml.safe_load(sample("nvml-mock-profile-gb200.yaml"))
    every, nvlink = profile["device_defaults"], profile["nvlink"]
    link = NvLink(remote="switch", nbytes_per_s=nvlink["bandwidth_per_link_mbps"] * 1e6)
    fabric = Fabric(
        state="completed",
        status="success",
        cluster_uuid=every["fabric"]["cluster_uuid"],
        clique_id=every["fabric"]["clique_id"],
    )
    said: dict[str, Any] = {
        "name": every["name"],
        "pci_id": f"{every['pci']['device_id'] & 0xFFFF:04x}:{every['pci']['device_id'] >> 16:04x}",
        "memory_nbytes": every["memory"]["total_bytes"],
        "compute_capability": tuple(every["compute_capability"].values()),
        "links": (link,) * nvlink["links_per_gpu"],
        "fabric": fabric,
    }
    gpus = [gpu(one["index"], **said, pci=one["pci"]["bus_id"].lower(), uuid=one["uuid"]) for one in profile["devices"]]
    NvmlLibrary(gpus, pairs(len(gpus))).install(monkeypatch)
    found = nvidia.probe("h")
    assert {(d.sku, d.architecture, d.num_links, d.link_nbytes_per_s) for d in found.devices} == {
        ("GB200", "sm_100", len(SWITCHED), 53.125e9)
    }
    assert [d.pci for d in found.devices] == [one.pci for one in gpus]
    (domain,) = found.domains
    assert domain.domain_id == "00000000-0000-0000-0000-000000000001.0"
    assert (len(domain.members), domain.nbytes_per_s) == (len(gpus), pytest.approx(956.25e9))
    assert {link.kind for link in found.links} == {"NV18"}


def test_the_model_of_four_racks_by_the_labels_that_topograph_gives() -> None:
    yaml = pytest.importorskip("yaml")
    model = yaml.safe_load(sample("topograph-model-nvl72.yaml"))
    above = {child: name for name, switch in model["switches"].items() for child in switch["switches"]}
    found = Topology()
    for block in model["blocks"]:
        leaf = block["switch"]
        labels = {
            "fabric.topograph.run/tier-0": leaf,
            "fabric.topograph.run/tier-1": above[leaf],
            "fabric.topograph.run/tier-2": above[above[leaf]],
            "accelerator.topograph.run/domain": block["annotations"]["accelerator.topology.test/domain"],
        }
        for node in block["nodes"]:
            for host_id in hostlist(node):
                devices = tuple(Device(device_id=f"{host_id}/gpu{i}", host_id=host_id) for i in range(4))
                known = Topology(hosts=(Host(host_id=host_id),), devices=devices)
                found = found.joined(known).joined(read_node_labels(labels, host_id=host_id, known=known))
    sizes = {domain.domain_id: len(domain.members) for domain in found.domains}
    leaves = ("leaf-1-1", "leaf-1-2", "leaf-2-1", "leaf-2-2")
    assert {name: sizes[name] for name in sizes if name.startswith("nvl-")} == {
        leaf.replace("leaf", "nvl"): 72 for leaf in leaves
    }
    assert {name: sizes[name] for name in sizes if name.startswith("rack/")} == {
        f"rack/core/spine-{leaf[5]}/{leaf}": 18 for leaf in leaves
    }
    assert (sizes["block/core"], sizes["block/core/spine-1"]) == (2, 2)
    assert {domain.kind for domain in found.domains if domain.is_scale_up} == {DomainKind.NVLINK}
