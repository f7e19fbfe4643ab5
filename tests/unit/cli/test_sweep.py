import csv
import json

import pytest

from ranker.cli import sweep, sweep_table
from ranker.cli.sweep_picture import draw_sweep
from ranker.errors import ConfigError, DataError


def finish(folder, objective, **more):
    """Write the files that `ranker train` leaves in a run folder."""
    (folder / "evaluation/dl").mkdir(parents=True)
    (folder / "evaluation/dl/metrics.json").write_text(json.dumps({"measures": {"RR": objective / 2}}))
    (folder / "result.json").write_text(json.dumps({"objective": objective, **more}))
    return objective


def fail():
    raise DataError("docs.jsonl:3: expected text")


def stop():
    raise SystemExit(75)


def rows_of(path):
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.fixture
def done(tmp_path):
    """A sweep of four jobs, the second of which fails and the third of which is pruned."""
    work = [
        lambda f: finish(f, 0.5),
        lambda f: fail(),
        lambda f: finish(f, 0.25, pruned=True),
        lambda f: finish(f, 0.75),
    ]
    for number, (run, lr, loss) in enumerate(
        zip(work, ("1e-4", "1e-3", "1e-2", "1e-3"), ("lce", "lce", "lce", "kl"), strict=True)
    ):
        folder = tmp_path / str(number)
        overrides = ["name=x", f"optim.lr={lr}", f"+loss={loss}", "++callbacks.prune={trial:1}"]
        value = sweep.run_job(tmp_path, folder, number, overrides, lambda run=run, folder=folder: run(folder))
        assert value == {0: 0.5, 1: None, 2: 0.25, 3: 0.75}[number]
    return tmp_path


def test_pc83_a_failed_job_leaves_its_error_and_the_others_go_on(done, capsys):
    assert "Traceback" in (done / "1/train.log").read_text()
    assert json.loads((done / "1/job.json").read_text())["error"] == "docs.jsonl:3: expected text"
    rows = rows_of(done / "summary.csv")
    assert [
        (row["job"], row["status"], row["objective"], row["optim.lr"], row["loss"], row["dl/RR"]) for row in rows
    ] == [
        ("0", "ok", "0.5", "1e-4", "lce", "0.25"),
        ("1", "failed", "", "1e-3", "lce", ""),
        ("2", "pruned", "0.25", "1e-2", "lce", "0.125"),
        ("3", "ok", "0.75", "1e-3", "kl", "0.375"),
    ]
    assert rows[0]["overrides"] == "name=x optim.lr=1e-4 +loss=lce"
    assert "name" not in rows[0]  # no job sets it to something else
    assert not sweep_table.finish_sweep(done)
    said = capsys.readouterr()
    assert f"error: job 1 failed: docs.jsonl:3: expected text; see {done / '1'}" in said.err
    assert "0.7500 *" in said.out
    assert (done / "pictures/sweep.png").stat().st_size > 10_000


def test_a_job_that_was_killed_is_named_and_a_sweep_without_faults_is_well(tmp_path, capsys):
    sweep.run_job(tmp_path, tmp_path / "0", 0, ["a=1"], lambda: None)
    assert sweep_table.finish_sweep(tmp_path)
    with pytest.raises(SystemExit):
        sweep.run_job(tmp_path, tmp_path / "1", 1, ["a=2"], stop)
    sweep._create_record(
        tmp_path / "2",
        {"job": 2, "overrides": ["a=3"], "status": "running", "objective": None, "seconds": None, "error": None},
    )
    assert [row["status"] for row in rows_of(tmp_path / "summary.csv")] == ["ok", "stopped"]
    assert not sweep_table.finish_sweep(tmp_path)
    assert [row["status"] for row in rows_of(tmp_path / "summary.csv")] == ["ok", "stopped", "killed"]
    assert "error: job 2 killed: its process was killed" in capsys.readouterr().err


def test_jobs_never_share_a_folder(tmp_path):
    sweep.run_job(tmp_path, tmp_path / "same", 0, [], lambda: finish(tmp_path / "same", 0.5))
    with pytest.raises(ConfigError, match="expected a folder for each job"):
        sweep.run_job(tmp_path, tmp_path / "same", 1, [], lambda: 0.0)
    assert json.loads((tmp_path / "same/job.json").read_text())["objective"] == 0.5


def test_the_picture_shows_each_job_once_a_panel(done):
    rows = sweep_table.read_jobs(done)
    figure = draw_sweep(rows, sweep_table.swept_values(rows))
    jobs, lr, loss = figure.axes[:3]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "finished",
        "pruned",
        "failed",
        "best so far",
    ]
    finished, pruned, failed = jobs.collections
    assert finished.get_offsets().tolist() == [[0, 0.5], [3, 0.75]]
    assert pruned.get_offsets().tolist() == [[2, 0.25]]
    assert failed.get_offsets().tolist() == [[1, 0.02]]
    assert jobs.lines[0].get_xydata().tolist() == [[0, 0.5], [1, 0.5], [2, 0.5], [3, 0.75]]
    assert lr.get_xscale() == "log"
    assert lr.collections[0].get_offsets().tolist() == [[1e-4, 0.5], [1e-3, 0.75]]
    assert [tick.get_text() for tick in loss.get_xticklabels()] == ["kl", "lce"]
    assert sweep_table.best_job(rows)["job"] == 3
    assert sweep_table.best_job(rows, maximize=False)["job"] == 0
