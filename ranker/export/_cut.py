"""Remove layers, heads and feed-forward units from a model folder; the result is a smaller model of the same class."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ranker.encoders.family import family_of
from ranker.encoders.pruned_heads import KEY, head_rows, removed_heads
from ranker.errors import CheckpointError
from ranker.export._module_weights import read_weights
from ranker.files.checksums import SUMS
from ranker.files.folders import write_folder

# names of the number of feed-forward units in the configurations of transformers
UNITS = ("intermediate_size", "hidden_dim", "ffn_dim", "d_ff", "n_inner")
_LAYER = re.compile(r"\.(\d+)\.")


def encoder_folder(folder: Path) -> Path:
    """Return the folder with the encoder's weights: the model folder itself, or the one folder inside that has them.

    Raises:
        CheckpointError: There is no such folder, or there are several, as in a bi-encoder with two encoders.
    """
    found = [
        path.parent for path in sorted(folder.rglob("config.json")) if "model_type" in json.loads(path.read_text())
    ]
    if len(found) != 1:
        raise CheckpointError(
            f"{folder}: expected a model with one encoder, got {len(found)}; `ranker compress` cuts one encoder"
        )
    return found[0]


def layer_of(name: str, total: int) -> int | None:
    """Return the number of the layer that a weight or module belongs to; None if it is in no layer.

    >>> layer_of("bert.encoder.layer.3.output.dense.weight", 6), layer_of("embeddings.word.weight", 6)
    (3, None)
    """
    match = _LAYER.search(f"{name}.")
    return int(match[1]) if match is not None and int(match[1]) < total else None


def unit_outputs(model: nn.Module, total: int, units: int) -> dict[int, nn.Linear]:
    """Return the linear layer that reads the feed-forward units of each layer, by the layer's number.

    Args:
        model: The model.
        total: Its number of layers.
        units: Its number of feed-forward units.

    Raises:
        CheckpointError: A layer does not have exactly one such linear layer (for example, in a mixture of experts).
    """
    found = [
        (layer_of(name, total), module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.in_features == units and "att" not in name
    ]
    layers = {layer: module for layer, module in found if layer is not None}
    if len(found) != len(layers) or len(layers) != total:
        raise CheckpointError(
            f"units: expected a model with one feed-forward block in each of its {total} layers, got {len(found)} "
            "layers that read one; set units=1"
        )
    return layers


def head_outputs(model: Any, total: int) -> dict[int, nn.Linear]:
    """Return the linear layer that reads the attention heads of each layer, by the layer's number.

    Args:
        model: The model.
        total: Its number of layers.

    Raises:
        CheckpointError: The model does not have BERT's modules.
    """
    if family_of(model.config).layers != "bert":
        raise CheckpointError(
            f"heads: expected a family with BERT's modules, whose heads can be removed, got {model.config.model_type}; "
            "set heads=1"
        )
    return {number: model.encoder.layer[number].attention.output.dense for number in range(total)}


def units_of(config: Any) -> tuple[str, int]:
    """Return the name and value of the number of feed-forward units in a configuration.

    Raises:
        CheckpointError: The configuration has none of the known names.
    """
    for name in UNITS:
        value = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
        if isinstance(value, int):
            return name, value
    raise CheckpointError(f"units: expected a configuration with one of {', '.join(UNITS)}, got none; set units=1")


def cut(
    source: Path,
    target: Path,
    layers: Sequence[int],
    units: Sequence[Tensor] | None,
    heads: Sequence[Sequence[int]] | None = None,
) -> None:
    """Write a model folder with some of the layers and feed-forward units of another one.

    Args:
        source: A model folder.
        target: The new folder; nothing may exist there.
        layers: Indices of the layers to keep, ascending.
        units: Indices of the units to keep in each layer of the source [kept]; None: all.
        heads: Indices of the attention heads to keep in each layer of the source, among its remaining heads; None: all.

    Raises:
        CheckpointError: The folder has no single file of weights, or another number of layers or units.
    """
    encoder = encoder_folder(source)
    content = json.loads((encoder / "config.json").read_text(encoding="utf-8"))
    weights = read_weights(encoder)
    name = next((key for key in ("num_hidden_layers", "n_layers", "num_layers", "n_layer") if key in content), None)
    if name is None:
        raise CheckpointError(f"{encoder}: expected a configuration with a number of layers, got none")
    total = content[name]
    for key, value in content.items():
        # one entry per layer, as in `ranker.encoders.text_model.keep_layers`
        if isinstance(value, list) and len(value) == total and ("layer" in key or "window" in key):
            content[key] = [value[i] for i in layers]
    content[name] = len(layers)
    if units is not None:
        key, size = units_of(content)
        weights = {name: _cut_units(name, tensor, size, total, units) for name, tensor in weights.items()}
        content[key] = len(units[0])
    removed = removed_heads(content)
    if heads is not None:
        weights, removed = _cut_heads(weights, content, heads)
    if removed:
        content[KEY] = {str(new): removed[old] for new, old in enumerate(layers) if removed.get(old)}
    with write_folder(target) as partial:
        shutil.copytree(source, partial, dirs_exist_ok=True, ignore=shutil.ignore_patterns(SUMS, "*.bin"))
        folder = partial / encoder.relative_to(source)
        (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        kept = _renumbered(weights, total, layers)
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def _renumbered(weights: dict[str, Tensor], total: int, layers: Sequence[int]) -> dict[str, Tensor]:
    """Return the weights of the kept layers under their new numbers, and those that are in no layer."""
    numbers = {old: new for new, old in enumerate(layers)}
    kept = {}
    for name, tensor in weights.items():
        layer = layer_of(name, total)
        if layer is None:
            kept[name] = tensor
        elif layer in numbers:
            kept[_LAYER.sub(f".{numbers[layer]}.", name, count=1)] = tensor
    return kept


def _cut_units(name: str, tensor: Tensor, size: int, total: int, units: Sequence[Tensor]) -> Tensor:
    """Return a weight with the kept units of its layer; weights without units are returned unchanged.

    In the weights that compute the units, the first dimension is `size`, or 2 * `size` if the matrix also contains a
    gate (then the same units are kept in both halves). In the weight that reads the units, the second dimension is
    `size`.
    """
    layer = layer_of(name, total)
    if layer is None or "att" in name:
        return tensor
    kept = units[layer]
    if tensor.ndim == 2 and tensor.shape[1] == size:
        return tensor.index_select(1, kept).contiguous()
    if tensor.shape[0] == size:
        return tensor.index_select(0, kept)
    if tensor.shape[0] == 2 * size:
        return tensor.index_select(0, torch.cat([kept, kept + size]))
    return tensor


def _cut_heads(
    weights: dict[str, Tensor], content: dict[str, Any], kept: Sequence[Sequence[int]]
) -> tuple[dict[str, Tensor], dict[int, list[int]]]:
    """Return the weights of the kept heads, and the heads that each layer of the original model has lost in all."""
    total, size = len(kept), content["hidden_size"] // content["num_attention_heads"]
    before, removed, rows = removed_heads(content), {}, {}
    for layer, heads in enumerate(kept):
        had = [head for head in range(content["num_attention_heads"]) if head not in before.get(layer, [])]
        rows[layer] = head_rows(len(had), [place for place in range(len(had)) if place not in heads], size)
        removed[layer] = sorted({*before.get(layer, []), *(had[i] for i in range(len(had)) if i not in heads)})
    parts = {}
    for name, tensor in weights.items():
        number = layer_of(name, total)
        if number is not None and re.search(r"attention\.self\.(query|key|value)\.", name):
            tensor = tensor.index_select(0, rows[number])
        elif number is not None and name.endswith("attention.output.dense.weight"):
            tensor = tensor.index_select(1, rows[number]).contiguous()
        parts[name] = tensor
    return parts, removed
