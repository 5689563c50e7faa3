"""`suffix`: the marks are the model's, and only where it has them."""

from __future__ import annotations

import httpx
import pytest
import tokenizers
from scripted_server import FakeServer, byte_tokenizer, serving
from tokenizers import models

from bough.core.errors import ConfigError
from bough.core.messages import unpack_ids
from bough.entrypoints.fim import FORMATS, choose_format
from bough.tokenizer import Tokenizer
from bough.tokenizer.tokenizer import FastCodebook


def tokenizer_with(*marks: str) -> Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    made.add_special_tokens(list(marks))
    return Tokenizer(codebook=FastCodebook(made))


@pytest.mark.parametrize("name", FORMATS)
def test_the_tokenizer_tells_the_format(name: str) -> None:
    form = FORMATS[name]
    assert choose_format("auto", tokenizer_with(*form.marks)) is form
    assert choose_format(name, tokenizer_with(*form.marks)) is form
    assert choose_format("none", tokenizer_with(*form.marks)) is None
    with pytest.raises(ConfigError, match="no marks"):
        choose_format(name, tokenizer_with(form.before))
    with pytest.raises(ConfigError, match="completion_template"):
        choose_format("emacs", tokenizer_with(*form.marks))


def test_without_marks_there_is_no_format() -> None:
    assert choose_format("auto", byte_tokenizer()) is None
    assert choose_format("auto", None) is None


def test_completions_and_ollama_fill_in() -> None:
    with serving(served={"fim": FORMATS["star_coder"]}) as running:
        body = {"prompt": "def f(", "suffix": "return x", "model": "fake"}
        for path, extra in (("/v1/completions", {}), ("/api/generate", {"stream": False})):
            answer = httpx.post(running.url + path, json={**body, **extra})
            assert answer.status_code == 200, answer.text
            ids = unpack_ids(running.engine.seen[-1].prompt).tolist()
            assert bytes(ids) == b"<fim_prefix>def f(<fim_suffix>return x<fim_middle>"
        for wrong in ({"echo": True}, {"prompt": [1, 2]}, {"suffix": "a <fim_middle> b"}):
            assert httpx.post(f"{running.url}/v1/completions", json={**body, **wrong}).status_code == 400


def test_models_without_marks_refuse(server: FakeServer) -> None:
    refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "suffix": "b"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "suffix"
