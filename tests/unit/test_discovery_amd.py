"""AMD: the KFD tree with its partition modes, `rocm-smi --showtopo`, and what is refused of both."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from _samples import sample
from hypothesis import given, settings
from hypothesis import strategies as st

from wsync.discovery.amd import probe, read_showtopo
from wsync.discovery.kfd import NODES, read_kfd
from wsync.errors import ProbeError
from wsync.topology import Device, DomainKind, Source, Topology

HIVE = 0x1234ABCD5678EF01


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def properties(**facts: int) -> str:
    return "".join(f"{name} {value}\n" for name, value in facts.items())


def tree(
    *,
    gpus: int = 2,
    partitions: int = 1,
    dies: int = 8,
    location: str = "function",
    rates: tuple[int, int] = (64000, 64000),
    pci: bool = True,
    mode: str = "",
    device_id: int = 0x74A1,
    hive: int = HIVE,
    unlinked: int = -1,
) -> dict[str, str]:
    """A sysfs tree of one CPU node and `gpus` x `partitions` GPU nodes, each linked to each other.

    `location` says where the driver puts the number of a partition: into the PCI `function`, or `above` the address.
    """
    files = {f"{NODES}/0/properties": properties(cpu_cores_count=96, simd_count=0), f"{NODES}/0/gpu_id": "0\n"}
    numbers = [1 + i for i in range(gpus * partitions)]
    for i in numbers:
        gpu, part = divmod(i - 1, partitions)
        bus = 0x0C + 0x10 * gpu
        files[f"{NODES}/{i}/properties"] = properties(
            cpu_cores_count=0,
            simd_count=304,
            gfx_target_version=90402,
            vendor_id=0x1002,
            device_id=device_id,
            location_id=bus << 8 | (part if location == "function" else part << 28),
            domain=0,
            hive_id=hive,
            unique_id=0xABC0 + gpu,
            num_xcc=dies // partitions,
        )
        size = 206141652992 // partitions
        files[f"{NODES}/{i}/mem_banks/0/properties"] = properties(heap_type=1, size_in_bytes=size, width=8192)
        files[f"{NODES}/{i}/mem_banks/1/properties"] = properties(heap_type=4, size_in_bytes=65536, width=0)
        peers = [0, *(j for j in numbers if j != i)]
        for k, j in enumerate(peers):
            kind = 2 if j == 0 or unlinked in (gpu, (j - 1) // partitions) else 11
            if j and kind == 2:
                continue
            slow, fast = (312, 64000) if j == 0 else rates
            files[f"{NODES}/{i}/io_links/{k}/properties"] = properties(
                type=kind, node_from=i, node_to=j, weight=15, min_bandwidth=slow, max_bandwidth=fast
            )
    for gpu in range(gpus) if pci else ():
        folder = f"bus/pci/devices/0000:{0x0C + 0x10 * gpu:02x}:00.0"
        files |= {
            f"{folder}/vendor": "0x1002\n",
            f"{folder}/device": f"0x{device_id:04x}\n",
            f"{folder}/numa_node": f"{gpu % 2}\n",
            f"{folder}/mem_info_vram_total": "206141652992\n",
            f"{folder}/product_name": "AMD Instinct MI300X OAM\n",
        }
        if mode:
            files[f"{folder}/current_compute_partition"] = f"{mode}\n"
    return files


def read(tmp_path: Path, files: Mapping[str, str]) -> Topology:
    write(tmp_path, files)
    return read_kfd(tmp_path, host_id="h")


def device(topology: Topology, name: str) -> Device:
    return next(one for one in topology.devices if one.device_id == name)


def test_kfd_whole_gpus(tmp_path: Path) -> None:
    found = read(tmp_path, tree(gpus=8, mode="SPX"))
    assert [one.device_id for one in found.devices] == [f"h/gpu{i}" for i in range(8)]
    gpu = device(found, "h/gpu3")
    assert (gpu.index, gpu.vendor, gpu.sku, gpu.architecture) == (3, "amd", "MI300X", "gfx942")
    assert (gpu.pci, gpu.pci_id, gpu.numa_node) == ("0000:3c:00.0", "1002:74a1", 1)
    assert (gpu.memory_nbytes, gpu.name, gpu.uuid) == (206141652992, "AMD Instinct MI300X OAM", "GPU-000000000000abc3")
    assert (gpu.num_links, gpu.link_nbytes_per_s) == (7, 64e9)
    assert (gpu.partition_of, gpu.partition_mode) == ("", "SPX")
    assert gpu.facts["memory_nbytes"] is Source.SYSFS
    assert gpu.facts["sku"] is Source.TABLE
    (hive,) = found.domains
    assert (hive.kind, hive.domain_id) == (DomainKind.XGMI, "xgmi-1234abcd5678ef01")
    assert hive.members == tuple(f"h/gpu{i}" for i in range(8))
    assert hive.nbytes_per_s == 448e9
    assert len(found.links) == 28
    link = found.link("h/gpu2", "h/gpu5")
    assert link is not None
    assert (link.kind, link.nbytes_per_s, link.facts) == ("XGMI", 64e9, {"nbytes_per_s": Source.SYSFS})
    assert found.notes == ()


@pytest.mark.parametrize("location", ["function", "above"])
def test_trap_12_kfd_nodes_are_partitions(tmp_path: Path, location: str) -> None:
    """Eight nodes of two GPUs in CPX mode: two packages of four, one hive, and links between packages only."""
    found = read(tmp_path, tree(gpus=2, partitions=4, dies=4, location=location, device_id=0x74A2, pci=False))
    packages = [one for one in found.devices if not one.partition_of]
    assert [one.device_id for one in packages] == ["h/gpu0", "h/gpu1"]
    assert [one.pci for one in packages] == ["0000:0c:00.0", "0000:1c:00.0"]
    assert {one.index for one in packages} == {-1}
    parts = [one for one in found.devices if one.partition_of]
    assert [(one.device_id, one.index) for one in parts] == [(f"h/gpu{i // 4}/part{i % 4}", i) for i in range(8)]
    assert [one.partition_of for one in parts] == ["h/gpu0"] * 4 + ["h/gpu1"] * 4
    assert {(one.partition_mode, one.sku, one.num_links) for one in parts} == {("CPX", "MI308X", 0)}
    assert {one.memory_nbytes for one in parts} == {206141652992 // 4}
    assert {one.pci for one in parts[:4]} == {"0000:0c:00.0"}
    assert [link.ends for link in found.links] == [{"h/gpu0", "h/gpu1"}]
    (hive,) = found.domains
    assert hive.members == tuple(one.device_id for one in parts), "what a process can open"
    assert hive.nbytes_per_s == 0, "partitions share their GPU's links"


@pytest.mark.parametrize(
    ("partitions", "dies", "told", "mode"),
    [(2, 8, "", "DPX"), (4, 8, "", "QPX"), (8, 8, "", "CPX"), (2, 2, "DPX", "DPX")],
)
def test_partition_modes(tmp_path: Path, partitions: int, dies: int, told: str, mode: str) -> None:
    found = read(tmp_path, tree(gpus=1, partitions=partitions, dies=dies, location="above", mode=told))
    assert {one.partition_mode for one in found.devices if one.partition_of} == {mode}
    assert device(found, "h/gpu0").memory_nbytes == 206141652992


@pytest.mark.parametrize(
    ("compute", "memory", "said"), [("SPX", "NPS1", "SPX/NPS1"), ("", "NPS4", "NPS4"), ("SPX", "UNKNOWN", "SPX")]
)
def test_the_mode_of_the_memory_is_told_with_that_of_the_dies(
    tmp_path: Path, compute: str, memory: str, said: str
) -> None:
    files = tree(gpus=2, mode=compute)
    for bus in ("0c", "1c"):
        files[f"bus/pci/devices/0000:{bus}:00.0/current_memory_partition"] = f"{memory}\n"
    found = read(tmp_path, files)
    assert [(one.device_id, one.partition_mode) for one in found.devices] == [("h/gpu0", said), ("h/gpu1", said)]


def test_gpus_in_different_modes_are_numbered_one_by_one_and_their_indexes_run_on(tmp_path: Path) -> None:
    """HIP counts partitions: the third GPU's index is that of the sixth thing that can be opened."""
    files = tree(gpus=3, partitions=4, dies=4)
    for number in (2, 3, 4, 10, 11, 12):
        files = {name: text for name, text in files.items() if not name.startswith(f"{NODES}/{number}/")}
        files = {
            name: text for name, text in files.items() if "_links/" not in name or f"node_to {number}\n" not in text
        }
    found = read(tmp_path, files)
    assert [(one.device_id, one.index) for one in found.devices] == [
        ("h/gpu0", 0),
        ("h/gpu1", -1),
        *((f"h/gpu1/part{i}", 1 + i) for i in range(4)),
        ("h/gpu2", 5),
    ]


