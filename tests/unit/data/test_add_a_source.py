"""docs/add_a_source.md holds a whole source: it is run here as it stands there."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from ranker.errors import DataError
from ranker.retrieval.first_stage import with_candidates

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "add_a_source.md").read_text(encoding="utf-8")


def block(language):
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return text


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "faq.py"
    path.write_text(block("python"), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("faq", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_loads_its_file(module, tmp_path):
    rows = "".join(f'"What is number {i}?","It is number {i % 25}, after number {i % 25 - 1}."\n' for i in range(50))
    (tmp_path / "faq.csv").write_text("question,answer\n" + rows, encoding="utf-8")
    splits = module.FAQ(str(tmp_path / "faq.csv")).load()
    assert len(splits.train.docs) == 25
    assert [len(part.queries) for part in (splits.train, splits.val, splits.tests["faq"])] == [40, 5, 5]
    parts = (splits.train, splits.val, splits.tests["faq"])
    asked = {query_id: (text, *part.qrels[query_id]) for part in parts for query_id, text in part.queries.items()}
    assert asked["q1"] == ("What is number 0?", "a1") and asked["q26"] == ("What is number 25?", "a1")
    filled = with_candidates(splits, 3, tmp_path / "cache")
    assert all(len(filled.tests["faq"].candidates[query_id]) == 3 for query_id in splits.tests["faq"].queries)


def test_the_example_names_mistakes(module, tmp_path):
    with pytest.raises(DataError, match=r"data.path: expected a CSV file, got '.*nothing.csv'"):
        module.FAQ(str(tmp_path / "nothing.csv")).load()
    (tmp_path / "faq.csv").write_text("question,answer\nWhat?,\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"faq.csv: row 1: expected a question and an answer"):
        module.FAQ(str(tmp_path / "faq.csv")).load()


def test_the_examples_yaml_fits_its_class(module):
    node = OmegaConf.create(block("yaml"))
    assert node._target_ == "ranker.data.sources.faq.FAQ"
    parameters = inspect.signature(module.FAQ).parameters
    assert [key for key in node if not key.startswith("_")] == list(parameters)
    assert OmegaConf.is_missing(node, "path") and node.split_seed == parameters["split_seed"].default
