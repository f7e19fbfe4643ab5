"""Write the page, an HTML file that needs no other file and no network; it appears completely or not at all."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ranker.files.writing import write_whole
from ranker.reports.charts import Chart
from ranker.reports.content import Limits, SetContent, fitted

FOLDER = Path(__file__).parent / "template"
MAX_SETTINGS = 100_000  # largest number of characters of the configuration


@dataclass(frozen=True)
class Page:
    """The content of a page.

    Args:
        title: The title.
        facts: Label -> value; shown below the title.
        command: The command that repeats the run.
        settings: The configuration as YAML.
        environment: Label -> value; shown below the settings.
        charts: Training curves; see `ranker.reports.charts.training`.
        overview: A table over all sets, or None.
        sets: The sets.
    """

    title: str
    facts: Mapping[str, str]
    command: str
    settings: str
    environment: Mapping[str, str]
    charts: Sequence[Chart] = ()
    overview: Mapping[str, Any] | None = None
    sets: Sequence[SetContent] = field(default_factory=tuple)


def write_page(path: Path, page: Page, limits: Limits) -> Path:
    """Write a page of about `limits.megabytes` megabytes, besides the template, tables and charts.

    Raises:
        DataError: The file can't be written.
    """
    with write_whole(path, binary=True) as file:
        file.write(render(page, limits).encode("utf-8", "replace"))  # texts may have lone surrogates
    return path


def render(page: Page, limits: Limits) -> str:
    """Return the page as HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # not needed by commands without a page

    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    size = int(limits.megabytes * 1e6) // max(1, len(page.sets))
    data = [fitted(part, size) for part in page.sets]
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    return environment.get_template("page.html").render(
        page=page,
        settings=page.settings[:MAX_SETTINGS],
        data=data,
        script=script,
        style=(FOLDER / "page.css").read_text(encoding="utf-8"),
        # the browser runs only the script with this hash, so that no text can run a script
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
