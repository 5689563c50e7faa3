"""What heads learn from: prompts, and what the model has answered to them. Needs no torch."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bough.core.errors import ConfigError
from bough.tokenizer import Tokenizer

Message = dict[str, Any]
Ask = Callable[[Sequence[list[int]], Sequence[float], int], list[list[int]]]
"""(prompts, temperatures that take turns, tokens at most) -> the model's answers, to the first prompts at least."""

_MARK: Final = "\uf8ffhere\uf8ff"
_QUESTIONS: Final = (
    "Summarise this text:",
    "What is this text about?",
    "Rewrite this text in simple words:",
    "Write three questions about this text, and answer them:",
    "Explain this to a beginner:",
    "Continue this text:",
)
_PIECE_CHARS: Final = (200, 1200)
_TEXT_ENDINGS: Final = frozenset({".md", ".txt", ".rst", ".py"})
_TURN_TOKENS: Final = 96
_ANSWER_FIELDS: Final = ("prompt_ids", "answer_ids")


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and an answer to it."""

    prompt: list[int]
    answer: list[int]

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.answer


class Prompts:
    """Makes prompts as the model's chat template has them; of models without one, texts as they are."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._draw = random.Random(seed)

    def of_messages(self, messages: Sequence[Message]) -> list[int]:
        template = self._tokenizer.chat_template
        if template is None:
            return self._tokenizer.encode("\n\n".join(str(each.get("content", "")) for each in messages))
        return self._tokenizer.encode(template.render(list(messages)), add_special_tokens=False)

    def of_file(self, path: Path) -> list[list[int]]:
        """One prompt per line: JSON (a text, or an object with `prompt`, `text` or `messages`), else the line itself.
        Raises `ConfigError`."""
        found = []
        for number, line in enumerate(_read(path).splitlines(), 1):
            if line.strip():
                found.append(self.of_messages(_messages(line, f"{path}, line {number}")))
        return found

    def of_texts(self, paths: Iterable[Path], count: int) -> list[list[int]]:
        """`count` questions about pieces of text files, or of those in directories. Raises `ConfigError`."""
        pieces = [piece for path in paths for file in _files(path) for piece in _pieces(_read(file))]
        if not pieces:
            raise ConfigError(what="there is no text to ask about", why="the files are empty", param="texts")
        self._draw.shuffle(pieces)
        asked = (f"{self._draw.choice(_QUESTIONS)}\n\n{piece}" for piece in pieces[:count])
        return [self.of_messages([{"role": "user", "content": each}]) for each in asked]

    def of_model(self, count: int, ask: Ask) -> list[list[int]]:
        """User turns that the model itself writes, where a user would."""
        template = self._tokenizer.chat_template
        if template is None:
            begin = self._tokenizer.encode("")
            if not begin and self._tokenizer.bos_id is not None:
                begin = [self._tokenizer.bos_id]
            if not begin:
                raise ConfigError(
                    what="the model can't write prompts of its own",
                    why="it has neither a chat template nor a token that begins a text",
                    fix="name prompts with --prompts or --texts",
                    param="sampled_prompts",
                )
            return [begin] * count
        before, _, after = template.render([{"role": "user", "content": _MARK}]).partition(_MARK)
        encode = self._tokenizer.encode
        begin, end = encode(before, add_special_tokens=False), encode(after, add_special_tokens=False)
        ends = {*self._tokenizer.eos_ids, *end[:1]}
        turns = ask([begin] * count, [1.0], _TURN_TOKENS)
        kept = ([*begin, *_until(turn, ends), *end] for turn in turns)
        return [prompt for prompt in kept if len(prompt) > len(begin) + len(end)]


def _until(ids: Sequence[int], ends: set[int]) -> list[int]:
    at = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return list(ids[:at])


def _messages(line: str, where: str) -> list[Message]:
    text = line.strip()
    if text[0] not in '{"':
        return [{"role": "user", "content": text}]
    try:
        given = json.loads(text)
    except ValueError as error:
        raise _bad_line(where, str(error)) from None
    if isinstance(given, dict):
        messages = given.get("messages")
        if isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages):
            return messages
        given = given.get("prompt", given.get("text"))
    if not isinstance(given, str) or not given:
        raise _bad_line(where, "it has neither `messages` nor a `prompt`")
    return [{"role": "user", "content": given}]


def _bad_line(where: str, why: str) -> ConfigError:
    fix = 'one prompt per line: {"prompt": "..."}, {"messages": [...]}, a JSON string, or plain text'
    return ConfigError(what=f"{where} is not a prompt", why=why, fix=fix, param="prompts")


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for file in sorted(path.rglob("*")):
        if file.suffix in _TEXT_ENDINGS and file.is_file():
            yield file


def _pieces(text: str) -> Iterator[str]:
    """Paragraphs, joined until they are long enough, cut where they are too long."""
    least, most = _PIECE_CHARS
    held = ""
    for paragraph in text.split("\n\n"):
        held = f"{held}\n\n{paragraph}" if held else paragraph
        if len(held) >= least:
            yield held[:most].strip()
            held = ""


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(what=f"{path} can't be read", why=str(error), fix="name a text file in UTF-8") from None


def answer_prompts(prompts: Sequence[list[int]], ask: Ask, temperatures: Sequence[float], most: int) -> list[Sample]:
    """Samples with an answer of two tokens at least: of less, nothing is to be learned."""
    answers = ask(prompts, temperatures, most)
    return [Sample(list(p), list(a)) for p, a in zip(prompts, answers, strict=False) if len(a) > 1]


def save_samples(samples: Iterable[Sample], path: Path) -> None:
    """One JSON object per line."""
    with path.open("w") as file:
        for sample in samples:
            file.write(json.dumps(dict(zip(_ANSWER_FIELDS, (sample.prompt, sample.answer), strict=True))) + "\n")


def load_samples(path: Path, vocab: int) -> list[Sample]:
    """What `save_samples` has written. Raises `ConfigError`, also for ids that the model does not have."""
    found = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        try:
            given = json.loads(line)
            prompt, answer = ([int(token) for token in given[name]] for name in _ANSWER_FIELDS)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                what=f"{path}, line {number} is not a prompt with its answer",
                why=f"{type(error).__name__}: {error}",
                fix="name a file that --save-answers has written",
                param="answers",
            ) from None
        if not all(0 <= token < vocab for token in (*prompt, *answer)):
            raise ConfigError(
                what=f"{path}, line {number} has tokens that the model lacks",
                why=f"its vocabulary has {vocab:,} tokens",
                fix="name answers of the same model",
                param="answers",
            )
        if prompt and len(answer) > 1:
            found.append(Sample(prompt, answer))
    return found
