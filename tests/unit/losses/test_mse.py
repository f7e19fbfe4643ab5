import pytest
import torch

from ranker.errors import ConfigError
from ranker.losses.mse import MSE


def test_value_by_hand(value):
    # Group 1: (1 - 3)^2 = 4, (0.5 + 2)^2 = 6.25, (0 - 0)^2 = 0: 10.25 / 3 = 3.416667. Group 2, one doc: (2 - 5)^2 = 9.
    # Mean over groups: 6.208333; a mean over all docs would be 19.25 / 4 = 4.8125.
    assert value(MSE(), [[1.0, 0.5, 0.0], [2.0]], [[3.0, -2.0, 0.0], [5.0]]) == pytest.approx(6.208333, abs=1e-6)


def test_same_as_loop(same_as_loop):
    def group_value(scores, labels):
        errors = [(score - label) ** 2 for score, label in zip(scores, labels, strict=True)]
        return sum(errors) / len(errors) if errors else 0.0

    same_as_loop(MSE(), group_value, grades=(-3.2, 0.1, 1.7, 4.4))


def test_the_map_by_hand(value):
    # a = 2, b = -1: scores 1, 0.5, 0 become 1, 0, -1, and 2 becomes 3.
    # Group 1: (1 - 3)^2 = 4, (0 + 2)^2 = 4, (-1 - 0)^2 = 1: 9 / 3 = 3. Group 2: (3 - 5)^2 = 4. Mean: 3.5.
    for loss in (MSE(scale=2.0, offset=-1.0), MSE(affine=True, scale=2.0, offset=-1.0)):
        assert value(loss, [[1.0, 0.5, 0.0], [2.0]], [[3.0, -2.0, 0.0], [5.0]]) == pytest.approx(3.5, abs=1e-6)
    assert not list(MSE(scale=2.0).parameters())


def test_gradients_of_the_map_by_hand():
    # One group, one doc, s = 3, y = 1, a = 1, b = 0: the error is 2, so d/db = 2 * 2 = 4 and d/d(log a) = 4 * a s = 12
    loss = MSE(affine=True)
    loss(torch.tensor([[3.0]]), torch.tensor([[1.0]]), torch.tensor([[True]])).backward()
    assert {name: p.grad.item() for name, p in loss.named_parameters()} == {"log_scale": 12.0, "shift": 4.0}


def test_a_trained_map_finds_the_teacher_s_scale_and_keeps_the_order():
    scores = torch.tensor([[1.0, -0.5, 0.25, 2.0]])
    loss, mask = MSE(affine=True), torch.ones(1, 4, dtype=torch.bool)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.05)
    for _ in range(800):
        optimizer.zero_grad()
        loss(scores, 7 * scores - 3, mask).backward()
        optimizer.step()
    assert loss.log_scale.exp().item() == pytest.approx(7, abs=0.01)
    assert loss.shift.item() == pytest.approx(-3, abs=0.01)


@pytest.mark.parametrize(("option", "number"), [("scale", 0.0), ("scale", float("nan")), ("offset", float("inf"))])
def test_a_map_that_is_none_is_refused(option, number):
    with pytest.raises(ConfigError, match=rf"^loss.{option}: expected a finite number"):
        MSE(**{option: number})
