"""Print the report of a labelling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

COUNTS = ("pairs", "AUC_queries")


def print_report(content: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the content of a `label.json`.

    Args:
        content: The report.
        console: The console to print on; None: standard output.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    rows: Mapping[str, Mapping[str, Any]] = content["rows"]
    columns = ["pairs", *(key for key in next(iter(rows.values())) if key not in COUNTS)]
    title = f"labels of {content['queries']} queries, scale: {content['scale']}"
    table = Table(title=Text(title), title_justify="left")
    table.add_column("scores")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in rows.items():
        table.add_row(Text(name), *(_shown(row[column]) for column in columns))
    console.print(table)
    for pair, agreement in content["kendall"].items():
        tau = _shown(agreement["tau"])
        console.print(Text(f"Kendall's tau-b of {pair}: {tau}, mean over {agreement['queries']} queries"))
    if any(row["AUC"] is not None for row in rows.values()):
        console.print(Text("AUC: per query, docs without a judgement count as not relevant", "dim"))


def _shown(value: Any) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.4f}"
