"""Which docs of other groups a query may be set against."""

import numpy as np
import pytest

from ranker.data.collate import Collator
from ranker.data.collection import Collection, Doc, MemoryDocs
from ranker.data.contrast import KnownPositives, contrast, doc_keys
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.token_store import build_token_store
from ranker.encoders.tiny import tiny_tokenizer

DOCS = {
    "p1": "alpha one",
    "p2": "beta two",
    "n1": "gamma",
    "n2": "delta",
    "twin": "alpha one",
    "other": "epsilon",
    "empty": "",
}
ROW = {name: row for row, name in enumerate(DOCS)}


@pytest.fixture
def make(tmp_path):
    def of(qrels, relevance=1, max_doc_tokens=16, triples=None):
        queries = {"q1": "a", "q2": "b", "q3": "c"}
        collection = Collection(
            "small",
            MemoryDocs(Doc(*item) for item in DOCS.items()),
            queries,
            qrels,
            triples=triples,
            relevance=relevance,
        )
        stores = [
            build_token_store(iter(part.items()), tmp_path / name, tiny_tokenizer(), 16, fingerprint=name)
            for name, part in (("queries", queries), ("docs", DOCS))
        ]
        collator = Collator.of(ScorerInputs(tiny_tokenizer(), "texts", 32), *stores, TextLimits(16, max_doc_tokens))
        return collator, KnownPositives.of(collection, *stores)

    return of


def rows(*groups):
    return np.array([[ROW[name] if name else -1 for name in group] for group in groups])


def mask_of(made):
    return made.mask.int().tolist()


def test_every_other_groups_doc_stands_against_a_query(make):
    collator, known = make({"q1": {"p1": 1}, "q2": {"p2": 1}})
    made = contrast(
        collator, np.array([0, 1]), rows(["p1", "n1"], ["p2", None]), np.array([[1.0, 0.0], [1.0, 0.0]]), known
    )
    assert mask_of(made) == [[1, 1, 1], [1, 1, 1]]
    assert made.owners.tolist() == [0, 0, 1] and made.labels.tolist() == [1.0, 0.0, 1.0]


def test_a_shared_positive_is_masked_whoever_drew_it(make):
    # p2 is relevant for q1 too, though only q2 drew it; p1 is drawn by both
    collator, known = make({"q1": {"p1": 1, "p2": 2}, "q2": {"p2": 1}, "q3": {"p1": 1}})
    made = contrast(
        collator, np.arange(3), rows(["p1", "n1"], ["p2", "n2"], ["p1", "n1"]), np.tile([1.0, 0.0], (3, 1)), known
    )
    assert mask_of(made) == [
        [1, 1, 0, 1, 0, 0],  # q1: not p2 (known), not q3's p1 (known), not q3's n1 (has it)
        [1, 1, 1, 1, 1, 1],
        [0, 0, 1, 1, 1, 1],
    ]


def test_grades_below_relevant_are_no_positives(make):
    collator, known = make({"q1": {"p1": 2, "p2": 1}, "q2": {"p2": 2}}, relevance=2)
    made = contrast(collator, np.arange(2), rows(["p1"], ["p2"]), np.full((2, 1), 2.0), known)
    assert mask_of(made) == [[1, 1], [1, 1]]


def test_a_text_that_equals_a_positives_is_masked_under_any_id(make):
    collator, known = make({"q1": {"p1": 1}, "q2": {"p2": 1}})
    made = contrast(collator, np.arange(2), rows(["p1", "n1"], ["p2", "twin"]), np.tile([1.0, 0.0], (2, 1)), known)
    assert mask_of(made) == [[1, 1, 1, 0], [0, 1, 1, 1]]  # nor is p1 a second negative beside its twin


def test_a_text_that_equals_a_positives_is_no_negative_of_its_own_group_either(make):
    collator, known = make({"q1": {"p1": 1, "p2": 1}})
    made = contrast(collator, np.array([0]), rows(["p1", "twin", "n1", "p2"]), np.array([[1.0, 0.0, 0.0, 0.0]]), known)
    assert mask_of(made) == [[1, 0, 1, 0]]  # p2 is relevant, though another draw's positive
    assert made.positive.tolist() == [True, False, False, False]


def test_only_grades_from_relevance_on_are_positives(make):
    collator, known = make({"q1": {"p1": 3, "n1": 1}}, relevance=2)
    made = contrast(collator, np.array([0]), rows(["p1", "n1", "n2"]), np.array([[3.0, 1.0, 0.0]]), known)
    assert made.positive.tolist() == [True, False, False] and made.labels.tolist() == [3.0, 1.0, 0.0]
    assert mask_of(made) == [[1, 1, 1]]


@pytest.mark.parametrize("qrels", [{}, {"q1": {"other": 1}}])
def test_a_triples_more_relevant_doc_is_no_negative_of_another_triple_of_its_query(make, qrels):
    triples = [("q1", "p1", "n1"), ("q1", "p2", "twin"), ("q2", "n2", "p1")]
    collator, known = make(qrels, relevance=2, triples=triples)
    made = contrast(
        collator,
        np.array([0, 0, 1]),
        rows(["p1", "n1"], ["p2", "twin"], ["n2", "p1"]),
        np.tile([1.0, 0.0], (3, 1)),
        known,
    )
    assert mask_of(made) == [
        [1, 1, 0, 0, 1, 0],  # not p2, nor p1 and its twin again
        [0, 1, 1, 0, 1, 0],  # nor is the twin of p1 a negative of its own
        [0, 1, 1, 0, 1, 1],
    ]
    assert made.positive.tolist() == [True, False] * 3


def test_docs_that_the_model_cannot_tell_apart_have_one_key(make):
    collator, _ = make({"q1": {"p1": 1}})
    keys = dict(zip(DOCS, doc_keys(collator, np.arange(len(DOCS))).tolist(), strict=True))
    assert keys["p1"] == keys["twin"] and len(set(keys.values())) == len(DOCS) - 1


def test_keys_depend_on_order_and_on_what_is_cut(make, tmp_path):
    docs = {"a": "ab cd", "b": "cd ab", "c": "ab cd ef"}
    store = build_token_store(iter(docs.items()), tmp_path / "more", tiny_tokenizer(), 16, fingerprint="more")
    whole, cut = (
        Collator.of(ScorerInputs(tiny_tokenizer(), "texts", 32), store, store, TextLimits(16, most)) for most in (16, 2)
    )
    assert len(set(doc_keys(whole, np.arange(3)).tolist())) == 3
    a, b, c = doc_keys(cut, np.arange(3)).tolist()
    assert a == c != b
