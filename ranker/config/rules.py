"""Rules between keys: which values of one key exclude or need values of another."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from ranker.config.groups import is_set
from ranker.config.signatures import attribute_of, parameters_of
from ranker.config.targets import PASSED, is_trusted
from ranker.errors import ConfigError, did_you_mean


def rule_faults(cfg: DictConfig) -> list[str]:
    """Return one fault for each rule between keys that a configuration breaks."""
    return [
        *_group_sizes(cfg),
        *_words(cfg),
        *_numbers(cfg),
        *_data(cfg),
        *_measures(cfg),
        *_evaluation(cfg),
        *_reranking(cfg),
    ]


def _group_sizes(cfg: DictConfig) -> list[str]:
    batch = cfg.get("batch")
    if batch is None or batch.docs < 1:
        return []
    faults = []
    if batch.positives > batch.docs:
        faults.append(f"batch.positives: expected at most batch.docs={batch.docs}, got {batch.positives}")
    if "loss" in cfg and batch.positives >= batch.docs:
        other_labels = cfg.model.get("in_batch_negatives", False) is not False or cfg.data.get("teacher")
        if not other_labels and _needs_negatives(str(OmegaConf.select(cfg, "loss._target_"))):
            faults.append(
                f"batch.docs: expected more than batch.positives={batch.positives}, got {batch.docs}; "
                "without negatives nothing is learnt"
            )
    return faults


def _needs_negatives(loss: str) -> bool:
    """Whether a loss learns nothing from relevant docs alone: yes, unless its class has `needs_negatives = False`."""
    return not is_trusted(loss, "loss") or attribute_of(loss, "needs_negatives", default=True) is not False


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
    if OmegaConf.select(cfg, "data.teacher") and OmegaConf.select(cfg, "data.random_negatives"):
        faults.append(
            "data.random_negatives: expected false beside data.teacher, since random docs have no teacher's score"
        )
    return faults


def _numbers(cfg: DictConfig) -> list[str]:
    faults = []
    for key in ("optim.lr", "optim.weight_decay", "schedule.warmup"):
        value = OmegaConf.select(cfg, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            faults.append(f"{key}: expected a number of at least 0, got {value!r}")
    return faults


def _data(cfg: DictConfig) -> list[str]:
    """Values of `drop_query_docs` and `first_stage`, which every source has."""
    data = cfg.get("data") if is_set(cfg, "data") else None
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
            "data.first_stage: expected options of conf/model/bm25.yaml, as {stemmer: german}, or null; "
            f"got {options!r}",
        ]
    known = {
        key: value
        for key, value in (parameters_of("ranker.retrieval.bm25.BM25") or {}).items()
        if key not in (*PASSED["model"], "threads")
    }
    for key in map(str, options):
        if key not in known:
            faults.append(f"data.first_stage.{key}: unknown key{did_you_mean(key, list(known))}")
        elif fault := known[key].fault(options[key]):
            faults.append(f"data.first_stage.{key}: {fault}")
    return faults


def _measures(cfg: DictConfig) -> list[str]:
    """Check the names of measures, and that each monitored value is one that the training logs."""
    if "measures" not in cfg:
        return []
    from ranker.evaluation.metrics import parse_measures  # importing ir_measures is slow, and --help does not need it

    try:
        measures = parse_measures(list(cfg.measures))
    except ConfigError as error:
        return str(error).split("\n")
    logged = [f"val/{measure}" for measure in measures]
    return [
        f"{key}: expected one of {', '.join(logged)} (from measures), got {value!r}"
        for key, value in _monitored(cfg).items()
        if value is not None
        and value not in logged
        and not (key != "monitor" and str(value).startswith(("train/", "optim/")))
    ]


def _monitored(cfg: DictConfig) -> dict[str, Any]:
    """Dotted keys that hold the name of a logged value, and that name."""
    monitored: dict[str, Any] = {"monitor": cfg.get("monitor")}
    for name, node in (cfg.get("callbacks") or {}).items():
        if (
            isinstance(node, DictConfig)
            and str(node.get("_target_")).endswith(".EarlyStopping")
            and not OmegaConf.is_missing(node, "monitor")
        ):
            # where the class allows no null, the check of its signature reports it
            monitored[f"callbacks.{name}.monitor"] = node.get("monitor") or cfg.get("monitor")
    return monitored


def _evaluation(cfg: DictConfig) -> list[str]:
    """What evaluate.py needs: a run file with its judgements, or a checkpoint."""
    if "qrels" not in cfg:
        return []
    faults = []
    if (cfg.run is None) == (cfg.checkpoint is None):
        faults.append(
            "run: expected either run=FILE qrels=FILE or checkpoint=RUN_FOLDER, got "
            + ("both" if cfg.run else "neither")
        )
    if cfg.run is not None and cfg.qrels is None:
        faults.append("qrels: expected the judgements for the file of run=, got none; set qrels=FILE")
    return faults


def _reranking(cfg: DictConfig) -> list[str]:
    """What `ranker rerank` needs beside `run`: the texts of its ids."""
    if "top_k" not in cfg or cfg.run is None:
        return []
    return [
        f"{key}: expected the file with the {key} of run={cfg.run}, got none; set {key}=FILE"
        for key in ("queries", "docs")
        if cfg.get(key) is None
    ]
