"""A tokenizer: one interface over the `tokenizers` library and over transformers' slow ones."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import tokenizers

from bough.core.errors import InvalidRequest
from bough.core.integers import shared
from bough.tokenizer.chat_template import ChatTemplate
from bough.tokenizer.pieces import LONG_CHARS, Rule, find_rule, uncuttable
from bough.tokenizer.vocabulary import TokenForm, bytes_of_tokens, form_of_decoder

_MOST_WHOLE_CHARS = 4 * 1024 * 1024
"""Characters of a text for a tokenizer that can't be given it in pieces."""
_LONG_IDS = 16_384
"""Ids that are decoded at once."""


class Encoded(NamedTuple):
    """The ids of one text or of a pair, special tokens included."""

    ids: list[int]
    second_at: int
    """Where the tokenizer says that a pair's second segment begins; 0: nowhere."""


class Codebook(Protocol):
    """What turns text into ids and back."""

    @property
    def num_ids(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def form(self) -> TokenForm:
        """How the tokens' names spell bytes."""
        ...

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]: ...

    def encode_whole(
        self,
        inputs: Sequence[str | tuple[str, str]],
        add_special_tokens: bool,
        most: int | None,
        enough: int | None = None,
    ) -> list[Encoded]:
        """Texts and pairs; those with more than `most` tokens are cut before special tokens are added. Of a longer one, only
        about `enough` tokens need to be found."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool, spaces_between_special_tokens: bool) -> str: ...

    def token_of(self, token_id: int) -> str | None: ...

    def id_of(self, token: str) -> int | None: ...

    def added(self) -> dict[int, tuple[str, bool]]:
        """Tokens outside the model proper: id -> (text, special)."""
        ...


class FastCodebook:
    """Over `tokenizers`: encodes without holding the interpreter, and may be used by many threads."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Padding and truncation in tokenizer.json are leftovers of training.
        tokenizer.no_padding()
        tokenizer.no_truncation()

    @cached_property
    def num_ids(self) -> int:
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return max([size, *(token_id + 1 for token_id in self.added())])

    @cached_property
    def form(self) -> TokenForm:
        decoder = self._tokenizer.decoder
        return form_of_decoder(json.loads(decoder.__getstate__()) if decoder is not None else None)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        longest = max(map(len, texts), default=0)
        if longest <= LONG_CHARS or self._rule is None:
            if longest > _MOST_WHOLE_CHARS:
                raise uncuttable(longest)
            return self._encode(texts, add_special_tokens)
        return [self._encode_long(text, self._rule, add_special_tokens) for text in texts]

    def _encode(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [each.ids for each in encoded]

    def _encode_long(self, text: str, rule: Rule, add_special_tokens: bool) -> list[int]:
        before, after = self._special_around if add_special_tokens else ([], [])
        ids = [*before]
        for begin, end in rule.spans(text):
            ids += shared(self._encode([text[begin:end]])[0])
        return ids + after

    @cached_property
    def _rule(self) -> Rule | None:
        """How long texts are cut."""
        return find_rule(self._encode, [text for text, _ in self.added().values()])

    @cached_property
    def _special_around(self) -> tuple[list[int], list[int]]:
        """The special tokens before a text, and behind it."""
        plain, whole = self._encode(["a"])[0], self._encode(["a"], True)[0]
        at = next(at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
        return whole[:at], whole[at + len(plain) :]

    def encode_whole(
        self,
        inputs: Sequence[str | tuple[str, str]],
        add_special_tokens: bool,
        most: int | None,
        enough: int | None = None,
    ) -> list[Encoded]:
        wanted = most if most is not None else enough
        if wanted is not None:
            inputs = [
                self._beginning(each, wanted) if isinstance(each, str)
                else (self._beginning(each[0], wanted), self._beginning(each[1], wanted))
                for each in inputs
            ]  # fmt: skip
        encoded = self._tokenizer.encode_batch_fast(list(inputs), add_special_tokens=add_special_tokens)
        found = []
        for given, each in zip(inputs, encoded, strict=True):
            if most is not None and len(each) > most:
                each = self._cut(given, add_special_tokens, most)
            found.append(Encoded(each.ids, 0 if isinstance(given, str) else _second(each.type_ids)))
        return found

    def _beginning(self, text: str, wanted: int) -> str:
        """Of a long text, the pieces in which its first `wanted` tokens are."""
        if len(text) <= LONG_CHARS or self._rule is None:
            return text
        count = 0
        for begin, end in self._rule.spans(text):
            count += len(self._encode([text[begin:end]])[0])
            if count > wanted:
                return text[:end]
        return text

    def _cut(self, given: str | tuple[str, str], add_special_tokens: bool, most: int) -> tokenizers.Encoding:
        texts = (given,) if isinstance(given, str) else given
        parts = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        special = self._tokenizer.num_special_tokens_to_add(len(parts) == 2) if add_special_tokens else 0
        for part, length in zip(parts, shares([len(part) for part in parts], max(0, most - special)), strict=True):
            part.truncate(length)
        second = parts[1] if len(parts) == 2 else None
        return self._tokenizer.post_process(parts[0], second, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool, spaces_between_special_tokens: bool) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_of(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def added(self) -> dict[int, tuple[str, bool]]:
        return {i: (token.content, token.special) for i, token in self._tokenizer.get_added_tokens_decoder().items()}


class SlowCodebook:
    """Over a Python tokenizer of transformers. Holds the interpreter; its vocabulary has no table of bytes."""

    form: TokenForm = "other"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def num_ids(self) -> int:
        return max([len(self._tokenizer), *(token_id + 1 for token_id in self.added())])

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [self._tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def encode_whole(
        self,
        inputs: Sequence[str | tuple[str, str]],
        add_special_tokens: bool,
        most: int | None,
        enough: int | None = None,
    ) -> list[Encoded]:
        found = []
        for given in inputs:
            texts = (given,) if isinstance(given, str) else given
            cut = {} if most is None else {"truncation": "longest_first", "max_length": most}
            each = self._tokenizer(*texts, add_special_tokens=add_special_tokens, return_token_type_ids=True, **cut)
            found.append(Encoded(each["input_ids"], 0 if len(texts) == 1 else _second(each["token_type_ids"])))
        return found

    def decode(self, ids: Sequence[int], skip_special_tokens: bool, spaces_between_special_tokens: bool) -> str:
        decoded: str = self._tokenizer.decode(
            list(ids),
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return decoded

    def token_of(self, token_id: int) -> str | None:
        token: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        return token

    def id_of(self, token: str) -> int | None:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary.get(token)

    def added(self) -> dict[int, tuple[str, bool]]:
        decoder = self._tokenizer.added_tokens_decoder
        return {i: (token.content, token.special) for i, token in decoder.items()}


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back. Safe to use from many threads."""

    codebook: Codebook
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    unk_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    """Every id that ends an answer: `eos_id`, and those the model's generation settings add."""
    chat_template: ChatTemplate | None = field(default=None, repr=False)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. A model's embedding may be padded beyond it."""
        return self.codebook.num_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.codebook.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return self.codebook.encode_batch(texts, add_special_tokens)

    def encode_whole(
        self,
        inputs: Sequence[str | tuple[str, str]],
        *,
        add_special_tokens: bool = True,
        most: int | None = None,
        enough: int | None = None,
    ) -> list[Encoded]:
        """Texts and pairs of texts, cut to at most `most` tokens each (a pair's longer text first). A caller that refuses
        texts with more than `enough` tokens need not wait for the rest of them."""
        return self.codebook.encode_whole(inputs, add_special_tokens, most, enough)

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        return self.codebook.decode(ids, skip_special_tokens, spaces_between_special_tokens)

    def decode_long(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """What `decode` returns, for lists of any length: the library would hold the interpreter for seconds. Raises
        `InvalidRequest` for a list that this tokenizer can't decode in pieces."""
        if len(ids) <= _LONG_IDS:
            return self.decode(ids, skip_special_tokens)
        table = self.token_bytes()
        if table is None:
            raise InvalidRequest(
                what=f"{len(ids)} token ids are too many",
                why=f"this tokenizer decodes at most {_LONG_IDS} at once",
                fix="send several lists",
                param="tokens",
            )
        silent = self.silent_ids(skip_special_tokens, frozenset())
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = []
        for at in range(0, len(ids), _LONG_IDS):
            spelled = [table[each] for each in ids[at : at + _LONG_IDS] if each not in silent]
            pieces.append(decoder.decode(b"".join(spelled), at + _LONG_IDS >= len(ids)))
        text = "".join(pieces)
        strips_space = self.codebook.form == "metaspace" and not self.decode(ids[:1], False).startswith(" ")
        return text.removeprefix(" ") if strips_space else text

    def id_of(self, token: str) -> int | None:
        return self.codebook.id_of(token)

    def token_of(self, token_id: int) -> str | None:
        """A token's name as the vocabulary spells it."""
        return self.codebook.token_of(token_id)

    def token_text(self, token_id: int) -> str:
        """What one token stands for, alone: broken characters show as U+FFFD, special tokens by name."""
        table = self.token_bytes()
        if table is None:
            return self.codebook.decode([token_id], False, False)
        return table[token_id].decode("utf-8", "replace") if 0 <= token_id < len(table) else ""

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out of text."""
        return frozenset(self._special.values())

    def special_among(self, texts: Iterable[str]) -> frozenset[int]:
        """Of these texts, those that are special tokens, by their ids."""
        return frozenset(self._special[text] for text in texts if text in self._special)

    def silent_ids(self, skip_special: bool, kept: frozenset[int]) -> frozenset[int]:
        """Ids without text: the special tokens if they are skipped, except `kept`."""
        return self.special_ids - kept if skip_special else frozenset()

    @cached_property
    def _special(self) -> dict[str, int]:
        return {text: i for i, (text, special) in self.codebook.added().items() if special}

    def token_bytes(self) -> list[bytes] | None:
        """The bytes each id adds to text, special tokens by their name, holes empty; None: texts are not joined bytes."""
        return self._token_bytes

    @cached_property
    def _token_bytes(self) -> list[bytes] | None:
        if self.codebook.form == "other":
            return None
        names = [self.codebook.token_of(i) for i in range(self.codebook.num_ids)]
        return bytes_of_tokens(names, self.codebook.added(), self.codebook.form)


def shares(lengths: Sequence[int], room: int) -> list[int]:
    """Lengths to which one or two texts are truncated so that they fit `room` tokens together: the longer one is cut
    first, until both are equal."""
    if sum(lengths) <= room:
        return list(lengths)
    if len(lengths) == 1:
        return [room]
    first, second = lengths
    short = min(first, second, room // 2)
    return [short, room - short] if first <= second else [room - short, short]


def _second(segments: Sequence[int]) -> int:
    return next((at for at, segment in enumerate(segments) if segment), 0)
