import logging
import math
import multiprocessing
from dataclasses import replace

import numpy as np
import pytest

from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs, Splits
from ranker.errors import ConfigError
from ranker.retrieval import bm25
from ranker.retrieval.bm25 import BM25
from ranker.retrieval.first_stage import FirstStage, first_stage, with_candidates

DOCS = MemoryDocs([
    Doc("d1", "a cat sat on the mat"),
    Doc("d2", "dogs chase cats and more cats", "Cats"),
    Doc("d3", "birds fly over the sea"),
    Doc("d4", ""),
])  # fmt: skip


def test_scores_are_lucenes_worked_by_hand():
    """N = 4, mean length 13 / 4.

    Stems: d1 cat sat mat (3), d2 cat dog chase cat more cat (6), d3 bird fly over sea (4), d4 none.
    """
    found = BM25(DOCS).search({"q": "cats"}, 10)
    idf = math.log(1 + (4 - 2 + 0.5) / (2 + 0.5))
    norm = lambda length: 0.9 * (1 - 0.4 + 0.4 * length / (13 / 4))  # noqa: E731
    assert found["q"] == ["d2", "d1"]
    assert found.scores_of("q").tolist() == pytest.approx([idf * 3 / (3 + norm(6)), idf * 1 / (1 + norm(3))], rel=1e-6)


def test_k1_and_b_are_used():
    found = BM25(DOCS, k1=2.0, b=0.0).search({"q": "cats"}, 10)
    idf = math.log(2)
    assert found.scores_of("q").tolist() == pytest.approx([idf * 3 / (3 + 2), idf * 1 / (1 + 2)], rel=1e-6)


def test_a_repeated_query_word_counts_twice_and_words_add_up():
    index = BM25(DOCS)

    def score(text, doc_id):
        return index.search({"q": text}, 10).to_run()["q"][doc_id]

    assert score("chase chase", "d2") == pytest.approx(2 * score("chase", "d2"))
    assert score("cat mat", "d1") == pytest.approx(score("cat", "d1") + score("mat", "d1"))


def test_a_query_without_a_known_word_has_no_candidates():
    found = BM25(DOCS).search({"q1": "the of", "q2": "zebra", "q3": "", "q4": "sea"}, 10)
    assert [found[query_id] for query_id in found] == [[], [], [], ["d3"]]


def test_pc01_ties_are_ordered_by_doc_id_descending_also_where_the_depth_cuts():
    docs = MemoryDocs(Doc(doc_id, "same words here") for doc_id in ("d10", "d9", "d1", "d2", "e"))
    other = MemoryDocs([*docs, Doc("x", "something else")])
    index = BM25(other)
    assert index.search({"q": "words"}, 10)["q"] == ["e", "d9", "d2", "d10", "d1"]
    assert index.search({"q": "words"}, 2)["q"] == ["e", "d9"]
    assert index.search({"q": "words"}, 4)["q"] == ["e", "d9", "d2", "d10"]


def test_threads_and_chunks_change_nothing(monkeypatch):
    rng = np.random.default_rng(0)
    docs = MemoryDocs(Doc(f"d{i}", " ".join(f"w{j}" for j in rng.zipf(1.3, 30) % 500)) for i in range(300))
    queries = {f"q{i}": " ".join(f"w{j}" for j in rng.zipf(1.3, 5) % 500) for i in range(50)}
    whole = BM25(docs).search(queries, 20)
    monkeypatch.setattr(bm25, "_CHUNK_DOCS", 7)
    parts = BM25(docs, threads=4).search(queries, 20)
    assert parts.to_run() == whole.to_run() and parts == whole


def test_equals_bm25s_used_by_itself():
    import bm25s
    import Stemmer

    rng = np.random.default_rng(1)
    docs = MemoryDocs(
        Doc(f"d{i}", " ".join(f"walking{j} the runs{j % 7}" for j in rng.zipf(1.3, 20) % 300)) for i in range(200)
    )
    reference = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
    stemmer = Stemmer.Stemmer("english")
    reference.index(
        bm25s.tokenize([doc.full_text for doc in docs], stopwords="en", stemmer=stemmer, show_progress=False),
        show_progress=False,
    )
    query = "walking12 the runs3 running walks5"
    theirs = reference.get_scores(
        bm25s.tokenize([query], stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False)[0]
    )
    ours = BM25(docs).search({"q": query}, 200).to_run()["q"]
    assert ours == {f"d{i}": float(score) for i, score in enumerate(theirs) if score > 0}


def test_stemmer_and_stopwords_can_be_off():
    assert BM25(DOCS, stemmer=None).search({"q": "cat"}, 10)["q"] == ["d1"]
    assert BM25(DOCS, stopwords=None).search({"q": "the"}, 10)["q"] == ["d3", "d1"]  # as long as each other
    with pytest.raises(ConfigError, match=r"bm25.stemmer: expected one of .*english.* or null, got 'klingon'"):
        BM25(DOCS, stemmer="klingon")
    with pytest.raises(ConfigError, match=r"bm25.stopwords: expected a language .* or null, got 'klingon'"):
        BM25(DOCS, stopwords="klingon")


def test_a_corpus_without_words():
    assert BM25(MemoryDocs([Doc("a", "")])).search({"q": "cat"}, 3)["q"] == []


