"""Search by term weights: exact, equal to brute force, ties, 8 bits, damage; candidates; the terms of a score."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import sparse

from ranker.data.collection import Candidates
from ranker.encoders.loading import load_encoder
from ranker.errors import ConfigError, DataError
from ranker.models.dpr import DPR
from ranker.models.splade import SPLADE
from ranker.models.tildev2 import TILDEv2
from ranker.retrieval import engines, pipeline
from ranker.retrieval.encode import Device, encode_queries
from ranker.retrieval.indexes.flat import Flat
from ranker.retrieval.indexes.seismic import Seismic
from ranker.retrieval.indexes.sparse import Sparse
from ranker.retrieval.pipeline import EncodeOptions
from ranker.retrieval.postings import Postings
from ranker.retrieval.sparse_search import Reranking, SparseEngine
from ranker.retrieval.vector_engine import LateOptions

QUERIES = [f"q{i}" for i in range(12)]


def encoder():
    torch.manual_seed(0)
    return load_encoder("tiny", dropout=0.0, attention_dropout=0.0)


@pytest.fixture(scope="module")
def splade():
    return SPLADE(encoder()).eval()


@pytest.fixture
def engine_of(small, data_of, tmp_path):
    """Encode a collection with a scorer and open an engine over it."""

    def make(scorer, index=None, **options):
        data, where = data_of(scorer, small), Device(max_tokens=500)
        encode = EncodeOptions(tmp_path / "cache", shard_docs=25, **options)
        folders = pipeline.encode_sets(scorer, data, {"small": small}, encode, where, "32-true")
        index = index or Sparse()
        return engines.vector_engines(scorer, data, {"small": small}, folders, index, where, LateOptions())["small"]

    return make


def brute_force(engine, scorer, depth):
    """All products in float64 from dense stored weights: scores by doc id, by score, then by id, both descending."""
    rows = engine.collator.queries.rows(QUERIES)
    queries = encode_queries(scorer, engine.collator, rows, Device()).values.numpy().astype(np.float64)
    docs = engine.store.matrix.toarray().astype(np.float64)
    ids = [doc_id.decode() for doc_id in engine.store.doc_ids]
    found = {}
    for query_id, query in zip(QUERIES, queries, strict=True):
        scores = [float(np.float32(sum(query * doc))) for doc in docs]
        ranked = sorted(zip(scores, ids, strict=True), reverse=True)[:depth]
        found[query_id] = [(doc_id, score) for score, doc_id in ranked if score > 0]
    return found


@pytest.mark.parametrize("model", ["splade", "tildev2"])
def test_the_best_docs_are_those_of_brute_force(engine_of, splade, model):
    scorer = splade if model == "splade" else TILDEv2(encoder()).eval()
    engine = engine_of(scorer)
    for depth in (3, 1000):
        run = engine.search(QUERIES, depth)
        got = {
            query_id: list(zip(run[query_id], run.scores_of(query_id).tolist(), strict=True)) for query_id in QUERIES
        }
        assert got == brute_force(engine, scorer, depth)
    with torch.no_grad():
        docs = scorer.encode_docs(engine.collator.doc_batch(np.arange(60))).values
    torch.testing.assert_close(torch.from_numpy(engine.store.matrix.toarray()), docs, rtol=1e-4, atol=1e-5)
    again = engine_of(scorer)  # from the stored index
    run = engine.search(QUERIES, 5).to_run()
    assert again.search(QUERIES, 5).to_run() == run
    assert engine.score("q0", [*run["q0"], "no such doc"]) == run["q0"]  # bit for bit


def by_hand(weights, ids, quantized=False):
    """An engine over given doc weights [docs, words], whose query q has weight 2 for word 0 and 1 for word 2."""
    matrix = sparse.csr_matrix(np.array(weights, dtype=np.float32))
    store = SimpleNamespace(
        doc_ids=np.array([i.encode() for i in ids]), matrix=matrix, num_docs=len(ids), num_bytes=1,
        description=SimpleNamespace(dim=matrix.shape[1]),
    )  # fmt: skip
    engine = SparseEngine(None, None, store, Postings.of(matrix, quantized), Device())
    engine.encode = lambda query_ids: [(np.array([0, 2]), np.array([2.0, 1.0], dtype=np.float32))] * len(query_ids)
    return engine


WEIGHTS = [[1.0, 9.0, 0.0], [0.0, 5.0, 2.0], [0.0, 1.0, 0.0], [0.5, 0.0, 1.0], [0.0, 0.0, 3.0]]
IDS = ["b", "d", "e", "a", "c"]


def test_scores_and_ties_by_hand():
    engine = by_hand(WEIGHTS, IDS)
    # b: 2, d: 2, a: 1 + 1, c: 3; e shares no word; ties by descending id
    run = engine.search(["q"], 10)
    assert (run["q"], run.scores_of("q").tolist()) == (["c", "d", "b", "a"], [3.0, 2.0, 2.0, 2.0])
    assert engine.search(["q"], 2)["q"] == ["c", "d"]
    assert engine.search(["q"], 3)["q"] == ["c", "d", "b"]
    # words 0 and 2: half of the docs' rows have them; 2/5 and 3/5 of docs, all queries
    assert engine.figures(["q"]) == pytest.approx({"query_terms": 2.0, "doc_terms": 8 / 5, "flops": 1.0})


def test_given_candidates_are_ranked_alone():
    candidates = Candidates.from_lists([("q", ["e", "a", "c", "unknown"], [9.0, 8.0, 7.0, 6.0]), ("r", ["b"], [1.0])])
    found = Reranking(by_hand(WEIGHTS, IDS), candidates).search(["q", "r", "without"], 2)
    assert found.to_run() == {"q": {"c": 3.0, "a": 2.0}, "r": {"b": 2.0}, "without": {}}


def test_eight_bits_are_multiples_of_the_largest_weight_over_255():
    engine = by_hand([[1.0, 0.0, 0.0], [0.0, 0.0, 255.0], [0.4, 0.0, 99.6]], ["x", "y", "z"], quantized=True)
    assert engine.index.impacts.dtype == np.uint8 and engine.index.scale == 1.0
    # of z, 0.4 rounds to 0 and 99.6 to 100
    assert engine.search(["q"], 3).to_run() == {"q": {"y": 255.0, "z": 100.0, "x": 2.0}}


def test_eight_bits_stay_near_the_exact_scores(engine_of, splade):
    exact, rounded = engine_of(splade), engine_of(splade, Sparse(quantized=True))
    expected, got = (engine.search(QUERIES, 10).to_run() for engine in (exact, rounded))
    for query_id in QUERIES:
        best = max(expected[query_id].values())
        assert max(got[query_id].values()) == pytest.approx(best, rel=0.02)
    assert rounded.num_bytes < exact.num_bytes


@pytest.mark.parametrize("name", ["impacts.npy", "meta.json"])
def test_a_damaged_index_is_refused(engine_of, splade, name):
    engine = engine_of(splade)
    path = engine.store.folder / "index-sparse-float" / name
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}: expected CRC-32 .*the file is damaged; delete .*index-sparse-float"):
        engine_of(splade)


def test_a_damaged_shard_is_refused(engine_of, splade):
    engine = engine_of(splade)
    path = engine.store.folder / "shard-00000/words.bin"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"words.bin: expected \d+ bytes, got"):
        engine_of(splade)


def test_half_precision_is_stored(engine_of, splade):
    engine = engine_of(splade, dtype="float16")
    exact = engine.scorer.encode_docs(engine.collator.doc_batch(np.array([0]))).values[0].detach().numpy()
    np.testing.assert_allclose(engine.store.matrix[0].toarray()[0], exact, rtol=1e-3, atol=1e-6)


def test_an_index_of_other_vectors_is_refused(engine_of, splade):
    with pytest.raises(ConfigError, match=r"^index: expected sparse for SPLADE, got flat; set index=sparse$"):
        engine_of(splade, Flat())
    with pytest.raises(ConfigError, match=r"^index: expected flat, hnsw, .* for DPR, got sparse; set index=flat$"):
        engine_of(DPR(encoder()), Sparse())


def test_the_terms_of_a_score_add_up_to_it(engine_of, splade):
    engine = engine_of(splade)
    (doc_id, score), *_ = engine.search(["q3"], 1).to_run()["q3"].items()
    terms = engine.explain("q3", doc_id)
    assert sum(query * doc for _, query, doc in terms) == pytest.approx(score, rel=1e-5)
    products = [query * doc for _, query, doc in terms]
    assert products == sorted(products, reverse=True) and all(products)
    assert {term for term, *_ in terms} <= set(splade.encoder.tokenizer.get_vocab())
    for ids, missing in ((("q3", "nothing"), "doc 'nothing'"), (("nobody", doc_id), "query 'nobody'")):
        with pytest.raises(DataError, match=f"^explain: expected a query id and a doc id .*; not found: {missing}$"):
            engine.explain(*ids)


def test_seismic_finds_most_of_the_best_docs_with_their_exact_scores(engine_of, splade, capfd):
    pytest.importorskip("seismic")
    exact, near = engine_of(splade), engine_of(splade, Seismic(query_terms=200, heap_factor=0.7, rescore=3))
    expected, found = exact.search(QUERIES, 60).to_run(), near.search(QUERIES, 10).to_run()
    for query_id in QUERIES:
        assert found[query_id] == {doc_id: expected[query_id][doc_id] for doc_id in found[query_id]}
        assert list(found[query_id].values()) == sorted(found[query_id].values(), reverse=True)
    assert near.figures(QUERIES)["recall@10"] > 0.8 and near.num_bytes > 0
    assert not capfd.readouterr().out  # the library's own output
    unknown = near._best(np.array([splade.dim - 1]), np.array([1.0]), 5)  # perhaps a word of no doc
    assert len(unknown[0]) <= 5


def test_wrong_options_of_seismic():
    for options, message in (
        ({"postings": 0}, "index.postings: expected at least 1, got 0"),
        ({"heap_factor": 2.0}, "index.heap_factor: expected above 0 and at most 1, got 2.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            Seismic(**options)
