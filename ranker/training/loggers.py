"""Loggers of a run folder. They log curves, and `dashboards.py` logs everything else."""

from __future__ import annotations

import json
import secrets
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from ranker.errors import DataError
from ranker.training.run_writer import write_json, write_text

ID_FILE, ENTRIES_FILE = "wandb.json", "wandb.jsonl"
SWEEP_FILE = "multirun.yaml"  # file in a sweep's folder, which contains the folders of the sweep's jobs
CONNECT_SECONDS = 20.0  # how long an online run waits for the server before its first step
FINISH_SECONDS = 300.0  # how long a run waits for uploads at its end; what is not uploaded stays in wandb's files


def csv(folder: Path) -> Logger:
    """Return the logger of `metrics.csv` in the run folder. A row's step is the number of earlier optimizer steps."""
    return CSVLogger(folder, name="", version="")


def tensorboard(folder: Path, earlier: Path | None = None) -> Logger:  # noqa: ARG001 - each run has its event files
    """Return the logger of `tensorboard/`. A resumed run writes new files; `--logdir PARENT_FOLDER` shows all files."""
    return TensorBoardLogger(folder, name="tensorboard", version="", default_hp_metric=False)


def wandb(
    folder: Path, earlier: Path | None = None, project: str = "ranker", mode: str = "offline", group: str | None = None,
    tags: list[str] | None = None,
) -> Logger:  # fmt: skip
    """Return the logger of a Weights & Biases run that has the run folder's name.

    Args:
        folder: The run folder.
        earlier: The run folder from which this run resumes; its wandb run is continued. None: a new run.
        project: Project name.
        mode: `offline`, `online` or `disabled`.
        group: Group name; None: the jobs of a sweep form a group.
        tags: Tags.
    """
    if group is None and (folder.parent / SWEEP_FILE).is_file():
        group = folder.parent.name
    return Wandb(folder, earlier, project, mode, group, tags)


class Wandb(WandbLogger):
    """Lightning's wandb logger. A resumed training continues the same wandb run.

    `wandb.json` stores the run's id, and `wandb.jsonl` its curves. Each entry has `trainer/global_step`, the x axis of
    all curves. wandb's own step counts entries and only increases, so wandb drops no value (PC-89). wandb's own file
    lacks the last seconds of a killed run. So a resumed run first logs those entries of the earlier run that the server
    lacks (offline: all entries). The steps after the checkpoint are repeated bit for bit. If the earlier run has logged
    values for these steps, they are not logged again.

    Args:
        folder: The run folder.
        earlier: The run folder from which this run resumes; None: a new run.
        project: Project name.
        mode: `offline`, `online` or `disabled`.
        group: Group name.
        tags: Tags.
    """

    def __init__(
        self, folder: Path, earlier: Path | None, project: str, mode: str, group: str | None, tags: list[str] | None
    ) -> None:
        from wandb import Settings

        self._folder = folder
        self._run_id, self._before = _read(earlier) if earlier is not None else (secrets.token_hex(4), [])
        self._logged = {(entry["trainer/global_step"], name) for entry in self._before for name in entry}
        super().__init__(
            name="/".join(folder.parts[-2:]),
            save_dir=folder,
            id=self._run_id,
            project=project,
            group=group,
            tags=tags or None,
            mode=mode,
            settings=Settings(
                console="off",
                silent=True,
                init_timeout=CONNECT_SECONDS,
                finish_timeout=FINISH_SECONDS,
                save_code=False,
                disable_code=True,
            ),
        )
        self._wandb_init.pop("anonymous", None)  # wandb warns of this argument even if it is None

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Open the run with its configuration and the earlier entries, and write its id for a later resume."""
        write_json(self._folder / ID_FILE, {"id": self._run_id})
        write_text(self._folder / ENTRIES_FILE, "".join(f"{json.dumps(entry)}\n" for entry in self._before))
        super().log_hyperparams(params)
        known = self.experiment.step  # number of entries on the server; 0 offline
        for entry in self._before:
            if entry["_step"] >= known:
                self.experiment.log(
                    {name: value for name, value in entry.items() if name != "_step"}, step=entry["_step"], commit=True
                )

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log an entry without the values that the earlier run has logged at the same step."""
        if step is None:  # an entry without a step: a table or a picture at the end of a training
            self.experiment.log(dict(metrics))
            return
        entry = {name: value for name, value in metrics.items() if (step, name) not in self._logged}
        if entry:
            entry["trainer/global_step"] = step
            with (self._folder / ENTRIES_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"_step": self.experiment.step, **entry}, default=float) + "\n")
            self.experiment.log(entry)


def _read(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """Return the id and the entries of a folder's wandb run. An incomplete last line, left by a kill, is ignored."""
    path, entries = folder / ID_FILE, folder / ENTRIES_FILE
    if not path.is_file():
        return secrets.token_hex(4), []
    try:
        lines = entries.read_text(encoding="utf-8").splitlines(keepends=True) if entries.is_file() else []
        logged = [json.loads(line) for line in lines if line.endswith("\n")]
        if any("_step" not in entry or "trainer/global_step" not in entry for entry in logged):
            raise ValueError("an entry without its step")
        return str(json.loads(path.read_text(encoding="utf-8"))["id"]), logged
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder}: expected a readable {ID_FILE} and {ENTRIES_FILE}, got {error}; "
            "delete both files; the training then continues as a new wandb run"
        ) from error
