"""`check` a composed configuration: every fault in one error, before anything heavy is imported."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import DictConfig, OmegaConf

from ranker.config import trainer as trainer_checks
from ranker.config import values as value_checks
from ranker.config.roots import ROOTS, known_keys, root_of
from ranker.config.signatures import Parameter, attribute_of, defines, parameters_of
from ranker.config.writing import WRITING, parts_of, writing_faults
from ranker.errors import ConfigError, did_you_mean
from ranker.files import leads_out

# what the `_target_` of each group may name, a whole name or the start of one: a config file is data, it must not be
# able to run anything it likes (torch.hub.load would, and ranker.training.run_writer.write_text)
TRUSTED = {
    "data": ("ranker.data.sources.",),
    "model": (
        "ranker.models.",
        "ranker.retrieval.bm25.BM25",
        "ranker.multitask.options.",
        "ranker.multitask.multitask.",
    ),
    "encoder": ("ranker.encoders.loading.load_encoder",),
    "loss": ("ranker.losses.",),
    "optim": ("torch.optim.",),
    "schedule": ("ranker.training.schedules.",),
    "index": ("ranker.retrieval.indexes.",),
    "probe": ("ranker.probing.tasks.",),
    "callbacks": ("ranker.training.pruning.Prune", "lightning.pytorch.callbacks."),
    "logger": ("ranker.training.loggers.", "lightning.pytorch.loggers."),
}
PARTS = "torch.nn."  # may be named within any group
# keys that the program reads out of a node itself, so that every source, encoder ... need not take them
OWN_KEYS = {
    "data": ("negatives", "teacher", "random_negatives", "suggested_pair_tokens", "drop_query_docs", "first_stage"),
    "encoder": ("suggested_lr",),
    "model": ("auto", "labels", "sampling", "weighting"),
}
# types of the plain ones among them, and of the keys that say how a `_target_` is built
OWN_TYPES = {
    "data.negatives": ("str", "None"), "data.teacher": ("str", "None"), "data.random_negatives": ("bool",),
    "data.suggested_pair_tokens": ("int", "None"), "encoder.suggested_lr": ("int", "float", "None"),
}  # fmt: skip
BUILT_BY = {"_partial_": ("bool",), "_recursive_": ("bool",), "_convert_": ("str",)}
# keys of a model that say how it is trained, not what it is
TRAINING_KEYS = ("model.in_batch_negatives", "model.symmetric", "model.labels.", "model.sampling.", "model.weighting.")
GROUPS = ("model", "encoder", "loss", "data", "optim", "schedule", "index", "probe")


def constructor_keys(group: str, node: Mapping[str, Any]) -> dict[str, Any]:
    """A node without the keys that the program reads itself: what `_target_` takes."""
    return {key: value for key, value in node.items() if key not in OWN_KEYS[group]}


def check(cfg: DictConfig) -> None:
    """Check a composed configuration.

    Raises:
        ConfigError: One line per fault: dotted key, what was expected, what came, how to fix it.
    """
    groups = _groups(cfg)  # what follows looks into them
    missing = [] if groups else _missing(cfg)
    if groups or any("." not in fault.split(":")[0] for fault in missing):
        raise ConfigError("\n".join(map(short, [*untrusted(OmegaConf.to_container(cfg), ""), *groups, *missing])))
    faults = [
        *missing,
        *_unknown(cfg),
        *untrusted(OmegaConf.to_container(cfg), ""),
        *target_faults(cfg),
        *_multitask(cfg),
        *trainer_checks.faults_of(cfg),
        *value_checks.text_faults(cfg),
        *value_checks.faults_of(cfg),
        *_numbers(cfg),
        *_data(cfg),
        *_measures(cfg),
        *_evaluation(cfg),
        *_logger(cfg),
        *_writing(cfg),
        *_files(cfg),
    ]
    if faults:
        raise ConfigError("\n".join(dict.fromkeys(map(short, faults))))


def short(fault: str) -> str:
    """A fault without the middle of a value of many thousand characters."""
    return fault if len(fault) < 800 else f"{fault[:300]} ... {fault[-200:]}"


def _missing(cfg: DictConfig) -> list[str]:
    keys = sorted(OmegaConf.missing_keys(cfg))
    root: Any = OmegaConf.get_type(cfg)
    if root in ROOTS.values():  # `~key` takes one away
        keys += [key for key in known_keys(root) if not _has(cfg, key)]
    return [f"{key}: expected a value, got none; set {key}=..." for key in dict.fromkeys(keys)]


def _has(cfg: DictConfig, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    node: Any = OmegaConf.select(cfg, parent) if parent else cfg
    return node is None or name in node or OmegaConf.is_missing(node, name)


def _groups(cfg: DictConfig) -> list[str]:
    """Groups and typed nodes that are null or plain values where something has to be built of them."""
    root: Any = OmegaConf.get_type(cfg)
    needed = [entry.name for entry in fields(root) if entry.default is not None] if root in ROOTS.values() else []
    faults = []
    for group in (*GROUPS, "callbacks", "logger", "trainer", "batch"):
        node = None if group not in cfg or OmegaConf.is_missing(cfg, group) else cfg.get(group)
        what = "keys and values" if group in ("trainer", "batch") else f"the name of a file in conf/{group}/"
        if group in cfg and not OmegaConf.is_missing(cfg, group) and node is None and group in needed:
            faults.append(f"{group}: expected {what}, got null")
        elif node is not None and not isinstance(node, DictConfig):
            faults.append(f"{group}: expected {what}, got {node!r} as a plain value")
        elif node is not None and (group in GROUPS or group == "callbacks"):
            faults += _unbuildable(group, node)
    return faults


def _unbuildable(group: str, node: DictConfig) -> list[str]:
    """Nodes without a `_target_`."""
    several = group in ("probe", "callbacks")
    entries = {f"{group}.{key!s}": part for key, part in node.items()} if several else {group: node}
    faults = [
        f"{name}._target_: expected the class or function to build, got none; choose a file of conf/{group}/"
        for name, part in entries.items()
        if not isinstance(part, DictConfig) or not isinstance(part.get("_target_"), str)
    ]
    return faults if entries or group == "callbacks" else [f"{group}: expected at least one of conf/{group}/, got none"]


def _unknown(cfg: DictConfig) -> list[str]:
    """Keys that `+` put into a typed node, where nothing reads them; or that a run folder's own config.yaml has beside those of its root."""
    root: Any = OmegaConf.get_type(cfg)
    return unknown_keys(cfg, root if root in ROOTS.values() else root_of(cfg))


