"""How the next token of a request is chosen: plain, validated values."""

from __future__ import annotations

from itertools import chain
from typing import Literal

from msgspec import Struct

from bough.core import bounds
from bough.core.errors import InvalidRequest

GrammarKind = Literal["json_schema", "json", "regex", "ebnf", "structural_tag", "choice"]

NO_TOP_K = -1
"""`top_k` value that keeps the whole vocabulary."""


class GrammarSpec(Struct, frozen=True, kw_only=True):
    """A constraint on the output, as its source text. `source` is canonical, so that equal specs share one compilation."""

    kind: GrammarKind
    source: str
    after_reasoning: bool = False
    """The constraint starts only after the reasoning section ends (decided by token state, not by text)."""
    param: str = ""
    """The client's field that it came from, for errors; empty: the native one of its kind."""


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request.

    What a client sends is checked once: ranges by `engine_client.sampling.parse_sampling`, which makes this, and token ids
    by the engine client, which knows the vocabulary.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = NO_TOP_K
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """A fixed seed makes the draws of this request reproducible, whatever else is in the batch."""
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear: already tokenised by the engine client."""
    grammar: GrammarSpec | None = None
    logit_processor: str | None = None
    """Name of a processor registered on the server."""
    custom_params: dict[str, bool | int | float | str] | None = None
    beam_width: int = 1

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def penalised(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    def check(self, vocab_size: int | None = None) -> None:
        """Raises `InvalidRequest` naming the first parameter outside its range; with `vocab_size` also for token ids."""
        for name, value, low, high in (
            ("max_new_tokens", self.max_new_tokens, 0, None),
            ("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens),
            ("temperature", self.temperature, 0.0, 100.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("n", self.n, 1, None),
            ("beam_width", self.beam_width, 1, None),
        ):
            if not (low <= value and (high is None or value <= high)):  # NaN is in no range
                limits = f"at least {low}" if high is None else f"between {low} and {high}"
                raise _bad(name, f"{value}", f"it must be {limits}")
        bounds.at_most("n", self.n, "n")
        bounds.at_most("beam_width", self.beam_width, "beam_width")
        if not 0.0 < self.top_p <= 1.0:
            raise _bad("top_p", f"{self.top_p}", "it must lie in (0, 1]")
        if self.top_k != NO_TOP_K and not 1 <= self.top_k < 2**31:
            raise _bad("top_k", "out of range", "it must be -1 (whole vocabulary), or from 1 to 2,147,483,647")
        if not 0.0 < self.repetition_penalty <= 2.0:
            raise _bad("repetition_penalty", f"{self.repetition_penalty}", "it must lie in (0, 2]")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise _bad("seed", f"{self.seed}", "it must fit in 64 bits")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise _bad("allowed_token_ids", "empty", "no token would be allowed")
        if vocab_size is not None:
            self.check_ids(vocab_size)

    def check_ids(self, vocab_size: int) -> None:
        """Raises `InvalidRequest` naming the first parameter with a token id that the vocabulary does not have."""
        for name, ids in (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words", tuple(chain.from_iterable(self.bad_words))),
        ):
            bad = [i for i in ids if not 0 <= i < vocab_size] if ids else []
            if bad:
                raise _bad(name, f"token id {bad[0]}", f"the vocabulary has ids 0 to {vocab_size - 1}")


def _bad(name: str, value: str, why: str) -> InvalidRequest:
    return InvalidRequest(what=f"{name} is {value}", why=why, fix=f"send a valid {name}", param=name)
