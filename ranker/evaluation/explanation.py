"""The terms that make the score of one query and one doc, as a table and a JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ranker.errors import ConfigError, DataError
from ranker.files import write_whole

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


def write_explanation(folder: Path, engines: Mapping[str, Any], pair: tuple[str, str]) -> None:
    """Print the terms of a pair, and write them to `explain.json`.

    Args:
        folder: The run folder.
        engines: Search engines by set name; the first that has query and doc explains them.
        pair: Query id and doc id.

    Raises:
        DataError: No set has both.
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
