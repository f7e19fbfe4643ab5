"""A folder of somebody else is refused with one line, or does nothing but be read: docs/security.md."""

import shutil
import sys
import time

import pytest
import torch
from omegaconf import OmegaConf

from ranker.checkpoint import load_scorer, read_description
from ranker.commands.replay import replay
from ranker.config.check import check
from ranker.config.stored import load_stored
from ranker.encoders.loading import load_encoder
from ranker.errors import RankerError
from ranker.files.checksums import write_sums
from ranker.models.colbert import ColBERT
from ranker.models.dpr import DPR
from ranker.models.monobert import MonoBERT
from ranker.multitask.multitask import Multitask
from ranker.training.checkpoint_files import WholeFiles, to_resume_from
from tests.assets import hostile_folders as hostile


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Sound folders of each kind."""
    where = tmp_path_factory.mktemp("sound")
    made = {
        "monobert": MonoBERT, "dpr": lambda encoder: DPR(encoder, projection=4), "colbert": ColBERT,
        "multitask": lambda encoder: Multitask(encoder, heads=[{"task": "bm25"}]),
    }  # fmt: skip
    for name, make in made.items():
        make(load_encoder("tiny")).save(where / name, max_tokens=64)
    return {name: where / name for name in made}


@pytest.fixture
def site(tmp_path, models, monkeypatch):
    """A place to put a hostile folder; afterwards nothing outside of it has changed."""
    site = hostile.Site(tmp_path, models)
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return site


def refused(site, load, *arguments) -> str:
    """The one line that refuses the folder; whatever was tried has left no trace."""
    before, started = site.state(), time.monotonic()
    with pytest.raises(RankerError) as caught:
        load(*arguments)
    unharmed(site, before)
    assert time.monotonic() - started < 20
    for line in str(caught.value).split("\n"):
        assert ": " in line and len(line) < 1000
    return str(caught.value)


def unharmed(site, before) -> None:
    after = site.state()
    assert {path: content for path, content in after.items() if path in before} == before
    assert after.keys() == before.keys()
    assert not list((site.root / "cwd").iterdir())


def test_the_sound_ones_are_taken(site, models):
    (site.folder / "config.yaml").write_text(hostile.SOUND)
    assert read_description(site.folder)["encoder"]["name"] == "tiny"
    for folder in models.values():
        if folder.name != "multitask":  # ranker.yaml says which it is
            load_scorer(folder)


@pytest.mark.parametrize("trait", list(hostile.CONFIGURATIONS))
def test_a_stored_configuration(site, trait):
    text = hostile.configuration(site, trait)
    for name in ("config.yaml", "ranker.yaml"):
        folder = site.folder / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text(text)
        line = refused(site, read_description, folder)
        assert str(folder / name) in line
    if trait not in (
        "anchors",
        "great depth",
        "depth",
        "size",
        "half a file",
        "binary",
        "Python tag",
    ):  # no YAML, or too much of it
        shutil.rmtree(site.folder)
        dump = hostile.Site.__new__(hostile.Site)
        dump.__dict__.update(site.__dict__)
        site.folder.mkdir()
        folder = hostile.step(dump, "no fields")
        (folder / "config.yaml").write_text(text)
        refused(site, load_stored, folder / "config.yaml")


@pytest.mark.parametrize("trait", list(hostile.MODELS))
def test_a_model_folder(site, trait):
    folder = hostile.model(site, trait)
    if trait in hostile.HARMLESS:
        before = site.state()
        load_scorer(folder)
        unharmed(site, before)
        return
    if hostile.MODELS[trait][0] == "multitask":
        (folder / "ranker.yaml").write_text("model: {_target_: ranker.multitask.multitask.Multitask}\n")
    refused(site, load_scorer, folder)
    if hostile.MODELS[trait][0] == "monobert" and trait not in ("no trusted scorer", "no scorer at all"):
        refused(site, load_encoder, str(folder))  # as encoder.name


@pytest.mark.parametrize("trait", list(hostile.STEPS))
def test_a_step_to_repeat(site, trait):
    refused(site, replay, hostile.step(site, trait))


@pytest.mark.parametrize("link", [False, True])
def test_a_pickled_checkpoint(site, link):
    (site.folder / "config.yaml").write_text(hostile.SOUND)
    path = site.folder / "checkpoints/last.ckpt"
    path.parent.mkdir()
    target = site.outside / "last.ckpt" if link else path
    torch.save({"state_dict": hostile.Evil(site.touch), "callbacks": {}, "loops": {}}, target)
    if link:
        path.symlink_to(target)
    refused(site, load_scorer, site.folder, "last")
    refused(site, WholeFiles().load_checkpoint, to_resume_from(site.folder))


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("evil_package.inner", "model"),
        ("evil_package", "../.."),
        ("evil_package", "/"),
        (".evil", "model"),
        ("__main__", "x"),
    ],
)
def test_a_package_is_found_and_never_imported(site, monkeypatch, package, name):
    code = site.folder / "evil_package/inner"
    code.mkdir(parents=True)
    for part in (code, code.parent):
        (part / "__init__.py").write_text(f"import os\nos.system({site.touch!r})\n")
    monkeypatch.syspath_prepend(str(site.folder))
    refused(site, load_encoder, name, package)
    assert "evil_package" not in sys.modules


def test_what_a_run_s_own_files_say_is_checked_in_its_other_processes(site):
    """They read the run folder's config.yaml as Hydra's own, which has no typed root."""
    cfg = OmegaConf.create(hostile.SOUND + f"job_logging: {{{hostile.LOGGING}}}")
    assert "job_logging: unknown key" in refused(site, check, cfg)


def test_a_file_that_passed_the_check_is_checked_again_when_it_or_its_checksums_change(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("name: first\nseed: 1\n")
    write_sums(tmp_path, ["config.yaml"])
    cfg = load_stored(path)
    cfg.name = "changed by its reader"
    assert load_stored(path).name == "first"
    path.write_text("name: other\nseed: 1\n")  # as many bytes
    with pytest.raises(RankerError, match="expected CRC-32"):
        load_stored(path)
    write_sums(tmp_path, ["config.yaml"])
    assert load_stored(path).name == "other"
    path.write_text("nome: other\nseed: 1\n")
    with pytest.raises(RankerError, match="nome: unknown key"):
        load_stored(path)
    path.write_text("name: other\nseed: 1\n")
    sums = (tmp_path / "checksums.json").read_text()
    (tmp_path / "checksums.json").write_text(sums.replace('"crc32": ', '"crc32": 1'))
    with pytest.raises(RankerError, match="expected CRC-32"):
        load_stored(path)
