"""Quantised checkpoints of whole models, against transformers on the weights that they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_attention import DenseAttention
from in_process import InProcess, Setup
from quantised_files import ALL_FORMATS, FORMATS, OTHER_FORMATS, quantise_checkpoint, rounds_activations
from safetensors.torch import load_file, save_file
from tiny import make_tiny

from bough.config.hf import open_checkpoint
from bough.core.errors import BoughError, ConfigError, UnsupportedModel, WeightsError
from bough.core.sampling import SamplingParams
from bough.distributed.mesh import Mesh
from bough.kernels.packed_linear import PackedWeight, dequantise
from bough.models.load import build_model

CPU = torch.device("cpu")
PROMPT = [5, 17, 99, 3, 64, 2, 120, 33, 7, 8, 9, 10, 11, 5, 5, 77]
GROUPS = {"a": {"targets": ["Linear"], "weights": {"num_bits": 4}}}
SIZES = {"hidden_size": 64, "intermediate_size": 96}


def build(folder: Path, **options: Any) -> Any:
    return build_model(open_checkpoint(str(folder)), dtype=torch.float32, device=CPU, **options)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model.logits(model.forward(DenseAttention(1).step([(0, PROMPT)], all_logits=True)))
    return out


def reference_logits(reference: Any, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    reference.load_state_dict(weights, strict=False)
    with torch.no_grad():
        out: torch.Tensor = reference(torch.tensor([PROMPT])).logits[0]
    return out


@pytest.mark.parametrize("form", [*FORMATS, *(pytest.param(each, marks=pytest.mark.long) for each in OTHER_FORMATS)])
def test_logits_are_those_of_the_weights_it_means(form: str, tmp_path: Path) -> None:
    """Dequantised on load to rounding; packed too, or close to it where the CPU rounds activations to 8 bits."""
    reference = make_tiny("llama", tmp_path, **SIZES)
    expected = reference_logits(reference, quantise_checkpoint(tmp_path, form))
    packed = build(tmp_path)
    assert all(isinstance(piece, PackedWeight) for piece in packed.layers[0].attn.qkv.matrix.pieces)
    assert (logits_of(build(tmp_path, quantization="none")) - expected).abs().max() <= 1e-4
    actual = logits_of(packed)
    if rounds_activations(form):
        assert torch.nn.functional.cosine_similarity(actual, expected, dim=-1).min() > 0.995
    else:
        assert (actual - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("form", ["awq", "gptq", "fp8-block", "fp8-static"])
def test_layers_that_are_fused_on_disk_are_cut_along_their_outputs(form: str, tmp_path: Path) -> None:
    reference = make_tiny("phi3", tmp_path, **SIZES, num_key_value_heads=4)
    expected = reference_logits(reference, quantise_checkpoint(tmp_path, form))
    assert (logits_of(build(tmp_path, quantization="none")) - expected).abs().max() <= 1e-4


EXPERTS = ("fp8-block", "fp8-channel", "int4-zeros", "gptq-desc_act")


@pytest.mark.parametrize(
    "form", [*EXPERTS, *(pytest.param(each, marks=pytest.mark.long) for each in ALL_FORMATS if each not in EXPERTS)]
)
def test_experts(form: str, tmp_path: Path) -> None:
    """Dequantised on load to rounding; packed too, or close to it where the CPU rounds activations to 8 bits. One token may
    then get another expert: the router is random."""
    reference = make_tiny("qwen3_moe", tmp_path, **SIZES, moe_intermediate_size=64)
    expected = reference_logits(reference, stacked(quantise_checkpoint(tmp_path, form), reference))
    packed = build(tmp_path)
    alike = "desc_act" not in form  # where gate and up have columns in different orders
    assert (packed.layers[-1].mlp.experts.stack.packed is not None) == alike
    assert (logits_of(build(tmp_path, quantization="none")) - expected).abs().max() <= 1e-4
    actual = logits_of(packed)
    if rounds_activations(form):
        likeness = torch.nn.functional.cosine_similarity(actual, expected, dim=-1).sort().values
        assert likeness[0 if form in EXPERTS else 1] > 0.99
        assert likeness[0] > 0.95
    else:
        assert (actual - expected).abs().max() <= 1e-4


def stacked(weights: dict[str, torch.Tensor], reference: Any) -> dict[str, torch.Tensor]:
    """Experts in one tensor, if that is how transformers has them in memory."""
    wanted = reference.state_dict()
    out = dict(weights)
    for name in wanted:
        if name in weights or ".experts." not in name:
            continue
        stem, _, last = name.rpartition(".")
        each: list[torch.Tensor] = []
        while f"{stem}.{len(each)}.down_proj.weight" in weights:
            here = f"{stem}.{len(each)}"
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            each.append(torch.cat([weights[f"{here}.{part}.weight"] for part in parts]))
        out[name] = torch.stack(each)
        assert out[name].shape == wanted[name].shape
    return out


@pytest.mark.parametrize("name", ["fp8", "fp8_block", "int4", "mxfp4"])
def test_experts_are_quantised_while_they_are_loaded_or_drawn(name: str, tmp_path: Path) -> None:
    reference = make_tiny("qwen3_moe", tmp_path, **SIZES, moe_intermediate_size=64)
    with torch.no_grad():
        exact = reference(torch.tensor([PROMPT])).logits[0]
    model = build(tmp_path, quantization=name)
    assert model.layers[-1].mlp.experts.stack.packed is not None
    assert torch.nn.functional.cosine_similarity(logits_of(model), exact, dim=-1).min() > (0.7 if "4" in name else 0.95)
    checkpoint = open_checkpoint(str(tmp_path), load_format="dummy")
    drawn, plain = (
        logits_of(build_model(checkpoint, dtype=torch.float32, device=CPU, load_format="dummy", quantization=each))
        for each in (name, "none")
    )
    assert torch.nn.functional.cosine_similarity(drawn, plain, dim=-1).min() > 0.8


@pytest.mark.parametrize("form", ["fp8-block", "awq"])
def test_answers(form: str, tmp_path: Path) -> None:
    """From the scheduler to the sampler, with prefixes that are cached and rows that join and leave."""
    make_tiny("llama", tmp_path, **SIZES)
    quantise_checkpoint(tmp_path, form)
    answers = []
    for quantization in ("auto", "none"):
        engine = InProcess(build(tmp_path, quantization=quantization), 128, Setup(page_size=4))
        greedy = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
        answers.append(engine.generate([PROMPT[:length] for length in (16, 12, 5)], greedy))
    same = sum(a == b for first, second in zip(*answers, strict=True) for a, b in zip(first, second, strict=True))
    assert same >= (18 if form == "fp8-block" else 12), answers


def test_parts_of_a_fused_layer_may_differ(tmp_path: Path) -> None:
    """Values are not quantised, the gate has 8 bits, and the output head is quantised too."""
    reference = make_tiny("llama", tmp_path, **SIZES)
    quantise_checkpoint(tmp_path, "int4", skip=("embed_tokens", "norm", "v_proj", "gate_proj"))
    meant = quantise_checkpoint(tmp_path, "int8", skip=("embed_tokens", "norm", "weight_", "v_proj"))
    four = FORMATS["int4"][0]["config_groups"]["group_0"]
    eight = {
        **FORMATS["int8"][0]["config_groups"]["group_0"],
        "targets": [r"re:.*\.gate_proj"],
        "format": "int-quantized",
    }
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {"a": {**four, "format": "pack-quantized"}, "b": eight},
        "ignore": [r"re:.*v_proj"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    exact = build(tmp_path, quantization="none")
    weights = {name: value for name, value in meant.items() if name.endswith(("norm.weight", "embed_tokens.weight"))}
    for index, layer in enumerate(exact.layers):
        here = f"model.layers.{index}"
        q, k, v = layer.attn.qkv.matrix.weight.split([64, 32, 32])
        gate, up = layer.mlp.gate_up.matrix.weight.chunk(2)
        named = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "mlp.gate_proj": gate}
        named |= {"mlp.up_proj": up, "mlp.down_proj": layer.mlp.down.matrix.weight}
        weights |= {f"{here}.{name}.weight": value for name, value in named.items()}
        weights[f"{here}.self_attn.o_proj.weight"] = layer.attn.out.matrix.weight
        assert torch.equal(v, meant[f"{here}.self_attn.v_proj.weight"])
        assert torch.equal(gate, meant[f"{here}.mlp.gate_proj.weight"])
        assert not torch.equal(q, k)
    weights["lm_head.weight"] = exact.head.matrix.weight
    expected = reference_logits(reference, weights)
    assert (logits_of(exact) - expected).abs().max() <= 1e-4
    packed = build(tmp_path)
    kinds = [type(piece).__name__ for piece in packed.layers[0].attn.qkv.matrix.pieces]
    assert kinds == ["PackedWeight", "Tensor"]
    assert [piece.kind for piece in packed.layers[0].mlp.gate_up.matrix.pieces] == ["int8", "int4"]
    assert packed.head.matrix.pieces[0].kind == "int4"
    assert torch.nn.functional.cosine_similarity(logits_of(packed), expected, dim=-1).min() > 0.99


def say(folder: Path, **changes: Any) -> None:
    """Changes the quantisation config of a checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def test_rules_of_single_layers_and_a_quantised_head(tmp_path: Path) -> None:
    """GPTQ's `dynamic`: values stay plain, gates have 8 bits in their own order, the head has 4."""
    reference = make_tiny("llama", tmp_path, **SIZES, vocab_size=128)
    meant = quantise_checkpoint(tmp_path, "gptq", skip=("embed_tokens", "norm", "v_proj", "gate_proj"))
    stored = ("embed_tokens", "norm", "v_proj", "qweight", "qzeros", "scales", "g_idx")
    meant |= {
        name: value
        for name, value in quantise_checkpoint(tmp_path, "gptq8-desc_act", skip=stored).items()
        if "gate_proj" in name
    }
    rules = {r"-:.*\.v_proj": {}, r"+:.*\.gate_proj": {"bits": 8, "desc_act": True}}
    say(tmp_path, bits=4, desc_act=False, lm_head=True, dynamic=rules)
    expected = reference_logits(reference, meant)
    assert (logits_of(build(tmp_path, quantization="none")) - expected).abs().max() <= 1e-4
    packed = build(tmp_path)
    assert packed.head.matrix.pieces[0].kind == "int4"
    assert [piece.kind for piece in packed.layers[0].mlp.gate_up.matrix.pieces] == ["int8", "int4"]
    assert torch.nn.functional.cosine_similarity(logits_of(packed), expected, dim=-1).min() > 0.99


