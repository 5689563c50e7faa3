"""Attention of a step's queries over paged KV: any mixture of decode rows, extends and prompts, with shared spans read once.

in: q, k, v of all tokens and an `AttentionInputs`. out: [T, heads * head width]. never: scheduling, a wait for the device.
"""

from bough.kernels.attention.inputs import AttentionInputs, AttentionSpec, HostLengths, SpanTensors, Spec, TreeMask

__all__ = ["AttentionInputs", "AttentionSpec", "HostLengths", "SpanTensors", "Spec", "TreeMask"]
