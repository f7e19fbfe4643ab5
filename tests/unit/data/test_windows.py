"""Windows over the token store: which tokens each row has, what a group costs, and which windows are kept."""

import math

import numpy as np
import pytest

from ranker.data.collate import Collator
from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs, Splits
from ranker.data.datamodule import RankData
from ranker.data.join import concatenate
from ranker.data.memory_store import MemoryStore
from ranker.data.options import BatchOptions
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.text_encoder import TextEncoder
from ranker.data.window_rows import WINDOW_IDS
from ranker.data.windows import Windows, best_windows
from ranker.encoders.loading import load_encoder
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import ConfigError
from ranker.models.monobert import MonoBERT

TOKENIZER = tiny_tokenizer()
LIMITS = TextLimits(4, 100)


def store(texts):
    return MemoryStore(TextEncoder(TOKENIZER, 100), {str(i): text for i, text in enumerate(texts)})


def collator(queries, docs, windows, *, reads="pairs", limits=LIMITS, titles=None, pair=None):
    lengths = None if titles is None else TextEncoder(TOKENIZER, 100)(titles)[0]
    inputs = ScorerInputs(TOKENIZER, reads, 512, pair=pair, windows=windows)
    return Collator.of(inputs, store(queries), store(docs), limits, lengths)


def collated(made, docs, query=0):
    rows = np.array([docs])
    return made.collate(np.array([query]), rows, np.zeros(rows.shape), np.array([0]), 1.0)


def words(batch):
    return [
        " ".join(TOKENIZER.convert_ids_to_tokens(row.tolist()))
        for row in batch.tokens.split(batch.cu_seqlens.diff().tolist())
    ]


def test_rows_of_pairs_by_hand():
    made = collator(["q"], ["a b c d e f g h", "a b c d", "", "a b c d e"], Windows(4, 3))
    pairs = collated(made, [0, 1, 2, 3]).pairs
    assert words(pairs) == [
        "[CLS] q [SEP] a b c d [SEP]",
        "[CLS] q [SEP] d e f g [SEP]",
        "[CLS] q [SEP] g h [SEP]",
        "[CLS] q [SEP] a b c d [SEP]",
        "[CLS] q [SEP] [SEP]",
        "[CLS] q [SEP] a b c d [SEP]",
        "[CLS] q [SEP] d e [SEP]",
    ]
    assert (pairs.windows.tolist(), pairs.max_windows, pairs.num_texts) == ([3, 1, 1, 2], 3, 4)
    assert pairs.segments.tolist()[:8] == [0, 0, 0, 1, 1, 1, 1, 1]


def test_rows_of_docs_by_hand():
    batch = collated(collator(["q"], ["a b c d e", ""], Windows(3), reads="texts"), [0, 1])
    assert words(batch.docs) == ["[CLS] a b c [SEP]", "[CLS] d e [SEP]", "[CLS] [SEP]"]
    assert words(batch.queries) == ["[CLS] q [SEP]"] and batch.docs.windows.tolist() == [2, 1]


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("overlap", [0, 1])
def test_every_token_is_in_a_window_and_no_window_within_another(length, overlap):
    windows = Windows(length, max(1, length - overlap))
    for tokens in range(30):
        cut = windows.cut(np.array([tokens]), None)
        spans = [set(range(start, start + kept)) for start, kept in zip(cut.starts, cut.lengths, strict=True)]
        assert set().union(*spans) == set(range(tokens))
        assert not any(one < other for one in spans for other in spans) or tokens == 0
        # a plain loop over starts: stop at the first window that reaches the end
        starts = [0]
        while starts[-1] + length < tokens:
            starts.append(starts[-1] + windows.step)
        assert cut.starts.tolist() == starts
        counts, total = windows.sizes(np.array([tokens]))
        assert (counts[0], total[0]) == (len(starts), sum(map(len, spans)))


def test_most_keeps_the_first_windows_and_cuts_the_doc_there():
    made = collator(["q"], ["a b c d e f g h i j", "a b"], Windows(4, 3, most=2))
    assert words(collated(made, [0, 1]).pairs) == [
        "[CLS] q [SEP] a b c d [SEP]",
        "[CLS] q [SEP] d e f g [SEP]",
        "[CLS] q [SEP] a b [SEP]",
    ]
    assert made.max_doc_tokens == 7  # so that docs that differ beyond are the same to the contrast of a step


