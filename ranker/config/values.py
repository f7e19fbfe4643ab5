"""Checks of single values: ranges of numbers, choices of words, lists. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ranker.config.roots import ROOTS, root_of
from ranker.config.sets import as_alone
from ranker.data.parsing import MAX_GRADE, shown

LARGEST = 2**31 - 1  # the largest count; numpy and torch store many counts in 32 bits


@dataclass(frozen=True)
class Range:
    """A range of numbers.

    Args:
        low: The lower bound.
        high: The upper bound.
        above: Whether the lower bound is excluded.
        below: Whether the upper bound is excluded.
    """

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False

    def fault(self, value: Any) -> str:
        """Return why a number is outside the range; empty if it is inside. Other values are left to other checks.

        >>> Range(1).fault(0), Range(0, 1).fault(0.5), Range(0, above=True).fault(math.inf)
        ('expected at least 1, got 0', '', 'expected a finite number above 0, got inf')
        """
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return ""
        if isinstance(value, int) and self.high == math.inf and value > LARGEST:
            return f"expected at most {LARGEST}, got {shown(value)}"
        low = value > self.low if self.above else value >= self.low
        high = value < self.high if self.below else value <= self.high
        infinite = isinstance(value, float) and not math.isfinite(value)
        return "" if low and high and not infinite else f"expected {self._words()}, got {shown(value)}"

    def _words(self) -> str:
        if self.low == -math.inf:
            return "a finite number"
        if self.high == math.inf:
            return f"a finite number above {self.low:g}" if self.above else f"at least {self.low:.17g}"
        if (self.low, self.high, self.above, self.below) == (0, 1, False, False):
            return "a share from 0 to 1"
        low = f"{'a number above' if self.above else 'at least'} {self.low:g}"
        return f"{low} and {'below' if self.below else 'at most'} {self.high:.17g}"


COUNT, FROM_0, POSITIVE, SHARE, RATE = Range(1), Range(0), Range(0, above=True), Range(0, 1), Range(0, 1, below=True)
SEED, GRADE, ANY = Range(0, 2**32 - 1), Range(1, MAX_GRADE), Range(-math.inf)
# Ranges by dotted key, or by class and key where classes of a group differ. They serve to report an unusable number
# before torch is imported. A new class needs no entry: a key without one takes any finite number here, and the
# constructor can check it.
RANGES = {
    **dict.fromkeys(
        (
            "batch.queries",
            "batch.texts",
            "ELECTRA.generator_layers",
            "InverseCloze.shortest",
            "BodyFirst.shortest",
            "BodyFirst.first",
            "batch.docs",
            "batch.positives",
            "batch.depth",
            "batch.max_tokens",
            "batch.eval_max_tokens",
            "depth",
            "val_depth",
            "max_query_tokens",
            "max_doc_tokens",
            "save_every_steps",
            "orders",
            "top_k",
            "pairs",
            "multiple",
            "max_queries",
            "dims",
            "limits.docs",
            "limits.text_chars",
            "limits.body_bytes",
            "limits.queue_pairs",
            "limits.connections",
            "encode.shard_docs",
            "shard_queries",
            "keep",
            "late.token_depth",
            "report.queries",
            "report.depth",
            "report.text_length",
            "late.candidates",
            "mining.last",
            "mining.count",
            "mining.every",
            "max_pairs",
            "docs_per_query",
            "control_seeds",
            "workers",
            "training.batch_pairs",
            "training.max_rounds",
            "training.round_steps",
            "training.patience",
            "training.small_val_pairs",
            "training.hidden",
            "cache.max_tokens",
            "trainer.log_every_n_steps",
            "trainer.num_nodes",
            "trainer.accumulate_grad_batches",
            "trainer.check_val_every_n_epoch",
            "load_encoder.layers",
            "DPR.projection",
            "DPR.matryoshka_dims",
            "DPR.matryoshka_layers",
            "DPR.matryoshka_layers_per_step",
            "ColBERT.projection",
            "Multitask.head_hidden",
            "BM25.threads",
            "IrDatasets.val_queries",
            "IrDatasets.max_triples",
            "MsMarcoPassage.val_queries",
            "MsMarcoPassage.max_triples",
            "Relevance.pool",
            "Relevance.negatives",
            "SemanticSimilarity.dim",
            "SemanticSimilarity.window",
            "SemanticSimilarity.min_count",
            "Coreference.max_positives",
            "Coreference.docs_per_query",
            "data.cap",
            "data.max_query_tokens",
            "data.max_doc_tokens",
            "Mixed.groups_per_epoch",
            "NamedEntities.max_targets",
            "RuleEntities.max_targets",
            "Gap.max_pairs",
            "SyntheticFacts.max_words",
            "passages.length",
            "passages.stride",
            "passages.most",
            "passages.suggested_doc_tokens",
            "length_buckets",
            "MeanP.k",
            "ParadeTransformer.layers",
            "ParadeTransformer.heads",
            "distill.layers",
        ),
        COUNT,
    ),
    **dict.fromkeys(
        (
            "batch.workers",
            "latency_queries",
            "max_gap",
            "max_loss",
            "layers",
            "trainer.min_epochs",
            "trainer.min_steps",
            "trainer.gradient_clip_val",
            "optim.lr",
            "optim.weight_decay",
            "optim.eps",
            "optim.momentum",
            "schedule.warmup",
            "schedule.end",
            "encoder.suggested_lr",
            "ColBERT.query_length",
            "BM25.k1",
            "BM25Score.k1",
            "EarlyStopping.patience",
            "EarlyStopping.min_delta",
            "data.weight",
            "limits.stop_seconds",
            "passages.title",
            "DPR.matryoshka_alignment",
            "distill.labels",
            "EarlyExit.weight",
            "EarlyExit.margin",
            "inference.margin",
            "distill.scores",
            "distill.states",
            "distill.attention",
            "tokenizers",
        ),
        FROM_0,
    ),
    **dict.fromkeys(
        (
            "DPR.temperature",
            "training.lr",
            "training.clip",
            "cache.max_bytes",
            "Mixed.temperature",
            "limits.request_seconds",
            "report.megabytes",
        ),
        POSITIVE,
    ),
    **dict.fromkeys(
        (
            "val_fraction",
            "test_fraction",
            "Files.val_fraction",
            "Files.test_fraction",
            "BM25.b",
            "BM25Score.b",
            "EarlyExit.distilled",
        ),
        SHARE,
    ),
    **dict.fromkeys(
        (
            "training.dropout",
            "load_encoder.dropout",
            "load_encoder.attention_dropout",
            "load_encoder.layer_drop",
            "MonoBERT.dropout",
            "Multitask.dropout",
            "EarlyExit.dropout",
            "Multitask.head_dropout",
            "optim.betas",
        ),
        RATE,
    ),
    **dict.fromkeys(("seed", "seeds", "data.split_seed"), SEED),
    **dict.fromkeys(("relevance", "tune.relevance", "Files.relevance", "IrDatasets.relevance"), GRADE),
    **dict.fromkeys(("trainer.max_epochs", "trainer.max_steps", "trainer.num_sanity_val_steps"), Range(-1)),
    **dict.fromkeys(("BM25Score.bins", "TermFrequency.bins", "SemanticSimilarity.bins", "JsonLines.bins"), Range(2)),
    "port": Range(0, 65535),
    "max_pair_tokens": Range(5),
    "data.suggested_pair_tokens": Range(5),
    "data.max_pair_tokens": Range(5),
    "training.lr_factor": Range(0, 1, above=True),
    "MonoBERT.num_labels": Range(1, 2),
    "Multitask.num_labels": Range(1, 2),
    "EarlyExit.num_labels": Range(1, 2),
    "EarlyExit.exit": COUNT,
    "inference.exit": COUNT,
    "portions": Range(0, 1, above=True),
    "heads": Range(0, 1, above=True),
    "units": Range(0, 1, above=True),
    "k": FROM_0,
    "weights": FROM_0,
    "tune.step": Range(0, 1, above=True),
}
SPLITS, SIMILARITIES = ("test", "val", "train"), ("cosine", "dot")
POOLINGS = ("cls", "mean", "max", "last", "weightedmean")
WORDS = {
    "weights": ("best", "last"),
    "split": SPLITS,
    "test": SPLITS,
    "inference.quantize": ("int8", "fp8"),
    "map": ("temperature", "platt", "isotonic"),
    "drop": ("top", "alternate", "contribution"),
    "format": ("onnx", "onnx_int8", "hf", "sentence_transformers", "merged"),
    "dtype": ("float32", "bf16", "fp16"),
    "scores": ("raw", "sigmoid"),
    "scale": ("auto", "none", "zscore", "minmax"),
    "scaling": ("minmax", "zscore", "none"),
    "method": ("rrf", "weighted"),
    "interpolation": ("linear", "slerp"),
    "lists.merge": ("auto", "mean", "sliding"),
    **dict.fromkeys(("lists.window", "lists.stride"), ("auto",)),
    "mine": SPLITS,
    "encode.dtype": ("float32", "float16"),
    "mining.order": ("top", "random"),
    "mining.unit": ("steps", "epochs"),
    "reads": ("pairs", "texts"),
    "group_by": ("query", "doc", "pair"),
    "validation": ("fixed", "within"),
    "units": ("bits", "legacy_mixed"),
    "batching": ("auto", "stacked", "separate"),
    "device": ("auto", "cpu", "cuda"),
    "training.head": ("edge", "mlp2", "linear"),
    "cache.dtype": ("float16", "float32", "int8"),
    "cache.tokens": ("all", "spans"),
    "controls": ("label_prior", "random_embeddings", "random_encoder", "control_task", "shuffled", "surface"),
    "MonoBERT.pooling": (*POOLINGS, "auto"),
    "InverseCloze.pooling": (*POOLINGS, "auto"),
    "BodyFirst.pooling": (*POOLINGS, "auto"),
    "Multitask.pooling": (*POOLINGS, "auto"),
    "EarlyExit.pooling": (*POOLINGS, "auto"),
    "DPR.pooling": (*POOLINGS, "auto"),
    "DPR.similarity": SIMILARITIES,
    "DPR.activation": ("identity", "tanh", "relu", "gelu", "silu", "sigmoid"),
    "ColBERT.similarity": SIMILARITIES,
    "Mixed.batches": ("mixed", "one_set"),
    "passages.select": ("first", "bm25"),
    "distill.layers": ("uniform", "last", "auto"),
    "load_encoder.attention": ("auto", "short", "library"),
    **dict.fromkeys(
        ("BM25Score.binning", "TermFrequency.binning", "SemanticSimilarity.binning", "JsonLines.binning"),
        ("mean2std", "minmax", "quantile"),
    ),
}
NON_EMPTY = ("seeds", "layers", "dims", "portions", "length_buckets")  # lists of at least one entry


def faults_of(cfg: DictConfig, skipped: tuple[str, ...] = ()) -> list[str]:
    """Check each value of a composed configuration by itself.

    Args:
        cfg: The configuration.
        skipped: Dotted keys that another check looks at, with all keys below them.

    Returns:
        One line per fault.
    """
    faults = []
    for key, rules, value in _leaves(cfg, ""):
        if f"{key}.".startswith(tuple(f"{other}." for other in skipped)):
            continue
        entries = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
        of_value = [fault for entry in entries if (fault := _fault(rules, entry))]
        if isinstance(value, list):
            of_value += _list_faults(key, value)
        faults += [f"{key}: {fault}" for fault in dict.fromkeys(of_value)]
    return faults


def _fault(rules: tuple[str, ...], value: Any) -> str:
    if isinstance(value, str):
        known = next((WORDS[rule] for rule in rules if rule in WORDS), (value,))
        return _text_fault(value) if value in known else f"expected one of {', '.join(known)}; got {shown(value)}"
    return next((RANGES[rule] for rule in rules if rule in RANGES), ANY).fault(value)


def _text_fault(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        return f"expected text that UTF-8 can hold, got {value[:60]!r}"
    return f"expected text without NUL characters, got {shown(value)}" if "\0" in value else ""


def _list_faults(key: str, value: list[Any]) -> Iterator[str]:
    if key in NON_EMPTY and not value:
        yield "expected at least one entry, got none; leave it out or name some"
    if any(entry is None for entry in value):
        yield f"expected entries without null, got {shown(value)}"
    plain = [entry for entry in value if isinstance(entry, (str, int, float))]
    if key in (*NON_EMPTY, "controls") and len(set(plain)) < len(plain):
        yield f"expected each entry once, got {shown(value)}"
    numbers = [entry for entry in value if isinstance(entry, (int, float))]
    if key == "length_buckets" and numbers != sorted(numbers):
        yield f"expected rising bounds, got {shown(value)}"
    if key == "portions" and numbers and (numbers != sorted(numbers) or numbers[-1] != 1):
        yield f"expected rising shares above 0 that end in 1.0, got {shown(value)}; set portions=[0.1,0.5,1.0]"


def _leaves(node: DictConfig, path: str) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Yield (dotted key, its names in `RANGES` and `WORDS`, plain value) of each leaf; a list is a leaf."""
    target = "" if OmegaConf.is_missing(node, "_target_") else str(node.get("_target_") or "").rpartition(".")[2]
    for key in map(str, node):
        name = f"{path}.{key}" if path else key
        if OmegaConf.is_missing(node, key) or key.startswith("_"):
            continue
        value = node[key]
        alone = as_alone(name)
        if isinstance(value, DictConfig) and alone not in ("data.relevance", "data.candidates", "trainer.max_time"):
            yield from _leaves(value, name)
        elif value is not None:
            plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            yield name, (f"{target}.{key}", alone), plain


