"""Google TPUs: both spellings of the keys, cores and chips, shapes of slices, GKE's environment; what is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from _samples import sample
from hypothesis import given
from hypothesis import strategies as st

from wsync.discovery.tpu import (
    GENERATIONS,
    Generation,
    parse_accelerator_type,
    parse_topology,
    probe,
    read_tpu_env,
    read_variables,
    slice_of,
)
from wsync.errors import ProbeError
from wsync.topology import DomainKind, Source, Topology


def env_text(**pairs: str) -> str:
    return "".join(f"{key}: '{value}'\n" for key, value in pairs.items())


def gke(**pairs: str) -> dict[str, str]:
    return {f"TPU_{key}": value for key, value in pairs.items()}


V6E_16 = {"ACCELERATOR_TYPE": "v6e-16", "TOPOLOGY": "4x4", "WORKER_ID": "2", "WRAP": "false,false,false"}


def generation(name: str) -> Generation:
    return next(one for one in GENERATIONS if one.name == name)


@pytest.mark.parametrize("spelling", ["", "TPU_"])
def test_trap_11_both_spellings_of_the_keys(spelling: str) -> None:
    found = read_tpu_env(env_text(**{f"{spelling}{key}": value for key, value in V6E_16.items()}), host_id="h")
    assert [one.device_id for one in found.devices] == [f"h/tpu{i}" for i in range(4)]
    chip = found.devices[0]
    assert (chip.name, chip.sku, chip.memory_nbytes) == ("v6e", "TPU-v6e", 32 << 30)
    assert (chip.facts["name"], chip.facts["memory_nbytes"]) == (Source.PLATFORM, Source.TABLE)


def test_trap_11_spellings_that_disagree_are_refused() -> None:
    with pytest.raises(ProbeError, match="ACCELERATOR_TYPE"):
        read_tpu_env(env_text(**V6E_16, TPU_ACCELERATOR_TYPE="v6e-32"), host_id="h")
    assert read_tpu_env(env_text(**V6E_16, TPU_ACCELERATOR_TYPE="v6e-16"), host_id="h").devices


@pytest.mark.parametrize(
    ("text", "name", "num_chips"),
    [
        ("v2-8", "v2", 4),
        ("v3-32", "v3", 16),
        ("v4-256", "v4", 128),
        ("v5p-128", "v5p", 64),
        ("v5litepod-16", "v5litepod", 16),
        ("v6e-8", "v6e", 8),
        ("tpu7x-8", "tpu7x", 4),
        ("v7x-128", "tpu7x", 64),
        ("tpu7x", "tpu7x", 0),
        ("tpu-v5-lite-podslice", "v5litepod", 0),
        ("tpu-v5p-slice", "v5p", 0),
        ("tpu-v6e-slice", "v6e", 0),
        ("tpu-v4-podslice", "v4", 0),
    ],
)
def test_trap_11_the_number_counts_cores_or_chips(text: str, name: str, num_chips: int) -> None:
    assert parse_accelerator_type(text) == (generation(name), num_chips)


@pytest.mark.parametrize("text", ["", "v9z-8", "v4-7", "v6e-0", "tpu", "v6e-", "v6e-16-4", "nvidia-h100-80gb"])
def test_accelerator_types_that_are_refused(text: str) -> None:
    with pytest.raises(ProbeError, match="accelerator type"):
        parse_accelerator_type(text)


def test_a_type_without_number_needs_a_topology() -> None:
    with pytest.raises(ProbeError, match="neither"):
        read_variables(gke(ACCELERATOR_TYPE="v5p"), host_id="h")


@pytest.mark.parametrize(
    ("kind", "topology", "chips", "hosts", "ports", "in_use"),
    [
        ("v4", "4x4x8", 128, 32, 6, (6, 6)),
        ("v5p", "2x2x2", 8, 2, 6, (3, 3)),
        ("v5p", "2x4x4", 32, 8, 6, (3, 5)),
        ("tpu7x", "2x2x1", 4, 1, 6, (2, 2)),
        ("tpu7x", "8x8x8", 512, 128, 6, (6, 6)),
        ("tpu7x", "1x1x1", 1, 1, 6, (0, 0)),
        ("v5litepod", "16x16", 256, 64, 4, (4, 4)),
        ("v6e", "8x16", 128, 32, 4, (3, 4)),
        ("v6e", "2x2", 4, 1, 4, (2, 2)),
        ("v6e", "2x4", 8, 0, 4, (2, 3)),
        ("v3", "4x4", 16, 4, 4, (0, 0)),
    ],
)
def test_shape_gives_chips_hosts_and_ports(
    kind: str, topology: str, chips: int, hosts: int, ports: int, in_use: tuple[int, int]
) -> None:
    """Without a word on closed axes GKE's rule holds; of v3, and of hosts of 8 chips in two sizes, nothing is known."""
    size = chips * generation(kind).cores_per_chip
    found = slice_of({"ACCELERATOR_TYPE": f"{kind}-{size}", "TOPOLOGY": topology}, "test")
    assert (found.num_chips, found.num_hosts, found.num_ports, found.port_range()) == (chips, hosts, ports, in_use)


