"""Results of the demo: nDCG@10 on the built-in test queries over BM25's top 20 and top 100, for seeds and ablations.

    python benchmarks/demo.py --seeds 0 1 2                       # the demo itself
    python benchmarks/demo.py --variants dropout pooler both      # the ablation

Each training is `python train.py` with the overrides of its variant. The result over the top 20 comes from the same run
file, without the docs outside of BM25's top 20. It equals re-ranking only the top 20, because a cross-encoder scores
each pair independently.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

from one_line import one_line

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

VARIANTS = {
    "default": [],
    "dropout": ["encoder.dropout=0.1", "encoder.attention_dropout=0.1"],
    "pooler": ["model.pooler=true"],
    "both": ["encoder.dropout=0.1", "encoder.attention_dropout=0.1", "model.pooler=true"],
}


def train(variant: str, seed: int, out: Path, extra: list[str]) -> dict[str, float]:
    """Train once; return measures and times."""
    folder = out / f"{variant}-{seed}"
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(ROOT / "train.py"),
        f"hydra.run.dir={folder}",
        f"seed={seed}",
        "trainer.enable_progress_bar=false",
    ]
    subprocess.run(
        [*command, *VARIANTS[variant], *extra],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    result = json.loads((folder / "result.json").read_text())
    return {
        "top 20": top_20(folder),
        "top 100": result["measures"]["cwe"]["nDCG@10"],
        "train seconds": result["train_seconds"],
        "all seconds": result["seconds"],
        "pairs/s": result["pairs_per_second"],
    }


def top_20(folder: Path) -> float:
    """Return nDCG@10 of the run after its restriction to BM25's top 20."""
    from ranker.data.sources.cwe import CWE
    from ranker.data.trec import read_run
    from ranker.evaluation.metrics import evaluate
    from ranker.retrieval.first_stage import with_candidates

    tests = with_candidates(CWE().load(), 100, ROOT / ".cache").tests["cwe"]
    run = read_run(folder / "evaluation" / "cwe" / "run.trec")
    first = {query: set(tests.candidates[query][:20]) for query in run}
    cut = {query: {doc: score for doc, score in docs.items() if doc in first[query]} for query, docs in run.items()}
    return evaluate(cut, tests.qrels, ["nDCG@10"]).means["nDCG@10"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=["default"], choices=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark-demo"))
    parser.add_argument("extra", nargs="*", help="further overrides for every training")
    args = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')}", flush=True)
    for variant in args.variants:
        rows = []
        for seed in args.seeds:
            rows.append(train(variant, seed, args.out.resolve(), args.extra))
            print(variant, seed, {key: round(value, 4) for key, value in rows[-1].items()}, flush=True)
        print(variant, "mean", {key: round(mean(row[key] for row in rows), 4) for key in rows[0]}, flush=True)


if __name__ == "__main__":
    one_line(main)
