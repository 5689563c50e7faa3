"""The seam between constrained decoding and the scheduler: who compiles a grammar, and who follows it token by token.

`bough.grammar` implements these; the scheduler knows nothing else of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from bough.core.sampling import GrammarSpec
from bough.core.step import I32


class Matcher(Protocol):
    """Where one request stands in its grammar."""

    def accept(self, token: int) -> bool:
        """Advances by one output token. False: the grammar does not allow it, and the state did not change."""
        ...

    def fill_mask(self, out: I32) -> None:
        """Overwrites one row of a vocabulary bit mask with the tokens allowed next."""
        ...

    @property
    def is_open(self) -> bool:
        """True where the choice is known to be wide: nothing is forced or respelled here, and nothing ends."""
        ...

    def is_terminated(self) -> bool:
        """True when nothing more can follow, not even an end token."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last accepted tokens."""
        ...

    def forced(self) -> list[int]:
        """The tokens that must come next whatever the model says; empty where it has a choice. Changes nothing."""
        ...

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Would `is_terminated` be true after these tokens, which are forced? Changes nothing. Raises `ValueError` if they
        are not accepted."""
        ...

    def respell(self) -> int | None:
        """The token that should stand in place of the last one, which the model chose: what must follow shows that the
        tokenizer would have cut the same text differently. None: it stands. Changes nothing."""
        ...


class Compiled(Struct, frozen=True):
    """A request's grammar is ready."""

    id: int
    matcher: Matcher


class CompileFailed(Struct, frozen=True):
    """A request's grammar can't be used: a sentence for the client."""

    id: int
    message: str
    status: int = 400


class GrammarQueue(Protocol):
    """Compiles grammars beside the loop. Requests wait in it until theirs is ready."""

    def submit(self, request_id: int, spec: GrammarSpec) -> None:
        """Asks for a matcher. Never waits; the answer comes from `poll`."""
        ...

    def poll(self) -> list[Compiled | CompileFailed]:
        """What became ready since the last call. Never waits."""
        ...

    def cancel(self, request_id: int) -> None:
        """The request is gone; no answer is wanted."""
        ...

    def look(self, matchers: Sequence[Matcher]) -> None:
        """The masks of all of these are wanted next: a chance to work them out together."""
        ...
