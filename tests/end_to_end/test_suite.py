"""`evaluate.py suite=`: files from which every number follows, left-out sets, overlaps, baselines, two processes."""

import csv
import importlib.util
import json
import shutil
from pathlib import Path

import ir_measures
import numpy as np
import pytest
import yaml
from commands import run_all

from ranker.data.trec import read_qrels, read_run

SMALL = ["report=none", "trainer.enable_progress_bar=false", "trainer.accelerator=cpu", "depth=5"]
SUITE = """
defaults:
  - /data@sets.first: files
  - /data@sets.second: files
  - /data@sets.gone: files
  - _self_
folder: sets
sets:
  first: {path: "${suite.folder}/first"}
  second: {path: "${suite.folder}/second", val_fraction: 0.0, test_fraction: 1.0}
  gone: {path: "${suite.folder}/gone"}
"""


@pytest.fixture(scope="module")
def where(tmp_path_factory, small_files):
    """Two sets: one with split files, and one without, whose test queries are all queries, so those of training too."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "my/suite").mkdir(parents=True)
    (folder / "my/suite/pair.yaml").write_text(SUITE)
    (folder / "my/suite/odd.yaml").write_text("folders: x\nsets: {a: 3}\n")
    shutil.copytree(small_files, folder / "sets/first")
    shutil.copytree(small_files, folder / "sets/second")
    judged = [part.read_text() for part in sorted((folder / "sets/second").glob("qrels.*.txt"))]
    for part in (folder / "sets/second").glob("qrels.*.txt"):
        part.unlink()
    (folder / "sets/second/qrels.txt").write_text("".join(judged))
    return folder


def suite(checkpoint: str, *arguments: str) -> list[str]:
    return [
        "evaluate.py",
        "--config-dir",
        "my",
        f"checkpoint=@outputs/{checkpoint}/*",
        "suite=pair",
        *SMALL,
        *arguments,
    ]


@pytest.fixture(scope="module")
def done(forks, where):
    train = ["train.py", "data=files", "data.path=sets/first", "encoder=tiny", "logger=none", *SMALL]
    train += ["trainer.max_steps=2", "batch.queries=4", "batch.docs=3"]
    validated = ["train.py", "--config-dir", "my", *train[1:], "suite=pair"]
    commands = {
        "own": [*train, "name=own"],
        "one": suite("own", "name=one", "report=page"),
        "other": [*train, "name=other", "seed=1"],
        "against": suite("other", "name=against", "baseline=@outputs/one/*", "report=page"),
        "validated": [*validated, "name=validated", "logger=csv", "monitor=val/second/nDCG@10"],
        "after": suite("validated", "name=after"),
        "monitor": [*validated, "name=monitor", "monitor=val/third/nDCG@10"],
        "no baseline": suite("other", "name=nobase", "baseline=sets"),
        "nowhere": suite("own", "suite.folder=nowhere", "name=nowhere"),
        "odd": suite("own", "suite=odd", "name=odd"),
        "target": suite("own", "suite.sets.first._target_=os.system", "name=target"),
        "key": suite("own", "+suite.sets.first.pth=x", "name=key"),
        "data": suite("own", "data=cwe", "candidates=sets/first/qrels.test.txt", "name=both"),
        "unknown": suite("own", "suite=smal", "name=unknown"),
    }
    return run_all(commands, where, forks=forks)


def folder_of(where, name):
    return next((where / "outputs" / name).iterdir())


def test_all_commands_end_as_they_should(done):
    mistakes = {
        "no baseline": ["error: baseline: expected the run folder of an evaluation of the same sets, got"],
        "nowhere": ["error: suite: expected at least one set that can be read, got none; set suite.folder"],
        "odd": [
            "error: suite.folders: unknown key; did you mean folder?",
            "error: suite.sets.a: expected keys and values of a file in conf/data/, got 3",
        ],
        "target": ["error: suite.sets.first._target_: expected a name that starts with ranker.data.sources."],
        "key": ["error: suite.sets.first.pth: unknown key for ranker.data.sources.files.Files; did you mean path?"],
        "data": ["error: data: expected none beside suite=", "error: candidates: expected none beside suite="],
        "unknown": ["smal"],
        "monitor": ["error: monitor: expected one of val/nDCG@10", "val/second/R@100, val/gone/nDCG@10"],
    }
    for name, result in done.items():
        if name in mistakes:
            assert result["code"] == 1, (name, result["out"])
            assert all(message in result["err"] for message in mistakes[name]), (name, result["err"])
            assert "Traceback" not in result["out"] and not result["left"], (name, result["left"])
        else:
            assert result["code"] == 0, (name, result["out"][-2000:])


def test_a_training_is_validated_on_the_sets_of_a_suite(done, where):
    """The values of the best step are those of the written model, evaluated on the suite afterwards."""
    folder = folder_of(where, "validated")
    result = json.loads((folder / "result.json").read_text())
    sets = json.loads((folder_of(where, "after") / "suite.json").read_text())["sets"]
    expected = {f"val/{name}/nDCG@10": sets[name]["run"]["nDCG@10"] for name in ("first", "second")}
    with (folder / "metrics.csv").open() as lines:
        (row,) = [row for row in csv.DictReader(lines) if row["val/nDCG@10"]]
    for name, value in expected.items():
        assert float(row[name]) == pytest.approx(value, abs=1e-6)
    assert float(row["val/nDCG@10"]) == pytest.approx(sum(expected.values()) / 2, abs=1e-6)
    assert result["objective"] == pytest.approx(expected["val/second/nDCG@10"], abs=1e-6)
    assert "this training was trained on 24 of the 40 queries of second" in done["validated"]["out"]
    assert "suite: gone is left out" in done["validated"]["out"]


@pytest.mark.parametrize("name", ["one", "against"])
def test_every_number_follows_from_the_files(done, where, name):
    folder = folder_of(where, name)
    content = json.loads((folder / "suite.json").read_text())
    assert list(content["sets"]) == ["first", "second"]
    of_sets = {"run": [], "first_stage": [], "oracle": []}
    for key, entry in content["sets"].items():
        files = folder / "evaluation" / key
        qrels = read_qrels(files / "qrels.txt")
        runs = {kind: read_run(files / f"{kind}.trec") for kind in ("run", "first_stage")}
        runs["oracle"] = {q: {d: float(qrels[q].get(d, 0)) for d in docs} for q, docs in runs["run"].items()}
        assert all(set(runs["run"][q]) == set(runs["first_stage"][q]) for q in qrels)
        values = {}
        for kind, run in runs.items():
            values[kind] = {
                part.query_id: part.value for part in ir_measures.iter_calc([ir_measures.nDCG @ 10], qrels, run)
            }
            mean = sum(values[kind].values()) / len(qrels)
            assert entry[kind]["nDCG@10"] == pytest.approx(mean, abs=1e-12)
            of_sets[kind].append(mean)
        worse = np.mean([values["run"][q] < values["first_stage"][q] for q in qrels])
        assert entry["worse"]["nDCG@10"] == pytest.approx(worse) and entry["queries"] == len(qrels)
    for kind, means in of_sets.items():
        macro = content["macro"][kind]["nDCG@10"]
        assert macro["mean"] == pytest.approx(np.mean(means), abs=1e-12)
        assert macro["interval"][0] <= macro["mean"] <= macro["interval"][1]
    assert (folder / "pictures/suite.png").is_file()


def test_wins_and_losses_are_against_the_baseline_s_run(done, where):
    content = json.loads((folder_of(where, "against") / "suite.json").read_text())
    other = json.loads((folder_of(where, "one") / "suite.json").read_text())
    for key, entry in content["sets"].items():
        assert entry["baseline"] == other["sets"][key]["run"] and entry["comparison"]["against"] == "baseline"
        ours, theirs = (
            {row["query_id"]: row["measures"]["nDCG@10"] for row in map(json.loads, path.read_text().splitlines())}
            for path in (folder_of(where, name) / "evaluation" / key / "per_query.jsonl" for name in ("against", "one"))
        )
        compared = entry["comparison"]["nDCG@10"]
        assert compared["wins"] == sum(ours[q] > theirs[q] for q in ours)
        assert compared["losses"] == sum(ours[q] < theirs[q] for q in ours)


def test_a_missing_folder_is_said_and_so_are_queries_of_the_training(done, where):
    out = done["one"]["out"]
    content = json.loads((folder_of(where, "one") / "suite.json").read_text())
    assert content["left_out"] == {"gone": str(where / "sets/gone")}
    assert "suite: gone is left out, because there is no folder" in out and "left out: gone" in out
    (warning,) = content["warnings"]
    assert "was trained on 24 of the 40 queries of second: read its numbers with care" in warning
    assert content["suite"] == "pair"


def test_two_processes_give_the_same_numbers(done, forks, where):
    checkpoint = folder_of(where, "own")
    arguments = [f"checkpoint={checkpoint}" if "checkpoint=" in part else part for part in suite("own")]
    pair = forks.run(*arguments, "name=pair", "trainer.devices=2", cwd=where, devices=2)
    assert pair.codes == [0, 0], pair.out
    one, two = (json.loads((folder_of(where, name) / "suite.json").read_text()) for name in ("one", "pair"))
    for key in one["sets"]:
        assert two["sets"][key]["run"]["nDCG@10"] == pytest.approx(one["sets"][key]["run"]["nDCG@10"], abs=1e-6)
    assert pair.out.count("macro mean:") == 1


def test_two_evaluations_of_a_suite_are_compared(done, forks, where):
    """Judgements come from the run folders; the means are those of `suite.json`."""
    folders = [folder_of(where, name) for name in ("one", "against")]
    runs = f"runs=[{folders[0]},{folders[1]}]"
    compared = forks.run("ranker/__main__.py", "compare", runs, "hydra.run.dir=compared", cwd=where)
    assert compared.code == 0, compared.out
    content = json.loads((where / "compared/comparison.json").read_text())
    for label, folder in zip(("one", "against"), folders, strict=True):
        sets = json.loads((folder / "suite.json").read_text())["sets"]
        assert list(content) == list(sets)
        assert all(content[name]["means"][label] == pytest.approx(entry["run"]) for name, entry in sets.items())
        assert "<caption>Sets</caption>" in (folder / "report.html").read_text()


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("name", "count"), [("beir", 13), ("nanobeir", 13), ("msmarco_dl", 3)])
def test_ids_of_the_shipped_suites_have_docs_queries_and_judgements(name, count):
    ir_datasets = pytest.importorskip("ir_datasets")
    sets = yaml.safe_load((ROOT / f"conf/suite/{name}.yaml").read_text())["sets"]
    ids = [dataset_id for node in sets.values() for dataset_id in node["test"]]
    assert len(set(ids)) == count
    for dataset_id in ids:
        dataset = ir_datasets.load(dataset_id)
        assert dataset.has_docs() and dataset.has_queries() and dataset.has_qrels(), dataset_id


def test_a_suite_of_ir_datasets_ids_runs_on_its_files_and_is_refused_without_a_network(forks, done, where, tmp_path):
    """The ids' own file formats, with 8 passages; the files that `nanobeir` needs are not there."""
    spec = importlib.util.spec_from_file_location("ir_datasets_home", ROOT / "tests/assets/ir_datasets_home.py")
    assets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(assets)
    assets.lay_out_unpacked_msmarco(tmp_path / "home")
    environment = {"IR_DATASETS_HOME": str(tmp_path / "home"), "HTTPS_PROXY": "http://127.0.0.1:9"}
    checkpoint = [f"checkpoint={folder_of(where, 'own')}", *SMALL]
    ran = forks.run("evaluate.py", *checkpoint, "suite=msmarco_dl", "name=run", cwd=tmp_path, **environment)
    assert ran.code == 0, ran.out
    content = json.loads((folder_of(tmp_path, "run") / "suite.json").read_text())
    judged = {"trec-dl-2019": assets.DL19_QRELS, "trec-dl-2020": assets.DL20_QRELS, "msmarco-passage": assets.DEV_QRELS}
    assert {name: entry["queries"] for name, entry in content["sets"].items()} == {
        name: len(qrels) for name, qrels in judged.items()
    }
    assert all(name in ran.out for name in judged), "the table names each set"
    refused = forks.run("evaluate.py", *checkpoint, "suite=nanobeir", "name=no", cwd=tmp_path, **environment)
    errors = [line for line in refused.out.splitlines() if line.startswith("error: ")]
    assert refused.code == 1 and len(errors) == 1 and "Traceback" not in refused.out
    assert errors[0].startswith("error: ir_datasets nano-beir/arguana: expected to read it, got ConnectionError")
    assert not [path for path in (tmp_path / "outputs/no").rglob("*") if path.is_file()], "nothing is written"
