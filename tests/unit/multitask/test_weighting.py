"""Loss weighting and gradient surgery against the worked values of the specification and values computed by hand."""

import math

import pytest
import torch

from ranker.multitask.gradient_surgery import combine, cosine
from ranker.multitask.gradients import Gradients
from ranker.multitask.options import TaskWeighting
from ranker.multitask.task_weights import TaskWeights, gradnorm_slopes


def weights(
    mode: str, classes=(2, 10, 2), regression=(False, False, True), given=(1.0, 1.0, 3.0), **options
) -> TaskWeights:
    return TaskWeights(TaskWeighting(mode=mode, **options), given, classes, regression).double()


def test_static_and_log_k():
    assert weights("static").coefficients([8, 2, 2]).tolist() == [1, 1, 3]
    assert weights("log_k").coefficients([8, 2, 2]).tolist() == pytest.approx(
        [1 / math.log(2), 1 / math.log(10), 3 / math.log(2)]
    )
    assert weights("log_k").coefficients([8, 0, 2])[1] == 0  # not in this step


def test_row_mean_counts_every_row_the_same():
    # ranking has 6 rows of mean loss 0.5, the tasks 3 of 1.0 and 1 of 2.0: (3 + 3 + 2) / 10
    made = weights("row_mean", given=(1.0, 1.0, 1.0))
    assert made.total(torch.tensor([0.5, 1.0, 2.0]).double(), [6, 3, 1]).item() == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("regression", "loss", "optimum", "value"),
    [(False, 2.0, math.log(4), 0.5 + math.log(2)), (True, 2.0, math.log(2), 0.5 + math.log(2) / 2)],
)
def test_uncertainty_settles_at_its_optimum(regression, loss, optimum, value):
    # exp(s) = 2 L for classes, L for numbers; L = 2 gives s = ln 4 and 1.193147
    made = weights("uncertainty", classes=(2,), regression=(regression,), given=(1.0,), lr=0.5)
    for _ in range(400):
        made.update(torch.tensor([loss]).double(), [1])
    assert made.log_variance.item() == pytest.approx(optimum, abs=1e-6)
    assert made.total(torch.tensor([loss]).double(), [1]).item() == pytest.approx(value, abs=1e-6)


def test_uncertainty_starts_at_no_weighting_is_clamped_and_leaves_absent_tasks_alone():
    made = weights("uncertainty", classes=(2, 2), regression=(False, False), given=(1.0, 1.0), lr=1e6)
    assert made.coefficients([1, 1]).tolist() == [1, 1]
    made.update(torch.tensor([2.0, 0.0]).double(), [1, 0])
    assert made.log_variance.tolist() == [5, 0]
    made.update(torch.tensor([math.nan, 0.0]).double(), [1, 1])
    assert made.log_variance.tolist() == [5, -5]  # a loss that is no number spoils nothing


def test_gradnorm_by_hand():
    # w = 1, 1; norms 3 and 1; the first task's loss halved, the second's did not move: r = 2/3, 4/3; alpha 1 -> targets
    # 4/3, 8/3
    slopes = gradnorm_slopes(
        torch.ones(2),
        torch.tensor([3.0, 1.0]),
        torch.tensor([0.5, 1.0]),
        torch.ones(2),
        torch.ones(2).bool(),
        alpha=1.0,
    )
    assert slopes.tolist() == [3.0, -1.0]
    made = weights("gradnorm", classes=(2, 2), regression=(False, False), given=(1.0, 1.0), lr=0.1, alpha=1.0)
    made.update(torch.tensor([1.0, 1.0]).double(), [1, 1], torch.tensor([3.0, 1.0]).double())
    # 1 - 0.3 and 1 + 0.1, brought back to a sum of 2
    assert made.learned.tolist() == pytest.approx([0.7 * 2 / 1.8, 1.1 * 2 / 1.8])
    assert made.first_losses.tolist() == [1, 1]
    made.update(torch.tensor([0.5, 7.0]).double(), [1, 0], torch.tensor([1.0, 0.0]).double())
    assert made.first_losses.tolist() == [1, 1] and made.learned.sum().item() == pytest.approx(2)


@pytest.mark.parametrize("mode", ["uncertainty", "gradnorm"])
def test_nothing_is_learned_of_a_step_that_is_not_finite(mode):
    made = weights(mode, classes=(2, 2), regression=(False, False), given=(1.0, 1.0), lr=0.1)
    usual = torch.tensor([0.3, 0.7]).double(), [1, 1], torch.tensor([3.0, 1.0]).double()
    made.update(*usual)
    before = {name: value.clone() for name, value in made.state_dict().items()}
    made.update(*usual, torch.tensor(False))
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    made.update(torch.tensor([0.3, 0.7]).double(), [1, 1], torch.tensor([math.inf, math.nan]).double())
    assert all(value.isfinite().all() for value in made.state_dict().values())
    if mode == "gradnorm":
        assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
        # one task's norm overflows: of the others' mean norm it is no part
        slopes = gradnorm_slopes(
            *(torch.tensor(row) for row in ([1.0] * 3, [math.inf, 3.0, 1.0], [math.nan, 1.0, 1.0], [1.0] * 3)),
            torch.tensor([False, True, True]),
            alpha=1.5,
        )
        assert slopes.tolist() == [0.0, 3.0, -1.0]


ALL = torch.ones(2, 2, dtype=torch.bool)


