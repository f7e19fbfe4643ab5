"""`callbacks=last_k`: the stored weights are the mean of the last k kept ones, also after a resume."""

import logging
import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ranker.assembly.run import quiet_libraries
from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs
from ranker.errors import ConfigError
from ranker.training.ema import EMA
from ranker.training.last_k import LastK
from ranker.training.rerank_module import RerankModule
from ranker.training.validation import measures_of_run


class Plain(pl.LightningModule):
    """Two weights that each step moves by the step's number."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.validated = {}

    def training_step(self, batch, index):
        return (self.weight * -(self.trainer.global_step + 1.0)).sum()

    def validation_step(self, batch, index):
        self.validated[self.trainer.global_step] = float(self.weight[0].detach())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(module, steps, folder, ckpt=None):
    callback = LastK(k=2, every_n_steps=2)
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback], val_check_interval=1, num_sanity_val_steps=0,
    )  # fmt: skip
    loader = DataLoader(torch.arange(7), batch_size=None)
    trainer.fit(module, loader, DataLoader(torch.zeros(1), batch_size=None), ckpt_path=ckpt, weights_only=True)
    trainer.save_checkpoint(folder / f"{steps}.ckpt")
    return module


def test_the_mean_of_the_last_kept_weights(tmp_path):
    module = fit(Plain(), 7, tmp_path)
    # weights after steps 1 to 7: 1, 3, 6, 10, 15, 21, 28; kept after steps 2, 4 and 6
    assert module.validated == {1: 1.0, 2: 3.0, 3: 3.0, 4: 6.5, 5: 6.5, 6: 15.5, 7: 15.5}
    assert module.weight.tolist() == [15.5, 15.5]


def test_a_resumed_training_has_the_same_mean(tmp_path):
    fit(Plain(), 5, tmp_path)
    stored = torch.load(tmp_path / "5.ckpt", weights_only=True)
    assert stored["state_dict"]["weight"].tolist() == [6.5, 6.5]
    # `fit` has ended, so the trained weights are the mean; a checkpoint during the training has both
    stored["current_model_state"]["weight"].fill_(15.0)
    torch.save(stored, tmp_path / "5.ckpt")
    module = fit(Plain(), 7, tmp_path, tmp_path / "5.ckpt")
    assert module.validated == {6: 15.5, 7: 15.5}


def test_values_out_of_range():
    with pytest.raises(ConfigError, match=r"callbacks\.last_k\.k: expected at least 1, got 0"):
        LastK(k=0)


@pytest.mark.parametrize("callback", [LastK(), EMA()])
def test_a_mean_of_weights_warns_of_nothing(callback):
    module = RerankModule(nn.Linear(1, 1), ["nDCG@10"])
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    module.trainer = trainer
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_libraries()
        callback.setup(trainer, module, "fit")
    assert [str(warning.message) for warning in caught] == []


@pytest.mark.parametrize(("scores", "warned"), [([1.0, 1.0 + 1e-9], True), ([1.0, 1.1], False)])
def test_equal_scores_of_a_validation_are_said(caplog, scores, warned):
    docs = MemoryDocs(Doc(name, name) for name in ("a", "b"))
    qrels = {"q": {"a": 1}, "p": {"b": 1}}
    run = {"q": dict(zip("ab", scores, strict=True)), "p": {"b": 0.0}}
    collection = Collection("one", docs, {"q": "q", "p": "p"}, qrels, Candidates.from_run(run))
    with caplog.at_level(logging.WARNING):
        measures_of_run(run, collection, ["nDCG@10"], step=7)
    assert ("validation at step 7: all candidates of each query have the same score" in caplog.text) == warned
