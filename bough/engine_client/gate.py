"""Admission as the engine client sees it, and the engine client's counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bough.core.messages import Ids


class WorkHold(Protocol):
    """An admitted request's share of the admission limits."""

    def began(self) -> None: ...

    def end(self) -> None: ...


class WorkGate(Protocol):
    """Admission control; raises `Overloaded`."""

    def admit(self, *, requests: int, tokens: int) -> WorkHold: ...


class Quota(Protocol):
    """Enforces the token rates of tenants, and counts their usage."""

    def charge(self, tenant: str, tokens: int) -> None:
        """The tenant is about to have about `tokens` computed; raises `Overloaded` if it has used up its rate."""
        ...

    def used(self, tenant: str, *, requests: int = 0, prompt: int = 0, generated: int = 0, charged: int = 0) -> None:
        """What it has used by now, of which it was charged `charged` tokens before."""
        ...


@dataclass(slots=True)
class EngineClientStats:
    """Counters since the start."""

    submitted: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """By `End.reason`, and `given_up` for requests whose client disconnected."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    live: int = 0


_BYTES_PER_TOKEN = 3
"""Characters per token: a cautious estimate for English, about right for code and other scripts."""


def num_tokens(prompt: str | Sequence[int] | Ids) -> int:
    """Number of tokens of a prompt; for a text, an estimate."""
    return estimate_tokens(prompt) if isinstance(prompt, str) else len(prompt)


def estimate_tokens(text: str) -> int:
    """About how many tokens a text has: what it counts for before it is tokenised. At least one."""
    num_bytes = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
    return num_bytes // _BYTES_PER_TOKEN + 1
