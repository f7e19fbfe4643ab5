"""Without a network: a server that is not there, or that accepts and never answers, is said to be so within seconds."""

import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import huggingface_hub
import pytest

from ranker import network
from ranker.data import ir_datasets_reader as irds
from ranker.encoders import loading
from ranker.errors import ConfigError, DataError, RankerError
from ranker.network import unreachable
from ranker.training import dashboards, loggers


@pytest.fixture
def hole(monkeypatch):
    """A server that accepts connections and never answers; waiting is cut to a tenth of a second."""
    waits = lambda url: unreachable(url, 0.1)  # noqa: E731
    for module in (loading, irds, dashboards):
        monkeypatch.setattr(module, "unreachable", waits)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def served(code):
    """A server whose only answer is this code."""

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(code)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/some/path?query"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("code", [200, 401, 404, 503])
def test_any_answer_is_one(code):
    with served(code) as url:
        assert unreachable(url) is None


def test_no_answer_is_told_in_time(hole):
    started = time.monotonic()
    assert unreachable(hole, 0.2) is not None
    assert time.monotonic() - started < 2
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert "refused" in unreachable(f"http://127.0.0.1:{closed.getsockname()[1]}").lower()
    assert network.SECONDS * 3 < 30  # ir_datasets asks two servers for a file


def test_a_look_up_of_a_name_that_hangs_is_given_up(monkeypatch):

    def hang(*_, **__):
        time.sleep(2.5)
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    started = time.monotonic()
    assert unreachable("http://somewhere.example", 0.1) == "no answer within 0 seconds"
    assert time.monotonic() - started < 2


def test_an_encoder_of_a_hub_that_does_not_answer(hole, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hole)
    with pytest.raises(
        ConfigError, match=rf"{hole} is out of reach: .*set encoder.name=FOLDER, or .* HF_HUB_OFFLINE=1"
    ) as raised:
        loading.load_encoder("someone/some-encoder")
    assert "\n" not in str(raised.value)


def test_a_data_set_whose_servers_do_not_answer(hole, tmp_path):
    from ir_datasets.util import Download, RequestsDownload

    stream = RequestsDownload.stream
    with (
        pytest.raises(DataError, match=rf"{hole}/a is out of reach: .*IR_DATASETS_HOME"),
        irds._reachable_servers(),
        irds.readable("x"),
    ):
        Download([RequestsDownload(f"{hole}/a"), RequestsDownload(f"{hole}/b")], cache_path=tmp_path / "file").path()
    assert RequestsDownload.stream is stream


def test_wandb_whose_server_does_not_answer(hole, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_BASE_URL", hole)
    logger = loggers.wandb(tmp_path / "run", mode="online")
    with pytest.raises(
        RankerError, match=rf"expected wandb at {hole} to answer, got .*; logger.mode=offline needs no server"
    ):
        dashboards.start([logger], {}, "")
