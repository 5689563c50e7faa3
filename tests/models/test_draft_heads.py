"""Every draft that a head leaves on the device is what the formulas of its paper give, at every step of an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import draft_files
import draft_reference
import proposing
import pytest
import torch
from families import DELTA, GATED_SHARED
from in_process import DraftsOnDevice, InProcess, Setup
from safetensors.torch import load_file, save_file
from test_renamed_families import FAMILIES
from tiny import make_tiny
from torch import Tensor

from bough.config.hf import open_checkpoint
from bough.core.errors import ConfigError
from bough.core.sampling import SamplingParams
from bough.core.step import Outcome, Step
from bough.layers.batch import Model
from bough.models.load import build_model

PROMPT = [(7 * i + 3) % 120 + 3 for i in range(40)]
NUM_NEW, NUM_DRAFTS = 16, 3
Reference = Callable[[list[int]], list[int]]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> tuple[Path, Any, Model]:
    """A tiny model: its folder, as transformers has it, and as bough does."""
    folder = tmp_path_factory.mktemp("target")
    reference = make_tiny("llama", folder)
    model = build_model(open_checkpoint(str(folder)), dtype=torch.float32, device=torch.device("cpu"))
    return folder, reference, model


def states_of(reference: Any, tokens: list[int]) -> tuple[list[Tensor], Tensor]:
    """The stream before each layer and behind the last, and after the final norm."""
    seen: list[Tensor] = []
    hook = reference.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        states = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    hook.remove()
    return [*(each[0] for each in states[:-1]), seen[0][0]], states[-1][0]


def check_drafts(
    model: Model, drafts: DraftsOnDevice, reference: Reference, sampling: SamplingParams, **setup: Any
) -> int:
    """Compares the drafts of each step with those of the formulas. Returns how many drafts were right in the end."""
    engine = InProcess(model, 131, Setup(drafts="device", most_drafts=NUM_DRAFTS, **setup), proposer=drafts)
    outcomes: list[Outcome] = []
    launch = engine.runner.launch

    def watched(step: Step) -> Any:
        launched = launch(step)
        wait = launched.wait
        launched.wait = lambda: outcomes.append(wait()) or outcomes[-1]  # type: ignore[method-assign, func-returns-value]
        return launched

    engine.runner.launch = watched  # type: ignore[method-assign]
    answer = engine.generate([PROMPT], sampling)[0]
    plain = InProcess(model, 131, Setup()).generate([PROMPT], sampling)[0]
    assert answer == plain
    said = list(PROMPT)
    for outcome in outcomes:
        count = int(outcome.counts[0])
        said += outcome.tokens[0, :count].tolist()
        if count and len(said) < len(PROMPT) + NUM_NEW:
            assert outcome.drafts is not None
            assert outcome.drafts[0].tolist() == reference(said), f"behind {len(said)} tokens"
    return engine.queues.counters.accepted_tokens


EAGLE3 = {
    "specforge": {},
    "speculators": {
        "speculators": True, "norm_before_residual": True, "norm_before_fc": True, "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    },
    "norms and layers": {
        "num_hidden_layers": 2, "fc_norm": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 1]},
    },
    "the target's head": {"draft_vocab": None},
}  # fmt: skip
TAPS = {"speculators": (1, 2, 4), "norms and layers": (1, 3, 2)}
"""Streams that the head reads; by default those before layers 2, n // 2 and n - 3 (n is 4)."""


@pytest.mark.parametrize("case", [*EAGLE3, "window"])
def test_eagle3(case: str, target: tuple[Path, Any, Model], tmp_path: Path) -> None:
    folder, reference, model = target
    window = 5 if case == "window" else 0
    state = draft_files.eagle3(tmp_path, **EAGLE3.get(case, {}))  # type: ignore[arg-type]
    written = json.loads((tmp_path / "config.json").read_text())
    config = {**written.get("transformer_layer_config", {}), **written}
    drafts = proposing.head("EAGLE3", folder, tmp_path, model, window=window)
    ends = reference.get_input_embeddings().weight, reference.lm_head.weight

    def formulas(tokens: list[int]) -> list[int]:
        streams, _ = states_of(reference, tokens[:-1])
        taps = [streams[layer] for layer in TAPS.get(case, (2, 2, 1))]
        return draft_reference.eagle3_drafts(state, config, tokens, taps, *ends, NUM_DRAFTS, window=window)

    greedy = SamplingParams(temperature=0.0, max_new_tokens=NUM_NEW)
    check_drafts(model, drafts, formulas, greedy, chunk_tokens=512 if case == "specforge" else 7)


GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NUM_NEW)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_map_of_tokens(temperature: float, target: tuple[Path, Any, Model], tmp_path: Path) -> None:
    """Drafts are among its tokens, and the likeliest of them; answers stay what they are."""
    folder, reference, model = target
    tokens = list(range(3, 131, 3))
    (tmp_path / "map.json").write_text(json.dumps([*tokens[::-1], 3]))
    state = draft_files.eagle3(tmp_path / "head", draft_vocab=None)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    drafts = proposing.head("EAGLE3", folder, tmp_path / "head", model, token_map=str(tmp_path / "map.json"))
    if temperature:
        params = SamplingParams(temperature=temperature, max_new_tokens=NUM_NEW, seed=3)
        engine = InProcess(model, 131, Setup(drafts="device", most_drafts=NUM_DRAFTS), proposer=drafts)
        assert engine.generate([PROMPT], params) == InProcess(model, 131, Setup()).generate([PROMPT], params)
        return
    ends = reference.get_input_embeddings().weight, reference.lm_head.weight

    def likeliest(logits: Tensor, _: int) -> int:
        return tokens[int(logits[tokens].argmax())]

    def formulas(said: list[int]) -> list[int]:
        streams, _ = states_of(reference, said[:-1])
        return draft_reference.eagle3_drafts(
            state, config, said, [streams[n] for n in (2, 2, 1)], *ends, NUM_DRAFTS, likeliest
        )

    check_drafts(model, drafts, formulas, GREEDY)


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1, 131]", "[true]", "[1.5]", None])
def test_a_map_that_can_not_be_read_is_refused(
    text: str | None, target: tuple[Path, Any, Model], tmp_path: Path
) -> None:
    draft_files.medusa(tmp_path / "head", own=text is None)
    (tmp_path / "map.json").write_text("[1]" if text is None else text)  # None: heads have tokens of their own
    with pytest.raises(ConfigError, match="speculative-token-map"):
        proposing.head("MEDUSA", target[0], tmp_path / "head", target[2], token_map=str(tmp_path / "map.json"))


@pytest.mark.parametrize("input_norm", [False, True])
def test_eagle(input_norm: bool, target: tuple[Path, Any, Model], tmp_path: Path) -> None:
    folder, reference, model = target
    state = draft_files.eagle(tmp_path, input_norm=input_norm, bias=not input_norm)
    drafts = proposing.head("EAGLE", folder, tmp_path, model)
    ends = reference.get_input_embeddings().weight, reference.lm_head.weight

    def join(embeds: Tensor, states: Tensor) -> Tensor:
        return torch.nn.functional.linear(torch.cat((embeds, states), -1), state["fc.weight"], state.get("fc.bias"))

    def formulas(tokens: list[int]) -> list[int]:
        _, hidden = states_of(reference, tokens[:-1])
        layer = draft_reference.eagle_layer(state, draft_files.HEAD)
        return draft_reference.fused_drafts(join, layer, lambda x: x, tokens, hidden, *ends, NUM_DRAFTS)

    check_drafts(model, drafts, formulas, GREEDY, chunk_tokens=7, attention="cpu")


@pytest.mark.parametrize(("own", "vllm"), [(True, False), (False, True)])
def test_medusa(own: bool, vllm: bool, target: tuple[Path, Any, Model], tmp_path: Path) -> None:
    folder, reference, model = target
    state = draft_files.medusa(tmp_path, own=own, vllm=vllm)
    drafts = proposing.head("MEDUSA", folder, tmp_path, model)

    def formulas(tokens: list[int]) -> list[int]:
        _, hidden = states_of(reference, tokens[:-1])
        return draft_reference.medusa_drafts(state, hidden[-1], reference.lm_head.weight, NUM_DRAFTS, vllm=vllm)

    check_drafts(model, drafts, formulas, GREEDY, chunk_tokens=7)


