"""Learned state of a multitask step: a step that is not finite changes nothing; tasks without rows are reported."""

import logging
import math
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch.loggers.logger import DummyLogger
from omegaconf import OmegaConf
from torch.utils.data import DataLoader
from transformers import AlbertConfig, AlbertModel

from ranker.assembly.scorer import training_module
from ranker.cli import entry
from ranker.commands.replay import replay
from ranker.config.targets import constructor_keys
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import ConfigError, NonFinite
from ranker.multitask import module as multitask_module
from ranker.multitask.gradients import Gradients
from ranker.multitask.module import MultitaskModule
from ranker.multitask.multitask import Multitask
from ranker.multitask.options import TaskWeighting
from ranker.multitask.steps import HeadBatch, TaskBatch, TaskStep
from ranker.training.nonfinite import read_dump
from ranker.training.options import NonFiniteOptions, Optimization
from ranker.types import TokenBatch

ROOT = Path(__file__).resolve().parents[3]
LEARNED = ["uncertainty", "gradnorm"]


def composed(mode: str, *overrides: str, layers: tuple[int, int] = (1, 2)):
    entry.register()
    entries = (
        f"{{task: {task}, layer: {layer}, regression: true}}"
        for task, layer in zip(("bm25", "tf"), layers, strict=True)
    )
    heads = f"model.heads=[{', '.join(entries)}]"
    options = ["model=multitask", "name=x", "encoder=tiny", "seed=7", "trainer.accelerator=cpu", "loss=ranknet", heads]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(
            "train", [*options, f"model.weighting.mode={mode}", "model.weighting.surgery=pcgrad", *overrides]
        )


def step(index: int, label: float = 0.5) -> TaskStep:
    """A group of two docs and a row of the first task, of 4 tokens each."""
    generator = torch.Generator().manual_seed(index)
    pairs = TokenBatch(
        torch.randint(5, 60, (12,), generator=generator),
        torch.zeros(12, dtype=torch.int64),
        torch.arange(0, 13, 4, dtype=torch.int32),
        4,
    )
    read = HeadBatch(
        0, torch.arange(8, 12), torch.zeros(4, dtype=torch.int64), torch.tensor([4]), torch.tensor([label]), 1
    )
    labels, mask = torch.tensor([[1.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool)
    batch = TaskBatch(labels, mask, torch.tensor([0]), 1.0, pairs, heads=(read,), num_rank_rows=2, num_rank_tokens=8)
    return TaskStep(0, index, (batch,), 1, 3, rows=(2, 1, 0))


def module_of(cfg, fused: bool = False, nonfinite: NonFiniteOptions | None = None):
    torch.manual_seed(0)
    scorer = instantiate(
        constructor_keys("model", cfg.model), encoder=instantiate(constructor_keys("encoder", cfg.encoder))
    )
    return training_module(cfg)(
        scorer,
        [],
        loss=instantiate(cfg.loss),
        optimization=Optimization(
            lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=fused),
            lambda step, total: 1.0,
            total_steps=9,
            max_norm=cfg.trainer.gradient_clip_val,
            seed=7,
        ),
        nonfinite=nonfinite,
    )


def train(module, *steps: TaskStep, logger=False) -> dict[str, torch.Tensor]:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(module, train_dataloaders=DataLoader(list(steps), batch_size=None))
    return module.state_dict()


@pytest.mark.parametrize("mode", LEARNED)
@pytest.mark.parametrize("fused", [False, True])  # True: as on a GPU, where the host judges a step during the next one
def test_a_skipped_step_leaves_no_trace(mode, fused):
    cfg = composed(mode)
    skipping = module_of(cfg, fused, nonfinite=NonFiniteOptions("skip"))
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
    module = module_of(cfg, fused, nonfinite=NonFiniteOptions(folder=tmp_path / "nonfinite"))
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


@pytest.mark.parametrize(
    ("layers", "expected"),
    [((1, 2), "model.encoder.layer.0."), ((2, 2), "model.encoder.layer.1."), ((0, 2), "model.embeddings.")],
)
def test_gradnorm_looks_at_the_last_layer_that_all_tasks_reach(layers, expected):
    module = module_of(composed("gradnorm", layers=layers))
    gradients = Gradients(module, 3)
    # one number a parameter: its place among all, so that the norm tells which were looked at
    gradients.values[1] = torch.cat([torch.full((size,), float(place)) for place, size in enumerate(gradients.sizes)])
    looked_at = [place for place, name in enumerate(gradients.names) if name.startswith(f"scorer.encoder.{expected}")]
    assert (
        len(looked_at)
        == sum(1 for name, _ in module.scorer.encoder.named_parameters() if name.startswith(expected))
        > 0
    )
    squares = sum(place**2 * gradients.sizes[place] for place in looked_at)
    assert gradients.norms(module._shared_layer).tolist() == pytest.approx([0, squares**0.5, 0])


def test_gradnorm_is_refused_for_an_encoder_whose_layers_have_no_parameters_of_their_own():
    config = AlbertConfig(
        vocab_size=60,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    encoder = Encoder(AlbertModel(config, add_pooling_layer=False), tiny_tokenizer(), Execution(ragged=False))
    scorer = Multitask(encoder, heads=[{"task": "bm25", "layer": 1}])
    options = {"loss": None, "optimization": Optimization(total_steps=9, seed=7)}
    said = (
        "model.weighting.mode: expected trained parameters in the last layer that all tasks share for gradnorm, got "
        "none that match .* in AlbertModel;"
    )
    with pytest.raises(ConfigError, match=said):
        MultitaskModule(scorer, [], weighting=TaskWeighting(mode="gradnorm"), **options)
    MultitaskModule(scorer, [], weighting=TaskWeighting(), **options)


class Kept(DummyLogger):
    """Keeps what is logged at each step."""

    def __init__(self):
        super().__init__()
        self.metrics = []

    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, metrics))


