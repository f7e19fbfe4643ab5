"""PC2-19: parts of a folder that do not fit each other are refused when it is loaded, in one line."""

import json
import logging

import numpy as np
import pytest
import torch
from tokenizers import AddedToken
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    RobertaConfig,
    RobertaModel,
)

from ranker.checkpoint import load_scorer
from ranker.data.token_store import build_token_store
from ranker.encoders.encoder import Encoder
from ranker.encoders.loading import load_encoder
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import CheckpointError, ConfigError, DataError
from ranker.models.colbert import ColBERT
from ranker.models.dpr import DPR
from ranker.models.monobert import MonoBERT
from tests.zoo.checkpoints import make

ROWS = len(tiny_tokenizer())
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 16,
    "vocab_size": ROWS,
}


def folder_of(path, tokenizer, kind=BertModel, **options):
    config = {BertModel: BertConfig, BertForSequenceClassification: BertConfig, RobertaModel: RobertaConfig}[kind]
    kind(config(**{**SMALL, "num_labels": 1, **options})).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def with_word(word="engine", special=False):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(word, special=special)], special_tokens=special)
    return tokenizer


def without_specials():
    tokenizer = tiny_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str()) | {"post_processor": None}
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(state))
    return tokenizer


def test_pc2_19_a_tokenizer_larger_than_the_embedding_table_is_refused(tmp_path):
    message = rf"{ROWS}, the rows of the embedding table, got {ROWS + 1} tokens with ids up to {ROWS} \('engine'\)"
    plain = folder_of(tmp_path / "plain", with_word())
    with pytest.raises(CheckpointError, match=message):
        load_encoder(str(plain))
    with pytest.raises(CheckpointError, match=message):
        load_encoder(str(plain), pretrained=False)
    with pytest.raises(CheckpointError, match=message):
        load_scorer(folder_of(tmp_path / "classifier", with_word(), BertForSequenceClassification))
    DPR(Encoder(BertModel(BertConfig(**SMALL), add_pooling_layer=False), tiny_tokenizer())).save(tmp_path / "bi", 64)
    with_word().save_pretrained(tmp_path / "bi")
    with pytest.raises(CheckpointError, match=message):
        load_scorer(tmp_path / "bi")


@pytest.mark.parametrize("family", ["bert", "t5", "gpt2", "gemma"])
def test_a_folder_without_the_files_of_its_tokenizer(family, tmp_path):
    """transformers makes a tokenizer of special tokens, for which each word of a text is unknown."""
    folder = make(family, tmp_path)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"expected a tokenizer with words, got one of \d+ special tokens, .*\Z"):
        load_encoder(str(folder))


def test_pc2_19_special_tokens_that_no_text_gives_may_lie_outside(tmp_path):
    encoder = load_encoder(str(folder_of(tmp_path / "plain", with_word("[unused]", special=True))))
    MonoBERT(encoder)
    tokenizer = with_word("[M]", special=True)
    tokenizer.mask_token = "[M]"
    encoder = load_encoder(str(folder_of(tmp_path / "mask", tokenizer)))
    with pytest.raises(
        ConfigError, match=f"model.query_length: expected 0, since the id {ROWS} of the expansion token is outside"
    ):
        ColBERT(encoder)
    tokenizer = with_word("[C]", special=True)
    tokenizer.cls_token = "[C]"
    with pytest.raises(CheckpointError, match=r"'\[C\]'"):
        load_encoder(str(folder_of(tmp_path / "cls", tokenizer)))


def test_pc2_19_a_padding_id_outside_the_table_or_none(tmp_path):
    path = folder_of(tmp_path / "plain", tiny_tokenizer())
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"pad_token_id": ROWS}))
    with pytest.raises(
        CheckpointError, match=rf"expected pad_token_id below vocab_size={ROWS} in config.json, got {ROWS}"
    ):
        load_encoder(str(path))
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    other = tmp_path / "other"
    DistilBertModel(DistilBertConfig(vocab_size=ROWS, dim=16, n_layers=1, n_heads=1, hidden_dim=16)).save_pretrained(
        other
    )
    tokenizer.save_pretrained(other)
    # padding is masked, so any token serves
    load_encoder(str(other), ragged=False)
    load_encoder(str(folder_of(tmp_path / "bert", tokenizer)))


