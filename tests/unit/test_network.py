"""Without a network, an absent server, or one that accepts and never answers, is reported within seconds."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from ranker import network
from ranker.data import ir_datasets_access as irds
from ranker.encoders import encoder_files, loading
from ranker.errors import ConfigError, DataError, RankerError
from ranker.network import unreachable
from ranker.training import dashboards, loggers

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def hole(monkeypatch):
    """A server that accepts connections and never answers; waiting is cut to a tenth of a second."""
    waits = lambda url: unreachable(url, 0.1)  # noqa: E731
    for module in (encoder_files, irds, dashboards):
        monkeypatch.setattr(module, "unreachable", waits)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def served(code):
    """A server that answers every request with this status code."""

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


FILES = re.compile(r"(?:/api/models)?/someone/(?P<repo>[\w-]+)(?:/resolve/main/(?P<file>[\w.]+))?")


@contextmanager
def hub(folder):
    """A hub that answers for its root, and for the files of a folder until it hangs, by the name of the repository.

    Yields its address and the list of the requests that it has left without an answer.
    """
    hanging, end = [], threading.Event()

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def hang(self):
            hanging.append(f"{self.command} {self.path}")
            end.wait(60)
            self.close_connection = True

        def do_HEAD(self):
            found = FILES.match(self.path)
            repo, name = (text or "" for text in found.groups()) if found else ("", "")
            path = folder / (name or "no such file")
            telemetry = self.path != "/" and not found
            if telemetry or repo == "hangs-at-once" or (repo == "hangs-at-weights" and name.startswith("model")):
                return self.hang()
            content = path.read_bytes() if path.is_file() else b""
            self.send_response(200 if path.is_file() else 404)
            if path.is_file():
                self.send_header("ETag", f'"{name}"')
            else:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("X-Repo-Commit", "c" * 40)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                if repo == "hangs-in-a-file":
                    self.wfile.write(content[:9])
                    return self.hang()
                self.wfile.write(content)
            return None

        do_GET = do_HEAD

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", hanging
    finally:
        end.set()
        server.shutdown()
        server.server_close()


def test_a_hub_that_answers_and_then_hangs(tmp_path):
    """Each load waits for one time-out (two if it comes within a file), then says how to go offline."""
    tiny = loading.load_encoder("tiny")
    tiny.model.save_pretrained(tmp_path / "served")
    tiny.tokenizer.save_pretrained(tmp_path / "served")
    code = """
import json, sys, time
from huggingface_hub import constants
from ranker.encoders.loading import load_encoder
constants.HF_HUB_ETAG_TIMEOUT = constants.HF_HUB_DOWNLOAD_TIMEOUT = 0.3  # the variables take whole seconds
for name in ("works", "hangs-at-once", "hangs-in-a-file", "hangs-at-weights", "works"):
    started, said = time.monotonic(), ""
    try:
        load_encoder("someone/" + name)
    except Exception as error:
        said = str(error)
    print(json.dumps([time.monotonic() - started, said]), flush=True)
"""
    with hub(tmp_path / "served") as (address, hanging):
        variables = {
            **os.environ,
            "HF_ENDPOINT": address,
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "*",
        }
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], env=variables, cwd=ROOT, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 5 and rows[0][1] == rows[4][1] == "", rows
    for seconds, said in rows[1:4]:
        assert f"{address} does not answer: " in said and "set HF_HUB_OFFLINE=1" in said and "\n" not in said, said
        assert seconds < 4
    files = [request for request in hanging if "someone" in request]
    assert 3 <= len(files) <= 4, hanging
