"""An instruction of its own for each query: it is stored with the query's text, in front of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ranker.data.collection import Collection
from ranker.errors import ConfigError

SEPARATOR = "\x1f"  # between instruction and query in a table of texts
BUDGET = 64  # tokens of an instruction that are kept; a longer one is cut


@dataclass(frozen=True)
class Instructed:
    """How instruction and query are put together: `instruction + between + query`.

    Args:
        between: What the prompt's template has between the two.
    """

    between: str

    def extra_tokens(self, tokenizer: Any) -> int:
        """Return how many tokens a query's text may be longer than the query itself."""
        # one more: what is between may be cut differently beside other texts
        return BUDGET + len(_ids(tokenizer, self.between)) + 1

    def text(self, tokenizer: Any, instruction: str, query: str, max_query_tokens: int) -> str:
        """Return the text that is stored for a query: neither part takes tokens of the other.

        Args:
            tokenizer: A fast tokenizer.
            instruction: The query's instruction.
            query: The query.
            max_query_tokens: Longest query.
        """
        return cut(tokenizer, instruction, BUDGET) + self.between + cut(tokenizer, query, max_query_tokens)


def refuse_instructions(sets: Mapping[str, Collection]) -> None:
    """Refuse sets whose queries have instructions of their own, where no prompt takes them.

    Args:
        sets: The sets by name.

    Raises:
        ConfigError: A set has such queries.
    """
    for name, collection in sets.items():
        if collection.instructions is not None:
            raise ConfigError(
                f"{name}: expected queries without instructions of their own, which only train.py and evaluate.py put "
                "into prompts, for sets of data= and not of a suite; leave instruction out of data.columns"
            )


def joined(instruction: str, query: str) -> str:
    """Return instruction and query as one text of a table; `Half` takes it apart.

    Args:
        instruction: The instruction; may be empty.
        query: The query.
    """
    return f"{instruction.replace(SEPARATOR, ' ')}{SEPARATOR}{query}"


class Half(Mapping[str, str]):
    """The instructions, or the queries, of texts that `joined` made: query_id -> text.

    Args:
        texts: query_id -> instruction and query.
        instructions: Whether to return the instructions.
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
    """Return the beginning of a text that gives at most so many tokens.

    Args:
        tokenizer: A fast tokenizer.
        text: The text.
        max_tokens: The most tokens.
    """
    ends = _ends(tokenizer, text)
    return text if len(ends) <= max_tokens else text[: ends[max_tokens - 1]]


def opened(template: str | None, key: str) -> tuple[str, str]:
    """Return a template without its instruction, and what stands between instruction and query.

    Args:
        template: A template with `{instruction}` before `{query}`.
        key: Its key, for the message.

    Raises:
        ConfigError: It has no such places, or the doc is between them.

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
    """Return where each token of a text ends."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return [end for _, end in encoded["offset_mapping"]]
