from math import exp, log

import pytest

from ranker.errors import ConfigError
from ranker.losses.infonce import InfoNCE


def test_value_by_hand(value):
    # Scores 2, 1, 0 with labels 1, 3, 0: ln(e^2 + e + 1) = 2.407606; 0.407606 and 1.407606: mean 0.907606. The second
    # group has no negative: 0. Mean 0.453803.
    assert value(InfoNCE(), [[2.0, 1.0, 0.0], [3.0]], [[1.0, 3.0, 0.0], [1.0]]) == pytest.approx(0.453803, abs=1e-6)


def test_any_positive_by_hand(value):
    # -ln((e^2 + e) / (e^2 + e + 1)) = 2.407606 - 2.313262 = 0.094344. Without a positive: 0. Mean 0.047172.
    loss = InfoNCE(positives="any")
    assert value(loss, [[2.0, 1.0, 0.0], [3.0, 1.0]], [[1.0, 3.0, 0.0], [0.0, 0.0]]) == pytest.approx(
        0.047172, abs=1e-6
    )


@pytest.mark.parametrize("positives", ["each", "any"])
def test_same_as_loop(same_as_loop, positives):
    def group_value(scores, labels):
        shares = [exp(score / 0.7) / sum(exp(other / 0.7) for other in scores) for score in scores]
        chosen = [share for share, label in zip(shares, labels, strict=True) if label > 0]
        if not chosen or len(chosen) == len(shares):
            return 0.0
        return -log(sum(chosen)) if positives == "any" else sum(-log(share) for share in chosen) / len(chosen)

    same_as_loop(InfoNCE(positives, temperature=0.7), group_value)


def test_other_words_are_refused():
    with pytest.raises(ConfigError, match=r"loss\.positives: expected one of each, any; got 'all'"):
        InfoNCE(positives="all")
