"""Hooks of mkdocs: the README as home page, its list of pages as navigation, and the reference of the modules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
# Packages whose modules users import; the reference has one page for each.
PACKAGES = ("assembly/reranker.py", "types.py", "losses", "models", "data", "evaluation", "reports")


class Examples(griffe.Extension):
    """Shows the examples of docstrings (`>>> ...`) as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put the examples of an object's docstring into fences."""
        if obj.docstring is not None:
            fenced = re.sub(r"(?m)^>>> (?:.+(?:\n|\Z))+", _fenced, obj.docstring.value)
            obj.docstring.value = fenced


def _fenced(match: re.Match[str]) -> str:
    return f"```pycon\n{match.group().rstrip()}\n```\n"


def _reference() -> dict[str, str]:
    """Name of each page of the reference -> its text."""
    pages = {}
    for entry in PACKAGES:
        path = ROOT / "ranker" / entry
        modules = [path] if path.is_file() else sorted(path.rglob("[!_]*.py"))
        name = path.stem
        lines = [f"# {'.'.join(path.relative_to(ROOT).with_suffix('').parts)}", ""]
        for module in modules:
            lines += [f"::: {'.'.join(module.relative_to(ROOT).with_suffix('').parts)}", ""]
        pages[f"reference/{name}.md"] = "\n".join(lines)
    return pages


def on_config(config: Any) -> Any:
    """Set the navigation."""
    text = README.read_text(encoding="utf-8")
    nav: list[dict[str, Any]] = [{"Home": "index.md"}]
    group: list[str] = []
    for line in text[text.index("\n## Pages\n") :].splitlines():
        if match := re.match(r"- \[[^\]]*\]\(docs/([\w-]+\.md)\)", line):
            group.append(match.group(1))
        elif heading := re.match(r"([A-Z][\w ]+)[.:]", line):
            group = []
            nav.append({heading.group(1): group})
    nav.append({"Reference": list(_reference())})
    config.nav = [entry for entry in nav if all(entry.values())]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the home page and the reference."""
    home = re.sub(r"\[docs/([\w-]+)\.md\]", r"[\1]", README.read_text(encoding="utf-8")).replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=home))
    for name, text in _reference().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to the README at the home page."""
    return markdown.replace("](../README.md", "](index.md")
