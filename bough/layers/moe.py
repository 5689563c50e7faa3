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
from bough.kernels.moe import Choosing, Routing, route
from bough.layers.build import Build
from bough.layers.choice import ExpertChoice
from bough.layers.dispatch import Routed, make_dispatch
from bough.layers.expert_table import ExpertTable
from bough.layers.linear import ColumnLinear, GateUpLinear, ReplicatedLinear, RowLinear
from bough.layers.mlp import ACTIVATIONS
from bough.layers.norm import RMSNorm
from bough.layers.stream import Input, Normed, value_of
from bough.quantization.scheme import ExpertShape, ExpertWeights
from bough.quantization.unquantized import PLAIN_KINDS, DenseMatrix, Unquantized
from bough.weights.slots import Slot, also_into, pass_over
from bough.weights.stored import Stored, copy_into

MOST_ALWAYS = 4
"""Largest width, in widths of a routed expert, of a shared expert that is computed as routed ones which every token chooses.
0: it never is."""


class Experts(nn.Module):
    """A layer's experts: those in this rank's slots, and of each of them its share of the inner units."""

    def __init__(self, facts: Moe, hidden: int, build: Build, mixture: int = 0, always: int = 0) -> None:
        """`mixture`: the layer's number among the model's mixtures. `always`: experts behind those of the router, which are
        parts of the shared one."""
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
            mine.stop - mine.start + always,
            hidden,
            facts.intermediate,
            units,
            facts.activation,
            facts.clamped,
            facts.gated,
            adds_bias=build.mesh.units.rank == 0,
        )
        self.always = always
        self.build = build
        self.stack: ExpertWeights

    def place(self, name: str) -> None:
        self.stack = self.build.experts(name, self.shape)

    def slots(self) -> dict[str, Slot]:
        """Those of all experts: an expert of several slots fills them all, and what other ranks hold is passed over,
        unread."""
        mine = self.stack.weight_slots()
        if self.always:
            behind = {str(self.num_experts + each) for each in range(self.always)}
            mine = {name: slot for name, slot in mine.items() if name.partition(".")[0] not in behind}
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
        """As `Choosing.forced_nk`. For dummy weights."""
        dense = replace(build, scheme=Unquantized())
        self.facts = facts
        self.choose: ExpertChoice | None = None
        """Says how experts are chosen, where it is not by `topk_softmax`."""
        if facts.scored is not None or facts.scale != 1.0:
            self.choose = ExpertChoice(facts, build)
            dense = replace(dense, dtype=torch.float32)
        self.router = ReplicatedLinear(hidden, facts.num_experts, dense, bias=facts.router_bias)
        self.always = _times_as_wide(facts, build)
        self.experts = Experts(facts, hidden, build, mixture, self.always)
        plan = build.experts_plan
        self.dispatch = make_dispatch(plan.dispatch, build.mesh, self.experts.table, build.spread)
        if build.spread is not None:
            build.spread.blocks.append(self)
        self.chosen_E: Tensor | None = None
        """int64 [E]: tokens that chose each expert, where they are counted."""
        if plan.records:
            self.chosen_E = torch.zeros(facts.num_experts, dtype=torch.int64, device=build.device)
        self.shared: SharedExpert | SharedInStack | None = None
        if self.always:
            self.shared = SharedInStack(self.experts, facts)
        elif facts.shared_intermediate:
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
        if self.chosen_E is not None:
            count_chosen(self.chosen_E, ids_Tk[:, : self.experts_per_token])
        slots_Tk = self.experts.table.slot_ids(ids_Tk)
        if self.facts.weighs_input:
            weighed_TD = x_TD * weights_Tk.to(x_TD.dtype)
            routed = Routed(weighed_TD, torch.ones_like(weights_Tk), slots_Tk, x_TD)
        else:
            routed = Routed(x_TD, weights_Tk, slots_Tk, x_TD)
        return self.dispatch(routed, self.experts, None if self.always else self.shared)

    def _chosen(self, x_TD: Tensor, of: Input) -> tuple[Tensor, Tensor]:
        """(weights float32 [T, k], ids int32 [T, k]). Padding chooses none, so that no expert is read for it."""
        loc_T = of.loc_T if isinstance(of, Normed) else None
        router, choice = self.router, self.choose
        how = Choosing(
            self.experts_per_token,
            self.renormalise,
            None if choice is None else choice.scoring,
            None if choice is None else choice.bias_E,
            self.forced_ids,
            self.always,
            self.facts.shared_scale,
        )
        if choice is not None and choice.is_involved:
            return choice(router(x_TD.float()), how, loc_T)  # type: ignore[no-any-return]
        return route(x_TD, cast(DenseMatrix, router.matrix).weight, router.bias, how, loc_T)

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


def _times_as_wide(facts: Moe, build: Build) -> int:
    """How many experts behind the router's the shared one is computed as; 0: it is computed by itself.

    Its weights must be stored as those of the others are, and be where they are."""
    times, rest = divmod(facts.shared_intermediate, facts.intermediate)
    if rest or times > MOST_ALWAYS or facts.shared_gated or facts.clamped is not None or facts.weighs_input:
        return 0
    plan = build.experts_plan
    here = plan.dispatch == "none" and build.spread is None and build.mesh.ep.size == 1
    still = plan.slots is None and not (plan.redundant or plan.moves)
    return times if here and still and facts.gated and isinstance(build.scheme, Unquantized) else 0


class SharedInStack(nn.Module):
    """The shared expert's weights as the last experts of a stack."""

    def __init__(self, experts: Experts, facts: Moe) -> None:
        super().__init__()
        self.gate_up = _PartInStack(experts, facts, ("gate", "up"))
        self.down = _PartInStack(experts, facts, ("",))


class _PartInStack(nn.Module):
    """Weights of the shared expert, and where they are in the stack."""

    def __init__(self, experts: Experts, facts: Moe, parts: tuple[str, ...]) -> None:
        super().__init__()
        self.facts = facts
        self.parts = parts
        self._experts = [experts]
        """In a list: it is no part of this."""

    def slots(self) -> dict[str, Slot]:
        facts, shape = self.facts, self._experts[0].shape
        is_down = len(self.parts) == 1
        whole = (facts.shared_intermediate, shape.hidden)
        return {
            f"{part}.weight" if part else "weight": Slot(
                whole[::-1] if is_down else whole, partial(self._fill, at), kinds=PLAIN_KINDS
            )
            for at, part in enumerate(self.parts)
        }

    def _fill(self, part: int, stored: Stored) -> None:
        experts, width = self._experts[0], self.facts.intermediate
        units, count = experts.shape.units, experts.shape.num_units
        for place, (gate_up, down) in enumerate(experts.stack.expert_tensors()[experts.num_experts :]):
            mine = slice(place * width + units.start, place * width + units.stop)
            if len(self.parts) == 1:
                copy_into(down, stored, slice(None), mine)
            else:
                copy_into(gate_up[part * count : (part + 1) * count], stored, mine)


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
