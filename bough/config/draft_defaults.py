"""Default numbers of drafts, by algorithm and target model, each with the measurement behind it.

With `--speculative-adaptive`, the default, these are upper bounds: drafts beyond those that pay are not made. A larger bound
costs memory for graphs and logits. `docs/speculative_decoding.md` shows this table.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from bough.config.concerns import SpeculativeAlgorithm


class DraftDefault(NamedTuple):
    """One entry of the table; the first that matches is used."""

    algorithms: frozenset[SpeculativeAlgorithm]
    architectures: tuple[str, ...]
    """Prefixes of names of target architectures; empty: any."""
    steps: int
    """Number of drafts in a chain (depth of a tree)."""
    topk: int
    """Nodes that are expanded per level of a tree; 1: a chain."""
    tokens: int
    """Tokens per row that a step verifies: the drafts and the newest token."""
    rests_on: str


_HEADS: Final[frozenset[SpeculativeAlgorithm]] = frozenset({"EAGLE", "EAGLE3", "NEXTN"})
DRAFT_DEFAULTS: Final = (
    DraftDefault(
        frozenset({"NGRAM"}), (), 11, 1, 12,
        "SGLang's number. Six prompts that ask for rewriting, default model on a CPU: 3.7 tokens per step, 1.6 times "
        "the tokens per second (`benchmarks/results/speculation_cpu.md`)",
    ),
    DraftDefault(
        frozenset({"SUFFIX"}), (), 16, 1, 17,
        "the same prompts, two runs: 1.64 and 1.53 times the tokens per second at 3.9 and 3.5 tokens per step; with 9 draft "
        "tokens 1.59 and 1.46, at 3.4 and 3.3 (`benchmarks/results/speculation_cpu.md`)",
    ),
    DraftDefault(
        _HEADS | {"STANDALONE"}, (), 3, 1, 4,
        "one H200, Llama-3.1-8B's shapes, an EAGLE-3 head, simulated acceptance of 0.75, 0.65, 0.55: 1.99, 1.71, 1.59 times "
        "the tokens per second at batch 1, 16, 64. By the measured costs, a fourth draft with 0.45 would take 2 % away at "
        "batch 1 (`benchmarks/h200/speculation.md`)",
    ),
)  # fmt: skip
"""Checkpoints with a fixed number of drafts (Medusa's heads, DFlash's blocks, several NextN layers) make all of them,
regardless of this table."""


def draft_default(algorithm: SpeculativeAlgorithm, architecture: str = "") -> DraftDefault | None:
    """The entry for an algorithm with a target of this architecture; None: the draft checkpoint decides."""
    for entry in DRAFT_DEFAULTS:
        if algorithm in entry.algorithms and (not entry.architectures or architecture.startswith(entry.architectures)):
            return entry
    return None
