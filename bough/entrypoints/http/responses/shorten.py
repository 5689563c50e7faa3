"""`truncation: auto`: leaves out the oldest turns of a conversation that is too long for the context."""

from __future__ import annotations

from bough.entrypoints.http.openai.chat import render
from bough.entrypoints.http.openai.schema import ChatRequest
from bough.entrypoints.http.openai.tools import offer
from bough.entrypoints.service import Service

_LEAST_ROOM = 16
"""Tokens kept for an answer whose length the client does not say."""


async def num_tokens(chat: ChatRequest, service: Service) -> int:
    """Tokens of the prompt that the model's template makes of a request."""
    prompt = render(chat, service.served, offer(chat, service.served.tool_parser)).text
    return len((await service.encode([prompt], False))[0])


async def shorten(chat: ChatRequest, service: Service) -> tuple[str, ...]:
    """Removes as few of the oldest turns from `chat.messages` as needed for an answer to fit. A turn begins with a
    user's message, so that calls keep their outputs; system messages stay. Returns what the header says about it;
    empty: nothing was taken out. A last turn that is too long alone is left to the usual error."""
    room = service.served.context_length - max(1, chat.max_completion_tokens or _LEAST_ROOM)
    messages = chat.messages
    if await num_tokens(chat, service) <= room:
        return ()
    first = next((at for at, each in enumerate(messages) if each["role"] not in ("system", "developer")), 0)
    begins = [at for at in range(first + 1, len(messages)) if messages[at]["role"] == "user"]

    def without(cut: int) -> list[dict[str, object]]:
        dropped = range(first, begins[cut])
        is_kept = (at not in dropped or each["role"] in ("system", "developer") for at, each in enumerate(messages))
        return [each for each, kept in zip(messages, is_kept, strict=True) if kept]

    low, high = 0, len(begins)
    while low < high:  # the smallest cut that fits
        middle = (low + high) // 2
        chat.messages = without(middle)
        if await num_tokens(chat, service) <= room:
            high = middle
        else:
            low = middle + 1
    if low == len(begins):
        chat.messages = messages
        return ()
    chat.messages = without(low)
    return (f"input[:{len(messages) - len(chat.messages)}]",)
