"""Families of encoders from the command line: a training resumes, and its model evaluates to the run that it wrote.

Five families run in each test run, one of each path. All others:

    python -m pytest -m every_family tests/end_to_end/test_families.py
"""

import json

import pytest
from commands import by_start

from tests.zoo.checkpoints import make
from tests.zoo.outcomes import PATHS

# one of each path, an encoder inside of an encoder-decoder, and a decoder
FAMILIES = ("modernbert", "deberta-v3", "convbert", "t5", "qwen3")
OTHERS = sorted({family for names in PATHS.values() for family in names.split()} - set(FAMILIES))
CHOICES = [
    "data=files", "batch.queries=4", "batch.docs=4", "depth=5", "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false", "max_pair_tokens=64",
]  # fmt: skip


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.every_family) for name in OTHERS)]
)
def test_a_family_trains_resumes_and_evaluates_alike(family, forks, small_files, tmp_path):
    def run(script: str, *arguments: str):
        done = forks.run(script, *arguments, "trainer.enable_progress_bar=false", cwd=tmp_path)
        assert done.code == 0, done.out
        return by_start(next((tmp_path / "outputs").iterdir()))[-1]

    where = [f"data.path={small_files}", f"cache_dir={tmp_path / 'cache'}", f"name={family}"]
    choices = [*CHOICES, *where, "encoder=bert_base", f"encoder.name={make(family, tmp_path / family)}"]
    first = run("train.py", *choices, "trainer.max_steps=2")
    last = run("train.py", f"checkpoint={first}", "resume=true", "trainer.max_steps=4")
    steps = [json.loads((folder / "result.json").read_text())["steps"] for folder in (first, last)]
    assert steps == [2, 4]
    again = run("evaluate.py", f"checkpoint={last}", f"name={family}")
    runs = [folder / "evaluation" / small_files.name / "run.trec" for folder in (last, again)]
    assert runs[0].read_text().splitlines() == runs[1].read_text().splitlines()