def test_pcgrad_of_the_specification():
    made = torch.tensor([[1.0, 0.0], [-1.0, 1.0]])
    # g1' = (.5, .5), g2' = (0, 1)
    for seed in range(3):
        assert combine(made, ALL, "pcgrad", seed).tolist() == [0.5, 1.5]
    assert combine(made, ALL, "none").tolist() == [0.0, 1.0]


# gradients of three tasks, and what each becomes by hand when it meets the two others in one order or in the other
THREE = [[1.0, 0.0], [-1.0, 1.0], [-1.0, -2.0]]
PROJECTED = {
    (0, 1, 2): [0.2, -0.1],  # (1, 0) + 1/2 (-1, 1) = (.5, .5); + 3/10 (-1, -2)
    (0, 2, 1): [0.2, 0.2],  # (1, 0) + 1/5 (-1, -2) = (.8, -.4); + 6/10 (-1, 1)
    (1, 0, 2): [-0.4, 0.2],  # (-1, 1) + (1, 0) = (0, 1); + 2/5 (-1, -2)
    (1, 2, 0): [0.0, 0.6],  # (-1, 1) + 1/5 (-1, -2) = (-1.2, .6); + 1.2 (1, 0)
    (2, 0, 1): [-1.0, -1.0],  # (-1, -2) + (1, 0) = (0, -2); + (-1, 1)
    (2, 1, 0): [0.0, -1.5],  # (-1, -2) + 1/2 (-1, 1) = (-1.5, -1.5); + 1.5 (1, 0)
}


def test_pcgrad_of_three_tasks_in_the_order_of_a_seed():
    met = set()
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        orders = [
            (task, *(j for j in torch.randperm(3, generator=generator).tolist() if j != task)) for task in range(3)
        ]
        expected = torch.tensor([PROJECTED[order] for order in orders]).sum(0)
        torch.testing.assert_close(
            combine(torch.tensor(THREE), torch.ones(3, 2, dtype=torch.bool), "pcgrad", seed), expected
        )
        met |= set(orders)
    assert met == set(PROJECTED)


class Toy(torch.nn.Module):
    """Two shared parameters, one of the ranking head, one of a task's head, one that nothing reads."""

    def __init__(self):
        super().__init__()
        self.scorer = torch.nn.Module()
        self.scorer.encoder = torch.nn.Module()
        self.scorer.encoder.shared = torch.nn.Parameter(torch.zeros(2))
        self.scorer.head, self.scorer.task, self.scorer.idle = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))


# weighted by 2 and 1 the shared gradients are (2, 0) and (-1, 1)
@pytest.mark.parametrize(
    ("surgery", "shared"),
    [("none", [1.0, 1.0]), ("pcgrad", [1.0, 2.0]), ("guard", [2.0, 1.0])],  # (1, 1) + (0, 1); (2, 0) + (0, 1)
)
def test_heads_keep_their_own_gradient(surgery, shared):
    toy = Toy()
    gradients = Gradients(toy, 2)
    gradients.add(toy.scorer.encoder.shared @ torch.tensor([1.0, 0.0]) + 3 * toy.scorer.head.sum(), 0)
    gradients.add(toy.scorer.encoder.shared @ torch.tensor([-1.0, 1.0]) - 5 * toy.scorer.task.sum(), 1)
    gradients.assign(torch.tensor([2.0, 1.0]), surgery)
    assert toy.scorer.encoder.shared.grad.tolist() == pytest.approx(shared)
    assert [toy.scorer.head.grad.item(), toy.scorer.task.grad.item()] == [6, -5]
    assert toy.scorer.idle.grad is None


def test_the_guard_leaves_ranking_alone():
    ranking, auxiliary = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 1.0])
    assert combine(torch.stack([ranking, auxiliary]), ALL, "guard").tolist() == [1.0, 1.0]  # (1, 0) + (0, 1)
    assert combine(torch.stack([ranking, -auxiliary]), ALL, "guard").tolist() == [
        2.0,
        -1.0,
    ]  # they agree: nothing is projected
    # two tasks that conflict with each other, not with ranking
    three = torch.tensor([[0.0, 1.0], [1.0, 1.0], [-1.0, 1.0]])
    assert combine(three, torch.ones(3, 2, dtype=torch.bool), "guard").tolist() == [0.0, 3.0]


@pytest.mark.parametrize("method", ["pcgrad", "guard"])
def test_surgery_adds_nothing_where_a_task_does_not_reach(method):
    # the second task reads a lower layer: the third and fourth parameter are above it
    gradients = torch.tensor([[1.0, 0.0, 5.0, 0.0], [-1.0, 1.0, 0.0, 0.0]])
    reach = torch.tensor([[True, True, True, True], [True, True, False, False]])
    ranking = gradients[0]
    both = combine(gradients, reach, method, 0)
    # as if only the shared parameters were there: the task's part is (0, 1)
    own = both - (ranking if method == "guard" else torch.tensor([0.5, 0.5, 5.0, 0.0]))
    assert own.tolist() == pytest.approx([0, 1, 0, 0])


def test_cosine_is_over_what_the_task_reaches():
    assert cosine(
        torch.tensor([1.0, 0.0, 9.0]), torch.tensor([1.0, 1.0, 0.0]), torch.tensor([True, True, False])
    ).item() == pytest.approx(math.sqrt(0.5))
    assert cosine(torch.zeros(2), torch.ones(2), torch.ones(2).bool()).item() == 0
