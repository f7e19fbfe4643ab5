"""The recipes of conf/experiment/: each begins with its command, composes, passes the check and trains a step."""

import importlib.util
import json
import random
from pathlib import Path

import pytest
from commands import run_folder
from hydra import compose, initialize_config_dir
from test_resume import losses

from ranker.cli import entry
from ranker.config.check import check

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "conf/experiment").glob("*.yaml"))
NEEDS_NETWORK = ("multitask_published",)  # its encoder and data are downloaded
SHORT = [
    "encoder=tiny",
    "batch.queries=2",
    "depth=5",
    "val_depth=5",
    "trainer.max_steps=1",
    "trainer.limit_train_batches=1",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "report=none",
]


@pytest.fixture(scope="module")
def inputs(small_files, tmp_path_factory):
    """The words in capitals of the commands: files of the small collection."""
    folder, rng = tmp_path_factory.mktemp("recipes"), random.Random(0)
    rows = [
        {"query": f"q {i}", "docs": [f"d {i} {j}" for j in range(5)], "scores": rng.sample(range(9), 5)}
        for i in range(20)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [f"q{i} Q0 d{j} 1 {j / 7} t\n" for i in range(24) for j in sorted({i, *rng.sample(range(60), 9)})]
    for name in ("teacher.trec", "negatives.trec"):
        (folder / name).write_text("".join(lines))
    found = {"ROWS": "rows.jsonl", "TEACHER_RUN": "teacher.trec", "NEGATIVES": "negatives.trec"}
    return {word: str(folder / name) for word, name in found.items()}


def overrides_of(path, inputs):
    """The overrides of the command in a recipe's second line, with files for its words in capitals."""
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# @package _global_" and lines[1].startswith(f"# python train.py experiment={path.stem}")
    assert lines[2].startswith("# "), "what it is and what to expect"
    words = [word.partition("=") for word in lines[1].removeprefix("# python train.py ").split()]
    return [f"{key}={inputs.get(value, value)}" for key, _, value in words]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_composes_and_passes_the_check(path, inputs):
    entry.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", overrides_of(path, inputs))
    assert cfg.name == path.stem
    check(cfg)


@pytest.mark.parametrize(
    "path", [path for path in RECIPES if path.stem not in NEEDS_NETWORK], ids=lambda path: path.stem
)
def test_a_recipe_trains_a_step(forks, path, inputs, small_files, tmp_path):
    data = ["data=files", f"data.path={small_files}"]
    if path.stem in ("distil_rows", "two_sets"):  # data of their own
        data = []
        if path.stem == "two_sets" and importlib.util.find_spec("cwe2") is None:
            pytest.skip("cwe2 (extra demo) is not installed")
    done = forks.run("train.py", *overrides_of(path, inputs), *data, *SHORT, cwd=tmp_path)
    assert done.code == 0, done.out
    assert len(losses(run_folder(tmp_path))) == 1
