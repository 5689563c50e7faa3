"""One architecture of every kind of mixer, lifetime and feed-forward block, under every way of spreading it over ranks: the
scores of transformers to 1e-4, its greedy answers, and less on each rank. Ranks are threads; the whole engine runs on them.
`test_served.py` has the same ways through `bough serve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import numpy as np
import pytest
import torch
from cluster import greedy
from families import DENSE, EARLIER, EXPERTS, LATENTS, SHARED_KV, STATES
from held_bytes import check_held
from PIL import Image
from prompts import make_prompt, noise, reference_answer
from seeing import load
from test_whisper import START as TRANSCRIPT, expected as transcript, folder, heard, whisper
from thread_engine import Asked, ThreadEngine, spread_over
from tiny import make_tiny
from tiny_phi4mm import load_phi4, placed_prompt, sound
from tiny_vision import END, IMAGE, START

from bough.config.hf import open_checkpoint
from bough.config.kv_groups import lifetimes_of
from bough.config.model_facts import FeedForward, Mixer, ModelFacts, Moe
from bough.core.kv import Lifetime
from bough.models.registry import facts_of

LONG = pytest.mark.long

DENSE_MODELS = (
    "llama", "gemma3", "olmo2", "bloom", "cohere-qk-norm", "falcon_h1-norm", "mamba2", "falcon_mamba", "gemma4",
)  # fmt: skip
"""Grouped queries; windows and norms around each half; norms over all heads; slopes and a plain feed-forward; a norm per
head and blocks whose halves read the same stream; states beside attention and alone; layers that read others' KV, and heads
of two widths."""
EXPERT_MODELS = (
    "qwen3_moe", "qwen2_moe", "gpt_oss", "llama4", "deepseek_v3", "qwen3_next", "granite4", "lfm2_moe", "minimax",
    "kimi_linear", "glm_moe_dsa",
)  # fmt: skip
"""Softmax over experts; a gated shared expert; sinks, windows and experts with biases; chunks, temperatures and a weight on
the input; latents, scored groups and shared experts; layers that keep states; those of Mamba 2, with a norm across ranks;
short convolutions; attention without a softmax, under a norm across ranks; decays by channel, beside
latents; latents of chosen tokens."""
MEDIA_MODELS = ("qwen3_vl_moe", "whisper", "phi4mm")
"""A tower whose embeddings stand among those of tokens, and are added after the first layers, too, with experts; cross
attention to what a tower gives; an adapter for prompts with images, and another one for prompts with sounds."""
STATE_MODELS = (
    "qwen3_next", "granite4", "lfm2_moe", "minimax", "kimi_linear", "falcon_h1-norm", "mamba2", "falcon_mamba",
)  # fmt: skip
"""Their states can't be shared by position."""
SPREADS: dict[str, dict[str, Any]] = {
    "tp": {"tp_size": 2},
    "pp": {"pp_size": 2, "chunked_prefill_size": 64},
    "uneven pp": {"pp_size": 2, "pp_layer_partition": "3,1"},
    "dp": {"dp_size": 2},
    "dp attention": {"tp_size": 2, "attn_dp_size": 2},
    "cp": {"tp_size": 2, "attn_cp_size": 2},
    "tp x pp": {"tp_size": 2, "pp_size": 2},
    "tp x dp": {"tp_size": 2, "dp_size": 2},
    "ep": {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "alltoall"},
    "tp x ep": {"tp_size": 4, "ep_size": 2, "moe_a2a_backend": "allgather"},
    "pp x ep": {"tp_size": 2, "ep_size": 2, "pp_size": 2},
    "cp x dp attention x ep": {
        "tp_size": 4, "attn_cp_size": 2, "attn_dp_size": 2, "ep_size": 4, "moe_a2a_backend": "alltoall",
    },
}  # fmt: skip
SHORT = {
    ("llama", "cp"), ("gemma3", "tp x pp"), ("olmo2", "dp attention"), ("bloom", "tp"), ("qwen2_moe", "pp x ep"),
    ("gpt_oss", "cp x dp attention x ep"), ("llama4", "tp x ep"), ("deepseek_v3", "ep"), ("cohere-qk-norm", "pp"),
    ("qwen3_moe", "dp"), ("qwen3_next", "tp x pp"), ("granite4", "tp"), ("gemma3", "uneven pp"), ("falcon_mamba", "tp"),
    ("falcon_h1-norm", "tp"), ("mamba2", "pp"), ("lfm2_moe", "dp attention"), ("minimax", "tp x pp"), ("gemma4", "tp"),
    ("qwen3_vl_moe", "pp"), ("whisper", "tp x dp"), ("kimi_linear", "tp"),
    ("glm_moe_dsa", "pp"), ("phi4mm", "tp"),
}  # fmt: skip
"""Each model once, and each way of spreading once, in `make test`."""


