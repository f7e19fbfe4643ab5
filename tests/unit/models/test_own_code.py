"""Folders with code: refused by default, run if the user allows it, and each load asks for that permission again."""

import json

import pytest
import torch
from omegaconf import OmegaConf
from transformers import BertConfig, BertModel

from ranker.checkpoint import load_scorer
from ranker.encoders.loading import load_encoder
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import CheckpointError, ConfigError
from ranker.models.dpr import DPR
from ranker.models.monobert import MonoBERT

CODE = """
from transformers import BertConfig, BertModel

class OwnConfig(BertConfig):
    model_type = "own_bert"

class OwnModel(BertModel):
    config_class = OwnConfig
"""


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "own"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(tiny_tokenizer()), **sizes)).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    (path / "own.py").write_text(CODE)
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "own_bert", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("make", [MonoBERT, DPR])
def test_trust_is_asked_for_at_loading_too(folder, make, tmp_path):
    with pytest.raises(ConfigError, match=r"it has code of its own; .* encoder.trust_remote_code=true"):
        load_encoder(str(folder))
    encoder = load_encoder(str(folder), trust_remote_code=True)
    scorer = make(encoder)
    scorer.save(tmp_path / "model", 64)
    about = {"model": {"_target_": f"{make.__module__}.{make.__name__}"}, "encoder": {"trust_remote_code": True}}
    OmegaConf.save(OmegaConf.create(about), tmp_path / "model/ranker.yaml")
    with pytest.raises(CheckpointError, match=r"it has code of its own; .* trust_remote_code=true"):
        load_scorer(tmp_path / "model")
    loaded = load_scorer(tmp_path / "model", trust_remote_code=True)
    assert all(value.equal(loaded.state_dict()[name]) for name, value in scorer.state_dict().items())
