"""Processes that tokenize give the tokens of the server's own encoder, and lose nothing when one is killed."""

import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ranker.data.text_encoder import TextEncoder
from ranker.encoders.loading import load_encoder
from ranker.serving.tokenizing import TokenizerProcesses

TEXTS = [f"the river {'is cold ' * 40} [SEP] and [MASK] \ud800 x{i}" for i in range(30)]


@pytest.fixture(scope="module")
def processes():
    tokenizer = load_encoder("tiny").tokenizer
    encoders = [TextEncoder(tokenizer, 8), TextEncoder(tokenizer, 300)]
    return encoders, TokenizerProcesses(encoders, 2)


def same(found, expected):
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))


def test_tokens_are_those_of_the_encoder(processes):
    encoders, pool = processes
    own, other = pool.encoders, [encoder(TEXTS) for encoder in encoders]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda number: own[number % 2](TEXTS), range(12)))
    assert all(same(part, other[number % 2]) for number, part in enumerate(found))
    children = [child for child in multiprocessing.active_children() if child.name.startswith("tokenizer")]
    assert len(children) == 2
    assert same(own[1](["short"]), encoders[1](["short"]))


def test_the_work_of_a_killed_process_is_done(processes, caplog):
    encoders, pool = processes
    for child in multiprocessing.active_children():
        if child.name.startswith("tokenizer"):
            os.kill(child.pid, signal.SIGKILL)
            child.join(10)
    for _ in range(4):
        assert same(pool.encoders[1](TEXTS), encoders[1](TEXTS))
    assert caplog.text.count("a tokenizer process has ended") == 2
