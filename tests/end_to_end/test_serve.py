"""`ranker serve` over a socket: scores, batches of several requests, bounds, bad requests, the end of the server."""

import logging
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import torch
from http_server import HeldModel, is_ready, metric, running, wait_until
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ranker import Reranker
from ranker.encoders.loading import load_encoder
from ranker.errors import CheckpointError
from ranker.models.monobert import MonoBERT
from ranker.serving.interface import require_finite

QUERY = "the river"
DOCS = ["a river runs to the sea", "apples are picked", "the sea", "cold nights and short days in autumn"]
BODY = {"query": QUERY, "documents": DOCS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    model = MonoBERT(load_encoder("tiny"))
    torch.nn.init.normal_(model.head.weight)
    model.save(folder, max_tokens=64)
    return folder


@pytest.fixture(scope="module")
def reranker(folder):
    return Reranker.load(folder, accelerator="cpu", precision="32-true")


@pytest.fixture(scope="module")
def client(reranker):
    """A server that stays up through the tests that use it."""
    with running(lambda: require_finite(HeldModel(reranker)), text_chars=2000, body_bytes=100_000) as client:
        wait_until(client, is_ready)
        yield client
        assert client.get("/health").status_code == 200


def by_transformers(folder, pairs):
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [float(model.eval()(**tokenizer(*pair, return_tensors="pt")).logits) for pair in pairs]


# shapes and scores -------------------------------------------------------------------------------------------------


def test_the_scores_are_those_of_python_and_of_transformers(client, folder, reranker):
    pairs = [(QUERY, doc) for doc in DOCS]
    expected = by_transformers(folder, pairs)
    np.testing.assert_allclose(reranker.score(pairs), expected, rtol=0, atol=1e-5)
    answer = client.post("/rerank", json=BODY).json()
    order = sorted(range(4), key=lambda i: -expected[i])
    assert [result["index"] for result in answer["results"]] == order
    scores = [result["relevance_score"] for result in answer["results"]]
    np.testing.assert_allclose(scores, [expected[i] for i in order], rtol=0, atol=1e-5)
    assert all(result.keys() == {"index", "relevance_score"} for result in answer["results"])
    scored = client.post("/score", json={"pairs": [[QUERY, doc] for doc in DOCS]}).json()
    np.testing.assert_allclose(scored["scores"], expected, rtol=0, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = sum(len(tokenizer(*pair)["input_ids"]) for pair in pairs)
    assert answer["usage"]["total_tokens"] == scored["usage"]["total_tokens"] == tokens


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_the_shape_of_cohere_and_jina(client, path):
    request = {
        "model": "any", "query": {"text": QUERY}, "documents": [DOCS[0], {"text": DOCS[1]}], "top_n": 1,
        "return_documents": True, "max_chunks_per_doc": 10,
    }  # fmt: skip
    (result,) = client.post(path, json=request).json()["results"]
    assert result["document"] == {"text": DOCS[result["index"]]}


def test_the_shape_of_text_embeddings_inference(client):
    raw = {row["index"]: row["relevance_score"] for row in client.post("/rerank", json=BODY).json()["results"]}
    request = {"query": QUERY, "texts": DOCS, "raw_scores": True, "return_text": True, "truncate": True}
    results = client.post("/rerank", json=request).json()
    assert [set(result) for result in results] == [{"index", "score", "text"}] * 4
    assert {result["index"]: result["score"] for result in results} == pytest.approx(raw, abs=1e-5)
    assert [result["text"] for result in results] == [DOCS[result["index"]] for result in results]
    squashed = client.post("/rerank", json={"query": QUERY, "texts": DOCS, "raw_scores": False}).json()
    expected = {index: 1 / (1 + math.exp(-score)) for index, score in raw.items()}
    assert {result["index"]: result["score"] for result in squashed} == pytest.approx(expected, abs=1e-6)


def test_a_title_precedes_the_text_and_equal_scores_keep_their_order(client):
    documents = [{"text": "runs to the sea", "title": "a river"}, DOCS[0], DOCS[0]]
    results = client.post("/rerank", json={"query": QUERY, "documents": documents}).json()["results"]
    assert [result["index"] for result in results] == [0, 1, 2]
    assert len({result["relevance_score"] for result in results}) == 1


def test_description_and_page_need_no_network(client):
    described = client.get("/openapi.json").json()
    assert {"/rerank", "/score", "/health", "/metrics"} <= described["paths"].keys()
    page = client.get("/docs").text
    assert "POST /rerank" in page and "http" not in page.replace("http://HOST:PORT", "")
    assert client.get("/nothing").status_code == 404 and client.get("/rerank").status_code == 405


# batches -----------------------------------------------------------------------------------------------------------


def test_requests_share_batches_and_do_not_change_each_other(reranker):
    model = HeldModel(reranker, max_tokens=100)
    words = ["river", "sea", "apple", "night", "autumn", "cold", "short", "day", "picked", "run"]
    bodies = [
        {"query": f"{words[i % 10]} {i}", "documents": [" ".join(words[: 1 + (i + j) % 10]) for j in range(1 + i % 7)]}
        for i in range(24)
    ]
    with running(lambda: model) as client, ThreadPoolExecutor(24) as pool:
        wait_until(client, is_ready)
        model.go.clear()
        answers = [pool.submit(client.post, "/rerank", json=body) for body in bodies]
        wait_until(client, lambda c: metric(c, "ranker_queue_pairs") == sum(len(b["documents"]) for b in bodies))
        model.go.set()
        for body, answer in zip(bodies, answers, strict=True):
            got = {row["index"]: row["relevance_score"] for row in answer.result().json()["results"]}
            alone = reranker.score([(body["query"], doc) for doc in body["documents"]])
            np.testing.assert_allclose([got[i] for i in range(len(alone))], alone, rtol=0, atol=1e-5)
        assert any(len(batch) > 2 for batch in model.batches)  # of several requests
        assert any(start > 0 for batch in model.batches for start, _ in batch)  # the rest of a split request
        assert metric(client, "ranker_pairs_total") == sum(len(body["documents"]) for body in bodies)


def test_the_counters_say_where_the_time_of_requests_goes(reranker):
    model = HeldModel(reranker, max_tokens=500)
    held = 0.5
    with running(lambda: model) as client, ThreadPoolExecutor(2) as pool:
        wait_until(client, is_ready)
        model.go.clear()
        first = pool.submit(client.post, "/rerank", json=BODY)
        wait_until(client, lambda _: model.busy.is_set())
        second = pool.submit(client.post, "/score", json={"pairs": [[QUERY, DOCS[0]]]})
        wait_until(client, lambda c: metric(c, "ranker_queue_pairs") == 5)
        time.sleep(held)
        model.go.set()
        assert {first.result().status_code, second.result().status_code} == {200}

        def stage(name):
            return metric(client, f'ranker_stage_seconds_total{{stage="{name}"}}')

        assert stage("queue") >= held and stage("score") >= held  # of the second request, and of the first
        assert metric(client, 'ranker_thread_seconds_total{state="prepare"}') >= held
        assert metric(client, 'ranker_thread_seconds_total{state="prepare_cpu"}') < held
        total = sum(metric(client, f'ranker_request_seconds_sum{{route="{route}"}}') for route in ("/rerank", "/score"))
        stages = sum(map(stage, ("body", "tokenize", "queue", "score", "reply")))
        assert 0.7 * total < stages < total
        assert metric(client, "ranker_batch_max_tokens") == 500


def test_a_request_over_which_the_model_fails_fails_alone(reranker, caplog):
    model = HeldModel(reranker, failing="a secret text")
    with running(lambda: model) as client, ThreadPoolExecutor(3) as pool:
        wait_until(client, is_ready)
        model.go.clear()
        documents = [DOCS[:1], ["a secret text", DOCS[1]], DOCS[2:]]
        answers = [pool.submit(client.post, "/rerank", json={"query": QUERY, "documents": docs}) for docs in documents]
        wait_until(client, lambda c: metric(c, "ranker_queue_pairs") == 5)
        model.go.set()
        assert [answer.result().status_code for answer in answers] == [200, 500, 200]
        assert answers[1].result().json()["error"] == "the model failed on this request (RuntimeError)"
    assert "RuntimeError" in caplog.text and "secret" not in caplog.text


def test_a_model_that_only_fails_shows_in_the_health(reranker):
    with running(lambda: HeldModel(reranker, failing="bad")) as client:
        wait_until(client, is_ready)
        for expected in ("ready", "ready", "failing"):
            assert client.post("/rerank", json={"query": QUERY, "documents": ["bad"]}).status_code == 500
            assert client.get("/health").json() == {"status": expected}
        assert client.get("/health").status_code == 503
        assert client.post("/rerank", json=BODY).status_code == 200
        assert client.get("/health").json() == {"status": "ready"}


# bounds ------------------------------------------------------------------------------------------------------------


def raw(body):
    return {"content": body, "headers": {"Content-Type": "application/json"}}


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        ({"json": {"query": QUERY, "documents": []}}, 422, "documents: list should have at least 1 item"),
        (
            {"json": {"query": QUERY, "documents": ["a"] * 10_000}},
            422,
            "documents: list should have at most 1000 items",
        ),
        ({"json": {"query": QUERY}}, 422, "expected either documents or texts, got neither"),
        ({"json": BODY | {"texts": DOCS}}, 422, "expected either documents or texts, got both"),
        ({"json": {"documents": DOCS}}, 422, "query: field required"),
        ({"json": {"query": QUERY, "documents": "text"}}, 422, "documents: input should be a valid array, got 'text'"),
        ({"json": {"query": 7, "documents": DOCS}}, 422, "query: input should be a valid string, got 7"),
        ({"json": {"query": QUERY, "documents": [{"id": 1}]}}, 422, "documents.0.text: field required"),
        ({"json": {"query": QUERY, "documents": [None]}}, 422, "documents.0: input should be a valid string, got null"),
        ({"json": BODY | {"top_n": 0}}, 422, "top_n: input should be greater than or equal to 1, got 0"),
        ({"json": BODY | {"top_n": True}}, 422, "top_n: input should be a valid integer, got true"),
        ({"json": BODY | {"truncate": False}}, 422, "truncate: input should be True, got false"),
        ({"json": [1]}, 422, "body: input should be an object, got an array"),
        ({"json": {"query": "x" * 2001, "documents": DOCS}}, 422, "query: string should have at most 2000 characters"),
        (raw(b'{"query": NaN, "documents": ["a"]}'), 422, "query: input should be a valid string, got nan"),
        (raw(b'{"query": "\\ud800", "documents": ["a"]}'), 400, "expected JSON in UTF-8"),
        (raw(b'{"query": "\xff", "documents": ["a"]}'), 400, "expected JSON in UTF-8"),
        (raw(b'{"query": '), 400, "expected JSON in UTF-8"),
        (raw(b"[" * 50_000), 400, "expected JSON in UTF-8"),
        (raw(b""), 400, "expected JSON in UTF-8"),
        (raw(b'"' + b"x" * 150_000), 413, "expected a body of at most 100000 bytes"),
        (raw(iter([b"x" * 90_000] * 4)), 413, "expected a body of at most 100000 bytes"),  # of unknown length
        ({"json": {"query": QUERY, "documents": ["x" * 10_000_000]}}, 413, "expected a body of at most 100000 bytes"),
        ({"content": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, "expected Content-Type: application/json"),
    ],
    ids=range(24),
)
def test_a_bad_request_is_answered_clearly(client, request_, status, message):
    try:
        answer = client.post("/rerank", **request_)
    except httpx.WriteError:  # the server has answered and closed, for a body far above its bound
        assert status == 413 and len(request_["json"]["documents"][0]) > 800_000
        return
    assert answer.status_code == status and answer.json()["error"].startswith(message)
    assert client.post("/rerank", json=BODY).status_code == 200


def test_texts_may_be_empty_or_strange(client, reranker):
    texts = ["", " ", "\x00", "[SEP] [CLS]", "\U0001f30a" * 50, "é\u0301\u202e", "x" * 2000]
    answer = client.post("/score", json={"pairs": [[QUERY, text] for text in texts] + [["", ""]]})
    expected = reranker.score([(QUERY, text) for text in texts] + [("", "")])
    np.testing.assert_allclose(answer.json()["scores"], expected, rtol=0, atol=1e-5)


def test_a_full_queue_refuses_and_a_slow_answer_ends(reranker):
    model = HeldModel(reranker)
    with running(lambda: model, queue_pairs=6, request_seconds=2) as client, ThreadPoolExecutor(1) as pool:
        wait_until(client, is_ready)
        model.go.clear()
        late = pool.submit(client.post, "/rerank", json=BODY)
        wait_until(client, lambda c: metric(c, "ranker_queue_pairs") == 4)
        refused = client.post("/rerank", json=BODY)
        assert refused.status_code == 429 and "the queue is full: 4 pairs are waiting" in refused.json()["error"]
        assert int(refused.headers["Retry-After"]) >= 1
        assert late.result().status_code == 504 and "no scores within 2 seconds" in late.result().json()["error"]
        assert metric(client, "ranker_queue_pairs") == 0
        model.go.set()
        assert client.post("/rerank", json=BODY | {"documents": DOCS * 5}).status_code == 200  # alone, above the bound


def test_a_client_that_leaves_frees_its_place(reranker):
    model = HeldModel(reranker)
    with running(lambda: model, request_seconds=600) as client:
        wait_until(client, is_ready)
        model.go.clear()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{client.base_url}/rerank", json=BODY, timeout=0.5)
        wait_until(client, lambda c: metric(c, "ranker_queue_pairs") == 0, seconds=15)
        model.go.set()


# token, loading, logs ----------------------------------------------------------------------------------------------


def test_a_token_guards_scores_and_metrics(reranker):
    with running(lambda: HeldModel(reranker), token=b"s3cret") as client:
        wait_until(client, is_ready)
        right = {"Authorization": "Bearer s3cret"}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
            answer = client.post("/rerank", json=BODY, headers=headers)
            assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
            assert client.get("/metrics", headers=headers).status_code == 401
        assert client.post("/rerank", json=BODY, headers=right).status_code == 200
        assert client.get("/metrics", headers=right).status_code == 200
        described = client.get("/openapi.json").json()
        assert described["paths"]["/rerank"]["post"]["security"] == [{"bearer": []}]


def test_a_server_that_loads_says_so(reranker):
    loaded = threading.Event()
    with running(lambda: loaded.wait(30) and HeldModel(reranker)) as client:
        assert (client.get("/health").status_code, client.get("/health").json()) == (503, {"status": "loading"})
        answer = client.post("/rerank", json=BODY)
        assert answer.status_code == 503 and answer.headers["Retry-After"] == "1"
        loaded.set()
        wait_until(client, is_ready)
        assert client.post("/rerank", json=BODY).status_code == 200


def test_a_model_that_does_not_load_ends_the_server():
    def load():
        raise CheckpointError("checkpoint: damaged")

    with running(load) as client:
        client.thread.join(30)
        assert [str(error) for error in client.errors] == ["checkpoint: damaged"]


def test_logs_have_no_text_of_a_request(reranker, caplog):
    with caplog.at_level(logging.INFO), running(lambda: HeldModel(reranker), log_requests=True) as client:
        wait_until(client, is_ready)
        client.post("/rerank?secret", json={"query": "secret", "documents": ["secret"]})
        client.post("/rerank", json={"query": "secret", "documents": [{"secret": 1}]})
        client.post("/secret", json={})
    assert "POST /rerank 200" in caplog.text and "POST /rerank 422" in caplog.text
    assert "secret" not in "\n".join(record.getMessage() for record in caplog.records if record.name != "httpx")


def test_a_stopping_server_answers_what_it_accepted(reranker):
    model = HeldModel(reranker)
    with running(lambda: model) as client, ThreadPoolExecutor(8) as pool:
        wait_until(client, is_ready)
        model.go.clear()
        accepted = [pool.submit(client.post, "/rerank", json=BODY) for _ in range(8)]
        wait_until(client, lambda c: metric(c, "ranker_queue_pairs") == 32)
        client.server.stop()
        wait_until(client, lambda c: c.get("/health").json() == {"status": "stopping"})
        time.sleep(0.5)  # it does not close while accepted requests wait
        refused = client.post("/rerank", json=BODY)
        assert refused.status_code == 503 and refused.headers["Connection"] == "close"
        model.go.set()
        assert [answer.result().status_code for answer in accepted] == [200] * 8
        client.thread.join(30)
        with pytest.raises(httpx.ConnectError):
            client.get("/health")


def test_answers_fit_the_openapi_description(reranker):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    seen = set()
    modes = schemathesis.GenerationMode
    with running(lambda: HeldModel(reranker), docs=5, text_chars=50) as client:
        wait_until(client, is_ready)
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())

        def check(case):
            response = case.call(base_url=str(client.base_url))
            seen.add(response.status_code)
            case.validate_response(response)

        bounded = settings(
            max_examples=12,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        for path, method in (("/rerank", "POST"), ("/score", "POST"), ("/health", "GET"), ("/metrics", "GET")):
            for mode in modes if method == "POST" else [modes.POSITIVE]:
                cases = schema[path][method].as_strategy(generation_mode=mode)
                bounded(given(case=cases)(lambda case: check(case)))()
        assert client.get("/health").status_code == 200
    assert {200, 422} <= seen
