"""The prompts and their lengths: random, read from files, or in groups with a shared prefix."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bough.core.errors import ConfigError
from bough.tokenizer import Tokenizer

DATASETS = ("random", "random-ids", "sharegpt", "shared-prefix", "custom")
_DATASET_ALIASES = {"generated-shared-prefix": "shared-prefix", "random_ids": "random-ids"}
_TOKENS_PER_WORD = 1.3
"""Assumed tokens per word of a text if there is no tokenizer."""
_SHORT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrompt:
    """One of text, ids and messages; `input_len` is exact for ids, and for texts as near as the tokenizer allows."""

    output_len: int
    input_len: int
    text: str = ""
    ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    group: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WordList:
    """The tokenizer for generating prompts. Without a tokenizer, lengths are estimated."""

    tokenizer: Tokenizer | None
    size: int = 0
    _words: list[int] = field(default_factory=list)

    def count(self, text: str) -> int:
        if self.tokenizer is None:
            return max(1, round(len(text.split()) * _TOKENS_PER_WORD))
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def random_text(self, num_tokens: int, rng: random.Random) -> str:
        """Words that are one token each, so that the text has the wanted length in tokens."""
        if self.tokenizer is None:
            return " ".join(rng.choices(_PLAIN_WORDS.split(), k=num_tokens))
        if not self._words:
            self._words.extend(_word_ids(self.tokenizer))
        return self.tokenizer.decode(rng.choices(self._words, k=num_tokens))

    def random_ids(self, num_tokens: int, rng: random.Random) -> list[int]:
        if not self.size:
            raise ConfigError(
                what="random-ids needs the size of the model's vocabulary",
                why="the server does not say it",
                fix="give --vocab-size or --tokenizer",
            )
        return [rng.randrange(self.size) for _ in range(num_tokens)]


# So common that every large vocabulary has each as one token.
_PLAIN_WORDS: Final = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
)


def _word_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of whole lower-case words with a space before them: side by side they stay the tokens they are."""
    texts = {token_id: tokenizer.token_text(token_id) for token_id in range(tokenizer.vocab_size)}
    words = [
        (token_id, text)
        for token_id, text in texts.items()
        if text.startswith(" ") and text[1:].isascii() and text[1:].isalpha() and text[1:].islower()
    ]
    encoded = tokenizer.encode_batch([text for _, text in words], add_special_tokens=False) if words else []
    alone = [token_id for (token_id, _), ids in zip(words, encoded, strict=True) if ids == [token_id]]
    return alone or [token_id for token_id in texts if token_id not in tokenizer.special_ids]


def add_dataset_flags(parser: argparse.ArgumentParser, *, default: str, num_prompts: int) -> None:
    group = parser.add_argument_group("what is asked")
    names = (*DATASETS, *_DATASET_ALIASES)
    group.add_argument("--dataset-name", "--dataset", choices=names, default=default, metavar="NAME",
                       help=f"{', '.join(DATASETS)} (default: {default})")  # fmt: skip
    group.add_argument("--dataset-path", default="", metavar="FILE",
                       help="sharegpt: a JSON file of conversations; custom: one JSON object a line, with `prompt` or "
                            "`messages` and, if wanted, `output_len`")  # fmt: skip
    group.add_argument("--num-prompts", type=_positive, default=num_prompts, metavar="N")
    group.add_argument("--random-input-len", "--input-len", type=_positive, default=1024, metavar="N")
    group.add_argument("--random-output-len", "--output-len", type=_positive, default=128, metavar="N",
                       help="tokens asked for; in the file's datasets, where an entry does not say")  # fmt: skip
    group.add_argument("--random-range-ratio", type=_share, default=1.0, metavar="X",
                       help="lengths are spread evenly from X times the length to all of it (default: 1)")  # fmt: skip
    group.add_argument("--sharegpt-context-len", type=_positive, default=2048, metavar="N",
                       help="leave out conversations that are longer")  # fmt: skip
    group.add_argument("--gsp-num-groups", type=_positive, default=8, metavar="N",
                       help="shared-prefix: number of groups, each with its own prefix")  # fmt: skip
    group.add_argument("--gsp-prompts-per-group", type=_positive, default=16, metavar="N",
                       help="shared-prefix: prompts in a group (--num-prompts does not count there)")  # fmt: skip
    group.add_argument("--gsp-system-prompt-len", type=_positive, default=2048, metavar="N",
                       help="shared-prefix: tokens that a group shares")  # fmt: skip
    group.add_argument("--gsp-question-len", type=_positive, default=128, metavar="N",
                       help="shared-prefix: tokens of each prompt after the prefix")  # fmt: skip
    group.add_argument("--gsp-output-len", type=_positive, default=64, metavar="N")
    group.add_argument("--seed", type=int, default=1, help="seed of the prompts and the arrivals (default: 1)")


def make_prompts(options: argparse.Namespace, vocabulary: WordList) -> list[BenchPrompt]:
    """The dataset that the flags describe. Raises `ConfigError`."""
    rng = random.Random(options.seed)
    name = _DATASET_ALIASES.get(options.dataset_name, options.dataset_name)
    makers: dict[str, Callable[[argparse.Namespace, WordList, random.Random], list[BenchPrompt]]] = {
        "random": _random_texts,
        "random-ids": _random_ids,
        "sharegpt": _sharegpt,
        "shared-prefix": _shared_prefix,
        "custom": _custom,
    }
    prompts = makers[name](options, vocabulary, rng)
    if not prompts:
        raise ConfigError(
            what=f"the dataset {options.dataset_path or name} has no usable prompt",
            why="its entries are too short, too long, or have no prompt",
            fix="give another --dataset-path, or a larger --sharegpt-context-len",
        )
    return prompts


