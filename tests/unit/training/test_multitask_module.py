"""What a multitask step learns beside its gradients: nothing of a step that is not finite; tasks that an epoch leaves out are named."""

import logging
import math
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from ranker import entry
from ranker.build import training_module
from ranker.config import constructor_keys
from ranker.data.task_steps import HeadBatch, TaskBatch, TaskStep
from ranker.errors import NonFinite
from ranker.replay import replay
from ranker.training.nonfinite import read_dump
from ranker.types import TokenBatch

ROOT = Path(__file__).resolve().parents[3]
LEARNED = ["uncertainty", "gradnorm"]


def composed(mode: str):
    entry.register()
    heads = "model.heads=[{task: bm25, layer: 1, regression: true}, {task: tf, layer: 2, regression: true}]"
    options = ["model=multitask", "name=x", "encoder=tiny", "seed=7", "trainer.accelerator=cpu", "loss=ranknet", heads]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("train", [*options, f"model.weighting.mode={mode}", "model.weighting.surgery=pcgrad"])


def step(index: int, label: float = 0.5) -> TaskStep:
    """A group of two docs and a row of the first task, of 4 tokens each."""
    generator = torch.Generator().manual_seed(index)
    pairs = TokenBatch(
        torch.randint(5, 60, (12,), generator=generator), torch.zeros(12, dtype=torch.int64), torch.arange(0, 13, 4, dtype=torch.int32), 4
    )
    read = HeadBatch(0, torch.arange(8, 12), torch.zeros(4, dtype=torch.int64), torch.tensor([4]), torch.tensor([label]), 1)
    labels, mask = torch.tensor([[1.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool)
    batch = TaskBatch(labels, mask, torch.tensor([0]), 1.0, pairs, heads=(read,), num_rank_rows=2, num_rank_tokens=8)
    return TaskStep(0, index, (batch,), 1, 3, rows=(2, 1, 0))


def module_of(cfg, fused: bool = False, **options):
    torch.manual_seed(0)
    scorer = instantiate(constructor_keys("model", cfg.model), encoder=instantiate(constructor_keys("encoder", cfg.encoder)))
    return training_module(cfg)(
        scorer, [], loss=instantiate(cfg.loss), optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=fused),
        schedule=lambda step, total: 1.0, total_steps=9, max_norm=cfg.trainer.gradient_clip_val, seed=7, **options,
    )  # fmt: skip


def train(module, *steps: TaskStep) -> dict[str, torch.Tensor]:
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, train_dataloaders=DataLoader(list(steps), batch_size=None))
    return module.state_dict()


@pytest.mark.parametrize("mode", LEARNED)
@pytest.mark.parametrize("fused", [False, True])  # True: as on a GPU, where the host judges a step during the next one
def test_a_skipped_step_leaves_no_trace(mode, fused):
    cfg = composed(mode)
    skipping = module_of(cfg, fused, nonfinite="skip")
    got = train(skipping, step(0), step(1, math.inf), step(2))
    expected = train(module_of(cfg, fused), step(0), step(2))
    assert skipping.skipped_steps == 1
    assert expected["rows_seen"].tolist() == [4, 2, 0]
    learned = expected["weights.log_variance" if mode == "uncertainty" else "weights.learned"]
    assert len(learned.unique()) > 1  # it moves
    assert all(torch.equal(got[name], value) for name, value in expected.items())


@pytest.mark.parametrize("fused", [False, True])
def test_the_weights_before_a_step_are_written_down_and_it_is_repeated(tmp_path, fused):
    cfg = composed("gradnorm")
    OmegaConf.save(cfg, tmp_path / "config.yaml", resolve=True)
    module = module_of(cfg, fused, dumps=tmp_path / "nonfinite")
    with pytest.raises(NonFinite) as raised:
        train(module, step(0), step(1, math.inf), step(2))
    _, weights, about = read_dump(tmp_path / "nonfinite" / "step-1")
    before = train(module_of(cfg, fused), step(0))
    assert all(torch.equal(value, before[name]) for name, value in weights.items() if name != "rows_before")
    assert about["loss"] == str(raised.value.loss) == "inf"
    loss, norm = replay(tmp_path / "nonfinite" / "step-1")
    assert (str(loss), str(norm)) == (about["loss"], about["grad_norm"])


def test_pc55_a_head_that_learns_nothing_in_an_epoch_is_named(caplog):
    with caplog.at_level(logging.WARNING, logger="ranker"):
        train(module_of(composed("log_k")), step(0))
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("ranker")]
    assert said.startswith("epoch 0: expected rows of every task, got none of tf, so that its head learned nothing;")
