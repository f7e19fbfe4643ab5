"""What the command line may change in a resumed training."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from ranker.cli import entry, resume
from ranker.errors import ConfigError

CONF = Path(__file__).resolve().parents[3] / "conf"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A run folder that holds its configuration."""
    folder = tmp_path_factory.mktemp("run")
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", ["encoder=tiny", "name=first", "logger=wandb", "callbacks=early_stopping"])
    cfg.encoder.trust_remote_code = True
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    return folder


@pytest.fixture
def command(stored, monkeypatch):
    """A function that lets Hydra appear to have been started with a command line; it returns the overrides."""

    def make(*overrides):
        task = [f"checkpoint={stored}", "resume=true", *overrides]
        hydra = SimpleNamespace(overrides=SimpleNamespace(task=task))
        monkeypatch.setattr(resume, "HydraConfig", SimpleNamespace(initialized=lambda: True, get=lambda: hydra))
        return task

    return make


@pytest.fixture
def resumed(command):
    def make(*overrides):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return resume.resumed(compose("train", command(*overrides)))

    return make


def test_the_rest_is_the_stored_run_s(resumed, stored):
    changes = [
        "trainer.max_epochs=9",
        "trainer.devices=2",
        "batch.max_tokens=77",
        "batch.workers=1",
        "name=second",
        "nonfinite=skip",
        "save_every_steps=3",
        "cache_dir=elsewhere",
        "logger=tensorboard",
        "callbacks=none",
    ]
    cfg, before = resumed(*changes), OmegaConf.load(stored / "config.yaml")
    assert (cfg.trainer.max_epochs, cfg.trainer.devices, cfg.batch.max_tokens, cfg.batch.workers) == (9, 2, 77, 1)
    assert (cfg.name, cfg.nonfinite, cfg.save_every_steps, cfg.cache_dir) == ("second", "skip", 3, "elsewhere")
    assert cfg.logger == {
        "_target_": "ranker.training.loggers.tensorboard",
        "_partial_": True,
    }  # no key of wandb is left
    assert not cfg.callbacks
    assert cfg.encoder.trust_remote_code is False  # the user must give it again
    before.encoder.trust_remote_code = False
    assert all(
        cfg[key] == before[key] for key in ("model", "encoder", "loss", "data", "optim", "schedule", "seed", "measures")
    )
    assert resumed("encoder.trust_remote_code=true").encoder.trust_remote_code is True


@pytest.mark.parametrize(
    "override",
    [
        "loss=ranknet",
        "optim.lr=1",
        "batch.docs=2",
        "batch.positives=2",
        "batch.depth=9",
        "data.path=x",
        "data=cwe",
        "schedule.warmup=0",
        "model.pooling=mean",
        "encoder.dropout=0.5",
        "max_doc_tokens=9",
        "depth=3",
        "monitor=null",
        "trainer.limit_train_batches=2",
        "trainer.gradient_clip_val=9",
        "++seed=1",
        "~loss",
    ],
)
def test_another_training_is_refused(stored, command, override):
    key = override.split("=")[0].lstrip("+~")
    command(override)
    with pytest.raises(ConfigError) as caught:
        resume.resumed(OmegaConf.create({"checkpoint": str(stored), "resume": True}))
    assert str(caught.value).startswith(
        f"{key}: expected the value of the run that is resumed, got {override!r}; leave it out, or start"
    )


@pytest.mark.parametrize(
    ("stored", "root", "function", "message"),
    [
        (
            "pretrain",
            "train",
            resume.started_from,
            "ranker train, got one of ranker pretrain (@); encoder.name=@/",
        ),
        ("pretrain", "train", resume.resumed, "ranker train, got one of ranker pretrain (@); encoder.name=@/"),
        ("compress", "train", resume.started_from, "ranker train, got one of another command (@); checkpoint=@/model"),
        ("search", "train", resume.resumed, "ranker train, got one of another command (@); checkpoint=@/model"),
        ("train", "pretrain", resume.resumed, "ranker pretrain, got one of ranker train (@); name a run folder of"),
        ("compress", "pretrain", resume.resumed, "ranker pretrain, got one of another command (@); name a run folder"),
    ],
)
def test_a_run_of_another_command_is_one_line(tmp_path, stored, root, function, message):
    needed = {"pretrain": ["encoder=tiny"], "compress": ["checkpoint=x"], "search": ["model=bm25"], "train": []}
    with initialize_config_dir(str(CONF), version_base="1.3"):
        written = OmegaConf.to_yaml(compose(stored, ["name=a", *needed[stored]]), resolve=True)
        cfg = compose(root, [f"checkpoint={tmp_path}"])
    (tmp_path / "config.yaml").write_text(written)
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError) as caught:
        function(cfg)
    assert str(caught.value).startswith(f"checkpoint: expected a run of {message}".replace("@", str(tmp_path)))
