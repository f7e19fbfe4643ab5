"""Duels: rows as tokenizers lay them out, aggregations against definitions and brute force, docs behind the top."""

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from ranker.encoders.loading import load_encoder
from ranker.errors import ConfigError
from ranker.interactions.duels import RIDGE, bradley_terry, sum_of_wins
from ranker.lists.duo import Duo
from ranker.models.monobert import MonoBERT
from ranker.types import RankBatch, TokenBatch

QUERY = "red apple"
DOCS = ["an apple is red.", "the sky", "green grass, and more of it, and more", "x y z", "red", "an apple"]


def duo_of(name="tiny", **options):
    torch.manual_seed(0)
    scorer = Duo(load_encoder(name, dropout=0.0, attention_dropout=0.0), **options)
    for weight in scorer.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return scorer.double().eval()


def score_of_row(scorer, ids, segments):
    """The logit of a row of tokens by itself."""
    tokens = torch.tensor(ids)
    rows = TokenBatch(tokens, torch.tensor(segments), torch.tensor([0, len(ids)]).int(), len(ids))
    one = torch.ones(1, 1)
    with torch.no_grad():
        return scorer(RankBatch(one, one.bool(), torch.zeros(1).long(), 1.0, rows)).item()


def bert_row(tokenizer, first, second):
    """[CLS] query [SEP] first [SEP] second [SEP] from the tokenizer's pair and a third text."""
    pair, third = tokenizer(QUERY, first), tokenizer(second, add_special_tokens=False)["input_ids"]
    end = tokenizer.sep_token_id
    return [*pair["input_ids"], *third, end], [*pair["token_type_ids"], *[1] * (len(third) + 1)]


def t5_row(tokenizer, first, second):
    ids = tokenizer(f"Query: {QUERY} Document0: {first} Document1: {second} Relevant:")["input_ids"]
    return ids, [0] * len(ids)


@pytest.mark.parametrize(("name", "row"), [("tiny", bert_row), ("tiny_t5", t5_row)])
def test_scores_are_sums_over_rows_that_the_tokenizer_lays_out(lists, name, row):
    scorer = duo_of(name)
    tokenizer = scorer.encoder.tokenizer
    with torch.no_grad():
        got = scorer(lists(scorer, [[0, 1, 2, 4], [3, 5, -1, -1], [2, -1, -1, -1]]))
    for scores, docs in zip(got, ([0, 1, 2, 4], [3, 5], [2]), strict=True):
        for place, first in enumerate(docs):
            wins = [
                torch.tensor(score_of_row(scorer.scorer, *row(tokenizer, DOCS[first], DOCS[second]))).sigmoid().item()
                for second in docs
                if second != first
            ]
            assert scores[place].item() == pytest.approx(sum(wins), abs=1e-6)
    assert not got[1, 2:].any() and got.std() > 1e-4


def test_docs_behind_the_top_keep_their_order(lists):
    for aggregation in ("sum", "bradley_terry"):
        scorer, whole = duo_of(top=3, aggregation=aggregation), duo_of(aggregation=aggregation)
        with torch.no_grad():
            got = scorer(lists(scorer, [range(6), [0, 1, -1, -1, -1, -1]])).numpy()
            three = whole(lists(whole, [range(3)])).numpy()[0]
        np.testing.assert_allclose(got[0, :3], three, atol=1e-9)
        assert got[0, :3].min() > got[0, 3] > got[0, 4] > got[0, 5]
        assert not got[1, 2:].any()


def test_docs_of_a_row_are_cut_to_its_positions(lists):
    scorer = duo_of()
    scorer.encoder.config.max_position_embeddings = 20
    with torch.no_grad():
        assert torch.isfinite(scorer(lists(scorer, [[0, 2, 4]]))).all()
    # a query of 2, four special tokens and room for 14: the one-token doc leaves 13 to the other
    from ranker.data.list_rows import ListTexts

    texts = ListTexts.of(lists(scorer, [[2, 4]]), list(scorer.literals))
    query, longer, short = texts.query_lengths[0], *texts.doc_lengths
    pieces = scorer._pieces(texts, np.array([0, 0]), np.array([0, 0]), np.array([1, 0]))
    room = 20 - 4 - query
    assert longer > room
    assert pieces.lengths.reshape(2, 7)[:, [3, 5]].tolist() == [[room - short, short], [room // 2, room // 2]]


def test_sum_by_hand():
    logits = torch.tensor([[[9.0, 0.0, np.log(3)], [0.0, 9.0, -np.log(3)], [np.log(3), 0.0, 9.0]]])
    assert sum_of_wins(logits, torch.ones(1, 3).bool())[0].tolist() == pytest.approx([1.25, 0.75, 1.25])
    assert sum_of_wins(logits, torch.tensor([[True, True, False]]))[0].tolist() == pytest.approx([0.5, 0.5, 0])


def test_bradley_terry_finds_the_maximum():
    """Against plain gradient ascent of the likelihood, and its gradient against finite differences."""
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 4, dtype=torch.float64)
    mask = torch.tensor([[True, True, True, True], [True, True, True, False]])
    got = bradley_terry(logits, mask)
    for number, docs in enumerate((4, 3)):
        part = logits[number, :docs, :docs].sigmoid()
        wins = (part + 1 - part.T) / 2
        strengths = torch.zeros(docs, dtype=torch.float64, requires_grad=True)
        for _ in range(3000):
            differences = strengths[:, None] - strengths
            off = ~torch.eye(docs, dtype=torch.bool)
            value = (wins * logsigmoid(differences))[off].sum() - RIDGE / 2 * strengths.square().sum()
            (slope,) = torch.autograd.grad(value, strengths)
            strengths = (strengths + 0.5 * slope).detach().requires_grad_()
        torch.testing.assert_close(got[number, :docs], strengths.detach(), rtol=0, atol=1e-9)
    assert got[1, 3] == 0
    torch.autograd.gradcheck(lambda values: bradley_terry(values, mask), logits.requires_grad_())
    sure = torch.full((1, 2, 2), 50.0).double().triu() - torch.full((1, 2, 2), 50.0).double().tril()
    assert torch.isfinite(bradley_terry(sure, torch.ones(1, 2).bool())).all()


def test_known_strengths_come_back():
    """Comparisons that follow a Bradley-Terry model exactly give its strengths, up to the ridge."""
    true = torch.tensor([1.0, 0.2, -0.5, -0.7], dtype=torch.float64)
    got = bradley_terry((true[:, None] - true)[None], torch.ones(1, 4).bool())[0]
    torch.testing.assert_close(got, true, rtol=0, atol=0.03)


def test_mistakes():
    encoder = load_encoder("tiny")
    with pytest.raises(ConfigError, match="top: expected at least 2"):
        Duo(encoder, top=1)
    with pytest.raises(ConfigError, match="aggregation: expected one of sum, bradley_terry"):
        Duo(encoder, aggregation="max")
    assert isinstance(Duo(encoder).scorer, MonoBERT)
