"""Schedules and decay groups by hand."""

import pytest
import torch

from ranker.training.rerank_module import RerankModule
from ranker.training.schedules import constant, cosine, linear, warmup_steps


def test_pc50_warm_up_counts_optimizer_steps():
    steps = 2 * -(-625 // 4)  # 10,000 examples, batch 8 on 2 devices, 4 micro-batches a step, 2 epochs
    assert steps == 314
    assert warmup_steps(0.1, steps) == 31
    rates = [linear(step, steps) for step in range(1, steps + 1)]
    assert rates[30] == max(rates) == 1.0
    assert rates[-1] == 0.0
    assert rates[0] == pytest.approx(1 / 31)
    assert linear(314, 314, end=0.1) == pytest.approx(0.1)


def test_cosine_and_constant_by_hand():
    assert cosine(60, 100, warmup=20, end=0.2) == pytest.approx(0.2 + 0.8 * 0.5)
    assert [constant(step, 10, warmup=4) for step in (1, 4, 5, 10)] == [0.25, 1.0, 1.0, 1.0]
    assert linear(1, 10, warmup=0) == pytest.approx(0.9)


def test_biases_and_norms_are_not_decayed():
    scorer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    module = RerankModule(
        scorer,
        ["nDCG@10"],
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1.0),
        schedule=lambda step, total: 1.0,
        total_steps=5,
        weight_decay=0.25,
    )
    (optimizer,), _ = module.configure_optimizers()
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in scorer.named_parameters()} == {
        "0.weight": 0.25,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
    }
