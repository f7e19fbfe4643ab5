"""Small trainings under different hardware layouts, run by test_invariance.py in one or two processes."""

import json
import os
import random
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from transformers import BertModel

from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs, Splits
from ranker.data.datamodule import RankData
from ranker.data.options import BatchOptions
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.windows import Windows
from ranker.distillation.layers import Layers
from ranker.distillation.module import DistillationModule
from ranker.encoders.encoder import Encoder
from ranker.encoders.loading import load_encoder
from ranker.encoders.lora import LoRA
from ranker.encoders.ragged import pad_to_tiles
from ranker.encoders.tiny import tiny_config, tiny_tokenizer
from ranker.exits.early_exit import EarlyExit
from ranker.exits.module import EarlyExitModule, ExitTraining
from ranker.lists.duo import Duo
from ranker.lists.listwise_lm import ListwiseLM
from ranker.lists.set_encoder import SetEncoder
from ranker.losses.ranknet import RankNet
from ranker.losses.reinforce import Reinforce
from ranker.models.lm_reranker import LMReranker
from ranker.models.mono_t5 import MonoT5
from ranker.models.monobert import MonoBERT
from ranker.passages.maxp import MaxP
from ranker.passages.parade_transformer import ParadeTransformer
from ranker.passages.windowed import Windowed
from ranker.training.options import Optimization
from ranker.training.rerank_module import RerankModule
from ranker.training.schedules import linear


def collection(num_queries: int) -> Collection:
    """Return queries with graded docs of 1 to 30 words."""
    words = [first + second for first in "bcdfgk" for second in ("ab", "el", "ir", "om")]
    rng = random.Random(7)
    text = lambda shortest, longest: " ".join(rng.choices(words, k=rng.randint(shortest, longest)))  # noqa: E731
    docs = MemoryDocs(Doc(f"d{i}", text(1, 30)) for i in range(6 * num_queries))
    queries = {f"q{i}": text(1, 8) for i in range(num_queries)}
    qrels = {f"q{i}": {f"d{6 * i}": 2, f"d{6 * i + 1}": 1, f"d{6 * i + 2}": 0} for i in range(num_queries)}
    run = {f"q{i}": {f"d{6 * i + j}": float(-j) for j in range(rng.randint(4, 6))} for i in range(num_queries)}
    return Collection("small", docs, queries, qrels, Candidates.from_run(run))


def small_trainer(devices: int, **options: Any) -> pl.Trainer:
    """Return a trainer on the CPU that writes nothing. Processes communicate with gloo, as in assembly/trainer.py.

    Args:
        devices: Number of processes.
        options: Further options of `Trainer`.
    """
    several = DDPStrategy(process_group_backend="gloo", broadcast_buffers=False, gradient_as_bucket_view=True)
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=several if devices > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **options,
    )


def names_of(data: RankData, index: int, world: int = 1) -> dict[int, list[int]]:
    """Return row id within the step -> tokens of the row, for all rows of a step on `world` devices."""
    found: list[tuple[int, list[int]]] = []
    for rank in range(world):
        for micro_batch in data.train_steps(rank, world)[0, index].micro_batches:
            for batch in (micro_batch.pairs, micro_batch.queries, micro_batch.docs):
                if batch is not None:
                    rows = batch.tokens.split(batch.cu_seqlens.diff().tolist())
                    found += [(int(row_id), row.tolist()) for row_id, row in zip(batch.row_ids, rows, strict=True)]
                    padded = pad_to_tiles(batch)
                    assert padded.row_ids.shape == padded.cu_seqlens[1:].shape
                    assert padded.row_ids[:-1].equal(batch.row_ids)
    assert len(dict(found)) == len(found), "no two rows of a step share an id"
    return dict(found)


def by_windows(scorer: Any, aggregation: str) -> Windowed:
    """Return the scorer with windows of 8 tokens, at most 4 per doc; if it reads pairs, BM25 selects the windows."""
    windows = Windows(8, 6, most=4, select="bm25" if scorer.reads == "pairs" else "first")
    return Windowed.of(scorer, windows, MaxP() if aggregation == "maxp" else ParadeTransformer(scorer.vector_dim))


class Losses(pl.Callback):
    """Collect the loss of each step in full precision."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.values.append(module.last_loss)


class Recording:
    """Mixin of training modules: store the loss of a step in full precision for `Losses`."""

    last_loss = float("nan")

    def _is_finite(self, seen) -> bool:
        self.last_loss = seen[0].item()
        return super()._is_finite(seen)


class Recorded(Recording, RerankModule):
    """Compare each query with its own docs."""


@dataclass
class Job:
    """One training."""

    cache: str
    model: str = "monobert"
    loss: str = "ranknet"
    devices: int = 1
    max_tokens: int = 100_000
    min_micro_batches: int = 1
    double: bool = False
    optimizer: str = "adamw"
    fault: str = ""
    passages: str = ""


def monobert() -> MonoBERT:
    """Return a random cross-encoder with dropout."""
    config = tiny_config(dim=16)
    config.hidden_dropout_prob, config.attention_probs_dropout_prob = 0.1, 0.0
    return MonoBERT(Encoder(BertModel(config, add_pooling_layer=False), tiny_tokenizer()))


def shared_lm() -> LMReranker:
    """Return a random language model with dropout in adapters; the docs of a query share the query's tokens."""
    encoder = load_encoder("tiny_lm", share_prefix=True, lora=LoRA(rank=2, dropout=0.2))
    return LMReranker(encoder, prompt="{query} [SEP] {doc} ?")


