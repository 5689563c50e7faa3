"""Mixture of experts: a router picks a few experts a token, all chosen ones are computed grouped. E experts, F width."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from bough.config.model_facts import Moe
from bough.core.errors import ConfigError
from bough.distributed.mesh import SINGLE
from bough.kernels.moe import Routing, topk_softmax
from bough.layers.build import Build
from bough.layers.choice import ExpertChoice
from bough.layers.dispatch import Routed, make_dispatch
from bough.layers.expert_table import ExpertTable
from bough.layers.linear import ColumnLinear, GateUpLinear, ReplicatedLinear, RowLinear
from bough.layers.mlp import ACTIVATIONS
from bough.layers.norm import RMSNorm
from bough.layers.stream import Input, Normed, value_of
from bough.quantization.scheme import ExpertShape, ExpertWeights
from bough.quantization.unquantized import DenseMatrix, Unquantized
from bough.weights.slots import Slot, also_into, pass_over


class Experts(nn.Module):
    """A layer's experts: those in this rank's slots, and of each of them its share of the inner units."""

    def __init__(self, facts: Moe, hidden: int, build: Build, mixture: int = 0) -> None:
        """`mixture`: the layer's number among the model's mixtures."""
        super().__init__()
        units = build.mesh.units.slice(facts.intermediate, "inner units of an expert")
        plan = build.experts_plan
        self.table = ExpertTable(
            plan.slots_of(mixture, facts.num_experts),
            facts.num_experts,
            build.mesh.ep,
            build.device,
            moves=plan.moves,
            copies=plan.copies,
        )
        mine = self.table.mine
        self.num_experts = facts.num_experts
        self.has_all = self.table.is_plain and mine.stop - mine.start == facts.num_experts
        self.shape = ExpertShape(
            mine.stop - mine.start,
            hidden,
            facts.intermediate,
            units,
            facts.activation,
            facts.clamped,
            facts.gated,
            adds_bias=build.mesh.units.rank == 0,
        )
        self.build = build
        self.stack: ExpertWeights

    def place(self, name: str) -> None:
        self.stack = self.build.experts(name, self.shape)

    def slots(self) -> dict[str, Slot]:
        """Those of all experts: an expert of several slots fills them all, and what other ranks hold is passed over,
        unread."""
        mine = self.stack.weight_slots()
        if self.has_all:
            return mine
        held = self.table.slots[self.table.mine].tolist()
        slots: dict[str, Slot] = {}
        for name, slot in mine.items():
            number, dot, rest = name.partition(".")
            if not dot or not number.isdigit():
                raise ConfigError(
                    what=f"experts of this form can't be spread over {self.build.mesh.ep.size} groups of ranks",
                    why=f"{name} holds those of all of them",
                    fix="leave out --ep-size",
                    param="ep_size",
                )
            taken = f"{held[int(number)]}.{rest}"
            slots[taken] = also_into(slots[taken], slot) if taken in slots else slot
            if number == "0":
                others = (expert for expert in range(self.num_experts) if expert not in held)
                slots |= {f"{expert}.{rest}": replace(slot, put=pass_over, check=None) for expert in others}
        return slots

    def forward(self, x_TD: Tensor, weights_Tk: Tensor, slots_Tk: Tensor) -> Tensor:
        """This rank's share of the sum over each token's experts, by their slots here; other numbers are of no slot."""
        return self.stack.forward(x_TD, weights_Tk, slots_Tk)

    def routed(self, x_TD: Tensor, residual_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """As `forward`, of the norm of x + residual, whose experts are chosen by it; and x + residual."""
        return self.stack.routed(x_TD, residual_TD, routing)


class MixtureOfExperts(nn.Module):
    """Router and experts, and the shared expert where there is one."""

    def __init__(self, facts: Moe, hidden: int, build: Build, mixture: int = 0) -> None:
        """`mixture`: the layer's number among the model's mixtures."""
        super().__init__()
        self.axis = build.mesh.tp
        self.experts_per_token = facts.experts_per_token
        self.renormalise = facts.renormalise
        self.spreads = build.spread is not None
        """Ranks hold different tokens."""
        self.forced_ids: Tensor | None = None
        """int32 [n, k]: the experts of token t are those of line t modulo n, whatever the router says. For dummy weights."""
        dense = replace(build, scheme=Unquantized())
        self.facts = facts
        self.choose: ExpertChoice | None = None
        """Chooses experts in another way than `topk_softmax`."""
        if facts.scored is not None or facts.scale != 1.0:
            self.choose = ExpertChoice(facts, build)
            dense = replace(dense, dtype=torch.float32)
        self.router = ReplicatedLinear(hidden, facts.num_experts, dense, bias=facts.router_bias)
        self.experts = Experts(facts, hidden, build, mixture)
        plan = build.experts_plan
        self.dispatch = make_dispatch(plan.dispatch, build.mesh, self.experts.table, build.spread)
        if build.spread is not None:
            build.spread.blocks.append(self)
        self.chosen_E: Tensor | None = None
        """int64 [E]: tokens that chose each expert, where they are counted."""
        if plan.records:
            self.chosen_E = torch.zeros(facts.num_experts, dtype=torch.int64, device=build.device)
        self.shared: SharedExpert | None = None
        if facts.shared_intermediate:
            gate = ReplicatedLinear(hidden, 1, replace(dense, dtype=build.dtype)) if facts.shared_gated else None
            whole = build if plan.dispatch == "none" else replace(build, mesh=SINGLE)
            self.shared = SharedExpert(hidden, facts, whole, gate)

    def forward(self, x: Input, by_TD: Tensor | None = None) -> Tensor:
        """What is added to the stream. Norm, router and experts take one launch where the device has one for them.
        `by_TD`: what the router reads, if it is not what experts read."""
        if (
            by_TD is None
            and isinstance(x, Normed)
            and isinstance(x.norm, RMSNorm)
            and x.can_fuse
            and self._joins(x.num_tokens)
        ):
            return self.axis.talk.all_reduce(x.fuse(partial(self._after, x.norm, x.loc_T)))
        x_TD = value_of(x)
        weights_Tk, ids_Tk = self._chosen(x_TD if by_TD is None else by_TD, x)
        if self.forced_ids is not None:
            ids_Tk = _without_padding(_lines(self.forced_ids, len(x_TD)), x)
        if self.chosen_E is not None:
            count_chosen(self.chosen_E, ids_Tk)
        slots_Tk = self.experts.table.slot_ids(ids_Tk)
        if self.facts.weighs_input:
            weighed_TD = x_TD * weights_Tk.to(x_TD.dtype)
            routed = Routed(weighed_TD, torch.ones_like(weights_Tk), slots_Tk, x_TD)
        else:
            routed = Routed(x_TD, weights_Tk, slots_Tk, x_TD)
        return self.dispatch(routed, self.experts, self.shared)

    def _chosen(self, x_TD: Tensor, of: Input) -> tuple[Tensor, Tensor]:
        """(weights float32 [T, k], ids int32 [T, k]). Padding chooses none, so that no expert is read for it."""
        loc_T = of.loc_T if isinstance(of, Normed) else None
        if self.choose is not None:
            weights_Tk, ids_Tk = self.choose(self.router(x_TD.float()), loc_T)
            return weights_Tk, ids_Tk
        return topk_softmax(self.router(x_TD), self.experts_per_token, self.renormalise, loc_T)

    def _joins(self, num_tokens: int) -> bool:
        """Whether experts are chosen and computed together: not where they are forced (of one token, any do)."""
        facts = self.facts
        plain = self.choose is None and not (facts.router_bias or facts.clamped or facts.weighs_input)
        plain = plain and facts.gated
        whole = self.shared is None and self.experts.has_all and not self.spreads
        return plain and whole and (self.forced_ids is None or num_tokens == 1)

    def _after(self, norm: RMSNorm, loc_T: Tensor | None, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(this rank's share of the experts' sum for the norm of x + residual, x + residual)."""
        router_ED = cast(DenseMatrix, self.router.matrix).weight
        how = norm.weight, norm.eps, norm.offset, router_ED, self.experts_per_token, self.renormalise
        return self.experts.routed(x_TD, residual_TD, Routing(*how, loc_T))


