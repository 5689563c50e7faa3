"""Names of tensors as the rest of the code knows them: the layer, a dot, one last word. Needs no torch."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_BITSANDBYTES: Final = re.compile(r"\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map)$")
_QUANT_STATE: Final = re.compile(r"\.weight\.quant_state\.bitsandbytes__\w+$")
_TORCHAO: Final = re.compile(r"\._weight_(qdata|scale|zero_point)$")
_LAYER: Final = re.compile(r"\.layers\.(\d+)\.")
_KV_SCALES: Final = (
    ("k", re.compile(r"\.(k_proj\.(k_scale|output_scale)|(self_attn|attention)\.(attn\.)?k_scale)$")),
    ("v", re.compile(r"\.(v_proj\.(v_scale|output_scale)|(self_attn|attention)\.(attn\.)?v_scale)$")),
    ("kv", re.compile(r"\.(self_attn|attention)\.(attn\.)?kv_scale$")),
    ("", re.compile(r"\.(self_attn|attention)\.(attn\.)?(q_scale|prob_scale|q_proj\.output_scale)$")),
)
"""Whose scales they are; those of queries and probabilities have no use here, since both stay in 16 bits."""


class KvScaleName(NamedTuple):
    """Which scale of the cache a tensor holds."""

    layer: int
    which: str
    """k, v, kv for both, or empty for something else of the attention."""


def kv_scale_of(name: str) -> KvScaleName | None:
    """What a tensor scales, if it belongs to a layer's cached keys and values: half a dozen places are in use."""
    layer = _LAYER.search(f".{name}")
    if layer is None:
        return None
    which = next((which for which, pattern in _KV_SCALES if pattern.search(name)), None)
    return None if which is None else KvScaleName(int(layer[1]), which)


def tensor_name(name: str) -> str:
    """The name under which layers look for a tensor of a quantised checkpoint: bitsandbytes keeps several below `weight`,
    torchao beside it."""
    found = _TORCHAO.search(name)
    if found is not None:
        return f"{name[: found.start()]}.weight" + ("" if found[1] == "qdata" else f"_{found[1]}")
    return _QUANT_STATE.sub(".weight_quant_state", _BITSANDBYTES.sub(r".weight_\1", name))


def weight_name(name: str, *, quantised: bool) -> str | None:
    """The name under which a layer takes a tensor of a checkpoint; None: it belongs to the KV cache."""
    if kv_scale_of(name) is not None:
        return None
    return tensor_name(name) if quantised else name
