"""What planning needs to know about the machine and the checkpoint, gathered before any weight is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import cast

from bough.config.concerns import DType, ModelConfig, Quantization
from bough.config.fields import Fields
from bough.config.gguf_header import KEPT_BITS
from bough.config.hf import Checkpoint
from bough.config.kv_groups import KvPlan, all_in_one, plan_groups
from bough.config.layout import Layout
from bough.config.model_facts import Gqa, ModelFacts, Moe
from bough.config.resolve_facts import MachineFacts, ModelPlanFacts
from bough.config.shares import largest_share, rank_state_values, rank_states
from bough.models.registry import find_architecture
from bough.models.seeing import TOWER, is_of_adapter
from bough.platform import DeviceFacts
from bough.platform.cpu_dtype import fastest_dtype
from bough.quantization.readable import rules_for
from bough.quantization.sizes import WeightSizes, weight_sizes

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def machine_facts(device: DeviceFacts, *, custom_kernels: bool) -> MachineFacts:
    """The device in the words of `config.resolve_facts`. `custom_kernels`: kernels compiled on first use are allowed."""
    if device.kind == "cuda":
        capability = device.capability or (0, 0)
        backends: tuple[str, ...] = ("triton", "torch") if custom_kernels and capability >= (8, 0) else ("torch",)
        if custom_kernels and capability == (9, 0):
            backends = ("hopper", *backends)
        fastest: DType = "bfloat16"
    else:
        backends = ("cpu", "torch") if custom_kernels and device.has_cpu_kernels else ("torch",)
        fastest = fastest_dtype()
    return MachineFacts(
        device=device.kind,
        name=device.name,
        arch=device.arch,
        total_bytes=device.total_bytes,
        free_bytes=device.free_bytes,
        host_free_bytes=device.host_free_bytes,
        num_devices=device.num_devices,
        physical_cores=device.physical_cores,
        has_bfloat16=device.has_bfloat16,
        fastest_dtype=fastest,
        attention_backends=backends,
    )


def plan_facts(
    checkpoint: Checkpoint,
    facts: ModelFacts,
    model: ModelConfig,
    *,
    on_cpu: bool,
    layout: Layout,
    frees_windows: bool = True,
) -> ModelPlanFacts:
    """What settings of the checkpoint are decided from. `frees_windows`: layers with windows keep no more than those. Raises
    `UnsupportedModel` or `ConfigError` if weights can't be stored as asked for, or split over the ranks of `layout`."""
    rules = rules_for(checkpoint, model.quantization)
    if rules is not None:
        sizes, quantization = weight_sizes(checkpoint, facts, rules), rules.method
    else:
        sizes = _sizes(checkpoint, facts, on_cpu=on_cpu, keep_blocks=model.quantization != "none")
        quantization = "gguf" if sizes.packed_bytes else ""
    dtype = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "bfloat16")
    if dtype not in _DTYPES.values():
        dtype = "bfloat16"
    return ModelPlanFacts(
        name=model.model,
        architecture=facts.architecture,
        context_length=facts.max_context,
        checkpoint_dtype=cast(DType, dtype),
        dense_params=sizes.dense_params,
        packed_bytes=sizes.packed_bytes,
        packed_params=sizes.packed_params,
        quantization=cast(Quantization, quantization),
        weight_format=rules.summary if rules is not None else "",
        kv_format=rules.kv.kind if rules is not None and rules.kv is not None else "",
        kv_values_per_token=sum(sum(mixer.planes) for mixer in facts.kv_mixers),
        num_kv_heads=max((mixer.num_kv_heads for mixer in facts.kv_mixers), default=1),
        hidden_size=facts.hidden,
        ffn_size=max((layer.ffn.inner_values for layer in facts.layers if layer.ffn is not None), default=0),
        attention_width=max(mixer.projected for mixer in facts.mixers),
        expert_values=max(
            (
                2 * layer.ffn.num_experts * layer.ffn.intermediate * facts.hidden
                for layer in facts.layers
                if isinstance(layer.ffn, Moe)
            ),
            default=0,
        ),
        vocab_size=facts.vocab,
        tower=facts.tower,
        state_values=max(rank_state_values(facts, layout, rank) for rank in range(layout.size)),
        table_values=sum(rope.rotary_dim for rope in {mixer.rope for mixer in facts.mixers} if rope is not None),
        draft_values=max(_draft_values(facts, layout, rank) for rank in range(layout.size)),
        state_layer_values=max((mixer.state_values for mixer in facts.state_mixers), default=0),
        weight_share=largest_share(facts, layout),
        kv=partial(_groups if frees_windows else _one_group, facts, layout),
        no_kv_codes=why_no_codes(facts),
        topk=facts.topk,
    )


def why_no_codes(facts: ModelFacts) -> str:
    """Why keys and values of a model can't be kept in whole numbers; empty: they can."""
    for mixer in facts.kv_mixers:
        if not isinstance(mixer, Gqa):
            return "its layers keep latents, whose parts differ too much in size for one scale"
        if mixer.head_dim % 2 or mixer.value_dim % 2:
            return f"heads of {mixer.head_dim} and {mixer.value_dim} numbers are not split into halves"
    return ""


def _draft_values(facts: ModelFacts, layout: Layout, rank: int) -> int:
    """Of a draft, on a rank: what layers that keep a state keep of it."""
    return sum(mixer.input_values for mixer in rank_states(facts, layout, rank))


def _groups(facts: ModelFacts, layout: Layout, page_size: int, context: int) -> KvPlan:
    return plan_groups(facts, layout, context=context, page_size=page_size)


def _one_group(facts: ModelFacts, layout: Layout, page_size: int, context: int) -> KvPlan:
    return all_in_one(facts, layout)


def _sizes(checkpoint: Checkpoint, facts: ModelFacts, *, on_cpu: bool, keep_blocks: bool) -> WeightSizes:
    """Of weights that are floats or GGUF's blocks."""
    if checkpoint.kind == "config-only":
        return WeightSizes(facts.num_parameters())
    packed_params = dense_params = 0
    packed_bytes = 0.0
    left_out = _left_out(facts)
    blocks = keep_blocks and checkpoint.kind == "gguf"
    for name, tensor in checkpoint.tensors.items():
        if left_out(name):
            continue
        count = math.prod(tensor.shape)
        halves = on_cpu and tensor.kind in ("F16", "BF16") and len(tensor.shape) > 1
        bits = 16.0 if halves else KEPT_BITS.get(tensor.kind)
        if blocks and bits is not None:
            packed_bytes += count * bits / 8
            packed_params += count
        else:
            dense_params += count
    return WeightSizes(dense_params, math.ceil(packed_bytes), packed_params)


def _left_out(facts: ModelFacts) -> Callable[[str], bool]:
    """Tells the tensors of a tower that is not served, and of adapters that only media need."""
    if facts.tower is not None or not Fields(facts.config).flag("language_model_only") or facts.through_transformers:
        return lambda name: False
    targets_of = find_architecture(facts.architecture).weights.targets_of

    def left_out(name: str) -> bool:
        targets = targets_of(name)
        return bool(targets) and all(target.startswith(TOWER) or is_of_adapter(target) for target in targets or ())

    return left_out
