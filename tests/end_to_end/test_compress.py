"""`ranker compress` makes a smaller model, which evaluates and trains further; each mistake is a one-line error."""

import json

import pytest
from commands import run_all
from safetensors.torch import load_file

from ranker.evaluation.calibration import Calibration

CPU = ["trainer.accelerator=cpu", "trainer.enable_progress_bar=false"]
COMPRESS = ["ranker/__main__.py", "compress", "checkpoint=@outputs/own/*"]


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    return tmp_path_factory.mktemp("compress")


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
    train += ["batch.queries=4", "batch.docs=3"]
    commands = {
        "train": [*train, "encoder=tiny", "name=own"],
        "small": [*COMPRESS, "name=small", "layers=1", "drop=contribution", "units=0.5", "heads=0.5", "pairs=20"],
        "evaluate": ["evaluate.py", "checkpoint=@outputs/small/*/model", "name=evaluated", "report=none", *CPU],
        "further": [*train, "checkpoint=@outputs/small/*/model", "name=further"],
        "tuned": [*COMPRESS, "name=tuned", "layers=1", "heads=0.5", "pairs=8", "tune=true"],
        "no_run": ["ranker/__main__.py", "compress", "checkpoint=@outputs/small/*/model", "layers=1", "tune=true"],
        "calibrate": ["ranker/__main__.py", "calibrate", "checkpoint=@outputs/own/*", "name=calibrated", *CPU],
        "layers": [*COMPRESS, "layers=5"],
        "indices": [*COMPRESS, "layers=[0,7]"],
        "units": [*COMPRESS, "units=0"],
        "drop": [*COMPRESS, "layers=1", "drop=bottom"],
    }
    return run_all(commands, where, forks=forks)


def test_the_smaller_model_is_one_to_use(done, where, small_files):
    for name in ("train", "small", "evaluate", "further"):
        assert done[name]["code"] == 0, done[name]["out"][-2000:]
    folder = next((where / "outputs/small").iterdir())
    content = json.loads((folder / "compress.json").read_text())
    config = json.loads((folder / "model/config.json").read_text())
    whole = json.loads((next((where / "outputs/own").iterdir()) / "model/config.json").read_text())
    assert content["pairs"] == 20
    assert config["num_hidden_layers"] == 1 < whole["num_hidden_layers"]
    assert config["intermediate_size"] == content["units"] == whole["intermediate_size"] // 2
    assert [len(heads) for heads in content["heads"]] == [config["num_attention_heads"] // 2]
    assert len(config["pruned_heads"]["0"]) == config["num_attention_heads"] // 2
    assert content["after"]["parameters"] < content["before"]["parameters"]
    assert content["after"]["megabytes"] < content["before"]["megabytes"]
    evaluated = next((where / "outputs/evaluated").iterdir())
    assert (evaluated / "evaluation" / small_files.name / "metrics.json").is_file()


def test_a_smaller_model_is_trained_further_as_its_run_was(done, where):
    assert done["tuned"]["code"] == 0, done["tuned"]["out"][-2000:]
    (folder,) = where.glob("outputs/tuned/*/tuned")
    cut, trained = (load_file(part / "model/model.safetensors") for part in (folder.parent, folder))
    assert json.loads((folder / "result.json").read_text())["steps"] == 2
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert cut[name].shape == trained[name].shape and not (cut[name] == trained[name]).all()


def test_the_scores_of_the_run_are_calibrated(done, where):
    """The map in the file lowers the negative log-likelihood of the test pairs and gives numbers between 0 and 1."""
    assert done["calibrate"]["code"] == 0, done["calibrate"]["out"]
    folder = next((where / "outputs/calibrated").iterdir())
    content = json.loads((folder / "calibration.json").read_text())
    assert (folder / "pictures/reliability.png").is_file()
    lines = [line.split() for line in (folder / "test.trec").read_text().splitlines()]
    assert content["tested"] == {"split": "test", "pairs": len(lines)}
    probabilities = Calibration.read(folder / "calibration.json")([float(line[4]) for line in lines])
    assert content["calibrated"]["nll"] < content["sigmoid"]["nll"]
    assert ((probabilities > 0) & (probabilities < 1)).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers", "layers: expected 1 to 2, the layers of the model, got 5"),
        ("indices", "layers: expected different indices from 0 to 1, got [0, 7]"),
        ("no_run", "tune: expected false without a run folder to train again, got true with"),
        ("units", "units: expected a number above 0 and at most 1, got 0"),
        ("drop", "drop: expected one of top, alternate, contribution; got 'bottom'"),
    ],
)
def test_mistakes_are_one_line(done, name, message):
    assert done[name]["code"] == 1
    (error,) = [line for line in done[name]["out"].splitlines() if line.startswith("error: ")]
    assert message in error
    assert "Traceback" not in done[name]["out"]
