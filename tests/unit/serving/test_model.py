"""Scores of batches of several requests, for cross-encoders and bi-encoders: those of `Reranker.score`."""

import numpy as np
import pytest
import torch

from ranker import Reranker
from ranker.encoders.loading import load_encoder
from ranker.models.colbert import ColBERT
from ranker.models.dpr import DPR
from ranker.models.monobert import MonoBERT
from ranker.serving.interface import Part
from ranker.serving.model import RerankerModel

WORDS = ["river", "sea", "apple", "night", "autumn", "cold", "short", "day", "picked", "run"]
REQUESTS = [
    [("the river", " ".join(WORDS[:n])) for n in (1, 9, 4, 4, 7)],
    [("apples", "picked in autumn")],
    [("sea", "cold"), ("night", "day"), ("sea", "run"), ("sea", "cold"), ("", "")],
]


@pytest.fixture(scope="module", params=[MonoBERT, DPR, ColBERT], ids=lambda model: model.__name__)
def reranker(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    scorer = request.param(load_encoder("tiny"))
    for parameter in scorer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    scorer.save(folder, max_tokens=64)
    return Reranker.load(folder, accelerator="cpu", precision="32-true")


@pytest.mark.parametrize(
    "cuts",
    [
        [(0, 0, 5), (1, 0, 1), (2, 0, 5)],
        [(2, 1, 4), (0, 3, 5)],
        [(0, 1, 2)],
    ],
)
def test_parts_of_requests_have_the_scores_of_python(reranker, cuts):
    model = RerankerModel(reranker)
    tokenized = [model.tokenize(pairs) for pairs in REQUESTS]
    got = model.launch([Part(tokenized[request], start, end) for request, start, end in cuts])()
    expected = np.concatenate([reranker.score(REQUESTS[request][start:end]) for request, start, end in cuts])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_sizes_are_the_tokens_of_the_batch(reranker):
    model = RerankerModel(reranker)
    tokenizer = reranker.scorer.encoder.tokenizer
    for pairs in REQUESTS[:2]:
        sizes = model.tokenize(pairs).sizes
        if reranker.scorer.reads == "pairs":
            assert sizes.tolist() == [len(tokenizer(*pair)["input_ids"]) for pair in pairs]
        else:
            query, doc = reranker.scorer.layouts()
            texts = [pairs[0][0], *(text for _, text in pairs)]
            lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
            of_docs = [max(length + doc.num_special, doc.fill_to) for length in lengths[1:]]
            assert sizes.sum() == sum(of_docs) + max(lengths[0] + query.num_special, query.fill_to)
