"""Heads as they are trained. B texts, T tokens, D width (the target's), N heads, H head width, V tokens that can be drafted.

Both kinds make one state for each draft at every token of a text at once: `drafts[j]` at token t is what the head would
carry for the (j + 1)-th draft, had the target just computed token t and drawn token t + 1. It guesses token t + 2 + j, so
its logits are compared with the target's of token t + 1 + j.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.config.model_facts import Dense, Gqa, Mixer
from bough.core.errors import ConfigError
from bough.layers.norm import RMSNorm
from bough.training.recording import Watched
from bough.training.target import TrainingTarget

Tensors = dict[str, Tensor]
TOKEN_MAP = "token_map.json"
"""Beside a head that drafts some tokens by the target's head: their ids, as `--speculative-token-map` takes them."""

_UNSURE = 0.3
"""Of the target's final norm, at the beginning of an EAGLE-3 head. With this and normed states, the loss for the default
model was 4.4 after 60 batches of 512 tokens; with the norm as it is 4.8, and with states as they are 5.4."""
_OTHER_STATES = 0.2
"""Of random weights, for the states that it does not begin with."""


class Trainee(Protocol):
    """A network that is trained, in float32."""

    taps: tuple[int, ...]
    """The target's states that it reads, as in `DraftFacts`."""
    tokens: DraftedTokens

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

    def __init__(self, target: TrainingTarget, ids_V: Tensor | None, count: int, *, own: bool = True) -> None:
        """`ids_V`: the tokens; None: all, by the target's head. `own`: `count` matrices are trained for them; otherwise the
        target's head serves for them, too."""
        super().__init__()
        self._target = (target,)
        self.vocab = target.facts.vocab
        self.register_buffer("ids_V", ids_V, persistent=False)
        self._rows = None if ids_V is None else target.rows(ids_V)
        self.own = nn.ParameterList()
        if self._rows is not None and own:
            scale = 1.0 if target.model.head.scale is None else target.model.head.scale
            begin = self._rows.weight_VE.float() * scale
            self.own.extend(nn.Parameter(begin.clone()) for _ in range(count))

    @property
    def count(self) -> int:
        """V"""
        return self.vocab if self.ids_V is None else len(self.ids_V)

    def named(self, places: Tensor) -> Tensor:
        """The target's ids of tokens, by their places among those that can be drafted."""
        return places if self.ids_V is None else self.ids_V[places]

    @property
    def is_shared(self) -> bool:
        """Whether some tokens are drafted by the target's head."""
        return self.ids_V is not None and not len(self.own)

    def logits(self, states_MD: Tensor, number: int) -> Tensor:
        if len(self.own):
            return F.linear(states_MD, self.own[number].to(states_MD.dtype))
        return self._target[0].head(states_MD, self._rows)

    @torch.no_grad()
    def wanted(self, hidden_ME: Tensor) -> Tensor:
        """float32 [M, V]: the target's probabilities of these tokens, behind its own states."""
        return self._target[0].head(hidden_ME, self._rows).float().softmax(-1)

    def stored(self, name: Callable[[int], str]) -> Tensors:
        """`name`: of each matrix."""
        if self.ids_V is None or not len(self.own):
            return {}
        ids = self.ids_V.cpu()
        known = torch.zeros(self.vocab, dtype=torch.bool).index_fill(0, ids, True)
        made = {name(number): weight.detach() for number, weight in enumerate(self.own)}
        return {**made, "d2t": ids - torch.arange(len(ids)), "t2d": known}

    def config(self) -> dict[str, Any]:
        ids = self.ids_V
        if self.is_shared:
            return {"draft_vocab_size": None, "token_map": TOKEN_MAP}
        return {"draft_vocab_size": None if ids is None else len(ids)}