@pytest.mark.parametrize("page_size", [16, 3])
def test_dflash(page_size: int, target: tuple[Path, Any, Model], tmp_path: Path) -> None:
    folder, reference, model = target
    state = draft_files.dflash(tmp_path)
    drafts = proposing.head("DFLASH", folder, tmp_path, model)
    config = json.loads((tmp_path / "config.json").read_text())
    ends = reference.get_input_embeddings().weight, reference.lm_head.weight

    def formulas(tokens: list[int]) -> list[int]:
        streams, _ = states_of(reference, tokens[:-1])
        states = [streams[layer + 1] for layer in config["dflash_config"]["target_layer_ids"]]
        return draft_reference.dflash_drafts(state, config, tokens[-1], states, *ends)[:NUM_DRAFTS]

    check_drafts(model, drafts, formulas, GREEDY, page_size=page_size, chunk_tokens=7)


LING = FAMILIES["bailing2"]
NEXTN = {
    "Ling 2": (LING.prefix, LING.extra),
    "MiMo": ("Qwen2", {}),
    "DeepSeek-V3": (
        "DeepseekV3",
        {
            "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 12,
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
        },
    ),
    "DeepSeek-V3.2": (
        "DeepseekV32",
        {
            "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 12,
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
            "index_n_heads": 16, "index_head_dim": 12, "index_topk": 9,
        },
    ),
    "GLM-4.5": (
        "Glm4Moe",
        {
            "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 16, "use_qk_norm": True,
        },
    ),
    "Qwen3-Next": ("Qwen3Next", {**DELTA, **GATED_SHARED, "layer_types": ["linear_attention", "full_attention"] * 2}),
    "Qwen3.5": ("Qwen3_5", {**DELTA, "layer_types": ["linear_attention", "full_attention"] * 2}),
}  # fmt: skip


def rename_as_ling(folder: Path) -> None:
    """A checkpoint of GLM-4.5 with a layer that drafts, by Ling's names."""
    names = {**LING.names, r"shared_head\.norm": "final_layernorm"}
    state = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("shared_head.head.weight", "3.embed_tokens.weight")):
            for pattern, new in names.items():
                name = re.sub(pattern, new, name)
            state[name] = tensor
    config = json.loads((folder / "config.json").read_text()) | LING.config
    (folder / "config.json").write_text(json.dumps({key: each for key, each in config.items() if each is not None}))
    save_file(LING.change(state), folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("family", NEXTN)
def test_nextn(family: str, tmp_path: Path) -> None:
    """The last layer of a model of transformers' is taken for the one that drafts."""
    case, extra = NEXTN[family]
    whole = make_tiny(case, tmp_path, num_hidden_layers=4, **extra)
    qwen = family.startswith("Qwen3")
    parts = draft_files.nextn(tmp_path, whole, kind="mimo" if family == "MiMo" else "qwen" if qwen else "deepseek")
    if family == "Ling 2":
        rename_as_ling(tmp_path)
    names = [name for name in parts if not name.startswith(("model.", "lm_head"))]
    embed_norm, hidden_norm, fc, last_norm = (parts[name] for name in names[:4])
    if qwen:  # norms multiply by 1 + weight
        embed_norm, hidden_norm, last_norm = embed_norm + 1, hidden_norm + 1, last_norm + 1
    drafts_with = whole.model.layers[3]
    whole.model.layers = whole.model.layers[:3]
    whole.config.num_hidden_layers = 3
    model = build_model(open_checkpoint(str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"))
    drafts = proposing.head("NEXTN", tmp_path, tmp_path, model)
    eps = whole.config.rms_norm_eps

    def join(embeds: Tensor, states: Tensor) -> Tensor:
        both = draft_reference.rms(embeds, embed_norm, eps), draft_reference.rms(states, hidden_norm, eps)
        return torch.cat(both[::-1] if family == "MiMo" else both, -1) @ fc.T

    def layer(x: Tensor) -> Tensor:
        positions = torch.arange(len(x))[None]
        mask = torch.full((len(x), len(x)), float("-inf")).triu(1)[None, None]
        turns = whole.model.rotary_emb(x[None], positions)
        with torch.no_grad():
            out = drafts_with(x[None], attention_mask=mask, position_ids=positions, position_embeddings=turns)
        return (out[0] if isinstance(out, tuple) else out).reshape(x.shape)

    def formulas(tokens: list[int]) -> list[int]:
        _, hidden = states_of(whole, tokens[:-1])
        return draft_reference.fused_drafts(
            join, layer, lambda x: draft_reference.rms(x, last_norm, eps), tokens, hidden,
            whole.get_input_embeddings().weight, whole.lm_head.weight, NUM_DRAFTS,
        )  # fmt: skip

    check_drafts(model, drafts, formulas, GREEDY, chunk_tokens=7)
