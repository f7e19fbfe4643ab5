"""Check at loading that a model, its tokenizer and its layout of texts fit together."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from ranker.data.template import Template
from ranker.encoders.causality import is_causal
from ranker.encoders.family import family_of
from ranker.encoders.traits import TOLERANCE, common_tokens
from ranker.errors import CheckpointError, ConfigError
from ranker.types import TokenBatch

log = logging.getLogger(__name__)

BLANK = "\u2581"  # the character of sentencepiece, which is also in a vocabulary that transformers makes without files
HALF_TOLERANCE = 0.05  # as `TOLERANCE`, for weights in half precision


def check_config(config: PretrainedConfig, where: str) -> None:
    """Refuse a padding id outside the embedding table. Call this before the model is built.

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
    """Refuse an encoder whose tokenizer has no words, or gives ids outside the embedding table.

    A special token may be outside if no text contains it and no layout uses it.

    Args:
        encoder: An `Encoder` that has just been loaded.

    Raises:
        CheckpointError: The vocabulary has special tokens only, or an id is outside the table.
    """
    model, tokenizer = encoder.model, encoder.tokenizer
    where = _name_of(encoder)
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    if not set(tokenizer.get_vocab()) - added - {BLANK}:
        raise CheckpointError(
            f"{where}: expected a tokenizer with words, got one of {len(tokenizer)} special tokens, as transformers "
            "makes for a folder without the tokenizer's files; add tokenizer.json"
        )
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
            f"with ids up to {outside[token]} ({token!r}); use the tokenizer that belongs to the model, or resize the "
            "table (resize_token_embeddings)"
        )


def check_layout(encoder: Any, texts: int, pooling: str | None = None, trained: bool = False) -> None:
    """Refuse a layout of texts that the encoder can't read, or that does not separate the texts.

    If the tokenizer of an encoder that `load_encoder` has loaded adds no special tokens, texts end with its separator
    or end-of-text token from now on. A trained scorer keeps its layout.

    Args:
        encoder: An `Encoder`.
        texts: 2 for a pair in one sequence, 1 for a single text.
        pooling: Pooling of the sequence; `cls` needs a special token at the start.
        trained: Whether the encoder belongs to a trained scorer, although `load_encoder` has loaded the encoder.

    Raises:
        CheckpointError: Special tokens are missing, a segment id has no embedding, or the positions leave no room for
            texts.
    """
    config = encoder.config
    where = _name_of(encoder)
    template = Template.of(encoder.tokenizer, texts)
    trained = trained or encoder.source is None
    unended = not template.specials[1] if texts == 2 else not template.num_special
    if unended and not trained and _end_texts(encoder):
        template = Template.of(encoder.tokenizer, texts)
        log.info("%s: the tokenizer adds no special tokens, so texts now end with %s", where, template.specials[-1])
    if texts == 2 and not template.specials[1] and not trained:
        raise CheckpointError(
            f"{where}: expected a tokenizer that puts a separator between query and doc, got none in its post-processor"
        )
    if pooling == "cls" and not template.specials[0]:
        raise CheckpointError(
            f"{where}: expected a tokenizer that puts a special token before a text, got {template.num_special} "
            "special tokens around it; set model.pooling=auto, or add a post-processor to tokenizer.json"
        )
    segments = getattr(config, "type_vocab_size", 0)
    reads_segments = segments > 1 or (segments == 1 and family_of(config).reads_single_segment)
    if reads_segments and max(template.segments) >= segments:
        raise CheckpointError(
            f"{where}: expected segment ids below type_vocab_size={segments}, got {max(template.segments)} from the "
            f"tokenizer's layout of {texts} texts; use the tokenizer that belongs to the model"
        )
    if encoder.max_tokens < template.num_special + texts:
        raise CheckpointError(
            f"{where}: expected positions for at least {template.num_special + texts} tokens, got {encoder.max_tokens} "
            f"(max_position_embeddings={config.max_position_embeddings}); use another encoder"
        )


def check_shared_prefix(encoder: Any) -> None:
    """Refuse an encoder whose rows can't share a prefix. A forward pass over two rows tests this.

    Args:
        encoder: An `Encoder`.

    Raises:
        ConfigError: The family is not causal, its rows are not packed, or a shared prefix changes its states.
    """
    why = "" if encoder.path == "packed" else "whose rows are not packed"
    if not why and not is_causal(encoder.model):
        why = "whose tokens attend in both directions"
    if not why:
        weight = encoder.model.get_input_embeddings().weight
        ids = common_tokens(encoder.tokenizer, len(weight))[:11]
        rows = torch.tensor([*ids, *ids[:-3], *ids[-2:], ids[0]], device=weight.device)
        ends = torch.tensor([0, len(ids), len(rows)], dtype=torch.int32, device=weight.device)
        batch, training = TokenBatch(rows, torch.zeros_like(rows), ends, len(ids)), encoder.training
        encoder.eval()
        try:
            with torch.no_grad():
                apart, shared = encoder.pooled(batch, "last"), encoder.last_of_groups(batch, [2])
            tolerance = TOLERANCE if weight.dtype in (torch.float32, torch.float64) else HALF_TOLERANCE
            if (shared - apart).abs().max() > tolerance * apart.abs().max():
                why = "whose states with a shared prefix differ from those of whole rows"
        except NotImplementedError as error:
            why = f"since {error}"
        encoder.train(training)
    if why:
        raise ConfigError(
            f"encoder.share_prefix: expected false for {encoder.config.model_type} models, {why}; got true"
        )


def _end_texts(encoder: Any) -> bool:
    """Let an encoder's tokenizer end texts with its separator or end-of-text token; return whether it has one."""
    old = encoder.tokenizer
    token = old.sep_token or old.eos_token
    if token is None:
        return False
    before, after = (old.convert_ids_to_tokens(list(ids)) for ids in Template.of(old, 1).specials)
    # the tokenizer classes of some families would restore their own layout at each call and after loading
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=copy.deepcopy(old.backend_tokenizer),
        model_max_length=old.model_max_length,
        model_input_names=old.model_input_names,
        padding_side=old.padding_side,
        **old.special_tokens_map,
    )
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=" ".join([*before, "$A", *(after or ([] if before else [token]))]),
        pair=" ".join([*before, "$A", token, "$B", *(after or [token])]),
        special_tokens=[(name, old.convert_tokens_to_ids(name)) for name in {token, *before, *after}],
    )
    encoder.tokenizer = tokenizer
    return True


def _name_of(encoder: Any) -> str:
    """Return the model's name for messages."""
    config = encoder.model.config
    return config.name_or_path or encoder.tokenizer.name_or_path or f"{config.model_type} encoder"
