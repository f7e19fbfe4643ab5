"""Scores as probabilities of relevance, in Python and over HTTP."""

import asyncio
import json

import httpx
import numpy as np
import pytest
import torch

from ranker import Reranker
from ranker.assembly.probabilities import copy_calibration, read_calibration
from ranker.encoders.loading import load_encoder
from ranker.errors import CheckpointError
from ranker.evaluation.calibration import Calibration
from ranker.models.monobert import MonoBERT
from ranker.serving.app import AppOptions, create_app
from ranker.serving.limits import Limits
from ranker.serving.metrics import Metrics

DOCS = ["the sea", "a river runs", "cold nights", "apples"]
PLATT = {"map": {"method": "platt", "slope": 2.0, "offset": -1.0}, "checkpoint": "/home/me/run"}
STEPS = {"map": {"method": "isotonic", "scores": [-9.0, 9.0], "probabilities": [0.25, 0.25]}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    scorer = MonoBERT(load_encoder("tiny"))
    torch.nn.init.normal_(scorer.head.weight, std=0.5)
    scorer.save(tmp_path_factory.mktemp("model"), 64)
    path = tmp_path_factory.getbasetemp() / "kept"
    scorer.save(path, 64)
    (path / "calibration.json").write_text(json.dumps(PLATT))
    (path / "steps.json").write_text(json.dumps(STEPS))
    return path


def test_probabilities_are_the_map_of_the_scores_in_their_order(folder):
    options = {"accelerator": "cpu", "precision": "32-true"}
    plain = Reranker.load(folder, **options)
    scores = plain.score([("the river", doc) for doc in DOCS]).astype(float)
    known = Reranker.load(folder, probabilities=True, **options)
    expected = 1 / (1 + np.exp(-(2 * scores - 1)))
    np.testing.assert_allclose(known.score([("the river", doc) for doc in DOCS]), expected, rtol=1e-12)
    order = [ranked.position for ranked in plain.rank("the river", DOCS)]
    ranking = known.rank("the river", DOCS)
    assert [ranked.position for ranked in ranking] == order
    assert [ranked.score for ranked in ranking] == pytest.approx(expected[order].tolist(), abs=1e-12)
    flat = Reranker.load(folder, calibration=folder / "steps.json", **options).rank("the river", DOCS)
    assert [ranked.position for ranked in flat] == order  # though all probabilities are equal
    assert [ranked.score for ranked in flat] == [0.25] * 4


def test_a_missing_map_is_named_and_an_order_that_would_be_lost_is_known(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"expected calibration.json in .*, got none; .* store=true"):
        read_calibration(tmp_path, wanted=True)
    assert read_calibration(tmp_path, wanted=False) is None
    assert Calibration.read(folder / "calibration.json").keeps_order
    assert not Calibration.read(folder / "steps.json").keeps_order


def test_an_export_keeps_the_map_without_the_path_of_the_run(folder, tmp_path):
    (tmp_path / "run/model").mkdir(parents=True)
    assert copy_calibration(tmp_path / "run", tmp_path) is None
    (tmp_path / "run/model/calibration.json").write_text(json.dumps(PLATT))
    assert copy_calibration(tmp_path / "run", tmp_path).slope == 2.0
    assert json.loads((tmp_path / "calibration.json").read_text()) == {"map": PLATT["map"]}


class Scores:
    """An engine whose scores are fixed."""

    state, metrics = "ready", Metrics()

    def check(self, pairs):
        pass

    async def score(self, pairs):
        return np.array([0.5, 3.0, -1.0, 0.25], dtype=np.float32)[: len(pairs)], 7


@pytest.mark.parametrize(("raw", "shown"), [(None, "map"), (False, "map"), (True, "scores")])
def test_the_server_answers_with_probabilities(raw, shown):
    app = create_app(Scores(), AppOptions(Limits(), calibration=Calibration("platt", 2.0, -1.0)))

    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            body = {"raw_scores": raw}
            ranked = await client.post("/rerank", json={"query": "q", "documents": DOCS} | body)
            scored = await client.post("/score", json={"pairs": [["q", doc] for doc in DOCS]} | body)
            return ranked.json()["results"], scored.json()["scores"]

    results, scores = asyncio.run(ask())
    values = [0.5, 3.0, -1.0, 0.25]
    expected = values if shown == "scores" else [1 / (1 + np.exp(1 - 2 * value)) for value in values]
    assert scores == pytest.approx(expected) and [row["index"] for row in results] == [1, 0, 3, 2]
    assert [row["relevance_score"] for row in results] == pytest.approx([expected[i] for i in (1, 0, 3, 2)])
