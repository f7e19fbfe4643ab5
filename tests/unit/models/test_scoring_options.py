"""Options that change a model's scores: a stored result is never reused for a model with other options."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transformers import BertModel

from ranker.assembly.inference import prepare
from ranker.assembly.merging import merge_scorers
from ranker.assembly.scorer import build_scorer
from ranker.distillation.start import check_fit
from ranker.encoders.encoder import Encoder
from ranker.encoders.tiny import tiny_config, tiny_tokenizer
from ranker.errors import ConfigError
from ranker.exits.early_exit import EarlyExit
from ranker.lists.duo import Duo
from ranker.lists.set_encoder import SetEncoder
from ranker.models.monobert import MonoBERT
from ranker.retrieval.encode import scorer_hash


def encoder(layers=3):
    torch.manual_seed(0)
    config = tiny_config(dim=16)
    config.num_hidden_layers = layers
    return Encoder(BertModel(config, add_pooling_layer=False), tiny_tokenizer())


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        (EarlyExit, {"exits": [1, 2]}, {"exits": [1, 2], "exit": 1}),
        (EarlyExit, {"exits": [1, 2], "margin": 1.0}, {"exits": [1, 2], "margin": 2.0}),
        (EarlyExit, {"exits": [1], "margin": 1.0}, {"exits": [1], "margin": 1.0, "center": 0.5}),
        (EarlyExit, {"exits": [1]}, {"exits": [2]}),
        (Duo, {"aggregation": "sum"}, {"aggregation": "bradley_terry"}),
        (SetEncoder, {}, {"window": 2}),
    ],
)
def test_models_that_differ_in_an_option_have_other_hashes_and_are_not_merged(kind, one, other):
    def scorer(options):
        torch.manual_seed(1)
        return kind(encoder(), **options)

    assert scorer_hash(scorer(one)) == scorer_hash(scorer(one)) != scorer_hash(scorer(other))
    with pytest.raises(ConfigError, match=r"^runs: expected models with one "):
        merge_scorers({"a": scorer(one), "b": scorer(other)}, None, "linear")


def trained_from(folder, **keys):
    model = {"_target_": "ranker.exits.early_exit.EarlyExit", "exit": None, "margin": None, "center": 0.0, **keys}
    node = {"layer_drop": 0.25}
    return build_scorer(OmegaConf.create({"checkpoint": str(folder), "resume": False, "model": model, "encoder": node}))


def test_a_training_from_a_stored_model_takes_its_exit_and_layer_drop(tmp_path):
    scorer = EarlyExit(encoder(), exits=[1, 2])
    scorer.save(tmp_path, 64)
    OmegaConf.save({"model": {"_target_": "ranker.exits.early_exit.EarlyExit"}}, tmp_path / "ranker.yaml")
    assert trained_from(tmp_path).exit is None
    exits = trained_from(tmp_path, exit=2)
    assert exits.exit == 2 and exits.encoder.layer_drop == 0.25
    assert not scorer.elsewhere() and "last layer" in exits.elsewhere()


def test_a_model_of_lists_is_no_teacher_of_layers():
    with pytest.raises(ConfigError, match=r"^distill.teacher: expected a cross-encoder as teacher that scores each"):
        check_fit(MonoBERT(encoder()), SetEncoder(encoder()), attention=False)


def test_an_unknown_option_of_inference_is_refused():
    with pytest.raises(ConfigError, match=r"^inference.quantise: expected one of exit, margin, quantize"):
        prepare(SimpleNamespace(), {"quantise": "int8"})
