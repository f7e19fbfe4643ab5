"""Linear layers in 8 bits against products of rounded numbers by a plain loop; scores; training under rounding."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers import BertModel, ModernBertConfig, ModernBertModel

from ranker.assembly.inference import prepare
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.quantized import Fp8Linear, Int8Weight, QuantizationAware, aware, rounded, to_int8
from ranker.encoders.tiny import tiny_config, tiny_tokenizer
from ranker.errors import ConfigError
from ranker.models.monobert import MonoBERT
from ranker.retrieval.encode import scorer_hash
from ranker.types import RankBatch, TokenBatch


def by_hand(inputs, weight, bias):
    """The product of rows and output weights, each rounded to multiples (at most 127) of its own unit."""
    found = torch.zeros(len(inputs), len(weight), dtype=torch.float64)
    for i, row in enumerate(inputs.double()):
        for j, column in enumerate(weight.double()):
            units = [float(part.abs().max()) / 127 or 1.0 for part in (row, column)]
            whole = [torch.round(part / unit) for part, unit in zip((row, column), units, strict=True)]
            found[i, j] = float((whole[0] * whole[1]).sum()) * units[0] * units[1] + float(bias[j])
    return found


def test_a_product_in_int8_is_that_of_rounded_numbers():
    torch.manual_seed(0)
    layer = nn.Linear(24, 10)
    inputs = torch.randn(5, 24) * torch.tensor([1.0, 100.0, 0.01, 0.0, 5.0])[:, None]
    expected = by_hand(inputs, layer.weight.detach(), layer.bias.detach())
    imitated = linear(rounded(inputs), rounded(layer.weight), layer.bias)
    exact = layer(inputs)
    model = nn.Sequential(layer)
    to_int8(model)
    got = model(inputs)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(imitated.double(), expected, rtol=1e-5, atol=1e-6)  # of quantisation-aware training
    assert 1e-6 < float((got - exact).abs()[0].max()) < 0.1
    assert torch.equal(model(inputs[2:3]), got[2:3])  # whatever else is in the batch
    both = torch.cat([layer.weight, layer.weight])
    assert isinstance(both, Int8Weight) and torch.equal(linear(inputs, both)[:, :10], linear(inputs, layer.weight))
    assert linear(inputs.bfloat16(), layer.weight, layer.bias).dtype == torch.bfloat16


def test_both_ways_to_multiply_in_int8_give_the_same_product(monkeypatch):
    """With instructions for int8 products a packed weight is multiplied, elsewhere the same numbers in float32."""
    torch.manual_seed(0)
    weight, inputs, bias = Int8Weight.of(torch.randn(48, 64)), torch.randn(300, 64), torch.randn(48)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with torch.autocast("cpu", torch.bfloat16):  # which must not round the product
        plain = linear(inputs, weight, bias)
    monkeypatch.undo()
    found = linear(inputs, weight, bias)
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-6)
    torch.set_default_dtype(torch.bfloat16)  # as with trainer.precision=bf16-true
    try:
        assert torch.equal(linear(inputs, weight, bias), found)
    finally:
        torch.set_default_dtype(torch.float32)
    assert linear(inputs[:0], weight, bias).shape == (0, 48)


def test_a_layer_that_has_multiplied_in_int8_can_be_copied_and_pickled():
    model, inputs = nn.Sequential(nn.Linear(24, 10)), torch.randn(5, 24)
    to_int8(model)
    expected = model(inputs)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(inputs), expected)


def test_joined_weights_are_packed_once_and_follow_their_parts():
    first, second, third = (Int8Weight.of(torch.randn(4, 8)) for _ in range(3))
    both = torch.cat([first, second])
    assert torch.cat([first, second]) is both
    assert torch.equal(torch.cat([first, third]).values, torch.cat([first.values, third.values]))
    assert torch.equal(torch.cat([first, second]).scale, torch.cat([first.scale, second.scale]))


def test_the_gradient_passes_through():
    layer = nn.Linear(6, 3)
    aware(nn.Sequential(layer))
    assert isinstance(layer, QuantizationAware) and list(layer.state_dict()) == ["weight", "bias"]
    inputs = torch.randn(4, 6, requires_grad=True)
    upstream = torch.randn(4, 3)
    layer(inputs).backward(upstream)
    torch.testing.assert_close(inputs.grad, upstream @ rounded(layer.weight).detach())
    torch.testing.assert_close(layer.weight.grad, upstream.t() @ rounded(inputs).detach())


def test_a_product_in_fp8_is_that_of_rounded_numbers():
    torch.manual_seed(0)
    layer = nn.Linear(32, 16)
    inputs = torch.randn(3, 32) * torch.tensor([1.0, 50.0, 0.01])[:, None]
    units = [part.abs().amax(1, keepdim=True) / 448 for part in (inputs, layer.weight.detach())]
    small = [
        (part / unit).to(torch.float8_e4m3fn).float() for part, unit in zip((inputs, layer.weight), units, strict=True)
    ]
    expected = (small[0] @ small[1].t()) * units[0] * units[1].t() + layer.bias
    fp8 = Fp8Linear(layer)
    torch.testing.assert_close(fp8(inputs), expected, rtol=1e-5, atol=1e-6)
    assert fp8.to(torch.bfloat16).weight.dtype == torch.float8_e4m3fn


def scorer(kind, execution=None, pooling="mean"):
    torch.manual_seed(0)
    if kind == "bert":
        model = BertModel(tiny_config(dim=32), add_pooling_layer=False)
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = ModernBertConfig(vocab_size=len(tiny_tokenizer()), pad_token_id=0, **sizes)
        model = ModernBertModel(config)
    made = MonoBERT(Encoder(model, tiny_tokenizer(), execution or Execution()), head="own", pooling=pooling)
    for weight in made.parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=0.2)
    return made.eval()


def batch(rows=6):
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(5, 60, (4 + 3 * i,), generator=generator) for i in range(rows)]
    tokens, ends = torch.cat(texts), torch.tensor([0, *map(len, texts)]).cumsum(0).int()
    pairs = TokenBatch(tokens, torch.zeros_like(tokens), ends, max(map(len, texts)))
    mask = torch.ones(1, rows, dtype=torch.bool)
    return RankBatch(mask.float(), mask, torch.zeros(1, dtype=torch.long), 1.0, pairs=pairs)


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
@torch.no_grad()
def test_scores_in_int8_are_near_and_those_of_aware_training(kind):
    plain, small = scorer(kind)(batch()), scorer(kind)
    before = scorer_hash(small)
    prepare(small, {"quantize": "int8"}, "cpu")
    assert small.encoder.path == kind and scorer_hash(small) != before
    got = small(batch())
    spread = float(plain.std())
    assert 1e-5 * spread < float((got - plain).abs().max()) < 0.2 * spread
    imitated = scorer(kind, Execution(quantize_aware=True))
    assert scorer_hash(imitated) not in (before, scorer_hash(small))  # the weights alone do not tell
    assert imitated.encoder.path in ("packed", "padded")
    # equal but for numbers that rounding in float32 moves to another whole number
    assert float((imitated(batch()) - got).abs().max()) < 0.05 * spread
    converted = prepare(imitated, {"quantize": "int8"}, "cpu")
    assert float((converted(batch()) - got).abs().max()) < 0.05 * spread


@torch.no_grad()
def test_the_last_layer_of_first_tokens_alone_is_near_too():
    plain, small = (
        scorer("bert", pooling="cls")(batch()),
        prepare(scorer("bert", pooling="cls"), {"quantize": "int8"}, "cpu"),
    )
    gap = float((small(batch()) - plain).abs().max()) / float(plain.std())
    assert 1e-5 < gap < 0.2


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
@torch.no_grad()
def test_scores_in_fp8_are_near(kind):
    """On a CPU the products run in float32, from numbers that were rounded to fp8."""
    plain, small = scorer(kind)(batch()), scorer(kind)
    small.encoder.quantize("fp8")
    assert small.encoder.path in ("packed", "padded")
    gap = float((small(batch()) - plain).abs().max()) / float(plain.std())
    assert 1e-4 < gap < 0.5


def test_what_can_not_be():
    with pytest.raises(ConfigError, match=r"inference\.quantize: expected null, int8 or fp8, got 'int4'"):
        prepare(scorer("bert"), {"quantize": "int4"})
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="expected null or int8, got fp8, but the device is cpu"):
            prepare(scorer("bert"), {"quantize": "fp8"})
    small = MonoBERT(Encoder(BertModel(tiny_config(dim=24, heads=2), add_pooling_layer=False), tiny_tokenizer()))
    with pytest.raises(ConfigError, match="multiples of 16 for fp8"):
        small.encoder.quantize("fp8")


CUDA = [("cuda", (9, 0), "null or fp8"), ("cuda", (8, 0), "null")]


@pytest.mark.parametrize(("accelerator", "capability", "other"), [*CUDA, ("mps", (), "null")])
def test_int8_is_for_a_cpu_and_refused_before_the_first_batch(monkeypatch, accelerator, capability, other):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    with pytest.raises(ConfigError, match=f"quantize: expected {other} on {accelerator}, got int8, which runs"):
        prepare(scorer("bert"), {"quantize": "int8"}, accelerator)
    prepare(scorer("bert"), {"quantize": "int8"}, "cpu")


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@NO_GPU
def test_products_in_fp8_on_a_gpu_are_those_of_the_cpu():
    torch.manual_seed(0)
    layer = nn.Linear(384, 1536)
    fp8, inputs = Fp8Linear(layer), torch.randn(1000, 384).bfloat16().float()  # what both round to fp8
    expected = fp8(inputs)
    got = fp8.cuda()(inputs.cuda().bfloat16()).float().cpu()
    assert float((got - expected).abs().max()) < 0.02 * float(expected.abs().max())
    together = fp8(inputs.cuda())
    assert torch.equal(fp8(inputs[:7].cuda()), together[:7])  # whatever else is in the batch


@pytest.mark.gpu
@NO_GPU
@torch.no_grad()
def test_scores_in_fp8_on_a_gpu_are_near_those_in_bf16():
    made = [scorer("bert").cuda() for _ in range(2)]
    prepare(made[1], {"quantize": "fp8"})
    with torch.autocast("cuda", torch.bfloat16):
        plain, small = (model(batch().to("cuda")).float() for model in made)
    assert float((small - plain).abs().max()) < 0.5 * float(plain.std())
