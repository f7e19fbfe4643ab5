"""How long does probing take, and how much is won by computing the encoder's states once?

Made-up texts and labels and a random encoder of a given size: neither weights nor labels change the time. Measured are

1. the encoder pass that fills the cache;
2. one optimizer step of the probes of all layers in three forms: every token projected, layer after layer (as published
code does it);
   pooled first, layer after layer; pooled first, all layers (and seeds) in one stack;
3. the online code of one task over all layers from the cache, and what the same number of steps and validation passes
would take if each
   ran the encoder up to its layer again, as published code does. That is measured on some batches and multiplied by
   their number.

    python benchmarks/probing.py                                       # MiniLM's size, 2,000 pairs, CPU
    python benchmarks/probing.py --dim 768 --layers 12 --pairs 10000   # BERT-base's size, on a GPU if there is one

Run it on an otherwise idle machine; on a shared one every number is noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertModel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ranker.encoders.encoder import Encoder  # noqa: E402
from ranker.encoders.tiny import tiny_config, tiny_tokenizer  # noqa: E402
from ranker.probing.batches import Inputs, SpanStates, make_batches, read_spans  # noqa: E402
from ranker.probing.code_length import portion_ends  # noqa: E402
from ranker.probing.examples import Span  # noqa: E402
from ranker.probing.online_code import Job, LabelSet, OnlineCoder  # noqa: E402
from ranker.probing.probes import EdgeProbe  # noqa: E402
from ranker.probing.sequences import Sequences  # noqa: E402
from ranker.probing.state_cache import StateCache  # noqa: E402
from ranker.probing.state_readers import TensorStates  # noqa: E402
from ranker.probing.subject import Subject  # noqa: E402
from ranker.probing.training import Stack, TrainingOptions, fit  # noqa: E402

CLASSES = 10


class TokenProbe(nn.Module):
    """The edge probe that projects every token before it pools, over padded spans."""

    def __init__(self, dim: int, hidden: int = 256) -> None:
        super().__init__()
        self.projects = nn.ModuleList(nn.Linear(dim, hidden) for _ in range(2))
        self.scores = nn.ModuleList(nn.Linear(hidden, 1, bias=False) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(2 * hidden, hidden), nn.Tanh(), nn.LayerNorm(hidden), nn.Dropout(0.3), nn.Linear(hidden, CLASSES)
        )

    def forward(self, spans: list[tuple[Tensor, Tensor]]) -> Tensor:
        read = []
        for (states, mask), project, score in zip(spans, self.projects, self.scores, strict=True):
            projected = project(states)
            weights = score(projected).masked_fill(~mask.unsqueeze(-1), -torch.inf).softmax(1)
            read.append((weights * projected).sum(1))
        return self.mlp(torch.cat(read, 1))


def texts(pairs: int, query_tokens: int, doc_tokens: int) -> list[tuple[str, str]]:
    """Texts of about so many tokens: one letter a word, lengths spread as real ones are."""
    rng = np.random.default_rng(0)
    letters = np.array(list(string.ascii_lowercase))

    def text(mean: int) -> str:
        return " ".join(rng.choice(letters, max(2, int(rng.gamma(4, mean / 4)))))

    return [(text(query_tokens), text(doc_tokens)) for _ in range(pairs)]


def clock(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of some runs, after one that does not count."""
    taken = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def step_times(inputs: Inputs, layers: int, batch: int, device: torch.device, repeats: int) -> dict[str, float]:
    """Milliseconds of one optimizer step for all layers, in each form."""
    dim = inputs.states.dim
    pairs = np.arange(min(len(inputs.spans), batch * 4))[None]
    labels = torch.randint(CLASSES, (1, len(inputs.spans)), device=device)
    steps = pairs.shape[1] // batch
    pairs = pairs[:, : steps * batch]
    options = TrainingOptions(batch_pairs=batch, max_rounds=1, round_steps=1)  # one pass
    probe = EdgeProbe(dim, 2, CLASSES)
    none = pairs[:, :0]

    def stacked(chosen: list[int], seeds: int) -> None:
        stack = Stack(
            chosen, list(range(seeds)), [[[layer * 10 + seed] for seed in range(seeds)] for layer in chosen], labels
        )
        fit(probe, inputs, stack, pairs.repeat(seeds, axis=0), none, options, 0)

    probes = [TokenProbe(dim).to(device) for _ in range(layers)]
    optimizers = [torch.optim.Adam(own.parameters(), lr=1e-4) for own in probes]
    whole = Inputs(inputs.states, inputs.spans, inputs.pair_starts, device)

    def token_wise() -> None:
        for layer, (own, optimizer) in enumerate(zip(probes, optimizers, strict=True)):
            for made in make_batches(whole, pairs, batch):
                spans = [padded(slot) for slot in read_spans(whole, [layer], made)]
                loss = nn.functional.cross_entropy(own(spans), labels[0, made.targets[0]])
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(own.parameters(), 5.0)
                optimizer.step()

    forms = {
        "every token projected, separate": token_wise,
        "pooled first, separate": lambda: [stacked([layer], 1) for layer in range(layers)],
        "pooled first, stacked": lambda: stacked(list(range(layers)), 1),
        "pooled first, stacked, 3 seeds": lambda: stacked(list(range(layers)), 3),
    }
    return {name: 1000 * clock(form, device, repeats) / steps for name, form in forms.items()}


