"""Compare FirstP, MaxP, PARADE and a Set-Encoder with monoBERT: equal training groups, several seeds, paired tests.

    python benchmarks/list_quality.py --out quality.json
    python benchmarks/list_quality.py --models monobert set_encoder --seeds 1 --steps 2 -- data=files data.path=DIR
    python benchmarks/list_quality.py --jobs 8 -- encoder=minilm data=cwe   # eight trainings at a time on one GPU
    python benchmarks/list_quality.py --models listwise_dot listwise_cosine --steps 600 -- max_doc_tokens=48 depth=20

The script trains each model with `train.py` on the same collection (CWE, unless the options after `--` name another)
and with the same number of steps, so for each seed all models see the same groups. Then it reads the runs of the test
set. nDCG@10 of each query is averaged over the seeds. Each model is compared with the first one by a paired
randomisation test over queries, with Holm's correction. The script prints a table, which `--out` also writes as JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from one_line import one_line  # noqa: E402

from ranker.evaluation.significance import holm, randomisation_test, wins_losses_ties  # noqa: E402

MEASURE = "nDCG@10"
WINDOWS = ["passages.length=112", "passages.stride=96", "passages.most=8"]
MODELS = {
    "monobert": [],
    "firstp": ["passages=firstp", *WINDOWS],
    "maxp": ["passages=maxp", *WINDOWS],
    "parade": ["passages=parade_transformer", *WINDOWS],
    "set_encoder": ["model=set_encoder"],
    "listwise_dot": ["model=listwise_lm"],
    "listwise_cosine": ["model=listwise_lm", "model.similarity=cosine", "model.projection=null"],
}
DEFAULT = ("monobert", "firstp", "maxp", "parade", "set_encoder")


def trained(name: str, seed: int, options: argparse.Namespace, where: Path) -> dict[str, float]:
    """Train and test a model; return the measure of each test query."""
    run = where / "outputs" / f"{name}_{seed}"
    if not run.is_dir():
        command = [
            sys.executable, str(ROOT / "train.py"), *MODELS[name], *options.options, f"seed={seed}",
            f"name={name}_{seed}", "logger=none", "report=none", f"cache_dir={where / 'cache'}",
            "trainer.enable_progress_bar=false", f"measures=[{MEASURE},RR@10]",
        ]  # fmt: skip
        if options.steps:
            command += ["trainer.max_epochs=-1", f"trainer.max_steps={options.steps}"]
        print(" ".join(command[2:]), file=sys.stderr, flush=True)
        with (where / f"{name}_{seed}.log").open("w") as log:
            subprocess.run(command, cwd=where, check=True, stdout=log, stderr=log)
    (lines,) = run.glob("*/evaluation/*/per_query.jsonl")
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    return {row["query_id"]: row["measures"][MEASURE] for row in rows}


def main() -> None:
    """Train all models, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(DEFAULT), choices=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="optimizer steps of each training; by default 4 epochs")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--folder", help="folder of the runs, in which finished ones are kept; by default a new one")
    parser.add_argument("--out", help="JSON file")
    parser.add_argument("options", nargs="*", help="further options of train.py, after --")
    options = parser.parse_args()
    where = Path(options.folder or tempfile.mkdtemp()).absolute()
    where.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        parts = {
            name: [pool.submit(trained, name, seed, options, where) for seed in range(options.seeds)]
            for name in options.models
        }
    values: dict[str, np.ndarray] = {}  # [seeds, queries]
    for name, runs in parts.items():
        found = [part.result() for part in runs]
        values[name] = np.array([[part[query] for query in sorted(found[0])] for part in found])
    first, *others = options.models
    differences = {name: values[name].mean(0) - values[first].mean(0) for name in others}
    corrected = holm({name: randomisation_test(part) for name, part in differences.items()})
    table: list[dict[str, Any]] = []
    print(f"| model | {MEASURE} | over seeds | against {first} | p (Holm) | wins, losses, ties |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in options.models:
        means = values[name].mean(1)
        entry: dict[str, Any] = {"model": name, "mean": float(means.mean()), "seeds": means.tolist()}
        against = "| | |"
        if name in differences:
            entry |= {"difference": float(differences[name].mean()), "p_holm": corrected[name]}
            entry["wins_losses_ties"] = wins_losses_ties(differences[name])
            counts = ", ".join(map(str, entry["wins_losses_ties"]))
            against = f"{entry['difference']:+.4f} | {corrected[name]:.3f} | {counts} |"
        table.append(entry)
        print(f"| {name} | {entry['mean']:.4f} | {means.min():.4f} to {means.max():.4f} | {against}")
    if options.out:
        Path(options.out).write_text(json.dumps({"options": vars(options), "table": table}, indent=1) + "\n")


if __name__ == "__main__":
    one_line(main)
