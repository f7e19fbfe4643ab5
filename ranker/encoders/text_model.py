"""Build the text encoder of a transformers checkpoint: its class, number of layers and dropout rates."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import MODEL_MAPPING, AutoModel, PretrainedConfig, PreTrainedModel

from ranker.encoders.family import family_of
from ranker.encoders.pruned_heads import removed_heads, with_fewer_heads
from ranker.errors import ConfigError

# configuration keys of all families: for dropout of token states, and for dropout of attention weights
DROPOUTS = (
    "hidden_dropout_prob", "hidden_dropout", "dropout", "dropout_rate", "resid_pdrop", "embd_pdrop", "mlp_dropout",
    "embedding_dropout", "embd_dropout", "feed_forward_dropout",
)  # fmt: skip
ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")


def model_class(config: PretrainedConfig) -> Any:
    """Return the class that encodes texts. For an encoder-decoder, it is the encoder's class, if transformers has one.

    Otherwise (BART) it is the class of the whole model. The states of a text are then the decoder's states, which
    BART's own classifier also reads.
    """
    own = _own_class(config)
    return getattr(transformers, own.__name__.removesuffix("Model") + "EncoderModel", AutoModel) if own else AutoModel


def _own_class(config: PretrainedConfig) -> Any:
    """Return the class that `AutoModel` chooses; None for a model with its own code."""
    own: Any = MODEL_MAPPING.get(type(config), None)
    return own[0] if isinstance(own, tuple) else own


def without_pooler(config: PretrainedConfig) -> dict[str, bool]:
    """Return the constructor arguments that leave out the pooler, since DDP would complain of unused parameters."""
    own = _own_class(config)
    if own is not None and "add_pooling_layer" in inspect.signature(own).parameters:
        return {"add_pooling_layer": False}
    return {}


def build(config: PretrainedConfig) -> PreTrainedModel:
    """Return a model with random weights."""
    chosen = model_class(config)
    if removed_heads(config):
        return _without_unused(with_fewer_heads(_own_class(config), config)(config, **without_pooler(config)))
    if chosen is AutoModel:
        return _without_unused(AutoModel.from_config(_prepared(config), **without_pooler(config)))
    return _without_unused(chosen(_prepared(config)))


def place_of(name: str | Path) -> tuple[str, dict[str, str]]:
    """Return the folder or hub id of weights, and more arguments of `from_pretrained`: for a GGUF file, its name.

    >>> place_of("models/small.Q4_1.gguf"), place_of("org/model")
    (('models', {'gguf_file': 'small.Q4_1.gguf'}), ('org/model', {}))
    """
    path = Path(name)
    return (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (str(name), {})


def read(
    name: str | Path, config: PretrainedConfig, trust_remote_code: bool = False, cached: bool = False
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a model in float32.

    Args:
        name: Folder, hub id, or GGUF file.
        config: The model's configuration. It may differ from the stored one.
        trust_remote_code: Whether to allow running code from the folder.
        cached: Whether to read only the hub's cache.

    Returns:
        The model, and transformers' report on missing and unexpected weights.
    """
    chosen = model_class(config)
    options: dict[str, Any] = {"output_loading_info": True, "local_files_only": cached, "dtype": torch.float32}
    if removed_heads(config):
        chosen = with_fewer_heads(_own_class(config), config)
        options |= without_pooler(config)
    elif chosen is AutoModel:
        options |= {"trust_remote_code": trust_remote_code, **without_pooler(config)}
    folder, file = place_of(name)
    model, info = chosen.from_pretrained(folder, config=_prepared(config), **options, **file)
    if file:
        _forget_quantization(model)
    return _without_unused(model), info


def _forget_quantization(model: Any) -> None:
    """Remove the marks of quantization that a GGUF file leaves in a model. The weights are plain and saved as such."""
    for key in ("quantization_config", "_pre_quantization_dtype"):
        vars(model.config).pop(key, None)
    for key in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(key, None)


def _without_unused(model: PreTrainedModel) -> PreTrainedModel:
    """Freeze weights on which no state depends, such as a pooler that can't be removed; DDP expects all gradients."""
    names = ("pooler.", *family_of(model.config).frozen)
    for name, weight in model.named_parameters():
        if any(part in name for part in names):
            weight.requires_grad_(False)
    return model


def _prepared(config: PretrainedConfig) -> PretrainedConfig:
    """Change a configuration so that it describes a text encoder."""
    config.use_cache = False
    for key, value in family_of(config).config_changes.items():
        setattr(config, key, value)
    return config


def keep_layers(config: PretrainedConfig, layers: int, name: str) -> None:
    """Change a configuration so that only the lower layers are built.

    Args:
        config: The configuration.
        layers: Number of layers.
        name: Name of the model, for the message.

    Raises:
        ConfigError: The model has fewer layers, or its number of layers can't be changed.
    """
    if hasattr(config, "block_sizes") or (config.is_encoder_decoder and model_class(config) is AutoModel):
        raise ConfigError(f"encoder.layers: expected null for {name!r} ({config.model_type}), got {layers}")
    # `get_text_config(encoder=True)` would return a copy of T5's configuration
    part: Any = getattr(config, "encoder", None) or config.get_text_config()
    total = part.num_hidden_layers
    if not 1 <= layers <= total:
        raise ConfigError(f"encoder.layers: expected 1 to {total} for {name!r}, got {layers}")
    for key, value in list(vars(part).items()):
        # shorten lists with one entry per layer (layer_types, attention_window), but not Mamba 2's time_step_limit
        if isinstance(value, list) and len(value) == total and ("layer" in key or "window" in key):
            setattr(part, key, value[:layers])
    part.num_hidden_layers = layers
    if removed := removed_heads(part):
        part.pruned_heads = {str(layer): heads for layer, heads in removed.items() if layer < layers}


def set_dropout(config: PretrainedConfig, rate: float | None, attention_rate: float | None, name: str) -> None:
    """Set the dropout rates of token states and of attention weights.

    Args:
        config: The configuration, before the model is built.
        rate: Rate of token states; None: the checkpoint's.
        attention_rate: Rate of attention weights; None: the checkpoint's.
        name: Name of the model, for the message.

    Raises:
        ConfigError: A rate is out of range, or above 0 for a family without such dropout.
    """
    configs = [config, *(getattr(config, key) for key in config.sub_configs)]
    for option, keys, value in (
        ("dropout", DROPOUTS, rate),
        ("attention_dropout", ATTENTION_DROPOUTS, attention_rate),
    ):
        if value is None:
            continue
        if not 0 <= value < 1:
            raise ConfigError(f"encoder.{option}: expected at least 0 and below 1, got {value}")
        present = [(part, key) for part in configs for key in keys if hasattr(part, key)]
        if value > 0 and not present:
            raise ConfigError(
                f"encoder.{option}: expected null or 0 for {name!r}, since {config.model_type} has no such dropout; "
                f"got {value}"
            )
        for part, key in present:
            setattr(part, key, value)
