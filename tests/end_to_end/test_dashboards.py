"""The content of dashboards, read from their files: offline wandb runs, TensorBoard's events, metrics.csv."""

import csv
import json
import time

import pytest
from offline_wandb import OfflineRun

from ranker.assembly import run
from ranker.errors import RankerError
from ranker.training import dashboards, loggers

SMALL = [
    "encoder=tiny",
    "data=files",
    "batch.queries=8",
    "batch.docs=4",
    "depth=5",
    "trainer.log_every_n_steps=1",
    "trainer.max_epochs=1",
    "trainer.enable_progress_bar=false",
    "encoder.dropout=0.1",
    "save_every_steps=1",
]
# The checkpoint of a step is written before the step is logged, that of a validation after it. This kill hits the
# checkpoint of the validation, after three steps.
KILL = [[0, 0, "SIGKILL", "open", ".last.ckpt.partial", 3, 0.0]]


@pytest.fixture(scope="module")
def done(forks, tmp_path_factory, small_files):
    """Folder of a sweep whose second job fails, and of a killed and resumed run for each of two dashboards."""
    where = tmp_path_factory.mktemp("dashboards")
    small = [*SMALL, f"data.path={small_files}"]
    swept = forks.run("train.py", "-m", *small, "name=sweep", "logger=wandb", "optim.lr=3e-3,1e30", cwd=where)
    assert swept.code == 1, swept.out
    for logger in ("wandb", "tensorboard"):
        killed = forks.run(
            "train.py",
            *small,
            f"name={logger}",
            f"logger={logger}",
            "optim.lr=3e-3",
            "trainer.max_epochs=2",
            cwd=where,
            signals=KILL,
        )
        assert killed.code == -9, killed.out
        folder = only(where, f"outputs/{logger}/*")
        again = forks.run("train.py", f"checkpoint={folder}", "resume=true", f"name={logger}-resumed", cwd=where)
        assert again.code == 0, again.out
    return where


def only(where, pattern):
    (found,) = where.glob(pattern)
    return found


def opened(folder):
    """The offline run, read after wandb's process has written its last record."""
    end = time.monotonic() + 60
    while (board := read(folder)).exit_code is None and time.monotonic() < end:
        time.sleep(0.2)
    return board


def read(folder):
    return OfflineRun(only(folder, "wandb/offline-run-*/run-*.wandb"))


def rows_of(path):
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_pc88_an_offline_run_holds_all_that_the_run_folder_holds(done, small_files):
    folder = only(done, "multirun/sweep/*/0")
    board = opened(folder)
    assert board.config["optim"]["lr"] == 3e-3
    assert board.config["encoder"]["_target_"] == "ranker.encoders.loading.load_encoder"
    logged = rows_of(folder / "metrics.csv")
    for name in (
        "train/loss",
        "train/grad_norm",
        "optim/lr",
        "train/pairs_per_second",
        "train/tokens_per_second",
        "val/nDCG@10",
    ):
        expected = [(int(row["step"]), float(row[name])) for row in logged if row.get(name)]
        assert expected
        assert board.curve(name) == [(step, pytest.approx(value)) for step, value in expected], name
    assert board.summary["objective"] == json.loads((folder / "result.json").read_text())["objective"]
    # the default schedule over the epoch's three steps: 0.3 of a step of warm-up is none
    rates = [float(row["optim/lr"]) for row in logged if row.get("optim/lr")]
    assert rates == pytest.approx([3e-3, 2e-3, 1e-3], rel=1e-6)
    name = small_files.name
    assert board.artifacts[f"{board.id}-{name}"] == ("run", ["metrics.json", "per_query.jsonl", "run.trec"])
    assert board.artifacts[f"{board.id}-report"] == ("report", ["report.html"])
    pictures = {f"pictures/{path.stem}" for path in (folder / "pictures").glob("*.png")}
    assert pictures == {"pictures/learning_curves", f"pictures/{name}_gains", f"pictures/{name}_ranks"}
    assert {
        "/".join(key.split("/")[:2]) for entry in board.history for key in entry if key.startswith("pictures/")
    } == pictures


