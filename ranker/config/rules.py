"""Rules between keys: a value of one key may exclude or require a value of another key."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from ranker.config import command_rules, data_rules, group_sizes
from ranker.config.groups import is_set
from ranker.config.sets import sets_of, source_nodes, suite_of
from ranker.config.signatures import attribute_of
from ranker.config.targets import is_trusted
from ranker.errors import ConfigError


def rule_faults(cfg: DictConfig) -> list[str]:
    """Return one fault for each rule between keys that a configuration breaks."""
    sizes = (group_sizes.faults_of, _losses, _shared_prefix, _passages, _words, _numbers)
    shape = (_distillation, _exits, data_rules.source_faults, data_rules.mix_faults, _measures)
    commands = (
        command_rules.evaluation_faults,
        data_rules.suite_faults,
        command_rules.teacher_faults,
        command_rules.reranking_faults,
        command_rules.merging_faults,
        command_rules.pretraining_faults,
    )
    rules = (*sizes, *shape, *commands)
    return [fault for rule in rules for fault in rule(cfg)]


def _shared_prefix(cfg: DictConfig) -> list[str]:
    """Refuse a shared prefix for models whose inputs have no common prefix."""
    wanted = OmegaConf.select(cfg, "encoder.share_prefix", default=False)
    target = str(OmegaConf.select(cfg, "model._target_"))
    by_pairs = is_trusted(target, "model") and attribute_of(target, "reads", default="") == "pairs"
    if not wanted or (by_pairs and attribute_of(target, "decoder_only", default=False)):
        return []
    return ["encoder.share_prefix: expected false, or model=lm_reranker, whose prompts begin with the query; got true"]


def _losses(cfg: DictConfig) -> list[str]:
    """Refuse a loss that needs more than scores and labels if the training cannot provide the additional input."""
    if "loss" not in cfg:
        return []
    losses = [str((node.get("loss") or cfg.loss).get("_target_")) for node in source_nodes(cfg).values()]
    faults = []
    for loss in sorted(set(losses)):
        name = loss.split(".")[-2] if "." in loss else loss
        reference, draws = (
            is_trusted(loss, "loss") and attribute_of(loss, key, default=False)
            for key in ("against_reference", "draws")
        )
        taught = any(node.get("teacher") for node in source_nodes(cfg).values())
        contrast = cfg.model.get("in_batch_negatives", False)
        if (reference or draws) and ("heads" in cfg.model or contrast or (contrast is None and not taught)):
            faults.append(
                f"loss: expected another loss than {name} with in-batch negatives or with model=multitask, "
                f"got loss={name}; set another loss or model.in_batch_negatives=false"
            )
        if reference and cfg.get("checkpoint") is None and not cfg.encoder.get("lora"):
            faults.append(
                f"loss: expected lora=default with loss={name}, whose reference is the model without adapters; "
                "got lora=null"
            )
    return faults


def _words(cfg: DictConfig) -> list[str]:
    faults = []
    name = cfg.get("name") if is_set(cfg, "name") else None
    if isinstance(name, str) and name.split() != [name]:
        faults.append(
            f"name: expected a word without white space, since it is the tag in the last column of run files, "
            f"got {name!r}"
        )
    if cfg.get("nonfinite", "stop") not in ("stop", "skip"):
        faults.append(f"nonfinite: expected stop or skip, got {cfg.nonfinite!r}")
    return faults


def _numbers(cfg: DictConfig) -> list[str]:
    faults = []
    for key in ("optim.lr", "optim.weight_decay", "schedule.warmup"):
        value = OmegaConf.select(cfg, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            faults.append(f"{key}: expected a number of at least 0, got {value!r}")
    return faults


def _measures(cfg: DictConfig) -> list[str]:
    """Check the names of measures, and that each monitored value is one that the training logs."""
    if "measures" not in cfg:
        return []
    from ranker.evaluation.measure_names import parse_measures  # imports ir_measures, slow and not needed by --help

    try:
        measures = parse_measures(list(cfg.measures))
    except ConfigError as error:
        return str(error).split("\n")
    logged = [f"val/{measure}" for measure in measures]
    for name, node in sets_of(cfg.get("data")).items() if is_set(cfg, "data") else ():
        logged += [f"val/{name}/{measure}" for measure in measures if node.get("evaluate", True)]
    if (suite := suite_of(cfg)) and "monitor" in cfg:
        logged = [*logged[: len(measures)], *(f"val/{name}/{measure}" for name in suite for measure in measures)]
    return [
        f"{key}: expected one of {', '.join(logged)} (from measures), got {value!r}"
        for key, value in _monitored(cfg).items()
        if value is not None
        and value not in logged
        and not (key != "monitor" and str(value).startswith(("train/", "optim/")))
    ]


def _monitored(cfg: DictConfig) -> dict[str, Any]:
    """Return the dotted keys that hold the name of a logged value, with that name."""
    monitored: dict[str, Any] = {"monitor": cfg.get("monitor")}
    for name, node in (cfg.get("callbacks") or {}).items():
        if (
            isinstance(node, DictConfig)
            and str(node.get("_target_")).endswith(".EarlyStopping")
            and not OmegaConf.is_missing(node, "monitor")
        ):
            # if the class does not allow null, the check of its signature reports null
            monitored[f"callbacks.{name}.monitor"] = node.get("monitor") or cfg.get("monitor")
    return monitored


def _passages(cfg: DictConfig) -> list[str]:
    """Check `passages`: windows must leave no gaps, and the model must be able to score windows."""
    node = cfg.get("passages") if is_set(cfg, "passages") else None
    if not isinstance(node, DictConfig):
        return []
    faults = []
    length, stride = node.get("length"), node.get("stride")
    if isinstance(length, int) and isinstance(stride, int) and stride > length:
        faults.append(
            f"passages.stride: expected at most passages.length={length}, got {stride}, which would leave out the "
            "tokens between two windows"
        )
    model = str(cfg.model.get("_target_")) if is_set(cfg, "model") else ""
    if is_trusted(model, "model"):
        if attribute_of(model, "takes_windows", default=False) is not True:
            faults.append(
                f"passages: expected none with {model.rpartition('.')[2]}, which can't score windows of docs, got "
                f"{str(node.get('_target_')).rpartition('.')[2]}; choose another model, as monobert, lm_reranker or dpr"
            )
        elif node.get("select", "first") == "bm25" and attribute_of(model, "reads") == "texts":
            faults.append("passages.select: expected first with a model that reads docs without the query, got bm25")
    return faults


def _distillation(cfg: DictConfig) -> list[str]:
    """Check `distill`, which needs a cross-encoder that reads whole docs; refuse options that distillation ignores."""
    node = cfg.get("distill") if is_set(cfg, "distill") else None
    if not isinstance(node, DictConfig):
        return []
    faults = []
    target = str(OmegaConf.select(cfg, "model._target_"))
    if is_trusted(target, "model") and ("heads" in cfg.model or target.rpartition(".")[2] != "MonoBERT"):
        faults.append(f"distill: expected none, or model=monobert, got {target.rpartition('.')[2]}")
    if cfg.get("passages") is not None:
        faults.append("distill: expected none with passages, whose windows have no teacher; got one")
    if OmegaConf.select(cfg, "encoder.lora") is not None:
        faults.append("distill: expected none with adapters (lora=none), got one")
    if node.get("layers") == "auto" and node.get("report") is None:
        faults.append("distill.report: expected the folder of a probing run with distill.layers=auto, got none")
    if node.get("attention") and OmegaConf.select(cfg, "encoder.ragged", default=True):
        faults.append(
            "distill.attention: expected 0, or encoder.ragged=false, whose forward pass returns attention; got "
            f"{node.attention}"
        )
    return faults


def _exits(cfg: DictConfig) -> list[str]:
    """Check early exit: at most one exit rule, and a loss that can be computed for every head."""
    model = cfg.get("model") if is_set(cfg, "model") else None
    if not isinstance(model, DictConfig) or "exits" not in model:
        return []
    faults = []
    if model.get("exit") is not None and model.get("margin") is not None:
        faults.append(f"model.exit: expected one rule, a layer or a margin, got {model.exit} and {model.margin}")
    if "loss" in cfg and sets_of(cfg.get("data")):
        faults.append("data: expected a single set with model=early_exit, got a mix; choose another source")
    if "loss" in cfg and str(cfg.loss.get("_target_")).endswith(".DPO"):
        faults.append("loss: expected another loss than dpo with model=early_exit, got loss=dpo")
    return faults
