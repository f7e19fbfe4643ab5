"""BM25 reaches the figures that the collections' README files give, with the same docs at the same places."""

import os
from pathlib import Path

import pytest

from ranker.data.corpus_files import JsonlDocs, read_queries
from ranker.data.trec import read_candidates, read_qrels
from ranker.evaluation.metrics import evaluate
from ranker.retrieval.bm25 import BM25

SHARED = Path(os.environ.get("RANKER_SHARED_DATA") or Path(__file__).resolve().parents[2] / ".." / "shared" / "data")
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder shared/data with real collections is not there")

MEASURES = ["AP@100", "RR@10", "nDCG@10", "R@100"]
FIGURES = [
    ("cwe", "qrels.test.txt", (0.337, 0.374, 0.387, 0.787)),
    ("scifact", "qrels.test.txt", (0.637, 0.641, 0.676, 0.913)),
    ("nfcorpus-preprocessed", "qrels.test.txt", (0.148, 0.531, 0.327, 0.255)),
    ("cranfield", "qrels.txt", (0.281, 0.514, 0.323, 0.726)),  # raw codes, as its README says
    ("cacm", "qrels.txt", (0.327, 0.690, 0.481, 0.644)),
    ("cisi", "qrels.txt", (0.160, 0.618, 0.373, 0.427)),
    ("medline", "qrels.txt", (0.500, 0.871, 0.671, 0.772)),
    ("adi", "qrels.txt", (0.408, 0.629, 0.480, 0.910)),
]


@pytest.mark.parametrize(("name", "qrels_file", "figures"), FIGURES, ids=[name for name, _, _ in FIGURES])
def test_bm25_reaches_the_published_figures(name, qrels_file, figures):
    folder = SHARED / name
    qrels = read_qrels(folder / qrels_file)
    queries = {query_id: text for query_id, text in read_queries(folder / "queries.tsv").items() if query_id in qrels}
    # their words have two characters at least
    found = BM25(JsonlDocs(folder / "docs.jsonl.gz"), min_word_chars=2).search(queries, 100)
    means = evaluate(found.to_run(), qrels, MEASURES).means
    for measure, figure in zip(MEASURES, figures, strict=True):
        # The files' RR@10 comes of ir-measures' own order of ties (PC-02); nfcorpus has many.
        assert means[measure] == pytest.approx(figure, abs=0.004 if measure == "RR@10" else 0.0006), measure

    theirs = read_candidates(folder / "bm25.run.gz")
    same = sum(found[query_id][:10] == theirs[query_id][:10] for query_id in queries)
    assert same >= 0.97 * len(queries)


def test_pc2_13_defaults_equal_bm25s_over_words_of_one_character_and_more():
    """bm25s with its own tokenizer, the word pattern in plain `re` and the stop word "i"; cwe is unaccented English."""
    import bm25s
    import Stemmer
    from bm25s.tokenization import STOPWORDS_EN

    folder = SHARED / "cwe"
    qrels = read_qrels(folder / "qrels.test.txt")
    queries = {query_id: text for query_id, text in read_queries(folder / "queries.tsv").items() if query_id in qrels}
    docs = JsonlDocs(folder / "docs.jsonl.gz")
    options = {
        "token_pattern": r"(?!(?<=\w')\w\b)\b\w+\b",
        "stopwords": [*STOPWORDS_EN, "i"],
        "stemmer": Stemmer.Stemmer("english"),
    }
    reference = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
    reference.index(
        bm25s.tokenize([doc.full_text for doc in docs], show_progress=False, **options), show_progress=False
    )
    ids = [doc.doc_id for doc in docs]
    words = bm25s.tokenize(list(queries.values()), return_ids=False, show_progress=False, **options)
    theirs = {
        query_id: {ids[row]: float(score) for row, score in enumerate(reference.get_scores(found)) if score > 0}
        for query_id, found in zip(queries, words, strict=True)
    }
    found = BM25(docs).search(queries, len(ids)).to_run()
    for query_id, scores in theirs.items():
        assert found[query_id] == pytest.approx(scores, rel=1e-6)
    # the figures of docs/data.md
    assert list(evaluate(theirs, qrels, MEASURES).means.values()) == pytest.approx(
        [0.336, 0.373, 0.386, 0.787], abs=0.0006
    )
