"""From windows to docs: values by hand, plain loops over docs, and short docs, for which windows change nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from ranker.data.collate import Collator
from ranker.data.memory_store import MemoryStore
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.text_encoder import TextEncoder
from ranker.data.windows import Windows
from ranker.encoders.loading import load_encoder
from ranker.models.dpr import DPR
from ranker.models.lm_reranker import LMReranker
from ranker.models.monobert import MonoBERT
from ranker.passages.firstp import FirstP
from ranker.passages.maxp import MaxP
from ranker.passages.meanp import MeanP
from ranker.passages.parade_attention import ParadeAttention
from ranker.passages.parade_transformer import ParadeTransformer
from ranker.passages.sump import SumP
from ranker.passages.windowed import Windowed, to_windows
from ranker.training.soundness import check_scores
from ranker.types import TokenBatch

QUERIES = ["red apple", "sky"]
SHORT = ["an apple", "the sky", "", "green grass"]
LONG = ["a b c d e f g h i j k l", "a b c d", "", "x y z x y z x", "the sky"]
GRID = np.array([[0, 1, -1], [2, 3, 0]])
SCORES = {"firstp": FirstP(), "maxp": MaxP(), "meanp": MeanP(2), "sump": SumP()}


def scorer_of(model, dropout=0.0):
    torch.manual_seed(0)
    options = {"dropout": dropout, "attention_dropout": 0.0}
    if model == "lm_reranker":
        return LMReranker(load_encoder("tiny_lm", **options)).double()
    encoder = load_encoder("tiny", **options)
    # tanh between pooling and head: window vectors are those after it
    return (MonoBERT(encoder, pooler=True) if model == "monobert" else DPR(encoder, temperature=1.0)).double()


def aggregation_of(name, dim):
    torch.manual_seed(1)
    learned = {"parade_attention": ParadeAttention, "parade_transformer": ParadeTransformer}
    return learned[name](dim).double() if name in learned else SCORES[name]


def batch_of(scorer, docs=LONG, grid=GRID, groups=None):
    """The batch of some groups; `groups` chooses some of the grid's rows."""
    tokenizer, inputs = scorer.encoder.tokenizer, ScorerInputs.of(scorer)
    stores = [
        MemoryStore(
            TextEncoder(tokenizer, 64), {str(i): inputs.affixes(side).around(text) for i, text in enumerate(texts)}
        )
        for side, texts in enumerate((QUERIES, docs))
    ]
    chosen = np.arange(len(grid)) if groups is None else np.array(groups)
    rows = grid[chosen]
    collator = Collator.of(inputs, *stores, TextLimits(16, 64))
    return collator.collate(chosen, rows, np.zeros(rows.shape), chosen, 1.0)


# values by hand
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"), {"firstp": [2, 1], "maxp": [5, 1], "meanp": [3.5, 0], "sump": [4, 0]}.items()
)
def test_values_and_gradients_by_hand(name, expected):
    """Two docs of three and of two windows; what is in the padding is ignored, and gets no gradient."""
    scores = torch.tensor([[2.0, 5.0, -3.0], [1.0, -1.0, 99.0]], requires_grad=True)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    docs = SCORES[name](scores, mask)
    assert docs.tolist() == expected
    docs.sum().backward()
    gradients = {
        "firstp": [[1, 0, 0], [1, 0, 0]],
        "maxp": [[0, 1, 0], [1, 0, 0]],
        "meanp": [[0.5, 0.5, 0], [0.5, 0.5, 0]],
        "sump": [[1, 1, 1], [1, 1, 0]],
    }
    assert scores.grad.tolist() == gradients[name]


def test_the_mean_of_all_windows():
    scores = torch.tensor([[2.0, 5.0, -1.0], [1.0, -1.0, 99.0]])
    assert MeanP(None)(scores, torch.tensor([[True, True, True], [True, True, False]])).tolist() == [2, 0]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["parade_attention", "parade_transformer"])
