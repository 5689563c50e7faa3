"""Adapters that a checkpoint brings: low-rank additions (LoRA) to matrices of its layers, of which a request has one or
none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """One adapter. Requests name it by its place among a model's adapters, counted from 1."""

    name: str
    rank: int
    """Of what it adds to each matrix."""
    scale: float
    """Multiplies what it adds."""
