"""`data=mixed` through the commands: training and evaluation, a kill and a resume, and mistakes in one line."""

import csv
import json
import math
import random

import pytest
from commands import by_start, run_folder
from test_resume import assert_same_end, losses, state

from ranker.data.trec import read_run
from ranker.evaluation.metrics import evaluate

SHORT = ["encoder=tiny", "encoder.dropout=0.1", "batch.queries=4", "batch.docs=4", "depth=5", "name=mixed",
         "trainer.enable_progress_bar=false", "report=none", "trainer.log_every_n_steps=1"]  # fmt: skip


@pytest.fixture(scope="module")
def sets(small_files, tmp_path_factory):
    """Overrides for two sets: judged files, and rows with a teacher's scores under another loss."""
    rng, path = random.Random(0), tmp_path_factory.mktemp("taught") / "rows.jsonl"
    words = [f"word{i}" for i in range(30)]
    rows = [
        {
            "query": f"query {i}",
            "docs": [" ".join(rng.choices(words, k=6)) for _ in range(5)],
            "scores": [rng.gauss(0, 3) for _ in range(5)],
        }
        for i in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "data=mixed", "+data@data.sets.judged=files", f"data.sets.judged.path={small_files}",
        "+data@data.sets.taught=rows", f"data.sets.taught.train={path}", "data.sets.taught.val_queries=4",
        "+loss@data.sets.taught.loss=mse", "data.sets.taught.loss.affine=true",
        "+data.sets.taught.max_doc_tokens=5", "+data.sets.judged.max_doc_tokens=8", "+data.sets.judged.cap=12",
        "+data.sets.taught.weight=0.5",
    ]  # fmt: skip


def logged(folder, name):
    with (folder / "metrics.csv").open() as lines:
        return [float(row[name]) for row in csv.DictReader(lines) if row.get(name)]


@pytest.fixture(scope="module")
def trained(forks, sets, tmp_path_factory):
    """A whole run of two epochs, its folder of outputs, and what it printed."""
    where = tmp_path_factory.mktemp("whole")
    arguments = [*sets, *SHORT, "trainer.max_epochs=2", "save_every_steps=1", f"cache_dir={where / 'cache'}"]
    done = forks.run("train.py", *arguments, cwd=where)
    assert done.code == 0, done.out
    return where, run_folder(where), done.out, arguments


def test_counts_and_losses_of_each_set_are_logged(trained):
    """12 groups count for `judged` (weight 1) and 16 for `taught` (weight 0.5): shares 12 and 8 of 20, of 28 groups."""
    _, folder, out, _ = trained
    assert "an epoch has 28 groups in 7 steps: judged 17 (60.7%; the set has 24), taught 11 (39.3%; the set has" in out
    judged, taught, total = (logged(folder, f"train/{name}") for name in ("groups/judged", "groups/taught", "loss"))
    assert (judged[-1], taught[-1]) == (34, 22) and len(total) == 14
    each = [logged(folder, f"train/loss/{name}") for name in ("judged", "taught")]
    for i in range(14):
        counts = [now[i] - (now[i - 1] if i else 0) for now in (judged, taught)]
        assert sum(counts) == 4
        parts = [loss[i] * count for loss, count in zip(each, counts, strict=True) if count]
        assert sum(parts) / 4 == pytest.approx(total[i], rel=1e-5)
        assert all(math.isnan(loss[i]) == (count == 0) for loss, count in zip(each, counts, strict=True))


def test_each_set_is_validated_and_the_mean_chooses_the_best(trained):
    _, folder, _, _ = trained
    means, *each = (logged(folder, f"val/{name}nDCG@10") for name in ("", "judged/", "taught/"))
    assert len(means) == 2
    assert means == pytest.approx([sum(values) / 2 for values in zip(*each, strict=True)], abs=1e-6)
    result = json.loads((folder / "result.json").read_text())
    assert result["objective"] == pytest.approx(max(means), abs=1e-6)
    assert list(result["measures"]) == ["judged"], "the rows have no test set"


@pytest.mark.parametrize(("split", "sizes"), [("test", {"judged": 8}), ("val", {"judged": 8, "taught": 4})])
def test_an_evaluation_writes_one_run_per_set(forks, trained, small_files, tmp_path, split, sizes):
    where, folder, _, _ = trained
    arguments = [f"split={split}", "name=again", "report=none", f"cache_dir={where / 'cache'}"]
    done = forks.run("evaluate.py", f"checkpoint={folder}", *arguments, cwd=tmp_path)
    assert done.code == 0, done.out
    (again,) = by_start(tmp_path / "outputs/again")
    assert not (again / "pictures").exists(), "report=none"
    runs = {path.name: read_run(path / "run.trec") for path in (again / "evaluation").iterdir()}
    assert {name: len(run) for name, run in runs.items()} == sizes
    metrics = json.loads((again / "evaluation/judged/metrics.json").read_text())["measures"]
    qrels = {"test": range(32, 40), "val": range(24, 32)}[split]
    expected = evaluate(runs["judged"], {f"q{i}": {f"d{i}": 1} for i in qrels}, ["nDCG@10"]).means
    assert metrics["nDCG@10"] == pytest.approx(expected["nDCG@10"], abs=1e-12)
    if split == "test":
        tested = read_run(folder / "evaluation/judged/run.trec")
        assert all(runs["judged"][query] == pytest.approx(docs, abs=1e-5) for query, docs in tested.items())


