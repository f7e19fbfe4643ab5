"""Small contrastive trainings under different hardware layouts, run by test_contrastive.py in one or two processes."""

import importlib.util
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from transformers import BertModel

from ranker.data.collection import Splits
from ranker.data.datamodule import RankData
from ranker.data.options import BatchOptions, TrainDocs
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.encoders.encoder import Encoder
from ranker.encoders.tiny import tiny_config, tiny_tokenizer
from ranker.losses.lce import LCE
from ranker.losses.ranknet import RankNet
from ranker.models.colbert import ColBERT
from ranker.models.dpr import DPR
from ranker.training import contrastive_module
from ranker.training.contrastive_module import ContrastiveModule
from ranker.training.matryoshka import MatryoshkaModule, Sizes
from ranker.training.options import Optimization
from ranker.training.schedules import linear

spec = importlib.util.spec_from_file_location("invariance_run", Path(__file__).with_name("invariance_run.py"))
invariance_run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(invariance_run)


class Recorded(invariance_run.Recording, ContrastiveModule):
    """Compare each query with all docs of its step."""


class RecordedMatryoshka(Recorded, MatryoshkaModule):
    """Store the loss of a step that is trained at several vector sizes."""


class OnePass(Recorded):
    """The reference: one micro-batch, one forward pass with its graph, one loss, one backward pass, and no cache."""

    def accumulate(self, step):
        (batch,) = step.micro_batches
        self._seed_dropout(step, 0)
        queries, docs = self._encode(batch)
        scores, contrast = self.scorer.score_block(queries, docs), step.contrast
        own, groups = torch.arange(step.num_docs), torch.arange(step.num_groups)
        labels = torch.zeros_like(scores)
        labels[contrast.owners, own] = contrast.labels.to(scores.dtype)
        loss = self.loss(scores, labels, contrast.mask)
        if self.symmetric:
            positive = own[contrast.positive]
            back = (contrast.owners[positive, None] == groups).to(scores.dtype)
            loss = (loss + self.loss(scores[:, positive].T, back, contrast.mask[:, positive].T)) / 2
        self.manual_backward(loss)
        return loss.detach().double()


def faulty(fault: str) -> type[ContrastiveModule]:
    """Return the module with a fault that the tests must detect; for an empty `fault`, the module without a fault."""

    class Faulty(Recorded):
        def _seed_dropout(self, step, micro_batch):
            if fault != "no replay":
                super()._seed_dropout(step, micro_batch)

        def _backward_through_scores(self, *args):
            grad_queries, grad_docs, grad_scoring_parameters = super()._backward_through_scores(*args)
            if fault == "detached docs":
                grad_docs = torch.zeros_like(grad_docs)
            if fault == "temperature twice":
                grad_scoring_parameters = [(p, g * 2) for p, g in grad_scoring_parameters]
            return grad_queries, grad_docs, grad_scoring_parameters

    return Faulty if fault else Recorded


@dataclass
class Job:
    """One training."""

    cache: str
    model: str = "dpr"
    devices: int = 1
    max_tokens: int = 100_000
    min_micro_batches: int = 1
    double: bool = False
    optimizer: str = "adamw"
    dropout: float = 0.1
    attention_dropout: float = 0.0
    one_pass: bool = False
    small_blocks: bool = False
    fault: str = ""
    precision: str | None = None
    passages: str = ""


def train(job: Job) -> dict[str, Any]:
    """Run the training of a job; return losses, weights and validation measures."""
    pl.seed_everything(1, verbose=False)
    groups = invariance_run.collection(9)  # steps of 4, 4 and 1 groups: in the third, one of two processes has no group
    config = tiny_config(dim=16)
    config.hidden_dropout_prob, config.attention_probs_dropout_prob = job.dropout, job.attention_dropout
    encoder = Encoder(BertModel(config, add_pooling_layer=False), tiny_tokenizer())
    if job.model == "colbert":
        scorer, loss = ColBERT(encoder, projection=8, query_length=12, in_batch_negatives=True), RankNet()
    else:
        options = (
            {"tied": False, "projection": 8, "similarity": "dot", "temperature": 3.0}
            if job.model == "separate"
            else {"temperature": 0.5}
        )
        scorer, loss = DPR(encoder, learn_temperature=True, symmetric=True, **options), LCE()
    symmetric = scorer.symmetric
    if job.passages:
        scorer = invariance_run.by_windows(scorer, job.passages)
    data = RankData(
        Splits(groups, groups, {}),
        ScorerInputs.of(scorer),
        BatchOptions(
            queries=4, docs=5, positives=2, max_tokens=job.max_tokens, min_micro_batches=job.min_micro_batches
        ),
        TextLimits(16, 64),
        seed=3,
        cache_dir=job.cache,
        train_docs=TrainDocs(in_batch=True),
    )
    make = OnePass if job.one_pass else faulty(job.fault)
    if job.model == "matryoshka":
        make = partial(RecordedMatryoshka, sizes=Sizes.of(scorer, [4, 8], [1], 1, 0.5))
    optimizer = torch.optim.AdamW if job.optimizer == "adamw" else torch.optim.SGD
    module = make(
        scorer, ["nDCG@10", "RR"], symmetric=symmetric, loss=loss,
        optimization=Optimization(
            lambda groups: optimizer(groups, lr=3e-3 if job.optimizer == "adamw" else 0.1),
            lambda step, total: linear(step, total, warmup=2),
        ),
    )  # fmt: skip
    if job.double:
        module = module.double()
    losses = invariance_run.Losses()
    trainer = invariance_run.small_trainer(
        job.devices,
        max_epochs=1,
        precision=job.precision or ("64-true" if job.double else "32-true"),
        callbacks=[losses],
    )
    sizes = ("BLOCK_QUERIES", "BLOCK_DOCS", "KERNEL_QUERIES", "KERNEL_DOCS")
    whole = [getattr(contrastive_module, name) for name in sizes]
    if job.small_blocks:
        for name, size in zip(sizes, (24, 64, 24, 64), strict=True):
            setattr(contrastive_module, name, size)
    try:
        trainer.fit(module, datamodule=data)
    finally:
        for name, size in zip(sizes, whole, strict=True):
            setattr(contrastive_module, name, size)
    measured = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val/")}
    return {
        "losses": losses.values,
        "val": measured,
        "weights": {k: v.clone() for k, v in module.scorer.state_dict().items()},
    }


if __name__ == "__main__":
    invariance_run.run_jobs(Job, train)
