"""Heads as they are trained. B texts, T tokens, D width (the target's), N heads, H head width, V tokens that can be drafted.

Both kinds make one state for each draft at every token of a text at once: `drafts[j]` at token t is what the head would
carry for the (j + 1)-th draft, had the target just computed token t and drawn token t + 1. It guesses token t + 2 + j, so
its logits are compared with the target's of token t + 1 + j.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.model_facts import Dense, Gqa, Mixer
from bough.core.errors import ConfigError
from bough.layers.norm import RMSNorm
from bough.training.target import TrainingTarget, Watched

Tensors = dict[str, Tensor]


class Trainee(Protocol):
    """A network that is trained, in float32."""

    taps: tuple[int, ...]
    """The target's states that it reads, as in `DraftFacts`."""

    def drafts(self, seen: Watched, count: int) -> list[Tensor]:
        """[B, T, D] for each of `count` drafts, ready for `logits`."""
        ...

    def logits(self, states_MD: Tensor, number: int) -> Tensor:
        """[M, V], of the draft with this number."""
        ...

    def stored(self) -> Tensors:
        """Its tensors under the names of the published layout."""
        ...

    def config(self) -> dict[str, Any]: ...

    def parameters(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Of the block of an EAGLE-3 head: those of the target's last block where it is of that kind."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    theta: float

    @staticmethod
    def of(target: TrainingTarget) -> HeadSizes:
        facts = target.facts
        last = facts.layers[-1]
        width = facts.hidden
        intermediate = last.ffn.intermediate if isinstance(last.ffn, Dense) else 4 * width
        mixer = last.mixers[0]
        if isinstance(mixer, Gqa):
            return HeadSizes(mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, intermediate, _theta(mixer))
        head_dim = 128 if width % 128 == 0 else 64
        count = max(1, width // head_dim)
        return HeadSizes(count, count, head_dim, intermediate, _theta(mixer))


def _theta(mixer: Mixer) -> float:
    return 10000.0 if mixer.rope is None else mixer.rope.theta


class DraftedTokens(nn.Module):
    """The tokens that a head can draft, and how: by the target's own head, or by matrices of its own over some of them."""

    ids_V: Tensor | None

    def __init__(self, target: TrainingTarget, ids_V: Tensor | None, count: int) -> None:
        """`count` matrices, if `ids_V` names tokens; None: all, by the target's head."""
        super().__init__()
        self._target = (target,)
        self.vocab = target.facts.vocab
        self.register_buffer("ids_V", ids_V, persistent=False)
        self.own = nn.ParameterList()
        if ids_V is not None:
            scale = 1.0 if target.model.head.scale is None else target.model.head.scale
            begin = target.head_VE[ids_V].float() * scale
            self.own.extend(nn.Parameter(begin.clone()) for _ in range(count))

    def logits(self, states_MD: Tensor, number: int) -> Tensor:
        return (
            F.linear(states_MD, self.own[number].to(states_MD.dtype))
            if len(self.own)
            else self._target[0].head(states_MD)
        )

    def stored(self, name: Callable[[int], str]) -> Tensors:
        """`name`: of each matrix."""
        if self.ids_V is None:
            return {}
        ids = self.ids_V.cpu()
        known = torch.zeros(self.vocab, dtype=torch.bool).index_fill(0, ids, True)
        made = {name(number): weight.detach() for number, weight in enumerate(self.own)}
        return {**made, "d2t": ids - torch.arange(len(ids)), "t2d": known}


class Eagle3Trainee(nn.Module):
    """EAGLE-3's head: states from between the target's layers, one block, trained on what it carries itself."""

    def __init__(self, target: TrainingTarget, ids_V: Tensor | None) -> None:
        super().__init__()
        facts, width, layers = target.facts, target.facts.hidden, target.facts.num_layers
        if layers < 3:
            raise ConfigError(
                what=f"an EAGLE-3 head needs a model of three layers at least, this one has {layers}",
                why="it reads states from between them",
                fix="use --method medusa",
                param="method",
            )
        self._target = (target,)
        self.taps: tuple[int, ...] = (2, layers // 2, layers - 3)
        self.sizes = sizes = HeadSizes.of(target)
        self.eps = facts.norm.eps
        rows, kv_rows = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.fc = _matrix(width, 3 * width)
        self.q, self.k, self.v = (_matrix(count, 2 * width) for count in (rows, kv_rows, kv_rows))
        self.o = _matrix(width, rows)
        self.gate, self.up = _matrix(sizes.intermediate, width), _matrix(sizes.intermediate, width)
        self.down = _matrix(width, sizes.intermediate)
        self.embed_norm, self.hidden_norm, self.mlp_norm, self.norm = (nn.Parameter(torch.ones(width)) for _ in "ehmn")
        with torch.no_grad():
            # It begins as what the latest of the states says about the next token.
            self.fc[:, 2 * width :] += torch.eye(width)
            self.o.zero_()
            self.down.zero_()
            last = target.model.norm
            if facts.norm.kind == "rms" and facts.norm.weight and last is not None:
                assert isinstance(last, RMSNorm), "the facts say so"
                self.norm.copy_(last.weight.float().cpu() + facts.norm.offset)
        self.tokens = DraftedTokens(target, ids_V, 1)
        self.to(target.device)

    def drafts(self, seen: Watched, count: int) -> list[Tensor]:
        ids, target, length = seen.ids_BT, self._target[0], seen.ids_BT.shape[1]
        at_T = torch.arange(length, device=ids.device)
        carried = F.linear(torch.cat(seen.states, -1).to(self._compute), self.fc.to(self._compute)).float()
        # One place for each draft behind the text's end: nothing is learned there.
        embeds = F.pad(target.embed(ids), (0, 0, 0, count))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        made = []
        for number in range(count):
            carried = self._block(embeds[:, number + 1 : number + 1 + length], carried, at_T + number, keys, values)
            made.append(_rms(carried, self.norm, self.eps))
        return made

    @property
    def _compute(self) -> torch.dtype:
        return self._target[0].dtype

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.to(self._compute), weight.to(self._compute))

    def _block(self, embeds: Tensor, x: Tensor, at_T: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        both = torch.cat((_rms(embeds.float(), self.embed_norm, self.eps), _rms(x, self.hidden_norm, self.eps)), -1)
        x = x + self._linear(self._attend(both, at_T, keys, values), self.o).float()
        normed = _rms(x, self.mlp_norm, self.eps)
        inner = F.silu(self._linear(normed, self.gate)) * self._linear(normed, self.up)
        return x + self._linear(inner, self.down).float()

    def _attend(self, both: Tensor, at_T: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Adds this draft's keys and values to those of the ones before it. A token sees the first ones of all tokens up to
        it, and of the others its own: the drafts that lead to it."""
        sizes, (rows, length) = self.sizes, both.shape[:2]

        def heads(weight: Tensor, count: int) -> Tensor:
            return self._linear(both, weight).view(rows, length, count, sizes.head_dim).transpose(1, 2)

        group = sizes.num_heads // sizes.num_kv_heads
        q = _rotate(heads(self.q, sizes.num_heads), at_T, sizes.theta)
        keys.append(_rotate(heads(self.k, sizes.num_kv_heads), at_T, sizes.theta).repeat_interleave(group, 1))
        values.append(heads(self.v, sizes.num_kv_heads).repeat_interleave(group, 1))
        if len(keys) == 1:
            out = F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
        else:
            hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
            first = (q @ keys[0].transpose(2, 3)).masked_fill(hidden, float("-inf"))
            own = [(q * key).sum(-1, keepdim=True) for key in keys[1:]]
            weights = (torch.cat((first, *own), -1).float() * sizes.head_dim**-0.5).softmax(-1).to(q.dtype)
            out = weights[..., :length] @ values[0]
            for place, value in enumerate(values[1:]):
                out = out + weights[..., length + place, None] * value
        return out.transpose(1, 2).flatten(2)

    def logits(self, states_MD: Tensor, number: int) -> Tensor:
        return self.tokens.logits(states_MD, 0)

    def stored(self) -> Tensors:
        names = {
            "fc": self.fc, "norm": self.norm, "midlayer.hidden_norm": self.hidden_norm,
            "midlayer.input_layernorm": self.embed_norm, "midlayer.post_attention_layernorm": self.mlp_norm,
            "midlayer.self_attn.q_proj": self.q, "midlayer.self_attn.k_proj": self.k,
            "midlayer.self_attn.v_proj": self.v, "midlayer.self_attn.o_proj": self.o,
            "midlayer.mlp.gate_proj": self.gate, "midlayer.mlp.up_proj": self.up, "midlayer.mlp.down_proj": self.down,
        }  # fmt: skip
        made = {f"{name}.weight": weight.detach() for name, weight in names.items()}
        return made | self.tokens.stored(lambda _: "lm_head.weight")

    def config(self) -> dict[str, Any]:
        facts, sizes, ids = self._target[0].facts, self.sizes, self.tokens.ids_V
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": facts.hidden,
            "target_hidden_size": facts.hidden,
            "num_hidden_layers": 1,
            "num_attention_heads": sizes.num_heads,
            "num_key_value_heads": sizes.num_kv_heads,
            "head_dim": sizes.head_dim,
            "intermediate_size": sizes.intermediate,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_theta": sizes.theta,
            "max_position_embeddings": facts.max_context,
            "vocab_size": facts.vocab,
            "draft_vocab_size": None if ids is None else len(ids),
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }


class MedusaTrainee(nn.Module):
    """Medusa's heads on the target's last state."""

    taps: tuple[int, ...] = ()

    def __init__(self, target: TrainingTarget, ids_V: Tensor | None, num_heads: int, num_layers: int) -> None:
        super().__init__()
        width = target.facts.hidden
        self._target = (target,)
        self.num_layers = num_layers
        # Zeros: each begins as the target's guess of the next token.
        self.blocks = nn.ModuleList(
            nn.ModuleList(_zero_linear(width) for _ in range(num_layers)) for _ in range(num_heads)
        )
        self.tokens = DraftedTokens(target, ids_V, num_heads)
        self.to(target.device)

    def drafts(self, seen: Watched, count: int) -> list[Tensor]:
        compute, made = self._target[0].dtype, []
        for stack in list(self.blocks)[:count]:
            assert isinstance(stack, nn.ModuleList)
            x = seen.hidden_BTE.float()
            for layer in stack:
                assert isinstance(layer, nn.Linear)
                product = F.linear(x.to(compute), layer.weight.to(compute), layer.bias.to(compute))
                x = x + F.silu(product).float()
            made.append(x)
        return made

    def logits(self, states_MD: Tensor, number: int) -> Tensor:
        return self.tokens.logits(states_MD, number)

    def stored(self) -> Tensors:
        names = {
            f"medusa_head.{number}.{name.replace('.', '.linear.', 1)}": weight.detach()
            for number, stack in enumerate(self.blocks)
            for name, weight in stack.named_parameters()
        }
        return names | self.tokens.stored(lambda number: f"medusa_head.{number}.{self.num_layers}.weight")

    def config(self) -> dict[str, Any]:
        facts, ids = self._target[0].facts, self.tokens.ids_V
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "medusa_num_heads": len(self.blocks),
            "medusa_num_layers": self.num_layers,
            "hidden_size": facts.hidden,
            "vocab_size": facts.vocab,
            "draft_vocab_size": None if ids is None else len(ids),
            "original_lm_head": ids is None,
            "torch_dtype": "bfloat16",
        }


def _matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * 0.5 * columns**-0.5)


def _zero_linear(width: int) -> nn.Linear:
    made = nn.Linear(width, width)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _rotate(x_BNTH: Tensor, at_T: Tensor, theta: float) -> Tensor:
    half = x_BNTH.shape[-1] // 2
    angles = at_T[:, None] / theta ** (torch.arange(half, device=at_T.device) / half)
    cos, sin = angles.cos().to(x_BNTH.dtype), angles.sin().to(x_BNTH.dtype)
    first, second = x_BNTH[..., :half], x_BNTH[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
