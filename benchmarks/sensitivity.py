"""Sensitivity of the linear layers of a run's model to 4 bits: the Hessian's trace times the rounding error; nDCG@10.

    python benchmarks/sensitivity.py RUN                    # prints the table, with the most sensitive weight first
    python benchmarks/sensitivity.py RUN --evaluate         # also nDCG@10 if parts of the weights have 4 bits

The trace is that of the training loss over some training groups (Q-BERT, arXiv:1909.05840). `--evaluate` rounds a
quarter, half, three quarters and all of the weights, the least sensitive ones first, and evaluates on the run's test
sets in float32.
"""

import argparse
import json
from pathlib import Path

import torch
from omegaconf import OmegaConf
from one_line import one_line

from ranker.assembly.data import build_data, load_splits
from ranker.assembly.scored import run_of
from ranker.assembly.scorer import build_loss
from ranker.assembly.sensitivity import hessian_traces, in_groups, sensitivities
from ranker.checkpoint import load_scorer
from ranker.config.stored import load_stored
from ranker.encoders.execution import Execution
from ranker.evaluation.metrics import evaluate
from ranker.training.loss_inputs import loss_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=128, help="number of inputs that share a scale")
    parser.add_argument("--steps", type=int, default=4, help="training steps whose loss is taken")
    parser.add_argument("--draws", type=int, default=4, help="random vectors for each micro-batch")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--measure", default="nDCG@10")
    options = parser.parse_args()
    cfg = load_stored(options.run / "config.yaml")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scorer = load_scorer(options.run, execution=Execution(ragged=False)).to(device).eval()
    OmegaConf.update(cfg, "batch.max_tokens", 2048)  # small, because the graph of second derivatives is large
    splits, loss = load_splits(cfg), build_loss(cfg)
    steps = build_data(cfg, splits, scorer).train_steps()
    batches = [batch.to(device) for index in range(options.steps) for batch in steps[0, index].micro_batches]
    weights = {
        name: weight
        for name, weight in scorer.encoder.model.named_parameters()
        if weight.ndim == 2 and "embedding" not in name
    }
    losses = [lambda batch=batch: loss_of(loss, scorer(batch), batch) for batch in batches]
    rows = sensitivities(weights, hessian_traces(losses, weights, options.draws), options.bits, options.group)
    print("| weight | numbers | mean trace | error | sensitivity |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        numbers = " | ".join(f"{row[key]:.3g}" for key in ("trace", "error", "sensitivity"))
        print(f"| {row['weight']} | {row['numbers']} | {numbers} |")
    content = {"bits": options.bits, "group": options.group, "weights": rows, "measures": {}}
    for share in (0.0, 0.25, 0.5, 0.75, 1.0) if options.evaluate else ():
        chosen = [row["weight"] for row in rows[len(rows) - round(share * len(rows)) :]]
        kept = {name: weights[name].detach().clone() for name in chosen}
        for name in chosen:
            weights[name].data.copy_(in_groups(weights[name].detach(), options.bits, options.group))
        for name, collection in splits.tests.items():
            run = run_of(cfg, scorer, cfg, collection)
            means = evaluate(run, dict(collection.qrels), [options.measure], collection.relevance).means
            value = next(iter(means.values()))
            content["measures"].setdefault(name, {})[share] = value
            print(f"{name}: {share:.0%} of the weights in {options.bits} bits: {options.measure} {value:.4f}")
        for name, value in kept.items():
            weights[name].data.copy_(value)
    (options.run / "sensitivity.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    one_line(main)
