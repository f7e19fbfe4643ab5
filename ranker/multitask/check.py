"""Check a multitask configuration: heads, tasks, layers and the probing report. This module does not import torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ranker.config.signatures import parameters_of
from ranker.config.stored import load_stored
from ranker.errors import ConfigError, did_you_mean
from ranker.multitask.options import (
    NAMED_LAYERS,
    POOLINGS,
    RANKING,
    AutoLayers,
    Head,
    TaskLabels,
    TaskSampling,
    TaskWeighting,
    at_least,
    one_of,
)
from ranker.probing.profile import check_encoder, probed_encoder, read_profile

# keys of the `model` node whose values `faults_of` checks
KEYS = ("auto", "heads", "labels", "sampling", "weighting")
TASKS = Path(__file__).parents[1] / "probing" / "tasks"  # the modules of tasks do not import torch


def read_heads(entries: Any) -> list[Head]:
    """Check the entries of `model.heads`, and return the heads.

    Raises:
        ConfigError: An entry is invalid; the message has one line per fault.
    """
    if not isinstance(entries, (list, tuple)):
        raise ConfigError(f"model.heads: expected a list such as [{{task: bm25, layer: 5}}], got {entries!r}")
    heads: list[Head] = []
    faults: list[str] = []
    for number, entry in enumerate(entries):
        try:
            heads.append(_head(entry, f"model.heads[{number}]"))
        except ConfigError as error:
            faults += str(error).split("\n")
    names = [head.label for head in heads]
    faults += [
        f"model.heads: expected each name once, got {name!r} twice; give one of them another name="
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if faults:
        raise ConfigError("\n".join(faults))
    return heads


def _head(entry: Any, where: str) -> Head:
    if not isinstance(entry, Mapping) or "task" not in entry:
        raise ConfigError(f"{where}: expected a task and its layer, such as {{task: bm25, layer: 5}}, got {entry!r}")
    known = [part.name for part in fields(Head)]
    for key in entry:
        if key not in known:
            raise ConfigError(f"{where}.{key}: unknown key{did_you_mean(str(key), known)}")
    task_class = task_class_of(str(entry["task"]), f"{where}.task")
    parameters = parameters_of("ranker.multitask.options.Head") or {}
    for key, value in entry.items():
        fault = parameters[str(key)].fault(value) if key != "layer" else ""
        if fault:
            raise ConfigError(f"{where}.{key}: {fault}")
    head = Head(**{str(key): value for key, value in entry.items()})
    if not head.label.isidentifier() or head.label == RANKING:
        raise ConfigError(f"{where}.name: expected letters, digits and _ (and not {RANKING!r}), got {head.label!r}")
    _check_layer(head.layer, f"{where}.layer")
    if head.pooling is not None:
        one_of(f"{where}.pooling", head.pooling, POOLINGS)
    at_least(f"{where}.weight", head.weight, 0)
    options = parameters_of(_dotted(task_class)) or {}
    for key, value in head.options.items():
        if key not in options:
            raise ConfigError(
                f"{where}.options.{key}: unknown key for {head.task}{did_you_mean(str(key), list(options))}"
            )
        fault = options[key].fault(value)
        if fault:
            raise ConfigError(f"{where}.options.{key}: {fault}")
    _check_labels(head, task_class, where)
    return head


def _check_labels(head: Head, task_class: type, where: str) -> None:
    """Check that `regression`, `classes` and the number of bins fit the task's labels."""
    label_type = label_type_of(task_class)
    if head.regression and label_type in ("closed", "open"):
        raise ConfigError(
            f"{where}.regression: expected false for {head.task}, whose labels are classes, got true; leave it out"
        )
    if head.classes is not None:
        if label_type in ("closed", "numbers"):
            what = "bins of numbers" if label_type == "numbers" else "labels"
            raise ConfigError(
                f"{where}.classes: expected none for {head.task}, which has its own {what}, got {head.classes!r}; "
                "leave classes out"
            )
        if head.regression:
            raise ConfigError(
                f"{where}.classes: expected none beside regression: true, got {head.classes!r}; leave one of them out"
            )
        if len({str(name) for name in head.classes}) != len(head.classes) or len(head.classes) < 2:
            raise ConfigError(
                f"{where}.classes: expected at least two labels, each once, got {head.classes!r}; name all that occur"
            )
    if head.options.get("bins", 2) < 2:
        raise ConfigError(f"{where}.options.bins: expected at least 2, got {head.options['bins']!r}")


