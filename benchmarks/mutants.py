"""Mutation testing: put small faults into a module, one at a time, in memory, and run the module's unit tests on each.

`python benchmarks/mutants.py --count 20 ranker/data/sampling.py` draws 20 mutants of the module and prints those that
no test sees. Without files it covers all modules in `TESTS`. Each mutant runs in a forked process; no file is changed.
See docs/tests.md.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 120  # a mutant that takes longer counts as seen: it hangs
STEPS = "training/test_optimizer_steps"
# module in ranker/ -> its test files in tests/unit/
TESTS = {
    "training/rerank_module": [STEPS, "training/test_rerank_module", "training/test_validation", "test_seeds"],
    "training/contrastive_module": ["training/test_contrastive_module", STEPS],
    "multitask/module": ["multitask/test_module", "multitask/test_weighting", STEPS],
    "multitask/task_weights": ["multitask/test_weighting", "multitask/test_module"],
    "multitask/gradient_surgery": ["multitask/test_weighting", "multitask/test_module"],
    "training/schedules": ["training/test_schedules"],
    "training/throughput": ["training/test_throughput"],
    "training/checkpointing": ["training/test_checkpointing"],
    "training/checkpoint_files": ["training/test_checkpointing"],
    "data/sampling": ["data/test_sampling", "test_seeds"],
    "data/step_plan": ["data/test_batching", "data/test_sampling", "test_seeds"],
    "data/template": ["data/test_batching"],
    "data/collate": ["data/test_batching", "data/test_sampling"],
    "retrieval/search": ["retrieval/test_search"],
    "retrieval/index": ["retrieval/test_index", "retrieval/test_search"],
    "retrieval/encode": ["retrieval/test_encode", "retrieval/test_search"],
    "retrieval/mining": ["retrieval/test_mining"],
    "retrieval/bm25": ["retrieval/test_bm25"],
    "retrieval/vector_store": ["retrieval/test_encode", "retrieval/test_search"],
    "retrieval/pipeline": ["retrieval/test_search", "retrieval/test_mining"],
    "evaluation/report": ["evaluation/test_report"],
    "evaluation/metrics": ["evaluation/test_metrics", "evaluation/test_report"],
}
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


def sites(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that can be mutated: not annotations, messages, logging or assertions."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(
                child, (ast.Raise, ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)
            ):
                continue
            text = ast.unparse(child)
            if isinstance(child, (ast.Expr, ast.Call)) and text.startswith(("log.", "print(", "'", '"')):
                continue
            if text.startswith("if TYPE_CHECKING"):
                continue
            if mutated(child) is not None:
                yield child
            yield from sites(child)


def mutated(node: ast.AST) -> ast.AST | None:
    """A copy of the node with one small fault, or None if the node can't have one."""
    changed: ast.AST = copy.deepcopy(node)
    if isinstance(changed, ast.AugAssign) or (isinstance(changed, ast.Expr) and isinstance(changed.value, ast.Call)):
        return ast.copy_location(ast.Pass(), node)
    if isinstance(changed, ast.Compare) and type(changed.ops[0]) in COMPARISONS:
        changed.ops[0] = COMPARISONS[type(changed.ops[0])]()
    elif isinstance(changed, ast.BinOp) and type(changed.op) in OPERATORS:
        changed.op = OPERATORS[type(changed.op)]()
    elif isinstance(changed, ast.BoolOp):
        changed.op = ast.Or() if isinstance(changed.op, ast.And) else ast.And()
    elif isinstance(changed, ast.UnaryOp):
        changed = changed.operand
    elif isinstance(changed, ast.IfExp):
        changed.body, changed.orelse = changed.orelse, changed.body
    elif isinstance(changed, ast.Constant) and isinstance(changed.value, (bool, int, float)):
        changed.value = not changed.value if isinstance(changed.value, bool) else changed.value + 1
    else:
        return None
    return changed


class Replace(ast.NodeTransformer):
    """Replace one node by another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


class Mutant(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a syntax tree."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.name, self.path, self.tree = ".".join(path.relative_to(ROOT).with_suffix("").parts), path, tree

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def create_module(self, spec):
        return None

    def exec_module(self, module) -> None:
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)


def survives(path: Path, tree: ast.Module, tests: list[str]) -> bool:
    """Whether the tests pass with the mutant, in a forked process that ends at the first failing test."""
    process = os.fork()
    if process == 0:
        os.setsid()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        sys.meta_path.insert(0, Mutant(path, tree))
        import pytest

        with tempfile.TemporaryDirectory() as folder:
            files = [str(ROOT / f"tests/unit/{test}.py") for test in tests]
            code = pytest.main(
                [
                    "-x",
                    "-q",
                    "-p",
                    "no:cacheprovider",
                    "-p",
                    "no:xdist",
                    "-W",
                    "ignore",
                    f"--basetemp={folder}/tests",
                    *files,
                ]
            )
        os._exit(int(code))
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return False


def main() -> None:
    """Print each survivor as one JSON line, and the number of survivors of each file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, default=[ROOT / f"ranker/{name}.py" for name in TESTS])
    parser.add_argument("--count", type=int, default=20, help="mutants per file, drawn with --seed")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
    sys.path.insert(0, str(ROOT))
    import faiss, hydra, ir_measures, lightning.pytorch, transformers.models.bert.modeling_bert  # noqa: E401, F401, I001 - before the fork

    for path in (file.resolve() for file in options.files):
        tests = TESTS[str(path.relative_to(ROOT / "ranker").with_suffix(""))]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not survives(path, tree, tests):
            sys.exit(f"{path}: expected its tests to pass without a fault")
        number = len(list(sites(tree)))
        chosen = sorted(random.Random(options.seed).sample(range(number), min(options.count, number)))
        survivors = 0
        for index in chosen:
            fault = copy.deepcopy(tree)
            node = list(sites(fault))[index]
            new = mutated(node)
            fault = ast.fix_missing_locations(Replace(node, new).visit(fault))
            if survives(path, fault, tests):
                survivors += 1
                print(
                    json.dumps(
                        {"file": path.name, "line": node.lineno, "was": ast.unparse(node), "is": ast.unparse(new)}
                    ),
                    flush=True,
                )
        print(f"{path.name}: {survivors} of {len(chosen)} survive; {number} mutants exist", flush=True)


if __name__ == "__main__":
    main()
