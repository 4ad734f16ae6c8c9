"""wsync against the copies that cannot be avoided, against raw sockets, and against the other ways to broadcast.

    python -m benchmarks.broadcast [--quick] [--json FILE] [--seed N] [--only CLAIM,...]

One trainer to one or four replicas on one machine, 1 GiB of bf16 tensors of a language model (`--quick`: 128 MiB,
three rounds, no Ray), in place on both sides, new bytes in every round, every round checked. Rounds of both sides of
a ratio are interleaved, and each figure is their median. PyTorch has one thread in every process.

`publish_pause_vs_memcpy`, `commit_pause_vs_memcpy`: the time for which `publish` holds the trainer, and for which
`commit_latest` holds the replica, by one memcpy of the bytes.
`shm_1toN_vs_bound`: from the start of publish to the last commit on one host, by `UnavoidableCopies`.
`first_version_s_vs_steady`: from the start of joining to the first commit, by a later round (1 to 4, one host).
`tcp_1to1_vs_raw_socket`: bytes per second from holder to holder, digests checked, to a host that joins when a version
is whole; by raw sockets.
`tcp_1to1_publish_vs_raw_socket`: the same for the whole way, from the start of publish (so with the trainer's copy and
the first hashing, for which raw sockets have no counterpart) to staged on another host.
`small_tensors_vs_one_tensor`: from the start of publish to the commit on another host, of 20,000 tensors of 4 KB; by
the same for one tensor of as many bytes.
`trainer_slowdown_while_serving`: a Python loop in the trainer's process (a core of its own) alone, by the same loop
while four other hosts (all on another core) pull; 256 MiB (`--quick`: 128), as five holders need memory.
`trainer_cpu_slowdown_while_serving`: the same by the process's CPU time, to which other programs do not add.
`speedup_vs_PEER`: seconds of the peer by seconds of wsync, 1 to 4. `peer_PEER`: its seconds by memcpy's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TypeVar

from benchmarks import _leftovers
from benchmarks._bench import ROUNDS, Claim, Options, interleaved, main, median
from benchmarks.bounds import Memcpy, Peer, RawSockets, UnavoidableCopies
from benchmarks.peers import PEERS, Setup
from benchmarks.shapes import layout_of, nbytes_of
from benchmarks.wsync_peer import Spin, WsyncBroadcast
from wsync.config import Config
from wsync.memory import available_memory

NBYTES, QUICK_NBYTES = 1 << 30, 128 << 20
NUM_REPLICAS = 4
MEMORY_FACTOR = 18
"""Times the bytes: wsync's five members and two slots, a peer's five members and its buffers, and a memcpy's two."""
PACKAGES = ("torch", "numpy", "ray", "nixl-cu12", "msgspec")

PAUSES = ("publish_pause_vs_memcpy", "commit_pause_vs_memcpy")
TCP = ("tcp_1to1_vs_raw_socket", "tcp_1to1_publish_vs_raw_socket")
SMALL = "small_tensors_vs_one_tensor"
NUM_SMALL, SMALL_WORDS = 20_000, 2048
SLOWDOWN = ("trainer_slowdown_while_serving", "trainer_cpu_slowdown_while_serving")
BOUNDS = ("bound_1to1", "bound_1to4", "raw_socket")
NAMES = (
    *PAUSES,
    "shm_1to1_vs_bound",
    "shm_1to4_vs_bound",
    "first_version_s_vs_steady",
    *TCP,
    SMALL,
    *SLOWDOWN,
    *(f"speedup_vs_{peer}" for peer in PEERS),
    *(f"peer_{peer}" for peer in PEERS),
    *BOUNDS,
)


AnyPeer = TypeVar("AnyPeer", bound=Peer)


