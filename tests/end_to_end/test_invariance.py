"""Hardware-invariant training with dropout: devices, memory and micro-batches change only rounding."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from ranker.data.collection import Splits
from ranker.data.datamodule import RankData
from ranker.data.options import BatchOptions
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.encoders.tiny import tiny_tokenizer

SCRIPT = Path(__file__).with_name("invariance_run.py")
spec = importlib.util.spec_from_file_location("invariance_run", SCRIPT)
invariance_run = importlib.util.module_from_spec(spec)
sys.modules["invariance_run"] = invariance_run
spec.loader.exec_module(invariance_run)

FLOAT64, FLOAT32 = {"double": True}, {"optimizer": "sgd"}
LAYOUTS = {
    "tenth of the budget": {"max_tokens": 420},
    "three micro-batches": {"min_micro_batches": 3},
    "two processes, one empty at a step": {"devices": 2},
    "two processes, a tenth of the budget": {"devices": 2, "max_tokens": 420},
}

# further models and losses, each in the layout that differs most
OTHERS = {name: {"model": name} for name in ("mono_t5", "shared_lm", "set_encoder", "listwise_lm")} | {
    "duo": {"model": "duo", "max_tokens": 2720},
    "reinforce": {"loss": "reinforce"},
}
OTHERS |= {name: {"model": name} for name in ("early_exit", "distilled", "layer_drop")}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("invariance")


def alone(cache, **options):
    return invariance_run.train(invariance_run.Job(str(cache), **options))


def launch(forks, cache, **jobs):
    """Run these trainings in one launch of two processes; returns exit codes with output, and the results."""
    jobs = {name: {"cache": str(cache), "devices": 2, **options} for name, options in jobs.items()}
    (cache / "jobs.json").write_text(json.dumps(jobs))
    out = cache / "results.pt"
    out.unlink(missing_ok=True)
    done = forks.run(
        "tests/end_to_end/invariance_run.py", str(cache / "jobs.json"), str(out), cwd=cache, devices=2, timeout=180
    )
    return done, torch.load(out, weights_only=True) if out.exists() else None


@pytest.fixture(scope="module")
def reference(cache):
    return {64: alone(cache, **FLOAT64), 32: alone(cache, **FLOAT32)} | {
        name: alone(cache, **{**FLOAT64, **options, "max_tokens": 100_000}) for name, options in OTHERS.items()
    }


@pytest.fixture(scope="module")
def together(forks, cache, reference):
    """Results of the trainings in two processes, and of one with a fault."""
    layouts = {name: options for name, options in LAYOUTS.items() if "devices" in options}
    jobs = {f"64 {name}": {**FLOAT64, **options} for name, options in layouts.items()}
    jobs |= {f"32 {name}": {**FLOAT32, **options} for name, options in layouts.items()}
    jobs |= {name: {**FLOAT64, "max_tokens": 450, **options} for name, options in OTHERS.items()}
    done, results = launch(forks, cache, **jobs, **{"fault world": {**FLOAT64, "fault": "world"}})
    assert done.codes == [0, 0], done.out
    return results


def furthest(one, other):
    return max((one["weights"][key] - other["weights"][key]).abs().max().item() for key in one["weights"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float64_losses_equal_to_1e_12_and_weights_to_1e_9(request, cache, reference, layout):
    options = LAYOUTS[layout]
    got = (
        request.getfixturevalue("together")[f"64 {layout}"]
        if "devices" in options
        else alone(cache, **FLOAT64, **options)
    )
    assert got["losses"] == pytest.approx(reference[64]["losses"], rel=0, abs=1e-12)
    assert furthest(got, reference[64]) < 1e-9
    assert got["val"] == pytest.approx(
        reference[64]["val"], abs=1e-12
    )  # each query counts once, whichever device scored it


@pytest.mark.parametrize("name", OTHERS)
def test_others_equal_in_two_processes_with_a_tenth_of_the_budget(together, reference, name):
    assert together[name]["losses"] == pytest.approx(reference[name]["losses"], rel=0, abs=1e-12)
    assert furthest(together[name], reference[name]) < 1e-9


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_sgd_losses_equal_to_1e_6_and_weights_to_1e_5(request, cache, reference, layout):
    options = LAYOUTS[layout]
    got = (
        request.getfixturevalue("together")[f"32 {layout}"]
        if "devices" in options
        else alone(cache, **FLOAT32, **options)
    )
    assert got["losses"] == pytest.approx(reference[32]["losses"], rel=1e-6)
    assert furthest(got, reference[32]) < 1e-5


@pytest.mark.parametrize("reads", ["pairs", "texts"])
def test_rows_have_the_same_ids_in_every_layout(cache, reads):
    """Dropout depends on row ids; two queries, docs or pairs of a step never share an id."""
    whole, small = (
        RankData(
            Splits(invariance_run.collection(9), None, {}),
            ScorerInputs(tiny_tokenizer(), reads, 512),
            BatchOptions(queries=4, docs=5, positives=2, max_tokens=tokens),
            TextLimits(16, 64),
            seed=3,
            cache_dir=cache,
        )
        for tokens in (100_000, 420)
    )
    for index in range(3):
        names = invariance_run.names_of(whole, index)
        assert len(names) > (5 if reads == "texts" else 3)
        assert invariance_run.names_of(small, index, world=2) == names


def test_steps_are_three_an_epoch(reference):
    """Six steps are too few to show learning; tests/unit/training/test_optimizer_steps.py tests it."""
    losses = reference[64]["losses"]
    assert len(losses) == len(set(losses)) == 6
    assert losses == pytest.approx([math.log(2)] * 6, abs=0.02)  # RankNet's loss of an untrained scorer


@pytest.mark.parametrize("fault", ["share", "masks"])
def test_a_seeded_fault_on_one_device_is_seen(cache, reference, fault):
    assert furthest(alone(cache, **FLOAT64, max_tokens=420, fault=fault), reference[64]) > 1e-6


def test_a_seeded_fault_in_two_processes_is_seen(together, reference):
    assert furthest(together["fault world"], reference[64]) > 1e-6


def test_a_step_that_never_waits_for_the_other_device_is_seen(forks, cache, reference):
    done, results = launch(forks, cache, **{"fault sync": {**FLOAT64, "fault": "sync"}})
    # one process may block in a reduction that the other never enters
    assert any(done.codes) or furthest(results["fault sync"], reference[64]) > 1e-6