def test_a_quantised_embedding(tmp_path: Path) -> None:
    reference = make_tiny("llama", tmp_path, **SIZES)
    expected = reference_logits(reference, quantise_checkpoint(tmp_path, "int8", skip=("norm",)))
    group = FORMATS["int8"][0]["config_groups"]["group_0"]
    say(tmp_path, config_groups={"group_0": {**group, "targets": ["Linear", "Embedding"]}}, ignore=[])
    assert (logits_of(build(tmp_path, quantization="none")) - expected).abs().max() <= 1e-4
    packed = build(tmp_path)
    assert isinstance(packed.embed.tokens.matrix.pieces[0], PackedWeight)
    assert torch.nn.functional.cosine_similarity(logits_of(packed), expected, dim=-1).min() > 0.99


def test_a_layer_that_is_plain_in_the_file_stays_plain(tmp_path: Path) -> None:
    reference = make_tiny("llama", tmp_path, **SIZES)
    expected = reference_logits(
        reference, quantise_checkpoint(tmp_path, "fp8-block", skip=("embed_tokens", "lm_head", "norm", "layers.2.mlp"))
    )
    model = build(tmp_path)
    assert (logits_of(model) - expected).abs().max() <= 1e-4
    assert isinstance(model.layers[2].mlp.down.matrix.weight, torch.Tensor)


