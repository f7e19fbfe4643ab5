"""Facts about families: a new family is one file, and unknown families have safe facts."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, T5Config

from ranker.encoders import families as package
from ranker.encoders import family
from ranker.encoders.encoder import Encoder
from ranker.encoders.family import families, family_of, first_position, max_positions
from ranker.encoders.loading import load_encoder
from ranker.encoders.text_model import without_pooler
from ranker.encoders.tiny import tiny_tokenizer
from ranker.encoders.traits import measure
from ranker.errors import CheckpointError
from ranker.models.monobert import MonoBERT

PAGE = Path(__file__).resolve().parents[3] / "docs/add_an_encoder_family.md"
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def small_config(model_type: str):
    # XLNet has no limit of positions, and states the size of its heads
    positions = {"d_head": 8} if model_type == "xlnet" else {"max_position_embeddings": 40}
    return AutoConfig.for_model(
        model_type,
        **SIZES,
        **positions,
        vocab_size=len(tiny_tokenizer()),
        pad_token_id=1,
        attention_window=8,
    )


@pytest.fixture
def page(tmp_path, monkeypatch) -> list[str]:
    """The page's Python blocks; the file that the first one describes is in the package's folder."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "ernie.py").write_text(blocks[0])
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    families.cache_clear()
    yield blocks
    families.cache_clear()


def test_a_stranger_adds_a_family_with_one_file(page):
    scope: dict = {}
    exec(page[1], scope)
    scope["test_ernie_without_padding_equals_transformers"]()


def test_a_new_familys_classifier_is_written_and_read(page, tmp_path):
    model = AutoModel.from_config(small_config("ernie"), **without_pooler(small_config("ernie")))
    scorer = MonoBERT(Encoder(model, tiny_tokenizer()), pooler=True)
    scorer.save(tmp_path / "model", 32)
    assert (tmp_path / "model/config.json").is_file() and not (tmp_path / "model/head.safetensors").exists()
    loaded = MonoBERT.load(tmp_path / "model")
    assert all(value.equal(loaded.state_dict()[name]) for name, value in scorer.state_dict().items())


def test_without_the_file_the_family_is_packed():
    config = small_config("ernie")
    assert "ernie" not in families() and Encoder(AutoModel.from_config(config), tiny_tokenizer()).path == "packed"


@pytest.mark.parametrize("model_type", [name for name, facts in families().items() if facts.refused])
def test_a_refused_family_says_why(model_type):
    class Refused(torch.nn.Module):
        config = type("Config", (), {"model_type": model_type, "name_or_path": "folder"})

    with pytest.raises(CheckpointError, match=f"folder: {model_type} models are not supported: .+"):
        measure(Refused(), None, [], True, families()[model_type])


def test_a_file_is_named_after_its_model_type():
    files = {file.stem for file in Path(package.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == {model_type.replace("-", "_") for model_type in families()}


# T5Gemma's sizes lie in two parts of its configuration: one of these small ones would still be of 20 GB
BUILT = [name for name, facts in families().items() if not facts.refused and name != "t5gemma"]


@pytest.mark.parametrize("model_type", BUILT)
def test_facts_are_those_of_the_model(model_type, monkeypatch):
    config = small_config(model_type)
    model = AutoModel.from_config(config)
    stated = first_position(config)
    if model_type != "xlnet":  # without a limit
        assert max_positions(config) == config.max_position_embeddings - stated
    classifier = family_of(config).classifier
    if classifier is not None:
        whole = AutoModelForSequenceClassification.from_config(config)
        assert whole.get_submodule(classifier.dense).out_features == config.hidden_size
        assert whole.get_submodule(classifier.output).out_features == config.num_labels
    monkeypatch.setattr(family, "families", dict)  # no facts: the offset is read from the model
    assert first_position(config, model) == stated


def test_an_unknown_familys_offset_is_read_from_the_model():
    config = small_config("data2vec-text")
    model = AutoModel.from_config(config)
    assert (first_position(config), first_position(config, model)) == (0, 2)
    assert Encoder(model, tiny_tokenizer()).max_tokens == 38


def test_a_configuration_without_positions_has_no_limit():
    assert max_positions(T5Config()) >= 10**6


def test_the_tiny_encoder_is_a_known_family():
    assert family_of(load_encoder("tiny").config).layers == "bert"
