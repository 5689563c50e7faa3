"""Prompts that end inside a reasoning section: a constraint applies after the section, and a budget limits it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from bough.core.errors import InvalidRequest
from bough.core.messages import Ids
from bough.core.sampling import SamplingParams
from bough.engine_client import Request
from bough.entrypoints.served_model import ServedModel
from bough.parsers import chat_closed_reasoning, chat_opens_reasoning, prompt_opens_reasoning

_TAIL_IDS = 32
"""Tokens of a prompt that can hold the start of a section."""


def chat_opens(
    prompt: str | Sequence[int], served: ServedModel, *, continued: str = "", switched_off: bool = False
) -> bool:
    """Whether the answer to a chat begins inside a reasoning section. `continued`: the beginning of the answer, given
    by the client. `switched_off`: the client disabled reasoning."""
    if served.reasoning_parser is None or (text := _end_of(prompt, served)) is None:
        return False
    return chat_opens_reasoning(text, served.reasoning_parser, continued=continued, switched_off=switched_off)


def chat_closed(prompt: str | Sequence[int], served: ServedModel, *, continued: str = "") -> bool:
    """Whether the answer to a chat, which does not begin inside a reasoning section, begins after one."""
    if served.reasoning_parser is None or (text := _end_of(prompt, served)) is None:
        return False
    return chat_closed_reasoning(text, served.reasoning_parser, continued=continued)


def _end_of(prompt: str | Sequence[int] | Ids, served: ServedModel) -> str | None:
    """A prompt's text, or the end of it; None: it can't be decoded."""
    if isinstance(prompt, str):
        return prompt
    if served.tokenizer is None:
        return None
    return served.tokenizer.decode([int(token) for token in prompt[-_TAIL_IDS:]], skip_special_tokens=False)


def after_reasoning(sampling: SamplingParams) -> SamplingParams:
    """The same parameters, with a constraint (if there is one) that waits for the end of the reasoning."""
    if sampling.grammar is None:
        return sampling
    return replace(sampling, grammar=replace(sampling.grammar, after_reasoning=True))


def with_reasoning(request: Request, served: ServedModel, budget: int = -1) -> Request:
    """The request of a raw prompt: if the prompt ends inside a reasoning section, its constraint applies after the
    section and its budget is enforced. The section stays part of the text, because the native API has no other field
    for it.
    """
    if request.session is not None or served.reasoning_parser is None:
        return request
    text = _end_of(request.prompt, served)
    if text is None or not prompt_opens_reasoning(text, served.reasoning_parser):
        return request
    return replace(
        request,
        sampling=after_reasoning(request.sampling),
        reasoning_forced=True,
        reasoning_end=served.reasoning_end,
        thinking_budget=budget,
    )


def budget_of(*given: int | None) -> int:
    """A thinking budget by any of its names; -1: none. Raises `InvalidRequest`."""
    budget = next((each for each in given if each is not None), None)
    if budget is None:
        return -1
    if budget < 0:
        raise InvalidRequest(
            what=f"thinking_budget is {budget}",
            why="it counts tokens",
            fix="send 0 or more, or leave it out",
            param="thinking_budget",
        )
    return budget
