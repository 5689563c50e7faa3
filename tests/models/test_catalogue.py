"""docs/models.md has every architecture, and every architecture has a test."""

from __future__ import annotations

from pathlib import Path

import families
from test_renamed_families import FAMILIES
from tiny import CASES

from bough.models.catalogue import GROUPS, markdown
from bough.models.registry import ARCHITECTURES
from bough.multimodal.families import FAMILIES as TAKING_MEDIA

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_is_as_generated() -> None:
    assert PAGE.read_text() == markdown(), "run: bough models families --markdown > docs/models.md"


def test_every_architecture_is_on_it_once() -> None:
    listed = [name for group in GROUPS for name in group.examples]
    assert sorted(listed) == sorted(ARCHITECTURES)


def test_every_model_file_is_compared_with_transformers() -> None:
    tables = (
        CASES, families.DENSE, families.EXPERTS, families.EARLIER, families.LATENTS, families.SHARED_KV, families.STATES,
    )  # fmt: skip
    prefixes = {prefix for table in tables for prefix, _ in table.values()}
    compared = {ARCHITECTURES["GPT2LMHeadModel" if each == "GPT2" else f"{each}ForCausalLM"] for each in prefixes}
    renamed = {ARCHITECTURES[family.config["architectures"][0]] for family in FAMILIES.values()}
    texts = {
        module
        for name, module in ARCHITECTURES.items()
        if name.endswith("ForConditionalGeneration") or name in TAKING_MEDIA
    }
    assert compared | renamed | texts == set(ARCHITECTURES.values()), "see test_text_of.py for models that also see"
