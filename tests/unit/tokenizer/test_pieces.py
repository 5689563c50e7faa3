"""Long texts in pieces: the same ids as whole, where the pieces are safe; and where they are not, none are made."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from bough.config.hf import default_model_path
from bough.core.errors import InvalidRequest
from bough.tokenizer import Tokenizer, load_tokenizer, pieces, tokenizer as module
from bough.tokenizer.pieces import find_rule
from bough.tokenizer.tokenizer import FastCodebook


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return load_tokenizer(default_model_path())


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("LONG_CHARS", 300), ("MOST_UNCUT_CHARS", 1200), ("_NEAR", 40)):
        monkeypatch.setattr(pieces, name, size)
    monkeypatch.setattr(module, "LONG_CHARS", 300)


def some_text(tokenizer: Tokenizer, count: int) -> str:
    pick = random.Random(3)
    ids = [pick.randrange(200, tokenizer.vocab_size) for _ in range(count)]
    return tokenizer.decode(ids) + "\nThe end\n\n of it.  漢字 and\nmore\r\n" * 5


def test_pieces_have_the_ids_of_the_whole(smollm: Tokenizer) -> None:
    codebook = smollm.codebook
    assert isinstance(codebook, FastCodebook)
    text = some_text(smollm, 3000)
    assert len(list(codebook._rule.spans(text))) > 20  # type: ignore[union-attr]
    for special in (True, False):
        whole = codebook._encode([text, "short"], special)
        assert codebook.encode_batch([text, "short"], special) == whole
    cut = codebook.encode_whole([text, (text, text)], True, 100)
    assert [len(each.ids) for each in cut] == [100, 100]
    assert cut[0].ids == whole[0][:100]
    counted = codebook.encode_whole([text], True, None, 50)[0].ids
    assert 50 < len(counted) < len(whole[0])
    assert counted == whole[0][: len(counted)]


def metaspace() -> tokenizers.Tokenizer:
    """As SentencePiece's: a space before every text, and merges over all of it."""
    letters = [chr(code) for code in [*range(32, 127), 0x2581, 10]]
    vocab = {letter: at for at, letter in enumerate(dict.fromkeys(letters))}
    merges = []
    for left, right in (("\u2581", "t"), ("\u2581t", "h"), ("e", "r"), ("\u2581", "a")):
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="?"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return made


def test_tokenizers_that_put_a_space_before_texts() -> None:
    codebook = FastCodebook(metaspace())
    text = "there are other trees that\nare rather the others " * 60
    assert codebook.encode_batch([text], False) == codebook._encode([text])
    assert len(list(codebook._rule.spans(text))) > 5  # type: ignore[union-attr]


def test_tokens_over_word_borders_allow_no_cut() -> None:
    made = metaspace()
    made.add_tokens(["of the"])
    codebook = FastCodebook(made)
    assert codebook._rule is None
    text = "one of the trees " * 100
    assert codebook.encode_batch([text], False) == codebook._encode([text])
    crossing = tokenizers.Tokenizer(
        models.BPE(vocab={"a": 0, " ": 1, "a ": 2, "?": 3}, merges=[("a", " ")], unk_token="?")
    )
    assert find_rule(FastCodebook(crossing)._encode, []) is None
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "?": 1}, "?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert find_rule(FastCodebook(words)._encode, []) is not None


def test_a_text_without_words_is_refused(smollm: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="without a word's end"):
        smollm.encode("a" * 5000)
    assert smollm.encode("a" * 1000), "up to a size it is taken whole"
    with pytest.raises(InvalidRequest, match="without a word's end"):
        smollm.encode("the first words are fine " * 40 + "x" * 5000)


def test_long_lists_of_ids(smollm: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_LONG_IDS", 7)
    ids = smollm.encode("Grüße 🎉🎉 漢字 and<|im_end|> more. " * 20)
    for skip in (True, False):
        assert smollm.decode_long(ids, skip) == smollm.decode(ids, skip)
    spaced = Tokenizer(codebook=FastCodebook(metaspace()))
    ids = spaced.encode("there are trees, and there are others")
    assert spaced.decode_long(ids) == spaced.decode(ids)
