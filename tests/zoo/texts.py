"""Texts of the zoo's tests, drawn from a seed, with words that repeat, punctuation, capitals and other scripts."""

import random

FIRST, SECOND, THIRD = (
    ["b", "dr", "f", "gl", "k", "m", "n", "pr", "s", "st", "t", "v"],
    ["ane", "el", "ir", "om", "und", "a", "o"],
    ["", "er", "ing", "o", "ta", "li"],
)
WORDS = ["the", "of", "river", "apple", "which", "query", "passage"]
WORDS += [first + second + third for third in THIRD for first in FIRST for second in SECOND]
ODD = ["The 7 seas, (again)!", "é à ü", "水", "it's a well-known passage: query", "3.14"]


def words(seed: int, count: int) -> str:
    """Return a text of `count` words; common words are drawn often."""
    rng = random.Random(seed)
    drawn = [WORDS[int(len(WORDS) * rng.random() ** 2)] + rng.choice(("", "", "", "s", ",", ".")) for _ in range(count)]
    return " ".join(drawn).capitalize()


CORPUS = [*(words(seed, 40) for seed in range(120)), *ODD, *ODD]
QUERIES = ["which river of stom", "Glane: the apple", words(700, 9), "drund, kel"]
# docs of mixed lengths, from one word on
DOCS = ["river", *ODD[:4], *(words(800 + i, count) for i, count in enumerate((3, 5, 8, 12, 17, 20, 25, 30, 31, 33)))]
LONG_DOC = words(900, 300)  # more tokens than the checkpoints have positions
