"""Files are data: they cannot name code outside the trusted packages, bring code along, or leave their folder."""

import ast
import json
import math
import os
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

from ranker.checkpoint import load_scorer, read_description
from ranker.commands.replay import replay
from ranker.config.check import check
from ranker.config.targets import is_trusted
from ranker.errors import CheckpointError, ConfigError, DataError
from ranker.training.nonfinite import write_dump
from ranker.training.options import NonFiniteOptions
from ranker.training.rerank_module import RerankModule
from ranker.types import TrainStep

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("path", "target", "trusted"),
    [
        ("model", "ranker.models.monobert.MonoBERT", True),
        ("model", "ranker.retrieval.bm25.BM25", True),
        ("model.sampling", "ranker.multitask.options.TaskSampling", True),
        ("model.head", "torch.nn.Identity", True),
        ("encoder", "ranker.encoders.loading.load_encoder", True),
        ("optim", "torch.optim.AdamW", True),
        ("callbacks.early_stopping", "lightning.pytorch.callbacks.EarlyStopping", True),
        ("callbacks.prune", "ranker.training.pruning.Prune", True),
        ("logger", "lightning.pytorch.loggers.CSVLogger", True),
        ("model", "os.system", False),
        ("loss", "builtins.eval", False),
        ("loss", "torch.hub.load", False),  # downloads code and runs it
        ("encoder", "torch.utils.cpp_extension.load", False),
        ("encoder", "torch.load", False),
        ("data", "ranker.training.run_writer.write_text", False),  # writes any file
        (
            "data",
            "ranker.data.sources.files.read_qrels",
            False,
        ),  # what a trusted module imports, from the same package or another
        ("model", "ranker.models.dpr.sentence_transformers.write_dense", False),
        ("model", "ranker.export.huggingface.write", False),
        ("loss", "ranker.losses.lce.nn.Module", False),
        ("optim", "torch.optim.optimizer.torch.hub.load", False),
        ("optim", "torch.nn.modules.module.torch.hub.load", False),
        ("loss", "ranker.models.monobert.MonoBERT", False),  # another group's
        ("data", "lightning.pytorch.loggers.WandbLogger", False),
        ("encoder", "ranker.encoders.loading.load_encoder_too", False),
        ("model", "rankerx.models.Anything", False),
        ("", "ranker.models.monobert.MonoBERT", False),
        ("model", "ranker", False),
    ],
)
def test_what_a_target_may_name(path, target, trusted):
    assert is_trusted(target, path) == trusted


@pytest.mark.parametrize(
    "content",
    [
        {"model": {"_target_": "os.system", "command": "touch ran"}},
        {"encoder": {"_target_": "ranker.encoders.loading.load_encoder", "inner": [{"_target_": "builtins.exec"}]}},
        {"callbacks": [{"_target_": "ranker.cli.entry.os.system"}]},
        {"data": {"_target_": "ranker.training.run_writer.write_text", "path": "ran", "text": ""}},
    ],
)
def test_a_folder_s_configuration_is_checked_also_in_lists(tmp_path, content):
    for name in ("config.yaml", "ranker.yaml"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text(OmegaConf.to_yaml(OmegaConf.create(content)))
        with pytest.raises(ConfigError, match=r"_target_: expected a name that starts with .* and is defined there"):
            read_description(folder)
    with pytest.raises(ConfigError, match="_target_: expected a name that starts with"):
        check(OmegaConf.create(content))


@pytest.mark.parametrize(
    "content",
    [
        "model: ${oc.create:{_target_:torch.hub.load,repo_or_dir:evil}}",
        "model: {heads: ['${oc.env:HOME}']}",
        "{name: a, copied: '${name}'}",
    ],
)
def test_a_folder_s_configuration_resolves_nothing(tmp_path, content):
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(
        ConfigError, match=r"config\.yaml: (model|model\.heads\.0|copied): expected a plain value.*got '\$\{"
    ) as caught:
        read_description(tmp_path)
    assert "\n" not in str(caught.value)


def test_replay_trusts_no_code_beside_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    evil, marker = remote_code(tmp_path / "model", tmp_path / "ran"), tmp_path / "ran"
    cfg = {
        "encoder": {"_target_": "ranker.encoders.loading.load_encoder", "name": str(evil), "trust_remote_code": True},
        "model": {"_target_": "ranker.models.monobert.MonoBERT"}, "loss": {"_target_": "ranker.losses.lce.LCE"},
        "optim": {"_target_": "torch.optim.AdamW"}, "schedule": {"_target_": "ranker.training.schedules.constant"},
        "trainer": {"max_epochs": 1},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(cfg)))
    module = RerankModule(torch.nn.Linear(1, 1), [], nonfinite=NonFiniteOptions(folder=tmp_path / "nonfinite"))
    module.trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    write_dump(module, TrainStep(0, 0, (), 1, 1), 1, math.nan, math.nan, ["q"])
    with pytest.raises((InstantiationException, ConfigError), match="code of its own"):
        replay(tmp_path / "nonfinite/step-1")
    assert not marker.exists()


