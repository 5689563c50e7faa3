"""What a beam says is told as the detokenizer tells the same tokens."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from bough.core.messages import Began, Delta, Deltas, End, RowOutput, TextSpec, Tokens, pack_ids
from bough.detokenizer.process import Answers
from bough.engine_client.beams import spoken
from bough.engine_client.request import Request
from bough.parsers import REASONING_FORMATS, assemble
from bough.tokenizer import Tokenizer
from bough.tokenizer.tokenizer import FastCodebook

PROMPT = np.array([5, 6, 7], np.int32)
STOP = "<stop>"


def byte_level(special: list[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    return Tokenizer(codebook=FastCodebook(made))


def word_level(special: list[str]) -> Tokenizer:
    words = {word: at for at, word in enumerate(["hm", "so", "far", "four", "[UNK]", "ok"])}
    made = tokenizers.Tokenizer(models.WordPiece(vocab=words, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(["[A]", "[B]", *special])
    return Tokenizer(codebook=FastCodebook(made))


def plain(ids: list[int], spec: TextSpec, end: End, tokenizer: Tokenizer) -> Delta:
    answers = Answers(tokenizer)
    answers.handle(Began(id=1, rid="r", text=spec))
    answers.handle(Tokens(ids=[1], counts=[len(ids)], tokens=pack_ids(ids), rows={0: RowOutput(end=end)}))
    (message,) = answers.take()[0][0]
    assert isinstance(message, Deltas)
    (delta,) = message.deltas
    return delta


def both(tokenizer: Tokenizer, ids: list[int], end: End, **fields: Any) -> tuple[Any, Any]:
    """What the detokenizer and what the search make of the same tokens."""
    tail = pack_ids(PROMPT) if tokenizer.codebook.form == "other" else b""
    spec = TextSpec(**fields, prompt_tail=tail)
    told = []
    beam = spoken(Delta(id=1, tokens=pack_ids(ids), end=end), Request(prompt=PROMPT), PROMPT, tokenizer, spec)
    for delta in (plain(ids, spec, end, tokenizer), beam):
        parsed = assemble(delta.events)
        calls = [(call.name, call.arguments) for call in parsed.tool_calls]
        told.append((delta.text, parsed.reasoning, parsed.content, calls))
    return told[0], told[1]


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", sorted(REASONING_FORMATS))
@pytest.mark.parametrize("make", [byte_level, word_level])
def test_reasoning_is_told_apart_alike(name: str, special: bool, forced: bool, make: Any) -> None:
    format = REASONING_FORMATS[name]
    marks = [*format.starts, *format.ends, *format.ended_by]
    marks = [mark for mark in marks if " " not in mark and "<|message|>" not in mark]
    tokenizer = make([STOP, *(marks if special else [])])
    for text in ("hm so far", f"hm{format.end}four", f"{format.start}hm{format.end}four", f"so{STOP}far", format.end):
        ids = tokenizer.encode(text, add_special_tokens=False)
        alike, beam = both(tokenizer, ids, End(reason="length"), reasoning_parser=name, reasoning_forced=forced)
        assert beam == alike, text
        if forced and text == f"hm{format.end}four" and not format.harmony and make is byte_level:
            told = ("", f"{format.start}{text}") if format.stays_content else ("hm", "four")
            assert beam[1:3] == told, "the test says too little"


@pytest.mark.parametrize("no_stop_trim", [False, True])
@pytest.mark.parametrize("skip_special_tokens", [False, True])
def test_stop_tokens_are_told_alike(no_stop_trim: bool, skip_special_tokens: bool) -> None:
    """The token that ends a call is the parser's to read, any other stop token is nobody's."""
    flags = {"no_stop_trim": no_stop_trim, "skip_special_tokens": skip_special_tokens}
    tokenizer = byte_level([STOP, "<|channel|>", "<|message|>", "<|call|>", "<|start|>", "<|end|>"])
    call = '<|channel|>commentary to=functions.look<|message|>{"at": 1}<|call|>'
    tools = json.dumps([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}])
    ids = tokenizer.encode(call, add_special_tokens=False)
    alike, beam = both(tokenizer, ids, End(reason="stop", matched=ids[-1]), tool_parser="gpt-oss", tools=tools, **flags)
    assert beam == alike
    assert beam[3] == [("look", '{"at": 1}')]
    for fields in ({}, {"tool_parser": "gpt-oss", "tools": tools}):
        ids = tokenizer.encode(f"ok{STOP}", add_special_tokens=False)
        alike, beam = both(tokenizer, ids, End(reason="stop", matched=ids[-1]), **fields, **flags)
        assert beam == alike
