"""Checkpoints of the zoo, made at first use and shared by the tests of a process; a table of the measured values."""

import contextlib
import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ranker.encoders.encoder import Encoder
from ranker.encoders.loading import load_encoder
from tests.zoo.checkpoints import make
from tests.zoo.outcomes import OUTCOMES
from tests.zoo.precision import Float64Stays


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that returns a family's folder by its name."""
    root, made = tmp_path_factory.mktemp("zoo"), {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make(family, root / family)
        return made[family]

    return folder


@pytest.fixture(scope="session")
def encoder(checkpoint) -> Callable[[str], Encoder]:
    """Return a function that returns a copy of a family's encoder, which is read once."""
    loaded: dict[str, Encoder] = {}

    def copied(family: str) -> Encoder:
        if family not in loaded:
            loaded[family] = load_encoder(str(checkpoint(family)))
        return copy.deepcopy(loaded[family])

    return copied


@pytest.fixture
def float64_stays(family):
    """transformers' code computes a float64 model in float64 throughout.

    ModernBERT is left out: the layers of this package rotate in float32, too, as transformers' layers do.
    """
    with contextlib.nullcontext() if family == "modernbert" else Float64Stays():
        yield


COLUMNS = {
    "path": "test_the_path_is_the_one_of_the_table",
    "states": "test_states_of_a_batch_are_those_of_each_row_alone",
    "layers": "test_layers_are_those_of_transformers",
    "dropout": "test_dropout_acts_and_does_not_depend_on_the_layout",
    "gradient": "test_a_gradient_reaches_all_weights",
    "alone": "test_a_score_depends_on_its_pair_alone",
    "saved": "test_a_saved_model_scores_alike_to_the_bit",
    "CrossEncoder": "test_a_cross_encoder_scores_the_saved_model_alike",
    "dpr": "test_a_sentence_transformer_compares_texts_alike",
    "colbert": "test_a_multi_vector_encoder_compares_texts_alike",
    "refused": "test_a_family_that_cannot_rank_is_refused_in_one_line",
}


def pytest_terminal_summary(terminalreporter, config):
    """Print a row per family after `pytest tests/zoo`: yes or NO, and the last difference that each test measured."""
    if not any("zoo" in str(argument) for argument in config.invocation_params.args):
        return
    cells = {}
    for outcome, word in (("passed", "yes"), ("failed", "NO")):
        for report in terminalreporter.getreports(outcome):
            if found := re.search(r"(\w+)\[(.+)\]$", report.nodeid):
                worst = dict(report.user_properties).get("worst")
                cells[found.groups()] = word if worst is None else f"{word} {worst:.0e}"
    terminalreporter.write_line("| " + " | ".join(["family", "takes", *COLUMNS]) + " |")
    terminalreporter.write_line("| --- " * (len(COLUMNS) + 2) + "|")
    for family, outcome in OUTCOMES.items():
        row = [cells.get((test, family), "") for test in COLUMNS.values()]
        if any(row):
            takes = outcome.path or "refused"
            terminalreporter.write_line("| " + " | ".join([family, takes, *row]) + " |")