class _Halves(NamedTuple):
    """Matrices of an EAGLE-3 head in the target's precision, cast once per batch."""

    fc: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class Eagle3Trainee(nn.Module):
    """EAGLE-3's head: states from between the target's layers, one block, trained on what it carries itself."""

    def __init__(self, target: TrainingTarget, ids_V: Tensor | None, *, own_head: bool = True) -> None:
        """`own_head`: of `DraftedTokens`."""
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
        self.feature_norms = nn.ParameterList(torch.ones(width) for _ in self.taps)
        with torch.no_grad():
            # It begins as what the latest of the states says about the next token, but not so sure of it: it has to guess
            # the token behind that one.
            self.fc.mul_(_OTHER_STATES)
            self.fc[:, 2 * width :] += torch.eye(width)
            self.o.zero_()
            self.down.zero_()
            last = target.model.norm
            if facts.norm.kind == "rms" and facts.norm.weight and last is not None:
                assert isinstance(last, RMSNorm), "the facts say so"
                self.norm.copy_(last.weight.float().cpu() + facts.norm.offset)
            self.norm.mul_(_UNSURE)
        self.tokens = DraftedTokens(target, ids_V, 1, own=own_head)
        self.to(target.device)

    def drafts(self, seen: Watched, count: int) -> list[Tensor]:
        target, length = self._target[0], seen.ids_BT.shape[1]
        half = _Halves(*(weight.to(target.dtype) for weight in self._matrices()))
        features = [
            _rms(state.float(), norm, self.eps) for state, norm in zip(seen.states, self.feature_norms, strict=True)
        ]
        carried = F.linear(torch.cat(features, -1).to(target.dtype), half.fc).float()
        # One place for each draft behind the text's end: nothing is learned there.
        embeds = F.pad(_rms(target.embed(seen.ids_BT).float(), self.embed_norm, self.eps), (0, 0, 0, count))
        turns = _turns(length + count, self.sizes, target)
        seen_by = torch.ones(length, length, dtype=torch.bool, device=carried.device).tril()
        keys: list[Tensor] = []
        values: list[Tensor] = []
        made = []
        for number in range(count):
            normed = _rms(carried, self.hidden_norm, self.eps)
            both = torch.cat((embeds[:, number + 1 : number + 1 + length], normed), -1).to(target.dtype)
            turn = (turns[0][number : number + length], turns[1][number : number + length])
            carried = carried + F.linear(self._attend(both, half, turn, keys, values, seen_by), half.o).float()
            inner = _rms(carried, self.mlp_norm, self.eps).to(target.dtype)
            inner = F.silu(F.linear(inner, half.gate)) * F.linear(inner, half.up)
            carried = carried + F.linear(inner, half.down).float()
            made.append(_rms(carried, self.norm, self.eps))
        return made

    def _matrices(self) -> tuple[Tensor, ...]:
        return self.fc, self.q, self.k, self.v, self.o, self.gate, self.up, self.down

    def _attend(
        self,
        both: Tensor,
        half: _Halves,
        turn: tuple[Tensor, Tensor],
        keys: list[Tensor],
        values: list[Tensor],
        seen_by: Tensor,
    ) -> Tensor:
        """Adds this draft's keys and values to those of the ones before it. A token sees the first ones of all tokens up to
        it, and of the others its own: the drafts that lead to it."""
        sizes, (rows, length) = self.sizes, both.shape[:2]

        def heads(weight: Tensor, count: int) -> Tensor:
            return F.linear(both, weight).view(rows, length, count, sizes.head_dim).transpose(1, 2)

        group = sizes.num_heads // sizes.num_kv_heads
        q = _rotate(heads(half.q, sizes.num_heads), turn)
        keys.append(_rotate(heads(half.k, sizes.num_kv_heads), turn).repeat_interleave(group, 1))
        values.append(heads(half.v, sizes.num_kv_heads).repeat_interleave(group, 1))
        if len(keys) == 1:
            out = F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
        else:
            first = (q @ keys[0].transpose(2, 3)).masked_fill(~seen_by, float("-inf"))
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
        names |= {f"fc_norm.{place}": norm for place, norm in enumerate(self.feature_norms)}
        made = {f"{name}.weight": weight.detach() for name, weight in names.items()}
        return made | self.tokens.stored(lambda _: "lm_head.weight")

    def config(self) -> dict[str, Any]:
        facts, sizes = self._target[0].facts, self.sizes
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
            "fc_norm": True,
            "tie_word_embeddings": False,
            **self.tokens.config(),
            "torch_dtype": "bfloat16",
        }


class MedusaTrainee(nn.Module):
    """Medusa's heads on the target's last state."""

    taps: tuple[int, ...] = ()

    def __init__(
        self, target: TrainingTarget, ids_V: Tensor | None, num_heads: int, num_layers: int, *, own_head: bool = True
    ) -> None:
        """`own_head`: of `DraftedTokens`."""
        super().__init__()
        width = target.facts.hidden
        self._target = (target,)
        self.num_layers = num_layers
        # Zeros: each begins as the target's guess of the next token.
        self.blocks = nn.ModuleList(
            nn.ModuleList(_zero_linear(width) for _ in range(num_layers)) for _ in range(num_heads)
        )
        self.tokens = DraftedTokens(target, ids_V, num_heads, own=own_head)
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
        facts = self._target[0].facts
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "medusa_num_heads": len(self.blocks),
            "medusa_num_layers": self.num_layers,
            "hidden_size": facts.hidden,
            "vocab_size": facts.vocab,
            "original_lm_head": not len(self.tokens.own),
            **self.tokens.config(),
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


def _turns(length: int, sizes: HeadSizes, target: TrainingTarget) -> tuple[Tensor, Tensor]:
    """[length, H / 2]: cosines and sines of each place."""
    half = sizes.head_dim // 2
    at = torch.arange(length, device=target.device)
    angles = at[:, None] / sizes.theta ** (torch.arange(half, device=target.device) / half)
    return angles.cos().to(target.dtype), angles.sin().to(target.dtype)


def _rotate(x_BNTH: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    first, second = x_BNTH.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
