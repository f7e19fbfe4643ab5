"""Training speed of this program, sentence-transformers' CrossEncoderTrainer and a padded loop, on the same pairs.

    python benchmarks/train_throughput.py --size base --rounds 2
    python benchmarks/train_throughput.py --size modernbert-base --doc-tokens 409

All train a random BERT or ModernBERT, in turn, in one process on one GPU. Lengths are like those of MS MARCO's
passages: log-normal, queries with mean 8 and standard deviation 4, docs with mean 76 and standard deviation 35 word
pieces. With `--doc-tokens`, docs have another mean and a standard deviation of 40. This program runs through its data
module, Lightning module and callbacks. The two others get bf16, 8 workers and their best batch size. They run without
cuDNN's attention, whose set-up for each new shape makes mixed lengths slow on Hopper. The output ends with pairs/s, the
share (the FLOP rate divided by the card's rate in an 8192-cubed bf16 matrix product), peak memory per pair, and ratios.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    MODEL_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    ModernBertConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from one_line import one_line  # noqa: E402

from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs, Splits  # noqa: E402
from ranker.data.datamodule import RankData  # noqa: E402
from ranker.data.options import BatchOptions  # noqa: E402
from ranker.data.scorer_inputs import ScorerInputs, TextLimits  # noqa: E402
from ranker.encoders.encoder import Encoder  # noqa: E402
from ranker.encoders.execution import DEFAULT, Execution  # noqa: E402
from ranker.losses.lce import LCE  # noqa: E402
from ranker.models.monobert import MonoBERT  # noqa: E402
from ranker.training.flops import matmul_flops, near_pairs  # noqa: E402
from ranker.training.options import Optimization  # noqa: E402
from ranker.training.rerank_module import RerankModule  # noqa: E402
from ranker.training.throughput import Throughput, measure_matmul  # noqa: E402

# numbers of layers, values of a state, heads, and values between feed-forward layers
SIZES = {
    "tiny": (2, 64, 2, 256),
    "minilm": (6, 384, 12, 1536),
    "base": (12, 768, 12, 3072),
    "large": (24, 1024, 16, 4096),
    "modernbert-tiny": (4, 64, 2, 96),
    "modernbert-minilm": (6, 384, 12, 1024),
    "modernbert-base": (22, 768, 12, 1152),
    "modernbert-large": (28, 1024, 16, 2624),
}
LONGEST = 512  # largest number of tokens of a pair
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
DOCS = 8  # number of docs of a query group


def tokenizer(size: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word, BERT's layout and vocabulary size; ModernBERT has no segments."""
    segments = [] if size.startswith("modernbert") else ["token_type_ids"]
    words = {word: i for i, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(30517))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=LONGEST,
        model_input_names=["input_ids", *segments, "attention_mask"],
    )


def lognormal(rng: np.random.Generator, mean: float, deviation: float, count: int, longest: int) -> np.ndarray:
    """Return log-normal lengths from 1 to `longest`, int [count]."""
    spread = np.log(1 + (deviation / mean) ** 2)
    return np.clip(np.round(rng.lognormal(np.log(mean) - spread / 2, spread**0.5, count)), 1, longest).astype(int)


def collection(groups: int, doc_tokens: int | None = None, seed: int = 0) -> Collection:
    """Return query groups of `DOCS` docs, one of them relevant; lengths are MS MARCO's, or docs have a given mean."""
    shape = (76, 35, groups * DOCS, 256) if doc_tokens is None else (doc_tokens, 40, groups * DOCS, LONGEST - 67)
    rng = np.random.default_rng(seed)
    text = lambda length: " ".join(f"w{i}" for i in rng.integers(0, 30517, length))  # noqa: E731
    queries = {f"q{i}": text(length) for i, length in enumerate(lognormal(rng, 8, 4, groups, 64))}
    docs = MemoryDocs(Doc(f"d{i}", text(length)) for i, length in enumerate(lognormal(rng, *shape)))
    qrels = {f"q{i}": {f"d{DOCS * i}": 1} for i in range(groups)}
    run = {f"q{i}": {f"d{DOCS * i + j}": float(-j) for j in range(DOCS)} for i in range(groups)}
    return Collection("generated", docs, queries, qrels, Candidates.from_run(run))


