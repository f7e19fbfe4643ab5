"""Set-Encoder: lists in any order, lists of one doc, windows of lists, and a task that only comparison solves."""

import numpy as np
import pytest
import torch

from ranker import Reranker
from ranker.data.scorer_inputs import TextLimits
from ranker.encoders.loading import load_encoder
from ranker.errors import ConfigError
from ranker.interactions.list_windows import ListWindows, score_lists
from ranker.lists.set_encoder import SetEncoder
from ranker.models.monobert import MonoBERT
from ranker.serving.interface import Part
from ranker.serving.model import RerankerModel

DOCS = ["an apple is red.", "the sky", "green grass, and more of it, and more", "x y z", "red", "an apple"]


def scorer_of(kind=SetEncoder, dropout=0.0, layers=None, **options):
    torch.manual_seed(0)
    scorer = kind(load_encoder("tiny", dropout=dropout, attention_dropout=0.0, layers=layers), **options)
    for weight in scorer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return scorer.double().eval()


def scores_of(scorer, lists, grid):
    with torch.no_grad():
        return scorer(lists(scorer, grid)).numpy()


def test_the_order_of_a_list_changes_nothing(lists):
    scorer, order = scorer_of(), [3, 0, 5, 1, 4, 2]
    whole = scores_of(scorer, lists, [range(6)])[0]
    np.testing.assert_allclose(scores_of(scorer, lists, [order])[0], whole[order], rtol=0, atol=1e-12)
    fewer = scores_of(scorer, lists, [range(5)])[0]
    assert np.abs(fewer - whole[:5]).max() > 1e-5  # and a doc's score depends on the others
    both = scores_of(scorer, lists, [[*range(5), -1], range(6)])  # but not on other lists
    np.testing.assert_allclose(both, [[*fewer, 0], whole], rtol=0, atol=1e-12)


def test_a_list_of_one_doc_is_monobert(lists):
    """Scores, gradients and dropout masks."""
    results = []
    for kind in (SetEncoder, MonoBERT):
        scorer = scorer_of(kind, dropout=0.2).train()
        scorer.encoder.dropout_seed = 5
        scores = scorer(lists(scorer, [[0], [2]]))
        scores.square().sum().backward()
        results.append([scores.detach(), *(p.grad for p in scorer.parameters() if p.grad is not None)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_a_longer_list_gives_the_other_docs_the_weight_of_a_training_group(lists):
    """In a model of one layer, a doc keeps its score if each other doc of a group of three is repeated."""
    group, longer = [0, 1, 2], [0, 1, 1, 1, 2, 2, 2]
    scaled, plain = (scorer_of(layers=1, list_size=size) for size in (3, None))
    expected = scores_of(plain, lists, [group])[0]
    np.testing.assert_allclose(scores_of(scaled, lists, [group])[0], expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(scores_of(scaled, lists, [longer])[0][0], expected[0], rtol=0, atol=1e-12)
    assert abs(scores_of(plain, lists, [longer])[0][0] - expected[0]) > 1e-5


def test_the_size_of_a_training_group_is_stored(lists, tmp_path):
    scorer = scorer_of(list_size=3)
    scorer.save(tmp_path, 64)
    loaded = SetEncoder.load(tmp_path).double().eval()
    assert loaded.list_size == 3
    expected = scores_of(scorer, lists, [range(6)])
    np.testing.assert_allclose(scores_of(loaded, lists, [range(6)]), expected, rtol=0, atol=1e-12)


def test_windows_of_a_list(lists):
    scorer = scorer_of(window=3, stride=2)
    assert [window.tolist() for window in scorer.lists.windows(6)] == [[0, 1, 2], [2, 3, 4], [3, 4, 5]]
    parts = [scores_of(scorer, lists, [window])[0] for window in ([0, 1, 2], [2, 3, 4], [3, 4, 5])]
    sums, seen = np.zeros(6), np.zeros(6)
    for part, window in zip(parts, ([0, 1, 2], [2, 3, 4], [3, 4, 5]), strict=True):
        sums[window] += part
        seen[window] += 1
    got = scores_of(scorer, lists, [range(6), [1, 4, -1, -1, -1, -1]])
    np.testing.assert_allclose(got[0], sums / seen, rtol=0, atol=1e-12)
    np.testing.assert_allclose(got[1, :2], scores_of(scorer, lists, [[1, 4]])[0], rtol=0, atol=1e-12)
    assert not got[1, 2:].any()


def test_sliding_windows_by_hand():
    """A scorer that knows the values ranks perfectly: the best 2 of each window of 4 go on to the next."""
    values, seen = np.array([3.0, 1.0, 7.0, 2.0, 9.0, 0.0, 5.0, 8.0]), []

    def score(parts):
        seen.extend(places.tolist() for _, places in parts)
        return [values[places] for _, places in parts]

    (scores,) = score_lists([8], ListWindows(4, 2, "sliding"), score)
    assert seen == [[4, 5, 6, 7], [2, 3, 4, 7], [0, 1, 4, 7]]
    assert np.argsort(-scores).tolist() == [4, 7, 0, 1, 2, 3, 6, 5]
    assert sorted(scores) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 1}, "window: expected at least 2"),
        ({"size": 4, "stride": 5}, "stride: expected 1 to window=4"),
        ({"stride": 5}, "stride: expected 1 to window=None"),
        ({"size": 4, "merge": "max"}, "merge: expected one of mean, sliding"),
    ],
)
def test_mistakes_in_windows(options, message):
    with pytest.raises(ConfigError, match=message):
        ListWindows(**options)


