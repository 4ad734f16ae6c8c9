"""The table of cases says what the tests say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = TESTS / "cases" / "README.md"
STATES = ("met", "in part", "refused by design", "out of scope")
NOT_LISTED = {4, 5, 8, 18, 30, 35, 45, 50, 52}
CASES = {f"A{n:02}" for n in range(1, 56) if n not in NOT_LISTED} | {"B01", "B02", "B03", "C06", "D02", "D07"}


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every test, as the table names it."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{path.relative_to(TESTS)}::{node.name}", node


def rows() -> list[list[str]]:
    """Case, subject, state and tests of each row."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def cases_of(name: str) -> list[str]:
    found = re.search(r"::test_case_((?:[A-H]\d\d_)+)", name)
    return found[1].split("_")[:-1] if found else []


def test_every_case_has_one_row_with_a_state() -> None:
    found = [case for case, *_ in rows()]
    assert sorted(found) == sorted(CASES)
    for case, _, state, tests in rows():
        assert state.startswith(STATES), case
        assert tests or state.startswith("out of scope"), case
        assert ":" in state or state == "met", f"{case}: say why"


def test_every_test_of_the_table_exists_and_every_test_of_a_case_is_in_it() -> None:
    there = dict(functions())
    listed = {case: set(re.findall(r"`([^`]+)`", tests)) for case, _, _, tests in rows()}
    for case, names in listed.items():
        assert names <= set(there), f"{case} names tests that are not there: {names - set(there)}"
    for name in there:
        for case in set(cases_of(name)) & CASES:
            assert name in listed[case], f"{name} is not in the row of {case}"
        if any(case.startswith("A") for case in cases_of(name)):
            assert set(cases_of(name)) <= CASES, f"{name} is of no case that is listed"


def test_what_is_expected_to_fail_is_called_a_known_fault() -> None:
    failing = {
        case
        for name, node in functions()
        if any("xfail" in ast.unparse(decorator) for decorator in node.decorator_list)
        for case in cases_of(name)
    }
    assert failing == {case for case, _, state, _ in rows() if "Known fault" in state}
