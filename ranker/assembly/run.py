"""Open a run folder when a command begins; restore the process's state when it ends. This module imports no torch."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ranker.errors import RankerError
from ranker.files.checksums import write_sums
from ranker.processes import PARENT, announce_dead_children, is_first_process, is_lost_peer
from ranker.training.run_writer import environment, log_to, write_json, write_text

# regular expressions of Lightning's warnings about things that this program does on purpose
SILENCED = (
    "Experiment logs directory",  # the run folder contains other files than logs
    ".*LeafSpec.*is deprecated",
    ".*does not have many workers.*",
    ".*Checkpoint directory .* exists and is not empty",
    ".*Your `IterableDataset`",
    "You're using the WeightAveraging callback with a model that overrides",  # sharding, which forbids this callback
    "FSDP2-wrapped module .* returned a view tensor",  # no code changes scores in place
    "You defined a `validation_step` but have no",  # a pretraining has no validation
)


def open_run(cfg: DictConfig) -> Path:
    """Write the run folder's configuration, environment and log in the first process; return the folder in all."""
    folder = Path(HydraConfig.get().runtime.output_dir).resolve()
    quiet_libraries()
    if is_first_process():
        write_config(cfg, folder)
        write_json(folder / "environment.json", environment(cfg.get("seed", 0)))
        log_to(folder / "train.log")
        announce_dead_children()
    else:
        logging.getLogger().setLevel(logging.WARNING)
    return folder


def write_config(cfg: DictConfig, folder: Path) -> None:
    """Write `config.yaml` and its checksum."""
    write_text(folder / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
    write_sums(folder, ["config.yaml"])


def add_facts(folder: Path, **facts: Any) -> None:
    """Add entries to `environment.json`."""
    path = folder / "environment.json"
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | facts)


def quiet_libraries() -> None:
    """Lower the log levels of the libraries that are already loaded; this loads no library."""
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric"):
        # these loggers have handlers; without this, the root logger's handlers would print each line again
        logging.getLogger(name).propagate = False
        logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger(f"{name}.utilities.rank_zero").addFilter(_is_no_tip)
    for message in SILENCED:
        warnings.filterwarnings("ignore", message=message)


def _is_no_tip(record: logging.LogRecord) -> bool:
    """Return False for Lightning's tips. One tip recommends static_graph, which breaks training with micro-batches."""
    text = record.getMessage()
    return not any(word in text for word in ("litlogger", "static_graph", "💡", "Checkpoint directory"))


def cfg_values(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain values."""
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    return values


@contextlib.contextmanager
def one_run() -> Iterator[None]:
    """Undo at the end what a run changes in this process, so that the next job starts clean.

    A run changes the command line, log handlers, the process group and environment variables.

    Raises:
        RankerError: Another process of the run has died.
    """
    argv, variables, handlers = sys.argv, dict(os.environ), list(logging.getLogger().handlers)
    failed, lost = True, False
    try:
        yield
        failed = False
    except RuntimeError as error:
        lost = is_lost_peer(error)
        if not lost:
            raise
        raise RankerError(
            "another process of this run has ended, so this one can't go on (the error of that process, if it had one, "
            f"is above; here: {str(error).splitlines()[0]}); continue from the last checkpoint with "
            "checkpoint=RUN_FOLDER resume=true"
        ) from error
    finally:
        _finish_wandb(failed)
        sys.argv = argv
        for handler in set(logging.getLogger().handlers) - set(handlers):
            logging.getLogger().removeHandler(handler)
            handler.close()
        if not lost:  # if a process is lost, `leave_without_peers` ends this process
            _leave_process_group()
        for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK", PARENT):
            if name not in variables:
                os.environ.pop(name, None)


def _finish_wandb(failed: bool) -> None:
    """Close this process's wandb run, if there is one, so that the next job of a sweep gets a new one."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.run.finish(exit_code=1 if failed else 0)


def _leave_process_group() -> None:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        # gloo's threads release their last tensors under a lock and may need the interpreter for that. If the group
        # were destroyed at once, this thread would hold the interpreter and wait for the lock: a deadlock.
        time.sleep(0.1)
        distributed.destroy_process_group()
