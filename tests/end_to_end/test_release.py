"""`ranker export` and `ranker publish`: other programs' scores, recomputed numbers, mistakes in one line."""

import base64
import getpass
import hashlib
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import ir_measures
import numpy as np
import pytest
import torch
import yaml
from commands import run_all
from huggingface_hub import constants
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ranker import Reranker
from ranker.assembly import exporting, publishing
from ranker.cli import entry
from ranker.config.roots import CONF
from ranker.data.corpus_files import JsonlDocs, read_queries
from ranker.data.trec import read_run
from ranker.errors import CheckpointError, DataError

CPU = ["trainer.accelerator=cpu", "trainer.enable_progress_bar=false"]
EXPORT = ["ranker/__main__.py", "export", "checkpoint=@outputs/own/*", "trainer.accelerator=cpu"]
PUBLISH = ["ranker/__main__.py", "publish", "checkpoint=@outputs/own/*"]


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    return tmp_path_factory.mktemp("release")


@pytest.fixture(scope="module")
def done(forks, where, small_files):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    train = ["train.py", "name=own", "data=files", f"data.path={small_files}", "depth=6", "encoder=tiny", "logger=none"]
    commands = {
        "train": [*train, "trainer.max_steps=12", "report=none", "batch.queries=8", "batch.docs=3", *CPU],
        "hf": [*EXPORT, "format=hf", "to=hf"],
        "int8": [*EXPORT, "format=onnx_int8", "to=int8", "max_gap=20", "max_loss=1"],
        "near": [*EXPORT, "format=hf", "dtype=bf16", "max_gap=1e-9"],
        "used": [*EXPORT, "format=hf", "to=hf"],
        "merged": [*EXPORT, "format=merged"],
        "word": [*EXPORT, "format=gguf"],
        "publish": [*PUBLISH, "to=published/small", "license=mit"],
        "taken": [*PUBLISH, "to=published/small"],
        "no hub": [*PUBLISH, "to=hub:me/model"],
        "no run": ["ranker/__main__.py", "publish", "checkpoint=hf", "to=x"],
    }
    return run_all(commands, where, forks=forks)


def the_run(where) -> Path:
    return next((where / "outputs/own").iterdir())


def pairs_and_scores(where, small_files):
    """The pairs of the run's test, with their texts, and the scores of its run file."""
    queries, docs = read_queries(small_files / "queries.tsv"), JsonlDocs(small_files / "docs.jsonl")
    run = read_run(the_run(where) / "evaluation" / small_files.name / "run.trec")
    ids = [(query, doc) for query, scores in run.items() for doc in scores]
    return ids, [(queries[query], docs[doc].text) for query, doc in ids], np.array([run[q][d] for q, d in ids])


def test_an_export_scores_as_the_run_and_says_so(done, where, small_files):
    assert done["hf"]["code"] == 0, done["hf"]["out"]
    _, texts, expected = pairs_and_scores(where, small_files)
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(where / "hf"),
        AutoTokenizer.from_pretrained(where / "hf"),
    )
    with torch.no_grad():
        scores = [float(model.eval()(**tokenizer(*pair, return_tensors="pt")).logits) for pair in texts]
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
    parity = json.loads((where / "hf/parity.json").read_text())
    part = parity["sets"][small_files.name]
    assert (part["pairs"], part["queries"]) == (len(texts), 8) and part["largest_gap"] < 1e-5
    assert part["score_std"] == pytest.approx(np.std(expected), abs=1e-5)
    size = sum((where / "hf" / name).stat().st_size for name in ("model.safetensors",)) / 1e6
    assert parity["size_mb"]["export"] == size and set(parity["pairs_per_second"]) == {"original", "export"}
    assert "ranker export format=hf" in (where / "hf/README.md").read_text()
    ranked = Reranker.load(where / "hf", accelerator="cpu").score(texts)
    np.testing.assert_allclose(ranked, expected, rtol=0, atol=1e-5)


