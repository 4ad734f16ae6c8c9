"""All probes together on one machine: what they say of one thing becomes one record, and one that fails is noted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from _nvml_library import NvmlLibrary
from _sysfs import Sysfs, port
from test_discovery_hwloc import machine as hwloc_machine
from test_discovery_nvidia import gpu, pairs

from wsync.discovery.detect import detect
from wsync.discovery.nics import read_nics
from wsync.discovery.skus import SKUS
from wsync.paths import between
from wsync.topology import Device, DomainKind, NicKind, Source, Topology

SMI = """#!/bin/sh
echo 'nvidia-smi has failed because it could not communicate with the driver' >&2
exit 9
"""

TOPO = """#!/bin/sh
if [ "$1" = topo ]; then
echo '	GPU0	GPU1	CPU Affinity	NUMA Affinity'
echo 'GPU0	 X 	NV18	0-7	0'
echo 'GPU1	NV18	 X 	0-7	0'
fi
"""


@pytest.fixture
def hgx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sysfs:
    """Two H100 with NVLink and a ConnectX-7 next to each, on two NUMA nodes; a management NIC; no cloud."""
    sysfs = Sysfs(tmp_path)
    for index, node in ((0, 0), (1, 1)):
        root, bridge = f"pci0000:{index}0", f"0000:{index}0:01.0"
        bus = f"0000:{0x18 + index:02x}:00.0"
        sysfs.function(root, bridge, bus, pci_id="10de:2330", numa_node=node)
        nic = sysfs.function(root, bridge, f"0000:{0x48 + index:02x}:00.0", pci_id="15b3:1021", numa_node=node)
        sysfs.rdma(f"mlx5_{index}", nic, port())
    board = sysfs.function("pci0000:00", "0000:00:1f.0", "0000:03:00.0", pci_id="8086:1521", numa_node=0)
    sysfs.interface("eno1", board, operstate="up", speed="1000")
    sysfs.write("sys/devices/system/node/has_cpu", "0-1")
    sysfs.write("proc/meminfo", "MemTotal:       2113192960 kB")
    NvmlLibrary([gpu(0), gpu(1, numa_nodes=(1,))], pairs(2)).install(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in [name for name in os.environ if name.startswith(("TPU_", "SLURM_", "NCCL_", "HWLOC_"))]:
        monkeypatch.delenv(name)
    return sysfs


def test_a_whole_machine_has_domain_rails_distances_sku_and_paths(hgx: Sysfs) -> None:
    topology = detect("h", root=hgx.root)
    assert topology.notes == ()
    (host,) = topology.hosts
    assert (host.num_numa_nodes, host.memory_nbytes) == (2, 2113192960 * 1024)
    assert [(d.device_id, d.sku, d.numa_node) for d in topology.devices] == [
        ("h/gpu0", "H100-SXM5", 0),
        ("h/gpu1", "H100-SXM5", 1),
    ]
    assert topology.devices[0].facts["memory_nbytes"] is Source.DRIVER
    assert topology.devices[0].facts["paths"] is Source.TABLE
    assert set(topology.devices[0].paths) >= {"cuda_ipc", "ucx"}
    nics = {nic.name: nic for nic in topology.nics}
    assert {name: (nic.kind, nic.rail, nic.nbytes_per_s) for name, nic in nics.items()} == {
        "mlx5_0": (NicKind.INFINIBAND, 0, 50e9),
        "mlx5_1": (NicKind.INFINIBAND, 1, 50e9),
        "eno1": (NicKind.ETHERNET, -1, 125e6),
    }
    (domain,) = topology.domains
    assert (domain.kind, domain.members) == (DomainKind.NVLINK, ("h/gpu0", "h/gpu1"))
    kinds = {tuple(sorted(link.ends)): link.kind for link in topology.links}
    assert kinds["h/gpu0", "h/mlx5_0"] == "PIX"
    assert kinds["h/gpu0", "h/mlx5_1"] == "SYS"
    assert kinds["h/gpu0", "h/gpu1"] == "NV18"
    assert [path.name for path in between(topology, "h/gpu0", "h/gpu1")] == ["cuda_ipc", "shm"]


def test_a_probe_that_fails_leaves_a_note_and_the_others_their_facts(
    hgx: Sysfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    NvmlLibrary([], []).install(monkeypatch)
    tool = hgx.write("bin/nvidia-smi", SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/bin:/usr/bin")
    hgx.write("var/run/nvidia-topologyd/virtualTopology.xml", "<system")
    topology = detect("h", root=hgx.root)
    assert topology.devices == ()
    assert [nic.name for nic in topology.nics] == ["mlx5_0", "mlx5_1", "eno1"]
    assert len(topology.notes) == 2
    assert topology.notes[0].startswith("nvidia-smi: ")
    assert "could not communicate with the driver" in topology.notes[0]
    assert topology.notes[1].startswith("NCCL's file: no topology file of NCCL")


def test_a_file_of_the_platform_is_joined_in_the_ids_of_the_drivers(hgx: Sysfs) -> None:
    hgx.write(
        "var/run/nvidia-topologyd/virtualTopology.xml",
        """<system version="1"><cpu numaid="0" affinity="ff" arch="x86_64" vendor="GenuineIntel">
        <pci busid="0000:11:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
        <pci busid="0000:18:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"/>
        <pci busid="0000:49:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16"/>
        </pci></cpu></system>""",
    )
    topology = detect("h", root=hgx.root)
    assert topology.notes == ()
    assert [device.device_id for device in topology.devices] == ["h/gpu0", "h/gpu1"]
    link = topology.link("h/gpu0", "h/mlx5_1")
    assert link is not None
    assert link.kind == "PIX"


def test_a_file_of_the_whole_machine_says_nothing_of_what_a_container_was_not_given(hgx: Sysfs) -> None:
    """Four GPUs in the file; the driver shows the last two of them, which it calls 0 and 1."""
    gpus = "".join(f'<pci busid="0000:{bus}:00.0" class="0x030200"/>' for bus in (16, 17, 18, 19))
    nics = "".join(f'<pci busid="0000:{bus}:00.0" class="0x020700"/>' for bus in (49, 50))
    hgx.write(
        "var/run/nvidia-topologyd/virtualTopology.xml",
        f"""<system version="1"><cpu numaid="0" affinity="ff" arch="x86_64" vendor="GenuineIntel">
        <pci busid="0000:11:00.0" class="0x060400">{gpus}{nics}</pci>
        <nic><net name="eth9" speed="10000"/></nic></cpu></system>""",
    )
    topology = detect("h", root=hgx.root)
    assert [(device.device_id, device.pci) for device in topology.devices] == [
        ("h/gpu0", "0000:18:00.0"),
        ("h/gpu1", "0000:19:00.0"),
    ]
    assert [nic.name for nic in topology.nics] == ["mlx5_0", "mlx5_1", "eno1"]
    kinds = {tuple(sorted(link.ends)): link.kind for link in topology.links}
    assert kinds["h/gpu0", "h/mlx5_1"] == kinds["h/gpu1", "h/mlx5_1"] == "PIX"
    assert topology.notes == (
        "NCCL's file: no device or NIC of h is the one at 0000:16:00.0, 0000:17:00.0, 0000:50:00.0, eth9",
    )


def test_a_file_of_hwloc_tells_distances_where_sysfs_has_no_tree(hgx: Sysfs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container's sysfs shows no PCI device; the file is of the whole machine, of four GPUs."""
    for name in ("bus", "class"):
        (hgx.root / "sys" / name).rename(hgx.root / f"hidden-{name}")
    monkeypatch.setenv("HWLOC_XMLFILE", str(hgx.root / "machine.xml"))
    hgx.write("machine.xml", hwloc_machine((0x16, 0x17, 0x18, 0x19), "mlx5_{}"))
    topology = detect("h", root=hgx.root)
    assert topology.hosts[0].num_numa_nodes == 2
    assert [(device.device_id, device.pci) for device in topology.devices] == [
        ("h/gpu0", "0000:18:00.0"),
        ("h/gpu1", "0000:19:00.0"),
    ]
    assert [nic.name for nic in topology.nics] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    kinds = {tuple(sorted(link.ends)): link.kind for link in topology.links}
    assert (kinds["h/gpu0", "h/mlx5_2"], kinds["h/gpu0", "h/mlx5_0"]) == ("PIX", "SYS")
    assert kinds["h/gpu0", "h/gpu1"] == "NV18"
    assert len([link for link in topology.links if link.ends == {"h/gpu0", "h/gpu1"}]) == 1
    assert topology.notes[-1] == "hwloc's file: no device or NIC of h is the one at 0000:16:00.0, 0000:17:00.0"
    monkeypatch.setenv("HWLOC_XMLFILE", str(hgx.root / "none.xml"))
    assert detect("h", root=hgx.root).notes[-1].startswith("hwloc's file: ")


