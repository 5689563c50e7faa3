"""What heads compute, from the formulas of their papers: one text at a time, in float32, without a cache.

`tokens` ends with the newest token, which the target has not seen yet; `states` are the target's for those before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from draft_files import State
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x_TNH: Tensor, positions: Tensor, theta: float) -> Tensor:
    half = x_TNH.shape[-1] // 2
    angles = positions[:, None] / theta ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x_TNH[..., :half], x_TNH[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention(state: State, name: str, config: dict[str, Any], x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    """`mask` [T, T]: which tokens each sees."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def project(part: str, count: int) -> Tensor:
        weight, bias = state[f"{name}.self_attn.{part}_proj.weight"], state.get(f"{name}.self_attn.{part}_proj.bias")
        return F.linear(x, weight, bias).view(len(x), count, -1)

    q, k, v = project("q", heads), project("k", kv_heads), project("v", kv_heads)
    q, k = rotate(q, positions, config["rope_theta"]), rotate(k, positions, config["rope_theta"])
    k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
    scores = torch.einsum("qnh,snh->nqs", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return F.linear(torch.einsum("nqs,snh->qnh", weights, v).flatten(1), state[f"{name}.self_attn.o_proj.weight"])


def mlp(state: State, name: str, x: Tensor) -> Tensor:
    gate, up, down = (state[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def causal(length: int, window: int = 0) -> Tensor:
    """`window`: newest tokens that each sees, itself included; 0: all."""
    seen = torch.ones(length, length).tril()
    return (seen.triu(1 - window) if window else seen).bool()


def eagle3_states(
    state: State, config: dict[str, Any], embeds: Tensor, carried: Tensor, mask: Tensor, positions: Tensor
) -> Tensor:
    """[T, D]: behind each token, before the last norm."""
    eps = config["rms_norm_eps"]
    name = "midlayer" if "midlayer.hidden_norm.weight" in state else "layers.0"
    normed = rms(carried, state[f"{name}.hidden_norm.weight"], eps)
    both = torch.cat((rms(embeds, state[f"{name}.input_layernorm.weight"], eps), normed), -1)
    x = (normed if config.get("norm_before_residual") else carried) + attention(
        state, name, config, both, mask, positions
    )
    x = x + mlp(state, name, rms(x, state[f"{name}.post_attention_layernorm.weight"], eps))
    for layer in range(1, config["num_hidden_layers"]):
        name = f"layers.{layer}"
        normed = rms(x, state[f"{name}.input_layernorm.weight"], eps)
        x = x + attention(state, name, config, normed, mask, positions)
        x = x + mlp(state, name, rms(x, state[f"{name}.post_attention_layernorm.weight"], eps))
    return x


def eagle3_drafts(
    state: State,
    config: dict[str, Any],
    tokens: list[int],
    states: list[Tensor],
    embedding: Tensor,
    head: Tensor,
    count: int,
    choose: Callable[[Tensor, int], int] | None = None,
    window: int = 0,
) -> list[int]:
    """`states`: [T, E] for each place that the head reads. `head`: the target's matrix. `choose`: takes the logits over the
    target's vocabulary and a draft's number; None: the likeliest."""
    eps = config["rms_norm_eps"]
    if config.get("fc_norm"):
        states = [rms(each, state[f"fc_norm.{place}.weight"], eps) for place, each in enumerate(states)]
    joined = torch.cat(states, -1)
    if config.get("norm_before_fc"):
        joined = rms(joined, state["input_norm.weight"], eps)
    carried = joined @ state["fc.weight"].T
    said, drafts = list(tokens), []
    for place in range(count):
        length = len(said) - 1
        embeds = embedding[torch.tensor(said[1:])]
        made = eagle3_states(state, config, embeds, carried, causal(length, window), torch.arange(length))
        last = made[-1]
        normed = rms(last, state["norm.weight"], eps)
        if "lm_head.weight" in state:
            own = state["lm_head.weight"] @ normed
            logits = torch.full((len(embedding),), float("-inf"))
            logits[torch.arange(len(own)) + state["d2t"]] = own
        else:
            logits = head @ normed
        drafts.append(int(logits.argmax()) if choose is None else choose(logits, place))
        said.append(drafts[-1])
        carried = torch.cat((carried, (normed if config.get("norm_output") else last)[None]))
    return drafts


Layer = Callable[[Tensor], Tensor]
"""A causal block over a whole text, [T, D] -> [T, D]."""


def fused_drafts(
    join: Callable[[Tensor, Tensor], Tensor],
    layer: Layer,
    last: Callable[[Tensor], Tensor],
    tokens: list[int],
    hidden: Tensor,
    embedding: Tensor,
    head: Tensor,
    count: int,
) -> list[int]:
    """EAGLE's and NextN's: `join` makes one vector of embeddings and states, `last` is the norm at the end, if any."""
    said, drafts, states = list(tokens), [], hidden
    for _ in range(count):
        made = last(layer(join(embedding[torch.tensor(said[1:])], states)))
        drafts.append(int((head @ made[-1]).argmax()))
        said.append(drafts[-1])
        states = torch.cat((states, made[-1:]))
    return drafts


def eagle_layer(state: State, config: dict[str, Any]) -> Layer:
    def run(x: Tensor) -> Tensor:
        length, eps, name = len(x), config["rms_norm_eps"], "layers.0"
        before = state.get(f"{name}.input_layernorm.weight")
        normed = x if before is None else rms(x, before, eps)
        x = x + attention(state, name, config, normed, causal(length), torch.arange(length))
        return x + mlp(state, name, rms(x, state[f"{name}.post_attention_layernorm.weight"], eps))

    return run


def medusa_drafts(state: State, hidden: Tensor, head: Tensor, count: int, *, vllm: bool) -> list[int]:
    """`hidden`: the target's state of the token before the newest."""
    drafts = []
    for place in range(count):
        name = f"blocks.{place}.layers.0" if vllm else f"medusa_head.{place}.0.linear"
        x = hidden + F.silu(state[f"{name}.weight"] @ hidden + state[f"{name}.bias"])
        own = state.get(f"lm_heads.{place}.weight" if vllm else f"medusa_head.{place}.1.weight")
        drafts.append(int(((head if own is None else own) @ x).argmax()))
    return drafts


def dflash_drafts(
    state: State, config: dict[str, Any], newest: int, states: list[Tensor], embedding: Tensor, head: Tensor
) -> list[int]:
    """One pass over [the newest token, masks]: keys and values of the text are made of the target's states."""
    eps, size = config["rms_norm_eps"], config["block_size"]
    heads, kv_heads, theta = config["num_attention_heads"], config["num_key_value_heads"], config["rope_theta"]
    text = rms(torch.cat(states, -1) @ state["fc.weight"].T, state["hidden_norm.weight"], eps)
    before = torch.arange(len(text))
    block = torch.arange(len(text), len(text) + size)
    x = embedding[torch.tensor([newest] + [config["dflash_config"]["mask_token_id"]] * (size - 1))]
    for layer in range(config["num_hidden_layers"]):
        name = f"layers.{layer}"

        def part(kind: str, x: Tensor, count: int, positions: Tensor | None, name: str = name) -> Tensor:
            out = (x @ state[f"{name}.self_attn.{kind}_proj.weight"].T).view(len(x), count, -1)
            if positions is None:
                return out
            return rotate(rms(out, state[f"{name}.self_attn.{kind}_norm.weight"], eps), positions, theta)

        normed = rms(x, state[f"{name}.input_layernorm.weight"], eps)
        q = part("q", normed, heads, block)
        k = torch.cat((part("k", text, kv_heads, before), part("k", normed, kv_heads, block)))
        v = torch.cat((part("v", text, kv_heads, None), part("v", normed, kv_heads, None)))
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
        weights = (torch.einsum("qnh,snh->nqs", q, k) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + torch.einsum("nqs,snh->qnh", weights, v).flatten(1) @ state[f"{name}.self_attn.o_proj.weight"].T
        x = x + mlp(state, name, rms(x, state[f"{name}.post_attention_layernorm.weight"], eps))
    made = rms(x, state["norm.weight"], eps)[1:] @ head.T
    return [int(token) for token in made.argmax(-1)]
