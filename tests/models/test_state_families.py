"""Families with layers that keep a state against transformers: logits, greedy tokens, and answers that go on from
snapshots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import PROMPTS, STATES, check_family, greedy
from in_process import InProcess, Setup
from tiny import SIZES, make_tiny

from bough.config.hf import open_checkpoint
from bough.config.server_args import build_config
from bough.core.errors import ConfigError, UnsupportedModel
from bough.engine.decide import check_servable
from bough.models.load import build_model
from bough.models.registry import facts_of
from bough.runner.graphs import Graphs

LONG = {
    "bamba-limits", "falcon_h1-norm", "granite4-dense", "jamba-dense", "lfm2_moe-plain", "mamba-untied", "mamba2-bias",
    "nemotron_h", "qwen3_next-dense",
}  # fmt: skip
"""Further variants of families, which `make test` shows once."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.long] * (case in LONG)) for case in STATES])
def test_answers_as_transformers_does(case: str, tmp_path: Path) -> None:
    check_family(*STATES[case], tmp_path, cached=28)  # in whole pages of 4


@pytest.mark.parametrize(
    "case",
    ["qwen3_next", "mamba2-bias", *(pytest.param(case, marks=pytest.mark.long) for case in ("granite4", "jamba"))],
)
def test_a_conversation_goes_on_from_snapshots(case: str, tmp_path: Path) -> None:
    """Turns that repeat what was said, a branch in the middle, and rows that lose their memory."""
    prefix, extra = STATES[case]
    reference = make_tiny(prefix, tmp_path, **extra)
    model = build_model(
        open_checkpoint(str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"), context_length=256
    )
    setup = Setup(chunk_tokens=16, page_size=4, context_length=256)
    engine = InProcess(model, SIZES["vocab_size"], setup)
    (first,) = engine.generate(PROMPTS[:1])
    assert [first] == greedy(reference, PROMPTS[:1], [first])
    said = [*PROMPTS[0], *first, 9, 8, 7]
    (answer,) = engine.finish([engine.submit(said)])
    assert [answer.tokens] == greedy(reference, [said], [answer.tokens])
    assert answer.end is not None
    assert answer.end.cached_tokens >= len(said) - 3 - setup.state_interval - setup.page_size
    branch = [*said[:50], *PROMPTS[1][:20]]
    for cached in (32, 48):  # the first finds no state where it parts from the others, and leaves one
        (answer,) = engine.finish([engine.submit(branch)])
        assert [answer.tokens] == greedy(reference, [branch], [answer.tokens])
        assert answer.end is not None
        assert answer.end.cached_tokens >= cached
    few = InProcess(
        model,
        SIZES["vocab_size"],
        Setup(chunk_tokens=16, page_size=4, context_length=128, num_pages=36, conservativeness=0.0),
    )
    tight = few.finish([few.submit(prompt) for prompt in PROMPTS])
    assert [answer.tokens for answer in tight] == greedy(reference, PROMPTS, [answer.tokens for answer in tight])
    assert few.queues.counters.retractions > 0


def test_no_setting_changes_the_answer(tmp_path: Path) -> None:
    prefix, extra = STATES["qwen3_next"]
    make_tiny(prefix, tmp_path, **extra)
    checkpoint = open_checkpoint(str(tmp_path))
    model = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), context_length=128)
    answers = []
    for setup in (
        Setup(context_length=128, overlap=False, radix_cache=False),
        Setup(context_length=128, page_size=1, chunk_tokens=5),
        Setup(context_length=128, page_size=16, attention="torch", num_snapshots=1),
        Setup(context_length=128, page_size=4, overlap=False, num_snapshots=0),
    ):
        engine = InProcess(model, SIZES["vocab_size"], setup)
        answers += [engine.generate(PROMPTS), engine.generate(PROMPTS)]
    assert all(each == answers[0] for each in answers)


class Rerun:
    """What a captured graph does: computes the same from what its inputs are now."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run
        self.result = run()
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        self.result[0].copy_(self._run()[0])


def test_decode_steps_as_graphs_compute_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps padded to captured sizes, with states found by slot: the same answers, also from snapshots."""
    made: list[Rerun] = []

    def capture(run: Callable[[], Any], pool: object) -> tuple[Rerun, Any]:
        made.append(Rerun(run))
        return made[-1], made[-1].result

    monkeypatch.setattr("bough.runner.graphs.capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    prefix, extra = STATES["qwen3_next"]
    make_tiny(prefix, tmp_path, **extra)
    checkpoint = open_checkpoint(str(tmp_path))
    model = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), context_length=128)
    prompts = [*PROMPTS, PROMPTS[0][:9]]
    for setup in (
        Setup(context_length=128, page_size=4, chunk_tokens=24),
        Setup(context_length=128, page_size=4, overlap=False, state_interval=4, num_snapshots=3),
        Setup(context_length=128, page_size=4, drafts="ngram"),
        Setup(context_length=128, page_size=4, drafts="known", overlap=False),
    ):
        expected = InProcess(model, SIZES["vocab_size"], replace(setup, drafts="none")).generate(prompts)
        answers = {tuple(prompt): answer for prompt, answer in zip(prompts, expected, strict=True)}
        engine = InProcess(model, SIZES["vocab_size"], setup, answers)
        runner = engine.runner
        runner.graphs = Graphs(
            runner.forward, max_tokens=64, context_length=128, spare_slot=runner.limits.num_slots, states=runner.states
        )
        assert engine.generate(prompts) == expected
        assert engine.generate_with_a_retraction(prompts) == expected
        assert sum(each.num_replays for each in made) > 40, "most steps decode"


