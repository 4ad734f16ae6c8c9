"""Importing wsync costs next to nothing, and the layers import in one direction only."""

from __future__ import annotations

import ast
import functools
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import wsync

ROOT = Path(wsync.__file__).parent
HEAVY = ("torch", "ray", "vllm", "nixl", "jax", "numpy", "asyncio", "xxhash", "msgspec")
RECORDS = {
    "wsync",
    "auth",
    "config",
    "errors",
    "events",
    "manifest",
    "memory",
    "status",
    "holding",
    "sharding",
    "layouts",
    "arrangements",
    "topology",
    "paths",
}
PURE = {
    f"engine.{name}"
    for name in (
        "planner",
        "progress",
        "fabric",
        "routes",
        "route_cost",
        "route_trees",
        "overlap",
        "groups",
        "lanes",
        "shards",
        "membership",
        "protocol",
        "channel",
        "machine",
    )
}


def layer(module: str) -> int:
    """0 records, 1 pure engine, 2 engine I/O, 3 integrations and programs; transports count as 1."""
    name = module.removeprefix("wsync.")
    if name in RECORDS:
        return 0
    if name in PURE or name.startswith(("transports", "discovery")):
        return 1
    if name.startswith("engine"):
        return 2
    return 3


@functools.cache
def modules() -> tuple[tuple[str, ast.Module], ...]:
    paths = {".".join(p.relative_to(ROOT.parent).with_suffix("").parts): p for p in sorted(ROOT.rglob("*.py"))}
    return tuple((name.removesuffix(".__init__"), ast.parse(path.read_text())) for name, path in paths.items())


def imports(tree: ast.Module, *, is_whole: bool) -> Iterator[str]:
    """Modules of wsync that are imported: at the top level, or anywhere if `is_whole`; not for type checking only."""
    nodes = list(ast.walk(tree)) if is_whole else tree.body
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def known(names: Iterator[str]) -> set[str]:
    every = {name for name, _ in modules()}
    return {name for name in names if name.startswith("wsync") and name in every} - {"wsync"}


def test_layers_import_downwards_only() -> None:
    wrong = []
    for module, tree in modules():
        if module == "wsync":
            continue
        for used in known(imports(tree, is_whole=False)):
            if layer(used) > layer(module):
                wrong.append(f"{module} imports {used}")
    assert not wrong


def test_transports_and_pure_engine_know_records_only() -> None:
    wrong = []
    for module, tree in modules():
        if layer(module) != 1:
            continue
        own = ".".join(module.split(".")[:2])
        for used in known(imports(tree, is_whole=True)):
            is_sibling = used.startswith(own) and layer(used) == 1
            if layer(used) > 0 and not is_sibling:
                wrong.append(f"{module} imports {used}")
    assert not wrong


def test_the_pure_engine_does_no_io() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, tree in modules()
        if module.removeprefix("wsync.") in PURE
        for name in imports(tree, is_whole=True)
        if name.split(".")[0] in {"socket", "asyncio", "os", "time", "threading", "subprocess", "select", "random"}
    ]
    assert not wrong


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_wsync_loads_nothing_heavy() -> None:
    found = python(f"import sys, wsync; print([m for m in {HEAVY!r} if m in sys.modules])")
    assert found.strip() == "[]"
    public = python("import sys, wsync; wsync.Publisher, wsync.Replica, wsync.Config; print(*sys.modules)").split()
    assert not {"torch", "ray", "vllm", "nixl", "jax"} & set(public)


def test_import_wsync_is_fast() -> None:
    """By the processor's time: what other programs take of a busy machine is not the import's."""

    def seconds(code: str) -> float:
        before = os.times()
        python(code)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    extra = [seconds("import wsync") - seconds("pass") for _ in range(5)]
    assert statistics.median(extra) < 0.15, extra


def test_public_names_load_on_use_and_unknown_ones_are_named() -> None:
    for name in wsync.__all__:
        assert getattr(wsync, name) is not None
    with pytest.raises(AttributeError, match="module 'wsync' has no attribute 'publish'"):
        wsync.publish  # noqa: B018