def _check_layer(layer: Any, where: str) -> None:
    several = isinstance(layer, (list, tuple))
    numbers = list(layer) if several else [layer]
    whole = all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers)
    if not (numbers and whole) and (several or layer not in NAMED_LAYERS):
        raise ConfigError(
            f"{where}: expected a layer from 0 (the embeddings), a list of layers, {', '.join(NAMED_LAYERS[:-1])} or "
            f"auto; got {layer!r}"
        )


def task_class_of(task: str, where: str) -> type:
    """Return the class of a probing task: the class with `examples` in the task's module.

    Args:
        task: Name of the task, a module of `ranker.probing.tasks`.
        where: Configuration key, for the start of an error message.

    Raises:
        ConfigError: The task does not exist.

    >>> task_class_of("bm25", "task").__name__
    'BM25Score'
    """
    path = TASKS / f"{task}.py"
    if not task.isidentifier() or not path.is_file():
        known = sorted(file.stem for file in TASKS.glob("*.py") if file.stem != "__init__")
        raise ConfigError(f"{where}: expected one of {', '.join(known)}; got {task!r}")
    module = importlib.import_module(f"ranker.probing.tasks.{task}")
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == module.__name__ and "examples" in vars(value):
            return value
    raise ConfigError(f"{where}: expected a class with `examples` in {path}, got none")


def _dotted(task_class: type) -> str:
    return f"{task_class.__module__}.{task_class.__qualname__}"


def label_type_of(task_class: type) -> str:
    """Classify a task's labels by the attribute `classes` of its class.

    Returns:
        `numbers`: labels are binned numbers. `closed`: the class lists the labels. `open`: all labels that occur are
        classes. `file`: the task's file decides the labels, so the class has no constant `classes`.

    >>> [label_type_of(task_class_of(task, "task")) for task in ("bm25", "rel", "fact", "jsonl")]
    ['numbers', 'closed', 'open', 'file']
    """
    classes = vars(task_class).get("classes", NotImplemented)
    if classes == ():
        return "numbers"
    if classes is None:
        return "open"
    return "closed" if isinstance(classes, tuple) else "file"


# checks of a whole `model` node
# -------------------------------------------------------------------------------------------------------


def faults_of(model: Mapping[str, Any], encoder: Mapping[str, Any]) -> list[str]:
    """Return the faults of a multitask `model` node, one line each.

    Args:
        model: The `model` node of the configuration.
        encoder: The `encoder` node of the configuration.
    """
    example = "[{task: bm25, layer: 5}]"
    if model.get("heads") is None:
        return [f"model.heads: expected a list such as {example}, got null"]
    if not isinstance(model["heads"], list):  # the check of signatures reports this fault
        return []
    faults: list[str] = []
    heads: list[Head] = []
    try:
        heads = read_heads(model["heads"])
        if not heads:
            faults.append(
                f"model.heads: expected at least one head, such as {example}, got none; model=monobert trains without"
            )
    except ConfigError as error:
        faults += str(error).split("\n")
    options: dict[str, Any] = {}
    for key, options_class in _OPTIONS.items():
        node = model.get(key) or {}
        if not isinstance(node, Mapping):
            faults.append(f"model.{key}: expected keys and values, got {node!r}")
            continue
        try:
            options[key] = options_class(**{name: value for name, value in node.items() if not name.startswith("_")})
        except ConfigError as error:
            faults.append(str(error))
        except TypeError:  # the check of signatures reports the unknown key
            continue
    faults += _contradictions(options.get("sampling"), options.get("weighting"))
    if any(head.layer == "auto" for head in heads) and "auto" in options:
        try:
            auto_layers(heads, options["auto"], encoder)
        except ConfigError as error:
            faults += str(error).split("\n")
    return faults


_OPTIONS = {"sampling": TaskSampling, "weighting": TaskWeighting, "labels": TaskLabels, "auto": AutoLayers}


