"""`nvidia-smi` as text: the matrix of `topo -m` is believed whole or not at all, the fabric of `-q` by three marks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsync.discovery.nvidia_smi import probe, read_fabrics, read_identities, read_topo
from wsync.discovery.nvlink import Fabric
from wsync.errors import ProbeError
from wsync.topology import Topology

SAMPLES = Path(__file__).parents[3] / "shared/data/topology"
UUID = "5a5a0001-c2cd-192b-28cc-9b5473fb5b93"


def sample(name: str) -> str:
    path = SAMPLES / name
    if not path.is_file():
        pytest.skip(f"the sample {name} is not here")
    return path.read_text()


def matrix(
    rows: dict[str, list[str]],
    affinity: dict[str, tuple[str, str]] | None = None,
    *,
    nics: dict[str, str] | None = None,
    is_tool: bool = True,
) -> str:
    """The matrix as the tool prints it, or as it is pasted; `affinity` has CPUs and NUMA nodes per row."""
    titles = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]
    lines = ["\x1b[4m\t" + "\t".join([*rows, *titles]) + "\x1b[0m"] if is_tool else ["   ".join(["", *rows, *titles])]
    for name, cells in rows.items():
        cpus, numa = (affinity or {}).get(name, ("", ""))
        rest = (
            [cpus, numa, "", "N/A" if name.startswith("GPU") else ""] if is_tool else [cpus, numa, "N/A"] * bool(cpus)
        )
        shown = [f" {cell} " if cell == "X" and is_tool else cell for cell in cells]
        lines.append(("\t" if is_tool else "     ").join([name, *shown, *rest]))
    lines += ["", "Legend:", "", "  X    = Self", ""]
    if nics:
        lines += ["NIC Legend:", "", *(f"  {label}: {name}" for label, name in nics.items())]
    return "\n".join(lines) + "\n"


def square(names: list[str], kind: str, **other: str) -> dict[str, list[str]]:
    """Every pair `kind`, but for those named `A_B`."""
    return {a: ["X" if a == b else other.get(f"{a}_{b}", other.get(f"{b}_{a}", kind)) for b in names] for a in names}


TWO_AND_TWO = square(["GPU0", "GPU1", "NIC0", "NIC1"], "SYS", GPU0_NIC0="PIX", GPU1_NIC1="PIX", GPU0_GPU1="NV6")
TWO_NUMA = {"GPU0": ("0-23", "0"), "GPU1": ("24-47", "1")}
NAMES = {"NIC0": "mlx5_4", "NIC1": "mlx5_0"}


def test_trap_01_the_head_has_escape_codes_and_columns_do_not_line_up() -> None:
    tool = read_topo(matrix(TWO_AND_TWO, TWO_NUMA, nics=NAMES), host_id="h")
    pasted = read_topo(matrix(TWO_AND_TWO, TWO_NUMA, nics=NAMES, is_tool=False), host_id="h")
    assert tool == pasted
    assert [device.numa_node for device in tool.devices] == [0, 1]
    assert [nic.nic_id for nic in tool.nics] == ["h/mlx5_4", "h/mlx5_0"]
    assert tool.link("h/gpu1", "h/mlx5_0").kind == "PIX"
    assert tool.link("h/gpu0", "h/gpu1").kind == "NV6"
    assert [(domain.domain_id, domain.members) for domain in tool.domains] == [("h/nvlink0", ("h/gpu0", "h/gpu1"))]
    assert tool.notes == ()


@pytest.mark.parametrize(
    ("numa", "node"), [("0,3-9,11-17", 0), ("1,19-25,27-33", 1), ("1", 1), ("2-3", 2), ("", -1), ("N/A", -1)]
)
@pytest.mark.parametrize("cpus", ["", "0-71"])
def test_trap_02_cpu_cells_may_be_empty_and_numa_is_a_list_of_which_the_first_counts(
    cpus: str, numa: str, node: int
) -> None:
    text = matrix(square(["GPU0", "GPU1"], "NV18"), {"GPU0": (cpus, numa), "GPU1": ("", "")})
    assert [device.numa_node for device in read_topo(text, host_id="h").devices] == [node, -1]


def test_trap_02_without_tabs_a_short_row_does_not_say_which_cell_is_missing() -> None:
    text = "   GPU0 GPU1 CPU Affinity NUMA Affinity GPU NUMA ID\nGPU0 X NV4 0 2\nGPU1 NV4 X 0-3 1 N/A\n"
    assert [device.numa_node for device in read_topo(text, host_id="h").devices] == [-1, 1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("X \tSYS", "XSYS"),
        ("PIX\tSYS", "PIXSYS"),
        ("GPU0\t X ", "GPU0 X"),
        ("NV6\tPIX", "NV6\n\tPIX"),
        ("PIX\tSYS", "PIX"),
        ("GPU1\tNV6", "GPU2\tNV6"),
        ("NV6", "NVX"),
        ("\t24-47", "\tPIX\t24-47"),
        ("\t1\t\tN/A", "\tone\t\tN/A"),
        ("GPU0\tGPU1\tNIC0", "GPU0\tGPU1 NIC 0"),
    ],
)
def test_trap_03_merged_wrapped_and_missing_cells_are_refused(old: str, new: str) -> None:
    text = matrix(TWO_AND_TWO, TWO_NUMA, nics=NAMES)
    assert old in text
    with pytest.raises(ProbeError, match="unwrapped"):
        read_topo(text.replace(old, new, 1), host_id="h")


def test_trap_03_every_cut_of_a_matrix_is_refused_or_complete() -> None:
    text = matrix(TWO_AND_TWO, TWO_NUMA, nics=NAMES)
    end = text.index("\n\nLegend")
    for cut in range(end - 5):  # What ends the last row is empty.
        with pytest.raises(ProbeError):
            read_topo(text[:cut], host_id="h")
    assert len(read_topo(text[: end - 5], host_id="h").links) == 6


@pytest.mark.parametrize("is_tool", [True, False])
def test_trap_03_a_head_that_lost_a_name_is_refused(is_tool: bool) -> None:
    text = matrix(TWO_AND_TWO, is_tool=is_tool)
    for name in TWO_AND_TWO:
        with pytest.raises(ProbeError):
            read_topo(text.replace(name, "", 1), host_id="h")
    last = next(line for line in text.splitlines() if line.startswith("NIC1"))
    with pytest.raises(ProbeError):
        read_topo(text.replace("NIC1", "", 1).replace(last + "\n", ""), host_id="h")
    for line in text.splitlines()[1:5]:
        with pytest.raises(ProbeError):
            read_topo(text.replace(line + "\n", "", 1), host_id="h")


def test_a_matrix_of_two_opinions_is_refused() -> None:
    rows = {"GPU0": ["X", "NV4"], "GPU1": ["SYS", "X"]}
    with pytest.raises(ProbeError, match="NV4 one way and SYS back"):
        read_topo(matrix(rows), host_id="h")
    with pytest.raises(ProbeError, match="X is for itself"):
        read_topo(matrix({"GPU0": ["X", "X"], "GPU1": ["X", "X"]}), host_id="h")


def test_trap_06_islands_are_made_pair_by_pair() -> None:
    names = [f"GPU{n}" for n in range(6)]
    off = {f"GPU2_{other}": "NODE" for other in names if other != "GPU2"}
    topology = read_topo(matrix(square(names, "NV18", **off)), host_id="h")
    (domain,) = topology.domains
    assert domain.members == tuple(f"h/gpu{n}" for n in (0, 1, 3, 4, 5))
    assert topology.link("h/gpu2", "h/gpu3").kind == "NODE"


@pytest.mark.parametrize("kind", ["NODE", "SYS"])
def test_trap_07_where_all_nics_look_alike_the_matrix_tells_no_distance(kind: str) -> None:
    rows = square(["GPU0", "GPU1", "NIC0", "NIC1"], kind, GPU0_GPU1="NV18")
    blind = read_topo(matrix(rows, TWO_NUMA, nics=NAMES), host_id="h")
    assert [link.kind for link in blind.links] == ["NV18", kind]
    assert any("NUMA node and PCI domain" in note for note in blind.notes)
    one_node = {"GPU0": ("0-23", "0"), "GPU1": ("0-23", "0")}
    assert len(read_topo(matrix(rows, one_node, nics=NAMES), host_id="h").links) == 6


def test_a_nic_without_a_legend_is_named_as_in_the_matrix() -> None:
    topology = read_topo(matrix(TWO_AND_TWO, nics={"NIC1": "mlx5_0"}), host_id="h")
    assert [nic.name for nic in topology.nics] == ["NIC0", "mlx5_0"]
    assert topology.notes == ("h/NIC0: the NIC legend does not name it",)
    with pytest.raises(ProbeError, match="contradicts itself"):
        read_topo(matrix(TWO_AND_TWO, nics={"NIC0": "mlx5_0", "NIC1": "mlx5_0"}), host_id="h")


def test_old_tools_name_nics_in_the_head() -> None:
    topology = read_topo(matrix(square(["GPU0", "mlx5_3"], "PHB")), host_id="h")
    assert [nic.nic_id for nic in topology.nics] == ["h/mlx5_3"]


def fabric(state: str = "Completed", status: str = "Success", clique: str = "32766", uuid: str = UUID) -> str:
    return (
        "    Fabric\n"
        f"        State                             : {state}\n"
        f"        Status                            : {status}\n"
        f"        CliqueId                          : {clique}\n"
        f"        ClusterUUID                       : {uuid}\n"
        "        Health\n"
        "            Bandwidth                     : Full\n"
    )


def xml(state: str = "Completed", status: str = "Success", clique: str = "32766", uuid: str = UUID) -> str:
    return (
        f"<fabric>\n\t<state>{state}</state>\n\t<status>{status}</status>\n\t<cliqueId>{clique}</cliqueId>\n"
        f"\t<clusterUuid>{uuid}</clusterUuid>\n\t<health>\n\t</health>\n</fabric>\n"
    )


@pytest.mark.parametrize("block", [fabric, xml])
def test_the_fabric_names_the_domain(block) -> None:
    text = matrix(square(["GPU0", "GPU1"], "NV18"))
    topology = read_topo(text, host_id="h", fabrics=read_fabrics(f"GPU a\n{block()}GPU b\n{block()}"))
    assert [domain.domain_id for domain in topology.domains] == [f"{UUID}.32766"]
    assert topology.notes == ()


@pytest.mark.parametrize("block", [fabric, xml])
@pytest.mark.parametrize(
    "said",
    [
        {"status": "Insufficient Resources", "clique": "0", "uuid": "00000000-0000-0000-0000-000000000000"},
        {"status": "Insufficient Resources"},
        {"uuid": "00000000-0000-0000-0000-000000000000", "clique": "0"},
        {"state": "In Progress"},
        {"uuid": "N/A"},
    ],
)
def test_trap_04_a_fabric_is_believed_only_if_completed_and_success_and_not_zero(block, said: dict[str, str]) -> None:
    text = matrix(square(["GPU0", "GPU1"], "NV18"))
    topology = read_topo(text, host_id="h", fabrics=read_fabrics(block(**said) * 2))
    assert [domain.domain_id for domain in topology.domains] == ["h/nvlink0"]
    assert sum("fabric not believed" in note for note in topology.notes) == 2


@pytest.mark.parametrize("block", [fabric, xml])
def test_a_gpu_that_knows_no_fabric_is_no_note(block) -> None:
    said = read_fabrics(block("N/A", "N/A", "N/A", "N/A"))
    assert said == (Fabric(state="not supported"),)
    assert read_topo(matrix({"GPU0": ["X"]}), host_id="h", fabrics=said).notes == ()


@pytest.mark.parametrize("block", [fabric, xml])
@pytest.mark.parametrize(
    "said", [{"state": "Completedly"}, {"clique": "0x7ffe"}, {"clique": ""}, {"uuid": "5a5a0001"}, {"uuid": "zz"}]
)
def test_a_fabric_block_that_cannot_be_read_is_refused_or_not_believed(block, said: dict[str, str]) -> None:
    try:
        (one,) = read_fabrics(block(**said))
    except ProbeError:
        return
    assert one.key == ""


@pytest.mark.parametrize("text", [fabric(), xml()])
def test_a_fabric_block_cut_short_is_refused(text: str) -> None:
    start = text.lower().index("state")
    for cut in range(start, text.lower().index("uuid") + 3):
        with pytest.raises(ProbeError):
            read_fabrics(text[:cut])


def test_fabrics_that_are_not_of_these_gpus_are_refused() -> None:
    with pytest.raises(ProbeError, match="2 GPUs in 'topo -m' and 1 in '-q'"):
        read_topo(matrix(square(["GPU0", "GPU1"], "NV18")), host_id="h", fabrics=read_fabrics(fabric()))


QUERY = """\

