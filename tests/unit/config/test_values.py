"""Unusual values for every key of every root and group: each is accepted, or refused by one readable ConfigError."""

import itertools
import math
import random
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ranker.cli import entry
from ranker.cli.complaints import in_one_line
from ranker.config.check import check
from ranker.config.ranges import Range
from ranker.config.sets import as_alone
from ranker.config.values import RANGES, WORDS
from ranker.errors import ConfigError

CONF = Path(__file__).resolve().parents[3] / "conf"
VALUES = [
    None,
    math.nan,
    math.inf,
    -math.inf,
    0,
    -1,
    0.0,
    1e30,
    10**30,
    True,
    False,
    "",
    "a b",
    "x" * 5000,
    "\0",
    "\udcff",
    "${nowhere}",
    [],
    [1, 1],
    [None],
    ["a", "a"],
    {},
    {"a": 1},
    {"_target_": "os.system"},
    1.5,
    "1e3",
]
# a choice of each group, so that each class's keys are tried once
COMPOSED = {
    "train": [
        ["encoder=tiny"],
        ["model=dpr", "loss=bce", "optim=sgd", "schedule=cosine", "callbacks=early_stopping", "passages=meanp"],
        ["model=colbert", "loss=lambda_loss", "schedule=constant", "data=msmarco_passage", "logger=wandb"],
        ["model=multitask", "loss=hinge", "data=files", "data.path=."],
        ["loss=margin_mse", "passages=parade_transformer"],
        ["model=early_exit"],
        ["loss=listnet", "distill=layers", "distill.teacher=."],
        [
            "data=mixed",
            "+data@data.sets.a=cwe",
            "+loss@data.sets.a.loss=mse",
            *(f"+data.sets.a.{key}=9" for key in ("weight", "cap", "max_query_tokens", "max_doc_tokens")),
            "+data.sets.a.max_pair_tokens=9",
            "+data.sets.a.evaluate=true",
            *(f"+data.sets.a.{key}=x" for key in ("instruction", "prompt", "query_prompt", "doc_prompt")),
        ],
    ],
    "evaluate": [["checkpoint=."], ["run=.", "qrels=."]],
    "search": [
        ["model=bm25", "data=ir_datasets", "index=ivf_pq"],
        ["checkpoint=.", "index=hnsw"],
        ["checkpoint=.", "index=plaid"],
    ],
    "probe": [["encoder=tiny"], ["encoder=tiny", "probe=[gap,jsonl,ner_rules,fact_synth]"]],
    "label": [["teacher=[.]"], ["teacher=.", "data=cwe"]],
    "compare": [["runs=[.,.]"], ["runs=[.,.]", "data=cwe", "report=none", "qrels=."]],
    "fuse": [["runs=[.,.]"], ["runs=[.,.]", "method=weighted", "weights=[1,2]"]],
    "rerank": [["checkpoint=."], ["checkpoint=.", "run=.", "queries=.", "docs=."]],
    "pretrain": [
        ["encoder=tiny"],
        *([f"objective={name}"] for name in ("prop", "electra", "inverse_cloze", "body_first")),
    ],
    "merge": [["runs=[.,.]"], ["runs=[.,.]", "tune.measure=nDCG@10", "data=cwe"]],
    "compress": [["checkpoint=."]],
    "sizes": [["checkpoint=."], ["checkpoint=.", "index=binary", "dims=[8]", "keep=[1,8]"]],
    "calibrate": [["checkpoint=."]],
    "export": [["checkpoint=.", "format=onnx"]],
    "publish": [["checkpoint=.", "to=x"]],
    "serve": [["checkpoint=."]],
}


@pytest.fixture(scope="module")
def composed():
    """Configurations that pass the check, by root and choice."""
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return {
            (root, i): compose(root, ["name=checked", *choice])
            for root, choices in COMPOSED.items()
            for i, choice in enumerate(choices)
        }


def leaves(node, path=""):
    for key in node:
        name = f"{path}.{key}" if path else str(key)
        yield name
        if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
            yield from leaves(node[key], name)


def put(cfg, keys: list[str], value) -> list[str]:
    """Set keys; returns what OmegaConf says of those that it refuses, as complaints.py words it."""
    refused = []
    for key in keys:
        try:
            OmegaConf.update(cfg, key, value, merge=False)
        except (OmegaConfBaseException, AssertionError) as error:
            refused.append(in_one_line(error))
    return refused


def faults(cfg) -> list[str]:
    """The check's lines; any other exception than these two is a fault of the check."""
    try:
        check(cfg)
    except ConfigError as error:
        return str(error).split("\n")
    except OmegaConfBaseException as error:  # an interpolation without a value, which `user_errors` says so
        assert "${" in str(OmegaConf.to_container(cfg))
        return [in_one_line(error)]
    return []


