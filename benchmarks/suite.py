"""Seconds of `evaluate.py suite=` on generated sets, from the loaded sets to the written report.

    python benchmarks/suite.py                                              # BERT-base, 13 x 50 queries x 100 docs
    python benchmarks/suite.py --size tiny --sets 3 --queries 5 --docs 10   # a try on a CPU

Each set has its own docs, with lengths as in train_throughput.py, and a run of `--docs` candidates per query. The
command runs in this process. The clock starts when model and sets are loaded, so it counts tokenizing, scoring,
measures, tests, pictures and the report. The script prints the seconds of the whole command, and those after loading.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from one_line import one_line  # noqa: E402
from train_throughput import SIZES, config_of, lognormal, tokenizer  # noqa: E402

from ranker.assembly import suite  # noqa: E402
from ranker.cli import main as cli  # noqa: E402


def write_set(folder: Path, seed: int, queries: int, docs: int) -> None:
    """Write one collection in the format of data=files, with a run."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    text = lambda length: " ".join(f"w{i}" for i in rng.integers(0, 30517, length))  # noqa: E731
    with (folder / "docs.jsonl").open("w") as lines:
        for i, length in enumerate(lognormal(rng, 76, 35, queries * docs, 256)):
            lines.write(json.dumps({"id": f"d{i}", "text": text(length)}) + "\n")
    names = [f"q{i}" for i in range(queries)]
    lengths = lognormal(rng, 8, 4, queries, 64)
    (folder / "queries.tsv").write_text(
        "".join(f"{name}\t{text(length)}\n" for name, length in zip(names, lengths, strict=True))
    )
    (folder / "qrels.test.txt").write_text(
        "".join(f"{name} 0 d{i * docs + i % docs} 1\n" for i, name in enumerate(names))
    )
    with (folder / "first.run").open("w") as lines:
        for i, name in enumerate(names):
            lines.writelines(f"{name} Q0 d{i * docs + j} {j + 1} {-j} first\n" for j in range(docs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--sets", type=int, default=13)
    parser.add_argument("--queries", type=int, default=50)
    parser.add_argument("--docs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2, help="with tokenized docs from the second on")
    options = parser.parse_args()
    seconds: dict[str, float] = {}
    evaluate_sets = suite.evaluate_sets

    def timed(*arguments: Any) -> None:
        seconds["loaded"] = time.perf_counter()
        evaluate_sets(*arguments)

    suite.evaluate_sets = timed
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for i in range(options.sets):
            write_set(root / f"sets/set{i}", i, options.queries, options.docs)
        torch.manual_seed(0)
        config = config_of(options.size)
        config.num_labels = 1
        AutoModelForSequenceClassification.from_config(config).save_pretrained(root / "model")
        tokenizer(options.size).save_pretrained(root / "model")
        choice = root / "conf/suite/generated.yaml"
        choice.parent.mkdir(parents=True)
        names = [f"set{i}" for i in range(options.sets)]
        choice.write_text(
            "defaults:\n" + "".join(f"  - /data@sets.{name}: files\n" for name in names) + "  - _self_\nsets:\n"
            + "".join(f"  {name}: {{ path: {root}/sets/{name} }}\n" for name in names)
        )  # fmt: skip
        pairs = options.sets * options.queries * options.docs
        for number in range(options.rounds):
            sys.argv = [
                "evaluate.py", "--config-dir", str(root / "conf"), f"checkpoint={root / 'model'}", "suite=generated",
                f"depth={options.docs}", f"cache_dir={root / 'cache'}", f"hydra.run.dir={root / f'run{number}'}",
                *(["trainer.precision=bf16-mixed"] if torch.cuda.is_available() else []),
            ]  # fmt: skip
            started = time.perf_counter()
            cli.run("evaluate")
            ended = time.perf_counter()
            print(
                f"round {number}: {pairs} pairs; command {ended - started:.1f} s, after loading "
                f"{ended - seconds['loaded']:.1f} s"
            )


if __name__ == "__main__":
    one_line(main)
