"""`wsync plan`: forecasts whose figures are known by hand, sizes of models, and what is wrong with a command line."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from wsync.cli import main
from wsync.discovery.machines import Machines
from wsync.engine.fabric import Limits
from wsync.errors import ConfigError, PlanError
from wsync.forecast import Forecast, Job, forecast, model_nbytes
from wsync.topology import Domain, DomainKind, Host, Nic, NicKind, Topology

FOLDER = Path(__file__).parents[2] / "recipes" / "topologies"


def of(file: str, hosts: int, job: Job, limits: Limits | None = None) -> Forecast:
    return forecast(Machines.load(FOLDER / f"{file}.toml").topology({file: hosts}), job, limits)


def test_hosts_with_a_nic_per_gpu_take_each_byte_in_once_in_host_memory() -> None:
    """70B in bfloat16 to 16 replicas of TP8: 140 GB into each host at 8 x 50 GB/s."""
    found = of("hgx-h100", 24, Job(nbytes=140 * 10**9, num_ranks=64, num_workers=8, num_replicas=16))
    assert found.routing.bound.time_s == pytest.approx(0.35)
    assert found.routing.ratio < 1.01
    assert found.link_nbytes["hgx-h100-23/rdma.in"] == pytest.approx(140e9)
    assert max(nbytes for name, nbytes in found.link_nbytes.items() if name.endswith(".in")) == pytest.approx(140e9)
    assert found.memory_nbytes["hgx-h100-23"] == 2 * 140 * 10**9
    assert found.memory_nbytes["hgx-h100-0"] == 2 * 140 * 10**9 // 8


def test_an_nvl72_rack_is_nine_times_faster_than_one_pull_per_replica() -> None:
    """671B in bfloat16 to nine replicas of TP8 in one rack: each byte enters the rack once, through 72 NICs."""
    nbytes = 1342 * 10**9
    found = of(
        "gb200-nvl72", 36, Job(nbytes=nbytes, num_ranks=72, num_workers=8, num_replicas=9, in_device_memory=True)
    )
    assert found.routing.bound.time_s == pytest.approx(nbytes / (72 * 50e9))
    assert found.routing.ratio < 1.15
    entering = sum(b for name, b in found.link_nbytes.items() if name.endswith("rdma.in"))
    assert entering == pytest.approx(nbytes)
    assert (nbytes / (8 * 50e9)) / found.routing.predicted_s > 8.5


def test_replicas_of_several_on_one_host_share_what_enters_it() -> None:
    """Four replicas of TP2 on an 8-GPU host: 140 GB enter, not four times as much."""
    found = of("hgx-h100", 2, Job(nbytes=140 * 10**9, num_ranks=8, num_workers=2, num_replicas=4))
    assert found.link_nbytes["hgx-h100-1/rdma.in"] == pytest.approx(140e9)
    assert found.routing.predicted_s == pytest.approx(0.35, rel=0.01)
    assert found.memory_nbytes == {"hgx-h100-0": 2 * 140 * 10**9, "hgx-h100-1": 2 * 140 * 10**9}


def test_forbidden_paths_are_left_out_and_no_path_is_an_error() -> None:
    job = Job(nbytes=10**9, num_ranks=8, num_workers=8, num_replicas=2)
    found = of("mi300x", 3, job, Limits(forbidden=frozenset({"nixl"})))
    assert {path for routed in found.routing.lanes for tree in routed.trees for path in tree.paths} == {"tcp"}
    assert (found.routing.predicted_s, found.routing.receiver_s) == (0.0, {}), "no Ethernet is in that file"
    with pytest.raises(PlanError, match="no path reaches mi300x-1"):
        of("mi300x", 3, job, Limits(forbidden=frozenset({"nixl", "tcp"})))


def test_unknown_rates_are_said_to_be_unknown() -> None:
    hosts = [Host(host_id=f"h{i}") for i in range(2)]
    from wsync.topology import Device

    devices = tuple(Device(device_id=f"h{i}/gpu0", host_id=f"h{i}") for i in range(2))
    topology = Topology(hosts=tuple(hosts), devices=devices)
    text = forecast(topology, Job(nbytes=10**9, num_ranks=1, num_workers=1, num_replicas=1)).as_text(has_routes=True)
    assert "how long it takes is unknown: some link on the way has no known rate" in text
    assert "predicted" not in text
    assert "h0 -> h1 (tcp)" in text


def test_too_few_devices_are_an_error_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="80 devices, the topology has 16"):
        of("hgx-h100", 2, Job(nbytes=1, num_ranks=16, num_workers=8, num_replicas=8))


def test_an_uplink_is_in_the_forecast() -> None:
    nics = [Nic(nic_id=f"h{i}/n", host_id=f"h{i}", kind=NicKind.ETHERNET, nbytes_per_s=1e9) for i in range(4)]
    from wsync.topology import Device

    topology = Topology(
        hosts=tuple(Host(host_id=f"h{i}") for i in range(4)),
        nics=tuple(nics),
        devices=tuple(Device(device_id=f"h{i}/gpu0", host_id=f"h{i}") for i in range(4)),
        domains=tuple(
            Domain(
                domain_id=f"r{r}", kind=DomainKind.RACK, members=(f"h{2 * r}", f"h{2 * r + 1}"), uplink_nbytes_per_s=1e8
            )
            for r in range(2)
        ),
    )
    found = forecast(topology, Job(nbytes=10**9, num_ranks=1, num_workers=1, num_replicas=3))
    assert found.routing.bound.time_s == pytest.approx(10.0)
    assert found.link_s["r1/uplink.in"] == pytest.approx(10.0)
    assert "r1/uplink.in: 1e+09 bytes, 10 s" in found.as_text()


def safetensors(path: Path, *sizes: int) -> None:
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for index, size in enumerate(sizes):
        header[f"t{index}"] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}  # type: ignore[dict-item]
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def test_the_size_of_a_model_is_given_or_read(tmp_path: Path) -> None:
    sizes = {"140GB": 140 * 10**9, "1.5 TiB": 3 * 2**39, "7e9": 7 * 10**9, "12B": 12, "3mb": 3 * 10**6}
    assert {text: model_nbytes(text) for text in sizes} == sizes
    safetensors(tmp_path / "a.safetensors", 100, 28)
    safetensors(tmp_path / "b.safetensors", 72)
    assert model_nbytes(str(tmp_path / "a.safetensors")) == 128
    assert model_nbytes(str(tmp_path)) == 200
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 4321}, "weight_map": {}}')
    assert model_nbytes(str(tmp_path)) == 4321


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("nothing.safetensors", None, "cannot be read"),
        ("short.safetensors", b"abc", "is no safetensors file"),
        ("other.safetensors", struct.pack("<Q", 2) + b"[]", "is no safetensors file"),
        ("x.index.json", b"{}", "is no safetensors file or index"),
        ("twelve", None, "cannot be read"),
    ],
)
def test_a_model_that_cannot_be_read_is_named(name: str, content: bytes | None, problem: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as refused:
        model_nbytes(str(tmp_path / name))
    assert name in str(refused.value)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no safetensors file"):
        model_nbytes(str(tmp_path))


GOOD = ["plan", "--model", "140GB", "--train", "fsdp=8", "--infer", "tp=8,replicas=2", "--topology"]


def test_the_command_prints_the_forecast_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert main([*GOOD, str(FOLDER / "hgx-h100.toml"), "--json", str(file), "--routes"]) == 0
    out = capsys.readouterr().out
    assert "predicted 0.35" in out
    assert "ratio 1.00" in out
    assert "hgx-h100-0 -> hgx-h100-1 (nixl)" in out
    assert json.loads(file.read_text())["routing"]["bound"]["time_s"] == 0.35
    topology = tmp_path / "topology.json"
    topology.write_text(Machines.load(FOLDER / "hgx-h100.toml").topology().dump())
    assert main([*GOOD, str(topology), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["nbytes"] == 140 * 10**9


def test_a_simulation_agrees_with_the_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", *GOOD[1:], str(FOLDER / "hgx-h100.toml"), "--hosts", "hgx-h100=5", "--chunk-mib", "256"]
    assert main([*command, "--infer", "tp=8,replicas=4", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"]["time_s"] == pytest.approx(found["routing"]["predicted_s"], rel=0.02)
    assert found["simulated"]["link_nbytes"]["hgx-h100-4/rdma.in"] == 140e9
    assert main([*GOOD, str(FOLDER / "hgx-h100.toml")]) == 0
    assert "simulated" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"--train": "8"}, "--train '8' is not understood"),
        ({"--train": "ddp=8"}, "--train 'ddp=8' is not understood"),
        ({"--infer": "tp=8"}, "--infer 'tp=8' is not understood"),
        ({"--infer": "tp=0,replicas=1"}, "nothing to plan"),
        ({"--model": "big"}, "big cannot be read"),
        ({"--hosts": "hgx=3"}, "no machine is named hgx"),
        ({"--train": "fsdp=800"}, "the topology has 32"),
        ({"--forbid": "nixl,tcp"}, "no path reaches"),
    ],
)
def test_a_command_line_of_no_use_is_explained(
    changes: dict[str, str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = dict(zip(GOOD[1::2], GOOD[2::2], strict=False)) | {"--topology": str(FOLDER / "hgx-h100.toml")} | changes
    assert main(["plan", *(part for pair in options.items() for part in pair)]) == 1
    assert problem in capsys.readouterr().err
