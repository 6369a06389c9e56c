"""MkDocs hook: what is written for people who read the Markdown files, as the site wants it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

# A line that is a link to a page outside docs/: the site shows that page there.
_ELSEWHERE = re.compile(r"^\[[^\]]*\]\(\.\./([\w/.-]+\.md)\)$", flags=re.MULTILINE)
# What tests/test_docs.py reads: which host a block needs.
_REQUIRES = re.compile(r"^(```\w+) \{requires=[\w.]+\}$", flags=re.MULTILINE)


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Called by MkDocs with the text of each page."""
    root = Path(config.config_file_path).parent

    def included(link: re.Match[str]) -> str:
        text = (root / link[1]).read_text(encoding="utf-8")
        return text.replace("](../docs/", "](")

    return _REQUIRES.sub(r"\1", _ELSEWHERE.sub(included, markdown))
