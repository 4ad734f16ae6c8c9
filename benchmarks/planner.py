"""How long the planner takes for a model of 1T parameters: 256 trainer ranks, 128 workers of 8 classes.

    python -m benchmarks.planner [--quick] [--json FILE] [--only CLAIM,...]

The layouts are those of `_big_model`; holdings are made (in child processes, as that takes longer than planning),
encoded, and decoded as the coordinator would get them; the claims begin with decoded holdings. Times are CPU seconds
of the one thread that plans, so that other programs on the machine do not add to them; `plan_1t_wall_s` is the same
plan by the clock. `--quick` has fewer layers and experts.

`plan_1t_s`: from holdings to a proven plan. `plan_1t_gib`: growth of the peak resident memory by that.
`replan_one_member_s`: a worker of a known class leaves, and comes again (the slower one).
`replan_equal_trainer_s`: a trainer rank restarts with an equal holding. `replan_other_trainer_s`: with another one,
which is a new plan. `replan_new_class_s`: workers of a layout not seen before come; the trainer is not read again.
`manifest_22k_names_s`: a plan of 22,213 names on both sides; `manifest_22k_vs_linear`: seconds per name, by those of a
tenth of the names.
`bytes_moved_over_needed`: bytes that the lanes carry into all classes, by the bytes of what the classes want.
`egress_max_over_mean`: of the trainer ranks. `expand_member_s`: fragments, manifests and places of the lanes of one
trainer rank and one worker. `check_wanted_s`: a worker's proof that all its memory is written once.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from benchmarks._bench import Claim, Options, main, median
from benchmarks._big_model import Size, tensors_of, trainer, worker
from wsync.engine.lanes import LanePlanner, Locator, ShardPlan
from wsync.engine.overlap import check_wanted
from wsync.holding import Holding, HoldingBuilder, Region

NUM_NAMES = 22_213
NAMES = (
    "plan_1t_s",
    "plan_1t_wall_s",
    "plan_1t_gib",
    "num_tensors",
    "num_pieces",
    "num_lanes",
    "num_fragments",
    "bytes_moved_over_needed",
    "egress_max_over_mean",
    "replan_one_member_s",
    "replan_equal_trainer_s",
    "replan_other_trainer_s",
    "replan_new_class_s",
    "expand_member_s",
    "check_wanted_s",
    "manifest_22k_names_s",
    "manifest_22k_vs_linear",
)


def seconds(call: Callable[[], object]) -> float:
    """CPU seconds of one call, with the garbage of earlier ones gone."""
    gc.collect()
    start = time.process_time()
    call()
    return time.process_time() - start


def encoded(size: Size) -> tuple[list[bytes], list[bytes]]:
    """The holdings of all trainer ranks and worker classes, as messages."""
    with ProcessPoolExecutor() as pool:
        held = pool.map(_encoded, *zip(*(("trainer", size, i) for i in range(size.num_trainers)), strict=True))
        wanted = pool.map(_encoded, *zip(*(("worker", size, i) for i in range(size.num_workers)), strict=True))
        return list(held), list(wanted)


def _encoded(side: str, size: Size, rank: int) -> bytes:
    return msgspec.msgpack.encode({"trainer": trainer, "worker": worker}[side](size, rank))


def decoded(message: bytes) -> Holding:
    return msgspec.msgpack.decode(message, type=Holding)


def reset_peak() -> None:
    """Peak resident memory starts again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(field: str) -> float:
    """GiB that are resident now (`VmRSS`) or were at most (`VmHWM`)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 2**20
    raise RuntimeError(f"no {field} in /proc/self/status")


def big(options: Options) -> Iterator[Claim]:
    """The whole model."""
    size = Size(num_layers=6, num_experts=128) if options.is_quick else Size()
    held_messages, wanted_messages = encoded(size)
    held = {rank: decoded(message) for rank, message in enumerate(held_messages)}
    wanted = {holding.digest(): holding for holding in map(decoded, wanted_messages)}

    gc.collect()
    reset_peak()
    before, start = resident("VmRSS"), time.monotonic()
    plan = LanePlanner().plan(held, wanted)
    wall, growth = time.monotonic() - start, resident("VmHWM") - before
    took = median([seconds(lambda: LanePlanner().plan(held, wanted)) for _ in range(3)])
    yield Claim.at_most("plan_1t_s", took, "cpu s", 2.0, took, 2.0)
    yield Claim.reported("plan_1t_wall_s", wall, "s")
    yield Claim.at_most("plan_1t_gib", growth, "GiB", 2.0, growth, 2.0)
    yield from counts(size, held, wanted, plan)
    yield from replans(size, held_messages, held, wanted)
    yield from members(plan, held, wanted)


def counts(size: Size, held: dict[int, Holding], wanted: dict[str, Holding], plan: ShardPlan) -> Iterator[Claim]:
    """What was planned, and that nothing moves twice."""
    yield Claim.reported("num_tensors", sum(1 for _ in tensors_of(size)), "")
    yield Claim.reported("num_pieces", sum(len(h.pieces) for h in (*held.values(), *wanted.values())), "")
    yield Claim.reported("num_lanes", len(plan.lanes), "")
    yield Claim.reported("num_fragments", sum(len(b.tensors) for lane in plan.lanes for b in lane.bundles), "")
    needed = sum(holding.nbytes for holding in wanted.values())
    moved = sum(lane.nbytes * len(lane.receivers) for lane in plan.lanes)
    yield Claim.at_most("bytes_moved_over_needed", moved, "B", needed, moved / needed, 1.0)
    egress = [sum(lane.nbytes for lane in plan.of_source(rank)) for rank in held]
    mean = sum(egress) / len(egress)
    yield Claim.reported("egress_max_over_mean", max(egress), "B", mean, max(egress) / mean)


def replans(size: Size, messages: list[bytes], held: dict[int, Holding], wanted: dict[str, Holding]) -> Iterator[Claim]:
    """One member is another one. A class stays wanted while one of its workers is left, so one worker is no change."""
    planner = LanePlanner()
    planner.plan(held, wanted)
    leaves = seconds(lambda: planner.plan(dict(held), dict(wanted)))
    comes = seconds(lambda: planner.plan(dict(held), dict(sorted(wanted.items(), reverse=True))))
    yield Claim.at_most("replan_one_member_s", max(leaves, comes), "cpu s", 0.1, max(leaves, comes), 0.1)
    again = decoded(messages[3])
    equal = seconds(lambda: planner.plan(held | {3: again}, wanted))
    yield Claim.at_most("replan_equal_trainer_s", equal, "cpu s", 0.1, equal, 0.1)
    # Ranks 3 and 7 swap their places: still a whole model, and two holdings that are not as they were.
    swapped = held | {3: held[7], 7: held[3]}
    yield Claim.reported("replan_other_trainer_s", seconds(lambda: planner.plan(swapped, wanted)), "cpu s")
    planner.plan(held, wanted)
    other = worker(msgspec.structs.replace(size, num_workers=16), 5)
    more = wanted | {other.digest(): other}
    yield Claim.reported("replan_new_class_s", seconds(lambda: planner.plan(held, more)), "cpu s")


def members(plan: ShardPlan, held: dict[int, Holding], wanted: dict[str, Holding]) -> Iterator[Claim]:
    """What one trainer rank and one worker do with the plan."""
    digest, holding = next(iter(wanted.items()))

    def expand() -> None:
        for own, lanes in ((held[0], plan.of_source(0)), (holding, plan.of_receiver(digest))):
            locator = Locator(own)
            for lane in lanes:
                assert len(locator.views(lane)) == len(lane.manifest.tensors)

    yield Claim.reported("expand_member_s", seconds(expand), "cpu s")
    yield Claim.reported("check_wanted_s", seconds(lambda: check_wanted(holding)), "cpu s")


def names(options: Options) -> Iterator[Claim]:
    """Many names, one rank and one worker."""

    def side(count: int) -> Holding:
        builder = HoldingBuilder()
        for index in range(count):
            name = f"model.language_model.layers.{index % 60}.mlp.experts.{index // 60}.gate_proj.weight"
            builder.tensor(name, "bfloat16", (64, 64))
            builder.local(name, "bfloat16", (64, 64))
            builder.piece(name, Region.whole((64, 64)), name, (0, 0))
        return decoded(msgspec.msgpack.encode(builder.build()))

    def per_plan(count: int) -> float:
        held, wanted = {0: side(count)}, {"worker": side(count)}
        return median([seconds(lambda: LanePlanner().plan(held, wanted)) for _ in range(5)])

    took, tenth = per_plan(NUM_NAMES), per_plan(NUM_NAMES // 10)
    yield Claim.at_most("manifest_22k_names_s", took, "cpu s", 0.2, took, 0.2)
    yield Claim.reported("manifest_22k_vs_linear", took, "cpu s", 10 * tenth, took / (10 * tenth))


def measure(options: Options) -> Iterator[Claim]:
    """All claims of a run."""
    if options.wants(*NAMES[:-2]):
        yield from big(options)
    if options.wants(*NAMES[-2:]):
        yield from names(options)


if __name__ == "__main__":
    sys.exit(main("planner", NAMES, measure, packages=("msgspec", "xxhash")))
