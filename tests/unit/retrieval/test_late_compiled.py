"""Compilation of the CPU kernels: what is kept on disk, unknown processors, and numba that cannot compile."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ranker
from ranker.retrieval.late.index import numba_compiles

pytest.importorskip("numba", reason="needs numba (extras cpu and gpu)")

PACKAGE = Path(ranker.__file__).parent
MAXSIM = """
import json
import numpy as np
from ranker.retrieval.late.doc_kernels import maxsim
rng = np.random.default_rng(0)
vectors, query = rng.normal(size=(10, 8)).astype("f4"), rng.normal(size=(3, 8)).astype("f4")
(score,) = maxsim(vectors, np.array([0]), np.array([10]), query)
print(json.dumps([float(score), sum(maxsim.stats.cache_hits.values())]))
"""
TOTALS = """
import json
import numpy as np
from ranker.retrieval.late.doc_kernels import totals
found = totals(np.array([[2], [3]], dtype="i2"), np.array([0.5, 10], dtype="f4"), 1)
print(json.dumps([found.tolist(), sum(totals.stats.cache_hits.values())]))
"""
SCAN = """
import json
import sys
from llvmlite import binding
if "unknown" in sys.argv:
    def fail():
        raise RuntimeError("failed to get host cpu features.")
    binding.get_host_cpu_features = fail
import numpy as np
from ranker.retrieval.late import doc_kernels, vector_code
rng = np.random.default_rng(0)
blocks = rng.integers(0, 256, size=(4, 8, 32)).astype("u1")
blocks[:, 6:] = rng.integers(8192, 31744, size=(4, 32)).astype("<i2").view("u1").reshape(4, 2, 32)
table, docs = rng.integers(0, 64, size=(3, 6, 2, 16)).astype("u1"), rng.integers(0, 10, size=(4, 32)).astype("i4")
cells = blocks, docs, np.array([0, 1, 2, 4]), np.array([32, 20, 50])
similarities, least = rng.integers(-7000, 3900, size=(3, 16)).astype("i2"), np.full(3, -8000, dtype="i2")
rows, best = doc_kernels.scan(similarities, least, least, table, cells, np.full(10, -1, dtype="i4"))
print(json.dumps([bool(vector_code.SHUFFLES or vector_code.WIDE), rows.tolist(), best[:, : len(rows)].tolist()]))
"""


def run(code, *arguments, folder=PACKAGE.parent, **settings):
    """Run Python code with the package in `folder`; return what it prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder,  # Python imports from the working folder first
        env={**os.environ, "PYTHONPATH": str(folder), **settings}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_machine_code_is_loaded_from_disk_until_any_source_changes(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    late = tmp_path / "ranker" / "retrieval" / "late"
    late.mkdir(parents=True)
    for folder in ("", "retrieval", "retrieval/late"):
        shutil.copy(PACKAGE / folder / "__init__.py", tmp_path / "ranker" / folder)
    for name in ("compiled", "doc_kernels", "query_kernels", "tiles", "vector_code"):
        shutil.copy(PACKAGE / "retrieval" / "late" / f"{name}.py", late)
    rng = np.random.default_rng(0)
    vectors, query = rng.normal(size=(10, 8)).astype("f4"), rng.normal(size=(3, 8)).astype("f4")
    truth = pytest.approx((vectors @ query.T).max(0).sum(), abs=1e-5)
    assert run(MAXSIM, folder=tmp_path) == [truth, 0]
    assert run(MAXSIM, folder=tmp_path) == [truth, 1]
    source = (late / "tiles.py").read_text()
    wrong = source.replace('fcmp_ordered(">"', 'fcmp_ordered("<"')  # nothing is lower than the first value, -inf
    assert wrong != source
    (late / "tiles.py").write_text(wrong)
    assert run(MAXSIM, folder=tmp_path) == [-np.inf, 0]
    (late / "tiles.py").write_text(source)
    assert run(MAXSIM, folder=tmp_path) == [truth, 1]


def test_without_a_folder_to_write_to_it_compiles_for_this_process(tmp_path):
    (tmp_path / "file").write_text("")
    assert run(TOTALS, NUMBA_CACHE_DIR=str(tmp_path / "file")) == [[31.0], 0]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_processor_that_llvm_does_not_know_computes_the_same_integers():
    expected, found = run(SCAN), run(SCAN, "unknown")
    assert found == [False, *expected[1:]] and len(found[1]) == 10


def test_numba_that_is_told_not_to_compile_is_not_used(monkeypatch, caplog):
    from numba import config

    assert numba_compiles()
    monkeypatch.setattr(config, "DISABLE_JIT", 1)  # the setting that NUMBA_DISABLE_JIT=1 makes
    assert not numba_compiles()
    assert caplog.messages == ["index=plaid: torch searches instead of numba, because NUMBA_DISABLE_JIT is set"]


def test_numba_that_refuses_to_be_imported_is_not_used(monkeypatch, caplog, tmp_path):
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text("raise ImportError('Numba needs NumPy 2.3 or less')")
    for name in [name for name in sys.modules if name.split(".")[0] == "numba"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    assert not numba_compiles()
    assert caplog.messages == [
        "index=plaid: torch searches instead of numba, which can't be imported: Numba needs NumPy 2.3 or less"
    ]
