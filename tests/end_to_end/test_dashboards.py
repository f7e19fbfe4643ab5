"""What the dashboards hold, read back from their files: offline wandb runs, TensorBoard's events, metrics.csv."""

import csv
import json
import time

import pytest
from commands import run, run_all
from offline_wandb import OfflineRun

SMALL = [
    "train.py", "encoder=tiny", "data=files", "batch.queries=8", "batch.docs=4", "optim.lr=3e-3", "depth=20", "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false", "encoder.dropout=0.1",
]  # fmt: skip
BROKEN = [*SMALL, "name=broken", "logger=wandb", "optim.lr=1e30", "trainer.max_epochs=2"]


@pytest.fixture(scope="module")
def done(tmp_path_factory, small_files):
    where = tmp_path_factory.mktemp("dashboards")
    data = f"data.path={small_files}"
    commands = {
        "first": [*SMALL, data, "name=first", "logger=wandb", "trainer.max_epochs=1"],
        "second": ["train.py", "checkpoint=@outputs/first/*", "resume=true", "name=second", "trainer.max_epochs=2"],
        "sweep": [SMALL[0], "-m", *SMALL[1:], data, "name=sweep", "logger=wandb", "trainer.max_epochs=1", "seed=0,1"],
        "broken": [*BROKEN, data],
        "board": [*SMALL, data, "name=board", "logger=tensorboard", "trainer.max_epochs=1"],
    }
    results = run_all(commands, where, timeout=900)
    assert {name: result["code"] for name, result in results.items()} == {
        "first": 0, "second": 0, "sweep": 0, "broken": 1, "board": 0,
    }, results  # fmt: skip
    return where


def only(where, pattern):
    (found,) = where.glob(pattern)
    return found


def opened(folder):
    """The run's file once its last record is there: wandb's own process writes it."""
    end = time.monotonic() + 60
    while (board := OfflineRun(only(folder, "wandb/offline-run-*/run-*.wandb"))).exit_code is None and time.monotonic() < end:
        time.sleep(0.2)
    return board


def rows_of(path):
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_pc88_an_offline_run_holds_all_that_the_run_folder_holds(done, small_files):
    folder = only(done, "outputs/first/*")
    board = opened(folder)
    assert board.name == f"first/{folder.name}"
    assert board.exit_code == 0
    assert board.config["optim"]["lr"] == 3e-3
    assert board.config["encoder"]["_target_"] == "ranker.layers.encoder.load_encoder"
    logged = rows_of(folder / "metrics.csv")
    for name in ("train/loss", "train/grad_norm", "optim/lr", "train/pairs_per_second", "train/tokens_per_second", "val/nDCG@10"):
        expected = [(int(row["step"]), float(row[name])) for row in logged if row.get(name)]
        assert expected
        assert board.curve(name) == [(step, pytest.approx(value)) for step, value in expected], name
    assert board.summary["objective"] == json.loads((folder / "result.json").read_text())["objective"]
    name = small_files.name
    assert board.artifacts[f"{board.id}-{name}"] == ("run", ["metrics.json", "per_query.jsonl", "run.trec"])
    pictures = {f"pictures/{path.stem}" for path in (folder / "pictures").glob("*.png")}
    assert pictures == {"pictures/learning_curves", f"pictures/{name}_gains", f"pictures/{name}_ranks"}
    assert {"/".join(key.split("/")[:2]) for entry in board.history for key in entry if key.startswith("pictures/")} == pictures


