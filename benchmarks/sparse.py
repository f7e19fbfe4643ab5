"""Speed and peak memory of encoding docs with SPLADE, compared with sentence-transformers' SparseEncoder.

    OMP_NUM_THREADS=1 python benchmarks/sparse.py                                   # the packaged encoder on a CPU
    OMP_NUM_THREADS=1 python benchmarks/sparse.py --vocabulary 50368                # the same sizes, random weights
    python benchmarks/sparse.py --device cuda --size base --vocabulary 30522 50368  # BERT-base with random weights

All programs encode the same docs, cut to `--tokens`, into sparse vectors in main memory. The docs are those of the
built-in collection, repeated if they are too few. Each program runs in a separate process, in turn, `--rounds` times,
and the best round counts. The bias of the words is lowered so that a doc has about 200 terms, as after a training. The
sums of all weights are shown. On CUDA, this program computes in bf16, with its kernel and with blocks of torch's
operations; sentence-transformers computes in float32 and in bf16. Each program encodes everything once before the clock
starts.

`sparse_kernels.py` times projection and pooling alone, and `sparse_rerank.py` times re-ranking with stored weights.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from itertools import cycle, islice
from pathlib import Path

from one_line import one_line

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TERMS = 200
SIZES = {
    "tiny": {},
    "base": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
}


def texts(count: int) -> list[str]:
    """Return the first docs of the built-in collection, repeated if there are fewer."""
    from ranker.data.sources.cwe import CWE

    return list(islice(cycle([doc.full_text for doc in CWE().load().train.docs]), count))


def model_folder(size: str, vocabulary: int, where: Path) -> Path:
    """Write the packaged encoder, or a random model; lower the biases of the words until docs have about 200 terms."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, BertForMaskedLM

    from ranker.encoders.loading import load_encoder

    source = load_encoder("model", package="cognition").source
    config = AutoConfig.from_pretrained(source)
    torch.manual_seed(0)
    if vocabulary == config.vocab_size and size == "tiny":
        model = BertForMaskedLM.from_pretrained(source)
    else:
        config.update({"vocab_size": vocabulary, **SIZES[size]})
        model = BertForMaskedLM(config)
    tokenizer = AutoTokenizer.from_pretrained(source)
    some = tokenizer(texts(16), truncation=True, max_length=64, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model.eval()(**some).logits.masked_fill(some["attention_mask"].unsqueeze(2) == 0, -torch.inf)
        highest = logits.amax(1).flatten()
        model.cls.predictions.bias -= highest.kthvalue(int(len(highest) * (1 - TERMS / vocabulary))).values
    model.save_pretrained(where)
    tokenizer.save_pretrained(where)
    return where


def ours(args: argparse.Namespace, docs: list[str], kernel: bool):
    """Return a function that encodes with this program and returns the sum of all weights."""
    import numpy as np
    import torch

    from ranker.checkpoint import load_scorer
    from ranker.data.collate import Collator
    from ranker.data.memory_store import MemoryStore
    from ranker.data.scorer_inputs import ScorerInputs, TextLimits
    from ranker.data.step_plan import fill
    from ranker.data.text_encoder import TextEncoder
    from ranker.interactions import term_pooling
    from ranker.retrieval.encode import Device, doc_terms

    if not kernel:
        term_pooling.has_kernel = lambda inputs, dtype: False
    scorer = load_scorer(args.model).eval().to(args.device)
    limit = args.tokens - 2
    bf16 = partial(torch.autocast, "cuda", torch.bfloat16) if args.device == "cuda" else nullcontext
    device = Device(args.device, bf16)

    def encode() -> float:
        store = MemoryStore(TextEncoder(scorer.encoder.tokenizer, limit), {str(i): t for i, t in enumerate(docs)})
        collator = Collator.of(ScorerInputs.of(scorer), store, store, TextLimits(limit, limit))
        rows = np.arange(len(docs))
        lengths = collator.doc.row_lengths(collator.doc_lengths(rows, np.zeros(len(rows), dtype=np.int64)))
        order = np.argsort(-lengths, kind="stable")
        found = [
            doc_terms(scorer, collator.doc_batch(rows[batch]), device)
            for batch in fill(order, lengths[order], args.budget)
        ]
        return sum(float(part.data.sum(dtype=np.float64)) for part in found)

    return encode


def theirs(args: argparse.Namespace, docs: list[str], dtype: str, batch_size: int):
    """Return a function that encodes with sentence-transformers and returns the sum of all weights."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    encoder = Transformer(str(args.model), transformer_task="fill-mask", model_kwargs={"dtype": dtype})
    model = SparseEncoder(modules=[encoder, SpladePooling("max")], device=args.device)
    model.max_seq_length = args.tokens

    def encode() -> float:
        found = model.encode_document(docs, batch_size=batch_size, convert_to_sparse_tensor=True, save_to_cpu=True)
        return float(found.coalesce().values().double().sum())

    return encode


def programs(args: argparse.Namespace) -> list[str]:
    """Return the names of the programs: the program, its form or dtype, and the number of texts in a batch."""
    if args.device == "cpu":
        return ["ours blocks", *(f"theirs float32 {size}" for size in args.batch_size)]
    peers = [f"theirs {dtype} {size}" for dtype in ("float32", "bfloat16") for size in args.batch_size]
    return ["ours kernel", "ours blocks", *peers]


def one(args: argparse.Namespace) -> None:
    """Encode with one program; print seconds, peak memory and the sum of all weights as JSON."""
    import torch

    gpu = args.device == "cuda"
    if not gpu:
        torch.set_num_threads(1)
    docs, (name, kind, *size) = texts(args.docs), args.one.split()
    encode = ours(args, docs, kind == "kernel") if name == "ours" else theirs(args, docs, kind, int(size[0]))
    if gpu:
        encode()
        torch.cuda.reset_peak_memory_stats()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    total = encode()
    seconds = time.perf_counter() - started
    added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    peak = torch.cuda.max_memory_allocated() / 2**20 if gpu else added
    print(json.dumps({"seconds": seconds, "mib": peak, "sum": total}))


def compare(args: argparse.Namespace, vocabulary: int) -> None:
    """Run all programs in turn, and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(args.size, vocabulary, Path(folder))
        results: dict[str, list] = {program: [] for program in programs(args)}
        for _ in range(args.rounds):
            for program, rounds in results.items():
                command = [sys.executable, "-W", "ignore", *sys.argv, "--one", program, "--model", str(model)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(f"{program}: {done.stderr}")
                rounds.append(json.loads(done.stdout.splitlines()[-1]))
    best = {program: args.docs / min(result["seconds"] for result in rounds) for program, rounds in results.items()}
    print(f"\n{args.size}, {vocabulary} words, {args.docs} docs of up to {args.tokens} tokens, {args.device}")
    memory = "peak GPU memory" if args.device == "cuda" else "memory added"
    print(f"| program | docs/s | times | {memory} | sum of weights |\n| --- | --- | --- | --- | --- |")
    for program, rounds in results.items():
        used, first = min(result["mib"] for result in rounds), next(iter(best.values()))
        times = f"{first / best[program]:.1f}"
        print(f"| {program} | {best[program]:.1f} | {times} | {used:.0f} MiB | {rounds[0]['sum']:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="layers x dim: 2 x 128 or 12 x 768")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[30522])
    parser.add_argument("--docs", type=int, help="default: 150, on CUDA 20,000")
    parser.add_argument("--tokens", type=int, default=128, help="longest doc, special tokens included")
    parser.add_argument("--budget", type=int, help="tokens of a batch, of this program; default: 8,192, on CUDA 32,768")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[32], help="docs of a batch, of the other program")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    gpu = args.device == "cuda"
    args.docs, args.budget = args.docs or (20_000 if gpu else 150), args.budget or (32_768 if gpu else 8192)
    if args.one:
        one(args)
        return
    for vocabulary in args.vocabulary:
        compare(args, vocabulary)


if __name__ == "__main__":
    one_line(main)