def test_a_driver_that_cannot_be_asked_is_noted_and_its_tool_is_asked(
    hgx: Sysfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    NvmlLibrary([gpu(0)], [], {("nvmlInitWithFlags", -1): 999}).install(monkeypatch)
    tool = hgx.write("bin/nvidia-smi", TOPO)
    tool.chmod(0o755)
    topology = detect("h", root=hgx.root)
    nameless = [f"h/gpu{n}: no SKU of the table (neither a PCI id nor a name)" for n in range(2)]
    assert [note.split(";")[0] for note in topology.notes[:2]] == nameless
    assert topology.notes[2].startswith("nvidia: NVML cannot be started")
    assert [device.device_id for device in topology.devices] == ["h/gpu0", "h/gpu1"]
    link = topology.link("h/gpu0", "h/gpu1")
    assert link is not None
    assert link.kind == "NV18"


def test_what_contradicts_the_rest_is_noted_and_not_believed(hgx: Sysfs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A switch may not have the name of a device."""
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "s0.node7")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.node")
    topology = detect("rack/s0", root=hgx.root)
    assert topology.notes == (
        "slurm: SLURM_TOPOLOGY_ADDR contradicts itself: 'rack/s0' is a host and a domain; ids are unique",
    )
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "gpu0.node7")
    topology = detect("rack", root=hgx.root)
    assert [device.device_id for device in topology.devices] == ["rack/gpu0", "rack/gpu1"]
    assert topology.notes == (
        "slurm contradicts what is known already, and is not believed: 'rack/gpu0' is a device and a domain",
    )


def test_labels_of_the_node_put_its_devices_into_a_domain(hgx: Sysfs) -> None:
    clique = "3143b15b-c2cd-192b-28cc-9b5473fb5b93.7"
    topology = detect("h", root=hgx.root, labels={"nvidia.com/gpu.clique": clique})
    assert {d.domain_id: d.members for d in topology.domains if d.is_scale_up}[clique] == ("h/gpu0", "h/gpu1")


def test_no_cloud_is_asked_when_told_so_and_none_where_there_is_no_cloud(
    hgx: Sysfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answer(method: str, url: str, headers: object) -> str:
        asked.append(url)
        raise OSError("no route")

    monkeypatch.setattr("wsync.discovery.platform._answer", answer)
    detect("h", root=hgx.root)
    assert asked == []
    hgx.write("sys/class/dmi/id/sys_vendor", "Google")
    assert detect("h", root=hgx.root, is_offline=True).notes == ()
    assert asked == []
    (note,) = detect("h", root=hgx.root).notes
    assert note.startswith("platform: the metadata service of gcp does not answer: no route")
    assert len(asked) == 1


def test_what_is_no_ProbeError_is_our_own_bug_and_not_hidden(hgx: Sysfs, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(root: Path, *, host_id: str) -> Topology:
        raise ZeroDivisionError

    monkeypatch.setattr("wsync.discovery.nics.read_nics", broken)
    with pytest.raises(ZeroDivisionError):
        detect("h", root=hgx.root)


@pytest.mark.parametrize("sku", [row.sku for row in SKUS if row.pci_ids])
def test_every_accelerator_of_the_table_gets_its_paths(sku: str) -> None:
    from wsync.discovery.hardware import described

    row = next(row for row in SKUS if row.sku == sku)
    kind = row.instance_types[0] if row.instance_types else ""
    device = Device(
        device_id="d",
        host_id="h",
        pci_id=row.pci_ids[0],
        name=row.names[0] if row.names else "",
        num_links=row.num_links,
    )
    found, _ = described(device, instance_type=kind)
    assert found.sku == sku
    assert found.paths == tuple(path.value for path in row.paths)
    assert bool(found.paths) != bool(row.reason)


def test_a_mig_partition_has_no_way_to_its_peers() -> None:
    from wsync.discovery.hardware import described

    whole = Device(device_id="g", host_id="h", pci_id="10de:2330", name="NVIDIA H100 80GB HBM3")
    part = msgspec.structs.replace(whole, device_id="g/part0", partition_of="g", partition_mode="1g.10gb")
    lost = set(described(whole)[0].paths) - set(described(part)[0].paths)
    assert lost == {"cuda_ipc", "nvls"}


def test_this_machine_is_shown_with_its_own_nics(tmp_path: Path) -> None:
    """`wsync topo` beside an independent look at sysfs: interfaces that have a device behind them."""
    folder = Path("/sys/class/net")
    interfaces = {entry.name for entry in folder.iterdir() if (entry / "device").exists()} if folder.is_dir() else set()
    file, page = tmp_path / "topology.json", tmp_path / "topology.html"
    command = [sys.executable, "-m", "wsync", "topo", "--offline", "--host", "here", "--json", file, "--html", page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    topology = Topology.load(file)
    assert {nic.netdev for nic in topology.nics if nic.netdev} <= interfaces
    expected = {nic.nic_id for nic in read_nics(Path("/"), host_id="here").nics}
    assert {nic.nic_id for nic in topology.nics} == expected
    if not topology.notes:
        assert interfaces <= {nic.netdev for nic in topology.nics}
    assert topology.hosts[0].memory_nbytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for nic in topology.nics:
        assert f"NIC {nic.nic_id.removeprefix('here/')}:" in done.stdout
        assert nic.name in page.read_text()
    again = subprocess.run(
        [sys.executable, "-m", "wsync", "topo", "--file", file], capture_output=True, text=True, timeout=60, check=True
    )
    assert again.stdout == done.stdout
