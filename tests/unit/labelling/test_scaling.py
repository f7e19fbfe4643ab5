"""Scaling, the mean of teachers and docs at quantiles: hand-computed values, and a plain loop."""

from itertools import pairwise

import numpy as np
import pytest

from ranker.errors import ConfigError
from ranker.labelling.scaling import at_quantiles, mean_of_teachers, scaled

OFFSETS = np.array([0, 3, 4, 6])
SCORES = np.array([2.0, 4.0, 9.0, 7.0, -1.0, -1.0])


def test_zscore_by_hand():
    # mean 5, squared distances 9, 1, 16: variance 26 / 3
    root = (26 / 3) ** 0.5
    expected = [-3 / root, -1 / root, 4 / root, 0.0, 0.0, 0.0]
    np.testing.assert_allclose(scaled(SCORES, OFFSETS, "zscore"), expected, rtol=1e-14)


def test_minmax_by_hand():
    np.testing.assert_allclose(scaled(SCORES, OFFSETS, "minmax"), [0, 2 / 7, 1, 0, 0, 0], rtol=1e-14)


def test_none_keeps_scores():
    assert scaled(SCORES.astype(np.float32), OFFSETS, "none").tolist() == SCORES.tolist()


def test_equal_scores_of_any_size_are_0():
    scores = np.full(3, np.float32(0.1) * 3e7)
    for scaling in ("zscore", "minmax"):
        assert scaled(scores, np.array([0, 3]), scaling).tolist() == [0, 0, 0]


def test_no_pairs():
    assert len(scaled(np.zeros(0), np.array([0]), "zscore")) == 0


def test_an_unknown_scaling():
    with pytest.raises(ConfigError, match="scale: expected one of none, zscore, minmax, got 'rank'"):
        scaled(SCORES, OFFSETS, "rank")


def test_the_mean_is_that_of_scaled_scores_so_that_no_teacher_outweighs_another():
    one, other = np.array([0.0, 1.0, 2.0]), np.array([300.0, 100.0, 200.0])
    # minmax: 0, 1/2, 1 and 1, 0, 1/2
    got = mean_of_teachers([one, other], np.array([0, 3]), "minmax")
    np.testing.assert_allclose(got, [0.5, 0.25, 0.75], rtol=1e-14)


def chosen(scores, always, count):
    """What `at_quantiles` keeps of one query, in a plain loop."""
    others = sorted((i for i in range(len(scores)) if not always[i]), key=lambda i: -scores[i])
    wanted = min(max(count - sum(always), 0), len(others))
    ranks = [round(j * (len(others) - 1) / max(wanted - 1, 1)) for j in range(wanted)]
    return {others[rank] for rank in ranks} | {i for i in range(len(scores)) if always[i]}


def test_quantiles_equal_a_plain_loop_and_keep_the_count():
    rng = np.random.default_rng(0)
    for count in (1, 2, 3, 5, 8, 40):
        sizes = rng.integers(1, 20, 30)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        scores, always = rng.normal(size=offsets[-1]), rng.random(offsets[-1]) < 0.2
        kept = at_quantiles(scores, offsets, always, count)
        for start, end in pairwise(offsets):
            got = set(np.flatnonzero(kept[start:end]).tolist())
            assert got == chosen(scores[start:end], always[start:end], count)
            assert len(got) == max(min(count, end - start), always[start:end].sum())


def test_quantiles_cover_the_range_by_hand():
    # 9 other docs of scores 9..1, one relevant of score 0; 4 docs: the relevant one, and ranks 0, 4 and 8
    scores = np.array([9.0, 8, 7, 6, 5, 4, 3, 2, 1, 0])
    kept = at_quantiles(scores, np.array([0, 10]), scores == 0, 4)
    assert scores[kept].tolist() == [9, 5, 1, 0]
