"""Loggers, each made for one run folder; what they show beyond curves is in `dashboards.py`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from ranker.training.run_writer import write_json

SWEEP_FILE = "multirun.yaml"  # lies in a sweep's folder, above its jobs' folders
CONNECT_SECONDS = 60.0  # how long online runs wait for the server before the first step
FINISH_SECONDS = 300.0  # ... and for what is not uploaded at the end; the files stay


def csv(folder: Path) -> Logger:
    """`metrics.csv` in the run folder; a row's step counts optimizer steps from 0."""
    return CSVLogger(folder, name="", version="")


def tensorboard(folder: Path, earlier: Path | None = None) -> Logger:  # noqa: ARG001 - a run's event files stay in its folder
    """TensorBoard event files in `tensorboard/`; a run that goes on has its own, `--logdir` of the folder above shows both."""
    return TensorBoardLogger(folder, name="tensorboard", version="", default_hp_metric=False)


def wandb(
    folder: Path, earlier: Path | None = None, project: str = "ranker", mode: str = "offline", group: str | None = None,
    tags: list[str] | None = None,
) -> Logger:  # fmt: skip
    """A Weights & Biases run named after the run folder.

    Args:
        folder: The run folder.
        earlier: The run folder that this run goes on from; its wandb run goes on too.
        project: Project name.
        mode: `offline`, `online` or `disabled`.
        group: Group name, for runs that belong together; None: a sweep's jobs are one group.
        tags: Tags.
    """
    if group is None and (folder.parent / SWEEP_FILE).is_file():
        group = folder.parent.name
    return Wandb(folder, earlier, project, mode, group, tags)


class Wandb(WandbLogger):
    """Lightning's logger with a run's identity in `wandb.json`, so that a resumed training goes on as the same wandb run.

    Every entry carries `trainer/global_step`, the x axis of all curves; wandb's own counter only goes up, so that no value is dropped
    (PC-89). A resumed training repeats the steps after its checkpoint, bit by bit; those that were logged are not logged again.

    Args:
        folder: The run folder.
        earlier: The run folder that this run goes on from.
        project: Project name.
        mode: `offline`, `online` or `disabled`.
        group: Group name.
        tags: Tags.
    """

    def __init__(self, folder: Path, earlier: Path | None, project: str, mode: str, group: str | None, tags: list[str] | None) -> None:
        from wandb import Settings

        self._file = folder / "wandb.json"
        before = _read(earlier / "wandb.json" if earlier is not None else None)
        self._run_id, self._entries, self._logged_before = before["id"], before["entries"], before["step"]
        self._last = self._logged_before
        super().__init__(
            name="/".join(folder.parts[-2:]), save_dir=folder, id=self._run_id, project=project, group=group, tags=tags or None, mode=mode,
            settings=Settings(
                console="off", silent=True, init_timeout=CONNECT_SECONDS, finish_timeout=FINISH_SECONDS, save_code=False, disable_code=True
            ),
        )  # fmt: skip
        self._wandb_init.pop("anonymous", None)  # wandb warns of it, even where it is None

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log an entry, unless the run that this one goes on from has logged it."""
        if step is not None and step < self._logged_before:
            return
        entry = dict(metrics) if step is None else {**metrics, "trainer/global_step": step}
        if self.experiment.step < self._entries:  # an offline run does not know how far the earlier one came
            self.experiment.log(entry, step=self._entries)
        else:
            self.experiment.log(entry)
        self._entries += 1
        self._last = self._last if step is None else max(self._last, step)
        write_json(self._file, {"id": self._run_id, "entries": self._entries, "step": self._last})


def _read(path: Path | None) -> dict[str, Any]:
    """A run's id, its number of entries and the last step that it logged."""
    if path is None or not path.is_file():
        return {"id": secrets.token_hex(4), "entries": 0, "step": 0}
    return json.loads(path.read_text(encoding="utf-8"))
