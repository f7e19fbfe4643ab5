"""Small trainings of sparse rankers under different hardware layouts, run by test_sparse.py in one or two processes."""

import importlib.util
import sys
from dataclasses import dataclass
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
from ranker.losses.margin_mse import MarginMSE
from ranker.models.splade import SPLADE
from ranker.models.tildev2 import TILDEv2
from ranker.training.contrastive_module import ContrastiveModule
from ranker.training.options import Optimization
from ranker.training.sparse_module import SparseModule, Sparsity, frequency_factor

spec = importlib.util.spec_from_file_location("contrastive_run", Path(__file__).with_name("contrastive_run.py"))
contrastive_run = importlib.util.module_from_spec(spec)
sys.modules.setdefault("contrastive_run", contrastive_run)
spec.loader.exec_module(contrastive_run)
invariance_run = contrastive_run.invariance_run

MODELS = {
    "flops": {"regularizer": "flops"},
    "df_flops": {"regularizer": "df_flops", "queries": "separate", "pooling": "sum"},
    "l1": {"regularizer": "l1", "queries": "learned", "in_batch_negatives": False},
    "tildev2": {},
}


class Recorded(invariance_run.Recording, SparseModule):
    """Train with penalties on the term weights."""


class Halved(Recorded):
    """A fault that the tests must detect: the penalty's gradient is halved."""

    def penalties(self, queries, docs, step):
        found = super().penalties(queries, docs, step)
        return found._replace(by_docs=found.by_docs / 2)


class OnePass(Recorded):
    """The reference: one micro-batch, one forward pass with its graph, penalties by autograd, and no cache."""

    def accumulate(self, step):
        (batch,) = step.micro_batches
        self._seed_dropout(step, 0)
        queries, docs = self._encode(batch)
        self.penalties(queries, docs, step)  # this call sets the factor and the frequencies
        scores, contrast = queries.values @ docs.values.T, step.contrast
        labels = torch.zeros_like(scores)
        labels[contrast.owners, torch.arange(step.num_docs)] = contrast.labels.to(scores.dtype)
        loss = self.loss(scores, labels, contrast.mask)
        kind, found = self.sparsity.regularizer, []
        for values, of_docs in ((queries.values, False), (docs.values, True)):
            if kind == "l1":
                found.append(values.abs().sum(1).mean())
            else:
                means = values.mean(0)
                if kind == "df_flops" and of_docs:
                    means = means * frequency_factor(self._counted)
                found.append((means**2).sum())
        query_factor = self.sparsity.query_penalty if self.scorer.encodes_queries else 0.0
        loss = loss + self.factor * (query_factor * found[0] + self.sparsity.doc_penalty * found[1])
        self.manual_backward(loss)
        return loss.detach().double()


class RecordedContrast(contrastive_run.Recorded, ContrastiveModule):
    """Train a model without penalties."""

    def __init__(self, *args, sparsity, **options) -> None:
        super().__init__(*args, **options)


@dataclass
class Job:
    """One training."""

    cache: str
    model: str = "flops"
    devices: int = 1
    max_tokens: int = 100_000
    module: str = "Recorded"


def train(job: Job) -> dict[str, Any]:
    """Run the training of a job in float64 with dropout; return losses, weights and validation measures."""
    pl.seed_everything(1, verbose=False)
    groups = invariance_run.collection(9)  # steps of 4, 4 and 1 groups: in the third, one of two processes has no group
    config = tiny_config(dim=16)
    config.hidden_dropout_prob, config.attention_probs_dropout_prob = 0.1, 0.0
    encoder = Encoder(BertModel(config, add_pooling_layer=False), tiny_tokenizer())
    options = MODELS[job.model]
    in_batch = options.get("in_batch_negatives", True)
    scorer = TILDEv2(encoder) if job.model == "tildev2" else SPLADE(encoder, **options)
    data = RankData(
        Splits(groups, groups, {}),
        ScorerInputs.of(scorer),
        BatchOptions(queries=4, docs=5, positives=2, max_tokens=job.max_tokens),
        TextLimits(16, 64),
        seed=3,
        cache_dir=job.cache,
        train_docs=TrainDocs(in_batch=in_batch, whole_step=True),
    )
    module = ({"tildev2": RecordedContrast}.get(job.model) or globals()[job.module])(
        scorer, ["nDCG@10", "RR"], loss=LCE() if in_batch else MarginMSE(),
        optimization=Optimization(
            lambda groups: torch.optim.AdamW(groups, lr=3e-3), lambda step, total: 1.0, total_steps=3
        ),
        sparsity=Sparsity(options.get("regularizer", "flops"), 0.02, 0.05, penalty_warmup=0.7),
    ).double()  # fmt: skip
    losses = invariance_run.Losses()
    trainer = invariance_run.small_trainer(job.devices, max_epochs=1, precision="64-true", callbacks=[losses])
    trainer.fit(module, datamodule=data)
    measured = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val/")}
    return {
        "losses": losses.values,
        "val": measured,
        "weights": {k: v.clone() for k, v in module.state_dict().items()},
    }


if __name__ == "__main__":
    invariance_run.run_jobs(Job, train)
