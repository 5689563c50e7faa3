"""Prompts with which a generative model reranks: it is asked whether a document answers a query, and the odds of its two
possible answers are the score."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import jinja2

from bough.core.errors import ConfigError, InvalidRequest
from bough.tokenizer import Tokenizer
from bough.tokenizer.template_sandbox import TemplateEnvironment, TemplateRefused, compile_template, render_bounded

DEFAULT_INSTRUCT: Final = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {{ instruct }}\n'
    "<Query>: {{ query }}\n<Document>: {{ document }}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n\n"
)
"""Jinja takes the last newline away."""
_PLAIN: Final = (
    "{{ instruct }}.\n\nQuery: {{ query }}\n\nDocument: {{ document }}\n\n"
    "Question: Is the document relevant to the query? Answer yes or no.\nAnswer:"
)
_LABELS: Final = re.compile(r"\{#\s*labels:\s*(.+?)\s*,\s*(.+?)\s*#\}")


@dataclass(frozen=True, slots=True)
class RerankPrompt:
    """A template, and the texts of the answers for yes and for no."""

    source: str
    yes: str
    no: str


BUILT_IN: Final = {"qwen3": RerankPrompt(_QWEN3, "yes", "no"), "plain": RerankPrompt(_PLAIN, " yes", " no")}


def choose_prompt(setting: str, model: str) -> RerankPrompt | None:
    """By the setting: a built-in name, a file, or `auto` (by the model's name; None: no template suits it).

    A file names other answers than "yes" and "no" in a comment, `{# labels: true, false #}`.
    """
    if setting == "auto":
        name = model.lower()
        return BUILT_IN["qwen3"] if "qwen3" in name and "rerank" in name else None
    if setting in BUILT_IN:
        return BUILT_IN[setting]
    path = Path(setting)
    if not path.is_file():
        raise ConfigError(
            what=f"there is no rerank template {setting!r}",
            why="it is neither a file nor the name of a built-in one",
            fix=f"give a file, or one of {', '.join(BUILT_IN)}",
            param="rerank_template",
        )
    source = path.read_text(encoding="utf-8")
    named = _LABELS.search(source)
    prompt = RerankPrompt(source, *(named.groups() if named else ("yes", "no")))
    Renderer(prompt)
    return prompt


class Renderer:
    """A compiled template."""

    def __init__(self, prompt: RerankPrompt) -> None:
        self.num_chars = len(prompt.source)
        """About what it adds to a query and a document."""
        self._environment = TemplateEnvironment()
        try:
            self._template = compile_template(self._environment, prompt.source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                what="the rerank template can't be read", why=str(error), fix="check it", param="rerank_template"
            ) from error

    def render(self, query: str, document: str, instruct: str) -> str:
        variables = {"query": query, "document": document, "instruct": instruct or DEFAULT_INSTRUCT}
        try:
            return render_bounded(self._environment, self._template, variables)
        except (TemplateRefused, jinja2.TemplateError) as error:
            raise InvalidRequest(
                what="the rerank template can't render this query and document", why=str(error), fix="send others"
            ) from error


def label_id(tokenizer: Tokenizer, text: str) -> int:
    """The one token of an answer."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise InvalidRequest(
            what=f"this model can't rerank: {text!r} is not one of its tokens",
            why=f"the tokenizer makes {len(ids)} tokens of it",
            fix="start with a --rerank-template whose answers are single tokens",
        )
    return ids[0]
