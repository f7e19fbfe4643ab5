"""Results of a study: a row for each subject (probed encoder), task, layer, seed and control, and bits of each target.

Results are written as a table (`probe_results.csv`) and arrays (`codes/`), which can be read back.
"""

from __future__ import annotations

import csv
import json
import math
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ranker.errors import DataError
from ranker.files.checksums import verify_folder, write_sums
from ranker.files.writing import write_whole
from ranker.probing.code_length import CodeLength
from ranker.probing.controls import MAIN

RANKING = ("AP", "RR", "nDCG@10", "nDCG@20", "P@10", "P@20")
# measures with relevance threshold 1, which are computed if the collection's threshold is higher
LENIENT = ("AP(rel=1)", "RR(rel=1)", "P(rel=1)@10", "P(rel=1)@20")
COLUMNS = (
    "model",
    "task",
    "layer",
    "seed",
    "control",
    "n_targets",  # training targets
    "k",  # classes
    "t1",  # targets in block 1
    "mdl_bits",
    "mdl_legacy",
    "compression",
    "units",
    "uniform_bits",
    "prior_bits",
    "acc",  # accuracy
    "macro_f1",
    *RANKING,
    *LENIENT,
    "epochs",
    "seconds",
    "data_hash",
    "model_hash",
)


@dataclass(frozen=True)
class Result:
    """Result of one subject, task, layer, seed and control.

    Args:
        model: Name of the subject.
        task: Name of the task.
        layer: Number of the layer, 0 for the embeddings; None for controls without states.
        seed: Seed of permutation and initial weights.
        control: Name of the control; `none` for the task itself.
        code: The description length.
        prior_bits: Description length of the label prior in the same blocks.
        accuracy: Accuracy on the test part, after training on all training pairs.
        macro_f1: Macro F1 on the test part, after training on all training pairs.
        measures: Ranking measures on the test queries, if the task ranks.
        epochs: Passes over the training pairs in the last training.
        seconds: Seconds of this probe's trainings.
        data_hash: Hash of labeller, texts, spans, labels and parts.
        model_hash: Hash of the subject.
        bits: Bits of each training target in the order of the pairs, float32 [targets].
        block_ends: End of each block, in targets.
        block_bits: Bits of each block.
    """

    model: str
    task: str
    layer: int | None
    seed: int
    control: str
    code: CodeLength
    prior_bits: float
    accuracy: float
    macro_f1: float
    measures: dict[str, float]
    epochs: float
    seconds: float
    data_hash: str
    model_hash: str
    bits: np.ndarray = field(repr=False)
    block_ends: list[int] = field(repr=False, default_factory=list)
    block_bits: list[float] = field(repr=False, default_factory=list)

    def row(self, units: str) -> dict[str, Any]:
        """Return the row of the table; `units` is the unit of compression."""
        code = self.code
        row = {
            "model": self.model,
            "task": self.task,
            "layer": "" if self.layer is None else self.layer,
            "seed": self.seed,
            "control": self.control,
            "n_targets": code.targets,
            "k": code.classes,
            "t1": code.first,
            "mdl_bits": code.bits,
            "mdl_legacy": code.legacy_mixed,
            "compression": code.compression(units),
            "units": units,
            "uniform_bits": code.uniform_bits,
            "prior_bits": self.prior_bits,
            "acc": self.accuracy,
            "macro_f1": self.macro_f1,
            "epochs": self.epochs,
            "seconds": self.seconds,
            "data_hash": self.data_hash,
            "model_hash": self.model_hash,
        }
        row |= {name: self.measures.get(name, "") for name in (*RANKING, *LENIENT)}
        return {name: row[name] for name in COLUMNS}


@dataclass(frozen=True)
class TaskRecord:
    """Description of a task's data, stored with the results.

    Args:
        description: The content of `ProbeData.record`, and `coding`: the options of the code (`StudyOptions.coding`).
        queries: Query of each training target, str [targets].
    """

    description: dict[str, Any]
    queries: np.ndarray


