"""Nodes of the radix tree, and results of lookups."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from bough.core.step import I32, I64, Pages

NO_KEY = np.empty(0, np.int64)


class WindowHold:
    """Locks and time of last use of a node's pages in the lines of one window."""

    __slots__ = ("last_used", "locks", "stamp")

    def __init__(self, locks: I32, last_used: int) -> None:
        self.locks = locks
        """Per column: rows whose window it is in."""
        self.last_used = last_used
        self.stamp = 0


class Node:
    """A span of tokens and its pages. `depth` counts the tokens from the root to the node's end."""

    __slots__ = (
        "born",
        "children",
        "depth",
        "detached",
        "held",
        "hits",
        "key",
        "last_used",
        "locks",
        "namespace",
        "pages",
        "parent",
        "priority",
        "snapshot",
        "stamp",
        "step",
    )

    def __init__(self, namespace: str, key: I64, pages: Pages, parent: Node | None, tick: int) -> None:
        self.namespace = namespace
        self.key = key
        self.pages = pages
        """[lines, columns]; 0 where a window's page is not there (any more)."""
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.depth: int = len(key) + (parent.depth if parent is not None else 0)
        self.locks = 0
        """Number of rows whose path contains this node."""
        self.held: tuple[WindowHold, ...] = ()
        """Per window of the model."""
        self.hits = 0
        self.born = tick
        self.last_used = tick
        self.priority = 0
        self.step = -1
        """The last step that computes pages of it."""
        self.stamp = 0
        self.snapshot = 0
        """Place of the recurrent state after its last token; 0: there is none."""
        self.detached = False

    @property
    def num_columns(self) -> int:
        columns: int = self.pages.shape[1]
        return columns

    def __repr__(self) -> str:
        return f"Node(depth={self.depth}, tokens={len(self.key)}, locks={self.locks}, detached={self.detached})"


class Match(Struct, frozen=True):
    """The longest prefix of a key that a row can continue from. `path` holds the nodes and how many columns of each it
    covers."""

    num_tokens: int
    path: tuple[tuple[Node, int], ...] = ()
    depth: int = 0
    """Depth of the last node when it was matched."""
    shape: int = -1
    """`RadixTree.shape` when it was matched."""
    in_tree: int = 0
    """Tokens that the tree has, in whole pages. In models with recurrent states it can be more than `num_tokens`,
    because a row can continue only where a state was saved."""
    tail_pages: I32 | None = None
    """If `num_tokens` goes beyond the last full page: per line, the page whose first tokens are those beyond it."""


class Extended(Struct, frozen=True):
    """A row's position in the tree after `extend`. `switched`: runs of columns that the tree had already, by offset
    into the tail."""

    node: Node
    switched: tuple[tuple[int, Pages], ...] = ()


NO_MATCH = Match(0)
