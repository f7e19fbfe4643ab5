"""Run the whole chain on one collection: BM25, monoBERT as teacher of DPR and ColBERT, mined negatives, a second round.

    python benchmarks/chain.py data=cwe
    python benchmarks/chain.py data=files data.path=../scifact

Each step is a command as a user would type it, and is printed before it runs. Finished steps are reused. The output
ends with a table of measures, latencies and index sizes.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from one_line import one_line  # noqa: E402

from ranker.assembly.data import load_source, text_limits  # noqa: E402
from ranker.checkpoint import load_scorer, read_description  # noqa: E402
from ranker.data.datamodule import RankData  # noqa: E402
from ranker.data.options import BatchOptions  # noqa: E402
from ranker.data.score_batches import ScoreBatches  # noqa: E402
from ranker.data.scorer_inputs import ScorerInputs  # noqa: E402
from ranker.retrieval.first_stage import with_candidates  # noqa: E402

MEASURES = ("nDCG@10", "AP@100", "RR@10", "R@100")


class Chain:
    """Run commands on one collection, each with its own folder in `out`."""

    def __init__(self, out: Path, training: list[str]) -> None:
        self.out, self.training = out, training

    def run(self, name: str, script: str, *arguments: str) -> Path:
        """Run a command unless its result exists; return its folder."""
        folder = self.out / name
        finished = {"train.py": "result.json", "evaluate.py": "evaluation", "search.py": "search.json"}[script]
        has_checkpoint = any(argument.startswith("checkpoint=") for argument in arguments)  # which has its own encoder
        extra = [
            override
            for override in self.training
            if script == "train.py" and not (has_checkpoint and override.startswith("encoder"))
        ]
        command = [script, *arguments, *extra, f"hydra.run.dir={folder}"]
        print("python", shlex.join(command), flush=True)
        if not (folder / finished).exists():
            command = [sys.executable, "-W", "ignore", str(ROOT / script), *command[1:]]
            if script != "search.py":
                command.append("trainer.enable_progress_bar=false")
            subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        return folder

    def scores(self, name: str, teacher: Path, *more: str) -> Path:
        """Score candidates and relevant docs of the training queries with the teacher; return the run file."""
        folder = self.run(
            name,
            "evaluate.py",
            f"checkpoint={teacher}",
            "split=train",
            "add_positives=true",
            "depth=30",
            "measures=[nDCG@10]",
            *more,
        )
        return folder / "evaluation/train+positives/run.trec"

    def search(self, name: str, *arguments: str) -> Path:
        """Search the whole collection; return the folder of the search."""
        return self.run(name, "search.py", *arguments)


def set_of(folder: Path) -> Path:
    """Return the evaluation folder of the only set of a run."""
    (evaluation,) = (folder / "evaluation").iterdir()
    return evaluation


def row(name: str, folder: Path, latency: dict[str, float], num_bytes: list[int]) -> str:
    """Return one line of the table.

    Args:
        name: First column.
        folder: Run folder with one evaluated set.
        latency: p50 and p95 of the time of a query, in milliseconds.
        num_bytes: Size of the index and size of the vectors.
    """
    measures = json.loads((set_of(folder) / "metrics.json").read_text())["measures"]
    numbers = [f"{measures[measure]:.3f}" for measure in MEASURES] + [
        f"{latency[share]:.1f}" for share in ("p50", "p95")
    ]
    sizes = [f"{size / 2**20:.1f}" if size else "" for size in num_bytes]
    return f"| {name} | " + " | ".join([*numbers, *sizes]) + " |"


def rerank_latency(folder: Path, queries: int = 50) -> dict[str, float]:
    """Return p50 and p95 of the milliseconds in which a cross-encoder ranks one query's candidates, without BM25."""
    trained = OmegaConf.create(read_description(folder))
    scorer = load_scorer(folder).eval()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scorer.to(device)
    splits = with_candidates(load_source(trained.data), trained.depth, ROOT / ".cache")
    (collection,) = splits.tests.values()
    data = RankData(
        splits,
        ScorerInputs(scorer.encoder.tokenizer, scorer.reads, scorer.encoder.max_tokens),
        BatchOptions(),
        text_limits(scorer, trained),
        depth=trained.depth,
        cache_dir=ROOT / ".cache",
    )
    collator, spent = data.collator(collection), []
    for query_id in list(collection.qrels)[: queries + 2]:
        batches = ScoreBatches(
            replace(collection, qrels={query_id: collection.qrels[query_id]}), trained.depth, collator, 65536
        )
        started = time.perf_counter()
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            for i in range(len(batches)):
                scorer(batches[i].batch.to(device)).tolist()
        spent.append(1000 * (time.perf_counter() - started))
    del spent[:2]  # these queries were the warm-up
    return {f"p{share}": float(np.percentile(spent, share)) for share in (50, 95)}


def searched(chain: Chain, label: str, name: str, *arguments: str) -> tuple[Path, str]:
    """Search; return the folder and a line of the table."""
    folder = chain.search(name, *arguments)
    (cost,) = (value for key, value in json.loads((folder / "search.json").read_text()).items() if key != "mined")
    return folder, row(label, folder, cost["latency_ms"], [cost["index_bytes"], cost["vector_bytes"]])


def taught(chain: Chain, model: str, data: list[str], teacher: Path, scores: Path) -> list[str]:
    """Train both rounds of a bi-encoder; return their lines of the table."""
    first = chain.run(f"{model}-1", "train.py", f"experiment=taught_{model}", *data, f"data.teacher={scores}")
    mining = ("mine=train", "mining.count=20", "mining.last=50")
    mined, one = searched(chain, f"{model}, first round", f"{model}-1-search", f"checkpoint={first}", *mining)
    again = chain.scores(f"{model}-teacher", teacher, f"candidates={mined / 'negatives.trec'}")
    second = chain.run(
        f"{model}-2", "train.py", f"experiment=taught_{model}", *data, f"checkpoint={first}", f"data.teacher={again}",
        f"data.negatives={mined / 'negatives.trec'}", "trainer.max_epochs=2",
    )  # fmt: skip
    return [one, searched(chain, f"{model}, second round", f"{model}-2-search", f"checkpoint={second}")[1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/chain"))
    parser.add_argument("--training", nargs="*", default=[], help="further overrides for every training")
    parser.add_argument(
        "--at-once",
        action="store_true",
        help="train both bi-encoders at the same time; this disturbs the latencies",
    )
    parser.add_argument("data", nargs="+", help="data=... and its keys")
    args = parser.parse_args()
    chain = Chain(args.out.resolve(), args.training)
    rows = [searched(chain, "BM25", "bm25", "model=bm25", *args.data)[1]]
    teacher = chain.run("monobert", "train.py", "model=monobert", *args.data)
    rows.append(row("monoBERT over BM25's top 100", teacher, rerank_latency(teacher), [0, 0]))
    scores = chain.scores("teacher", teacher)
    with ThreadPoolExecutor(2 if args.at_once else 1) as pool:
        for lines in pool.map(lambda model: taught(chain, model, args.data, teacher, scores), ("dpr", "colbert")):
            rows += lines
    print(
        "| | "
        + " | ".join(MEASURES)
        + " | ms a query, p50 | p95 | index, MiB | vectors, MiB |\n|"
        + " --- |" * (len(MEASURES) + 5)
    )
    print("\n".join(rows))


if __name__ == "__main__":
    one_line(main)
