"""Properties of encoder families: one file per family in ranker/encoders/families/, named after its `model_type`.

A file contains one `FAMILY = Family(...)`. `families` reads the folder, so a new family is one new file, and no list
has to change (docs/add_an_encoder_family.md). A family without a file works, too: it has the defaults of `Family`
(`family_of`). It runs through transformers' own forward pass, and `first_position` reads its position offset from the
model.
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

UNLIMITED = 10**6  # number of positions of a model whose configuration states no limit


@dataclass(frozen=True)
class ClassifierLayers:
    """Names of the two layers in transformers' sequence classification model of a family.

    Only for classifiers that compute `output(tanh(dense(first token)))`; `ranker.export` reads and writes them.

    Args:
        dense: Path of the dense layer before tanh, an argument of `get_submodule`.
        output: Path of the layer that returns the logits.
    """

    dense: str
    output: str


@dataclass(frozen=True)
class Family:
    """Properties of the models of one `model_type`. The defaults are safe for every family.

    Args:
        model_type: The family's `model_type` in transformers.
        layers: Kind of the model's layers, if this package can run them without padding. The kind determines module
            names and computation. `bert`: `embeddings.word_embeddings`, `encoder.layer.0.attention.self.query`, ...,
            absolute positions, post-norm layers. `distilbert`: as `bert`, but without segments, and with names such as
            `transformer.layer.0.attention.q_lin`. `modernbert`: `embeddings.tok_embeddings`, `layers.0.attn.Wqkv`, ...,
            rotary positions, pre-norm layers. None: the model runs through transformers' own forward pass.
        positions_after_padding: Whether position ids start at `pad_token_id + 1`, as in RoBERTa, which needs 514
            positions for 512 tokens. False: they start at 0. None: unknown; `first_position` reads the offset from the
            model.
        reads_single_segment: Whether the model looks up token type ids even if `type_vocab_size` is 1, so that an id of
            1 would be outside its table. False: a model with one token type ignores the ids.
        classifier: Layers of the family's sequence classification model; None if it computes something else.
        path: Path of transformers' own forward pass, see `ranker.encoders.traits.Traits`. None: it is measured.
        why_padded: Reason for the log why this path is not `packed`.
        refused: Reason why models of the family can't be trained; empty if they can.
        config_changes: Configuration values to set before a model is built.
        window_excess: How many tokens further attention reaches than the `sliding_window` that modules pass to it.
        why_float32: Reason why transformers' code of the family fails under autocast in half precision; empty if it
            runs.
        frozen: Parts of names of weights on which no state depends. They are frozen, because DDP expects a gradient for
            each trained weight.
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
    why_float32: str = ""
    frozen: tuple[str, ...] = ()


@cache
def families() -> Mapping[str, Family]:
    """Return `model_type` -> properties, for all families in the folder."""
    modules = [
        importlib.import_module(f"{folder.__name__}.{module.name}") for module in pkgutil.iter_modules(folder.__path__)
    ]
    return {module.FAMILY.model_type: module.FAMILY for module in modules}


def family_of(config: PretrainedConfig) -> Family:
    """Return the properties of a configuration's family; the defaults of `Family` if there is no file for it."""
    return families().get(config.model_type, Family(config.model_type))


def first_position(config: PretrainedConfig, model: nn.Module | None = None) -> int:
    """Return the position id of a sequence's first token.

    Args:
        config: The model's configuration.
        model: The model, needed for a family without a file. A table `position_embeddings` with a padding row, as in
            RoBERTa, gives an offset of this row + 1. None: the offset of an unknown family is 0.
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
    """Return the largest number of tokens of a sequence (PC-43: RoBERTa's 514 positions allow 512 tokens).

    Args:
        config: The model's configuration.
        model: The model, see `first_position`.
    """
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return UNLIMITED if limit is None or limit <= 0 else limit - first_position(config, model)
