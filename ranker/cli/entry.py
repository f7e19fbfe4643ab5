"""Start a command: set up Hydra, check the configuration, make the run folder, report a user's errors in one line."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ranker import run_folder
from ranker.cli import hydra_rules, overrides, sweep
from ranker.cli.complaints import cause_of, in_one_line, is_hydras, memory_in_one_line, path_in_one_line
from ranker.cli.resume import overrides_of, resumed, run_name, started_from
from ranker.config import check as config
from ranker.config import roots
from ranker.config.paths import make_absolute, split_by_folder
from ranker.config.sets import source_nodes
from ranker.config.targets import constructor_keys
from ranker.errors import ConfigError, Preempted, RankerError, errors_of
from ranker.files.space import no_room
from ranker.processes import global_rank, is_first_process, leave_without_peers, watch_from_the_start


def register(command: str | None = None) -> None:
    """Register typed roots, resolvers and rules with Hydra, and quote text values in `sys.argv`, before Hydra starts.

    Args:
        command: The command that `sys.argv` is for; None leaves `sys.argv` as it is.
    """
    watch_from_the_start()
    if command is not None:
        sys.argv[1:] = overrides.quote_texts(command, sys.argv[1:])
    # without this variable, Hydra prints its own traceback and exits, and `user_errors` sees no error
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    roots.register(command)
    hydra_rules.install()
    _register_resolvers()


def _register_resolvers() -> None:
    OmegaConf.register_new_resolver("stamp", _stamp, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("module_of", lambda target: ("unnamed." + str(target)).split(".")[-2], replace=True)
    OmegaConf.register_new_resolver("root", _root, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("run_name", run_name, replace=True)


def _stamp() -> str:
    """Return a folder name that is unique, even among runs that start in the same second."""
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(2)}"


def _root(folder: str) -> str:
    """Return the folder of all runs; for a rank above 0, a temporary folder until it gets the run folder."""
    return folder if global_rank() == 0 else os.path.join(tempfile.gettempdir(), f"ranker-process-{os.getpid()}")  # noqa: PTH118


def job(command: str, cfg: DictConfig) -> float | None:
    """Check the configuration, then run `ranker.commands.COMMAND`; its faults are reported before torch is imported.

    If a job of a sweep fails, the error is printed and the result is None, so that the other jobs run. SIGTERM ends the
    whole sweep.

    Args:
        command: The command's name.
        cfg: The composed configuration.

    Returns:
        The objective of a training; None for other commands.
    """
    _register_resolvers()  # a process that a launcher started has not called `register`
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    if hydra.mode != RunMode.MULTIRUN:
        with user_errors(), _own_folder(folder):
            return _run(command, cfg)
    if global_rank() != 0:  # another task of a SLURM job; the first task writes the records
        return _run(command, cfg)
    if not folder.resolve().is_relative_to(Path(hydra.sweep.dir).resolve()):
        raise ConfigError(f"hydra.sweep.subdir: expected a folder inside {hydra.sweep.dir}, got {hydra.sweep.subdir!r}")

    def work() -> float | None:
        with _preempted_only(), _one_line_errors():
            return _run(command, cfg)

    return sweep.run_job(Path(hydra.sweep.dir), folder, hydra.job.num, list(hydra.overrides.task), work)


@contextlib.contextmanager
def _own_folder(folder: Path) -> Iterator[None]:
    """Remove the run folder if a user's mistake ends the run before it has a result."""
    if not is_first_process() or os.environ.get(sweep.JOB_FOLDER) == str(folder):  # not made by this run
        yield
        return
    try:
        yield
    except (RankerError, HydraException, OmegaConfBaseException):
        run_folder.discard(folder)
        raise


def _run(command: str, cfg: DictConfig) -> float | None:
    # Child processes skip this: they read config.yaml of the run folder, which already has the keys of the resumed run
    if cfg.get("checkpoint") and Path(str(cfg.checkpoint)).is_dir() and overrides_of("checkpoint"):
        if command in ("train", "pretrain") and cfg.get("resume"):
            cfg = resumed(cfg)
        elif command == "train":
            cfg = started_from(cfg)
    config.check(cfg)
    make_absolute(cfg)
    _check_source(cfg)
    config.fill_in(cfg)
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN and "trainer" in cfg:
        build = importlib.import_module("ranker.assembly.trainer")
        if build.several_devices(cfg.trainer):
            return sweep.run_in_separate_process(
                command, Path(HydraConfig.get().runtime.output_dir), OmegaConf.to_yaml(cfg, resolve=True)
            )
    function = getattr(importlib.import_module(f"ranker.commands.{command}"), command)
    gc.freeze()  # the objects of the start-up live until the end, so the garbage collector need not look at them
    atexit.register(gc.unfreeze)  # otherwise these objects are not freed at exit, and extension modules report leaks
    gc.enable()  # `ranker.cli.main.run` disabled it
    return function(cfg)


def _check_source(cfg: DictConfig) -> None:
    """Call the method `check` of each data source: it reports missing files or packages before torch is imported."""
    nodes = {"data": cfg.get("data")} | dict(source_nodes(cfg))
    if cfg.get("suite") is not None:  # a suite leaves out a set whose folder is missing
        _, missing = split_by_folder(cfg.suite.sets)
        nodes = {path: node for path, node in nodes.items() if path not in {f"suite.sets.{name}" for name in missing}}
    for path, node in nodes.items():
        if node is not None and str(node._target_).startswith("ranker."):
            with errors_of(path):
                try:
                    check = getattr(instantiate(constructor_keys(path, node)), "check", None)
                except HydraException as error:
                    raise (cause_of(error) or error) from error
                if check is not None:
                    check()


@contextlib.contextmanager
def _preempted_only() -> Iterator[None]:
    try:
        yield
    except Preempted as error:
        _fail(str(error), error.exit_code)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Raise errors of Hydra and OmegaConf as errors of this program, in one line."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise (cause_of(error) or ConfigError(in_one_line(error))) from error


def _report_thread(failed: threading.ExceptHookArgs) -> None:
    """Print one line if a library's thread fails on a full disk; TensorBoard also raises this error in its caller."""
    reason = no_room(failed.exc_value) if failed.exc_value is not None else None
    if reason is None:
        threading.__excepthook__(failed)
    else:
        name = failed.thread.name if failed.thread is not None else "a thread"
        print(f"warning: {name}: expected room to write to, got {reason!r}", file=sys.stderr)  # noqa: T201


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Print a user's error without a traceback and exit; any other error is a bug and keeps its traceback."""
    threading.excepthook = _report_thread
    try:
        yield
    except RankerError as error:
        _fail(str(error), error.exit_code)
    except (HydraException, OmegaConfBaseException) as error:
        cause = cause_of(error)
        _fail(in_one_line(error) if cause is None else str(cause))
    except KeyboardInterrupt:
        _fail("stopped by the keyboard")
    except Exception as error:  # after Hydra's errors, because some of them are OSErrors
        message = path_in_one_line(error, is_hydras(error)) or memory_in_one_line(error)
        if message is None and is_hydras(error) and not isinstance(error, OSError):
            message = in_one_line(error)
        if message is None:
            raise
        _fail(message)


def _fail(message: str, exit_code: int = 1) -> None:
    for line in message.split("\n") if message else ():
        print(f"error: {line}", file=sys.stderr)  # noqa: T201 - logging may not be set up yet
    sys.stderr.flush()
    leave_without_peers(exit_code)
    raise SystemExit(exit_code)
