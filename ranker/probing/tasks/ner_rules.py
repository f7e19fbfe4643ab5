"""Probing task: the type of a named entity, by patterns and short lists of names; needs no package (`ner_rules`)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ranker.probing.examples import PairSample, ProbeExample, Span, Target

PLACES = """
    Afghanistan Algeria Argentina Australia Austria Bangladesh Belgium Brazil Bulgaria Cambodia Canada Chile China
    Colombia Croatia Cuba Denmark Egypt England Ethiopia Finland France Germany Ghana Greece Hungary Iceland India
    Indonesia Iran Iraq Ireland Israel Italy Jamaica Japan Kenya Korea Kuwait Lebanon Libya Malaysia Mexico Morocco
    Nepal Netherlands Nigeria Norway Pakistan Peru Philippines Poland Portugal Romania Russia Scotland Singapore
    Spain Sudan Sweden Switzerland Syria Taiwan Thailand Tunisia Turkey Uganda Ukraine Venezuela Vietnam Wales Yemen
    Zimbabwe California Florida Texas Ohio Alaska Arizona Virginia Hawaii Amsterdam Athens Baghdad Bangkok Barcelona
    Beijing Berlin Boston Brussels Budapest Cairo Chicago Copenhagen Dallas Delhi Dublin Geneva Houston Istanbul
    Jakarta Jerusalem Lagos Lisbon London Madrid Manila Melbourne Milan Montreal Moscow Mumbai Munich Nairobi Oslo
    Paris Philadelphia Prague Rome Seattle Seoul Shanghai Stockholm Sydney Tokyo Toronto Vienna Warsaw Washington
    Zurich
""".split()  # noqa: SIM905 - a list literal would be a page
PLACES += [
    "New York",
    "Los Angeles",
    "San Francisco",
    "Hong Kong",
    "New Zealand",
    "South Africa",
    "Saudi Arabia",
    "United States",
    "United Kingdom",
]
PEOPLES = """
    African American Arab Argentine Asian Australian Austrian Belgian Brazilian British Bulgarian Canadian Chilean
    Chinese Christian Cuban Danish Dutch Egyptian English European Finnish French German Greek Hindu Hungarian
    Indian Iranian Iraqi Irish Israeli Italian Japanese Jewish Korean Mexican Muslim Nigerian Norwegian Pakistani
    Polish Portuguese Roman Romanian Russian Scottish Spanish Swedish Swiss Syrian Thai Turkish Ukrainian Vietnamese
    Welsh Buddhist Catholic Protestant Democrat Republican
""".split()  # noqa: SIM905
LANGUAGES = """
    Arabic Bengali Chinese Czech Danish Dutch English French German Greek Hebrew Hindi Italian Japanese Korean Latin
    Persian Polish Portuguese Russian Sanskrit Spanish Swahili Swedish Turkish Urdu
""".split()  # noqa: SIM905
FIRST_NAMES = """
    Adam Alan Albert Alexander Alice Andrew Anna Anne Anthony Arthur Barbara Benjamin Bill Carl Catherine Charles
    Christopher Daniel David Diana Donald Edward Elizabeth Emily Emma Eric Eva Francis Frank Frederick George Hannah
    Harry Helen Henry Isaac Jack Jacob James Jane Jennifer John Joseph Julia Karen Karl Kevin Laura Linda Louis Lucy
    Margaret Maria Marie Mark Martin Mary Michael Nicholas Oliver Oscar Patrick Paul Peter Philip Richard Robert
    Rose Samuel Sarah Simon Sophie Stephen Steven Susan Thomas Victoria Walter William
