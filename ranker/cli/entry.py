"""The edge between the command line and the program: run folders, and errors as one message with exit code 1."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import re
import secrets
import sys
import tempfile
import traceback
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ranker import run_folder
from ranker.cli import hydra_rules, overrides, sweep
from ranker.config import check as config
from ranker.config import roots
from ranker.config.paths import make_absolute
from ranker.config.roots import CONF
from ranker.config.stored import load_stored
from ranker.errors import ConfigError, Preempted, RankerError, did_you_mean
from ranker.processes import global_rank, is_first_process, watch_from_the_start

# what may be another in a training that goes on: how long, where and how it is computed, what is kept and shown; else
# it would be another one
CHANGEABLE = (
    "trainer",
    "batch.max_tokens",
    "batch.eval_max_tokens",
    "batch.workers",
    "encoder.trust_remote_code",
    "callbacks",
    "logger",
    "name",
    "cache_dir",
    "save_every_steps",
    "nonfinite",
    "checkpoint",
    "resume",
)
HYDRA, HERE = Path(hydra.__file__).parent, Path(__file__).resolve().parents[1]
FIXED = ("trainer", "trainer.limit_train_batches", "trainer.gradient_clip_val")


def register(command: str | None = None) -> None:
    """Make typed roots, resolvers and rules known to Hydra, and let a script's text keys take what was typed; before `hydra.main`."""
    watch_from_the_start()
    if command is not None:
        sys.argv[1:] = overrides.quote_texts(command, sys.argv[1:])
    # Hydra would print its own traceback and exit; with this it hands every error to `user_errors`
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    roots.register(command)
    hydra_rules.install()
    _register_resolvers()


