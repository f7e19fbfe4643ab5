"""An optimizer step is all of its groups, however it is cut."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ranker.data.step_plan import StepPlan
from ranker.data.training_steps import StepLoader
from ranker.training.options import Optimization
from ranker.training.progress import ProgressBar
from ranker.training.rerank_module import RerankModule
from ranker.training.throughput import Throughput
from ranker.types import RankBatch, TrainStep


class Weight(nn.Module):
    """Every doc's score is one weight, so that each group's gradient is exactly 1 under a mean of scores."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, batch: RankBatch) -> torch.Tensor:
        return self.weight.expand(batch.labels.shape)


class Steps:
    """Steps of one-doc groups of one token each."""

    def __init__(self, plan: StepPlan, rank: int = 0, world: int = 1) -> None:
        self.plan, self.rank, self.world = plan, rank, world

    def __getitem__(self, key) -> TrainStep:
        groups = self.plan.groups(*key)
        parts = self.plan.micro_batches([1] * len(groups), self.rank, self.world)
        batches = tuple(
            RankBatch(
                torch.ones(len(part), 1),
                torch.ones(len(part), 1, dtype=torch.bool),
                torch.tensor(part),
                len(part) / len(groups),
            )
            for part in parts
        )
        return TrainStep(*key, batches, len(groups), len(groups))


class Gradients(pl.Callback):
    """The gradient that each optimizer step sees."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer, module, optimizer) -> None:
        self.seen.append(module.scorer.weight.grad.item())


@pytest.mark.parametrize(
    ("groups", "queries", "epochs"),
    [
        (5, 4, 1),  # PC-47: an epoch's last step has one group left over, of four micro-batches each
        (2, 4, 2),  # PC-49: fewer groups in an epoch than micro-batches asked for
    ],
)
def test_pc47_pc49_a_step_s_gradient_is_the_mean_over_what_it_has(groups, queries, epochs):
    plan = StepPlan(groups, queries, max_tokens=100, min_micro_batches=4)
    module = RerankModule(
        Weight(),
        [],
        loss=lambda scores, labels, mask: scores.mean(),
        optimization=Optimization(
            lambda params: torch.optim.SGD(params, lr=1.0),
            lambda step, total: 1.0,
            total_steps=2,
            max_norm=None,
            weight_decay=0.0,
        ),
    )
    gradients = Gradients()
    pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[gradients],
    ).fit(module, train_dataloaders=StepLoader(Steps(plan)))
    assert gradients.seen == [1.0, 1.0]
    assert module.scorer.weight.item() == -2.0


class Reads(TorchDispatchMode):
    """Counts the numbers that Python reads from tensors; on a GPU it waits for each."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


class Counted(pl.Callback):
    """Reads from the first step's start to the start of the sixth, and what the bar shows then."""

    def __init__(self, bar: ProgressBar) -> None:
        self.bar, self.reads = bar, Reads()

    def on_train_batch_start(self, trainer, module, batch, index) -> None:
        if index == 0:
            self.reads.__enter__()
        elif index == 5:
            self.reads.__exit__(None, None, None)
            self.shown = self.bar.get_metrics(trainer, module)


def test_a_step_waits_for_nothing_but_what_judges_it():
    bar = ProgressBar()
    module = RerankModule(
        Weight(),
        [],
        loss=lambda scores, labels, mask: scores.mean(),
        optimization=Optimization(
            lambda params: torch.optim.SGD(params, lr=1.0),
            lambda step, total: 1.0,
            total_steps=8,
            max_norm=None,
            weight_decay=0.0,
        ),
    )
    counted = Counted(bar)
    pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_model_summary=False,
        callbacks=[bar, Throughput(), counted],
    ).fit(module, train_dataloaders=StepLoader(Steps(StepPlan(16, 2, max_tokens=100))))  # fmt: skip
    assert counted.reads.count == 5 * 3  # loss, whether it is finite, and whether a stop was asked for
    assert counted.shown["train/loss"] == -4.0, "the loss of the fifth step: each before it took 1 from the weight"
    assert counted.shown["train/pairs_per_second"] > 0


def test_skipped_steps_go_along_with_a_checkpoint():
    make = lambda: RerankModule(Weight(), [], loss=None, optimization=None)  # noqa: E731
    first, second, checkpoint = make(), make(), {}
    first.skipped_steps = 7
    first.on_save_checkpoint(checkpoint)
    second.on_load_checkpoint(checkpoint)
    assert second.skipped_steps == 7


def test_pc70_two_devices_share_the_rows_of_an_epoch():
    plan = StepPlan(8, 4, max_tokens=2, seed=3)
    seen = {}
    for epoch in (0, 1):
        rows = []
        for rank in (0, 1):
            steps = Steps(plan, rank, 2)
            own = [
                (index, int(plan.groups(epoch, index)[group]))
                for index in range(len(plan))
                for batch in steps[epoch, index].micro_batches
                for group in batch.group_ids
            ]
            assert len({index for index, _ in own}) == 2  # one batch of two rows in each of the two steps
            assert len(own) == 4
            rows.append([row for _, row in own])
        assert sorted(rows[0] + rows[1]) == list(range(8))
        seen[epoch] = rows
    assert not np.array_equal(seen[0], seen[1])
