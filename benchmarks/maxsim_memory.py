"""Peak memory of ColBERT's training and re-ranking for several batch.queries. MaxSim never stores all similarities.

python benchmarks/maxsim_memory.py [--queries 64 256 1024] [--docs 8] [--tokens 64] [--max-tokens 4096]
Each row is a separate process that runs one optimizer step, or scores the candidates of as many queries, with generated
texts. The result is the peak resident memory minus the resident memory before the step. `whole step` is the size of one
float32 tensor [queries, docs, query tokens, doc tokens], with the docs of each query, or with the docs of all queries
(in-batch negatives).
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from one_line import one_line

QUERY_TOKENS = 32
MODES = {"train": "own docs", "in-batch": "in-batch negatives", "rerank": "re-ranking"}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(mode: str, queries: int, docs: int, tokens: int, max_tokens: int) -> dict[str, float]:
    """Run one step in this process; return MiB and seconds."""
    import lightning.pytorch as pl
    import torch
    from transformers import BertModel

    from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs, Splits
    from ranker.data.datamodule import RankData
    from ranker.data.options import BatchOptions, TrainDocs
    from ranker.data.scorer_inputs import ScorerInputs, TextLimits
    from ranker.encoders.encoder import Encoder
    from ranker.encoders.tiny import tiny_config, tiny_tokenizer
    from ranker.evaluation.scoring import Devices, score_collection
    from ranker.losses.lce import LCE
    from ranker.models.colbert import ColBERT
    from ranker.training.contrastive_module import ContrastiveModule
    from ranker.training.options import Optimization
    from ranker.training.rerank_module import RerankModule

    torch.set_num_threads(1)
    rng = random.Random(0)
    words = [first + second for first in "bcdfgklmnprst" for second in ("ab", "el", "ir", "om", "un")]
    text = lambda count: " ".join(rng.choices(words, k=count))  # noqa: E731
    corpus = MemoryDocs(Doc(f"d{i}", text(tokens)) for i in range(docs * queries))
    run = {f"q{i}": {f"d{docs * i + j}": float(-j) for j in range(docs)} for i in range(queries)}
    qrels = {f"q{i}": {f"d{docs * i}": 1} for i in range(queries)}
    collection = Collection(
        "generated", corpus, {f"q{i}": text(12) for i in range(queries)}, qrels, Candidates.from_run(run)
    )
    scorer = ColBERT(
        Encoder(BertModel(tiny_config(dim=64), add_pooling_layer=False), tiny_tokenizer()),
        projection=128,
        query_length=QUERY_TOKENS,
    )
    with tempfile.TemporaryDirectory() as cache:
        data = RankData(
            Splits(collection, None, {"generated": collection}),
            ScorerInputs.of(scorer),
            BatchOptions(queries=queries, docs=docs, max_tokens=max_tokens),
            TextLimits(32, tokens),
            depth=docs,
            cache_dir=cache,
            train_docs=TrainDocs(in_batch=mode == "in-batch"),
        )
        module_class = ContrastiveModule if mode == "in-batch" else RerankModule
        module = module_class(
            scorer,
            ["nDCG@10"],
            loss=LCE(),
            optimization=Optimization(lambda groups: torch.optim.SGD(groups, lr=0.1), lambda step, total: 1.0),
        )
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
        )
        data.train_steps() if mode != "rerank" else data.score_batches(collection)  # this builds the token stores
        before, started = resident(), time.perf_counter()
        if mode == "rerank":
            score_collection(scorer, data.score_batches(collection), Devices(torch.device("cpu")))
        else:
            trainer.fit(module, datamodule=data)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"added_mib": (peak - before) / 2**20, "peak_mib": peak / 2**20, "seconds": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--docs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("RESULT " + json.dumps(measure(args.one[0], int(args.one[1]), args.docs, args.tokens, args.max_tokens)))
        return
    print(
        f"{args.docs} docs of {args.tokens + 3} tokens per query, queries of {QUERY_TOKENS} tokens, "
        f"batch.max_tokens={args.max_tokens}"
    )
    print("| what | batch.queries | added MiB | whole step, MiB | s |\n| --- | --- | --- | --- | --- |")
    for mode in args.modes:
        for queries in args.queries:
            command = [
                sys.executable,
                __file__,
                "--one",
                mode,
                str(queries),
                "--docs",
                str(args.docs),
                "--tokens",
                str(args.tokens),
                "--max-tokens",
                str(args.max_tokens),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])
            line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
            result = json.loads(line.removeprefix("RESULT "))
            pairs = queries * args.docs * (queries if mode == "in-batch" else 1)
            whole = 4 * pairs * QUERY_TOKENS * (args.tokens + 3) / 2**20
            print(
                f"| {MODES[mode]} | {queries} | {result['added_mib']:.0f} | {whole:,.0f} | {result['seconds']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    one_line(main)