def unknown_keys(cfg: Mapping[Any, Any], root: Any) -> list[str]:
    """Say which keys of a configuration, and of its typed nodes, a typed root lacks."""
    typed = {
        "": root,
        **{entry.name: entry.default_factory for entry in fields(root) if is_dataclass(entry.default_factory)},
    }
    faults = []
    for path, kind in typed.items():
        node = cfg.get(path) if path else cfg
        known = [entry.name for entry in fields(kind)]
        for key in map(str, node if isinstance(node, Mapping) else ()):
            if key not in known:
                faults.append(f"{path + '.' if path else ''}{key}: unknown key{did_you_mean(key, known)}")
    return faults


def untrusted(node: Any, path: str) -> list[str]:
    """Say which `_target_` of a node of plain values its group may not name."""
    faults = [fault for part, name in parts_of(node, path) for fault in untrusted(part, name)]
    target = node.get("_target_") if isinstance(node, dict) else None
    if target is not None and not is_trusted(str(target), path):
        names = ", ".join(_trusted(path))
        faults.append(f"{path}._target_: expected a name that starts with {names} and is defined there, got {target!r}")
    return faults


def _trusted(path: str) -> tuple[str, ...]:
    return (*TRUSTED.get(path.split(".")[0], ()), PARTS)


@cache
def is_trusted(target: str, path: str) -> bool:
    """Whether the node at a dotted path may name a target: one that is public and defined where its group's are, not what is imported there."""
    place = next(
        (name for name in _trusted(path) if target == name or (name.endswith(".") and target.startswith(name))), None
    )
    if place is None or any(part.startswith("_") for part in target.split(".")):
        return False
    try:
        return defines(target, target.rpartition(".")[0] if target.startswith("ranker.") else place)
    except LookupError:
        return False


