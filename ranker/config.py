"""`check` a composed configuration: every fault in one error, before anything heavy is imported."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import DictConfig, OmegaConf

from ranker.errors import ConfigError
from ranker.roots import ROOTS
from ranker.signatures import Parameter, defines, parameters_of

# what the `_target_` of each group may name, a whole name or the start of one: a config file is data, it must not be able to run anything
# it likes (torch.hub.load would, and ranker.training.run_writer.write_text)
TRUSTED = {
    "data": ("ranker.data.sources.",),
    "model": ("ranker.models.", "ranker.retrieval.bm25.BM25", "ranker.data.multitask."),
    "encoder": ("ranker.layers.encoder.load_encoder",),
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
    "data": ("negatives", "teacher", "random_negatives", "suggested_pair_tokens", "drop_query_docs", "first_stage"), "encoder": ("suggested_lr",),
    "model": ("auto", "labels", "sampling", "weighting"),
}  # fmt: skip
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
    faults = [
        *_missing(cfg),
        *_unknown(cfg),
        *_untrusted(OmegaConf.to_container(cfg), ""),
        *_targets(cfg),
        *_multitask(cfg),
        *_trainer(cfg),
        *_numbers(cfg),
        *_data(cfg),
        *_measures(cfg),
        *_evaluation(cfg),
        *_logger(cfg),
        *_files(cfg),
    ]
    if faults:
        raise ConfigError("\n".join(dict.fromkeys(faults)))


def _missing(cfg: DictConfig) -> list[str]:
    return [f"{key}: expected a value, got none; set {key}=..." for key in sorted(OmegaConf.missing_keys(cfg))]


def _unknown(cfg: DictConfig) -> list[str]:
    """Keys that `+` put into a typed node, where nothing reads them."""
    root: Any = OmegaConf.get_type(cfg)
    if root not in ROOTS.values():  # a run folder's own config.yaml, checked when it was written
        return []
    typed = {"": root, **{entry.name: entry.default_factory for entry in fields(root) if is_dataclass(entry.default_factory)}}
    faults = []
    for path, kind in typed.items():
        known = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
        for key in map(str, cfg[path] if path else cfg):
            if key not in known:
                faults.append(f"{path + '.' if path else ''}{key}: unknown key{suggestion(key, known)}")
    return faults


def suggestion(got: str, known: list[str]) -> str:
    """Words that point to the nearest of the known names."""
    near = difflib.get_close_matches(got, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f"; expected one of {', '.join(sorted(known))}" if known else ""


def load_stored(path: Path) -> Any:
    """Read the configuration in a run folder or model folder, which may be someone else's.

    Code that lies beside an encoder's weights is not trusted, whatever the file says.

    Raises:
        ConfigError: A `_target_` that its group may not name; or an interpolation, which would be resolved after the check.
    """
    cfg: Any = OmegaConf.load(path)
    content = OmegaConf.to_container(cfg)
    faults = [*_untrusted(content, ""), *_unresolved(content, "")]
    if faults:
        raise ConfigError("\n".join(f"{path}: {fault}" for fault in faults))
    if OmegaConf.select(cfg, "encoder.trust_remote_code"):
        cfg.encoder.trust_remote_code = False
    return cfg


def _parts(node: Any, path: str) -> list[tuple[Any, str]]:
    """What a node holds, with dotted paths."""
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [(part, f"{path}.{key}" if path else str(key)) for key, part in entries]


def _unresolved(node: Any, path: str) -> list[str]:
    if isinstance(node, str) and "${" in node:
        return [f"{path}: expected a plain value, as they are written there, got {node!r}; write the value"]
    return [fault for part, name in _parts(node, path) for fault in _unresolved(part, name)]


def _untrusted(node: Any, path: str) -> list[str]:
    faults = [fault for part, name in _parts(node, path) for fault in _untrusted(part, name)]
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
    place = next((name for name in _trusted(path) if target == name or (name.endswith(".") and target.startswith(name))), None)
    if place is None or any(part.startswith("_") for part in target.split(".")):
        return False
    try:
        return defines(target, target.rpartition(".")[0] if target.startswith("ranker.") else place)
    except LookupError:
        return False


def _targets(cfg: DictConfig) -> list[str]:
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
    for group in GROUPS:
        node = cfg.get(group) if group in cfg and not OmegaConf.is_missing(cfg, group) else None
        if isinstance(node, str):
            faults.append(f"{group}: expected the name of a file in conf/{group}/, got {node!r} as a plain value")
    return faults


def _bind(node: DictConfig, path: str, target: str) -> list[str]:
    if not is_trusted(target, path):
        return []  # said by `_untrusted`
    try:
        parameters = parameters_of(target)
    except LookupError as error:
        return [f"{path}._target_: expected the dotted path of a class or function, got {target!r} ({error})"]
    if parameters is None:  # an outside signature that can't be read without importing; Python will check it
        return []
    given = {str(key) for key in node if not str(key).startswith("_")} - set(OWN_KEYS.get(path, ()))
    faults = [f"{path}.{key}: unknown key for {target}{suggestion(key, list(parameters))}" for key in sorted(given - set(parameters))]
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
    if "heads" not in (parameters_of(str(model.get("_target_"))) or ()):
        return [f"model.{key}: unknown key for {model.get('_target_')}" for key in OWN_KEYS["model"] if key in model]
    from ranker.data.multitask_check import faults_of  # other models need none of it

    plain: Any = OmegaConf.to_container(model, resolve=True)
    return faults_of(plain, cfg.get("encoder") or {})


def set_layers(cfg: DictConfig) -> None:
    """Put the layers of the probing report in place of `layer: auto`, so that the run folder says which they are."""
    heads = OmegaConf.select(cfg, "model.heads") or []
    if any(head.get("layer") == "auto" for head in heads):
        from ranker.data.multitask import AutoLayers
        from ranker.data.multitask_check import auto_layers, read_heads

        plain: Any = OmegaConf.to_container(cfg.model, resolve=True)
        auto = AutoLayers(**{key: value for key, value in plain["auto"].items() if not key.startswith("_")})
        chosen = auto_layers(read_heads(plain["heads"]), auto, cfg.encoder)
        for head in heads:
            head.layer = chosen.get(head.get("name") or head.task, head.layer)


def _trainer(cfg: DictConfig) -> list[str]:
    trainer = cfg.get("trainer")
    if trainer is None:
        return []
    faults = []
    number = Parameter("number", ("int", "float"), required=False)
    for key in ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"):
        value = trainer.get(key)
        if value is not None and number.fault(value):
            faults.append(f"trainer.{key}: {number.fault(value)}")
    devices = trainer.get("devices")
    if isinstance(devices, str) and devices != "auto" and not devices.lstrip("-").replace(",", "").isdigit():
        faults.append(f"trainer.devices: expected a number, a list of indices or auto; got {devices!r}")
    if isinstance(devices, int) and (devices == 0 or devices < -1):
        faults.append(f"trainer.devices: expected a number above 0 (or -1 for all), got {devices}")
    precisions = (None, "16-mixed", "bf16-mixed", "32-true", "64-true", "bf16-true", 32, 64, "32", "64", "bf16")
    if trainer.get("precision") not in precisions:
        faults.append(f"trainer.precision: expected one of bf16-mixed, 32-true, 64-true, bf16-true; got {trainer.get('precision')!r}")
    if trainer.get("precision") == "16-mixed":
        faults.append("trainer.precision: 16-mixed is refused, since gradients would be clipped before they are unscaled; use bf16-mixed")
    strategies = ("auto", "ddp", "ddp_find_unused_parameters_true")
    if trainer.get("strategy") not in strategies:
        faults.append(f"trainer.strategy: expected one of {', '.join(strategies)}; got {trainer.get('strategy')!r}")
        if "fsdp" in str(trainer.get("strategy")).lower():
            faults[-1] += ", which would synchronise gradients at each micro-batch and clip each shard by its own norm"
    if trainer.get("accelerator") not in ("auto", "cpu", "gpu", "cuda", "mps"):
        faults.append(f"trainer.accelerator: expected one of auto, cpu, gpu, cuda, mps; got {trainer.get('accelerator')!r}")
    interval = trainer.get("val_check_interval")
    if interval is not None and number.fault(interval):
        faults.append(f"trainer.val_check_interval: {number.fault(interval)}")
    for key in ("fast_dev_run", "barebones", "use_distributed_sampler", "limit_val_batches", "limit_test_batches"):
        if trainer.get(key):
            faults.append(f"trainer.{key}: not supported, since an evaluation needs every query exactly once; leave it unset")
    if trainer.get("enable_checkpointing") is False:
        faults.append("trainer.enable_checkpointing: expected true, since the best state is what is tested and exported")
    if trainer.get("overfit_batches"):
        faults.append("trainer.overfit_batches: not supported with one item per optimizer step; use trainer.limit_train_batches")
    if trainer.get("gradient_clip_algorithm") not in (None, "norm"):
        faults.append(f"trainer.gradient_clip_algorithm: expected norm, got {trainer.get('gradient_clip_algorithm')!r}")
    if trainer.get("accumulate_grad_batches", 1) < 1:
        faults.append(f"trainer.accumulate_grad_batches: expected at least 1, got {trainer.accumulate_grad_batches}")
    if "optim" in cfg and (trainer.get("max_epochs") or -1) < 0 and trainer.get("max_steps", -1) < 0:
        faults.append("trainer.max_epochs: expected trainer.max_epochs or trainer.max_steps, got neither; the schedule needs an end")
    return faults


def _numbers(cfg: DictConfig) -> list[str]:
    faults = []
    least = {"batch.queries": 1, "batch.docs": 1, "batch.positives": 1, "batch.depth": 1, "batch.max_tokens": 1, "batch.workers": 0,
             "depth": 1, "val_depth": 1, "max_query_tokens": 1, "max_doc_tokens": 1, "max_pair_tokens": 5, "save_every_steps": 1, "seed": 0,
             "latency_queries": 0, "encode.shard_docs": 1, "late.token_depth": 1, "late.candidates": 1,
             "trainer.log_every_n_steps": 1, "max_pairs": 1}  # fmt: skip
    for key, lowest in least.items():
        value = OmegaConf.select(cfg, key)
        if value is not None and value < lowest:
            faults.append(f"{key}: expected at least {lowest}, got {value}")
    for key in ("val_fraction", "test_fraction"):
        value = cfg.get(key)
        if value is not None and not 0 <= value <= 1:
            faults.append(f"{key}: expected a share from 0 to 1, got {value}")
    batch = cfg.get("batch")
    if batch is not None and batch.positives > batch.docs >= 1:
        faults.append(f"batch.positives: expected at most batch.docs={batch.docs}, got {batch.positives}")
    if "loss" in cfg and batch is not None and batch.positives >= batch.docs >= 1 and cfg.model.get("in_batch_negatives", False) is False:
        pointwise = ("pointwise_cross_entropy", "bce")
        if not any(f".{name}." in str(OmegaConf.select(cfg, "loss._target_")) for name in pointwise) and not cfg.data.get("teacher"):
            faults.append(
                f"batch.docs: expected more than batch.positives={batch.positives}, got {batch.docs}; without negatives nothing is learnt"
            )
    if "name" in cfg and not OmegaConf.is_missing(cfg, "name") and str(cfg.name).split() != [str(cfg.name)]:
        faults.append(f"name: expected a word without white space, since runs carry it as their tag, got {cfg.name!r}")
    if cfg.get("nonfinite", "stop") not in ("stop", "skip"):
        faults.append(f"nonfinite: expected stop or skip, got {cfg.nonfinite!r}")
    if OmegaConf.select(cfg, "data.teacher") and OmegaConf.select(cfg, "data.random_negatives"):
        faults.append("data.random_negatives: expected false beside data.teacher, since random docs have no teacher's score")
    for key in ("optim.lr", "optim.weight_decay", "schedule.warmup"):
        value = OmegaConf.select(cfg, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0):
            faults.append(f"{key}: expected a number of at least 0, got {value!r}")
    return faults


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
        return [*faults, f"data.first_stage: expected options of conf/model/bm25.yaml, as {{stemmer: german}}, or null; got {options!r}"]
    known = {key: value for key, value in (parameters_of("ranker.retrieval.bm25.BM25") or {}).items() if key not in ("docs", "threads")}
    for key in map(str, options):
        if key not in known:
            faults.append(f"data.first_stage.{key}: unknown key{suggestion(key, list(known))}")
        elif (fault := known[key].fault(options[key])) is not None:
            faults.append(f"data.first_stage.{key}: {fault}")
    return faults


def _measures(cfg: DictConfig) -> list[str]:
    if "measures" not in cfg:
        return []
    from ranker.metrics import parse_measures  # ir_measures takes a moment, and --help does not need it

    try:
        measures = parse_measures(list(cfg.measures))
    except ConfigError as error:
        return str(error).split("\n")
    monitor = cfg.get("monitor")
    logged = [f"val/{measure}" for measure in measures]
    if monitor is not None and monitor not in logged:
        return [f"monitor: expected one of {', '.join(logged)} (from measures), got {monitor!r}"]
    return []


def _evaluation(cfg: DictConfig) -> list[str]:
    """What evaluate.py is asked for: a run file with its judgements, or a checkpoint."""
    if "qrels" not in cfg:
        return []
    faults = []
    if (cfg.run is None) == (cfg.checkpoint is None):
        faults.append("run: expected either run=FILE qrels=FILE or checkpoint=RUN_FOLDER, got " + ("both" if cfg.run else "neither"))
    if cfg.run is not None and cfg.qrels is None:
        faults.append("qrels: expected the judgements of run=, got none; set qrels=FILE")
    for key, known in (("split", ("test", "val", "train")), ("weights", ("best", "last"))):
        if cfg[key] not in known:
            faults.append(f"{key}: expected one of {', '.join(known)}; got {cfg[key]!r}")
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
    for key in ("checkpoint", "compare", "run", "qrels", "baseline", "data.negatives", "data.teacher", "candidates", "mining.teacher"):
        value = OmegaConf.select(cfg, key) if key.split(".")[0] in cfg and not OmegaConf.is_missing(cfg, key.split(".")[0]) else None
        if value is not None and not Path(str(value)).exists() and not (key == "baseline" and value == "bm25" and "index" in cfg):
            faults.append(f"{key}: expected a file or folder, got {value!r}, which does not exist")
    if cfg.get("resume") and not cfg.get("checkpoint"):
        faults.append("resume: expected checkpoint=RUN_FOLDER beside resume=true, got none")
    return faults
