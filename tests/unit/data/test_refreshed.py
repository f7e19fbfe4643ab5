"""Negatives that are replaced during a training: which round a step has, what is drawn, what is refused."""

from types import SimpleNamespace

import numpy as np
import pytest

from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs, Splits
from ranker.data.datamodule import RankData
from ranker.data.options import BatchOptions
from ranker.data.refreshed import Rounds
from ranker.data.sampling import Pool
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import CheckpointError, ConfigError
from ranker.retrieval.mining import Mining
from ranker.retrieval.refresh import RefreshedNegatives

COLLECTION = Collection(
    "small",
    MemoryDocs([Doc(f"d{i}", ["a", "bab", "fir"][i % 3] + " com" * i) for i in range(12)]),
    {f"q{i}": "bab" + " gel" * (i + 1) for i in range(3)},
    {"q0": {"d0": 2}, "q1": {"d1": 1, "d9": 0}, "q2": {"d2": 1}},
    Candidates.from_run({f"q{i}": {f"d{j}": -float(j) for j in (3, 4, 5, i)} for i in range(3)}),
)


@pytest.fixture
def data(tmp_path):
    found = RankData(
        Splits(COLLECTION, None, {}),
        ScorerInputs(tiny_tokenizer(), "pairs", 64),
        BatchOptions(queries=3, docs=3),
        TextLimits(16, 32),
        cache_dir=tmp_path / "cache",
    )
    found.rounds = Rounds(tmp_path / "mined", every=2, epoch_steps=1)
    return found


def negatives(steps, epoch):
    """query_id -> drawn doc ids without the relevant one, and the round of the step."""
    rows, labels = steps.sampler.draw(epoch, np.arange(3))
    ids = steps.collator.docs.ids()
    queries = [query.decode() for query in steps.collator.queries.ids()[steps.sampler.query_rows]]
    return {
        query: {(ids[row].decode(), float(label)) for row, label in zip(drawn[1:], of[1:], strict=True) if row >= 0}
        for query, drawn, of in zip(queries, rows, labels, strict=True)
    }


def test_a_step_has_the_negatives_of_its_round(data):
    steps = data.train_steps()
    identity = steps.identity()
    assert steps[1, 0].round == 0
    assert {doc for docs in negatives(steps, 1).values() for doc, _ in docs} <= {"d3", "d4", "d5"}
    run = {"q0": {"d7": 1.0, "d8": 0.9}, "q1": {"d9": 0.5}}
    data.rounds.write(1, steps.pool_of(run, COLLECTION))
    before = steps[1, 0]
    assert steps[2, 0].round == 1
    found = negatives(steps, 2)
    assert (found["q0"], found["q1"]) == ({("d7", 0.0), ("d8", 0.0)}, {("d9", 0.0)})
    assert {doc for doc, _ in found["q2"]} <= {"d3", "d4", "d5"} and len(found["q2"]) == 2  # none was mined
    # an earlier step again, and another process that prefetches a step of a round that is not mined yet
    again = steps[1, 0]
    assert again.round == 0 and again.micro_batches[0].pairs.tokens.equal(before.micro_batches[0].pairs.tokens)
    other = data.train_steps()
    assert [other[4, 0].round, other[3, 0].round, other[4, 0].round] == [0, 1, 1]
    data.rounds.write(2, steps.pool_of({"q2": {"d11": 1.0}}, COLLECTION))
    assert other[4, 0].round == 2 and negatives(other, 4)["q2"] == {("d11", 0.0)}
    assert steps.identity() == other.identity() == identity  # of the data that the training begins with


def test_a_process_that_does_not_see_the_round_ends_the_training(data, tmp_path):
    steps = data.train_steps()
    refresh = RefreshedNegatives(data.rounds, Mining(), data)
    refresh.done = 1  # the first process has mined it, on a disk of its own
    loader = SimpleNamespace(steps=steps)
    module = SimpleNamespace(trainer=SimpleNamespace(train_dataloader=loader), device="cpu")
    with pytest.raises(CheckpointError, match="round-00001: expected the mined negatives of round 1 in a folder that"):
        refresh.current(steps[2, 0], module)
    data.rounds.write(1, steps.pool_of({"q0": {"d7": 1.0}}, COLLECTION))
    assert refresh.current(steps[2, 0], module).round == 1


def test_a_round_is_whole_or_refused(data, tmp_path):
    rounds = data.rounds
    with pytest.raises(CheckpointError, match="round-00003: expected the mined negatives of round 3, got no such"):
        rounds.read(3)
    rounds.write(3, Pool.of([np.array([4, 2]), np.array([1])], [np.array([0.0, 1.0]), np.array([0.0])]))
    later = Rounds(tmp_path / "later", 2, 1)
    later.folder.mkdir()
    later.copy_from(rounds.folder, 3)
    pool = later.read(3)
    assert pool.rows.tolist() == [4, 2, 1] and pool.starts.tolist() == [0, 2] and pool.labels.tolist() == [0, 1, 0]
    path = later.path(3) / "rows.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    with pytest.raises(CheckpointError, match="resume from an earlier checkpoint"):
        later.read(3)


def test_groups_whose_negatives_have_no_label_are_refused(data, tmp_path):
    scores = tmp_path / "teacher.trec"
    scores.write_text("".join(f"q{i} Q0 d{j} 1 {j}.5 t\n" for i in range(3) for j in (i, 3, 4)))
    data.train_docs = data.train_docs.__class__(teacher=scores)
    with pytest.raises(ConfigError, match=r"mining\.every: expected null with triples, and with rows that have"):
        data.train_steps()
