"""Rules between keys: which values of one key exclude or need values of another."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from ranker.config.groups import is_set
from ranker.config.paths import READER
from ranker.config.sets import sets_of, source_nodes, suite_of
from ranker.config.signatures import attribute_of, parameters_of
from ranker.config.targets import PASSED, is_trusted
from ranker.errors import ConfigError, did_you_mean

SUITE = ("folder", "sets")  # keys of a suite


def rule_faults(cfg: DictConfig) -> list[str]:
    """Return one fault for each rule between keys that a configuration breaks."""
    sizes = (_group_sizes, _losses, _shared_prefix, _passages, _words, _numbers)
    shape = (_distillation, _exits, _data, _mix, _measures, _evaluation)
    commands = (_suite, _teachers, _reranking, _merging, _pretraining)
    rules = (*sizes, *shape, *commands)
    return [fault for rule in rules for fault in rule(cfg)]


def _group_sizes(cfg: DictConfig) -> list[str]:
    batch = cfg.get("batch")
    if batch is None or "docs" not in batch or batch.docs < 1:
        return []
    faults = []
    if batch.get("novelty") is not None and not 0 < batch.novelty <= 1:
        faults.append(f"batch.novelty: expected a share above 0 and at most 1, or null; got {batch.novelty}")
    top = (cfg.get("model") or {}).get("top")
    if isinstance(top, int) and top < batch.docs and "loss" in cfg:
        faults.append(f"model.top: expected at least batch.docs={batch.docs}, the docs of a group, got {top}")
    if batch.positives > batch.docs:
        faults.append(f"batch.positives: expected at most batch.docs={batch.docs}, got {batch.positives}")
    if "loss" in cfg and batch.positives >= batch.docs:
        taught = any(node.get("teacher") for node in source_nodes(cfg).values())
        other_labels = cfg.model.get("in_batch_negatives", False) is not False or taught
        losses = [node.get("loss") or cfg.loss for node in source_nodes(cfg).values()]
        if not other_labels and any(_needs_negatives(str(loss.get("_target_"))) for loss in losses):
            faults.append(
                f"batch.docs: expected more than batch.positives={batch.positives}, got {batch.docs}; "
                "without negatives nothing is learnt"
            )
    return faults


def _needs_negatives(loss: str) -> bool:
    """Whether a loss learns nothing from relevant docs alone: yes, unless its class has `needs_negatives = False`."""
    return not is_trusted(loss, "loss") or attribute_of(loss, "needs_negatives", default=True) is not False


def _shared_prefix(cfg: DictConfig) -> list[str]:
    """Refuse a shared prefix for models whose rows have none."""
    wanted = OmegaConf.select(cfg, "encoder.share_prefix", default=False)
    target = str(OmegaConf.select(cfg, "model._target_"))
    by_pairs = is_trusted(target, "model") and attribute_of(target, "reads", default="") == "pairs"
    if not wanted or (by_pairs and attribute_of(target, "decoder_only", default=False)):
        return []
    return ["encoder.share_prefix: expected false, or model=lm_reranker, whose prompts begin with the query; got true"]


def _losses(cfg: DictConfig) -> list[str]:
    """Refuse losses that read more than scores and labels where the training does not give it to them."""
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
                f"loss: expected another one than {name} with in-batch negatives and with model=multitask, "
                f"got loss={name}; model.in_batch_negatives=false"
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


def _data(cfg: DictConfig) -> list[str]:
    """Keys of every source, and those that a mix has in its sets only."""
    return [fault for path, node in source_nodes(cfg).items() for fault in _source(path, node)]


def _mix(cfg: DictConfig) -> list[str]:
    """What a mix of sets needs."""
    sets = sets_of(cfg.data) if is_set(cfg, "data") else {}
    if not sets:
        return []
    if "loss" not in cfg and "qrels" not in cfg:
        return [f"data: expected a single set for this command, got a mix ({', '.join(sets)}); choose another source"]
    faults = [
        f"data.{key}: expected it in a set of the mix, got {cfg.data[key]!r}; set +data.sets.NAME.{key}=..."
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
        faults.append("data.batches: expected one_set with penalties, which are of one set's texts, got mixed")
    negatives = model.get("in_batch_negatives", False)
    taught = any(node.get("teacher") for node in sets.values())
    if (negatives or (negatives is None and not taught)) and cfg.data.get("batches") == "mixed":
        faults.append(
            "data.batches: expected one_set with in-batch negatives, which come from one set, got mixed; or set "
            "model.in_batch_negatives=false"
        )
    return faults


def _source(path: str, node: DictConfig) -> list[str]:
    """Values of the keys that every source has.

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
    if "qrels" not in cfg or "run" not in cfg:
        return []
    faults = []
    if (cfg.run is None) == (cfg.checkpoint is None):
        faults.append(
            "run: expected either run=FILE qrels=FILE or checkpoint=RUN_FOLDER, got "
            + ("both" if cfg.run else "neither")
        )
    if cfg.run is not None and cfg.qrels is None:
        faults.append("qrels: expected the judgements for the file of run=, got none; set qrels=FILE")
    if cfg.run is not None and cfg.orders > 1:
        faults.append(f"orders: expected 1 with run=, whose scores are given, got {cfg.orders}; set checkpoint=")
    for key, least in (("window", 2), ("stride", 1)):
        value = cfg.lists[key]
        if not (value is None or value == "auto" or (isinstance(value, int) and value >= least)):
            faults.append(f"lists.{key}: expected auto, null or at least {least}; got {value!r}")
    if cfg.run is not None and cfg.length_buckets is not None:
        faults.append("length_buckets: expected none with run=, which has no texts of docs; set checkpoint= or null")
    return faults


