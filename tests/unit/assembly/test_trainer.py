"""The arguments of Lightning's Trainer and Fabric."""

import pytest
from omegaconf import OmegaConf

from ranker.assembly import trainer
from ranker.errors import ConfigError


@pytest.mark.parametrize("options", [trainer.trainer_options, trainer.fabric_options])
def test_more_processes_than_the_cores_can_run_are_refused(options, monkeypatch):
    monkeypatch.setattr(trainer, "available_cores", lambda: 2)
    values = {
        "accelerator": "cpu",
        "num_nodes": 1,
        "precision": "32-true",
        "strategy": "auto",
        "accumulate_grad_batches": 1,
        "gradient_clip_val": None,
        "gradient_clip_algorithm": None,
    }
    assert options(OmegaConf.create({"trainer": {**values, "devices": 8}}))["devices"] == 8
    for devices in (9, "99"):
        message = f"trainer.devices: expected at most 8 processes on the 2 CPU cores of this machine, got {devices};"
        with pytest.raises(ConfigError, match=message):
            options(OmegaConf.create({"trainer": {**values, "devices": devices}}))
