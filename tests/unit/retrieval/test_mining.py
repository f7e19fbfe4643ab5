"""Hard negatives: window, draws, margins, denoising; known positives never."""

import pytest

from ranker.assembly.data import mined_set
from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs, Splits
from ranker.errors import ConfigError
from ranker.retrieval.mining import Mining, mine

DOCS = [f"d{i}" for i in range(10)]
# d0 best: 10, 9, ... 1
FOUND = Candidates.from_lists([(query_id, DOCS, [10.0 - i for i in range(10)]) for query_id in ("q1", "q2")])
COLLECTION = Collection(
    "c",
    MemoryDocs(Doc(doc_id, doc_id) for doc_id in DOCS),
    {"q1": "a", "q2": "b"},
    {"q1": {"d2": 1, "d4": 2, "d6": 0}, "q2": {"d0": 1}},
)


def negatives(options, **more):
    return {query_id: list(docs) for query_id, docs in mine(FOUND, COLLECTION, options, **more).items()}


def exact(query_id, doc_ids):
    return {doc_id: 10.0 - DOCS.index(doc_id) for doc_id in doc_ids}


def test_pc32_known_positives_are_never_negatives_and_low_grades_may_be():
    assert negatives(Mining(last=8)) == {
        "q1": ["d0", "d1", "d3", "d5", "d6", "d7"],
        "q2": ["d1", "d2", "d3", "d4", "d5", "d6", "d7"],
    }


def test_a_doc_with_the_text_of_a_positive_is_no_negative():
    texts = {"d1": "d2"}  # q1's positive d2 again
    docs = MemoryDocs(Doc(doc_id, texts.get(doc_id, doc_id)) for doc_id in DOCS)
    collection = Collection("c", docs, COLLECTION.queries, COLLECTION.qrels)
    assert {query_id: list(found) for query_id, found in mine(FOUND, collection, Mining(last=4)).items()} == {
        "q1": ["d0", "d3"], "q2": ["d1", "d2", "d3"],
    }  # fmt: skip


def test_a_window_of_ranks_and_a_count():
    assert negatives(Mining(first=3, last=6, count=2)) == {"q1": ["d3", "d5"], "q2": ["d2", "d3"]}
    assert mine(FOUND, COLLECTION, Mining(first=4, last=4))["q1"] == {"d3": 7.0}  # with the search's own score


def test_random_ones_of_the_window_are_the_same_for_a_seed():
    draws = [negatives(Mining(last=10, count=3, order="random", seed=seed)) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert all(len(set(docs)) == 3 and not {"d2", "d4"} & set(docs) for docs in (draws[0]["q1"], draws[2]["q1"]))
    assert draws[0]["q1"] != draws[0]["q2"]
    many = [negatives(Mining(last=10, count=1, order="random", seed=seed))["q1"][0] for seed in range(60)]
    assert set(many) == set(DOCS) - {"d2", "d4"}


def test_a_margin_to_the_best_positive():
    # q1: the best positive d2 has 8; q2: d0 has 10
    assert negatives(Mining(margin=2.0), score=exact) == {
        "q1": ["d5", "d6", "d7", "d8", "d9"],
        "q2": [f"d{i}" for i in range(2, 10)],
    }
    assert negatives(Mining(margin=0.0), score=exact)["q1"] == ["d3", "d5", "d6", "d7", "d8", "d9"]


def test_denoising_by_a_teacher(caplog):
    teacher = {"q1": {"d2": 5.0, "d4": 3.0, "d0": 9.0, "d1": 4.5, "d3": 1.0, "d5": 4.0}, "q2": {"d1": 1.0}}
    # d0 looks relevant to the teacher; docs that it has not scored are left out; of q2's positive it says nothing
    assert negatives(Mining(), teacher=teacher) == {"q1": ["d1", "d3", "d5"]}
    assert "1 of 2 queries have no doc left to be a negative" in caplog.text
    assert negatives(Mining(teacher_margin=1.0), teacher=teacher) == {"q1": ["d3", "d5"]}
    assert negatives(Mining(), teacher={"q1": teacher["q1"]}) == {"q1": ["d1", "d3", "d5"]}  # it has not read q2


@pytest.mark.parametrize(("options", "message"), [
    ({"first": 5, "last": 4}, "mining.first: expected 1 to mining.last=4, got 5"),
    ({"count": 0}, "mining.count: expected at least 1, got 0"),
    ({"order": "best"}, "mining.order: expected one of top, random; got 'best'"),
])  # fmt: skip
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        Mining(**options)


def test_negatives_are_those_of_one_set():
    splits = Splits(COLLECTION, None, {"one": COLLECTION, "two": COLLECTION})
    assert mined_set(splits, None) == {} and mined_set(splits, "train") == {"train": COLLECTION}
    with pytest.raises(ConfigError, match="mine: expected a split of one set, got one, two; set mine to train or val"):
        mined_set(splits, "test")
