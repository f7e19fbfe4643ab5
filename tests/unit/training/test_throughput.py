"""The throughput report: figures by hand."""

from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, BertModel

from ranker.training import throughput
from ranker.training.throughput import WARM_UP, Throughput, matmul_flops
from ranker.types import RankBatch, TokenBatch, TrainStep


def step_of(*lengths: int) -> TrainStep:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    pairs = TokenBatch(torch.zeros(sum(lengths), dtype=torch.long), torch.zeros(sum(lengths), dtype=torch.long), cu_seqlens, max(lengths))
    batch = RankBatch(torch.zeros(1, len(lengths)), torch.ones(1, len(lengths), dtype=torch.bool), torch.zeros(1), 1.0, pairs=pairs)
    return TrainStep(0, 0, (batch,), 1, len(lengths))


class Module:
    """As much of a module as the callback reads."""

    device = torch.device("cpu")

    def __init__(self, computed) -> None:
        self.scorer = SimpleNamespace(encoder=SimpleNamespace(config=BertConfig(), computed_tokens=computed))
        self.logged = {}

    def log(self, name, value, prog_bar) -> None:
        self.logged[name] = value


def run(monkeypatch, steps, clock, computed=lambda texts: texts.num_tokens * 2):
    ticks = iter(clock)
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(ticks))
    callback, module, trainer = Throughput(), Module(computed), SimpleNamespace(world_size=2, log_every_n_steps=1000)
    callback.on_train_start(trainer, module)
    for i, step in enumerate(steps, start=1):
        callback.on_train_batch_start(trainer, module, step, i)
        callback.on_train_batch_end(trainer, module, None, step, i)
    return callback


def test_rates_by_hand_and_the_first_steps_apart(monkeypatch):
    # start, counted, noted; the first steps take 10 s each, the last two 1 s after 0.25 s of waiting
    clock = [t for i in range(WARM_UP) for t in (10 * i, 10 * i + 10, 10 * i + 10)]
    end = clock[-1]
    clock += [end + 0.25, end + 1.25, end + 1.25, end + 1.5, end + 2.5, end + 2.5]
    report = run(monkeypatch, [step_of(3, 5)] * (WARM_UP + 2), clock).report()
    assert report["start_seconds"] == pytest.approx(10 * WARM_UP)
    assert report["pairs_per_second"] == pytest.approx(4 / 2.5)
    assert report["tokens_per_second"] == pytest.approx(2 * 16 / 2.5)  # two devices
    assert report["padding_share"] == pytest.approx(0.5)
    assert report["data_wait_share"] == pytest.approx(0.5 / 2.5)
    assert "mfu" not in report  # no card


def test_a_short_training_is_all_start(monkeypatch):
    report = run(monkeypatch, [step_of(4)], [0.0, 2.0, 2.0]).report()
    assert report["pairs_per_second"] == pytest.approx(0.5)
    assert report["train_seconds"] == pytest.approx(2.0)


def test_flops_equal_torchs_own_count():
    from torch.utils.flop_counter import FlopCounterMode

    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=40)
    model = BertModel(config, add_pooling_layer=False)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(2, 7, dtype=torch.long))
    assert matmul_flops(config, tokens=14, squares=2 * 49.0) == counter.get_total_flops()


def test_the_mean_share_of_the_cards_rate(monkeypatch):
    callback = run(monkeypatch, [step_of(4)], [0.0, 2.0, 2.0])
    callback.matmul_rate = 1e9
    flops = 3 * matmul_flops(BertConfig(), 8, 32.0)  # two devices
    assert callback.report()["mfu"] == pytest.approx(flops / 2.0 / 1e9)
