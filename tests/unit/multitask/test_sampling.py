"""Sampling of tasks: probabilities, observed frequencies, and draws that depend on (seed, epoch, step) alone."""

import numpy as np
import pytest
from scipy import stats

from ranker.data.step_plan import StepPlan
from ranker.multitask.options import TaskSampling
from ranker.multitask.sampling import TaskPlan, draw_tasks, probabilities

SIZES = (10**6, 10**6, 10**4)


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(1, [0.497512, 0.497512, 0.004975]), (2, [10 / 21, 10 / 21, 1 / 21]), (5, [0.416996, 0.416996, 0.166009])],
)
def test_temperature_of_the_specification(temperature, expected):
    sampling = TaskSampling(mode="temperature", temperature=temperature, main_fraction=None)
    assert probabilities(sampling, SIZES, 0, 1).tolist() == pytest.approx(expected, abs=1e-6)


def test_the_other_modes():
    def shares(mode, epoch=0, epochs=1, **options):
        return probabilities(TaskSampling(mode=mode, main_fraction=None, **options), SIZES, epoch, epochs).tolist()

    assert shares("proportional") == pytest.approx([1 / 2.01, 1 / 2.01, 0.01 / 2.01])
    assert shares("uniform") == pytest.approx([1 / 3] * 3)
    assert shares("temperature", temperature=1, cap=10**4) == pytest.approx([1 / 3] * 3)
    assert shares("annealed", 0, 5) == pytest.approx(shares("proportional"))  # a = 1
    assert shares("temperature", temperature=float("inf")) == [1 / 3] * 3
    # the last epoch: a = 0.2, as a temperature of 5
    assert shares("annealed", 4, 5) == pytest.approx([0.416996, 0.416996, 0.166009], abs=1e-6)
    assert shares("annealed", 2, 5) == pytest.approx(shares("temperature", temperature=1 / 0.6))


def test_a_fixed_share_of_ranking():
    sampling = TaskSampling(mode="proportional", main_fraction=0.75)
    assert probabilities(sampling, (5, 30, 10), 0, 1).tolist() == pytest.approx([0.75, 0.1875, 0.0625])


def test_frequencies_are_those_asked_for():
    shares = np.array([0.5, 0.3, 0.2])
    counts = np.bincount(draw_tasks(shares, seed=3, epoch=1, count=20_000), minlength=3)
    assert stats.chisquare(counts, shares * 20_000).pvalue > 0.01
    # a seeded fault, shares of the wrong task, is seen
    assert stats.chisquare(counts, shares[::-1] * 20_000).pvalue < 1e-9


def plan(**options) -> TaskPlan:
    sizes = options.pop("sizes", (50, 20))
    return TaskPlan(StepPlan(30, 4, 1000, seed=7), 5, sizes, TaskSampling(**options), num_epochs=3)


def test_a_mixed_epoch_is_one_pass_over_ranking_with_its_share_of_rows():
    made = plan(main_fraction=0.8)
    steps = range(len(made))
    assert len(made) == 8
    assert sorted(np.concatenate([made.groups(1, step) for step in steps]).tolist()) == list(range(30))
    rows = [made.rows(1, step) for step in steps]
    # 20 ranking rows a step, so 5 others
    assert [sum(map(len, own)) for own in rows] == [5] * 8
    thirds = plan(main_fraction=0.7)  # 20 * 3 / 7 = 8.57 rows: 8 or 9, and never off by a row in the sum
    counts = [sum(map(len, thirds.rows(0, step))) for step in steps]
    assert set(counts) == {8, 9} and sum(counts) == int(8 * 20 * 3 / 7)


def test_no_row_comes_twice_before_all_came_once():
    made = plan(main_fraction=0.5)
    drawn = [np.concatenate([made.rows(0, step)[task] for step in range(len(made))]) for task in range(2)]
    for own, size in zip(drawn, (50, 20), strict=True):
        for start in range(0, len(own), size):
            part = own[start : start + size]
            assert len(set(part.tolist())) == len(part)
    assert len(drawn[1]) > 20  # so a second pass began


def test_a_step_hangs_on_nothing_but_seed_epoch_and_number():
    one, other = plan(main_fraction=0.6), plan(main_fraction=0.6)
    later = [own.tolist() for own in one.rows(2, 5)]
    for epoch in range(3):
        for step in range(len(other)):
            rows = other.rows(epoch, step)
    assert [own.tolist() for own in other.rows(2, 5)] == later
    assert rows is not None
    assert [own.tolist() for own in other.rows(1, 5)] != later


def test_a_homogeneous_step_is_one_tasks_and_passes_go_on():
    made = plan(composition="homogeneous", main_fraction=0.5)
    assert len(made) == 16
    groups, tasks = [], []
    for step in range(len(made)):
        own, rows = made.groups(0, step), made.rows(0, step)
        kinds = [len(own) > 0, *(len(part) > 0 for part in rows)]
        assert sum(kinds) == 1
        assert sum(map(len, rows)) in (0, 20)  # as many rows as 4 groups of 5 docs
        groups += own.tolist()
        tasks.append(kinds.index(True))
    first_pass = groups[:30]
    assert len(set(first_pass)) == len(first_pass)
    assert set(tasks) == {0, 1, 2}


def test_annealing_counts_the_epochs_that_its_own_steps_make():
    sampling = TaskSampling(composition="homogeneous", mode="annealed", main_fraction=0.2)
    made = TaskPlan(StepPlan(80, 8, 1000, seed=7), 5, (50, 20), sampling)
    assert len(made) == 50  # 10 steps of ranking are a fifth
    assert made.until(None, 100).num_epochs == 2
    assert [made.until(*ends).num_epochs for ends in ((4, -1), (1, 100), (4, 100), (None, 101), (None, 1))] == [
        4,
        1,
        2,
        3,
        1,
    ]
    mixed = TaskPlan(made.ranking, 5, (50, 20), TaskSampling(mode="annealed", main_fraction=0.2))
    assert mixed.until(None, 100).num_epochs == 10


def test_without_other_tasks_it_is_rankings_own_plan():
    made = plan(sizes=(), main_fraction=None)
    ranking = StepPlan(30, 4, 1000, seed=7)
    assert len(made) == len(ranking)
    assert all((made.groups(2, step) == ranking.groups(2, step)).all() for step in range(8))
    assert made.rows(0, 0) == []
