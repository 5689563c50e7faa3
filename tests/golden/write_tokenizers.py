"""Writes ranks.json and mistral_chats.json: what tiktoken and mistral-common make of texts and chats.

    pip install tiktoken==0.14.0 mistral-common==1.13.0 regex && python tests/golden/write_tokenizers.py

Vocabularies are tiny ones, trained here; the real ones differ in nothing but their size.
"""

from __future__ import annotations

import base64
import json
import random
import tempfile
import unicodedata
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import regex
import tiktoken
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

HERE = Path(__file__).parent
UPPER, LOWER = (
    rf"[\p{{{first}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for first in (r"Lu}\p{Lt", "Ll")
)  # fmt: skip
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
)
HUNYUAN = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
)
NAMES = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", *(f"<SPECIAL_{i}>" for i in range(20, 32)), "[ARGS]",
    "[CALL_ID]", "[THINK]", "[/THINK]",
]  # fmt: skip


def texts() -> list[str]:
    pick = random.Random(1)
    letters = "abcXYZ 019.,;!?'\n\t漢字éßя한🙂"
    return [
        "Hello, world!", "  leading spaces", "tabs\tand\nnewlines\r\n\r\n  x", "don't can't WE'LL I'M", "naïve café ﬁ ﷺ",
        "日本語のテキスト、漢字かな交じり文。", "Привет мир! Как дела?", "مرحبا بالعالم", "12345 67,890.123",
        "x=1;y=[2]*3 # code\n\tdef f(a:int)->int:\n\t\treturn a**2", "🙂👩‍👩‍👧‍👦🏳️‍🌈", "a" * 300, "  " * 50,
        "MixedCaseWordsHere HTTPServer iPhone XMLHttpRequest", "ไทย ภาษา", "한국어 문장입니다", "\x00\x01 weird \ufeff",
        "http://example.com/a/b?c=d&e=f#g", "",
        *("".join(pick.choice(letters) for _ in range(pick.randint(1, 60))) for _ in range(40)),
    ]  # fmt: skip


def trained(corpus: str, count: int) -> list[bytes]:
    """Bytes, then merges of the commonest pairs."""
    found = regex.findall(r" ?\p{L}+|\p{N}+|\s+|[^\s\p{L}\p{N}]+", corpus)
    words = Counter(tuple(bytes([byte]) for byte in word.encode()) for word in found)
    tokens = [bytes([byte]) for byte in range(256)]
    while len(tokens) < count:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, times in words.items():
            for pair in pairwise(word):
                pairs[pair] += times
        best = max(pairs.items(), key=lambda item: (item[1], item[0]))[0]
        tokens.append(b"".join(best))
        merged: Counter[tuple[bytes, ...]] = Counter()
        for word, times in words.items():
            merged[merge(word, best)] += times
        words = merged
    return tokens


def merge(word: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    made: list[bytes] = []
    for part in word:
        if made and (made[-1], part) == pair:
            made[-1] += part
        else:
            made.append(part)
    return tuple(made)


def tekken_file(tokens: list[bytes], version: str, names: list[str]) -> str:
    vocab = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for i, token in enumerate(tokens)
    ]
    config = {
        "pattern": TEKKEN, "num_vocab_tokens": 1000 + len(tokens), "default_vocab_size": 1650,
        "default_num_special_tokens": 1000, "version": version,
    }  # fmt: skip
    file = Path(tempfile.mkdtemp()) / "tekken.json"
    special = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)]
    file.write_text(json.dumps({"config": config, "vocab": vocab, **({"special_tokens": special} if special else {})}))
    return str(file)


def write_ranks(given: list[str], tokens: list[bytes]) -> None:
    ids = {token: i for i, token in enumerate(tokens)}

    def encoded(pattern: str, of: list[str]) -> list[list[int]]:
        encoding = tiktoken.Encoding("tiny", pat_str=pattern, mergeable_ranks=ids, special_tokens={})
        return [encoding.encode(text, disallowed_special=()) for text in of]

    tekken = Tekkenizer.from_file(tekken_file(tokens, "v3", []))
    made = {
        "ranks": [base64.b64encode(token).decode() for token in tokens],
        "tekken_pattern": TEKKEN,
        "texts": given,
        "kimi": encoded(KIMI, given),
        "hunyuan": encoded(HUNYUAN, [unicodedata.normalize("NFC", text) for text in given]),
        "tekken": [tekken.encode(text, bos=False, eos=False) for text in given],
    }
    (HERE / "ranks.json").write_text(json.dumps(made, separators=(",", ":")) + "\n")


def chats() -> dict[str, dict[str, Any]]:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Weather of a city", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    made = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    call = {
        "role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", "type": "function", "function": made}],
    }  # fmt: skip
    result = {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "sunny"}
    system, hi, ask = (
        {"role": role, "content": text}
        for role, text in (("system", "Be brief."), ("user", "Hi"), ("user", "Weather?"))
    )
    return {
        "one": {"messages": [hi]},
        "system": {
            "messages": [system, hi, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Bye"}]
        },
        "tools": {"messages": [ask], "tools": tools},
        "called": {"messages": [system, ask, call, result], "tools": tools},
        "answered": {
            "messages": [
                ask, call, result, {"role": "assistant", "content": "It is sunny."}, {"role": "user", "content": "Thanks"},
            ],
            "tools": tools,
        },
    }  # fmt: skip


def write_chats(tokens: list[bytes]) -> None:
    written: dict[str, dict[str, str]] = {}
    for version in ("v3", "v7", "v11", "v13"):
        tokenizer = MistralTokenizer.from_file(tekken_file(tokens, version, NAMES))
        written[version] = {
            name: tokenizer.encode_chat_completion(ChatCompletionRequest.from_openai(**chat)).text
            for name, chat in chats().items()
        }
    made = {"conversations": chats(), "texts": written}
    (HERE / "mistral_chats.json").write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    given = texts()
    prose = (HERE.parents[1] / "docs" / "language.md").read_text()[:20_000]
    tokens = trained(" ".join(given) + prose + " 日本語 漢字 日本語 Привет мир " * 20, 700)
    write_ranks(given, tokens)
    write_chats(tokens)
