"""Tokenizers made of GGUF metadata, against transformers and SentencePiece on the same vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import assume, example, given, settings, strategies as st

from bough.config.default_model import default_model_path
from bough.core.errors import UnsupportedModel
from bough.tokenizer import Tokenizer
from bough.tokenizer.gguf import tokenizer_from_gguf

TEXTS = [
    "Hello world, this isn't 12345.67 of a test!",
    "  two  spaces\n\n\ttabs and   trailing   ",
    "日本語のテキスト émoji 🎉🏽 and ‘quotes’",
    "<|im_start|>user\nhi<|im_end|>\n",
    "x_y = {'a': [1, 2, 3]}\r\n\r\nfoo()",
    "",
    " ",
    "\u0000\u0001\x7f",
    "a\u0301 n\u0303 combining",
]


@pytest.fixture(scope="module")
def reference() -> Any:
    """What transformers makes of the same file."""
    from transformers import AutoTokenizer

    path = default_model_path()
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS)
def test_the_default_model_tokenises_as_transformers_does(smollm: Tokenizer, reference: Any, text: str) -> None:
    ids = smollm.encode(text)
    assert ids == reference.encode(text)
    assert smollm.decode(ids, skip_special_tokens=False) == reference.decode(ids, clean_up_tokenization_spaces=False)


def test_the_default_models_chat_template_renders_as_transformers_does(smollm: Tokenizer, reference: Any) -> None:
    assert smollm.chat_template is not None
    for messages in (
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é\n"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    ):
        for prompt in (True, False):
            expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert smollm.chat_template.render(messages, add_generation_prompt=prompt) == expected


@given(st.text(max_size=60))
@example("🏳️‍🌈")
@settings(max_examples=150, deadline=None)
def test_byte_level_round_trips(smollm: Tokenizer, text: str) -> None:
    """For text whose bytes are all in the vocabulary; this one lacks a few that no UTF-8 text of its training had."""
    known = {token[0] for token in smollm.token_bytes() or [] if len(token) == 1}
    assume(set(text.encode()) <= known)
    ids = smollm.encode(text, add_special_tokens=False)
    assert smollm.decode(ids, skip_special_tokens=False) == text
    table = smollm.token_bytes()
    assert table is not None
    assert b"".join(table[i] for i in ids) == text.encode()


@given(st.lists(st.integers(0, 49_151), max_size=30))
@settings(max_examples=150, deadline=None)
def test_the_byte_table_says_what_decoding_says(smollm: Tokenizer, ids: list[int]) -> None:
    table = smollm.token_bytes()
    assert table is not None
    joined = b"".join(table[i] for i in ids)
    assert joined.decode("utf-8", "replace") == smollm.decode(ids, skip_special_tokens=False)
    plain = b"".join(table[i] for i in ids if i not in smollm.special_ids)
    assert plain.decode("utf-8", "replace") == smollm.decode(ids, skip_special_tokens=True)


@given(
    st.text(
        alphabet=st.sampled_from("the quickbrownfxl zydgs,.'é漢🎉\n()[]0123")
        | st.characters(codec="utf-8", exclude_characters="\u2581\0"),
        max_size=50,
    )
)
@settings(max_examples=200, deadline=None)
@example("the  quick   brown    fox")
@example("the<turn>fox")
def test_sentencepiece_models_tokenise_as_sentencepiece_does(
    sentencepiece_model: tuple[Any, Mapping[str, Any]], text: str
) -> None:
    model, metadata = sentencepiece_model
    assume(
        not any(control in text for control in ("<s>", "</s>", "<unk>"))
    )  # ids here, as in transformers' conversions
    if metadata["tokenizer.ggml.add_space_prefix"] and "<turn>" in text:
        return  # what follows a symbol gets a mark of its own here, as in transformers' conversions
    built = _build(metadata)
    expected = model.encode(text)
    assert built.encode(text, add_special_tokens=False).ids == expected
    assert built.decode(expected, skip_special_tokens=False) == model.decode(expected)


_BUILT: dict[int, Any] = {}


def _build(metadata: Mapping[str, Any]) -> Any:
    if id(metadata) not in _BUILT:
        _BUILT[id(metadata)] = tokenizer_from_gguf(metadata)
    return _BUILT[id(metadata)]


def test_sentencepiece_models_begin_with_bos_unless_told_otherwise(
    sentencepiece_model: tuple[Any, Mapping[str, Any]],
) -> None:
    _, metadata = sentencepiece_model
    assert tokenizer_from_gguf(metadata).encode("the").ids[0] == metadata["tokenizer.ggml.bos_token_id"]
    without = tokenizer_from_gguf({**metadata, "tokenizer.ggml.add_bos_token": False})
    assert without.encode("the").ids == without.encode("the", add_special_tokens=False).ids
    both = tokenizer_from_gguf({**metadata, "tokenizer.ggml.add_eos_token": True})
    assert both.encode("the").ids[-1] == metadata["tokenizer.ggml.eos_token_id"]


WORDS = {
    "llama-bpe": ("I'LL pay $12345 now\n\n ok", ["I", "'LL", " pay", " $", "123", "45", " now", "\n\n", " ok"]),
    "qwen2": ("I'll pay 123 now", ["I", "'ll", " pay", " ", "1", "2", "3", " now"]),
    "gpt-2": ("I'll pay 123  now", ["I", "'ll", " pay", " 123", " ", " now"]),
    "smollm": ("a 123 b", ["a", " ", "1", "2", "3", " b"]),
    "tekken": ("HelloWorld a1/\n", ["Hello", "World", " a", "1", "/\n"]),
    "gpt-4o": ("HelloWorld don't 1234", ["Hello", "World", " don't", " ", "123", "4"]),
}


@pytest.mark.parametrize("pre", WORDS)
def test_words_are_cut_as_each_kind_says(pre: str) -> None:
    text, expected = WORDS[pre]
    alphabet = [chr(i) for i in range(0x21, 0x180)]
    built = tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": alphabet,
            "tokenizer.ggml.merges": [],
        }
    )
    cuts = [text[begin:end] for _, (begin, end) in built.pre_tokenizer.pre_tokenize_str(text)]
    assert cuts == expected


@pytest.mark.parametrize(
    "metadata",
    [
        {"tokenizer.ggml.model": "bert"},
        {},
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "of-the-future", "tokenizer.ggml.tokens": []},
    ],
)
def test_unknown_kinds_are_refused_with_a_way_out(metadata: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        tokenizer_from_gguf(metadata)
    assert "--tokenizer" in caught.value.fix