def test_whole_gpus_without_a_mode_have_none(tmp_path: Path) -> None:
    assert {one.partition_mode for one in read(tmp_path, tree()).devices} == {""}


def test_an_unknown_partition_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="OPX"):
        read(tmp_path, tree(mode="OPX"))


def test_several_links_to_one_peer(tmp_path: Path) -> None:
    found = read(tmp_path, tree(rates=(50000, 200000)))
    assert (device(found, "h/gpu0").num_links, device(found, "h/gpu0").link_nbytes_per_s) == (4, 50e9)
    assert found.domains[0].nbytes_per_s == 200e9


def test_without_rates_peers_are_counted_and_the_rate_is_the_tables_share(tmp_path: Path) -> None:
    found = read(tmp_path, tree(gpus=4, rates=(0, 0)))
    assert device(found, "h/gpu0").num_links == 3
    assert device(found, "h/gpu0").facts["link_nbytes_per_s"] is Source.TABLE
    (hive,) = found.domains
    assert (hive.nbytes_per_s, hive.facts["nbytes_per_s"]) == (3 * 64e9, Source.TABLE)
    assert {link.nbytes_per_s for link in found.links} == {0}


def test_rates_of_some_peers_only_are_no_rate(tmp_path: Path) -> None:
    files = tree(gpus=3)
    for i, j in ((1, 2), (2, 1)):
        name = next(name for name, text in files.items() if f"nodes/{i}/io_links" in name and f"node_to {j}\n" in text)
        files[name] = files[name].replace("64000", "0")
    (hive,) = read(tmp_path, files).domains
    assert hive.facts["nbytes_per_s"] is Source.TABLE