def target_faults(cfg: DictConfig) -> list[str]:
    """Bind every `_target_` node's keys to the signature that it names."""
    faults: list[str] = []

    def walk(node: Any, path: str) -> None:
        if not isinstance(node, DictConfig) or node._is_none() or node._is_missing():
            return
        target = node.get("_target_")
        if target is not None:
            faults.extend(_bind(node, path, str(target)))
        for key in map(str, node):
            if not OmegaConf.is_missing(node, key):
                walk(node._get_node(key), f"{path}.{key}" if path else key)

    walk(cfg, "")
    return faults


def _bind(node: DictConfig, path: str, target: str) -> list[str]:
    if not is_trusted(target, path):
        return []  # said by `untrusted`
    types = {
        **BUILT_BY,
        **{key.removeprefix(f"{path}."): value for key, value in OWN_TYPES.items() if key.startswith(f"{path}.")},
    }
    faults = []
    for key, allowed in types.items():
        if (
            key in node
            and not OmegaConf.is_missing(node, key)
            and (fault := Parameter(key, allowed, required=False).fault(node.get(key)))
        ):
            faults.append(f"{path}.{key}: {fault}")
    try:
        parameters = parameters_of(target)
    except LookupError as error:
        return [*faults, f"{path}._target_: expected the dotted path of a class or function, got {target!r} ({error})"]
    if parameters is None:  # an outside signature that can't be read without importing; Python will check it
        return faults
    given = {str(key) for key in node if not str(key).startswith("_")} - set(OWN_KEYS.get(path, ()))
    faults += [
        f"{path}.{key}: unknown key for {target}{did_you_mean(key, list(parameters))}"
        for key in sorted(given - set(parameters))
    ]
    live = {"encoder", "params", "folder", "step", "total", "scorer", "docs"}  # filled in by the program
    for name, parameter in parameters.items():
        if name in given and not OmegaConf.is_missing(node, name):
            fault = parameter.fault(node.get(name))
            if fault:
                faults.append(f"{path}.{name}: {fault}")
        elif parameter.required and name not in given and name not in live and not node.get("_partial_"):
            faults.append(f"{path}.{name}: expected a value, got none; set {path}.{name}=...")
    return faults


def _multitask(cfg: DictConfig) -> list[str]:
    """Heads, sampling and weighting of model=multitask; no other model has them."""
    model = cfg.get("model") if "model" in cfg and not OmegaConf.is_missing(cfg, "model") else None
    if not isinstance(model, DictConfig) or not is_trusted(str(model.get("_target_")), "model"):
        return []
    rules = _rules_of(str(model.get("_target_")))
    if rules is None:
        return [f"model.{key}: unknown key for {model.get('_target_')}" for key in OWN_KEYS["model"] if key in model]
    plain: Any = OmegaConf.to_container(model, resolve=True)
    faults: list[str] = rules.faults_of(plain, cfg.get("encoder") or {})
    return faults


def _rules_of(target: str) -> Any:
    """The module `check` of the package that a model is defined in, None where it has none; ranker/multitask/check.py is one.

    It offers `faults_of(model, encoder)` and `fill_in(cfg)`, which puts found values in place of `auto`.
    """
    name = f"{target.rpartition('.')[0].rpartition('.')[0]}.check"
    return importlib.import_module(name) if name.startswith("ranker.") and importlib.util.find_spec(name) else None


def fill_in(cfg: DictConfig) -> None:
    """Put found values in place of `auto` in the model's node, so that the run folder says what they are."""
    rules = _rules_of(str(OmegaConf.select(cfg, "model._target_")))
    if rules is not None:
        rules.fill_in(cfg)


