"""A classifier's labels as OpenAI's moderation categories: by configuration, else by their names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bough.core.errors import ConfigError

OPENAI: Final = (
    "harassment", "harassment/threatening", "hate", "hate/threatening", "illicit", "illicit/violent", "self-harm",
    "self-harm/instructions", "self-harm/intent", "sexual", "sexual/minors", "violence", "violence/graphic",
)  # fmt: skip
DEFAULT_THRESHOLD: Final = 0.5
_BY_NAME: Final = {
    "toxic": "harassment",
    "toxicity": "harassment",
    "severe-toxic": "harassment",
    "severe-toxicity": "harassment",
    "insult": "harassment",
    "offensive": "harassment",
    "threat": "harassment/threatening",
    "identity-hate": "hate",
    "identity-attack": "hate",
    "hate-speech": "hate",
    "obscene": "sexual",
    "nsfw": "sexual",
    "sexual-explicit": "sexual",
    "violent": "violence",
}
_HARMLESS: Final = frozenset(
    {
        "safe",
        "ok",
        "neutral",
        "normal",
        "clean",
        "none",
        "benign",
        "non-toxic",
        "not-toxic",
        "not-hate",
        "not-offensive",
    }
)


@dataclass(frozen=True, slots=True)
class Categories:
    """The categories of each label; labels without categories are ignored."""

    by_label: tuple[tuple[str, ...], ...]
    threshold: float

    @classmethod
    def of(cls, setting: str, labels: Sequence[str]) -> Categories:
        """From `--moderation-categories`. Other labels are mapped by name: known ones to their category, harmless ones
        to none, others to a category of the same name. Raises `ConfigError`."""
        given = _read(setting) if setting else {}
        inner = given.get("labels")
        stated: Mapping[str, Any] = inner if isinstance(inner, Mapping) else given
        threshold = given.get("threshold", DEFAULT_THRESHOLD) if isinstance(inner, Mapping) else DEFAULT_THRESHOLD
        if not isinstance(threshold, int | float) or not 0 < threshold <= 1:
            raise _wrong(f"its threshold is {threshold!r}", "give a number between 0 and 1")
        unknown = sorted(set(stated) - set(labels)) if labels else []
        if unknown:
            raise _wrong(f"the model has no label {unknown[0]!r}", f"its labels are: {', '.join(labels)}")
        rows = [_categories(stated[label]) if label in stated else _by_name(label) for label in labels]
        return cls(tuple(rows), float(threshold))

    def judge(self, scores: Sequence[float]) -> dict[str, Any]:
        """One result of /v1/moderations."""
        found = dict.fromkeys(OPENAI, 0.0)
        for names, score in zip(self.by_label, scores, strict=True):
            for name in names:
                found[name] = max(found.get(name, 0.0), score)
        flags = {name: score >= self.threshold for name, score in found.items()}
        return {
            "flagged": any(flags.values()),
            "categories": flags,
            "category_scores": found,
            "category_applied_input_types": {name: ["text"] for name in found},
        }


def _by_name(label: str) -> tuple[str, ...]:
    name = label.strip().lower().replace("_", "-").replace(" ", "-")
    if name in _HARMLESS:
        return ()
    slashed = name.replace("-", "/", 1)
    for form in (name, slashed):
        if form in OPENAI:
            return (form,)
    return (_BY_NAME.get(name, label),)


def _categories(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise _wrong(f"it maps a label to {value!r}", "map labels to a category, a list of them, or null")


def _read(setting: str) -> dict[str, Any]:
    text = setting
    if not setting.lstrip().startswith("{"):
        try:
            text = Path(setting).read_text(encoding="utf-8")
        except OSError as error:
            raise _wrong(f"{setting} can't be read", "give a JSON object, or a file with one") from error
    try:
        loaded = json.loads(text)
    except ValueError as error:
        raise _wrong(f"it is no JSON: {error}", 'for example {"toxic": "harassment", "safe": null}') from error
    if not isinstance(loaded, dict):
        raise _wrong("it is no JSON object", 'for example {"toxic": "harassment", "safe": null}')
    return loaded


def _wrong(why: str, fix: str) -> ConfigError:
    return ConfigError(
        what="--moderation-categories can't be used", why=why, fix=fix, param="moderation_categories"
    )  # fmt: skip
