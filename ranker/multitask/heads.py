"""Read the entries of `model.heads`, and find the probing task of each. torch is not imported here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ranker.config.signatures import parameters_of
from ranker.errors import ConfigError, did_you_mean
from ranker.multitask.options import NAMED_LAYERS, POOLINGS, RANKING, Head, at_least, one_of

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


def reported_name(head: Head) -> str:
    """Return the name of a head's task in probing reports, which may depend on the task's options, such as sem_svd.

    >>> reported_name(Head(task="gap"))
    'coref_gap'
    """
    task_class: Any = task_class_of(head.task, f"model.heads.{head.label}.task")
    name = {"name": head.label} if "name" in (parameters_of(_dotted(task_class)) or {}) else {}
    return str(task_class(**name | head.options).name)
