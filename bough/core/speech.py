"""The rules that Whisper's answers keep to, as they cross from an API process to the engine with a request."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import msgspec
from msgspec import Struct

SPEECH_RULES = "speech-rules"
"""Name of the logit processor that applies them."""
_PARAM = "rules"


class SpeechRules(Struct, frozen=True, kw_only=True):
    """Which tokens may come next in a transcript."""

    end: int
    """Ends a transcript. Ids of text are below it."""
    first_timestamp: int
    """Of 0.00 s; all ids from here on are timestamps. The one before it says that there are none."""
    timestamps: bool
    """Whether the transcript has timestamps: it begins with one, they come in pairs, and none is before another."""
    most_initial: int = -1
    """The first one at most, in steps of timestamps; -1: any."""
    suppress: tuple[int, ...] = ()
    """Never come."""
    suppress_first: tuple[int, ...] = ()
    """Don't come first."""

    def params(self) -> dict[str, bool | int | float | str]:
        """As `SamplingParams.custom_params`."""
        return {_PARAM: msgspec.json.encode(self).decode()}

    @staticmethod
    def of(params: Mapping[str, bool | int | float | str]) -> SpeechRules:
        """Raises KeyError or `msgspec.ValidationError` for params of something else."""
        return _parsed(str(params[_PARAM]))


@lru_cache(maxsize=64)
def _parsed(text: str) -> SpeechRules:
    return msgspec.json.decode(text, type=SpeechRules)
