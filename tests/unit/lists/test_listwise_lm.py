"""One row for a list: tokens by hand, transformers' own states, orders in training, windows, a task of comparison."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from ranker.encoders.loading import load_encoder
from ranker.errors import CheckpointError, ConfigError
from ranker.lists.listwise_lm import ListwiseLM

QUERY = "red apple"
DOCS = ["an apple is red.", "the sky", "green grass, and more of it, and more", "x y z", "red", "an apple"]


def scorer_of(**options):
    torch.manual_seed(0)
    scorer = ListwiseLM(load_encoder("tiny_lm"), **options)
    for weight in scorer.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return scorer.double().eval()


def scores_of(scorer, lists, grid):
    with torch.no_grad():
        return scorer(lists(scorer, grid)).numpy()


def row_of(scorer, docs):
    """The tokens of a list's row, and where its docs end."""
    tokenizer = scorer.encoder.tokenizer
    end, begin = tokenizer.eos_token_id, tokenizer("a")["input_ids"][:-1]
    begin = [token for token in begin if token == tokenizer.bos_token_id]
    row = [*begin, *tokenizer(f"Query: {QUERY}", add_special_tokens=False)["input_ids"], end]
    ends = []
    for doc in docs:
        row += [*tokenizer(f"Document: {doc}", add_special_tokens=False)["input_ids"], end]
        ends.append(len(row) - 1)
    row += [*tokenizer(f"Query: {QUERY}", add_special_tokens=False)["input_ids"], end]
    return row, ends


def by_hand(scorer, docs):
    """The scores of a list from transformers' model on its row."""
    row, ends = row_of(scorer, docs)
    with torch.no_grad():
        states = scorer.encoder.model(torch.tensor([row])).last_hidden_state[0]
        vectors, query = scorer.projection(states[ends]), scorer.projection(states[-1])
        if scorer.similarity == "cosine":
            return (functional.cosine_similarity(vectors, query, dim=1) / scorer.temperature).numpy()
        return (vectors @ query).numpy()


@pytest.mark.parametrize(
    "options",
    [{"projection": 8}, {"similarity": "cosine", "projection": None, "temperature": 0.5}],
    ids=["dot", "cosine"],
)
def test_scores_are_those_of_transformers_on_one_row(lists, options):
    scorer = scorer_of(**options)
    got = scores_of(scorer, lists, [[0, 1, 2, 3], [5, 4, -1, -1]])
    np.testing.assert_allclose(got[0], by_hand(scorer, DOCS[:4]), rtol=0, atol=1e-9)
    np.testing.assert_allclose(got[1, :2], by_hand(scorer, [DOCS[5], DOCS[4]]), rtol=0, atol=1e-9)
    assert not got[1, 2:].any()


def test_windows_of_a_list(lists):
    scorer = scorer_of(window=3, stride=2)
    windows = [[0, 1, 2], [2, 3, 4], [3, 4, 5]]
    sums, seen = np.zeros(6), np.zeros(6)
    for window in windows:
        sums[window] += by_hand(scorer, [DOCS[doc] for doc in window])
        seen[window] += 1
    np.testing.assert_allclose(scores_of(scorer, lists, [range(6)])[0], sums / seen, rtol=0, atol=1e-9)
    order = list(range(6))
    for start in (3, 1, 0):  # sliding, from the end to the start
        part = order[start : start + 3]
        ranks = np.argsort(-by_hand(scorer, [DOCS[doc] for doc in part]))
        order[start : start + 3] = [part[rank] for rank in ranks]
    sliding = scorer_of(window=3, stride=2, merge="sliding")
    got = scores_of(sliding, lists, [range(6), [0, 1, -1, -1, -1, -1]])
    assert np.argsort(-got[0]).tolist() == order
    np.testing.assert_allclose(got[1, :2], by_hand(sliding, DOCS[:2]), rtol=0, atol=1e-9)


def test_a_list_that_is_too_long_is_read_in_few_equal_rows(lists, caplog):
    scorer = scorer_of()
    positions = max(len(row_of(scorer, part)[0]) for part in (DOCS[:3], DOCS[3:]))
    scorer.encoder.config.max_position_embeddings = positions
    with caplog.at_level("WARNING"):
        got = scores_of(scorer, lists, [range(6)])[0]
    np.testing.assert_allclose(got[:3], by_hand(scorer, DOCS[:3]), rtol=0, atol=1e-9)
    np.testing.assert_allclose(got[3:], by_hand(scorer, DOCS[3:]), rtol=0, atol=1e-9)
    (record,) = caplog.records
    assert f"a list of 6 docs has more tokens than the {positions} positions of the encoder" in record.message
    assert "it is read in 2 rows" in record.message
    scorer.encoder.config.max_position_embeddings = 30
    with pytest.raises(CheckpointError, match="max_doc_tokens: expected rows of at most 30 tokens"):
        scores_of(scorer, lists, [range(6)])


def test_the_order_in_training_depends_on_step_and_query_alone(lists):
    scorer = scorer_of().train()

    def orders(seed, grid, groups):
        scorer.encoder.dropout_seed = seed
        batch = lists(scorer, grid)
        batch.group_ids = torch.tensor(groups)
        from ranker.data.list_rows import ListTexts

        texts = ListTexts.of(batch, scorer._literals)
        found = scorer._parts(batch, texts)
        scores = scorer(batch).detach().numpy()
        for (number, order), row in zip(found, grid, strict=True):
            expected = by_hand(scorer, [DOCS[row[place]] for place in order])
            np.testing.assert_allclose(scores[number][order], expected, rtol=0, atol=1e-9)
        return [order.tolist() for _, order in found]

    one = orders(5, [range(6), range(6)], [0, 1])
    assert one[0] != one[1] and sorted(one[0]) == list(range(6))
    assert orders(5, [range(6)], [1]) == one[1:]  # in another micro-batch
    assert orders(6, [range(6), range(6)], [0, 1]) != one  # in another step
    scorer.shuffle = False
    assert orders(5, [range(6)], [0]) == [list(range(6))]


def test_only_comparison_tells_whether_the_best_doc_is_repeated(repeats):
    torch.manual_seed(0)
    assert repeats(ListwiseLM(load_encoder("tiny_lm"), projection=64), steps=120) > 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"similarity": "l2"}, "similarity: expected cosine or dot"),
        ({"temperature": 0.0}, "temperature: expected a number above 0"),
        ({"projection": 0}, "projection: expected at least 1"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ConfigError, match=message):
        ListwiseLM(load_encoder("tiny_lm"), **options)