def early_exit() -> EarlyExit:
    """Return a random cross-encoder with dropout and a head at its first layer."""
    return EarlyExit(monobert().encoder, exits=[1])


def with_layer_drop() -> MonoBERT:
    """Return a random cross-encoder with dropout; half of its steps leave out its first layer."""
    scorer = monobert()
    scorer.encoder.drop_layers(0.5)
    return scorer


class RecordedExits(Recorded, EarlyExitModule):
    """Store the loss of a training of early heads."""


class RecordedDistillation(Recorded, DistillationModule):
    """Store the loss of a training with a teacher."""


def module_of(job: "Job") -> Any:
    """Return the training module of a job."""
    if job.model == "early_exit":
        return partial(RecordedExits, options=ExitTraining(trunk=True))
    if job.model == "distilled":
        config = tiny_config(dim=24)
        teacher = MonoBERT(Encoder(BertModel(config, add_pooling_layer=False), tiny_tokenizer()))
        return partial(RecordedDistillation, teacher=teacher, options=Layers(teacher=Path()))
    return seed_fault(job.fault)


def listwise_lm() -> ListwiseLM:
    """Return a random language model with dropout in adapters; in training, its docs are in a random order."""
    return ListwiseLM(load_encoder("tiny_lm", lora=LoRA(rank=2, dropout=0.2)), window=3, merge="sliding")


SCORERS = {
    "monobert": monobert,
    "early_exit": early_exit,
    "distilled": monobert,
    "layer_drop": with_layer_drop,
    "mono_t5": lambda: MonoT5(load_encoder("tiny_t5", dropout=0.1)),
    "shared_lm": shared_lm,
    "set_encoder": lambda: SetEncoder(load_encoder("tiny", dropout=0.1, attention_dropout=0.0), window=3, stride=2),
    "duo": lambda: Duo(load_encoder("tiny", dropout=0.1, attention_dropout=0.0), aggregation="bradley_terry"),
    "listwise_lm": listwise_lm,
}


def train(job: Job) -> dict[str, Any]:
    """Run the training of a job; return losses, weights and validation measures."""
    pl.seed_everything(1, verbose=False)
    groups = collection(9)  # steps of 4, 4 and 1 groups: in the third, one of two processes has no group
    scorer: Any = SCORERS[job.model]()
    if job.passages:
        scorer = by_windows(scorer, job.passages)
    data = RankData(
        Splits(groups, groups, {}),
        ScorerInputs.of(scorer),
        BatchOptions(
            queries=4, docs=5, positives=2, max_tokens=job.max_tokens, min_micro_batches=job.min_micro_batches
        ),
        TextLimits(16, 64),
        seed=3,
        cache_dir=job.cache,
    )
    optimizer = torch.optim.AdamW if job.optimizer == "adamw" else torch.optim.SGD
    module = module_of(job)(
        scorer,
        ["nDCG@10", "RR"],
        loss=Reinforce() if job.loss == "reinforce" else RankNet(),
        optimization=Optimization(
            lambda groups: optimizer(groups, lr=3e-3 if job.optimizer == "adamw" else 0.3),
            lambda step, total: linear(step, total, warmup=2),
        ),
    )
    if job.double:
        module = module.double()
    losses = Losses()
    trainer = small_trainer(
        job.devices, max_epochs=2, precision="64-true" if job.double else "32-true", callbacks=[losses]
    )
    trainer.fit(module, datamodule=data)
    measured = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val/")}
    return {
        "losses": losses.values,
        "val": measured,
        "weights": {k: v.clone() for k, v in module.scorer.state_dict().items()},
    }


def seed_fault(fault: str) -> type[RerankModule]:
    """Return the module with a fault that the tests must detect; for an empty `fault`, the module without a fault."""

    class Faulty(Recorded):
        def micro_batch_loss(self, batch):
            loss = super().micro_batch_loss(batch)
            return (
                loss / batch.share if fault == "share" else loss / self.trainer.world_size if fault == "world" else loss
            )

        def _seed_dropout(self, step, micro_batch):
            super()._seed_dropout(step, micro_batch)
            if fault == "masks":  # the masks then depend on the micro-batch
                self.scorer.encoder.dropout_seed = None

        def _gradient_sync(self, only_if):
            return super()._gradient_sync(only_if=False if fault == "sync" else only_if)

    return Faulty if fault else Recorded


def run_jobs(job_type: Any, train: Any) -> None:
    """Run the jobs of a JSON file one after another in every process; the first process writes the results."""
    jobs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    results = {name: train(job_type(**job)) for name, job in jobs.items()}
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(results, out)


if __name__ == "__main__":
    run_jobs(Job, train)
