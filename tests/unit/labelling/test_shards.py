"""Shards of scores: which are missing, damaged files, the bits of a shard, the folder's name."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs, Splits
from ranker.data.datamodule import RankData
from ranker.data.options import BatchOptions
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.encoders.loading import load_encoder
from ranker.errors import DataError
from ranker.evaluation.scoring import Devices
from ranker.labelling.shards import ScoreShards, score_missing
from ranker.models.monobert import MonoBERT

NAMES = [f"d{i}" for i in range(12)]
CANDIDATES = Candidates.from_lists(
    (f"q{i}", NAMES[i : i + 4 + i % 3], [float(4 + i % 3 - j) for j in range(4 + i % 3)]) for i in range(5)
)


def shards(folder, size=2):
    return ScoreShards.open(folder, CANDIDATES, size, {"weights": "w"}, "name")


def test_parts_are_all_candidates_in_order(tmp_path):
    parts = shards(tmp_path)
    assert len(parts) == 3
    joined = {query_id: docs for i in range(3) for query_id, docs in parts.part(i).items()}
    assert joined == dict(CANDIDATES) and [len(parts.part(i)) for i in range(3)] == [2, 2, 1]


def test_missing_shards_are_dealt_by_their_number_whatever_is_there(tmp_path):
    parts = shards(tmp_path, size=1)
    assert [parts.missing(rank, 2) for rank in range(2)] == [[0, 2, 4], [1, 3]]
    parts.write(2, np.zeros(6))
    assert [parts.missing(rank, 2) for rank in range(2)] == [[0, 4], [1, 3]]


def test_a_damaged_shard_is_missing_and_is_not_read(tmp_path, caplog):
    parts = shards(tmp_path, size=5)
    parts.write(0, np.arange(len(CANDIDATES.doc_ids)))
    assert parts.read().tolist() == list(range(len(CANDIDATES.doc_ids)))
    content = bytearray(parts.path(0).read_bytes())
    content[len(content) // 2] ^= 1
    parts.path(0).write_bytes(bytes(content))
    assert parts.missing() == [0] and "it is scored again" in caplog.text
    with pytest.raises(DataError, match=r"shard-00000.npz: expected 24 scores, got one whose part .* is damaged"):
        parts.read()


def test_a_shard_of_another_size_is_refused(tmp_path):
    parts = shards(tmp_path, size=5)
    parts.write(0, np.zeros(3))
    with pytest.raises(DataError, match=r"expected 24 scores, got scores of shape \(3,\)"):
        parts.read()


def test_the_folder_changes_with_what_decides_the_scores_and_with_nothing_else(tmp_path):
    fewer = CANDIDATES.top(3)
    other = [
        ScoreShards.open(tmp_path, fewer, 2, {"weights": "w"}, "name"),
        ScoreShards.open(tmp_path, CANDIDATES, 3, {"weights": "w"}, "name"),
        ScoreShards.open(tmp_path, CANDIDATES, 2, {"weights": "v"}, "name"),
    ]
    assert len({part.folder for part in [shards(tmp_path), *other]}) == 4
    assert ScoreShards.open(tmp_path, CANDIDATES, 2, {"weights": "w"}, "new name").folder == shards(tmp_path).folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    torch.manual_seed(0)
    scorer = MonoBERT(load_encoder("tiny"))
    words = ["gull", "fish", "lake", "deep", "cold", "wide", "north", "town", "old"]
    docs = MemoryDocs(Doc(name, " ".join(words[i % 4 :] * (1 + i % 3))) for i, name in enumerate(NAMES))
    queries = {f"q{i}": " ".join(words[i : i + 2]) for i in range(5)}
    collection = Collection("train", docs, queries, {}, CANDIDATES)
    data = RankData(
        Splits(None, None, {}),
        ScorerInputs.of(scorer),
        BatchOptions(max_tokens=64),
        TextLimits(),
        cache_dir=tmp_path_factory.mktemp("cache"),
    )
    return scorer, collection, data.collator(collection)


def scored(teacher, parts, rank=0, world=1):
    scorer, collection, collator = teacher
    devices = Devices(torch.device("cpu"), rank, world)
    return score_missing(scorer, collator, collection, parts, devices, max_tokens=64)


def test_scores_are_those_of_a_loop_over_pairs(teacher, tmp_path):
    scorer, _, collator = teacher
    parts = shards(tmp_path)
    assert scored(teacher, parts) == 24
    expected = []
    scorer.eval()
    for query_id, docs in CANDIDATES.items():
        for doc_id in docs:
            rows = [store.rows([name]) for store, name in ((collator.queries, query_id), (collator.docs, doc_id))]
            batch = collator.collate(rows[0], rows[1][:, None], np.zeros((1, 1)), rows[0], 1.0)
            with torch.no_grad():
                expected.append(float(scorer(batch)))
    np.testing.assert_allclose(parts.read(), expected, rtol=0, atol=1e-6)


def test_any_order_and_any_number_of_processes_give_the_same_bits(teacher, tmp_path):
    whole, dealt, resumed = (shards(tmp_path / name) for name in ("whole", "dealt", "resumed"))
    scored(teacher, whole)
    assert sum(scored(teacher, dealt, rank, 2) for rank in (1, 0)) == 24
    resumed.write(1, np.load(whole.path(1))["scores"])
    before = resumed.path(1).stat().st_mtime_ns
    assert scored(teacher, resumed) == 24 - len(whole.part(1).doc_ids)
    assert resumed.path(1).stat().st_mtime_ns == before
    assert scored(teacher, resumed) == 0
    for other in (dealt, resumed):
        assert other.read().tobytes() == whole.read().tobytes()


def test_a_score_that_is_not_finite_is_refused_and_nothing_is_written(teacher, tmp_path):
    _, collection, collator = teacher
    broken = MonoBERT(load_encoder("tiny"))
    torch.nn.init.constant_(broken.head.bias, float("nan"))
    parts = shards(tmp_path)
    with pytest.raises(DataError, match="expected finite scores within float32"):
        score_missing(broken, collator, collection, parts, Devices(torch.device("cpu"), 0, 1), max_tokens=64)
    assert parts.missing() == [0, 1, 2]


def test_only_the_given_candidates_are_scored(teacher, tmp_path):
    scorer, collection, collator = teacher
    fewer = CANDIDATES.top(2)
    parts = ScoreShards.open(tmp_path, fewer, 2, {}, "name")
    devices = Devices(torch.device("cpu"), 0, 1)
    assert score_missing(scorer, collator, replace(collection, candidates=None), parts, devices, max_tokens=64) == 10
