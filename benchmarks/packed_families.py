"""Training speed of families that run packed through transformers' own forward pass, and of a hand-written packed loop.

    python benchmarks/packed_families.py --families distilbert eurobert qwen3 --rounds 1

Both train a random model of base size on the same pairs, in turn, in one process. The loop is what a user would write:
transformers' forward pass over one packed row per step, torch's variable-length attention, autocast, and fused AdamW.
Its batches are built before the clock starts. The output ends with pairs/s and the share: the FLOP rate divided by the
card's rate in an 8192-cubed bf16 matrix product. It counts 6 FLOP per token and weight of a linear layer, and for
attention 3 times 4 l d n^2 per row.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AutoConfig, AutoModel, PretrainedConfig
from transformers.masking_utils import AttentionMaskInterface

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import train_throughput  # noqa: E402
from one_line import one_line  # noqa: E402
from train_throughput import DOCS, LONGEST, _fresh, _wait, collection, pair_texts, product, tokenizer  # noqa: E402

from ranker.data.collection import Collection  # noqa: E402
from ranker.encoders.execution import Execution  # noqa: E402
from ranker.training.throughput import measure_matmul  # noqa: E402

BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 30522}
FAMILIES: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072},
    "mpnet": {**BASE, "intermediate_size": 3072},
    "albert": {**BASE, "intermediate_size": 3072, "embedding_size": 128},
    "eurobert": {**BASE, "num_key_value_heads": 12, "intermediate_size": 3072},
    "qwen3": {**BASE, "num_key_value_heads": 6, "head_dim": 64, "intermediate_size": 2048},
    "gte": {**BASE, "intermediate_size": 3072},
    "nomic_bert": {**BASE, "intermediate_size": 3072},
}
TAKES_NO_POSITIONS = ("distilbert", "mpnet")  # families without position ids as input, so the loop can't pack rows
BOUNDARIES: dict[str, Any] = {}  # row boundaries of the running step of the hand-written loop


def config_of(family: str) -> PretrainedConfig:
    return AutoConfig.for_model(family, **FAMILIES[family], pad_token_id=0)


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    """Compute attention for transformers: [1, heads, tokens, head size] -> [1, tokens, heads, head size]."""
    # under autocast, rotary positions return float32, which the kernel does not convert
    states = [part[0].transpose(0, 1).to(torch.bfloat16) for part in (query, key, value)]
    groups = states[0].shape[1] // states[1].shape[1]
    states[1:] = [part.repeat_interleave(groups, dim=1) if groups > 1 else part for part in states[1:]]
    window = (-1, 0) if getattr(module, "is_causal", False) else (-1, -1)
    starts, longest = BOUNDARIES["starts"], BOUNDARIES["longest"]
    mixed: Any = varlen_attn(
        *states, starts, starts, longest, longest, scale=options.get("scaling"), window_size=window
    )
    return mixed.unsqueeze(0), None


def packed_steps(family: str, data: Collection, pairs: int, steps: int) -> list[dict[str, Tensor | int]]:
    """Return each step as one packed row: token ids, positions, row starts, and the index of each row's last token."""
    pieces = tokenizer("base")
    texts = list(pair_texts(data, pairs * steps))
    result = []
    for first in range(0, len(texts), pairs):
        rows = pieces(*map(list, zip(*texts[first : first + pairs], strict=True)))["input_ids"]
        lengths = torch.tensor([len(row) for row in rows])
        result.append(
            {
                "input_ids": torch.tensor([token for row in rows for token in row]),
                "position_ids": torch.cat([torch.arange(len(row)) for row in rows]),
                "starts": functional.pad(lengths.cumsum(0), (1, 0)).int(),
                "ends": lengths.cumsum(0) - 1,
                "longest": int(lengths.max()),
            }
        )
    return result


def loop(family: str, data: Collection, pairs: int, steps: int) -> float:
    """Train with the hand-written packed loop; return pairs per second."""
    AttentionInterface.register("by_hand", attend)
    AttentionMaskInterface.register("by_hand", lambda *_, **__: None)
    model: Any = AutoModel.from_config(config_of(family)).cuda().train()
    model.set_attn_implementation("by_hand")
    head = nn.Linear(768, 1).cuda()
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    labels = torch.zeros(pairs // DOCS, dtype=torch.long, device="cuda")
    started = 0.0
    for i, step in enumerate(packed_steps(family, data, pairs, steps)):
        if i == 3:
            _wait("cuda")
            started = time.perf_counter()
        on_card = {k: v.cuda(non_blocking=True) if isinstance(v, Tensor) else v for k, v in step.items()}
        BOUNDARIES.update(on_card)
        with torch.autocast("cuda", torch.bfloat16):
            inputs = {name: on_card[name].unsqueeze(0) for name in ("input_ids", "position_ids")}
            states = model(**inputs).last_hidden_state[0]
            scores = head(states[on_card["ends"]])
        functional.cross_entropy(scores.float().view(-1, DOCS), labels).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    _wait("cuda")
    return pairs * (steps - 3) / (time.perf_counter() - started)


def flops(family: str, lengths: Tensor) -> float:
    """Return the training FLOP of a pair of average length: linear layers and attention."""
    config = config_of(family)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    attention = 4 * config.num_hidden_layers * config.hidden_size * float((lengths.double() ** 2).mean())
    return 3 * (2 * weights * float(lengths.double().mean()) + attention)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--pairs", type=int, default=744)
    parser.add_argument("--max-tokens", type=int, default=69632)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    rate = measure_matmul(torch.device("cuda"))
    data = collection(args.pairs // DOCS * args.steps)
    lengths = torch.tensor([len(q.split()) + len(d.split()) + 3 for q, d in pair_texts(data, 5000)])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, product {rate / 1e12:.0f} TFLOP/s, {LONGEST=}")
    train_throughput.config_of = config_of  # type: ignore[assignment]
    train_throughput.tokenizer = lambda _: tokenizer("base")  # type: ignore[assignment]
    ways: dict[str, Any] = {
        "compiled": lambda family, cache: product(family, data, args.pairs, args.max_tokens, cache, Execution())[
            "pairs_per_second"
        ],
        "eager": lambda family, cache: product(
            family, data, args.pairs, args.max_tokens, cache, Execution(compile=False)
        )["pairs_per_second"],
        "loop": lambda family, _: loop(family, data, args.pairs, args.steps),
    }
    for family in args.families:
        for _ in range(args.rounds):
            for name, way in ways.items():
                if name == "loop" and family in TAKES_NO_POSITIONS:
                    continue
                _fresh()
                try:
                    with tempfile.TemporaryDirectory() as cache:
                        pairs = way(family, cache)
                except Exception as error:  # if one program fails, the others' results must not be lost
                    print(f"| {family} | {name} | failed: {error!r:.300} |", flush=True)
                    continue
                share = pairs * flops(family, lengths) / rate
                print(f"| {family} | {name} | {pairs:.0f} pairs/s | {share:.3f} |", flush=True)


if __name__ == "__main__":
    one_line(main)