def padded(chunks: list[SpanStates]) -> tuple[Tensor, Tensor]:
    """The states of a slot's spans as one padded batch [targets, tokens, dim], and its mask."""
    lengths = torch.cat([chunk.mask[0].sum(dim=1) for chunk in chunks])
    longest = torch.arange(int(lengths.max()), device=lengths.device)
    states = [row for chunk in chunks for row in chunk.read()[0, 0]]
    return nn.utils.rnn.pad_sequence(states, batch_first=True)[:, : len(longest)], longest < lengths[:, None]


def encoder_times(
    subject: Subject, sequences: Sequences, places: np.ndarray, device: torch.device, repeats: int
) -> list[float]:
    """Seconds that running the encoder up to each layer takes for one pair, in random batches of 32."""
    rows = np.random.default_rng(0).permutation(places)[:32]
    # rows stand sorted by length; a batch of a training holds long and short ones
    batches = [sequences.batch(int(row), int(row) + 1) for row in rows]
    tokens = torch.cat([batch.tokens for batch in batches])
    lengths = torch.tensor([0, *[batch.num_tokens for batch in batches]])
    batch = type(batches[0])(tokens, torch.zeros_like(tokens), lengths.cumsum(0).int(), int(lengths.max())).to(device)

    def run(depth: int) -> None:
        for layer, _ in enumerate(subject.frozen.layers(batch)):
            if layer == depth:
                break

    return [clock(lambda depth=depth: run(depth), device, repeats) / len(rows) for depth in range(subject.num_states)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--query-tokens", type=int, default=20)
    parser.add_argument("--doc-tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20, help="epochs of each training")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps-only", action="store_true", help="leave out the online code")
    asked = parser.parse_args()
    if asked.pairs < TrainingOptions().batch_pairs:
        parser.error(f"--pairs: expected at least a batch of {TrainingOptions().batch_pairs}, got {asked.pairs}")
    if asked.threads:
        torch.set_num_threads(asked.threads)
    device = torch.device(asked.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    config = tiny_config(
        dim=asked.dim, layers=asked.layers, heads=asked.dim // 32 if asked.dim < 768 else asked.dim // 64
    )
    subject = Subject("random", Encoder(BertModel(config, add_pooling_layer=False), tiny_tokenizer()))
    made = texts(asked.pairs, asked.query_tokens, asked.doc_tokens)
    sequences = Sequences.of(made, subject.encoder.tokenizer, "pairs", 512, 64, 448)
    report: dict[str, object] = {
        "device": name,
        "torch": torch.__version__,
        "pairs": asked.pairs,
        "tokens a pair": round(sequences.num_tokens / asked.pairs, 1),
        "states": subject.num_states,
        "dim": asked.dim,
    }
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        states = StateCache(Path(folder), max_bytes=1e12, max_tokens=8192 if device.type == "cpu" else 65536).states(
            subject, sequences, list(range(subject.num_states)), device
        )
        report["encoder pass into the cache, s"] = round(time.perf_counter() - start, 2)
        states = TensorStates(states.data.to(device)) if device.type == "cuda" else states
        spans = np.array(
            [[sequences.tokens_of(i, Span("query")), sequences.tokens_of(i, Span("doc"))] for i in range(asked.pairs)]
        )
        inputs = Inputs(states, spans, np.arange(asked.pairs + 1), device)
        for batch in (size for size in sorted({32, TrainingOptions().batch_pairs, 256}) if size <= asked.pairs):
            report[f"step of all layers, batch {batch}, ms"] = {
                form: round(taken, 2)
                for form, taken in step_times(inputs, subject.num_states, batch, device, asked.repeats).items()
            }
        if not asked.steps_only:
            report |= task_times(asked, subject, sequences, inputs, device, report)
    print(json.dumps(report, indent=2))


def task_times(
    asked: argparse.Namespace,
    subject: Subject,
    sequences: Sequences,
    inputs: Inputs,
    device: torch.device,
    report: dict[str, object],
) -> dict[str, object]:
    """The online code of one task over all layers: measured from the cache, reckoned for running the encoder again."""
    # one pass a round and no early stop, so that both ways take the same steps
    options = TrainingOptions(max_rounds=asked.rounds, round_steps=1, patience=asked.rounds)
    train, val = int(asked.pairs * 2 / 3), int(asked.pairs / 6)
    parts = np.split(np.arange(asked.pairs), [train, train + val])
    rng = np.random.default_rng(0)
    job = Job(inputs, "benchmark", {layer: layer for layer in range(subject.num_states)},
              [LabelSet("made up", "none", rng.integers(0, CLASSES, asked.pairs))], CLASSES, *parts, [0])  # fmt: skip
    start = time.perf_counter()
    OnlineCoder(options).code(job)
    cached = time.perf_counter() - start
    trained = [*portion_ends(train)[:-1], train]
    steps = asked.rounds * sum(-(-pairs // options.batch_pairs) for pairs in trained)
    visits = asked.rounds * (sum(trained) + len(trained) * val) + train
    forward = encoder_times(subject, sequences, sequences.pair_rows[:, 0], device, asked.repeats)
    step = report[f"step of all layers, batch {options.batch_pairs}, ms"]["every token projected, separate"] / 1000  # type: ignore[index]
    again = sum(forward) * visits + step * steps
    pass_into_cache = float(report["encoder pass into the cache, s"])  # type: ignore[arg-type]
    return {
        "one task, all layers, from the cache, s": round(cached, 1),
        "the same with the encoder run again, s (reckoned)": round(again, 1),
        "of that the encoder, s": round(sum(forward) * visits, 1),
        "optimizer steps": steps,
        "factor, cache filled for this task alone": round(again / (cached + pass_into_cache), 1),
        "factor, four tasks sharing the cache": round(4 * again / (4 * cached + pass_into_cache), 1),
    }


if __name__ == "__main__":
    main()
