"""Finds a model's tokenizer and chat template and loads them, by the quickest way there is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import tokenizers

from bough.config.concerns import ModelConfig
from bough.config.gguf_header import read_gguf_header
from bough.config.hf import Checkpoint, checkpoint_of
from bough.core.errors import ConfigError
from bough.tokenizer.builtin_templates import BUILTIN_TEMPLATES
from bough.tokenizer.chat_template import ChatTemplate
from bough.tokenizer.deepseek_templates import OWN_FORMATS
from bough.tokenizer.gguf import tokenizer_from_gguf
from bough.tokenizer.mistral_templates import mistral_template
from bough.tokenizer.ranks import TEKKEN, TEKKEN_SPECIAL, ranks_file, tokenizer_from_ranks, tokenizer_from_tekken
from bough.tokenizer.sentencepiece_file import read_sentencepiece, tokenizer_from_sentencepiece
from bough.tokenizer.tokenizer import Codebook, FastCodebook, SlowCodebook, Tokenizer

_HUB_FILES: Final = ["tokenizer*", "*.jinja", "chat_template.json", "vocab*", "merges.txt", "*.model", "*config.json"]
_SPECIAL: Final = ("bos", "eos", "pad", "unk")
_MAX_TEMPLATE_BYTES: Final = 4 * 1024 * 1024


class _Wish(NamedTuple):
    """How a tokenizer is to be loaded."""

    trust_remote_code: bool
    slow: bool
    template: Mapping[str, str] | None
    """Instead of the model's own, by name."""


def load_tokenizer(
    source: Checkpoint | str | Path,
    *,
    trust_remote_code: bool = False,
    revision: str = "",
    chat_template: str = "",
    slow: bool = False,
    download_dir: str = "",
) -> Tokenizer:
    """Loads the tokenizer of a checkpoint, a directory, a .gguf file or a hub id.

    `chat_template` replaces the model's own: a file, or the name of a built-in one. `slow`: the one that transformers has in
    Python. Raises `ConfigError`.
    """
    wish = _Wish(trust_remote_code, slow, _chosen_template(chat_template) if chat_template else None)
    if isinstance(source, Checkpoint):
        if source.kind == "gguf" and source.tokenizer in source.files:
            return _from_gguf(source.gguf[source.files.index(source.tokenizer)].metadata, source.eos_ids, wish)
        return _load(source.tokenizer, source.eos_ids, wish)
    return _load(_locate(source, revision, download_dir), None, wish)


def tokenizer_of(model: ModelConfig, checkpoint: Checkpoint | None = None) -> Tokenizer | None:
    """The tokenizer that a configuration names, by default its checkpoint's, which is opened if it is not given.

    None: none is wanted (--skip-tokenizer-init). Raises `ConfigError`.
    """
    if model.skip_tokenizer_init:
        return None
    return load_tokenizer(
        model.tokenizer or checkpoint or checkpoint_of(model),
        trust_remote_code=model.trust_remote_code,
        revision=model.revision if model.tokenizer else "",
        chat_template=model.chat_template,
        slow=model.tokenizer_mode == "slow",
        download_dir=model.download_dir,
    )


def _load(path: Path, eos_ids: tuple[int, ...] | None, wish: _Wish) -> Tokenizer:
    if path.is_file():
        return _from_gguf(read_gguf_header(path).metadata, eos_ids or (), wish)
    if not (path / "tokenizer.json").exists():
        lone = sorted(path.glob("*.gguf"))
        if lone and not (path / "tokenizer_config.json").exists():
            return _from_gguf(read_gguf_header(lone[0]).metadata, eos_ids or (), wish)
    return _from_directory(path, eos_ids, wish)


