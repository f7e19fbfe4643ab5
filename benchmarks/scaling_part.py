"""One part of scaling.py on one number of devices; each process writes its results to `OUT.RANK`.

The argument is a JSON object with the fields of `Part`. Output lines that begin with `@` report progress. Shortly
before the time limit, each process writes its stack to the log, which shows where it hangs.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import sys
import time
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.strategies import DDPStrategy
from transformers import BertModel

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from one_line import one_line  # noqa: E402
from rerank_throughput import Clock  # noqa: E402
from train_throughput import DOCS, collection, config_of, tokenizer  # noqa: E402

from ranker.data.collection import Collection, Splits  # noqa: E402
from ranker.data.datamodule import RankData  # noqa: E402
from ranker.data.options import BatchOptions, TrainDocs  # noqa: E402
from ranker.data.scorer_inputs import ScorerInputs, TextLimits  # noqa: E402
from ranker.data.trec import write_run  # noqa: E402
from ranker.encoders.encoder import Encoder  # noqa: E402
from ranker.encoders.execution import Execution  # noqa: E402
from ranker.evaluation.scoring import Devices, score_collection  # noqa: E402
from ranker.losses.lce import LCE  # noqa: E402
from ranker.models.colbert import ColBERT  # noqa: E402
from ranker.models.dpr import DPR  # noqa: E402
from ranker.models.monobert import MonoBERT  # noqa: E402
from ranker.retrieval.encode import Device, encode_queries  # noqa: E402
from ranker.retrieval.pipeline import EncodeOptions, encode_sets  # noqa: E402
from ranker.training.checkpoint_files import WholeFiles  # noqa: E402
from ranker.training.checkpointing import SaveLast  # noqa: E402
from ranker.training.contrastive_module import ContrastiveModule  # noqa: E402
from ranker.training.options import Optimization  # noqa: E402
from ranker.training.rerank_module import RerankModule  # noqa: E402
from ranker.training.throughput import Throughput, peak_memory_bytes  # noqa: E402

STARTED = time.perf_counter()
STEPS = 20  # number of steps whose losses are compared
SMALL, LARGE = "small", "large"  # collections for the comparison of results, and for speed
PRECISIONS = {"float32": "32-true", "bf16": "bf16-mixed"}
SCORERS: dict[str, Any] = {
    "monobert": MonoBERT,
    "dpr": DPR,
    "colbert": partial(ColBERT, query_prompt="[Q]", doc_prompt="[D]"),
}


@dataclass(frozen=True)
class Part:
    """The job of one part.

    Args:
        what: The job: prepare, losses, speed, evaluate or encode.
        devices: Number of devices.
        model: monobert, dpr or colbert; the last two with the docs of a step's other queries as negatives.
        size: Size of the random BERT, as in train_throughput.py.
        pairs: Pairs per step and device, for speed.
        max_tokens: Token budget of a micro-batch, for speed.
        steps: Optimizer steps, for speed.
        exact_pairs: Pairs per step over all devices, for losses.
        exact_tokens: Token budget of a micro-batch, for losses.
        graphs: Whether training passes are replayed as CUDA graphs, see `Execution`.
        groups: Query groups of the large collection.
        queries: Number of queries of the large collection that are evaluated.
        folder: Folder of collections, token stores, runs and vectors.
        out: Prefix of the result files.
        seconds: Time limit of the part.
        dump_at: Time at which each process writes its stack, as time.time().
    """

    what: str
    devices: int
    model: str
    size: str
    pairs: int
    max_tokens: int
    steps: int
    exact_pairs: int
    exact_tokens: int
    graphs: bool | str
    groups: int
    queries: int
    folder: str
    out: str
    seconds: float
    dump_at: float

    def file(self, name: str) -> Path:
        """Return the path of a file or folder of this part."""
        return Path(self.folder) / f"{self.model}-{self.what}-{self.devices}-{name}"


def rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def say(text: str) -> None:
    print(f"@ rank {rank()}, {time.perf_counter() - STARTED:.0f} s: {text}", flush=True)


class Progress(pl.Callback):
    """Print the progress of a training."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.last_report = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Print the first steps, which compile, and then one step every ten seconds."""
        if batch_idx < 3 or time.perf_counter() - self.last_report > 10:
            self.last_report = time.perf_counter()
            say(f"step {batch_idx + 1} done")


