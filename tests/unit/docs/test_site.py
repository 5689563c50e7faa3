"""The documentation is whole: the site builds without a warning, and what the README says is there is there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


@pytest.mark.skipif(
    importlib.util.find_spec("material") is None,
    reason="mkdocs-material is not installed (pip install mkdocs-material)",
)
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, timeout=170, check=False, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "make setup" in (tmp_path / "contributing.html").read_text()
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert not [url for url in loaded if "canonical" not in url], f"{page.name} loads from elsewhere: {loaded}"


def test_every_page_is_in_the_navigation() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    named = set(_files(nav))
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert named == there, "nav in mkdocs.yml and the files in docs/ must agree"


def _files(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    if isinstance(entry, dict):
        return [name for value in entry.values() for name in _files(value)]
    assert isinstance(entry, list)
    return [name for each in entry for name in _files(each)]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "examples/README.md"])
def test_links_and_pictures_of_the_repository_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    targets = [*re.findall(r"\]\(([^)#\s]+)", text), *re.findall(r'(?:src|srcset)="([^"]+)"', text)]
    inside = [target for target in targets if not target.startswith(("http://", "https://"))]
    assert inside, f"{page} has links that can be checked, or does not belong here"
    for target in inside:
        assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


def test_the_readme_names_what_works() -> None:
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"`make ([\w-]+)`", text) + re.findall(r"^\$ make ([\w-]+)", text, re.MULTILINE)
    assert {"serve", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
    from bough.cli.main import COMMANDS

    commands = re.findall(r"`bough ([a-z-]+)", text)
    assert commands
    assert set(commands) <= set(COMMANDS)


def test_pictures_are_small() -> None:
    pictures = list((DOCS / "images").glob("*.png"))
    assert len(pictures) == 2
    assert all(path.stat().st_size < 200_000 for path in pictures)
