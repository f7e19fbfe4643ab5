"""`from ranker import Reranker`: scores equal those of the folder's library; order and ids; one-line errors."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ranker import Ranked, Reranker
from ranker.encoders.loading import load_encoder
from ranker.errors import DataError
from ranker.models.dpr import DPR
from ranker.models.monobert import MonoBERT

QUERIES = ["the river", "apples in the autumn"]
DOCS = ["a river runs to the sea", "apples are picked", "the sea", "cold nights and short days in autumn"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = MonoBERT(load_encoder("tiny"))
    torch.nn.init.normal_(model.head.weight)
    model.save(folder, max_tokens=64)
    return folder


@pytest.fixture(scope="module")
def reranker(folder):
    return Reranker.load(folder, accelerator="cpu")


def by_transformers(folder, pairs):
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [float(model.eval()(**tokenizer(*pair, return_tensors="pt")).logits) for pair in pairs]


def test_scores_are_those_of_transformers_on_each_pair_alone(folder, reranker):
    pairs = [(query, doc) for query in QUERIES for doc in DOCS]
    pairs += [pairs[0]]  # a pair that occurs twice
    np.testing.assert_allclose(reranker.score(pairs), by_transformers(folder, pairs), rtol=0, atol=1e-5)
    assert reranker.score([]).shape == (0,)


def test_a_ranking_has_ids_scores_and_positions(folder, reranker):
    docs = [DOCS[0], {"id": "b", "text": DOCS[1]}, {"id": 3, "title": "Sea", "text": DOCS[2]}]
    expected = by_transformers(folder, [(QUERIES[0], text) for text in (DOCS[0], DOCS[1], f"Sea {DOCS[2]}")])
    ranking = reranker.rank(QUERIES[0], docs)
    order = sorted(range(3), key=lambda i: -expected[i])
    assert [doc.position for doc in ranking] == order
    assert [doc.doc_id for doc in ranking] == [("0", "b", "3")[i] for i in order]
    np.testing.assert_allclose([doc.score for doc in ranking], [expected[i] for i in order], rtol=0, atol=1e-5)
    assert reranker.rank(QUERIES[0], docs, top_k=1) == ranking[:1]


def test_several_queries_rank_one_list_or_a_list_each(reranker):
    def ids(rankings):
        return [[doc.doc_id for doc in ranking] for ranking in rankings]

    each = [reranker.rank(query, DOCS) for query in QUERIES]
    assert ids(reranker.rank(QUERIES, DOCS)) == ids(each)
    assert ids(reranker.rank(QUERIES, [DOCS, DOCS[:2]])) == ids([each[0], reranker.rank(QUERIES[1], DOCS[:2])])
    tables = [{"x": DOCS[0], "y": DOCS[1]}, {"z": DOCS[2]}]
    assert [sorted(part) for part in ids(reranker.rank(QUERIES, tables))] == [["x", "y"], ["z"]]
    assert reranker.rank(QUERIES, [[], DOCS[:1]])[0] == [] == reranker.rank(QUERIES[0], [])


def test_equal_scores_keep_the_order_of_the_input(reranker):
    ranking = reranker.rank(QUERIES[0], [{"id": name, "text": DOCS[0]} for name in "cab"])
    assert [doc.doc_id for doc in ranking] == ["c", "a", "b"] and len({doc.score for doc in ranking}) == 1
    assert isinstance(ranking[0], Ranked)


def test_a_small_budget_of_tokens_gives_the_same_scores(folder, reranker):
    pairs = [(query, doc) for query in QUERIES for doc in DOCS]
    small = Reranker.load(folder, accelerator="cpu", max_tokens=16)
    np.testing.assert_allclose(small.score(pairs), reranker.score(pairs), rtol=1e-6)


def test_a_long_text_is_cut_as_the_limits_say(folder):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    query, doc = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (QUERIES[0], DOCS[3]))
    first = [tokenizer.cls_token_id, *query, tokenizer.sep_token_id]
    second = [*doc[:2], tokenizer.sep_token_id]
    with torch.no_grad():
        expected = model.eval()(
            input_ids=torch.tensor([first + second]),
            token_type_ids=torch.tensor([[0] * len(first) + [1] * len(second)]),
        ).logits
    got = Reranker.load(folder, accelerator="cpu", max_doc_tokens=2).score([(QUERIES[0], DOCS[3])])
    np.testing.assert_allclose(got, expected[0], rtol=0, atol=1e-5)


def test_a_bi_encoder_scores_as_sentence_transformers(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    torch.manual_seed(0)
    DPR(load_encoder("tiny"), query_prompt="search: ").save(tmp_path, max_tokens=64)
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    expected = theirs.encode_query(QUERIES) @ theirs.encode_document(DOCS).T / 0.05  # the default temperature
    rankings = Reranker.load(tmp_path, accelerator="cpu").rank(QUERIES, DOCS)
    for ranking, scores in zip(rankings, expected, strict=True):
        assert [doc.position for doc in ranking] == np.argsort(-scores).tolist()
        np.testing.assert_allclose([doc.score for doc in ranking], np.sort(scores)[::-1], rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: r.rank("q", "doc"), "docs: expected a list of docs, got one text"),
        (lambda r: r.rank("q", [7]), r"docs\[0\]: expected a text, or a mapping with a text under 'text'; got 7"),
        (lambda r: r.rank("q", [{"id": 1}]), r"docs\[0\]: expected a text, or a mapping"),
        (lambda r: r.rank(["p", "q"], [["x"]]), "docs: expected a list of docs for each of 2 queries, got 1"),
        (
            lambda r: r.rank("q", [{"id": 1, "text": "a"}, {"id": "1", "text": "b"}]),
            r"docs\[1\]: expected an id of its own, got '1', which docs\[0\] has",
        ),
        (lambda r: r.rank("q", ["x"], top_k=0), "top_k: expected at least 1 or None, got 0"),
        (lambda r: r.score([("q",)]), "pairs: expected a query and a doc, both texts"),
        (lambda r: r.score([("q", None)]), "pairs: expected a query and a doc, both texts"),
    ],
)
def test_mistakes_say_what_was_expected(reranker, call, message):
    with pytest.raises(DataError, match=message):
        call(reranker)


def test_importing_the_package_imports_no_torch():
    code = "import ranker, sys; assert 'torch' not in sys.modules; assert not hasattr(ranker, 'nothing')"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
