"""Rules of the house that a program can check."""

import ast
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from ranker.cli import entry
from ranker.config.check import check
from ranker.config.roots import ROOTS
from ranker.config.signatures import parameters_of
from ranker.config.targets import PASSED, program_keys

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "ranker").rglob("*.py"))
YAMLS = sorted(
    path
    for path in (ROOT / "conf").glob("*/[!_]*.yaml")
    if path.parent.name not in ("hydra", "experiment", "local", "sweep")
)
# groups whose targets are functions of one file or outside classes, so the file is not named after the yaml
GATHERED = ("encoder", "lora", "schedule", "logger", "optim", "callbacks", "sweep")


def targets(path: Path) -> list[tuple[str, dict]]:
    """Return every node of a yaml that has a `_target_`, with its keys."""
    found = []

    def walk(node):
        if isinstance(node, dict):
            if "_target_" in node:
                found.append((node["_target_"], node))
            for child in node.values():
                walk(child)

    node = OmegaConf.load(path)
    if "_shared" in node.pop("defaults", []):
        node = OmegaConf.merge(OmegaConf.load(path.with_name("_shared.yaml")), node)
    walk(OmegaConf.to_container(node, resolve=False))
    return found


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_yaml_lists_every_parameter_of_its_target(path):
    for target, node in targets(path):
        parameters = parameters_of(target)
        assert parameters is not None, target
        keys = {key for key in node if not key.startswith("_")} - program_keys(path.parent.name, target)
        assert keys <= set(parameters), f"{path}: {keys - set(parameters)} are no parameters of {target}"
        if target.startswith("ranker."):
            lacking = set(parameters) - set(PASSED.get(path.parent.name, ())) - keys
            assert not lacking, f"{path}: lacks {lacking}"
            if path.parent.name not in GATHERED:
                assert path.stem in target.split(".")[1:-1], f"{target} is in no module or package named {path.stem}"


def together() -> list[tuple[str, dict[str, str]]]:
    """Return configurations that have every yaml: a root, and one yaml of each of its groups as long as they last.

    A model and a distillation are alone, because they decide what the other groups may hold.
    """
    groups: dict[tuple[str, str], dict[str, list[str]]] = {}
    for path in YAMLS:
        group = path.parent.name
        known = (name for name in ("train", "evaluate", "search", "probe", "pretrain") if name in ROOTS)
        root = next((name for name in known if hasattr(ROOTS[name], group)), "train")
        alone = group if group in ("model", "distill") else ""
        groups.setdefault((root, alone), {}).setdefault(group, []).append(path.stem)
    return [
        (root, {group: stems[number] for group, stems in of_root.items() if number < len(stems)})
        for (root, _), of_root in groups.items()
        for number in range(max(map(len, of_root.values())))
    ]


@pytest.mark.parametrize(
    ("root", "chosen"),
    [
        pytest.param(*row, id=f"{row[0]}-{'-'.join(f'{group}={stem}' for group, stem in row[1].items())}")
        for row in together()
    ],
)
def test_every_yaml_composes_and_passes_the_check(root, chosen, small_files, tmp_path):
    entry.register()
    if chosen.get("loss") == "dpo":  # the reference of dpo is the model without adapters
        chosen = {"lora": "default", **chosen}
    overrides = [f"{group}={stem}" for group, stem in chosen.items()]
    if chosen.get("distill") == "layers":
        overrides.append(f"distill.teacher={small_files}")
    if chosen.get("data") == "files":
        overrides.append(f"data.path={small_files}")
    if chosen.get("data") == "ir_datasets":
        overrides += ["data.train=vaswani", "data.test=[vaswani]"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose(root, [*overrides, f"name={tmp_path.name}"])
    check(cfg)


def test_library_code_knows_no_hydra():
    allowed = {"cli", "commands", "assembly", "config/roots.py", "checkpoint.py"}
    for path in SOURCES:
        name = path.relative_to(ROOT / "ranker")
        if {str(name), name.parts[0]} & allowed:
            continue
        imported = {
            (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        assert not any(name.split(".")[0] == "hydra" for name in imported), path


def test_measures_come_from_one_place():
    users = [
        path.name
        for path in SOURCES
        if any(line.startswith(("import ir_measures", "from ir_measures")) for line in path.read_text().splitlines())
    ]
    assert sorted(users) == ["measure_names.py", "measure_values.py", "metrics.py"]  # of ranker.evaluation


def test_names():
    for path in SOURCES:
        assert path.stem not in ("utils", "helpers", "common", "base", "misc"), path
        # ranker/__init__.py defines the Python interface and imports it at first use
        if path.name == "__init__.py" and path.parent.name != "ranker":
            assert len(ast.parse(path.read_text()).body) == 1, f"{path} holds more than a docstring"


def test_no_constructor_that_yaml_reaches_takes_anything():
    for path in YAMLS:
        for target, _ in targets(path):
            if target.startswith("ranker."):
                assert parameters_of(target) is not None, f"{target} takes **kwargs"


def test_weights_are_never_unpickled():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert any(
                    keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True" for keyword in node.keywords
                ), path
            assert not (isinstance(node, (ast.Import, ast.ImportFrom)) and "pickle" in ast.unparse(node)), path
