"""A training on windows takes the same steps on one device, in two processes and with a small budget, with dropout."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def script(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


RUNS = {name: script(f"{name}_run") for name in ("invariance", "contrastive")}
CASES = [("invariance", "maxp"), ("invariance", "parade"), ("contrastive", "maxp"), ("contrastive", "parade")]
SMALL = 560  # token budget: the largest group


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("windows")


@pytest.fixture(scope="module")
def whole(cache):
    return {case: train(cache, *case) for case in CASES}


@pytest.fixture(scope="module")
def two_processes(forks, cache, whole):
    results = {}
    for run in RUNS:
        jobs = {
            case: {"cache": str(cache), "double": True, "devices": 2, "passages": case, "max_tokens": tokens}
            for case, tokens in (("maxp", 100_000), ("parade", SMALL))
        }
        (cache / "jobs.json").write_text(json.dumps(jobs))
        files = (str(cache / "jobs.json"), str(cache / "results.pt"))
        done = forks.run(f"tests/end_to_end/{run}_run.py", *files, cwd=cache, devices=2, timeout=300)
        assert done.codes == [0, 0], done.out
        found = torch.load(cache / "results.pt", weights_only=True)
        results |= {(run, case): result for case, result in found.items()}
    return results


def train(cache, run, passages, **options):
    return RUNS[run].train(RUNS[run].Job(str(cache), double=True, passages=passages, **options))


def assert_equal(got, expected):
    assert got["losses"] == pytest.approx(expected["losses"], rel=0, abs=1e-12)
    assert got["weights"].keys() == expected["weights"].keys()
    assert max((got["weights"][key] - value).abs().max().item() for key, value in expected["weights"].items()) < 1e-9
    assert got["val"] == pytest.approx(expected["val"], abs=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_a_small_token_budget_changes_nothing(cache, whole, case):
    assert_equal(train(cache, *case, max_tokens=SMALL), whole[case])


@pytest.mark.parametrize("case", CASES)
def test_two_processes_take_the_same_steps(whole, two_processes, case):
    assert_equal(two_processes[case], whole[case])


@pytest.mark.parametrize("passages", ["maxp", "parade"])
def test_cached_gradients_are_those_of_one_pass(cache, whole, passages):
    """In-batch negatives: the step's whole matrix with its graph, from one forward pass, as the reference."""
    assert_equal(whole["contrastive", passages], train(cache, "contrastive", passages, one_pass=True))
