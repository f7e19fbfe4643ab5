"""Contrastive training: negatives of the whole step on every hardware layout; GradCache equals one pass."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("contrastive_run.py")
spec = importlib.util.spec_from_file_location("contrastive_run", SCRIPT)
contrastive_run = importlib.util.module_from_spec(spec)
sys.modules["contrastive_run"] = contrastive_run
spec.loader.exec_module(contrastive_run)

FLOAT64, FLOAT32 = {"double": True}, {"optimizer": "sgd"}
TENTH = {"max_tokens": 420}
# with two processes, one of them has no group in the third step
TWO = {
    "dpr 64": {**FLOAT64}, "dpr 64 tenth": {**FLOAT64, **TENTH}, "dpr 32 tenth": {**FLOAT32, **TENTH},
    "colbert 64 tenth": {"model": "colbert", "small_blocks": True, **FLOAT64, **TENTH},
    "matryoshka 64 tenth": {"model": "matryoshka", **FLOAT64, **TENTH},
    "fault": {"fault": "detached docs", **FLOAT64},
}  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("contrastive")


@pytest.fixture(scope="module")
def alone(cache):
    """Function that trains in this process; results are cached by options."""
    done = {}

    def run(**options):
        key = json.dumps(options, sort_keys=True)
        if key not in done:
            done[key] = contrastive_run.train(contrastive_run.Job(str(cache), **options))
        return done[key]

    return run


@pytest.fixture(scope="module")
def together(forks, cache, alone):
    """Results of all trainings of `TWO`, in one launch of two processes."""
    alone(**FLOAT64)  # builds the token stores
    jobs = {name: {"cache": str(cache), "devices": 2, **options} for name, options in TWO.items()}
    (cache / "jobs.json").write_text(json.dumps(jobs))
    done = forks.run(
        "tests/end_to_end/contrastive_run.py",
        str(cache / "jobs.json"),
        str(cache / "results.pt"),
        cwd=cache,
        devices=2,
        timeout=300,
    )
    assert done.codes == [0, 0], done.out
    return torch.load(cache / "results.pt", weights_only=True)


def furthest(one, other):
    return max((one["weights"][key] - other["weights"][key]).abs().max().item() for key in one["weights"])


def assert_equal_to_rounding(got, expected, double):
    assert len(got["losses"]) == 3
    assert got["losses"] == (
        pytest.approx(expected["losses"], rel=0, abs=1e-12) if double else pytest.approx(expected["losses"], rel=1e-6)
    )
    assert furthest(got, expected) < (1e-9 if double else 1e-5)
    assert got["val"] == pytest.approx(expected["val"], abs=1e-12)


@pytest.mark.parametrize("model", ["dpr", "separate", "colbert"])
def test_a_tenth_of_the_memory_changes_nothing_but_rounding_in_float64(alone, model):
    expected = alone(model=model, **FLOAT64)
    assert_equal_to_rounding(
        alone(model=model, small_blocks=model == "colbert", **FLOAT64, **TENTH), expected, double=True
    )


@pytest.mark.parametrize("model", ["dpr", "colbert"])
def test_a_tenth_of_the_memory_changes_nothing_but_rounding_in_float32(alone, model):
    assert_equal_to_rounding(alone(model=model, **FLOAT32, **TENTH), alone(model=model, **FLOAT32), double=False)


@pytest.mark.parametrize("name", [name for name in TWO if "fault" not in name])
def test_pc46_two_processes_change_nothing_but_rounding(together, alone, name):
    options = {key: value for key, value in TWO[name].items() if key not in ("max_tokens", "small_blocks")}
    assert_equal_to_rounding(together[name], alone(**options), double="double" in options)


@pytest.mark.parametrize("model", ["dpr", "separate", "colbert"])
def test_gradcache_is_one_pass_bit_for_bit_with_one_micro_batch_and_dropout(alone, model):
    cached, plain = (alone(model=model, attention_dropout=0.1, one_pass=one_pass) for one_pass in (False, True))
    assert [loss.hex() for loss in cached["losses"]] == [loss.hex() for loss in plain["losses"]]
    assert furthest(cached, plain) == 0.0


def test_under_bf16_autocast_the_second_pass_reaches_the_weights(alone):
    # autocast caches converted weights; cached weights from the pass without a graph would have no gradient
    cached, plain = (alone(precision="bf16-mixed", one_pass=one_pass, **FLOAT32) for one_pass in (False, True))
    assert cached["losses"] == pytest.approx(plain["losses"], rel=1e-2)
    assert furthest(cached, plain) < 1e-2
    moved = {
        key: (value - alone(**FLOAT32)["weights"][key]).abs().max().item() for key, value in cached["weights"].items()
    }
    assert max(moved.values()) < 0.05


@pytest.mark.parametrize("fault", ["detached docs", "temperature twice"])
def test_a_seeded_fault_is_seen(alone, fault):
    options = {**FLOAT64, **FLOAT32}  # Adam would hide a factor
    assert furthest(alone(fault=fault, **options), alone(one_pass=True, **options)) > 1e-6


def test_dropout_that_is_not_replayed_is_seen(alone):  # shows that dropout was on
    assert furthest(alone(fault="no replay"), alone(one_pass=True)) > 1e-3


def test_a_seeded_fault_in_two_processes_is_seen(together, alone):
    assert furthest(together["fault"], alone(**FLOAT64)) > 1e-6
