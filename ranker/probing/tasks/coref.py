"""Probing task: do a query mention and a doc mention corefer? A rule on head words gives the labels (`coref_head`)."""

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
LEADING = ("DET", "SCONJ", "CCONJ", "ADP")  # parts of speech that are removed from the start of a noun phrase


@dataclass(frozen=True)
class Mention:
    """A noun phrase, or a third-person pronoun.

    Args:
        start: First character.
        end: One past the last character.
        text: Lower-case text.
        head: Lower-case lemma of the head.
        words: Lower-case words and lemmas, by which shared words of two mentions are found.
        pronoun: Whether the mention is a pronoun.
        plural: Whether the head is plural.
        person: Whether the head is the name of a person.
    """

    start: int
    end: int
    text: str
    head: str
    words: frozenset[str]
    pronoun: bool = False
    plural: bool = False
    person: bool = False


class Coreference:
    """Targets with two spans, labelled by a rule on head words.

    A positive pairs a query mention with a doc mention of the same head lemma, or with a doc pronoun to which `resolve`
    assigns that lemma. Each positive gets one negative with the same query mention. Half of the negatives are easy: a
    random doc word outside all mentions and names. The other half are hard: a doc mention that shares no word with the
    query mention. If there is no hard negative, an easy negative is used. The rule is lexical. So compare the results
    with the controls, and see `exclude_copies`.

    Args:
        model: Package of a spaCy pipeline.
        exclude_copies: Whether doc mentions with the query mention's text are left out, because word matching alone
            finds them.
        max_positives: Maximum positives per pair, drawn by seed.
        docs_per_query: Maximum docs with targets per query; None: all docs of the sample.
    """

    classes: tuple[str, ...] | None = (OTHER, SAME)
    whole_text = False
    ranks = False

    def __init__(
        self,
        model: str = MODEL,
        exclude_copies: bool = False,
        max_positives: int = 4,
        docs_per_query: int | None = None,
    ) -> None:
        self.model, self.exclude_copies = model, exclude_copies
        self.max_positives, self.docs_per_query = max_positives, docs_per_query
        self.name = "coref_head" + ("_nocopy" if exclude_copies else "") + ("" if model == MODEL else f"_{model}")

    @cached_property
    def labeller(self) -> str:  # type: ignore[override]
        """Id, versions and settings."""
        return (
            f"coref-head@1 {self.model} {versions(self.model)} exclude_copies={self.exclude_copies} "
            f"max_positives={self.max_positives} docs_per_query={self.docs_per_query}"
        )

    def examples(self, sample: PairSample) -> Iterator[ProbeExample]:
        """Yield the pairs that have a positive.

        Raises:
            TaskUnavailable: The pipeline is not installed.
        """
        parsed = parse_all(self.model, (text for pair in sample.texts() for text in pair[2:]))
        num_docs: dict[str, int] = {}  # query_id -> number of the query's docs that have targets
        for query_id, doc_id, query, doc in sample.texts():
            if self.docs_per_query is not None and num_docs.get(query_id, 0) >= self.docs_per_query:
                continue
            digest = hashlib.blake2b(repr((sample.seed, query_id, doc_id)).encode(), digest_size=8).digest()
            targets = self.targets(parsed[query], parsed[doc], random.Random(digest))
            if targets:
                num_docs[query_id] = num_docs.get(query_id, 0) + 1
                yield ProbeExample(query_id, doc_id, query, doc, tuple(targets))

    def targets(self, query: Any, doc: Any, rng: random.Random) -> list[Target]:
        """Return the positives and negatives of a parsed query and a parsed doc."""
        query_mentions = [mention for mention in mentions(query) if not mention.pronoun]
        doc_mentions = mentions(doc)
        heads = resolve(doc_mentions)
        positives = [
            (first, later)
            for first in query_mentions
            for later, head in zip(doc_mentions, heads, strict=True)
            if head == first.head and not (self.exclude_copies and later.text == first.text)
        ]
        positives = rng.sample(positives, min(len(positives), self.max_positives))
        names = [(entity.start_char, entity.end_char) for entity in doc.ents]
        targets = []
        for first, later in positives:
            hard: list[Mention] = []
            if rng.random() < 0.5:
                hard = [mention for mention in doc_mentions if _unlike(mention, first) and _unlike(mention, later)]
            if hard:
                mention = rng.choice(hard)
                negative: tuple[int, int] | None = (mention.start, mention.end)
            else:
                negative = _easy_negative(doc, doc_mentions, names, rng)
            query_span = Span("query", first.start, first.end)
            targets.append(Target((query_span, Span("doc", later.start, later.end)), SAME))
            if negative is not None:
                targets.append(Target((query_span, Span("doc", *negative)), OTHER))
        return targets


def mentions(parsed: Any) -> list[Mention]:
    """Return the noun phrases and third-person pronouns of a parsed text, in order."""
    in_order = []
    for chunk in parsed.noun_chunks:
        root = chunk.root
        pronoun = root.pos_ == "PRON"
        if pronoun and (root.lower_ not in PERSONAL | PLURAL | NEUTRAL or root.dep_ == "expl"):
            continue
        # leading articles and conjunctions are removed, so that "the attacker" and "if an attacker" have the same text
        start = next((token.i for token in chunk if token.pos_ not in LEADING and not token.is_punct), root.i)
        phrase = parsed[start : chunk.end]
        in_order.append(
            Mention(
                start=phrase.start_char,
                end=phrase.end_char,
                text=phrase.text.lower(),
                head=root.lemma_.lower(),
                words=frozenset(form for token in phrase for form in (token.lower_, token.lemma_.lower())),
                pronoun=pronoun,
                plural=root.lower_ in PLURAL if pronoun else "Plur" in root.morph.get("Number"),
                person=root.lower_ in PERSONAL if pronoun else root.ent_type_ == "PERSON",
            )
        )
    return in_order


def resolve(in_order: list[Mention]) -> list[str | None]:
    """Return the head lemma of each mention.

    A pronoun gets the head lemma of the nearest earlier noun phrase with the same `plural` and `person`, or None if
    there is no such noun phrase.
    """
    heads: list[str | None] = []
    for i, mention in enumerate(in_order):
        if not mention.pronoun:
            heads.append(mention.head)
            continue
        earlier = (other for other in reversed(in_order[:i]) if not other.pronoun)
        compatible = (other for other in earlier if (other.plural, other.person) == (mention.plural, mention.person))
        heads.append(next((other.head for other in compatible), None))
    return heads


def _unlike(mention: Mention, other: Mention) -> bool:
    """Return whether a mention is a noun phrase that shares no head, word or text with another mention."""
    contained = mention.text in other.text or other.text in mention.text
    return not mention.pronoun and mention.head != other.head and not contained and not mention.words & other.words


def _easy_negative(
    doc: Any, doc_mentions: list[Mention], names: list[tuple[int, int]], rng: random.Random
) -> tuple[int, int] | None:
    """Return the characters of a random word outside all mentions and names; None after `EASY_TRIES` tries."""
    taken = [*((mention.start, mention.end) for mention in doc_mentions), *names]
    for _ in range(EASY_TRIES if len(doc) else 0):
        token = doc[rng.randrange(len(doc))]
        start, end = token.idx, token.idx + len(token)
        if not (token.is_space or token.is_punct) and all(end <= first or last <= start for first, last in taken):
            return start, end
    return None