def test_all_keys_at_once_with_any_value_are_refused_in_words(composed):
    values = itertools.cycle(random.Random(1).sample(VALUES, len(VALUES)))
    for (_, choice), cfg in composed.items():
        assert faults(cfg) == []
        keys = [key for key in leaves(cfg) if "hydra" not in key]
        inner = [
            key
            for key in keys
            if not isinstance(OmegaConf.select(cfg, key, throw_on_missing=False), DictConfig) and key[-1] != "_"
        ]
        for value in itertools.islice(values, 3 if choice else 9):  # most keys are those of the root's first choice
            changed = cfg.copy()
            lines = [*put(changed, inner, value), *faults(changed)]
            assert lines
            for line in lines:
                assert ": " in line and "\n" not in line and len(line) < 1000, line


def test_one_key_with_any_value_is_legal_or_refused_in_words(composed):
    rng = random.Random(0)
    for _ in range(120):
        cfg = rng.choice(list(composed.values())).copy()
        key, value = rng.choice([key for key in leaves(cfg) if "hydra" not in key]), rng.choice(VALUES)
        for line in [*put(cfg, [key], value), *faults(cfg)]:
            assert ": " in line and "\n" not in line and len(line) < 1000, (key, value, line)


@pytest.mark.parametrize(
    ("root", "key", "value", "message"),
    [
        ("train", "optim.lr", math.nan, "optim.lr: expected at least 0, got nan"),
        ("train", "optim.lr", math.inf, "optim.lr: expected at least 0, got inf"),
        ("train", "seed", 2**32, "seed: expected at least 0 and at most 4294967295, got 4294967296"),
        (
            "train",
            "batch.queries",
            10**30,
            "batch.queries: expected at most 2147483647, got 1000000000000000000000000000000",
        ),
        ("train", "loss", None, "loss: expected the name of a file in conf/loss/, got null"),
        (
            "train",
            "trainer.max_epochs",
            0,
            (
                "trainer.max_epochs: expected at least 1, got 0, which trains nothing; evaluate.py "
                "measures a model as it is"
            ),
        ),
        (
            "train",
            "trainer.limit_train_batches",
            0,
            (
                "trainer.limit_train_batches: expected a number of steps from 1 or a share of an epoch "
                "above 0 and up to 1.0, got 0"
            ),
        ),
        (
            "train",
            "trainer.max_time",
            "00:00:00:00",
            (
                "trainer.max_time: expected days:hours:minutes:seconds above 0, as 00:12:00:00, or "
                "{hours: 12}; got '00:00:00:00'"
            ),
        ),
        (
            "train",
            "trainer.devices",
            [0, 0],
            "trainer.devices: expected a number above 0 (or -1 for all), a list of indices or auto; got [0, 0]",
        ),
        (
            "train",
            "trainer.profiler",
            "fast",
            "trainer.profiler: expected one of simple, advanced, pytorch or null; got 'fast'",
        ),
        (
            "train",
            "trainer.limit_val_batches",
            0,
            (
                "trainer.limit_val_batches: not supported, since an evaluation needs every query exactly "
                "once; leave it unset"
            ),
        ),
        ("train", "name", 7, "name: expected text, got 7; put it in quotes"),
        (
            "train",
            "cache_dir",
            "/dev/null/x",
            "cache_dir: expected a folder, got '/dev/null/x', where '/dev/null' is a file; set another cache_dir",
        ),
        (
            "train",
            "model.pooling",
            "median",
            "model.pooling: expected one of cls, mean, max, last, weightedmean, auto; got 'median'",
        ),
        ("probe", "layers", [], "layers: expected at least one entry, got none; leave it out or name some"),
        ("probe", "seeds", [1, 1], "seeds: expected each entry once, got [1, 1]"),
        (
            "probe",
            "portions",
            [0.5, 0.2],
            "portions: expected rising shares above 0 that end in 1.0, got [0.5, 0.2]; set portions=[0.1,0.5,1.0]",
        ),
        ("probe", "probe.bm25.bins", 1, "probe.bm25.bins: expected at least 2, got 1"),
        ("probe", "weights", "worst", "weights: expected one of best, last; got 'worst'"),
    ],
)
def test_a_value_is_refused_in_these_words(composed, root, key, value, message):
    cfg = composed[root, 0].copy()
    OmegaConf.update(cfg, key, value, merge=False)
    assert faults(cfg) == [message]


