from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import pytest

from bough.config.default_model import default_model_path
from bough.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def smollm() -> Tokenizer:
    return load_tokenizer(default_model_path())


CORPUS = [
    "the quick brown fox jumps over the lazy dog and runs through the quiet forest at night",
    "she sells sea shells by the sea shore while the waves keep rolling in and out again",
    "def main(): return [x * 2 for x in range(10)]  # doubled numbers",
    "many small words make one long sentence, and many sentences make one small book",
    "l'été dernier, nous étions à la mer; el niño corrió hacia la montaña",
] * 20


@pytest.fixture(scope="session", params=[True, False], ids=["space-prefix", "no-prefix"])
def sentencepiece_model(request: pytest.FixtureRequest) -> tuple[Any, Mapping[str, Any]]:
    """A small SentencePiece BPE model with byte fallback, and what a GGUF file would say of it."""
    sentencepiece = pytest.importorskip("sentencepiece")
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=buffer,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=request.param,
        user_defined_symbols=["<turn>", "\u2581\u2581", "\u2581\u2581\u2581"] if not request.param else ["<turn>"],
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=buffer.getvalue())

    def kind(i: int) -> int:
        if model.is_unknown(i):
            return 2
        if model.is_control(i):
            return 3
        if model.is_byte(i):
            return 6
        return 4 if model.id_to_piece(i) in ("<turn>", "\u2581\u2581", "\u2581\u2581\u2581") else 1

    size = model.get_piece_size()
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [model.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": [kind(i) for i in range(size)],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.add_space_prefix": request.param,
    }
    return model, metadata
