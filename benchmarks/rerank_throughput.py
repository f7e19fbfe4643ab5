"""Re-ranking throughput of the product's evaluation loop and of sentence-transformers' CrossEncoder.predict, on the same pairs.

    python benchmarks/rerank_throughput.py --size base

A random BERT, bf16, lengths as in train_throughput.py. The product is timed in `trainer.test`, from its fifth batch on,
to the last score; the peer gets tokens of the same texts, bf16 weights, its best batch size and cuDNN's attention off.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from transformers import BertForSequenceClassification

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from train_throughput import DOCS, SIZES, _wait, collection, config_of, module_of, pair_texts, tokenizer  # noqa: E402

from ranker.data.collate import ScorerInputs, TextLimits  # noqa: E402
from ranker.data.collection import Splits  # noqa: E402
from ranker.data.datamodule import BatchOptions, RankData  # noqa: E402


class Clock(pl.Callback):
    """When this process scored how many pairs, the first batches left out, which compile."""

    def __init__(self) -> None:
        self.pairs, self.first, self.started, self.ended = 0, 0, 0.0, 0.0

    @property
    def rate(self) -> float:
        """Pairs a second."""
        return self.pairs / max(self.ended - self.started, 1e-9)

    def on_test_batch_start(
        self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Start."""
        self.first = min(5, int(trainer.num_test_batches[dataloader_idx]) // 4)
        if batch_idx == self.first:
            _wait("cuda")
            self.started = time.time()
        if batch_idx >= self.first:
            self.pairs += len(batch.slots)

    def on_test_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Stop."""
        if batch_idx == trainer.num_test_batches[dataloader_idx] - 1:
            _wait("cuda")
            self.ended = time.time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--pairs", type=int, default=60000)
    parser.add_argument("--max-tokens", type=int, default=65536)
    parser.add_argument("--peer-pairs", type=int, default=8000)
    parser.add_argument("--peer-batch", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    gpu = torch.cuda.is_available()
    data = collection(args.pairs // DOCS)
    module = module_of(args.size)
    module.on_evaluated = lambda name, run: {}
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(args.size)
        config.num_labels = 1
        BertForSequenceClassification(config).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        for _ in range(args.rounds):
            torch.backends.cuda.enable_cudnn_sdp(False)
            loaders = RankData(
                Splits(None, None, {"generated": data}),
                ScorerInputs(module.scorer.encoder.tokenizer, "pairs", 512),
                BatchOptions(max_tokens=args.max_tokens, workers=4 if gpu else 0),
                TextLimits(64, 256),
                cache_dir=folder,
            )
            clock = Clock()
            trainer = pl.Trainer(
                accelerator="auto",
                devices=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[clock],
                precision="bf16-mixed" if gpu else "32-true",
            )
            trainer.test(module, datamodule=loaders, verbose=False)
            found.setdefault("product", []).append(clock.rate)
            from sentence_transformers.cross_encoder import CrossEncoder

            peer = CrossEncoder(folder, max_length=512, model_kwargs={"dtype": torch.bfloat16} if gpu else None)
            texts = list(pair_texts(data, args.peer_pairs))
            for size in args.peer_batch:
                peer.predict(texts[: 4 * size], batch_size=size)
                _wait("cuda")
                started = time.perf_counter()
                peer.predict(texts, batch_size=size)
                found.setdefault(f"CrossEncoder.predict {size}", []).append(
                    len(texts) / (time.perf_counter() - started)
                )
    best = {name: max(rates) for name, rates in found.items()}
    print(f"\n{args.size} on {torch.cuda.get_device_name() if gpu else 'CPU'}, torch {torch.__version__}")
    for name, rates in found.items():
        print(
            f"| {name} | {' / '.join(str(round(rate)) for rate in rates)} pairs/s | {best['product'] / best[name]:.1f} |"
        )


if __name__ == "__main__":
    main()