def test_a_folder_can_not_ask_for_its_own_code(tmp_path):
    (tmp_path / "ranker.yaml").write_text(
        "encoder: {_target_: ranker.encoders.loading.load_encoder, name: x, trust_remote_code: true}"
    )
    assert read_description(tmp_path)["encoder"]["trust_remote_code"] is False


def remote_code(folder: Path, marker: Path) -> Path:
    """A model folder that brings code along, as the hub allows."""
    from ranker.encoders.loading import load_encoder

    encoder = load_encoder("tiny")
    encoder.model.save_pretrained(folder)
    encoder.tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    return folder


def test_code_beside_weights_does_not_run(tmp_path, monkeypatch):
    from ranker.encoders.loading import load_encoder

    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = remote_code(tmp_path / "model", tmp_path / "ran"), tmp_path / "ran"
    with pytest.raises((ConfigError, CheckpointError, DataError)):
        load_encoder(str(folder))
    with pytest.raises((ValueError, CheckpointError, ConfigError), match="code of its own"):
        load_scorer(folder)
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
                {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            ]
        )
    )
    with pytest.raises((ValueError, CheckpointError, ConfigError), match="code of its own"):
        load_scorer(folder)
    assert not marker.exists()


@pytest.mark.parametrize("path", ["../outside", "/etc", "1_Pooling/../../outside"])
def test_a_model_folder_s_files_stay_inside(tmp_path, path):
    from ranker.export._modules import read_modules

    kinds = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Dense"]
    entries = [{"idx": i, "name": str(i), "path": ["", path][i], "type": kind} for i, kind in enumerate(kinds)]
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(CheckpointError, match="stay inside it"):
        read_modules(tmp_path)


def test_a_pickle_in_a_model_folder_does_not_run(tmp_path):
    from ranker.export._module_weights import read_dense
    from ranker.export._modules import StoredModule

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    (tmp_path / "config.json").write_text(json.dumps({"activation_function": "torch.nn.modules.linear.Identity"}))
    torch.save({"linear.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"weights_only|Weights only|Unsupported"):
        read_dense(StoredModule("Dense", tmp_path))
    assert not (tmp_path / "ran").exists()


# False, or what the user said in this command
TRUST = ("False", "trust_remote_code", "trusted", "execution.trust_remote_code", "encoder.execution.trust_remote_code")


def test_arrays_are_never_unpickled_and_nobody_trusts_by_default():
    for path in sorted((ROOT / "ranker").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            name = ast.unparse(node.func)
            if name in ("np.load", "numpy.load"):
                assert keywords.get("allow_pickle") == "False", path
            if name.endswith(".from_pretrained") and name.startswith("Auto"):
                assert keywords.get("trust_remote_code") in TRUST, f"{path}: {name}"
    assert "trust_remote_code: false" in (ROOT / "conf/encoder/_shared.yaml").read_text()
