"""Tokens reach the ranks of their experts in every way, wherever experts are: the logits of transformers, with ranks as
threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dense_attention import DenseAttention
from families import EXPERTS, LATENTS
from quantised_files import quantise_checkpoint
from tiny import make_tiny

from bough.config.experts import ExpertPlan
from bough.config.hf import open_checkpoint
from bough.config.layout import Layout
from bough.config.model_facts import Moe
from bough.config.shares import rank_parameters
from bough.core.errors import ConfigError
from bough.distributed.mesh import Mesh
from bough.distributed.threads import run_ranks
from bough.engine.expert_balance import BalanceRules, ExpertBalancer
from bough.layers.expert_moves import move_experts
from bough.layers.moe import Experts, MixtureOfExperts
from bough.models.load import build_model
from bough.models.registry import facts_of

PROMPTS = [[5, 17, 99, 3, 64, 2, 120, 33, 7, 8, 9, 10, 11], [42], [100, 90, 80]]
CPU = torch.device("cpu")
LONG = pytest.mark.long


def built(path: Path, mesh: Mesh, plan: ExpertPlan) -> torch.nn.Module:
    model = build_model(
        open_checkpoint(str(path)), dtype=torch.float32, device=CPU, mesh=mesh, context_length=256, experts_plan=plan
    )
    assert isinstance(model, torch.nn.Module)
    return model


def logits_of(model: torch.nn.Module, prompts: list[list[int]] = PROMPTS) -> np.ndarray:
    batch = DenseAttention(len(prompts)).step(list(enumerate(prompts)), all_logits=True)
    return model.logits(model.forward(batch)).numpy()  # type: ignore[operator]


def reference_logits(reference: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return torch.cat([reference(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]).numpy()


def make(case: str, folder: Path, **more: object) -> torch.nn.Module:
    prefix, extra = {**EXPERTS, **LATENTS}.get(case, (case, {}))
    return make_tiny(prefix, folder, **{**extra, **more})


# Experts that don't divide and copies; ranks that split an expert; experts with biases; a weight on the input and a shared
# expert; a gated shared expert; groups of experts with a bias of choice, latents, several shared experts.
CASES = {
    "qwen3_moe": (Layout(tp=2, ep=2), 0),
    "mixtral": (Layout(tp=3, ep=3), 1),
    "qwen2_moe": (Layout(tp=4, ep=2), 2),
    "gpt_oss": (Layout(tp=2, ep=2), 2),
    "llama4": (Layout(tp=2, ep=2), 0),
    "deepseek_v3": (Layout(tp=2, ep=2), 4),
}


@pytest.mark.parametrize("kind", ["allgather", "alltoall", "none"])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in ("mixtral", "deepseek_v3") else LONG) for case in CASES]
)
def test_ranks_give_the_logits_of_one(case: str, kind: str, tmp_path: Path) -> None:
    layout, redundant = CASES[case]
    expected = reference_logits(make(case, tmp_path))
    if (facts_of(open_checkpoint(str(tmp_path)).config).layers[-1].ffn.num_experts + redundant) % layout.ep:
        redundant = 0
    plan = ExpertPlan(dispatch=kind, redundant=redundant)  # type: ignore[arg-type]
    every = run_ranks(layout, lambda mesh: logits_of(built(tmp_path, mesh, plan)))
    for rank, actual in enumerate(every):
        assert np.abs(actual - expected).max() <= 1e-4, rank
        assert np.array_equal(actual, every[0]), f"rank {rank} has other bits"


@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_the_sum_does_not_depend_on_where_experts_are(kind: str, tmp_path: Path) -> None:
    """To the last bit: results are added in the order of the router's choice. Copies share an expert's tokens, and products
    of fewer tokens may round differently; whichever copy is chosen."""
    make("qwen3_moe", tmp_path)
    rng = np.random.default_rng(1)
    plans = [ExpertPlan(dispatch=kind)]  # type: ignore[arg-type]
    for redundant in (0, 2):
        slots = tuple(tuple(int(e) for e in rng.permutation(np.arange(6 + redundant) % 6)) for _ in range(2))
        plans.append(replace(plans[0], slots=slots, redundant=redundant))
    if kind == "alltoall":
        plans.append(replace(plans[-1], copies="static"))
    layout = Layout(tp=2, ep=2)
    first, moved, *copied = (run_ranks(layout, lambda mesh, p=p: logits_of(built(tmp_path, mesh, p)))[0] for p in plans)
    assert np.array_equal(first, moved)
    for other in copied:
        assert np.abs(first - other).max() <= 1e-5


@pytest.mark.parametrize(
    ("case", "form", "layout", "kind"),
    [
        pytest.param("qwen3_moe", "", Layout(tp=2, ep=2), "alltoall", marks=LONG),
        ("gpt_oss", "", Layout(tp=2, ep=2), "allgather"),
        ("qwen3_moe", "fp8-channel", Layout(tp=2, ep=2), "alltoall"),
        ("qwen3_moe", "int4", Layout(tp=3, ep=3), "none"),
        pytest.param("qwen3_moe", "fp8-channel", Layout(tp=4, ep=2), "none", marks=LONG),
    ],
)
def test_experts_move_with_all_their_tensors(case: str, form: str, layout: Layout, kind: str, tmp_path: Path) -> None:
    """Between two steps, to slots at random, again and again: the logits stay."""
    sizes = {"hidden_size": 96, "moe_intermediate_size": 64, "intermediate_size": 192, "head_dim": 32} if form else {}
    make(case, tmp_path, **sizes)
    if form:
        quantise_checkpoint(tmp_path, form)
    experts = {each.num_experts for each in mixtures_of(tmp_path)}.pop()
    redundant = -experts % layout.ep or layout.ep
    plan = ExpertPlan(dispatch=kind, redundant=redundant, moves=True)  # type: ignore[arg-type]

    def main(mesh: Mesh) -> tuple[list[np.ndarray], int]:
        model = built(tmp_path, mesh, plan)
        held = [each for each in model.modules() if isinstance(each, Experts)]
        rng, seen, moved = np.random.default_rng(3), [logits_of(model)], 0
        for _ in range(3):
            for each in held:
                moved += move_experts(each, rng.permutation(each.table.slots))
            seen.append(logits_of(model))
        return seen, moved

    for seen, moved in run_ranks(layout, main):
        assert moved > 5
        for later in seen[1:]:
            assert np.array_equal(later, seen[0]) if kind != "none" else np.abs(later - seen[0]).max() <= 1e-5


def mixtures_of(path: Path) -> list[Moe]:
    layers = facts_of(open_checkpoint(str(path)).config).layers
    return [layer.ffn for layer in layers if isinstance(layer.ffn, Moe)]


def test_a_rank_holds_its_slots_and_the_shared_experts(tmp_path: Path) -> None:
    make("deepseek_v3", tmp_path)
    facts = facts_of(open_checkpoint(str(tmp_path)).config)
    layout = Layout(tp=2, ep=2, redundant=2, whole_shared=True)
    plan = ExpertPlan(dispatch="alltoall", redundant=2)
    every = run_ranks(layout, lambda mesh: sum(each.numel() for each in built(tmp_path, mesh, plan).parameters()))
    for rank, weights in enumerate(every):
        assert abs(weights - rank_parameters(facts, layout, rank)) <= 2 * facts.hidden + 64 * facts.num_layers
        assert weights < 0.75 * facts.num_parameters()


def test_the_balancer_evens_the_load_out_at_one_step(tmp_path: Path) -> None:
    """Every rank moves by itself at the same step; answers stay, and traffic that used two experts of one rank is spread."""
    make("qwen3_moe", tmp_path, num_experts=8)
    plan = ExpertPlan(dispatch="alltoall", redundant=2, moves=True, records=True)
    rules = BalanceRules(every=3, layers_at_once=1, least_uneven=1.0)

    def main(mesh: Mesh) -> tuple[list[np.ndarray], list[list[list[int]]], float, int, list[int]]:
        model = built(tmp_path, mesh, plan)
        mixtures = [each for each in model.modules() if isinstance(each, MixtureOfExperts)]
        forced = torch.tensor([[0, 1, 2], [1, 0, 3], [0, 2, 1]], dtype=torch.int32)
        for each in mixtures:
            each.forced_ids = forced
        balancer = ExpertBalancer(model, mesh.dp, rules)
        seen, slots = [], []
        for _ in range(8):
            balancer.before_step()
            seen.append(logits_of(model))
            slots.append([each.experts.table.slots.tolist() for each in mixtures])
        return seen, slots, balancer.balancedness, balancer.moves, balancer.counts[0].tolist()

    every = run_ranks(Layout(tp=2, ep=2), main)
    (seen, slots, balancedness, moves, counts), other = every
    assert slots == other[1]
    changes = [step for step in range(1, 8) if slots[step] != slots[step - 1]]
    assert changes == [2, 3], "one layer at a time, from the third step on"
    assert all(np.abs(each - seen[0]).max() <= 1e-5 for each in seen)
    assert moves == 1
    assert balancedness > 0.9
    tokens = sum(map(len, PROMPTS))
    assert sum(counts) == 3 * 5 * tokens, "as of the sixth step, before it"
    assert counts[4:] == [0, 0, 0, 0]


def test_experts_that_cannot_be_spread_are_refused(tmp_path: Path) -> None:
    make("qwen3_moe", tmp_path)
    with pytest.raises(ConfigError, match="nowhere to dispatch"):
        built(tmp_path, Mesh(), ExpertPlan(dispatch="alltoall"))
    with pytest.raises(ConfigError, match="spread evenly") as caught:
        run_ranks(Layout(tp=2, ep=2), lambda mesh: built(tmp_path, mesh, ExpertPlan(redundant=3)))
    assert "--ep-num-redundant-experts 0, or 2" in caught.value.fix
    with pytest.raises(ConfigError, match="each of 6 needs a slot"):
        run_ranks(Layout(tp=2, ep=2), lambda mesh: built(tmp_path, mesh, ExpertPlan(slots=((0,) * 6,) * 2)))
