"""SGLang's flags: each acts, is taken for another setting (which is said), or is refused with a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bough.cli.config_flags import parse, sglang_markdown
from bough.config import sglang
from bough.config.flags import ALIASES, abbreviated, is_setting, settings
from bough.config.server_args import ServerArgs, load_config
from bough.core.errors import ConfigError

NAMES = (Path(__file__).parent / "sglang_flags.txt").read_text().split()
"""Every flag of SGLang 0.5.23, and some of releases before it."""


def notes_of(*arguments: str, **environ: str) -> tuple[str, ...]:
    return parse(list(arguments), environ=environ).loaded.notes


def test_every_flag_has_one_fate() -> None:
    for name in NAMES:
        acts = is_setting(name) or name == "config"
        mapped, refused = name in sglang.MAPPED, name in sglang.refused()
        assert acts or mapped or refused, f"{name}: a flag of SGLang's that nothing is said about"
        assert not (mapped and refused), name
        assert acts or name not in sglang.ACTING, name


def test_names_are_sglangs() -> None:
    assert {*sglang.MAPPED, *sglang.refused(), *sglang.ACTING} <= set(NAMES)


REFUSED = sorted(set(sglang.refused()) - set(settings()) - set(ALIASES))


def test_what_is_refused_says_why() -> None:
    for name in REFUSED:
        entry = sglang.refused()[name]
        with pytest.raises(ConfigError) as caught:
            load_config({name: True if entry.is_switch else "something"}, environ={})
        told = caught.value
        assert (told.what, told.why, told.fix) == (f"{name} is not supported", entry.why, entry.fix)
        load_config({name: False if entry.is_switch else None}, environ={})


@pytest.mark.parametrize("name", REFUSED[::12])
def test_what_is_refused_says_why_on_a_command_line(name: str) -> None:
    entry, flag = sglang.refused()[name], "--" + name.replace("_", "-")
    with pytest.raises(ConfigError) as caught:
        parse([flag] if entry.is_switch else [flag, "something", "else", "model"], environ={})
    assert (caught.value.what, caught.value.why) == (f"{flag} is not supported", entry.why)
    if entry.default:
        assert notes_of(flag, entry.default) == (f"{flag} changes nothing: it is at its default",)


@pytest.mark.parametrize(
    ("arguments", "setting", "value"),
    [
        (["--constrained-json-disable-any-whitespace"], "json_max_whitespace", 0),
        (["--cuda-graph-backend-decode", "disabled"], "cuda_graph", False),
        (["--cuda-graph-backend-decode", "full"], "cuda_graph", True),
        (["--file-storage-path", "x"], "batch_dir", "x"),
        (["--log-requests-format", "json"], "log_format", "json"),
        (["--media-url-max-file-size-mb", "3"], "max_media_bytes", 3 * 1024 * 1024),
        (["--attention-backend", "flashinfer"], "attention_backend", "auto"),
        (["--attention-backend", "fa3"], "attention_backend", "auto"),
        (["--grammar-backend", "outlines"], "grammar_backend", "auto"),
        (["--log-requests-level", "3"], "log_requests_level", 1),
    ],
)
def test_what_is_taken_for_another_setting_is_said(arguments: list[str], setting: str, value: object) -> None:
    loaded = parse(arguments, environ={}).loaded
    assert getattr(ServerArgs.of(loaded.config), setting) == value
    assert any(note.startswith(arguments[0]) for note in loaded.notes)
    assert loaded.origins[setting] == arguments[0]


@pytest.mark.parametrize("name", sorted(set(sglang.MAPPED) - set(settings()) - set(ALIASES)))
def test_a_mapped_flag_is_never_silent(name: str) -> None:
    mapped, flag = sglang.MAPPED[name], "--" + name.replace("_", "-")
    values = [None] if mapped.is_switch else [*(mapped.values or ["json" if "format" in name else "7"])]
    for value in values:
        assert notes_of(flag, *([] if value is None else [value]))[0] == f"{flag} {mapped.said}"
        assert mapped.target in settings() or "changes nothing" in mapped.said
    if mapped.values and not mapped.is_switch:
        with pytest.raises(ConfigError, match="must be one of"):
            parse([flag, "nonsense"], environ={})


@pytest.mark.parametrize(
    ("arguments", "setting", "value"),
    [
        (["--tp", "2"], "tp_size", 2),
        (["--model-path", "x"], "model", "x"),
        (["--attention-backend", "torch_native"], "attention_backend", "torch"),
        (["--kv-cache-dtype", "bf16"], "kv_cache_dtype", "bfloat16"),
        (["--radix-eviction-policy", "slru"], "radix_eviction_policy", "slru"),
        (["--radix-eviction-policy", "filo"], "radix_eviction_policy", "filo"),
        (["--max-prefill-tokens", "4096"], "max_prefill_tokens", 4096),
        (["--decode-log-interval", "40"], "decode_log_interval", 40),
        (["--log-requests-level", "0"], "log_requests_level", 0),
        (["--tokenizer-mode", "slow"], "tokenizer_mode", "slow"),
        (["--download-dir", "x"], "download_dir", "x"),
        (["--allow-auto-truncate"], "allow_auto_truncate", True),
        (["--preferred-sampling-params", "{}"], "preferred_sampling_params", "{}"),
        (["--disable-priority-preemption"], "priority_preemption", False),
        (["--stream-response-default-include-usage"], "stream_usage", True),
        (["--stream-output"], "incremental_streaming_output", True),
        (["--enable-overlap-schedule"], "overlap_schedule", True),
    ],
)
def test_flags_that_act(arguments: list[str], setting: str, value: object) -> None:
    loaded = parse(arguments, environ={}).loaded
    assert getattr(ServerArgs.of(loaded.config), setting) == value
    assert loaded.notes == ()


def test_keyword_arguments_of_older_engines() -> None:
    args = ServerArgs(enable_overlap_schedule=False, stream_output=True, dp_size=1, disaggregation_mode="null")
    assert (args.overlap_schedule, args.incremental_streaming_output) == (False, True)


@pytest.mark.parametrize(
    ("arguments", "setting", "value"),
    [
        (["--mem-frac", "0.5"], "mem_fraction_static", 0.5),
        (["--mem-frac=0.5"], "mem_fraction_static", 0.5),
        (["--context-len", "128"], "context_length", 128),
        (["--tensor", "2"], "tp_size", 2),
        (["--disable-rad"], "radix_cache", False),
        (["--chunked", "256"], "chunked_prefill_size", 256),
    ],
)
def test_unambiguous_abbreviations(arguments: list[str], setting: str, value: object) -> None:
    loaded = parse(arguments, environ={}).loaded
    assert getattr(ServerArgs.of(loaded.config), setting) == value
    (note,) = loaded.notes
    assert note.startswith(arguments[0].partition("=")[0] + " is read as --")


@pytest.mark.parametrize("argument", ["--max", "--disable", "--x", "--mem-fraction-statics"])
def test_ambiguous_abbreviations_are_unknown_options(argument: str) -> None:
    assert abbreviated(argument.removeprefix("--").replace("-", "_")) is None
    with pytest.raises(ConfigError, match="unknown option"):
        parse([argument, "3"], environ={})


def test_an_abbreviation_of_what_is_refused_is_refused() -> None:
    with pytest.raises(ConfigError, match="--enable-torch-compile-debug-mode is not supported"):
        parse(["--enable-torch-compile-d"], environ={})


def test_sglangs_variable_for_the_log_level() -> None:
    assert load_config({}, environ={"SGLANG_LOG_LEVEL": "debug"}).config.log.log_level == "debug"
    both = {"SGLANG_LOG_LEVEL": "debug", "BOUGH_LOG_LEVEL": "error"}
    assert load_config({}, environ=both).config.log.log_level == "error"
    assert load_config({"log_level": "info"}, environ=both).config.log.log_level == "info"
    with pytest.raises(ConfigError, match="SGLANG_LOG_LEVEL is 'loud'"):
        load_config({}, environ={"SGLANG_LOG_LEVEL": "loud"})


PAGE = Path(__file__).parents[3] / "docs" / "sglang.md"


def test_the_page_has_every_flag_as_it_is() -> None:
    text = PAGE.with_name("sglang_flags.md").read_text()
    assert text == sglang_markdown(), "run: bough serve --help=sglang > docs/sglang_flags.md"
    missing = [name for name in NAMES if f"`--{name.replace('_', '-')}`" not in text]
    assert missing == []


def test_the_page_names_tests_that_exist() -> None:
    rows = [line for line in PAGE.read_text().partition("## Flags")[0].splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith(("| behaviour", "|---"))]
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`(tests/[\w/.]+)::(\w+)`", row)
        assert named, f"no test: {row}"
        for file, test in named:
            assert f"def {test}(" in (PAGE.parents[1] / file).read_text(), f"{file} has no {test}"
