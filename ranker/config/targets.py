"""Check the `_target_` of each node against the allowed names, and the node's keys against the target's signature."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ranker.config.sets import SET_KEYS, as_alone, is_set
from ranker.config.signatures import Parameter, attribute_of, defines, parameters_of
from ranker.config.writing import parts_of
from ranker.errors import did_you_mean

# Names that the `_target_` of each group may use: a full name, or a prefix that ends in a dot. A configuration file is
# data: it must not run arbitrary code, such as torch.hub.load or ranker.training.run_writer.write_text. Prefixes are
# packages, so that a new file in a package needs no new entry.
TRUSTED = {
    "data": ("ranker.data.sources.",),
    "model": (
        "ranker.models.",
        "ranker.retrieval.bm25.BM25",
        "ranker.retrieval.tfidf.TFIDF",
        "ranker.multitask.options.",
        "ranker.multitask.multitask.",
        "ranker.exits.early_exit.",
        "ranker.lists.",
    ),
    "encoder": ("ranker.encoders.loading.load_encoder", "ranker.encoders.lora.LoRA"),
    "loss": ("ranker.losses.",),
    "objective": ("ranker.pretraining.objectives.",),
    "passages": ("ranker.passages.",),
    "distill": ("ranker.distillation.layers.Layers",),
    "optim": ("torch.optim.",),
    "schedule": ("ranker.training.schedules.",),
    "index": ("ranker.retrieval.indexes.",),
    "probe": ("ranker.probing.tasks.",),
    "callbacks": (
        "ranker.training.pruning.Prune",
        "ranker.training.ema.EMA",
        "ranker.training.last_k.LastK",
        "lightning.pytorch.callbacks.",
    ),
    "logger": ("ranker.training.loggers.", "lightning.pytorch.loggers."),
}
ANY_GROUP = "torch.nn."  # the prefix that every group may use
# Keys that the program reads itself, whatever the `_target_` of the group is, and their types. An empty tuple: the
# type is checked elsewhere.
SHARED_KEYS: dict[str, dict[str, tuple[str, ...]]] = {
    "data": {
        "negatives": ("str", "None"),
        "teacher": ("str", "None"),
        "random_negatives": ("bool",),
        "suggested_pair_tokens": ("int", "None"),
        "drop_query_docs": (),
        "first_stage": (),
        "expansion": ("str", "None"),
    },
    "encoder": {"suggested_lr": ("int", "float", "None")},
    "passages": {
        "length": ("int",),
        "stride": ("int", "None"),
        "most": ("int", "None"),
        "title": ("int",),
        "select": ("str",),
        "suggested_doc_tokens": ("int",),
        "suggested_pair_tokens": ("int", "None"),
        "suggested_buckets": ("list", "None"),
    },
}
# Keys of a `passages` node that are arguments of `Windows`.
WINDOW_KEYS = ("length", "stride", "most", "title", "select")
# Types of Hydra's keys that control how a `_target_` is built.
BUILD_KEYS = {"_partial_": ("bool",), "_recursive_": ("bool",), "_convert_": ("str",)}
# Arguments that the program passes itself when it builds a group's object; a yaml does not set them.
PASSED = {
    "data": ("cache_dir",),
    "model": ("encoder", "docs"),
    "passages": ("dim",),
    "optim": ("params",),
    "schedule": ("step", "total"),
    "logger": ("folder", "earlier"),
}


def program_keys(group: str, target: str) -> set[str]:
    """Return the keys of a node that the program reads itself and does not pass to the constructor.

    Args:
        group: The node's dotted path, such as `data` or `model`.
        target: The node's `_target_`. Its class may name further keys in a class attribute `program_keys`, a tuple.
    """
    return {*shared_keys(group), *_declared(group, target, "program_keys")}


def shared_keys(group: str) -> dict[str, tuple[str, ...]]:
    """Return the keys that the program reads itself in every node at a dotted path, with the types of their values."""
    return SHARED_KEYS.get(as_alone(group), {}) | (SET_KEYS if is_set(group) else {})


def training_keys(group: str, target: str) -> set[str]:
    """Return the keys that only affect the training of a node's object: the class attribute `training_keys`.

    A training that starts from a stored model may set these keys; all other keys keep their stored value.
    """
    return _declared(group, target, "training_keys")


def _declared(group: str, target: str, attribute: str) -> set[str]:
    return set(attribute_of(target, attribute, default=())) if is_trusted(target, group) else set()


def constructor_keys(group: str, node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node without the keys that the program reads itself: the `_target_` and its arguments remain."""
    excluded = program_keys(group, str(node.get("_target_")))
    return {key: value for key, value in node.items() if key not in excluded}