def test_the_table_has_the_queries_won_and_lost_most(done, small_files):
    folder = only(done, "outputs/first/*")
    path = only(folder, f"wandb/offline-run-*/files/media/table/queries/{small_files.name}_*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == ["query_id", "query", "nDCG@10 gain", "nDCG@10 baseline", "nDCG@10", "RR@10", "AP@100", "R@100"]
    rows = [json.loads(line) for line in (folder / "evaluation" / small_files.name / "per_query.jsonl").read_text().splitlines()]
    gains = {row["query_id"]: row["measures"]["nDCG@10"] - row["baseline"]["nDCG@10"] for row in rows}
    texts = dict(line.split("\t") for line in (small_files / "queries.tsv").read_text().splitlines())
    assert [(row[0], row[1], row[2]) for row in table["data"]] == [
        (query, texts[query], pytest.approx(gain)) for query, gain in sorted(gains.items(), key=lambda pair: (-pair[1], pair[0]))
    ]


def test_pc89_a_resumed_run_goes_on_under_its_id_without_gap_or_step_back(done):
    first, second = (opened(only(done, f"outputs/{name}/*")) for name in ("first", "second"))
    assert second.id == first.id
    assert [step for step, _ in first.curve("train/loss") + second.curve("train/loss")] == [0, 1, 2, 3, 4, 5]
    entries = [entry["_step"] for entry in first.history + second.history]
    assert entries == list(range(len(entries)))
    assert all("val/nDCG@10" in board.summary for board in (first, second))


def test_pc89_a_value_of_an_earlier_step_is_kept(tmp_path):
    from ranker.training.loggers import wandb

    logger = wandb(tmp_path)
    for name, step in (("train/loss", 5), ("val/RR", 3), ("train/loss", 6)):
        logger.log_metrics({name: float(step)}, step)
    logger.experiment.finish()
    board = opened(tmp_path)
    assert board.curve("train/loss") == [(5, 5.0), (6, 6.0)]
    assert board.curve("val/RR") == [(3, 3.0)]


def test_each_job_of_a_sweep_is_a_run_of_one_group(done):
    folder = only(done, "multirun/sweep/*")
    boards = [opened(folder / number) for number in ("0", "1")]
    assert [board.group for board in boards] == [folder.name] * 2
    assert [board.name for board in boards] == [f"{folder.name}/0", f"{folder.name}/1"]
    assert [board.config["seed"] for board in boards] == [0, 1]
    assert len({board.id for board in boards}) == 2
    assert [board.exit_code for board in boards] == [0, 0]
    assert all(len(board.curve("train/loss")) == 3 for board in boards)


def test_a_run_that_fails_says_so(done):
    assert opened(only(done, "outputs/broken/*")).exit_code == 1


def test_pc88_online_without_a_key_is_refused_before_anything_is_loaded(tmp_path):
    empty = {"HOME": str(tmp_path), "WANDB_API_KEY": "", "NETRC": ""}
    done = run("train.py", "logger=wandb", "logger.mode=online", cwd=tmp_path, **empty)
    assert done.returncode == 1
    assert done.stderr.startswith("error: logger.mode: expected a key for mode online, got none; set WANDB_API_KEY")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and ".hydra" not in path.parts]


def test_tensorboard_holds_curves_configuration_queries_and_pictures(done, small_files):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = only(done, "outputs/board/*")
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0, "scalars": 0, "tensors": 0})
    events.Reload()
    expected = [(int(row["step"]), float(row["train/loss"])) for row in rows_of(folder / "metrics.csv") if row.get("train/loss")]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (step, pytest.approx(value)) for step, value in expected
    ]
    assert {"train/grad_norm", "optim/lr", "train/tokens_per_second", "val/nDCG@10"} <= set(events.Tags()["scalars"])
    name = small_files.name
    assert set(events.Tags()["images"]) == {"pictures/learning_curves", f"pictures/{name}_gains", f"pictures/{name}_ranks"}
    tags = [tag for tag in events.Tags()["tensors"] if tag.endswith("/text_summary")]
    texts = {tag.removesuffix("/text_summary"): events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags}
    assert "lr: 0.003" in texts["config"]
    assert texts[f"queries/{name}"].startswith("| query_id | query | nDCG@10 gain |")
    assert events.Scalars("objective")[0].value == pytest.approx(json.loads((folder / "result.json").read_text())["objective"])
