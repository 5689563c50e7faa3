"""Hooks that mkdocs calls while it builds the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The page about contributing is the repository's own file, its links seen from here."""
    if page.file.src_uri != "contributing.md":
        return markdown
    text = (Path(config.config_file_path).parent / "CONTRIBUTING.md").read_text()
    return text.replace("](docs/", "](")
