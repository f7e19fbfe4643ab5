"""Follow docs/add_a_model.md in a copy of the project: its three files are all that a new model needs."""

import re
import shutil
from pathlib import Path

import pytest

from tests.assets.forked import in_copy

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/add_a_model.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`([\w/]+\.\w+)`:\n\n```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
COPIED = ("ranker", "conf", "hydra_plugins", "tests/assets", "tests/contract", "tests/house")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project with the files of the page."""
    folder = tmp_path_factory.mktemp("project")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / name, folder / name)
    for name, content in FILES.items():
        path = folder / name
        assert not path.exists(), f"{name}: the page changes a file of the project"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return folder


def test_the_page_has_one_module_one_yaml_and_one_test():
    assert [Path(name).suffix for name in FILES] == [".py", ".yaml", ".py"]
    assert len(next(iter(FILES.values())).splitlines()) <= 60


def test_the_example_passes_its_test_the_contract_and_the_house_rules(project):
    stem = next(Path(name).stem for name in FILES)
    own_test = next(name for name in FILES if name.startswith("tests/"))
    tests = [own_test, "tests/contract/test_models.py", "tests/house/test_house.py"]
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-vv", "-k", stem]
    output = in_copy(project, lambda: pytest.main([*options, *tests]))
    for check in (
        "value_by_hand",
        "any_batch",
        "ragged_and_padded",
        "thirty_steps",
        "comes_back",
        "lists_every_parameter",
    ):
        assert re.search(rf"{stem}.py::\w*{check} PASSED|{check}\w*\[\S*{stem}\S*\] PASSED", output), output
