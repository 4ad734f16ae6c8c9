"""Four ranks of a sharded trainer on two hosts to three replicas of two workers, each on a host of its own."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks._bench import Claim, Options, median
from benchmarks._cluster_remote import ROUNDS, Job, Remote, bound_s, call_all, cluster_of, nbytes_of
from benchmarks.emulated import EmulatedHost

SHARDED = "sharded_4x4_vs_bound"
CHILD = "benchmarks._cluster_shards_child"
NUM_RANKS, NUM_WORKERS = 4, 2


def sharded(options: Options) -> Iterator[Claim]:
    """Each receiving host needs all bytes once, and each of the trainer's hosts has half of them to send."""
    nbytes = nbytes_of(options)
    with cluster_of([EmulatedHost(f"h{number}", 1.0) for number in range(5)]) as cluster:
        job = Job(cluster, "h0")

        def member(kind: str, host: str, rank: int, num_ranks: int) -> Remote:
            return Remote(cluster, host, job.environment(host), CHILD, kind, str(nbytes), str(rank), str(num_ranks))

        ranks = [member("trainer", f"h{rank // 2}", rank, NUM_RANKS) for rank in range(NUM_RANKS)]
        workers = [member("worker", host, rank, NUM_WORKERS) for host in ("h2", "h3", "h4") for rank in range(2)]
        for remote in [*ranks, *workers]:
            remote.call("join")

        def round_s(step: int) -> float:
            """From the first rank's start of publish to the last worker's commit."""
            call_all(ranks, "fill", step)
            for worker in workers:
                worker.send("install", step)
            published = call_all(ranks, "publish", step)
            ended = [worker.result() for worker in workers]
            call_all(workers, "check", step)
            if {version for version, _ in published} != {step}:
                raise AssertionError(f"versions {published} are not {step}")
            return float(max(ended) - min(started for _, started in published))

        round_s(1)
        seconds, bound = median([round_s(2 + number) for number in range(ROUNDS)]), bound_s(nbytes, 1.0)
    yield Claim.at_most(SHARDED, seconds, "s", bound, seconds / bound, 1.15)
