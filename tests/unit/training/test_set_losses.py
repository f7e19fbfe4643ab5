"""The loss of a batch of several sets is a plain loop over its groups, each under the loss of its set."""

import pytest
import torch

from ranker.losses.lce import LCE
from ranker.losses.mse import MSE
from ranker.training.set_losses import SetLosses
from ranker.types import RankBatch, TrainStep


class Scaled(torch.nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, scores, labels, doc_mask):
        return (self.scale * scores).mean()


def batch_of(sizes, seed=0):
    count, rng = sum(sizes), torch.Generator().manual_seed(seed)
    mask = torch.rand(count, 3, generator=rng) < 0.8
    mask[:, :2] = True
    labels = torch.tensor([[1.0, 0.0, 0.0]]).repeat(count, 1)
    scores = torch.randn(count, 3, generator=rng, dtype=torch.float64)
    batch = RankBatch(labels, mask, torch.arange(count), share=1.0, set_sizes=tuple(sizes))
    return scores, batch


@pytest.mark.parametrize("sizes", [(3, 2), (0, 4), (1, 0)])
def test_a_batch_is_a_plain_loop_over_its_groups(sizes):
    losses = SetLosses({"a": LCE(), "b": MSE()})
    losses.begin(TrainStep(0, 0, (), sum(sizes), 0, set_groups=sizes))
    scores, batch = batch_of(sizes)
    each = []
    for i in range(sum(sizes)):
        row = slice(i, i + 1)
        loss = LCE() if i < sizes[0] else MSE()
        each.append(loss(scores[row], batch.labels[row], batch.doc_mask[row]).item())
    assert losses.of_batch(scores, batch).item() == pytest.approx(sum(each) / len(each), abs=1e-12)
    total = torch.tensor(sum(each) / len(each), dtype=torch.float64)
    parts = torch.stack(losses.parts(total))
    assert parts.sum().item() == pytest.approx(total.item(), abs=1e-12)
    logged = {name: (count, loss.item()) for name, count, loss in losses.end(losses._step, parts)}
    for name, start, size in (("a", 0, sizes[0]), ("b", sizes[0], sizes[1])):
        count, loss = logged[name]
        assert count == size
        expected = sum(each[start : start + size]) / size if size else float("nan")
        assert loss == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_groups_are_counted_over_steps():
    losses = SetLosses({"a": LCE(), "b": MSE()})
    for groups in ((3, 1), (0, 4), (2, 2)):
        step = TrainStep(0, 0, (), 4, 0, set_groups=groups)
        losses.begin(step)
        list(losses.end(step, torch.zeros(2)))
    assert losses.groups == [5, 7]


def test_a_parameter_of_a_set_s_loss_has_a_gradient_in_every_batch():
    losses = SetLosses({"a": LCE(), "train": Scaled()})  # "train" is also a name of torch's modules
    assert [name for name, _ in losses.named_parameters()] == ["registered.1.scale"]
    losses.begin(TrainStep(0, 0, (), 2, 0, set_groups=(2, 0)))
    scores, batch = batch_of((2, 0))
    losses.of_batch(scores, batch).backward()
    assert losses.losses[1].scale.grad.item() == 0.0
    losses.begin(TrainStep(0, 0, (), 4, 0, set_groups=(2, 2)))
    scores, batch = batch_of((2, 2))
    losses.of_batch(scores, batch).backward()
    assert losses.losses[1].scale.grad.item() == pytest.approx(scores[2:].mean().item() / 2, abs=1e-12)


def test_a_step_of_one_set_has_that_set_s_loss():
    losses = SetLosses({"a": LCE(), "b": MSE()})
    scores, batch = batch_of((0, 3))
    losses.begin(TrainStep(0, 0, (), 3, 0, set_groups=(0, 3)))
    assert losses(scores, batch.labels, batch.doc_mask) == MSE()(scores, batch.labels, batch.doc_mask)
