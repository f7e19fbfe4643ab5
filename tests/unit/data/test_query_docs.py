"""PC2-16: a query that is a document of the collection."""

import json
import logging
from functools import partial

import numpy as np
import pytest
from omegaconf import OmegaConf

from ranker.assembly.data import load_source
from ranker.config.check import check
from ranker.data.collate import Collator
from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs, Splits
from ranker.data.contrast import KnownPositives, contrast
from ranker.data.judged_groups import JudgedGroups
from ranker.data.query_docs import allowed_run, apply_mode, queries_are_docs, same_text, warn_of_query_docs
from ranker.data.sampling import GroupOptions
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.token_store import build_token_store
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import ConfigError
from ranker.evaluation.report import first_stage_run, write_evaluation
from ranker.retrieval.bm25 import BM25
from ranker.retrieval.engines import bm25_engines
from ranker.retrieval.first_stage import first_stage, with_candidates
from ranker.retrieval.mining import Mining
from ranker.retrieval.pipeline import add_positives, mine_set, search_set

TEXTS = {
    "a1": "Zoos should close because animals suffer in cages",
    "a2": "Zoos should stay because animals are saved in cages",
    "a3": "Exams are unfair to slow pupils",
    "a4": "Exams are fair to all pupils",
    "a5": "Taxes on sugar help health",
    "a6": "Taxes on sugar hurt the poor",
}
QRELS = {"a1": {"a2": 1}, "a3": {"a4": 1}, "a5": {"a6": 1}}
MEASURES = ["RR@10", "nDCG@10"]


