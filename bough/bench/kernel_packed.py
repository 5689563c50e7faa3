"""Products with packed weights on a GPU: every format with three of a Llama's weights, each product of a layer, experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.kernels.linear.tuning import time_us
from bough.kernels.moe import fused_experts
from bough.kernels.packed_linear import PackedWeight, pack, pack_codes, packed_linear
from bough.kernels.packed_linear.codes import Inputs
from bough.kernels.packed_linear.weight import FORMATS
from bough.kernels.packed_moe import pack_experts, packed_experts
from bough.quantization.formats import Four, Gptq, Online, WeightFormat
from bough.quantization.quantise import quantise

SHAPES = ((6144, 4096), (28672, 4096), (4096, 14336))
"""Of Llama-3.1-8B: queries, keys and values; gate and up; down."""
PRODUCTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""All of a layer's."""
NEIGHBOURS = {"5120x5120": (5120, 5120), "3072x8192": (3072, 8192), "2048x6144": (2048, 6144)}
"""Weights of few rows that are not Llama's."""
PRODUCT_TOKENS = {"FP8": (1, 4, 16, 24, 32), "FP8 rounded": (48, 64, 100, 128, 160, 200), "INT4": (1, 4, 8, 16, 24, 32)}
_READ_BYTES = 260_000_000
"""Of weights that take turns, so that none is in a cache when its turn comes."""
CODED: dict[str, WeightFormat] = {
    "FP8 channel": Online("fp8"),
    "FP8 block": Online("fp8_block"),
    "INT8": Online("int8_weight"),
    "INT4 g128": Gptq(4, 128),
    "INT4 g32": Gptq(4, 32),
    "MXFP4": Four("mx"),
    "NVFP4": Four("nv", tensor_scale="weight_scale_2"),
}
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
TOKENS = (1, 4, 16, 32, 64, 256, 4096)
EXPERTS, WIDTH, INNER, PER_TOKEN = 128, 2048, 768, 8
"""Qwen3-30B-A3B's."""


@dataclass(frozen=True, slots=True)
class TimedProduct:
    """One case."""

    case: str
    us: float
    num_bytes: int
    """Of weights that it reads."""
    plain_us: float
    """The same with weights in bfloat16."""


def dense(device: torch.device) -> Iterator[TimedProduct]:
    """Each format, summed over the three weights."""
    plain = {tokens: sum(_plain_us(shape, tokens, device) for shape in SHAPES) for tokens in TOKENS}
    makers: dict[str, Callable[[tuple[int, int]], PackedWeight]] = {
        name: partial(_coded, form, device=device) for name, form in CODED.items()
    }
    makers |= {kind: partial(_blocks, kind, device=device) for kind in BLOCKS}
    for name, make in makers.items():
        weights = [make(shape) for shape in SHAPES]
        read = sum(weight.num_bytes for weight in weights)
        for tokens in TOKENS:
            us = sum(
                time_us([partial(packed_linear, _x(tokens, weight.cols, device), weight)] * 8) for weight in weights
            )
            yield TimedProduct(f"{name} T={tokens}", us, read, plain[tokens])


def products(device: torch.device) -> Iterator[TimedProduct]:
    """Each product alone, with as many weights taking turns as no cache holds; "rounded": activations may be."""
    for name, shape in (PRODUCTS | NEIGHBOURS).items():
        for form, tokens_of in PRODUCT_TOKENS.items():
            codes = quantise(Gptq(4, 128) if form == "INT4" else Online("fp8"), torch.randn(*shape, device=device) / 50)
            codes = replace(codes, inputs=Inputs("float8") if form == "FP8 rounded" else None)
            first = pack_codes(codes)
            weights = [first] + [pack_codes(codes) for _ in range(max(2, _READ_BYTES // first.num_bytes))]
            for tokens in tokens_of:
                x = _x(tokens, shape[1], device)
                us = time_us([partial(packed_linear, x, weight, exact=form == "FP8") for weight in weights])
                yield TimedProduct(f"{form} {name} T={tokens}", us, first.num_bytes, _plain_us(shape, tokens, device))


def experts(device: torch.device) -> Iterator[TimedProduct]:
    """A layer's, with tokens that choose uniformly."""
    generator = torch.Generator(device=device).manual_seed(0)
    gate_up = torch.randn(EXPERTS, 2 * INNER, WIDTH, device=device, generator=generator, dtype=torch.bfloat16) / 50
    down = torch.randn(EXPERTS, WIDTH, INNER, device=device, generator=generator, dtype=torch.bfloat16) / 50
    choices = {tokens: _choice(tokens, device, generator) for tokens in (1, 4, 24, 64, 256, 4096)}
    for name in ("FP8 channel", "FP8 block", "INT4 g128", "MXFP4"):
        form = CODED[name]
        packed = pack_experts([quantise(form, each) for each in gate_up], [quantise(form, each) for each in down])
        assert packed is not None, "these formats have kernels"
        per_expert = sum(each.numel() * each.element_size() for each in packed.data) // EXPERTS
        for tokens, (weights, ids) in choices.items():
            x = _x(tokens, WIDTH, device)
            us = time_us([partial(packed_experts, x, packed, weights, ids)] * 8)
            plain_us = time_us([partial(fused_experts, x, gate_up, down, weights, ids)] * 8)
            yield TimedProduct(
                f"experts {name} T={tokens}", us, per_expert * len(set(ids.flatten().tolist())), plain_us
            )


def _choice(tokens: int, device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    weights, ids = torch.rand(tokens, EXPERTS, device=device, generator=generator).topk(PER_TOKEN, -1)
    return weights, ids.int()


def _x(tokens: int, width: int, device: torch.device) -> Tensor:
    return torch.randn(tokens, width, device=device, dtype=torch.bfloat16)


def _plain_us(shape: tuple[int, int], tokens: int, device: torch.device) -> float:
    weight = torch.randn(*shape, device=device, dtype=torch.bfloat16)
    return time_us([partial(F.linear, _x(tokens, shape[1], device), weight)] * 8)


def _coded(form: WeightFormat, shape: tuple[int, int], *, device: torch.device) -> PackedWeight:
    return pack_codes(quantise(form, torch.randn(*shape, device=device) * 0.02))


def _blocks(kind: str, shape: tuple[int, int], *, device: torch.device) -> PackedWeight:
    """Random bytes whose values do not matter, as long as they are finite."""
    form, (rows, cols) = FORMATS[kind], shape
    row_bytes = cols // form.block * form.block_bytes
    raw = torch.randint(0, 60, (rows, row_bytes), device=device, dtype=torch.uint8)
    return pack(kind, raw, cols)