def _register_resolvers() -> None:
    OmegaConf.register_new_resolver("stamp", _stamp, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("module_of", lambda target: ("unnamed." + str(target)).split(".")[-2], replace=True)
    OmegaConf.register_new_resolver("root", _root, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("run_name", _run_name, replace=True)


def _stamp() -> str:
    """A folder name that no other run has, even one started in the same second."""
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(2)}"


def _run_name(name: str, checkpoint: str | None, resume: bool) -> str:
    """The folder of runs of this name; a run that goes on stands beside the one that it goes on from, unless it is given a name."""
    stored = Path(checkpoint or "") / "config.yaml"
    if not resume or _overridden("name") or not stored.is_file():
        return name
    return str(OmegaConf.select(load_stored(stored), "name") or name)


def _root(folder: str) -> str:
    """Where runs go; other processes than the first get a folder of their own elsewhere, and learn the run's from the first."""
    return folder if global_rank() == 0 else os.path.join(tempfile.gettempdir(), f"ranker-process-{os.getpid()}")  # noqa: PTH118


def job(command: str, cfg: DictConfig) -> float | None:
    """Check the configuration, then run `ranker.commands.COMMAND`; a mistake is answered before torch is imported.

    A sweep's job that fails says so and returns None, so that the other jobs go on; SIGTERM is meant for all of them.
    """
    _register_resolvers()  # a launcher's process has not come through `register`
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    if hydra.mode != RunMode.MULTIRUN:
        with user_errors(), _own_folder(folder):
            return _run(command, cfg)
    if global_rank() != 0:  # another task of a SLURM job; the first one keeps the records
        return _run(command, cfg)
    if not folder.resolve().is_relative_to(Path(hydra.sweep.dir).resolve()):
        raise ConfigError(f"hydra.sweep.subdir: expected a folder inside {hydra.sweep.dir}, got {hydra.sweep.subdir!r}")

    def work() -> float | None:
        with _preempted_only(), _one_line_errors():
            return _run(command, cfg)

    return sweep.run_job(Path(hydra.sweep.dir), folder, hydra.job.num, list(hydra.overrides.task), work)


@contextlib.contextmanager
def _own_folder(folder: Path) -> Iterator[None]:
    """Begin in an unused run folder; a mistake that shows before there is any result leaves nothing in it."""
    if not is_first_process() or os.environ.get(sweep.JOB_FOLDER) == str(
        folder
    ):  # else it is another process's, or a sweep's
        yield
        return
    run_folder.check_unused("hydra.run.dir", folder, [HydraConfig.get().output_subdir or ""])
    try:
        yield
    except (RankerError, HydraException, OmegaConfBaseException):
        run_folder.discard(folder)
        raise


def _run(command: str, cfg: DictConfig) -> float | None:
    # a child process reads the run folder's own configuration, where all this has been done
    if command == "train" and cfg.get("checkpoint") and Path(cfg.checkpoint).is_dir() and _overridden("checkpoint"):
        cfg = _resumed(cfg) if cfg.get("resume") else _started_from(cfg)
    config.check(cfg)
    make_absolute(cfg)
    _check_source(cfg)
    config.fill_in(cfg)
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN and "trainer" in cfg:
        build = importlib.import_module("ranker.assembly.trainer")
        if build.several_devices(cfg.trainer):
            return sweep.run_apart(
                command, Path(HydraConfig.get().runtime.output_dir), OmegaConf.to_yaml(cfg, resolve=True)
            )
    function = getattr(importlib.import_module(f"ranker.commands.{command}"), command)
    gc.freeze()  # what start-up made stays until the end; no collection has to look at it
    gc.enable()  # `ranker.cli.main.run` disabled it
    return function(cfg)


def _check_source(cfg: DictConfig) -> None:
    """Let the data source say what it lacks before torch is imported, if it can."""
    if cfg.get("data") is not None and str(cfg.data._target_).startswith("ranker."):
        check = getattr(instantiate(config.constructor_keys("data", cfg.data)), "check", None)
        if check is not None:
            check()


def _overridden(key: str) -> list[str]:
    """What the command line says of a key or group."""
    task = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    return [override for override in task if re.match(rf"\+{{0,2}}{key}[.=]", override)]


def _started_from(cfg: DictConfig) -> DictConfig:
    """The configuration with the model and encoder of the checkpoint that the training starts from; how they are trained may change."""
    stored = next(
        (path for name in ("config.yaml", "ranker.yaml") if (path := Path(cfg.checkpoint) / name).is_file()), None
    )
    if stored is None:  # another program's folder: what it is shows when it is loaded
        return cfg
    trained = load_stored(stored)
    for group in ("model", "encoder"):
        changed = {override.split("=", 1)[0].lstrip("+"): override for override in _overridden(group)}
        for key, override in changed.items():
            if key == "model" and cfg.model.get("_target_") == trained.model.get("_target_"):
                continue
            if not key.startswith(config.TRAINING_KEYS):
                raise ConfigError(
                    f"{group}: expected the {group} of checkpoint={cfg.checkpoint}, got {override!r}; leave it out"
                )
            OmegaConf.update(trained, key, OmegaConf.select(cfg, key), force_add=True)
        cfg[group] = trained[group]
    return cfg


def _resumed(cfg: DictConfig) -> DictConfig:
    """The configuration of the run that goes on, with what the command line sets on top."""
    stored = Path(cfg.checkpoint) / "config.yaml"
    if not stored.is_file():
        raise ConfigError(f"checkpoint: expected a run folder with config.yaml to resume from, got {cfg.checkpoint!r}")
    resumed = load_stored(stored)
    for override in HydraConfig.get().overrides.task if HydraConfig.initialized() else []:
        key = override.split("=", 1)[0].lstrip("+~")
        if key in FIXED or not any(f"{key}.".startswith(f"{changeable}.") for changeable in CHANGEABLE):
            raise ConfigError(
                f"{key}: expected the value of the run that is resumed, got {override!r}; leave it out, or start a new run without resume=true"
            )
        OmegaConf.update(resumed, key, OmegaConf.select(cfg, key), merge=False)
    resumed.cache_dir = cfg.get("cache_dir")  # where this program may write is not for a stored file to say
    if "prune" in (resumed.get("callbacks") or {}) and not _overridden("callbacks"):
        del resumed.callbacks["prune"]  # of a sweep's job: the sweep does not wait for this run
    return resumed


@contextlib.contextmanager
def _preempted_only() -> Iterator[None]:
    try:
        yield
    except Preempted as error:
        _fail(str(error), error.exit_code)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Hydra's complaints in words, as errors of this program."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise (_cause(error) or ConfigError(in_one_line(error))) from error


def _cause(error: BaseException) -> RankerError | None:
    """The error of this program that Hydra or OmegaConf has wrapped, perhaps several times."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, RankerError):
        inner = inner.__cause__ or inner.__context__
    return inner


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Print a user's mistake without a traceback and exit with 1; anything else is a bug and keeps its traceback."""
    try:
        yield
    except RankerError as error:
        _fail(str(error), error.exit_code)
    except (HydraException, OmegaConfBaseException) as error:
        cause = _cause(error)
        _fail(in_one_line(error) if cause is None else str(cause))
    except OSError as error:  # after Hydra's, of which some are one
        if (message := _place_in_one_line(error, _is_hydras(error))) is None:
            raise
        _fail(message)
    except KeyboardInterrupt:
        _fail("stopped by the keyboard")
    except Exception as error:
        if not _is_hydras(error):
            raise
        _fail(in_one_line(error))


def _is_hydras(error: BaseException) -> bool:
    """Whether Hydra raised an error while it read the command line and the files, and not what it was to run."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    programs = [HYDRA if HYDRA in file.parents else HERE for file in files if {HYDRA, HERE} & set(file.parents)]
    return bool(programs) and programs[-1] == HYDRA and not any(HERE / "commands" in file.parents for file in files)


def _place_in_one_line(error: OSError, making_folders: bool) -> str | None:
    """Say what is wrong with a file, folder or disk; None for an error that is no place's."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"{error.filename or 'disk'}: expected room to write to, got {error.strerror!r}; make room, and go on with checkpoint=RUN_FOLDER "
            "resume=true where the run has a checkpoints/last.ckpt"
        )
    places = (
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.ENAMETOOLONG,
        errno.ELOOP,
    )
    if (error.errno in places or making_folders) and error.filename is not None:
        name = str(error.filename)
        shown = name if len(name) < 200 else f"{name[:200]}..."
        return f"{shown}: expected a file or folder that this user can use, got {error.strerror!r}; check it, or set hydra.run.dir or cache_dir"
    return None


