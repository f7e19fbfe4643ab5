"""Batches of lists, and a task that a model can solve only if it compares the docs of a list."""

from itertools import permutations

import numpy as np
import pytest
import torch
from torch.nn import functional

from ranker.data.collate import Collator
from ranker.data.memory_store import MemoryStore
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.text_encoder import TextEncoder

DOCS = ["an apple is red.", "the sky", "green grass, and more of it, and more", "x y z", "red", "an apple"]


@pytest.fixture(scope="session")
def lists():
    """Return a function that makes the batch of some lists of `DOCS`, all for one query."""

    def make(scorer, grid, docs=DOCS, queries=None):
        rows, inputs = np.array(grid), ScorerInputs.of(scorer)
        parts = ["red apple"] * len(rows) if queries is None else queries, docs
        stores = [
            MemoryStore(
                TextEncoder(scorer.encoder.tokenizer, 64),
                {str(i): inputs.affixes(side).around(text) for i, text in enumerate(part)},
            )
            for side, part in enumerate(parts)
        ]
        collator = Collator.of(inputs, *stores, TextLimits(64, 64))
        return collator.collate(np.arange(len(rows)), rows, np.zeros(rows.shape), np.arange(len(rows)), 1.0)

    return make


@pytest.fixture(scope="session")
def repeats(lists):
    """Return a function that trains on lists, and returns the share of lists whose first doc is right.

    Half of the lists have the best doc twice, with label 0. If the best doc is not repeated, it should be first. If it
    is repeated, the second best doc should be first. A model that sees each doc alone gives the best doc the same score
    in both cases, so it is right in only one of them.
    """
    docs, grades = ["b best", "s second", "a junk"], [2.0, 1.0, 0.0]
    grid = [list(order) for order in permutations((0, 1, 2))]
    once = len(grid)
    grid += [[0, 0, 1], [0, 1, 0], [1, 0, 0]] * 2
    labels = [[grades[doc] * (number < once or doc > 0) for doc in row] for number, row in enumerate(grid)]

    def train(scorer, steps, rate=3e-3):
        batch, target = lists(scorer, grid, docs, ["q"] * len(grid)), torch.tensor(labels)
        optimizer = torch.optim.AdamW(scorer.parameters(), lr=rate)
        for _ in range(steps):
            optimizer.zero_grad()
            functional.mse_loss(scorer(batch), target).backward()
            optimizer.step()
        with torch.no_grad():
            return (scorer.eval()(batch).argmax(1) == target.argmax(1)).float().mean().item()

    return train