def _from_gguf(metadata: Mapping[str, Any], eos_ids: tuple[int, ...], wish: _Wish) -> Tokenizer:
    if wish.slow:
        raise _not_slow("a GGUF file has its tokenizer as tables")
    codebook = FastCodebook(tokenizer_from_gguf(metadata))
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {short: metadata.get(f"tokenizer.ggml.{long}_token_id") for short, long in names.items()}
    ends = [ids["eos"], *(metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))]
    templates = {
        key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default": text
        for key, text in metadata.items()
        if key.startswith("tokenizer.chat_template") and isinstance(text, str)
    }
    special = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}
    return _assemble(codebook, ids, [*ends, *eos_ids], wish.template or templates, special)


def _stated_ends(path: Path) -> list[int | None]:
    """Ids that end an answer, as a checkpoint's configs say."""
    ends: list[int | None] = []
    for file in ("generation_config.json", "config.json"):
        stated = _read_json(path / file).get("eos_token_id")
        ends += stated if isinstance(stated, list) else [stated]
    return ends


def _from_directory(path: Path, eos_ids: tuple[int, ...] | None, wish: _Wish) -> Tokenizer:
    """`eos_ids`: those of the checkpoint; None: it has not been read."""
    settings = _read_json(path / "tokenizer_config.json")
    codebook, defaults = _codebook(path, settings, wish)
    settings = {**defaults, **settings}
    special = {name: _token_text(settings.get(name)) for name in settings if name.endswith("_token")}
    special |= {
        name: _token_text(value)
        for name, value in _read_json(path / "special_tokens_map.json").items()
        if name.endswith("_token") and not special.get(name)
    }
    texts = {name: text for name, text in special.items() if text}
    ids = {name: codebook.id_of(texts[f"{name}_token"]) if f"{name}_token" in texts else None for name in _SPECIAL}
    ends: list[int | None] = [ids["eos"], *(_stated_ends(path) if eos_ids is None else eos_ids)]
    templates = wish.template or _templates_in(path, settings) or _own_format(path)
    return _assemble(codebook, ids, ends, templates, texts)


def _assemble(
    codebook: Codebook,
    ids: Mapping[str, int | None],
    ends: list[int | None],
    templates: Mapping[str, str],
    special: Mapping[str, str],
) -> Tokenizer:
    return Tokenizer(
        codebook=codebook,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        pad_id=ids["pad"],
        unk_id=ids["unk"],
        eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        chat_template=ChatTemplate(templates, special) if templates else None,
    )


Defaults = Mapping[str, Any]
"""What a tokenizer_config.json would say, of what it doesn't."""


def _codebook(path: Path, settings: Mapping[str, Any], wish: _Wish) -> tuple[Codebook, Defaults]:
    file = path / "tokenizer.json"
    if wish.slow:
        return _through_transformers(path, wish), {}
    if not file.exists():
        return _other_form(path, settings, wish)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise ConfigError(
            what=f"the tokenizer in {path} can't be read",
            why=str(error),
            fix="fetch tokenizer.json again, or name another one with --tokenizer",
        ) from error
    _add_missing_tokens(tokenizer, settings)
    return FastCodebook(tokenizer), {}


def _other_form(path: Path, settings: Mapping[str, Any], wish: _Wish) -> tuple[Codebook, Defaults]:
    """For checkpoints without a tokenizer.json. Those that would bring code for it are read here, where their form is
    known."""
    if (path / TEKKEN).exists():
        tekken, version = tokenizer_from_tekken(path / TEKKEN)
        return FastCodebook(tekken), {**TEKKEN_SPECIAL, "chat_template": mistral_template(version)}
    if (ranks := ranks_file(path, settings)) is not None:
        return FastCodebook(tokenizer_from_ranks(ranks, settings)), {}
    pieces = read_sentencepiece(path / "tokenizer.model")
    if pieces is None or (not pieces.is_byte_pairs and "tokenizer_class" in settings):
        try:
            return _through_transformers(path, wish), {}
        except ConfigError:
            if pieces is None:
                raise
    return FastCodebook(tokenizer_from_sentencepiece(pieces, settings)), pieces.special


