"""Checks of a multitask configuration before torch is imported: its heads, their tasks and layers, and what a probing report says of them."""

from __future__ import annotations

import ast
import csv
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

# keys of the model's node whose values `faults_of` checks
KEYS = ("auto", "heads", "labels", "sampling", "weighting")
TASKS = Path(__file__).parents[1] / "probing" / "tasks"


def read_heads(entries: Any) -> list[Head]:
    """Check the entries of `model.heads`.

    Raises:
        ConfigError: One line per fault.
    """
    if not isinstance(entries, (list, tuple)):
        raise ConfigError(f"model.heads: expected a list as [{{task: bm25, layer: 5}}], got {entries!r}")
    heads: list[Head] = []
    faults: list[str] = []
    for place, entry in enumerate(entries):
        try:
            heads.append(_head(entry, f"model.heads[{place}]"))
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
        raise ConfigError(f"{where}: expected a task and its layer as {{task: bm25, layer: 5}}, got {entry!r}")
    known = [part.name for part in fields(Head)]
    for key in entry:
        if key not in known:
            raise ConfigError(f"{where}.{key}: unknown key{did_you_mean(str(key), known)}")
    target = task_target(str(entry["task"]), f"{where}.task")
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
    options = parameters_of(target) or {}
    for key, value in head.options.items():
        if key not in options:
            raise ConfigError(
                f"{where}.options.{key}: unknown key for {head.task}{did_you_mean(str(key), list(options))}"
            )
        fault = options[key].fault(value)
        if fault:
            raise ConfigError(f"{where}.options.{key}: {fault}")
    _check_labels(head, target, where)
    return head


def _check_labels(head: Head, target: str, where: str) -> None:
    """Refuse labels that the task does not have."""
    kind = labels_of(target)
    if head.regression and kind in ("closed", "open"):
        raise ConfigError(
            f"{where}.regression: expected false for {head.task}, whose labels are classes, got true; leave it out"
        )
    if head.classes is not None:
        if kind in ("closed", "numbers"):
            what = "bins of numbers" if kind == "numbers" else "labels"
            raise ConfigError(
                f"{where}.classes: expected none for {head.task}, which has its own {what}, got {head.classes!r}; leave them out"
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
            f"{where}: expected a layer from 0 (the embeddings), a list of them, {', '.join(NAMED_LAYERS[:-1])} or auto; got {layer!r}"
        )


def task_target(task: str, where: str) -> str:
    """Dotted path of a probing task's class: the one in its file that makes examples; nothing is imported.

    Raises:
        ConfigError: There is no such task.

    >>> task_target("bm25", "task")
    'ranker.probing.tasks.bm25.BM25Score'
    """
    path = TASKS / f"{task}.py"
    if not task.isidentifier() or not path.is_file():
        known = sorted(own.stem for own in TASKS.glob("*.py") if own.stem != "__init__")
        raise ConfigError(f"{where}: expected one of {', '.join(known)}; got {task!r}")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and any(
            isinstance(part, ast.FunctionDef) and part.name == "examples" for part in node.body
        ):
            return f"ranker.probing.tasks.{task}.{node.name}"
    raise ConfigError(f"{where}: expected a class with `examples` in {path}, got none")


