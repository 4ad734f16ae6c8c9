"""What the demo does when, and whether this machine can do it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import msgspec

from wsync.demo.models import SPECS, smollm2_file
from wsync.errors import ConfigError

NUM_NODES = 3
MIN_VERSIONS = 4
PROCESS_NBYTES = 400 << 20


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """The schedule.

    `sizes`: replicas at first, when grown, when shrunk; `serve_s`: time served with each version;
    `think_s`: rest between two tokens.
    """

    model: str
    num_versions: int
    seed: int = 0
    sizes: tuple[int, int, int] = (4, 6, 3)
    serve_s: float = 8.0
    think_s: float = 0.0
    timeout_s: float = 900.0
    is_verbose: bool = False

    def __post_init__(self) -> None:
        if self.num_versions < MIN_VERSIONS:
            raise ConfigError(f"the demo needs at least {MIN_VERSIONS} versions, not {self.num_versions}")
        if self.timeout_s <= 0:
            raise ConfigError(f"--timeout-s must be positive, not {self.timeout_s}")

    @property
    def kill_at(self) -> int:
        """The version during which a holder and a replica are killed."""
        return max(2, 3 * self.num_versions // 8)

    @property
    def grow_at(self) -> int:
        """The version before which the fleet grows."""
        return self.kill_at + (2 if self.num_versions >= 6 else 1)

    @property
    def shrink_at(self) -> int:
        """The version before which the fleet shrinks."""
        return max(self.grow_at + 1, self.num_versions - 1)

    @property
    def needed_nbytes(self) -> int:
        """Memory at the peak: weights and gradients, every replica, two slots on every host, and the processes."""
        spec = SPECS[self.model]
        num_copies = 2 + max(self.sizes) + 2 * NUM_NODES
        one_step = 3 * 4 * spec.vocab_size * spec.hidden_size  # three float32 copies of the largest tensor
        return num_copies * spec.nbytes + one_step + (max(self.sizes) + NUM_NODES + 1) * PROCESS_NBYTES


def make_scenario(args: argparse.Namespace) -> Scenario:
    """From the options of `wsync.demo.add_arguments`. Raises `ConfigError`."""
    default = 4 if args.tiny else 8
    return Scenario(
        model="tiny" if args.tiny else args.model,
        sizes=(2, 3, 2) if args.model == "qwen3-0.6b" and not args.tiny else (4, 6, 3),
        num_versions=default if args.versions is None else args.versions,
        seed=args.seed,
        serve_s=1.0 if args.tiny else 8.0,
        think_s=0.05 if args.tiny else 0.0,
        timeout_s=args.timeout_s,
        is_verbose=args.verbose,
    )


def require(scenario: Scenario) -> None:
    """Raises `ConfigError` when the weights are not installed or the memory is not there."""
    if SPECS[scenario.model].has_real_weights:
        smollm2_file()
    available = available_nbytes()
    if available < scenario.needed_nbytes:
        raise ConfigError(
            f"{scenario.model} needs {scenario.needed_nbytes / 1e9:.1f} GB of memory, "
            f"{available / 1e9:.1f} GB are available",
            hint="try --model smollm2, or --tiny",
        )


def available_nbytes() -> int:
    """Memory that can be had without swapping, as the kernel estimates it."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
