"""Labels as moderation categories."""

from __future__ import annotations

from pathlib import Path

import pytest

from bough.core.errors import ConfigError
from bough.entrypoints.http.pooling.categories import OPENAI, Categories


def test_names_speak_for_themselves() -> None:
    labels = ("safe", "Hate", "self_harm", "toxic", "spam", "violence_graphic")
    found = Categories.of("", labels).judge([0.9, 0.8, 0.1, 0.6, 0.7, 0.2])
    assert found["flagged"]
    assert set(OPENAI) | {"spam"} == set(found["categories"])
    true = {name for name, flag in found["categories"].items() if flag}
    assert true == {"hate", "harassment", "spam"}
    assert found["category_scores"]["self-harm"] == 0.1
    assert found["category_scores"]["violence/graphic"] == 0.2
    assert not Categories.of("", labels).judge([1.0, 0, 0, 0, 0, 0])["flagged"]


def test_the_setting_decides(tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text('{"threshold": 0.9, "labels": {"LABEL_1": ["hate", "violence"], "LABEL_0": null}}')
    found = Categories.of(str(file), ("LABEL_0", "LABEL_1")).judge([0.1, 0.85])
    assert not found["flagged"]
    assert found["category_scores"]["hate"] == found["category_scores"]["violence"] == 0.85
    assert Categories.of('{"LABEL_1": "sexual"}', ("LABEL_0", "LABEL_1")).judge([0.1, 0.85])["categories"]["sexual"]


@pytest.mark.parametrize(
    "setting", ["{", "[]", "/no/such/file", '{"other": "hate"}', '{"a": 3}', '{"threshold": 2, "labels": {}}']
)
def test_settings_that_can_not_be_used(setting: str) -> None:
    with pytest.raises(ConfigError, match="moderation-categories"):
        Categories.of(setting, ("a", "b"))
