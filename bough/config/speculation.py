"""Numbers of drafts per request and per step for a configuration. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final, NamedTuple

from bough.config.concerns import AUTO, SpeculativeAlgorithm, SpeculativeConfig
from bough.config.draft_defaults import DraftDefault, draft_default
from bough.core.errors import ConfigError

MOST_DRAFT_TOKENS = 64
"""Maximum number of tokens per row that a step verifies, including the newest token."""
STEP_DRAFTS = {"cuda": 512, "cpu": 128}
"""Maximum number of drafts of all rows of a step, by device: with more, matrix products take as long as drafts save."""
ON_DEVICE: Final[frozenset[SpeculativeAlgorithm]] = frozenset(
    {"STANDALONE", "EAGLE", "EAGLE3", "NEXTN", "MEDUSA", "DFLASH"}
)
"""Algorithms whose drafts are computed on the device."""
KEEPS_KV: Final[frozenset[SpeculativeAlgorithm]] = ON_DEVICE - {"MEDUSA"}
"""Algorithms with their own KV cache."""
TREES: Final[frozenset[SpeculativeAlgorithm]] = frozenset({"EAGLE", "EAGLE3", "NEXTN", "MEDUSA"})
"""Algorithms whose drafts can form trees."""
WINDOWED: Final[frozenset[SpeculativeAlgorithm]] = frozenset({"STANDALONE", "EAGLE", "EAGLE3"})
"""Algorithms whose attention can be limited to the newest tokens."""
_TREE_TOKENS: Final = 16
"""Tokens of a tree that a step verifies, unless it has fewer nodes."""
_ANY_STEPS: Final = 4
"""Number of drafts of an algorithm without an entry in `DRAFT_DEFAULTS`, before its checkpoint has been read."""
_METHODS: Final[dict[str, SpeculativeAlgorithm]] = {
    "ngram": "NGRAM", "suffix": "SUFFIX", "draft_model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3",
    "medusa": "MEDUSA", "dflash": "DFLASH", "mtp": "NEXTN", "deepseek_mtp": "NEXTN", "glm4_moe_mtp": "NEXTN",
    "glm4_moe_lite_mtp": "NEXTN", "mimo_mtp": "NEXTN", "qwen3_next_mtp": "NEXTN", "qwen3_5_mtp": "NEXTN",
}  # fmt: skip
"""vLLM's names of algorithms."""
_NAMED: Final = (("eagle3", "eagle3"), ("eagle", "eagle"), ("dflash", "dflash"), ("medusa", "medusa"))
"""What a draft model's name says of its method, where none is given, as vLLM reads it; other names: `draft_model`."""
_JUDGED: Final = {
    "standard": "speculative_use_rejection_sampling",
    "block": "speculative_use_block_verification",
}
"""Values of vLLM's `rejection_sample_method`."""
_NOT_TAKEN: Final = {
    "draft_tensor_parallel_size": "what drafts is split like the model, by --tp-size",
    "num_speculative_tokens_per_batch_size": "the number of drafts follows what they bring, for each range of batch sizes",
    "enable_adaptive_verification": "use --speculative-adaptive or --no-speculative-adaptive",
    "draft_sample_method": "drafts are drawn with the noise of the place that the model draws with",
    "use_heterogeneous_vocab": "what drafts needs the model's tokenizer",
}
"""Entries of vLLM's object without a meaning here, and why."""


class _Entry(NamedTuple):
    """A field of vLLM's object."""

    setting: str
    kind: type[int] | type[float] | type[str] = int
    more: int = 0
    """Added to its value: vLLM does not count the newest token, bough does."""
    algorithms: frozenset[SpeculativeAlgorithm] | None = None
    """Algorithms to which it applies; None: all."""