def test_the_title_starts_every_window_but_the_first():
    made = collator(
        ["q"], ["t u a b c d", "t u v w x y z", "a b c d e"], Windows(3, title=2), titles=["t u", "t u v", ""]
    )
    assert words(collated(made, [0, 1, 2]).pairs) == [
        "[CLS] q [SEP] t u a [SEP]",
        "[CLS] q [SEP] t u b c d [SEP]",
        "[CLS] q [SEP] t u v [SEP]",
        "[CLS] q [SEP] t u w x y [SEP]",
        "[CLS] q [SEP] t u z [SEP]",
        "[CLS] q [SEP] a b c [SEP]",
        "[CLS] q [SEP] d e [SEP]",
    ]


def test_windows_keep_the_prompt_around_them():
    prompt = "find {query} in: {doc} yes?"
    layout = MonoBERT(load_encoder("tiny", dropout=0.0, attention_dropout=0.0), prompt=prompt).pair_layout()
    around = [layout.affixes_of(text).around for text in range(2)]
    docs = ["a b c d e", "a"]
    made = collator([around[0]("q")], [around[1](doc) for doc in docs], Windows(3), pair=layout)
    expected = [f"find q in: {text} yes?" for text in ("a b c", "d e", "a")]
    whole = [" ".join(TOKENIZER.convert_ids_to_tokens(TOKENIZER(text)["input_ids"])) for text in expected]
    assert words(collated(made, [0, 1]).pairs) == whole


@pytest.mark.parametrize("reads", ["pairs", "texts"])
@pytest.mark.parametrize("windows", [Windows(4, 3), Windows(3, most=2), Windows(2, most=3, title=2)])
def test_a_group_costs_its_windows(reads, windows):
    docs = ["a b c d e f g h", "", "a b c d", "a b c d e f g h i j k l"]
    titles = ["a b", "", "a b", "a b"] if windows.title else None
    made = collator(["q", "q r s"], docs, windows, reads=reads, titles=titles)
    rows = np.array([[0, 1, -1], [2, 3, 0]])
    sizes = made.group_sizes(np.array([0, 1]), rows)
    for group in range(2):
        batch = made.collate(np.array([group]), rows[[group]], np.zeros((1, 3)), np.array([group]), 0.5)
        parts = [part for part in (batch.pairs, batch.queries, batch.docs) if part is not None]
        assert sizes[group] == sum(part.num_tokens for part in parts)


def test_a_selection_costs_at_most_its_windows():
    made = collator(["e"], ["a b c d e f g"], Windows(3, most=2, select="bm25"))
    assert made.group_sizes(np.array([0]), np.array([[0]]))[0] >= collated(made, [0]).pairs.num_tokens


def test_bm25_keeps_the_matching_windows_in_reading_order():
    made = collator(["h b"], ["a b c d e f g h i j k b"], Windows(3, most=2, select="bm25"))
    assert words(collated(made, [0]).pairs) == ["[CLS] h b [SEP] g h i [SEP]", "[CLS] h b [SEP] a b c [SEP]"][::-1]
    none = collator(["z"], ["a b c d e f g h i j k b"], Windows(3, most=2, select="bm25"))
    assert words(collated(none, [0]).pairs) == ["[CLS] z [SEP] a b c [SEP]", "[CLS] z [SEP] d e f [SEP]"]


def test_bm25_equals_a_plain_loop():
    rng = np.random.default_rng(0)
    for _ in range(20):
        doc, query = rng.integers(0, 8, 40), rng.integers(0, 8, 4)
        cut = Windows(7, 5).cut(np.array([40]), None)
        parts = [doc[start : start + kept].tolist() for start, kept in zip(cut.starts, cut.lengths, strict=True)]
        mean = sum(map(len, parts)) / len(parts)
        scores = []
        for part in parts:
            score = 0.0
            for term in query.tolist():
                containing = sum(term in other for other in parts)
                frequency = part.count(term)
                rarity = math.log(1 + (len(parts) - containing + 0.5) / (containing + 0.5))
                score += rarity * frequency / (frequency + 0.9 * (0.6 + 0.4 * len(part) / mean))
            scores.append(score)
        got = best_windows(query, doc, cut.starts, cut.lengths, 3).tolist()
        assert got == sorted(got)
        rest = [score for i, score in enumerate(scores) if i not in got]
        assert min(scores[i] for i in got) >= max(rest) - 1e-12


