"""Places for snapshots of recurrent states, and the prefix that each belongs to. A state covers all tokens of a prefix
together, so a row can continue from a prefix only where a snapshot was taken: after the last token of a node. There are
few places. The least recently used snapshot is replaced first; before that, snapshots of nodes with a single child,
because requests seldom branch there again.
"""

from __future__ import annotations

from bough.cache.nodes import Node


class Snapshots:
    """Owns the places 1 .. `count`: free, of a node, or lent to a row."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.num_lent = 0
        """Places lent to rows, which no match finds."""
        self._free = list(range(count, 0, -1))
        self._owner: dict[int, Node] = {}
        self._step: dict[int, int] = {}
        """By place of a node: the step that writes it."""

    @property
    def num_kept(self) -> int:
        """Places of nodes."""
        return len(self._owner)

    @property
    def balanced(self) -> bool:
        return len(self._free) + self.num_lent + self.num_kept == self.count

    def lend(self) -> tuple[int, Node | None]:
        """(a place for a row, the node that loses it); 0: rows have them all."""
        if self._free:
            self.num_lent += 1
            return self._free.pop(), None
        if not self._owner:
            return 0, None
        number = min(self._owner, key=lambda each: _worth(self._owner[each]))
        node = self._owner[number]
        self.drop(node)
        self.num_lent += 1
        return self._free.pop(), node

    def give_back(self, number: int) -> None:
        """A row does not need its place any more."""
        self.num_lent -= 1
        self._free.append(number)

    def keep(self, node: Node, number: int, step: int) -> bool:
        """Moves a row's place to the node. False: the node already has one, and the row's place becomes free."""
        if node.snapshot or node.detached or node.parent is None:
            self.give_back(number)
            return False
        self.num_lent -= 1
        node.snapshot = number
        self._owner[number] = node
        self._step[number] = step
        return True

    def step_of(self, node: Node) -> int:
        """The step that writes a node's snapshot."""
        return self._step[node.snapshot]

    def drop(self, node: Node) -> None:
        """Frees a node's place, if it has one."""
        if node.snapshot:
            del self._owner[node.snapshot]
            del self._step[node.snapshot]
            self._free.append(node.snapshot)
            node.snapshot = 0

    def drop_since(self, step: int) -> bool:
        """Frees the snapshots that this step and later ones write. Returns whether there were any."""
        lost = [self._owner[number] for number, wrote in self._step.items() if wrote >= step]
        for node in lost:
            self.drop(node)
        return bool(lost)

    def forget(self) -> None:
        """Frees everything: no row is alive, and the tree is empty."""
        self.num_lent = 0
        self._free = list(range(self.count, 0, -1))
        self._owner.clear()
        self._step.clear()


def _worth(node: Node) -> tuple[bool, int]:
    return len(node.children) != 1, node.last_used
