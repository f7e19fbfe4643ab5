"""Searching a collection: brute force, ties, more than there is, several vectors a doc, BM25."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from ranker.data.collection import Collection, Doc, MemoryDocs
from ranker.errors import ConfigError, DataError
from ranker.retrieval import engines, pipeline, vector_engine
from ranker.retrieval.bm25 import BM25
from ranker.retrieval.encode import Device
from ranker.retrieval.indexes.flat import Flat
from ranker.retrieval.indexes.hnsw import HNSW
from ranker.retrieval.indexes.ivf_flat import IVFFlat
from ranker.retrieval.indexes.ivf_pq import IVFPQ
from ranker.retrieval.indexes.plaid import Plaid
from ranker.retrieval.indexes.sparse import Sparse
from ranker.retrieval.pipeline import EncodeOptions
from ranker.retrieval.search import latencies
from ranker.retrieval.vector_engine import LateOptions

pytest.importorskip("faiss")
QUERIES = [f"q{i}" for i in range(12)]


@pytest.fixture
def engine_of(small, data_of, tmp_path):
    """Encode a collection with a scorer and open an engine over it."""

    def make(scorer, kind=None, collection=None, late=None, **options):
        collection = collection or small
        data, where = data_of(scorer, collection), Device(max_tokens=500)
        folders = pipeline.encode_sets(
            scorer,
            data,
            {"small": collection},
            EncodeOptions(tmp_path / "cache", shard_docs=25, **options),
            where,
            "32-true",
        )
        opened = engines.vector_engines(
            scorer, data, {"small": collection}, folders, kind or Flat(), where, late or LateOptions()
        )
        return opened["small"]

    return make


def brute_force(engine, scorer, small, depth):
    """Score every query with every doc by the scorer itself, in double precision for one vector per text.

    Returns (score, doc id) by query id, sorted by score, then by id, both descending.
    """
    everything = engine.store.take(np.arange(len(small.docs)))
    queries = vector_engine.encode_queries(scorer, engine.collator, engine.collator.queries.rows(QUERIES), Device())
    ids = engine.store.doc_ids
    if everything.counts is None:
        scores = queries.values.numpy().astype(np.float64) @ everything.values.numpy().astype(np.float64).T
        scores = (scores / scorer.fixed_temperature).astype(np.float32)
    else:
        with torch.no_grad():
            scores = scorer.score_block(queries, everything).numpy()
    return {
        query_id: sorted(zip(scores[i].tolist(), (doc_id.decode() for doc_id in ids), strict=True), reverse=True)[
            :depth
        ]
        for i, query_id in enumerate(QUERIES)
    }


@pytest.mark.parametrize("options", [{}, {"similarity": "dot", "temperature": 1.0}])
@pytest.mark.parametrize("depth", [1, 10, 52, 60])
def test_flat_is_exactly_the_brute_force_ranking(engine_of, scorers, small, options, depth):
    scorer = scorers(**options)
    engine = engine_of(scorer)
    expected = brute_force(engine, scorer, small, depth)
    found = engine.search(QUERIES, depth)
    for query_id in QUERIES:
        assert list(zip(found.scores_of(query_id).tolist(), found[query_id], strict=True)) == expected[query_id]


def test_ties_at_the_last_place_follow_the_tie_rule_however_many_there_are(engine_of, scorers, small, monkeypatch):
    monkeypatch.setattr(vector_engine, "SPARE", 1)
    scorer = scorers()
    engine = engine_of(scorer)
    expected = brute_force(engine, scorer, small, 60)
    # docs 50 to 54 have the same text: cut the ranking among them, for a query that finds them
    for query_id in QUERIES:
        ranking = [doc_id for _, doc_id in expected[query_id]]
        first = min(ranking.index(f"d{i}") for i in range(50, 55))
        assert ranking[first : first + 5] == ["d54", "d53", "d52", "d51", "d50"]
        assert engine.search([query_id], first + 2)[query_id] == ranking[: first + 2]


@pytest.mark.parametrize("scorer_kind", ["dpr", "colbert"])
def test_ties_are_cut_by_doc_id_descending_whatever_the_order_of_the_rows(engine_of, scorers, scorer_kind):
    # sixteen docs of one text whose ids neither rise nor fall with their rows, and eight others
    ids = [f"t{7 * i % 16:02}" for i in range(16)] + [f"o{i}" for i in range(8)]
    docs = MemoryDocs(
        Doc(doc_id, "bab cel" if doc_id[0] == "t" else f"gom {'kir ' * i}") for i, doc_id in enumerate(ids)
    )
    engine = engine_of(scorers(scorer_kind), collection=Collection("ties", docs, {"q": "bab"}, {"q": {"t00": 1}}))
    found = engine.search(["q"], 24)
    scores = dict(zip(found["q"], found.scores_of("q").tolist(), strict=True))
    assert len({scores[f"t{i:02}"] for i in range(16)}) == 1
    ranking = sorted(ids, key=lambda doc_id: (scores[doc_id], doc_id), reverse=True)
    assert ranking.index("t15") == ranking.index("t00") - 15
    for depth in range(1, 25):
        assert engine.search(["q"], depth)["q"] == ranking[:depth]


@pytest.mark.parametrize("kind", [
    IVFFlat(lists=4, probes=4), IVFPQ(lists=2, probes=2, rescore=60), HNSW(search_depth=60, neighbours=16),
], ids=lambda kind: type(kind).__name__)  # fmt: skip
def test_other_kinds_give_exact_scores(engine_of, scorers, small, kind):
    scorer = scorers()
    engine = engine_of(scorer, kind)
    expected = brute_force(engine, scorer, small, 10)
    found = engine.search(QUERIES, 10)
    for query_id in QUERIES:
        assert list(zip(found.scores_of(query_id).tolist(), found[query_id], strict=True)) == expected[query_id]


def test_a_search_gives_the_scores_of_re_ranking(engine_of, scorers, data_of, small):
    for kind in ("dpr", "colbert"):
        scorer = scorers(kind)
        engine = engine_of(scorer)
        found = engine.search(["q1", "q2"], 5)
        collator = data_of(scorer).collator(small)
        for query_id in ("q1", "q2"):
            rows = collator.docs.rows(found[query_id])[None]
            with torch.no_grad():
                scores = scorer(
                    collator.collate(
                        collator.queries.rows([query_id]), rows, np.zeros(rows.shape), np.zeros(1, dtype=np.int64), 1.0
                    )
                )
            np.testing.assert_allclose(scores[0], found.scores_of(query_id), atol=1e-4)
            assert engine.score(query_id, [*found[query_id], "nowhere"]) == pytest.approx(
                dict(zip(found[query_id], found.scores_of(query_id).tolist(), strict=True)), abs=1e-5
            )  # fmt: skip


def test_more_docs_than_there_are(engine_of, scorers):
    for kind in ("dpr", "colbert"):
        found = engine_of(scorers(kind)).search(QUERIES, 1000)
        assert [len(found[query_id]) for query_id in QUERIES] == [60] * 12
        assert all(len(set(found[query_id])) == 60 for query_id in QUERIES)


def test_the_first_vector_of_all_makes_its_doc_a_candidate(engine_of, scorers):
    engine = engine_of(scorers("colbert"))
    second = int(engine.store.ends[0])  # the first vector of the second doc
    places = np.array([[0, second, -1]])
    assert engine._promising(np.array([[0.9, 0.5, 0.0]], dtype=np.float32), places, 2).tolist() == [0, 1]
    assert engine._promising(np.array([[0.9, 0.5, 0.0]], dtype=np.float32), places, 1).tolist() == [0]


def test_no_queries_and_a_query_without_text(engine_of, scorers, small, caplog):
    engine = engine_of(scorers())
    assert len(engine.search([], 10)) == 0
    empty = replace(small, queries={**small.queries, "blank": " "}, qrels={**small.qrels, "blank": {"d1": 1}})
    run, report = pipeline.search_set(engine_of(scorers(), collection=empty), empty, 10, 3)
    assert len(run) == report["queries"] == 13 and len(run["blank"]) == 10
    assert np.isfinite(list(run["blank"].values())).all()
    assert "1 queries have no text, the first is 'blank'" in caplog.text


def test_all_queries_of_a_set_without_judgements_are_searched(engine_of, scorers, small, monkeypatch):
    monkeypatch.setattr(vector_engine, "QUERIES_IN_MEMORY", 5)  # several blocks
    judged, _ = pipeline.search_set(engine_of(scorers()), small, 10, 0)
    unjudged = replace(small, qrels={})
    run, report = pipeline.search_set(engine_of(scorers(), collection=unjudged), unjudged, 10, 0)
    assert report["queries"] == len(run) == len(small.queries)
    assert {query_id: run[query_id] for query_id in judged} == judged


def test_colbert_over_all_docs_is_brute_force(engine_of, scorers, small):
    scorer = scorers("colbert")
    engine = engine_of(scorer)
    expected = brute_force(engine, scorer, small, 10)
    found = engine.search(QUERIES, 10)
    for query_id in QUERIES:
        assert found[query_id] == [doc_id for _, doc_id in expected[query_id]]
        np.testing.assert_allclose(found.scores_of(query_id), [score for score, _ in expected[query_id]], atol=1e-5)


def test_colbert_by_token_candidates_finds_the_best_with_exact_scores(engine_of, scorers, small):
    scorer = scorers("colbert")
    engine = engine_of(scorer, late=LateOptions(token_depth=200, candidates=20))
    expected = brute_force(engine, scorer, small, 60)
    found = engine.search(QUERIES, 10)
    hits = 0
    for query_id in QUERIES:
        exact = {doc_id: score for score, doc_id in expected[query_id]}
        for doc_id, score in zip(found[query_id], found.scores_of(query_id).tolist(), strict=True):
            assert score == pytest.approx(exact[doc_id], abs=1e-5)
        hits += len(set(found[query_id]) & {doc_id for _, doc_id in expected[query_id][:10]})
        assert list(found.scores_of(query_id)) == sorted(found.scores_of(query_id), reverse=True)
    assert hits >= 0.9 * 120


def test_colbert_with_fewer_candidates_than_asked_for_says_so_once(engine_of, scorers, caplog):
    engine = engine_of(scorers("colbert"), late=LateOptions(token_depth=1, candidates=20))
    counts = [len(found) for _ in range(2) for found in engine.search(QUERIES, 40).values()][:12]
    assert max(counts) < 40
    assert (
        caplog.text.count(f"12 of 12 queries got fewer than 40 docs, the fewest {min(counts)}; raise late.token_depth")
        == 1
    )


def test_options_that_no_search_reads_are_refused():
    deep, wide = LateOptions(token_depth=9), LateOptions(candidates=9)
    for index, several in ((Flat(), True), (HNSW(), True)):
        engines.check_late(index, several, deep)
    for index, several in ((Plaid(), True), (Flat(), False), (Sparse(), False)):
        engines.check_late(index, several, LateOptions())
        with pytest.raises(ConfigError, match=r"late\.token_depth: expected the default, 256, with index="):
            engines.check_late(index, several, deep)
    with pytest.raises(ConfigError, match="candidates: expected the default, 1000, with index=plaid, which ranks docs"):
        engines.check_late(Plaid(), True, wide)


def test_small_blocks_change_nothing(engine_of, scorers, monkeypatch):
    engine = engine_of(scorers("colbert"))
    whole = engine.search(QUERIES, 10).to_run()
    monkeypatch.setattr(vector_engine, "QUERY_VECTORS", 20)
    monkeypatch.setattr(vector_engine, "DOC_VECTORS", 50)
    monkeypatch.setattr(vector_engine, "QUERIES_PER_SEARCH", 5)
    small_blocks = engine.search(QUERIES, 10).to_run()
    assert {query_id: list(docs) for query_id, docs in whole.items()} == {
        query_id: list(docs) for query_id, docs in small_blocks.items()
    }


def test_bm25_through_the_same_door(small):
    engine = engines.bm25_engines({"small": small}, partial(BM25, stemmer=None, stopwords=None))["small"]
    found = engine.search(QUERIES, 10)
    direct = BM25(small.docs, stemmer=None, stopwords=None).search(small.queries, 10)
    assert found.to_run() == direct.to_run()
    best = found["q0"][0]
    assert engine.score("q0", [best, "nowhere"]) == {best: pytest.approx(found.scores_of("q0")[0])}
    assert engine.num_bytes > 0


def test_figures_of_a_search(engine_of, scorers, small):
    engine = engine_of(scorers())
    _, report = pipeline.search_set(engine, small, 10, 4)
    assert (
        report["index_bytes"] == report["vector_bytes"] == 60 * 32 * 4
        and report["docs"] == 60
        and report["queries"] == 12
    )
    assert 0 < report["latency_ms"]["p50"] <= report["latency_ms"]["p95"]
    parts = latencies(engine, QUERIES, 10, 5)
    assert list(parts) == ["search", "encode", "candidates", "exact"] and {len(part) for part in parts.values()} == {5}
    assert (sum(parts[name] for name in list(parts)[1:]) <= parts["search"]).all()
    assert "12 queries over 60 docs" in pipeline.in_words(report)


def test_positives_are_added_after_the_candidates(small):
    candidates = {"q0": {"d5": 2.0, "d0": 1.0}, "q1": {"d7": 1.0}}
    from ranker.data.collection import Candidates

    collection = Collection(
        "c",
        small.docs,
        small.queries,
        {"q0": {"d0": 1}, "q1": {"d1": 1, "d2": 0, "gone": 1}, "q2": {"d2": 1}},
        Candidates.from_run(candidates),
    )
    made = pipeline.add_positives(collection, 1).candidates
    assert {query_id: made[query_id] for query_id in made} == {"q0": ["d5", "d0"], "q1": ["d7", "d1"], "q2": ["d2"]}


@pytest.mark.parametrize("kind", ["dpr", "colbert"])
def test_scores_that_are_not_finite_end_a_search(engine_of, scorers, kind):
    engine = engine_of(scorers(kind))
    encoded = engine.store.take
    engine.store.take = lambda rows: replace(encoded(rows), values=encoded(rows).values * 3e38 * 3e38)
    with pytest.raises(
        DataError,
        match=r"search: expected finite scores, got \d+ of 10 that are not, the first -?(inf|nan) for query 'q1'",
    ):
        engine.search(["q1", "q2"], 5)
    with pytest.raises(
        DataError, match=r"search: expected finite scores, got 1 of 1 that are not, .* for query 'q1' and doc 'd7'"
    ):
        engine.score("q1", ["d7"])