class Bench:
    """One run: its options, its sizes, and how rounds are taken."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.wants = options.wants
        self.target = QUICK_NBYTES if options.is_quick else NBYTES
        self.nbytes = nbytes_of(layout_of(self.target))
        self.rounds = 3 if options.is_quick else ROUNDS
        self.warmups = 1 if options.is_quick else 2

    def setup(self, num_replicas: int, share: int = 1) -> Setup:
        """A setup of the run's bytes, or of one in `share` of them."""
        return Setup(layout=layout_of(self.target // share), seed=self.options.seed, num_replicas=num_replicas)

    def medians(self, **sides: Callable[[], float]) -> dict[str, float]:
        """The median of every side's rounds, interleaved."""
        samples = interleaved(sides, rounds=self.rounds, warmups=self.warmups)
        return {name: median(values) for name, values in samples.items()}


@contextlib.contextmanager
def running(peer: AnyPeer) -> Iterator[AnyPeer]:
    """Start a peer, and stop it at the end, also when its start has failed."""
    try:
        peer.start()
        yield peer
    finally:
        peer.stop()


def one_replica(bench: Bench) -> Iterator[Claim]:
    """The pauses, and the whole way on one host."""
    names = (*PAUSES, "shm_1to1_vs_bound")
    if not bench.wants(*names, "bound_1to1"):
        return
    setup = bench.setup(1)
    with contextlib.ExitStack() as stack:
        memcpy = stack.enter_context(running(Memcpy(bench.nbytes)))
        bound = stack.enter_context(running(UnavoidableCopies(setup.layout, setup.seed, 1)))
        sides = {"memcpy": memcpy.round, "bound": bound.round}
        if bench.wants(*names):
            ours = stack.enter_context(running(WsyncBroadcast(setup, ["home"])))
            sides |= {
                "total": ours.round,
                "memcpy_again": memcpy.round,
                "polled": ours.polled_round,
                "publish": lambda: ours.published.pause_s,
                "commit": lambda: ours.installed[0].pause_s,
            }
        took = bench.medians(**sides)
    yield Claim.reported("bound_1to1", took["bound"], "s", took["memcpy"], took["bound"] / took["memcpy"])
    if "total" in took:
        for side in ("publish", "commit"):
            ratio = took[side] / took["memcpy_again"]
            yield Claim.at_most(f"{side}_pause_vs_memcpy", took[side], "s", took["memcpy_again"], ratio, 1.3)
        yield Claim.at_most("shm_1to1_vs_bound", took["total"], "s", took["bound"], took["total"] / took["bound"], 1.25)


def four_replicas(bench: Bench) -> Iterator[Claim]:
    """The bound and the other ways, each next to wsync, which stays up for all of them."""
    is_peer_default = {peer: not bench.options.is_quick or peer == "torch_gloo_broadcast" for peer in PEERS}
    speedups = [peer for peer in PEERS if bench.wants(f"speedup_vs_{peer}", by_default=is_peer_default[peer])]
    peers = [peer for peer in PEERS if peer in speedups or bench.wants(f"peer_{peer}", by_default=False)]
    names = ("shm_1to4_vs_bound", "first_version_s_vs_steady")
    setup = bench.setup(NUM_REPLICAS)
    with contextlib.ExitStack() as stack:
        ours: WsyncBroadcast | None = None
        if speedups or bench.wants(*names):
            ours = stack.enter_context(running(WsyncBroadcast(setup, ["home"] * NUM_REPLICAS)))
        if bench.wants(*names, "bound_1to4"):
            yield from _four_and_bound(bench, setup, ours if bench.wants(*names) else None)
        for peer in peers:
            yield from _peer(bench, setup, peer, ours if peer in speedups else None)


def _four_and_bound(bench: Bench, setup: Setup, ours: WsyncBroadcast | None) -> Iterator[Claim]:
    with (
        running(Memcpy(bench.nbytes)) as memcpy,
        running(UnavoidableCopies(setup.layout, setup.seed, NUM_REPLICAS)) as bound,
    ):
        sides = {"memcpy": memcpy.round, "bound": bound.round}
        took = bench.medians(**sides, **({"total": ours.round} if ours else {}))
    yield Claim.reported("bound_1to4", took["bound"], "s", took["memcpy"], took["bound"] / took["memcpy"])
    if ours:
        total = took["total"]
        yield Claim.at_most("shm_1to4_vs_bound", total, "s", took["bound"], total / took["bound"], 1.25)
        yield Claim.reported("first_version_s_vs_steady", ours.first_s, "s", total, ours.first_s / total)


def _peer(bench: Bench, setup: Setup, name: str, ours: WsyncBroadcast | None) -> Iterator[Claim]:
    """A peer's fastest variant by memcpy's time, and by wsync's in the same rounds."""
    fastest: dict[str, float] = {}
    for make in PEERS[name].values():
        with running(Memcpy(bench.nbytes)) as memcpy, running(make(setup)) as peer:
            sides = {"memcpy": memcpy.round, "peer": peer.round}
            took = bench.medians(**sides, **({"total": ours.round} if ours else {}))
        if not fastest or took["peer"] < fastest["peer"]:
            fastest = took
    theirs = fastest["peer"]
    yield Claim.reported(f"peer_{name}", theirs, "s", fastest["memcpy"], theirs / fastest["memcpy"])
    if ours:
        total = fastest["total"]
        yield Claim.at_least(f"speedup_vs_{name}", total, "s", theirs, theirs / total, 1.0)


def two_hosts(bench: Bench) -> Iterator[Claim]:
    """One holder to another over tcp, by raw sockets with as many connections."""
    if not bench.wants(*TCP, "raw_socket"):
        return
    with contextlib.ExitStack() as stack:
        memcpy = stack.enter_context(running(Memcpy(bench.nbytes)))
        raw = stack.enter_context(running(RawSockets(bench.nbytes, Config().tcp_connections)))
        sides = {"memcpy": memcpy.round, "raw": raw.round}
        if bench.wants(*TCP):
            ours = stack.enter_context(running(WsyncBroadcast(bench.setup(1), ["away"])))
            sides |= {"total": ours.round, "staged": ours.staged_s, "raw_again": raw.round, "pull": ours.joining_round}
        took = bench.medians(**sides)
    yield Claim.reported("raw_socket", took["raw"], "s", took["memcpy"], took["raw"] / took["memcpy"])
    if "staged" in took:
        rate = {side: bench.nbytes / seconds / 1e9 for side, seconds in took.items()}
        staged, pull = rate["staged"] / rate["raw"], rate["pull"] / rate["raw_again"]
        yield Claim.at_least("tcp_1to1_vs_raw_socket", rate["pull"], "GB/s", rate["raw_again"], pull, 0.8)
        yield Claim.reported("tcp_1to1_publish_vs_raw_socket", rate["staged"], "GB/s", rate["raw"], staged)


def small_tensors(bench: Bench) -> Iterator[Claim]:
    """What it costs that the bytes come in many pieces."""
    if not bench.wants(SMALL):
        return
    many = tuple((f"t{index}", (SMALL_WORDS,)) for index in range(NUM_SMALL))
    one = (("all", (NUM_SMALL, SMALL_WORDS)),)
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, layout in (("many", many), ("one", one)):
            setup = Setup(layout=layout, seed=bench.options.seed, num_replicas=1)
            sides[name] = stack.enter_context(running(WsyncBroadcast(setup, ["away"]))).round
        took = bench.medians(**sides)
    yield Claim.at_most(SMALL, took["many"], "s", took["one"], took["many"] / took["one"], 2.0)


def while_serving(bench: Bench) -> Iterator[Claim]:
    """What the trainer's own computing loses while other hosts pull."""
    if not bench.wants(*SLOWDOWN):
        return
    first, second, *_ = (*sorted(os.sched_getaffinity(0)), None, None)
    if first is None or second is None:
        raise SystemExit(f"{SLOWDOWN[0]} needs two cores: one for the trainer, one for everybody else")
    hosts = [f"away{index}" for index in range(NUM_REPLICAS)]
    setup = bench.setup(NUM_REPLICAS, share=1 if bench.options.is_quick else 4)
    with running(WsyncBroadcast(setup, hosts, cores=(first, second))) as ours:
        spins: dict[str, Spin] = {}

        def serving() -> float:
            spins["serving"] = ours.serve_and_spin()
            return spins["serving"].rate

        def alone() -> float:
            spins["alone"] = ours.spin(spins["serving"].seconds)
            return spins["alone"].rate

        rates = bench.medians(
            serving=serving,
            alone=alone,
            serving_cpu=lambda: spins["serving"].cpu_rate,
            alone_cpu=lambda: spins["alone"].cpu_rate,
        )
    slowdown, cpu_slowdown = rates["alone"] / rates["serving"], rates["alone_cpu"] / rates["serving_cpu"]
    yield Claim.at_most(SLOWDOWN[0], rates["serving"], "units/s", rates["alone"], slowdown, 1.05)
    yield Claim.reported(SLOWDOWN[1], rates["serving_cpu"], "units/cpu s", rates["alone_cpu"], cpu_slowdown)


def measure(options: Options) -> Iterator[Claim]:
    """All claims of a run, in the order in which they are measured."""
    bench = Bench(options)
    needed = MEMORY_FACTOR * bench.nbytes
    if available_memory() < needed:
        raise SystemExit(f"needs {needed / 2**30:.1f} GiB of available memory")
    _leftovers.mark()
    with tempfile.TemporaryDirectory(prefix="wsync-bench-", ignore_cleanup_errors=True) as folder:
        os.environ["WSYNC_RUNTIME_DIR"] = folder
        try:
            for part in (one_replica, two_hosts, small_tensors, while_serving, four_replicas):
                yield from part(bench)
        finally:
            _leftovers.wait_until_gone(set())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind then either
    sys.exit(main("broadcast", NAMES, measure, packages=PACKAGES))
