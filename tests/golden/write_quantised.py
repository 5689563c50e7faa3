"""Writes `quantised/*.safetensors`: small weights as other packages store them, and what those packages dequantise them to.

    python tests/golden/write_quantised.py [torchao ...]

Needs an environment with compressed-tensors 0.20, gptqmodel 7.7, auto-round 0.16, bitsandbytes 0.50, nvidia-modelopt 0.47,
torchao 0.18, fbgemm-gpu-genai 1.9 and transformers 5.22; each case says which package made it. The tests read the files
only. Every file holds the stored tensors, `dense` (the package's own dequantised weight) and, as metadata, the quantisation
config of a checkpoint.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

FOLDER = Path(__file__).parent / "quantised"
ROWS, COLS = 32, 256


def weight(rows: int = ROWS, cols: int = COLS, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, generator=generator) * 0.02 * (1 + torch.rand(rows, 1, generator=generator))


def save(name: str, config: dict[str, Any], tensors: dict[str, Tensor], dense: Tensor) -> None:
    tensors = {key: value.detach().contiguous().clone() for key, value in tensors.items()}
    FOLDER.mkdir(exist_ok=True)
    save_file(
        {**tensors, "dense": dense.detach().contiguous()},
        FOLDER / f"{name}.safetensors",
        {"config": json.dumps(config)},
    )
    print(name, {key: (str(value.dtype), tuple(value.shape)) for key, value in tensors.items()})


def compressed_tensors() -> None:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    def case(
        name: str,
        form: str,
        args: dict[str, Any],
        inputs: dict[str, Any] | None = None,
        *,
        shape: tuple[int, int] = (ROWS, COLS),
        dtype: torch.dtype = torch.bfloat16,
        bound: bool = False,
    ) -> None:
        w = weight(*shape)
        quant = QuantizationArgs(**args)
        if args["strategy"] == "group":
            blocks = w.view(shape[0], -1, args["group_size"])
        elif args["strategy"] == "tensor_group":
            blocks = w.view(shape[0], -1, 16)
        elif args["strategy"] == "block":
            rows, cols = args["block_structure"]
            padded = nn.functional.pad(w, (0, -shape[1] % cols, 0, -shape[0] % rows))
            blocks = (
                padded.view(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols).transpose(1, 2).flatten(2)
            )
        elif args["strategy"] == "channel":
            blocks = w.unsqueeze(1)
        else:
            blocks = w.view(1, 1, -1)
        state: dict[str, Tensor] = {"weight": w}
        whole = None
        if form == "nvfp4-pack-quantized":
            whole = (448 * 6 / w.abs().max()).reshape(1)
            state["weight_global_scale"] = whole
        scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), quant, global_scale=whole)
        if args["strategy"] == "tensor":
            scale, zero = scale.reshape(1), zero.reshape(1)
        state["weight_scale"] = scale if form.startswith(("nv", "mx")) else scale.to(dtype)
        if not quant.symmetric:
            state["weight_zero_point"] = zero
        scheme = QuantizationScheme(targets=["Linear"], weights=quant)
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(dict(state), scheme)
        dense = compressor.decompress(dict(stored), scheme)["weight"]
        if bound:
            stored["input_scale"] = torch.tensor([0.0125])
        group = {"targets": ["Linear"], "weights": args, "input_activations": inputs}
        config = {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": group},
            "ignore": [],
        }
        save(f"ct_{name}", config, stored, dense)

    def ints(bits: int, **rest: Any) -> dict[str, Any]:
        return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64, **rest}

    token = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    case("int4", "pack-quantized", ints(4))
    case("int4_asymmetric", "pack-quantized", ints(4, symmetric=False))
    case("int4_channel", "pack-quantized", ints(4, strategy="channel", group_size=None))
    ordered(ints(4, actorder="group"))
    case("int8_weights", "pack-quantized", ints(8, strategy="channel", group_size=None))
    case("int3", "pack-quantized", ints(3))
    case("w4a8", "pack-quantized", ints(4), token)
    case("int8", "int-quantized", ints(8, strategy="channel", group_size=None), token)
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    dynamic = {**eight, "strategy": "token", "dynamic": True}
    case("fp8_channel", "float-quantized", {**eight, "strategy": "channel"}, dynamic)
    case("fp8_static", "float-quantized", {**eight, "strategy": "tensor"}, {**eight, "strategy": "tensor"}, bound=True)
    inputs = {**eight, "strategy": "group", "group_size": 128, "dynamic": True}
    block = {**eight, "strategy": "block", "block_structure": [128, 128]}
    case("fp8_block", "float-quantized", block, inputs, shape=(144, 160), dtype=torch.float32)
    four = {"num_bits": 4, "type": "float", "symmetric": True}
    mx = {**four, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    case("mxfp4", "mxfp4-pack-quantized", mx)
    case("mxfp8", "mxfp8-quantized", {**mx, "num_bits": 8})
    nv = {**four, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
    case("nvfp4", "nvfp4-pack-quantized", nv)


def ordered(args: dict[str, Any]) -> None:
    """Columns of a group that are not neighbours, which releases before 0.20 wrote: packed by today's helpers."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    w, group = weight(), args["group_size"]
    group_of = (torch.arange(COLS) // group)[torch.randperm(COLS, generator=torch.Generator().manual_seed(3))]
    blocks = torch.stack([w[:, group_of == g] for g in range(COLS // group)], 1)
    scale = (blocks.abs().amax(-1) / 7.5).bfloat16()
    q = (w / scale.float()[:, group_of]).round().clamp(-8, 7)
    stored = {
        "weight_packed": pack_to_int32(q.to(torch.int8), 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor([ROWS, COLS]),
        "weight_g_idx": group_of.int(),
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": args, "input_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": []}
    save("ct_int4_actorder", config, stored, q * scale.float()[:, group_of])


def gptqmodel() -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    for bits in (2, 3, 4, 8):
        for name, symmetric, order, version in (
            ("", True, False, 1), ("_asymmetric", False, False, 1), ("_v2", False, False, 2), ("_desc_act", True, True, 1),
        ):  # fmt: skip
            if name == "_asymmetric" and bits in (2, 8):
                continue
            group = 64
            w = weight()
            top = 2**bits - 1
            group_of = torch.arange(COLS) // group
            if order:
                group_of = group_of[torch.randperm(COLS, generator=torch.Generator().manual_seed(5))]
            blocks = torch.stack([w[:, group_of == g] for g in range(COLS // group)], 1)
            if symmetric:
                scale, zero = blocks.abs().amax(-1) * 2 / top, torch.full((ROWS, COLS // group), 2.0 ** (bits - 1))
            else:
                low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
                scale = (high - low) / top
                zero = (-low / scale).round().clamp(1, top)
            scale = scale.half().float()
            linear = nn.Linear(COLS, ROWS, bias=False)
            q = (w / scale[:, group_of] + zero[:, group_of]).round().clamp(0, top)
            linear.weight.data = (q - zero[:, group_of]) * scale[:, group_of]
            made = TorchLinear(
                bits=bits, group_size=group, sym=symmetric, desc_act=order, in_features=COLS, out_features=ROWS
            )
            made.pack_original(linear, scale, zero, group_of.int())
            made.post_init()
            dense = made.dequantize_weight().T
            stored = {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales, "g_idx": made.g_idx}
            if version == 1:
                stored["qzeros"] = stored["qzeros"].clone()
                made.qzero_format(2)
                convert_gptq_v2_to_v1_format_module(made, _Config(bits))
                stored["qzeros"] = made.qzeros
            config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": order}
            config["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"
            save(f"gptq{bits}{name}", config, stored, dense)


class _Config:
    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.pack_dtype = torch.int32


def awq() -> None:
    """By gptqmodel's own AWQ layer, which reads AutoAWQ's gemm layout."""
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    for name, group in (("", 64), ("_row", -1)):
        w = weight()
        size = COLS if group < 0 else group
        blocks = w.view(ROWS, -1, size)
        low, high = blocks.amin(-1), blocks.amax(-1)
        scale = ((high - low) / 15).half().float()
        zero = (-low / scale).round().clamp(0, 15)
        grown = [each.repeat_interleave(size, 1) for each in (scale, zero)]
        linear = nn.Linear(COLS, ROWS, bias=False)
        linear.weight.data = ((w / grown[0] + grown[1]).round().clamp(0, 15) - grown[1]) * grown[0]
        made = AwqTorchLinear(
            bits=4, group_size=size, sym=False, desc_act=False, in_features=COLS, out_features=ROWS, bias=False
        )
        made.pack(linear, scale.half(), zero)
        dense = dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, size).T
        config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
        save(f"awq{name}", config, {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales}, dense)


def auto_round() -> None:
    from auto_round_extension.torch.qlinear_torch import QuantLinear as Raw
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as MinusOne

    for name, made_by, packing in (("", MinusOne, "auto_round:auto_gptq"), ("_raw", Raw, "auto_round")):
        w = weight()
        blocks = w.view(ROWS, -1, 64)
        low, high = blocks.amin(-1), blocks.amax(-1)
        scale = ((high - low) / 15).half().float()
        zero = (-low / scale).round().clamp(1, 15)
        grown = [each.repeat_interleave(64, 1) for each in (scale, zero)]
        linear = nn.Linear(COLS, ROWS, bias=False)
        dense = ((w / grown[0] + grown[1]).round().clamp(0, 15) - grown[1]) * grown[0]
        linear.weight.data = dense
        made = made_by(4, 64, COLS, ROWS, False)
        made.device = "cpu"
        made.pack(linear, scale, zero)
        read = made.forward(torch.eye(COLS)).T
        assert torch.allclose(read.float(), dense, atol=1e-3)
        config = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False, "packing_format": packing}
        save(
            f"auto_round{name}", config, {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales}, dense
        )


def bitsandbytes() -> None:
    import bitsandbytes as bnb
    from bitsandbytes import functional as F

    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            w = weight()
            packed, state = F.quantize_4bit(w, quant_type=kind, compress_statistics=nested, blocksize=64)
            stored = {"weight": packed}
            stored |= {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
            config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
            save(f"bnb_{kind}{'_nested' if nested else ''}", config, stored, F.dequantize_4bit(packed, state))
    quantised, scale, _ = F.int8_vectorwise_quant(weight().half())
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    save("bnb_int8", config, {"weight": quantised, "SCB": scale}, F.int8_vectorwise_dequant(quantised, scale))
    assert bnb


def modelopt() -> None:
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    w = weight()
    made, scale, whole = NVFP4QTensor.quantize(w, 16)
    dense = made.dequantize(dtype=torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16})
    stored = {
        "weight": made._quantized_data,
        "weight_scale": scale,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(0.01),
    }
    save("modelopt_nvfp4", {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}, stored, dense)
    made, scale = FP8QTensor.quantize(w)
    dense = made.dequantize(dtype=torch.float32, scale=scale)
    stored = {"weight": made._quantized_data, "weight_scale": scale, "input_scale": torch.tensor(0.01)}
    save("modelopt_fp8", {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}, stored, dense)
    sizes = {-1: 128, -2: 128}
    made, scale = FP8QTensor.quantize(weight(128, COLS), block_sizes=sizes)
    dense = made.dequantize(dtype=torch.float32, scale=scale, block_sizes=sizes)
    stored = {"weight": made._quantized_data, "weight_scale": scale[:, None, :, None]}
    save("modelopt_fp8_block", {"quantization": {"quant_algo": "FP8_PB_WO"}}, stored, dense)
    made, scale = MXFP8QTensor.quantize(w)
    dense = made.dequantize(dtype=torch.float32, scale=scale)
    stored = {"weight": made._quantized_data, "weight_scale": scale}
    save("modelopt_mxfp8", {"quantization": {"quant_algo": "MXFP8"}}, stored, dense)


def transformers() -> None:
    """Fine-grained FP8 by the layer that reads DeepSeek's checkpoints, MXFP4 by the one that reads gpt-oss's."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    w = weight(144, 160)  # the last blocks are partial
    padded = nn.functional.pad(w, (0, 96, 0, 112)).view(2, 128, 2, 128)
    scale = padded.abs().amax((1, 3)) / 448
    grown = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:144, :160]
    stored = {"weight": (w / grown).to(torch.float8_e4m3fn), "weight_scale_inv": scale}
    dense = _dequantize_fp8_weight(stored["weight"], scale, [128, 128], torch.float32)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    save("transformers_fp8_block", config, stored, dense)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 64, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(115, 130, (2, 64, 3), dtype=torch.uint8, generator=generator)
    dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    save("mxfp4_experts", config, {"blocks": blocks, "scales": scales}, dense)


def fbgemm() -> None:
    """Rows by the function that fbgemm quantises weights with where there is no GPU; what they are worth by the product that
    transformers' layer for this format computes, with the identity as activations."""
    found = importlib.util.find_spec("fbgemm_gpu")
    assert found is not None
    assert found.submodule_search_locations
    place = Path(found.submodule_search_locations[0])
    for name in ("", ".experimental", ".experimental.gemm", ".experimental.gemm.triton_gemm"):
        package = types.ModuleType(
            f"fbgemm_gpu{name}"
        )  # without the packages' own imports, which want a GPU's libraries
        package.__path__ = [str(place.joinpath(*name.split(".")))]
        sys.modules[package.__name__] = package
    from fbgemm_gpu.experimental.gemm.triton_gemm.fp8_gemm import quantize_fp8_row

    values, scale = quantize_fp8_row(weight())
    eye = torch.eye(COLS).to(torch.float8_e4m3fn)
    one = torch.ones(COLS, 1)
    dense = torch._scaled_mm(eye, values.T, scale_a=one, scale_b=scale.view(1, -1), out_dtype=torch.float32).T
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    save("fbgemm_fp8", config, {"weight": values, "weight_scale": scale.view(-1, 1)}, dense)


def torchao() -> None:
    """As transformers saves them: the tensors of a subclass beside the weight's name."""
    from torchao import quantization as q
    from transformers import TorchAoConfig

    group, row = q.PerGroup(64), q.PerAxis(0)
    cases = {
        "int8": q.Int8WeightOnlyConfig(version=2),
        "int8_group": q.Int8WeightOnlyConfig(version=2, granularity=q.PerGroup(32)),
        "int8_dynamic": q.Int8DynamicActivationInt8WeightConfig(version=2),
        "fp8": q.Float8WeightOnlyConfig(),
        "int4": q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group),
        "int4_row": q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=row),
        "int3_asymmetric": q.IntxWeightOnlyConfig(
            weight_dtype=torch.int3, granularity=group, mapping_type=q.MappingType.ASYMMETRIC
        ),
        "int6": q.IntxWeightOnlyConfig(weight_dtype=torch.int6, granularity=group),
        "w4a8": q.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=group),
    }
    for name, config in cases.items():
        linear = nn.Linear(COLS, ROWS, bias=False, dtype=torch.bfloat16)
        linear.weight.data = weight().bfloat16()
        q.quantize_(linear, config)
        made = linear.weight
        found = {key: getattr(made, key, None) for key in ("qdata", "scale", "zero_point")}
        stored = {f"_weight_{key}": value for key, value in found.items() if value is not None}
        described = {**TorchAoConfig(config).to_dict(), "quant_method": "torchao"}
        save(f"torchao_{name}", described, stored, made.dequantize())


WRITERS = (compressed_tensors, gptqmodel, awq, auto_round, bitsandbytes, modelopt, transformers, fbgemm, torchao)

if __name__ == "__main__":
    chosen = sys.argv[1:] or [write.__name__ for write in WRITERS]
    for write in WRITERS:
        if write.__name__ in chosen:
            write()
