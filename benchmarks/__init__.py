"""One script per claim: `python -m benchmarks.NAME [--quick] [--json FILE] [--seed N] [--only CLAIM,...]`."""
