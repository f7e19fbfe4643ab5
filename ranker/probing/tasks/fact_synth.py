"""Probing task: does the doc support a claim? Claims are sentences of the doc, half of them with a number or a name swapped."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from ranker.probing.examples import PairSample, ProbeExample, whole_text_example

REFUTES, SUPPORTS = "REFUTES", "SUPPORTS"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_THINGS = {
    "number": re.compile(r"\b\d+(?:[.,]\d+)*\b"),
    "name": re.compile(r"(?<=[a-z,;] )[A-Z][a-z]+(?: [A-Z][a-z]+)*"),  # not a sentence's first word
}
Claim = tuple[str, str, int, int]  # sentence, kind of what can be swapped, its first character and one past its last


class SyntheticFacts:
    """Label made claims: for those who have no labelled pairs (`fact`); never to be confused with these.

    A claim is the doc's first sentence that holds a number or a name. Every second one is refuted: its number or name
    is replaced by one of another doc's claims that the doc does not hold. A probe that finds the claim's words in the
    doc has solved it.

    Args:
        max_words: Longer sentences make no claim.
    """

    name = "fact_synth"
    classes: tuple[str, ...] | None = (REFUTES, SUPPORTS)
    whole_text = True
    ranks = False

    def __init__(self, max_words: int = 40) -> None:
        self.max_words = max_words
        self.labeller = f"fact-synth@1 max_words={max_words}"

    def examples(self, sample: PairSample) -> Iterator[ProbeExample]:
        """One target a pair, the claim in the query's place; pairs whose doc makes no claim, or has no false one, are left out."""
        claims = [(pair, claim) for pair in sample.texts() if (claim := claim_of(pair[3], self.max_words)) is not None]
        things: dict[str, list[str]] = {kind: [] for kind in _THINGS}
        for _, (sentence, kind, start, end) in claims:
            things[kind].append(sentence[start:end])
        made = 0
        for number, ((query_id, doc_id, _, doc), (sentence, kind, start, end)) in enumerate(claims):
            others = [thing for thing in things[kind] if thing.lower() not in doc.lower()]
            if not others:
                continue
            label = (SUPPORTS, REFUTES)[made % 2]
            made += 1
            if label == REFUTES:
                other = others[int(np.random.default_rng([sample.seed, number]).integers(len(others)))]
                sentence = sentence[:start] + other + sentence[end:]
            yield whole_text_example((query_id, doc_id, sentence, doc), label=label)


def claim_of(doc: str, max_words: int) -> Claim | None:
    """The first sentence with a number, or else a name, to swap; None without one.

    >>> claim_of("It was cold. In 1912 he sailed to Rome.", 40)
    ('In 1912 he sailed to Rome.', 'number', 3, 7)
    """
    for sentence in _SENTENCE_END.split(doc):
        for kind, pattern in _THINGS.items():
            found = pattern.search(sentence)
            if found is not None and len(sentence.split()) <= max_words:
                return sentence, kind, found.start(), found.end()
    return None