def test_ids_of_rows():
    """Dropout depends on ids: no two are equal, and a doc of one window has the id that it has without windows."""
    docs = ["a b c d e f g", "a", "a b c d"]
    made, plain = (collator(["q"], docs, windows) for windows in (Windows(3), None))
    ids = collated(made, [0, 1, 2]).pairs.row_ids.tolist()
    assert ids == [1, 1 + WINDOW_IDS, 1 + 2 * WINDOW_IDS, 2, 3, 3 + WINDOW_IDS]
    assert collated(plain, [0, 1, 2]).pairs.row_ids.tolist() == [1, 2, 3]


def test_joined_batches_keep_their_windows():
    made = collator(["q"], ["a b c d e f g", "a"], Windows(3))
    joined = concatenate([collated(made, [1]).pairs, collated(made, [0]).pairs])
    assert (joined.windows.tolist(), joined.max_windows) == ([1, 3], 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length": 4, "stride": 5}, ["passages.stride", "at most passages.length=4", "got 5"]),
        ({"length": 0}, ["passages.length", "at least 1", "got 0"]),
        ({"length": 4, "stride": 0}, ["passages.stride", "at least 1"]),
        ({"length": 4, "most": 0}, ["passages.most", "at least 1"]),
        ({"length": 4, "title": -1}, ["passages.title", "at least 0"]),
        ({"length": 4, "select": "best"}, ["passages.select", "first, bm25", "'best'"]),
    ],
)
def test_wrong_values_are_refused(options, words):
    with pytest.raises(ConfigError) as caught:
        Windows(**options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_window_that_does_not_fit_is_refused():
    # [CLS] query of 4 [SEP] window of 9, title of 2 [SEP]: 18 tokens
    fits = TextLimits(4, 100, 18)
    collator(["q"], ["a"], Windows(9, title=2), limits=fits, titles=["a"])
    message = (
        r"passages.length: expected at most 9, .* 3 special .* query of up to 4, a title of up to 2; got 10; raise"
    )
    with pytest.raises(ConfigError, match=message):
        collator(["q"], ["a"], Windows(10, title=2), limits=fits)
    with pytest.raises(ConfigError, match="expected at most 510"):
        collator(["q"], ["a"], Windows(511), reads="texts")
    with pytest.raises(ConfigError, match=r"passages\.select: expected first"):
        collator(["q"], ["a"], Windows(4, select="bm25"), reads="texts")


def test_a_budget_that_is_not_set_grows_to_the_largest_group(tmp_path):
    docs = MemoryDocs([Doc("d", "a b c d e f g"), Doc("e", "a"), Doc("f", "b c d")])
    run = Candidates.from_run({"q": {"d": 3.0, "e": 2.0, "f": 1.0}})
    groups = Collection("c", docs, {"q": "q r"}, {"q": {"e": 1}}, run)

    def steps(**options):
        inputs = ScorerInputs(TOKENIZER, "pairs", 512, windows=Windows(3, 2))
        batch = BatchOptions(queries=1, docs=2, **options)
        return RankData(Splits(groups, None, {}), inputs, batch, LIMITS, cache_dir=tmp_path).train_steps()

    largest = 2 * 3 * (3 + 3 + 2)  # two docs as the longest, each of three rows of a window, a query and special tokens
    assert steps(max_tokens=10, grows=True).plan.max_tokens == largest
    assert steps(max_tokens=100, grows=True).plan.max_tokens == 100
    with pytest.raises(ConfigError, match=rf"batch\.max_tokens: expected at least {largest}, .* got 10"):
        steps(max_tokens=10)