def test_parade_equals_a_plain_loop_over_docs(name, training):
    dim, counts = 128, [3, 1, 4]
    parade = aggregation_of(name, dim).train(training)
    vectors = torch.randn(sum(counts), dim, dtype=torch.float64)
    batch = TokenBatch(
        torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64), torch.arange(9, dtype=torch.int32), 1,
        windows=torch.tensor(counts), max_windows=4,
    )  # fmt: skip
    with torch.no_grad():
        got = parade(*to_windows(vectors, batch))
        for doc, own in enumerate(vectors.split(counts)):
            torch.testing.assert_close(got[doc], loop(parade, own), rtol=0, atol=1e-12)


def loop(parade, windows):
    """A doc's vector from its windows' [windows, dim], one product at a time."""
    if isinstance(parade, ParadeAttention):
        weights = [torch.dot(parade.weight, window).exp() for window in windows]
        return sum(weight * window for weight, window in zip(weights, windows, strict=True)) / sum(weights)
    states = torch.stack([parade.start, *windows])
    for layer in parade.layers:
        attention, dim, heads = layer.self_attn, states.shape[1], layer.self_attn.num_heads
        queries, keys, values = (states @ attention.in_proj_weight.T + attention.in_proj_bias).split(dim, dim=1)
        size, found = dim // heads, []
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            weights = (queries[:, part] @ keys[:, part].T / size**0.5).softmax(1)
            found.append(weights @ values[:, part])
        attended = torch.cat(found, 1) @ attention.out_proj.weight.T + attention.out_proj.bias
        states = layer.norm1(states + attended)
        inner = functional.gelu(states @ layer.linear1.weight.T + layer.linear1.bias)
        states = layer.norm2(states + inner @ layer.linear2.weight.T + layer.linear2.bias)
    return states[0]


# whole scorers
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("model", ["monobert", "lm_reranker", "dpr"])
def test_a_score_is_that_of_a_loop_over_windows(model, name):
    """Each window alone, as the only doc of its query, then the aggregation of the list; docs without tokens too."""
    scorer = scorer_of(model).eval()
    windowed = Windowed.of(scorer, Windows(4, 3), SCORES[name])
    batch = batch_of(windowed)
    with torch.no_grad():
        got = windowed(batch)
        assert got[0, 2] == 0
        rows = batch.pairs if batch.pairs is not None else batch.docs
        starts = rows.windows.cumsum(0) - rows.windows
        for doc, (group, slot) in enumerate(batch.doc_mask.nonzero().tolist()):
            alone = [
                window_score(scorer, batch, group, int(starts[doc]) + window)
                for window in range(int(rows.windows[doc]))
            ]
            best = sorted(alone, reverse=True)
            expected = {
                "firstp": alone[0], "maxp": best[0], "sump": sum(alone), "meanp": sum(best[:2]) / len(best[:2])
            }[name]  # fmt: skip
            assert float(got[group, slot]) == pytest.approx(expected, abs=1e-12)
    counts = rows.windows.tolist()
    assert counts[0] == counts[4] >= 4 and counts[2] == 1


def window_score(scorer, batch, group, row):
    """The score of one row, as the only doc of its group."""

    def only(rows, index):
        start, end = rows.cu_seqlens[index : index + 2].tolist()
        lengths = torch.tensor([0, end - start], dtype=torch.int32)
        return TokenBatch(rows.tokens[start:end], rows.segments[start:end], lengths, end - start)

    parts = {"pairs": only(batch.pairs, row)} if batch.pairs is not None else {}
    if batch.docs is not None:
        parts = {"queries": only(batch.queries, group), "docs": only(batch.docs, row)}
    alone = replace(batch, labels=torch.zeros(1, 1), doc_mask=torch.ones(1, 1, dtype=torch.bool), **parts)
    return float(scorer(alone))


