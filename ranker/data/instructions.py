"""Queries with individual instructions: the token store has instruction and query as one text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ranker.data.collection import Collection
from ranker.errors import ConfigError

SEPARATOR = "\x1f"  # separates instruction and query in the texts of a collection
BUDGET = 64  # largest number of tokens of an instruction; the rest is cut off


@dataclass(frozen=True)
class Instructed:
    """Joins instruction and query into one text for the token store: `instruction + between + query`.

    Args:
        between: The text between instruction and query in the prompt's template.
    """

    between: str

    def extra_tokens(self, tokenizer: Any) -> int:
        """Return how many tokens the stored text may have besides the query's own tokens."""
        # + 1: the tokenizer may split `between` into more tokens next to other texts
        return BUDGET + len(_ids(tokenizer, self.between)) + 1

    def text(self, tokenizer: Any, instruction: str, query: str, max_query_tokens: int) -> str:
        """Return the text to store for a query; instruction and query are cut to separate limits.

        Args:
            tokenizer: A fast tokenizer.
            instruction: The query's instruction.
            query: The query.
            max_query_tokens: Largest number of tokens of the query.
        """
        return cut(tokenizer, instruction, BUDGET) + self.between + cut(tokenizer, query, max_query_tokens)


def refuse_instructions(sets: Mapping[str, Collection]) -> None:
    """Refuse sets whose queries have instructions, for a caller that puts no instructions into prompts.

    Args:
        sets: The sets by name.

    Raises:
        ConfigError: A set has queries with instructions.
    """
    for name, collection in sets.items():
        if collection.instructions is not None:
            raise ConfigError(
                f"{name}: expected queries without instructions: only train.py and evaluate.py put instructions into "
                "prompts, and only for sets of data=, not of suite=; leave instruction out of data.columns"
            )


def joined(instruction: str, query: str) -> str:
    """Return instruction and query as one text of a collection; `Half` separates them again.

    Args:
        instruction: The instruction; may be empty.
        query: The query.
    """
    return f"{instruction.replace(SEPARATOR, ' ')}{SEPARATOR}{query}"


class Half(Mapping[str, str]):
    """A mapping query_id -> instruction or query_id -> query, over texts of `joined`.

    Args:
        texts: query_id -> text of `joined`.
        instructions: True: return instructions; False: return queries.
    """

    def __init__(self, texts: Mapping[str, str], instructions: bool) -> None:
        self._texts, self._part = texts, 0 if instructions else 2

    def __getitem__(self, query_id: str) -> str:
        return self._texts[query_id].partition(SEPARATOR)[self._part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, query_id: object) -> bool:
        return query_id in self._texts


def cut(tokenizer: Any, text: str, max_tokens: int) -> str:
    """Return the beginning of a text, cut after `max_tokens` tokens.

    Args:
        tokenizer: A fast tokenizer.
        text: The text.
        max_tokens: Largest number of tokens.
    """
    ends = _ends(tokenizer, text)
    return text if len(ends) <= max_tokens else text[: ends[max_tokens - 1]]


def opened(template: str | None, key: str) -> tuple[str, str]:
    """Return a template without `{instruction}`, and the text between `{instruction}` and `{query}`.

    Args:
        template: A template with `{instruction}` before `{query}`.
        key: Key of the template in the `model` node, for the error message.

    Raises:
        ConfigError: The template has no `{instruction}` before `{query}`, or has another field between the two.

    >>> opened("Task: {instruction} Q: {query} D: {doc}", "prompt")
    ('Task: {query} D: {doc}', ' Q: ')
    """
    first, found, rest = (template or "").partition("{instruction}")
    between, query, last = rest.partition("{query}")
    if not found or not query or "{" in between:
        raise ConfigError(
            f"model.{key}: expected a template with {{instruction}} before {{query}}, and no other field between them, "
            f"since the queries have instructions of their own; got {template!r}"
        )
    return f"{first}{{query}}{last}", between


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _ends(tokenizer: Any, text: str) -> list[int]:
    """Return the character offset at which each token of a text ends."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return [end for _, end in encoded["offset_mapping"]]
