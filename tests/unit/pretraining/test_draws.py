"""Random draws from texts (masked tokens, sentences, sets of words) equal plain loops and are pinned at seed 0."""

import math
import re
from collections import Counter

import numpy as np
import pytest

from ranker.data.memory_store import MemoryStore
from ranker.data.stop_words import STOP_WORDS
from ranker.data.text_encoder import TextEncoder
from ranker.encoders.tiny import tiny_tokenizer
from ranker.hashing import mix
from ranker.pretraining.blocks import MaskedBlocks
from ranker.pretraining.masking import Masking, mask
from ranker.pretraining.objectives.body_first import BodyPairs
from ranker.pretraining.objectives.inverse_cloze import ClozePairs
from ranker.pretraining.objectives.prop import WordSets
from ranker.pretraining.texts import Ragged, Texts, uniform

DOCS = [
    "The cat sat on the mat. A dog ran to the old house! Why did it run? Nobody in the house could say why.",
    "",
    "One single sentence without an end mark",
    "Rain fell all day. Snow fell at night. " * 4,
    "cat cat dog (house) cat-house. The dog: rain, rain.",
]
TOKENIZER = tiny_tokenizer(("cat", "dog", "house", "rain", "snow", "##s", "the", "fell"))


def texts_of(docs=DOCS, seed=0, longest=40, query=12):
    store = MemoryStore(TextEncoder(TOKENIZER, 10_000), {f"d{i}": text for i, text in enumerate(docs)})
    return Texts(store, TOKENIZER, longest, query, seed)


def text(tokens):
    return " ".join(TOKENIZER.convert_ids_to_tokens(list(map(int, tokens)))).replace(" ##", "")


# masked tokens
# ---------------------------------------------------------------------------------------------------------------------


def loop_mask(tokens, number, epoch, masking, seed):
    """Hide tokens of one row, token by token."""
    hashes = [int(mix(seed, epoch, 101, number, i)) for i in range(len(tokens))]
    hidden = sorted(
        sorted(range(len(tokens)), key=hashes.__getitem__)[: max(1, math.floor(masking.share * len(tokens) + 0.5))]
    )
    words = sorted(set(TOKENIZER.get_vocab().values()) - set(TOKENIZER.all_special_ids))
    seen = list(tokens)
    for i in hidden:
        how = (int(mix(seed, epoch, 102, number, i)) >> 11) / 2**53
        if how < masking.masked:
            seen[i] = TOKENIZER.mask_token_id
        elif how < masking.masked + masking.random:
            seen[i] = words[int(mix(seed, epoch, 103, number, i)) % len(words)]
    return seen, hidden


@pytest.mark.parametrize("masking", [Masking(), Masking(0.4, 0.3, 0.5), Masking(0.15, 1.0, 0.0)])
def test_hidden_tokens_equal_a_plain_loop(masking):
    texts = texts_of(seed=7)
    blocks = texts.blocks()
    numbers = np.array([3, 0, 5])
    masked = mask(blocks.take(numbers), numbers, 2, masking, texts)
    for row, number in enumerate(numbers):
        tokens = blocks.take(np.array([number]))[0].tolist()
        seen, hidden = loop_mask(tokens, int(number), 2, masking, 7)
        assert masked.rows[row].tolist() == seen
        assert masked.position[masked.row == row].tolist() == hidden
        assert masked.words[masked.row == row].tolist() == [tokens[i] for i in hidden]


def test_hidden_tokens_at_seed_0_and_1():
    draws = MaskedBlocks(texts_of(), Masking())
    first = draws.step(0, np.array([0])).masked
    assert first.position.tolist() == [2, 9, 13]
    assert draws.step(1, np.array([0])).masked.position.tolist() != first.position.tolist()
    other = MaskedBlocks(texts_of(seed=1), Masking()).step(0, np.array([0])).masked
    assert other.position.tolist() != first.position.tolist()


