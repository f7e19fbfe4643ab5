"""`ranker serve` as a process: SIGTERM under load loses no request; a mistake is one line and exit code 1."""

import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from http_server import free_port, is_ready, metric, wait_until

from ranker import Reranker
from ranker.encoders.loading import load_encoder
from ranker.models.monobert import MonoBERT

CPU = ["trainer.accelerator=cpu", "trainer.precision=32-true"]
WORDS = ["river", "sea", "apple", "night", "autumn", "cold", "short", "day", "picked", "run"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    MonoBERT(load_encoder("tiny")).save(folder, max_tokens=64)
    return folder


def listener(port):
    """The process that listens at a port of 127.0.0.1."""
    address = f"0100007F:{port:04X}"
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    (inode,) = (row[9] for row in rows if row[1] == address and row[3] == "0A")
    for files in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(str(file.readlink()) == f"socket:[{inode}]" for file in files.iterdir()):
                return int(files.parent.name)
        except OSError:  # a process of another user, or one that has ended
            continue
    raise AssertionError(f"nothing listens at {port}")


def test_sigterm_under_load_loses_no_accepted_request(forks, folder, tmp_path):
    port, ended = free_port(), []
    # small batches, so that the accepted requests take seconds
    arguments = [f"checkpoint={folder}", f"port={port}", "batch.max_tokens=64", *CPU]
    server = threading.Thread(
        target=lambda: ended.append(forks.run("ranker/__main__.py", "serve", *arguments, cwd=tmp_path, timeout=100)),
        daemon=True,
    )
    server.start()
    bodies = [
        {"query": f"{word} {i}", "documents": [f"{WORDS[j % 10]} {word} {j}" for j in range(250)]}
        for i, word in enumerate(WORDS)
    ]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client, ThreadPoolExecutor(10) as pool:
        wait_until(client, lambda c: listens(c) and is_ready(c))
        answers = [pool.submit(client.post, "/rerank", json=body) for body in bodies]
        wait_until(client, lambda c: metric(c, "ranker_queue_pairs") == 2500)
        os.kill(listener(port), signal.SIGTERM)
        # a request that comes before the server has seen the signal is accepted, and answered after all others
        wait_until(client, lambda c: not is_ready(c))
        refused = []
        while not all(answer.done() for answer in answers):
            try:
                refused.append(client.post("/rerank", json=bodies[0]).status_code)
            except httpx.TransportError:
                break
            time.sleep(0.05)
    server.join(60)
    assert refused and set(refused) == {503}
    reranker = Reranker.load(folder, accelerator="cpu", precision="32-true")
    for body, answer in zip(bodies, answers, strict=True):
        scores = {row["index"]: row["relevance_score"] for row in answer.result().json()["results"]}
        expected = reranker.score([(body["query"], doc) for doc in body["documents"]])
        np.testing.assert_allclose([scores[i] for i in range(250)], expected, rtol=0, atol=1e-5)
    (done,) = ended
    assert done.code == 0, done.out
    assert f"serving at http://127.0.0.1:{port}" in done.out and "stopping: " in done.out
    assert not any(word in done.out for word in WORDS if word != "run")  # `run` is in "running"
    assert not list((tmp_path / "outputs/serve").iterdir())  # no run folder is left


def listens(client):
    try:
        client.get("/health")
    except httpx.TransportError:
        return False
    return True


def damaged(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint={damaged}"], r"model\.safetensors|expected a model folder that loads"),
        (["checkpoint={tmp}"], "checkpoint: expected a run folder or a model folder"),
        (["checkpoint={folder}", "port={busy}"], r"host, port: expected an address to listen at, got 127\.0\.0\.1:"),
        (["checkpoint={folder}", "host=no.such.host.invalid"], "host, port: expected an address to listen at"),
        (["checkpoint={folder}", "scores=log"], "scores: expected one of raw, sigmoid; got 'log'"),
        (["checkpoint={folder}", "token_env=NO_SUCH"], "token_env: the variable NO_SUCH: expected a token"),
        (["checkpoint={folder}", "token_file={tmp}/none"], "token_file: expected a file with the token"),
    ],
)
def test_a_mistake_is_one_line(forks, folder, tmp_path, arguments, message):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        (tmp_path / "damaged").mkdir()
        names = {"damaged": damaged(folder, tmp_path / "damaged"), "tmp": tmp_path, "folder": folder, "busy": port}
        given = [argument.format(**names) for argument in arguments]
        given += [] if any("port=" in argument for argument in given) else ["port=0"]
        done = forks.run("ranker/__main__.py", "serve", *given, *CPU, cwd=tmp_path)
    errors = [line for line in done.out.splitlines() if line.startswith("error: ")]
    assert done.code == 1 and len(errors) == 1 and re.search(message, errors[0]), done.out
    assert "Traceback" not in done.out
