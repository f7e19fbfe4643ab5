"""Three optimizer steps of each training module against a plain PyTorch loop: losses, norms, rates, weights."""

import copy
import math
from collections.abc import Callable
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.utils.data import DataLoader

from ranker.encoders.loading import load_encoder
from ranker.losses.lce import LCE
from ranker.losses.ranknet import RankNet
from ranker.models.dpr import DPR
from ranker.models.monobert import MonoBERT
from ranker.multitask.module import MultitaskModule
from ranker.multitask.multitask import Multitask
from ranker.multitask.options import TaskWeighting
from ranker.multitask.steps import HeadBatch, TaskBatch, TaskStep
from ranker.training.contrastive_module import ContrastiveModule
from ranker.training.options import Optimization
from ranker.training.rerank_module import RerankModule
from ranker.training.schedules import cosine, linear
from ranker.types import Contrast, RankBatch, TokenBatch, TrainStep

LR, DECAY = 1e-2, 0.1
# The head's bias has a gradient of 0 under LCE, but for rounding. Adam divides it by its own size plus epsilon:
# with 1e-8 in place of 1e-6, the rounding of some processors moves that weight by more than the bound of this test.
EPSILON = 1e-6
ONE_WARM_STEP = partial(linear, warmup=1)
FACTORS = [1.0, 1.0, 0.5]  # of three steps: one of warm-up, two of decay
LABELS = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
MASK = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])  # docs of the step's three groups
# RankNet's pairs: docs (first better than second) by group
PAIRS = [[(0, 1), (0, 2), (1, 2)], [(1, 0)], [(0, 1), (0, 2)]]


def rows(seed: int, count: int) -> list[Tensor]:
    """Token rows of 3 to 7 tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 60, (3 + (seed + i) % 5,), generator=generator) for i in range(count)]


def batch_of(parts: list[Tensor], names: list[int]) -> TokenBatch:
    lengths = torch.tensor([0, *map(len, parts)])
    tokens = torch.cat(parts)
    return TokenBatch(
        tokens, torch.zeros_like(tokens), lengths.cumsum(0).int(), int(lengths.max()), row_ids=torch.tensor(names)
    )


def cls_vector(scorer: nn.Module, row: Tensor) -> Tensor:
    """The first token's last state by transformers' own forward, of a row by itself."""
    return scorer.encoder.model(row.unsqueeze(0), token_type_ids=torch.zeros_like(row).unsqueeze(0)).last_hidden_state[
        0, 0
    ]


class Recorded(pl.Callback):
    """What each step of a training did, in full precision."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[list[float]] = []
        self.logged: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer, module, optimizer) -> None:
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def recording(kind: type[RerankModule], recorded: Recorded) -> type[RerankModule]:
    """The module, whose check for finite values writes down what it sees."""

    class Watched(kind):
        def _is_finite(self, seen) -> bool:
            recorded.losses.append(seen[0].item())
            recorded.norms.append(seen[1].item())
            return super()._is_finite(seen)

    return Watched


def encoder():
    torch.manual_seed(0)
    return load_encoder("tiny", dropout=0.0, attention_dropout=0.0)


class Rerank:
    """Three groups in two micro-batches, RankNet."""

    module, loss = RerankModule, RankNet

    def scorer(self) -> nn.Module:
        return MonoBERT(encoder()).double()

    def steps(self) -> list[TrainStep]:
        return [TrainStep(0, index, (self.part(index, [0, 2]), self.part(index, [1])), 3, 8) for index in range(3)]

    def part(self, index: int, groups: list[int]) -> RankBatch:
        texts = rows(10 * index, 9)
        cells = [3 * group + doc for group in groups for doc in range(3) if MASK[group, doc]]
        pairs = batch_of([texts[cell] for cell in cells], cells)
        return RankBatch(LABELS[groups], MASK[groups], torch.tensor(groups), len(groups) / 3, pairs=pairs)

    def plain_loss(self, scorer: nn.Module, index: int) -> Tensor:
        texts = rows(10 * index, 9)
        scores = [scorer.head(cls_vector(scorer, text))[0] for text in texts]
        groups = []
        for group, pairs in enumerate(PAIRS):
            costs = [softplus(scores[3 * group + worse] - scores[3 * group + better]) for better, worse in pairs]
            groups.append(torch.stack(costs).mean())
        return torch.stack(groups).mean()


