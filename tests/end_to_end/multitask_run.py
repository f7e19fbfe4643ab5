"""Small multitask trainings under different hardware layouts, run by test_multitask_invariance.py."""

import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from transformers import BertModel

from ranker.data.collection import Splits
from ranker.data.datamodule import RankData
from ranker.data.options import BatchOptions
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.encoders.encoder import Encoder
from ranker.encoders.tiny import tiny_config, tiny_tokenizer
from ranker.losses.ranknet import RankNet
from ranker.multitask import module as multitask_module
from ranker.multitask.datamodule import TaskData
from ranker.multitask.module import MultitaskModule
from ranker.multitask.multitask import Multitask
from ranker.multitask.options import TaskLabels, TaskSampling, TaskWeighting
from ranker.training.options import Optimization
from ranker.training.schedules import linear

spec = importlib.util.spec_from_file_location("invariance_run", Path(__file__).with_name("invariance_run.py"))
invariance_run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(invariance_run)

CASES: dict[str, tuple[TaskSampling, TaskWeighting]] = {
    "log_k": (TaskSampling(main_fraction=0.6), TaskWeighting()),
    "guard and uncertainty": (TaskSampling(main_fraction=0.5), TaskWeighting(mode="uncertainty", surgery="guard")),
    "pcgrad and gradnorm": (
        TaskSampling(mode="annealed", main_fraction=None),
        TaskWeighting(mode="gradnorm", surgery="pcgrad"),
    ),
    "one task a step": (TaskSampling(composition="homogeneous", main_fraction=0.5), TaskWeighting(mode="row_mean")),
}


@dataclass
class Job:
    """One training."""

    cache: str
    case: str
    devices: int = 1
    max_tokens: int = 100_000
    fault: str = ""


class Recorded(MultitaskModule):
    """Store losses and task losses of each step in full precision."""

    def _is_finite(self, seen) -> bool:
        self.kept.append(seen[0].item())
        return super()._is_finite(seen)

    def _log_tasks(self, step, losses, gradients) -> None:
        self.kept_tasks.append(losses.tolist())
        super()._log_tasks(step, losses, gradients)


class OwnMeans(Recorded):
    """A fault: every micro-batch takes the mean over its own targets."""

    def task_losses(self, batch):
        heads = tuple(replace(own, num_targets=len(own.labels)) for own in batch.heads)
        return super().task_losses(replace(batch, heads=heads))


class Apart(multitask_module.Gradients):
    """A fault: gradients are not summed over devices."""

    def sum_over_devices(self) -> None:
        """Do nothing."""


def spans_file(cache: Path, collection) -> Path:
    """Write the labels of a task that classifies words as short or long; return the file."""
    records = []
    for query_id, text in collection.queries.items():
        doc = collection.docs[f"d{6 * int(query_id[1:])}"].text
        word = doc.split()[0]
        spans = [(0, len(word)), (len(doc) - len(doc.split()[-1]), len(doc))]
        records.append(
            {
                "info": {"qid": query_id, "pid": "d"},
                "input": {"query": text, "passage": doc},
                "targets": [
                    {"span1": {"side": "doc", "start": a, "end": b}, "label": "long" if b - a > 3 else "short"}
                    for a, b in spans
                ],
            }
        )
    path = cache / "spans.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def made(job: Job) -> tuple[Multitask, TaskData]:
    """Return the model and the data of a job."""
    groups = invariance_run.collection(9)  # steps of 4, 4 and 1 groups
    cache = Path(job.cache)
    heads = [
        {"task": "bm25", "layer": 1, "options": {"bins": 4}},
        {"task": "tf", "layer": [0, 1, 2], "regression": True, "weight": 2.0},
        {
            "task": "jsonl",
            "name": "words",
            "layer": "last",
            "classes": ["short", "long"],
            "options": {"path": str(cache / "spans.jsonl")},
        },
    ]
    config = tiny_config(dim=16)
    config.hidden_dropout_prob, config.attention_probs_dropout_prob = 0.1, 0.0
    scorer = Multitask(
        Encoder(BertModel(config, add_pooling_layer=False), tiny_tokenizer()), heads=heads, head_hidden=8
    )
    ranking = RankData(
        Splits(groups, None, {}),
        ScorerInputs.of(scorer),
        BatchOptions(queries=4, docs=5, positives=2, max_tokens=job.max_tokens),
        TextLimits(16, 64),
        seed=3,
        cache_dir=job.cache,
    )
    data = TaskData(
        ranking, scorer.auxiliary_tasks(), TaskLabels(docs_per_query=3), sampling=CASES[job.case][0], max_epochs=2
    )
    return scorer, data


def train(job: Job) -> dict[str, Any]:
    """Run the training of a job; return losses of steps and tasks, and the state dict with learned task weights."""
    pl.seed_everything(1, verbose=False)
    scorer, data = made(job)
    module = (OwnMeans if job.fault == "own means" else Recorded)(
        scorer,
        ["nDCG@10"],
        weighting=CASES[job.case][1],
        loss=RankNet(),
        optimization=Optimization(
            lambda groups: torch.optim.AdamW(groups, lr=3e-3), lambda step, total: linear(step, total, warmup=2)
        ),
    ).double()
    module.kept, module.kept_tasks = [], []
    trainer = invariance_run.small_trainer(job.devices, max_epochs=2, precision="64-true", log_every_n_steps=1)
    whole = multitask_module.Gradients
    multitask_module.Gradients = Apart if job.fault == "no sum" else whole
    try:
        trainer.fit(module, datamodule=data)
    finally:
        multitask_module.Gradients = whole
    state = {key: value.clone() for key, value in module.state_dict().items()}
    return {"losses": module.kept, "tasks": module.kept_tasks, "weights": state}


if __name__ == "__main__":
    invariance_run.run_jobs(Job, train)
