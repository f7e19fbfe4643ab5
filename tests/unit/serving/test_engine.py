"""Which pairs the engine puts into one batch, tested without a server."""

import asyncio
import threading
from dataclasses import dataclass

import numpy as np
import pytest

from ranker.serving.engine import Engine
from ranker.serving.interface import ScoringFailed, Unavailable
from ranker.serving.metrics import Metrics


@dataclass
class Sized:
    """A request whose pairs have the sizes that their docs name."""

    sizes: np.ndarray
    name: str

    @property
    def whole(self) -> bool:
        return self.name.startswith("whole")


class Recorder:
    """A model that records its batches, and gives each pair its size as score; the first batch waits for `go`."""

    max_tokens, computes_aside = 10, False

    def __init__(self):
        self.batches, self.go, self.steps = [], threading.Event(), []

    def tokenize(self, pairs):
        return Sized(np.array([int(doc) for _, doc in pairs]), pairs[0][0])

    def launch(self, parts):
        names = [(part.pairs.name, part.start, part.end) for part in parts]
        self.steps.append(("launch", names[0][0]))
        if not self.computes_aside:
            self.go.wait(10)
        self.batches.append(names)
        scores = np.concatenate([part.pairs.sizes[part.start : part.end] for part in parts]).astype(np.float32)

        def wait():
            self.go.wait(10)
            self.steps.append(("wait", names[0][0]))
            if (scores == 9).any():
                raise RuntimeError("the device failed")
            return np.where(scores == 7, np.nan, scores)

        return wait


class Aside(Recorder):
    """The same, whose batches are computed while the thread goes on."""

    computes_aside = True


def batches_of(*requests, model=None):
    """The batches, and each request's outcome, of requests (name, sizes) that arrive while the first one is scored."""
    model = model or Recorder()

    async def work():
        engine = Engine(1000, Metrics())
        engine.start(lambda: model, lambda: None)
        while engine.state != "ready":
            await asyncio.sleep(0.01)
        tasks = []
        for number, (name, sizes) in enumerate(requests):
            tasks.append(asyncio.create_task(engine.score([(name, str(size)) for size in sizes])))
            while len(engine._queue) < number:  # the first one is in a batch, the others wait in order
                await asyncio.sleep(0.01)
            if number == 0:
                while engine._queue or not engine.waiting_pairs:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)
        model.go.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert await engine.drain(5)
        with pytest.raises(Unavailable, match="the server is stopping"):
            await engine.score([("late", "1")])
        engine.close()
        return model.batches[1:], outcomes[1:]

    return asyncio.run(work())


FIRST = ("first", [1])


def test_a_batch_takes_pairs_of_several_requests_up_to_its_budget():
    batches, outcomes = batches_of(FIRST, ("a", [3, 3]), ("b", [2, 2, 2]), ("c", [10]), ("d", [1]))
    assert batches == [[("a", 0, 2), ("b", 0, 2)], [("b", 2, 3)], [("c", 0, 1)], [("d", 0, 1)]]
    assert [scores.tolist() for scores, _ in outcomes] == [[3, 3], [2, 2, 2], [10], [1]]
    assert [tokens for _, tokens in outcomes] == [6, 6, 10, 1]


def test_a_large_request_does_not_hold_up_small_ones():
    batches, outcomes = batches_of(FIRST, ("large", [5] * 6), ("a", [4]), ("b", [4]))
    assert batches[:2] == [[("large", 0, 2)], [("a", 0, 1), ("b", 0, 1)]]
    assert outcomes[0][0].tolist() == [5] * 6


def test_a_pair_above_the_budget_goes_alone():
    batches, _ = batches_of(FIRST, ("a", [3]), ("b", [25, 3]))
    assert batches == [[("a", 0, 1)], [("b", 0, 1)], [("b", 1, 2)]]


def test_a_request_whose_docs_see_each_other_is_never_split():
    batches, outcomes = batches_of(FIRST, ("a", [3]), ("whole", [4, 5]), ("whole large", [8, 8]), ("b", [1]))
    assert batches == [[("a", 0, 1)], [("whole", 0, 2)], [("whole large", 0, 2)], [("b", 0, 1)]]
    assert [scores.tolist() for scores, _ in outcomes] == [[3], [4, 5], [8, 8], [1]]


def test_a_score_that_is_not_finite_fails_its_request_alone():
    _, outcomes = batches_of(FIRST, ("a", [3]), ("b", [7]), ("c", [5]))
    assert [scores.tolist() for scores, _ in (outcomes[0], outcomes[2])] == [[3], [5]]
    assert isinstance(outcomes[1], ScoringFailed) and "not finite" in str(outcomes[1])


def test_a_full_batch_is_launched_before_the_thread_waits_for_the_one_before():
    model = Aside()
    batches, outcomes = batches_of(FIRST, ("a", [5, 5]), ("b", [5, 5]), ("c", [3]), model=model)
    assert batches == [[("a", 0, 2)], [("b", 0, 2)], [("c", 0, 1)]]
    ready = model.steps.index(("wait", "first"))
    assert model.steps[ready + 1 :] == [
        ("launch", "a"), ("launch", "b"), ("wait", "a"), ("wait", "b"), ("launch", "c"), ("wait", "c"),
    ]  # fmt: skip
    assert [scores.tolist() for scores, _ in outcomes] == [[5, 5], [5, 5], [3]]


def test_an_error_of_a_launched_batch_fails_its_request_alone():
    model = Aside()
    _, outcomes = batches_of(FIRST, ("a", [1, 2]), ("b", [9]), ("c", [1]), ("d", [8]), model=model)
    assert isinstance(outcomes[1], ScoringFailed) and "RuntimeError" in str(outcomes[1])
    assert [outcomes[i][0].tolist() for i in (0, 2, 3)] == [[1, 2], [1], [8]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_model_s_thread_that_has_ended_is_seen():
    async def after_the_end():
        engine = Engine(1000, Metrics())
        engine._queue.take = lambda *_: 1 / 0
        engine.start(Recorder, on_failure=lambda: None)
        engine._thread.join(10)
        with pytest.raises(Unavailable, match="the model's thread has ended after an error"):
            await engine.score([("q", "1")])
        return engine.state

    assert asyncio.run(after_the_end()) == "failing"