def refused(model: str, spread: str) -> bool:
    """What `engine/decide.py` refuses, with its reason."""
    sizes = SPREADS[spread]
    if "ep_size" in sizes and model not in (*EXPERT_MODELS, "qwen3_vl_moe"):
        return True
    if "attn_cp_size" in sizes and (model in STATE_MODELS or model in ("gemma4", "whisper", "glm_moe_dsa")):
        return True
    if model == "glm_moe_dsa" and spread == "uneven pp":  # the second stage would begin with a choice of the first
        return True
    if "pp_size" in sizes and model in ("gemma4", "whisper"):
        return True
    return "attn_dp_size" in sizes and model in ("whisper", "phi4mm")


MODELS = (*DENSE_MODELS, *EXPERT_MODELS, *MEDIA_MODELS)
CASES = [
    pytest.param(model, spread, marks=() if (model, spread) in SHORT else LONG)
    for model in MODELS
    for spread in SPREADS
    if not refused(model, spread)
]
PROMPTS = [[5, 17, 99, 3, 64, 2, 120, 33], [42], list(range(3, 40)), [(7 * i + 3) % 120 + 3 for i in range(140)]]
NEW_TOKENS = 6
MARK = [START, IMAGE, END]


@dataclass(frozen=True)
class Subject:
    """A model, what it is asked, and what transformers answers."""

    path: Path
    prompts: Sequence[list[int] | Asked]
    expected: list[list[int]]
    reference: torch.nn.Module | None
    """Scores texts."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the engine."""


def make(case: str, folder: Path) -> torch.nn.Module:
    prefix, extra = {**DENSE, **EARLIER, **EXPERTS, **LATENTS, **STATES, **SHARED_KV}.get(case, (case, {}))
    return make_tiny(prefix, folder, **extra)


def subject(model: str, into: Path) -> Subject:
    if model == "whisper":
        return hearing()
    if model == "phi4mm":
        return adapted()
    if model in MEDIA_MODELS:
        return seeing(model)
    reference = make(model, into)
    return Subject(into, PROMPTS, greedy(reference, PROMPTS, NEW_TOKENS), reference)


def seeing(model: str) -> Subject:
    seen = load(model)
    texts = [[5, *MARK, 9, *MARK, 7], [5, *MARK, 9], [*PROMPTS[-1], *MARK, 7]]
    pixels = [[noise(24, 40), noise(56, 64)], [noise(24, 40)], [noise(16, 16, seed=1)]]
    made = [make_prompt(seen.processor, text, images) for text, images in zip(texts, pixels, strict=True)]
    asked = [Asked(each.ids, each.features, {"media": each.items, "positions": each.positions}) for each in made]
    expected = [reference_answer(seen.reference, each, seen.tower, NEW_TOKENS) for each in made]
    return Subject(
        Path(seen.checkpoint.path),
        [*asked, PROMPTS[0]],
        [*expected, *greedy(seen.reference, PROMPTS[:1], NEW_TOKENS)],
        None,
    )


