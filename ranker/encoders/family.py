"""Facts about encoder families: one file per family in ranker/encoders/families/, named after its `model_type`.

A file holds one `FAMILY = Family(...)`. `families` reads the folder, so a new family is one new file, and no list
changes (docs/add_an_encoder_family.md). A family without a file still works: `family_of` returns the defaults of
`Family`, so it runs through transformers' own forward, and `first_position` reads the position offset from the model.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from torch import nn
from transformers import PretrainedConfig

from ranker.encoders import families as folder

UNLIMITED = 10**6  # positions of a model whose configuration states no limit


@dataclass(frozen=True)
class ClassifierLayers:
    """Where transformers' sequence classification model of a family keeps its two layers.

    Only for classifiers that compute `output(tanh(dense(first token)))`, which `ranker.export` reads and writes.

    Args:
        dense: Path of the dense layer before tanh, as `get_submodule` takes it.
        output: Path of the layer that returns the logits.
    """

    dense: str
    output: str


@dataclass(frozen=True)
class Family:
    """Facts about the models of one `model_type`. The defaults are safe for every family.

    Args:
        model_type: The family's `model_type` in transformers.
        layers: The module names and the computation of the model's layers, which this package can run without padding.
            `bert`: `embeddings.word_embeddings`, `encoder.layer.0.attention.self.query`, ..., absolute positions,
            post-norm layers. `distilbert`: the same without segments, as `transformer.layer.0.attention.q_lin`, ....
            `modernbert`: `embeddings.tok_embeddings`, `layers.0.attn.Wqkv`, ..., rotary positions, pre-norm layers.
            None: the model runs through transformers' own forward.
        positions_after_padding: Position ids start at `pad_token_id + 1`, as in RoBERTa, so 514 positions are enough
            for 512 tokens. False: they start at 0. None: unknown; `first_position` reads the offset from the model.
        reads_single_segment: The model looks up token type ids even if `type_vocab_size` is 1, so an id of 1 would
            be outside its table. False: a model with one token type ignores the ids.
        classifier: Layers of the family's sequence classification model; None if it computes something else.
        path: The path of transformers' own forward, see `ranker.encoders.traits.Traits`. None: it is measured.
        why_padded: Why this path is not `packed`, for the log.
        refused: Why models of the family can't be trained; empty if they can.
        config_changes: Values of configuration keys to set before a model is built.
        window_excess: Tokens that attention reaches beyond the `sliding_window` that its modules pass to its function.
        frozen: Parts of names of weights that no state depends on; DDP expects a gradient of all trained weights.
    """

    model_type: str
    layers: Literal["bert", "distilbert", "modernbert"] | None = None
    positions_after_padding: bool | None = None
    reads_single_segment: bool = False
    classifier: ClassifierLayers | None = None
    path: str | None = None
    why_padded: str = ""
    refused: str = ""
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    window_excess: int = 0
    frozen: tuple[str, ...] = ()


@cache
def families() -> Mapping[str, Family]:
    """Return the facts of all families in this folder by `model_type`."""
    modules = [
        importlib.import_module(f"{folder.__name__}.{module.name}") for module in pkgutil.iter_modules(folder.__path__)
    ]
    return {module.FAMILY.model_type: module.FAMILY for module in modules}


def family_of(config: PretrainedConfig) -> Family:
    """Return the facts of a configuration's family; the defaults of `Family` if the folder has no file for it."""
    return families().get(config.model_type, Family(config.model_type))


def first_position(config: PretrainedConfig, model: nn.Module | None = None) -> int:
    """Return the position id of a sequence's first token.

    Args:
        config: The model's configuration.
        model: The model. For a family without a file the offset is read from it: a table `position_embeddings` with a
            padding row, as in RoBERTa, starts after that row. None: the offset of an unknown family is taken as 0.
    """
    after_padding = family_of(config).positions_after_padding
    if after_padding is not None:
        return (config.pad_token_id or 0) + 1 if after_padding else 0
    for name, module in model.named_modules() if model is not None else ():
        table: Any = module
        if name.rpartition(".")[2] == "position_embeddings" and getattr(table, "padding_idx", None) is not None:
            return int(table.padding_idx) + 1
    return 0


def max_positions(config: PretrainedConfig, model: nn.Module | None = None) -> int:
    """Return the longest sequence that a model takes, in tokens (PC-43: RoBERTa's 514 positions take 512 tokens).

    Args:
        config: The model's configuration.
        model: The model, see `first_position`.
    """
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return UNLIMITED if limit is None or limit <= 0 else limit - first_position(config, model)
