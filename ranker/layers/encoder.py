"""The encoder: any Hugging Face encoder over ragged batches; BERT's relatives run without padding."""

from __future__ import annotations

import importlib.util
import logging
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from ranker.errors import CheckpointError, ConfigError
from ranker.layers.attention import RaggedLayout, ragged_attention, varlen_missing
from ranker.layers.tiny import tiny_config, tiny_tokenizer
from ranker.types import TokenBatch

log = logging.getLogger(__name__)

# Families whose modules have BERT's names: embeddings.*, encoder.layer.*.attention.self.query ...
RAGGED_FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert", "electra")
# Families that count positions from pad_token_id + 1, so that 514 positions serve 512 tokens
SHIFTED_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet", "longformer")


class Encoder(nn.Module):
    """Turn ragged token batches into states, one vector per token.

    Families in `RAGGED_FAMILIES` run padding-free: every linear layer sees real tokens only. Others are padded at the door and run
    through their own transformers forward. Both give the same states.

    Args:
        model: The transformers model, without its pooler.
        tokenizer: Its fast tokenizer.
        ragged: Whether to run without padding where the family can; False takes transformers' own forward.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, ragged: bool = True) -> None:
        super().__init__()
        self.model: Any = model
        self.tokenizer = tokenizer
        self.ragged = ragged and model.config.model_type in RAGGED_FAMILIES
        self._told = False

    @property
    def config(self) -> PretrainedConfig:
        """The transformers configuration."""
        return self.model.config

    @property
    def dim(self) -> int:
        """Size of a state."""
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        """Number of transformer layers."""
        return self.config.num_hidden_layers

    @property
    def max_tokens(self) -> int:
        """Longest sequence that the position table serves, special tokens included."""
        return max_positions(self.config)

    def forward(self, batch: TokenBatch) -> Tensor:
        """Return the last layer's states, [tokens, dim]."""
        return deque(self.layers(batch), maxlen=1).pop()  # keeps no earlier layer alive

    def layers(self, batch: TokenBatch) -> Iterator[Tensor]:
        """Yield the states after the embeddings and after each layer, each [tokens, dim]; stop early to save the rest."""
        layout = RaggedLayout.of(batch)
        segments = batch.segments if getattr(self.config, "type_vocab_size", 0) > 1 else torch.zeros_like(batch.segments)
        if self.ragged:
            yield from self._ragged_layers(batch.tokens, segments, layout)
        else:
            yield from self._padded_layers(batch.tokens, segments, layout)

    def _ragged_layers(self, tokens: Tensor, segments: Tensor, layout: RaggedLayout) -> Iterator[Tensor]:
        embeddings = self.model.embeddings
        positions = layout.positions + position_shift(self.config)
        states = embeddings.word_embeddings(tokens) + embeddings.position_embeddings(positions) + embeddings.token_type_embeddings(segments)
        states = embeddings.dropout(embeddings.LayerNorm(states))
        if hasattr(self.model, "embeddings_project"):  # ELECTRA
            states = self.model.embeddings_project(states)
        yield states
        for layer in self.model.encoder.layer:
            states = self._ragged_layer(layer, states, layout)
            yield states

    def _ragged_layer(self, layer: Any, states: Tensor, layout: RaggedLayout) -> Tensor:
        """One post-norm transformer layer (Devlin et al., 2019) on [tokens, dim]."""
        attention, output = layer.attention.self, layer.attention.output
        shape = (states.shape[0], attention.num_attention_heads, attention.attention_head_size)
        query, key, value = (part(states).view(shape) for part in (attention.query, attention.key, attention.value))
        self._tell_path(query)
        dropout = attention.dropout.p if attention.training else 0.0
        mixed = ragged_attention(query, key, value, layout, dropout).reshape(states.shape[0], -1)
        states = output.LayerNorm(output.dropout(output.dense(mixed)) + states)
        inner = layer.intermediate.intermediate_act_fn(layer.intermediate.dense(states))
        return layer.output.LayerNorm(layer.output.dropout(layer.output.dense(inner)) + states)

    def _tell_path(self, query: Tensor) -> None:
        if not self._told and query.device.type == "cuda":
            self._told = True
            why = varlen_missing(query)
            log.info("attention: %s", f"padded, because {why}" if why else "variable-length kernel; attention dropout is off in it")

    def _padded_layers(self, tokens: Tensor, segments: Tensor, layout: RaggedLayout) -> Iterator[Tensor]:
        inputs = {"input_ids": _pad_with(layout, tokens, self.tokenizer.pad_token_id), "attention_mask": layout.key_mask.long()}
        if getattr(self.config, "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = layout.pad(segments)
        for states in self.model(**inputs, output_hidden_states=True).hidden_states:
            yield layout.unpad(states)


def _pad_with(layout: RaggedLayout, tokens: Tensor, pad_id: int) -> Tensor:
    return torch.where(layout.mask, layout.pad(tokens), pad_id)


def position_shift(config: PretrainedConfig) -> int:
    """First position id of a sequence."""
    return (config.pad_token_id or 0) + 1 if config.model_type in SHIFTED_POSITIONS else 0


def max_positions(config: PretrainedConfig) -> int:
    """Longest sequence that a model of this configuration takes (PC-43: RoBERTa's 514 positions serve 512 tokens)."""
    return getattr(config, "max_position_embeddings", 10**6) - position_shift(config)


def load_encoder(
    name: str,
    package: str | None = None,
    layers: int | None = None,
    dropout: float | None = None,
    attention_dropout: float | None = None,
    pretrained: bool = True,
    ragged: bool = True,
    trust_remote_code: bool = False,
) -> Encoder:
    """Load an encoder and its tokenizer.

    Args:
        name: Hub id, folder, or the folder's path inside `package`; `tiny` is a random BERT for tests.
        package: An installed Python package that carries the weights; it is located, never imported.
        layers: Keep only this many of the lower layers; None keeps all.
        dropout: Dropout after embeddings, attention and feed-forward; None keeps the checkpoint's.
        attention_dropout: Dropout on attention weights (off in the variable-length kernel); None keeps the checkpoint's.
        pretrained: False takes the configuration and random weights.
        ragged: False pads every batch and runs transformers' own forward.
        trust_remote_code: Whether code that lies beside the weights may run.

    Raises:
        ConfigError: No such encoder, package or folder; more layers than there are.
        CheckpointError: The checkpoint lacks the encoder's weights, so that it would silently be random.
    """
    if name == "tiny":
        config: Any = tiny_config()
        tokenizer: Any = tiny_tokenizer()
    else:
        name = str(_package_folder(package, name)) if package else name
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            reason = str(error).strip().split("\n", 1)[0]
            raise ConfigError(
                f"encoder.name: expected a hub id or a folder with config.json and a tokenizer, got {name!r} ({reason})"
            ) from error
    if layers is not None:
        if not 1 <= layers <= config.num_hidden_layers:
            raise ConfigError(f"encoder.layers: expected 1 to {config.num_hidden_layers} for {name!r}, got {layers}")
        config.num_hidden_layers = layers
    if dropout is not None:
        config.hidden_dropout_prob = dropout
    if attention_dropout is not None:
        config.attention_probs_dropout_prob = attention_dropout
    model = _build(config) if name == "tiny" or not pretrained else _load_weights(name, config, trust_remote_code)
    model.train()  # from_pretrained leaves it in eval mode, and Lightning keeps modes as they are: dropout would be off
    return Encoder(model, tokenizer, ragged=ragged)


def _package_folder(package: str, folder: str) -> Path:
    """The folder inside an installed package, found without importing (and so running) the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"encoder.package: expected an installed package, got {package!r}; install it with: pip install -e '.[demo]'")
    path = Path(spec.submodule_search_locations[0]) / folder
    if not path.is_dir():
        raise ConfigError(f"encoder.name: expected a folder inside the package {package!r}, got {folder!r}")
    return path


def _without_pooler(config: PretrainedConfig) -> dict[str, bool]:
    """BERT's relatives build a pooler that nothing reads; it would be an unused parameter under DDP."""
    return {"add_pooling_layer": False} if config.model_type in RAGGED_FAMILIES and config.model_type != "electra" else {}


def _build(config: PretrainedConfig) -> PreTrainedModel:
    return AutoModel.from_config(config, **_without_pooler(config))


def _load_weights(name: str, config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    model, info = AutoModel.from_pretrained(
        name, config=config, output_loading_info=True, trust_remote_code=trust_remote_code, dtype=torch.float32, **_without_pooler(config)
    )
    missing = sorted(info["missing_keys"])
    inner = [key for key in missing if "pooler" not in key]
    if missing:
        log.warning("encoder %s: weights that the checkpoint lacks, random now: %s", name, ", ".join(missing))
    total = len(list(model.parameters()))
    if len(inner) > total // 2:
        raise CheckpointError(
            f"{name}: expected the weights of a {config.model_type} encoder, but {len(inner)} of {total} are missing and would be random; "
            "check encoder.name, or set encoder.pretrained=false to start from random weights"
        )
    return model