def _contradictions(sampling: TaskSampling | None, weighting: TaskWeighting | None) -> list[str]:
    """Return a fault for a weighting that needs several tasks per step if the sampling gives one task per step."""
    if sampling is None or weighting is None or sampling.composition != "homogeneous":
        return []
    return [
        f"model.weighting.{name}: {value} compares the tasks of a step, got steps of one task; "
        "set model.sampling.composition=mixed"
        for name, value in (("mode", weighting.mode), ("surgery", weighting.surgery))
        if value in ("gradnorm", "pcgrad", "guard")
    ]


def reported_name(head: Head) -> str:
    """Return the name of a head's task in probing reports, which may depend on the task's options, such as sem_svd.

    >>> reported_name(Head(task="gap"))
    'coref_gap'
    """
    task_class: Any = task_class_of(head.task, f"model.heads.{head.label}.task")
    name = {"name": head.label} if "name" in (parameters_of(_dotted(task_class)) or {}) else {}
    return str(task_class(**name | head.options).name)


def auto_layers(heads: Sequence[Head], auto: AutoLayers, encoder: Mapping[str, Any]) -> dict[str, int]:
    """Choose the layer of each head with `layer: auto`: the layer with the highest compression in a probing report.

    Compression is averaged over the seeds of the report. Among layers with equal compression, the lowest is chosen.

    Args:
        heads: All heads.
        auto: The report and the allowed layers.
        encoder: The configuration's `encoder` node.

    Returns:
        Name of the head -> layer.

    Raises:
        ConfigError: There is no report, or the report lacks a task or is about another encoder.
    """
    wanted = [head for head in heads if head.layer == "auto"]
    if not wanted:
        return {}
    if auto.report is None:
        raise ConfigError(
            "model.auto.report: expected the folder of a probing run for layer: auto, got none; run probe.py, or give "
            "a layer"
        )
    profile = read_profile(auto.report, "model.auto.report")
    allowed = _allowed_layers({layer for layers in profile.values() for layer in layers}, auto, encoder)
    chosen, faults = {}, []
    for head in wanted:
        name = reported_name(head)
        if name not in profile:
            faults.append(
                f"model.heads.{head.label}.layer: expected {name} in {auto.report}/probe_results.csv, got "
                f"{', '.join(profile) or 'no task'}; probe it, or give a layer"
            )
            continue
        by_layer = {layer: value for layer, value in profile[name].items() if layer in allowed}
        if not by_layer:
            faults.append(
                f"model.auto.last_layer: expected other layers than the last one in {auto.report}, got none for "
                f"{head.task}"
            )
            continue
        chosen[head.label] = max(by_layer, key=lambda layer: (by_layer[layer], -layer))
    if faults:
        raise ConfigError("\n".join(faults))
    return chosen


def fill_in(cfg: Any) -> None:
    """Replace `layer: auto` in the configuration's heads by the layers that the probing report suggests, in place."""
    if any(head.get("layer") == "auto" for head in cfg.model.heads):
        plain: Any = OmegaConf.to_container(cfg.model, resolve=True)
        auto = AutoLayers(**{key: value for key, value in plain["auto"].items() if not key.startswith("_")})
        chosen = auto_layers(read_heads(plain["heads"]), auto, cfg.encoder)
        for head in cfg.model.heads:
            head.layer = chosen.get(head.get("name") or head.task, head.layer)


def _allowed_layers(layers: set[int], auto: AutoLayers, encoder: Mapping[str, Any]) -> set[int]:
    """Return the layers of a report that may be chosen.

    Raises:
        ConfigError: The report is about another encoder; or the last layer is not allowed, and the report does not show
            which layer is last.
    """
    assert auto.report is not None
    stored = Path(auto.report) / "config.yaml"
    report_cfg: Any = load_stored(stored) if stored.is_file() else {}
    probed = probed_encoder(auto.report)
    check_encoder(auto.report, encoder, "model.auto.report")
    if auto.last_layer:
        return layers
    last = encoder.get("layers") or (
        max(layers, default=0) if not report_cfg.get("layers") and not probed.get("layers") else None
    )
    if last is None:
        raise ConfigError(
            "model.auto.last_layer: expected a report on all layers, to know which is the last, got one on some in "
            f"{auto.report!r}; run probe.py with layers=null, or set model.auto.last_layer=true"
        )
    return {layer for layer in layers if layer < last}
