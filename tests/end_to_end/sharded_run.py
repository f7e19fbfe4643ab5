"""Small trainings that test_sharding.py runs in two processes with sharded weights, and in one process without."""

import importlib.util
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as collectives

from ranker.data.collection import Splits
from ranker.data.datamodule import RankData
from ranker.data.options import BatchOptions
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.encoders.encoder import Encoder
from ranker.encoders.loading import load_encoder
from ranker.losses.ranknet import RankNet
from ranker.models.lm_reranker import LMReranker
from ranker.models.monobert import MonoBERT
from ranker.training.options import Optimization
from ranker.training.schedules import linear
from ranker.training.sharding import ShardedStrategy

spec = importlib.util.spec_from_file_location("invariance_run", Path(__file__).with_name("invariance_run.py"))
invariance_run = importlib.util.module_from_spec(spec)
sys.modules.setdefault("invariance_run", invariance_run)
spec.loader.exec_module(invariance_run)

SCORERS = {
    "monobert": lambda checkpointing: MonoBERT(load_encoder("tiny", None, None, 0.1, 0.0, checkpointing=checkpointing)),
    "lm": lambda checkpointing: LMReranker(
        load_encoder("tiny_lm", checkpointing=checkpointing), prompt="{query} {doc} ?"
    ),
}


@dataclass
class Job:
    """One training in float64 (Lightning does not convert weights), with gradients clipped far below their norm."""

    cache: str
    model: str = "monobert"
    devices: int = 1
    max_tokens: int = 100_000
    checkpointing: bool = False
    optimizer: str = "sgd"
    fault: str = ""


class Recorded(invariance_run.Recorded):
    """Count gathers and reductions of each step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.losses: list[float] = []
        self.counts: list[dict[str, int]] = []

    def training_step(self, step: Any, step_idx: int) -> None:
        before = Counter(COUNTED)
        super().training_step(step, step_idx)
        self.counts.append(dict(COUNTED - before))

    def _is_finite(self, seen: Any) -> bool:
        self.losses.append(seen[0].item())
        return super()._is_finite(seen)


COUNTED: Counter[str] = Counter()


def counted(name: str) -> None:
    """Count the calls of a function of torch that sends weights or gradients."""
    function = getattr(collectives, name)

    def call(*args: Any, **options: Any) -> Any:
        COUNTED[name] += 1
        return function(*args, **options)

    setattr(collectives, name, call)


def train(job: Job) -> dict[str, Any]:
    """Run the training of a job; return losses, weights, measures and counts of collectives."""
    pl.seed_everything(1, verbose=False)
    groups = invariance_run.collection(9)  # steps of 4, 4 and 1 groups: in the third, one of two processes has no group
    scorer: Any = SCORERS[job.model](job.checkpointing)
    for encoder in scorer.modules():
        if isinstance(encoder, Encoder):
            encoder.run_by_transformers()
    options = BatchOptions(queries=4, docs=5, positives=2, max_tokens=job.max_tokens)
    data = RankData(
        Splits(groups, groups, {}), ScorerInputs.of(scorer), options, TextLimits(16, 64), seed=3, cache_dir=job.cache
    )
    make = (lambda groups: torch.optim.SGD(groups, lr=0.3)) if job.optimizer == "sgd" else (
        lambda groups: torch.optim.AdamW(groups, lr=3e-3, fused=job.optimizer == "fused"))  # fmt: skip
    clip = None if job.fault == "clip" else 0.05
    module = Recorded(
        scorer, ["nDCG@10", "RR"], loss=RankNet(),
        optimization=Optimization(make, lambda step, total: linear(step, total, warmup=2), max_norm=clip),
    ).double()  # fmt: skip
    trainer = invariance_run.small_trainer(1, max_epochs=2, precision="32-true") if job.devices == 1 else pl.Trainer(
        accelerator="cpu", devices=job.devices, strategy=ShardedStrategy(process_group_backend="gloo"), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, inference_mode=False,
        use_distributed_sampler=False, num_sanity_val_steps=0, max_epochs=2, precision="32-true",
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    weights = trainer.strategy.lightning_module_state_dict()
    return {
        "losses": module.losses,
        "counts": module.counts,
        "val": {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val/")},
        "weights": {key: value.clone() for key, value in weights.items()},
        "sharded": sum(type(weight).__name__ == "DTensor" for weight in module.parameters()),
    }


if __name__ == "__main__":
    for name in ("foreach_all_gather", "foreach_reduce"):
        counted(name)
    invariance_run.run_jobs(Job, train)
