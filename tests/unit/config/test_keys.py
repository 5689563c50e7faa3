"""Keys by name: how they are given, found and refused."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from bough.config.check import check_exposure
from bough.config.concerns import ServerConfig
from bough.config.keys import Key, load_keys, split_key
from bough.config.server_args import dump_yaml, load_config, public
from bough.core.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "name", "key"),
    [
        ("s3cret", "default", "s3cret"),
        ("alice=s3cret", "alice", "s3cret"),
        ("alice=a=b", "alice", "a=b"),
        ("c2VjcmV0LWtleQ==", "default", "c2VjcmV0LWtleQ=="),
        ("c2VjcmV0LWtl=", "default", "c2VjcmV0LWtl="),
        ("alice=c2VjcmV0LWtleQ==", "alice", "c2VjcmV0LWtleQ=="),
        ("no name=key", "default", "no name=key"),
        ("=key", "default", "=key"),
    ],
)
def test_names_of_keys(given: str, name: str, key: str) -> None:
    assert split_key(given) == (name, key)
    found = load_keys(ServerConfig(api_key=(given,)))
    assert found.find(key.encode()) == Key(name=name)
    assert found.find(key.encode() + b"x") is None
    assert found.find(b"") is None


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(
        "alice: sk-alice\n"
        "bob: {key: [sk-old, sk-new], requests_per_minute: 60, tokens_per_minute: 1000}\n"
        f"carol: {{sha256: {hashlib.sha256(b'sk-carol').hexdigest()}}}\n"
    )
    found = load_keys(ServerConfig(api_key=("dave=sk-dave",), api_keys_file=str(path)))
    bob = Key(name="bob", requests_per_minute=60, tokens_per_minute=1000)
    wanted = {"sk-alice": Key(name="alice"), "sk-old": bob, "sk-new": bob, "sk-carol": Key(name="carol")}
    assert {key: found.find(key.encode()) for key in wanted} == wanted
    assert set(found.named) == {"alice", "bob", "carol", "dave"}
    assert "sk-" not in repr(found)


@pytest.mark.parametrize(
    "text",
    [
        "", "just text", "- a\n- b", "a: [", "a: 5", "a: ''", "a: {}", "a: {key: x, colour: red}", "'a b': x", "admin: x",
        "a: {key: x, tokens_per_minute: many}", "a: {key: x, tokens_per_minute: -1}",
        "a: {key: x, requests_per_minute: true}", "a: {sha256: abc}", "a: x\nb: x", "a: {key: [x, 5]}",
    ],
)  # fmt: skip
def test_files_that_can_not_be_meant(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_keys(ServerConfig(api_keys_file=str(path)))
    assert refused.value.param == "api_keys_file"
    assert refused.value.fix


def test_other_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read"):
        load_keys(ServerConfig(api_keys_file=str(tmp_path / "nothing")))
    with pytest.raises(ConfigError, match="the same"):
        load_keys(ServerConfig(api_key=("a=x", "b=x")))
    with pytest.raises(ConfigError, match="no keys"):
        check_exposure(load_config({"isolate_cache": True}, environ={}).config)


@pytest.mark.parametrize(
    ("given", "environ", "keys"),
    [
        ({"api_key": "a,b"}, {}, ("a,b",)),
        ({"api_key": ["n=a", "m=b"]}, {}, ("n=a", "m=b")),
        ({}, {"BOUGH_API_KEY": "a,b"}, ("a,b",)),
    ],
)
def test_keys_are_never_split_or_shown(given: dict[str, Any], environ: dict[str, str], keys: tuple[str, ...]) -> None:
    config = load_config(given, environ=environ).config
    assert config.server.api_key == keys
    assert "api_key" not in public(config)
    assert all(f'"{key}"' not in dump_yaml(config) for key in keys)
