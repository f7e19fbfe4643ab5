"""The structure of the source tree: who imports whom, and the size of signatures, functions, lines and folders."""

import importlib.util
from pathlib import Path

import pytest
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("house_rules", Path(__file__).with_name("rules.py"))
rules = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(rules)
TREE = rules.Tree(ROOT / "ranker")
LINES = sorted(
    path
    for path in (*ROOT.glob("*.py"), *(path for folder in (
        "ranker", "hydra_plugins", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")))
)  # fmt: skip


def targets() -> set[str]:
    """Return every `_target_` in conf/."""
    found = set()

    def walk(node):
        if isinstance(node, dict):
            found.update([str(node["_target_"])] if "_target_" in node else [])
            for child in node.values():
                walk(child)
        elif isinstance(node, list):
            for child in node:
                walk(child)

    for path in (ROOT / "conf").rglob("*.yaml"):
        walk(OmegaConf.to_container(OmegaConf.load(path), resolve=False))
    return found


CHECKS = {
    "import_cycles": lambda: rules.import_cycles(TREE),
    "sibling_imports": lambda: rules.sibling_imports(TREE),
    "private_imports": lambda: rules.private_imports(TREE),
    "forbidden_imports": lambda: rules.forbidden_imports(TREE),
    "top_level": lambda: rules.top_level(TREE),
    "long_signatures": lambda: rules.long_signatures(TREE, targets()),
    "long_functions": lambda: rules.long_functions(TREE),
    "wide_lines": lambda: rules.wide_lines(LINES),
}


@pytest.mark.parametrize("rule", CHECKS)
def test_no_violation(rule):
    assert [text.replace(f"{ROOT}/", "") for text in CHECKS[rule]()] == []


# each rule detects a seeded violation
# ---------------------------------------------------------------------------------------------------------------------


def tree(folder: Path, **files: str):
    """Return a package `house` with the given files; a double underscore in a keyword is a slash."""
    for name, text in files.items():
        path = folder / "house" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for part in {path.parent for path in (folder / "house").rglob("*.py")}:
        (part / "__init__.py").touch()
    return rules.Tree(folder / "house")


@pytest.mark.parametrize(
    ("back", "is_cycle"),
    [
        ("from house.a.one import x", True),
        ("def late():\n    from house.a import one", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.a.one", True),
        ("from ..a import one", True),
        ("import importlib\none = importlib.import_module('house.a.one')", False),
        ("from house.c.three import x", False),
    ],
)
def test_an_import_cycle_is_seen(tmp_path, back, is_cycle):
    seeded = tree(tmp_path, a__one="from house.b.two import x", b__two=back, c__three="x = 1")
    assert rules.import_cycles(seeded) == (["import cycle: a, b"] if is_cycle else [])


def test_a_cycle_through_a_module_at_the_top_level_is_seen(tmp_path):
    seeded = tree(tmp_path, a__one="from house import top", b__two="import house.a.one", top="from house.b import two")
    assert rules.import_cycles(seeded) == ["import cycle: a, b, top"]


@pytest.mark.parametrize("package", rules.PLUGINS)
def test_a_plug_in_that_imports_its_sibling_is_seen(tmp_path, package):
    dotted, key = package.replace("/", "."), package.replace("/", "__")
    seeded = tree(tmp_path, **{
        f"{key}__one": f"from house.{dotted}.two import x\nfrom house.{dotted} import _shared",
        f"{key}__two": "x = 1", f"{key}___shared": "y = 1",
    })  # fmt: skip
    assert rules.sibling_imports(seeded) == [f"house.{dotted}.one imports its sibling house.{dotted}.two"]
    relative = tree(tmp_path / "relative", **{f"{key}__one": "from . import two", f"{key}__two": "x = 1"})
    assert rules.sibling_imports(relative) == [f"house.{dotted}.one imports its sibling house.{dotted}.two"]


def test_a_private_name_of_another_module_is_seen(tmp_path):
    seeded = tree(
        tmp_path, one="from house.two import _x, y\nfrom house.a import _shared", two="_x = y = 1", a___shared=""
    )
    assert rules.private_imports(seeded) == ["house.one imports the private name house.two._x"]


@pytest.mark.parametrize("package", ["probing", "multitask"])
def test_a_forbidden_import_is_seen(tmp_path, package):
    seeded = tree(
        tmp_path, data__one=f"def late():\n    from house.{package}.two import x", **{f"{package}__two": "x = 1"}
    )
    assert rules.forbidden_imports(seeded) == [f"house.data.one imports house.{package}.two"]


@pytest.mark.parametrize(("count", "is_seen"), [(8, False), (9, True)])
def test_too_many_modules_at_the_top_level_are_seen(tmp_path, count, is_seen):
    seeded = tree(tmp_path, __main__="", **{f"m{i}": "" for i in range(count)})
    assert bool(rules.top_level(seeded)) is is_seen


NINE = ", ".join(f"a{i}" for i in range(9))


@pytest.mark.parametrize(
    ("module", "text", "violations"),
    [
        ("one", f"def f({NINE}): pass", ["house.one.f has 9 parameters"]),
        ("one", f"def f(*, {NINE}): pass", ["house.one.f has 9 parameters"]),
        ("one", f"class C:\n    def __init__(self, {NINE}): pass", ["house.one.C.__init__ has 9 parameters"]),
        ("one", f"def outer():\n    def f({NINE}): pass", ["house.one.outer.f has 9 parameters"]),
        ("one", f"class C:\n    def f(self, {NINE[4:]}): pass", []),  # eight
        ("one", f"class Yaml:\n    def __init__(self, {NINE}): pass", []),
        ("one", f"class Yaml:\n    def other(self, {NINE}): pass", ["house.one.Yaml.other has 9 parameters"]),
        ("one", f"class F(torch.autograd.Function):\n    def forward(ctx, {NINE}): pass", []),
        ("encoders__kernels__one", f"def f({NINE}): pass", []),
        ("encoders__one", f"def f({NINE}): pass", ["house.encoders.one.f has 9 parameters"]),
    ],
)
def test_a_long_signature_is_seen(tmp_path, module, text, violations):
    assert rules.long_signatures(tree(tmp_path, **{module: text}), {"house.one.Yaml"}) == violations


@pytest.mark.parametrize(("count", "is_seen"), [(50, False), (51, True)])
def test_a_long_function_is_seen(tmp_path, count, is_seen):
    text = "def f():\n" + "    if x:\n        y\n" * (count // 2) + "    x\n" * (count % 2)
    assert bool(rules.long_functions(tree(tmp_path, one=text))) is is_seen


def test_a_wide_line_is_seen(tmp_path):
    path = tmp_path / "one.py"
    path.write_text(f"{'x' * 120}\n{'x' * 121}\n")
    assert rules.wide_lines([path]) == [f"{path}:2: 121 columns"]
