"""Tokens from a cache of words are those of the tokenizer on whole texts."""

import pickle
import sys

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import BertTokenizerFast, PreTrainedTokenizerFast

from ranker.data import word_cache
from ranker.data.text_encoder import TextEncoder
from ranker.data.word_cache import WordCache

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["ab", "the", "river", "cafe", "sep", "cls"]
PIECES = [*SPECIAL, *"abcdefgh,.!?[]'-水é", *WORDS, "##a", "##b", "##cd", "##s", "##é"]
TEXTS = [
    "The rivers, the river.", "", "  ", "ab\tcafé\nCAFÉ\r\nab", "[SEP] a[MASK]b [CLS ]", "a\u0301 \u0301b", "水水 a水b",
    "a\x0bb a\x1cb a\x85b", "a\u200bb\xa0c\u3000d\u2028e\ufeff", "\ud800 a \ud83d\ude00 b", "b" * 300 + " a",
    "the " * 50, "ΑΣ ΑΣ. İ ﬁ ［ＳＥＰ］ \ufffd a\x00b\x7f",
]  # fmt: skip


def bert(**options):
    return BertTokenizerFast(vocab={piece: number for number, piece in enumerate(PIECES)}, **options)


def assert_same(tokenizer, texts, max_tokens=20):
    encoder = TextEncoder(tokenizer, max_tokens)
    assert encoder.by_word
    cache = WordCache(encoder)
    backend = TextEncoder(tokenizer, max_tokens)
    for part in (texts, texts[::-1]):  # the second time, all words are known
        lengths, tokens = cache(part)
        expected, ids = backend(part)
        np.testing.assert_array_equal(lengths, expected)
        np.testing.assert_array_equal(tokens, ids)
        assert lengths.dtype == expected.dtype and tokens.dtype == ids.dtype


@pytest.mark.parametrize(
    "options", [{}, {"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False}]
)
@pytest.mark.parametrize("max_tokens", [1, 3, 200])
def test_hostile_texts(options, max_tokens):
    assert_same(bert(**options), TEXTS, max_tokens)


def test_every_character_between_and_within_words():
    points = [*range(0x3100), *range(0x3100, sys.maxunicode, 331), 0xFEFF, 0xFFFD, 0xFFFC]
    assert_same(bert(), [f"a{chr(point)}b {chr(point)} the{chr(point)} {chr(point)}river" for point in points])


def test_without_the_cleaning_of_control_characters():
    tokenizer = bert()
    tokenizer.backend_tokenizer.normalizer = normalizers.BertNormalizer(clean_text=False)
    assert_same(tokenizer, [*TEXTS, *(f"a{chr(point)}b" for point in range(0x3100))])


def test_a_cache_that_is_full_starts_again(monkeypatch):
    monkeypatch.setattr(word_cache, "MOST_CHARS", 10)
    encoder = TextEncoder(bert(), 50)
    cache = WordCache(encoder)
    for start in range(0, 60, 3):
        texts = [" ".join(f"{'ab' * (i % 7)}{i}" for i in range(start, start + 5)), "the river"]
        for found, expected in zip(cache(texts), encoder(texts), strict=True):
            np.testing.assert_array_equal(found, expected)
        assert len(cache._known) < 20
    copy = pickle.loads(pickle.dumps(cache))
    assert copy._known == {} and copy(["the river"])[1].tolist() == encoder(["the river"])[1].tolist()


def test_short_words_fill_a_cache_too(monkeypatch):
    """An entry takes about 180 bytes, whatever the length of its word."""
    monkeypatch.setattr(word_cache, "MOST_CHARS", 1000)
    cache = WordCache(TextEncoder(bert(), 50))
    for first in range(0x4E00, 0x4E00 + 1000, 10):
        cache([" ".join(map(chr, range(first, first + 10)))])
        assert len(cache._known) <= 130


def whitespace():
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))


def with_added(token):
    tokenizer = bert()
    tokenizer.add_tokens([token])
    return tokenizer


def with_control(content):
    tokenizer = bert()
    tokenizer.add_special_tokens({"additional_special_tokens": [content]})
    return tokenizer


def with_pre_tokenizer():
    tokenizer = bert()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [whitespace, with_pre_tokenizer, lambda: with_added(AddedToken("a b")), lambda: with_control("river")],
    ids=["another model", "words with their spaces", "a token of two words", "a control token that is a word"],
)
def test_tokenizers_without_words_of_their_own(tokenizer):
    assert not TextEncoder(tokenizer(), 20).by_word
