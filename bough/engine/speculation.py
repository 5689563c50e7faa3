"""Wires speculative decoding into an engine: the drafter that its configuration asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bough.config.concerns import Config, SpeculativeConfig
from bough.config.speculation import drafts_of_row
from bough.core.messages import Corpus
from bough.scheduler.limits import Limits
from bough.speculative.corpora import Corpora
from bough.speculative.guesses import Guesser
from bough.speculative.host import HostDrafter
from bough.speculative.ngram import NgramGuesser
from bough.speculative.suffix import SuffixGuesser


def drafter_of(config: Config, limits: Limits) -> HostDrafter | None:
    """What makes drafts for the engine's rows; None: nothing does."""
    asked = config.speculative
    if asked.speculative_algorithm == "none":
        return None
    guesser: Guesser
    if asked.speculative_algorithm == "SUFFIX":
        guesser = SuffixGuesser(
            most=drafts_of_row(asked),
            most_match=asked.speculative_suffix_max_tree_depth,
            factor=asked.speculative_suffix_max_spec_factor,
            least_likely=asked.speculative_suffix_min_token_prob,
            capacity_tokens=asked.speculative_ngram_capacity,
        )
    else:
        guesser = _ngram(asked)
    return HostDrafter(
        guesser,
        limits.num_slots,
        overlaps=config.scheduler.overlap_schedule,
        adaptive=asked.speculative_adaptive,
    )


def _ngram(asked: SpeculativeConfig) -> NgramGuesser:
    return NgramGuesser(
        most=drafts_of_row(asked),
        corpora=Corpora(asked.speculative_ngram_external_corpus_max_tokens),
        least_match=asked.speculative_ngram_min_match_window_size,
        most_match=asked.speculative_ngram_max_match_window_size,
        capacity_tokens=asked.speculative_ngram_capacity,
    )


def corpora_of(drafter: HostDrafter | None) -> Callable[[Corpus], dict[str, Any]] | None:
    """What takes corpora to draft from; None: nothing does."""
    guesser = None if drafter is None else drafter.guesser
    return guesser.corpora.handle if isinstance(guesser, NgramGuesser) else None
