"""What planning needs to know about the machine and the checkpoint, gathered before any weight is loaded."""

from __future__ import annotations

import math
from typing import cast

from bough.config.concerns import DType
from bough.config.hf import Checkpoint
from bough.config.resolve import MachineFacts, ModelPlanFacts
from bough.platform import DeviceFacts
from bough.platform.cpu_dtype import fastest_dtype

_PLAIN_KINDS = {"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64", "U8", "BOOL"}
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def machine_facts(device: DeviceFacts, *, custom_kernels: bool) -> MachineFacts:
    """The device in the words of `config.resolve`. `custom_kernels`: kernels compiled on first use are allowed."""
    if device.kind == "cuda":
        capability = device.capability or (0, 0)
        backends: tuple[str, ...] = ("triton", "torch") if custom_kernels and capability >= (8, 0) else ("torch",)
        if custom_kernels and capability == (9, 0):
            backends = ("hopper", *backends)
        fastest: DType = "bfloat16"
    else:
        backends = ("cpu", "torch") if custom_kernels and device.compiler else ("torch",)
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


def plan_facts(checkpoint: Checkpoint, model: str, *, keep_packed: bool) -> ModelPlanFacts:
    """The checkpoint in the words of `config.resolve`. `keep_packed`: quantised blocks stay as they are in memory."""
    facts = checkpoint.facts
    packed_bytes = packed_params = dense_params = 0
    dtype = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "bfloat16")
    if checkpoint.kind == "config-only":
        dense_params = facts.num_parameters()
    else:
        for tensor in checkpoint.tensors.values():
            count = math.prod(tensor.shape)
            if keep_packed and tensor.kind not in _PLAIN_KINDS:
                packed_bytes += tensor.nbytes
                packed_params += count
            else:
                dense_params += count
    if dtype not in _DTYPES.values():
        dtype = "bfloat16"
    experts = facts.moe
    ffn = facts.intermediate if experts is None else experts.experts_per_token * experts.intermediate
    return ModelPlanFacts(
        name=model,
        context_length=checkpoint.max_context,
        checkpoint_dtype=cast(DType, dtype),
        dense_params=dense_params,
        packed_bytes=packed_bytes,
        packed_params=packed_params,
        quantization="gguf" if packed_bytes else "",
        kv_values_per_token=facts.num_layers * facts.num_kv_heads * facts.head_dim * 2,
        num_kv_heads=facts.num_kv_heads,
        hidden_size=facts.hidden,
        ffn_size=ffn,
        attention_width=(facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim,
        vocab_size=facts.vocab,
    )