class Losses(Progress):
    """Store the loss of each step. Reading it waits for the device, so this callback is not used to measure speed."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Store the loss."""
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        self.losses.append(float(trainer.callback_metrics["train/loss"]))


def load(part: Part, name: str) -> Collection:
    """Read a collection that `prepare` wrote."""
    with (Path(part.folder) / f"{name}.pickle").open("rb") as file:
        found = pickle.load(file)
    say(f"{name} collection read: {len(found.docs)} docs")
    return found


def scorer_of(part: Part, dropout: bool) -> Any:
    """Return a random scorer, the same in every process."""
    config = config_of(part.size)
    if not dropout:
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    torch.manual_seed(0)
    execution = Execution(graphs=part.graphs)
    encoder = Encoder(BertModel(config, add_pooling_layer=False), tokenizer(part.size), execution)
    return SCORERS[part.model](encoder)


def data_of(part: Part, scorer: Any, splits: Splits, pairs: int, max_tokens: int) -> RankData:
    layouts = scorer.layouts() if scorer.reads == "texts" else None
    return RankData(
        splits,
        ScorerInputs(scorer.encoder.tokenizer, scorer.reads, 512, layouts),
        BatchOptions(
            queries=pairs // DOCS, docs=DOCS, max_tokens=max_tokens, workers=4 if torch.cuda.is_available() else 0
        ),
        TextLimits(64, 256),
        cache_dir=Path(part.folder) / "tokens",
        train_docs=TrainDocs(in_batch=scorer.reads == "texts"),
    )


def trainer_of(part: Part, precision: str, *callbacks: pl.Callback, max_steps: int = -1) -> pl.Trainer:
    """Return a trainer like that of assembly/trainer.py, but a process that lost the others ends with the part."""
    several = DDPStrategy(
        broadcast_buffers=False, gradient_as_bucket_view=True, timeout=timedelta(seconds=part.seconds)
    )
    return pl.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=part.devices,
        strategy=several if part.devices > 1 else "auto",
        precision=PRECISIONS[precision],
        max_steps=max_steps,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(callback, SaveLast) for callback in callbacks),
        plugins=[WholeFiles()],
    )


def fit(
    part: Part, precision: str, data: Collection, pairs: int, max_tokens: int, steps: int, exact: bool
) -> dict[str, Any]:
    """Train; return losses if `exact`, else throughput."""
    scorer = scorer_of(part, dropout=not exact)
    kind = ContrastiveModule if scorer.reads == "texts" else RerankModule
    make: Any = (
        (lambda groups: torch.optim.SGD(groups, lr=0.01))
        if exact
        else (lambda groups: torch.optim.AdamW(groups, lr=1e-5, fused=True))
    )
    options = Optimization(make, lambda step, total: 1.0, total_steps=steps)
    module = kind(scorer, ["nDCG@10"], loss=LCE(), optimization=options)
    progress, throughput = Losses() if exact else Progress(), Throughput()
    say(f"{precision}: {steps} steps of {pairs} pairs")
    # this program's checkpoint callback, which also handles signals; here it writes only at the end
    last = SaveLast(part.file("checkpoints") / "last.ckpt", every_steps=10**9)
    trainer = trainer_of(part, precision, progress, *([] if exact else [throughput, last]), max_steps=steps)
    trainer.fit(module, datamodule=data_of(part, scorer, Splits(data, None, {}), pairs, max_tokens))
    return {"losses": progress.losses} if exact else throughput.report()


