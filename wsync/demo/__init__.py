"""`wsync demo`: a trainer and a fleet of replicas on a small Ray cluster, with kills, growth and a verdict.

Importing this package loads neither torch nor ray; `main` does.
"""

from __future__ import annotations

import argparse

MODELS = ("smollm2", "qwen3-0.6b")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `wsync demo`. `main` expects the namespace that this parser returns."""
    parser.add_argument(
        "--model", choices=MODELS, default="smollm2", help="real SmolLM2-135M, or random Qwen3 (1.2 GB, needs 18 GB)"
    )
    parser.add_argument("--tiny", action="store_true", help="a random Llama of a few MB instead, for a quick look")
    parser.add_argument("--versions", type=int, default=None, help="how many to publish (8; with --tiny 4)")
    parser.add_argument("--seed", type=int, default=0, help="of random weights, prompts and check times")
    parser.add_argument("--json", metavar="FILE", default=None, help="write the report there as JSON too")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="the demo fails when it takes longer")
    parser.add_argument("--verbose", action="store_true", help="show the logs of Ray and of the actors")


def main(args: argparse.Namespace) -> int:
    """Run the demo. Returns 0 when every check held, 1 when one did not or anything else went wrong."""
    from wsync.demo.run import main as run

    return run(args)