_NGRAM: Final[frozenset[SpeculativeAlgorithm]] = frozenset({"NGRAM"})
_SUFFIX: Final[frozenset[SpeculativeAlgorithm]] = frozenset({"SUFFIX"})
_ENTRIES: Final = {
    "num_speculative_tokens": _Entry("speculative_num_draft_tokens", more=1),
    "model": _Entry("speculative_draft_model_path", str, algorithms=ON_DEVICE),
    "revision": _Entry("speculative_draft_model_revision", str, algorithms=ON_DEVICE),
    "quantization": _Entry("speculative_draft_model_quantization", str, algorithms=ON_DEVICE),
    "prompt_lookup_min": _Entry("speculative_ngram_min_match_window_size", algorithms=_NGRAM),
    "prompt_lookup_max": _Entry("speculative_ngram_max_match_window_size", algorithms=_NGRAM),
    "suffix_decoding_max_tree_depth": _Entry("speculative_suffix_max_tree_depth", algorithms=_SUFFIX),
    "suffix_decoding_max_spec_factor": _Entry("speculative_suffix_max_spec_factor", float, algorithms=_SUFFIX),
    "suffix_decoding_min_token_prob": _Entry("speculative_suffix_min_token_prob", float, algorithms=_SUFFIX),
}
_KINDS: Final = {int: "a whole number", float: "a number", str: "a text"}


def read_speculative_config(text: str, origin: str) -> Mapping[str, bool | int | float | str]:
    """The settings that vLLM's JSON object stands for. Raises `ConfigError`."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise _bad_config(origin, "is not JSON", str(error)) from error
    if not isinstance(given, dict):
        raise _bad_config(origin, "is not a JSON object", f"it is {text[:40]!r}")
    method = given.pop("method", None)
    if method is None and isinstance(given.get("model"), str):
        method = _method_of(given["model"])
        if method == "ngram":
            del given["model"]
    if not isinstance(method, str) or method not in _METHODS:
        raise _bad_config(origin, f"has the method {method!r}", f"there are {', '.join(_METHODS)}")
    algorithm = _METHODS[method]
    entries = {name: entry for name, entry in _ENTRIES.items() if algorithm in (entry.algorithms or {algorithm})}
    found: dict[str, bool | int | float | str] = {"speculative_algorithm": algorithm}
    for name, value in given.items():
        if name == "rejection_sample_method" and algorithm in ON_DEVICE:
            if not isinstance(value, str) or value not in _JUDGED:
                raise _bad_config(origin, f"has {value!r} as {name}", f"there are {', '.join(_JUDGED)}")
            found[_JUDGED[value]] = True
            continue
        if name in _NOT_TAKEN:
            raise _bad_config(origin, f"has {name!r}", _NOT_TAKEN[name])
        if name not in entries:
            known = ", ".join(["method", *entries])
            raise _bad_config(origin, f"has {name[:40]!r}", f"of its entries, {method} knows these: {known}")
        entry = entries[name]
        fits = isinstance(value, int | float if entry.kind is float else entry.kind)
        if isinstance(value, bool) or not fits:
            raise _bad_config(origin, f"has {value!r} as {name}", f"it is {_KINDS[entry.kind]}")
        found[entry.setting] = value + entry.more if entry.more else value
    return found


def _method_of(model: str) -> str:
    """vLLM's method where only the draft model is named. A checkpoint of another kind is refused when it is read."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    if name in ("ngram", "[ngram]"):
        return "ngram"
    return next((method for part, method in _NAMED if part in name), "draft_model")


def _bad_config(origin: str, what: str, why: str) -> ConfigError:
    fix = 'for example \'{"method": "ngram", "num_speculative_tokens": 5}\''
    return ConfigError(what=f"{origin} {what}", why=why, fix=fix, param="speculative_config")


class DraftNumbers(NamedTuple):
    """Numbers of drafts of an algorithm that drafts on the device."""

    steps: int
    topk: int
    tokens: int
    """Tokens per row that a step verifies: the newest one and its drafts."""
    because: str


def draft_numbers(config: SpeculativeConfig, most: int | None = None, architecture: str = "") -> DraftNumbers:
    """The numbers for an algorithm that drafts on the device. `most`: maximum number of successive drafts; None: any
    number. `architecture`: of the target model, if it is known.

    Raises `ConfigError` for numbers that contradict one another.
    """
    topk = config.speculative_eagle_topk
    usual = draft_default(config.speculative_algorithm, architecture)
    numbers = _chain(config, most, usual) if topk is AUTO or topk == 1 else _tree(config, topk, most, usual)
    if most is not None and numbers.steps > most:
        raise ConfigError(
            what=f"{numbers.steps} drafts were asked for, the checkpoint makes {most}",
            why=f"{config.speculative_algorithm} has a part of its own for each draft",
            fix=f"use --speculative-num-steps {most}",
            param="speculative_num_steps",
        )
    return numbers


