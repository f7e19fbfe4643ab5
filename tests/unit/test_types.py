"""Batches that move between devices."""

import copy
import pickle
from dataclasses import replace

import torch

from ranker.types import RankBatch, TokenBatch


def batch() -> RankBatch:
    rows = TokenBatch(torch.tensor([5, 6, 7]), torch.zeros(3, dtype=torch.long), torch.tensor([0, 1, 3]).int(), 2)
    return RankBatch(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), torch.zeros(1), 1.0, pairs=rows)


def test_a_batch_on_a_device_knows_the_batch_on_the_host():
    """`meta` stands for a GPU: values on it can't be read."""
    original = batch()
    moved = original.to("meta")
    assert moved.pairs.tokens.device.type == "meta"
    assert moved.host is original and moved.pairs.host is original.pairs
    assert moved.pairs.host.tokens.tolist() == [5, 6, 7]


def test_only_that_move_keeps_it():
    moved = batch().to("meta")
    changed = replace(moved.pairs, tokens=torch.zeros(3, device="meta"))
    assert changed.host is None, "the tokens may be others"
    assert copy.deepcopy(moved).host is None
    assert batch().to("cpu").host is None and moved.to("meta").host is None
    assert pickle.loads(pickle.dumps(batch())).pairs.host is None