_FORCED = 20_480
"""Lines of random experts: more than the tokens of most steps."""
_BETWEEN_LAYERS = 61
"""Layers begin at different lines."""


def route_uniformly(model: nn.Module, seed: int) -> None:
    """Makes all mixtures of experts in a model send each token to experts drawn uniformly, without repetition, by its place
    in the step. All ranks of a mesh draw alike."""
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    tables: dict[tuple[int, int], Tensor] = {}
    for place, mixture in enumerate(mixtures):
        router_ED = cast(DenseMatrix, mixture.router.matrix).weight
        key = (len(router_ED), mixture.experts_per_token)
        if key not in tables:
            generator = torch.Generator().manual_seed(seed)
            lines = _FORCED + _BETWEEN_LAYERS * len(mixtures)
            drawn = torch.rand(lines, key[0], generator=generator).topk(key[1], dim=1).indices
            tables[key] = drawn.to(device=router_ED.device, dtype=torch.int32)
        first = _BETWEEN_LAYERS * place
        mixture.forced_ids = tables[key][first : first + _FORCED]


def count_chosen(counts_E: Tensor, ids_Tk: Tensor) -> None:
    """Adds the tokens that chose each expert; -1 is none."""
    ids = ids_Tk.reshape(-1).long()
    counts_E.scatter_add_(0, ids.clamp(min=0), (ids >= 0).to(counts_E.dtype))


def _without_padding(ids_Tk: Tensor, of: Input) -> Tensor:
    """The experts chosen for these tokens, none for padding."""
    is_padding_T1 = of.stream.is_padding_T1 if isinstance(of, Normed) else None
    return ids_Tk if is_padding_T1 is None else torch.where(is_padding_T1, -1, ids_Tk)


def _lines(table: Tensor, count: int) -> Tensor:
    """The first `count` lines, from the beginning again if there are not as many."""
    return table[:count] if count <= len(table) else table.repeat(-(-count // len(table)), 1)[:count]


class SharedExpert(nn.Module):
    """The expert that sees every token, perhaps weighed by a gate of its own. Returns this rank's share of the sum."""

    def __init__(self, hidden: int, facts: Moe, build: Build, gate: nn.Module | None) -> None:
        super().__init__()
        self.gate = gate
        self.scale = facts.shared_scale
        if facts.gated:
            self.gate_up = GateUpLinear(hidden, facts.shared_intermediate, build, activation=facts.activation)
        else:
            self.up = ColumnLinear(hidden, facts.shared_intermediate, build)
        self.activation = None if facts.gated else ACTIVATIONS[facts.activation]
        self.down = RowLinear(facts.shared_intermediate, hidden, build, reduce=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        weight_T1 = None if self.gate is None else torch.sigmoid(self.gate(x_TD))
        inner_TF = self.gate_up(x_TD) if self.activation is None else self.activation(self.up(x_TD))
        out_TD: Tensor = self.down(inner_TF).value()
        if self.scale != 1.0:
            out_TD = out_TD * self.scale
        return out_TD if weight_T1 is None else weight_T1 * out_TD
