"""Probing task: the type of a named entity, tagged by spaCy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from ranker.probing.examples import PairSample, ProbeExample, Span, Target
from ranker.probing.spacy_model import MODEL, parse_all, versions

ONTONOTES = (
    "CARDINAL",
    "DATE",
    "EVENT",
    "FAC",
    "GPE",
    "LANGUAGE",
    "LAW",
    "LOC",
    "MONEY",
    "NORP",
    "ORDINAL",
    "ORG",
    "PERCENT",
    "PERSON",
    "PRODUCT",
    "QUANTITY",
    "TIME",
    "WORK_OF_ART",
)


class NamedEntities:
    """A target with one span for each entity of query and doc; the label is the entity's OntoNotes type.

    Query and doc are tagged separately, so that no entity covers parts of both.

    Args:
        model: Package of a spaCy pipeline.
        max_targets: Maximum number of entities per pair; the first ones are kept. None: all.
    """

    classes: tuple[str, ...] | None = ONTONOTES
    whole_text = False
    ranks = False

    def __init__(self, model: str = MODEL, max_targets: int | None = None) -> None:
        self.model, self.max_targets = model, max_targets
        self.name = "ner" if model == MODEL else f"ner_{model}"

    @cached_property
    def labeller(self) -> str:  # type: ignore[override]
        """Id, versions and settings."""
        return f"ner-spacy@2 {self.model} {versions(self.model)} max_targets={self.max_targets}"

    def examples(self, sample: PairSample) -> Iterator[ProbeExample]:
        """Yield the pairs that have an entity.

        Raises:
            TaskUnavailable: The pipeline is not installed.
        """
        tagged = parse_all(self.model, (text for pair in sample.texts() for text in pair[2:]))
        for query_id, doc_id, query, doc in sample.texts():
            targets = [
                Target((Span(side, entity.start_char, entity.end_char),), entity.label_)
                for side, text in (("query", query), ("doc", doc))
                for entity in tagged[text].ents
                if entity.label_ in ONTONOTES
            ]
            if targets:
                yield ProbeExample(query_id, doc_id, query, doc, tuple(targets[: self.max_targets]))
