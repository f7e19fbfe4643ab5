"""Checks that a model, its tokenizer and its layout of texts fit together, made when they are loaded."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from ranker.data.template import Template
from ranker.encoders.family import family_of
from ranker.errors import CheckpointError


def check_config(config: PretrainedConfig, where: str) -> None:
    """Refuse a padding id outside the embedding table, before a model is built.

    Args:
        config: The model's configuration.
        where: Name or folder of the model, for the message.

    Raises:
        CheckpointError: The id is outside the table.
    """
    pad, rows = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    if pad is not None and rows is not None and pad >= rows:
        raise CheckpointError(
            f"{where}: expected pad_token_id below vocab_size={rows} in config.json, got {pad}; correct config.json"
        )


def check_tokens(encoder: Any) -> None:
    """Refuse an encoder whose tokenizer gives ids outside the embedding table.

    Special tokens may be outside if no text contains them and no layout uses them.

    Args:
        encoder: An `Encoder`, just loaded.

    Raises:
        CheckpointError: An id is outside the table.
    """
    model, tokenizer = encoder.model, encoder.tokenizer
    where = _name_of(encoder)
    rows = len(model.get_input_embeddings().weight)
    unused = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    unused -= {
        tokenizer.cls_token_id,
        tokenizer.sep_token_id,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    }
    outside = {
        token: token_id
        for token, token_id in tokenizer.get_vocab().items()
        if token_id >= rows and token_id not in unused
    }
    if outside:
        token = max(outside, key=outside.__getitem__)
        raise CheckpointError(
            f"{where}: expected token ids below {rows}, the rows of the embedding table, got {len(tokenizer)} tokens "
            f"with ids up to {outside[token]} ({token!r}); take the tokenizer that belongs to the model, or resize the "
            "table (resize_token_embeddings)"
        )


def check_layout(encoder: Any, texts: int, pooling: str | None = None) -> None:
    """Refuse a layout of texts that the encoder can't read, or that does not separate the texts.

    Args:
        encoder: An `Encoder`.
        texts: 2 for a pair in one sequence, 1 for a text by itself.
        pooling: Pooling of the sequence; `cls` needs a special token at its start.

    Raises:
        CheckpointError: Special tokens are missing, a segment id has no embedding, or the positions leave no room for
            texts.
    """
    config = encoder.config
    where = _name_of(encoder)
    template = Template.of(encoder.tokenizer, texts)
    if texts == 2 and not template.specials[1]:
        raise CheckpointError(
            f"{where}: expected a tokenizer that puts a separator between query and doc, got none in its post-processor"
        )
    if not template.num_special or (pooling == "cls" and not template.specials[0]):
        raise CheckpointError(
            f"{where}: expected a tokenizer that puts a special token before a text, got {template.num_special} "
            "special tokens around it; add a post-processor to tokenizer.json"
            + (", or set model.pooling=mean" if pooling == "cls" and template.num_special else "")
        )
    segments = getattr(config, "type_vocab_size", 0)
    reads_segments = segments > 1 or (segments == 1 and family_of(config).reads_single_segment)
    if reads_segments and max(template.segments) >= segments:
        raise CheckpointError(
            f"{where}: expected segment ids below type_vocab_size={segments}, got {max(template.segments)} from the "
            f"tokenizer's layout of {texts} texts; take the tokenizer that belongs to the model"
        )
    if encoder.max_tokens < template.num_special + texts:
        raise CheckpointError(
            f"{where}: expected positions for at least {template.num_special + texts} tokens, got {encoder.max_tokens} "
            f"(max_position_embeddings={config.max_position_embeddings}); take another encoder"
        )


def _name_of(encoder: Any) -> str:
    """Return the model's name for messages."""
    config = encoder.model.config
    return config.name_or_path or encoder.tokenizer.name_or_path or f"{config.model_type} encoder"