def _fail(message: str, exit_code: int = 1) -> None:
    for line in message.split("\n") if message else ():
        print(f"error: {line}", file=sys.stderr)  # noqa: T201 - the logger may not be there yet
    sys.stderr.flush()
    raise SystemExit(exit_code)


def in_one_line(error: BaseException) -> str:
    """Say Hydra's or OmegaConf's complaint as: where, expected, got, fix."""
    return config.short(" ".join(_complaint(error).split()))


def _complaint(error: BaseException) -> str:
    text = str(error)
    for part in (error.__cause__, error.__context__):
        text += f"\n{part}" if part is not None and str(part) not in text else ""
    missing = re.search(
        r"Could not find '([^']+)/([^'/]*)'(?:\s+Available options in '[^']+':\s+(.*?)(?:\n\n|\nConfig search|$))?",
        text,
        re.S,
    )
    if missing:
        group, got, options = missing.groups()
        known = re.findall(r"\S+", options or "") or sorted(path.stem for path in (CONF / group).glob("*.yaml"))
        known = [name for name in known if not name.startswith("_")]
        return (
            f"{group}: expected one of {', '.join(known)}; got {got!r}"
            if known
            else f"{group}: no such file conf/{group}/{got}.yaml"
        )
    deleted = re.search(r"Could not delete from config\. '?([\w.]+)'?", text)
    if deleted:
        return f"{deleted.group(1)}: expected a key that can be left out, got ~{deleted.group(1)}"
    if "Config group override must be" in text:
        return "; ".join(
            f"{group}: expected the name of a file in conf/{group}/, got {got}" for group, got in _groups_without_name()
        )
    unknown = re.search(r"Interpolation key '([^']+)' not found", text)
    if unknown:
        full = re.search(r"full_key: (\S+)", text)
        return f"{full.group(1) if full else 'interpolation'}: expected a key that exists in ${{{unknown.group(1)}}}, got no such key"
    wrong = re.search(r"Invalid type assigned: (\w+) is not a subclass of (\w+).*?full_key: (\S+)", text, re.S)
    if wrong:
        return f"{wrong.group(3)}: expected {wrong.group(2)}, got {'null' if wrong.group(1) == 'NoneType' else wrong.group(1)}"
    not_null = re.search(r"field '[^']*' is not Optional\s+full_key: (\S+)", text)
    if not_null:
        return f"{not_null.group(1)}: expected a value, got null"
    key = re.search(
        r"(?:Could not override|Key|Could not append to config\. An item is already at|Error merging override) '?\+?([\w./@-]+)'?",
        text,
    )
    struct = re.search(r"Key '([^']+)' is not in struct\s+full_key: (\S+)", text)
    if struct:
        return f"{struct.group(2)}: unknown key{_near(struct.group(2))}"
    if key and "not in" in text:
        full = re.search(r"full_key: (\S+)", text)
        name = full.group(1) if full else key.group(1)
        return f"{name}: unknown key{_near(name)}"
    value = re.search(r"Value '([^']*)'(?: of type '[^']*')? could not be converted to (\w+)", text)
    if value:
        full = re.search(r"full_key: (\S+)", text)
        kinds = {"Integer": "an integer", "Float": "a number", "Boolean": "true or false"}
        return f"{full.group(1) if full else '?'}: expected {kinds.get(value.group(2), value.group(2))}, got {value.group(1)!r}"
    if "mismatched input '='" in text or "extraneous input" in text:
        return f"{_first(text)}; quote a value that holds '=' or ',' for Hydra as well as for the shell: 'key=\"a=b.ckpt\"' or key=a\\=b.ckpt"
    return _first(text)


def _groups_without_name() -> list[tuple[str | Any, ...]]:
    """Groups of the command line whose value is no text, with it."""
    given = [
        re.fullmatch(r"\+?([\w/]+)(?:@[\w.]+)?=(null|[\d.eE+-]+|true|false|)", argument) for argument in sys.argv[1:]
    ]
    return [match.groups() for match in given if match and (CONF / match.group(1)).is_dir()] or [("a group", "null")]


def _first(text: str) -> str:
    return " ".join(text.strip().split("\n\n")[0].split())


def _near(name: str) -> str:
    known = [key for root in roots.ROOTS.values() for key in roots.known_keys(root)]
    hint = did_you_mean(name, known)
    return hint if "did you mean" in hint else "; see --help for the keys"
