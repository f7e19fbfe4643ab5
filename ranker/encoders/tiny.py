"""Tokenizers, and a random BERT, Llama and T5, small enough for tests. They need no files and no hub."""

from __future__ import annotations

from itertools import product
from string import ascii_lowercase, digits, punctuation
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, LlamaConfig, PreTrainedTokenizerFast, T5Config

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def tiny_tokenizer(words: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Return an uncased WordPiece tokenizer of single characters and pairs of letters, in BERT's layout.

    Args:
        words: Further words of the vocabulary.
    """
    characters = [*ascii_lowercase, *digits, *punctuation]
    pairs = ["".join(pair) for pair in product(ascii_lowercase, repeat=2)]
    pieces = [*SPECIAL, *characters, *pairs, *(f"##{piece}" for piece in characters + pairs), *words]
    backend = Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]", max_input_chars_per_word=200)
    )  # type: ignore[call-arg]
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=512,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def tiny_config(dim: int = 32, layers: int = 2, heads: int = 2, positions: int = 512) -> BertConfig:
    """Return the configuration of a random BERT for `tiny_tokenizer`.

    Args:
        dim: Size of a state.
        layers: Transformer layers.
        heads: Attention heads.
        positions: Number of rows of the position table.
    """
    return BertConfig(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * dim,
        max_position_embeddings=positions,
    )


def tiny_lm_tokenizer() -> PreTrainedTokenizerFast:
    """Return `tiny_tokenizer` with the word "yes" and a language model's layout: a token before a text, none after."""
    tokenizer = tiny_tokenizer(("yes",))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", pair="[CLS] $A [SEP] $B", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.bos_token, tokenizer.eos_token = "[CLS]", "[SEP]"
    return tokenizer


def tiny_lm_config() -> LlamaConfig:
    """Return the configuration of a random Llama for `tiny_lm_tokenizer`."""
    return LlamaConfig(
        vocab_size=len(tiny_lm_tokenizer()),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )


def tiny_t5_tokenizer() -> PreTrainedTokenizerFast:
    """Return `tiny_tokenizer` with the words "true" and "false" and T5's layout: one token after a text."""
    tokenizer = tiny_tokenizer(("true", "false"))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", pair="$A [SEP] $B [SEP]", special_tokens=[("[SEP]", 3)]
    )
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.eos_token = "[SEP]"
    return tokenizer


def tiny_t5_config() -> T5Config:
    """Return the configuration of a random T5 for `tiny_t5_tokenizer`."""
    start: dict[str, Any] = {"decoder_start_token_id": 0}
    return T5Config(
        vocab_size=len(tiny_t5_tokenizer()),
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=3,
        **start,
    )
