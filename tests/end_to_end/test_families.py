"""Families of encoders from the command line: training, resume, evaluation, search and exports; see `family.py`.

One family of each path trains, resumes and evaluates in each test run. All families and all commands:

    python -m pytest -m every_family tests/end_to_end/test_families.py
"""

import pytest
from family import Walk, write_data

from tests.zoo.checkpoints import make
from tests.zoo.outcomes import OUTCOMES

# one of each path, an encoder inside of an encoder-decoder, and a decoder
FAMILIES = ("modernbert", "deberta-v3", "convbert", "t5", "qwen3")
REFUSED = {"fnet": ["colbert st"], "ibert": ["colbert"]}  # no attention mask; a table that can't be extended


@pytest.fixture
def walk(request, forks, tmp_path):
    family = request.getfixturevalue("family")
    return Walk(forks, make(family, tmp_path / "checkpoint"), write_data(tmp_path / "words"), tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_resumes_and_evaluates_alike(family, walk):
    assert walk.monobert(exports=False) == dict.fromkeys(("train", "resume", "evaluate"), "yes"), walk.messages


@pytest.mark.every_family
@pytest.mark.parametrize("family", OUTCOMES)
def test_a_family_does_all_that_the_table_of_encoders_says(family, walk):
    outcome, cells = OUTCOMES[family], {name: cell.split()[0] for name, cell in walk.all().items()}
    refused = ["train"] if outcome.refused else REFUSED.get(family, [])
    if not (outcome.own_export or outcome.refused):
        refused = ["hf", *refused]
    assert "NO" not in cells.values() and [name for name in cells if cells[name] == "refused"] == refused, walk.messages
