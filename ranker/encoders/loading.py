"""Load an encoder from a folder, a package or the hub, with trained or random weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from ranker.encoders.adapters import base_of, merge_folder
from ranker.encoders.causality import attend_both_ways, is_causal
from ranker.encoders.encoder import Encoder
from ranker.encoders.encoder_files import folder_of, in_package, no_hub
from ranker.encoders.execution import Execution
from ranker.encoders.fit import check_config, check_tokens
from ranker.encoders.gguf_file import parses_once
from ranker.encoders.lora import ROUNDED, LoRA, add_adapter
from ranker.encoders.lora_base import cast_base
from ranker.encoders.model_folder import check_model_folder
from ranker.encoders.quantized_base import quantize_base
from ranker.encoders.text_model import build, keep_layers, place_of, read, set_dropout
from ranker.encoders.tiny import (
    tiny_config,
    tiny_lm_config,
    tiny_lm_tokenizer,
    tiny_t5_config,
    tiny_t5_tokenizer,
    tiny_tokenizer,
)
from ranker.errors import CheckpointError, ConfigError
from ranker.network import hub_failure

log = logging.getLogger(__name__)

RANDOM: dict[str, tuple[Any, Any]] = {
    "tiny": (tiny_config, tiny_tokenizer),
    "tiny_lm": (tiny_lm_config, tiny_lm_tokenizer),
    "tiny_t5": (tiny_t5_config, tiny_t5_tokenizer),
}


@parses_once
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
    checkpointing: bool = False,
    share_prefix: bool = False,
    quantize_aware: bool = False,
    trust_remote_code: bool = False,
    causal: bool | None = None,
    lora: LoRA | None = None,
    layer_drop: float = 0.0,
) -> Encoder:
    """Load an encoder and its tokenizer.

    Args:
        name: Hub id, folder, folder of a LoRA adapter of peft, GGUF file, or path of a folder or file inside `package`.
            For tests: `tiny` is a random BERT, `tiny_lm` a random Llama, `tiny_t5` a random T5.
        package: An installed Python package that contains the weights. It is located, but not imported.
        layers: Number of lower layers to keep; None: all.
        dropout: Dropout rate after embeddings, attention and feed-forward; None: the checkpoint's rate.
        attention_dropout: Dropout rate of attention weights; None: the checkpoint's rate. It has no effect in attention
            without padding (CUDA in half precision).
        pretrained: False: random weights with the checkpoint's configuration.
        ragged: See `Execution`.
        compile: See `Execution`.
        attention: See `Execution`.
        fused: See `Execution`.
        graphs: See `Execution`.
        checkpointing: See `Execution`.
        share_prefix: See `Execution`.
        quantize_aware: See `Execution`.
        trust_remote_code: Whether to allow running code from the weights' repository.
        causal: False: the tokens of a language model attend in both directions (LLM2Vec, arXiv:2404.05961). None or
            True: the model is used as it was trained.
        lora: Adapters to train on frozen weights; None: all weights are trained.
        layer_drop: Probability with which a training step leaves out a layer; the last layer is never left out.

    Raises:
        ConfigError: The encoder, package or folder does not exist, or an option is out of range.
        CheckpointError: The checkpoint lacks weights of the encoder, so they would be random; or model and tokenizer do
            not fit together.
    """
    adapter = None  # folder of an adapter; `name` is then its base
    cached = False  # whether to read only the hub's cache, because the hub does not answer
    if name in RANDOM:
        config: Any = RANDOM[name][0]()
        tokenizer: Any = RANDOM[name][1]()
    else:
        name = in_package(package, name) if package else name
        adapter = name if base_of(name) is not None else None
        name = base_of(name) or name
        check_model_folder(name)
        offline = no_hub(name)
        cached = offline is not None
        config, tokenizer = _config_and_tokenizer(name, adapter, trust_remote_code, offline)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise CheckpointError(
            f"{name}: expected a fast tokenizer (tokenizer.json), got {type(tokenizer).__name__}, which is "
            f"written in Python; {config.model_type} models are not supported"
        )
    check_config(config, name)
    if layers is not None:
        keep_layers(config, layers, name)
    set_dropout(config, dropout, attention_dropout, name)
    if causal is False:
        config.get_text_config().is_causal = False
    if name in RANDOM or not pretrained:
        model = build(config)
        if name not in RANDOM:
            log.warning("encoder.pretrained=false: random weights, with the configuration and tokenizer of %s", name)
    else:
        model = _load_weights(name, config, trust_remote_code, cached)
    if adapter is not None:
        merge_folder(model, Path(adapter))
    if not getattr(config.get_text_config(), "is_causal", True):
        attend_both_ways(model)
    model.train()  # from_pretrained returns evaluation mode, and Lightning keeps the mode: dropout would stay off
    if lora is not None:
        add_adapter(model, lora)
    execution = Execution(
        ragged, compile, attention, fused, graphs, checkpointing, share_prefix, quantize_aware, trust_remote_code
    )
    encoder = Encoder(model, tokenizer, execution)
    check_tokens(encoder)
    if lora is not None:  # after the measurement of the path, which needs weights in float32
        if lora.base in ROUNDED:
            quantize_base(model, lora.base)
        else:
            cast_base(model, getattr(torch, lora.base))
    encoder.source = folder_of(name, cached) if pretrained and name not in RANDOM else None
    encoder.adapter = adapter
    encoder.drop_layers(layer_drop)
    if causal is False and is_causal(encoder.model):
        raise ConfigError(f"encoder.causal: expected null for {config.model_type} models, which are causal; got false")
    return encoder


def _config_and_tokenizer(
    name: str, adapter: str | None, trust_remote_code: bool, offline: str | None
) -> tuple[Any, Any]:
    """Return the configuration of a model, and its tokenizer, or the adapter's tokenizer if there is an adapter.

    Args:
        name: Hub id, folder or GGUF file.
        adapter: Folder of an adapter; None: no adapter.
        trust_remote_code: Whether to allow running code from the folder.
        offline: Why the hub does not answer, see `no_hub`.
    """
    place, file = place_of(name)
    options: dict[str, Any] = {"local_files_only": offline is not None, **file}
    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, **options)
        if adapter is not None and (Path(adapter) / "tokenizer.json").is_file():
            return config, AutoTokenizer.from_pretrained(adapter, trust_remote_code=False, local_files_only=True)
        return config, AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # the libraries raise many classes of exceptions for damaged files
        reason = offline or hub_failure() or needs_trust(error) or " ".join(str(error).split())[:300]
        raise ConfigError(
            f"encoder.name: expected a hub id or a folder with config.json and a tokenizer, got {name!r} ({reason})"
        ) from error


def needs_trust(error: Exception, key: str = "encoder.trust_remote_code") -> str:
    """Return advice if transformers' error says that a folder has its own code; empty for any other error."""
    if "trust_remote_code" not in str(error):
        return ""
    return f"it has code of its own; read that code, then run it with {key}=true"


def _load_weights(name: str, config: PretrainedConfig, trust_remote_code: bool, cached: bool) -> PreTrainedModel:
    """Load trained weights. Refuse a checkpoint that lacks a matrix, or more than a tenth of all weights."""
    try:
        model, info = read(name, config, trust_remote_code, cached)
    except Exception as error:
        reason = hub_failure() or " ".join(str(error).split())[:300]
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
