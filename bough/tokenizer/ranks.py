"""Byte-level tokenizers from files of ranks: tiktoken's format (Kimi K2, Hunyuan) and Mistral's tekken.json.

Both hold tokens as bytes with a rank; the rank orders merges and numbers the tokens.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from bough.core.errors import ConfigError
from bough.tokenizer.vocabulary import byte_of_character

TEKKEN: Final = "tekken.json"
TEKKEN_SPECIAL: Final = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
"""In the words of a tokenizer_config.json."""

_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_NOT_HAN_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_NOT_HAN_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SPACES: Final = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
_KIMI: Final = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_UPPER}*{_NOT_HAN_LOWER}+{_ENDINGS}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_UPPER}+{_NOT_HAN_LOWER}*{_ENDINGS}?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        *_SPACES,
    )
)
_HUNYUAN: Final = "|".join(
    (_ENDINGS, r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", *_SPACES)
)  # fmt: skip

Names = dict[int, str]
"""Special tokens by id."""


class _Kind(NamedTuple):
    """What a tokenizer class knows beside its file."""

    pattern: str
    """Words."""
    special: Callable[[int, Names], Names]
    """All special tokens, from how many ordinary ones there are and what tokenizer_config.json names."""
    normal_form_c: bool = False


def _reserved(count: int, stated: Names) -> Names:
    """Kimi's: 256 behind the ordinary ones; those without a name are reserved."""
    return {id_: stated.get(id_, f"<|reserved_token_{id_}|>") for id_ in range(count, count + 256)}


def _hunyuan(count: int, stated: Names) -> Names:
    names = ("endoftext", "startoftext", "bos", "eos", "pad", *(f"extra_{i}" for i in range(205)))
    return {count + i: f"<|{name}|>" for i, name in enumerate(names)} | stated


_KINDS: Final[Mapping[str, _Kind]] = {
    "TikTokenTokenizer": _Kind(_KIMI, _reserved),
    "HYTokenizer": _Kind(_HUNYUAN, _hunyuan, normal_form_c=True),
}
"""By `tokenizer_class`."""


def ranks_file(path: Path, settings: Mapping[str, Any]) -> Path | None:
    """The file of ranks in a directory, in a format that `tokenizer_from_ranks` reads; None: there is none."""
    if settings.get("tokenizer_class") not in _KINDS:
        return None
    return next((file for file in (path / "tiktoken.model", *sorted(path.glob("*.tiktoken"))) if file.exists()), None)


def tokenizer_from_ranks(file: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a file of tiktoken's. `settings`: tokenizer_config.json, whose class `ranks_file` knows. Raises
    `ConfigError`."""
    kind = _KINDS[settings["tokenizer_class"]]
    ranks: dict[bytes, int] = {}
    for line in file.read_bytes().splitlines():
        token, _, _ = line.partition(b" ")
        if token:
            ranks.setdefault(_bytes_of(token, file), len(ranks))
    stated = settings.get("added_tokens_decoder") or {}
    special = kind.special(len(ranks), {int(id_): str(entry["content"]) for id_, entry in stated.items()})
    return _byte_level(ranks, special, kind.pattern, normal_form_c=kind.normal_form_c)


def tokenizer_from_tekken(file: Path) -> tuple[Tokenizer, str]:
    """(The tokenizer of a tekken.json, the version of its chat format). Raises `ConfigError`."""
    try:
        read = json.loads(file.read_bytes())
        config = read["config"]
        num_special = int(config["default_num_special_tokens"])
        most = int(config["default_vocab_size"]) - num_special
        pattern, version = str(config["pattern"]), str(config.get("version") or "v3")
        entries = sorted(read["vocab"], key=lambda entry: int(entry["rank"]))[:most]
        ranks = {_bytes_of(entry["token_bytes"], file): num_special + int(entry["rank"]) for entry in entries}
        listed = read.get("special_tokens") or [{"rank": i, "token_str": name} for i, name in enumerate(_FIRST)]
        named = {int(entry["rank"]): str(entry["token_str"]) for entry in listed}
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(file, f"{type(error).__name__}: {error}") from error
    special = {id_: named.get(id_, f"<SPECIAL_{id_}>") for id_ in range(num_special)}
    tokenizer = _byte_level(ranks, special, pattern)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>:0", "$A:0"], pair=["<s>:0", "$A:0", "<s>:1", "$B:1"], special_tokens=[("<s>", 1)]
    )
    return tokenizer, version


_FIRST: Final = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""Special tokens of tekken.json files that list none."""


def _byte_level(ranks: Mapping[bytes, int], special: Names, pattern: str, *, normal_form_c: bool = False) -> Tokenizer:
    """`ranks`: ids of ordinary tokens, by which merges are ordered."""
    vocabulary = {_characters(token): id_ for token, id_ in ranks.items()} | {name: i for i, name in special.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(_merges(ranks)), ignore_merges=True))
    if normal_form_c:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    ordered = [AddedToken(special[id_], special=True, normalized=False) for id_ in sorted(special)]
    tokenizer.add_special_tokens(ordered)
    return tokenizer


def _merges(ranks: Mapping[bytes, int]) -> Iterable[tuple[str, str]]:
    """Every way to make a token of two others, by the token's rank: the lowest is merged first."""
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [(ranks[left], ranks[right], left, right) for left, right in cuts if left in ranks and right in ranks]
        yield from ((_characters(left), _characters(right)) for _, _, left, right in sorted(known))


def _characters(token: bytes) -> str:
    """Each byte by the character that stands for it in byte-level vocabularies."""
    return token.decode("latin-1").translate(_spelling())


@cache
def _spelling() -> dict[int, str]:
    return {byte: character for character, byte in byte_of_character().items()}


def _bytes_of(token: bytes | str, file: Path) -> bytes:
    try:
        return base64.b64decode(token, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _unreadable(file, str(error)) from error


def _unreadable(file: Path, why: str) -> ConfigError:
    return ConfigError(
        what=f"the tokenizer {file} can't be read", why=why, fix="fetch it again, or name another one with --tokenizer"
    )