@pytest.mark.parametrize("name", ["fp8", "fp8_block", "int8", "w8a16", "int4", "mxfp8", "mxfp4"])
def test_floats_are_quantised_while_they_are_loaded(name: str, tmp_path: Path) -> None:
    reference = make_tiny("llama", tmp_path, **SIZES)
    with torch.no_grad():
        exact = reference(torch.tensor([PROMPT])).logits[0]
    actual = logits_of(build(tmp_path, quantization=name))
    near = 0.8 if "4" in name else 0.97
    assert near < torch.nn.functional.cosine_similarity(actual, exact, dim=-1).min() < 1 - 1e-6
    assert torch.equal(logits_of(build(tmp_path, quantization=name)), actual)


@pytest.mark.parametrize(("name", "form"), [("fp8", "fp8-channel"), ("int8", "int8")])
def test_quantised_while_loading_or_before_is_the_same(name: str, form: str, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, **SIZES)
    online = build(tmp_path, quantization=name)
    meant = quantise_checkpoint(tmp_path, form)
    for layer, mine in enumerate(online.layers):
        (piece,) = mine.mlp.down.matrix.pieces
        expected = meant[f"model.layers.{layer}.mlp.down_proj.weight"]
        torch.testing.assert_close(dequantise(piece), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "name", ["fp8", "fp8_block", "int8", "int4", "awq", "gptq", "mxfp4", "modelopt", "bitsandbytes"]
)
def test_dummy_weights_take_any_format(name: str, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, **SIZES)
    checkpoint = open_checkpoint(str(tmp_path), load_format="dummy")
    models = [
        build_model(checkpoint, dtype=torch.float32, device=CPU, load_format="dummy", quantization=quantization)
        for quantization in (name, name, "none")
    ]
    quantised, again, plain = map(logits_of, models)
    assert torch.equal(quantised, again)
    assert torch.nn.functional.cosine_similarity(quantised, plain, dim=-1).min() > 0.9


