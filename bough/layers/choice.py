"""How a router's logits become experts and weights, where it is more than a softmax. T tokens, E experts, k per token."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from bough.config.model_facts import Moe, Scored
from bough.kernels.moe import Choosing, Scoring, settle, topk_scored
from bough.layers.build import Build
from bough.layers.norm import fill
from bough.weights.slots import Slot


class ExpertChoice(nn.Module):
    """Chooses each token's experts."""

    def __init__(self, facts: Moe, build: Build) -> None:
        super().__init__()
        self.facts = facts
        self.scored = facts.scored or Scored(by="softmax")
        self.scoring = Scoring(
            sigmoid=self.scored.by == "sigmoid",
            groups=self.scored.groups,
            kept_groups=self.scored.kept_groups,
            best_two=self.scored.group_by == "best two",
            renormalise=facts.renormalise,
            least_sum=self.scored.least_sum,
            scale=facts.scale,
        )
        self.bias: nn.Parameter | None = None
        if self.scored.bias:
            shape = (1, facts.num_experts) if self.scored.bias == "row" else (facts.num_experts,)
            # float32: rounding it changes which experts are chosen
            self.bias = nn.Parameter(torch.empty(shape, dtype=torch.float32, device=build.device), requires_grad=False)

        self.scales: nn.Parameter | None = None
        if self.scored.expert_scales:
            ones = torch.ones(facts.num_experts, dtype=torch.float32, device=build.device)
            self.scales = nn.Parameter(ones, requires_grad=False)

    def slots(self) -> dict[str, Slot]:
        both = {"bias": self.bias, "scales": self.scales}
        return {name: Slot(tuple(each.shape), partial(fill, each)) for name, each in both.items() if each is not None}

    @property
    def bias_E(self) -> Tensor | None:
        return None if self.bias is None else self.bias.view(-1)

    @property
    def is_involved(self) -> bool:
        """Whether it takes more than `scoring` and a bias: then `forward` chooses."""
        scored = self.scored
        capped = scored.logit_scale != 1.0 or scored.softcap is not None
        return capped or scored.by == "sparsemixer" or self.scales is not None

    def forward(self, logits_TE: Tensor, how: Choosing, loc_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(weights float32 [T, k], ids int32 [T, k]) as of `kernels.moe.route`, from logits."""
        if self.scored.logit_scale != 1.0:
            logits_TE = logits_TE * self.scored.logit_scale
        if self.scored.softcap is not None:
            logits_TE = torch.tanh(logits_TE / self.scored.softcap) * self.scored.softcap
        if self.scored.by == "sparsemixer":
            weights_Tk, ids_Tk = sparse_mixer(logits_TE, self.scored.margin)
        else:
            weights_Tk, ids_Tk = topk_scored(logits_TE, how.per_token, self.scoring, how.bias_E)
        if self.scales is not None:
            weights_Tk = weights_Tk * self.scales[ids_Tk]
        return settle(weights_Tk, ids_Tk, logits_TE.shape[1], how, loc_T)


def sparse_mixer(logits_TE: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """The best expert, then the best of the others; each one's weight is its share of a softmax over those experts that
    come within `margin` of it, relative to their size."""
    weights, ids, rest_TE = [], [], logits_TE
    for _ in range(2):
        best_T1, id_T1 = rest_TE.max(-1, keepdim=True)
        far_TE = (best_T1 - logits_TE) / logits_TE.abs().clamp(min=best_T1) > margin
        near_TE = rest_TE.masked_fill(far_TE, float("-inf")).softmax(-1)
        weights.append(near_TE.gather(1, id_T1))
        ids.append(id_T1)
        rest_TE = rest_TE.scatter(1, id_T1, float("-inf"))
    return torch.cat(weights, 1), torch.cat(ids, 1).to(torch.int32)
