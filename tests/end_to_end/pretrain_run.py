"""Small pretrainings under different hardware layouts, run by test_pretrain.py in one or two processes."""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from transformers import BertModel

from ranker.data.memory_store import MemoryStore
from ranker.data.text_encoder import TextEncoder
from ranker.encoders.encoder import Encoder
from ranker.encoders.tiny import tiny_config, tiny_tokenizer
from ranker.pretraining.objectives.body_first import BodyFirst
from ranker.pretraining.objectives.electra import ELECTRA
from ranker.pretraining.objectives.inverse_cloze import InverseCloze
from ranker.pretraining.objectives.mlm import MLM
from ranker.pretraining.objectives.prop import PROP
from ranker.pretraining.steps import PretrainData
from ranker.pretraining.texts import Texts
from ranker.training.options import Optimization
from ranker.training.schedules import linear

spec = importlib.util.spec_from_file_location("invariance_run", Path(__file__).with_name("invariance_run.py"))
invariance_run = importlib.util.module_from_spec(spec)
sys.modules.setdefault("invariance_run", invariance_run)
spec.loader.exec_module(invariance_run)

OBJECTIVES = {
    "mlm": MLM,
    "electra": ELECTRA,
    "prop": PROP,
    "inverse_cloze": lambda: InverseCloze(pooling="mean"),
    "body_first": lambda: BodyFirst(first=1, pooling="cls"),
}
WORDS = [
    "rain",
    "snow",
    "wind",
    "sun",
    "cloud",
    "storm",
    "fog",
    "hail",
    "frost",
    "heat",
    "cold",
    "warm",
    "dry",
    "wet",
    "day",
    "night",
    "week",
    "year",
]


@dataclass
class Job:
    """One pretraining in float64 with dropout."""

    objective: str
    devices: int = 1
    max_tokens: int | None = None
    fault: str = ""


def docs() -> dict[str, str]:
    """Return eleven docs of 1 to 4 sentences; 9 or 10 docs have several sentences, so the last step has one group."""
    sentence = lambda i, j: " ".join(WORDS[(3 * i + 5 * j + k * (i + 2)) % 18] for k in range(4 + (i + j) % 5)) + "."  # noqa: E731
    return {f"d{i}": " ".join(sentence(i, j) for j in range(1 + (i + 1) % 4)) for i in range(11)}


def train(job: Job) -> dict[str, Any]:
    """Run the pretraining of a job; return losses and weights."""
    pl.seed_everything(1, verbose=False)
    config = tiny_config(dim=16)
    config.hidden_dropout_prob, config.attention_probs_dropout_prob = 0.1, 0.0
    encoder = Encoder(BertModel(config, add_pooling_layer=False), tiny_tokenizer())
    objective: Any = OBJECTIVES[job.objective]()
    model = objective.model(encoder).train()
    store = MemoryStore(TextEncoder(encoder.tokenizer, 1000), docs())
    texts = Texts(store, encoder.tokenizer, 40, 12, seed=5).fitting(512, objective.pairs)
    data = PretrainData(objective.draws(texts), 4, job.max_tokens, seed=3)
    module = objective.module(
        model,
        optimization=Optimization(
            lambda groups: torch.optim.AdamW(groups, lr=3e-3), lambda step, total: linear(step, total, warmup=2)
        ),
    ).double()
    recorded: list[float] = []
    check = module._is_finite
    module._is_finite = lambda seen: recorded.append(seen[0].item()) or check(seen)
    if job.fault == "share":  # each micro-batch then divides by its own count
        loss = module.micro_batch_loss
        module.micro_batch_loss = lambda batch: loss(batch) * batch.hidden.of_step / len(batch.hidden.words)
    trainer = invariance_run.small_trainer(job.devices, max_epochs=2, precision="64-true")
    trainer.fit(module, datamodule=data)
    return {"losses": recorded, "weights": {key: value.clone() for key, value in model.state_dict().items()}}


if __name__ == "__main__":
    invariance_run.run_jobs(Job, train)
