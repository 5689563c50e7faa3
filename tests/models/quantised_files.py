"""Writes tiny quantised checkpoints, by arithmetic on what each format's documents say.

`tests/unit/quantization/test_golden.py` compares our reading of each format with files of the packages that own it; what is
written here is read by the same code, in whole models.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden" / "quantised"
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns each nibble of a word holds."""
Stored = dict[str, Tensor]


def ints(w: Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, float16 scales, zero points), a scale for each group of columns."""
    blocks, top = w.view(w.shape[0], -1, group), 2**bits - 1
    if symmetric:
        scale = blocks.abs().amax(-1) * 2 / top
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scale = (high - low) / top
        zero = (-low / scale).round().clamp(1, top)
    scale = scale.half()
    codes = (blocks / scale.float()[..., None] + zero[..., None]).round().clamp(0, top)
    return codes.view(w.shape).int(), scale, zero.int()


def back(codes: Tensor, scale: Tensor, zero: Tensor, group: int) -> Tensor:
    scale, zero = (each.float().repeat_interleave(group, 1) for each in (scale, zero))
    return (codes.float() - zero) * scale


def words(codes: Tensor, bits: int, dim: int) -> Tensor:
    """int32 words along `dim`, lowest bits first, without gaps."""
    codes = codes.movedim(dim, -1).long()
    bit = torch.arange(codes.shape[-1] * bits)
    stream = (codes[..., bit // bits] >> (bit % bits)) & 1
    packed = (stream.view(*stream.shape[:-1], -1, 32) << torch.arange(32)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int().movedim(-1, dim).contiguous()


def awq(w: Tensor, group: int) -> tuple[Stored, Tensor]:
    codes, scale, zero = ints(w, 4, group, symmetric=False)

    def interleaved(by_column: Tensor) -> Tensor:
        return words(by_column.view(by_column.shape[0], -1, 8)[..., AWQ_COLUMNS].flatten(1), 4, 1)

    stored = {"qweight": interleaved(codes.T), "qzeros": interleaved(zero.T), "scales": scale.T.contiguous()}
    return stored, back(codes, scale, zero, group)


def gptq(
    w: Tensor, group: int, bits: int = 4, *, desc_act: bool = False, symmetric: bool = True
) -> tuple[Stored, Tensor]:
    order = torch.randperm(w.shape[1]) if desc_act else torch.arange(w.shape[1])
    codes, scale, zero = ints(w[:, order], bits, group, symmetric=symmetric)
    where = torch.argsort(order)
    stored = {
        "qweight": words(codes[:, where].T, bits, 0),
        "qzeros": words((zero.T - 1) % 2**bits, bits, 1),
        "scales": scale.T.contiguous(),
        "g_idx": (where // group).int(),
    }
    return stored, back(codes, scale, zero, group)[:, where]


def packed(w: Tensor, group: int, *, symmetric: bool) -> tuple[Stored, Tensor]:
    codes, scale, zero = ints(w, 4, group, symmetric=symmetric)
    stored = {"weight_packed": words(codes, 4, 1), "weight_scale": scale, "weight_shape": torch.tensor(w.shape)}
    if not symmetric:
        stored["weight_zero_point"] = words(zero, 4, 0)
    return stored, back(codes, scale, zero, group)


def fp8(w: Tensor, rows: int, cols: int, name: str, shape: tuple[int, ...] | None = None) -> tuple[Stored, Tensor]:
    """Blocks of rows x cols share a scale (0: all)."""
    down, across = rows or w.shape[0], cols or w.shape[1]
    count = (-(-w.shape[0] // down), -(-w.shape[1] // across))
    scale = torch.empty(count)
    dense, stored = torch.empty_like(w), torch.empty_like(w)
    for i in range(count[0]):
        for j in range(count[1]):
            at = (slice(i * down, (i + 1) * down), slice(j * across, (j + 1) * across))
            scale[i, j] = w[at].abs().max() / 448
            stored[at] = w[at] / scale[i, j]
            dense[at] = stored[at].to(torch.float8_e4m3fn).float() * scale[i, j]
    return {"weight": stored.to(torch.float8_e4m3fn), name: scale if shape is None else scale.view(shape)}, dense


def int8(w: Tensor) -> tuple[Stored, Tensor]:
    scale = w.abs().amax(1, keepdim=True) / 127
    codes = (w / scale).round()
    return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale


def static(w: Tensor) -> tuple[Stored, Tensor]:
    stored, dense = fp8(w, 0, 0, "weight_scale", ())
    return {**stored, "input_scale": torch.rand(()) * 0.1 + 0.01}, dense


def exponents(w: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """(bytes of e8m0, scales) for each 32 columns, so that none exceeds `largest`."""
    scale = torch.exp2(torch.ceil(torch.log2(w.view(w.shape[0], -1, 32).abs().amax(-1) / largest)))
    return (torch.log2(scale) + 127).to(torch.uint8), scale.repeat_interleave(32, 1)


def mxfp8(w: Tensor) -> tuple[Stored, Tensor]:
    stored, scale = exponents(w, 448)
    codes = (w / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": stored}, codes.float() * scale


HALVES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def fours(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """(e2m1 codes, their values), each the nearest."""
    nearest = (scaled.abs()[..., None] - HALVES).abs().argmin(-1)
    return (nearest | (scaled < 0).long() << 3).to(torch.uint8), HALVES[nearest] * scaled.sign()


def mxfp4(w: Tensor) -> tuple[Stored, Tensor]:
    stored, scale = exponents(w, 6)
    codes, values = fours(w / scale)
    return {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": stored}, values * scale


def nvfp4(w: Tensor) -> tuple[Stored, Tensor]:
    whole = w.abs().max() / (6 * 448)
    small = (w.view(w.shape[0], -1, 16).abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    scale = small.float().repeat_interleave(16, 1) * whole
    codes, values = fours(w / scale)
    stored = {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": small, "weight_scale_2": whole}
    return {**stored, "input_scale": torch.tensor(0.01)}, values * scale


def golden(name: str) -> tuple[dict[str, Any], Stored]:
    """The config and the tensors of a file that the format's own package wrote."""
    with safe_open(GOLDEN / f"{name}.safetensors", framework="pt") as file:
        return json.loads(file.metadata()["config"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def nf4(w: Tensor) -> tuple[Stored, Tensor]:
    table = golden("bnb_nf4")[1]["weight.quant_map"]
    blocks = w.reshape(-1, 64)
    scale = blocks.abs().amax(1)
    codes = (blocks[..., None] / scale[:, None, None] - table).abs().argmin(-1)
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(w.shape)})
    flat = codes.view(-1, 2)
    stored = {
        "weight": (flat[:, :1] << 4 | flat[:, 1:]).to(torch.uint8),
        "weight.absmax": scale,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state.encode()), dtype=torch.uint8),
    }
    return stored, (table[codes] * scale[:, None]).view(w.shape)


