"""A model of 8 billion seeded random weights against transformers on the same tensors: what the benchmarks run is right."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import InProcess, Setup
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from bough.config.hf import open_checkpoint
from bough.core.messages import LogprobSpec
from bough.core.sampling import SamplingParams
from bough.models.load import build_model

pytestmark = pytest.mark.xdist_group("large models")

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
DEVICE = torch.device("cuda")
LENGTHS = (17, 128, 300, 700)
RNG = random.Random(8)
PROMPTS = [[RNG.randrange(1000, 32000) for _ in range(length)] for length in LENGTHS]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=32)
SCORES = LogprobSpec(start=0)


def same_weights(ours: torch.nn.Module, theirs: Any) -> None:
    """Copies our weights to where transformers keeps them."""
    sizes = (CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["num_key_value_heads"])
    mine = dict(ours.named_parameters())
    pairs = {"model.embed_tokens.weight": mine["embed.tokens.matrix.weight"], "model.norm.weight": mine["norm.weight"]}
    pairs["lm_head.weight"] = mine["head.matrix.weight"]
    for layer in range(theirs.config.num_hidden_layers):
        here, there = f"layers.{layer}", f"model.layers.{layer}"
        heads = mine[f"{here}.attn.qkv.matrix.weight"].split([size * CONFIG["head_dim"] for size in sizes])
        gate, up = mine[f"{here}.mlp.gate_up.matrix.weight"].chunk(2)
        pairs |= {f"{there}.self_attn.{name}_proj.weight": part for name, part in zip("qkv", heads, strict=True)}
        pairs |= {
            f"{there}.self_attn.o_proj.weight": mine[f"{here}.attn.out.matrix.weight"],
            f"{there}.mlp.gate_proj.weight": gate,
            f"{there}.mlp.up_proj.weight": up,
            f"{there}.mlp.down_proj.weight": mine[f"{here}.mlp.down.matrix.weight"],
            f"{there}.input_layernorm.weight": mine[f"{here}.attn_norm.weight"],
            f"{there}.post_attention_layernorm.weight": mine[f"{here}.mlp_norm.weight"],
        }
    targets = dict(theirs.named_parameters())
    assert pairs.keys() == targets.keys()
    with torch.no_grad():
        for name, value in pairs.items():
            targets[name].copy_(value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama-8b")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def ours(folder: Path, dtype: torch.dtype) -> Any:
    """Seeded weights, drawn in bfloat16, so that every dtype holds the same values."""
    drawn: Any = build_model(
        open_checkpoint(str(folder), load_format="dummy"),
        dtype=torch.bfloat16,
        device=DEVICE,
        load_format="dummy",
        seed=3,
    )
    return drawn.to(dtype)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return transformers_model(folder)


def transformers_model(folder: Path) -> Any:
    """transformers' model in float32, with our weights."""
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).eval()
    source = ours(folder, torch.bfloat16)
    same_weights(source, model)
    return model.float()


@torch.no_grad()
def scores(model: Any, prompt: list[int]) -> torch.Tensor:
    """Log-probability of every token but the first, by transformers."""
    ids = torch.tensor([prompt], device=DEVICE)
    logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu()


def our_scores(engine: InProcess) -> list[torch.Tensor]:
    nothing = SamplingParams(temperature=0.0, max_new_tokens=1)
    answers = engine.finish([engine.submit(prompt, nothing, SCORES) for prompt in PROMPTS])
    return [
        torch.tensor(answer.prompt_logprobs.logprobs[-(n - 1) :]) for answer, n in zip(answers, LENGTHS, strict=True)
    ]


def setup(dtype: torch.dtype, **more: Any) -> Setup:
    return Setup(
        page_size=64,
        chunk_tokens=2048,
        context_length=1024,
        dtype=dtype,
        device="cuda",
        attention="hopper" if torch.cuda.get_device_capability() == (9, 0) else "triton",
        graphs=True,
        **more,
    )


def test_fp32_scores_and_tokens_equal_transformers(folder: Path, reference: Any) -> None:
    engine = InProcess(ours(folder, torch.float32), CONFIG["vocab_size"], setup(torch.float32))
    for got, prompt in zip(our_scores(engine), PROMPTS, strict=True):
        assert (got - scores(reference, prompt)).abs().max() < 2e-3
    tokens = engine.generate(PROMPTS, GREEDY)
    for got, prompt in zip(tokens, PROMPTS, strict=True):
        ids = torch.tensor([prompt], device=DEVICE)
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=32,
            min_new_tokens=32,
            do_sample=False,
            pad_token_id=0,
        )
        assert got == out[0, len(prompt) :].tolist()


def test_bf16_is_as_close_to_fp32_as_transformers_is(folder: Path, reference: Any) -> None:
    exact = [scores(reference, prompt) for prompt in PROMPTS]
    engine = InProcess(ours(folder, torch.bfloat16), CONFIG["vocab_size"], setup(torch.bfloat16))
    ours_off = torch.cat([(a - b).abs() for a, b in zip(our_scores(engine), exact, strict=True)])
    reference.bfloat16()
    try:
        theirs_off = torch.cat([(scores(reference, p) - b).abs() for p, b in zip(PROMPTS, exact, strict=True)])
    finally:
        reference.float()  # the weights were drawn in bfloat16: nothing is lost
    assert ours_off.mean() <= 1.2 * theirs_off.mean()
    tokens = engine.generate(PROMPTS, GREEDY)
    for prompt, got in zip(PROMPTS, tokens, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + got], device=DEVICE)).logits[0, len(prompt) - 1 : -1]
        behind = logits.max(-1).values - logits.gather(1, torch.tensor(got, device=DEVICE)[:, None])[:, 0]
        assert behind.max() <= 6 * theirs_off.max(), "each token is the best one, but for rounding"


def test_fp8_kv_is_transformers_with_rounded_keys_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 but for the cache, whose 8 bits transformers gets too.

    Four layers: more of them make a large difference of the few values that lie in the middle between two of 8 bits.
    """
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 4}))
    engine = InProcess(
        ours(tmp_path, torch.float32), CONFIG["vocab_size"], setup(torch.float32, kv_dtype=torch.float8_e4m3fn)
    )
    got = our_scores(engine)
    reference = transformers_model(tmp_path)
    plain = [scores(reference, prompt) for prompt in PROMPTS]
    update = DynamicCache.update

    def rounded(cache: Any, *args: Any, **more: Any) -> tuple[torch.Tensor, ...]:
        return tuple(x.to(torch.float8_e4m3fn).to(x.dtype) for x in update(cache, *args, **more))

    monkeypatch.setattr(DynamicCache, "update", rounded)
    for ours_off, prompt, exact in zip(got, PROMPTS, plain, strict=True):
        expected = scores(reference, prompt)
        assert (ours_off - expected).abs().mean() < 0.1 * (exact - expected).abs().mean()
