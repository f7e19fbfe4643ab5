"""SPLADE: term weights by the plain formula, variants for queries, weights of query tokens, saved folders."""

import math

import pytest
import torch
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM, DistilBertConfig, ModernBertConfig

from ranker.checkpoint import load_scorer
from ranker.data.token_counts import document_frequencies
from ranker.data.token_store import build_token_store
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.loading import load_encoder
from ranker.encoders.tiny import tiny_config, tiny_tokenizer
from ranker.errors import CheckpointError, ConfigError
from ranker.models.dpr import DPR
from ranker.models.splade import SPLADE

ROWS = [[0, 1, 2, 3], [1, -1, 3, -1], [2, 2, -1, 0]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A masked language model of transformers with random weights; its biases are not 0."""
    torch.manual_seed(0)
    where = tmp_path_factory.mktemp("mlm")
    model = BertForMaskedLM(tiny_config())
    torch.nn.init.normal_(model.cls.predictions.bias, std=0.5)
    model.save_pretrained(where)
    tiny_tokenizer().save_pretrained(where)
    return where


@pytest.fixture
def scorer_of(folder):
    def make(**options):
        return SPLADE(load_encoder(str(folder), dropout=0.0, attention_dropout=0.0), **options).eval()

    return make


def row(batch, number):
    return batch.tokens[int(batch.cu_seqlens[number]) : int(batch.cu_seqlens[number + 1])]


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize(("pooling", "activation"), [("max", "relu"), ("sum", "log1p_relu")])
def test_weights_are_those_of_transformers_logits(texts, folder, scorer_of, pooling, activation, ragged):
    scorer = scorer_of(pooling=pooling, activation=activation)
    scorer.encoder = Encoder(scorer.encoder.model, scorer.encoder.tokenizer, Execution(ragged=ragged))
    whole = AutoModelForMaskedLM.from_pretrained(folder).eval()
    batch = texts(scorer, ROWS)
    with torch.no_grad():
        found, scores = scorer.encode_docs(batch.docs).values, scorer(batch)
        queries = scorer.encode_queries(batch.queries).values
        for number in range(batch.docs.num_rows):
            logits = whole(input_ids=row(batch.docs, number).unsqueeze(0)).logits[0]
            weights = torch.log1p(torch.relu(logits))
            weights = torch.log1p(weights) if activation == "log1p_relu" else weights
            expected = weights.max(0).values if pooling == "max" else weights.sum(0)
            torch.testing.assert_close(found[number], expected, rtol=1e-4, atol=1e-5)
        cells = batch.doc_mask.nonzero().tolist()
        for number, (group, place) in enumerate(cells):
            torch.testing.assert_close(scores[group, place], queries[group] @ found[number], rtol=1e-4, atol=1e-4)
        assert (scores[~batch.doc_mask] == 0).all()


def test_separate_encoders_start_equal_and_learn_apart(texts, scorer_of):
    tied, apart = scorer_of(), scorer_of(queries="separate")
    batch = texts(tied, ROWS)
    torch.testing.assert_close(tied(batch), apart(batch))
    apart.encode_queries(batch.queries).values.sum().backward()
    with_gradient = {name for name, weight in apart.named_parameters() if weight.grad is not None}
    assert with_gradient and not any(name.startswith("doc_") for name in with_gradient)
    # the docs' output matrix is that of the docs' embeddings
    assert apart.doc_head.weight is apart.doc_encoder.model.get_input_embeddings().weight
    assert apart.head.weight is apart.encoder.model.get_input_embeddings().weight


def test_the_output_matrix_is_trained_through_both_of_its_uses(texts, scorer_of):
    scorer = scorer_of()
    batch = texts(scorer, ROWS)
    scorer.encode_docs(batch.docs).values.sum().backward()
    gradient = scorer.encoder.model.get_input_embeddings().weight.grad
    unseen = sorted(set(range(scorer.dim)) - set(batch.docs.tokens.tolist()))
    assert gradient[unseen].abs().sum() > 0  # words that no text has are outputs alone


def test_queries_without_an_encoder_have_the_weights_of_their_tokens(texts, scorer_of, tmp_path):
    scorer = scorer_of(queries="idf")
    assert not scorer.encodes_queries and not scorer.query_weights.requires_grad
    store = build_token_store(
        ((str(i), text) for i, text in enumerate(["b b c", "b", "c d e"])), tmp_path / "docs",
        scorer.encoder.tokenizer, 64, fingerprint="docs",
    )  # fmt: skip
    frequencies = document_frequencies(store, 2, scorer.dim)  # of the first two tokens: b b, b, c d
    vocabulary = scorer.encoder.tokenizer.get_vocab()
    assert {token: int(frequencies[vocabulary[token]]) for token in "bcde"} == {"b": 2, "c": 1, "d": 1, "e": 0}
    scorer.start_from_docs(torch.from_numpy(frequencies), 3)
    batch = texts(scorer, [[0], [1]], queries=["b c b", "e"])
    found = scorer.encode_queries(batch.queries).values
    expected = {"b": math.log(1 + 1.5 / 2.5), "c": math.log(1 + 2.5 / 1.5)}  # a repeated token counts once
    got = {token: found[0, vocabulary[token]].item() for token in "bc"}
    assert got == pytest.approx(expected) and (found[0] > 0).sum() == 2
    assert found[1].nonzero().flatten().tolist() == [vocabulary["e"]]  # no special token
    learned = scorer_of(queries="learned")
    learned.encode_queries(batch.queries).values.sum().backward()
    assert learned.query_weights.grad.nonzero().flatten().tolist() == sorted(vocabulary[token] for token in "bce")


def test_wrong_options_and_encoders(scorer_of, tmp_path):
    for options, message in (
        ({"pooling": "mean"}, "model.pooling: expected one of max, sum; got 'mean'"),
        ({"queries": "none"}, "model.queries: expected one of tied, separate, idf, learned; got 'none'"),
        ({"activation": "gelu"}, "model.activation: expected one of relu, log1p_relu; got 'gelu'"),
        ({"queries": "idf", "query_prompt": "q: "}, "model.query_prompt: expected none with queries=idf, got 'q: '"),
    ):
        with pytest.raises(ConfigError, match=message):
            scorer_of(**options)
    with pytest.raises(CheckpointError, match=r"expected an encoder with a masked language model .*, got llama"):
        SPLADE(load_encoder("tiny_lm"))
    DPR(load_encoder("tiny")).save(tmp_path / "dpr", 64)  # an encoder without the head
    with pytest.raises(
        CheckpointError, match=r"expected weights with the head of a ForMaskedLM model, cls\.predictions"
    ):
        SPLADE(load_encoder(str(tmp_path / "dpr")))


def test_a_masked_language_model_alone_is_a_splade(folder, texts, scorer_of):
    loaded = load_scorer(folder).eval()
    batch = texts(loaded, ROWS)
    torch.testing.assert_close(loaded(batch), scorer_of()(batch))


@pytest.mark.parametrize("queries", ["tied", "separate", "idf", "learned"])
def test_a_saved_model_comes_back_bit_for_bit(scorer_of, texts, tmp_path, queries):
    scorer = scorer_of(queries=queries, pooling="sum", activation="log1p_relu", doc_prompt="d: ")
    if queries == "separate":
        torch.nn.init.normal_(scorer.doc_head.bias)
    scorer.start_from_docs(torch.arange(scorer.dim), scorer.dim)
    scorer.save(tmp_path / "saved", 64, 20)
    loaded = load_scorer(tmp_path / "saved").eval()
    assert (loaded.queries, loaded.pooling, loaded.activation) == (queries, "sum", "log1p_relu")
    batch = texts(scorer, ROWS)
    assert torch.equal(loaded(batch), scorer(batch))
    assert loaded.layouts() == scorer.layouts()
    loaded.save(tmp_path / "again", 64, 20)  # and once more
    assert torch.equal(load_scorer(tmp_path / "again").eval()(batch), scorer(batch))


SIZES = {"vocab_size": len(tiny_tokenizer()), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 64, "max_position_embeddings": 130, "pad_token_id": 0, "bos_token_id": 2,
         "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}  # fmt: skip
FAMILIES = {
    "modernbert": ModernBertConfig(**SIZES),
    "distilbert": DistilBertConfig(vocab_size=SIZES["vocab_size"], dim=32, n_layers=2, n_heads=2, hidden_dim=64),
    "untied bert": BertConfig(**SIZES, tie_word_embeddings=False),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_of_other_families(family, tmp_path, texts):
    torch.manual_seed(0)
    whole = AutoModelForMaskedLM.from_config(FAMILIES[family]).eval()
    whole.save_pretrained(tmp_path / "mlm")
    tiny_tokenizer().save_pretrained(tmp_path / "mlm")
    scorer = SPLADE(load_encoder(str(tmp_path / "mlm"), dropout=0.0, attention_dropout=0.0)).eval()
    batch = texts(scorer, [[0]])
    tokens = row(batch.docs, 0).unsqueeze(0)
    with torch.no_grad():
        expected = torch.log1p(torch.relu(whole(input_ids=tokens).logits[0])).max(0).values
        torch.testing.assert_close(scorer.encode_docs(batch.docs).values[0], expected, rtol=1e-4, atol=1e-5)
        scores = scorer(batch)
    scorer.save(tmp_path / "saved", 64)
    assert torch.equal(load_scorer(tmp_path / "saved").eval()(batch), scores)
    scorer(batch).sum().backward()
    missing = [n for n, weight in scorer.named_parameters() if weight.requires_grad and weight.grad is None]
    assert not missing  # DDP expects a gradient of each trained weight