def test_pc2_25_docs_of_equal_length_tie_and_empty_docs_are_found_by_nothing():
    """One word in two docs of two words; N = 7, mean length 7 / 7 = 1 after stop words."""
    texts = {"e1": "", "e2": "the of", "foo": "foo", "dog": "dog", "baz": "baz", "d4": "quick god", "d5": "quick fox"}
    found = BM25(MemoryDocs(Doc(*item) for item in texts.items())).search({"a": "quick", "b": "the", "c": ""}, 10)
    expected = math.log(1 + (7 - 2 + 0.5) / (2 + 0.5)) / (1 + 0.9 * (0.6 + 0.4 * 2))
    assert found["a"] == ["d5", "d4"] and found.scores_of("a").tolist() == pytest.approx([expected] * 2, rel=1e-6)
    assert len(set(found.scores_of("a").tolist())) == 1 and found["b"] == found["c"] == []


# first stage

QUERIES = {"q1": "cats", "q2": "sea birds"}
COLLECTION = Collection("test", DOCS, QUERIES, {"q1": {"d1": 1}})


@pytest.fixture
def built(monkeypatch):
    """Names of the corpora indexed, in order."""
    built = []

    class Counted(BM25):
        def __init__(self, docs, **options):
            built.append(docs.fingerprint)
            super().__init__(docs, **options)

    monkeypatch.setattr("ranker.retrieval.first_stage.BM25", Counted)
    return built


def test_first_stage_is_made_once_and_read_back_the_same(tmp_path, built):
    made = first_stage(COLLECTION, 10, tmp_path)
    again = first_stage(replace(COLLECTION, name="other", docs=MemoryDocs(DOCS)), 10, tmp_path)
    assert built == [DOCS.fingerprint]
    assert again.to_run() == made.to_run() == BM25(DOCS).search(QUERIES, 10).to_run() and list(again) == ["q1", "q2"]


@pytest.mark.parametrize(
    "change",
    [
        lambda c, o: (replace(c, docs=MemoryDocs([*DOCS, Doc("d5", "a cat")])), o),
        lambda c, o: (replace(c, queries=QUERIES | {"q1": "dogs"}), o),
        lambda c, o: (replace(c, queries={"q2": "sea birds", "q1": "cats"}), o),
        lambda c, o: (c, o | {"depth": 1}),
        lambda c, o: (c, o | {"options": FirstStage(k1=1.2)}),
        lambda c, o: (c, o | {"options": FirstStage(b=0.75)}),
        lambda c, o: (c, o | {"options": FirstStage(stemmer=None)}),
        lambda c, o: (c, o | {"options": FirstStage(min_word_chars=2)}),
        lambda c, o: (c, o | {"options": FirstStage(bigrams=False)}),
    ],
)
def test_whatever_changes_is_noticed(tmp_path, built, change):
    first_stage(COLLECTION, 10, tmp_path)
    collection, options = change(COLLECTION, {"depth": 10})
    found = first_stage(collection, options.pop("depth"), tmp_path, **options)
    assert len(built) == 2 and list(found) == list(collection.queries)


def test_a_broken_cache_file_is_made_anew(tmp_path, built, caplog):
    made = first_stage(COLLECTION, 10, tmp_path)
    (path,) = tmp_path.rglob("*.npz")
    path.write_bytes(path.read_bytes()[:100])
    assert first_stage(COLLECTION, 10, tmp_path).to_run() == made.to_run()
    assert "expected a whole cache file" in caplog.text and len(built) == 2


def test_pc34_a_build_that_dies_leaves_nothing_that_looks_finished(tmp_path, monkeypatch):
    def die(path, **arrays):
        path.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", die)
        with pytest.raises(KeyboardInterrupt):
            first_stage(COLLECTION, 10, tmp_path)
    assert not list(tmp_path.rglob("*.npz"))
    assert first_stage(COLLECTION, 10, tmp_path)["q1"] == ["d2", "d1"]


def _in_another_process(folder, start, results):
    counted = []
    search = BM25.search
    BM25.search = lambda self, *arguments: counted.append(1) or search(self, *arguments)
    start.wait()
    results.put((len(counted), first_stage(COLLECTION, 10, folder).to_run(), len(counted)))


def test_pc34_processes_that_start_together_build_once(tmp_path):
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    processes = [context.Process(target=_in_another_process, args=(tmp_path, start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    got = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert sum(after for _, _, after in got) == 1
    assert all(run == got[0][1] for _, run, _ in got)


def test_with_candidates_fills_what_is_missing_and_indexes_a_corpus_once(tmp_path, built):
    given = Candidates.from_run({"q1": {"d3": 1.0}})
    other_docs = MemoryDocs([Doc("x", "sea")])
    splits = Splits(
        train=replace(COLLECTION, name="train", triples=[("q1", "d1", "d3")]),
        val=replace(COLLECTION, name="val", queries={"q1": "cats"}),
        tests={"a": COLLECTION, "b": replace(COLLECTION, docs=other_docs), "c": replace(COLLECTION, candidates=given)},
        notice="licence",
    )
    filled = with_candidates(splits, 10, tmp_path)
    assert built == [DOCS.fingerprint, other_docs.fingerprint]
    assert filled.train.candidates is None  # triples name their docs
    assert filled.val.candidates["q1"] == ["d2", "d1"] and filled.tests["a"].candidates["q2"] == ["d3"]
    assert filled.tests["b"].candidates["q2"] == ["x"] and filled.tests["c"].candidates is given
    assert filled.notice == "licence" and splits.val.candidates is None
    assert with_candidates(Splits(None, None, {}), 10, tmp_path) == Splits(None, None, {})


def test_a_training_set_without_triples_gets_candidates(tmp_path):
    assert with_candidates(Splits(COLLECTION, None, {}), 10, tmp_path).train.candidates["q1"] == ["d2", "d1"]


def test_bm25s_does_not_flood_the_log():
    BM25(DOCS)
    assert logging.getLogger("bm25s").level >= logging.INFO
