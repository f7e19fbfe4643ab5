"""Values that no training could use are refused by the check, each in one line that names the key."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from ranker import entry
from ranker.config import check
from ranker.errors import ConfigError

CONF = Path(__file__).resolve().parents[2] / "conf"


@pytest.fixture(scope="module")
def composed():
    """The default configurations of train.py and probe.py."""
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return {root: compose(root, ["name=checked", "encoder=tiny"]) for root in ("train", "probe")}


@pytest.mark.parametrize(
    ("root", "key", "value", "message"),
    [
        ("train", "trainer.log_every_n_steps", 0, "trainer.log_every_n_steps: expected at least 1, got 0"),
        ("probe", "max_pairs", 0, "max_pairs: expected at least 1, got 0"),
        ("probe", "val_fraction", 1.5, "val_fraction: expected a share from 0 to 1, got 1.5"),
        ("probe", "val_fraction", -0.1, "val_fraction: expected a share from 0 to 1, got -0.1"),
        ("probe", "test_fraction", 2, "test_fraction: expected a share from 0 to 1, got 2.0"),
    ],
)
def test_a_value_out_of_range_is_one_line(composed, root, key, value, message):
    cfg = composed[root].copy()
    OmegaConf.update(cfg, key, value)
    with pytest.raises(ConfigError) as caught:
        check(cfg)
    assert str(caught.value) == message
