"""Compare students of a cross-encoder with the same students trained on judgements only, on one collection.

    python -m ranker.labelling.packaged_teacher teacher
    python benchmarks/students.py teacher data=cwe
    python benchmarks/students.py teacher data=files data.path=../scifact --jobs 4   # several trainings at a time
    python benchmarks/students.py teacher data=cwe --pretrain prop                   # students start from pretraining

Students learn from the teacher in its original form, and from the teacher fine-tuned on the collection's judgements.
Each step is a command as a user would type it, and is printed before it runs. Finished steps are reused, and a killed
step is repeated (a labelling continues with its missing shards). The output ends with a table of nDCG@10 of the test
set over BM25's candidates: means over seeds, and paired tests over queries (with the seeds' means).
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from one_line import one_line

from ranker.errors import ConfigError
from ranker.evaluation.significance import randomisation_test, wins_losses_ties

ROOT = Path(__file__).resolve().parents[1]
STUDENTS = {"2x128": ["encoder=splade_tiny"], "minilm3": ["encoder=minilm", "encoder.layers=3"]}
LOSSES = {"kl": ["loss=kl"], "margin_mse": ["loss=margin_mse"], "mse": ["loss=mse"]}
FINISHED = {
    "train": "result.json",
    "pretrain": "model/checksums.json",
    "label": "label.json",
    "evaluate": "evaluation/*/metrics.json",
    "compress": "compress.json",
    "search": "search.json",
}
MEASURE = "nDCG@10"


@dataclass(frozen=True)
class Step:
    """A command, with the folder of its result."""

    folder: Path
    command: str
    arguments: tuple[str, ...]

    def run(self) -> Path:
        """Run the command unless its result exists; return the folder.

        Raises:
            ConfigError: The folder has the result of another command.
        """
        words = ["-m", "ranker", self.command, *self.arguments, f"hydra.run.dir={self.folder}"]
        shown, written = shlex.join(words), self.folder.parent / f"{self.folder.name}.command"
        print("python", shown, flush=True)
        if any(self.folder.glob(FINISHED[self.command])):
            before = written.read_text() if written.is_file() else shown
            if before != shown:
                raise ConfigError(
                    f"{self.folder}: expected the result of this command, got that of python {before}; name another "
                    "folder with --out"
                )
        else:
            shutil.rmtree(self.folder, ignore_errors=True)  # left by a killed run; only this script writes there
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(shown)
            with (self.folder.parent / f"{self.folder.name}.log").open("w") as log:
                quiet = ["trainer.enable_progress_bar=false"]
                command = [sys.executable, "-W", "ignore", *words, *quiet]
                variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
                subprocess.run(command, check=True, stdout=log, stderr=log, env=variables)
        return self.folder


def steps(options: argparse.Namespace) -> list[list[Step]]:
    """Return the steps by stages. The steps of a stage can run at the same time."""
    out, data, more = options.out, tuple(options.data), tuple(options.with_)
    students = {name: STUDENTS[name] for name in options.students}
    pretrained = {name: out / f"{name}_{options.pretrain}" for name in students if options.pretrain}
    tuning = (
        "optim.lr=2e-5",
        "max_doc_tokens=448",
        "max_pair_tokens=512",
        f"trainer.max_epochs={options.teacher_epochs}",
    )
    tuned = Step(out / "tuned", "train", (*data, f"checkpoint={options.teacher}", *tuning, "logger=none", *more))
    teachers = {"raw": str(options.teacher), "tuned": str(tuned.folder)}
    stages: list[list[Step]] = [[tuned], [], []]
    for name, folder in pretrained.items():
        budget = ("trainer.max_epochs=-1", f"trainer.max_steps={options.pretrain_steps}", "batch.texts=64")
        arguments = (*data, *STUDENTS[name], f"objective={options.pretrain}", *budget, "logger=none")
        stages[0].append(Step(folder, "pretrain", arguments))
        students[name] = [
            *STUDENTS[name], f"encoder.name={folder / 'model'}", "encoder.package=null",
        ]  # fmt: skip
    for name, path in teachers.items():
        labelling = (f"teacher={path}", *data, f"depth={options.docs}", f"cache_dir={out / 'cache'}")
        stages[1].append(Step(out / f"labels_{name}", "label", labelling))
        stages[1].append(Step(out / f"teacher_{name}", "evaluate", (f"checkpoint={path}", *data, "depth=100")))
    for student, encoder in students.items():
        for seed in range(options.seeds):
            common = (*data, *encoder, f"seed={seed}", f"trainer.max_epochs={options.epochs}", "logger=none", *more)
            stages[1].append(Step(out / f"{student}_judgements_{seed}", "train", common))
            for name in teachers:
                labels = f"data.teacher={out / f'labels_{name}' / 'labels.trec'}"
                for loss in options.losses:
                    folder = out / f"{student}_{name}_{loss}_{seed}"
                    stages[2].append(Step(folder, "train", (*common, *LOSSES[loss], labels)))
    return stages


def values(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the measure of each test query in a finished run and in the first stage, float64 [queries] each."""
    (path,) = folder.glob("evaluation/*/per_query.jsonl")
    rows = sorted(map(json.loads, path.read_text().splitlines()), key=lambda row: row["query_id"])
    return tuple(np.array([row[key][MEASURE] for row in rows]) for key in ("measures", "baseline"))


