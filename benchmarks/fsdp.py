"""Full fine-tuning of a language model in shards over two devices (`trainer.strategy=fsdp`): speed, memory, losses.

    python benchmarks/fsdp.py                                  # Qwen3-4B's shape on two GPUs
    python benchmarks/fsdp.py --size tiny --check-size tiny    # two gloo processes on a CPU, to try it

The model has random weights with the sizes of Qwen3; pairs and prompt are those of `lm_throughput.py`. Weights and
AdamW's states are float32 and sharded, layers compute in bf16, and activations are recomputed in the backward pass.
First, a model of `--check-size` is trained on one device without shards and on two devices with shards, and the losses
are compared step by step. Each part runs in its own process. The share is the FLOP rate divided by the cards' rate in
8192-cubed bf16 matrix products. It counts 6 operations per token and weight of the layers, and no recomputation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from transformers import AutoModel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from one_line import one_line  # noqa: E402

from benchmarks.lm_throughput import PROMPT, SIZES, config_of, layer_weights, tokenizer  # noqa: E402
from benchmarks.train_throughput import DOCS, LONGEST, collection  # noqa: E402
from ranker.data.collection import Splits  # noqa: E402
from ranker.data.datamodule import RankData  # noqa: E402
from ranker.data.options import BatchOptions  # noqa: E402
from ranker.data.scorer_inputs import ScorerInputs, TextLimits  # noqa: E402
from ranker.encoders.encoder import Encoder  # noqa: E402
from ranker.encoders.execution import Execution  # noqa: E402
from ranker.losses.lce import LCE  # noqa: E402
from ranker.models.lm_reranker import LMReranker  # noqa: E402
from ranker.training.options import Optimization  # noqa: E402
from ranker.training.rerank_module import RerankModule  # noqa: E402
from ranker.training.sharding import ShardedStrategy  # noqa: E402
from ranker.training.throughput import Throughput, measure_matmul  # noqa: E402

GPU = torch.cuda.is_available()
RANK = int(os.environ.get("LOCAL_RANK", "0"))


class Losses(pl.Callback):
    """Collect the loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(float(trainer.callback_metrics["train/loss"]))


def scorer_of(size: str, checkpointing: bool) -> LMReranker:
    torch.manual_seed(0)
    with torch.device(f"cuda:{RANK}" if GPU else "cpu"):
        model = AutoModel.from_config(config_of(size))
        model.config.use_cache = False
        encoder = Encoder(model, tokenizer(), Execution(compile=False, checkpointing=checkpointing))
        return LMReranker(encoder, head="linear", prompt=PROMPT, chat=False)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Run a part; return its losses, speed and memory."""
    scorer = scorer_of(args.size, not args.no_checkpointing)
    module = RerankModule(
        scorer, [], loss=LCE(),
        optimization=Optimization(
            lambda groups: torch.optim.AdamW(groups, lr=1e-5, fused=GPU), lambda step, total: 1.0, args.steps
        ),
    )  # fmt: skip
    data = collection(args.pairs // DOCS * args.steps)
    throughput, losses = Throughput(), Losses()
    with tempfile.TemporaryDirectory() as cache:
        loaders = RankData(
            Splits(data, None, {}),
            ScorerInputs.of(scorer),
            BatchOptions(args.pairs // DOCS, DOCS, args.max_tokens, workers=4 if GPU else 0),
            TextLimits(64, LONGEST - 67),
            cache_dir=cache,
        )
        trainer = pl.Trainer(
            accelerator="auto", devices=args.devices, strategy=ShardedStrategy() if args.devices > 1 else "auto",
            max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False, callbacks=[throughput, losses],
            precision="bf16-mixed" if GPU else "32-true", inference_mode=False,
        )  # fmt: skip
        trainer.fit(module, datamodule=loaders)
    report = throughput.report()
    return {
        "losses": losses.values,
        "tokens_per_second": report["tokens_per_second"],
        "pairs_per_second": report["pairs_per_second"],
        "data_wait_share": report["data_wait_share"],
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if GPU else 0.0,
        "weights": sum(weight.numel() for weight in module.parameters()),
    }


def part(args: argparse.Namespace, size: str, devices: int, steps: int, pairs: int) -> dict[str, Any]:
    """Run a part in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        words = ["--size", size, "--devices", str(devices), "--steps", str(steps), "--pairs", str(pairs),
                 "--max-tokens", str(args.max_tokens), "--out", str(out)]  # fmt: skip
        more = ["--no-checkpointing"] if args.no_checkpointing else []
        subprocess.run([sys.executable, "-W", "ignore", __file__, *words, *more], check=True)
        result: dict[str, Any] = json.loads(out.read_text())
    print(size, f"{devices} device(s)", json.dumps(result), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--size", choices=SIZES, default="qwen3-4b")
    parser.add_argument("--check-size", choices=SIZES, default="qwen3-0.6b")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=1504, help="pairs per step, over all devices")
    parser.add_argument("--max-tokens", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--no-checkpointing", action="store_true", help="store activations")
    parser.add_argument("--out", type=Path, help="run one part and write its result here")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.out is not None:
        result = train(args)
        if RANK == 0:
            args.out.write_text(json.dumps(result))
        return
    check_pairs = min(args.pairs, 376)
    one = part(args, args.check_size, 1, 4, check_pairs)["losses"]
    several = part(args, args.check_size, args.devices, 4, check_pairs)["losses"]
    print(f"{args.check_size}: losses on 1 device {one}, in shards on {args.devices} {several}, largest difference "
          f"{max(abs(a - b) for a, b in zip(one, several, strict=True)):.2e}", flush=True)  # fmt: skip
    figures = part(args, args.size, args.devices, args.steps, args.pairs)
    rate = measure_matmul(torch.device("cuda")) if GPU else 1e12
    share = figures["tokens_per_second"] * 6 * layer_weights(args.size) / (rate * args.devices)
    card = torch.cuda.get_device_name() if GPU else "CPU (the share is of 1 TFLOP/s)"
    print(f"{card}, torch {torch.__version__}, 8192-cubed bf16 product {rate / 1e12:.0f} TFLOP/s")
    print("| size | weights | devices | pairs/s | tokens/s | share | peak memory a device | waiting for data |")
    print("| --- |" + " ---: |" * 7)
    print(f"| {args.size} | {figures['weights'] / 1e6:.0f} M | {args.devices} | "
          f"{figures['pairs_per_second']:.0f} | {figures['tokens_per_second']:.0f} | {share:.3f} | "
          f"{figures['peak_gb']:.1f} GB | {figures['data_wait_share']:.3f} |")  # fmt: skip


if __name__ == "__main__":
    one_line(main)