@pytest.mark.parametrize(
    ("root", "key", "value"),
    [
        ("train", "seed", 2**32 - 1),
        ("train", "optim.lr", 1e30),
        ("train", "optim.lr", 0),
        ("train", "batch.workers", 0),
        ("train", "trainer.devices", "0,1"),
        ("train", "trainer.devices", [0]),
        ("train", "trainer.max_time", "01:02:03:04"),
        ("train", "trainer.max_time", {"hours": 0.5}),
        ("train", "trainer.val_check_interval", 0.5),
        ("train", "trainer.gradient_clip_val", 0),
        ("train", "trainer.limit_train_batches", 0.1),
        ("train", "model.dropout", 0.99),
        ("train", "name", "007"),
        ("train", "val_depth", None),
        ("probe", "layers", None),
        ("probe", "layers", [0]),
        ("probe", "seeds", [2**32 - 1]),
        ("probe", "controls", []),
    ],
)
def test_a_value_at_the_end_of_its_range_is_legal(composed, root, key, value):
    cfg = composed[root, 0].copy()
    OmegaConf.update(cfg, key, value, merge=False)
    assert faults(cfg) == []


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"max_epochs": 0}, "max_epochs"),
        ({"max_epochs": -1, "max_steps": 0}, "max_steps"),
        ({"limit_train_batches": 0}, "limit_train_batches"),
        ({"limit_train_batches": 0.0}, "limit_train_batches"),
        ({"max_time": "00:00:00:00"}, "max_time"),
        ({"max_epochs": None}, "max_epochs"),
    ],
)
def test_pc2_05_a_training_of_no_step_is_refused_and_0_is_not_unset(composed, values, key):
    cfg = composed["train", 0].copy()
    for name, value in values.items():
        cfg.trainer[name] = value
    (line,) = faults(cfg)
    assert line.startswith(f"trainer.{key}: expected ") and ("got neither" in line) == (values == {"max_epochs": None})


def test_a_group_that_is_no_mapping_is_refused(composed):
    for group in ("callbacks", "logger", "optim", "schedule", "data", "encoder", "model", "passages", "distill"):
        for value in (1, "a b", True, [1], {"a": 1}) if group != "logger" else (1, "a b", True, [1]):
            cfg = composed["train", 0].copy()
            cfg[group] = value
            lines = faults(cfg)
            assert lines and all(line.startswith(group) for line in lines), (group, value, lines)


def test_the_tables_name_keys_that_exist(composed):
    """A key that was renamed would go unchecked."""
    known, classes = set(), set()
    for cfg in composed.values():
        for key in leaves(cfg):
            known |= {key, as_alone(key)}
            parent = OmegaConf.select(cfg, key.rpartition(".")[0]) if "." in key else cfg
            if isinstance(parent, DictConfig) and "_target_" in parent:
                classes.add(f"{str(parent._target_).rpartition('.')[2]}.{key.rpartition('.')[2]}")
    optional = {"optim.eps", "optim.betas", "optim.momentum", "data.suggested_pair_tokens"}
    uncovered = {
        "Coreference.max_positives",
        "Coreference.docs_per_query",
        "NamedEntities.max_targets",
        "Relevance.pool",
        "Relevance.negatives",
    }
    assert {*RANGES, *WORDS} - known - classes - optional - uncovered == set()


def test_the_words_are_those_of_the_code():
    from ranker.interactions.pooling import POOLINGS
    from ranker.models._bi_encoder import ACTIVATIONS
    from ranker.probing.binning import METHODS
    from ranker.probing.code_length import UNITS
    from ranker.probing.controls import CONTROLS
    from ranker.probing.online_code import BATCHINGS, VALIDATIONS
    from ranker.probing.pairs import GROUPINGS
    from ranker.probing.probes import HEADS
    from ranker.probing.sequences import READS
    from ranker.retrieval.mining import ORDERS

    in_code = {
        "MonoBERT.pooling": {*POOLINGS, "auto"},
        "Multitask.pooling": {*POOLINGS, "auto"},
        "DPR.pooling": {*POOLINGS, "auto"},
        "DPR.activation": ACTIVATIONS,
        "BM25Score.binning": METHODS,
        "units": UNITS,
        "controls": CONTROLS,
        "batching": BATCHINGS,
        "validation": VALIDATIONS,
        "group_by": GROUPINGS,
        "training.head": HEADS,
        "reads": READS,
        "mining.order": ORDERS,
    }
    assert {key: set(WORDS[key]) for key in in_code} == {key: set(words) for key, words in in_code.items()}


def test_a_range_in_words():
    assert Range(0, 1, above=True).fault(0) == "expected a number above 0 and at most 1, got 0"
    assert Range(0, 1, below=True).fault(1.0) == "expected at least 0 and below 1, got 1.0"
    assert Range(1).fault(2**31) == "expected at most 2147483647, got 2147483648"
    assert Range(-1).fault(-1) == Range(1).fault("text") == ""
