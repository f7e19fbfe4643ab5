"""A new loss needs one file and one yaml: `focal` of docs/add_a_loss.md trains a step in a copy with them."""

import json
import re
import shutil
import sys
from pathlib import Path

from tests.assets.forked import in_copy

ROOT = Path(__file__).resolve().parents[2]


def example(page: str, heading: str) -> dict[str, str]:
    """The files of a section of a page: path -> content."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL).group(1)
    return dict(re.findall(r"^`([\w/]+\.\w+)`:\n\n```\w+\n(.*?)^```", section, re.MULTILINE | re.DOTALL))


def test_a_loss_of_two_files_trains_on_relevant_docs_alone(tmp_path, small_files):
    files = example((ROOT / "docs/add_a_loss.md").read_text(encoding="utf-8"), "Without negatives: focal loss")
    assert list(files) == ["ranker/losses/focal.py", "conf/loss/focal.yaml"]
    for folder in ("ranker", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / folder, tmp_path / "copy" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path, content in files.items():
        (tmp_path / "copy" / path).write_text(content, encoding="utf-8")
    command = [
        *("train.py", "loss=focal", "loss.gamma=1.5", "batch.docs=1", "batch.positives=1"),
        *("data=files", f"data.path={small_files}", "encoder=tiny", "trainer.accelerator=cpu", "trainer.max_steps=1"),
        *("logger=none", f"cache_dir={tmp_path / 'cache'}", f"hydra.run.dir={tmp_path / 'run'}"),
    ]

    def train() -> None:
        from ranker.cli.main import run

        sys.argv = command
        run("train")

    in_copy(tmp_path / "copy", train)
    result = json.loads((tmp_path / "run/result.json").read_text(encoding="utf-8"))
    assert result["steps"] == 1, result
