"""Text keys take what was typed on the command line, and a run file's name becomes a tag."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from ranker.cli import entry
from ranker.cli.overrides import quote_texts, takes_text
from ranker.commands.evaluate import run_name
from ranker.config.check import check
from ranker.config.roots import ROOTS
from ranker.config.text_keys import text_keys
from ranker.errors import ConfigError

CONF = Path(__file__).resolve().parents[3] / "conf"
TYPED = ["007", "1e3", "1_000", "-5", "+1", "0x10", "1.50", "inf", "nan", "true", "False", "12", ".5"]


def composed(root: str, *overrides: str):
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(root, quote_texts(root, list(overrides)))


@pytest.mark.parametrize("typed", TYPED)
def test_hydra_reads_a_quoted_text_as_it_was_typed(typed):
    (override,) = quote_texts("train", [f"name={typed}"])
    assert OverridesParser.create().parse_override(override).value() == typed


@pytest.mark.parametrize("typed", ["/home/Zoë/a b", "ё", "論文", "e\u0301", "\u00a0x\u00a0", "q@ü#1", "😀"])
@pytest.mark.parametrize("key", ["name", "data.path", "hydra.run.dir", "+data.unknown"])
def test_letters_of_every_script_need_no_quotes(key, typed):
    (override,) = quote_texts("train", [f"{key}={typed}"])
    assert OverridesParser.create().parse_override(override).value() == typed
    (several,) = quote_texts("train", [f"{key}={typed},b"])
    assert [*OverridesParser.create().parse_override(several).sweep_string_iterator()] == [f"'{typed}'", "b"]


@pytest.mark.parametrize("root", list(ROOTS))
def test_every_text_key_of_a_root_takes_what_was_typed(root):
    cfg = composed(root, *(f"{key}=1e3" for key in text_keys(ROOTS[root])))
    assert {OmegaConf.select(cfg, key) for key in text_keys(ROOTS[root])} == {"1e3"}


def test_text_keys_of_groups_take_what_was_typed():
    keys = [
        "data.path",
        "data.candidates",
        "data.negatives",
        "data.teacher",
        "encoder.name",
        "encoder.package",
        "logger.project",
        "callbacks.early_stopping.monitor",
        "model.query_prompt",
    ]
    groups = ["name=x", "data=files", "logger=wandb", "callbacks=early_stopping", "model=dpr"]
    cfg = composed("train", *groups, *(f"{key}=1e3" for key in keys))
    assert [OmegaConf.select(cfg, key) for key in keys] == ["1e3"] * len(keys)
    assert composed("train", "name=x", "data=ir_datasets", "data.test=[1e3,true,a]").data.test == ["1e3", "true", "a"]


def test_numbers_stay_numbers_and_other_texts_as_they_are():
    same = [
        "optim.lr=1e3",
        "seed=7",
        "trainer.devices=2",
        "data.relevance=2",
        "encoder.layers=1",
        "encoder.compile=true",
        "model.num_labels=2",
        "name=word",
        "name='1e3'",
        'name="7"',
        "name=null",
        "name=${seed}",
        "-m",
        "--multirun",
        "~data.path",
        "loss=lce,bce",
        "hydra.verbose=true",
        'name="ü"',
        "name=[ü,'ä']",
        "name=a=ü",
        "~name=ü",
    ]
    assert quote_texts("train", same) == same
    assert quote_texts("train", ["+name=7", "name=1_0,1e3,a", "data.path=1e3"]) == [
        "+name='7'",
        "name='1_0','1e3',a",
        "data.path='1e3'",
    ]
    assert (
        takes_text("probe", "probe.fact.path")
        and not takes_text("train", "optim.lr")
        and not takes_text("train", "nowhere.path")
    )


def test_a_number_for_a_text_in_a_yaml_asks_for_quotes(tmp_path):
    (tmp_path / "local").mkdir()
    (tmp_path / "local/mine.yaml").write_text("# @package _global_\nname: 007\ndata: {path: 1e3}\n")
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", ["data=files", f"hydra.searchpath=[file://{tmp_path}]", "+local@_global_=mine"])
    with pytest.raises(ConfigError) as caught:
        check(cfg)
    assert str(caught.value).split("\n") == [
        "data.path: expected str, got 1000.0; put it in quotes", "name: expected text, got 7; put it in quotes",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("my run.trec", "my_run"),
        (".run", "run"),
        (".hidden.run.gz", "hidden"),
        ("a.b.run", "a.b"),
        ("...", "run"),
        ("x\u00a0y.run", "x_y"),
    ],
)
def test_a_run_s_file_name_becomes_a_tag(file, name):
    assert run_name(Path("folder") / file) == name
