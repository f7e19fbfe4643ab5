"""docs/cases.md is right: each case names a test or a decision, and each test with a case's number is listed there."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = dict(
    re.findall(r"^\| (PC2?-\d\d) \| [^|]+ \| (.+) \|$", (ROOT / "docs/cases.md").read_text(encoding="utf-8"), re.M)
)


@cache
def functions(path: Path) -> set[str]:
    """Return the names of a file's test functions."""
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def cases_of(name: str) -> set[str]:
    """Return the cases in a test's name, such as pc01 or pc2_01."""
    return {f"PC2-{number}" if second else f"PC-{number}" for second, number in re.findall(r"pc(2_)?(\d\d)", name)}


def test_every_case_is_held_by_what_its_row_names():
    assert sum(case.startswith("PC-") for case in ROWS) == 62
    decided = set(re.findall(r"PC2?-\d\d", (ROOT / "docs/decisions.md").read_text(encoding="utf-8")))
    for case, where in ROWS.items():
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", where)
        assert named or "decisions.md" in where, f"{case} is held by nothing"
        assert "decisions.md" not in where or case in decided, f"docs/decisions.md has no {case}"
        for path, name in named:
            assert case in cases_of(name), f"{name} is not of {case}"
            assert name in functions(ROOT / "tests" / path), f"docs/cases.md, {case}: tests/{path} has no {name}"


def test_every_test_with_a_number_has_a_case():
    for path in (ROOT / "tests").rglob("test_*.py"):
        cases = {case for name in functions(path) for case in cases_of(name)}
        assert cases <= ROWS.keys(), f"{path}: {cases - ROWS.keys()}"
