"""A tokenizer and a random BERT that are small enough for tests and need no file and no hub."""

from __future__ import annotations

from itertools import product
from string import ascii_lowercase, digits, punctuation

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, PreTrainedTokenizerFast


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return an uncased WordPiece tokenizer of single characters and pairs of letters, in BERT's layout."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    characters = [*ascii_lowercase, *digits, *punctuation]
    pairs = ["".join(pair) for pair in product(ascii_lowercase, repeat=2)]
    pieces = special + characters + pairs + [f"##{piece}" for piece in characters + pairs]
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
        positions: Rows of the position table.
    """
    return BertConfig(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * dim,
        max_position_embeddings=positions,
    )