def test_the_table_has_the_queries_won_and_lost_most(done, small_files):
    folder = only(done, "multirun/sweep/*/0")
    path = only(folder, f"wandb/offline-run-*/files/media/table/queries/{small_files.name}_*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == [
        "query_id",
        "query",
        "nDCG@10 gain",
        "nDCG@10 baseline",
        "nDCG@10",
        "RR@10",
        "AP@100",
        "R@100",
    ]
    rows = [
        json.loads(line)
        for line in (folder / "evaluation" / small_files.name / "per_query.jsonl").read_text().splitlines()
    ]
    gains = {row["query_id"]: row["measures"]["nDCG@10"] - row["baseline"]["nDCG@10"] for row in rows}
    texts = dict(line.split("\t") for line in (small_files / "queries.tsv").read_text().splitlines())
    assert [(row[0], row[1], row[2]) for row in table["data"]] == [
        (query, texts[query], pytest.approx(gain))
        for query, gain in sorted(gains.items(), key=lambda pair: (-pair[1], pair[0]))
    ]


def test_pc89_a_killed_run_goes_on_under_its_id_without_gap_double_or_step_back(done):
    folder, again = (only(done, f"outputs/{name}/*") for name in ("wandb", "wandb-resumed"))
    killed, resumed = read(folder), opened(again)
    assert killed.exit_code is None and resumed.exit_code == 0
    assert resumed.id == json.loads((folder / "wandb.json").read_text())["id"]
    # the resumed run has repeated the third step and its validation; the kill lost what wandb had not yet written
    assert [int(row["step"]) for row in rows_of(again / "metrics.csv") if row["train/loss"]] == [1, 2, 3, 4, 5]
    assert [step for step, _ in resumed.curve("train/loss")] == [0, 1, 2, 3, 4, 5]
    assert [step for step, _ in resumed.curve("val/nDCG@10")] == [2, 5]
    entries = [entry["_step"] for entry in resumed.history]
    assert entries == list(range(len(entries)))
    assert set(killed.curve("train/loss")) <= set(resumed.curve("train/loss"))


def test_a_killed_run_goes_on_in_tensorboard_without_gap(done):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = []
    for name in ("tensorboard", "tensorboard-resumed"):
        events = EventAccumulator(str(only(done, f"outputs/{name}/*") / "tensorboard")).Reload()
        curves.append([(event.step, event.value) for event in events.Scalars("train/loss")])
    # each run has its own files; a repeated step is in both, with the same value
    assert [step for step, _ in curves[0]] in ([0, 1], [0, 1, 2])
    assert [step for step, _ in curves[1]] == [1, 2, 3, 4, 5]
    assert set(curves[0]) - set(curves[1]) == {curves[0][0]}


def test_pc89_a_value_of_an_earlier_step_is_kept_and_one_that_was_logged_is_not_repeated(tmp_path):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    # a run that ended before it logged anything
    logger = loggers.wandb(first, mode="disabled")
    dashboards.start([logger], {"lr": 1.0}, "")
    run._finish_wandb(failed=True)
    logger = loggers.wandb(second, first)
    dashboards.start([logger], {}, "")
    for name, step in (("train/loss", 5), ("val/RR", 3), ("train/loss", 6)):
        logger.log_metrics({name: float(step)}, step)
    run._finish_wandb(failed=True)
    # a run that ended between two entries of a step, in the middle of a line; the next run repeats the steps after its
    # checkpoint
    with (second / "wandb.jsonl").open("a") as file:
        file.write('{"_step": 3, "val/')
    logger = loggers.wandb(third, second)
    dashboards.start([logger], {}, "")
    for name, step in (("train/loss", 5), ("train/loss", 6), ("val/RR", 6), ("train/loss", 7)):
        logger.log_metrics({name: float(step)}, step)
    logger.experiment.finish()
    board = opened(third)
    assert board.id == json.loads((first / "wandb.json").read_text())["id"]
    assert board.curve("train/loss") == [(5, 5.0), (6, 6.0), (7, 7.0)]
    assert board.curve("val/RR") == [(3, 3.0), (6, 6.0)]
    assert [entry["_step"] for entry in board.history] == [0, 1, 2, 3, 4]


