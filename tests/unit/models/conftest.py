"""Batches of texts for bi-encoders."""

import numpy as np
import pytest

from ranker.data.collate import Collator
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.token_store import build_token_store

QUERIES = ["red apple", "blue sky over a lake", "g"]
DOCS = ["an apple is red.", "the sky", "green grass, and more of it, and more", "x y z"]


@pytest.fixture
def texts(tmp_path):
    """Return a function that makes the batch of some groups for a scorer, through token store and collator."""

    def make(scorer, rows, queries=QUERIES, docs=DOCS, labels=None):
        tokenizer = scorer.encoder.tokenizer
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        stores = [
            build_token_store(
                ((str(i), text) for i, text in enumerate(part)), folder / name, tokenizer, 64, fingerprint=name
            )
            for name, part in (("queries", queries), ("docs", docs))
        ]
        collator = Collator.of(ScorerInputs.of(scorer), *stores, TextLimits(64, 64))
        rows = np.array(rows)
        return collator.collate(
            np.arange(len(rows)), rows, np.zeros(rows.shape) if labels is None else labels, np.arange(len(rows)), 1.0
        )

    return make
