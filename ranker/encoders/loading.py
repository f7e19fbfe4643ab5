"""Load an encoder from a folder, a package or the hub, with trained or random weights."""

from __future__ import annotations

import importlib.util
import inspect
import logging
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.fit import check_config, check_tokens
from ranker.encoders.model_folder import check_model_folder
from ranker.encoders.tiny import tiny_config, tiny_tokenizer
from ranker.errors import CheckpointError, ConfigError
from ranker.files import leads_out
from ranker.network import OFFLINE, hub_failure, unreachable, watch_hub

log = logging.getLogger(__name__)


def load_encoder(
    name: str,
    package: str | None = None,
    layers: int | None = None,
    dropout: float | None = None,
    attention_dropout: float | None = None,
    pretrained: bool = True,
    ragged: bool = True,
    compile: bool | str = "auto",
    attention: str = "auto",
    fused: bool | str = "auto",
    graphs: bool | str = "auto",
    trust_remote_code: bool = False,
) -> Encoder:
    """Load an encoder and its tokenizer.

    Args:
        name: Hub id, folder, or the folder's path inside `package`; `tiny` is a random BERT for tests.
        package: An installed Python package that contains the weights; it is located, never imported.
        layers: Keep only this many of the lower layers; None keeps all.
        dropout: Dropout after embeddings, attention and feed-forward; None keeps the checkpoint's.
        attention_dropout: Dropout on attention weights (off in attention without padding: CUDA in half precision);
            None keeps the checkpoint's.
        pretrained: False: random weights with the checkpoint's configuration.
        ragged: See `Execution`, as for the next four.
        compile: See `Execution`.
        attention: See `Execution`.
        fused: See `Execution`.
        graphs: See `Execution`.
        trust_remote_code: Whether code in the weights' repository may run.

    Raises:
        ConfigError: The encoder, package or folder does not exist; an option is out of range.
        CheckpointError: The checkpoint lacks weights of the encoder, which would be random; or model and tokenizer do
            not fit together.
    """
    cached = False  # whether to read the hub's cache only, because the hub is out of reach
    if name == "tiny":
        config: Any = tiny_config()
        tokenizer: Any = tiny_tokenizer()
    else:
        name = str(_package_folder(package, name)) if package else name
        check_model_folder(name)
        offline = _no_hub(name)
        cached = offline is not None
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, local_files_only=cached)
            tokenizer = AutoTokenizer.from_pretrained(
                name, trust_remote_code=trust_remote_code, local_files_only=cached
            )
        except Exception as error:  # the libraries raise many classes of exceptions for damaged files
            reason = offline or hub_failure() or " ".join(str(error).split())[:300]
            raise ConfigError(
                f"encoder.name: expected a hub id or a folder with config.json and a tokenizer, got {name!r} ({reason})"
            ) from error
    check_config(config, name)
    if layers is not None:
        if not 1 <= layers <= config.num_hidden_layers:
            raise ConfigError(f"encoder.layers: expected 1 to {config.num_hidden_layers} for {name!r}, got {layers}")
        config.num_hidden_layers = layers
    for key, config_key, rate in (
        ("dropout", "hidden_dropout_prob", dropout),
        ("attention_dropout", "attention_probs_dropout_prob", attention_dropout),
    ):
        if rate is not None:
            if not 0 <= rate < 1:
                raise ConfigError(f"encoder.{key}: expected at least 0 and below 1, got {rate}")
            setattr(config, config_key, rate)
    model = (
        _build(config) if name == "tiny" or not pretrained else _load_weights(name, config, trust_remote_code, cached)
    )
    model.train()  # from_pretrained returns eval mode, which Lightning keeps: dropout would be off
    encoder = Encoder(model, tokenizer, Execution(ragged, compile, attention, fused, graphs))
    check_tokens(encoder)
    return encoder


def _package_folder(package: str, folder: str) -> Path:
    """Locate a folder inside an installed package, without importing (and so running) the package."""
    if not package.isidentifier():  # to locate a submodule, Python would import its parent
        raise ConfigError(f"encoder.package: expected the name of a top-level package, got {package!r}")
    if leads_out(folder):
        raise ConfigError(f"encoder.name: expected a folder inside the package {package!r}, got {folder!r}")
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # raised for modules without a spec, such as __main__
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"encoder.package: expected an installed package, got {package!r}; "
            "install it with: pip install -e '.[demo]'"
        )
    path = Path(spec.submodule_search_locations[0]) / folder
    if not path.is_dir():
        raise ConfigError(f"encoder.name: expected a folder inside the package {package!r}, got {folder!r}")
    return path


def without_pooler(config: PretrainedConfig) -> dict[str, bool]:
    """Return the constructor arguments that leave out the pooler, whose parameters would be unused under DDP."""
    model_class: Any = MODEL_MAPPING.get(type(config), None)
    if model_class is not None and "add_pooling_layer" in inspect.signature(model_class).parameters:
        return {"add_pooling_layer": False}
    return {}


def _build(config: PretrainedConfig) -> PreTrainedModel:
    return AutoModel.from_config(config, **without_pooler(config))


def _no_hub(name: str) -> str | None:
    """Return why the hub is out of reach; None if it answers or is not needed.

    It is not needed for a folder, or with HF_HUB_OFFLINE set.
    """
    if Path(name).is_dir() or huggingface_hub.constants.HF_HUB_OFFLINE:
        return None
    endpoint = huggingface_hub.constants.ENDPOINT
    reason = unreachable(endpoint)
    if reason is None:
        watch_hub(name)
        return None
    log.warning(
        "encoder %s: %s is out of reach (%s); looking for it in the cache only; HF_HUB_OFFLINE=1 does so at once",
        name,
        endpoint,
        reason,
    )
    return f"no such folder, {endpoint} is out of reach: {reason}, and it is not in the hub's cache; {OFFLINE}"


def _load_weights(name: str, config: PretrainedConfig, trust_remote_code: bool, cached: bool) -> PreTrainedModel:
    """Load trained weights; refuse a checkpoint that lacks a matrix, or more than a tenth of all weights."""
    try:
        model, info = AutoModel.from_pretrained(
            name, config=config, output_loading_info=True, trust_remote_code=trust_remote_code, local_files_only=cached,
            dtype=torch.float32, **without_pooler(config),
        )  # fmt: skip
    except Exception as error:
        reason = hub_failure() or " ".join(str(error).split())
        raise CheckpointError(f"{name}: expected weights that load, got {type(error).__name__}: {reason}") from error
    missing = sorted(info["missing_keys"])
    inner = [key for key in missing if "pooler" not in key]
    if missing:
        log.warning("encoder %s: weights that the checkpoint lacks, random now: %s", name, ", ".join(missing))
    weights = dict(model.named_parameters())
    if len(inner) > len(weights) // 10 or any(key in weights and weights[key].ndim > 1 for key in inner):
        raise CheckpointError(
            f"{name}: expected the weights of a {config.model_type} encoder, but {len(inner)} of {len(weights)}, "
            f"such as {inner[0]}, are missing and would be random; check encoder.name, or set encoder.pretrained=false "
            "to start from random weights"
        )
    return model
