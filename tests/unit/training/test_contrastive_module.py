"""The loss of a whole step's score matrix: worked values, micro-batches, symmetry."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ranker.interactions.maxsim import TextVectors
from ranker.losses.lce import LCE
from ranker.losses.pointwise_cross_entropy import PointwiseCrossEntropy
from ranker.training import score_matrix
from ranker.training.contrastive_module import ContrastiveModule
from ranker.types import Contrast, RankBatch, TokenBatch, TrainStep


class Scalar(torch.nn.Module):
    """A query is w * a, a doc w * b; texts are token rows of one number each."""

    vectors = "one"
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
    """The module without a Trainer."""

    trainer = SimpleNamespace(world_size=1, is_global_zero=True, strategy=object())
    global_rank, device = 0, torch.device("cpu")

    def manual_backward(self, loss):
        loss.backward()


def tokens(numbers):
    return TokenBatch(
        torch.tensor(numbers), torch.zeros(len(numbers), dtype=torch.int64), torch.arange(len(numbers) + 1).int(), 1
    )


def step_of(groups: int, size: int, docs: int = 1) -> TrainStep:
    """Groups of docs, the first one relevant, cut into micro-batches of `size`; docs are numbered over the step."""
    batches = []
    for start in range(0, groups, size):
        group_ids = torch.arange(start, min(start + size, groups))
        numbers = torch.arange(start * docs, (start + len(group_ids)) * docs).tolist()
        labels = torch.zeros(len(group_ids), docs)
        mask = torch.ones(len(group_ids), docs, dtype=torch.bool)
        batches.append(
            RankBatch(
                labels,
                mask,
                group_ids,
                len(group_ids) / groups,
                queries=tokens(group_ids.tolist()),
                docs=tokens(numbers),
            )
        )
    return TrainStep(0, 0, tuple(batches), groups, groups * docs, contrast_of(groups, docs))


def contrast_of(groups: int, docs: int = 1) -> Contrast:
    """The contrast in which every query is compared with every doc."""
    positive = torch.arange(groups * docs) % docs == 0
    return Contrast(
        positive.float(),
        torch.arange(groups).repeat_interleave(docs),
        torch.ones(groups, groups * docs, dtype=torch.bool),
        positive,
    )


def of_scores(scores, contrast, loss=None, **options):
    """The loss of a score matrix, and its gradient."""
    return score_matrix.loss_of_matrix(loss or LCE(), scores, contrast, **options)[:2]


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


@pytest.mark.parametrize(("size", "passes"), [(4, 1), (2, 3), (1, 7)])
def test_the_last_micro_batch_is_encoded_once_and_the_others_twice(size, passes, monkeypatch):
    seen = []
    encode = ContrastiveModule._encode
    monkeypatch.setattr(ContrastiveModule, "_encode", lambda self, batch: seen.append(1) or encode(self, batch))
    trained(torch.eye(4, dtype=torch.float64), 4, size)
    assert len(seen) == passes


def test_docs_are_encoded_before_queries_so_that_most_gradients_are_ready_during_the_backward_pass():
    """Both texts share w; the last encoded ones come first in the backward pass, and the long ones should come last."""
    order = []

    class Watched(Scalar):
        def encode_queries(self, batch):
            order.append("queries")
            return super().encode_queries(batch)

        def encode_docs(self, batch):
            order.append("docs")
            return super().encode_queries(batch)

    scorer = Watched(torch.eye(4, dtype=torch.float64))
    scorer.dim = 4
    Alone(scorer, [], loss=LCE()).accumulate(step_of(4, 4))
    assert order == ["docs", "queries"]


def test_pc46_the_gradient_is_that_of_the_whole_matrix():
    torch.manual_seed(1)
    table = torch.randn(4, 3, dtype=torch.float64)
    w = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    scores = (w * table) @ (w * table).T
    torch.nn.functional.cross_entropy(scores, torch.arange(4)).backward()
    assert trained(table, 4, 2)[1] == pytest.approx(w.grad.item(), rel=1e-12)


def test_symmetric_is_the_mean_of_both_directions():
    torch.manual_seed(2)
    scores = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    both = sum(torch.nn.functional.cross_entropy(part, torch.arange(3)) for part in (scores, scores.T)) / 2
    both.backward()
    loss, gradient = of_scores(scores.detach(), contrast_of(3), symmetric=True)
    assert loss.item() == pytest.approx(both.item(), abs=1e-12)
    torch.testing.assert_close(gradient, scores.grad, rtol=0, atol=1e-12)


def test_masked_docs_are_no_negatives_in_either_direction():
    scores = torch.tensor([[1.0, 9.0], [0.0, 1.0]], dtype=torch.float64)
    contrast = contrast_of(2)
    contrast.mask = torch.tensor(
        [[True, False], [True, True]]
    )  # the second doc is relevant for the first query as well
    one_way = of_scores(scores, contrast)[0].item()
    assert one_way == pytest.approx(math.log(1 + math.exp(-1)) / 2, abs=1e-6)
    both = of_scores(scores, contrast, symmetric=True)[0].item()
    assert both == pytest.approx((one_way + math.log(1 + math.exp(-1)) / 2) / 2, abs=1e-6)


def test_a_doc_with_a_grade_below_relevant_is_no_positive_of_the_symmetric_direction():
    scores = torch.tensor([[3.0, 1.0, 0.0], [2.0, 5.0, 1.0]], dtype=torch.float64)
    owners, mask = torch.tensor([0, 0, 1]), torch.ones(2, 3, dtype=torch.bool)
    graded = Contrast(torch.tensor([2.0, 1.0, 2.0]), owners, mask, torch.tensor([True, False, True]))
    back = (
        math.log(1 + math.exp(2.0 - 3.0)) + math.log(1 + math.exp(0.0 - 1.0))
    ) / 2  # docs 0 and 2 against the other query
    loss = PointwiseCrossEntropy()
    both, forward = (of_scores(scores, graded, LCE(), symmetric=symmetric)[0].item() for symmetric in (True, False))
    assert both == pytest.approx((forward + back) / 2, abs=1e-9)
    assert (
        of_scores(scores, Contrast(graded.labels, owners, mask, mask[0] & False), loss, symmetric=True)[0]
        == of_scores(scores, graded, loss)[0]
    )


LOSSES = {
    path.stem: instantiate(OmegaConf.load(path))
    for path in sorted((Path(__file__).resolve().parents[3] / "conf/loss").glob("*.yaml"))
}
# dpo is refused with in-batch negatives, see `_losses` of ranker/config/rules.py
USED = {name: loss for name, loss in LOSSES.items() if not getattr(loss, "against_reference", False)}
of_every_loss = pytest.mark.parametrize("loss", USED.values(), ids=USED)


@of_every_loss
def test_micro_batches_change_no_loss_and_no_gradient(loss):
    table = torch.randn(15, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    seen = []
    for size in (5, 1):
        scorer = Scalar(table)
        scorer.dim = 3
        value = Alone(scorer, [], loss=loss, symmetric=True).accumulate(step_of(5, size, docs=3))
        seen.append((value.item(), scorer.w.grad.item()))
    assert seen[1] == pytest.approx(seen[0], rel=0, abs=1e-12)
    assert abs(seen[0][1]) > 1e-3


@of_every_loss
def test_blocks_of_rankings_change_no_loss_and_hold_few_pairs(loss, monkeypatch):
    contrast = contrast_of(6, docs=3)
    contrast.mask = torch.rand(6, 18, generator=torch.Generator().manual_seed(5)) > 0.3
    scores = torch.randn(6, 18, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    asked = []

    class Watched(torch.nn.Module):
        pairwise = getattr(loss, "pairwise", True)

        def forward(self, values, labels, mask):
            asked.append((len(values), values.shape[1]))
            return loss(values, labels, mask)

    whole = of_scores(scores, contrast, Watched(), symmetric=True)
    assert asked == [(6, 18), (6, 6)]
    asked.clear()
    monkeypatch.setattr(score_matrix, "BLOCK_PAIRS", 4 * 18**2)
    blocks = of_scores(scores, contrast, Watched(), symmetric=True)
    assert asked == ([(4, 18), (2, 18), (6, 6)] if Watched.pairwise else [(6, 18), (6, 6)])
    monkeypatch.setattr(score_matrix, "BLOCK_PAIRS", 1)
    for made in (blocks, of_scores(scores, contrast, Watched(), symmetric=True)):
        for got, expected in zip(made, whole, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_pc44_a_step_of_one_doc_warns(caplog):
    trained(torch.eye(1, dtype=torch.float64), 1, 1)
    assert "a step with one doc has no negatives, so nothing is learnt" in caplog.text
