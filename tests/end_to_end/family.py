"""Run a family of encoders through all commands as a user would; print a table of several families.

    python tests/end_to_end/family.py bert deberta-v3 t5
    python tests/end_to_end/family.py

The second command runs all families, which takes an hour on one core. Every cell of the table is `yes` with the
measured value, `refused` (a message and exit code 1) or `NO`; the messages go to stderr.
"""

import contextlib
import json
import os
import random
import re
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/end_to_end")]

from commands import by_start  # noqa: E402
from forks import Forks  # noqa: E402

from ranker.data.trec import read_run  # noqa: E402
from tests.zoo.families import FAMILIES  # noqa: E402
from tests.zoo.texts import words  # noqa: E402

COLUMNS = {
    "train": "monobert: 4 steps and the test of the last state; some docs are longer than the model's positions",
    "resume": "killed at the checkpoint of step 2 and resumed: weights and training state of `train`, bit for bit",
    "evaluate": "evaluate.py writes the run file of the training's own test",
    "st": "ranker export format=sentence_transformers: largest difference of a score",
    "hf": "ranker export format=hf",
    "dpr": "model=dpr: 2 steps; largest difference between the scores of search.py and of the training's test",
    "dpr st": "its export",
    "colbert": "the same for model=colbert",
    "colbert st": "its export",
}
CHOICES = [
    "data=files", "batch.queries=4", "batch.docs=4", "depth=6", "max_doc_tokens=1000", "encoder=bert_base",
    "trainer.log_every_n_steps=1", "trainer.enable_progress_bar=false", "report=none",
]  # fmt: skip
CLOSE = 1e-4  # largest difference of two scores, divided by the largest score if that is above 1


def write_data(folder: Path) -> Path:
    """Return a folder in the `files` format: 20 queries over 30 docs, three of which have 200 words."""
    rng = random.Random(3)
    texts = [words(i, 200 if i % 10 == 4 else rng.randint(2, 40)) for i in range(30)]
    folder.mkdir(parents=True)
    lines = [json.dumps({"id": f"d{i}", "text": text}) for i, text in enumerate(texts)]
    (folder / "docs.jsonl").write_text("\n".join(lines) + "\n")
    queries = [" ".join(rng.sample(texts[i].split(), min(3, len(texts[i].split())))) for i in range(20)]
    (folder / "queries.tsv").write_text("".join(f"q{i}\t{text}\n" for i, text in enumerate(queries)))
    for split, numbers in {"train": range(12), "dev": range(12, 15), "test": range(15, 20)}.items():
        (folder / f"qrels.{split}.txt").write_text("".join(f"q{i} 0 d{i} 1\n" for i in numbers))
    return folder


class Wrong(AssertionError):
    """A command did something wrong."""


class Refused(Exception):
    """A command ended with a message and exit code 1."""


