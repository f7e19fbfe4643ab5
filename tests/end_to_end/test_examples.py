"""The examples run, and their results are right."""

import math
import runpy
from pathlib import Path

import pytest

EXAMPLES = {path.stem: path for path in sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))}


def result_of(name):
    return runpy.run_path(str(EXAMPLES[name]))["main"]()


def test_every_example_is_short_and_tested():
    assert set(EXAMPLES) == {"train_in_python", "measure_a_run", "own_loss"}
    assert all(len(path.read_text().splitlines()) < 100 for path in EXAMPLES.values())


def test_training_in_python_beats_the_first_stage():
    """BM25 finds the eight bowls of a fruit but not the colour of four; the trained model does, for unseen fruits."""
    measured = result_of("train_in_python")
    assert measured["num_queries"] == 8 and measured["measures"]["nDCG@10"] > 0.95


def test_measures_by_hand():
    """q1 and q2 are perfect. The docs of q3 tie, and d8 comes first because d8 > d7: RR is 1/2."""
    assert result_of("measure_a_run") == pytest.approx(
        {"RR@10": 2.5 / 3, "nDCG@10": (2 + 1 / math.log2(3)) / 3, "AP": 2.5 / 3}
    )


def test_a_loss_of_a_batch_is_the_weighted_mean_of_its_parts():
    whole, parts = result_of("own_loss")
    assert whole == pytest.approx(parts, abs=1e-7) and whole > 0
