"""What BERT-like encoders have beside what decoders have: learned positions and segments."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFacts:
    """The ends of a BERT-like encoder."""

    num_positions: int
    """Rows of the position table."""
    first_position: int
    """Row of the position table for the first token of a text (RoBERTa counts from its padding id)."""
    num_segments: int
    """Rows of the segment table ("token types")."""

    @property
    def max_context(self) -> int:
        return self.num_positions - self.first_position