class InBatch:
    """Three queries with two docs each in two micro-batches, softmax over all six docs of the step."""

    module, loss = ContrastiveModule, LCE

    def scorer(self) -> nn.Module:
        return DPR(encoder(), pooling="cls", similarity="dot", temperature=2.0).double()

    def steps(self) -> list[TrainStep]:
        positive = torch.arange(6) % 2 == 0
        known = Contrast(
            positive.float(), torch.arange(3).repeat_interleave(2), torch.ones(3, 6, dtype=torch.bool), positive
        )
        return [
            TrainStep(0, index, (self.part(index, [0, 1]), self.part(index, [2])), 3, 6, known) for index in range(3)
        ]

    def part(self, index: int, groups: list[int]) -> RankBatch:
        queries, docs = rows(10 * index, 3), rows(10 * index + 5, 6)
        labels = torch.tensor([[1.0, 0.0]]).repeat(len(groups), 1)
        own = [2 * group + doc for group in groups for doc in range(2)]
        return RankBatch(
            labels,
            labels >= 0,
            torch.tensor(groups),
            len(groups) / 3,
            queries=batch_of([queries[group] for group in groups], groups),
            docs=batch_of([docs[i] for i in own], [10 + i for i in own]),
        )

    def plain_loss(self, scorer: nn.Module, index: int) -> Tensor:
        queries, docs = (
            torch.stack([cls_vector(scorer, row) for row in rows(*which)])
            for which in ((10 * index, 3), (10 * index + 5, 6))
        )
        return cross_entropy(queries @ docs.T / 2.0, torch.tensor([0, 2, 4]))


class Tasks:
    """A group of two docs and a row of an auxiliary task that a head reads, its loss at 0.75 of its value."""

    module, loss = partial(MultitaskModule, weighting=TaskWeighting(mode="static", cosine_every=0)), RankNet

    def scorer(self) -> nn.Module:
        heads = [{"task": "bm25", "layer": 2, "regression": True, "pooling": "cls", "weight": 0.75}]
        return Multitask(encoder(), heads=heads).double()

    def steps(self) -> list[TaskStep]:
        return [self.step(index) for index in range(3)]

    def step(self, index: int) -> TaskStep:
        texts = rows(10 * index, 3)
        first = len(texts[0]) + len(texts[1])  # where the auxiliary row begins
        head = HeadBatch(0, torch.tensor([first]), torch.tensor([0]), torch.tensor([1]), torch.tensor([0.25]), 1)
        batch = TaskBatch(
            torch.tensor([[1.0, 0.0]]),
            torch.ones(1, 2, dtype=torch.bool),
            torch.tensor([0]),
            1.0,
            batch_of(texts, [0, 1, 2]),
            heads=(head,),
            num_rank_rows=2,
            num_rank_tokens=first,
        )
        return TaskStep(0, index, (batch,), 1, 3, rows=(2, 1))

    def plain_loss(self, scorer: nn.Module, index: int) -> Tensor:
        better, worse, auxiliary = (cls_vector(scorer, row) for row in rows(10 * index, 3))
        ranking = softplus(scorer.head(worse) - scorer.head(better))[0]
        (head,) = scorer.heads.values()
        return ranking + 0.75 * (head.out(head.inner(auxiliary).relu())[0] - 0.25).square()


KINDS = {"rerank": Rerank(), "in-batch": InBatch(), "multitask": Tasks()}


