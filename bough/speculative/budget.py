"""What drafting may lose beside plain steps: a small part of the time that passes, and a little at the beginning.

The unit is the time of a plain step. A step with drafts that takes 1.4 of them and yields 1.1 tokens a row has lost 0.3; one
that yields 2 has gained 0.6. Whatever estimates say: where the budget is spent, nothing is drafted until time has filled it
up again, so over a run no more is lost than `share` of it and the beginning's `first`.
"""

from __future__ import annotations

MOST_SLOW = 2.0
"""A step that takes longer than this many of its kind do was held up by something else: no more is booked."""


class LossBudget:
    """`share`: of the time. `first`: what may be lost before any time has passed. `most`: what is kept of gains, so that a
    good hour does not pay for a bad one. `debt`: what is kept of losses beyond the budget: a step that takes far longer
    than expected is known from then on. `again`: what must be there before a spent budget is touched again."""

    def __init__(self, share: float, *, first: float, most: float, debt: float, again: float) -> None:
        self._share = share
        self._most = most
        self._debt = debt
        self._again = again
        self.left = first
        self.is_spent = False

    def pass_time(self, plain_steps: float) -> None:
        """So much time has passed in steps."""
        self._change(self._share * plain_steps)

    def lose(self, plain_steps: float) -> None:
        """Drafting has cost so much more than it has saved; below 0: it has saved more."""
        self._change(-plain_steps)

    def _change(self, by: float) -> None:
        self.left = min(max(self.left + by, -self._debt), self._most)
        if self.left < 0:
            self.is_spent = True
        elif self.left >= self._again:
            self.is_spent = False