def _numbers(cfg: DictConfig) -> list[str]:
    faults = []
    batch = cfg.get("batch")
    if batch is not None and batch.positives > batch.docs >= 1:
        faults.append(f"batch.positives: expected at most batch.docs={batch.docs}, got {batch.positives}")
    if "loss" in cfg and batch is not None and batch.positives >= batch.docs >= 1:
        others = cfg.model.get("in_batch_negatives", False) is not False or cfg.data.get("teacher")
        if not others and _needs_negatives(str(OmegaConf.select(cfg, "loss._target_"))):
            faults.append(
                f"batch.docs: expected more than batch.positives={batch.positives}, got {batch.docs}; without negatives nothing is learnt"
            )
    name = None if OmegaConf.is_missing(cfg, "name") else cfg.get("name")
    if isinstance(name, str) and name.split() != [name]:
        faults.append(f"name: expected a word without white space, since runs carry it as their tag, got {name!r}")
    if cfg.get("nonfinite", "stop") not in ("stop", "skip"):
        faults.append(f"nonfinite: expected stop or skip, got {cfg.nonfinite!r}")
    if OmegaConf.select(cfg, "data.teacher") and OmegaConf.select(cfg, "data.random_negatives"):
        faults.append(
            "data.random_negatives: expected false beside data.teacher, since random docs have no teacher's score"
        )
    for key in ("optim.lr", "optim.weight_decay", "schedule.warmup"):
        value = OmegaConf.select(cfg, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            faults.append(f"{key}: expected a number of at least 0, got {value!r}")
    return faults


def _needs_negatives(loss: str) -> bool:
    """Whether a loss learns nothing from relevant docs alone: so unless its class says `needs_negatives = False`."""
    return not is_trusted(loss, "loss") or attribute_of(loss, "needs_negatives", default=True) is not False


def _data(cfg: DictConfig) -> list[str]:
    """Keys that go with every source."""
    data = cfg.get("data") if "data" in cfg and not OmegaConf.is_missing(cfg, "data") else None
    if not isinstance(data, DictConfig):
        return []
    faults = []
    drop = data.get("drop_query_docs", "auto")
    if drop not in ("auto", True, False):
        faults.append(f"data.drop_query_docs: expected auto, true or false; got {drop!r}")
    options = data.get("first_stage")
    if options is None:
        return faults
    if not isinstance(options, DictConfig):
        return [
            *faults,
            f"data.first_stage: expected options of conf/model/bm25.yaml, as {{stemmer: german}}, or null; got {options!r}",
        ]
    known = {
        key: value
        for key, value in (parameters_of("ranker.retrieval.bm25.BM25") or {}).items()
        if key not in ("docs", "threads")
    }
    for key in map(str, options):
        if key not in known:
            faults.append(f"data.first_stage.{key}: unknown key{did_you_mean(key, list(known))}")
        elif fault := known[key].fault(options[key]):
            faults.append(f"data.first_stage.{key}: {fault}")
    return faults


def _measures(cfg: DictConfig) -> list[str]:
    if "measures" not in cfg:
        return []
    from ranker.evaluation.metrics import parse_measures  # ir_measures takes a moment, and --help does not need it

    try:
        measures = parse_measures(list(cfg.measures))
    except ConfigError as error:
        return str(error).split("\n")
    logged = [f"val/{measure}" for measure in measures]
    watched = {"monitor": cfg.get("monitor")}
    for name, node in (cfg.get("callbacks") or {}).items():
        if (
            isinstance(node, DictConfig)
            and str(node.get("_target_")).endswith(".EarlyStopping")
            and not OmegaConf.is_missing(node, "monitor")
        ):
            watched[f"callbacks.{name}.monitor"] = node.get("monitor") or cfg.get(
                "monitor"
            )  # null is refused as no text
    return [
        f"{key}: expected one of {', '.join(logged)} (from measures), got {value!r}"
        for key, value in watched.items()
        if value is not None
        and value not in logged
        and not (key != "monitor" and str(value).startswith(("train/", "optim/")))
    ]


def _evaluation(cfg: DictConfig) -> list[str]:
    """What evaluate.py is asked for: a run file with its judgements, or a checkpoint."""
    if "qrels" not in cfg:
        return []
    faults = []
    if (cfg.run is None) == (cfg.checkpoint is None):
        faults.append(
            "run: expected either run=FILE qrels=FILE or checkpoint=RUN_FOLDER, got "
            + ("both" if cfg.run else "neither")
        )
    if cfg.run is not None and cfg.qrels is None:
        faults.append("qrels: expected the judgements of run=, got none; set qrels=FILE")
    return faults


def _logger(cfg: DictConfig) -> list[str]:
    """Wandb's mode, and its key where it would have to ask for one (PC-88): it would ask on the terminal and the run would wait."""
    if not str(OmegaConf.select(cfg, "logger._target_")).endswith(".loggers.wandb"):
        return []
    mode = cfg.logger.get("mode")
    if mode not in ("offline", "online", "disabled"):
        return [f"logger.mode: expected offline, online or disabled; got {mode!r}"]
    if mode == "online" and not os.environ.get("WANDB_API_KEY"):
        host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
        if not _has_login(host):
            return [
                f"logger.mode: expected a key for mode online, got none for {host}; "
                "set WANDB_API_KEY, run `wandb login`, or take logger.mode=offline"
            ]
    return []


def _writing(cfg: DictConfig) -> list[str]:
    """What would be written outside of the run's folder."""
    nodes: dict[str, Any] = {
        key: OmegaConf.to_container(cfg[key], resolve=True) for key in WRITING if isinstance(cfg.get(key), DictConfig)
    }
    faults = writing_faults(nodes)
    name = cfg.get("name") if "name" in cfg and not OmegaConf.is_missing(cfg, "name") else ""
    if leads_out(str(name)):
        faults.append(f"name: expected a folder below outputs/, got {name!r}")
    return faults


def _has_login(host: str) -> bool:
    """Whether wandb will find a key in the file that `wandb login` writes; one without this host is no use."""
    home = [path for path in (Path.home() / ".netrc", Path.home() / "_netrc") if path.is_file()]
    path = Path(os.environ["NETRC"]).expanduser() if os.environ.get("NETRC") else next(iter(home), None)
    try:
        found = netrc(path).authenticators(host) if path is not None else None
    except (OSError, NetrcParseError):
        return False
    return found is not None and bool(found[2])


def _files(cfg: DictConfig) -> list[str]:
    faults = []
    for key in (
        "checkpoint",
        "compare",
        "run",
        "qrels",
        "baseline",
        "data.negatives",
        "data.teacher",
        "candidates",
        "mining.teacher",
    ):
        value = (
            OmegaConf.select(cfg, key)
            if key.split(".")[0] in cfg and not OmegaConf.is_missing(cfg, key.split(".")[0])
            else None
        )
        if (
            isinstance(value, str)
            and not _exists(value)
            and not (key == "baseline" and value == "bm25" and "index" in cfg)
        ):
            faults.append(f"{key}: expected a file or folder, got {value!r}, which does not exist")
    if cfg.get("resume") and not cfg.get("checkpoint"):
        faults.append("resume: expected checkpoint=RUN_FOLDER beside resume=true, got none")
    for key in ("cache_dir", "encode.folder"):
        value = OmegaConf.select(cfg, key)
        if isinstance(value, str):
            faults += [f"{key}: {fault}; set another {key}" for fault in _unwritable(Path(value))]
    return faults


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # a name that is too long, or holds a NUL
        return False


def _unwritable(path: Path) -> list[str]:
    """Why nothing can be written into a folder, which need not exist yet."""
    try:
        there = next(
            folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists() or folder.is_symlink()
        )
        if not there.is_dir():
            return [
                f"expected a folder, got {str(path)!r}, where {str(there)!r} is {'a broken link' if there.is_symlink() else 'a file'}"
            ]
        if not os.access(there, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            return [
                f"expected a folder to write to, got {str(path)!r}, where {str(there)!r} is not writable for this user"
            ]
    except OSError as error:
        return [f"expected a folder to write to, got {str(path)[:60]!r} ({error.strerror})"]
    return []
