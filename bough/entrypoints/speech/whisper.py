"""Whisper's algorithm: consecutive windows of 30 s, each beginning where the last segment of the previous one ended."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import AsyncGenerator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from bough.config.speech import LANGUAGES, OTHER_NAMES, SpeechFacts
from bough.core.errors import InvalidRequest
from bough.core.messages import Delta, LogprobSpec, unpack_ids
from bough.core.sampling import SamplingParams
from bough.core.speech import SPEECH_RULES
from bough.engine_client import Request
from bough.entrypoints.service import Service
from bough.entrypoints.speech.forms import ScoredSegment
from bough.entrypoints.speech.segments import SpeechSegment, cut_window, whole_window
from bough.multimodal.desk import MediaInput
from bough.multimodal.processor import SoundRules
from bough.multimodal.sound import wav_bytes
from bough.tokenizer import Tokenizer

# The numbers below are those of Whisper's own transcribing.
FALLBACK = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures that are tried one after the other, unless a client names others."""
_LEAST_LOGPROB = -1.0
"""Mean over a window's tokens; if it is lower, the next temperature is tried."""
_MOST_COMPRESSED = 2.4
"""Factor by which zlib compresses a text; if it is higher, the text repeats itself and the next temperature is tried."""
_NO_SPEECH = 0.6
"""Probability from which on a window that is also unlikely counts as silence."""
_FORGETS_ABOVE = 0.5
"""Temperature from which on a window's text is no prompt for the next one."""


class SpeechTask(Struct, frozen=True, kw_only=True):
    """A client's transcription request."""

    task: str
    """"transcribe", or "translate" to English."""
    language: str | None
    """Language code; None: it is detected."""
    prompt: tuple[int, ...]
    """Text before the sound, as tokens."""
    temperatures: tuple[float, ...]
    timestamps: bool
    """Whether segments are requested; audio longer than a window gets timestamps in any case."""
    like: Request
    """Other fields of its requests: caller, priority, deadline."""


class WindowDone(Struct, frozen=True, kw_only=True):
    """A window's segments."""

    segments: tuple[ScoredSegment, ...]
    language: str
    """Code."""


class _Answer(Struct, frozen=True, kw_only=True):
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    text: str