def labels_of(target: str) -> str:
    """Kind of a task's labels by its class's `classes`: `numbers`, `closed` (it names them), `open`, or `file` where data decides.

    >>> [labels_of(task_target(task, "task")) for task in ("bm25", "rel", "fact", "jsonl")]
    ['numbers', 'closed', 'open', 'file']
    """
    module, _, name = target.rpartition(".")
    body = ast.parse((TASKS / f"{module.rpartition('.')[2]}.py").read_text(encoding="utf-8")).body
    (node,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    for part in node.body:
        if isinstance(part, (ast.AnnAssign, ast.Assign)) and part.value is not None:
            names = [part.target] if isinstance(part, ast.AnnAssign) else part.targets
            if "classes" in map(ast.unparse, names):
                return {"()": "numbers", "None": "open"}.get(ast.unparse(part.value), "closed")
    return "file"


# checks of a whole `model` node
# -------------------------------------------------------------------------------------------------------


def faults_of(model: Mapping[str, Any], encoder: Mapping[str, Any]) -> list[str]:
    """What is wrong with a multitask `model` node for an `encoder` node, one line a fault."""
    if not isinstance(model.get("heads"), list):  # said by the check of signatures
        return (
            []
            if model.get("heads") is not None
            else ["model.heads: expected a list as [{task: bm25, layer: 5}], got null"]
        )
    found: list[str] = []
    heads: list[Head] = []
    made: dict[str, Any] = {}
    try:
        heads = read_heads(model.get("heads"))
        if not heads:
            found.append(
                "model.heads: expected at least one head as [{task: bm25, layer: 5}], got none; model=monobert trains without"
            )
    except ConfigError as error:
        found += str(error).split("\n")
    for key, kind in (
        ("sampling", TaskSampling),
        ("weighting", TaskWeighting),
        ("labels", TaskLabels),
        ("auto", AutoLayers),
    ):
        if not isinstance(model.get(key) or {}, Mapping):
            found.append(f"model.{key}: expected keys and values, got {model[key]!r}")
            continue
        try:
            made[key] = kind(
                **{name: value for name, value in (model.get(key) or {}).items() if not name.startswith("_")}
            )
        except ConfigError as error:
            found.append(str(error))
        except TypeError:  # said by the check of signatures
            continue
    sampling, weighting = made.get("sampling"), made.get("weighting")
    if sampling is not None and weighting is not None and sampling.composition == "homogeneous":
        for name, value in (("mode", weighting.mode), ("surgery", weighting.surgery)):
            if value in ("gradnorm", "pcgrad", "guard"):
                found.append(
                    f"model.weighting.{name}: {value} compares the tasks of a step, got steps of one task; set model.sampling.composition=mixed"
                )
    if any(head.layer == "auto" for head in heads) and "auto" in made:
        try:
            auto_layers(heads, made["auto"], encoder)
        except ConfigError as error:
            found += str(error).split("\n")
    return found


def reported_name(head: Head) -> str:
    """The name under which a probing report has a head's task: a variant's own, as sem_svd.

    Imports the task, and torch with it.

    >>> reported_name(Head(task="gap"))
    'coref_gap'
    """
    target = task_target(head.task, f"model.heads.{head.label}.task")
    module, _, name = target.rpartition(".")
    named = {"name": head.label} if "name" in (parameters_of(target) or {}) else {}
    return str(getattr(importlib.import_module(module), name)(**named | head.options).name)


def auto_layers(heads: Sequence[Head], auto: AutoLayers, encoder: Mapping[str, Any]) -> dict[str, int]:
    """The layer of the highest compression for each head with `layer: auto`, the mean over the report's seeds; the lower one of a tie.

    Raises:
        ConfigError: There is no report, it lacks a task, or it is of another encoder than the `encoder` node's.
    """
    wanted = [head for head in heads if head.layer == "auto"]
    if not wanted:
        return {}
    if auto.report is None:
        raise ConfigError(
            "model.auto.report: expected the folder of a probing run for layer: auto, got none; run probe.py, or give a layer"
        )
    path = Path(auto.report) / "probe_results.csv"
    if not path.is_file():
        raise ConfigError(
            f"model.auto.report: expected a finished probing run with probe_results.csv, got {auto.report!r}"
        )
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("control") == "none" and row.get("layer")]
    rows = [row for row in rows if row["model"] == rows[0]["model"]]
    allowed = _allowed_layers({int(row["layer"]) for row in rows}, auto, encoder)
    tasks = sorted({row["task"] for row in rows})
    chosen, faults = {}, []
    for head in wanted:
        name = reported_name(head)
        if name not in tasks:
            faults.append(
                f"model.heads.{head.label}.layer: expected {name} in {path}, got {', '.join(tasks) or 'no task'}; probe it, or give a layer"
            )
            continue
        by_layer: dict[int, list[float]] = {}
        for row in rows:
            if row["task"] == name and int(row["layer"]) in allowed:
                by_layer.setdefault(int(row["layer"]), []).append(float(row["compression"]))
        if not by_layer:
            faults.append(
                f"model.auto.last_layer: expected other layers than the last one in {path}, got none for {head.task}"
            )
            continue
        chosen[head.label] = max(by_layer, key=lambda layer: (sum(by_layer[layer]) / len(by_layer[layer]), -layer))
    if faults:
        raise ConfigError("\n".join(faults))
    return chosen


def fill_in(cfg: Any) -> None:
    """Put the layers of the probing report in place of `layer: auto` in the configuration's heads."""
    if any(head.get("layer") == "auto" for head in cfg.model.heads):
        plain: Any = OmegaConf.to_container(cfg.model, resolve=True)
        auto = AutoLayers(**{key: value for key, value in plain["auto"].items() if not key.startswith("_")})
        chosen = auto_layers(read_heads(plain["heads"]), auto, cfg.encoder)
        for head in cfg.model.heads:
            head.layer = chosen.get(head.get("name") or head.task, head.layer)


def _allowed_layers(layers: set[int], auto: AutoLayers, encoder: Mapping[str, Any]) -> set[int]:
    """Those of a report's layers that may be chosen.

    Raises:
        ConfigError: The report says that it is of another encoder; or it does not tell which layer is the last, which
            is to be left out.
    """
    assert auto.report is not None
    stored = Path(auto.report) / "config.yaml"
    told: Any = load_stored(stored) if stored.is_file() else {}
    probed = {} if told.get("checkpoint") else told.get("encoder") or {}
    wanted, got = (
        "/".join(str(node[key]) for key in ("package", "name") if node.get(key)) for node in (encoder, probed)
    )
    if got and got != wanted:
        raise ConfigError(
            f"model.auto.report: expected a report on {wanted}, which is trained, got one on {got} in {auto.report!r}; "
            "run probe.py with the same encoder, or give a layer"
        )
    if auto.last_layer:
        return layers
    last = encoder.get("layers") or (
        max(layers, default=0) if not told.get("layers") and not probed.get("layers") else None
    )
    if last is None:
        raise ConfigError(
            f"model.auto.last_layer: expected a report on all layers, to know which is the last, got one on some in {auto.report!r}; "
            "run probe.py with layers=null, or set model.auto.last_layer=true"
        )
    return {layer for layer in layers if layer < last}
