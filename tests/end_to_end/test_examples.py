"""The examples run, and what they show is so."""

import math
import runpy
from pathlib import Path

import pytest

EXAMPLES = {path.stem: path for path in sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))}


def shown(name):
    return runpy.run_path(str(EXAMPLES[name]))["main"]()


def test_every_example_is_short_and_tested():
    assert set(EXAMPLES) == {"train_in_python", "measure_a_run", "own_loss"}
    assert all(len(path.read_text().splitlines()) < 70 for path in EXAMPLES.values())


def test_training_in_python_beats_the_first_stage():
    """BM25 finds a fruit's eight bowls and can't tell which four are of the colour; the trained model can, for unseen fruits."""
    measured = shown("train_in_python")
    assert measured["num_queries"] == 8 and measured["measures"]["nDCG@10"] > 0.95


def test_measures_by_hand():
    """q1 and q2 are perfect; q3's docs tie, and d8 > d7 stands first: RR 1/2."""
    assert shown("measure_a_run") == pytest.approx(
        {"RR@10": 2.5 / 3, "nDCG@10": (2 + 1 / math.log2(3)) / 3, "AP": 2.5 / 3}
    )


def test_a_loss_of_a_batch_is_the_weighted_mean_of_its_parts():
    whole, parts = shown("own_loss")
    assert whole == pytest.approx(parts, abs=1e-7) and whole > 0
