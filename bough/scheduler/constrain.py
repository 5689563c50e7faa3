"""Constraints of a row: a grammar, a grammar that applies after the reasoning, a budget of reasoning tokens."""

from __future__ import annotations

from collections.abc import Sequence

from bough.core.grammar import Matcher
from bough.core.step import I32


class Gate:
    """Decides which tokens one request may generate next. It sees every output token once, in order.

    While `thinking`, nothing is constrained, with two exceptions: after `budget` tokens the marker that ends the reasoning
    is forced, and where a matcher waits, the `ends` of an answer are forbidden, because an answer that ended within its
    reasoning would not fit the grammar. After the marker (or from the start, without reasoning) the matcher rules. The
    marker may have begun `before` the output, at the end of the prompt.
    """

    __slots__ = ("_before", "_budget", "_ended_at", "_ends", "_marker", "_matcher", "_seen", "_thinks", "thinking")

    def __init__(
        self,
        matcher: Matcher | None,
        *,
        marker: tuple[int, ...] = (),
        before: Sequence[int] = (),
        after_reasoning: bool = False,
        budget: int = -1,
        ends: Sequence[int] = (),
    ) -> None:
        self._matcher = matcher
        self._marker = list(marker)
        self._ends = [token for token in ends if token not in marker] if matcher is not None else []
        self._before = list(before[1 - len(marker) :]) if len(marker) > 1 else []
        self._budget = budget
        self._seen: list[int] = []
        self._thinks = bool(marker) and (after_reasoning if matcher is not None else budget >= 0)
        self._ended_at = 0
        self.thinking = self._thinks

    def may_constrain(self, num_output: int) -> bool:
        """Whether the sample after `num_output` tokens can need a mask. Called before the last tokens are known."""
        if self._matcher is not None:
            return True
        return self.thinking and num_output >= self._budget

    def accept(self, token: int) -> bool:
        """Records an output token. False: the grammar forbids it."""
        if not self.thinking and self._matcher is not None and not self._matcher.accept(token):
            return False
        self._seen.append(token)
        if self.thinking and self._last(len(self._marker)) == self._marker:
            self.thinking = False
            self._ended_at = len(self._seen)
        return True

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last accepted tokens."""
        if num_tokens <= 0:
            return
        left = len(self._seen) - num_tokens
        if not self.thinking and self._matcher is not None:
            self._matcher.rollback(len(self._seen) - max(left, self._ended_at))
        if self._thinks and not self.thinking and left < self._ended_at:
            self.thinking = True
            self._ended_at = 0
        del self._seen[left:]

    def forced(self) -> list[int]:
        """Tokens that must come next."""
        if self.thinking:
            if self._budget < 0 or len(self._seen) < self._budget:
                return []
            return self._marker[self._half_marker() :]
        return self._matcher.forced() if self._matcher is not None and not self._matcher.is_terminated() else []

    def ends_with(self, tokens: list[int]) -> bool:
        """Would nothing follow these forced tokens?"""
        if not self.thinking and self._matcher is not None:
            return self._matcher.ends_with(tokens)
        accepted = 0
        for token in tokens:
            if not self.accept(token):
                raise ValueError(f"it forces token {token} and does not accept it")
            accepted += 1
        ends = self.terminated
        self.rollback(accepted)
        return ends

    def respell(self) -> int | None:
        """The token that should replace the last token, if any."""
        if self.thinking or self._matcher is None or len(self._seen) <= self._ended_at:
            return None
        return self._matcher.respell()

    @property
    def ruler(self) -> Matcher | None:
        """The matcher, if it decides about the next token; None while reasoning, or if there is no grammar."""
        return self._matcher if not self.thinking else None

    @property
    def is_open(self) -> bool:
        """Whether the grammar allows many tokens here, as within a string: no token is forced or respelled, and the
        grammar can't be complete."""
        return not self.thinking and self._matcher is not None and self._matcher.is_open

    def fill_mask(self, out: I32) -> None:
        """Overwrites a mask row with what may be sampled next."""
        if self.thinking:
            forced = self.forced()
            if forced:
                allow_only(out, forced[0])
            else:
                out[:] = -1
                for token in self._ends:
                    forbid(out, token)
        elif self._matcher is not None and not self._matcher.is_terminated():
            self._matcher.fill_mask(out)
        else:
            out[:] = -1

    @property
    def terminated(self) -> bool:
        """The grammar is complete and nothing can follow."""
        return not self.thinking and self._matcher is not None and self._matcher.is_terminated()

    def _half_marker(self) -> int:
        """Number of tokens of the marker that the output already ends with."""
        for length in range(len(self._marker) - 1, 0, -1):
            if self._last(length) == self._marker[:length]:
                return length
        return 0

    def _last(self, num_tokens: int) -> list[int]:
        """The last tokens of prompt and output; fewer if there are not enough."""
        missing = num_tokens - len(self._seen)
        return self._before[-missing:] + self._seen if missing > 0 else self._seen[-num_tokens:]


def allow_only(out: I32, token: int) -> None:
    out[:] = 0
    out[token >> 5] = _bit(token)


def forbid(out: I32, token: int) -> None:
    out[token >> 5] &= ~_bit(token)


def _bit(token: int) -> int:
    """The token's bit in its word, as a signed number of 32 bits."""
    bit = 1 << (token & 31)
    return bit - (1 << 32) if bit >= 1 << 31 else bit
