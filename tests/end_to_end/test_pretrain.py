"""`ranker pretrain`: the same on any layout, resumed to the bit after a kill, and its weights as `encoder.name`."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from commands import by_start, run_folder
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("pretrain_run.py")
spec = importlib.util.spec_from_file_location("pretrain_run", SCRIPT)
pretrain_run = importlib.util.module_from_spec(spec)
sys.modules["pretrain_run"] = pretrain_run
spec.loader.exec_module(pretrain_run)

CHOICES = [
    "pretrain",
    "encoder=tiny",
    "encoder.dropout=0.1",
    "data=files",
    "batch.texts=16",
    "trainer.max_epochs=3",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "trainer.accelerator=cpu",
    "save_every_steps=1",
    "name=killed",
]


@pytest.fixture(scope="module")
def alone():
    return {name: pretrain_run.train(pretrain_run.Job(name)) for name in pretrain_run.OBJECTIVES}


@pytest.fixture(scope="module")
def together(forks, tmp_path_factory):
    """The same pretrainings in two processes, with a token budget that splits each step."""
    where = tmp_path_factory.mktemp("pretrain")
    jobs = {name: {"objective": name, "devices": 2, "max_tokens": 160} for name in pretrain_run.OBJECTIVES}
    jobs["fault"] = {**jobs["mlm"], "fault": "share"}
    (where / "jobs.json").write_text(json.dumps(jobs))
    done = forks.run("tests/end_to_end/pretrain_run.py", "jobs.json", "results.pt", cwd=where, devices=2, timeout=180)
    assert done.codes == [0, 0], done.out
    return torch.load(where / "results.pt", weights_only=True)


def furthest(one, other):
    assert one["weights"].keys() == other["weights"].keys()
    return max((one["weights"][key] - other["weights"][key]).abs().max().item() for key in one["weights"])


@pytest.mark.parametrize("name", pretrain_run.OBJECTIVES)
def test_two_processes_with_a_small_budget_equal_one(alone, together, name):
    assert len(alone[name]["losses"]) >= 4
    assert together[name]["losses"] == pytest.approx(alone[name]["losses"], rel=0, abs=1e-11)
    assert together[name]["losses"][0] == pytest.approx(alone[name]["losses"][0], rel=0, abs=1e-12)
    assert furthest(together[name], alone[name]) < 1e-9


def test_a_loss_by_the_counts_of_each_micro_batch_is_seen(alone, together):
    assert together["fault"]["losses"] != pytest.approx(alone["mlm"]["losses"], abs=1e-6)


@pytest.mark.parametrize("objective", ["prop", "inverse_cloze"])
def test_a_killed_pretraining_resumes_to_the_bit(forks, small_files, tmp_path, objective):
    choices = [*CHOICES, f"objective={objective}", f"data.path={sentences(small_files, tmp_path)}"]
    (tmp_path / "whole").mkdir()
    cache = f"cache_dir={tmp_path / 'cache'}"
    done = forks.run("ranker/__main__.py", *choices, cache, cwd=tmp_path / "whole")
    assert done.code == 0, done.out
    kill = [0, 0, "SIGKILL", "open", ".last.ckpt.partial", 5, 0.0]
    done = forks.run("ranker/__main__.py", *choices, cache, cwd=tmp_path, signals=[kill])
    assert done.code == -9, done.out
    killed = run_folder(tmp_path)
    assert torch.load(killed / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 4
    done = forks.run("ranker/__main__.py", "pretrain", f"checkpoint={killed}", "resume=true", cache, cwd=tmp_path)
    assert done.code == 0, done.out
    weights = [load_file(folder / "model/model.safetensors") for folder in (
        run_folder(tmp_path / "whole"), by_start(tmp_path / "outputs/killed")[-1])]  # fmt: skip
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def sentences(small_files, where):
    """The small collection with docs of several sentences."""
    folder = where / "sentences"
    folder.mkdir()
    for path in small_files.iterdir():
        (folder / path.name).write_text(path.read_text())
    docs = [json.loads(line) for line in (small_files / "docs.jsonl").read_text().splitlines()]
    texts = [doc["text"] for doc in docs]
    longer = [doc | {"text": f"{texts[i]}. {texts[i - 1]}. {texts[i - 2]}."} for i, doc in enumerate(docs)]
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in longer))
    return folder


def test_its_weights_are_the_start_of_a_ranker(forks, small_files, tmp_path):
    where = tmp_path / "docs"
    where.mkdir()
    folder = sentences(small_files, where)
    common = [f"data.path={folder}", f"cache_dir={tmp_path / 'cache'}", "trainer.max_epochs=1"]
    for objective, model in (("electra", "monobert"), ("body_first", "dpr")):
        done = forks.run("ranker/__main__.py", *CHOICES[:-1], *common, f"objective={objective}", cwd=tmp_path)
        assert done.code == 0, done.out
        (left,) = (tmp_path / "outputs" / objective).iterdir()
        done = forks.run(
            "train.py", f"model={model}", "encoder=bert_base", f"encoder.name={left / 'model'}", "data=files", *common,
            "trainer.accelerator=cpu", "optim.lr=1e-30", "trainer.max_steps=1", "batch.docs=2", "report=none",
            cwd=tmp_path,
        )  # fmt: skip
        assert done.code == 0, done.out
        (trained,) = (tmp_path / "outputs" / model).iterdir()
        before, after = (load_file(path / "model/model.safetensors") for path in (left, trained))
        same = {key: value for key, value in before.items() if "layer." in key}
        assert len(same) >= 32
        for key, value in same.items():
            (found,) = [other for name, other in after.items() if name.removeprefix("bert.") == key]
            assert torch.allclose(found, value, atol=1e-6), key


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["lora=default"], "lora"),
        (["checkpoint=."], "checkpoint: expected resume=true"),
        (["objective=mlm", "objective.share=2"], "objective.share: expected"),
        (["encoder=tiny_lm"], "expected an encoder with a masked language model"),
    ],
)
def test_what_does_not_fit_is_one_line(forks, tmp_path, arguments, complaint):
    done = forks.run("ranker/__main__.py", "pretrain", "encoder=tiny", *arguments, cwd=tmp_path)
    assert done.code == 1, done.out
    assert complaint in done.out and "Traceback" not in done.out
    assert not list((tmp_path / "outputs").glob("*/*")) if (tmp_path / "outputs").exists() else True
