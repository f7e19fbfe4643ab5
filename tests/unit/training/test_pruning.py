from types import SimpleNamespace

import optuna
import pytest
from optuna.trial import TrialState

from ranker.errors import ConfigError
from ranker.training.pruning import Prune

optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.fixture
def study(tmp_path):
    """A study in SQLite with three finished trials, whose validations were 0.2 0.4, 0.3 0.6 and 0.4 0.8."""
    found = optuna.create_study(storage=f"sqlite:///{tmp_path}/study.db", study_name="sweep", direction="maximize")
    for scale in (1, 1.5, 2):
        trial = found.ask()
        trial.report(0.2 * scale, 1)
        trial.report(0.4 * scale, 2)
        found.tell(trial, 0.4 * scale)
    return found


def fit(tmp_path, number, values, last=3, **knobs):
    """Validate with these values as Lightning does; returns how many it took and whether the trial was pruned."""
    callback = Prune(f"sqlite:///{tmp_path}/study.db", "sweep", number, "val/RR", **knobs)
    trainer = SimpleNamespace(
        is_global_zero=True, sanity_checking=False, state=SimpleNamespace(fn="fit"), should_stop=False, global_step=0,
        estimated_stepping_batches=last, strategy=SimpleNamespace(broadcast=lambda value: value), callback_metrics={},
    )  # fmt: skip
    callback.on_fit_start(trainer, None)
    for i, value in enumerate(values, 1):
        trainer.global_step, trainer.callback_metrics["val/RR"] = i, value
        callback.on_validation_end(trainer, None)
        if trainer.should_stop:
            return i, callback.pruned
    return len(values), callback.pruned


# the medians of the others are 0.3 at the first validation and 0.6 at the second
@pytest.mark.parametrize(
    ("values", "knobs", "expected"),
    [
        ([0.29, 0.9], {}, (1, True)),
        ([0.31, 0.59], {}, (2, True)),
        ([0.31, 0.61], {}, (2, False)),
        ([0.29, 0.61], {"warmup": 1}, (2, False)),
        ([0.29], {"startup_trials": 4}, (1, False)),
        ([0.29], {"keep": 75.0}, (1, False)),  # above the worst quarter's edge, 0.25
        ([0.24], {"keep": 75.0}, (1, True)),
        ([0.31], {"keep": 25.0}, (1, True)),  # below the best quarter's edge, 0.35
    ],
)
def test_a_trial_that_is_worse_than_the_others_were_at_this_validation_stops(study, tmp_path, values, knobs, expected):
    number = study.ask().number
    assert fit(tmp_path, number, values, **{"startup_trials": 3, **knobs}) == expected
    assert list(study.trials[number].intermediate_values.values()) == values[: expected[0]]


def test_the_last_validation_prunes_nothing(study, tmp_path):
    assert fit(tmp_path, study.ask().number, [0.31, 0.1], last=2, startup_trials=3) == (2, False)


def test_a_trial_that_is_over_is_left_alone_and_an_unknown_one_is_refused(study, tmp_path):
    assert fit(tmp_path, 0, [0.0], startup_trials=1) == (1, False)
    assert study.trials[0].state == TrialState.COMPLETE
    assert study.trials[0].intermediate_values == {1: 0.2, 2: 0.4}
    with pytest.raises(ConfigError, match=r"expected trial 9 of study 'sweep'"):
        fit(tmp_path, 9, [0.0])