def adapted() -> Subject:
    phi4, asked, expected = load_phi4("own"), [], []
    for text, shapes, seconds, adapter in (
        ("a<|image|>bcd", [(24, 40)], [], "vision"),
        ("a<|audio|>bcd", [], [0.6], "speech"),
        ("a<|image|>b<|audio|>", [(37, 20)], [0.4], "vision"),
        ("hello", [], [], ""),
    ):
        images, sounds = [Image.fromarray(noise(*shape)) for shape in shapes], [sound(each) for each in seconds]
        made = placed_prompt(phi4, text, images, sounds)
        asked.append(Asked(made.ids, made.features, {"media": made.items, "adapter": made.adapter}))
        given = phi4.theirs(text, images, sounds)
        with torch.no_grad():
            out = phi4.references[adapter].generate(
                **given, attention_mask=torch.ones_like(given["input_ids"]), max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        expected.append(out[0, len(made.ids) :].tolist())
    # Keys of a longer context would be rotated otherwise.
    return Subject(phi4.folder, asked, expected, None, {"context_length": 512})


def hearing() -> Subject:
    whisper()
    texts = [
        (0, (TRANSCRIPT, 7, 8)),
        (1, (TRANSCRIPT, 7, 8)),
        (0, (TRANSCRIPT, 7, 8, 9)),
        (2, (TRANSCRIPT, *range(20, 50))),
    ]
    asked = []
    for seed, prompt in texts:
        features, item = heard(seed)
        asked.append(Asked(prompt, {item.features.path: features}, {"media": (item,)}))
    return Subject(folder(), asked, [transcript(*each)[:NEW_TOKENS] for each in texts], None)


@pytest.mark.parametrize(("model", "spread"), CASES)
def test_spread_over_ranks_it_is_the_same_model(model: str, spread: str, tmp_path: Path) -> None:
    given = subject(model, tmp_path)
    with spread_over(given.path, **SPREADS[spread], **given.settings) as served:
        assert served.ask(given.prompts, NEW_TOKENS) == given.expected
        again = served.ask(given.prompts[::-1], NEW_TOKENS)
        assert again == given.expected[::-1], "other replicas, cached prefixes"
        for engine in served.engines:
            if given.reference is not None:
                check_scores(engine, given.reference)
            check_bytes(engine)


def check_scores(engine: ThreadEngine, reference: torch.nn.Module) -> None:
    for scheduler in range(len(engine.schedulers)):
        prompt = [*PROMPTS[-1][::-1], scheduler]
        with torch.no_grad():
            logits = reference(torch.tensor([prompt])).logits[0].float().log_softmax(-1).numpy()
        drawn = [*prompt[1:], int(logits[-1].argmax())]
        scores = engine.scores(prompt, scheduler)
        assert np.abs(np.array(scores) - logits[np.arange(len(prompt)), drawn]).max() <= 1e-4


def check_bytes(engine: ThreadEngine) -> None:
    plan = engine.decided.resolved.plan
    held = [each for each in engine.held if each is not None]
    check_held(engine.decided.facts, engine.layout, held, kv_tokens=4096, page_size=4, slots=8, kv_bytes=plan.kv_bytes)
    assert plan.state_bytes == max(each.state_bytes for each in held)


def test_the_short_form_covers_everything() -> None:
    assert {model for model, _ in SHORT} == set(MODELS)
    assert {spread for _, spread in SHORT} == set(SPREADS)
    assert not any(refused(*each) for each in SHORT)


def kinds(union: UnionType) -> set[type]:
    """The members of a union, those of unions within it, too."""
    return {kind for each in get_args(union) for kind in (kinds(each) if get_args(each) else {each})}


def test_the_kinds_are_all_there(tmp_path: Path) -> None:
    """Every mixer, lifetime and feed-forward block that facts can have: by the facts of the models."""
    found: set[type] = set()
    plain: set[bool] = set()
    for number, case in enumerate((*DENSE_MODELS, *EXPERT_MODELS)):
        make(case, tmp_path / str(number))
    paths = [*(tmp_path / str(number) for number in range(len(DENSE_MODELS) + len(EXPERT_MODELS)))]
    whisper()
    for path in (*paths, folder()):
        facts: ModelFacts = facts_of(open_checkpoint(str(path)).config)
        found |= {type(mixer) for mixer in facts.mixers} | {type(each) for each in lifetimes_of(facts, 4096)}
        found |= {type(layer.ffn) for layer in facts.layers if layer.ffn is not None}
        plain |= {layer.ffn.gated for layer in facts.layers if layer.ffn and not isinstance(layer.ffn, Moe)}
    assert kinds(Mixer) | kinds(Lifetime) | kinds(FeedForward) <= found
    assert plain == {True, False}
