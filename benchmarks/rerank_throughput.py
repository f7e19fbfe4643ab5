"""Speed of re-ranking of this program and of sentence-transformers' CrossEncoder.predict, on the same pairs.

    python benchmarks/rerank_throughput.py --size base

The model is a random BERT or ModernBERT in bf16; lengths are as in train_throughput.py. This program is timed in
`score_collection`, from the fifth batch to the last score. sentence-transformers gets the same texts, bf16 weights and
its best batch size, and runs without cuDNN's attention.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from one_line import one_line  # noqa: E402
from train_throughput import DOCS, LONGEST, SIZES, _wait, collection, config_of, module_of, pair_texts, tokenizer  # noqa: E402

from ranker.data.collection import Splits  # noqa: E402
from ranker.data.datamodule import RankData  # noqa: E402
from ranker.data.options import BatchOptions  # noqa: E402
from ranker.data.scorer_inputs import ScorerInputs, TextLimits  # noqa: E402
from ranker.evaluation.scoring import Devices, score_collection  # noqa: E402
from ranker.types import RankBatch  # noqa: E402


class Clock:
    """Count the pairs that a scorer scores, and the time. The first batches compile and are not counted.

    Args:
        scorer: The scorer.
        num_batches: Number of batches that this process will score.
    """

    def __init__(self, scorer: Any, num_batches: int) -> None:
        self.pairs, self.done, self.started, self.ended = 0, 0, 0.0, 0.0
        self.num_batches, self.first = num_batches, min(5, num_batches // 4)
        scorer.register_forward_pre_hook(self._start)
        scorer.register_forward_hook(self._stop)

    @property
    def rate(self) -> float:
        """Return the pairs per second."""
        return self.pairs / max(self.ended - self.started, 1e-9)

    def _start(self, scorer: Any, inputs: tuple[RankBatch]) -> None:
        if self.done == self.first:
            _wait("cuda")
            self.started = time.time()
        rows = inputs[0].pairs or inputs[0].docs
        if self.done >= self.first and rows is not None:
            self.pairs += rows.num_rows

    def _stop(self, scorer: Any, inputs: tuple[RankBatch], outputs: Any) -> None:
        self.done += 1
        if self.done == self.num_batches:
            _wait("cuda")
            self.ended = time.time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--pairs", type=int, default=60000)
    parser.add_argument("--max-tokens", type=int, default=65536)
    parser.add_argument("--doc-tokens", type=int, help="mean length of docs; default: as in MS MARCO's passages")
    parser.add_argument("--peer-pairs", type=int, default=8000)
    parser.add_argument("--peer-batch", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    gpu = torch.cuda.is_available()
    data = collection(args.pairs // DOCS, args.doc_tokens)
    scorer: Any = module_of(args.size).scorer
    bf16 = partial(torch.autocast, "cuda", torch.bfloat16) if gpu else nullcontext
    devices = Devices(torch.device("cuda" if gpu else "cpu"), autocast=bf16)
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(args.size)
        config.num_labels = 1
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
        tokenizer(args.size).save_pretrained(folder)
        for _ in range(args.rounds):
            torch.backends.cuda.enable_cudnn_sdp(False)
            loaders = RankData(
                Splits(None, None, {"generated": data}),
                ScorerInputs(scorer.encoder.tokenizer, "pairs", LONGEST),
                BatchOptions(max_tokens=args.max_tokens, workers=4 if gpu else 0),
                TextLimits(64, LONGEST - 67),
                cache_dir=folder,
            )
            batches = loaders.score_batches(data)
            clock = Clock(scorer, len(batches))
            score_collection(scorer, batches, devices, loaders.batch_options.workers)
            rates.setdefault("product", []).append(clock.rate)
            from sentence_transformers.cross_encoder import CrossEncoder

            peer = CrossEncoder(folder, max_length=LONGEST, model_kwargs={"dtype": torch.bfloat16} if gpu else None)
            texts = list(pair_texts(data, args.peer_pairs))
            for size in args.peer_batch:
                peer.predict(texts[: 4 * size], batch_size=size)
                _wait("cuda")
                started = time.perf_counter()
                peer.predict(texts, batch_size=size)
                rates.setdefault(f"CrossEncoder.predict {size}", []).append(
                    len(texts) / (time.perf_counter() - started)
                )
    best = {name: max(values) for name, values in rates.items()}
    print(f"\n{args.size} on {torch.cuda.get_device_name() if gpu else 'CPU'}, torch {torch.__version__}")
    for name, values in rates.items():
        rounds = " / ".join(str(round(value)) for value in values)
        print(f"| {name} | {rounds} pairs/s | {best['product'] / best[name]:.1f} |")


if __name__ == "__main__":
    one_line(main)
