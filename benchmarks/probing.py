"""Time of probing, and how much faster it is if the encoder's states are computed only once.

Texts and labels are generated and the encoder has random weights, because neither weights nor labels change the time.
The script measures

1. the encoder pass that fills the cache of states;
2. one optimizer step of the probes of all layers in three forms: every token projected, one layer at a time (as in
   published code); pooled first, one layer at a time; pooled first, all layers (and seeds) stacked;
3. the online code of one task over all layers from the cache. This is compared with an estimate for published code,
   which runs the encoder up to the probed layer in each step and validation pass. The estimate multiplies the time of
   some batches by the number of batches.

    python benchmarks/probing.py                                       # MiniLM's size, 2,000 pairs, CPU
    python benchmarks/probing.py --dim 768 --layers 12 --pairs 10000   # BERT-base's size, on a GPU if there is one

Run it on a machine without other work; otherwise the numbers are noise.
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

from one_line import one_line  # noqa: E402

from ranker.encoders.encoder import Encoder  # noqa: E402
from ranker.encoders.tiny import tiny_config, tiny_tokenizer  # noqa: E402
from ranker.probing.batches import Inputs, SpanStates, make_batches, read_spans  # noqa: E402
from ranker.probing.code_length import portion_ends  # noqa: E402
from ranker.probing.coding_jobs import Job, LabelSet  # noqa: E402
from ranker.probing.examples import Span  # noqa: E402
from ranker.probing.online_code import OnlineCoder  # noqa: E402
from ranker.probing.probes import EdgeProbe  # noqa: E402
from ranker.probing.sequences import Sequences  # noqa: E402
from ranker.probing.state_cache import StateCache  # noqa: E402
from ranker.probing.state_readers import TensorStates  # noqa: E402
from ranker.probing.subject import Subject  # noqa: E402
from ranker.probing.training import Stack, fit  # noqa: E402
from ranker.probing.training_options import TrainingOptions  # noqa: E402

CLASSES = 10


class TokenProbe(nn.Module):
    """The edge probe in the form that projects every token before pooling, over padded spans."""

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
    """Return (query, doc) texts with these mean numbers of tokens: one letter per word, gamma-distributed lengths."""
    rng = np.random.default_rng(0)
    letters = np.array(list(string.ascii_lowercase))

    def text(mean: int) -> str:
        return " ".join(rng.choice(letters, max(2, int(rng.gamma(4, mean / 4)))))

    return [(text(query_tokens), text(doc_tokens)) for _ in range(pairs)]


def clock(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds of `repeats` runs, after one warm-up run."""
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
    """Return the milliseconds of one optimizer step for all layers, in each form."""
    dim = inputs.states.dim
    pairs = np.arange(min(len(inputs.spans), batch * 4))[None]
    labels = torch.randint(CLASSES, (1, len(inputs.spans)), device=device)
    steps = pairs.shape[1] // batch
    pairs = pairs[:, : steps * batch]
    options = TrainingOptions(batch_pairs=batch, max_rounds=1, round_steps=1)  # a training of one pass
    edge_probe = EdgeProbe(dim, 2, CLASSES)
    none = pairs[:, :0]

    def stacked(chosen: list[int], seeds: int) -> None:
        stack = Stack(
            chosen, list(range(seeds)), [[[layer * 10 + seed] for seed in range(seeds)] for layer in chosen], labels
        )
        fit(edge_probe, inputs, stack, pairs.repeat(seeds, axis=0), none, options, 0)

    probes = [TokenProbe(dim).to(device) for _ in range(layers)]
    optimizers = [torch.optim.Adam(probe.parameters(), lr=1e-4) for probe in probes]
    whole = Inputs(inputs.states, inputs.spans, inputs.pair_starts, device)

    def token_wise() -> None:
        for layer, (probe, optimizer) in enumerate(zip(probes, optimizers, strict=True)):
            for probe_batch in make_batches(whole, pairs, batch):
                spans = [padded(slot) for slot in read_spans(whole, [layer], probe_batch)]
                loss = nn.functional.cross_entropy(probe(spans), labels[0, probe_batch.targets[0]])
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(probe.parameters(), 5.0)
                optimizer.step()

    forms = {
        "every token projected, separate": token_wise,
        "pooled first, separate": lambda: [stacked([layer], 1) for layer in range(layers)],
        "pooled first, stacked": lambda: stacked(list(range(layers)), 1),
        "pooled first, stacked, 3 seeds": lambda: stacked(list(range(layers)), 3),
    }
    return {name: 1000 * clock(form, device, repeats) / steps for name, form in forms.items()}


