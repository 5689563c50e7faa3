"""Decoding in pieces, against decoding the whole."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer as Library, decoders, models, pre_tokenizers

from bough.detokenizer.decode import DecoderFactory, TokenDecoder, WindowDecoder
from bough.tokenizer import Tokenizer
from bough.tokenizer.tokenizer import FastCodebook

TEXT = "naïve café 日本語 🎉🏽 👩‍👩‍👧 déjà vu — “quoted” text\n\tend"


def in_pieces(decoder: TokenDecoder, ids: list[int], cuts: list[int]) -> list[str]:
    pieces, begin = [], 0
    for cut in [*sorted(cuts), len(ids)]:
        pieces.append(decoder.feed(ids[begin:cut]))
        begin = cut
    return [*pieces, decoder.finish()]


def plain(factory: DecoderFactory, **changes: Any) -> TokenDecoder:
    return factory.make(**{"skip_special": True, "spaces": True, "keep": frozenset(), "tail": (), **changes})


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_pieces_join_to_the_whole(smollm: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(
        st.lists(st.integers(0, 49_151), max_size=20)
        | st.text(max_size=20).map(lambda text: smollm.encode(text, add_special_tokens=False))
    )
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    factory = DecoderFactory(smollm)
    for skip in (True, False):
        joined = "".join(in_pieces(plain(factory, skip_special=skip), ids, cuts))
        assert joined == smollm.decode(ids, skip_special_tokens=skip)


def test_never_half_a_character(smollm: Tokenizer) -> None:
    """Token by token, what has come out is always a prefix of the text: no stump shows up and is corrected later."""
    ids = smollm.encode(TEXT)
    decoder, so_far, waited = plain(DecoderFactory(smollm)), "", 0
    for token_id in ids:
        piece = decoder.feed([token_id])
        waited += not piece
        so_far += piece
        assert TEXT.startswith(so_far)
        assert "\ufffd" not in piece
    assert so_far == TEXT
    assert waited > 3, "the text should have characters of several tokens"
    assert decoder.finish() == ""


def test_a_stump_at_the_end_shows_as_a_replacement(smollm: Tokenizer) -> None:
    ids = smollm.encode("🎉")[:-1]
    decoder = plain(DecoderFactory(smollm))
    assert decoder.feed(ids) == ""
    assert decoder.finish() == "\ufffd"


def test_special_tokens_can_be_kept_one_by_one(smollm: Tokenizer) -> None:
    ids = smollm.encode("<|im_start|>a<|im_end|>b")
    factory = DecoderFactory(smollm)
    assert plain(factory).feed(ids) == "ab"
    assert plain(factory, keep=frozenset({"<|im_end|>", "no token"})).feed(ids) == "a<|im_end|>b"
    assert plain(factory, skip_special=False).feed(ids) == "<|im_start|>a<|im_end|>b"


def test_ids_beyond_the_vocabulary_are_silent(smollm: Tokenizer) -> None:
    decoder = plain(DecoderFactory(smollm))
    assert decoder.feed([60_000]) == ""
    assert decoder.feed([*smollm.encode("a"), 60_000, *smollm.encode("b")]) == "ab"
    head, *rest = smollm.encode("🎉")
    assert decoder.feed([head, 60_000, *rest]) == "🎉", "what comes before them is not read twice"


@pytest.fixture(scope="module")
def wordpiece() -> Tokenizer:
    """A vocabulary whose decoder looks at neighbours."""
    words = ["[UNK]", "play", "##ing", "##ed", "the", "game", ",", "re", "##play", "\ufffd"]
    library = Library(models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    return Tokenizer(codebook=FastCodebook(library))


@given(st.lists(st.integers(0, 8), min_size=1, max_size=12), st.integers(0, 4))
@settings(max_examples=150, deadline=None)
def test_decoders_that_look_around_get_context(wordpiece: Tokenizer, ids: list[int], prompt: int) -> None:
    """Prompt and answer together read as the library reads them, however the answer arrives."""
    assert wordpiece.token_bytes() is None
    prompt = min(prompt, len(ids) - 1)
    tail, answer = ids[:prompt], ids[prompt:]
    decoder = plain(DecoderFactory(wordpiece), tail=tail)
    assert isinstance(decoder, WindowDecoder)
    said = "".join([*(decoder.feed([token_id]) for token_id in answer), decoder.finish()])
    whole = wordpiece.decode(ids)
    assert wordpiece.decode(tail) + said == whole if tail else said == whole


def test_broken_bytes_do_not_hold_text_back_for_ever(wordpiece: Tokenizer) -> None:
    decoder = WindowDecoder(wordpiece, [], frozenset(), True)
    said = [decoder.feed([9]) for _ in range(40)]
    assert any(said)
