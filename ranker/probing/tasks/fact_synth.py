"""Probing task: does the doc support a claim? Claims are sentences of docs; half have a wrong number or name."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from ranker.probing.examples import PairSample, ProbeExample, whole_text_example

REFUTES, SUPPORTS = "REFUTES", "SUPPORTS"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_PATTERNS = {
    "number": re.compile(r"\b\d+(?:[.,]\d+)*\b"),
    "name": re.compile(r"(?<=[a-z,;] )[A-Z][a-z]+(?: [A-Z][a-z]+)*"),  # not the first word of a sentence
}
Claim = tuple[str, str, int, int]  # sentence; "number" or "name"; its first character; one past its last character


class SyntheticFacts:
    """Label synthetic claims, for collections without labelled pairs. Do not compare the results with those of `fact`.

    A claim is the doc's first sentence that contains a number or a name. Every second claim is made false: its number
    or name is replaced by a number or name of another doc's claim. The replacement does not occur in this doc. A probe
    solves the task if it finds the claim's words in the doc.

    Args:
        max_words: Maximum words of a claim.
    """

    name = "fact_synth"
    classes: tuple[str, ...] | None = (REFUTES, SUPPORTS)
    whole_text = True
    ranks = False

    def __init__(self, max_words: int = 40) -> None:
        self.max_words = max_words
        self.labeller = f"fact-synth@1 max_words={max_words}"

    def examples(self, sample: PairSample) -> Iterator[ProbeExample]:
        """Yield each pair with one target: the whole claim, which is the query, and the whole doc.

        A pair is left out if the doc has no claim, or if the claim's number or name has no replacement.
        """
        claims = [(pair, claim) for pair in sample.texts() if (claim := claim_of(pair[3], self.max_words)) is not None]
        replacements: dict[str, list[str]] = {category: [] for category in _PATTERNS}
        for _, (sentence, category, start, end) in claims:
            replacements[category].append(sentence[start:end])
        num_examples = 0
        for number, ((query_id, doc_id, _, doc), (sentence, category, start, end)) in enumerate(claims):
            others = [text for text in replacements[category] if text.lower() not in doc.lower()]
            if not others:
                continue
            label = (SUPPORTS, REFUTES)[num_examples % 2]
            num_examples += 1
            if label == REFUTES:
                other = others[int(np.random.default_rng([sample.seed, number]).integers(len(others)))]
                sentence = sentence[:start] + other + sentence[end:]
            yield whole_text_example((query_id, doc_id, sentence, doc), label=label)


def claim_of(doc: str, max_words: int) -> Claim | None:
    """Return the first sentence of at most `max_words` words with a number or name (number first), or None.

    >>> claim_of("It was cold. In 1912 he sailed to Rome.", 40)
    ('In 1912 he sailed to Rome.', 'number', 3, 7)
    """
    for sentence in _SENTENCE_END.split(doc):
        for category, pattern in _PATTERNS.items():
            match = pattern.search(sentence)
            if match is not None and len(sentence.split()) <= max_words:
                return sentence, category, match.start(), match.end()
    return None
