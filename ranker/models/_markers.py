"""ColBERT's markers and expansion token, for any tokenizer; markers missing from its vocabulary are added."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import AddedToken

from ranker.encoders.encoder import Encoder
from ranker.errors import ConfigError

log = logging.getLogger(__name__)

MARKER = re.compile(r"\[\S+\]|<\S+>")


def add_markers(encoder: Encoder, markers: Sequence[str]) -> None:
    """Make markers special tokens of the tokenizer, so that the tokens of a text never include a marker.

    A marker of the vocabulary keeps its embedding. A marker in brackets that the vocabulary lacks, such as `[Q]`, is
    added; its embedding is the mean of all embeddings (Hewitt, 2021,
    https://nlp.stanford.edu/~johnhew/vocab-expansion.html). Any other marker is tokenized as ordinary text. Nothing is
    drawn at random, so a model that is built again has the same weights.

    Args:
        encoder: The encoder; its tokenizer and its table of embeddings are changed.
        markers: Markers without blanks around them.

    Raises:
        ConfigError: A marker is new, and the family's table can't be extended.
    """
    tokenizer = encoder.tokenizer
    vocabulary = tokenizer.get_vocab()
    new = [marker for marker in dict.fromkeys(markers) if marker not in vocabulary and MARKER.fullmatch(marker)]
    known = [marker for marker in dict.fromkeys(markers) if marker and marker in vocabulary]
    tokenizer.add_tokens(
        [AddedToken(marker, normalized=False, special=True) for marker in known + new], special_tokens=True
    )
    if not new:
        return
    table: Any = encoder.model.get_input_embeddings()
    rows, mean = len(table.weight), table.weight.detach()[: len(vocabulary)].mean(0)
    ids = [tokenizer.get_vocab()[marker] for marker in new]
    if max(ids) >= rows:
        try:
            with torch.random.fork_rng(devices=[]):  # the library first fills new rows at random
                encoder.model.resize_token_embeddings(max(ids) + 1, mean_resizing=False)
        except (TypeError, NotImplementedError) as error:  # I-BERT
            raise ConfigError(
                "model.query_prompt: expected a marker of the vocabulary, or a text without brackets, got "
                f"{' and '.join(new)}; the embeddings of {encoder.config.model_type} models can't be extended"
            ) from error
        config: Any = encoder.config
        getattr(config, "encoder", config).vocab_size = max(ids) + 1  # T5Gemma's encoder has a configuration of its own
    with torch.no_grad():
        weight = encoder.model.get_input_embeddings().weight
        weight[[*ids, *range(rows, len(weight))]] = mean.to(weight)
    log.info("markers %s: added to the vocabulary, with the mean of all embeddings", ", ".join(new))


def expansion_token(encoder: Encoder) -> int:
    """Return the id of the token that extends queries: the mask token or, if there is none, the end-of-text token.

    sentence-transformers chooses the same token (`query_expansion` with `token: null`).

    Raises:
        ConfigError: The tokenizer has neither token, or the id has no embedding.
    """
    tokenizer, rows = encoder.tokenizer, len(encoder.model.get_input_embeddings().weight)
    token_id = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else tokenizer.eos_token_id
    if token_id is None:
        raise ConfigError(
            "model.query_length: expected 0, since the encoder's tokenizer has neither a mask token nor an eos token"
        )
    if token_id >= rows:
        raise ConfigError(
            f"model.query_length: expected 0, since the id {token_id} of the expansion token is outside the encoder's "
            f"{rows} embeddings"
        )
    if tokenizer.mask_token_id is None:
        log.info("model.query_length: no mask token, so queries are extended with %s", tokenizer.eos_token)
    return int(token_id)
