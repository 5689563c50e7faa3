"""Settings are generated from the dataclasses: every field has a flag, a type, a help text and one owner."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from bough.config import flags
from bough.config.concerns import AUTO, Config
from bough.core.errors import ConfigError


def test_every_field_is_a_setting_with_help() -> None:
    expected = [
        (group.name, field.name)
        for group in dataclasses.fields(Config)
        for field in dataclasses.fields(group.default_factory)  # type: ignore[arg-type, misc]
    ]
    found = [(setting.group, setting.name) for setting in flags.settings().values()]
    assert found == expected  # also: no name belongs to two concerns, or the mapping would be shorter
    assert all(setting.help.endswith(".") for setting in flags.settings().values())


def test_help_is_the_field_docstring() -> None:
    assert flags.settings()["page_size"].help == "Tokens per KV page."
    assert flags.groups()["cache"] == "The KV cache and the prefix tree."


def test_aliases_lead_to_settings_and_hide_none() -> None:
    for name, alias in flags.ALIASES.items():
        assert alias.target in flags.settings()
        assert name not in flags.settings()
        assert not alias.inverted or flags.settings()[alias.target].kind == "bool"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("32k", 32_000), ("32K", 32_768), ("25.6k", 25_600), ("2GiB", 2 * 2**30), ("2gib", 2 * 2**30), ("2GB", 2 * 10**9),
        ("1M", 2**20), ("1m", 10**6), ("1_000", 1000), ("1,000", 1000), ("-1", -1), ("0.5K", 512), ("7", 7),
    ],
)  # fmt: skip
def test_human_sizes(text: str, value: int) -> None:
    assert flags.parse_value(flags.settings()["max_total_tokens"], text, "x") == value


@pytest.mark.parametrize("text", ["", "k", "12q", "1.5", "GiB", "1iB", "nan", "inf", "0x10", "1 2"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        flags.parse_value(flags.settings()["port"], text, "--port")
    assert "--port" in caught.value.what
    assert caught.value.fix


@given(st.integers(min_value=-(10**12), max_value=10**12))
def test_plain_integers_survive(number: int) -> None:
    assert flags.parse_value(flags.settings()["port"], str(number), "x") == number
    assert flags.parse_value(flags.settings()["port"], number, "x") == number


def test_auto_is_taken_only_where_it_means_something() -> None:
    assert flags.parse_value(flags.settings()["page_size"], "auto", "x") is AUTO
    with pytest.raises(ConfigError):
        flags.parse_value(flags.settings()["port"], "auto", "x")


@pytest.mark.parametrize(
    ("name", "raw"),
    [("port", True), ("port", None), ("port", [1]), ("metrics", "maybe"), ("metrics", 1), ("host", 5),
     ("schedule_policy", "fcsf"), ("cors_origins", [1]), ("drain_timeout_s", "nan"), ("drain_timeout_s", True)],
)  # fmt: skip
def test_wrong_types_are_refused(name: str, raw: object) -> None:
    with pytest.raises(ConfigError):
        flags.parse_value(flags.settings()[name], raw, name)


@pytest.mark.parametrize(("word", "meant"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_types_in_other_servers_words(word: str, meant: str) -> None:
    assert flags.parse_value(flags.settings()["dtype"], word, "--dtype") == meant
    if word != meant:
        with pytest.raises(ConfigError, match="kv_cache_dtype is"):
            flags.parse_value(flags.settings()["kv_cache_dtype"], word, "kv_cache_dtype")


def test_a_misspelt_choice_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        flags.parse_value(flags.settings()["schedule_policy"], "fcsf", "--schedule-policy")
    assert caught.value.fix == "did you mean fcfs?"


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("--modl-path", "--model-path"), ("--chunked-prefil-size", "--chunked-prefill-size"), ("--prot", "--port"),
     ("tp_sise", "tp_size"), ("--radix", "--radix-cache"), ("-tp", "--tp"),
     ("--gpu-memory-utilization", "--mem-fraction-static"), ("--max-num-batched-tokens=2048", "--chunked-prefill-size"),
     ("--ctx-size", "--context-length")],
)  # fmt: skip
def test_unknown_names_get_the_nearest(typo: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        flags.lookup(typo)
    assert caught.value.fix == f"did you mean {meant}?"


@pytest.mark.parametrize(
    ("flag", "about"),
    [("--enable-two-batch-overlap", "two-batch"), ("--disaggregation-mode", "disaggregated")],
)  # fmt: skip
def test_what_is_not_there_is_not_taken_for_something_else(flag: str, about: str) -> None:
    with pytest.raises(ConfigError) as caught:
        flags.lookup(flag)
    assert about in caught.value.why
    assert "did you mean" not in caught.value.fix
    assert not any(part in name for part in flags.NOT_THERE for name in {*flags.settings(), *flags.ALIASES})


def test_nearly_the_same_is_named_and_exists() -> None:
    assert set(flags.NEARLY.values()) <= set(flags.settings())
    assert not set(flags.NEARLY) & {*flags.settings(), *flags.ALIASES}


def test_a_hopeless_name_points_to_help() -> None:
    with pytest.raises(ConfigError) as caught:
        flags.lookup("--zzqqxx")
    assert "--help" in caught.value.fix


PARSING = {"concerns.py", "flags.py", "check.py", "presets.py", "server_args.py"}


def test_no_setting_is_read_and_ignored() -> None:
    """Somebody, outside of reading and checking settings, looks at each of them."""
    package = Path(flags.__file__).parents[1]
    looked_at: set[str] = set()
    for file in package.rglob("*.py"):
        if file.parent.name == "config" and file.name in PARSING:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                looked_at.add(node.attr)
    ignored = (
        set(flags.settings()) - looked_at - {"speculative_config", "enable_dp_attention"}
    )  # read as other settings
    assert not ignored
