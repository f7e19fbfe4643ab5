"""Speed of training and inference of `model=lm_reranker` with LoRA, beside a padded loop of transformers and peft.

    python benchmarks/lm_throughput.py --sizes qwen3-0.6b qwen3-4b qwen3-8b

The models have random weights with the sizes of Qwen3, frozen in bf16, and LoRA of rank 16 on all linear layers. Pairs
are those of `train_throughput.py`: lengths as in MS MARCO's passages, 87 tokens per pair with the prompt. This program
runs through its data module, Lightning module and callbacks. The other loop pads each batch to its longest row, and
uses the best batch size of `--peer-pairs`. Both score with a linear head on the last token.

The share is the FLOP rate divided by the card's rate in an 8192-cubed bf16 matrix product in the same run. It counts 4
operations per token and weight of the layers in training (the backward pass needs no gradients of the base) and 2 in
inference. Memory per token is the peak memory without the weights, divided by the tokens of a micro-batch. The script
needs peft and accelerate. `--profile` also prints the kernels of one training pass by their time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast, Qwen3Config

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from one_line import one_line  # noqa: E402

from benchmarks.train_throughput import DOCS, LONGEST, collection, module_of, pair_texts  # noqa: E402
from ranker.data.collection import Collection, Splits  # noqa: E402
from ranker.data.datamodule import RankData  # noqa: E402
from ranker.data.options import BatchOptions  # noqa: E402
from ranker.data.scorer_inputs import ScorerInputs, TextLimits  # noqa: E402
from ranker.encoders.encoder import Encoder  # noqa: E402
from ranker.encoders.execution import Execution  # noqa: E402
from ranker.encoders.lora import LoRA, add_adapter  # noqa: E402
from ranker.encoders.lora_base import cast_base  # noqa: E402
from ranker.models.lm_reranker import LMReranker  # noqa: E402
from ranker.training.throughput import Throughput, measure_matmul  # noqa: E402

# numbers of layers, values of a state, heads, key heads, values of a head, and values between feed-forward layers
SIZES = {
    "tiny": (2, 64, 4, 2, 16, 128),
    "qwen3-0.6b": (28, 1024, 16, 8, 128, 3072),
    "qwen3-4b": (36, 2560, 32, 8, 128, 9728),
    "qwen3-8b": (36, 4096, 32, 8, 128, 12288),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORDS = 30517
PROMPT = "query: {query} doc: {doc} relevant:"  # adds three tokens
RANK = 16


def config_of(size: str) -> Qwen3Config:
    layers, dim, heads, key_heads, head_dim, inner = SIZES[size]
    return Qwen3Config(
        vocab_size=151936, hidden_size=dim, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, head_dim=head_dim, intermediate_size=inner, max_position_embeddings=LONGEST,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, num_labels=1,
    )  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word and no special tokens around a text."""
    words = ["[PAD]", "[UNK]", "[SEP]", *(f"w{i}" for i in range(WORDS)), "query:", "doc:", "relevant:"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", eos_token="[SEP]", model_max_length=LONGEST,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def scorer_of(size: str, execution: Execution) -> LMReranker:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModel.from_config(config_of(size))
        model.config.use_cache = False
        add_adapter(model, LoRA(rank=RANK))
        encoder = Encoder(model, tokenizer(), execution)
        cast_base(model, torch.bfloat16)
        return LMReranker(encoder, head="linear", prompt=PROMPT, chat=False)


def layer_weights(size: str) -> int:
    """Return the number of weights in the layers' matrices, without adapters."""
    layers, dim, heads, key_heads, head_dim, inner = SIZES[size]
    return layers * (2 * dim * head_dim * (heads + key_heads) + 3 * dim * inner)


def product(
    size: str, data: Collection, pairs: int, max_tokens: int, cache: str, execution: Execution, profile: bool
) -> dict[str, dict[str, float]]:
    """Train with this program's modules, then score; return the results of both."""
    scorer = scorer_of(size, execution)
    module = module_of(size, scorer)
    gpu = DEVICE == "cuda"
    loaders = RankData(
        Splits(data, None, {}),
        ScorerInputs.of(scorer),
        BatchOptions(queries=pairs // DOCS, docs=DOCS, max_tokens=max_tokens, workers=4 if gpu else 0),
        TextLimits(64, LONGEST - 67),
        cache_dir=cache,
    )
    throughput, weights = Throughput(), allocated()
    trainer = pl.Trainer(
        accelerator="auto", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, callbacks=[throughput],
        precision="bf16-mixed" if gpu else "32-true",
    )  # fmt: skip
    trainer.fit(module, datamodule=loaders)
    report = throughput.report()
    training = {
        "tokens_per_second": report["tokens_per_second"],
        "pairs_per_second": report["pairs_per_second"],
        "data_wait_share": report["data_wait_share"],
        "memory_per_token": (peak() - weights) / min(max_tokens, pairs * 87),
    }
    if profile:
        print_kernels(scorer, loaders)
    return {"training": training, "inference": product_inference(scorer, loaders, max_tokens)}


def print_kernels(scorer: LMReranker, loaders: RankData, rows: int = 40) -> None:
    """Print the kernels of one forward and backward pass by their time, and the time of the whole pass."""
    batch = loaders.train_steps()[0, 0].micro_batches[0].to(DEVICE)
    scorer.to(DEVICE).train()

    def run() -> None:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            scores = scorer(batch)
        scores.float().square().mean().backward()
        scorer.zero_grad()

    for _ in range(3):
        run()
    wait()
    started = time.perf_counter()
    run()
    wait()
    seconds = time.perf_counter() - started
    with torch.profiler.profile() as profiler:
        run()
        wait()
    device = "device" if DEVICE == "cuda" else "cpu"
    events = [event for event in profiler.key_averages() if DEVICE == "cpu" or event.device_type.name == "CUDA"]
    times = {event.key: (getattr(event, f"self_{device}_time_total"), event.count) for event in events}
    total = sum(taken for taken, _ in times.values()) / 1e3
    print(f"a pass of {batch.pairs.num_tokens} tokens: {1e3 * seconds:.1f} ms, of which kernels {total:.1f} ms")
    for name, (taken, count) in sorted(times.items(), key=lambda item: -item[1][0])[:rows]:
        print(f"{taken / 1e3:9.2f} ms {count:6d} {name[:120]}")


def product_inference(scorer: LMReranker, loaders: RankData, max_tokens: int) -> dict[str, float]:
    steps = loaders.train_steps()
    batches = [batch.to(DEVICE) for i in range(len(steps.plan)) for batch in steps[0, i].micro_batches][:40]
    scorer.to(DEVICE).eval()
    weights = allocated()
    fresh()
    with torch.inference_mode(), torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        for batch in batches[:3]:
            scorer(batch)
        wait()
        started = time.perf_counter()
        for batch in batches:
            scorer(batch)
        wait()
    seconds = time.perf_counter() - started
    tokens = sum(batch.pairs.num_tokens for batch in batches)
    return {
        "tokens_per_second": tokens / seconds,
        "pairs_per_second": sum(batch.pairs.num_rows for batch in batches) / seconds,
        "memory_per_token": (peak() - weights) / max(batch.pairs.num_tokens for batch in batches),
    }


def padded_loop(size: str, data: Collection, pairs: int, steps: int) -> dict[str, dict[str, float]]:
    """Train and score with transformers' classifier and peft's adapters over padded batches; return both results."""
    import peft

    torch.manual_seed(0)
    with torch.device(DEVICE):
        base = AutoModelForSequenceClassification.from_config(config_of(size), dtype=torch.bfloat16)
    base.config.use_cache = False
    options = peft.LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="SEQ_CLS")
    model = peft.get_peft_model(base, options).train()
    weights = allocated()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    pieces = tokenizer()
    texts = [PROMPT.format(query=query, doc=doc) for query, doc in pair_texts(data, pairs * steps)]
    batches = [
        pieces(texts[i : i + pairs], padding=True, return_tensors="pt") for i in range(0, len(texts), pairs)
    ]  # fmt: skip
    labels = torch.zeros(pairs, 1, device=DEVICE)
    tokens = [int(batch["attention_mask"].sum()) for batch in batches]

    def run(batch: Any) -> Any:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            return model(**{key: value.to(DEVICE, non_blocking=True) for key, value in batch.items()}).logits

    figures = {}
    for name in ("training", "inference"):
        fresh()
        started = 0.0
        for i, batch in enumerate(batches):
            if i == 3:
                wait()
                started = time.perf_counter()
            if name == "inference":
                with torch.inference_mode():
                    run(batch)
                continue
            logits = run(batch).float()
            torch.nn.functional.binary_cross_entropy_with_logits(logits, labels[: len(logits)]).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        wait()
        seconds = time.perf_counter() - started
        figures[name] = {
            "tokens_per_second": sum(tokens[3:]) / seconds,
            "pairs_per_second": pairs * (len(batches) - 3) / seconds,
            "memory_per_token": (peak() - weights) / max(tokens),
        }
        model.eval()
    return figures


def allocated() -> int:
    return torch.cuda.memory_allocated() if DEVICE == "cuda" else 0


def peak() -> int:
    return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def fresh() -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["qwen3-0.6b"])
    parser.add_argument("--pairs", type=int, default=376, help="pairs per step of the product")
    parser.add_argument("--max-tokens", type=int, default=34816, help="tokens of a micro-batch of the product")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--peer-pairs", type=int, nargs="*", default=[16, 32, 64, 128], help="none: without the peer")
    parser.add_argument("--peer-steps", type=int, default=16)
    parser.add_argument("--checkpointing", action="store_true", help="the product recomputes activations")
    parser.add_argument("--profile", action="store_true", help="also print the kernels of one training pass by time")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    rate = measure_matmul(torch.device("cuda")) if DEVICE == "cuda" else 1e12
    card = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU (the share is of 1 TFLOP/s)"
    print(f"{card}, torch {torch.__version__}, 8192-cubed bf16 product {rate / 1e12:.0f} TFLOP/s", flush=True)
    data = collection(args.pairs // DOCS * args.steps)
    lines = []
    for size in args.sizes:
        runs: dict[str, dict[str, dict[str, float]]] = {}
        with tempfile.TemporaryDirectory() as cache:
            execution = Execution(checkpointing=args.checkpointing)
            calls: list[tuple[str, Any, tuple[Any, ...]]] = [
                ("product", product, (size, data, args.pairs, args.max_tokens, cache, execution, args.profile))
            ]
            calls += [(f"padded {n}", padded_loop, (size, data, n, args.peer_steps)) for n in args.peer_pairs]
            for name, call, arguments in calls:
                fresh()
                try:
                    runs[name] = call(*arguments)
                except Exception as error:  # a batch size that does not fit must not lose the other results
                    print(size, name, "failed:", repr(error)[:500], flush=True)
                    continue
                print(size, name, json.dumps(runs[name]), flush=True)
        for kind, flops in (("training", 4), ("inference", 2)):
            for name, run in runs.items():
                row = run[kind]
                ratio = runs["product"][kind]["pairs_per_second"] / row["pairs_per_second"] if "product" in runs else 0
                share = row["tokens_per_second"] * flops * layer_weights(size) / rate
                lines.append(
                    f"| {size} {kind} | {name} | {row['pairs_per_second']:.0f} | {row['tokens_per_second']:.0f} | "
                    f"{share:.3f} | {row['memory_per_token'] / 1e3:.0f} kB | {ratio:.1f} |"
                )
    print("| | | pairs/s | tokens/s | share | memory a token | product / this |\n| --- | --- |" + " ---: |" * 5)
    print("\n".join(lines))


if __name__ == "__main__":
    one_line(main)
