"""Loggers of a run folder. They log curves; `dashboards.py` logs everything else."""

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
SWEEP_FILE = "multirun.yaml"  # in a sweep's folder, which holds the folders of its jobs
CONNECT_SECONDS = 20.0  # an online run waits this long for the server before its first step
FINISH_SECONDS = 300.0  # and this long for uploads at its end; what is not uploaded stays in its files


def csv(folder: Path) -> Logger:
    """`metrics.csv` in the run folder; a row's step counts optimizer steps from 0."""
    return CSVLogger(folder, name="", version="")


def tensorboard(folder: Path, earlier: Path | None = None) -> Logger:  # noqa: ARG001 - each run has its event files
    """TensorBoard event files in `tensorboard/`. A resumed run writes new ones; the parent as `--logdir` shows both."""
    return TensorBoardLogger(folder, name="tensorboard", version="", default_hp_metric=False)


def wandb(
    folder: Path, earlier: Path | None = None, project: str = "ranker", mode: str = "offline", group: str | None = None,
    tags: list[str] | None = None,
) -> Logger:  # fmt: skip
    """A Weights & Biases run named after the run folder.

    Args:
        folder: The run folder.
        earlier: The run folder from which this run resumes; its wandb run is continued.
        project: Project name.
        mode: `offline`, `online` or `disabled`.
        group: Group name; None groups the jobs of a sweep.
        tags: Tags.
    """
    if group is None and (folder.parent / SWEEP_FILE).is_file():
        group = folder.parent.name
    return Wandb(folder, earlier, project, mode, group, tags)


class Wandb(WandbLogger):
    """Lightning's wandb logger; a resumed training continues the same wandb run.

    `wandb.json` holds the run's id and `wandb.jsonl` its curves. Each entry has `trainer/global_step`, the x axis of
    all curves. wandb's step counts entries and only increases, so wandb drops no value (PC-89). wandb's file lacks the
    last seconds of a killed run. A resumed run therefore first logs the entries of the earlier run that the server
    lacks (offline: all of them). The steps after its checkpoint are repeated bit for bit, so values that the earlier
    run has logged for these steps are not logged again.

    Args:
        folder: The run folder.
        earlier: The run folder from which this run resumes.
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
        known = self.experiment.step  # the number of entries on the server; 0 offline
        for entry in self._before:
            if entry["_step"] >= known:
                self.experiment.log(
                    {name: value for name, value in entry.items() if name != "_step"}, step=entry["_step"], commit=True
                )

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log an entry, except values that the earlier run has logged at the same step."""
        if step is None:  # tables and pictures at the end of a training
            self.experiment.log(dict(metrics))
            return
        entry = {name: value for name, value in metrics.items() if (step, name) not in self._logged}
        if entry:
            entry["trainer/global_step"] = step
            with (self._folder / ENTRIES_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"_step": self.experiment.step, **entry}, default=float) + "\n")
            self.experiment.log(entry)


def _read(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """The id and the entries of a folder's wandb run; an incomplete last line (after a kill) is ignored."""
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
            "delete both: the training goes on as a new wandb run"
        ) from error
