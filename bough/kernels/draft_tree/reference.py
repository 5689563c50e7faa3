"""Trees of drafts in plain torch. Reads nothing back from the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bough.kernels.draft_tree import TreePath, TreeStep
from bough.kernels.step_end import SampleInputs
from bough.kernels.step_start import SlotState, StepInputs


def start_tree(state: SlotState, inputs: StepInputs, sample_at_L: Tensor) -> TreeStep:
    tree = state.tree
    assert tree is not None, "made for a runner whose drafts are trees"
    positions_T, slots_T = inputs.positions_T, inputs.token_slots_T
    chain_T, counter_L = positions_T.clone(), inputs.counter_L.clone()
    place_T = positions_T - state.kv_len[slots_T]
    derived_T = torch.arange(len(slots_T), device=slots_T.device) < inputs.derived[0]
    is_node = derived_T & (place_T > 0)
    node_T = (place_T - 1).clamp(0, tree.depth.shape[1] - 1)
    moved_T = torch.where(is_node, tree.depth[slots_T, node_T] - place_T, 0)
    seen_T = torch.where(is_node, tree.seen[slots_T, node_T], torch.where(derived_T, 1, 0))
    tail_T = torch.where(derived_T, positions_T - place_T, positions_T + 1).to(torch.int32)
    inputs.positions_T.add_(moved_T)
    samples = torch.arange(len(counter_L), device=slots_T.device) < inputs.derived[2]
    inputs.counter_L.add_(torch.where(samples, moved_T[sample_at_L], 0))
    return TreeStep(seen_T, tail_T, chain_T, counter_L)


def walk_tree(
    state: SlotState,
    inputs: SampleInputs,
    tree: TreeStep,
    drawn_L: Tensor,
    num_rows: int,
    width: int,
    blocked_L: Tensor | None,
) -> TreePath:
    assert state.tree is not None
    device, num_samples = drawn_L.device, len(drawn_L)
    starts = inputs.sample_start_R1[: num_rows + 1].long()
    first_R, count_R = starts[:-1].clamp_max(num_samples - 1), starts.diff()
    slots_R = inputs.sample_slots_L[first_R]
    parents_RN = state.tree.parents[slots_R]
    nodes = torch.arange(1, parents_RN.shape[1] + 1, device=device)
    inside = nodes < count_R[:, None]
    at_RN = (first_R[:, None] + nodes).clamp_max(num_samples - 1)
    ids_RN = inputs.ids_T[inputs.sample_at_L[at_RN]]
    goes_on = count_R > 0
    node_R = torch.zeros_like(first_R)
    yields_R, places, drawn = torch.zeros_like(first_R), [], []
    for _ in range(width):
        here = first_R + node_R
        token_R = drawn_L[here]
        if blocked_L is not None:
            goes_on = goes_on & ~blocked_L[here]
        yields_R = yields_R + goes_on.long()
        places.append(node_R)
        drawn.append(torch.where(goes_on, token_R, -1))
        fits = inside & (parents_RN == node_R[:, None]) & (ids_RN == token_R[:, None])
        goes_on = goes_on & fits.any(1)
        node_R = torch.where(goes_on, fits.long().argmax(1) + 1, node_R)
    drawn_RW, places_RW = torch.stack(drawn, 1), torch.stack(places, 1)
    last_R = (yields_R - 1).clamp_min(0)
    newest_R = drawn_RW.gather(1, last_R[:, None])[:, 0]
    spare = len(state.last_token) - 1
    moved = torch.where(yields_R > 0, slots_R, spare)
    root_R = inputs.sample_at_L[first_R]
    state.last_token.scatter_(0, moved, newest_R)
    state.kv_len.scatter_(0, moved, tree.positions_T[root_R] + yields_R)
    state.num_output.scatter_(0, moved, tree.counter_L[first_R] + yields_R)
    place_W = torch.arange(width, device=device)
    real = place_W < yields_R[:, None]
    from_L = torch.arange(num_samples + 1, device=device)
    into = torch.where(real, first_R[:, None] + place_W, num_samples)
    from_L.scatter_(0, into.flatten(), torch.where(real, first_R[:, None] + places_RW, 0).flatten())
    from_L = from_L[:num_samples]
    num_tokens = len(inputs.ids_T)
    moves_L = from_L != torch.arange(num_samples, device=device)
    from_T = torch.arange(num_tokens + 1, device=device)
    at_L = inputs.sample_at_L[:num_samples]
    from_T.scatter_(0, torch.where(moves_L, at_L, num_tokens), at_L[from_L])
    places_RW = torch.where(real, places_RW, 0)
    return TreePath(torch.cat((yields_R[:, None], drawn_RW), 1), from_L, from_T[:num_tokens], root_R, places_RW)


def gather_path(caches: Sequence[Tensor], loc_T: Tensor, path: TreePath) -> None:
    place_W = torch.arange(path.places_RW.shape[1], device=loc_T.device)
    moves = (place_W < path.result[:, :1]) & (path.places_RW != place_W)
    last = len(loc_T) - 1
    source, target = (loc_T[(path.root_R[:, None] + places).clamp_max(last)] for places in (path.places_RW, place_W))
    # Nothing is moved at location 0, which is never read: a copy of a fixed size serves every tree.
    moves &= (source >= 0) & (target >= 0)
    source, target = (torch.where(moves, each, 0).flatten() for each in (source, target))
    for cache in caches:
        flat = cache.flatten(0, 1)
        flat = flat.view(torch.uint8) if flat.dtype.itemsize == 1 else flat  # 8-bit floats can't be indexed
        flat[target] = flat[source]
