"""Splits a reasoning model's output into reasoning and answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Tags around the reasoning; `open_at_start` when the output begins inside it (the prompt wrote the opening tag)."""

    start: str
    end: str
    open_at_start: bool = False

    def split(self, text: str, *, final: bool) -> tuple[str, str]:
        """(reasoning, answer) of `text`, with their white space; while not final, a tail that may yet become a tag is held
        back."""
        body = text.lstrip()
        if body.startswith(self.start):
            body = body[len(self.start) :]
        elif not self.open_at_start:
            unsure = not final and self.start.startswith(body)
            return ("", "") if unsure else ("", _without_partial(text, self.start, final))
        elif not final and self.start.startswith(body):
            return "", ""
        else:
            body = text
        reasoning, tag, answer = body.partition(self.end)
        if tag:
            return reasoning, answer
        return _without_partial(reasoning, self.end, final), ""


def _without_partial(text: str, tag: str, final: bool) -> str:
    """`text` without a tail that is the beginning of `tag`."""
    if final:
        return text
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return text[:-length]
    return text


_THINK = ReasoningFormat("<think>", "</think>")
_THINK_OPEN = ReasoningFormat("<think>", "</think>", open_at_start=True)
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "deepseek-r1": _THINK_OPEN,
    "deepseek-v3": _THINK,
    "glm45": _THINK,
    "interns1": _THINK,
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "kimi_k2": _THINK_OPEN,
    "minimax": _THINK_OPEN,
    "nemotron_3": _THINK,
    "qwen3": _THINK,
    "qwen3-thinking": _THINK_OPEN,
    "step3": _THINK_OPEN,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}