def untrusted(node: Any, path: str) -> list[str]:
    """Return one fault for each `_target_`, in a node of plain values, that its group may not use."""
    faults = [fault for part, name in parts_of(node, path) for fault in untrusted(part, name)]
    target = node.get("_target_") if isinstance(node, dict) else None
    if target is not None and not is_trusted(str(target), path):
        names = ", ".join(_trusted(path))
        faults.append(f"{path}._target_: expected a name that starts with {names} and is defined there, got {target!r}")
    return faults


def _trusted(path: str) -> tuple[str, ...]:
    return (*TRUSTED.get(as_alone(path).split(".")[0], ()), ANY_GROUP)


@cache
def is_trusted(target: str, path: str) -> bool:
    """Whether the node at a dotted path may use a target.

    The target must be public, allowed in the node's group, and defined in the module of its dotted path. An import into
    this module is not enough.
    """
    prefix = next(
        (name for name in _trusted(path) if target == name or (name.endswith(".") and target.startswith(name))), None
    )
    if prefix is None or any(part.startswith("_") for part in target.split(".")):
        return False
    try:
        return defines(target, target.rpartition(".")[0] if target.startswith("ranker.") else prefix)
    except LookupError:
        return False


def target_faults(cfg: DictConfig) -> list[str]:
    """Compare the keys of every node that has a `_target_` with the signature of that target."""
    faults: list[str] = []

    def walk(node: Any, path: str) -> None:
        if not isinstance(node, DictConfig) or node._is_none() or node._is_missing():
            return
        target = node.get("_target_")
        if target is not None and is_trusted(str(target), path):  # `untrusted` reports the other targets
            faults.extend([*_type_faults(node, path), *_signature_faults(node, path, str(target))])
        for key in map(str, node):
            if not OmegaConf.is_missing(node, key):
                walk(node._get_node(key), f"{path}.{key}" if path else key)

    walk(cfg, "")
    return faults


def _type_faults(node: DictConfig, path: str) -> list[str]:
    """Return one fault for each value of a wrong type under a key that the program or Hydra reads."""
    return [
        f"{path}.{key}: {fault}"
        for key, types in {**BUILD_KEYS, **shared_keys(path)}.items()
        if key in node and not OmegaConf.is_missing(node, key)
        if (fault := Parameter(key, types, required=False).fault(node.get(key)))
    ]


def _signature_faults(node: DictConfig, path: str, target: str) -> list[str]:
    try:
        parameters = parameters_of(target)
    except LookupError as error:
        return [f"{path}._target_: expected the dotted path of a class or function, got {target!r} ({error})"]
    if parameters is None:  # reading the signature would need an import; Python checks the call later
        return []
    given = {str(key) for key in node if not str(key).startswith("_")} - program_keys(path, target)
    known = [*parameters, *(SET_KEYS if is_set(path) else ())]
    faults = [
        f"{path}.{key}: unknown key for {target}{did_you_mean(key, known)}" for key in sorted(given - set(parameters))
    ]
    passed = PASSED.get(as_alone(path), ())
    faults += [
        f"{path}.{key}: expected no such key, since the program sets this argument, got {node.get(key)!r}"
        for key in sorted(given & set(passed))
    ]
    for name, parameter in parameters.items():
        if name in given and not OmegaConf.is_missing(node, name):
            fault = parameter.fault(node.get(name))
            if fault:
                faults.append(f"{path}.{name}: {fault}")
        elif parameter.required and name not in given and name not in passed and not node.get("_partial_"):
            faults.append(f"{path}.{name}: expected a value, got none; set {path}.{name}=...")
    return faults
