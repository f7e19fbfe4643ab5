"""Docs that a caller in Python gives as texts, mappings, tables or `Doc`s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ranker.data.collection import Doc
from ranker.errors import DataError


def lists_of(docs: Any, count: int, single: bool) -> list[Any]:
    """Return the docs of each query.

    Args:
        docs: A list of docs, or a mapping of ids to texts, for all queries; or one of these for each query.
        count: Number of queries.
        single: Whether there is one query, outside of a list.

    Raises:
        DataError: The number of lists differs from the number of queries.
    """
    if single or isinstance(docs, Mapping):
        return [docs] * count
    lists = list(docs)
    nested = bool(lists) and all(not isinstance(part, (str, Mapping, Doc)) or _is_table(part) for part in lists)
    if not nested:
        return [lists] * count
    if len(lists) != count:
        raise DataError(f"docs: expected a list of docs for each of {count} queries, got {len(lists)} lists")
    return lists


def _is_table(part: Any) -> bool:
    """Return whether a mapping maps ids to texts; a single doc is also a mapping."""
    return isinstance(part, Mapping) and "text" not in part


def docs_of(docs: Any) -> list[Doc]:
    """Return the docs of a query with their ids; a doc without an id gets its position.

    Args:
        docs: Texts, mappings with `text` and perhaps `id` and `title`, or `Doc`s; or a mapping of ids to texts.

    Raises:
        DataError: A doc has no text, or two docs have the same id.
    """
    if isinstance(docs, str):
        raise DataError(f"docs: expected a list of docs, got one text ({docs!r:.80}); put it into a list")
    entries = [{"id": key, "text": text} for key, text in docs.items()] if isinstance(docs, Mapping) else list(docs)
    found = [_doc_of(entry, position) for position, entry in enumerate(entries)]
    seen: dict[str, int] = {}
    for position, doc in enumerate(found):
        if doc.doc_id in seen:
            raise DataError(
                f"docs[{position}]: expected an id of its own, got {doc.doc_id!r}, which docs[{seen[doc.doc_id]}] has"
            )
        seen[doc.doc_id] = position
    return found


def _doc_of(entry: Any, position: int) -> Doc:
    if isinstance(entry, Doc):
        return entry
    values = {"text": entry} if isinstance(entry, str) else entry
    if not isinstance(values, Mapping) or not isinstance(values.get("text"), str):
        raise DataError(f"docs[{position}]: expected a text, or a mapping with a text under 'text'; got {entry!r:.200}")
    title = values.get("title") or ""
    return Doc(str(values.get("id", values.get("doc_id", position))), values["text"], title)