def test_the_map_of_a_set_s_loss_is_trained_and_in_the_checkpoint(trained):
    _, folder, _, _ = trained
    stored = {key: value.item() for key, value in state(folder)["state_dict"].items() if key.startswith("loss.")}
    assert set(stored) == {"loss.registered.1.log_scale", "loss.registered.1.shift"}
    assert all(abs(value) > 1e-4 for value in stored.values())


def test_killed_in_the_middle_of_an_epoch_and_resumed(forks, trained, tmp_path):
    _, whole, _, arguments = trained
    kill = [0, 0, "SIGKILL", "open", ".last.ckpt.partial", 4, 0.0]
    done = forks.run("train.py", *arguments, cwd=tmp_path, signals=[kill])
    assert done.code == -9, done.out
    first = run_folder(tmp_path)
    done = forks.run("train.py", f"checkpoint={first}", "resume=true", arguments[-1], cwd=tmp_path)
    assert done.code == 0, done.out
    last = by_start(tmp_path / "outputs/mixed")[-1]
    assert_same_end(whole, last)
    assert losses(first, last) == losses(whole) and 7 < len(losses(last)) < 14
    assert logged(last, "train/groups/taught")[-1] == 22, "groups are counted from the start of the first run"


def test_two_processes_give_the_same_losses(forks, trained, tmp_path):
    _, whole, _, arguments = trained
    done = forks.run("train.py", *arguments, "trainer.devices=2", "trainer.accelerator=cpu", cwd=tmp_path, devices=2)
    assert done.codes == [0, 0], done.out
    folder = run_folder(tmp_path)
    for name in ("loss", "groups/judged", "loss/taught"):
        assert logged(folder, f"train/{name}") == pytest.approx(logged(whole, f"train/{name}"), rel=1e-4, nan_ok=True)


def test_in_batch_negatives_come_from_one_set(forks, small_files, tmp_path):
    sets = ["data=mixed", *(f"+data@data.sets.{name}=files" for name in "ab"),
            *(f"data.sets.{name}.path={small_files}" for name in "ab"), "+data.sets.b.evaluate=false"]  # fmt: skip
    arguments = ["model=dpr", *sets, *SHORT, "trainer.max_steps=3"]
    done = forks.run("train.py", *arguments, cwd=tmp_path)
    assert done.code == 1 and "data.batches: expected one_set with in-batch negatives" in done.out
    done = forks.run("train.py", *arguments, "data.batches=one_set", cwd=tmp_path)
    assert done.code == 0, done.out
    folder = run_folder(tmp_path)
    assert sorted(path.name for path in (folder / "evaluation").iterdir()) == ["a"]
    done = forks.run("search.py", f"checkpoint={folder}", cwd=tmp_path)
    assert done.code == 1 and "data: expected a single set, got a mix (a, b); choose data=..." in done.out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["monitor=val/other/nDCG@10"], "monitor: expected one of val/nDCG@10"),
        (["+data.sets.judged.weight=0", "data.sets.taught.weight=0"], "data.sets: expected a weight above 0 for at"),
        (["+data.sets.judged.wieght=1"], "data.sets.judged.wieght: unknown key for ranker.data.sources.files.Files;"),
        (["data.sets.judged.weight=1"], "data.sets.judged.weight: unknown key; a key that the set's yaml does not"),
        (["data.teacher=run.trec"], "data.teacher: expected this key in a set of the mix, got 'run.trec'; set +"),
        (["data.sets.taught.train=none.jsonl"], "data.sets.taught.train: expected files, got"),
        (
            ["data.sets.taught.train=null"],
            "data.sets.taught.train: expected files for train, val or test, got none; set data.sets.taught.train=FILE",
        ),
        (["+loss@data.sets.judged.loss=nope"], "loss: expected one of"),
        (["data.sets.taught.loss._target_=os.system"], "data.sets.taught.loss._target_: expected a name that starts"),
        (["model=multitask"], "data: expected a single set with model=multitask, got a mix"),
        (["data.sets.taught.max_doc_tokens=0"], "data.sets.taught.max_doc_tokens: expected at least 1, got 0"),
    ],
)
def test_mistakes_are_one_line(forks, sets, tmp_path, changes, message):
    done = forks.run("train.py", *sets, *SHORT, *changes, cwd=tmp_path)
    errors = [line for line in done.out.splitlines() if line.startswith("error: ")]
    assert done.code == 1 and "Traceback" not in done.out
    assert any(line.startswith(f"error: {message}") for line in errors), done.out