def test_each_job_of_a_sweep_is_a_run_of_one_group_and_says_how_it_ended(done):
    folder = only(done, "multirun/sweep/*")
    boards = [opened(folder / number) for number in ("0", "1")]
    assert [board.group for board in boards] == [folder.name] * 2
    assert [board.name for board in boards] == [f"{folder.name}/0", f"{folder.name}/1"]
    assert [board.config["optim"]["lr"] for board in boards] == [3e-3, 1e30]
    assert len({board.id for board in boards}) == 2
    assert [board.exit_code for board in boards] == [0, 1]
    assert [len(board.curve("train/loss")) for board in boards] == [3, 1]


@pytest.mark.parametrize(
    "login", [None, "machine github.com login me password secret", "machine api.wandb.ai login me password"]
)
def test_pc88_online_without_a_key_is_refused_before_anything_is_loaded(forks, tmp_path, login):
    if login is not None:
        (tmp_path / ".netrc").write_text(login)
    nothing = {"HOME": str(tmp_path), "WANDB_API_KEY": "", "WANDB_BASE_URL": "", "NETRC": ""}
    done = forks.run("train.py", "logger=wandb", "logger.mode=online", cwd=tmp_path, **nothing)
    assert done.code == 1
    assert done.out.startswith(
        "error: logger.mode: expected a key for mode online, got none for api.wandb.ai; set WANDB_API_KEY"
    )
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".netrc" and ".hydra" not in path.parts
    ]


def test_pc88_a_server_that_does_not_answer_ends_the_wait_with_one_line(tmp_path, monkeypatch):
    import wandb

    wandb.teardown()  # wandb reads the environment only once
    monkeypatch.setattr(loggers, "CONNECT_SECONDS", 1.0)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    started = time.monotonic()
    with pytest.raises(
        RankerError,
        match=r"^logger: expected wandb at http://127.0.0.1:9 to answer, got .*; logger.mode=offline needs no server$",
    ):
        dashboards.start([loggers.wandb(tmp_path, mode="online")], {}, "")
    assert time.monotonic() - started < 30
    wandb.teardown()


def test_tensorboard_holds_curves_configuration_queries_and_pictures(done, small_files):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = only(done, "outputs/tensorboard-resumed/*")
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0, "scalars": 0, "tensors": 0})
    events.Reload()
    expected = [
        (int(row["step"]), float(row["train/loss"])) for row in rows_of(folder / "metrics.csv") if row.get("train/loss")
    ]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (step, pytest.approx(value)) for step, value in expected
    ]
    assert {"train/grad_norm", "optim/lr", "train/tokens_per_second", "val/nDCG@10"} <= set(events.Tags()["scalars"])
    name = small_files.name
    assert set(events.Tags()["images"]) == {
        "pictures/learning_curves",
        f"pictures/{name}_gains",
        f"pictures/{name}_ranks",
    }
    tags = [tag for tag in events.Tags()["tensors"] if tag.endswith("/text_summary")]
    texts = {
        tag.removesuffix("/text_summary"): events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags
    }
    assert "lr: 0.003" in texts["config"]
    assert texts[f"queries/{name}"].startswith("| query_id | query | nDCG@10 gain |")
    assert events.Scalars("objective")[0].value == pytest.approx(
        json.loads((folder / "result.json").read_text())["objective"]
    )
