"""A training on several sets takes the same steps on one device, in two processes and with a small token budget."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("mixed_run.py")
spec = importlib.util.spec_from_file_location("mixed_run", SCRIPT)
mixed_run = importlib.util.module_from_spec(spec)
sys.modules["mixed_run"] = mixed_run
spec.loader.exec_module(mixed_run)
Job, CASES = mixed_run.Job, mixed_run.CASES

SMALL = 420  # token budget: a tenth of a step


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("mixed")


@pytest.fixture(scope="module")
def whole(cache):
    return {case: mixed_run.train(Job(str(cache), case)) for case in CASES}


@pytest.fixture(scope="module")
def two_processes(forks, cache, whole):
    jobs = {case: {"cache": str(cache), "case": case, "devices": 2} for case in CASES}
    jobs["mixed, small"] = {**jobs["mixed"], "max_tokens": SMALL}
    (cache / "jobs.json").write_text(json.dumps(jobs))
    files = (str(cache / "jobs.json"), str(cache / "results.pt"))
    done = forks.run("tests/end_to_end/mixed_run.py", *files, cwd=cache, devices=2, timeout=300)
    assert done.codes == [0, 0], done.out
    return torch.load(cache / "results.pt", weights_only=True)


def furthest(one, other):
    return max((one["weights"][key] - other["weights"][key]).abs().max().item() for key in one["weights"])


def assert_equal(got, expected):
    assert got["losses"] == pytest.approx(expected["losses"], rel=0, abs=1e-12)
    for of_sets, reference in zip(got["sets"], expected["sets"], strict=True):
        assert of_sets == pytest.approx(reference, rel=0, abs=1e-12)
    assert got["groups"] == expected["groups"]
    assert furthest(got, expected) < 1e-9
    assert got["val"] == pytest.approx(expected["val"], abs=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_a_small_token_budget_changes_nothing(cache, whole, case):
    assert_equal(mixed_run.train(Job(str(cache), case, max_tokens=SMALL)), whole[case])


@pytest.mark.parametrize("case", CASES)
def test_two_processes_change_nothing(two_processes, whole, case):
    assert_equal(two_processes[case], whole[case])
    if case == "mixed":
        assert_equal(two_processes["mixed, small"], whole[case])


def test_rows_have_the_same_ids_in_every_layout(cache):
    data, small = (mixed_run.made(Job(str(cache), "mixed", max_tokens=tokens)) for tokens in (100_000, SMALL))
    for index in range(4):
        names = mixed_run.invariance_run.names_of(data, index)
        assert mixed_run.invariance_run.names_of(small, index, world=2) == names


@pytest.mark.parametrize("case", CASES)
def test_groups_are_counted_and_every_set_is_learned_from(whole, case):
    """Shares 1 * sqrt(9), 2 * sqrt(5), 1 * sqrt(3) of 18 groups an epoch: 5.87, 8.75, 3.39 rounded to 6, 9, 3."""
    result = whole[case]
    assert result["groups"] == [12, 18, 6]
    parts = torch.tensor(result["sets"], dtype=torch.float64)  # [steps, sets]
    assert parts.sum(1).tolist() == pytest.approx(result["losses"], abs=1e-12)
    # 18 groups in steps of 4; with one set a step, 6, 9 and 3 groups need 2, 3 and 1 of them
    assert len(parts) == 2 * (5 if case == "mixed" else 6)
    assert (parts > 0).any(0).all()
    assert case == "mixed" or ((parts > 0).sum(1) == 1).all()


def test_penalties_of_a_mix_are_those_of_each_step_s_texts_and_grow_over_all_sets_steps(cache, whole):
    """A penalty is a function of the means over the texts of a step, which are of one set; the warm-up counts steps."""
    assert_equal(mixed_run.train(Job(str(cache), "sparse", one_pass=True)), whole["sparse"])
    assert whole["sparse"]["factors"] == pytest.approx([(step / 12) ** 2 for step in range(1, 13)])
    weights = whole["sparse"]["weights"]
    assert weights["averaged"] == 12 and 0 < weights["frequencies"].max() <= 1


def test_the_map_of_a_set_s_loss_is_trained(whole):
    stored = {key: value.item() for key, value in whole["mixed"]["weights"].items() if key.startswith("loss.")}
    assert set(stored) == {"loss.registered.1.log_scale", "loss.registered.1.shift"}
    assert all(abs(value) > 1e-4 for value in stored.values())


def test_each_set_is_validated_and_the_mean_is_theirs(whole):
    values = whole["mixed"]["val"]
    for measure in ("nDCG@10", "RR"):
        of_sets = [values[f"val/{name}/{measure}"] for name in ("judged", "taught", "triples")]
        assert values[f"val/{measure}"] == pytest.approx(sum(of_sets) / 3, abs=1e-7)
    assert len({values[f"val/{name}/nDCG@10"] for name in ("judged", "taught")}) == 2


def test_a_seeded_fault_is_seen(cache, whole):
    small, large = (
        mixed_run.train(Job(str(cache), "mixed", max_tokens=tokens, fault="equal sets")) for tokens in (SMALL, 100_000)
    )
    assert furthest(small, large) > 1e-6
