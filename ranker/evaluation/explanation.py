"""Show the terms whose weights sum to the score of a query and a doc, as a table and a JSON file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ranker.data.collection import Collection
from ranker.errors import ConfigError, DataError
from ranker.files.writing import write_whole

SHOWN = 30  # terms on the screen


def explained_pair(value: str | None) -> tuple[str, str] | None:
    """Return the query id and the doc id in the value of `explain`; None for null.

    Raises:
        ConfigError: The value is not two ids.

    >>> explained_pair("q1,d:2"), explained_pair(None)
    (('q1', 'd:2'), None)
    """
    if value is None:
        return None
    ids = [part.strip() for part in value.split(",")]
    if len(ids) != 2 or not all(ids):
        raise ConfigError(f"explain: expected QUERY_ID,DOC_ID, got {value!r}")
    return ids[0], ids[1]


def check_pair(pair: tuple[str, str] | None, sets: Iterable[Collection]) -> None:
    """Refuse a pair of a query and a doc that no set contains.

    Args:
        pair: Query id and doc id; None: nothing is explained.
        sets: The sets that are searched.

    Raises:
        DataError: No set contains both ids.
    """
    if pair is None:
        return
    missing = set()
    for collection in sets:
        lacks_query, lacks_doc = pair[0] not in collection.queries, pair[1] not in collection.docs
        if not lacks_query and not lacks_doc:
            return
        missing.add(f"query {pair[0]!r}" if lacks_query else f"doc {pair[1]!r}")
    raise DataError(
        "explain: expected a query id and a doc id that one set contains; not found: " + ", ".join(sorted(missing))
    )


def write_explanation(folder: Path, engines: Mapping[str, Any], pair: tuple[str, str]) -> None:
    """Print the terms of a pair, and write them to `explain.json`.

    Args:
        folder: The run folder.
        engines: Search engines by set name; the first engine that has the query and the doc explains the pair.
        pair: Query id and doc id.

    Raises:
        DataError: No set contains both ids.
    """
    faults = []
    for name, engine in engines.items():
        try:
            terms = engine.explain(*pair)
        except DataError as error:
            faults.append(error)
            continue
        _write(folder, name, pair, terms)
        return
    raise faults[0]


def _write(folder: Path, name: str, pair: tuple[str, str], terms: list[tuple[str, float, float]]) -> None:
    import json

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    score = sum(query * doc for _, query, doc in terms)
    entries = [{"term": term, "query": query, "doc": doc, "product": query * doc} for term, query, doc in terms]
    content = {"set": name, "query_id": pair[0], "doc_id": pair[1], "score": score, "terms": entries}
    with write_whole(folder / "explain.json") as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    table = Table(title=Text(f"{name}: query {pair[0]}, doc {pair[1]}, score {score:.4f}"), title_justify="left")
    table.add_column("term")
    for heading in ("in query", "in doc", "product", "share"):
        table.add_column(heading, justify="right")
    for term, query, doc in terms[:SHOWN]:
        product = query * doc
        table.add_row(Text(term), f"{query:.4f}", f"{doc:.4f}", f"{product:.4f}", f"{product / score:.1%}")
    Console().print(table)
    if len(terms) > SHOWN:
        Console().print(Text(f"{len(terms) - SHOWN} more in {folder / 'explain.json'}", "dim"))
