"""`ranker sizes` measures a dpr model at each pair of layers and size; the model of a kept pair searches the same."""

import json

import pytest
from commands import run_all

from ranker.data.trec import read_run

CPU = ["trainer.accelerator=cpu", "trainer.enable_progress_bar=false"]
SIZES = ["ranker/__main__.py", "sizes", "trainer.accelerator=cpu", "trainer.devices=1"]


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    return tmp_path_factory.mktemp("sizes")


@pytest.fixture(scope="module")
def done(forks, where, small_files):
    train = [
        "train.py",
        "data=files",
        f"data.path={small_files}",
        "depth=6",
        "logger=none",
        "trainer.max_steps=2",
        "report=none",
        *CPU,
    ]
    train += ["batch.queries=4", "batch.docs=3", "encoder=tiny"]
    matryoshka = ["model=dpr", "model.matryoshka_dims=[8]", "model.matryoshka_layers=[1]"]
    commands = {
        "train": [*train, *matryoshka, "name=own"],
        "other": [*train, "name=other"],
        "sizes": [*SIZES, "checkpoint=@outputs/own/*", "keep=[1,8]", "latency_queries=2", "depth=10"],
        "search": ["search.py", "checkpoint=@outputs/sizes/*/model", "depth=10", "index=int8",
                   "trainer.accelerator=cpu"],
        "monobert": [*SIZES, "checkpoint=@outputs/other/*"],
        "dims": [*SIZES, "checkpoint=@outputs/own/*", "dims=[8,64]"],
        "keep": [*SIZES, "checkpoint=@outputs/own/*", "keep=[2,16]"],
        "windows": [*train, *matryoshka, "passages=maxp"],
    }  # fmt: skip
    return run_all(commands, where, forks=forks)


def test_each_pair_has_a_run_and_a_row(done, where, small_files):
    for name in ("train", "other", "sizes", "search"):
        assert done[name]["code"] == 0, done[name]["out"][-2000:]
    folder, name = next((where / "outputs/sizes").iterdir()), small_files.name
    rows = {(row["layers"], row["dim"]): row for row in json.loads((folder / "sizes.json").read_text())["rows"]}
    assert set(rows) == {(1, 8), (1, 32), (2, 8), (2, 32)}  # those of the training, and the model's own
    for (layers, dim), row in rows.items():
        of_pair = folder / f"evaluation/{name}/layers-{layers}-dim-{dim}"
        assert row["measures"] == json.loads((of_pair / "metrics.json").read_text())["measures"]
        assert row["bytes_per_doc"] == dim * 4 and (row["comparison"] is None) == ((layers, dim) == (2, 32))
    lines = (folder / "sizes.tsv").read_text().splitlines()
    assert len(lines) == 5 and lines[0].startswith("set\tlayers\tdim\tbytes_per_doc")
    assert (folder / f"pictures/{name}_sizes.png").stat().st_size > 2_000 and not (folder / "vectors").exists()


def test_the_kept_pair_searches_as_it_was_measured(done, where, small_files):
    kept = read_run(
        next((where / "outputs/sizes").iterdir()) / f"evaluation/{small_files.name}/layers-1-dim-8/run.trec"
    )
    found = read_run(next((where / "outputs/search").iterdir()) / f"evaluation/{small_files.name}/run.trec")
    assert kept.keys() == found.keys()
    for query_id, docs in kept.items():
        assert found[query_id] == pytest.approx(docs, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("monobert", "checkpoint: expected a dpr model with one vector per doc, got MonoBERT, whose vectors can't"),
        ("dims", "dims: expected values from 1 to 32, the model's own, got [8, 64]"),
        ("keep", "keep: expected [LAYERS,DIM] out of layers=[1, 2] and dims=[8, 32], got [2, 16]"),
        ("windows", "model.matryoshka_dims and model.matryoshka_layers: expected null with passages"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_line(done, name, message):
    assert done[name]["code"] == 1
    (line,) = [line for line in done[name]["out"].splitlines() if line.startswith("error: ")]
    assert message in line