def test_closed_axes_that_are_told_come_before_the_rule() -> None:
    pairs = {"ACCELERATOR_TYPE": "v5p-256", "TOPOLOGY": "4x4x8"}
    assert slice_of({**pairs, "WRAP": "false,true,true"}, "test").port_range() == (5, 6)
    assert slice_of({**pairs, "TPU_TOPOLOGY_WRAP": "false,false,false"}, "test").port_range() == (3, 6)


def test_the_ici_domain_of_a_torus() -> None:
    pairs = {"ACCELERATOR_TYPE": "v5p-256", "TOPOLOGY": "4x4x8", "WORKER_ID": "31", "NODE_ID": "my-slice"}
    found = read_tpu_env(env_text(**pairs, WRAP="true,true,true"), host_id="h")
    (domain,) = found.domains
    assert (domain.kind, domain.domain_id) == (DomainKind.ICI, "my-slice/ici0")
    assert domain.members == tuple(f"h/tpu{i}" for i in range(4))
    assert (domain.nbytes_per_s, domain.facts["nbytes_per_s"]) == (6 * 100e9, Source.TABLE)
    assert {one.num_links for one in found.devices} == {6}
    assert found.notes == ()
    assert found.hosts[0].platform == "gcp"


def test_hosts_of_a_slice_share_its_domain() -> None:
    pairs = {**V6E_16, "NODE_ID": "my-slice"}
    texts = {f"h{i}": env_text(**{**pairs, "WORKER_ID": str(i)}) for i in range(4)}
    joined = Topology()
    for host_id, text in texts.items():
        joined = joined.joined(read_tpu_env(text, host_id=host_id))
    (domain,) = joined.domains
    assert len(domain.members) == 16


def test_a_mesh_has_the_rate_of_its_corners() -> None:
    found = read_tpu_env(env_text(**V6E_16), host_id="h")
    assert found.domains[0].nbytes_per_s == 2 * 100e9
    assert {one.num_links for one in found.devices} == {0}, (
        "corners and inner chips differ, and which is which is unknown"
    )
    assert any("without a name" in note for note in found.notes)


def test_a_number_is_no_name_of_a_slice() -> None:
    found = read_tpu_env(env_text(**V6E_16, NODE_ID="0"), host_id="h")
    assert found.domains[0].domain_id == "h/ici0"


def test_one_chip_is_no_domain() -> None:
    found = read_tpu_env(env_text(ACCELERATOR_TYPE="v6e-1", TOPOLOGY="1x1"), host_id="h")
    assert (len(found.devices), found.domains, found.devices[0].num_links) == (1, (), 0)


def test_bounds_give_the_shape() -> None:
    pairs = {"ACCELERATOR_TYPE": "v4-32", "CHIPS_PER_HOST_BOUNDS": "2,2,1", "HOST_BOUNDS": "1,1,4"}
    found = slice_of(pairs, "test")
    assert (found.dims, found.num_chips, found.num_hosts) == ((2, 2, 4), 16, 4)


