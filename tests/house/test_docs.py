"""Links between pages of the documentation lead to files and headings that exist, on GitHub and on the site."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)


def without_code(text: str) -> str:
    """Return a page without code blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "`code`", FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """Return headings' anchors by GitHub's rule: lower case, no punctuation, hyphens for spaces, numbered repeats."""
    found, seen = set(), Counter()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", FENCE.sub("", text), re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


def broken_links(page: Path) -> list[str]:
    """Return the links of a page whose target does not exist."""
    broken = []
    for target in re.findall(r"\]\(\s*<?([^)\s>]+)", without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):  # a web address, which a test without a network can't follow
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            broken.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
            broken.append(f"{target}: no such heading")
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert broken_links(page) == []


def test_the_readme_lists_every_page():
    listed = re.findall(r"^- \[docs/([\w-]+\.md)\]\(docs/\1\)", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == [page.name for page in PAGES if page.parent.name == "docs"]


def test_broken_links_are_seen(tmp_path):
    (tmp_path / "other.md").write_text("# Two `words`: here\n\n## Again\n\n## Again\n\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#two-words-here) [b](other.md#again-1) [c](other.md#again-2) [d](gone.md) [e](https://x.y/z)\n"
        "[f](#here) `[g](nowhere.md)` [h](other.md#no-heading)\n\n```\n[i](nowhere.md)\n```\n\n# Here\n"
    )
    assert broken_links(page) == [
        "other.md#again-2: no such heading",
        "gone.md: no such file",
        "other.md#no-heading: no such heading",
    ]
