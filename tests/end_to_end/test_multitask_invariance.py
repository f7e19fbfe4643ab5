"""Multitask training is hardware-invariant: one device, two processes and a small token budget take the same steps."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("multitask_run.py")
spec = importlib.util.spec_from_file_location("multitask_run", SCRIPT)
multitask_run = importlib.util.module_from_spec(spec)
sys.modules["multitask_run"] = multitask_run
spec.loader.exec_module(multitask_run)
Job, CASES = multitask_run.Job, list(multitask_run.CASES)

SMALL = 420  # token budget: a tenth of a step
names_of = multitask_run.invariance_run.names_of


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("multitask")
    multitask_run.spans_file(folder, multitask_run.invariance_run.collection(9))
    return folder


@pytest.fixture(scope="module")
def whole(cache):
    return {case: multitask_run.train(Job(str(cache), case)) for case in CASES}


@pytest.fixture(scope="module")
def two_processes(forks, cache, whole):
    jobs = {CASES[0]: {"cache": str(cache), "case": CASES[0], "devices": 2}}
    jobs |= {f"{case}, small": {"cache": str(cache), "case": case, "devices": 2, "max_tokens": SMALL} for case in CASES}
    jobs["no sum"] = {"cache": str(cache), "case": CASES[0], "devices": 2, "fault": "no sum"}
    (cache / "jobs.json").write_text(json.dumps(jobs))
    done = forks.run(
        "tests/end_to_end/multitask_run.py",
        str(cache / "jobs.json"),
        str(cache / "results.pt"),
        cwd=cache,
        devices=2,
        timeout=600,
    )
    assert done.codes == [0, 0], done.out
    return torch.load(cache / "results.pt", weights_only=True)


def furthest(one, other):
    return max(
        (one["weights"][key].double() - other["weights"][key].double()).abs().max().item() for key in one["weights"]
    )


def assert_equal(got, expected):
    assert got["losses"] == pytest.approx(expected["losses"], rel=0, abs=1e-12)
    for task_losses, reference in zip(got["tasks"], expected["tasks"], strict=True):
        assert task_losses == pytest.approx(reference, rel=0, abs=1e-12)
    assert furthest(got, expected) < 1e-9


@pytest.mark.parametrize("case", [CASES[0], CASES[-1]])
def test_rows_have_the_same_ids_in_every_layout(cache, case):
    data, small = (multitask_run.made(Job(str(cache), case, max_tokens=tokens))[1] for tokens in (100_000, SMALL))
    for index in range(3):
        assert names_of(small, index, world=2) == names_of(data, index)


@pytest.mark.parametrize("case", CASES)
def test_a_small_token_budget_changes_nothing(cache, whole, case):
    assert_equal(multitask_run.train(Job(str(cache), case, max_tokens=SMALL)), whole[case])


@pytest.mark.parametrize("case", CASES)
def test_pc55_two_processes_change_nothing(two_processes, whole, case):
    assert_equal(two_processes[f"{case}, small"], whole[case])
    if case in two_processes:
        assert_equal(two_processes[case], whole[case])


def test_every_task_is_trained_and_its_rows_are_counted(whole):
    for case, result in whole.items():
        losses = torch.tensor(result["tasks"])  # [steps, tasks]
        assert ((losses > 0).any(0)).all(), case
        assert (result["weights"]["rows_seen"] > 0).all(), case
    mixed = torch.tensor(whole["guard and uncertainty"]["tasks"])
    assert len(mixed) == 6 and (mixed[:, 0] > 0).all()
    single = torch.tensor(whole["one task a step"]["tasks"])
    assert ((single > 0).sum(1) == 1).all() and len(single) == 12


def test_what_is_learned_moves(whole):
    assert whole["guard and uncertainty"]["weights"]["weights.log_variance"].abs().min() > 1e-3
    learned = whole["pcgrad and gradnorm"]["weights"]["weights.learned"]
    assert learned.sum().item() == pytest.approx(4) and (learned - 1).abs().max() > 1e-3


def test_a_seeded_fault_is_seen(cache, whole, two_processes):
    own_means = multitask_run.train(Job(str(cache), CASES[0], max_tokens=SMALL, fault="own means"))
    assert furthest(own_means, whole[CASES[0]]) > 1e-6
    assert furthest(two_processes["no sum"], whole[CASES[0]]) > 1e-6
