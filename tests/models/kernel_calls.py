"""Records what a forward pass launches: calls through the doors of `bough.kernels`, and torch operations beside them.

A door counts as one entry, whatever its implementation does inside. Operations that only make views are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from narrowing_attention import NarrowingAttention
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bough.config.hf import open_checkpoint
from bough.kernels.choices import Choices
from bough.layers.batch import AttentionSpec, Model
from bough.models.load import build_model

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SCORED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": None,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama"},
    "SmolLM3ForCausalLM": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "Qwen2ForCausalLM": {"model_type": "qwen2"},
    "Qwen3ForCausalLM": {"model_type": "qwen3"},
    "Gemma2ForCausalLM": {"model_type": "gemma2", "sliding_window": 8},
    "Gemma3ForCausalLM": {"model_type": "gemma3_text", "sliding_window": 8},
    "MixtralForCausalLM": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 24, **EXPERTS},
    "Qwen3MoeForCausalLM": {"model_type": "qwen3_moe", "mlp_only_layers": [1], **EXPERTS},
    "GptOssForCausalLM": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_scaling": YARN,
    },
    "Glm4MoeForCausalLM": {"model_type": "glm4_moe", "use_qk_norm": True, **SCORED},
    "DeepseekV2ForCausalLM": {"model_type": "deepseek_v2", "q_lora_rank": None, **SCORED, **LATENT},
    "DeepseekV3ForCausalLM": {
        "model_type": "deepseek_v3",
        "q_lora_rank": 16,
        "n_group": 2,
        "topk_group": 1,
        **SCORED,
        **LATENT,
    },
}
DECODE = [(0, [5]), (1, [7]), (2, [9])]
PREFILL = [(0, [5, 17, 9, 3]), (1, [42]), (2, [7, 8, 9])]
_VIEWS = frozenset(
    {"view", "_unsafe_view", "reshape", "split_with_sizes", "split", "slice", "select", "transpose", "t", "permute"}
    | {"expand", "unsqueeze", "squeeze", "detach", "alias", "as_strided", "unbind", "empty", "new_empty", "chunk"}
)


class Recorder(TorchDispatchMode):
    """While it is active, entries gather in `calls`."""

    def __init__(self, replaced: dict[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._replaced = replaced
        self._inside = 0

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as one entry."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                self.calls.append(name)
            self._inside += 1
            try:
                return self._replaced.get(name, function)(*args, **kwargs)
            finally:
                self._inside -= 1

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self._inside and name not in _VIEWS:
            self.calls.append(f"torch.{name}")
        return func(*args, **(kwargs or {}))


class RecordedAttention(NarrowingAttention):
    """Attention of the kind GPUs have: it rotates, and may narrow the last layer."""

    def __init__(self, num_rows: int, num_layers: int, *, narrows: bool, recorder: Recorder) -> None:
        super().__init__(num_rows, num_layers)
        self.narrows = narrows
        self.recorder = recorder

    def queries_at(self, spec: AttentionSpec) -> Tensor | None:
        return super().queries_at(spec) if self.narrows else None

    def forward(self, spec: AttentionSpec, *args: Any, **kwargs: Any) -> Tensor:
        inner = super().forward
        out: Tensor = self.recorder.wrapped("attention.forward", inner)(spec, *args, **kwargs)
        return out

    def forward_rope(self, spec: AttentionSpec, *args: Any, **kwargs: Any) -> Tensor:
        inner = super().forward_rope
        out: Tensor = self.recorder.wrapped("attention.forward_rope", inner)(spec, *args, **kwargs)
        return out


def in_place(x_TD: Tensor, weight_OD: Tensor, stream_TO: Tensor) -> tuple[Tensor, None]:
    """`linear_onto` as some devices do it: the sum, made in the stream's memory."""
    return stream_TO.add_(x_TD @ weight_OD.T), None


def in_parts(x_TD: Tensor, weight_OD: Tensor, stream_TO: Tensor) -> tuple[Tensor, Tensor]:
    """`linear_onto` as others do it: two addends."""
    product = x_TD @ weight_OD.T
    return torch.stack((product / 4, product * 0.75)), stream_TO


@contextmanager
def recording(replaced: dict[str, Callable[..., Any]]) -> Iterator[Recorder]:
    """Doors of kernels lead through the recorder."""
    recorder = Recorder(replaced)
    pick = Choices.pick

    def recorded(self: Choices, function: str, device: torch.device) -> Callable[..., Any]:
        return recorder.wrapped(function, pick(self, function, device))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Choices, "pick", recorded)
        yield recorder


def tiny_model(architecture: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    """A model with dummy weights."""
    folder.mkdir(exist_ok=True)
    config = {**SIZES, **CONFIGS[architecture], "architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(str(folder), load_format="dummy")
    return build_model(checkpoint, dtype=dtype, device=torch.device("cpu"), load_format="dummy", **options)


def calls_of(
    model: Model,
    queries: list[tuple[int, list[int]]],
    *,
    narrows: bool = False,
    onto: Callable[..., Any] | None = None,
) -> tuple[list[str], Tensor]:
    """What one step launches, and its logits."""
    with recording({} if onto is None else {"linear_onto": onto}) as recorder, torch.no_grad():
        attention = RecordedAttention(3, SIZES["num_hidden_layers"], narrows=narrows, recorder=recorder)
        batch = attention.step(queries)
        with recorder:
            logits = model.logits(model.forward(batch))
    return recorder.calls, logits
