"""Every option of execution is kept when a scorer is built, saved, loaded, trained on, resumed, probed or copied."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from ranker.assembly.scorer import build_scorer
from ranker.checkpoint import load_scorer, save_model
from ranker.cli import entry
from ranker.cli.resume import resumed, started_from
from ranker.config.signatures import parameters_of
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import DEFAULT, Execution
from ranker.encoders.loading import load_encoder
from ranker.errors import ConfigError
from ranker.models.monobert import MonoBERT
from ranker.probing.subject import Subject

CONF = Path(__file__).resolve().parents[2] / "conf"
# for every option, a value that differs from its default
OTHER = {
    "ragged": False, "compile": False, "attention": "library", "fused": False, "graphs": False, "checkpointing": True,
    "share_prefix": True, "quantize_aware": True,
}  # fmt: skip
MODELS = {
    "monobert": [], "monobert apart": ["model.pooling=mean"], "dpr": ["model.tied=false"], "colbert": [],
    "multitask": ["model.heads=[{task: bm25, layer: 1, regression: true}]"],
}  # fmt: skip


def composed(model: str, *overrides: str):
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", [
            f"model={model.split()[0]}", "encoder=tiny", "name=x", *MODELS[model],
            *(f"encoder.{option}={str(value).lower()}" for option, value in OTHER.items()), *overrides,
        ])  # fmt: skip


def executions(module: torch.nn.Module) -> list[Execution]:
    return [part.execution for part in module.modules() if isinstance(part, Encoder)]


def test_every_option_has_another_value_here_and_a_key_in_yaml():
    # trust_remote_code is not stored: each command must set it again
    options = [option.name for option in fields(Execution) if option.name != "trust_remote_code"]
    assert list(OTHER) == options
    assert not [option for option in options if OTHER[option] == getattr(DEFAULT, option)]
    assert set(options) <= set(parameters_of("ranker.encoders.loading.load_encoder"))


@pytest.mark.parametrize("model", MODELS)
def test_a_scorer_has_them_when_it_is_built_saved_loaded_and_trained_on(model, tmp_path):
    cfg, wanted = composed(model), Execution(**OTHER)
    scorer = build_scorer(cfg)
    count = 2 if model == "dpr" else 1
    assert executions(scorer) == [wanted] * count
    save_model(tmp_path / "run/model", scorer, cfg)
    assert executions(load_scorer(tmp_path / "run/model")) == [wanted] * count
    # a run folder, whose last weights are in its checkpoint
    (tmp_path / "run/checkpoints").mkdir()
    state = {f"scorer.{name}": value for name, value in scorer.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "run/checkpoints/last.ckpt")
    (tmp_path / "run/config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    for weights in ("best", "last"):
        assert executions(load_scorer(tmp_path / "run", weights)) == [wanted] * count
    cfg.checkpoint = str(tmp_path / "run")
    for prepare in (started_from, resumed):  # a new training from its weights, and the same training resumed
        assert executions(build_scorer(prepare(cfg.copy()))) == [wanted] * count
    if model != "multitask":
        subject = Subject.of_checkpoint(tmp_path / "run", "best")
        assert [part.encoder.execution for part in (subject.frozen, subject.frozen_docs)] == [wanted] * 2
        random = subject.randomised(seed=0)
        assert [part.encoder.execution for part in (random.frozen, random.frozen_docs)] == [wanted] * 2


def test_another_program_s_folder_is_trained_on_as_the_configuration_says(tmp_path):
    MonoBERT(load_encoder("tiny")).save(tmp_path, 64)
    cfg = composed("monobert")
    cfg.checkpoint = str(tmp_path)
    assert executions(build_scorer(started_from(cfg))) == [Execution(**OTHER)]
    assert executions(load_scorer(tmp_path)) == [DEFAULT]


def test_options_that_an_older_folder_lacks_have_their_defaults():
    assert Execution.of({"name": "tiny", "ragged": False}) == Execution(ragged=False)


@pytest.mark.parametrize(
    ("option", "value"), [("ragged", "auto"), ("compile", "yes"), ("attention", True), ("fused", 2), ("graphs", None)]
)
def test_a_value_that_an_option_does_not_have(option, value):
    with pytest.raises(ConfigError, match=rf"^encoder\.{option}: expected .*got {value!r}$"):
        Execution(**{option: value})
