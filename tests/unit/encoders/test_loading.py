"""A checkpoint that lacks weights: named in the log, and refused when the encoder would be random."""

import logging
from inspect import signature

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AlbertConfig, AlbertModel

from ranker.config.roots import CONF
from ranker.encoders.loading import load_encoder
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import CheckpointError


@pytest.fixture
def folder(tmp_path):
    encoder = load_encoder("tiny")
    encoder.model.save_pretrained(tmp_path)
    encoder.tokenizer.save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder, change):
    path = folder / "model.safetensors"
    save_file(
        {change(key): value for key, value in load_file(path).items() if change(key)}, path, metadata={"format": "pt"}
    )


def test_a_missing_weight_is_named_in_the_log(folder, caplog):
    rewrite(folder, lambda key: None if key == "encoder.layer.1.output.dense.bias" else key)
    with caplog.at_level(logging.WARNING):
        load_encoder(str(folder))
    assert "weights that the checkpoint lacks, random now: encoder.layer.1.output.dense.bias" in caplog.text


def test_an_encoder_that_would_be_random_is_an_error(folder):
    rewrite(folder, lambda key: f"elsewhere.{key}")
    with pytest.raises(
        CheckpointError, match=r"are missing and would be random; check encoder.name, or set encoder.pretrained=false"
    ):
        load_encoder(str(folder))
    assert load_encoder(str(folder), pretrained=False).num_layers == 2


def test_a_name_that_is_given_beside_encoder_tiny_is_loaded_and_random_weights_are_named(folder, caplog):
    weights = load_file(folder / "model.safetensors")
    node = OmegaConf.load(CONF / "encoder/tiny.yaml")
    options = {key: node[key] for key in node if key in signature(load_encoder).parameters}
    loaded = load_encoder(**{**options, "name": str(folder)}).model
    assert torch.equal(loaded.embeddings.word_embeddings.weight, weights["embeddings.word_embeddings.weight"])
    assert "random weights" not in caplog.text
    load_encoder(str(folder), pretrained=False)
    assert "encoder.pretrained=false: random weights" in caplog.text


def test_a_loaded_encoder_trains_with_its_dropout(folder):
    encoder = load_encoder(str(folder), dropout=0.3)
    assert all(module.training for module in encoder.modules())


def test_an_encoder_without_one_matrix_is_refused(folder):
    rewrite(folder, lambda key: None if key == "embeddings.word_embeddings.weight" else key)
    with pytest.raises(CheckpointError, match=r"such as embeddings\.word_embeddings\.weight"):
        load_encoder(str(folder))


def test_no_family_keeps_a_pooler_that_nothing_reads(tmp_path):
    config = AlbertConfig(
        vocab_size=len(tiny_tokenizer()),
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    AlbertModel(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    for pretrained in (True, False):
        encoder = load_encoder(str(tmp_path), pretrained=pretrained)
        assert not [name for name, _ in encoder.named_parameters() if "pooler" in name]
