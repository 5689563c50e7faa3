"""Fill-in-the-middle: the special tokens of code models around the prefix and the suffix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bough.core.errors import ConfigError, InvalidRequest
from bough.tokenizer import Tokenizer

AUTO = "auto"
NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class FimFormat:
    """The prompt is `before` prefix `gap` suffix `after`; the model writes the middle."""

    before: str
    gap: str
    after: str

    @property
    def marks(self) -> tuple[str, str, str]:
        return (self.before, self.gap, self.after)

    def render(self, prefix: str, suffix: str) -> str:
        return f"{self.before}{prefix}{self.gap}{suffix}{self.after}"


FORMATS: Mapping[str, FimFormat] = {
    "deepseek_coder": FimFormat(before="<｜fim▁begin｜>", gap="<｜fim▁hole｜>", after="<｜fim▁end｜>"),
    "star_coder": FimFormat(before="<fim_prefix>", gap="<fim_suffix>", after="<fim_middle>"),
    "qwen_coder": FimFormat(before="<|fim_prefix|>", gap="<|fim_suffix|>", after="<|fim_middle|>"),
}


def choose_format(setting: str, tokenizer: Tokenizer | None) -> FimFormat | None:
    """The format by its name, by the tokenizer's special tokens (`auto`), or none. Raises `ConfigError` for an unknown
    name."""
    if setting == NONE or tokenizer is None:
        return None
    if setting == AUTO:
        return next((form for form in FORMATS.values() if _knows(tokenizer, form)), None)
    form = FORMATS.get(setting)
    if form is None:
        raise ConfigError(
            what=f"completion_template is {setting!r}",
            why=f"it must be auto, none or one of: {', '.join(FORMATS)}",
            fix="for example --completion-template qwen_coder",
            param="completion_template",
        )
    if not _knows(tokenizer, form):
        raise ConfigError(
            what=f"the model's tokenizer has no marks of {setting}",
            why=f"{' '.join(form.marks)} are not single tokens",
            fix="use --completion-template auto",
            param="completion_template",
        )
    return form


def fill_in(form: FimFormat | None, prefix: str, suffix: str) -> str:
    """The prompt for the text between prefix and suffix. Raises `InvalidRequest` if the model does not support this, or
    if the texts contain the special tokens."""
    if form is None:
        raise InvalidRequest(
            what="suffix is not supported",
            why="the served model has no marks for filling in the middle",
            fix="leave it out, or serve a code model that has them",
            param="suffix",
        )
    for mark in form.marks:
        if mark in prefix or mark in suffix:
            raise InvalidRequest(
                what=f"the text holds the mark {mark}",
                why="it would end the prompt's part early",
                fix="leave suffix out, or take the mark out of the text",
                param="suffix",
            )
    return form.render(prefix, suffix)


def _knows(tokenizer: Tokenizer, form: FimFormat) -> bool:
    return all(tokenizer.id_of(mark) is not None for mark in form.marks)
