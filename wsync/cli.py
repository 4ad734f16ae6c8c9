"""The `wsync` command."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wsync import __version__
from wsync.config import Config
from wsync.errors import ConfigError, WsyncError

if TYPE_CHECKING:
    from wsync.topology import Topology


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; exit status 1 for a named error, 2 for wrong usage.

    `verify` keeps 1 for weights that differ: its named errors, about reports that cannot be compared, are 2 too.
    """
    parser = argparse.ArgumentParser(prog="wsync", description="Asynchronous weight broadcast for RL.")
    parser.add_argument("--version", action="version", version=f"wsync {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    coordinator = commands.add_parser("coordinator", help="run a job's coordinator (without Ray, on several hosts)")
    coordinator.add_argument("--listen", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    coordinator.add_argument("--port", type=int, default=0, help="tcp port (default: any free one)")
    coordinator.add_argument("--token-file", type=Path, required=True, help="the job's token; made if it is not there")

    verify = commands.add_parser("verify", help="compare the weights of a trainer's ranks and of a replica's workers")
    for side, whose in (("--trainer", "all trainer ranks"), ("--replica", "a replica's workers")):
        verify.add_argument(
            side, type=Path, nargs="+", action="extend", required=True, help=f"digest reports of {whose}"
        )

    topo = commands.add_parser("topo", help="what this machine consists of, and the path between each two of its parts")
    topo.add_argument("--host", default="", help="name of this host (default: as holders name it)")
    topo.add_argument("--file", type=Path, help="show this topology (of --json) instead of this machine")
    topo.add_argument("--offline", action="store_true", help="ask no metadata service of a cloud")
    topo.add_argument("--json", metavar="FILE", help="write it as JSON; '-': to standard output, and nothing else")
    topo.add_argument("--html", metavar="FILE", help="write a page with a picture")

    for name, about in (
        ("plan", "how long a broadcast would take on machines that need not be there"),
        ("simulate", "the same by simulating every transfer"),
    ):
        _add_job(commands.add_parser(name, help=about))

    demo = commands.add_parser("demo", help="a live broadcast on a Ray cluster of three nodes on this machine")
    from wsync.demo import add_arguments

    add_arguments(demo)
    arguments = parser.parse_args(argv)
    level = (os.environ.get("WSYNC_LOG") or "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        parser.error(f"WSYNC_LOG must be a level such as INFO, not {level!r}")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=level)
    try:
        if arguments.command == "coordinator":
            return run_coordinator(arguments.listen, arguments.port, arguments.token_file)
        if arguments.command == "verify":
            return run_verify(arguments.trainer, arguments.replica)
        if arguments.command == "topo":
            return run_topo(arguments)
        if arguments.command in ("plan", "simulate"):
            return run_plan(arguments)
        from wsync.demo import main as run_demo

        return run_demo(arguments)
    except WsyncError as exc:
        print(f"wsync {arguments.command}: {type(exc).__name__}: {exc}", file=sys.stderr)
        return 2 if arguments.command == "verify" else 1


def run_coordinator(listen: str, port: int, token_file: Path) -> int:
    """Serve until SIGTERM or Ctrl-C. Prints the variables that members need."""
    from wsync.engine.coordinator import Coordinator

    token = _token(token_file)

    async def serve() -> None:
        coordinator = Coordinator(Config(listen=listen), token)
        coordinator.start(port)
        host, bound_port = coordinator.address
        print(f"WSYNC_ADDRESS={f'[{host}]' if ':' in host else host}:{bound_port}")
        print(f"WSYNC_TOKEN_FILE={token_file.resolve()}", flush=True)
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await coordinator.run()

    try:
        asyncio.run(serve())
    except asyncio.CancelledError:
        pass
    return 0


def run_verify(trainer: Sequence[Path], replica: Sequence[Path]) -> int:
    """Print every tensor that differs; exit status 1 when there is one. Raises ConfigError for reports that cannot be
    read or compared, also when one of a side seems to be missing.
    """
    from wsync.engine.verify import DigestReport, check_complete, compare

    reports = [[DigestReport.load(path) for path in paths] for paths in (trainer, replica)]
    for side, given in zip(("trainer", "replica"), reports, strict=True):
        check_complete(given, side)
    differences = compare(*reports)
    for difference in differences:
        print(difference)
    num_tensors = len({tensor.name for side in reports for report in side for tensor in report.tensors})
    print(f"{len(differences)} of {num_tensors} tensors differ")
    return 1 if differences else 0


def run_topo(arguments: argparse.Namespace) -> int:
    """Print the topology, or write it where the options say. Raises ConfigError for files that cannot be used."""
    from wsync import topo_view
    from wsync.discovery.detect import detect
    from wsync.engine.session import host_id
    from wsync.topology import Topology

    if arguments.file:
        topology = Topology.load(arguments.file)
    else:
        topology = detect(arguments.host or host_id(Config()), is_offline=arguments.offline)
    if arguments.json != "-":
        print(topo_view.as_text(topology), end="")
    if arguments.json:
        _write(arguments.json, topology.dump())
    if arguments.html:
        _write(arguments.html, topo_view.as_html(topology))
    return 0


def _add_job(parser: argparse.ArgumentParser) -> None:
    """Options that say who has which model, who wants it, and on what."""
    parser.add_argument(
        "--model", required=True, help="a size (140GB), a safetensors file or index, or a folder of them"
    )
    parser.add_argument("--train", required=True, metavar="fsdp=S", help="trainer ranks that cut the model evenly")
    parser.add_argument("--infer", required=True, metavar="tp=K,replicas=N", help="workers of a replica, and replicas")
    parser.add_argument("--topology", type=Path, required=True, help="of recipes/topologies, or of `wsync topo --json`")
    parser.add_argument(
        "--hosts", default="", metavar="NAME=COUNT,...", help="so many hosts of a kind, whatever the file says"
    )
    parser.add_argument(
        "--memory", choices=("host", "device"), default="host", help="of the holders (default: %(default)s)"
    )
    parser.add_argument("--forbid", default="", metavar="PATH,...", help="paths that shall not be used, such as nixl")
    parser.add_argument("--chunk-mib", type=float, default=0.0, help="size of chunks (default: chosen for the routes)")
    parser.add_argument("--routes", action="store_true", help="print every hop")
    parser.add_argument("--json", metavar="FILE", help="write it as JSON; '-': to standard output, and nothing else")


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the forecast, and what a simulation of it took. Raises ConfigError for files and numbers of no use,
    PlanError if there is no path.
    """
    import msgspec

    from wsync.engine.fabric import Limits
    from wsync.forecast import Job, forecast, model_nbytes

    train = _numbers(arguments.train, "--train", "fsdp")
    infer = _numbers(arguments.infer, "--infer", "tp", "replicas")
    job = Job(
        nbytes=model_nbytes(arguments.model),
        num_ranks=train["fsdp"],
        num_workers=infer["tp"],
        num_replicas=infer["replicas"],
        in_device_memory=arguments.memory == "device",
        chunk_nbytes=int(arguments.chunk_mib * (1 << 20)),
    )
    limits = Limits(forbidden=frozenset(name for name in arguments.forbid.split(",") if name))
    found = forecast(_topology(arguments), job, limits, is_simulated=arguments.command == "simulate")
    if arguments.json != "-":
        print(found.as_text(has_routes=arguments.routes), end="")
    if arguments.json:
        _write(arguments.json, msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    return 0


def _topology(arguments: argparse.Namespace) -> Topology:
    from wsync.discovery.machines import Machines
    from wsync.topology import Topology

    if arguments.topology.suffix == ".toml":
        counts = _numbers(arguments.hosts, "--hosts") if arguments.hosts else {}
        return Machines.load(arguments.topology).topology(counts)
    if arguments.hosts:
        raise ConfigError("--hosts needs a TOML file of machines", hint="a saved topology has the hosts that it has")
    return Topology.load(arguments.topology)


def _numbers(text: str, option: str, *names: str) -> dict[str, int]:
    """`a=1,b=2`; exactly `names` if they are given. Raises ConfigError."""
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    found = {name.strip(): int(number) for name, number in pairs if number.strip().isdigit()}
    if len(found) < len(pairs) or (names and found.keys() != set(names)):
        form = ",".join(f"{name}=NUMBER" for name in names or ("NAME",))
        raise ConfigError(f"{option} {text!r} is not understood", hint=f"give it as {form}")
    return found


def _write(name: str, content: str) -> None:
    if name == "-":
        print(content, end="")
        return
    try:
        Path(name).write_text(content, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{name} cannot be written: {exc.strerror}") from exc


def _token(path: Path) -> str:
    """The token in `path`, which only its owner may read; a new one is made if the file is not there."""
    from wsync.auth import new_token, read_token

    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be made: {exc.strerror}") from exc
    token = new_token()
    with os.fdopen(fd, "w") as file:
        file.write(token + "\n")
    return token
