"""Measure how pretraining on a collection's docs helps a cross-encoder fine-tuned with few, more or all queries.

    python benchmarks/pretraining.py FOLDER [FOLDER ...] --device cuda --jobs 8

Each FOLDER has the format of `data=files`. For each folder, an encoder is pretrained on the docs once by representative
words (PROP) and once by inverse cloze. Then cross-encoders are fine-tuned with 50, 200 and all training queries. They
start from these two encoders, or from the encoder without pretraining. Training queries are chosen by a hash, so the 50
are among the 200. Validation and test queries are the same for all. Each step is a command as a user would type it, and
is printed before it runs. Finished steps are reused. The output ends with a table of nDCG@10 of the test set over the
candidates. It shows the mean over seeds, and a paired test over queries (with the seeds' means) against the encoder
without pretraining.
"""

import argparse
import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from one_line import one_line
from students import MEASURE, Step, against, values

from ranker.data.sources.files import Files

STARTS = ("none", "prop", "inverse_cloze")
SIZES = (50, 200, 0)  # numbers of training queries; 0: all
EPOCHS = {50: 20, 200: 10, 0: 4}  # a small set of queries is read more often


def subset(source: Path, folder: Path, size: int) -> Path:
    """Write the collection with only `size` of its training queries, and with all validation and test queries."""
    if folder.is_dir():
        return folder
    splits = Files(source).load()
    train, val = splits.train, splits.val
    (test,) = splits.tests.values()
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in source.iterdir():
        if path.name.startswith(("docs.", "queries.")) or ".run" in path.name:
            shutil.copyfile(path, partial / path.name)
    chosen = sorted(train.qrels, key=lambda query: hashlib.blake2b(query.encode()).digest())[: size or None]
    parts = {"train": {query: train.qrels[query] for query in chosen}, "dev": val.qrels, "test": test.qrels}
    for name, qrels in parts.items():
        lines = [f"{query} 0 {doc} {grade}\n" for query, docs in qrels.items() for doc, grade in docs.items()]
        (partial / f"qrels.{name}.txt").write_text("".join(lines))
    partial.replace(folder)
    return folder


def steps(options: argparse.Namespace) -> list[list[Step]]:
    """Return the steps by stages: pretrainings, then trainings. The steps of a stage can run at the same time."""
    stages: list[list[Step]] = [[], []]
    for source in options.folders:
        out = options.out / source.name
        common = (f"encoder={options.encoder}", "logger=none", f"cache_dir={options.out / 'cache'}",
                  f"trainer.accelerator={options.device}", "trainer.devices=1", "data=files")  # fmt: skip
        for start in STARTS[1:]:
            arguments = (*common, f"objective={start}", f"data.path={subset(source, out / 'data_0', 0)}",
                         "trainer.max_epochs=-1", f"trainer.max_steps={options.pretrain_steps}",
                         f"batch.texts={options.texts}", *options.with_pretraining)  # fmt: skip
            stages[0].append(Step(out / start, "pretrain", arguments))
        for size in SIZES:
            data = f"data.path={subset(source, out / f'data_{size}', size)}"
            for start in STARTS:
                begin = (
                    ()
                    if start == "none"
                    else (
                        f"encoder.name={out / start / 'model'}",
                        "encoder.package=null",
                        "encoder.pretrained=true",
                    )
                )
                for seed in range(options.seeds):
                    epochs = EPOCHS[size]
                    arguments = (*common, data, *begin, f"seed={seed}", f"trainer.max_epochs={epochs}",
                                 f"trainer.check_val_every_n_epoch={max(1, epochs // 4)}", "report=none",
                                 *options.with_)  # fmt: skip
                    stages[1].append(Step(out / f"{start}_{size}_{seed}", "train", arguments))
    return stages


def table(options: argparse.Namespace) -> list[str]:
    """Return the lines of the table in Markdown."""
    lines = [f"| {MEASURE} | queries | start | each seed | mean | against none | against BM25 |", "| --- " * 7 + "|"]
    for source in options.folders:
        for size in SIZES:
            base = None
            for start in STARTS:
                runs = [values(options.out / source.name / f"{start}_{size}_{seed}") for seed in range(options.seeds)]
                mean, bm25 = np.mean([run for run, _ in runs], axis=0), runs[0][1]
                base = mean if base is None else base
                each = ", ".join(f"{run.mean():.4f}" for run, _ in runs)
                compared = "" if start == "none" else against(mean, base)
                cells = (source.name, size or "all", start, each, f"{mean.mean():.4f}", compared, against(mean, bm25))
                lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="collections in the layout of data=files")
    parser.add_argument("--out", type=Path, default=Path("pretraining"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--encoder", default="splade_tiny", help="a file of conf/encoder with a masked language model")
    parser.add_argument("--pretrain-steps", type=int, default=1000)
    parser.add_argument("--texts", type=int, default=64, help="blocks of a pretraining step")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="commands at a time")
    parser.add_argument("--with", dest="with_", nargs="*", default=[], metavar="KEY=VALUE", help="for all trainings")
    parser.add_argument("--with-pretraining", nargs="*", default=[], metavar="KEY=VALUE", help="for all pretrainings")
    options = parser.parse_args()
    options.out = options.out.absolute()
    options.folders = [folder.resolve() for folder in options.folders]
    with ThreadPoolExecutor(options.jobs) as pool:
        for stage in steps(options):
            list(pool.map(Step.run, stage))
    print("\n".join(table(options)), flush=True)


if __name__ == "__main__":
    one_line(main)