def _chain(config: SpeculativeConfig, most: int | None, usual: DraftDefault | None) -> DraftNumbers:
    """The numbers for a chain of drafts."""
    steps, tokens = config.speculative_num_steps, config.speculative_num_draft_tokens
    if steps is not AUTO and tokens is not AUTO and tokens != steps + 1:
        raise ConfigError(
            what=f"--speculative-num-steps {steps} and --speculative-num-draft-tokens {tokens} contradict one another",
            why="each step makes one draft, and the newest token is verified with them",
            fix=f"use --speculative-num-draft-tokens {steps + 1}, or leave one of them out",
            param="speculative_num_draft_tokens",
        )
    if steps is not AUTO:
        return DraftNumbers(steps, 1, steps + 1, "--speculative-num-steps")
    if tokens is not AUTO:
        return DraftNumbers(tokens - 1, 1, tokens, "--speculative-num-draft-tokens")
    if most is not None:
        return DraftNumbers(most, 1, most + 1, "as many as the checkpoint drafts")
    steps = _ANY_STEPS if usual is None else usual.steps
    return DraftNumbers(steps, 1, steps + 1, "fewer are made where they do not pay")


def _tree(config: SpeculativeConfig, topk: int, most: int | None, usual: DraftDefault | None) -> DraftNumbers:
    """The numbers for a tree, whose most likely nodes are verified."""
    method = config.speculative_algorithm
    if method not in TREES:
        raise ConfigError(
            what=f"--speculative-eagle-topk {topk} with --speculative-algorithm {method}",
            why="its drafts follow one another",
            fix=f"use --speculative-eagle-topk 1, or one of {', '.join(sorted(TREES))}",
            param="speculative_eagle_topk",
        )
    given = config.speculative_num_steps
    most_usual = _ANY_STEPS if usual is None else usual.steps
    steps = min(most_usual, most or most_usual) if given is AUTO else given
    looked_at = topk + (steps - 1) * topk**2
    if topk * (steps - 1) > MOST_DRAFT_TOKENS:
        raise ConfigError(
            what=f"trees of {steps} steps with {topk} nodes each are too large",
            why=f"{topk * (steps - 1)} nodes would go on, at most {MOST_DRAFT_TOKENS} can",
            fix="use a smaller --speculative-num-steps or --speculative-eagle-topk",
            param="speculative_eagle_topk",
        )
    tokens = config.speculative_num_draft_tokens
    if tokens is AUTO:
        tokens = min(_TREE_TOKENS, looked_at + 1)
    if tokens > looked_at + 1:
        raise ConfigError(
            what=f"--speculative-num-draft-tokens {tokens} were asked for, the tree has {looked_at} nodes",
            why=f"{steps} steps with {topk} nodes each look at no more",
            fix=f"use --speculative-num-draft-tokens {looked_at + 1}",
            param="speculative_num_draft_tokens",
        )
    return DraftNumbers(steps, topk, tokens, f"a tree of {topk} nodes a step")


def draft_tokens(config: SpeculativeConfig) -> tuple[int, str]:
    """The value of an `auto` `speculative_num_draft_tokens`, with the reason."""
    if config.speculative_algorithm == "none":
        return 1, "there are no drafts"
    if config.speculative_algorithm in ON_DEVICE:
        numbers = draft_numbers(config)
        return numbers.tokens, numbers.because
    usual = draft_default(config.speculative_algorithm)
    assert usual is not None, "every algorithm that drafts on the host has an entry"
    return usual.tokens, "fewer are verified where they do not pay"


def drafts_of_row(config: SpeculativeConfig) -> int:
    """Maximum number of drafts per row and step; 0: no speculative decoding."""
    if config.speculative_algorithm == "none":
        return 0
    asked = config.speculative_num_draft_tokens
    return (draft_tokens(config)[0] if asked is AUTO else asked) - 1


def drafts_of_step(config: SpeculativeConfig, device: str, num_rows: int) -> int:
    """Maximum number of drafts of all rows of a step."""
    return min(drafts_of_row(config) * num_rows, STEP_DRAFTS[device])
