"""Adapters over weights in 4 and 8 bits: a missing package, and with bitsandbytes values, gradients and merging."""

import importlib.util

import pytest
import torch

from ranker import Reranker
from ranker.assembly.scorer import build_scorer
from ranker.checkpoint import without_adapters
from ranker.data.scorer_inputs import TextLimits
from ranker.encoders.lora import LoRA
from ranker.encoders.quantized_base import dequantized, rounded_layer
from ranker.errors import ConfigError
from ranker.export import _adapter
from tests.unit.models.test_lm_reranker import PAIRS, folder_of
from tests.unit.models.test_lora import lm_cfg, trained

installed = importlib.util.find_spec("bitsandbytes") is not None
needs_package = pytest.mark.skipif(not installed, reason="bitsandbytes is not installed")


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_missing_package_is_one_line(kind, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"expected the package bitsandbytes for {kind}, which is not installed"):
        LoRA(base=kind)


def test_an_unknown_precision_is_one_line():
    with pytest.raises(ConfigError, match="base: expected one of float32, bfloat16, int8, nf4; got 'int3'"):
        LoRA(base="int3")


def scores_of(scorer):
    reranker = Reranker(scorer.eval(), TextLimits(64, 64), accelerator="cpu", precision="32-true")
    return torch.from_numpy(reranker.score(PAIRS))


@needs_package
@pytest.mark.parametrize(("kind", "bits"), [("int8", torch.int8), ("nf4", torch.uint8)])
def test_rounded_weights_keep_adapters_and_train_them_alone(kind, bits, tmp_path):
    cfg = lm_cfg(folder_of(tmp_path / "base"))
    plain = trained(build_scorer(cfg))
    (tmp_path / "adapter").mkdir()
    _adapter.write(tmp_path / "adapter", plain, "base", 64)
    cfg.encoder.lora.base = kind
    scorer = build_scorer(cfg)
    _adapter.read(tmp_path / "adapter", scorer)  # the base has the same fingerprint
    expected, rounded = scores_of(plain), scores_of(scorer)
    assert 1e-6 < (expected - rounded).abs().max() < 0.1 * expected.abs().max()
    layers = [part.base_layer for part in scorer.modules() if hasattr(part, "base_layer")]
    assert {layer.weight.dtype for layer in layers} == {bits}
    assert not any("base_layer" in name for name in scorer.state_dict())
    whole, _ = without_adapters(scorer, cfg)
    # the merged model computes in float32, the one with the rounded base in bfloat16
    torch.testing.assert_close(scores_of(whole), rounded, rtol=0.02, atol=0)
    before = {name: weight.clone() for name, weight in scorer.named_parameters()}
    trained(scorer.train())
    changed = {name for name, weight in scorer.named_parameters() if not torch.equal(weight, before[name])}
    assert changed and all("lora_" in name for name in changed)


@needs_package
@pytest.mark.parametrize(("kind", "step"), [("int8", 1 / 254), ("nf4", 0.152)])
def test_a_weight_moves_by_half_a_step_of_its_grid(kind, step):
    linear = torch.nn.Linear(64, 32)  # a row is a block of 64; the widest gap of NormalFloat's values is 0.304
    rounded = dequantized(rounded_layer(linear, kind)).weight
    largest = linear.weight.abs().amax(1, keepdim=True)
    assert 0 < ((rounded - linear.weight).abs() / largest).max() <= step * 1.1  # int8 rounds to half precision first
