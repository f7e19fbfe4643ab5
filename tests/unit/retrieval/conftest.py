"""Small collections and bi-encoders for encoding and search."""

import random

import pytest
import torch

from ranker.data.collection import Collection, Doc, MemoryDocs, Splits
from ranker.data.datamodule import RankData
from ranker.data.options import BatchOptions
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.encoders.loading import load_encoder
from ranker.models.colbert import ColBERT
from ranker.models.dpr import DPR


@pytest.fixture(scope="session")
def small():
    """Return 60 docs of 1 to 40 words, and 12 queries; docs 50 to 54 have the same text."""
    rng = random.Random(3)
    words = [first + second for first in "bcdfgk" for second in ("ab", "el", "ir", "om")]
    text = lambda least, most: " ".join(rng.choices(words, k=rng.randint(least, most)))  # noqa: E731
    texts = [text(1, 40) + "." * (i % 3) for i in range(60)]
    texts[50:55] = ["bab cel"] * 5
    docs = MemoryDocs(Doc(f"d{i}", text) for i, text in enumerate(texts))
    queries = {f"q{i}": text(1, 6) for i in range(12)}
    return Collection("small", docs, queries, {f"q{i}": {f"d{i}": 1, f"d{i + 20}": 0} for i in range(12)})


@pytest.fixture
def scorers():
    """Return a function that makes tiny bi-encoders."""

    def make(kind="dpr", **options):
        torch.manual_seed(0)
        encoder = load_encoder("tiny", dropout=0.0, attention_dropout=0.0)
        return (
            DPR(encoder, **options)
            if kind == "dpr"
            else ColBERT(encoder, **{"projection": 8, "query_length": 8, **options})
        )

    return make


@pytest.fixture
def data_of(small, tmp_path):
    """Return a function that makes the data side for a scorer."""

    def make(scorer, collection=None, max_tokens=500):
        return RankData(
            Splits(None, None, {"small": collection or small}),
            ScorerInputs.of(scorer),
            BatchOptions(max_tokens=max_tokens),
            TextLimits(16, 64),
            cache_dir=tmp_path / "cache",
        )

    return make
