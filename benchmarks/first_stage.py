"""Read, index and search generated docs with BM25: time, memory, and an estimate for MS MARCO's 8.8 million passages.

    python benchmarks/first_stage.py                      # one million docs of about 56 words in a plain docs.jsonl
    python benchmarks/first_stage.py --docs 100000 --queries 500

Words follow Zipf's law over 500,000 generated words. Lengths follow a gamma distribution. A query is the first six
words of a doc. Times are processor seconds of one thread. Memory is the process's peak resident memory, which includes
the mapped file.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from one_line import one_line

from ranker.data.corpus_files import JsonlDocs
from ranker.retrieval.bm25 import BM25

MS_MARCO_DOCS = 8_841_823
VOCABULARY = 500_000
BLOCK = 10_000


def words() -> np.ndarray:
    """Return pronounceable words by falling frequency; frequent words are short. String array [VOCABULARY]."""
    rng = np.random.default_rng(1)
    syllables = np.array([consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in "aeiou"], dtype=object)
    numbers = np.arange(VOCABULARY)
    short = syllables[numbers % 90] + syllables[numbers // 90 % 90]
    return np.where(
        numbers < 8100, short, short + syllables[rng.integers(0, 90, VOCABULARY)] + syllables[numbers // 8100 % 90]
    )


def write(path: Path, num_docs: int, mean_words: float) -> None:
    """Write `num_docs` docs of `mean_words` words on average as JSON lines."""
    rng, vocabulary = np.random.default_rng(0), words()
    weights = np.cumsum(1 / (np.arange(VOCABULARY) + 2.7))  # frequencies by the Zipf-Mandelbrot law
    with path.open("w") as file:
        for start in range(0, num_docs, BLOCK):
            lengths = np.maximum(1, rng.gamma(6, mean_words / 6, min(BLOCK, num_docs - start)).astype(int))
            drawn = vocabulary[np.searchsorted(weights, rng.random(int(lengths.sum())) * weights[-1])].tolist()
            ends = np.cumsum(lengths).tolist()
            for i, end in enumerate(ends):
                text = " ".join(drawn[end - lengths[i] : end])
                file.write(json.dumps({"id": str(start + i), "text": text}) + "\n")


def report(stage: str, seconds: float, per_doc: float) -> None:
    """Print seconds, an estimate for MS MARCO from the seconds per doc, and the peak of resident memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{stage:<28} {seconds:8.1f} s   MS MARCO: {per_doc * MS_MARCO_DOCS / 60:6.1f} min   peak {peak:5.2f} GiB",
        flush=True,
    )


def main() -> None:
    """Run the stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=int, default=1_000_000)
    parser.add_argument("--words", type=float, default=56.0, help="mean words per doc")
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--depth", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "docs.jsonl"
        write(path, options.docs, options.words)
        print(f"{options.docs} docs, {path.stat().st_size / 2**20:.0f} MiB")
        start = time.process_time()
        docs = JsonlDocs(path)
        seconds = time.process_time() - start
        report("open docs.jsonl", seconds, seconds / options.docs)
        start = time.process_time()
        index = BM25(docs)
        seconds = time.process_time() - start
        report("index", seconds, seconds / options.docs)
        rows = np.random.default_rng(2).integers(0, options.docs, options.queries)
        queries = {str(i): " ".join(docs[str(row)].text.split()[:6]) for i, row in enumerate(rows)}
        start = time.process_time()
        index.search(queries, options.depth)
        seconds = time.process_time() - start
        per_query = seconds / options.queries
        report(f"search, {per_query * 1000:.1f} ms per query", seconds, per_query / options.docs * 6980)


if __name__ == "__main__":
    one_line(main)
