"""Sparse rankers: penalties over the whole step on every hardware layout; the penalties' gradients equal autograd's."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("sparse_run.py")
spec = importlib.util.spec_from_file_location("sparse_run", SCRIPT)
sparse_run = importlib.util.module_from_spec(spec)
sys.modules["sparse_run"] = sparse_run
spec.loader.exec_module(sparse_run)

TENTH = {"max_tokens": 420}
# with two processes, one of them has no group in the third step
TWO = {name: {"model": name, **TENTH} for name in sparse_run.MODELS}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("sparse")


@pytest.fixture(scope="module")
def alone(cache):
    """Function that trains in this process; results are cached by options."""
    done = {}

    def run(**options):
        key = json.dumps(options, sort_keys=True)
        if key not in done:
            done[key] = sparse_run.train(sparse_run.Job(str(cache), **options))
        return done[key]

    return run


@pytest.fixture(scope="module")
def together(forks, cache, alone):
    """Results of all trainings of `TWO`, in one launch of two processes."""
    alone(model="flops")  # builds the token stores
    jobs = {name: {"cache": str(cache), "devices": 2, **options} for name, options in TWO.items()}
    (cache / "jobs.json").write_text(json.dumps(jobs))
    done = forks.run(
        "tests/end_to_end/sparse_run.py",
        str(cache / "jobs.json"),
        str(cache / "results.pt"),
        cwd=cache,
        devices=2,
        timeout=300,
    )
    assert done.codes == [0, 0], done.out
    return torch.load(cache / "results.pt", weights_only=True)


def furthest(one, other):
    differences = [(one["weights"][key] - other["weights"][key]).abs().flatten() for key in one["weights"]]
    return torch.cat(differences).max().item()


def assert_equal_to_rounding(got, expected):
    assert len(got["losses"]) == 3
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-12, abs=1e-12)
    assert furthest(got, expected) < 1e-9
    assert got["val"] == pytest.approx(expected["val"], abs=1e-12)


@pytest.mark.parametrize("model", sparse_run.MODELS)
def test_two_processes_and_a_tenth_of_the_memory_change_nothing_but_rounding(together, alone, model):
    assert_equal_to_rounding(together[model], alone(model=model))


@pytest.mark.parametrize("model", ["df_flops", "l1"])
def test_penalties_and_their_gradients_are_those_of_autograd_over_one_pass(alone, model):
    assert_equal_to_rounding(alone(model=model), alone(model=model, module="OnePass"))


def test_a_wrong_gradient_of_a_penalty_is_seen(alone):
    assert furthest(alone(model="df_flops", module="Halved"), alone(model="df_flops", module="OnePass")) > 1e-6


def test_document_frequencies_are_averaged_over_the_steps(alone):
    weights = alone(model="df_flops")["weights"]
    assert weights["averaged"] == 3
    assert 0 < weights["frequencies"].max() <= 1 and weights["factor"] == 1.0  # steps 1 to 3 of 2.1 of warm-up
