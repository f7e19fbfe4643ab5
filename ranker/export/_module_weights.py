"""Read and write the weights of sentence-transformers' modules: encoder with tokenizer, linear layers, norms."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import normalizers
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from ranker.encoders import text_model
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.fit import check_config, check_tokens
from ranker.encoders.model_folder import check_model_folder, read_object
from ranker.encoders.native_head import padding_token_id
from ranker.errors import CheckpointError
from ranker.export._modules import StoredModule, write_json


def read_encoder(folder: Path, execution: Execution) -> tuple[Encoder, dict[str, Any]]:
    """Read a transformer without its pooler.

    Returns:
        The encoder, and the content of sentence_bert_config.json.

    Raises:
        CheckpointError: A weight is missing, or the folder is one that `check_model_folder` refuses.
    """
    check_model_folder(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=execution.trust_remote_code)
    check_config(config, str(folder))
    model, info = text_model.read(folder, config, execution.trust_remote_code)
    if info["missing_keys"]:
        raise CheckpointError(
            f"{folder}: expected all weights of the encoder, got none for {', '.join(sorted(info['missing_keys']))}"
        )
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=execution.trust_remote_code)
    settings = read_object(folder / "sentence_bert_config.json")
    if settings.get("do_lower_case"):
        _lower_case(tokenizer)
    encoder = Encoder(model, tokenizer, execution)
    check_tokens(encoder)
    return encoder, settings


def _lower_case(tokenizer: PreTrainedTokenizerFast) -> None:
    """Make the tokenizer lower-case its texts, unless it does so already."""
    backend: Any = tokenizer.backend_tokenizer
    normalizer = backend.normalizer
    if normalizer is None or normalizer.normalize_str("A") != "a":
        rest = [normalizer] if normalizer is not None else []
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rest])


def write_encoder(folder: Path, encoder: Encoder, max_tokens: int, extra: Mapping[str, Any]) -> None:
    """Write a transformer, its tokenizer and sentence_bert_config.json.

    Args:
        folder: The folder; it is created if missing.
        encoder: The encoder.
        max_tokens: Maximum number of tokens per text, including special tokens.
        extra: More keys of sentence_bert_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    encoder.model.save_pretrained(folder)
    write_tokenizer(folder, encoder, max_tokens)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_tokens, "do_lower_case": False, **extra})


def write_tokenizer(folder: Path, encoder: Encoder, max_tokens: int, pads_right: bool = True) -> None:
    """Write an encoder's tokenizer so that other programs lay texts out as this one does.

    The stored tokenizer has a padding token, which other programs need for a batch. It gives no segment ids if the
    encoder does not read them.

    Args:
        folder: The folder.
        encoder: The encoder.
        max_tokens: Longest row, special tokens included; stored with the tokenizer.
        pads_right: Whether other programs are to pad on the right, where queries are also extended. If False, they pad
            on the tokenizer's own side.
    """
    tokenizer = copy.deepcopy(encoder.tokenizer)
    tokenizer.model_max_length = max_tokens
    if pads_right:
        tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding_token_id(encoder))
    if not encoder.reads_segments:
        tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"  # not all classes write the side
    write_json(path, read_object(path) | {"padding_side": tokenizer.padding_side})


def read_dense(module: StoredModule) -> tuple[nn.Linear, nn.Module]:
    """Read a Dense module: its linear layer and its activation, Tanh if its configuration names none.

    Raises:
        CheckpointError: The module has a residual or no weights, or its activation is not a torch.nn class without
            weights.
    """
    if module.config.get("use_residual"):
        raise CheckpointError(f"{module.folder}: use_residual: expected a Dense without a residual, got one with it")
    state = read_weights(module.folder)
    linear = linear_of(state["linear.weight"], state.get("linear.bias"))
    name = str(module.config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    found: Any = getattr(nn, name.rpartition(".")[2], None) if name.startswith("torch.nn.") else None
    try:
        activation: nn.Module = found()
        fits = not list(activation.parameters()) and activation(linear.weight[:, :1].T).shape[1] == len(linear.weight)
    except Exception:  # no such class, or one with arguments
        fits = False
    if not fits:
        raise CheckpointError(
            f"{module.folder}: activation_function: expected an activation of torch.nn without weights, such as "
            f"torch.nn.modules.activation.GELU; got {name!r}"
        )
    return linear, activation


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a folder by name.

    Raises:
        CheckpointError: There is no file of weights.
    """
    if (folder / "model.safetensors").is_file():
        return load_file(folder / "model.safetensors")
    if (folder / "pytorch_model.bin").is_file():
        state: dict[str, Tensor] = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
        return state
    raise CheckpointError(f"{folder}: expected model.safetensors or pytorch_model.bin, got neither")


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer with these weights [outputs, inputs] and biases [outputs]."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        linear.weight.copy_(weight)
        if bias is not None:
            linear.bias.copy_(bias)
    return linear


def write_dense(folder: Path, linear: nn.Linear, activation: nn.Module, extra: Mapping[str, Any] | None = None) -> None:
    """Write a Dense module.

    Args:
        folder: Its folder.
        linear: The layer.
        activation: The activation after it.
        extra: More keys of its config.json.
    """
    config = {
        "in_features": linear.in_features,
        "out_features": linear.out_features,
        "bias": linear.bias is not None,
        "activation_function": f"{type(activation).__module__}.{type(activation).__qualname__}",
        **(extra or {}),
    }
    write_json(folder / "config.json", config)
    save_file(
        {f"linear.{name}": value.detach().contiguous().cpu() for name, value in linear.named_parameters()},
        folder / "model.safetensors",
    )


def write_norm(folder: Path, norm: nn.LayerNorm) -> None:
    """Write a LayerNorm module. The module of sentence-transformers has a bias, which is 0 if the layer has none."""
    write_json(folder / "config.json", {"dimension": norm.normalized_shape[0]})
    bias = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias
    weights = {"norm.weight": norm.weight, "norm.bias": bias}
    save_file(
        {name: value.detach().contiguous().cpu() for name, value in weights.items()}, folder / "model.safetensors"
    )
