"""Small trainings on three sets under different hardware layouts, run by test_mixed_invariance.py."""

import importlib.util
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from transformers import BertModel

from ranker.data.collection import Splits
from ranker.data.datamodule import RankData
from ranker.data.mixed_data import MixedData, MixedSet
from ranker.data.options import BatchOptions, TrainDocs
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.sources.mixed import Mixed
from ranker.encoders.encoder import Encoder
from ranker.encoders.tiny import tiny_config, tiny_tokenizer
from ranker.losses.lce import LCE
from ranker.losses.mse import MSE
from ranker.losses.ranknet import RankNet
from ranker.models.dpr import DPR
from ranker.models.monobert import MonoBERT
from ranker.models.splade import SPLADE
from ranker.training.contrastive_module import ContrastiveModule
from ranker.training.options import Optimization
from ranker.training.rerank_module import RerankModule
from ranker.training.schedules import linear
from ranker.training.set_losses import SetLosses
from ranker.training.sparse_module import SparseModule, Sparsity

spec = importlib.util.spec_from_file_location("sparse_run", Path(__file__).with_name("sparse_run.py"))
sparse_run = importlib.util.module_from_spec(spec)
sys.modules.setdefault("sparse_run", sparse_run)
spec.loader.exec_module(sparse_run)
invariance_run = sparse_run.invariance_run

CASES = ("mixed", "one_set", "in_batch", "sparse")


@dataclass
class Job:
    """One training."""

    cache: str
    case: str
    devices: int = 1
    max_tokens: int = 100_000
    fault: str = ""
    one_pass: bool = False


def made(job: Job) -> MixedData:
    """Return three sets: nine queries with judgements, five with a teacher's scores and shorter texts, four triples."""
    judged = invariance_run.collection(9)
    few = invariance_run.collection(5)
    taught = replace(few, queries={name: f"{text} bab" for name, text in few.queries.items()})
    triples = replace(few, triples=[(f"q{i}", f"d{6 * i}", f"d{6 * i + 1}") for i in range(4)])
    texts = job.case in ("in_batch", "sparse")
    teacher = Path(job.cache) / "teacher.trec"
    lines = [f"q{i} Q0 d{6 * i + j} {j + 1} {3.0 - j} t\n" for i in range(5) for j in range(4)]
    teacher.write_text("".join(lines))

    def data(collection, limits, seed, teacher=None):
        return RankData(
            Splits(collection, replace(collection, triples=None), {}),
            ScorerInputs(tiny_tokenizer(), "texts" if texts else "pairs", 512),
            BatchOptions(queries=4, docs=5, positives=2, max_tokens=job.max_tokens),
            limits,
            seed=seed,
            cache_dir=job.cache,
            train_docs=TrainDocs(teacher=teacher, in_batch=texts),
        )

    sets = {
        "judged": MixedSet(data(judged, TextLimits(16, 64), 3)),
        # a teacher has no scores for in-batch negatives
        "taught": MixedSet(data(taught, TextLimits(5, 9), 4, None if texts else teacher), weight=2.0),
        "triples": MixedSet(data(triples, TextLimits(16, 64, 40), 5), cap=3),
    }
    return MixedData(sets, Mixed({"a": 1}, 2.0, "mixed" if job.case == "mixed" else "one_set", 18))


class Recorded:
    """Store the losses of a step, of all groups and of each set, in full precision."""

    def _is_finite(self, seen) -> bool:
        self.kept.append(seen[0].item())
        self.kept_sets.append(seen[3:].tolist())
        return super()._is_finite(seen)


class RecordedModule(Recorded, RerankModule):
    """Compare each query with its own docs."""


class RecordedContrast(Recorded, ContrastiveModule):
    """Compare each query with all docs of its step."""


class RecordedSparse(Recorded, SparseModule):
    """Train with in-batch negatives and penalties; store the factor of the penalties at each step."""

    def penalties(self, queries, docs, step):
        found = super().penalties(queries, docs, step)
        self.kept_factors.append(self.factor.item())
        return found


class OnePass(Recorded, sparse_run.OnePass):
    """The reference: penalties by autograd over one forward pass."""


class EqualSets(SetLosses):
    """A fault: each set has the same weight in a micro-batch, whatever its number of groups."""

    def of_batch(self, scores, batch, reference=None, seed=0):
        several = super().of_batch(scores, batch, reference, seed)
        return several * sum(batch.set_sizes) / max(batch.set_sizes)


def train(job: Job) -> dict[str, Any]:
    """Run the training of a job; return losses, validation measures, counts and weights."""
    pl.seed_everything(1, verbose=False)
    config = tiny_config(dim=16)
    config.hidden_dropout_prob, config.attention_probs_dropout_prob = 0.1, 0.0
    encoder = Encoder(BertModel(config, add_pooling_layer=False), tiny_tokenizer())
    texts = job.case in ("in_batch", "sparse")
    data = made(job)
    losses = (EqualSets if job.fault == "equal sets" else SetLosses)(
        {"judged": RankNet(), "taught": LCE() if texts else MSE(affine=True), "triples": LCE()}
    )
    kinds: dict[str, Any] = {"in_batch": RecordedContrast, "sparse": OnePass if job.one_pass else RecordedSparse}
    models: dict[str, Any] = {"in_batch": DPR, "sparse": SPLADE}
    penalties = {"sparsity": Sparsity("df_flops", 0.02, 0.05, penalty_warmup=1.0)} if job.case == "sparse" else {}
    module: Any = kinds.get(job.case, RecordedModule)(
        models.get(job.case, MonoBERT)(encoder),
        ["nDCG@10", "RR"],
        loss=losses,
        optimization=Optimization(
            lambda groups: torch.optim.AdamW(groups, lr=3e-3), lambda step, total: linear(step, total, warmup=2)
        ),
        **penalties,
    ).double()
    module.kept_factors = []
    module.kept, module.kept_sets = [], []
    trainer = invariance_run.small_trainer(job.devices, max_epochs=2, precision="64-true", log_every_n_steps=1)
    trainer.fit(module, datamodule=data)
    return {
        "losses": module.kept,
        "sets": module.kept_sets,
        "groups": losses.groups,
        "factors": module.kept_factors,
        "val": {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val/")},
        "weights": {key: value.clone() for key, value in module.state_dict().items()},
    }


if __name__ == "__main__":
    invariance_run.run_jobs(Job, train)