def prepare(part: Part) -> dict[str, Any]:
    """Build collections and token stores once, so that the processes of other parts need not."""
    for name, groups in ((SMALL, part.exact_pairs // DOCS * STEPS), (LARGE, part.groups)):
        made = collection(groups, seed=len(name))
        say(f"{name} collection: {groups} queries, {len(made.docs)} docs")
        scorer = scorer_of(replace(part, size="tiny"), dropout=True)
        data_of(part, scorer, Splits(None, None, {}), part.pairs, part.max_tokens).collator(made)
        with (Path(part.folder) / f"{name}.pickle").open("wb") as file:
            pickle.dump(made, file)
    return {}


def losses(part: Part) -> dict[str, Any]:
    """Compute the losses of the first steps: SGD, no dropout, the same steps for any number of devices."""
    data = load(part, SMALL)
    return {
        precision: fit(part, precision, data, part.exact_pairs, part.exact_tokens, STEPS, exact=True)["losses"]
        for precision in PRECISIONS
    }


def speed(part: Part) -> dict[str, Any]:
    """Measure training speed with this program's settings: bf16 on GPUs, AdamW, as many pairs on every device."""
    precision = "bf16" if torch.cuda.is_available() else "float32"
    return fit(part, precision, load(part, LARGE), part.pairs * part.devices, part.max_tokens, part.steps, exact=False)


def fabric_of(part: Part, precision: str) -> Fabric:
    """Launch the processes of this part; return their Fabric. A process that lost the others ends with the part."""
    several = FabricDDP(timeout=timedelta(seconds=part.seconds))
    fabric = Fabric(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=part.devices,
        precision=PRECISIONS[precision],  # type: ignore[arg-type]
        strategy=several if part.devices > 1 else "auto",
    )
    fabric.launch()
    return fabric


def evaluate(part: Part) -> dict[str, Any]:
    """Score all candidates, gather one run, and write the run."""
    found = {}
    for precision, name, most in (("float32", SMALL, None), ("bf16", LARGE, part.queries)):
        data = load(part, name)
        data = replace(data, qrels=dict(list(data.qrels.items())[:most]))
        scorer = scorer_of(part, dropout=False)
        say(f"{precision}: {len(data.qrels)} queries of {DOCS} docs")
        loaders = data_of(
            part,
            scorer,
            Splits(None, None, {"generated": data}),
            part.pairs,
            part.exact_tokens if most is None else part.max_tokens,
        )
        devices = Devices.of_fabric(fabric_of(part, precision))
        batches = loaders.score_batches(data, devices.rank, devices.world_size)
        clock = Clock(scorer, len(batches))
        run = score_collection(scorer, batches, devices, loaders.batch_options.workers)
        if run is not None:
            say(f"one run of {len(run)} queries")
            write_run(part.file(f"{precision}.trec"), run)
        found[precision] = {"pairs": clock.pairs, "started": clock.started, "ended": clock.ended}
    return found


def encode(part: Part) -> dict[str, Any]:
    """Encode the docs of a collection as search.py does, in shards spread over the devices."""
    results = {}
    for precision, name in (("float32", SMALL), ("bf16", LARGE)):
        data = load(part, name)
        fabric = fabric_of(part, precision)
        scorer = scorer_of(part, dropout=False).to(fabric.device)
        loaders = data_of(part, scorer, Splits(None, None, {}), part.pairs, part.max_tokens)
        device = Device(
            fabric.device,
            fabric.autocast,
            fabric.global_rank,
            fabric.world_size,
            part.exact_tokens if name == SMALL else part.max_tokens,
        )
        collator = loaders.collator(data)
        encode_queries(scorer, collator, np.arange(min(len(data.queries), 8192)), device)  # this call compiles
        say(f"{precision}: {len(data.docs)} docs")
        options = EncodeOptions(Path(part.folder), part.file(precision), shard_docs=max(1, -(-len(data.docs) // 64)))
        fabric.barrier()
        started = time.time()
        encode_sets(scorer, loaders, {"generated": data}, options, device, str(PRECISIONS[precision]))
        results[precision] = {"started": started, "ended": time.time()}
        fabric.barrier()
        say(f"{precision}: encoded")
    return results


def main() -> None:
    part = Part(**json.loads(sys.argv[1]))
    faulthandler.dump_traceback_later(max(1.0, part.dump_at - time.time()))
    warnings.filterwarnings("ignore")
    torch.backends.cuda.enable_cudnn_sdp(False)
    say(f"started, process {os.getpid()}")
    found = {"prepare": prepare, "losses": losses, "speed": speed, "evaluate": evaluate, "encode": encode}[part.what](
        part
    )
    found["memory"] = peak_memory_bytes()
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found["memory_on_card"] = total - free
    Path(f"{part.out}.{rank()}").write_text(json.dumps(found), encoding="utf-8")
    say("done")


if __name__ == "__main__":
    one_line(main)