def _add_missing_tokens(tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Adds tokens that only tokenizer_config.json names, where their ids come out as stated."""
    stated = settings.get("added_tokens_decoder") or {}
    known = tokenizer.get_added_tokens_decoder()
    for token_id in sorted(map(int, stated)):
        entry = stated[str(token_id)]
        if token_id in known or token_id < tokenizer.get_vocab_size():
            continue
        token = tokenizers.AddedToken(
            entry["content"],
            single_word=entry.get("single_word", False),
            lstrip=entry.get("lstrip", False),
            rstrip=entry.get("rstrip", False),
            normalized=entry.get("normalized", True),
            special=entry.get("special", False),
        )
        tokenizer.add_tokens([token])


def _through_transformers(path: Path, wish: _Wish) -> Codebook:
    """For tokenizers without a tokenizer.json: transformers converts what it can. Slow to import, so only here."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=wish.trust_remote_code, use_fast=not wish.slow
        )
    except Exception as error:
        raise ConfigError(
            what=f"there is no tokenizer in {path} that can be read",
            why=" ".join(str(error).split())[:500],
            fix="name a directory or hub id with a tokenizer.json with --tokenizer, or use --skip-tokenizer-init",
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        return SlowCodebook(loaded)
    if wish.slow:
        raise _not_slow(f"transformers has {type(loaded).__name__} in its fast form only")
    return FastCodebook(backend)


def _not_slow(why: str) -> ConfigError:
    return ConfigError(
        what="--tokenizer-mode slow was asked for, this model has no such tokenizer",
        why=why,
        fix="leave --tokenizer-mode out",
        param="tokenizer_mode",
    )


def _templates_in(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name, from the newest place that has them to the oldest."""
    lone = path / "chat_template.jinja"
    if lone.exists():
        extra = {file.stem: _read_text(file) for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
        return {**extra, "default": _read_text(lone)}
    stated = _read_json(path / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(stated, str):
        return {"default": stated}
    if isinstance(stated, list):
        return {entry["name"]: entry["template"] for entry in stated}
    return {}


def _own_format(path: Path) -> dict[str, str]:
    """The format of models that bring none, where theirs is known."""
    architectures = _read_json(path / "config.json").get("architectures")
    known = [each for each in architectures or () if isinstance(each, str) and each in OWN_FORMATS]
    return {"default": OWN_FORMATS[known[0]]} if known else {}


def _chosen_template(name: str) -> dict[str, str]:
    if name in BUILTIN_TEMPLATES:
        return {"default": BUILTIN_TEMPLATES[name]}
    path = Path(name)
    if path.is_file():
        text = _read_text(path)
        if path.suffix == ".json":
            inner = _read_json(path).get("chat_template")
            if isinstance(inner, str):
                text = inner
        return {"default": text}
    raise ConfigError(
        what=f"there is no chat template {name!r}",
        why="it is neither a file nor the name of a built-in one",
        fix=f"give a file, or one of {', '.join(sorted(BUILTIN_TEMPLATES))}",
    )


def _locate(source: str | Path, revision: str, download_dir: str) -> Path:
    path = Path(source).expanduser()
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            str(source), revision=revision or None, cache_dir=download_dir or None, allow_patterns=_HUB_FILES
        )
        return Path(found)
    except Exception as error:
        raise ConfigError(
            what=f"there is no tokenizer {str(source)!r}",
            why=f"it is no file or directory, and the hub says: {' '.join(str(error).split())[:300]}",
            fix="check the path or the hub id",
        ) from error


def _token_text(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _read_text(path: Path) -> str:
    if path.stat().st_size > _MAX_TEMPLATE_BYTES:
        raise ConfigError(
            what=f"the chat template {path.name} has {path.stat().st_size} bytes",
            why=f"templates of at most {_MAX_TEMPLATE_BYTES} bytes are read",
            fix="give another one with --chat-template",
        )
    return path.read_text(encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(what=f"{path} is not JSON", why=str(error), fix="fetch the file again") from error
    return loaded if isinstance(loaded, dict) else {}
