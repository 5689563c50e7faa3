"""Random texts of a grammar tree: what a model that knows nothing would say under it."""

from __future__ import annotations

import random

from bough.grammar.rules import Alt, Chars, Grammar, LiteralText, Node, Ref, Repeat, Seq, walk

_PLAIN = range(32, 127)


class Sampler:
    """Draws texts. Where a rule leads back to itself, ways that end soon become more and more likely."""

    def __init__(self, grammar: Grammar, rng: random.Random) -> None:
        self._rules = grammar.rules
        self._root = grammar.root
        self._rng = rng
        self._height = self._heights()

    def text(self) -> str:
        return self._draw(Ref(self._root), 0)

    def _heights(self) -> dict[str, int]:
        """Fewest nested rules until a rule can end."""
        heights: dict[str, int] = {}
        while len(heights) < len(self._rules):
            before = len(heights)
            for name, rule in self._rules.items():
                if name not in heights and self._least(rule, heights) is not None:
                    heights[name] = 1 + (self._least(rule, heights) or 0)
            assert len(heights) > before, "a rule never ends"
        return heights

    def _least(self, node: Node, heights: dict[str, int]) -> int | None:
        match node:
            case Ref():
                return heights.get(node.name)
            case Seq():
                parts = [self._least(part, heights) for part in node.parts]
                return None if None in parts else max((part for part in parts if part is not None), default=0)
            case Alt():
                found = [least for part in node.parts if (least := self._least(part, heights)) is not None]
                return min(found) if found else None
            case Repeat():
                return 0 if node.low == 0 else self._least(node.node, heights)
            case _:
                return 0

    def _draw(self, node: Node, depth: int) -> str:
        rng = self._rng
        match node:
            case LiteralText():
                return node.value
            case Chars():
                low, high = rng.choice(node.ranges)
                seen = [point for point in _PLAIN if low <= point <= high]
                return chr(rng.choice(seen) if seen and rng.random() < 0.9 else rng.randint(low, high))
            case Ref():
                return self._draw(self._rules[node.name], depth + 1)
            case Seq():
                return "".join(self._draw(part, depth) for part in node.parts)
            case Alt():
                parts = list(node.parts)
                if depth > 40 and any(isinstance(each, Ref) for each in walk(node)):
                    least = min(self._least(part, self._height) or 0 for part in parts)
                    parts = [part for part in parts if (self._least(part, self._height) or 0) == least]
                return self._draw(rng.choice(parts), depth)
            case Repeat():
                most = node.low if depth > 40 else min(node.low + rng.choice((0, 1, 2, 9)), node.high or 1000)
                times = rng.randint(node.low, most) if rng.random() < 0.8 else most
                return "".join(self._draw(node.node, depth) for _ in range(times))
