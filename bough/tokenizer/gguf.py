"""A tokenizer from a GGUF file's metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama")."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from bough.core.errors import UnsupportedModel
from bough.tokenizer.vocabulary import SPACE_MARK

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Values of `tokenizer.ggml.token_type` that matter here."""

_LETTERS_WITH_CASE: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_ENGLISH_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")


def _words(*, digits: str, newlines: str = r"[\r\n]*") -> str:
    """The word pattern that GPT-4's tokenizer began: endings, words, numbers, signs, spaces."""
    letters = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return "|".join((_ENGLISH_ENDINGS, letters, digits, r" ?[^\s\p{L}\p{N}]+" + newlines, *_SPACES))


class _Pre(NamedTuple):
    """How text is cut into words before BPE."""

    pattern: str = ""
    """Words; empty: GPT-2's own pattern."""
    lone_digits: bool = False
    normal_form_c: bool = False
    whole_words: bool = False
    """A word that is a token is taken as it is, without merging."""
    begins_with_bos: bool = False
    """Unless `tokenizer.ggml.add_bos_token` says otherwise."""


_LLAMA3 = _Pre(_words(digits=r"\p{N}{1,3}"), whole_words=True, begins_with_bos=True)
_QWEN2 = _Pre(_words(digits=r"\p{N}"), normal_form_c=True)
_DBRX = _Pre(_words(digits=r"\p{N}{1,3}"))
_TEKKEN = _Pre(
    "|".join((*_LETTERS_WITH_CASE, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", *_SPACES)),
    whole_words=True,
    begins_with_bos=True,
)
_GPT4O = _Pre(
    "|".join(
        (
            *(letters + _ENGLISH_ENDINGS + "?" for letters in _LETTERS_WITH_CASE),
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            *_SPACES,
        )
    )
)
_GPT2 = _Pre()
_DIGITS = _Pre(lone_digits=True)

_PRE_TOKENIZERS: Final[Mapping[str, _Pre]] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "jina-es": _GPT2,
    "jina-de": _GPT2,
    "mpt": _GPT2,
    "exaone": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "dbrx": _DBRX,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _Pre(_words(digits=r"\p{N}")),
    "megrez": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that a GGUF file describes. Raises `UnsupportedModel` for kinds not known here."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata)
    elif kind == "llama":
        tokenizer, adds_bos = sentencepiece_bpe(metadata), True
    else:
        raise UnsupportedModel(
            what=f"the GGUF file's tokenizer is of the kind {kind!r}",
            why="GGUF tokenizers of the kinds 'gpt2' and 'llama' can be built",
            fix="name a directory or hub id that has a tokenizer.json with --tokenizer",
        )
    finish_tokenizer(tokenizer, metadata, adds_bos=adds_bos)
    return tokenizer


def finish_tokenizer(tokenizer: Tokenizer, metadata: Mapping[str, Any], *, adds_bos: bool) -> None:
    """Adds the tokens that are not words, and puts BOS before texts if the metadata say so; `adds_bos`: if they don't."""
    _add_tokens(tokenizer, metadata)
    _add_bos_and_eos(tokenizer, metadata, adds_bos)


def save_gguf_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Writes the tokenizer as `tokenizer.json` and `tokenizer_config.json`, for a checkpoint that is no GGUF file."""
    tokenizer_from_gguf(metadata).save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    found = {short: metadata.get(f"tokenizer.ggml.{long}_token_id") for short, long in names.items()}
    settings: dict[str, Any] = {
        f"{name}_token": tokens[at] for name, at in found.items() if at is not None and at < len(tokens)
    }
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _byte_level(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    pre = _PRE_TOKENIZERS.get(name)
    if pre is None:
        raise UnsupportedModel(
            what=f"the GGUF file's tokenizer cuts text in the way {name!r}",
            why=f"known are {', '.join(sorted(_PRE_TOKENIZERS))}",
            fix="name a directory or hub id that has a tokenizer.json with --tokenizer",
        )
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [_split_merge(merge) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.whole_words))
    if pre.normal_form_c:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.lone_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pre.pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.begins_with_bos


def _split_merge(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ", 1)
    return left, right


def sentencepiece_bpe(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer without what `finish_tokenizer` adds."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if unknown is None:
        unknown = next((i for i, kind in enumerate(kinds) if kind == _UNKNOWN), None)
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges_from_scores(tokens, metadata["tokenizer.ggml.scores"], kinds),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    to_marks = normalizers.Replace(" ", SPACE_MARK)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), to_marks]) if prefix else to_marks
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def merges_from_scores(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """SentencePiece merges whichever pair makes the best-scored token; as a list of merges, best first."""
    ids = {token: i for i, token in enumerate(tokens) if kinds[i] not in (_UNKNOWN, _CONTROL)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, i in ids.items():
        if len(token) < 2:
            continue
        for cut in range(1, len(token)):
            left = ids.get(token[:cut])
            if left is None:
                continue
            right = ids.get(token[cut:])
            if right is not None:
                found.append((-scores[i], left, right, token[:cut], token[cut:]))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type") or ()
    special = {i for i, kind in enumerate(kinds) if kind == _CONTROL}
    for name in ("bos", "eos", "eot", "eom"):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and token_id < len(tokens):
            special.add(token_id)
    plain = [i for i, kind in enumerate(kinds) if kind == _USER_DEFINED and i not in special]
    tokenizer.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in sorted(special)])
    # Runs of spaces are looked for after spaces have become marks, unless marks are also put in front of every text.
    marks = isinstance(tokenizer.normalizer, normalizers.Replace)
    tokenizer.add_tokens(
        [AddedToken(tokens[i], special=False, normalized=marks and SPACE_MARK in tokens[i]) for i in plain]
    )


def _add_bos_and_eos(tokenizer: Tokenizer, metadata: Mapping[str, Any], adds_bos: bool) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    template, special = ["$A:0"], []
    bos, eos = metadata.get("tokenizer.ggml.bos_token_id"), metadata.get("tokenizer.ggml.eos_token_id")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        template.insert(0, f"{tokens[bos]}:0")
        special.append((tokens[bos], bos))
    if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False):
        template.append(f"{tokens[eos]}:0")
        special.append((tokens[eos], eos))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template,
            pair=[*template, *(part.replace(":0", ":1").replace("$A", "$B") for part in template)],
            special_tokens=list(dict.fromkeys(special)),
        )
