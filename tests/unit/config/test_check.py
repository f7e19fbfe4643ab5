"""Values that no training could use are refused by the check, each in one line that names the key."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from omegaconf import OmegaConf

from ranker.cli import entry
from ranker.config.check import check
from ranker.config.signatures import attribute_of
from ranker.errors import ConfigError
from ranker.probing.training_options import TrainingOptions

CONF = Path(__file__).resolve().parents[3] / "conf"


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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.teacher=t.trec"],
            "with data.teacher, got 0.5; a doc that repeats another gets label 0, which must be the lowest label",
        ),
        (["model=dpr", "mining.every=2"], "with mining.every=2, got 0.5"),
    ],
)
def test_labels_by_novelty_are_for_judgements(overrides, message):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", ["name=checked", "encoder=tiny", "batch.novelty=0.5", *overrides])
    with pytest.raises(ConfigError, match=f"^batch.novelty: expected null {message}"):
        check(cfg)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["model.matryoshka_dims=[8,16]"], "model.matryoshka_dims"),
        (["model.matryoshka_layers=[1]"], "model.matryoshka_layers"),
        (["mining.every=2"], "mining.every=2, which encodes the docs between two steps"),
    ],
)
def test_passes_outside_the_scorer_s_forward_are_refused_with_shards(overrides, reason):
    dpr = ["model=dpr", "model.in_batch_negatives=false", "trainer.strategy=fsdp", *overrides]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", ["name=checked", "encoder=tiny", *dpr])
    with pytest.raises(ConfigError) as caught:
        check(cfg)
    assert str(caught.value) == f"trainer.strategy: expected auto or ddp with {reason}, got fsdp"


LOSSES = {path.stem: str(OmegaConf.load(path)._target_) for path in sorted((CONF / "loss").glob("*.yaml"))}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("docs", "positives"), [(1, 1), (3, 3)])
def test_groups_of_relevant_docs_alone_are_for_losses_that_say_so(composed, loss, docs, positives):
    cfg = composed["train"].copy()
    cfg.batch.docs, cfg.batch.positives, cfg.loss = docs, positives, OmegaConf.load(CONF / f"loss/{loss}.yaml")
    if getattr(get_class(LOSSES[loss]), "against_reference", False):
        cfg.encoder.lora = OmegaConf.load(CONF / "lora/default.yaml")
    if getattr(get_class(LOSSES[loss]), "needs_negatives", True):
        message = (
            f"batch.docs: expected more than batch.positives={positives}, got {docs}; "
            "without negatives nothing is learnt"
        )
        with pytest.raises(ConfigError, match=f"^{message}$"):
            check(cfg)
        cfg.batch.docs = positives + 1
    check(cfg)


def test_which_losses_need_no_negatives():
    assert {name for name, target in LOSSES.items() if not getattr(get_class(target), "needs_negatives", True)} == {
        "bce", "mse", "pointwise_cross_entropy",
    }  # fmt: skip


def test_a_class_attribute_is_read_without_importing_its_file(tmp_path, monkeypatch):
    package = tmp_path / "newlosses"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "base.py").write_text("1 / 0\nclass Base:\n    needs_negatives = False\n")
    (package / "focal.py").write_text(
        "from newlosses.base import Base\n1 / 0\nclass Focal(Base):\n    pass\n"
        "class Other(Base):\n    needs_negatives: bool = True\n"
        "class Plain:\n    pairwise = False\n    training_keys = ('a', 'b')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert attribute_of("newlosses.focal.Focal", "needs_negatives", default=True) is False  # its base says so
    assert attribute_of("newlosses.focal.Other", "needs_negatives", default=False) is True
    assert attribute_of("newlosses.focal.Plain", "needs_negatives", default=True) is True
    assert attribute_of("newlosses.focal.Plain", "pairwise", default=True) is False
    assert attribute_of("newlosses.focal.Plain", "training_keys", default=()) == ("a", "b")
    with pytest.raises(LookupError):
        attribute_of("newlosses.nowhere.Focal", "needs_negatives")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss=dpo"], "loss: expected lora=default with loss=dpo, whose reference is the model without adapters; got"),
        (
            ["loss=reinforce", "model=dpr"],
            "loss: expected another loss than reinforce with in-batch negatives or with",
        ),
        (["loss=reinforce", "model=multitask"], "loss: expected another loss than reinforce with in-batch negatives"),
        (["loss=reinforce", "model=dpr", "model.in_batch_negatives=false"], None),
        (["loss=dpo", "lora=default"], None),
    ],
)
def test_losses_that_read_more_than_scores_and_labels(overrides, message):
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", ["name=checked", "encoder=tiny", *overrides])
    if message is None:
        check(cfg)
    else:
        with pytest.raises(ConfigError) as caught:
            check(cfg)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "training.lr: expected a number above 0, got 0.0"),
        ({"lr": float("nan")}, "training.lr: expected a number above 0, got nan"),
        ({"clip": 0.0}, "training.clip: expected a number above 0, got 0.0; set training.clip=.inf to clip nothing"),
        ({"lr_factor": 0.0}, "training.lr_factor: expected above 0 and at most 1, got 0.0; 1 keeps the rate"),
        ({"lr_factor": -0.5}, "training.lr_factor: expected above 0 and at most 1, got -0.5; 1 keeps the rate"),
        ({"patience": 0}, "training.patience: expected at least 1, got 0"),
    ],
)
def test_pc2_01_a_probe_s_numbers_have_no_value_that_stops_learning(options, message):
    with pytest.raises(ConfigError) as caught:
        TrainingOptions(**options)
    assert str(caught.value) == message
    assert TrainingOptions(clip=float("inf"), lr_factor=1.0).clip == float("inf")
