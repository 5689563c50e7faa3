"""Jinja templates that an operator chooses for a task (reranking, embedding): compiled once, rendered within bounds."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import jinja2

from bough.core.errors import ConfigError, InvalidRequest
from bough.tokenizer.template_sandbox import TemplateEnvironment, TemplateRefused, compile_template, render_bounded


class PromptTemplate:
    """A compiled template. `task`: "rerank", "embedding"; the flag that chooses it is named after it."""

    def __init__(self, source: str, task: str) -> None:
        """Raises `ConfigError` if the source can't be read."""
        self.num_chars = len(source)
        """About what it adds to texts."""
        self._task = task
        self._environment = TemplateEnvironment()
        try:
            self._template = compile_template(self._environment, source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                what=f"the {task} template can't be read", why=str(error), fix="check it", param=f"{task}_template"
            ) from error

    def render(self, **variables: str) -> str:
        """Raises `InvalidRequest`."""
        try:
            return render_bounded(self._environment, self._template, variables)
        except (TemplateRefused, jinja2.TemplateError) as error:
            raise InvalidRequest(
                what=f"the {self._task} template can't render this input", why=str(error), fix="send another"
            ) from error


def read_template(setting: str, task: str, built_in: Collection[str]) -> str:
    """The text of a file that a flag names. Raises `ConfigError` if there is none."""
    path = Path(setting)
    if not path.is_file():
        raise ConfigError(
            what=f"there is no {task} template {setting!r}",
            why="it is neither a file nor the name of a built-in one",
            fix=f"give a file, or one of {', '.join(built_in)}",
            param=f"{task}_template",
        )
    return path.read_text(encoding="utf-8")