def _lengths(options: argparse.Namespace, rng: random.Random) -> tuple[int, int]:
    def one(length: int) -> int:
        return rng.randint(max(1, round(length * options.random_range_ratio)), length)

    return one(options.random_input_len), one(options.random_output_len)


def _random_texts(options: argparse.Namespace, vocabulary: WordList, rng: random.Random) -> list[BenchPrompt]:
    prompts = []
    for _ in range(options.num_prompts):
        input_len, output_len = _lengths(options, rng)
        text = vocabulary.random_text(input_len, rng)
        prompts.append(BenchPrompt(text=text, input_len=input_len, output_len=output_len))
    return prompts


def _random_ids(options: argparse.Namespace, vocabulary: WordList, rng: random.Random) -> list[BenchPrompt]:
    prompts = []
    for _ in range(options.num_prompts):
        input_len, output_len = _lengths(options, rng)
        ids = vocabulary.random_ids(input_len, rng)
        prompts.append(BenchPrompt(ids=ids, input_len=input_len, output_len=output_len))
    return prompts


def _shared_prefix(options: argparse.Namespace, vocabulary: WordList, rng: random.Random) -> list[BenchPrompt]:
    prompts = []
    for group in range(options.gsp_num_groups):
        shared = vocabulary.random_text(options.gsp_system_prompt_len, rng)
        for _ in range(options.gsp_prompts_per_group):
            own = vocabulary.random_text(options.gsp_question_len, rng)
            total = options.gsp_system_prompt_len + options.gsp_question_len
            text = f"{shared}\n\n{own}"
            prompts.append(BenchPrompt(text=text, input_len=total, output_len=options.gsp_output_len, group=group))
    rng.shuffle(prompts)
    return prompts


def _sharegpt(options: argparse.Namespace, vocabulary: WordList, rng: random.Random) -> list[BenchPrompt]:
    """First turns of conversations; the wanted output is as long as the second turn was."""
    entries = json.loads(_read(options))
    if not isinstance(entries, list):
        raise _bad_file(options, "it must hold a JSON list of conversations")
    rng.shuffle(entries)
    prompts: list[BenchPrompt] = []
    for entry in entries:
        turns = _turns(entry)
        if len(turns) < 2:
            continue
        input_len, output_len = vocabulary.count(turns[0]), vocabulary.count(turns[1])
        if min(input_len, output_len) < _SHORT or input_len + output_len > options.sharegpt_context_len:
            continue
        prompts.append(BenchPrompt(text=turns[0], input_len=input_len, output_len=output_len))
        if len(prompts) == options.num_prompts:
            break
    return prompts


def _turns(entry: Any) -> list[str]:
    named = entry if isinstance(entry, dict) else {}
    turns: list[Any] = named.get("conversations") or named.get("conversation") or []
    return [turn["value"] for turn in turns if isinstance(turn, dict) and isinstance(turn.get("value"), str)]


def _custom(options: argparse.Namespace, vocabulary: WordList, rng: random.Random) -> list[BenchPrompt]:
    prompts: list[BenchPrompt] = []
    for number, line in enumerate(_read(options).splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise _bad_file(options, f"line {number}: {error}") from error
        prompts.append(_custom_prompt(options, vocabulary, entry, number))
        if len(prompts) == options.num_prompts:
            break
    return prompts


def _custom_prompt(options: argparse.Namespace, vocabulary: WordList, entry: Any, number: int) -> BenchPrompt:
    known = isinstance(entry, dict) and next((name for name in ("prompt", "text", "messages") if name in entry), None)
    if not known:
        raise _bad_file(options, f"line {number} is no object with `prompt` or `messages`")
    value = entry[known]
    output_len = entry.get("output_len", entry.get("max_tokens", options.random_output_len))
    if not isinstance(output_len, int) or output_len < 1:
        raise _bad_file(options, f"line {number}: output_len is {output_len!r}")
    if known == "messages" and isinstance(value, list):
        text = " ".join(str(message.get("content", "")) for message in value)
        return BenchPrompt(messages=value, input_len=vocabulary.count(text), output_len=output_len)
    if isinstance(value, str) and value:
        return BenchPrompt(text=value, input_len=vocabulary.count(value), output_len=output_len)
    if isinstance(value, list) and value and all(isinstance(each, int) for each in value):
        return BenchPrompt(ids=value, input_len=len(value), output_len=output_len)
    raise _bad_file(options, f"line {number}: {known} must be a text or a list of token ids")


def _read(options: argparse.Namespace) -> str:
    if not options.dataset_path:
        raise ConfigError(what=f"the dataset {options.dataset_name} is a file", fix="name it with --dataset-path")
    try:
        return Path(options.dataset_path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _bad_file(options, str(error)) from error


def _bad_file(options: argparse.Namespace, why: str) -> ConfigError:
    return ConfigError(what=f"{options.dataset_path} can't be used as {options.dataset_name}", why=why)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError("must be from 0 to 1")
    return value


def describe(prompts: Sequence[BenchPrompt]) -> str:
    """Lengths of a dataset, in words."""
    inputs = [prompt.input_len for prompt in prompts]
    outputs = [prompt.output_len for prompt in prompts]
    return f"{len(prompts)} prompts, {_range(inputs)} tokens in, {_range(outputs)} out"


def _range(lengths: Sequence[int]) -> str:
    low, high = min(lengths), max(lengths)
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"