def config_of(size: str) -> PretrainedConfig:
    layers, dim, heads, inner = SIZES[size]
    sizes: Any = {
        "hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner,
        "pad_token_id": 0,
    }  # fmt: skip
    if not size.startswith("modernbert"):
        return BertConfig(**sizes)
    return ModernBertConfig(**sizes, bos_token_id=2, cls_token_id=2, eos_token_id=3, sep_token_id=3)


def encoder_of(size: str, execution: Execution) -> Encoder:
    config = config_of(size)
    has_pooler = "add_pooling_layer" in inspect.signature(MODEL_MAPPING[type(config)]).parameters
    pooler = {"add_pooling_layer": False} if has_pooler else {}
    return Encoder(AutoModel.from_config(config, **pooler), tokenizer(size), execution)


def module_of(
    size: str, scorer: Any = None, rate: float = 1e-5, max_norm: float | None = 1.0, optimizer: Any = None,
    execution: Execution = DEFAULT,
) -> RerankModule:  # fmt: skip
    torch.manual_seed(0)
    scorer = scorer or MonoBERT(encoder_of(size, execution))
    optimizer = optimizer or (lambda groups: torch.optim.AdamW(groups, lr=rate, fused=True))
    options = Optimization(optimizer, lambda step, total: 1.0, max_norm=max_norm)
    return RerankModule(scorer, ["nDCG@10"], loss=LCE(), optimization=options)


def product(
    size: str, data: Collection, pairs: int, max_tokens: int, cache: str, execution: Execution
) -> dict[str, float]:
    """Train with this program's modules; return its throughput report."""
    module = module_of(size, execution=execution)
    loaders = RankData(
        Splits(data, None, {}),
        ScorerInputs(module.scorer.encoder.tokenizer, "pairs", LONGEST),
        BatchOptions(
            queries=pairs // DOCS, docs=DOCS, max_tokens=max_tokens, workers=4 if torch.cuda.is_available() else 0
        ),
        TextLimits(64, LONGEST - 67),
        cache_dir=cache,
    )
    throughput = Throughput()
    trainer = pl.Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[throughput],
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
    )
    trainer.fit(module, datamodule=loaders)
    return throughput.report()