def spoil(folder: Path, name: str, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    changed = change(tensors.pop(name))
    save_file({**tensors, **({} if changed is None else {name: changed})}, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("tensor", "change", "said"),
    [
        (
            "scales",
            lambda scales: torch.where(scales == scales.max(), torch.nan, scales),
            "1 scales that are no numbers",
        ),
        ("scales", lambda scales: None, "1 missing"),
        ("qzeros", lambda zeros: zeros[:1].clone(), "1 misshaped"),
        ("qweight", lambda codes: codes.float(), "1 mistyped"),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_said_before_it_is_loaded(
    tensor: str, change: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny("llama", tmp_path, **SIZES)
    quantise_checkpoint(tmp_path, "awq")
    name = f"model.layers.3.mlp.down_proj.{tensor}"
    spoil(tmp_path, name, change)
    monkeypatch.setattr("bough.weights.load._Fill.run", lambda self: pytest.fail("weights were loaded"))
    with pytest.raises(WeightsError) as caught:
        build(tmp_path)
    assert said in caught.value.what
    assert name in caught.value.sentence()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "quip"}, "quip"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "gemv"),
        ({"quant_method": "awq", "bits": 3, "group_size": 32}, "3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "group_size": 32}, "bits"),
        ({"quant_method": "fp8", "activation_scheme": "psychic"}, "psychic"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ"),
        ({"quant_method": "bitsandbytes"}, "neither 4 nor 8"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": GROUPS}, "marlin-24"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be_read_are_refused(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, **SIZES)
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**described, "quantization_config": config}))
    with pytest.raises(UnsupportedModel) as caught:
        build(tmp_path)
    assert said in caught.value.what
    assert caught.value.fix


def test_another_format_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, **SIZES)
    for name in ("awq", "gptq"):
        with pytest.raises(ConfigError, match="not quantised"):
            build(tmp_path, quantization=name)
    quantise_checkpoint(tmp_path, "awq")
    for name in ("fp8", "gptq"):
        with pytest.raises(ConfigError, match="quantised with awq"):
            build(tmp_path, quantization=name)


@pytest.mark.parametrize(
    ("form", "size", "changes"), [("fp8-block", 8, {"intermediate_size": 160}), ("awq", 2, {"intermediate_size": 96})]
)
def test_shares_that_cannot_be_cut_are_refused(form: str, size: int, changes: dict[str, int], tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, **{**SIZES, "num_attention_heads": 8, "num_key_value_heads": 8, **changes})
    quantise_checkpoint(tmp_path, form)
    with pytest.raises(BoughError) as caught:
        build(tmp_path, mesh=Mesh.tensor(0, size))
    assert "--tp-size" in caught.value.fix
    assert "down_proj" in caught.value.what or "o_proj" in caught.value.what
