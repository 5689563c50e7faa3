"""A tokenizer from a SentencePiece model, for checkpoints that have no other form of it.

The file is a protocol buffer: pieces with scores and kinds, how the model was trained, and how it normalises text. It is
read here, because other libraries' readers need packages that bough doesn't.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from bough.tokenizer.gguf import finish_tokenizer, sentencepiece_bpe
from bough.tokenizer.vocabulary import SPACE_MARK

_MOST_BYTES: Final = 64 * 1024 * 1024
"""Of a model file: the largest known has 5 MiB."""
_UNIGRAM, _BPE = 1, 2
"""Values of `trainer_spec.model_type`."""
_CONTROL, _USER_DEFINED = 3, 4
"""Kinds of pieces, which GGUF numbers alike."""


@dataclass(frozen=True, slots=True)
class SentencePieces:
    """What a model file says."""

    pieces: list[str]
    scores: list[float]
    kinds: list[int]
    kind: int
    ids: dict[str, int]
    """Of special pieces: unk, bos, eos, pad."""
    begins_with_space: bool
    charsmap: bytes
    """How characters are normalised, compiled."""

    @property
    def is_byte_pairs(self) -> bool:
        return self.kind == _BPE

    @property
    def special(self) -> dict[str, str]:
        """In the words of a tokenizer_config.json."""
        return {f"{name}_token": self.pieces[id_] for name, id_ in self.ids.items()}


def read_sentencepiece(file: Path) -> SentencePieces | None:
    """What the model says; None: there is no such file, or it is no model of unigrams or byte pairs."""
    if not file.exists() or file.stat().st_size > _MOST_BYTES:
        return None
    pieces: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        for number, value in _fields(file.read_bytes()):
            if number == 1:
                piece = dict(_fields(value))
                pieces.append(piece[1].decode())
                scores.append(float(piece.get(2, 0.0)))
                kinds.append(int(piece.get(3, 1)))
            elif number == 2:
                trainer = dict(_fields(value))
            elif number == 3:
                normalizer = dict(_fields(value))
        kind = int(trainer.get(3, _UNIGRAM))
        stated = {
            "unk": trainer.get(40, 0),
            "bos": trainer.get(41, 1),
            "eos": trainer.get(42, 2),
            "pad": trainer.get(43),
        }
        ids = {name: int(id_) for name, id_ in stated.items() if id_ is not None and int(id_) < len(pieces)}
        charsmap = bytes(normalizer.get(2, b""))
    except (ValueError, IndexError, KeyError, AttributeError, TypeError, struct.error):
        return None
    if not pieces or kind not in (_UNIGRAM, _BPE):
        return None
    return SentencePieces(pieces, scores, kinds, kind, ids, bool(normalizer.get(3, 1)), charsmap)


def tokenizer_from_sentencepiece(model: SentencePieces, settings: Mapping[str, Any]) -> Tokenizer:
    """`settings`: tokenizer_config.json, which names added tokens and says whether a text begins with BOS."""
    metadata = _as_metadata(model, settings)
    if model.is_byte_pairs:
        tokenizer = sentencepiece_bpe(metadata)
        if model.begins_with_space and not settings.get("legacy"):
            tokenizer.normalizer = None  # a space before the text alone, not before what follows a special token
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme="first", split=False)
    else:
        tokenizer = _unigram(model)
    if model.charsmap:
        own = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Precompiled(model.charsmap), *own])
    finish_tokenizer(tokenizer, metadata, adds_bos=model.is_byte_pairs)
    return tokenizer


def _as_metadata(model: SentencePieces, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The model in the words of a GGUF file's metadata, with added tokens in their places: some stand where it has unused
    pieces, others behind its last one."""
    pieces, scores, kinds = [*model.pieces], [*model.scores], [*model.kinds]
    added = settings.get("added_tokens_decoder") or {}
    for id_ in sorted(map(int, added)):
        entry = added[str(id_)]
        while len(pieces) <= id_:
            pieces.append(f"<unused_{len(pieces)}>")
            scores.append(0.0)
            kinds.append(_CONTROL)
        pieces[id_] = str(entry["content"])
        kinds[id_] = _CONTROL if entry.get("special", True) else _USER_DEFINED
    long_names = {"unk": "unknown", "bos": "bos", "eos": "eos"}
    metadata: dict[str, Any] = {
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_space_prefix": model.begins_with_space,
        **{
            f"tokenizer.ggml.{long}_token_id": model.ids[name] for name, long in long_names.items() if name in model.ids
        },
    }
    for name in ("bos", "eos"):
        stated = settings.get(f"add_{name}_token")
        if isinstance(stated, bool):
            metadata[f"tokenizer.ggml.add_{name}_token"] = stated
    return metadata


def _unigram(model: SentencePieces) -> Tokenizer:
    vocabulary = list(zip(model.pieces, model.scores, strict=True))
    falls_back = "<0x00>" in model.pieces
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=model.ids.get("unk"), byte_fallback=falls_back))
    scheme = "always" if model.begins_with_space else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE_MARK, prepend_scheme=scheme)
    spaces = decoders.Metaspace(replacement=SPACE_MARK, prepend_scheme=scheme)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), spaces]) if falls_back else spaces
    return tokenizer


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer: numbers as int or float, everything else as bytes. Raises `ValueError`, `IndexError`
    or `struct.error` for what is none."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
        elif wire == 1:
            yield number, struct.unpack_from("<d", data, at)[0]
            at += 8
        elif wire == 2:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise ValueError("a field is cut off")
            yield number, data[at : at + length]
            at += length
        elif wire == 5:
            yield number, struct.unpack_from("<f", data, at)[0]
            at += 4
        else:
            raise ValueError(f"unknown wire type {wire}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(A number of seven bits a byte, where it ends). Ids of pieces that a model lacks are -1, the largest number."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number is too long")
