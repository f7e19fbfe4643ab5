"""The throughput report: figures by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, BertModel

from ranker.encoders.loading import load_encoder
from ranker.encoders.tiny import tiny_config
from ranker.training import throughput
from ranker.training.flops import linear_weights, matmul_flops, transformers_flops
from ranker.training.throughput import WARM_UP, Throughput
from ranker.types import RankBatch, TokenBatch, TrainStep


def step_of(*lengths: int) -> TrainStep:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    pairs = TokenBatch(
        torch.zeros(sum(lengths), dtype=torch.long),
        torch.zeros(sum(lengths), dtype=torch.long),
        cu_seqlens,
        max(lengths),
    )
    batch = RankBatch(
        torch.zeros(1, len(lengths)), torch.ones(1, len(lengths), dtype=torch.bool), torch.zeros(1), 1.0, pairs=pairs
    )
    return TrainStep(0, 0, (batch,), 1, len(lengths))


class Module(torch.nn.Module):
    """As much of a module as the callback reads, around a real encoder."""

    device = torch.device("cpu")

    def __init__(self, read, **options) -> None:
        super().__init__()
        self.scorer = torch.nn.Module()
        self.scorer.encoder = load_encoder("tiny", attention_dropout=0.0, **options)
        self.read, self.logged, self.shown = read, {}, {}

    def log(self, name, value) -> None:
        self.logged[name] = value

    def train_on(self, step: TrainStep) -> None:
        for batch in step.micro_batches:
            self.read(self.scorer.encoder, batch.pairs)


def run(monkeypatch, steps, clock, read=lambda encoder, texts: encoder(texts), **options):
    ticks = iter(clock)
    callback, module = Throughput(), Module(read, **options)
    loader = SimpleNamespace(waited=0.0)
    trainer = SimpleNamespace(world_size=2, log_every_n_steps=1000, train_dataloader=loader)
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(ticks))
    module.train_on(steps[0])  # what is computed before the training is not counted
    callback.on_train_start(trainer, module)
    callback.on_train_epoch_start(trainer, module)
    for i, step in enumerate(steps, start=1):
        loader.waited += 0.25
        module.train_on(step)
        callback.on_train_batch_end(trainer, module, None, step, i)
    return callback


def test_rates_by_hand_and_the_first_steps_apart(monkeypatch):
    # the first steps take 10 s each, the last two 1.25 s, of which 0.25 s are waiting in the loader
    clock = [10 * i for i in range(WARM_UP + 1)]
    clock += [clock[-1] + 1.25, clock[-1] + 2.5]
    report = run(monkeypatch, [step_of(4, 5)] * (WARM_UP + 2), clock, ragged=False).report()
    assert report["start_seconds"] == pytest.approx(10 * WARM_UP)
    assert report["pairs_per_second"] == pytest.approx(4 / 2.5)
    assert report["tokens_per_second"] == pytest.approx(2 * 18 / 2.5)  # two devices
    assert report["padding_share"] == pytest.approx(1 - 9 / 10)  # a row of 4 beside one of 5
    assert report["data_wait_share"] == pytest.approx(0.5 / 2.5)
    assert "mfu" not in report  # no card


def test_a_short_training_is_all_start(monkeypatch):
    report = run(monkeypatch, [step_of(4)], [0.0, 2.0]).report()
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


QWEN = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
QWEN |= {"num_key_value_heads": 2, "intermediate_size": 128, "pad_token_id": 0}
# a layer by hand: queries and output 64 x 64, keys and values 64 x 32, gate, up and down 64 x 128
QWEN_WEIGHTS = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)


def test_grouped_heads_and_a_gate_by_hand_and_by_torchs_own_count():
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen3Config, Qwen3Model

    model = Qwen3Model(Qwen3Config(**QWEN))
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 7, dtype=torch.long), use_cache=False).last_hidden_state.sum().backward()
    weights = linear_weights(model)
    assert (weights.trained, weights.frozen, weights.causal) == (QWEN_WEIGHTS, 0, True)
    # eager attention also computes the pairs that the mask hides
    whole = transformers_flops(model.config, replace(weights, causal=False), 14, 2 * 49.0, 0.0)
    rotary = counter.get_total_flops() - whole
    assert 0 <= rotary < 0.001 * whole
    # 2 rows x 7 x 8 / 2 pairs, 2 layers, 12 operations for each of 4 heads x 16
    expected = 6.0 * QWEN_WEIGHTS * 14 + 12 * 64 * 2 * 56
    assert transformers_flops(model.config, weights, 14, 2 * 49.0, 0.0) == expected


def test_adapters_cost_six_operations_and_the_frozen_base_four():
    pytest.importorskip("peft")
    from transformers import Qwen3Config, Qwen3Model

    from ranker.encoders.lora import LoRA, add_adapter

    model = Qwen3Model(Qwen3Config(**QWEN))
    add_adapter(model, LoRA(rank=2))
    weights = linear_weights(model)
    rank_two = 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))  # of a layer
    assert (weights.trained, weights.frozen) == (2 * rank_two, QWEN_WEIGHTS)
    attention = 12 * 64 * 2 * 28
    assert transformers_flops(model.config, weights, 7, 49.0, 0.0) == 7 * (12 * rank_two + 4 * QWEN_WEIGHTS) + attention


def test_experts_that_a_token_visits_and_albert_s_shared_layer():
    from transformers import AlbertConfig, AlbertModel, Qwen3MoeConfig, Qwen3MoeModel

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    router, attention = 64 * 4, 2 * 64 * 64 + 2 * 64 * 32
    model = Qwen3MoeModel(Qwen3MoeConfig(**QWEN, **experts))
    assert linear_weights(model).trained == 2 * (attention + 2 * 3 * 64 * 32 + router * linear_router(model))
    sizes = {"hidden_size": 16, "embedding_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = AlbertModel(AlbertConfig(vocab_size=50, intermediate_size=40, **sizes))
    assert linear_weights(model).trained == 8 * 16 + 3 * (4 * 16 * 16 + 2 * 16 * 40)


def linear_router(model) -> int:
    """1 if the router is a linear layer in this version of transformers, else 0."""
    return int(
        any(name.endswith(".gate") and isinstance(part, torch.nn.Linear) for name, part in model.named_modules())
    )


def test_what_the_last_layer_is_spared_counts_nothing(monkeypatch):
    callback = run(monkeypatch, [step_of(4, 2)], [0.0, 2.0], read=lambda encoder, texts: encoder.pooled(texts, "cls"))
    callback.matmul_rate = 1e9
    flops = 3 * matmul_flops(tiny_config(), 12, 40.0, last_layer_tokens=4)  # two devices
    assert callback.report()["mfu"] == pytest.approx(flops / 2.0 / 1e9)


def test_micro_batches_of_one_step_count_each_by_its_own_path(monkeypatch):
    long, short = (step_of(*lengths).micro_batches[0] for lengths in ((4, 2), (3,)))
    step = TrainStep(0, 0, (long, short), 2, 3)
    read = lambda encoder, texts: encoder(texts) if texts.num_rows == 2 else encoder.pooled(texts, "cls")  # noqa: E731
    callback = run(monkeypatch, [step], [0.0, 2.0], read)
    assert callback.counts.last_layer_tokens == 2 * (6 + 1)  # two devices
    callback = run(monkeypatch, [replace(step, micro_batches=(short, long))], [0.0, 2.0], read, ragged=False)
    assert callback.counts.computed_tokens == 2 * (3 + 4 + 2)  # rows of such different lengths run apart


def test_the_mean_share_of_the_cards_rate(monkeypatch):
    callback = run(monkeypatch, [step_of(4)], [0.0, 2.0])
    callback.matmul_rate = 1e9
    flops = 3 * matmul_flops(tiny_config(), 8, 32.0)  # two devices
    assert callback.report()["mfu"] == pytest.approx(flops / 2.0 / 1e9)


def test_waiting_is_the_loaders_alone_and_validation_is_left_out(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: clock.now)
    loader = SimpleNamespace(waited=0.0)
    callback, module, step = Throughput(), Module(None), step_of(3, 5)
    trainer = SimpleNamespace(world_size=1, log_every_n_steps=1000, train_dataloader=loader)

    def after(seconds, name, *rest):
        clock.now += seconds
        getattr(callback, name)(trainer, module, *rest)

    callback.on_train_start(trainer, module)
    after(0, "on_train_epoch_start")
    for i in range(1, WARM_UP + 1):
        after(1, "on_train_batch_end", None, step, i)
    after(
        2, "on_train_batch_end", None, step, WARM_UP + 1
    )  # a callback that takes 3 s follows: it is the training's time, not the loader's
    after(3, "on_validation_start")
    after(100, "on_validation_end")
    loader.waited += 1
    after(1, "on_train_batch_end", None, step, WARM_UP + 2)
    after(1, "on_train_epoch_end")
    after(50, "on_train_epoch_start")
    report = callback.report()
    assert report["train_seconds"] == pytest.approx(WARM_UP + 7)
    assert report["data_wait_share"] == pytest.approx(1 / 7)
    assert report["pairs_per_second"] == pytest.approx(4 / 7)