def alone(made: TaskStep, ranking: bool) -> TaskStep:
    """The step with ranking's rows or the task's only."""
    (batch,) = made.micro_batches
    if ranking:
        pairs = batch.rank_pairs
        return replace(made, micro_batches=(replace(batch, pairs=pairs, heads=()),), rows=(2, 0, 0))
    pairs = TokenBatch(batch.pairs.tokens[8:], batch.pairs.segments[8:], batch.pairs.cu_seqlens[:2], 4)
    heads = (replace(batch.heads[0], tokens=batch.heads[0].tokens - 8),)
    return replace(
        made,
        micro_batches=(replace(batch, pairs=pairs, heads=heads, num_rank_rows=0, num_rank_tokens=0),),
        rows=(0, 1, 0),
    )


def test_the_logged_cosine_by_hand_and_only_where_a_step_has_both(monkeypatch):
    cfg = composed("log_k", "model.weighting.surgery=none", "model.weighting.cosine_every=1")
    made, rows_kept = step(0), []
    plain = module_of(cfg).scorer
    (batch,) = made.micro_batches
    # RankNet's loss of one pair is ln(1 + exp(s2 - s1)); the task's is the squared error of 0.5
    scores, (outputs,) = plain.outputs(batch)
    losses = torch.log1p(torch.exp(scores[0, 1] - scores[0, 0])), (outputs[0, 0] - 0.5) ** 2
    model = plain.encoder.model
    reached = [*model.embeddings.parameters(), *model.encoder.layer[0].parameters()]  # the head reads layer 1
    one, other = (
        torch.cat([part.flatten() for part in torch.autograd.grad(loss, reached, retain_graph=True)]) for loss in losses
    )
    expected = torch.nn.functional.cosine_similarity(one, other, dim=0).item()
    assert 0.001 < abs(expected) < 0.999

    class Watched(Gradients):
        def __init__(self, module, num_tasks):
            rows_kept.append(num_tasks)
            super().__init__(module, num_tasks)

    monkeypatch.setattr(multitask_module, "Gradients", Watched)
    logger = Kept()
    train(
        module_of(cfg),
        made,
        replace(alone(step(1), True), index=1),
        replace(alone(step(2), False), index=2),
        logger=logger,
    )
    logged = {
        number: metrics for number, metrics in logger.metrics if any(key.startswith("train/loss/") for key in metrics)
    }
    assert logged[0]["cosine/bm25"] == pytest.approx(expected, abs=1e-5)
    assert logged[0]["train/loss/bm25"] == pytest.approx(losses[1].item(), abs=1e-6)
    assert [sorted(key for key in logged[number] if key != "epoch") for number in range(3)] == [
        ["cosine/bm25", "train/loss/bm25", "train/loss/ranking"], ["train/loss/ranking"], ["train/loss/bm25"],
    ]  # fmt: skip
    assert rows_kept == [3, 1, 1]  # steps of one task keep one gradient, not one a task