def _suite(cfg: DictConfig) -> list[str]:
    """A suite: its keys, the sets that it lists, and the keys that are for one set only."""
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


def _teachers(cfg: DictConfig) -> list[str]:
    """`teacher` of `ranker label`: a path, or a list of paths."""
    if not is_set(cfg, "teacher"):
        return []
    value: Any = cfg.get("teacher")
    if value == READER:
        return [
            f"reader.{key}: expected {what} with teacher=reader, got null"
            for key, what in (("name", "a folder or a name on the hub"), ("answers", "a file of query ids and answers"))
            if not cfg.reader.get(key)
        ]
    paths = list(value) if isinstance(value, ListConfig) else [value]
    if paths and all(isinstance(path, str) and path for path in paths):
        return []
    return [f"teacher: expected a run folder, a model folder, a TREC run, or a list of these; got {value!r}"]


def _reranking(cfg: DictConfig) -> list[str]:
    """What `ranker rerank` needs beside `run`: the texts of its ids."""
    if "top_k" not in cfg or cfg.run is None:
        return []
    return [
        f"{key}: expected the file with the {key} of run={cfg.run}, got none; set {key}=FILE"
        for key in ("queries", "docs")
        if cfg.get(key) is None
    ]


def _merging(cfg: DictConfig) -> list[str]:
    """`runs` and `shares` of `ranker merge`."""
    if "shares" not in cfg or not is_set(cfg, "runs"):
        return []
    runs, shares = cfg.runs, cfg.shares
    faults = []
    if not isinstance(runs, ListConfig) or len(runs) < 2 or not all(isinstance(run, str) and run for run in runs):
        faults.append(f"runs: expected a list of at least two folders, runs=[A,B]; got {runs!r}")
    if shares is not None and (
        not isinstance(shares, ListConfig)
        or not all(isinstance(share, (int, float)) and 0 <= share < float("inf") for share in shares)
        or not any(shares)
        or (isinstance(runs, ListConfig) and len(shares) != len(runs))
    ):
        faults.append(f"shares: expected a number of at least 0 for each run, not all 0, or null; got {shares!r}")
    if shares is not None and OmegaConf.select(cfg, "tune.measure") is not None:
        faults.append(f"shares: expected null with tune.measure, which searches them, got {shares!r}")
    if cfg.interpolation == "slerp" and isinstance(runs, ListConfig) and len(runs) != 2:
        faults.append(f"interpolation: slerp is between two runs, got {len(runs)}; linear takes any number")
    return faults


def _pretraining(cfg: DictConfig) -> list[str]:
    """What `ranker pretrain` starts from: an encoder, whose weights are all trained, or a run that it continues."""
    if "objective" not in cfg:
        return []
    faults = []
    if OmegaConf.select(cfg, "encoder.lora") is not None:
        faults.append("encoder.lora: expected null, since a pretraining trains all weights of the encoder")
    if cfg.get("checkpoint") is not None and not cfg.get("resume"):
        faults.append(
            f"checkpoint: expected resume=true beside it, got false; encoder.name={cfg.checkpoint} starts from a model"
        )
    return faults


def _passages(cfg: DictConfig) -> list[str]:
    """Windows: strides without gaps, and a model that can read them."""
    node = cfg.get("passages") if is_set(cfg, "passages") else None
    if not isinstance(node, DictConfig):
        return []
    faults = []
    length, stride = node.get("length"), node.get("stride")
    if isinstance(length, int) and isinstance(stride, int) and stride > length:
        faults.append(
            f"passages.stride: expected at most passages.length={length}, got {stride}: no window would have the "
            "tokens between two windows"
        )
    model = str(cfg.model.get("_target_")) if is_set(cfg, "model") else ""
    if is_trusted(model, "model"):
        if attribute_of(model, "takes_windows", default=False) is not True:
            faults.append(
                f"passages: expected none with {model.rpartition('.')[2]}, which does not score a doc by windows, got "
                f"{str(node.get('_target_')).rpartition('.')[2]}; choose another model, as monobert, lm_reranker or dpr"
            )
        elif node.get("select", "first") == "bm25" and attribute_of(model, "reads") == "texts":
            faults.append("passages.select: expected first with a model that reads docs without the query, got bm25")
    return faults


def _distillation(cfg: DictConfig) -> list[str]:
    """Distillation of layers: between cross-encoders that read whole docs, without options that it would not see."""
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
    """Early exit: one rule at a time, and losses that every head can have."""
    model = cfg.get("model") if is_set(cfg, "model") else None
    if not isinstance(model, DictConfig) or "exits" not in model:
        return []
    faults = []
    if model.get("exit") is not None and model.get("margin") is not None:
        faults.append(f"model.exit: expected one rule, a layer or a margin, got {model.exit} and {model.margin}")
    if "loss" in cfg and sets_of(cfg.get("data")):
        faults.append("data: expected a single set with model=early_exit, got a mix; choose another source")
    if "loss" in cfg and str(cfg.loss.get("_target_")).endswith(".DPO"):
        faults.append("loss: expected another one than dpo with model=early_exit, got loss=dpo")
    return faults