def padded_loop(size: str, data: Collection, pairs: int, steps: int, flops: float) -> dict[str, float]:
    """Train with a hand-written loop: padded batches, autocast, transformers' forward pass and pooled classifier."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForSequenceClassification.from_config(config_of(size)).to(device)
    pieces = tokenizer(size)
    model.config.problem_type, model.config.num_labels = None, 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    texts = list(pair_texts(data, pairs * steps))
    batches = [
        pieces(*map(list, zip(*texts[i : i + pairs], strict=True)), padding=True, return_tensors="pt")
        for i in range(0, len(texts), pairs)
    ]
    labels = torch.zeros(pairs, dtype=torch.long, device=device)
    started = 0.0
    for i, batch in enumerate(batches):
        if i == 3:
            _wait(device)
            started = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(
                **{key: value.to(device, non_blocking=True) for key, value in batch.items()},
                labels=labels[: len(batch["input_ids"])],
            ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    _wait(device)
    return figures(pairs * (steps - 3) / (time.perf_counter() - started), flops, pairs)


def sentence_transformers(size: str, data: Collection, pairs: int, steps: int, flops: float) -> dict[str, float]:
    """Train with CrossEncoderTrainer and its binary cross-entropy."""
    from datasets import Dataset
    from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **rest) -> None:
            if state.global_step == 3:
                _wait("cuda")
                self.started = time.perf_counter()

    config = config_of(size)
    config.num_labels = 1
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
        tokenizer(size).save_pretrained(folder)
        model = CrossEncoder(folder, max_length=LONGEST)
        texts = list(pair_texts(data, pairs * steps))
        rows = Dataset.from_dict(
            {
                "query": [q for q, _ in texts],
                "doc": [d for _, d in texts],
                "label": [float(i % 2) for i in range(len(texts))],
            }
        )
        clock = Clock()
        arguments = CrossEncoderTrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=pairs,
            bf16=torch.cuda.is_available(),
            dataloader_num_workers=8,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = CrossEncoderTrainer(
            model=model, args=arguments, train_dataset=rows, loss=BinaryCrossEntropyLoss(model), callbacks=[clock]
        )
        trainer.train()
        _wait("cuda")
        return figures(pairs * (steps - 3) / (time.perf_counter() - clock.started), flops, pairs)


def pair_texts(data: Collection, count: int) -> Any:
    """Return the first `count` pairs of texts; they are repeated if there are fewer."""
    docs = list(data.docs)
    for i in range(count):
        doc = docs[i % len(docs)]
        yield data.queries[f"q{(i % len(docs)) // DOCS}"], doc.full_text


def figures(rate: float, flops: float, pairs: int) -> dict[str, float]:
    return {"pairs_per_second": rate, "mfu": rate * flops, "memory": _peak() / pairs}


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def _wait(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=744, help="pairs per step of the product")
    parser.add_argument("--max-tokens", type=int, default=69632)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--peer-pairs", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--peer-steps", type=int, default=40)
    parser.add_argument("--doc-tokens", type=int, help="mean length of docs; default: as in MS MARCO's passages")
    parser.add_argument("--checkpointing", action="store_true", help="the product recomputes activations")
    parser.add_argument("--library", action="store_true", help="the product's layers are compiled, without its kernels")
    parser.add_argument("--without", nargs="*", default=[], help="peers to leave out: sentence-transformers, padded")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    gpu = torch.cuda.is_available()
    rate = measure_matmul(torch.device("cuda")) if gpu else 1.0
    execution = Execution(checkpointing=args.checkpointing, fused=False if args.library else "auto")
    data = collection(args.pairs // DOCS * args.steps, args.doc_tokens)
    lengths = np.array([len(q.split()) + len(d.split()) + 3 for q, d in pair_texts(data, 5000)])
    config, counts = config_of(args.size), torch.from_numpy(lengths)
    pairs = (float(near_pairs(counts, window)) for window in (None, getattr(config, "sliding_window", None)))
    squares, near = (pairs_of / len(lengths) for pairs_of in pairs)
    flops = 3 * matmul_flops(config, 1, 0.0) * lengths.mean() + 3 * matmul_flops(config, 0, squares, None, near)
    rows: dict[str, list[dict[str, float]]] = {}

    def note(name: str, train: Any, *arguments: Any) -> None:
        _fresh()
        try:
            result = train(*arguments)
        except Exception as error:  # if one program fails, the others' results must not be lost
            print(name, "failed:", repr(error)[:500], flush=True)
            return
        if name == "product":
            result["memory"] = result["peak_memory_bytes"] / args.pairs
        rows.setdefault(name, []).append(result)
        print(name, json.dumps({key: round(value, 4) for key, value in result.items()}), flush=True)

    with tempfile.TemporaryDirectory() as cache:
        for _ in range(args.rounds):
            note("product", product, args.size, data, args.pairs, args.max_tokens, cache, execution)
            for pairs in args.peer_pairs:
                for name, peer in {"sentence-transformers": sentence_transformers, "padded": padded_loop}.items():
                    if name not in args.without:
                        note(f"{name} {pairs}", peer, args.size, data, pairs, args.peer_steps, flops / rate)
    best = {name: max(run["pairs_per_second"] for run in runs) for name, runs in rows.items()}
    card = torch.cuda.get_device_name() if gpu else "CPU"
    print(
        f"\n{args.size} on {card}, torch {torch.__version__}, 8192-cubed bf16 product {rate / 1e12:.0f} TFLOP/s, "
        f"{lengths.mean():.1f} tokens per pair"
    )
    for name, runs in rows.items():
        rates = " / ".join(str(round(run["pairs_per_second"])) for run in runs)
        mfu = max(run.get("mfu", 0) for run in runs)
        ratio = best["product"] / best[name]
        print(f"| {name} | {rates} | {mfu:.3f} | {runs[0]['memory'] / 1e6:.1f} MB | {ratio:.1f} |")


def _fresh() -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    one_line(main)
