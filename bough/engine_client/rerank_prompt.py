"""Prompts with which a generative model reranks: it is asked whether a document answers a query, and the odds of its two
possible answers are the score."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from bough.core.errors import InvalidRequest
from bough.engine_client.prompt_template import PromptTemplate, read_template
from bough.tokenizer import Tokenizer

DEFAULT_INSTRUCT: Final = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {{ instruct }}\n'
    "<Query>: {{ query }}\n<Document>: {{ document }}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n\n"
)
"""Jinja takes the last newline away."""
_QWEN3_VL: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {{ instruct }}'
    "<Query>:{{ query }}\n<Document>:{{ document }}<|im_end|>\n<|im_start|>assistant\n\n"
)
_PLAIN: Final = (
    "{{ instruct }}.\n\nQuery: {{ query }}\n\nDocument: {{ document }}\n\n"
    "Question: Is the document relevant to the query? Answer yes or no.\nAnswer:"
)
_PROBES: Final = ("the-query-stands-here", "the-document-stands-here")
_LABELS: Final = re.compile(r"\{#\s*labels:\s*(.+?)\s*,\s*(.+?)\s*#\}")


@dataclass(frozen=True, slots=True)
class RerankPrompt:
    """A template, and the texts of the answers for yes and for no."""

    source: str
    yes: str
    no: str
    instruct: str = DEFAULT_INSTRUCT
    """Default instruction, which says what "relevant" means."""


BUILT_IN: Final = {
    "qwen3": RerankPrompt(_QWEN3, "yes", "no"),
    "qwen3-vl": RerankPrompt(
        _QWEN3_VL, "yes", "no", "Given a search query, retrieve relevant candidates that answer the query."
    ),
    "plain": RerankPrompt(_PLAIN, " yes", " no"),
}


def choose_prompt(setting: str, model: str) -> RerankPrompt | None:
    """By the setting: a built-in name, a file, or `auto` (by the model's name; None: no template suits it).

    A file names other answers than "yes" and "no" in a comment, `{# labels: true, false #}`.
    """
    if setting == "auto":
        name = model.lower()
        if "qwen3" not in name or "rerank" not in name:
            return None
        return BUILT_IN["qwen3-vl" if "qwen3-vl" in name else "qwen3"]
    if setting in BUILT_IN:
        return BUILT_IN[setting]
    source = read_template(setting, "rerank", BUILT_IN)
    named = _LABELS.search(source)
    prompt = RerankPrompt(source, *(named.groups() if named else ("yes", "no")))
    Renderer(prompt)
    return prompt


class Renderer:
    """A compiled template."""

    def __init__(self, prompt: RerankPrompt) -> None:
        self._template = PromptTemplate(prompt.source, "rerank")
        self.num_chars = self._template.num_chars
        """About what it adds to a query and a document."""
        self._instruct = prompt.instruct
        probe = self.render(*_PROBES, "")
        self.query_first = probe.find(_PROBES[0]) <= probe.find(_PROBES[1])
        """Whether the query stands before the document, and its media before that one's."""

    def render(self, query: str, document: str, instruct: str) -> str:
        return self._template.render(query=query, document=document, instruct=instruct or self._instruct)


def label_id(tokenizer: Tokenizer, text: str) -> int:
    """The id of an answer that is a single token. Raises `ConfigError` otherwise."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise InvalidRequest(
            what=f"this model can't rerank: {text!r} is not one of its tokens",
            why=f"the tokenizer makes {len(ids)} tokens of it",
            fix="start with a --rerank-template whose answers are single tokens",
        )
    return ids[0]