def test_the_numbers_of_int8_are_those_of_its_graph(done, where, small_files):
    assert done["int8"]["code"] == 0, done["int8"]["out"]
    ids, texts, expected = pairs_and_scores(where, small_files)
    got = Reranker.load(where / "int8", accelerator="cpu").score(texts)
    part = json.loads((where / "int8/parity.json").read_text())["sets"][small_files.name]
    assert part["largest_gap"] == pytest.approx(np.abs(got - expected).max(), rel=1e-3) and part["largest_gap"] > 1e-4
    measured = []
    for scores in (expected, got):
        run = {}
        for (query, doc), score in zip(ids, scores.tolist(), strict=True):
            run.setdefault(query, {})[doc] = score
        qrels = {f"q{i}": {f"d{i}": 1} for i in range(32, 40)}
        measured.append(ir_measures.calc_aggregate([ir_measures.nDCG @ 10], qrels, run)[ir_measures.nDCG @ 10])
    assert part["nDCG@10"]["original"] == pytest.approx(measured[0])
    assert part["nDCG@10"]["change"] == pytest.approx(measured[1] - measured[0])
    assert (where / "int8/README.md").read_text().count("session.run") == 1


def test_a_wrong_weight_is_refused_and_nothing_is_left(done, where, small_files, monkeypatch):
    def with_a_wrong_bias(folder, dtype):
        state = load_file(folder / "model.safetensors")
        state["classifier.bias"] += 0.01  # the order stays, the scores do not
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(exporting, "cast", with_a_wrong_bias)
    monkeypatch.chdir(where)
    entry.register("export")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        choices = [f"checkpoint={the_run(where)}", "format=hf", "to=wrong", "trainer.accelerator=cpu", "hydra.mode=RUN"]
        cfg = compose("export", choices, return_hydra_config=True)
    cfg.hydra.runtime.output_dir = str(where / "in_process")
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    HydraConfig.instance().set_config(cfg)
    with pytest.raises(
        CheckpointError, match=r"expected scores within max_gap=0.001 of .*, got a gap of 0.01, which is"
    ):
        exporting.export_checkpoint(OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"]))
    assert not (where / "wrong").exists() and not [path for path in where.iterdir() if "partial" in path.name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("near", "expected scores within max_gap=1e-09 of the original's standard deviation"),
        ("used", "error: to: expected a new or an empty folder, got "),
        ("merged", "error: format: expected hf or sentence_transformers, since the model has no adapters to merge"),
        ("word", "error: format: expected one of onnx, onnx_int8, hf, sentence_transformers, merged; got 'gguf'"),
        ("taken", "error: to: expected a new or an empty folder, got "),
        ("no hub", "error: to: expected a network for hub:NAME, got HF_HUB_OFFLINE=1"),
        ("no run", "error: checkpoint: expected the run folder of a training with model/, got "),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(done, where, name, message):
    assert done[name]["code"] == 1 and message in done[name]["err"] and "Traceback" not in done[name]["err"]
    left = [
        path for path in done[name]["left"] if Path(path).name not in ("config.yaml", "environment.json", "train.log")
    ]
    assert [path for path in left if "cache" not in path and not path.endswith("checksums.json")] == []


def card_of(folder):
    _, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(metadata), text


def test_a_published_folder_has_the_numbers_of_its_run_files(done, where, small_files):
    assert done["publish"]["code"] == 0, done["publish"]["out"]
    folder = where / "published/small"
    metadata, text = card_of(folder)
    evaluation = folder / "evaluation" / small_files.name
    qrels = list(ir_measures.read_trec_qrels(str(evaluation / "qrels.txt")))
    measures = [ir_measures.parse_measure(name) for name in ("nDCG@10", "RR@10", "AP@100", "R@100")]
    for file, column in (("run.trec", 2), ("first_stage.trec", 3)):
        values = ir_measures.calc_aggregate(measures, qrels, ir_measures.read_trec_run(str(evaluation / file)))
        for measure in measures:
            (row,) = [line.split("|") for line in text.splitlines() if line.startswith(f"| {measure} |")]
            assert float(row[column]) == pytest.approx(values[measure], abs=5.1e-5), (file, measure)
        if column == 2:
            (model,) = metadata["model-index"]
            named = {part["name"]: part["value"] for part in model["results"][0]["metrics"]}
            assert named == pytest.approx({str(measure): values[measure] for measure in measures}, abs=1e-6)
    assert metadata["license"] == "mit" and metadata["pipeline_tag"] == "text-ranking"
    _, texts, expected = pairs_and_scores(where, small_files)
    np.testing.assert_allclose(Reranker.load(folder, accelerator="cpu").score(texts), expected, rtol=0, atol=1e-5)
    settings = yaml.safe_load((folder / "ranker.yaml").read_text())
    assert "data" not in settings and settings["trainer"]["max_steps"] == 12 and "local files" in text


def test_numbers_that_are_not_those_of_the_run_file_are_not_published(done, where, small_files, monkeypatch):
    monkeypatch.chdir(where)
    shutil.copytree(the_run(where), where / "changed")
    path = where / "changed/evaluation" / small_files.name / "metrics.json"
    metrics = json.loads(path.read_text())
    metrics["measures"]["nDCG@10"] += 0.01
    path.write_text(json.dumps(metrics))
    cfg = {"checkpoint": str(where / "changed"), "to": "better", "private": True, "license": None, "data": None}
    with pytest.raises(DataError, match=r"metrics.json: expected nDCG@10 0\.\d+, computed from the run file, got"):
        publishing.publish_checkpoint(OmegaConf.create({**cfg, "cache_dir": ".cache"}))
    assert not (where / "better").exists()


def test_a_published_folder_names_no_path_and_no_user(done, where, small_files):
    for path in (where / "published").rglob("*"):
        if path.is_file():
            content = path.read_bytes().decode(errors="replace")
            for trace in (str(where), str(small_files), str(Path.home()) + "/", f"/home/{getpass.getuser()}"):
                assert trace not in content, (path, trace)


class Hub(BaseHTTPRequestHandler):
    """A stand-in for the hub's HTTP interface: creates models, accepts uploads and keeps the uploaded files."""

    files: dict = {}
    requests: list = []

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self):
        self.send_response(200)
        self.end_headers()

    def do_GET(self):
        self.requests.append(self.path)
        self.answer({"id": "me/model", "sha": "0" * 40, "siblings": []})

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.files[self.path.removeprefix("/store/")] = content
        self.answer({})

    def do_POST(self):
        self.requests.append(self.path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        address = f"http://{self.headers['Host']}"
        assert self.headers["Authorization"] == "Bearer hf_test"
        if self.path == "/api/repos/create":
            assert json.loads(body)["visibility"] == "private"
            self.answer({"url": f"{address}/me/model", "id": "1"})
        elif "/preupload/" in self.path:
            large = (".safetensors",)
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(large) else "regular",
                 "shouldIgnore": False} for file in json.loads(body)["files"]
            ]  # fmt: skip
            self.answer({"files": modes})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**entry, "actions": {"upload": {"href": f"{address}/store/{entry['oid']}"}}}
                for entry in json.loads(body)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                elif entry["key"] == "lfsFile":
                    self.files[entry["value"]["path"]] = self.files.pop(entry["value"]["oid"])
            self.answer({"commitUrl": f"{address}/me/model/commit/1", "commitOid": "1", "success": True})
        else:  # the check of the card's metadata
            self.answer({"warnings": [], "errors": []})

    def log_message(self, *args):
        pass


def test_an_upload_reaches_the_hub_with_all_files(done, where, small_files, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # what HF_ENDPOINT, HF_HUB_OFFLINE=0 and HF_HUB_DISABLE_XET=1 set when huggingface_hub is imported
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.chdir(where)
    before = {str(path) for path in where.rglob("*")}
    cfg = {"checkpoint": str(the_run(where)), "to": "hub:me/model", "private": True, "license": None, "data": None}
    try:
        publishing.publish_checkpoint(OmegaConf.create({**cfg, "cache_dir": ".cache"}))
    finally:
        server.shutdown()
        server.server_close()
    assert "/api/repos/create" in Hub.requests and Hub.requests[-1].startswith("/api/models/me/model/commit/main")
    folder = where / "published/small"
    expected = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert Hub.files.keys() == expected.keys()
    same = {name for name, content in expected.items() if Hub.files[name] == content}
    assert set(expected) - same <= {"README.md", "checksums.json"}  # they have the model's name and licence
    digest = hashlib.sha256(Hub.files["model.safetensors"]).hexdigest()
    assert digest == hashlib.sha256(expected["model.safetensors"]).hexdigest()
    assert b"# me/model" in Hub.files["README.md"]
    assert {str(path) for path in where.rglob("*")} == before
