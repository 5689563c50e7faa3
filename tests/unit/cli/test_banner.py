"""What is printed when a server is ready, of a server that is made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bough.cli import serving
from bough.cli.serving import banner
from bough.config.server_args import build_config
from bough.entrypoints.served_model import ServedModel


def shown(
    *, facts: dict[str, Any] | None = None, format: str = "gguf", stored_as: str = "Q4_1", **settings: Any
) -> str:
    config = build_config(**settings)
    known = {"device": "cpu", "dtype": "float32", "kv_tokens": 16_384, "memory": [["weights", 96_573_849, ""]]}
    served = ServedModel(
        name="tiny", aliases=frozenset(), tokenizer=None, context_length=8192, format=format, stored_as=stored_as,
        facts=known | (facts or {}),
    )  # fmt: skip
    server = SimpleNamespace(config=config, url="http://127.0.0.1:30000", port=30_000, seconds=1.0)
    return banner(server, SimpleNamespace(served=served))  # type: ignore[arg-type]


def test_weights_and_kv_capacity() -> None:
    text = shown()
    assert "  weights    GGUF, Q4_1, 92.10 MiB in memory" in text
    assert "  KV cache   16,384 tokens" in text
    assert "  weights    safetensors, BF16" in shown(format="safetensors", stored_as="BF16")
    assert "drawn at random" in shown(stored_as="")
    quantised = shown(format="safetensors", stored_as="I32", facts={"weight_format": "GPTQ, INT4 in groups of 128"})
    assert "  weights    safetensors, GPTQ, INT4 in groups of 128, 92.10 MiB in memory" in quantised


def test_a_better_model_is_named_beside_the_default_one_only() -> None:
    assert "  next       a better model: bough serve Qwen/Qwen3-1.7B-GGUF:Q8_0" in shown()
    assert "bough serve Qwen/Qwen3-8B" in shown(facts={"device": "cuda"})
    assert "a better model" not in shown(model="org/repo")


def test_the_network_address_is_shown_to_those_who_listen_to_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "network_address", lambda: "192.168.7.9")
    assert "  network    http://192.168.7.9:30000" in shown(host="0.0.0.0", api_key="k")
    assert "192.168.7.9" not in shown()
    monkeypatch.setattr(serving, "network_address", lambda: "")
    assert "  network " not in shown(host="0.0.0.0", api_key="k")