@pytest.mark.parametrize("name", [*SCORES, "parade_attention"])
@pytest.mark.parametrize("model", ["monobert", "lm_reranker", "dpr"])
def test_short_docs_score_as_without_windows(model, name):
    """Scores and gradients to 1e-12 in float64, with the same dropout."""
    scorer = scorer_of(model, dropout=0.0 if model == "lm_reranker" else 0.1).train()  # llama has no dropout
    windowed = Windowed.of(
        scorer, Windows(20, 10, most=1 if name == "firstp" else 3), aggregation_of(name, scorer.vector_dim)
    )
    results = []
    for one in (scorer, windowed):
        scorer.zero_grad()
        scorer.encoder.dropout_seed = 5
        scores = one(batch_of(one, SHORT))
        (scores**2).sum().backward()
        results.append(
            (scores.detach(), [weight.grad.clone() for weight in scorer.parameters() if weight.grad is not None])
        )
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-12)
    assert len(results[0][1]) == len(results[1][1]) > 10
    for plain, with_windows in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(plain, with_windows, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["maxp", "meanp", "parade_attention", "parade_transformer"])
@pytest.mark.parametrize("model", ["monobert", "lm_reranker", "dpr"])
def test_a_score_does_not_depend_on_the_other_docs_of_the_batch(model, name):
    scorer = scorer_of(model).eval()
    windowed = Windowed.of(scorer, Windows(3, 2), aggregation_of(name, scorer.vector_dim)).eval()
    with torch.no_grad():
        together = windowed(batch_of(windowed))
        for group in range(2):
            alone = windowed(batch_of(windowed, groups=[group]))
            torch.testing.assert_close(alone[0], together[group], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["maxp", "sump", "parade_transformer"])
def test_a_block_of_dpr_scores_as_its_groups(name):
    """In-batch negatives are scored from vectors alone, by `score_block`; own docs by `forward`."""
    scorer = scorer_of("dpr").eval()
    windowed = Windowed.of(scorer, Windows(3, 2), aggregation_of(name, scorer.dim)).eval()
    batch = batch_of(windowed)
    with torch.no_grad():
        docs = windowed.encode_docs(batch.docs)
        block = windowed.score_block(windowed.encode_queries(batch.queries), docs)
        own = windowed(batch)
    assert block.shape == (2, 5) and docs.num_texts == 5
    assert windowed.doc_vector_counts(batch.docs).tolist() == (
        [1] * 5 if name.startswith("parade") else [6, 2, 1, 3, 6]
    )
    torch.testing.assert_close(torch.cat([block[0, :2], block[1, 2:]]), own[batch.doc_mask], rtol=0, atol=1e-12)


def test_all_chosen_windows_get_a_gradient():
    """MaxP trains the best window alone; PARADE trains all."""
    scorer = scorer_of("monobert").train()
    for name, expected in (("maxp", 1), ("meanp", 2), ("sump", 4), ("parade_attention", 4)):
        windowed = Windowed.of(scorer, Windows(4, 3), aggregation_of(name, scorer.vector_dim))
        batch = batch_of(windowed, grid=np.array([[0]]))
        words = scorer.encoder.model.get_input_embeddings()
        seen = []
        hook = words.register_forward_hook(lambda *args, seen=seen: seen.append(args[2]) or args[2].retain_grad())
        windowed(batch).sum().backward()
        hook.remove()
        reached = seen[0].grad.reshape(-1, scorer.encoder.dim).abs().sum(1) > 0
        rows = torch.repeat_interleave(torch.arange(4), batch.pairs.cu_seqlens.diff().long())
        assert len(set(rows[reached[: len(rows)]].tolist())) == expected, name


@pytest.mark.parametrize("model", ["monobert", "dpr"])
def test_rows_that_are_no_windows_are_one_each(model):
    scorer = scorer_of(model)
    windowed = Windowed.of(scorer, Windows(8), ParadeTransformer(scorer.vector_dim).double())
    check_scores(windowed)  # lays out docs by itself
    plain = Windowed.of(scorer, Windows(8), MaxP())
    batch = batch_of(scorer, SHORT)
    torch.testing.assert_close(plain.eval()(batch), scorer.eval()(batch), rtol=0, atol=0)