def test_the_shares_of_masked_random_and_kept_tokens():
    texts = texts_of(["cat dog " * 4000], longest=8000)
    masked = mask(texts.blocks().take(np.array([0])), np.array([0]), 0, Masking(), texts)
    assert len(masked.words) == round(0.15 * 8000)
    seen = masked.rows.tokens[masked.position]
    assert (seen == TOKENIZER.mask_token_id).mean() == pytest.approx(0.8, abs=0.04)
    assert (seen == masked.words).mean() == pytest.approx(0.1, abs=0.03)


def test_blocks_cover_each_doc_once_in_nearly_equal_parts():
    texts = texts_of(longest=9)
    blocks = texts.blocks()
    assert 1 not in blocks.docs  # the empty doc
    for doc in set(blocks.docs.tolist()):
        chosen = np.flatnonzero(blocks.docs == doc)
        assert (
            np.concatenate([blocks.take(chosen)[i] for i in range(len(chosen))]).tolist() == texts.store[doc].tolist()
        )
        assert blocks.lengths[chosen].max() - blocks.lengths[chosen].min() <= 1
        assert len(chosen) == -(-len(texts.store[doc]) // 9)


def test_the_key_of_a_row_is_that_of_its_tokens():
    keys = Ragged.of([np.array([1, 2]), np.array([2, 1]), np.array([1, 2]), np.array([1]), np.zeros(0, int)]).keys()
    assert keys[0] == keys[2] and len(set(keys.tolist())) == 4


# sentences
# ---------------------------------------------------------------------------------------------------------------------


def test_a_sentence_and_the_rest_of_its_block():
    pairs = ClozePairs(texts_of(longest=60), keep=0.0, shortest=3)
    whole = text(texts_of().store[0])
    first = re.findall(r"[^ .!?][^.!?]+[.!?]", whole)
    seen = set()
    for epoch in range(30):
        query, doc = map(text, pairs.pair(epoch, 0))
        assert query in first
        assert doc.split() == " ".join(part for part in first if part != query).split()
        seen.add(query)
    assert seen == set(first)  # each sentence is drawn at some time
    drawn = [text(query) for query, _ in [pairs.pair(epoch, 0) for epoch in range(2, 4)]]
    assert drawn == ["the cat sat on the mat .", "nobody in the house could say why ."]


def test_the_sentence_stays_in_its_block_in_the_share_of_the_draws_that_keep_sets():
    kept = ClozePairs(texts_of(longest=60), keep=0.3, shortest=3)
    whole = len(texts_of(longest=60).blocks().take(np.array([0]))[0])
    assert np.mean([len(kept.pair(epoch, 0)[1]) == whole for epoch in range(300)]) == pytest.approx(0.3, abs=0.08)


def test_texts_of_one_sentence_are_left_out():
    assert 2 not in ClozePairs(texts_of(longest=60), 0.1, 3).owners
    assert 2 not in BodyPairs(texts_of(longest=60), 1, 3).owners


def test_a_sentence_of_the_beginning_with_a_passage_of_the_body():
    texts = texts_of(longest=30)
    pairs = BodyPairs(texts, first=2, shortest=3)
    whole = text(texts.store[3])
    assert pairs.owners.tolist() == [0, 3, 4]
    parts = re.findall(r"[^.]+\.", whole)
    body = "".join(parts[2:]).split()
    passages = set()
    for epoch in range(40):
        query, doc = map(text, pairs.pair(epoch, 1))
        assert query.strip() in [part.strip() for part in parts[:2]]
        assert len(pairs.pair(epoch, 1)[1]) <= 30
        passages.add(doc)
    assert len(passages) == -(-len(texts.store[3][len(TOKENIZER("".join(parts[:2]))["input_ids"]) - 2 :]) // 30)
    assert sorted(" ".join(passages).split()) == sorted(body)


def test_docs_of_the_same_text_or_of_the_same_doc_are_no_negatives():
    texts = texts_of([*DOCS, DOCS[0], DOCS[3] + "Sun shone in the morning. Wind blew over the hills."], longest=30)
    pairs = ClozePairs(texts, 1.0, 3)  # the sentence stays, so equal blocks are equal docs
    rows = pairs.step(0, np.arange(len(pairs)))
    for i, owner in enumerate(pairs.owners):
        for j, other in enumerate(pairs.owners):
            same = owner == other or rows.docs[i].tolist() == rows.docs[j].tolist()
            assert bool(rows.contrast.mask[i, j]) is (i == j or not same)
    assert not rows.contrast.mask.all()
    assert rows.contrast.owners.tolist() == list(range(len(pairs)))
    assert bool(rows.contrast.positive.all())


# sets of words
# ---------------------------------------------------------------------------------------------------------------------


def loop_words(doc):
    """The words of a text in lower case, without stop words."""
    return [word for word in re.findall(r"[a-z0-9]+", doc.lower()) if word not in STOP_WORDS]


def loop_sets(doc, epoch, group, seed, mean, mu):
    """The two sets of words of a text and their likelihoods, word by word."""
    collection = Counter(word for other in DOCS for word in loop_words(other))
    total = sum(collection.values())
    counts = Counter(loop_words(doc))
    length = sum(counts.values())
    likely = {word: (n + mu * collection[word] / total) / (length + mu) for word, n in counts.items()}
    size, cumulated, draw = 0, math.exp(-mean), float(uniform(seed, epoch, 131, group))
    while draw >= cumulated:
        size += 1
        cumulated += math.exp(-mean) * mean**size / math.factorial(size)
    sets, logs = [], []
    for which in range(2):
        words = []
        for place in range(max(1, size)):
            left = float(uniform(seed, epoch, 132, group, which, place)) * sum(likely.values())
            rest = iter(likely.items())
            while left >= 0:
                word, share = next(rest)
                left -= share
            words.append(word)
        sets.append(words)
        logs.append(sum(math.log(likely[word]) for word in words))
    return sets, logs


def test_sets_of_words_equal_a_plain_loop():
    texts = texts_of(longest=200, query=60)
    draws = WordSets(texts, 3.0, 50.0, Masking())
    assert draws.blocks.docs.tolist() == [0, 2, 3, 4]
    sizes, better = Counter(), Counter()
    for epoch in range(25):
        step = draws.step(epoch, np.arange(4))
        for group, doc in enumerate(draws.blocks.docs):
            sets, logs = loop_sets(DOCS[doc], epoch, group, 0, 3.0, 50.0)
            got = [text(step.sets[2 * group + i]) for i in range(2)]
            assert [re.findall(r"[a-z]+", part) for part in got] == sets
            assert step.better[group] == (0 if abs(logs[0] - logs[1]) < 1e-12 else np.sign(logs[0] - logs[1]))
            sizes[len(sets[0])] += 1
            better[int(step.better[group])] += 1
    assert len(sizes) > 4 and set(better) == {-1, 0, 1}


def test_sets_of_words_at_seed_0():
    step = WordSets(texts_of(longest=200, query=60), 3.0, 2000.0, Masking()).step(0, np.array([0, 1]))
    assert [text(step.sets[i]) for i in range(4)] == ["old old cat", "sat house cat", "sentence", "one"]
    assert step.better.tolist() == [-1, 0]


def test_a_set_is_cut_and_only_tokens_of_the_block_are_hidden():
    draws = WordSets(texts_of(longest=30, query=4), 6.0, 2000.0, Masking())
    step = draws.step(0, np.arange(len(draws)))
    assert step.sets.lengths.max() == 4
    batch = step.batch(np.array([2, 0]))
    tokens = batch.pairs.tokens.clone()
    tokens[batch.hidden.positions] = batch.hidden.words
    rows = [row.tolist() for row in tokens.split(batch.pairs.cu_seqlens.diff().tolist())]
    blocks = draws.blocks.take(np.array([2, 0]))
    for i, (group, which) in enumerate([(2, 0), (2, 1), (0, 0), (0, 1)]):
        words = step.sets[2 * group + which].tolist()
        assert rows[i] == [2, *words, 3, *blocks[i // 2].tolist(), 3]
    assert max(sum(len(row) for row in rows[i : i + 2]) for i in (0, 2)) <= draws.largest()
    assert step.sizes[[2, 0]].tolist() == [len(rows[0]) + len(rows[1]), len(rows[2]) + len(rows[3])]
