"""docs/cases.md is true: each case has a test of its number or a decision, and each such test has its case there."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = dict(re.findall(r"^\| PC-(\d\d) \| [^|]+ \| (.+) \|$", (ROOT / "docs/cases.md").read_text(encoding="utf-8"), re.M))


@cache
def functions(path: Path) -> set[str]:
    """The names of a file's test functions."""
    return {
        node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_case_is_held_by_what_its_row_names():
    assert len(ROWS) == 62
    decided = set(re.findall(r"PC-(\d\d)", (ROOT / "docs/decisions.md").read_text(encoding="utf-8")))
    for number, where in ROWS.items():
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", where)
        assert named or "decisions.md" in where, f"PC-{number} is held by nothing"
        assert "decisions.md" not in where or number in decided, f"docs/decisions.md has no PC-{number}"
        for path, name in named:
            assert f"pc{number}" in name, f"{name} is not of PC-{number}"
            assert name in functions(ROOT / "tests" / path), f"docs/cases.md, PC-{number}: tests/{path} has no {name}"


def test_every_test_with_a_number_has_a_case():
    for path in (ROOT / "tests").rglob("test_*.py"):
        numbers = {number for name in functions(path) for number in re.findall(r"pc(\d\d)", name)}
        assert numbers <= ROWS.keys(), f"{path}: {numbers - ROWS.keys()}"
