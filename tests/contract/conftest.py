"""Follow a page that shows how to add something: write its files exactly as shown, then import and test them."""

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def follow_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], tuple[ModuleType, Path]]:
    """Return `follow(page, package)`: write and import a page's module, yaml and test, and run the test."""

    def import_as(name: str, path: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    def follow(page: str, package: str) -> tuple[ModuleType, Path]:
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        blocks = dict(re.findall(r"^`([\w/]+\.\w+)`:\n\n```\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
        for path, content in blocks.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(content, encoding="utf-8")
        module_path, yaml_path, test_path = (tmp_path / path for path in list(blocks)[:3])
        module = import_as(f"{package}.{module_path.stem}", module_path)
        tests = [
            value for name, value in vars(import_as(test_path.stem, test_path)).items() if name.startswith("test_")
        ]
        assert tests
        for test in tests:
            test()
        return module, yaml_path

    return follow
