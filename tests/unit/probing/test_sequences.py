"""Characters to tokens and back."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ranker.data.token_store import build_token_store
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import ConfigError
from ranker.probing.examples import ProbeExample, Span
from ranker.probing.sequences import Sequences

TOKENIZER = tiny_tokenizer()  # pieces of one and two letters, so that every word is cut
PAIRS = [
    ("Where is  New York?", "New York, [SEP] a city; the Bronx is in it."),
    ("short", "Ein Überblick über naïve Straßen – und so weiter " * 3),
    ("", "A text without any query [SEP] at all."),
    ("Where is  New York?", "short"),
]


def sequences(pairs=PAIRS, reads="pairs", positions=512, max_query=64, max_doc=256) -> Sequences:
    return Sequences.of(pairs, TOKENIZER, reads, positions, max_query, max_doc)


def flat_tokens(made: Sequences) -> np.ndarray:
    return np.concatenate([made.batch(*chunk).tokens.numpy() for chunk in made.chunks(64)])


def surface(made: Sequences, pair: tuple[str, str], number: int, span: Span) -> str | None:
    """The text that the span's tokens stand for, read from the tokens' own offsets."""
    found = made.tokens_of(number, span)
    if found is None:
        return None
    ids = flat_tokens(made)[found[0] : found[1]]
    text = pair[0] if span.side == "query" else pair[1]
    own = TOKENIZER(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
    for first in range(len(own["input_ids"])):
        if own["input_ids"][first : first + len(ids)] == ids.tolist():
            start, end = own["offset_mapping"][first][0], own["offset_mapping"][first + len(ids) - 1][1]
            if span.start is None or start == span.start:
                return text[start:end]
    raise AssertionError("the tokens are not in the text")


@pytest.mark.parametrize("reads", ["pairs", "texts"])
def test_spans_give_back_the_same_text(reads: str) -> None:
    made = sequences(reads=reads)
    for number, pair in enumerate(PAIRS):
        for side, text in zip(("query", "doc"), pair, strict=True):
            for word in ("New York", "Where", "[SEP]", "Bronx", "Überblick", "naïve", "Straßen", "query", "short"):
                if word in text:
                    span = Span(side, text.index(word), text.index(word) + len(word))
                    assert surface(made, pair, number, span) == word
            if text:
                assert surface(made, pair, number, Span(side)) == text.strip()


def test_a_literal_separator_is_text_and_no_separator() -> None:
    made = sequences()
    separator = TOKENIZER.sep_token_id
    first, last = made.tokens_of(0, Span("doc"))
    assert separator not in flat_tokens(made)[first:last]
    row = made.pair_rows[0, 0]
    assert (flat_tokens(made)[made.starts[row] : made.starts[row + 1]] == separator).sum() == 2


def test_truncation_drops_cut_spans_and_shortens_whole_sides() -> None:
    text = "alpha beta gamma delta"
    lengths = [len(TOKENIZER(word, add_special_tokens=False)["input_ids"]) for word in text.split()]
    room = sum(lengths[:2]) + 1  # the third word's first piece fits, the rest does not
    made = sequences([("query", text)], max_doc=room)
    spans = {word: Span("doc", text.index(word), text.index(word) + len(word)) for word in text.split()}
    assert [made.tokens_of(0, spans[word]) is not None for word in text.split()] == [True, True, False, False]
    first, last = made.tokens_of(0, Span("doc"))
    assert last - first == room
    tight = sequences([("a b c d e f g h", text)], positions=12)
    query, doc = (tight.tokens_of(0, Span(side)) for side in ("query", "doc"))
    assert query[1] - query[0] == 8
    assert doc[1] - doc[0] == 1, "one token of the doc, whatever the query"
    assert sequences([("a b c d e f g h", text)], positions=12, max_query=3).tokens_of(0, Span("query", 14, 15)) is None
    assert tight.starts[-1] == 12


def test_spans_without_tokens_are_dropped() -> None:
    made = sequences([("a", "b \u200b c"), ("\u200b", "b")])
    assert made.tokens_of(0, Span("doc", 2, 3)) is None
    assert made.tokens_of(1, Span("query")) is None
    assert made.tokens_of(1, Span("doc")) is not None
    assert sequences().tokens_of(2, Span("query")) is None, "there is no query"


def test_ids_are_those_of_the_tokenizer_and_of_the_token_store(tmp_path) -> None:
    made = sequences()
    for number, (query, doc) in enumerate(PAIRS):
        texts = (query, doc) if query else (doc,)
        expected = TOKENIZER(*texts, split_special_tokens=True)
        row = made.pair_rows[number, 1]
        batch = made.batch(row, row + 1)
        assert batch.tokens.tolist() == expected["input_ids"]
        assert batch.segments.tolist() == expected["token_type_ids"]
    unique = list(dict.fromkeys(text for pair in PAIRS for text in pair))
    store = build_token_store(
        ((str(i), text) for i, text in enumerate(unique)), tmp_path / "store", TOKENIZER, 512, fingerprint="x"
    )
    for i in range(len(unique)):
        assert store[i].tolist() == made.texts.tokens[made.texts.offsets[i] : made.texts.offsets[i + 1]].tolist()


def test_texts_are_read_apart_and_once() -> None:
    made = sequences(reads="texts")
    assert made.num_rows == 6, "two different queries, four different docs, though a query and a doc are both 'short'"
    assert made.pair_rows[0, 0] == made.pair_rows[3, 0]
    assert made.pair_rows[2, 0] == -1
    row = made.pair_rows[1, 0]
    assert made.batch(row, row + 1).tokens.tolist() == TOKENIZER("short")["input_ids"]


def test_chunks_cover_all_rows_within_the_budget() -> None:
    made = sequences([(f"query {i}", "word " * (i % 7 + 1)) for i in range(40)] + [("", "alone")])
    chunks = made.chunks(60)
    assert [first for first, _ in chunks] == [0, *(last for _, last in chunks[:-1])]
    assert chunks[-1][1] == made.num_rows
    for first, last in chunks:
        batch = made.batch(first, last)
        assert batch.num_tokens == made.starts[last] - made.starts[first]
        assert last - first == 1 or (last - first) * batch.max_length <= 60


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE in RoBERTa's layout, whose pieces carry the space before a word."""
    backend = Tokenizer(
        models.BPE(
            vocab={"<s>": 0, "</s>": 1, **{c: i + 2 for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}},
            merges=[],
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", sep_token="</s>", cls_token="<s>", pad_token="</s>"
    )


def test_two_separators_and_spaces_inside_pieces() -> None:
    tokenizer = byte_level_tokenizer()
    made = Sequences.of([("a bc", "de fé")], tokenizer, "pairs", 64, 32, 32)
    ids = made.batch(0, 1).tokens.numpy()
    assert ids.tolist() == tokenizer("a bc", "de fé")["input_ids"]
    for side, text, word in (("query", "a bc", "bc"), ("doc", "de fé", "de"), ("doc", "de fé", "fé")):
        first, last = made.tokens_of(0, Span(side, text.index(word), text.index(word) + len(word)))
        assert tokenizer.decode(ids[first:last]).strip() == word


def test_faults() -> None:
    with pytest.raises(ConfigError, match="reads: expected one of pairs, texts"):
        sequences(reads="both")
    with pytest.raises(ConfigError, match="got 4 positions"):
        sequences(positions=4)


def test_text_of_a_span() -> None:
    example = ProbeExample("q", "d", "who", "the cat", ())
    assert example.text_of(Span("doc", 4, 7)) == "cat"
    assert example.text_of(Span("query")) == "who"
