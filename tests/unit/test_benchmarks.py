"""Benchmarks end with one line if a package is missing or their user made a mistake."""

import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from ranker.errors import DataError

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAMS = [path for path in sorted(FOLDER.glob("*.py")) if "__main__" in path.read_text()]
# what the dependencies of pyproject.toml without extras install
INSTALLED = {"hydra", "lightning", "matplotlib", "numpy", "omegaconf", "scipy", "tokenizers", "torch", "transformers"}
_spec = importlib.util.spec_from_file_location("one_line", FOLDER / "one_line.py")
one_line = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(one_line)


def imported(body):
    """Yield the packages that statements import before their function is called, unless `need` has checked them."""
    needed = set()
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value
            if ast.unparse(call.func) == "need":
                needed.add(ast.literal_eval(call.args[0]))
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names = [node.module] if isinstance(node, ast.ImportFrom) else names
        yield from {name.split(".")[0] for name in names} - needed


def test_the_functions_that_the_rehearsal_times_exist():
    tree = ast.parse((FOLDER / "rehearsal.py").read_text())
    (stages,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "STAGES"
    )
    for module, name in [*stages.values(), ("ranker.commands.train", "check_length")]:
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_runs_in_one_line_and_imports_packages_of_extras_where_it_needs_them(path):
    tree = ast.parse(path.read_text())
    assert [ast.unparse(node) for node in tree.body[-1].body][-1] == "one_line(main)"
    own = {"ranker", "benchmarks", *(other.stem for other in FOLDER.glob("*.py"))}
    assert set(imported(tree.body)) <= INSTALLED | own | sys.stdlib_module_names


def test_a_missing_package_is_one_line():
    code = (
        "import runpy, sys; sys.modules['faiss'] = None; sys.argv = ['index_recall.py', '--vectors', '9']; "
        f"sys.path.insert(0, {str(FOLDER)!r}); runpy.run_path({str(FOLDER / 'index_recall.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=FOLDER.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "error: expected the package faiss, which is not installed; pip install faiss-cpu\n"


def test_a_mistake_is_one_line_and_a_fault_of_the_program_is_not():
    def mistaken():
        raise DataError("docs: expected a file, got none")

    def without_package():
        import no_such_package_anywhere  # noqa: F401

    def without_module():
        import json.no_such_module  # noqa: F401

    with pytest.raises(SystemExit, match=r"^error: docs: expected a file, got none$"):
        one_line.one_line(mistaken)
    with pytest.raises(SystemExit, match="expected the package no_such_package_anywhere, which is not installed"):
        one_line.one_line(without_package)
    with pytest.raises(ModuleNotFoundError):
        one_line.one_line(without_module)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        one_line.folder_of("no_such_package")
    with pytest.raises(ZeroDivisionError):
        one_line.one_line(lambda: 1 / 0)
