"""Rules for `hydra.*`: Hydra imports and calls the names in this node before `ranker.config.check` runs.

The configuration of every run, of every sweep and of each job of a sweep is checked against these rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra._internal.hydra as hydra_start
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ranker.config.roots import CONF
from ranker.config.signatures import defines
from ranker.config.writing import parts_of
from ranker.errors import ConfigError
from ranker.files.folders import leads_out

LOGGING = ("job_logging", "hydra_logging")
# Values that `class` and `()` of Python's logging configuration may have.
LOGGING_CLASSES = (
    "logging.StreamHandler",
    "logging.FileHandler",
    "logging.NullHandler",
    "logging.Formatter",
    "colorlog.ColoredFormatter",
)
STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
LOG_FILE = re.compile(r"\$\{hydra\.(runtime\.output_dir|run\.dir|sweep\.dir)\}/(\$\{hydra\.job\.name\}|[\w-]+)\.log")
CALLBACKS = ("hydra_plugins.ranker_sweeps.SweepFolder", "hydra.experimental.callbacks.LogJobReturnCallback")
# Packages of Hydra's plugins.
PLUGINS = ("hydra_plugins.", "hydra._internal.core_plugins.")
SAMPLERS = "optuna.samplers."
# Interpolations that give text. Any other interpolation could insert a node with its own `_target_`.
TEXTS = re.compile(r"\$\{hydra\.(sweep\.(dir|subdir)|run\.dir|runtime\.output_dir|job\.(name|num|id))\}")
# Keys that hold shell commands, environment variables or paths to write to -> their values in conf/. A file outside
# conf/ may change such a key only if the command line sets the same key.
COMMANDS = {
    "launcher.setup": None,
    "launcher.python": None,
    "launcher.srun_args": None,
    "launcher.additional_parameters": None,
    "launcher.ray.init.runtime_env": None,
    "launcher.ray.remote.runtime_env": None,
    "job.env_set": None,
    "launcher.submitit_folder": "${hydra.sweep.dir}/.submitit/%j",
    "sweeper.storage": "sqlite:///${hydra.sweep.dir}/study.db",
}


class CheckedLoader(ConfigLoaderImpl):
    """Hydra's loader of configurations; it refuses a configuration that breaks a rule."""

    _composed: tuple[str | None, list[str], DictConfig] | None = None

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Compose a configuration.

        Hydra composes the configuration of a run twice: first to read `hydra.mode`, then to use the configuration. The
        first result is kept and returned by the second call.

        Raises:
            ConfigError: The configuration's `hydra` node breaks a rule.
        """
        if not validate_sweep_overrides:  # Hydra looks for `hydra.mode`
            # if this fails, the call of `super()` below composes a sweep, or reports the mistake
            with suppress(Exception):
                cfg = self.load_configuration(config_name, overrides, RunMode.RUN, from_shell)
                self._composed = (config_name, [*overrides], cfg)
                return cfg
        elif self._composed is not None:
            (name, known, cfg), self._composed = self._composed, None
            added = overrides[len(known) :]
            if run_mode == RunMode.RUN and (name, known) == (config_name, overrides[: len(known)]):
                if added == ["hydra.mode=RUN"] and cfg.hydra.mode is None:
                    cfg.hydra.mode = RunMode.RUN
                    cfg.hydra.overrides.hydra.append(*added)
                    return cfg
                if not added:
                    return cfg
        cfg = super().load_configuration(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
        content: Any = OmegaConf.to_container(cfg.hydra, resolve=False)
        faults = hydra_faults(content)
        if faults:
            raise ConfigError("\n".join(faults))
        return cfg


def install() -> None:
    """Make Hydra use `CheckedLoader`. Launchers pickle this class for the processes of their jobs."""
    hydra_start.ConfigLoaderImpl = CheckedLoader  # type: ignore[misc, attr-defined]


def hydra_faults(content: Mapping[str, Any]) -> list[str]:
    """Return one fault for each rule that a `hydra` node breaks.

    Args:
        content: The node as plain values, interpolations not resolved.
    """
    faults = [fault for key in LOGGING for fault in _logging_faults(content.get(key), f"hydra.{key}")]
    callbacks = content.get("callbacks") or {}
    if not isinstance(callbacks, dict):
        faults.append(f"hydra.callbacks: expected names and callbacks, got {callbacks!r}")
    else:
        for name, node in callbacks.items():
            if not isinstance(node, dict) or list(node) != ["_target_"] or node["_target_"] not in CALLBACKS:
                faults.append(
                    f"hydra.callbacks.{name}: expected _target_ to be one of {', '.join(CALLBACKS)}, got {node!r}"
                )
        if CALLBACKS[0] not in [node.get("_target_") for node in callbacks.values() if isinstance(node, dict)]:
            faults.append(
                f"hydra.callbacks: expected {CALLBACKS[0]} among them, which refuses a used run folder, got "
                f"{', '.join(callbacks) or 'none'}; set hydra/callbacks=sweep"
            )
    for key in ("launcher", "sweeper"):
        faults += _plugin_faults(content.get(key), f"hydra.{key}")
    for path in ("output_subdir", "job.name"):
        value = _select(content, path)
        if value is not None and (leads_out(str(value)) or "/" in str(value) or "${" in str(value)):
            faults.append(f"hydra.{path}: expected a name, got {value!r}")
    subdir = str(_select(content, "sweep.subdir"))
    if leads_out(subdir):
        faults.append(f"hydra.sweep.subdir: expected a folder inside hydra.sweep.dir, got {subdir!r}")
    return faults + _foreign_commands(content)


def _logging_faults(node: Any, path: str) -> list[str]:
    """Return one fault for each value that would make Python's logging import a name, call an object or open a file."""
    if isinstance(node, dict):
        faults = [f"{path}.{key}: unknown key" for key in (".", "queue", "listener") if key in node]
        for key in ("class", "()"):
            if key in node and node[key] not in LOGGING_CLASSES:
                faults.append(f"{path}.{key}: expected one of {', '.join(LOGGING_CLASSES)}; got {node[key]!r}")
        if "filename" in node and not LOG_FILE.fullmatch(str(node["filename"])):
            faults.append(f"{path}.filename: expected ${{hydra.runtime.output_dir}}/NAME.log, got {node['filename']!r}")
        return faults + [
            fault
            for part, name in parts_of(node, path)
            if not name.endswith(".filename")
            for fault in _logging_faults(part, name)
        ]
    if isinstance(node, str) and node not in STREAMS and ("://" in node or "${" in node):
        return [f"{path}: expected plain text, {STREAMS[0]} or {STREAMS[1]}; got {node!r}"]
    return [fault for part, name in parts_of(node, path) for fault in _logging_faults(part, name)]