def padded(chunks: list[SpanStates]) -> tuple[Tensor, Tensor]:
    """Return the states of all spans in one position of the probe, padded [targets, tokens, dim], and their mask."""
    lengths = torch.cat([chunk.mask[0].sum(dim=1) for chunk in chunks])
    longest = torch.arange(int(lengths.max()), device=lengths.device)
    states = [row for chunk in chunks for row in chunk.read()[0, 0]]
    return nn.utils.rnn.pad_sequence(states, batch_first=True)[:, : len(longest)], longest < lengths[:, None]


def encoder_times(
    subject: Subject, sequences: Sequences, row_ids: np.ndarray, device: torch.device, repeats: int
) -> list[float]:
    """Return the seconds per pair to run the encoder up to each layer, in random batches of 32."""
    rows = np.random.default_rng(0).permutation(row_ids)[:32]
    # the stored rows are sorted by length, but a training batch mixes long and short rows
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
    options = parser.parse_args()
    if options.pairs < TrainingOptions().batch_pairs:
        parser.error(f"--pairs: expected at least a batch of {TrainingOptions().batch_pairs}, got {options.pairs}")
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    config = tiny_config(
        dim=options.dim, layers=options.layers, heads=options.dim // 32 if options.dim < 768 else options.dim // 64
    )
    subject = Subject("random", Encoder(BertModel(config, add_pooling_layer=False), tiny_tokenizer()))
    pair_texts = texts(options.pairs, options.query_tokens, options.doc_tokens)
    sequences = Sequences.of(pair_texts, subject.encoder.tokenizer, "pairs", 512, 64, 448)
    report: dict[str, object] = {
        "device": name,
        "torch": torch.__version__,
        "pairs": options.pairs,
        "tokens a pair": round(sequences.num_tokens / options.pairs, 1),
        "states": subject.num_states,
        "dim": options.dim,
    }
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        states = StateCache(Path(folder), max_bytes=1e12, max_tokens=8192 if device.type == "cpu" else 65536).states(
            subject, sequences, list(range(subject.num_states)), device
        )
        report["encoder pass into the cache, s"] = round(time.perf_counter() - start, 2)
        states = TensorStates(states.data.to(device)) if device.type == "cuda" else states
        spans = np.array(
            [[sequences.tokens_of(i, Span("query")), sequences.tokens_of(i, Span("doc"))] for i in range(options.pairs)]
        )
        inputs = Inputs(states, spans, np.arange(options.pairs + 1), device)
        for batch in (size for size in sorted({32, TrainingOptions().batch_pairs, 256}) if size <= options.pairs):
            report[f"step of all layers, batch {batch}, ms"] = {
                form: round(taken, 2)
                for form, taken in step_times(inputs, subject.num_states, batch, device, options.repeats).items()
            }
        if not options.steps_only:
            report |= task_times(options, subject, sequences, inputs, device, report)
    print(json.dumps(report, indent=2))


def task_times(
    arguments: argparse.Namespace,
    subject: Subject,
    sequences: Sequences,
    inputs: Inputs,
    device: torch.device,
    report: dict[str, object],
) -> dict[str, object]:
    """Return the times of the online code of a task over all layers: from the cache, and estimated without a cache."""
    # with one pass per round and no early stop, both forms take the same number of steps
    options = TrainingOptions(max_rounds=arguments.rounds, round_steps=1, patience=arguments.rounds)
    train, val = int(arguments.pairs * 2 / 3), int(arguments.pairs / 6)
    parts = np.split(np.arange(arguments.pairs), [train, train + val])
    rng = np.random.default_rng(0)
    layers = {layer: layer for layer in range(subject.num_states)}
    label_sets = [LabelSet("generated", "none", rng.integers(0, CLASSES, arguments.pairs))]
    job = Job(inputs, "benchmark", layers, label_sets, CLASSES, *parts, [0])
    start = time.perf_counter()
    OnlineCoder(options).code(job)
    cached = time.perf_counter() - start
    trained = [*portion_ends(train)[:-1], train]
    steps = arguments.rounds * sum(-(-pairs // options.batch_pairs) for pairs in trained)
    visits = arguments.rounds * (sum(trained) + len(trained) * val) + train
    forward = encoder_times(subject, sequences, sequences.pair_rows[:, 0], device, arguments.repeats)
    step = report[f"step of all layers, batch {options.batch_pairs}, ms"]["every token projected, separate"] / 1000  # type: ignore[index]
    again = sum(forward) * visits + step * steps
    pass_into_cache = float(report["encoder pass into the cache, s"])  # type: ignore[arg-type]
    return {
        "one task, all layers, from the cache, s": round(cached, 1),
        "the same with the encoder run again, s (estimated)": round(again, 1),
        "of which the encoder, s": round(sum(forward) * visits, 1),
        "optimizer steps": steps,
        "factor, cache filled for this task alone": round(again / (cached + pass_into_cache), 1),
        "factor, four tasks sharing the cache": round(4 * again / (4 * cached + pass_into_cache), 1),
    }


if __name__ == "__main__":
    one_line(main)