@pytest.mark.parametrize(
    ("case", "drafts"),
    [
        ("qwen3_next", "ngram"),
        ("qwen3_next", "known"),
        ("qwen3_next", "adaptive"),
        ("bamba", "known"),
        ("mamba", "known"),
        *(pytest.param(case, "known", marks=pytest.mark.long) for case in ("kimi_linear", "lfm2", "minimax")),
    ],
)
def test_drafts_change_no_token(case: str, drafts: str, tmp_path: Path) -> None:
    """Greedy answers with drafts, right and wrong ones, are those without: cached, in chunks, retracted."""
    prefix, extra = STATES[case]
    reference = make_tiny(prefix, tmp_path, **extra)
    checkpoint = open_checkpoint(str(tmp_path))
    model = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), context_length=128)
    plain = InProcess(model, SIZES["vocab_size"], Setup(context_length=128)).generate(PROMPTS)
    assert plain == greedy(reference, PROMPTS, plain)
    answers = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, plain, strict=True)}
    for setup in (
        Setup(context_length=128, page_size=4, drafts=drafts),
        Setup(context_length=128, page_size=1, chunk_tokens=9, drafts=drafts, overlap=False, state_interval=4),
    ):
        engine = InProcess(model, SIZES["vocab_size"], setup, answers)
        assert engine.generate(PROMPTS) == plain
        assert engine.generate_with_a_retraction(PROMPTS[::-1]) == plain[::-1]
        counters = engine.queues.counters
        if drafts == "known":  # every third may be wrong
            assert 60 < counters.accepted_tokens < counters.draft_tokens


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"attn_cp_size": 2, "tp_size": 2}, "attn_cp_size"),
        ({"speculative_algorithm": "NEXTN", "speculative_eagle_topk": 4}, "--speculative-eagle-topk"),
    ],
)
def test_what_states_do_not_allow_is_refused(changes: dict[str, Any], flag: str, tmp_path: Path) -> None:
    prefix, extra = STATES["qwen3_next"]
    make_tiny(prefix, tmp_path, **extra)
    checkpoint = open_checkpoint(str(tmp_path))
    config = build_config(model=str(tmp_path), **changes)
    with pytest.raises(ConfigError, match=f"{flag}.* Qwen3NextForCausalLM"):
        check_servable(config, checkpoint, facts_of(checkpoint.config), None)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"mamba_n_heads": 5}, "5 Mamba heads of 16 inputs, which are not 96"),
        ({"mamba_n_groups": 4}, "6 Mamba heads in 4 groups"),
        ({"time_step_limit": [0.0]}, "time_step_limit"),
        ({"mamba_d_state": 0}, "mamba_d_state"),
        ({"hidden_act": "relu"}, "hidden_act"),
    ],
)
def test_broken_configs_are_named(changes: dict[str, Any], error: str, tmp_path: Path) -> None:
    prefix, extra = STATES["bamba"]
    make_tiny(prefix, tmp_path, **extra)
    with pytest.raises((ConfigError, UnsupportedModel), match=error):
        facts_of({**open_checkpoint(str(tmp_path)).config, **changes})


def test_kimi_linear_as_published(tmp_path: Path) -> None:
    """Sizes in an object of their own, layers by number."""
    prefix, extra = STATES["kimi_linear"]
    make_tiny(prefix, tmp_path, **extra)
    config = open_checkpoint(str(tmp_path)).config
    renamed = {"linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "layer_types", "mlp_layer_types"}
    own = {
        "head_dim": 12,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [2],
        "kda_layers": [1, 3, 4],
    }
    published = {key: value for key, value in config.items() if key not in renamed}
    published |= {"linear_attn_config": own, "first_k_dense_replace": 1, "mla_use_nope": True}
    assert facts_of(published).layers == facts_of(config).layers
    with pytest.raises(ConfigError, match="kda_layers are not all"):
        facts_of({**published, "linear_attn_config": {**own, "kda_layers": [1, 3]}})
    with pytest.raises(UnsupportedModel, match="rotated latents"):
        facts_of({**published, "mla_use_nope": False})
