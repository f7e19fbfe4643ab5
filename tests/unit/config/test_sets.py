"""The sets of a mix in the configuration: composed from yaml files, checked like sources, stored and read again."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from ranker.cli import entry
from ranker.cli.overrides import quote_texts
from ranker.config.check import check
from ranker.config.paths import make_absolute
from ranker.config.sets import source_nodes
from ranker.config.stored import load_stored
from ranker.errors import ConfigError, DataError, errors_of

CONF = Path(__file__).resolve().parents[3] / "conf"
PAGE = (CONF.parent / "docs/data.md").read_text(encoding="utf-8")
TWO = ["data=mixed", "+data@data.sets.a=cwe", "+data@data.sets.b=rows"]


def composed(*overrides, command="train"):
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(command, [*(["encoder=tiny"] if command == "train" else []), "name=two", *overrides])


def faults(cfg):
    with pytest.raises(ConfigError) as caught:
        check(cfg)
    return str(caught.value).splitlines()


def test_the_yaml_of_the_page_composes_and_passes_the_check(tmp_path):
    (tmp_path / "data").mkdir()
    text = PAGE.split("```\ndefaults:\n  - mixed")[1].split("```")[0]
    (tmp_path / "data/two.yaml").write_text("defaults:\n  - mixed" + text)
    cfg = composed("data=two", f"hydra.searchpath=[file://{tmp_path}]")
    check(cfg)
    sets = OmegaConf.to_container(cfg.data.sets)
    assert list(sets) == ["labels", "taught"] and sets["labels"]["weight"] == 2 and cfg.data.temperature == 2
    assert sets["labels"]["_target_"].endswith(".CWE") and sets["labels"]["first_stage"] == {"min_word_chars": 2}
    assert sets["taught"]["loss"]["_target_"].endswith(".MSE") and sets["taught"]["cap"] == 5000


def test_keys_of_a_set_are_checked_as_those_of_a_source():
    cfg = composed(
        *TWO,
        "data.sets.a.split_seed=-1",
        "+data.sets.a.weight=-2",
        "+data.sets.b.cap=many",
        "+data.sets.b.max_pair_tokens=1",
        "+data.sets.b.teacher=none.trec",
        "+data.sets.b.random_negatives=true",
        "data.sets.b.drop_query_docs=perhaps",
    )
    assert faults(cfg) == [
        "data.sets.b.cap: expected int or null, got 'many'",
        "data.sets.a.split_seed: expected at least 0 and at most 4294967295, got -1",
        "data.sets.a.weight: expected at least 0, got -2",
        "data.sets.b.max_pair_tokens: expected at least 5, got 1",
        "data.sets.b.random_negatives: expected false beside data.sets.b.teacher, since random docs have no teacher's "
        "score",
        "data.sets.b.drop_query_docs: expected auto, true or false; got 'perhaps'",
        "data.sets.b.teacher: expected a file or folder, got 'none.trec', which does not exist",
    ]


def test_a_mix_in_a_mix_and_a_mix_for_a_single_set_are_refused():
    nested = composed(*TWO, "+data@data.sets.c=mixed")
    assert faults(nested) == ["data.sets.c._target_: expected a source, got another mix; add its sets to data.sets"]
    search = composed(*TWO, "checkpoint=.", command="search")
    assert faults(search) == ["data: expected a single set for this command, got a mix (a, b); choose another source"]
    for name in ("a", "b"):
        broken = composed(*TWO)
        broken.data.sets[name] = OmegaConf.create({"path": "x"})
        assert faults(broken)[0].startswith(f"data.sets.{name}._target_: expected the class or function to build")


def test_paths_and_texts_of_a_set_are_those_of_a_source(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").touch()
    cfg = composed("data=mixed", "+data@data.sets.a=files", "data.sets.a.path=here", "+data.sets.a.negatives=n.run",
                   "+data@data.sets.b=rows", "data.sets.b.train=rows.jsonl", "data.sets.b.val=ORG/NAME")  # fmt: skip
    make_absolute(cfg)
    assert cfg.data.sets.a.path == str(tmp_path / "here") and cfg.data.sets.a.negatives == str(tmp_path / "n.run")
    assert cfg.data.sets.b.train == str(tmp_path / "rows.jsonl") and cfg.data.sets.b.val == "ORG/NAME"
    given = ["+data.sets.a.teacher=1e3", "data.sets.a.split_seed=1"]
    assert quote_texts("train", given) == ["+data.sets.a.teacher='1e3'", "data.sets.a.split_seed=1"]


def test_a_stored_mix_is_read_and_may_name_no_other_targets(tmp_path):
    cfg = composed(*TWO, "data.sets.b.train=rows.jsonl", "+loss@data.sets.b.loss=mse")
    stored = tmp_path / "config.yaml"
    stored.write_text(OmegaConf.to_yaml(cfg, resolve=True))
    read = load_stored(stored)
    assert list(source_nodes(read)) == ["data.sets.a", "data.sets.b"]
    for key, target in (("_target_", "os.system"), ("loss._target_", "ranker.data.sources.cwe.CWE")):
        changed = read.copy()
        OmegaConf.update(changed, f"data.sets.b.{key}", target)
        stored.write_text(OmegaConf.to_yaml(changed))
        with pytest.raises(ConfigError, match=rf"data\.sets\.b\.{key}: expected a name that starts with"):
            load_stored(stored)


def test_errors_name_the_set():
    expected = r"^data\.sets\.a\.train: expected x in data\.csv; set data\.sets\.a\.train=F$"
    with pytest.raises(DataError, match=expected), errors_of("data.sets.a"):
        raise DataError("data.train: expected x in data.csv; set data.train=F")
    with pytest.raises(DataError, match=r"^data\.sets\.a: rows\.csv:1: broken$"), errors_of("data.sets.a"):
        raise DataError("rows.csv:1: broken")
    with pytest.raises(DataError, match=r"^data\.train: x$"), errors_of("data"):
        raise DataError("data.train: x")
