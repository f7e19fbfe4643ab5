"""Probing task: does a mention in the doc mean what a mention in the query means? Labels by a rule on heads (`coref_head`)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ranker.probing.examples import PairSample, ProbeExample, Span, Target
from ranker.probing.spacy_model import MODEL, parse_all, versions

SAME, OTHER = "1", "0"
EASY_TRIES = 500
PERSONAL = {"he", "him", "his", "himself", "she", "her", "hers", "herself"}
PLURAL = {"they", "them", "their", "theirs", "themselves"}
NEUTRAL = {"it", "its", "itself"}
LEADING = ("DET", "SCONJ", "CCONJ", "ADP")


@dataclass(frozen=True)
class Mention:
    """A noun phrase, or a third-person pronoun.

    Args:
        start: First character.
        end: One past the last.
        text: Lower-case text.
        head: Lower-case lemma of its head.
        words: Lower-case words and lemmas, to see whether two mentions share one.
        pronoun: Whether it is a pronoun.
        plural: Whether its head is plural.
        person: Whether its head names a person.
    """

    start: int
    end: int
    text: str
    head: str
    words: frozenset[str]
    pronoun: bool = False
    plural: bool = False
    person: bool = False

    def overlaps(self, start: int, end: int) -> bool:
        """Whether it shares a character with a span."""
        return self.start < end and start < self.end


class Coreference:
    """Two-span targets by the head rule.

    Positive: a query mention and a doc mention with equal head lemma, or a doc pronoun whose nearest compatible earlier
    mention has it. For each positive one negative with the same query mention, half of them easy (a random doc word
    outside all mentions and names), half hard (another doc mention that shares no word with the query mention); easy
    where there is no hard one. The rule is lexical by nature: read the task against its controls, and see
    `exclude_copies`.

    Args:
        model: spaCy pipeline, a package's name.
        exclude_copies: Leave out doc mentions with the same text as the query mention, which a word match would find.
        max_positives: At most so many positives of a pair, drawn by seed.
        docs_per_query: At most so many docs of a query with targets; None for all of the sample.
    """

    classes: tuple[str, ...] | None = (OTHER, SAME)
    whole_text = False
    ranks = False

    def __init__(
        self, model: str = MODEL, exclude_copies: bool = False, max_positives: int = 4, docs_per_query: int | None = None
    ) -> None:  # fmt: skip
        self.model, self.exclude_copies, self.max_positives, self.docs_per_query = (
            model,
            exclude_copies,
            max_positives,
            docs_per_query,
        )
        self.name = "coref_head" + ("_nocopy" if exclude_copies else "") + ("" if model == MODEL else f"_{model}")

    @cached_property
    def labeller(self) -> str:  # type: ignore[override]
        """Id, versions and settings."""
        return (
            f"coref-head@1 {self.model} {versions(self.model)} exclude_copies={self.exclude_copies} "
            f"max_positives={self.max_positives} docs_per_query={self.docs_per_query}"
        )

    def examples(self, sample: PairSample) -> Iterator[ProbeExample]:
        """The pairs that hold a positive.

        Raises:
            TaskUnavailable: The pipeline is not installed.
        """
        parsed = parse_all(self.model, (text for pair in sample.texts() for text in pair[2:]))
        kept: dict[str, int] = {}
        for query_id, doc_id, query, doc in sample.texts():
            if self.docs_per_query is not None and kept.get(query_id, 0) >= self.docs_per_query:
                continue
            digest = hashlib.blake2b(repr((sample.seed, query_id, doc_id)).encode(), digest_size=8).digest()
            targets = self.targets(parsed[query], parsed[doc], random.Random(digest))
            if targets:
                kept[query_id] = kept.get(query_id, 0) + 1
                yield ProbeExample(query_id, doc_id, query, doc, tuple(targets))

    def targets(self, query: Any, doc: Any, rng: random.Random) -> list[Target]:
        """Positives and negatives of two parsed texts."""
        asked = [mention for mention in mentions(query) if not mention.pronoun]
        told = mentions(doc)
        heads = resolve(told)
        positives = [
            (first, later)
            for first in asked
            for later, head in zip(told, heads, strict=True)
            if head == first.head and not (self.exclude_copies and later.text == first.text)
        ]
        positives = rng.sample(positives, min(len(positives), self.max_positives))
        names = [(entity.start_char, entity.end_char) for entity in doc.ents]
        targets = []
        for first, later in positives:
            hard = (
                [mention for mention in told if _unlike(mention, first) and _unlike(mention, later)]
                if rng.random() < 0.5
                else []
            )
            other = rng.choice(hard) if hard else _easy(doc, told, names, rng)
            query_span = Span("query", first.start, first.end)
            targets.append(Target((query_span, Span("doc", later.start, later.end)), SAME))
            if other is not None:
                targets.append(Target((query_span, Span("doc", *_range(other))), OTHER))
        return targets


def mentions(parsed: Any) -> list[Mention]:
    """Noun phrases and third-person pronouns of a parsed text, in order."""
    found = []
    for chunk in parsed.noun_chunks:
        root = chunk.root
        pronoun = root.pos_ == "PRON"
        if pronoun and (root.lower_ not in PERSONAL | PLURAL | NEUTRAL or root.dep_ == "expl"):
            continue
        # a phrase without what leads to it: "the attacker" and "if an attacker" are one mention text
        start = next((token.i for token in chunk if token.pos_ not in LEADING and not token.is_punct), root.i)
        words = frozenset(form for token in parsed[start : chunk.end] for form in (token.lower_, token.lemma_.lower()))
        text = parsed[start : chunk.end]
        found.append(
            Mention(
                text.start_char, text.end_char, text.text.lower(), root.lemma_.lower(), words, pronoun,
                root.lower_ in PLURAL if pronoun else "Plur" in root.morph.get("Number"),
                root.lower_ in PERSONAL if pronoun else root.ent_type_ == "PERSON",
            )
        )  # fmt: skip
    return found


def resolve(told: list[Mention]) -> list[str | None]:
    """Head lemma that each mention stands for: its own, or that of a pronoun's nearest compatible earlier mention; None without one."""
    heads: list[str | None] = []
    for place, mention in enumerate(told):
        if not mention.pronoun:
            heads.append(mention.head)
            continue
        earlier = (other for other in reversed(told[:place]) if not other.pronoun)
        heads.append(
            next(
                (other.head for other in earlier if other.plural == mention.plural and other.person == mention.person),
                None,
            )
        )
    return heads


def _unlike(mention: Mention, other: Mention) -> bool:
    contained = mention.text in other.text or other.text in mention.text
    return not mention.pronoun and mention.head != other.head and not contained and not mention.words & other.words


def _easy(doc: Any, told: list[Mention], names: list[tuple[int, int]], rng: random.Random) -> Any:
    """A random word outside all mentions and names; None after too many tries."""
    taken = [*((mention.start, mention.end) for mention in told), *names]
    for _ in range(EASY_TRIES if len(doc) else 0):
        token = doc[rng.randrange(len(doc))]
        start, end = token.idx, token.idx + len(token)
        if not (token.is_space or token.is_punct) and all(end <= first or last <= start for first, last in taken):
            return token
    return None


def _range(found: Any) -> tuple[int, int]:
    return (found.start, found.end) if isinstance(found, Mention) else (found.idx, found.idx + len(found))
