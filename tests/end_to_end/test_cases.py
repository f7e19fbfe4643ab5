"""Cases of the command line: commas in values, and relative paths."""

import json

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

SMALL = [
    "encoder=tiny",
    "data=files",
    "batch.queries=4",
    "batch.docs=4",
    "trainer.max_steps=1",
    "depth=5",
    "trainer.enable_progress_bar=false",
    "report=none",
]


def jobs(*arguments: str) -> list[tuple[str, ...]]:
    """The jobs that Hydra's basic sweeper derives from a command line."""
    parsed = OverridesParser.create().parse_overrides(list(arguments))
    (batch,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    return [tuple(job) for job in batch]


def test_pc80_pc82_a_quoted_comma_is_one_value_and_paths_are_the_launch_folder_s(forks, small_files, tmp_path):
    assert len(jobs("seed=1,3", "data.path=what is, this")) == 4  # unquoted: a sweep
    assert len(jobs("seed=1,3", "data.path='what is, this'")) == 2
    (tmp_path / "what is, this").symlink_to(small_files)
    done = forks.run(
        "train.py", "-m", *SMALL, "data.path='what is, this'", "seed=1,3", "name=sweep", "cache_dir=cache", cwd=tmp_path
    )
    assert done.code == 0, done.out
    results = sorted((tmp_path / "multirun/sweep").glob("*/*/result.json"))
    assert [path.parent.name for path in results] == ["0", "1"]
    assert [
        f"seed: {seed}\n" in (path.parent / "config.yaml").read_text()
        for path, seed in zip(results, (1, 3), strict=True)
    ] == [True, True]
    assert all(json.loads(path.read_text())["steps"] == 1 for path in results)
    done = forks.run("train.py", *SMALL, "data.path='./what is, this'", "name=single", "cache_dir=cache", cwd=tmp_path)
    assert done.code == 0, done.out
    assert len(list((tmp_path / "outputs/single").glob("*/result.json"))) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "multirun", "outputs", "what is, this"]