==============NVSMI LOG==============

Attached GPUs                             : 2
GPU 00000000:18:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    Product Brand                         : NVIDIA
    GPU UUID                              : GPU-31a5ce5c-3df1-8821-cc7d-8488c05f755c
    PCI
        Bus                               : 0x18
        Device Id                         : 0x233010DE
        Bus Id                            : 00000000:18:00.0
        Sub System Id                     : 0x16C110DE

GPU 00000000:2A:00.0
    Product Name                          : N/A
    PCI
        Device Id                         : 0x290110DE
"""


def test_the_query_tells_what_the_gpus_are() -> None:
    text = matrix(square(["GPU0", "GPU1"], "NV18"))
    topology = read_topo(text, host_id="h", identities=read_identities(QUERY))
    first, second = topology.devices
    assert (first.pci, first.pci_id, first.name) == ("0000:18:00.0", "10de:2330", "NVIDIA H100 80GB HBM3")
    assert (first.sku, first.uuid) == ("H100-SXM5", "GPU-31a5ce5c-3df1-8821-cc7d-8488c05f755c")
    assert first.paths
    assert (second.pci, second.sku, second.name) == ("0000:2a:00.0", "B200-SXM", "")
    assert topology.notes == ()
    assert read_identities("no GPUs") == ()


def test_identities_that_are_not_of_these_gpus_are_refused() -> None:
    with pytest.raises(ProbeError, match="3 GPUs in 'topo -m' and 2 in '-q'"):
        read_topo(matrix(square(["GPU0", "GPU1", "GPU2"], "NV18")), host_id="h", identities=read_identities(QUERY))


def test_the_probe_asks_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe("h") == Topology()
    (tmp_path / "topo").write_text(matrix(square(["GPU0", "GPU1"], "NV18")))
    (tmp_path / "query").write_text("".join(f"GPU 00000000:{bus}:00.0\n{fabric()}" for bus in ("18", "2A")))
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        f'#!/bin/sh\ncase "$*" in "topo -m") f={tmp_path}/topo;; -q) f={tmp_path}/query;; *) exit 3;; esac\n'
        'while IFS= read -r line; do printf "%s\\n" "$line"; done < $f\n'
    )
    tool.chmod(0o755)
    found = probe("h")
    assert [domain.domain_id for domain in found.domains] == [f"{UUID}.32766"]
    assert [device.pci for device in found.devices] == ["0000:18:00.0", "0000:2a:00.0"]
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2\nexit 9\n")
    with pytest.raises(ProbeError, match="NVIDIA-SMI has failed"):
        probe("h")


@pytest.mark.parametrize(
    ("name", "gpus", "nics", "islands", "numa"),
    [
        ("nvidia-smi-topo-gb200-nvl72-oci-ansi.txt", 4, 6, [4], [0, 0, 1, 1]),
        ("nvidia-smi-topo-hgx-h100-8nic.txt", 8, 8, [8], [0] * 4 + [1] * 4),
        ("nvidia-smi-topo-pcie-4x-rtx6000ada.txt", 4, 4, [], [0, 0, 1, 1]),
        ("nvidia-smi-topo-pcie-6gpu-ansi.txt", 6, 0, [], [0] * 4 + [1] * 2),
    ],
)
def test_real_captures(name: str, gpus: int, nics: int, islands: list[int], numa: list[int]) -> None:
    topology = read_topo(sample(name), host_id="h")
    assert (len(topology.devices), len(topology.nics)) == (gpus, nics)
    assert [len(domain.members) for domain in topology.domains] == islands
    assert [device.numa_node for device in topology.devices] == numa


def test_the_rail_of_a_real_hgx_box() -> None:
    topology = read_topo(sample("nvidia-smi-topo-hgx-h100-8nic.txt"), host_id="h")
    assert all(topology.link(f"h/gpu{n}", f"h/mlx5_{n}").kind == "PIX" for n in range(8))


@pytest.mark.parametrize(
    "name", ["nvidia-smi-topo-b200-gpu2-off-nvlink.PARTIAL.txt", "nvidia-smi-topo-gb200-numa-lists.PARTIAL.txt"]
)
def test_partial_captures_are_refused(name: str) -> None:
    with pytest.raises(ProbeError):
        read_topo(sample(name), host_id="h")


def test_trap_06_the_real_box_with_a_gpu_off_nvlink() -> None:
    rows = [line.split()[1:9] for line in sample("nvidia-smi-topo-b200-gpu2-off-nvlink.PARTIAL.txt").splitlines()]
    names = [f"GPU{n}" for n in range(6)]
    text = matrix({name: row[:6] for name, row in zip(names, rows, strict=True)})
    assert read_topo(text, host_id="h").domains[0].members == tuple(f"h/gpu{n}" for n in (0, 1, 3, 4, 5))


def test_trap_02_the_real_numa_lists() -> None:
    lines = sample("nvidia-smi-topo-gb200-numa-lists.PARTIAL.txt").splitlines()[1:]
    numa = {line.split()[0]: ("", line.split()[-2]) for line in lines}
    topology = read_topo(matrix(square(list(numa), "NV18"), numa), host_id="h")
    assert [device.numa_node for device in topology.devices] == [0, 0, 1]


def test_trap_07_the_real_table_of_azure_tells_nodes_apart() -> None:
    lines = sample("nvidia-smi-topo-azure-gb300.md.txt").splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines[2:]]
    rows = {name: row for name, *row in cells}
    nics = {f"NIC{n}": [rows[f"GPU{g}"][4 + n] for g in range(4)] + ["X" if m == n else "SYS" for m in range(4)]
            for n in range(4)}  # fmt: skip
    numa = {f"GPU{n}": ("0-71", str(n // 2)) for n in range(4)}
    topology = read_topo(matrix(rows | nics, numa, nics={f"NIC{n}": f"mlx5_{n}" for n in range(4)}), host_id="h")
    assert topology.link("h/gpu0", "h/mlx5_0").kind == "NODE"
    assert topology.link("h/gpu0", "h/mlx5_3").kind == "SYS"


def test_trap_04_the_real_fabric_blocks() -> None:
    blocks = sample("nvidia-smi-q-fabric-fragments.txt").split("#")
    found = [said for block in blocks for said in read_fabrics(block)]
    assert [said.state for said in found] == ["completed", "not supported", "not supported"]
    assert [said.key for said in found] == ["", "", ""]
    assert found[0].doubt


words = st.sampled_from(
    [
        "GPU0",
        "GPU1",
        "NIC0",
        "X",
        "NV18",
        "SYS",
        "NODENODE",
        "0-3",
        "0",
        "N/A",
        "\t",
        "\n",
        " ",
        "CPU Affinity",
        "\x1b[4m",
    ]
)


@given(st.text() | st.lists(words).map("".join) | st.lists(words).map(" ".join))
def test_any_text_is_a_topology_or_a_probe_error(text: str) -> None:
    try:
        assert isinstance(read_topo(text, host_id="h"), Topology)
    except ProbeError:
        pass


@given(st.integers(0, 400), st.sampled_from(["", "\t", "X", "NODE", "\n", "0"]))
def test_any_one_change_of_a_matrix_is_refused_or_changes_no_link(at: int, put: str) -> None:
    text = matrix(TWO_AND_TWO, TWO_NUMA, nics=NAMES)
    whole = {link.ends: link.kind for link in read_topo(text, host_id="h").links}
    end = text.index("\n\nLegend")
    at = at % end
    try:
        links = read_topo(text[:at] + put + text[at + 1 :], host_id="h").links
    except ProbeError:
        return
    assert len(links) == len(whole)
    assert sorted(link.kind for link in links) == sorted(whole.values())


field_words = ["State", "Status", "CliqueId", "ClusterUUID", " : ", "Completed", "Success", "0", UUID, "\n", " ", "N/A"]


@given(
    st.text()
    | st.lists(st.sampled_from(["Fabric\n", "<fabric>", "</fabric>", "<state>", "</state>", *field_words])).map("".join)
    | st.lists(st.sampled_from(field_words)).map(lambda parts: "Fabric\n    " + "".join(parts))
)
def test_any_text_is_fabrics_or_a_probe_error(text: str) -> None:
    try:
        assert all(isinstance(said, Fabric) for said in read_fabrics(text))
    except ProbeError:
        pass
