"""Labels by novelty, by hand: token sets and their overlap are counted in the comments."""

import json

import numpy as np
import pytest

from ranker.data.datamodule import RankData
from ranker.data.memory_store import MemoryStore
from ranker.data.novelty import NovelGroups
from ranker.data.options import BatchOptions
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.sources.rows import Rows
from ranker.data.text_encoder import TextEncoder
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import ConfigError

DOCS = ["a b c d", "d c b a a", "a b c e", "x y", "x y z"]


class Fixed:
    """One group of given docs and labels."""

    query_rows = np.zeros(1, dtype=np.int64)

    def __init__(self, rows, labels):
        self.rows, self.labels = np.array([rows]), np.array([labels], dtype=np.float32)

    def __len__(self):
        return 1

    def draw(self, epoch, groups):
        return self.rows, self.labels

    def fingerprint(self):
        return "fixed"


def labels(rows, given, threshold):
    store = MemoryStore(TextEncoder(tiny_tokenizer(), 64), {str(i): text for i, text in enumerate(DOCS)})
    groups = NovelGroups(Fixed(rows, given), store, threshold)
    assert groups.fingerprint() != "fixed"
    got_rows, got = groups.draw(0, np.zeros(1, dtype=np.int64))
    assert got_rows.tolist() == [rows]
    return got[0].tolist()


def test_a_doc_that_repeats_a_better_one_counts_nothing():
    # 0 and 1 have the same four tokens; 2 shares 3 of 5 with them; 3 shares 2 of 3 with 4
    assert labels([0, 1, 2, 3, -1], [1, 2, 3, 1, 0], 1.0) == [0, 2, 3, 1, 0]
    assert labels([0, 1, 2, 3, 4], [1, 2, 3, 1, 1], 0.6) == [0, 0, 3, 1, 0]
    assert labels([0, 1, 2, 3, 4], [1, 1, 0, 0, 1], 0.61) == [1, 0, 0, 0, 1]
    # a repeated doc hides none itself: 1 is hidden by 2 at 0.6, 0 by 2 as well and not by 1
    assert labels([1, 0, 2], [2, 1, 3], 0.6) == [0, 0, 3]


def test_rows_with_scores_of_a_teacher_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"query": "a", "docs": ["b c", "b c", "x"], "scores": [3.0, 2.9, -4.0]}) + "\n")
    data = RankData(
        Rows(train=str(path), cache_dir=str(tmp_path)).load(),
        ScorerInputs(tiny_tokenizer(), "pairs", 64),
        BatchOptions(queries=1, docs=3, novelty=1.0),
        TextLimits(16, 32),
        cache_dir=tmp_path / "cache",
    )
    with pytest.raises(ConfigError, match=r"^batch\.novelty: expected null with rows that have a teacher's scores"):
        data.train_steps()