def test_encoders_whose_rows_cannot_see_each_other_are_refused():
    for name, message in (("tiny_lm", "attend in both directions"), ("tiny_t5", "plain attention")):
        with pytest.raises(ConfigError, match=message):
            SetEncoder(load_encoder(name), head="own", pooling="last")


def test_only_comparison_tells_whether_the_best_doc_is_repeated(repeats):
    found = {}
    for kind in (SetEncoder, MonoBERT):
        torch.manual_seed(0)
        found[kind] = repeats(kind(load_encoder("tiny", dropout=0.0, attention_dropout=0.0)), steps=80, rate=5e-3)
    assert found == {SetEncoder: 1.0, MonoBERT: 0.5}


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    scorer = scorer_of(window=4, merge="sliding").float()
    scorer.save(folder, max_tokens=64)
    loaded = SetEncoder.load(folder)
    assert loaded.lists == scorer.lists
    loaded.lists = ListWindows()
    return Reranker(loaded, TextLimits(64, 64), accelerator="cpu", precision="32-true")


def test_lists_of_a_reranker(reranker, lists):
    """A doc that is twice in a list is seen twice, and equal queries are lists of their own."""
    scorer = reranker.scorer.double()
    grid = [[0, 1, 1], [4, 5, -1]]
    with torch.no_grad():
        expected = scorer(lists(scorer, grid, queries=["red apple", "blue sky over a lake"])).numpy()
    scorer.float()
    docs = [[DOCS[0], DOCS[1], DOCS[1]], [DOCS[4], DOCS[5]]]
    ranked = reranker.rank(["red apple", "blue sky over a lake"], docs)
    for row, part in zip(expected, ranked, strict=True):
        for doc in part:
            assert doc.score == pytest.approx(row[doc.position], abs=1e-4)
    twice = reranker.rank(["red apple", "red apple"], [docs[0], docs[0][:2]])
    for part, few in zip(twice, (docs[0], docs[0][:2]), strict=True):
        alone = {doc.doc_id: doc.score for doc in reranker.rank("red apple", few)}
        assert {doc.doc_id: doc.score for doc in part} == pytest.approx(alone, abs=1e-5)


def test_requests_are_not_split_and_do_not_see_each_other(reranker):
    model = RerankerModel(reranker)
    requests = [[("red", text) for text in DOCS[:4]], [("red", DOCS[5]), ("sky", DOCS[0]), ("red", DOCS[5])]]
    parts = [Part(model.tokenize(pairs), 0, len(pairs)) for pairs in requests]
    assert all(part.pairs.whole for part in parts)
    expected = np.concatenate([reranker.score(pairs) for pairs in requests])
    np.testing.assert_allclose(model.launch(parts)(), expected, rtol=1e-5, atol=1e-5)
