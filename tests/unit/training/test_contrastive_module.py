"""The loss of a whole step's score matrix: worked values, micro-batches, symmetry."""

import math
from types import SimpleNamespace

import pytest
import torch

from ranker.layers.interaction import TextVectors
from ranker.losses.lce import LCE
from ranker.training.contrastive_module import ContrastiveModule
from ranker.types import Contrast, RankBatch, TokenBatch, TrainStep


class Scalar(torch.nn.Module):
    """A query is w * a, a doc w * b; texts are token rows of one number each."""

    dim = 2

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.w, self.table = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64)), table

    def encode_queries(self, batch):
        return TextVectors(self.w * self.table[batch.tokens])

    encode_docs = encode_queries

    def score_block(self, queries, docs):
        return queries.values @ docs.values.T

    def scoring_parameters(self):
        return []


class Alone(ContrastiveModule):
    """Without a Trainer."""

    trainer = SimpleNamespace(world_size=1, is_global_zero=True, strategy=object())
    global_rank, device = 0, torch.device("cpu")

    def manual_backward(self, loss):
        loss.backward()


def tokens(numbers):
    return TokenBatch(torch.tensor(numbers), torch.zeros(len(numbers), dtype=torch.int64), torch.arange(len(numbers) + 1).int(), 1)


def step_of(groups: int, size: int) -> TrainStep:
    """Groups of one doc each, cut into micro-batches of `size`; the doc of group i is row i of the table."""
    batches = []
    for start in range(0, groups, size):
        places = torch.arange(start, min(start + size, groups))
        ones = torch.ones(len(places), 1)
        batches.append(
            RankBatch(ones, ones.bool(), places, len(places) / groups, queries=tokens(places.tolist()), docs=tokens(places.tolist()))
        )
    contrast = Contrast(torch.ones(groups), torch.arange(groups), torch.ones(groups, groups, dtype=torch.bool))
    return TrainStep(0, 0, tuple(batches), groups, groups, contrast)


def trained(table, groups, size, **options):
    torch.manual_seed(0)
    scorer = Scalar(table)
    scorer.dim = table.shape[1]
    module = Alone(scorer, [], loss=LCE(), **options)
    return module.accumulate(step_of(groups, size)).item(), scorer.w.grad.item()


@pytest.mark.parametrize(("groups", "expected"), [(1, 0.0), (2, 0.313262), (4, 0.743668), (8, 1.274009)])
def test_pc44_in_batch_loss_of_an_identity_matrix(groups, expected):
    table = torch.eye(groups, dtype=torch.float64)
    loss, _ = trained(table, groups, groups)
    # LCE leaves a group without a negative out, where the softmax would give 0 as well
    assert loss == pytest.approx(expected, abs=1e-6) == pytest.approx(math.log(1 + (groups - 1) / math.e), abs=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_pc44_micro_batches_have_the_loss_and_the_gradient_of_the_whole_step(size):
    table = torch.eye(4, dtype=torch.float64)
    loss, gradient = trained(table, 4, size)
    assert loss == pytest.approx(0.743668, abs=1e-6)  # not 0.313262, the loss of two batches of 2
    w = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    torch.nn.functional.cross_entropy(w * w * table, torch.arange(4)).backward()
    assert gradient == pytest.approx(w.grad.item(), abs=1e-12)


def test_pc46_the_gradient_is_that_of_the_whole_matrix():
    torch.manual_seed(1)
    table = torch.randn(4, 3, dtype=torch.float64)
    w = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    scores = (w * table) @ (w * table).T
    torch.nn.functional.cross_entropy(scores, torch.arange(4)).backward()
    assert trained(table, 4, 2)[1] == pytest.approx(w.grad.item(), rel=1e-12)


def test_symmetric_is_the_mean_of_both_directions():
    torch.manual_seed(2)
    module = Alone(Scalar(torch.eye(3)), [], loss=LCE(), symmetric=True)
    scores = torch.randn(3, 3, dtype=torch.float64)
    contrast = Contrast(torch.ones(3), torch.arange(3), torch.ones(3, 3, dtype=torch.bool))
    both = [torch.nn.functional.cross_entropy(part, torch.arange(3)) for part in (scores, scores.T)]
    assert module._on_matrix(scores, contrast).item() == pytest.approx((sum(both) / 2).item(), abs=1e-12)


def test_masked_docs_are_no_negatives_in_either_direction():
    scores = torch.tensor([[1.0, 9.0], [0.0, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False], [True, True]])  # the second doc is relevant for the first query as well
    contrast = Contrast(torch.ones(2), torch.arange(2), mask)
    one_way = Alone(Scalar(torch.eye(2)), [], loss=LCE())._on_matrix(scores, contrast).item()
    assert one_way == pytest.approx(math.log(1 + math.exp(-1)) / 2, abs=1e-6)
    both = Alone(Scalar(torch.eye(2)), [], loss=LCE(), symmetric=True)._on_matrix(scores, contrast).item()
    assert both == pytest.approx((one_way + math.log(1 + math.exp(-1)) / 2) / 2, abs=1e-6)


def test_pc44_a_step_of_one_doc_warns(caplog):
    trained(torch.eye(1, dtype=torch.float64), 1, 1)
    assert "a step with one doc has none and teaches nothing" in caplog.text