def plain_loop(kind, max_norm: float) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Three steps of AdamW with two decay groups and clipping by the L2 norm: losses, unclipped norms, weights."""
    scorer = kind.scorer()
    weights = dict(scorer.named_parameters())
    groups = [
        {"params": [p for p in weights.values() if p.ndim == 2], "weight_decay": DECAY},
        {"params": [p for p in weights.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, eps=EPSILON)
    losses, norms = [], []
    for index, factor in enumerate(FACTORS):
        loss = kind.plain_loss(scorer, index)
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in weights.values() if p.grad is not None))
        for p in weights.values():
            if p.grad is not None and norm > max_norm:
                p.grad *= max_norm / (norm + 1e-6)
        for group in optimizer.param_groups:
            group["lr"] = LR * factor
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm)
    return losses, norms, {name: p.detach() for name, p in weights.items()}


def trained(
    kind, steps: int = 3, schedule: Callable[..., float] = ONE_WARM_STEP, epsilon: float = 1e-8, **options
) -> tuple[Recorded, nn.Module]:
    """The same steps by the module under Lightning."""
    recorded = Recorded()
    scorer = kind.scorer()
    optimization = Optimization(
        lambda groups: torch.optim.AdamW(groups, lr=LR, eps=epsilon),
        schedule,
        **{"total_steps": 3, "weight_decay": DECAY, **options},
    )
    base = getattr(kind.module, "func", kind.module)
    module = recording(base, recorded)(
        scorer, [], loss=kind.loss(), optimization=optimization, **getattr(kind.module, "keywords", {})
    ).double()
    trainer = pl.Trainer(
        accelerator="cpu",
        precision="64-true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        callbacks=[recorded],
    )
    trainer.fit(module, train_dataloaders=DataLoader((kind.steps() * 10)[:steps], batch_size=None))
    return recorded, scorer


@pytest.mark.parametrize("name", KINDS)
def test_three_steps_equal_a_plain_loop(name):
    kind = KINDS[name]
    max_norm = 0.3
    losses, norms, weights = plain_loop(kind, max_norm)
    assert min(norms) > 1.1 * max_norm  # it bites
    recorded, scorer = trained(kind, max_norm=max_norm, epsilon=EPSILON)
    assert recorded.losses == pytest.approx(losses, rel=0, abs=1e-12)
    assert recorded.norms == pytest.approx(norms, rel=1e-12)
    assert recorded.rates == [[pytest.approx(LR * factor, rel=1e-15)] * 2 for factor in FACTORS]
    assert [row["optim/lr"] for row in recorded.logged] == pytest.approx([LR * factor for factor in FACTORS], rel=1e-6)
    assert [row["train/loss"] for row in recorded.logged] == pytest.approx(losses, rel=1e-6)
    assert [row["train/grad_norm"] for row in recorded.logged] == pytest.approx(norms, rel=1e-6)
    got = dict(scorer.named_parameters())
    assert got.keys() == weights.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(got[key].detach(), weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_thirty_steps_learn_their_groups_by_heart(name):
    recorded, _ = trained(KINDS[name], steps=30, total_steps=30, max_norm=1.0)
    first, last = recorded.losses[:3], recorded.losses[-3:]
    assert sum(last) < 0.3 * sum(first)


@pytest.mark.parametrize("name", KINDS)
def test_pc2_01_clip_norm_0_and_less_clip_nothing(name):
    kind = KINDS[name]
    start = kind.scorer().state_dict()
    _, unclipped = trained(kind, max_norm=None)
    assert all(
        not torch.equal(value, start[key])
        for key, value in unclipped.state_dict().items()
        if value.ndim == 2 and "head" in key
    )
    for max_norm in (0, 0.0, -1.0, math.inf):
        _, scorer = trained(kind, max_norm=max_norm)
        assert all(torch.equal(value, unclipped.state_dict()[key]) for key, value in scorer.state_dict().items()), (
            max_norm
        )


@pytest.mark.parametrize("schedule", [linear, cosine])
def test_pc2_06_an_only_step_changes_the_weights(schedule):
    kind = KINDS["rerank"]
    start = copy.deepcopy(kind.scorer().state_dict())
    recorded, scorer = trained(kind, steps=1, schedule=schedule, total_steps=1, weight_decay=0.0)
    assert recorded.rates == [[LR, LR]]
    moved = (scorer.head.weight - start["head.weight"]).abs()
    torch.testing.assert_close(
        moved, torch.full_like(moved, LR), rtol=1e-4, atol=0
    )  # Adam's first step is the rate itself
