"""Packed rows and DistilBERT on CUDA, in bfloat16, against each row alone in float32 by transformers itself.

CUDA_VISIBLE_DEVICES=0 pytest -m gpu tests/unit/encoders
"""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModel, T5EncoderModel

from ranker.encoders.compiled_layer import compiled_dropout
from ranker.encoders.dropout import column_hashes, dropout_hashes, hashed_dropout
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import ConfigError
from ranker.types import TokenBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; set CUDA_VISIBLE_DEVICES=0"),
]
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
FAMILIES = {
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},  # causal, grouped heads
    "mistral": {"num_key_value_heads": 2, "sliding_window": 12},  # causal with a window
    "modernbert-decoder": {"local_attention": 16, "pad_token_id": 0},
    "ernie": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16},  # soft-capped logits
    "distilbert": {"dim": 64, "n_layers": 3, "n_heads": 2, "hidden_dim": 128, "dropout": 0.2, "attention_dropout": 0.0},
    "t5": {"d_model": 64, "num_layers": 3, "num_heads": 4, "d_kv": 16, "d_ff": 128},  # a bias on positions
}


def model_of(family: str, **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {} if family in ("t5", "distilbert") else SIZES
    options = {**sizes, **FAMILIES[family], **options, "vocab_size": len(tiny_tokenizer())}
    config = AutoConfig.for_model(family, **options)
    if family == "t5":
        return T5EncoderModel(config).cuda()
    extra = {"add_pooling_layer": False} if family == "ernie" else {}
    return AutoModel.from_config(config, **extra).cuda()


def rows_of(*lengths: int, device: str = "cuda") -> TokenBatch:
    tokens = torch.randint(5, 400, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    return TokenBatch(tokens, torch.zeros_like(tokens), offsets, max(lengths)).to(device, non_blocking=False)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_gradients_are_near_those_of_each_row_alone(family, compile):
    model = model_of(family).eval()
    reference = copy.deepcopy(model)
    encoder = Encoder(model, tiny_tokenizer(), Execution(compile=compile)).eval()
    assert encoder.path == ("distilbert" if family == "distilbert" else "packed")
    for lengths in ((40, 7, 1, 64, 23), (5, 90), (33,)):
        batch = rows_of(*lengths)
        alone = torch.cat([reference(input_ids=row[None]).last_hidden_state[0] for row in batch.tokens.split(lengths)])
        with torch.autocast("cuda", torch.bfloat16):
            states = encoder(batch)
        assert error(states, alone) < 0.03
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(2)).cuda()
    (states.float() * weights).sum().backward()
    (alone * weights).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if theirs.grad is not None and theirs.grad.norm() > 1e-3:
            assert error(ours.grad, theirs.grad) < 0.1, name


@pytest.mark.parametrize("family", ["qwen3", "mistral", "modernbert-decoder", "ernie", "gemma2", "t5"])
def test_tokens_that_no_other_attends_to_read_those_that_a_mask_lets_them_read(family):
    """As ColBERT's expansion: the last tokens of each row, in transformers by itself padding that has states."""
    model = model_of(family).eval()
    reference = copy.deepcopy(model)
    encoder = Encoder(model, tiny_tokenizer()).eval()
    batch = rows_of(24, 24, 20)
    batch = replace(batch, attended=torch.tensor([9, 17, 20], dtype=torch.int32).cuda(), num_attended=46)
    alone = []
    for row, kept in zip(batch.tokens.split([24, 24, 20]), (9, 17, 20), strict=True):
        mask = (torch.arange(len(row)) < kept).long().cuda()
        alone.append(reference(input_ids=row[None], attention_mask=mask[None]).last_hidden_state[0])
    with torch.autocast("cuda", torch.bfloat16):
        states = encoder(batch)
    kept = torch.cat([torch.arange(24) < 20, torch.arange(24) < 24, torch.arange(20) < 20])  # else no key in a window
    assert error(states[kept], torch.cat(alone)[kept]) < 0.03


# masks that differ in one place give ernie an error of 0.009, and bfloat16 alone gives 0.0002; DistilBERT's layers keep
# bfloat16 between them, so its weights are large: 0.5, and 0.02
@pytest.mark.parametrize(("family", "deviation", "bound"), [("ernie", 0.02, 0.002), ("distilbert", 0.2, 0.06)])
def test_masks_are_the_same_compiled_and_on_the_cpu(family, deviation, bound):
    states = []
    for device, compile in (("cpu", False), ("cuda", False), ("cuda", True)):
        model = model_of(family, initializer_range=deviation).to(device)
        encoder = Encoder(model, tiny_tokenizer(), Execution(compile=compile)).train()
        encoder.dropout_seed = 3
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            states.append(encoder(rows_of(40, 7, 64, device=device)).float().cpu())
    assert error(states[1], states[0]) < bound and error(states[2], states[0]) < bound


def test_compiled_masks_of_several_widths_are_those_of_the_cpu():
    variable = torch.compile(hashed_dropout, dynamic=True)
    hashes = dropout_hashes(5, torch.arange(37), torch.arange(37), 1)[0]
    for width in (64, 96, 80):
        values = torch.rand(37, width) + 1
        expected = hashed_dropout(values, hashes, 0.3) != 0
        columns = column_hashes(width, torch.device("cuda"))
        assert torch.equal(variable(values.cuda(), hashes.cuda(), 0.3, columns).cpu() != 0, expected), width
        assert torch.equal(compiled_dropout(values.cuda(), hashes.cuda(), 0.3).cpu() != 0, expected), width


def test_insisting_on_compiled_layers_in_float32_is_refused():
    encoder = Encoder(model_of("qwen3"), tiny_tokenizer(), Execution(compile=True))
    with pytest.raises(ConfigError, match=r"encoder.compile: expected auto or false, got true, but the precision is"):
        encoder(rows_of(5, 9))


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_shared_prefixes_have_the_states_and_gradients_of_whole_rows(compile, window):
    """`head_dim` 64 goes through this package's kernel, and with a window through torch's."""
    sizes = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = model_of("mistral", **sizes, sliding_window=window)
    encoder = Encoder(model, tiny_tokenizer(), Execution(compile=compile))
    generator, rows, sizes_of = torch.Generator().manual_seed(1), [], (3, 2, 1)
    for size in sizes_of:
        prefix = torch.randint(5, 400, (50,), generator=generator)
        rows += [torch.cat([prefix, torch.randint(5, 400, (9 + 30 * n,), generator=generator)]) for n in range(size)]
    tokens, ends = torch.cat(rows), torch.tensor([0, *map(len, rows)]).cumsum(0).int()
    batch = TokenBatch(tokens, torch.zeros_like(tokens), ends, max(map(len, rows))).to("cuda")
    weights = torch.randn(len(rows), 128, generator=generator).cuda()
    found = []
    for last_states in (lambda: encoder.pooled(batch, "last"), lambda: encoder.last_of_groups(batch, sizes_of)):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            states = last_states()
        (states.float() * weights).sum().backward()
        found.append([states, *(weight.grad.clone() for weight in model.parameters() if weight.grad is not None)])
    for whole, shared in zip(*found, strict=True):
        assert error(shared, whole) < 0.02
