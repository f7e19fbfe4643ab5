"""The transformers in pipelines of the installed PyTerrier; these start no Java."""

import numpy as np
import pytest
import torch

from ranker import Reranker
from ranker.encoders.loading import load_encoder
from ranker.errors import CheckpointError, DataError
from ranker.models.colbert import ColBERT
from ranker.models.dpr import DPR
from ranker.models.monobert import MonoBERT

pd = pytest.importorskip("pandas", reason="needs the extra pyterrier")
pt = pytest.importorskip("pyterrier", reason="needs the extra pyterrier")

DOCS = [
    {"docno": "d1", "text": "a river runs to the sea"},
    {"docno": "d2", "text": "apples are picked"},
    {"docno": "d3", "text": "the sea", "title": "cold nights"},
    {"docno": "d4", "text": "cold nights and short days in autumn"},
]
QUERIES = [{"qid": "q1", "query": "the river"}, {"qid": "q2", "query": "apples in the autumn"}]
TOPICS = pd.DataFrame(QUERIES)


@pytest.fixture(scope="module")
def rerankers(tmp_path_factory):
    loaded = {}
    for model in (MonoBERT, DPR, ColBERT):
        folder = tmp_path_factory.mktemp(model.__name__)
        torch.manual_seed(0)
        scorer = model(load_encoder("tiny"))
        for parameter in scorer.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        scorer.save(folder, max_tokens=64)
        loaded[model.__name__] = Reranker.load(folder, accelerator="cpu", precision="32-true")
    return loaded


def full_text(doc):
    return f"{doc['title']} {doc['text']}" if "title" in doc else doc["text"]


def test_a_ranking_gets_new_scores_and_ranks(rerankers):
    from ranker.integrations.pyterrier import RerankTransformer

    first = pd.DataFrame([{**query, **doc, "score": 0.0, "rank": i} for query in QUERIES for i, doc in enumerate(DOCS)])
    ranked = RerankTransformer(rerankers["MonoBERT"])(first)
    expected = rerankers["MonoBERT"].score([(row.query, row.text) for row in first.itertuples()])
    scores = {(row.qid, row.docno): row.score for row in ranked.itertuples()}
    assert scores == pytest.approx(
        {(row.qid, row.docno): float(score) for row, score in zip(first.itertuples(), expected, strict=True)}, abs=1e-5
    )
    for _, group in ranked.groupby("qid"):
        by_rank = group.sort_values("rank")
        assert by_rank["rank"].tolist() == [0, 1, 2, 3]
        assert by_rank["score"].is_monotonic_decreasing


@pytest.mark.parametrize("model", ["DPR", "ColBERT"])
def test_docs_are_searched(rerankers, tmp_path, model):
    from ranker.integrations.pyterrier import DenseRetriever

    reranker = rerankers[model]
    found = DenseRetriever(reranker, DOCS, depth=3, cache_dir=tmp_path)(TOPICS.assign(query_0=["x", "y"]))
    assert set(found.columns) == {"qid", "query", "query_0", "docno", "text", "score", "rank"}
    for query in QUERIES:
        scores = reranker.score([(query["query"], full_text(doc)) for doc in DOCS])
        rows = found[found.qid == query["qid"]]
        order = np.argsort(-scores, kind="stable")[:3]
        assert rows.docno.tolist() == [DOCS[i]["docno"] for i in order]
        assert rows["rank"].tolist() == [0, 1, 2]
        assert rows.text.tolist() == [full_text(DOCS[i]) for i in order]
        np.testing.assert_allclose(rows.score, scores[order], rtol=1e-4)
    again = DenseRetriever(reranker, DOCS, depth=3, cache_dir=tmp_path)(TOPICS)  # from the stored vectors
    np.testing.assert_array_equal(again.score, found.score)


def test_a_pipeline_is_evaluated_without_java(rerankers, tmp_path):
    from ranker.integrations.pyterrier import DenseRetriever, RerankTransformer

    dense = DenseRetriever(rerankers["DPR"], DOCS, vectors=tmp_path / "vectors")
    rerank = RerankTransformer(rerankers["MonoBERT"])
    pipeline = dense % 3 >> rerank
    qrels = pd.DataFrame({"qid": ["q1", "q2"], "docno": ["d1", "d2"], "label": [1, 1]})
    table = pt.Experiment([dense, pipeline], TOPICS, qrels, ["recip_rank"], names=["dense", "rerank"])
    run = pipeline(TOPICS)
    ranks = {row.qid: row["rank"] for _, row in run.iterrows() if (row.qid, row.docno) in {("q1", "d1"), ("q2", "d2")}}
    expected = np.mean([1 / (1 + ranks[qid]) if qid in ranks else 0 for qid in ("q1", "q2")])
    assert table.set_index("name").recip_rank["rerank"] == pytest.approx(expected)
    assert not pt.java.started()


def test_empty_frames_pass_through(rerankers, tmp_path):
    from ranker.integrations.pyterrier import DenseRetriever, RerankTransformer

    dense = DenseRetriever(rerankers["DPR"], DOCS, vectors=tmp_path / "vectors")
    found = dense(TOPICS[:0])
    assert len(found) == 0 and {"qid", "query", "docno", "score", "rank", "text"} <= set(found.columns)
    assert len(RerankTransformer(rerankers["MonoBERT"])(found)) == 0


def test_mistakes_are_named(rerankers, tmp_path):
    from ranker.integrations.pyterrier import DenseRetriever, RerankTransformer

    with pytest.raises(DataError, match=r"docs\[1\]: expected a mapping with docno and text"):
        DenseRetriever(rerankers["DPR"], [DOCS[0], {"docno": "d2"}], cache_dir=tmp_path)
    with pytest.raises(DataError, match="expected each doc id once, got 'd1' twice"):
        DenseRetriever(rerankers["DPR"], [DOCS[0], DOCS[0]], cache_dir=tmp_path)
    with pytest.raises(CheckpointError, match="expected a bi-encoder"):
        DenseRetriever(rerankers["MonoBERT"], DOCS, cache_dir=tmp_path)
    with pytest.raises(KeyError, match="text"):
        RerankTransformer(rerankers["MonoBERT"])(pd.DataFrame([{"qid": "1", "query": "q", "docno": "d", "score": 1.0}]))