def against(mean: np.ndarray, other: np.ndarray) -> str:
    """Return the difference, p-value and wins/losses/ties of two systems over the same queries, as text."""
    wins, losses, ties = wins_losses_ties(mean - other)
    p_value = randomisation_test(mean - other)
    shown = "<0.001" if p_value < 0.001 else f"{p_value:.3f}"
    return f"{(mean - other).mean():+.4f} (p {shown}, {wins}/{losses}/{ties})"


def table(options: argparse.Namespace) -> list[str]:
    """Return the lines of the table in Markdown."""
    out = options.out
    _, bm25 = values(out / "teacher_raw")
    lines = [
        f"| {MEASURE} | each seed | mean | against BM25 | against judgements only |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines.append(f"| BM25 | | {bm25.mean():.4f} | | |")
    for name in ("raw", "tuned"):
        mean, _ = values(out / f"teacher_{name}")
        lines.append(f"| teacher, {name} | | {mean.mean():.4f} | {against(mean, bm25)} | |")
    for student in options.students:
        shown = f"{student} after {options.pretrain}" if options.pretrain else student
        rows = {"judgements": f"{student}_judgements"}
        rows |= {
            f"{teacher}, {loss}": f"{student}_{teacher}_{loss}"
            for teacher in ("raw", "tuned")
            for loss in options.losses
        }
        only = None
        for title, stem in rows.items():
            seeds = [values(out / f"{stem}_{seed}")[0] for seed in range(options.seeds)]
            mean = np.mean(seeds, axis=0)
            only = mean if only is None else only
            each = ", ".join(f"{part.mean():.4f}" for part in seeds)
            compared = "" if title == "judgements" else against(mean, only)
            lines.append(f"| {shown}, {title} | {each} | {mean.mean():.4f} | {against(mean, bm25)} | {compared} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path, help="a cross-encoder's folder")
    parser.add_argument("data", nargs="+", help="the collection, as for train.py")
    parser.add_argument("--out", type=Path, help="default: students/SET")
    parser.add_argument("--students", nargs="+", choices=STUDENTS, default=["2x128"])
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=["kl", "margin_mse"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--docs", type=int, default=30, help="candidates of a training query that the teacher scores")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--teacher-epochs", type=int, default=1)
    parser.add_argument("--pretrain", choices=["prop", "inverse_cloze"], help="pretrain the students on the docs first")
    parser.add_argument("--pretrain-steps", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1, help="commands at a time")
    parser.add_argument(
        "--with",
        dest="with_",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="for all trainings except the pretraining",
    )
    options = parser.parse_args()
    source = next((part.split("=", 1)[1] for part in options.data if part.startswith("data.path=")), options.data[0])
    options.out = (options.out or Path("students") / Path(source).name.removeprefix("data=")).absolute()
    options.teacher = options.teacher.absolute()
    with ThreadPoolExecutor(options.jobs) as pool:
        for stage in steps(options):
            list(pool.map(Step.run, stage))
    lines = table(options)
    (options.out / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    one_line(main)