""".split()  # noqa: SIM905
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
DAYS = "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday"
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
WORDS = (
    "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|hundred|"
    "thousand|million|billion"
)
COUNT = rf"(?:{NUMBER}|{WORDS})"
UNITS = (
    "kilometers|kilometres|meters|metres|centimeters|miles|feet|inches|yards|kilograms|grams|pounds|tons|"
    "tonnes|liters|litres|gallons|degrees|acres|km|cm|mm|kg|mg|ml|mph"
)


def _any(words: list[str]) -> str:
    return "|".join(sorted(words, key=len, reverse=True))


# if two rules match at the same character, the first rule is used
RULES = {
    "MONEY": rf"[$€£]\s?{NUMBER}(?: (?:million|billion|trillion))?"
    rf"|{COUNT}(?: (?:million|billion))? (?:dollars|euros|pounds sterling|cents|yen)",
    "PERCENT": rf"{COUNT}(?: percent| per cent|\s?%)",
    "TIME": rf"\d{{1,2}}:\d{{2}}(?:\s?[ap]\.?m)?|\d{{1,2}}\s?[ap]\.?m\b|{COUNT} (?:hours?|minutes?|seconds?)",
    "DATE": rf"(?:{DAYS})|(?:\d{{1,2}} )?(?:{MONTHS}) \d{{1,4}}(?:, \d{{4}})?|(?:1[0-9]|20)\d{{2}}s?"
    rf"|{COUNT} (?:years?|months?|weeks?|days?)",
    "QUANTITY": rf"{COUNT} (?:square |cubic )?(?:{UNITS})",
    "ORDINAL": r"\d+(?:st|nd|rd|th)|first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth",
    "CARDINAL": COUNT,
    "ORG": r"(?:[A-Z][a-z]+ )+"
    r"(?:Inc|Corporation|Company|University|Institute|Association|Ministry|Council|Bank|Party|Agency)"
    r"|University of [A-Z][a-z]+|(?:United Nations|European Union|NATO|NASA|UNESCO|FBI|CIA|BBC|IBM|WHO)",
    "PERSON": rf"(?:{_any(FIRST_NAMES)})(?: [A-Z][a-z]+)+|(?:{_any(FIRST_NAMES)})",
    "LANGUAGE": rf"(?:{_any(LANGUAGES)})(?= language)",
    "NORP": rf"(?:{_any(PEOPLES)})s?",
    "GPE": rf"(?:{_any(PLACES)})",
}
_PATTERN = re.compile("|".join(rf"(?P<{label}>(?<![\w$])(?:{rule})(?!\w))" for label, rule in RULES.items()))


class RuleEntities:
    """A target with one span for each entity of query and doc; the label is the entity's type, named as in OntoNotes.

    The labels are less accurate than those of `ner`, but are the same on every machine.

    Args:
        max_targets: Maximum number of entities per pair; the first ones are kept. None: all.
    """

    name = "ner_rules"
    classes: tuple[str, ...] | None = tuple(sorted(RULES))
    whole_text = False
    ranks = False

    def __init__(self, max_targets: int | None = None) -> None:
        self.max_targets = max_targets
        self.labeller = f"ner-rules@1 max_targets={max_targets}"

    def examples(self, sample: PairSample) -> Iterator[ProbeExample]:
        """Yield the pairs that have an entity."""
        for query_id, doc_id, query, doc in sample.texts():
            targets = [
                Target((Span(side, start, end),), label)
                for side, text in (("query", query), ("doc", doc))
                for label, start, end in entities(text)
            ]
            if targets:
                yield ProbeExample(query_id, doc_id, query, doc, tuple(targets[: self.max_targets]))


def entities(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the type, the first character and one past the last character of each entity, from left to right.

    >>> text = "On 5 May 1912 Mary Smith paid $3 million, 20% of it in Paris."
    >>> [(label, text[start:end]) for label, start, end in entities(text)]
    [('DATE', '5 May 1912'), ('PERSON', 'Mary Smith'), ('MONEY', '$3 million'), ('PERCENT', '20%'), ('GPE', 'Paris')]
    """
    for match in _PATTERN.finditer(text):
        yield str(match.lastgroup), match.start(), match.end()