def bnb8(w: Tensor) -> tuple[Stored, Tensor]:
    stored, dense = int8(w)
    return {"weight": stored["weight"], "SCB": stored["weight_scale"].flatten() * 127}, dense


def torchao(w: Tensor) -> tuple[Stored, Tensor]:
    codes, scale, zero = ints(w, 4, 32, symmetric=True)
    stored = {"_weight_qdata": codes - 8, "_weight_zero_point": zero - 8}
    stored = {key: value.to(torch.int8) for key, value in stored.items()}
    return {**stored, "_weight_scale": scale}, back(codes, scale, zero, 32)


def blocks8(w: Tensor) -> tuple[Stored, Tensor]:
    stored, dense = torch.empty_like(w), torch.empty_like(w)
    scale = torch.empty(w.shape[0] // 32, w.shape[1] // 32)
    for i, j in itertools.product(*map(range, scale.shape)):
        at = (slice(i * 32, (i + 1) * 32), slice(j * 32, (j + 1) * 32))
        scale[i, j] = w[at].abs().max() / 127
        stored[at] = (w[at] / scale[i, j]).round()
        dense[at] = stored[at] * scale[i, j]
    return {"weight": stored.to(torch.int8), "weight_scale_inv": scale}, dense


Writer = Callable[[Tensor], tuple[Stored, Tensor]]


def _ct(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_GPTQ = {"quant_method": "gptq", "group_size": 32, "sym": True, "desc_act": False, "checkpoint_format": "gptq"}
FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        lambda w: awq(w, 32),
    ),
    "gptq": ({**_GPTQ, "bits": 4}, lambda w: gptq(w, 32)),
    "gptq3": ({**_GPTQ, "bits": 3, "sym": False}, lambda w: gptq(w, 32, 3, symmetric=False)),
    "gptq-desc_act": ({**_GPTQ, "bits": 4, "desc_act": True}, lambda w: gptq(w, 32, desc_act=True)),
    "int4": (_ct("pack-quantized", {**_INT4, "symmetric": True}), lambda w: packed(w, 32, symmetric=True)),
    "int4-zeros": (_ct("pack-quantized", {**_INT4, "symmetric": False}), lambda w: packed(w, 32, symmetric=False)),
    "w4a8": (_ct("pack-quantized", {**_INT4, "symmetric": True}, _TOKEN), lambda w: packed(w, 32, symmetric=True)),
    "int8": (_ct("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, _TOKEN), int8),
    "fp8-channel": (
        _ct("float-quantized", {**_FP8, "strategy": "channel"}, {**_FP8, "strategy": "token", "dynamic": True}),
        lambda w: fp8(w, 1, 0, "weight_scale"),
    ),
    "fp8-static": ({"quant_method": "fp8", "activation_scheme": "static"}, static),
    "fp8-block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
        lambda w: fp8(w, 32, 32, "weight_scale_inv"),
    ),
}
_TORCHAO = golden("torchao_int4")[0]
_TORCHAO["quant_type"]["default"]["_data"]["granularity"]["_data"]["group_size"] = 32
_FOUR = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
OTHER_FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    "gptq2": ({**_GPTQ, "bits": 2, "sym": False}, lambda w: gptq(w, 32, 2, symmetric=False)),
    "gptq8-desc_act": ({**_GPTQ, "bits": 8, "desc_act": True}, lambda w: gptq(w, 32, 8, desc_act=True)),
    "auto-round": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_gptq"},
        lambda w: gptq(w, 32),
    ),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8"}, lambda w: fp8(w, 1, 0, "weight_scale")),
    "mxfp8": ({"quant_method": "mxfp8"}, mxfp8),
    "mxfp4": (_ct("mxfp4-pack-quantized", _FOUR), mxfp4),
    "modelopt-fp8": ({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}, static),
    "modelopt-nvfp4": ({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}, nvfp4),
    "w8a8_int8": ({"quant_method": "w8a8_int8"}, int8),
    "blockwise_int8": ({"quant_method": "blockwise_int8", "weight_block_size": [32, 32]}, blocks8),
    "bnb-nf4": (golden("bnb_nf4")[0], nf4),
    "bnb-int8": (golden("bnb_int8")[0], bnb8),
    "torchao-int4": (_TORCHAO, torchao),
}
"""Formats whose whole models are tried by fewer tests."""
ALL_FORMATS = {**FORMATS, **OTHER_FORMATS}
FLOATS = ("fp8", "nf4")
"""In the names of formats whose activations a CPU does not round."""


def rounds_activations(form: str) -> bool:
    """Whether a CPU rounds activations to 8 bits before a product with weights of this format."""
    return not any(word in form for word in FLOATS)


def quantise_checkpoint(
    folder: Path, form: str, *, skip: tuple[str, ...] = ("embed_tokens", "lm_head", "norm", ".gate.", "router")
) -> dict[str, Tensor]:
    """Quantises the matrices of the checkpoint in `folder`, but those with a word of `skip` in their names. Returns all
    weights as the new checkpoint means them."""
    config, write = ALL_FORMATS[form]
    torch.manual_seed(0)
    path = folder / "model.safetensors"
    stored: Stored = {}
    meant: Stored = {}
    for name, tensor in load_file(path).items():
        if tensor.dim() != 2 or any(word in name for word in skip):
            stored[name] = meant[name] = tensor
            continue
        tensors, dense = write(tensor.float())
        layer = name.removesuffix(".weight")
        stored |= {f"{layer}.{key}": value.contiguous() for key, value in tensors.items()}
        meant[name] = dense
    save_file(stored, path, {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "quantization_config": config}))
    return meant