class Walk:
    """The commands of one family.

    Args:
        forks: Runs the commands.
        checkpoint: The folder of the family's model.
        data: The folder that `write_data` wrote.
        where: An empty folder to work in.
    """

    def __init__(self, forks: Forks, checkpoint: Path, data: Path, where: Path) -> None:
        self.forks, self.where, self.data = forks, where, data
        self.choices = [*CHOICES, f"encoder.name={checkpoint}", f"data.path={data}", f"cache_dir={where / 'cache'}"]
        self.messages: list[str] = []

    def run(self, script: str, *arguments: str, name: str, signals: list | None = None) -> Path:
        """Run a command; return its run folder."""
        done = self.forks.run(script, *arguments, f"name={name}", cwd=self.where, timeout=400, signals=signals)
        found = self.where / "outputs" / name
        if signals and done.code == -9:
            return by_start(found)[-1]
        if done.code == 0 and not signals:
            return by_start(found)[-1]
        errors = [line for line in done.out.splitlines() if line.startswith("error: ")]
        if done.code == 1 and errors:
            raise Refused("; ".join(line.removeprefix("error: ") for line in errors))
        raise Wrong(f"{script} {' '.join(arguments[-3:])}: exit {done.code}\n{done.out[-3000:]}")

    def train(self, model: str, steps: int, *more: str, name: str = "", signals: list | None = None) -> Path:
        """Train a model."""
        given = [f"model={model}", f"trainer.max_steps={steps}", "save_every_steps=1", *self.choices, *more]
        return self.run("train.py", *given, name=name or model, signals=signals)

    def test_run(self, folder: Path) -> dict[str, dict[str, float]]:
        """Return the run that a command wrote."""
        return read_run(folder / "evaluation" / self.data.name / "run.trec")

    def monobert(self, exports: bool = True) -> dict[str, str]:
        """Train, kill, resume, evaluate and, with `exports`, export."""
        cells: dict[str, str] = {}
        with self.cell(cells, "train"):
            whole = self.train("monobert", 4)
            scores = [score for docs in self.test_run(whole).values() for score in docs.values()]
            if len(scores) < 20 or max(scores) - min(scores) < 1e-5:
                raise Wrong(f"expected scores that differ, got {scores}")
        if cells["train"] != "yes":
            return cells
        with self.cell(cells, "resume"):
            kill = [0, 0, "SIGKILL", "os.rename", ".last.ckpt.partial", 3, 0.0]
            killed = self.train("monobert", 4, name="killed", signals=[kill])
            self.run("train.py", f"checkpoint={killed}", "resume=true", name="killed")
            from test_resume import assert_same_end  # imported here, because pytest rewrites its assertions

            assert_same_end(whole, by_start(self.where / "outputs/killed")[-1])
        with self.cell(cells, "evaluate"):
            again = self.run("evaluate.py", f"checkpoint={whole}", "report=none", name="evaluate")
            if self.test_run(again) != self.test_run(whole):
                raise Wrong("evaluate.py wrote another run than the training")
        for column, layout in (("st", "sentence_transformers"), ("hf", "hf")) if exports else ():
            self.export(cells, column, whole, layout)
        return cells

    def bi_encoder(self, model: str) -> dict[str, str]:
        """Train, search and export."""
        cells: dict[str, str] = {}
        with self.cell(cells, model):
            trained = self.train(model, 2)
            late = ["late.token_depth=3000"] if model == "colbert" else []
            given = [f"checkpoint={trained}", "index=flat", "depth=30", "report=none", *late]
            searched = self.test_run(self.run("search.py", *given, f"cache_dir={self.where / 'cache'}", name="search"))
            ours = self.test_run(trained)
            pairs = [(score, searched[query][doc]) for query, docs in ours.items() for doc, score in docs.items()]
            worst = max(abs(a - b) for a, b in pairs) / max(1.0, *(abs(a) for a, _ in pairs))
            cells[model] = f"yes {worst:.0e}"
            if worst > CLOSE:
                raise Wrong(f"scores of search.py differ from those of the training's test by {worst:.1e}")
        if cells[model].startswith("yes"):
            self.export(cells, f"{model} st", trained, "sentence_transformers")
        return cells

    def export(self, cells: dict[str, str], column: str, trained: Path, layout: str) -> None:
        """Export a run, and read the comparison of the scores."""
        with self.cell(cells, column):
            target = self.where / column.replace(" ", "_")
            given = [f"checkpoint={trained}", f"format={layout}", f"to={target}", f"cache_dir={self.where / 'cache'}"]
            self.run("ranker/__main__.py", "export", *given, name=f"export_{target.name}")
            part = json.loads((target / "parity.json").read_text())["sets"][self.data.name]
            cells[column] = f"yes {part['largest_gap']:.0e}"
            if part["largest_gap"] > CLOSE:
                raise Wrong(f"scores differ by {part['largest_gap']:.1e}")

    @contextlib.contextmanager
    def cell(self, cells: dict[str, str], column: str):
        """Write `yes`, `refused` or `NO` into a cell, and store the message."""
        try:
            yield
            cells.setdefault(column, "yes")
        except Refused as error:
            cells[column] = "refused"
            self.messages.append(f"{column}: {error}")
        except AssertionError as error:
            cells[column] = "NO"
            self.messages.append(f"{column}: {error}")

    def all(self) -> dict[str, str]:
        """Run all commands; for a family that is refused, only the first one."""
        cells = self.monobert()
        return cells if cells["train"] != "yes" else cells | self.bi_encoder("dpr") | self.bi_encoder("colbert")


def main() -> None:
    """Print a row when a family has ended, and the messages after all rows."""
    from tests.zoo.checkpoints import make

    forks = Forks("ranker.commands.export", "sentence_transformers.cross_encoder")
    print("| family | " + " | ".join(COLUMNS) + " |\n" + "| --- " * (1 + len(COLUMNS)) + "|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        data = write_data(Path(temporary) / "words")
        for family in sys.argv[1:] or FAMILIES:
            where = Path(temporary) / re.sub(r"\W", "_", family)
            where.mkdir()
            walk = Walk(forks, make(family, where / "checkpoint"), data, where)
            cells = walk.all()
            print(f"| {family} | " + " | ".join(cells.get(column, "") for column in COLUMNS) + " |", flush=True)
            for message in walk.messages:
                print(f"{family}, {message}".replace(temporary, "."), file=sys.stderr, flush=True)
    forks.close()


if __name__ == "__main__":
    main()
