"""Words of BM25: one character, combining marks, scripts without blanks."""

import logging
import math
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from ranker.data.collection import Collection, Doc, MemoryDocs, Splits
from ranker.errors import ConfigError
from ranker.retrieval.bm25 import BM25
from ranker.retrieval.first_stage import FirstStage, first_stage, with_candidates
from ranker.retrieval.words import Words

LETTERS = MemoryDocs([
    Doc("d1", "Vitamin C deficiency causes scurvy."), Doc("d2", "Vitamin D deficiency causes rickets."),
    Doc("d3", "The C programming language and the R language."),
])  # fmt: skip


def ranked(docs, text, **options):
    found = BM25(docs if isinstance(docs, MemoryDocs) else MemoryDocs(Doc(*doc) for doc in docs), **options)
    return found.search({"q": text}, 10)["q"]


def test_pc2_13_words_of_one_character_count():
    assert ranked(LETTERS, "vitamin C")[0] == "d1"
    assert sorted(ranked(LETTERS, "C")) == ["d1", "d3"]
    assert ranked(LETTERS, "R language") == ["d3"]
    assert ranked([("a", "type 1"), ("b", "type 2"), ("c", "2")], "type 2")[0] == "b"
    assert ranked(LETTERS, "C", min_word_chars=2) == []


def test_pc2_13_scores_are_lucenes_worked_by_hand():
    """Search vitamin C over d1 and d2, 5 words each: vitamin is in both (idf log 1.2), C only in d1 (idf log 2).

    The part of the term frequency is 1 / (1 + 0.9).
    """
    docs = MemoryDocs(list(LETTERS)[:2])
    found = BM25(docs).search({"q": "vitamin C"}, 10)
    expected = [(math.log(1.2) + math.log(2)) / 1.9, math.log(1.2) / 1.9]
    assert found.scores_of("q").tolist() == pytest.approx(expected, rel=1e-6)
    assert expected == pytest.approx([0.461, 0.096], abs=5e-4)


def test_pc2_13_a_letter_after_an_apostrophe_and_the_pronoun_i_are_no_words():
    assert Words()(["I can't use the user\u2019s 'C'", "O'Brien"]) == [["can", "use", "user", "c"], ["o", "brien"]]
    assert Words(stopwords=None, stemmer=None)(["I can't"]) == [["i", "can"]]


def test_pc2_14_words_with_combining_marks_stay_whole():
    docs = [("d4", "हिन्दी भाषा में किताब"), ("d5", "किसान खेत में काम करता है")]
    assert ranked(docs, "किताब") == ["d4"]
    assert Words()([docs[0][1]]) == [["हिन्दी", "भाषा", "में", "किताब"]]  # as BertPreTokenizer splits
    assert Words()(["தமிழ் நூல்", "שָׁלוֹם", "می\u200cخواهم"]) == [
        ["தமிழ்", "நூல்"],
        [unicodedata.normalize("NFKC", "שָׁלוֹם")],
        ["می\u200cخواهم"],
    ]


def test_pc2_14_a_composed_letter_equals_its_decomposed_form():
    assert ranked([("a", "cafe\u0301 noir"), ("b", "cafe noir")], "caf\u00e9") == ["a"]
    assert ranked([("a", "ＡＢＣ"), ("b", "xyz")], "abc") == ["a"]


@pytest.mark.parametrize(
    ("docs", "query"),
    [
        ([("a", "東京都は日本の首都です"), ("b", "大阪は商業の都市です")], "日本の首都"),
        ([("a", "我喜欢喝绿茶"), ("b", "他在北京工作")], "绿茶"),
        ([("a", "我喜欢喝绿茶"), ("b", "他在北京工作")], "茶"),
        ([("a", "ฉันชอบน้ำชาเขียว"), ("b", "เขาทำงานที่กรุงเทพ")], "ชาเขียว"),
        ([("a", "데이터베이스를 만든다"), ("b", "커피를 마신다")], "데이터베이스"),
    ],
)
def test_pc2_14_scripts_without_blanks_are_searched_by_characters_and_pairs(docs, query):
    assert ranked(docs, query)[0] == "a"
    assert ranked(docs, query, bigrams=False) == []  # whole runs never match


def test_pc2_14_pairs_keep_letters_and_marks_together():
    assert Words()(["東京タワー2024年 abc"]) == [
        ["東京", "京タ", "タワ", "ワー", "東", "京", "タ", "ワ", "ー", "2024", "年", "abc"]
    ]
    assert Words(min_word_chars=2)(["東京 水"]) == [["東京"]]
    assert Words()(["ที่"]) == [["ที่"]]


def test_pc2_14_a_query_without_words_is_reported_once(caplog):
    index = BM25(LETTERS)
    with caplog.at_level(logging.WARNING):
        index.search({"q1": "?!", "q2": "vitamin", "q3": "the of"}, 10)
        index.search({"q1": "?!"}, 10)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "BM25: 2 of 3 queries have no words but stop words, such as 'q1' ('?!'), and so get no docs"
    )


def test_pc2_14_queries_without_words_are_reported_also_where_the_cache_has_the_candidates(tmp_path, caplog):
    collection = Collection("test", LETTERS, {"q1": "...", "q2": "vitamin", "q3": "zebra"}, {"q2": {"d1": 1}})
    for _ in range(2):
        caplog.clear()
        with_candidates(Splits(None, None, {"test": collection}), 10, tmp_path)
        assert "BM25: 1 of 3 queries have no words but stop words, such as 'q1'" in caplog.text


def test_pc2_13_other_options_are_another_cache_file(tmp_path):
    collection = Collection("test", LETTERS, {"q": "C"}, {})
    assert len(first_stage(collection, 10, tmp_path)["q"]) == 2
    assert first_stage(collection, 10, tmp_path, FirstStage(min_word_chars=2))["q"] == []


def test_options_out_of_range():
    with pytest.raises(ConfigError, match=r"bm25.min_word_chars: expected at least 1, got 0"):
        Words(min_word_chars=0)


def test_bm25s_does_not_start_jax(tmp_path):
    """JAX would reserve most of the GPU's memory; a package of its name that fails when it is imported stands in."""
    for name in ("jax", "jax/lax"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('JAX was started')" if "/" in name else "")
    program = (
        "import sys; from ranker.retrieval.words import Words, import_bm25s; Words()(['a word']);"
        "import bm25s.selection; assert not bm25s.selection.JAX_IS_AVAILABLE; assert 'jax' not in sys.modules;"
        "import jax; import_bm25s(); assert sys.modules['jax'] is jax"
    )
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