def test_eight_chips_of_a_generation_with_two_sizes_of_host() -> None:
    """A v6e 2x4 is one host of 8 or two of 4: unknown, unless bounds or the PCI bus say."""
    pairs = gke(ACCELERATOR_TYPE="v6e-8", TOPOLOGY="2x4")
    unknown = read_variables(pairs, host_id="h")
    assert (unknown.devices, unknown.domains) == ((), ())
    assert any("how many chips" in note for note in unknown.notes)
    assert len(read_variables({**pairs, "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}, host_id="h").devices) == 4
    assert len(read_variables(pairs, host_id="h", pci_ids=["1ae0:006f"] * 8).devices) == 8


def test_gke_environment() -> None:
    pairs = gke(
        ACCELERATOR_TYPE="tpu7x-16",
        TOPOLOGY="2x2x2",
        WORKER_ID="1",
        WORKER_HOSTNAMES="job-0.svc,job-1.svc",
        TOPOLOGY_WRAP="false,false,false",
        CHIPS_PER_HOST_BOUNDS="2,2,1",
        HOST_BOUNDS="1,1,2",
    )
    found = read_variables({**pairs, "PATH": "/bin"}, host_id="h")
    assert [(one.name, one.sku, one.num_links) for one in found.devices] == [("tpu7x", "TPU7x", 3)] * 4
    assert found.domains[0].domain_id == "job-0.svc/ici0"
    assert read_variables({**pairs, "TPU_NAME": "group-0"}, host_id="h").domains[0].domain_id == "group-0/ici0"
    assert read_variables({"PATH": "/bin"}, host_id="h") == Topology()


def test_gke_accelerator_label_with_topology() -> None:
    found = read_variables(gke(ACCELERATOR_TYPE="tpu-v5p-slice", TOPOLOGY="2x2x4"), host_id="h")
    assert (len(found.devices), found.devices[0].sku) == (4, "TPU-v5p")


def test_bounds_of_a_process_that_sees_some_chips_are_not_believed() -> None:
    pairs = gke(ACCELERATOR_TYPE="v6e-16", TOPOLOGY="4x4", CHIPS_PER_HOST_BOUNDS="1,1,1", HOST_BOUNDS="1,1,1")
    with pytest.raises(ProbeError, match="do not make a shape"):
        read_variables(pairs, host_id="h")
    found = read_variables({**pairs, "TPU_VISIBLE_CHIPS": "3"}, host_id="h")
    assert len(found.devices) == 4
    assert any("not believed" in note for note in found.notes)


def test_chips_that_were_counted_come_before_the_platforms_word() -> None:
    found = read_tpu_env(env_text(**{**V6E_16, "WORKER_ID": "1"}), host_id="h", pci_ids=["1ae0:0063"] * 8)
    assert (len(found.devices), {one.sku for one in found.devices}) == (8, {"TPU-v5e"})
    assert any("4 chips per host, 8 are here" in note for note in found.notes)
    assert any("h/tpu0" in note and "v6e" in note for note in found.notes)
    with pytest.raises(ProbeError, match="alone"):
        read_tpu_env(env_text(ACCELERATOR_TYPE="v6e-1"), host_id="h", pci_ids=["1ae0:006f"] * 4)


@pytest.mark.parametrize(
    "changes",
    [
        {"ACCELERATOR_TYPE": ""},
        {"TOPOLOGY": "4x8"},
        {"TOPOLOGY": "4x4x1x1"},
        {"TOPOLOGY": "0x4"},
        {"TOPOLOGY": "2x2x4"},
        {"WORKER_ID": "4"},
        {"WORKER_ID": "two"},
        {"WRAP": "true"},
        {"WRAP": "true,yes,false"},
        {"CHIPS_PER_HOST_BOUNDS": "2,2"},
        {"CHIPS_PER_HOST_BOUNDS": "4,4,1", "WORKER_ID": "0"},
        {"ACCELERATOR_TYPE": "tpu-v6e-slice", "CHIPS_PER_HOST_BOUNDS": "2,2,1", "HOST_BOUNDS": "2,4,1"},
        {"CHIPS_PER_HOST_BOUNDS": "3,1,1"},
        {"CHIPS_PER_HOST_BOUNDS": "2,2,1", "HOST_BOUNDS": "1,1,1"},
    ],
)
def test_contradictions_and_broken_values_are_refused(changes: Mapping[str, str]) -> None:
    with pytest.raises(ProbeError):
        read_tpu_env(env_text(**{**V6E_16, **changes}), host_id="h")


@pytest.mark.parametrize("line", ["ACCELERATOR_TYPE: 'v6e-16'", "TOPOLOGY 4x4", "KEY: 'a' 'b'", "KEY: 'v4-8", ": 'x'"])
def test_broken_lines_are_refused(line: str) -> None:
    with pytest.raises(ProbeError, match="no line of its own"):
        read_tpu_env(env_text(**V6E_16) + line, host_id="h")


def test_topology_text() -> None:
    assert parse_topology(" 4X4x8 ") == (4, 4, 8)
    assert parse_topology("2x4") == (2, 4, 1)


WORDS = st.sampled_from(
    [
        "v4-8",
        "v6e-16",
        "tpu7x-8",
        "2x4",
        "4x4",
        "2x2x1",
        "2,2,1",
        "1,1,2",
        "true,true,true",
        "0",
        "9999,9999,9999",
        "٣",
        "",
    ]
)
KEYS = st.sampled_from(["ACCELERATOR_TYPE", "TOPOLOGY", "WORKER_ID", "CHIPS_PER_HOST_BOUNDS", "HOST_BOUNDS", "WRAP"])


@given(st.dictionaries(KEYS, st.one_of(WORDS, st.text(max_size=12)), max_size=6), st.sampled_from(["", "TPU_"]))
def test_any_values_are_read_or_refused(pairs: dict[str, str], prefix: str) -> None:
    for read in (
        lambda: read_tpu_env(env_text(**{prefix + key: value for key, value in pairs.items()}), host_id="h"),
        lambda: read_variables({f"TPU_{key}": value for key, value in pairs.items()}, host_id="h"),
    ):
        try:
            found = read()
        except ProbeError:
            continue
        assert len(found.devices) <= 8


@given(st.text(max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    with pytest.raises(ProbeError):
        read_tpu_env(text, host_id="h")


def pci(root: Path, *addresses: str, device: str = "0x006f", accel: bool = False) -> Path:
    for index, name in enumerate(addresses):
        folder = root / "bus/pci/devices" / name
        folder.mkdir(parents=True)
        for file, text in (("vendor", "0x1ae0"), ("device", device), ("numa_node", str(index // 2))):
            (folder / file).write_text(text + "\n")
        if accel:
            link = root / f"class/accel/accel{len(addresses) - 1 - index}"
            link.mkdir(parents=True)
            (link / "device").symlink_to(folder)
    return root


def test_probe_asks_the_metadata_server_only_where_there_are_tpus(tmp_path: Path) -> None:
    asked: list[str] = []

    def metadata(key: str) -> str | None:
        asked.append(key)
        return {"tpu-env": env_text(**V6E_16), "instance-id": "slice-7"}.get(key)

    # gVNIC is a device of the same vendor.
    nic = pci(tmp_path / "nic", "0000:00:04.0", device="0x0042")
    assert probe("h", variables={}, sysfs=nic, metadata=metadata) == Topology()
    assert not asked
    chips = pci(tmp_path / "tpu", *(f"0000:00:{i:02x}.0" for i in range(5, 9)))
    found = probe("h", variables={}, sysfs=chips, metadata=metadata)
    assert (len(found.devices), found.domains[0].domain_id) == (4, "slice-7/ici0")
    assert {(one.pci_id, one.pci) for one in found.devices} == {("1ae0:006f", "")}, "nobody numbers them"
    assert len(probe("h", variables=gke(**V6E_16), sysfs=chips, metadata=metadata).devices) == 4
    assert asked == ["tpu-env", "instance-id"]
    with pytest.raises(ProbeError, match="4 TPU chips"):
        probe("h", variables={}, sysfs=chips, metadata=lambda key: None)


def test_probe_places_chips_that_the_driver_numbers(tmp_path: Path) -> None:
    sysfs = pci(tmp_path, *(f"0000:00:{i:02x}.0" for i in range(5, 9)), device="0x005e", accel=True)
    found = probe("h", variables=gke(ACCELERATOR_TYPE="v4-8", TOPOLOGY="2x2x1"), sysfs=sysfs, metadata=lambda key: None)
    assert [one.pci for one in found.devices] == [f"0000:00:{i:02x}.0" for i in (8, 7, 6, 5)]
    assert [one.numa_node for one in found.devices] == [1, 1, 0, 0]


def test_jax_is_not_loaded() -> None:
    code = "import sys, wsync.discovery.tpu; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_real_variants() -> None:
    texts = [text for text in re.split(r"^(?=# [A-E]\. )", sample("tpu-env-variants.txt"), flags=re.MULTILINE) if text]
    found = [read_tpu_env(text, host_id="h") for text in texts]
    assert [(len(one.devices), one.devices[0].name) for one in found] == [
        (4, "v4"),
        (4, "v4"),
        (4, "v6e"),
        (8, "v5litepod"),
        (1, "v6e"),
    ]
    assert [[domain.nbytes_per_s for domain in one.domains][:1] for one in found[2:]] == [[200e9], [100e9], []]
    assert any("32 hosts" in note for note in found[0].notes)