@pytest.mark.parametrize("segments", [1, 2])
def test_pc2_19_a_pair_needs_the_segments_of_the_tokenizer(segments, tmp_path):
    encoder = load_encoder(str(folder_of(tmp_path / "bert", tiny_tokenizer(), type_vocab_size=segments)))
    DPR(encoder)  # a text by itself has segment 0
    if segments == 2:
        MonoBERT(encoder)
        return
    with pytest.raises(
        CheckpointError,
        match="expected segment ids below type_vocab_size=1, got 1 from the tokenizer's layout of 2 texts",
    ):
        MonoBERT(encoder)
    roberta = load_encoder(str(folder_of(tmp_path / "roberta", tiny_tokenizer(), RobertaModel, type_vocab_size=1)))
    MonoBERT(roberta)  # a family without segments: the tokenizer's are not read


def test_pc2_19_positions_and_special_tokens(tmp_path):
    short = load_encoder(str(folder_of(tmp_path / "short", tiny_tokenizer(), max_position_embeddings=4)))
    DPR(short)
    with pytest.raises(
        CheckpointError, match=r"expected positions for at least 5 tokens, got 4 \(max_position_embeddings=4\)"
    ):
        MonoBERT(short)
    bare = load_encoder(str(folder_of(tmp_path / "bare", without_specials())))
    MonoBERT(bare)  # texts end with the separator now
    first, second = (bare.tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("red", "blue"))
    end = [bare.tokenizer.sep_token_id]
    assert bare.tokenizer("red", "blue")["input_ids"] == first + end + second + end
    bare = load_encoder(str(tmp_path / "bare"))
    bare.tokenizer.sep_token = None
    with pytest.raises(
        CheckpointError, match="expected a tokenizer that puts a separator between query and doc, got none"
    ):
        MonoBERT(bare)


def test_a_tokenizer_without_special_tokens_has_a_token_for_an_empty_text(tmp_path):
    bare = load_encoder(str(folder_of(tmp_path / "bare", without_specials())))
    bare.source = None  # as in a bi-encoder that was trained without special tokens
    with pytest.raises(
        CheckpointError, match="expected a tokenizer that puts a special token before a text, got 0 special tokens"
    ):
        DPR(bare, pooling="cls")
    for scorer in (DPR(bare), ColBERT(bare, query_prompt="", doc_prompt="", query_length=0)):
        for layout in scorer.layouts():  # a row of an empty text still has a token
            assert layout.num_special == 0 and layout.row_lengths(np.array([0, 1, 3])).tolist() == [1, 1, 3]


def test_pc2_19_a_tokenizer_that_does_not_know_the_words(tmp_path, caplog):
    def store(name, text):
        return build_token_store(
            [(str(i), text) for i in range(300)], tmp_path / name, tiny_tokenizer(), 64, fingerprint=name
        )

    with pytest.raises(
        DataError, match=r"expected a tokenizer that knows the words of these texts, but 75% of 1200 tokens are \[UNK\]"
    ):
        store("foreign", "\u0e01 \u0e02 \u0e03 a")
    assert not (tmp_path / "foreign").exists()
    with caplog.at_level(logging.WARNING):
        store("known", "ab ab \u0e01 ab ab ab ab ab ab ab ab")
        assert not caplog.records
        store("mixed", "ab \u0e01 ab ab")
    assert "25% of 1200 tokens are [UNK], so the model can't tell these words apart" in caplog.text


def test_pc2_19_what_fits_still_scores(tmp_path):
    torch.manual_seed(0)
    scorer = MonoBERT(load_encoder(str(folder_of(tmp_path / "plain", tiny_tokenizer()))))
    scorer.save(tmp_path / "model", 64)
    assert isinstance(load_scorer(tmp_path / "model"), MonoBERT)
