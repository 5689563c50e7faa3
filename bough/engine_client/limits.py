"""Checks prompts and lengths against the engine's limits, before anything is sent."""

from __future__ import annotations

import contextlib
import logging
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from bough.core import bounds
from bough.core.errors import InvalidRequest, PromptTooLong, no_such_token, overflow
from bough.core.messages import Ids
from bough.core.sampling import SamplingParams
from bough.engine_client.request import Request
from bough.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_LONG_TEXT_CHARS = 65_536


class RequestLimits:
    """The context and the vocabulary, and what follows from them for requests."""

    def __init__(
        self, context_length: int, vocab_size: int, tokenizer: Tokenizer | None, *, truncate: bool = False
    ) -> None:
        """`truncate`: prompts and answers that are too long are cut, not refused (--allow-auto-truncate)."""
        self._context_length = context_length
        self._truncate = truncate
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._longest_token = 0

    def taken_of(self, text: str) -> str:
        """The part of a text that can fill the context. Raises if texts are not accepted at all, or if it is too long
        for any tokenization."""
        if self._tokenizer is None:
            raise InvalidRequest(
                what="the prompt is text",
                why="the server has no tokenizer (--skip-tokenizer-init)",
                fix="send token ids (input_ids)",
                param="prompt",
            )
        if len(text) > _LONG_TEXT_CHARS:
            if not self._longest_token:
                self._longest_token = max(map(len, self._tokenizer.token_bytes() or [b"x" * 256]))
            least = len(text) // self._longest_token
            if least >= self._context_length and self._truncate:
                return text[: (self._context_length + 1) * self._longest_token]
            if least >= self._context_length:
                raise self._too_long(f"at least {least}")
        return text

    def cut(self, prompt: Ids) -> Ids:
        """The prompt, truncated (if that is allowed) so that at least one token of an answer fits."""
        most = self._context_length - 1
        if not self._truncate or len(prompt) <= most:
            return prompt
        _log.warning("a prompt was cut", extra={"tokens": len(prompt), "kept": most})
        return prompt[:most]

    def check_uncut(self, prompt: Ids) -> None:
        """Raises `PromptTooLong` for a prompt with media that leaves no room for an answer: it is never cut."""
        if self._truncate and len(prompt) > self._context_length - 1:
            raise self._too_long(str(len(prompt)))

    def ids_of(self, prompt: Sequence[int] | Ids) -> Ids:
        """A prompt's ids as an array of its own: who gave one may use it again. Raises if they are no ids of this model."""
        ids = prompt if isinstance(prompt, np.ndarray) else _as_array(prompt)
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise InvalidRequest(
                what="the prompt is no list of token ids",
                why="ids are integers",
                fix="send text, or a list of integers",
                param="input_ids",
            )
        if len(ids) and not (ids.max() < self._vocab_size and (ids.dtype.kind == "u" or ids.min() >= 0)):
            bad = ids[(ids < 0) | (ids >= self._vocab_size)][0]
            raise no_such_token(f"the prompt has token id {bad}", self._vocab_size, param="input_ids")
        return ids.astype(np.int32) if ids is prompt else ids.view(np.int32)

    def fitted(self, request: Request, prompt: Ids) -> SamplingParams:
        """The request's sampling parameters, with a length that fits. Raises if the request can't be served.

        Stop ids that the vocabulary does not have are left out: no token could ever match them.
        """
        sampling = request.sampling
        stops = tuple(each for each in sampling.stop_token_ids if 0 <= each < self._vocab_size)
        if len(stops) < len(sampling.stop_token_ids):
            sampling = msgspec.structs.replace(sampling, stop_token_ids=stops)
        self._check(request, sampling)
        if len(prompt) == 0:
            raise InvalidRequest(what="the prompt is empty", fix="send at least one token", param="prompt")
        room = self._context_length - len(prompt)
        if request.pool:
            if room < 0:
                raise self._too_long(str(len(prompt)))
            return sampling
        wanted = sampling.max_new_tokens
        if room < min(wanted, 1):
            raise self._too_long(str(len(prompt)))
        if request.room == "exact" and wanted > room and not self._truncate:
            raise overflow(
                self._context_length,
                f"the prompt's {len(prompt)} tokens and max_new_tokens of {wanted} make {len(prompt) + wanted}",
                fix=f"ask for at most {room} new tokens, or start the server with a larger --context-length",
                param="max_new_tokens",
            )
        fits = room if request.room == "fill" else min(wanted, room)
        if fits == wanted:
            return sampling
        least = min(sampling.min_new_tokens, fits)
        return msgspec.structs.replace(sampling, max_new_tokens=fits, min_new_tokens=least)

    def _check(self, request: Request, sampling: SamplingParams) -> None:
        sampling.check_ids(self._vocab_size)
        if request.logprobs is not None:
            request.logprobs.check(self._vocab_size)
        bounds.count("rid_chars", request.rid, "rid")
        if request.every < 1:
            raise InvalidRequest(what="stream_interval is less than 1", fix="send 1 or more", param="stream_interval")
        if self._tokenizer is None and (sampling.stop or sampling.stop_regex):
            raise InvalidRequest(
                what="stop strings were given",
                why="the server has no tokenizer (--skip-tokenizer-init)",
                fix="use stop_token_ids",
                param="stop",
            )

    def _too_long(self, tokens: str) -> PromptTooLong:
        return overflow(
            self._context_length,
            f"the prompt has {tokens} tokens, at most {self._context_length - 1} fit",
            fix="shorten the prompt, or start the server with a larger --context-length",
            param="prompt",
        )


def _as_array(ids: Sequence[int]) -> npt.NDArray[Any]:
    """The ids as an array; an empty float array if one is not an integer. `array` refuses those, where numpy would cast
    them."""
    try:
        numbers = np.frombuffer(array("I", ids), np.uint32)  # three times as fast as any signed kind
        if not len(numbers) or numbers.min() > 1 or bool not in map(type, ids):  # true would be 1
            return numbers
    except TypeError:
        pass
    except OverflowError:
        with contextlib.suppress(TypeError, OverflowError):
            return np.frombuffer(array("q", ids), np.int64)
    return np.empty(1, object)
