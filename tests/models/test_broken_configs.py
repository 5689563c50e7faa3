"""Configs with fields that are missing or wrong: the model that transformers would make of them, or an error that names the
field. Before any weight is read, and never a traceback."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import transformers
from families import DENSE, EARLIER, EXPERTS, LATENTS
from tiny import CASES, SIZES

from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.core.errors import BoughError, ConfigError
from bough.models.registry import facts_of

TABLES = {**CASES, **DENSE, **EXPERTS, **LATENTS, **EARLIER}
FAMILIES = {prefix: case for case, (prefix, _) in reversed(TABLES.items())}
"""One case of each family."""
WRONG: tuple[Any, ...] = ("x", -1, 1.5, True, [], [None], {"a": 1}, float("nan"), 10**18)
NOT_OURS = {
    "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "model_type", "output_router_logits",
    "pad_token_id", "router_aux_loss_coef", "transformers_version", "use_cache",
}  # fmt: skip


@cache
def config_of(prefix: str) -> dict[str, Any]:
    _, extra = TABLES[FAMILIES[prefix]]
    config = config_class(prefix)(**{**SIZES, **extra}).to_dict()
    config["architectures"] = ["GPT2LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM"]
    plain: dict[str, Any] = json.loads(json.dumps(config))
    return {key: value for key, value in plain.items() if key not in NOT_OURS}


def config_class(prefix: str) -> Any:
    return getattr(transformers, f"{prefix}{'Text' if prefix in ('Gemma3', 'Llama4') else ''}Config")


@pytest.mark.parametrize("prefix", FAMILIES)
def test_a_wrong_value_is_named(prefix: str) -> None:
    config = config_of(prefix)
    for key in config:
        for wrong in WRONG:
            facts = facts_or_refusal({**config, key: wrong})
            if isinstance(facts, str):
                assert key in facts, f"{key} = {wrong!r}"
            else:
                assert facts.num_parameters() > 0
                assert facts.max_context > 0


@pytest.mark.parametrize("prefix", FAMILIES)
def test_a_missing_field_is_what_transformers_takes_it_for(prefix: str) -> None:
    """Where the weights would be of other sizes, they don't fit, and an error names them."""
    config = config_of(prefix)
    for key in set(config) - {"architectures"}:
        left = {each: value for each, value in config.items() if each != key}
        found = facts_or_refusal(left)
        if isinstance(found, str):
            assert key in found
            continue
        try:
            full = json.loads(json.dumps(config_class(prefix).from_dict(dict(left)).to_dict()))
        except Exception:  # transformers refuses it as well
            continue
        expected = facts_or_refusal({**full, "architectures": config["architectures"]})
        if isinstance(expected, str):  # its default doesn't fit these tiny sizes
            continue
        same_weights = found.num_parameters() == expected.num_parameters()
        assert bare(found) == bare(expected) or not same_weights, key


def facts_or_refusal(config: dict[str, Any]) -> ModelFacts | str:
    try:
        return facts_of(config)
    except BoughError as error:
        return str(error)


def bare(facts: ModelFacts) -> ModelFacts:
    return replace(facts, config={})


def test_fields_are_checked_as_they_are_read() -> None:
    fields = Fields({"a": 3, "b": 2.0, "c": 0, "list": [1, 0], "inner": {"d": "x"}, "on": 1, "null": None})
    assert (fields.count("none", "a"), fields.whole("b"), fields.size("c"), fields.positive("c", default=7)) == (
        3,
        2,
        0,
        7,
    )
    assert (fields.flags("list", 2), fields.sizes("list"), fields.flag("on")) == ([True, False], [1, 0], True)
    assert fields.also(new="a").count("new") == 3
    assert fields.put(a=5).count("a") == 5
    assert not fields.has("null")
    for read, named in (
        (lambda: fields.count("b"), "a senseless b; it is 2.0"),
        (lambda: fields.count("null", "other"), "no null or other"),
        (lambda: fields.also(new="c").count("new"), "a senseless c"),
        (lambda: fields.inner("inner").count("d"), r"a senseless inner\.d"),
        (lambda: fields.inner("a"), "a senseless a"),
        (lambda: fields.counts("list", 2), "a senseless list"),
        (lambda: fields.flags("list", 3), "2 list for 3 layers"),
        (lambda: fields.flag("a"), "a senseless a; it is 3 and must be true or false"),
    ):
        with pytest.raises(ConfigError, match=named):
            read()


def test_layers_of_hunyuan_that_share_kv_are_refused() -> None:
    for prefix in ("HunYuanDenseV1", "HunYuanMoEV1"):
        config = config_of(prefix)
        assert isinstance(facts_or_refusal({**config, "use_cla": False}), ModelFacts)
        refusal = facts_or_refusal({**config, "use_cla": True, "cla_share_factor": 2})
        assert "use_cla can't be served" in str(refusal)