class WhisperRun:
    """The transcription of one audio file."""

    def __init__(
        self, service: Service, facts: SpeechFacts, tokenizer: Tokenizer, rules: SoundRules, task: SpeechTask
    ) -> None:
        self._service, self._facts, self._tokenizer, self._rules, self._task = service, facts, tokenizer, rules, task
        self._language = task.language or ("" if facts.languages else "en")
        self._before = task.prompt
        """Tokens of the text before the window."""

    async def windows(self, samples: npt.NDArray[np.float32]) -> AsyncGenerator[WindowDone | str, None]:
        """The windows as they are done; where the client streams, texts of each come before it. Closing it early gives up
        what is under way. Raises `BoughError`."""
        rate, size = self._rules.rate, int(self._rules.seconds * self._rules.rate)
        timestamps = self._task.timestamps or len(samples) > size
        at = 0
        while at < len(samples):
            window = samples[at : at + size]
            file = await asyncio.to_thread(wav_bytes, window, rate)
            media = (MediaInput(kind="audio", source=file, param="file"),)
            no_speech = await self._look(media)
            begin_s, length_s = at / rate, len(window) / rate
            answer = None
            async for news in self._decoded(media, timestamps):
                if isinstance(news, str):
                    yield news
                else:
                    answer = news
            assert answer is not None, "the last news is the answer"
            is_silent = no_speech > _NO_SPEECH and answer.avg_logprob < _LEAST_LOGPROB
            parsed = cut_window if timestamps else whole_window
            cut = parsed(answer.tokens, self._facts, self._tokenizer.decode, begin_s=begin_s, length_s=length_s)
            found = () if is_silent and not self._task.like.stream else cut.segments
            self._before = _tail(self._before, found, self._facts) if answer.temperature <= _FORGETS_ABOVE else ()
            scored = tuple(
                ScoredSegment(
                    segment=each, seek_s=begin_s, temperature=answer.temperature, avg_logprob=answer.avg_logprob,
                    compression_ratio=answer.compression_ratio, no_speech_prob=no_speech,
                )
                for each in found
            )  # fmt: skip
            yield WindowDone(segments=scored, language=self._language)
            at += max(1, size if is_silent else round(cut.advance_s * rate))

    async def _look(self, media: tuple[MediaInput, ...]) -> float:
        """The probability of silence. Also detects the language, if it is not known."""
        facts = self._facts
        asks = bool(facts.languages) and not self._language
        sampling = SamplingParams(
            temperature=0.0, max_new_tokens=1, ignore_eos=True,
            allowed_token_ids=tuple(facts.languages.values()) if asks else None,
        )  # fmt: skip
        request = replace(
            self._task.like, prompt=[*self._previous(), facts.start], sampling=sampling, media=media, stream=False,
            want_text=False, logprobs=LogprobSpec(token_ids=(facts.no_speech,)),
        )  # fmt: skip
        [(_, _, delta)] = await self._service.collect([request])
        if asks:
            codes = {each: code for code, each in facts.languages.items()}
            self._language = codes[int(unpack_ids(delta.tokens)[0])]
        scores = delta.logprobs
        return math.exp(scores.chosen[0][0][1]) if scores is not None and scores.chosen and scores.chosen[0] else 0.0

    async def _decoded(self, media: tuple[MediaInput, ...], timestamps: bool) -> AsyncGenerator[str | _Answer, None]:
        """The window's text: at the first temperature that gives a likely one, or at the last. A stream shows the first."""
        answer = None
        for temperature in self._task.temperatures[: 1 if self._task.like.stream else None]:
            request = self._request(media, temperature, timestamps)
            if request.stream:
                gathered: list[Delta] = []
                async for _, _, delta in self._service.run([request]):
                    gathered.append(delta)
                    text = _shown(delta, self._facts, self._tokenizer, gathered)
                    if text:
                        yield text
                answer = self._scored(gathered, temperature)
            else:
                [(_, _, delta)] = await self._service.collect([request])
                answer = self._scored([delta], temperature)
            if answer.avg_logprob >= _LEAST_LOGPROB and answer.compression_ratio <= _MOST_COMPRESSED:
                break
        assert answer is not None, "there is a temperature"
        yield answer

    def _request(self, media: tuple[MediaInput, ...], temperature: float, timestamps: bool) -> Request:
        facts = self._facts
        marks = [facts.start]
        if facts.languages:
            marks += [facts.languages[self._language], facts.tasks[self._task.task]]
        if not timestamps:
            marks.append(facts.no_timestamps)
        prompt = [*self._previous(), *marks]
        sampling = SamplingParams(
            temperature=temperature,
            max_new_tokens=max(1, min(facts.context // 2, facts.context - len(prompt))),
            logit_processor=SPEECH_RULES,
            custom_params=facts.rules(timestamps=timestamps).params(),
        )
        return replace(
            self._task.like, prompt=prompt, sampling=sampling, media=media, want_text=False, logprobs=LogprobSpec(),
            room="at_most",
        )  # fmt: skip

    def _previous(self) -> list[int]:
        """The prompt before the transcript's special tokens: previous text, up to the length that Whisper was trained
        with."""
        facts = self._facts
        most = facts.context // 2 - 1
        return [facts.previous, *self._before[-most:]] if self._before and facts.previous is not None else []

    def _scored(self, deltas: Sequence[Delta], temperature: float) -> _Answer:
        tokens = tuple(int(token) for delta in deltas for token in unpack_ids(delta.tokens))
        scores = [each for delta in deltas if delta.logprobs is not None for each in delta.logprobs.logprobs]
        known = [each for each in scores if each is not None]
        text = self._tokenizer.decode([token for token in tokens if token < self._facts.end]).strip()
        raw = text.encode()
        return _Answer(
            tokens=tokens,
            temperature=temperature,
            avg_logprob=sum(known) / (len(known) + 1),
            compression_ratio=len(raw) / len(zlib.compress(raw)) if raw else 0.0,
            text=text,
        )


def _shown(delta: Delta, facts: SpeechFacts, tokenizer: Tokenizer, gathered: Sequence[Delta]) -> str:
    """The text that a delta adds to the window. Incomplete characters are held back."""
    ids = [int(token) for each in gathered for token in unpack_ids(each.tokens) if token < facts.end]
    new = sum(1 for token in unpack_ids(delta.tokens) if token < facts.end)
    before = tokenizer.decode(ids[: len(ids) - new]).removesuffix("\ufffd") if new < len(ids) else ""
    now = tokenizer.decode(ids)
    if delta.end is None:
        now = now.removesuffix("\ufffd")
    return now[len(before) :] if len(now) > len(before) else ""


def _tail(before: tuple[int, ...], segments: Sequence[SpeechSegment], facts: SpeechFacts) -> tuple[int, ...]:
    """The last tokens of the transcript so far, with timestamps."""
    said = [token for each in segments for token in each.tokens]
    return (*before, *said)[-facts.context :]


def language_code(given: str, facts: SpeechFacts) -> str:
    """The code of a language that a client names. Raises `InvalidRequest`."""
    wanted = given.strip().lower().replace("_", " ")
    by_name = {**{name: code for code, name in LANGUAGES.items()}, **OTHER_NAMES}
    code = wanted if wanted in LANGUAGES else by_name.get(wanted, wanted.split("-")[0])
    known = facts.languages or {"en": 0}
    if code not in known:
        raise InvalidRequest(
            what=f"language is {given[:40]!r}",
            why=f"the model knows {', '.join(sorted(known))}",
            fix="send a code of two letters, or leave it out",
            param="language",
        )
    return code