class Results:
    """All results of a study.

    Args:
        results: The rows.
        tasks: Name of each task -> its record, in order.
        units: Unit of compression, `bits` or `legacy_mixed`.
    """

    def __init__(self, results: Iterable[Result], tasks: dict[str, TaskRecord], units: str = "bits") -> None:
        self.all, self.tasks, self.units = list(results), tasks, units

    @property
    def models(self) -> list[str]:
        """Names of the subjects, in order."""
        return list(dict.fromkeys(result.model for result in self.all))

    def of(self, model: str, task: str, control: str = MAIN) -> list[Result]:
        """Return the results of one subject, task and control."""
        return [result for result in self.all if (result.model, result.task, result.control) == (model, task, control)]

    def by_layer(self, model: str, task: str, control: str = MAIN) -> dict[int, list[Result]]:
        """Return layer -> the results of all seeds, with layers in rising order."""
        layers: dict[int, list[Result]] = {}
        for result in self.of(model, task, control):
            if result.layer is not None:
                layers.setdefault(result.layer, []).append(result)
        return dict(sorted(layers.items()))

    def compression(self, model: str, task: str, control: str = MAIN) -> dict[int, float]:
        """Return the mean compression over seeds of each layer."""
        return {
            layer: float(np.mean([result.code.compression(self.units) for result in seeds]))
            for layer, seeds in self.by_layer(model, task, control).items()
        }

    def value(self, model: str, task: str, control: str) -> float:
        """Return a control's mean compression over seeds, at the best layer if it has layers; NaN if it was not run."""
        by_layer: dict[int | None, list[float]] = {}
        for result in self.of(model, task, control):
            by_layer.setdefault(result.layer, []).append(result.code.compression(self.units))
        return max((float(np.mean(seeds)) for seeds in by_layer.values()), default=math.nan)

    def mean_bits(self, model: str, task: str, layer: int) -> np.ndarray:
        """Return the bits of each training target, a mean over seeds, float64 [targets]."""
        return np.mean([result.bits.astype(np.float64) for result in self.by_layer(model, task)[layer]], axis=0)

    def seed_lengths(self, model: str, task: str, layer: int) -> list[float]:
        """Return the bits per target of each seed."""
        return [result.code.bits / result.code.targets for result in self.by_layer(model, task)[layer]]

    # files
    # ----------------------------------------------------------------------------------------------------------

    def write(self, folder: Path) -> None:
        """Write `probe_results.csv`, `codes/TASK.npz` and `data/TASK.json`."""
        for name, record in self.tasks.items():
            with write_whole(folder / "data" / f"{name}.json") as file:
                json.dump(record.description, file, ensure_ascii=False, indent=2)
            arrays: dict[str, np.ndarray] = {"queries": record.queries}
            notes = []
            for i, result in enumerate(result for result in self.all if result.task == name):
                arrays[f"bits{i}"] = result.bits
                notes.append(
                    [
                        result.model,
                        result.layer,
                        result.seed,
                        result.control,
                        result.block_ends,
                        result.block_bits,
                        result.measures,
                    ]
                )
            arrays["notes"] = np.array(json.dumps(notes))
            with write_whole(folder / "codes" / f"{name}.npz", binary=True) as packed:
                np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]
        with write_whole(folder / "probe_results.csv") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(result.row(self.units) for result in self.all)
        written = [part for name in self.tasks for part in (f"data/{name}.json", f"codes/{name}.npz")]
        write_sums(folder, ["probe_results.csv", *written])

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Read the files that `write` wrote.

        Raises:
            DataError: The folder is not a finished probing run, or its files are damaged.
        """
        path = folder / "probe_results.csv"
        if not path.is_file():
            raise DataError(
                f"{folder}: expected a finished probing run with probe_results.csv, got none; give another folder"
            )
        verify_folder(folder)
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        tasks: dict[str, TaskRecord] = {}
        results = []
        try:
            for name in dict.fromkeys(row["task"] for row in rows):
                description = json.loads((folder / "data" / f"{name}.json").read_text(encoding="utf-8"))
                with np.load(folder / "codes" / f"{name}.npz", allow_pickle=False) as arrays:
                    tasks[name] = TaskRecord(description, arrays["queries"])
                    task_rows = [row for row in rows if row["task"] == name]
                    for i, (row, note) in enumerate(zip(task_rows, json.loads(str(arrays["notes"])), strict=True)):
                        results.append(_result(row, note, arrays[f"bits{i}"]))
        except (OSError, KeyError, ValueError, TypeError, IndexError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{folder}: expected a whole probing run, got a file that cannot be read ({error}); run it again"
            ) from error
        return cls(results, tasks, rows[0]["units"] if rows else "bits")


def _result(row: dict[str, str], note: Sequence[Any], bits: np.ndarray) -> Result:
    """Return a result from its row of the table, its note and its array in the files of `Results.write`."""
    code = CodeLength(classes=int(row["k"]), first=int(row["t1"]), targets=int(row["n_targets"]), later_bits=0.0)
    *_, block_ends, block_bits, measures = note
    return Result(
        model=row["model"],
        task=row["task"],
        layer=None if row["layer"] == "" else int(row["layer"]),
        seed=int(row["seed"]),
        control=row["control"],
        code=replace(code, later_bits=float(row["mdl_bits"]) - code.first_bits),
        prior_bits=float(row["prior_bits"]),
        accuracy=float(row["acc"]),
        macro_f1=float(row["macro_f1"]),
        measures=measures,
        epochs=float(row["epochs"]),
        seconds=float(row["seconds"]),
        data_hash=row["data_hash"],
        model_hash=row["model_hash"],
        bits=bits,
        block_ends=block_ends,
        block_bits=block_bits,
    )
