"""Choosing among given texts by their likelihood."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bough.lang.errors import LangError

TokenLogprob = Sequence[Any]
"""`[logprob, token_id, text]`, as the native API reports it; the logprob of a text's very first token is None."""


@dataclass(slots=True)
class ChoicesDecision:
    """The chosen text and what the decision was based on."""

    decision: str
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceScores:
    """Scores of each choice; the four lists are parallel to `choices`."""

    choices: Sequence[str]
    normalized_prompt_logprobs: list[float]
    input_token_logprobs: list[list[TokenLogprob]]
    output_token_logprobs: list[list[TokenLogprob]]
    unconditional_token_logprobs: list[list[TokenLogprob]] | None = None


class ChoicesSamplingMethod(ABC):
    """Subclass it for your own rule; pass an instance as `choices_method`."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """True when the choices must also be scored without the prompt (one more pass)."""
        return False

    @abstractmethod
    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[TokenLogprob]],
        output_token_logprobs: list[list[TokenLogprob]],
        unconditional_token_logprobs: list[list[TokenLogprob]] | None = None,
    ) -> ChoicesDecision:
        """Choose. The logprob lists have one entry per choice, with one `[logprob, token_id, text]` per token."""


class TokenLengthNormalized(ChoicesSamplingMethod):
    """The choice whose tokens have the highest mean logprob."""

    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[TokenLogprob]],
        output_token_logprobs: list[list[TokenLogprob]],
        unconditional_token_logprobs: list[list[TokenLogprob]] | None = None,
    ) -> ChoicesDecision:
        return ChoicesDecision(
            choices[_argmax(normalized_prompt_logprobs)],
            {
                "normalized_prompt_logprobs": normalized_prompt_logprobs,
                "input_token_logprobs": input_token_logprobs,
                "output_token_logprobs": output_token_logprobs,
            },
        )


class GreedyTokenSelection(ChoicesSamplingMethod):
    """Token by token, keep the choices that continue with the best next token.

    A choice that has run out of tokens competes with the mean of its own logprobs. Choices that share a token stay
    together even if the server computed that token twice with slightly different results.
    """

    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[TokenLogprob]],
        output_token_logprobs: list[list[TokenLogprob]],
        unconditional_token_logprobs: list[list[TokenLogprob]] | None = None,
    ) -> ChoicesDecision:
        rows = [[(float(t[0]), t[1]) for t in tokens if t[0] is not None] for tokens in input_token_logprobs]
        num_steps = max((len(row) for row in rows), default=0)
        padded = [row + [(mean_logprob(tokens), None)] * (num_steps - len(row))
                  for row, tokens in zip(rows, input_token_logprobs, strict=True)]  # fmt: skip
        remaining = list(range(len(choices)))
        for step in range(num_steps):
            best = max(remaining, key=lambda i: padded[i][step][0])
            best_logprob, best_token = padded[best][step]
            remaining = [
                i
                for i in remaining
                if padded[i][step][0] >= best_logprob or (best_token is not None and padded[i][step][1] == best_token)
            ]
            if len(remaining) == 1:
                break
        return ChoicesDecision(
            choices[remaining[0]],
            {
                "normalized_prompt_logprobs": normalized_prompt_logprobs,
                "input_token_logprobs": input_token_logprobs,
                "output_token_logprobs": output_token_logprobs,
                "greedy_logprob_matrix": [[logprob for logprob, _ in row] for row in padded],
            },
        )


class UnconditionalLikelihoodNormalized(ChoicesSamplingMethod):
    """The choice that the prompt makes more likely by the most: mean of conditional minus unconditional logprobs."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return True

    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[TokenLogprob]],
        output_token_logprobs: list[list[TokenLogprob]],
        unconditional_token_logprobs: list[list[TokenLogprob]] | None = None,
    ) -> ChoicesDecision:
        if unconditional_token_logprobs is None:
            raise LangError(
                what="unconditional_likelihood_normalized got no unconditional logprobs",
                why="it compares each choice with and without the prompt",
                fix="use a backend that scores texts (RuntimeEndpoint, Runtime, Engine), or another choices_method",
            )
        scores = [
            _mean([(with_prompt[0] or 0.0) - (alone[0] or 0.0) for with_prompt, alone in zip(given, bare, strict=True)])
            for given, bare in zip(input_token_logprobs, unconditional_token_logprobs, strict=True)
        ]
        return ChoicesDecision(
            choices[_argmax(scores)],
            {
                "normalized_prompt_logprobs": normalized_prompt_logprobs,
                "input_token_logprobs": input_token_logprobs,
                "output_token_logprobs": output_token_logprobs,
                "unconditional_token_logprobs": unconditional_token_logprobs,
                "normalized_unconditional_prompt_logprobs": scores,
            },
        )


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()


def decide(method: ChoicesSamplingMethod, temperature: float, scores: ChoiceScores) -> ChoicesDecision:
    """Apply the method; above temperature 0 draw a choice from the softmax of the mean logprobs instead."""
    decision = method(
        choices=scores.choices,
        normalized_prompt_logprobs=scores.normalized_prompt_logprobs,
        input_token_logprobs=scores.input_token_logprobs,
        output_token_logprobs=scores.output_token_logprobs,
        unconditional_token_logprobs=scores.unconditional_token_logprobs,
    )
    if temperature <= 1e-5:
        return decision
    if not isinstance(method, TokenLengthNormalized):
        raise LangError(
            what=f"select with {type(method).__name__} got temperature={temperature}",
            why="only token_length_normalized defines a distribution to draw from",
            fix="use temperature=0.0, or choices_method=token_length_normalized",
        )
    top = max(scores.normalized_prompt_logprobs)
    weights = [math.exp((score - top) / temperature) for score in scores.normalized_prompt_logprobs]
    return ChoicesDecision(random.choices(list(scores.choices), weights)[0], decision.meta_info)


def mean_logprob(tokens: Sequence[TokenLogprob]) -> float:
    """Mean over the tokens whose logprob is known; 0.0 when none is (a text of one first token)."""
    return _mean([float(token[0]) for token in tokens if token[0] is not None])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