@pytest.fixture
def folder(tmp_path):
    """Arguments and counter-arguments, each query with the id and the text of a doc."""
    rows = [json.dumps({"id": doc_id, "title": f"debate {doc_id}", "text": text}) for doc_id, text in TEXTS.items()]
    (tmp_path / "docs.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "queries.tsv").write_text("".join(f"{query_id}\t{TEXTS[query_id]}\n" for query_id in QRELS))
    (tmp_path / "qrels.txt").write_text("".join(f"{q} 0 {d} 1\n" for q, docs in QRELS.items() for d in docs))
    return tmp_path


def loaded(folder, **options) -> Collection:
    node = {
        "_target_": "ranker.data.sources.files.Files",
        "path": str(folder),
        "val_fraction": 0,
        "test_fraction": 1,
        **options,
    }
    (collection,) = load_source(OmegaConf.create(node)).tests.values()
    return collection


def searched(collection) -> dict:
    (engine,) = bm25_engines({"x": collection}, BM25).values()
    return search_set(engine, collection, 2, 0)[0]


def test_pc2_16_a_search_leaves_the_query_itself_out_or_warns(folder, caplog):
    found = searched(loaded(folder, drop_query_docs=True))
    assert {query_id: next(iter(docs)) for query_id, docs in found.items()} == {"a1": "a2", "a3": "a4", "a5": "a6"}
    means = write_evaluation(folder / "out", found, QRELS, MEASURES)["measures"]
    assert means == {"RR@10": 1.0, "nDCG@10": 1.0}
    assert "are docs of the collection" not in caplog.text
    plain = searched(loaded(folder))
    assert {query_id: next(iter(docs)) for query_id, docs in plain.items()} == {"a1": "a1", "a3": "a3", "a5": "a5"}
    assert "3 of 3 queries are docs of the collection by id and text, such as 'a1'" in caplog.text
    assert "data.drop_query_docs=true" in caplog.text


def test_pc2_16_the_first_stage_and_given_candidates_leave_it_out(folder, tmp_path):
    plain, without = loaded(folder), loaded(folder, drop_query_docs=True)
    cache = tmp_path / "cache"
    assert first_stage(plain, 1, cache)["a1"] == ["a1"] and first_stage(without, 1, cache)["a1"] == ["a2"]
    (folder / "first.run").write_text(
        "".join(f"{q} Q0 {d} 1 {score} t\n" for q in QRELS for d, score in (("a1", 3), ("a3", 2), ("a5", 1)))
    )
    candidates = loaded(folder, drop_query_docs=True).candidates
    assert candidates.to_run() == {"a1": {"a3": 2, "a5": 1}, "a3": {"a1": 3, "a5": 1}, "a5": {"a1": 3, "a3": 2}}
    run = loaded(folder).candidates.to_run()
    assert allowed_run(without, run) == candidates.to_run() and allowed_run(plain, run) is run
    assert list(first_stage_run(loaded(folder, drop_query_docs=True), 2)["a1"]) == ["a3", "a5"]


def test_pc2_16_a_judged_query_doc_is_not_added_again(folder):
    collection = loaded(folder, drop_query_docs=True)
    collection.qrels["a1"]["a1"] = 1
    (collection,) = with_candidates(Splits(None, None, {"x": collection}), 1, folder / "cache").tests.values()
    assert "a1" not in add_positives(collection, 1).candidates["a1"]


def test_pc2_16_mining_and_its_window(folder):
    for drop in (True, False):
        collection = loaded(folder, drop_query_docs=drop)
        (engine,) = bm25_engines({"x": collection}, partial(BM25, stopwords=None)).values()
        found = mine_set(engine, collection, Mining(last=5), None)
        assert "a1" not in found.get("a1", {}) and "a2" not in found.get("a1", {})
    twin = MemoryDocs([*loaded(folder).docs, Doc("b1", TEXTS["a1"].upper()), Doc("b2", TEXTS["a1"], "title")])
    collection = Collection("twin", twin, {"a1": TEXTS["a1"]}, {"a1": {"a2": 1}})
    (engine,) = bm25_engines({"x": collection}, BM25).values()
    assert not {"a1", "a2", "b1", "b2"} & mine_set(engine, collection, Mining(), None).get("a1", {}).keys()


def test_pc2_16_mining_leaves_out_the_querys_own_id_also_with_another_text(folder):
    collection = Collection("c", loaded(folder).docs, {"a1": "animals in cages"}, {"a1": {"a2": 1}})
    (engine,) = bm25_engines({"x": collection}, BM25).values()
    assert set(engine.search(["a1"], 9)["a1"]) == {"a1", "a2"}
    assert mine_set(engine, collection, Mining(), None) == {}


def test_pc2_16_collections_that_need_it_have_it_by_default():
    known = ("beir/arguana", "beir/quora/test", "beir/quora/dev", "nano-beir/arguana")
    assert all(map(queries_are_docs, known))
    assert not any(map(queries_are_docs, ("beir/scifact/test", "vaswani", "antique/test", "beir/nq")))


def test_pc2_16_modes():
    candidates = Candidates.from_run({"q": {"q": 2.0, "d": 1.0}})
    docs = MemoryDocs([Doc("q", "x"), Doc("d", "y")])
    splits = Splits(
        Collection("train", docs, {"q": "x"}, {}, candidates), None,
        {"t": Collection("t", docs, {"q": "x"}, {}, candidates, drop_query_docs=True)},
    )  # fmt: skip
    kept = {mode: apply_mode(splits, mode) for mode in ("auto", True, False)}
    assert {mode: part.train.candidates["q"] for mode, part in kept.items()} == {
        "auto": ["q", "d"],
        True: ["d"],
        False: ["q", "d"],
    }
    assert {mode: part.tests["t"].candidates["q"] for mode, part in kept.items()} == {
        "auto": ["d"],
        True: ["d"],
        False: ["q", "d"],
    }
    with pytest.raises(ConfigError, match=r"data.drop_query_docs: expected auto, true or false; got 'yes'"):
        apply_mode(splits, "yes")
    with pytest.raises(ConfigError, match=r"data.drop_query_docs: expected auto, true or false; got 'perhaps'"):
        check(OmegaConf.create({"data": {"_target_": "ranker.data.sources.cwe.CWE", "drop_query_docs": "perhaps"}}))


def test_pc2_16_equal_numbers_as_ids_are_no_reason_to_warn_and_equal_texts_are(caplog):
    docs = MemoryDocs(
        [Doc("1", "a long text about the sea and its fish"), Doc("2", "Red  apple"), Doc("3", "green apple")]
    )
    collection = Collection("c", docs, {"1": "fish in the sea", "9": "red apple"}, {})
    with caplog.at_level(logging.WARNING):
        warn_of_query_docs(collection, Candidates.from_run({"1": {"1": 1.0}, "9": {"3": 1.0}}))
        assert not caplog.records
        warn_of_query_docs(collection, Candidates.from_run({"1": {"1": 1.0}, "9": {"2": 1.0}}))
    assert [record.getMessage() for record in caplog.records] == [
        "c: 1 of 2 queries, such as '9', have the text of a doc with another id among their top results"
    ]


# training


DOCS = {"p": "the answer", "n": "another", "q1": "not the text", "twin": "what is it", "cut": "one two six"}
QUERIES = {"q1": "what is it", "q2": "one two six"}


def stores(tmp_path, max_query_tokens=16):
    return [
        build_token_store(
            iter(texts.items()), tmp_path / f"{name}{max_query_tokens}", tiny_tokenizer(), limit, fingerprint=name
        )
        for name, texts, limit in (("queries", QUERIES, max_query_tokens), ("docs", DOCS, 16))
    ]


def training(candidates) -> Collection:
    docs = MemoryDocs(Doc(*item) for item in DOCS.items())
    return Collection(
        "train", docs, QUERIES, {"q1": {"p": 1}}, Candidates.from_lists([("q1", candidates, [1.0] * len(candidates))])
    )


def names_of(rows) -> set[str | None]:
    return {list(DOCS)[row] if row >= 0 else None for row in rows.ravel().tolist()}


def test_pc2_16_the_querys_own_id_or_text_is_never_a_negative_in_training(tmp_path, caplog):
    queries, docs = stores(tmp_path)
    sampler = JudgedGroups(training(["twin", "q1", "p", "n"]), queries, docs, GroupOptions(num_docs=4))
    assert {name for epoch in range(5) for name in names_of(sampler.draw(epoch, np.array([0]))[0])} == {"p", "n", None}
    filled = JudgedGroups(training(["twin", "q1"]), queries, docs, GroupOptions(num_docs=5, random_negatives=True))
    assert {name for epoch in range(5) for name in names_of(filled.draw(epoch, np.array([0]))[0])} == {
        "p",
        "n",
        "cut",
        None,
    }
    with pytest.raises(Exception, match="expected a negative for at least one training query, got none for all 1"):
        JudgedGroups(training(["twin"]), queries, docs, GroupOptions(num_docs=4))


def test_pc2_16_of_a_cut_query_the_docs_first_tokens_count(tmp_path):
    queries, docs = stores(tmp_path, max_query_tokens=4)
    cut = len(tiny_tokenizer()(QUERIES["q2"], add_special_tokens=False)["input_ids"]) > 4
    assert cut
    pairs = [(1, row) for row in range(len(DOCS))]
    same = same_text(queries, docs, np.array([q for q, _ in pairs]), np.array([d for _, d in pairs]))
    assert [list(DOCS)[row] for (_, row), found in zip(pairs, same, strict=True) if found] == ["cut"]


def test_pc2_16_a_prompt_before_the_texts_is_not_compared(tmp_path):
    made = [
        build_token_store([("1", f"{prompt} what is it")], tmp_path / prompt, tiny_tokenizer(), 16, fingerprint=prompt)
        for prompt in ("ab", "cd")
    ]
    row = np.array([0])
    assert same_text(*made, row, row, (1, 1)).tolist() == [True] and same_text(*made, row, row).tolist() == [False]


def test_pc2_16_in_batch_negatives_are_not_the_query_itself(tmp_path):
    queries, docs = stores(tmp_path)
    collator = Collator.of(ScorerInputs(tiny_tokenizer(), "texts", 64), queries, docs, TextLimits(16, 16))
    positives = KnownPositives.of(
        Collection("c", MemoryDocs(Doc(*item) for item in DOCS.items()), QUERIES, {"q1": {"p": 1}, "q2": {"n": 1}}),
        queries,
        docs,
    )
    rows = np.array(
        [[list(DOCS).index(name) for name in group] for group in (("p", "cut"), ("n", "q1"), ("n", "twin"))]
    )
    made = contrast(collator, np.array([0, 1, 1]), rows, np.array([[1.0, 0.0]] * 3), positives)
    assert made.mask.int().tolist() == [
        [1, 1, 1, 0, 1, 0],  # q1: neither the doc of its id nor that of its text
        [1, 0, 1, 1, 0, 1],  # q2: not the doc of its text; the other group's positive is its own
        [1, 0, 0, 1, 1, 1],
    ]