def _plugin_faults(node: Any, path: str) -> list[str]:
    """Check that a launcher or sweeper is a plugin of Hydra, and that each nested `_target_` is a sampler of Optuna."""
    if not isinstance(node, dict) or not str(node.get("_target_")).startswith(PLUGINS):
        got = node.get("_target_") if isinstance(node, dict) else node
        return [f"{path}: expected a plugin of Hydra's as _target_, got {got!r}"]
    faults: list[str] = []

    def walk(part: Any, name: str) -> None:
        if (
            isinstance(part, dict)
            and "_target_" in part
            and part is not node
            and not _is_sampler(str(part["_target_"]), name)
        ):
            faults.append(f"{name}._target_: expected one of {SAMPLERS}*, got {part['_target_']!r}")
        if isinstance(part, str) and "${" in TEXTS.sub("", part):
            faults.append(
                f"{name}: only interpolations of hydra.sweep.dir, sweep.subdir, run.dir, runtime.output_dir and "
                f"job.name, num or id are allowed; got {part!r}"
            )
        for inner, inner_name in parts_of(part, name):
            walk(inner, inner_name)

    walk(node, path)
    return faults


def _is_sampler(target: str, path: str) -> bool:
    try:
        return path.startswith("hydra.sweeper.") and target.startswith(SAMPLERS) and defines(target, SAMPLERS)
    except LookupError:
        return False


def _foreign_commands(content: Mapping[str, Any]) -> list[str]:
    """If files outside conf/ are in use, check that they did not set a key of `COMMANDS`.

    Return one fault for each key that has a new value without being set on the command line.
    """
    sources = [source for source in _select(content, "runtime.config_sources") or () if source.get("schema") == "file"]
    if all(Path(source["path"]).resolve().is_relative_to(CONF) for source in sources):
        return []
    overrides: Sequence[str] = _select(content, "overrides.hydra") or ()
    return [
        f"hydra.{key}: expected the key on the command line as well, "
        f"since {', '.join(source['path'] for source in sources)} may be someone else's"
        for key, default in COMMANDS.items()
        if _select(content, key)
        and _select(content, key) != default
        and not any(override.lstrip("+").startswith(f"hydra.{key}") for override in overrides)
    ]


def _select(content: Mapping[str, Any], path: str) -> Any:
    node: Any = content
    for part in path.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node
