"""Schedules by hand and against transformers' own, and decay groups."""

import math

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from ranker.training.options import Optimization
from ranker.training.rerank_module import RerankModule
from ranker.training.schedules import constant, cosine, linear, warmup_steps


def test_pc50_warm_up_counts_optimizer_steps():
    steps = 2 * -(-625 // 4)  # 10,000 examples, batch 8 on 2 devices, 4 micro-batches a step, 2 epochs
    assert steps == 314
    assert warmup_steps(0.1, steps) == 31
    rates = [linear(step, steps) for step in range(1, steps + 1)]
    assert rates[29] < rates[30] == rates[31] == max(rates) == 1.0 > rates[32]
    assert rates[0] == pytest.approx(1 / 31)
    assert rates[-1] == pytest.approx(1 / 283)  # 314 - 31 steps of decay
    assert linear(315, 314, end=0.1) == pytest.approx(0.1)


def rates_of_transformers(schedule, total: int, warmup: int) -> list[float]:
    """The rate of each step under a schedule of transformers, from a base rate of 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = schedule(optimizer, warmup, total)
    rates = []
    for _ in range(total):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("own", "theirs"),
    [(linear, get_linear_schedule_with_warmup), (cosine, get_cosine_schedule_with_warmup)],
    ids=["linear", "cosine"],
)
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (2, 0), (7, 0), (2, 1), (12, 4), (1, 1), (3, 3)])
def test_pc2_06_decays_are_those_of_transformers(own, theirs, total, warmup):
    rates = [own(step, total, warmup=warmup) for step in range(1, total + 1)]
    assert rates[warmup:] == pytest.approx(rates_of_transformers(theirs, total, warmup)[warmup:], abs=1e-15)
    assert rates[:warmup] == [step / warmup for step in range(1, warmup + 1)]  # theirs begins at 0, one step late
    assert min(rates) > 0
    assert total > 1 or rates == [1.0]


def test_pc2_06_the_first_steps_of_all_schedules_by_hand():
    assert [linear(step, 4, warmup=0) for step in (1, 2, 3, 4)] == [1.0, 0.75, 0.5, 0.25]
    assert [linear(step, 4, warmup=2, end=0.5) for step in (1, 2, 3, 4)] == [0.5, 1.0, 1.0, 0.75]
    assert cosine(61, 100, warmup=20, end=0.2) == pytest.approx(0.2 + 0.8 * 0.5)
    assert cosine(4, 4, warmup=0) == pytest.approx(0.5 * (1 + math.cos(0.75 * math.pi)))
    assert [constant(step, 10, warmup=4) for step in (1, 4, 5, 10)] == [0.25, 1.0, 1.0, 1.0]
    assert constant(1, 1) == 1.0


@pytest.mark.parametrize("schedule", [linear, cosine, constant])
@pytest.mark.parametrize("total", [1, 2, 3, 10])
@pytest.mark.parametrize("warmup", [0, 0.1, 0.5, 0.999, 1, 2, 1000])
def test_pc2_06_no_step_of_any_schedule_has_rate_0_or_above_1(schedule, total, warmup):
    assert all(0 < schedule(step, total, warmup=warmup) <= 1 for step in range(1, total + 1))


def test_warm_up_below_1_is_a_share_and_from_1_on_a_number_of_steps():
    assert [warmup_steps(warmup, 10) for warmup in (0, 0.05, 0.5, 0.99, 1, 1.0, 9, 10, 11)] == [
        0,
        0,
        5,
        9,
        1,
        1,
        9,
        10,
        10,
    ]


def test_biases_and_norms_are_not_decayed():
    scorer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    module = RerankModule(
        scorer,
        ["nDCG@10"],
        optimization=Optimization(
            lambda groups: torch.optim.AdamW(groups, lr=1.0), lambda step, total: 1.0, total_steps=5, weight_decay=0.25
        ),
    )
    (optimizer,), _ = module.configure_optimizers()
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in scorer.named_parameters()} == {
        "0.weight": 0.25,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
    }


def test_the_fused_update_of_a_weight_with_gaps_in_memory_is_that_of_adamw():
    torch.manual_seed(0)
    values, inputs = torch.randn(4, 12), torch.randn(9, 6)
    found = []
    for fused in (True, False):
        scorer = torch.nn.Linear(6, 4, bias=False)
        scorer.weight = torch.nn.Parameter(values.clone()[:, ::2])  # strides of 12 and 2 numbers
        optimization = Optimization(
            lambda groups, fused=fused: torch.optim.AdamW(groups, lr=0.1, fused=fused), lambda step, total: 1.0, 5
        )
        (optimizer,), _ = RerankModule(scorer, ["nDCG@10"], optimization=optimization).configure_optimizers()
        torch.testing.assert_close(scorer.weight.detach(), values[:, ::2], rtol=0, atol=0)
        for _ in range(3):
            optimizer.zero_grad()
            (scorer(inputs) ** 2).sum().backward()
            optimizer.step()
        found.append(scorer.weight.detach())
    torch.testing.assert_close(*found)
