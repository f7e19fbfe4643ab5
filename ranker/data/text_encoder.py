"""Tokenize texts without the ids of control tokens, and identify tokenizers."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ranker.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BERT = ("BertNormalizer", "BertPreTokenizer", "WordPiece")
PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")
Encoded = tuple[np.ndarray, np.ndarray]  # lengths [texts], token ids [tokens]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a hash of everything that decides the token ids of a text; padding and truncation do not change it.

    Raises:
        ConfigError: The tokenizer is not a fast one.
    """
    content = _backend(tokenizer).to_str()
    options = (
        bool(getattr(tokenizer, "split_special_tokens", False)),
        tuple(sorted(tokenizer.all_special_tokens)),
        tokenizer.unk_token,
    )
    return _digest(content, options)


@lru_cache(maxsize=4)  # a suite needs the digest of one tokenizer for each of its sets
def _digest(content: str, options: tuple[bool, tuple[str, ...], str | None]) -> str:
    state = json.loads(content)
    state["padding"] = state["truncation"] = None  # the last call of the tokenizer has set both
    return hashlib.blake2b(json.dumps([state, options], sort_keys=True).encode(), digest_size=16).hexdigest()


class TextEncoder:
    """Tokenizes texts with a copy of the tokenizer, so that the caller's tokenizer does not change; thread-safe.

    The result never has the id of a control token (padding, separator, ...), with any text.

    Args:
        tokenizer: A fast tokenizer.
        max_tokens: Longer texts keep their first `max_tokens` tokens.

    Attributes:
        by_word: Whether a text's tokens equal the tokens of its words, split at white space, one after another.
        dtype: Type of the token ids.
        unknown: Id of the token for what is not in the vocabulary; -1: there is none.

    Raises:
        ConfigError: The tokenizer is not a fast one, or `max_tokens` is not positive.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, max_tokens: int) -> None:
        if max_tokens < 1:
            raise ConfigError(f"token store: expected max_tokens of at least 1, got {max_tokens!r}; raise it")
        backend = copy.deepcopy(_backend(tokenizer))
        backend.no_padding()
        backend.enable_truncation(max_tokens, direction="right")
        # A literal [SEP] in a text is text. A copy of the tokenizer loses this setting, so it is set here
        backend.encode_special_tokens = True
        self._tokenizer: Any = backend
        added = backend.get_added_tokens_decoder()
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        special |= {tokenizer.convert_tokens_to_ids(token): token for token in tokenizer.all_special_tokens}
        for allowed in (tokenizer.unk_token_id, None):  # None is the key of special tokens without an id
            special.pop(allowed, None)
        num_ids = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=0)
        self._is_control = np.zeros(num_ids, dtype=bool)
        self._is_control[list(special)] = True
        self._literal = re.compile("|".join(re.escape(token) for token in special.values() if token) or "(?!)")
        self.unknown = -1 if tokenizer.unk_token_id is None else tokenizer.unk_token_id
        self.dtype = np.dtype("<u2" if num_ids <= 1 << 16 else "<i4")
        self.max_tokens = max_tokens
        parts = tuple(type(part).__name__ for part in (backend.normalizer, backend.pre_tokenizer, backend.model))
        # BERT splits at punctuation, so no word gives a control token that contains some
        self.by_word = parts == BERT and all(
            token.special and len(token.content) > 1 and PUNCTUATION.search(token.content) for token in added.values()
        )

    def __call__(self, texts: list[str]) -> Encoded:
        """Return the number of tokens of each text, int64 [texts], and all token ids, `dtype` [tokens]."""
        lengths, tokens = self._ids(texts)
        if self._is_control[tokens].any():
            # Unigram models, and models that split at spaces only, would find the literal in their vocabulary. A space
            # inside the literal prevents this.
            lengths, tokens = self._ids(
                [self._literal.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text) for text in texts]
            )
            # Drop control tokens that appear only after normalization (of full-width letters, for example)
            leaks = self._is_control[tokens]
            lengths -= np.bincount(np.repeat(np.arange(len(texts)), lengths)[leaks], minlength=len(texts))
            tokens = tokens[~leaks]
        return lengths, tokens.astype(self.dtype)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        self._tokenizer.encode_special_tokens = True  # pickling loses this setting

    def _encode(self, texts: list[str]) -> list[Any]:
        # encode_batch_fast does not compute character offsets
        encode = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)
        encodings: list[Any] = encode(texts, add_special_tokens=False)
        return encodings

    def _ids(self, texts: list[str]) -> Encoded:
        try:
            encodings = self._encode(texts)
        except TypeError:  # a lone surrogate, which JSON allows and UTF-8 does not, becomes U+FFFD
            texts = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
            encodings = self._encode(texts)
        lengths, tokens = array("q"), array("I")
        for (
            encoding
        ) in encodings:  # one list of Python integers at a time, because all lists together take ten times the memory
            ids = encoding.ids
            lengths.append(len(ids))
            tokens.extend(ids)
        return np.array(lengths, dtype=np.int64), np.array(tokens, dtype=np.uint32)


def _backend(tokenizer: PreTrainedTokenizerFast) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"encoder tokenizer: expected a fast one (with a tokenizer.json), got {type(tokenizer).__name__!r}; "
            "convert it or take another encoder"
        )
    return backend
