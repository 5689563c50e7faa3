"""What BERT's relatives have at their ends beyond what decoders do: learned positions and segments."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFacts:
    """The ends of a BERT-like encoder."""

    num_positions: int
    """Rows of the position table..."""
    first_position: int
    """...and the one that a text's first token takes (RoBERTa counts from its padding id on)."""
    num_segments: int
    """Rows of the segment table ("token types")."""

    @property
    def max_context(self) -> int:
        return self.num_positions - self.first_position
