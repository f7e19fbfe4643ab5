"""Encoding docs with SPLADE: docs/s and peak memory on a CPU, beside sentence-transformers' SparseEncoder.

    OMP_NUM_THREADS=1 python benchmarks/sparse.py                       # the packaged encoder, 30,522 words
    OMP_NUM_THREADS=1 python benchmarks/sparse.py --vocabulary 50368    # the same sizes with random weights
    OMP_NUM_THREADS=1 python benchmarks/sparse.py --rerank              # candidates from stored term weights

Both programs encode the first docs of the built-in collection, cut to `--tokens`, each in a process of its own, in
turn, `--rounds` times; the best round counts. The sums of all term weights are shown.

`--rerank` scores 1,000 of 100,000 stored docs of 60 random terms for a query of 6 terms, as TILDEv2 does, once the
query is tokenized; the median of 200 queries.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PROGRAMS = ("ours", "theirs")


def texts(count: int) -> list[str]:
    """The first docs of the built-in collection."""
    from ranker.data.sources.cwe import CWE

    docs = CWE().load().train.docs
    return [doc.full_text for doc, _ in zip(docs, range(count), strict=False)]


def model_folder(vocabulary: int, where: Path) -> str:
    """The packaged encoder; with another vocabulary, a random model of its sizes."""
    from transformers import AutoConfig, AutoTokenizer, BertForMaskedLM

    from ranker.encoders.loading import load_encoder

    source = load_encoder("model", package="cognition").source
    config = AutoConfig.from_pretrained(source)
    if vocabulary == config.vocab_size:
        return source
    config.vocab_size = vocabulary
    BertForMaskedLM(config).save_pretrained(where)
    AutoTokenizer.from_pretrained(source).save_pretrained(where)
    return str(where)


def one(program: str, args: argparse.Namespace) -> None:
    """Encode with one program; print seconds, peak memory and the sum of all weights as JSON."""
    import torch

    torch.set_num_threads(1)
    docs = texts(args.docs)
    if program == "ours":
        import numpy as np

        from ranker.checkpoint import load_scorer
        from ranker.data.collate import Collator, ScorerInputs, TextLimits
        from ranker.data.memory_store import MemoryStore
        from ranker.data.step_plan import fill
        from ranker.data.token_writer import TextEncoder

        scorer = load_scorer(Path(args.model)).eval()
        limit = args.tokens - 2

        def encode() -> list:
            store = MemoryStore(TextEncoder(scorer.encoder.tokenizer, limit), {str(i): t for i, t in enumerate(docs)})
            collator = Collator.of(ScorerInputs.of(scorer), store, store, TextLimits(limit, limit))
            rows = np.arange(len(docs))
            lengths = collator.doc.row_lengths(collator.doc_lengths(rows, np.zeros(len(rows), dtype=np.int64)))
            order = np.argsort(-lengths, kind="stable")
            with torch.inference_mode():
                return [
                    float(scorer.encode_docs(collator.doc_batch(rows[batch])).values.double().sum())
                    for batch in fill(order, lengths[order], args.budget)
                ]
    else:
        from sentence_transformers import SparseEncoder
        from sentence_transformers.base.modules import Transformer
        from sentence_transformers.sparse_encoder.modules import SpladePooling

        modules = [Transformer(args.model, transformer_task="fill-mask"), SpladePooling("max")]
        model = SparseEncoder(modules=modules, device="cpu")
        model.max_seq_length = args.tokens

        def encode() -> list:
            found = model.encode_document(docs, batch_size=args.batch_size, convert_to_sparse_tensor=True)
            return [float(found.to_dense().double().sum())]

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    total = sum(encode())
    seconds = time.perf_counter() - started
    added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"seconds": seconds, "added_mib": added / 1024, "sum": total}))


def rerank() -> None:
    """Print the time of scoring 1,000 candidates from stored term weights."""
    from types import SimpleNamespace

    import numpy as np
    from scipy import sparse

    from ranker.retrieval.encode import Device
    from ranker.retrieval.postings import Postings
    from ranker.retrieval.sparse_search import SparseEngine

    rng, num_docs, words = np.random.default_rng(0), 100_000, 30522
    indices = np.sort(rng.integers(0, words, (num_docs, 60), dtype=np.int32)).ravel()
    data = rng.random(indices.size, dtype=np.float32)
    matrix = sparse.csr_matrix((data, indices, np.arange(0, indices.size + 1, 60)), shape=(num_docs, words))
    ids = np.array([f"d{i}".encode() for i in range(num_docs)])
    description = SimpleNamespace(dim=words)
    store = SimpleNamespace(doc_ids=ids, matrix=matrix, num_docs=num_docs, num_bytes=0, description=description)
    engine = SparseEngine(None, None, store, Postings.of(matrix, False), Device())
    seconds = []
    for _ in range(200):
        terms = np.sort(rng.integers(0, words, 6)), np.ones(6, dtype=np.float32)
        candidates = [f"d{i}" for i in rng.integers(0, num_docs, 1000)]
        started = time.perf_counter()
        engine.scores_of(terms, candidates)
        seconds.append(time.perf_counter() - started)
    print(f"1,000 candidates: {1e6 * float(np.median(seconds)):.0f} microseconds a query")


def main() -> None:
    """Run both programs in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=128, help="longest doc, special tokens included")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a batch, of this program")
    parser.add_argument("--batch-size", type=int, default=32, help="docs of a batch, of sentence-transformers")
    parser.add_argument("--vocabulary", type=int, default=30522)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rerank", action="store_true")
    parser.add_argument("--one", choices=PROGRAMS)
    parser.add_argument("--model")
    args = parser.parse_args()
    if args.rerank:
        rerank()
        return
    if args.one:
        one(args.one, args)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(args.vocabulary, Path(folder))
        results: dict[str, list] = {program: [] for program in PROGRAMS}
        for _ in range(args.rounds):
            for program in PROGRAMS:
                command = [sys.executable, "-W", "ignore", *sys.argv, "--one", program, "--model", model]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                results[program].append(json.loads(done.stdout.splitlines()[-1]))
    print("| program | docs/s | memory added | sum of weights |\n| --- | --- | --- | --- |")
    for program, rounds in results.items():
        best = min(result["seconds"] for result in rounds)
        memory = min(result["added_mib"] for result in rounds)
        print(f"| {program} | {args.docs / best:.1f} | {memory:.0f} MiB | {rounds[0]['sum']:.3f} |")


if __name__ == "__main__":
    main()
