"""Rules between the keys of `data` and `suite`: sources, mixes of sets, suites of test sets."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from ranker.config.groups import is_set
from ranker.config.sets import sets_of, source_nodes
from ranker.config.signatures import parameters_of
from ranker.config.targets import PASSED
from ranker.errors import did_you_mean

SUITE = ("folder", "sets")  # keys of a suite


def source_faults(cfg: DictConfig) -> list[str]:
    """Check the keys that every source has."""
    return [fault for path, node in source_nodes(cfg).items() for fault in _source(path, node)]


def mix_faults(cfg: DictConfig) -> list[str]:
    """Check the keys of a mix of sets; a configuration without a mix has no fault."""
    sets = sets_of(cfg.data) if is_set(cfg, "data") else {}
    if not sets:
        return []
    if "loss" not in cfg and "qrels" not in cfg:
        return [f"data: expected a single set for this command, got a mix ({', '.join(sets)}); choose another source"]
    faults = [
        f"data.{key}: expected this key in a set of the mix, got {cfg.data[key]!r}; set +data.sets.NAME.{key}=..."
        for key in ("negatives", "teacher", "random_negatives")
        if cfg.data.get(key)
    ]
    if all(node.get("weight", 1) == 0 for node in sets.values()):
        faults.append("data.sets: expected a weight above 0 for at least one set, got 0 for all")
    model = cfg.get("model") or {}
    if OmegaConf.select(cfg, "mining.every") is not None:
        faults.append("mining.every: expected null with a mix of sets, got a number; set data.sets.NAME.negatives")
    if "heads" in model:
        faults.append("data: expected a single set with model=multitask, got a mix; choose another source or model")
    if "doc_penalty" in model and cfg.data.get("batches") == "mixed":
        faults.append("data.batches: expected one_set with penalties, which are computed from one set, got mixed")
    negatives = model.get("in_batch_negatives", False)
    taught = any(node.get("teacher") for node in sets.values())
    if (negatives or (negatives is None and not taught)) and cfg.data.get("batches") == "mixed":
        faults.append(
            "data.batches: expected one_set with in-batch negatives, which come from one set, got mixed; or set "
            "model.in_batch_negatives=false"
        )
    return faults


def _source(path: str, node: DictConfig) -> list[str]:
    """Check the keys that every source has, in one source.

    Args:
        path: Dotted path of the source's node.
        node: The node.
    """
    faults = []
    if node.get("teacher") and node.get("random_negatives"):
        faults.append(
            f"{path}.random_negatives: expected false beside {path}.teacher, since random docs have no teacher's score"
        )
    drop = node.get("drop_query_docs", "auto")
    if drop not in ("auto", True, False):
        faults.append(f"{path}.drop_query_docs: expected auto, true or false; got {drop!r}")
    options = node.get("first_stage")
    if options is None:
        return faults
    if not isinstance(options, DictConfig):
        return [
            *faults,
            f"{path}.first_stage: expected options of conf/model/bm25.yaml, as {{stemmer: german}}, or null; "
            f"got {options!r}",
        ]
    known = {
        key: value
        for key, value in (parameters_of("ranker.retrieval.bm25.BM25") or {}).items()
        if key not in (*PASSED["model"], "threads")
    }
    for key in map(str, options):
        if key not in known:
            faults.append(f"{path}.first_stage.{key}: unknown key{did_you_mean(key, list(known))}")
        elif fault := known[key].fault(options[key]):
            faults.append(f"{path}.first_stage.{key}: {fault}")
    return faults


def suite_faults(cfg: DictConfig) -> list[str]:
    """Check the keys and sets of a suite; refuse the keys that only a single set may have."""
    suite = cfg.get("suite") if is_set(cfg, "suite") else None
    if suite is None:
        return []
    if not isinstance(suite, DictConfig) or not isinstance(suite.get("sets"), DictConfig) or not suite.sets:
        return [f"suite: expected the name of a file in conf/suite/, which lists sets; got {suite!r}"]
    faults = [f"suite.{key}: unknown key{did_you_mean(key, SUITE)}" for key in map(str, suite) if key not in SUITE]
    faults += [
        f"suite.sets.{name!s}: expected keys and values of a file in conf/data/, got {node!r}"
        for name, node in suite.sets.items()
        if not isinstance(node, DictConfig) or not isinstance(node.get("_target_"), str)
    ]
    if "loss" in cfg:  # a training validates on the suite
        return faults
    used = {"run": None, "data": None, "candidates": None, "add_positives": False, "split": "test"}
    return faults + [
        f"{key}: expected none beside suite=, whose sets have their own, got {cfg[key]!r}"
        for key, unused in used.items()
        if cfg[key] != unused
    ]