# text keys of the typed roots
# ----------------------------------------------------------------------------------------------------


def text_keys(root: type, prefix: str = "") -> dict[str, bool]:
    """Return for each dotted key of a root dataclass that takes text whether it may be null."""
    keys: dict[str, bool] = {}
    for entry in fields(root):
        if str(entry.type) in ("Text", "Text | None"):
            keys[prefix + entry.name] = str(entry.type).endswith("None")
        elif is_dataclass(entry.default_factory):
            keys |= text_keys(entry.default_factory, f"{prefix}{entry.name}.")  # type: ignore[arg-type]
    return keys


def text_faults(cfg: DictConfig) -> list[str]:
    """Text keys with a value of another type: once yaml has parsed 007 or 1e3 as a number, the characters are lost."""
    typed: Any = OmegaConf.get_type(cfg) in ROOTS.values()
    keys: Mapping[str, bool] = text_keys(OmegaConf.get_type(cfg) if typed else root_of(cfg))  # type: ignore[arg-type]
    faults = []
    for key, may_be_null in keys.items():
        value = None if _is_missing(cfg, key) else OmegaConf.select(cfg, key)
        if _is_missing(cfg, key) or isinstance(value, str) or (value is None and (may_be_null or not typed)):
            continue
        got = "null" if value is None else shown(value)
        faults.append(
            f"{key}: expected text, got {got}" + ("; put it in quotes" if isinstance(value, (bool, int, float)) else "")
        )
    return faults


def _is_missing(cfg: DictConfig, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    node: Any = OmegaConf.select(cfg, parent) if parent else cfg
    return node is not None and OmegaConf.is_missing(node, name)
