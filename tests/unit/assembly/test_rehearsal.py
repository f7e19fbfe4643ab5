"""Refused early: trainings without a step, validations that never run, and options that Lightning refuses."""

import pytest
from omegaconf import OmegaConf

from ranker.assembly.rehearsal import check_length, refused_in_fit, rehearse_training
from ranker.assembly.scorer import total_steps
from ranker.config.shared_keys import TrainerConfig
from ranker.data.collection import Collection, MemoryDocs, Splits
from ranker.errors import ConfigError

SET = Collection("set", MemoryDocs([]), {"q": "text"}, {})
BOTH = Splits(SET, SET, {})


def configuration(**trainer):
    groups = {
        "optim": {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 1e-3},
        "loss": {"_target_": "ranker.losses.lce.LCE"},
        "schedule": {"_target_": "ranker.training.schedules.linear", "_partial_": True, "warmup": 0.1},
        "callbacks": {},
        "monitor": "val/nDCG@10",
    }
    values = (
        OmegaConf.to_container(OmegaConf.structured(TrainerConfig))
        | {"accelerator": "cpu", "devices": 1, "max_epochs": 1}
        | trainer
    )
    return OmegaConf.create({**groups, "trainer": values})


def test_pc2_03_an_interval_longer_than_the_epoch_is_refused_with_the_epoch_s_steps():
    with pytest.raises(
        ConfigError, match=r"trainer.val_check_interval: expected at most 3, the steps of an epoch, got 1000; .*=null"
    ):
        check_length(configuration(val_check_interval=1000), BOTH, 3)
    with pytest.raises(ConfigError, match="expected at most 2, the steps of an epoch, got 3"):
        check_length(configuration(val_check_interval=3, limit_train_batches=2), BOTH, 3)
    for fine in (
        {"val_check_interval": 3},
        {"val_check_interval": 1000, "check_val_every_n_epoch": None},
        {"val_check_interval": 0.5},
    ):
        check_length(configuration(**fine), BOTH, 3)
    check_length(configuration(val_check_interval=1000), Splits(SET, None, {}), 3)  # nothing to validate


def test_pc2_05_a_share_of_an_epoch_that_is_no_step_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"limit_train_batches: expected at least one of the 3 steps of an epoch, got 0.1, which gives 0 steps",
    ):
        check_length(configuration(limit_train_batches=0.1), BOTH, 3)
    cfg = configuration(limit_train_batches=0.34)
    check_length(cfg, BOTH, 3)
    assert total_steps(cfg, 3) == 1


def test_pc2_26_early_stopping_without_any_validation_is_refused_and_a_monitor_warns(caplog):
    cfg = configuration()
    check_length(cfg, Splits(SET, None, {}), 3)
    assert "monitor: the data has no validation set" in caplog.text
    cfg.callbacks = {
        "early_stopping": {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "val/nDCG@10"}
    }
    with pytest.raises(
        ConfigError,
        match=r"callbacks.early_stopping.monitor: expected a validation set for val/nDCG@10, got data without one",
    ):
        check_length(cfg, Splits(SET, None, {}), 3)


def test_a_mix_is_validated_if_one_of_its_sets_is_and_a_monitored_set_must_be(caplog):
    cfg = configuration()
    check_length(cfg, Splits(None, None, {}, sets={"a": BOTH, "b": Splits(SET, None, {})}), 3)
    assert "no validation set" not in caplog.text
    cfg.monitor = "val/b/nDCG@10"
    with pytest.raises(ConfigError, match=r"^monitor: expected a set with validation queries, got 'val/b/nDCG@10', bu"):
        check_length(cfg, Splits(None, None, {}, sets={"a": BOTH, "b": Splits(SET, None, {})}), 3)
    check_length(cfg, Splits(None, None, {}, sets={"a": BOTH, "b": BOTH}), 3)
    cfg.monitor = "val/nDCG@10"
    check_length(cfg, Splits(None, None, {}, sets={"a": Splits(SET, None, {})}), 3)
    assert "monitor: the data has no validation set" in caplog.text


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "trainer.accelerator",
            "cuda",
            "trainer: expected values that Lightning accepts, got Lightning's error: .*CUDA.*",
        ),
        ("trainer.devices", [5], "trainer: expected values that Lightning accepts, got Lightning's error: .*"),
        ("optim.betas", [], "optim: expected values that its class accepts, got its error: .*"),
        ("optim.betas", ["a", "b"], "optim: expected values that its class accepts, got its error: .*"),
        ("optim.lr", None, "optim: expected values that its class accepts, got its error: .*"),
        (
            "callbacks.stop",
            {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "x", "mode": "up"},
            ".*",
        ),
    ],
)
def test_what_lightning_and_torch_refuse_is_met_before_the_data(key, value, message):
    cfg = configuration()
    rehearse_training(cfg)
    OmegaConf.update(cfg, key, value, merge=False)
    with pytest.raises(Exception, match=message) as caught:
        rehearse_training(cfg)
    assert "\n" not in str(caught.value) or "mode" in str(caught.value)
    assert isinstance(caught.value, ConfigError) or type(caught.value).__module__.startswith(
        "hydra"
    )  # entry.py says Hydra's in one line


def test_what_a_callback_misses_in_the_training_is_one_line():
    message = (
        "callbacks: expected a monitor that is logged, got Lightning's error: Early stopping conditioned on metric `x`"
    )
    with pytest.raises(ConfigError, match=message), refused_in_fit():
        raise RuntimeError("Early stopping conditioned on metric `x` which is not available.")
    with pytest.raises(RuntimeError, match="anything else"), refused_in_fit():
        raise RuntimeError("anything else")
