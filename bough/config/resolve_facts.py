"""Facts about the machine and the checkpoint from which settings are decided, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bough.config.concerns import DType, Quantization
from bough.config.kv_groups import KvPlan
from bough.config.media_facts import TowerFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The device that will be used, and its host."""

    device: Literal["cpu", "cuda"]
    name: str = ""
    arch: str = ""
    """Instruction set or compute capability, say "avx512" or "sm90"."""
    total_bytes: int
    free_bytes: int
    host_free_bytes: int = 0
    num_devices: int = 1
    physical_cores: int = 1
    has_bfloat16: bool = True
    fastest_dtype: DType = "bfloat16"
    """The type with the fastest matrix product (measured, on CPUs)."""
    attention_backends: tuple[str, ...] = ("torch",)
    """Backends that work on this machine, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlanFacts:
    """Facts from a checkpoint's config and headers. Counts are for the whole model, not for one rank."""

    name: str
    """As given on the command line; empty: the default model."""
    architecture: str = ""
    """As the checkpoint's config names it."""
    context_length: int
    checkpoint_dtype: DType
    dense_params: int
    """Parameters kept in the compute type."""
    packed_bytes: int = 0
    """Bytes of weights that stay quantized."""
    packed_params: int = 0
    """Number of parameters of those weights, for the case that they are dequantized on load."""
    quantization: Quantization | Literal[""] = ""
    """How the weights are quantized."""
    weight_format: str = ""
    """The quantization in a few words."""
    kv_format: Literal["", "fp8_e4m3"] = ""
    """The KV cache type for which the checkpoint has scales."""
    kv_values_per_token: int
    """Keys and values of one token in all layers."""
    num_kv_heads: int
    hidden_size: int
    ffn_size: int
    """Width of the widest feed-forward activation of a token (experts per token x their width, for mixtures)."""
    attention_width: int
    """Query, key and value widths together."""
    expert_values: int = 0
    """Values of the gate and up matrices of all experts of the largest mixture."""
    vocab_size: int
    kv_page_multiple: int = 1
    no_kv_codes: str = ""
    """Why its KV cache can't be quantized to integers; empty: it can."""
    topk: int = 0
    """Maximum number of tokens that a query attends to in sparse attention; 0: there is none."""
    tower: TowerFacts | None = None
    """The media encoder, if the model has one."""
    weight_share: float | None = None
    """Share of all weights on the rank with the most; None: an equal part."""
    kv: Callable[[int, int], KvPlan] | None = None
    """How its layers share pages, given the tokens of a column and of the longest request; None: each token takes those of
    `kv_values_per_token` that are of a rank's part of the key-value heads."""
    state_values: int = 0
    """Values of a request's state, in layers that keep one, on the rank with the most."""
    table_values: int = 0
    """Values for each position in tables of rotary positions, which every rank has in float32."""
    state_layer_values: int = 0
    """Of these, values of the largest layer."""
    draft_values: int = 0
    """Values that recurrent layers keep per draft until it is accepted or rejected."""
    tapped_values: int = 0
    """Values per token that are kept beside the residual stream for the draft heads."""
    most_draft_steps: int | None = None
    """Maximum number of drafts of the draft model; None: any number."""