def test_a_gpu_without_xgmi_links_is_not_in_its_hive(tmp_path: Path) -> None:
    found = read(tmp_path, tree(gpus=4, unlinked=2))
    assert found.domains[0].members == ("h/gpu0", "h/gpu1", "h/gpu3")
    assert any("h/gpu2" in note and "no xGMI link" in note for note in found.notes)


def test_gpus_without_hive_are_in_no_domain(tmp_path: Path) -> None:
    assert read(tmp_path, tree(hive=0)).domains == ()


def test_an_unknown_gpu_is_described_by_what_was_read(tmp_path: Path) -> None:
    found = read(tmp_path, tree(device_id=0x7FFF))
    gpu = device(found, "h/gpu0")
    assert (gpu.sku, gpu.memory_nbytes, gpu.num_links, gpu.link_nbytes_per_s) == ("", 206141652992, 1, 64e9)
    assert any("1002:7fff" in note for note in found.notes)


def test_architecture_with_a_letter(tmp_path: Path) -> None:
    files = tree(gpus=1)
    name = f"{NODES}/1/properties"
    files[name] = files[name].replace("gfx_target_version 90402", "gfx_target_version 90010")
    assert device(read(tmp_path, files), "h/gpu0").architecture == "gfx90a"


def test_nodes_that_are_closed_to_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel answers EPERM for GPUs that a container was not given; root of a test may read every file."""
    closed: set[Path] = set()
    read_text = Path.read_text

    def guarded(path: Path, *args: str, **more: str) -> str:
        if closed & set(path.parents):
            raise PermissionError(1, "Operation not permitted", str(path))
        return read_text(path, *args, **more)

    monkeypatch.setattr(Path, "read_text", guarded)

    def close(root: Path, *numbers: int) -> None:
        closed.clear()
        closed.update(root / NODES / str(i) for i in numbers)

    whole = tmp_path / "whole"
    write(whole, tree(gpus=4))
    close(whole, 1, 4)
    found = read_kfd(whole, host_id="h")
    assert [(one.device_id, one.pci) for one in found.devices] == [
        ("h/gpu0", "0000:1c:00.0"),
        ("h/gpu1", "0000:2c:00.0"),
    ]
    assert {one.num_links for one in found.devices} == {0}, "how many there are to the others is not to be seen"
    assert found.domains[0].nbytes_per_s == 64e9
    assert any("2 nodes" in note for note in found.notes)
    close(whole, 1, 3, 4)
    assert [domain.members for domain in read_kfd(whole, host_id="h").domains] == [("h/gpu0",)]
    close(whole, *range(5))
    assert read_kfd(whole, host_id="h").devices == ()

    told, untold = tmp_path / "told", tmp_path / "untold"
    write(told, tree(gpus=1, partitions=4, dies=4, mode="CPX"))
    write(untold, tree(gpus=1, partitions=4, dies=4))
    close(told, 1, 2, 4)
    package, part = read_kfd(told, host_id="h").devices
    assert (package.device_id, package.pci, package.memory_nbytes) == ("h/gpu0", "0000:0c:00.0", 206141652992)
    assert (part.partition_of, part.partition_mode, part.pci) == ("h/gpu0", "CPX", "0000:0c:00.0")
    close(untold, 1, 2)
    assert {one.partition_mode for one in read_kfd(untold, host_id="h").devices} == {""}


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("1/properties", "location_id", "location_no", "location_id"),
        ("1/properties", "simd_count 304", "simd_count many", "simd_count"),
        ("1/properties", "device_id 29857", "device_id 2985700", "device_id"),
        ("1/properties", "domain 0", "domain 0\ndomain 0", "no line of its own"),
        ("2/properties", None, "", "no properties"),
        ("1/io_links/1/properties", "node_from 1", "node_from 2", "link of node 2"),
        ("1/io_links/1/properties", "node_to 2", "node_to 77", "not there"),
        ("1/io_links/1/properties", None, "type 11\n", "node_from"),
    ],
)
def test_a_broken_tree_is_refused(tmp_path: Path, name: str, old: str | None, new: str, says: str) -> None:
    files = tree()
    name = f"{NODES}/{name}"
    assert old is None or old in files[name]
    files[name] = new if old is None else files[name].replace(old, new, 1)
    with pytest.raises(ProbeError, match=says):
        read(tmp_path, files)


def test_a_file_that_the_kernel_cannot_read_is_refused(tmp_path: Path) -> None:
    files = tree()
    del files[f"{NODES}/1/properties"]
    (tmp_path / NODES / "1/properties").mkdir(parents=True)
    with pytest.raises(ProbeError, match="cannot be read"):
        read(tmp_path, files)


def test_no_tree_and_no_gpus(tmp_path: Path) -> None:
    assert read_kfd(tmp_path, host_id="h") == Topology()
    assert read(tmp_path, {f"{NODES}/0/properties": properties(simd_count=0)}) == Topology()


TEXT = st.one_of(st.text(max_size=60), st.binary(max_size=60).map(lambda raw: raw.decode("latin-1")))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_text_in_the_tree_is_read_or_refused(data: st.DataObject) -> None:
    files = tree(gpus=2, partitions=2, dies=4)
    name = data.draw(st.sampled_from(sorted(files)))
    lines = files[name].splitlines(keepends=True)
    cut = data.draw(st.integers(0, len(lines)))
    files[name] = "".join(lines[:cut]) + data.draw(TEXT) + "".join(lines[cut + data.draw(st.integers(0, 2)) :])
    with tempfile.TemporaryDirectory() as root:
        try:
            found = read(Path(root), {name: text.encode("utf-8", "replace").decode() for name, text in files.items()})
        except ProbeError:
            return
    assert msgspec.json.decode(msgspec.json.encode(found), type=Topology) == found


def showtopo(kinds: list[list[str]], *, numa: bool = True) -> str:
    """What the tool prints, for a square table of link types."""
    names = [f"GPU{i}" for i in range(len(kinds))]
    head = "       " + "".join(f"{name:13}" for name in names)

    def table(title: str, rows: list[list[str]]) -> str:
        body = (f"{name:7}" + "".join(f"{cell:13}" for cell in row) for name, row in zip(names, rows, strict=True))
        return "\n".join([f"{'=' * 30} {title} {'=' * 30}", head, *body, ""])

    hops = [["0" if cell == "0" else "1" for cell in row] for row in kinds]
    parts = [
        f"{'=' * 20} ROCm System Management Interface {'=' * 20}",
        "WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status",
        "",
        table("Weight between two GPUs", hops),
        table("Hops between two GPUs", hops),
        table("Link Type between two GPUs", kinds),
    ]
    if numa:
        parts.append(f"{'=' * 30} Numa Nodes {'=' * 30}")
        for i in range(len(names)):
            parts.append(f"GPU[{i}]\t\t: (Topology) Numa Node: {i // 2}")
            parts.append(f"GPU[{i}]\t\t: (Topology) Numa Affinity: {i // 2}")
    return "\n".join([*parts, f"{'=' * 20} End of ROCm SMI Log {'=' * 20}", ""])


def mesh(size: int, kind: str = "XGMI") -> list[list[str]]:
    return [["0" if i == j else kind for j in range(size)] for i in range(size)]


def test_showtopo_mesh() -> None:
    found = read_showtopo(showtopo(mesh(4)), host_id="h")
    assert [(one.device_id, one.index, one.numa_node) for one in found.devices] == [
        (f"h/gpu{i}", i, i // 2) for i in range(4)
    ]
    assert found.devices[3].facts["numa_node"] is Source.DRIVER
    assert [(link.kind, link.nbytes_per_s) for link in found.links] == [("XGMI", 0)] * 6
    (domain,) = found.domains
    assert (domain.domain_id, domain.members) == ("h/xgmi0", tuple(f"h/gpu{i}" for i in range(4)))
    assert found.notes == ()


def test_showtopo_islands_are_by_pair() -> None:
    kinds = mesh(4, "PCIE")
    for i, j in ((0, 1), (2, 3)):
        kinds[i][j] = kinds[j][i] = "XGMI"
    found = read_showtopo(showtopo(kinds), host_id="h")
    assert [domain.members for domain in found.domains] == [("h/gpu0", "h/gpu1"), ("h/gpu2", "h/gpu3")]
    assert sorted(link.kind for link in found.links) == ["PCIE"] * 4 + ["XGMI"] * 2


def test_showtopo_without_numa_and_with_unknown_links() -> None:
    found = read_showtopo(showtopo(mesh(2, "XXXX"), numa=False), host_id="h")
    assert (found.links, found.domains) == ((), ())
    assert {one.numa_node for one in found.devices} == {-1}
    assert any("XXXX" in note for note in found.notes)


def test_showtopo_of_one_gpu() -> None:
    found = read_showtopo(showtopo(mesh(1)), host_id="h")
    assert (len(found.devices), found.domains, found.links) == (1, (), ())


def test_trap_12_showtopo_has_more_members_than_a_hive_has_gpus() -> None:
    found = read_showtopo(showtopo(mesh(16)), host_id="h")
    assert any("16 members are partitions" in note for note in found.notes)


def test_trap_03_merged_cells_in_showtopo_are_refused() -> None:
    text = showtopo(mesh(3)).replace("XGMI         XGMI", "XGMIXGMI", 1)
    assert "XGMIXGMI" in text
    with pytest.raises(ProbeError, match="not square"):
        read_showtopo(text, host_id="h")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("End of ROCm SMI Log", "End", "no end"),
        ("Link Type between two GPUs", "Link Kind between two GPUs", "no table"),
        ("0            XGMI", "0            PCIE", "disagree"),
        ("0            XGMI", "0            NVLK", "NVLK"),
        ("0            XGMI", "1            XGMI", "itself"),
        ("GPU[1]\t\t: (Topology) Numa Node", "GPU[9]\t\t: (Topology) Numa Node", "GPU9"),
        ("Hops between two GPUs", "Weight between two GPUs", "two parts"),
    ],
)
def test_broken_showtopo_is_refused(old: str, new: str, says: str) -> None:
    text = showtopo(mesh(3))
    assert old in text
    with pytest.raises(ProbeError, match=says):
        read_showtopo(text.replace(old, new, 1), host_id="h")


def test_every_cut_of_showtopo_is_refused() -> None:
    lines = showtopo(mesh(3)).splitlines()
    for end in range(len(lines)):
        with pytest.raises(ProbeError):
            read_showtopo("\n".join(lines[:end]), host_id="h")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_text_is_read_or_refused_as_showtopo(data: st.DataObject) -> None:
    words = showtopo(mesh(2)).split(" ")
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(words) - 1))
        words[at : at + data.draw(st.integers(0, 2))] = data.draw(st.lists(TEXT, max_size=2))
        words = words or [""]
    try:
        found = read_showtopo(" ".join(words), host_id="h")
    except ProbeError:
        return
    assert isinstance(found, Topology)


def tool(folder: Path, name: str, body: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def test_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert probe("h", sysfs=tmp_path / "empty") == Topology()
    files = tree(gpus=2)
    write(tmp_path / "kfd", files)
    assert len(probe("h", sysfs=tmp_path / "kfd").devices) == 2
    write(tmp_path / "pci", {name: text for name, text in files.items() if name.startswith("bus/")})
    with pytest.raises(ProbeError, match="neither"):
        probe("h", sysfs=tmp_path / "pci")
    (tmp_path / "out.txt").write_text(showtopo(mesh(2)))
    tool(
        tmp_path / "bin",
        "rocm-smi",
        f'test "$*" = --showtopo && while read -r l; do echo "$l"; done < {tmp_path}/out.txt',
    )
    assert [one.pci_id for one in probe("h", sysfs=tmp_path / "pci").devices] == ["1002:74a1"] * 2
    (tmp_path / "out.txt").write_text(showtopo(mesh(4)))
    assert {one.pci_id for one in probe("h", sysfs=tmp_path / "pci").devices} == {""}, "these are partitions"
    tool(tmp_path / "bin", "rocm-smi", "echo no permission >&2; exit 3")
    with pytest.raises(ProbeError, match="status 3: no permission"):
        probe("h", sysfs=tmp_path / "pci")


def test_the_real_kfd_tree(tmp_path: Path) -> None:
    parts = re.split(r"^### /sys/(.*)$", sample("kfd-topology-mi308x-8.txt"), flags=re.MULTILINE)
    found = read(tmp_path, {name: text.strip("\n") for name, text in zip(parts[1::2], parts[2::2], strict=True)})
    packages = [one for one in found.devices if not one.partition_of]
    parts_of = [one.partition_of for one in found.devices if one.partition_of]
    assert [one.pci for one in packages[:2]] == ["0000:0a:00.0", "0000:80:00.0"]
    assert (len(packages), len(parts_of), {parts_of.count(one.device_id) for one in packages}) == (8, 32, {4})
    assert {(one.sku, one.num_links) for one in packages} == {("MI308X", 7)}
    assert {one.partition_mode for one in found.devices if one.partition_of} == {"CPX"}
    (hive,) = found.domains
    assert (hive.domain_id, len(hive.members)) == (f"xgmi-{2095653680343411291:016x}", 32)
    assert len(found.links) == 28


def test_the_real_showtopo() -> None:
    found = read_showtopo(sample("rocm-smi-showtopo-mi308x-8.txt"), host_id="h")
    assert [one.numa_node for one in found.devices] == [0] * 4 + [1] * 4
    assert (len(found.links), [len(domain.members) for domain in found.domains]) == (28, [8])
