"""Joined KV against transformers.

The reference computes each branch over the parent alone, in transformers: that is the branch-blind mask, at the positions
the branches were computed at. Then it rotates their keys, as they are before any rotation, to the positions they have in
the joined context with transformers' own rotary module, and continues from a cache filled with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import Answer, InProcess, Setup
from tiny import make_tiny
from transformers import DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from bough.config.hf import Checkpoint, open_checkpoint
from bough.core.messages import JoinBranches, LogprobSpec, joined_namespace, unpack_ids
from bough.core.sampling import SamplingParams
from bough.kernels.attention.inputs import IndexKeys
from bough.kernels.attention.spread_keys import hadamard
from bough.kernels.kv_codes import decode, encode
from bough.memory.mha import KVPool, KVShape, Turn
from bough.models.load import build_model
from bough.models.registry import facts_of
from bough.runner.model_runner import ModelRunner
from bough.runner.moves import Mover

CPU = torch.device("cpu")
VOCAB = 131
CONTEXT = 256
ROPES = ["llama", "llama-linear", "llama-llama3", "llama-yarn", "llama-dynamic"]
PARENT = [5, 17, 99, 3, 64, 2, 120, 33, 7, 8, 9]
BRANCHES = [[10, 11, 5, 77, 31], [42, 43, 44, 45, 46, 47, 48], [100, 90, 80]]
TEXT = [61, 62, 63, 99, 12]
JOINED = joined_namespace("", "session")


def engine_on(checkpoint: Checkpoint, setup: Setup) -> InProcess:
    device = torch.device(setup.device)
    model = build_model(checkpoint, dtype=torch.float32, device=device, context_length=CONTEXT)
    engine = InProcess(model, VOCAB, setup)
    runner = engine.loop.runner
    assert isinstance(runner, ModelRunner)
    runner.mover = Mover(runner.forward.pool, facts_of(checkpoint.config).ropes, CONTEXT, device)
    return engine


def prefill(engine: InProcess, prompts: Sequence[Sequence[int]]) -> list[str]:
    ids = []
    for prompt in prompts:
        ids.append(engine.submit(prompt, SamplingParams(temperature=0.0, max_new_tokens=0)))
        engine.mailbox.incoming[-1].keep = True  # type: ignore[union-attr]
    engine.finish(ids)
    return [str(each) for each in ids]


def join(engine: InProcess, shifts: tuple[int, ...] = ()) -> list[int]:
    names = prefill(engine, [PARENT, *(PARENT + own for own in BRANCHES)])
    computed = engine.queues.counters.prompt_tokens
    starts = (len(PARENT),) * len(BRANCHES)
    message = JoinBranches(call=1, namespace="", branches=tuple(names[1:]), starts=starts, shifts=shifts, joined=JOINED)
    engine.loop.control.handle(message, now=0.0)
    (reply,) = engine.queues.mail.take()
    assert not reply.error
    assert engine.queues.counters.prompt_tokens == computed
    ids: list[int] = unpack_ids(reply.body["ids"]).tolist()
    assert ids == [*PARENT, *(token for own in BRANCHES for token in own)]
    return ids


def go_on(engine: InProcess, prompt: list[int], start: int, new: int) -> Answer:
    every = LogprobSpec(start=start, top=VOCAB)
    number = engine.submit(prompt, SamplingParams(temperature=0.0, max_new_tokens=new), every)
    engine.mailbox.incoming[-1].namespace = JOINED  # type: ignore[union-attr]
    return engine.finish([number])[0]


def scores(answer: Answer) -> torch.Tensor:
    """Log-probabilities of the whole vocabulary: after each token of the text, and after each new one."""
    assert answer.prompt_logprobs is not None
    rows = [row for part in (answer.prompt_logprobs, *answer.output_logprobs) for row in part.top]
    table = torch.empty(len(rows), VOCAB)
    for at, row in enumerate(rows):
        table[at, [token for token, _ in row]] = torch.tensor([value for _, value in row])
    return table


def unrotated(reference: PreTrainedModel, prompt: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer, [heads, tokens, width], as the projections yield them."""
    caught: dict[str, list[torch.Tensor]] = {"k_proj": [], "v_proj": []}
    hooks = [
        getattr(layer.self_attn, name).register_forward_hook(lambda _, __, out, kept=kept: kept.append(out))
        for layer in reference.model.layers
        for name, kept in caught.items()
    ]
    with torch.no_grad():
        reference(torch.tensor([prompt]))
    for hook in hooks:
        hook.remove()
    heads = reference.config.num_key_value_heads
    split = [[each[0].unflatten(-1, (heads, -1)).transpose(0, 1) for each in kept] for kept in caught.values()]
    return list(zip(*split, strict=True))


def reference_scores(
    reference: PreTrainedModel, inputs: list[int], shifts: Sequence[int] = (0, 0, 0), *, rotate: bool = True
) -> torch.Tensor:
    start = len(PARENT)
    of_branches = [unrotated(reference, PARENT + own) for own in BRANCHES]
    positions = list(range(start))
    for own, shift in zip(BRANCHES, shifts, strict=True):
        first = len(positions) + shift if rotate else start
        positions += range(first, first + len(own))
    where = torch.tensor([positions])
    cache = DynamicCache()
    with torch.no_grad():
        cos, sin = reference.model.rotary_emb(torch.zeros(1), where)
        for layer, first in enumerate(of_branches[0]):
            keys, values = (
                torch.cat([first[side], *(branch[layer][side][:, start:] for branch in of_branches[1:])], 1)[None]
                for side in (0, 1)
            )
            cache.update(apply_rotary_pos_emb(keys, keys, cos, sin)[1], values, layer)
        at = torch.arange(len(positions), len(positions) + len(inputs))[None]
        return reference(torch.tensor([inputs]), past_key_values=cache, position_ids=at).logits[0].log_softmax(-1)


@pytest.mark.parametrize("case", ROPES)
@pytest.mark.parametrize(("attention", "page_size"), [("torch", 4), ("torch", 16), ("cpu", 8)])
def test_logits_are_those_of_transformers(case: str, attention: str, page_size: int, tmp_path: Path) -> None:
    reference = make_tiny(case, tmp_path)
    engine = engine_on(open_checkpoint(str(tmp_path)), Setup(page_size=page_size, attention=attention))
    ids = join(engine)
    computed = engine.queues.counters.prompt_tokens
    answer = go_on(engine, ids + TEXT, len(ids) + 1, new=12)
    assert engine.queues.counters.prompt_tokens - computed == len(TEXT), "only the text after the join is computed"
    actual = scores(answer)
    expected = reference_scores(reference, TEXT + answer.tokens[:-1])
    assert actual.shape == expected.shape == (len(TEXT) + 11, VOCAB)
    assert (actual - expected).abs().max() <= 1e-3
    assert answer.tokens == expected[len(TEXT) - 1 :].argmax(-1).tolist()
    unturned = reference_scores(reference, TEXT + answer.tokens[:-1], rotate=False)
    assert (unturned - expected).abs().max() > 2e-2, "without rotation the answer would be another"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", ROPES)
def test_logits_on_cuda(case: str, tmp_path: Path) -> None:
    reference = make_tiny(case, tmp_path)
    engine = engine_on(open_checkpoint(str(tmp_path)), Setup(page_size=16, device="cuda"))
    ids = join(engine)
    actual = scores(go_on(engine, ids + TEXT, len(ids) + 1, new=1))
    assert (actual - reference_scores(reference, TEXT)).abs().max() <= 1e-3


def test_shifted_branches(tmp_path: Path) -> None:
    reference = make_tiny("llama", tmp_path)
    engine = engine_on(open_checkpoint(str(tmp_path)), Setup(page_size=4))
    shifts = (0, 9, -3)
    ids = join(engine, shifts)
    actual = scores(go_on(engine, ids + TEXT, len(ids) + 1, new=1))
    assert (actual - reference_scores(reference, TEXT, shifts)).abs().max() <= 1e-3


def test_a_lone_branch_is_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.BRANCHES", BRANCHES[:1])
    reference = make_tiny("llama-llama3", tmp_path)
    engine = engine_on(open_checkpoint(str(tmp_path)), Setup(page_size=4))
    ids = join(engine)
    actual = scores(go_on(engine, ids + TEXT, len(ids) + 1, new=1))
    with torch.no_grad():
        expected = reference(torch.tensor([ids + TEXT])).logits[0, len(ids) :].log_softmax(-1)
    assert (actual - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("bits", [8, 4])
def test_moved_codes(bits: int) -> None:
    """Keys that turn are encoded anew; everything else is moved as it is, with its ranges. Those of 4 bits are spread over
    their channels, and turn without that."""
    generator = torch.Generator().manual_seed(0)
    shapes = [KVShape(2, 12, 8), KVShape(1, 8, 8)]
    pool = KVPool(shapes, num_pages=5, page_size=4, dtype=torch.float32, device=CPU, code_bits=bits)
    for shape, keys, values, ranges in zip(shapes, pool.keys, pool.values, pool.ranges, strict=True):
        for cache, held, width in ((keys, ranges.keys, shape.k_dim), (values, ranges.values, shape.v_dim)):
            codes, made = encode(torch.randn(*cache.shape[:3], width, generator=generator), bits)
            cache.copy_(codes)
            held.copy_(made)
    assert sum(store.nbytes for store in pool.stores) == 5 * 4 * (56 * bits // 8 + 6 * 4)

    def numbers() -> list[torch.Tensor]:
        keys = [decode(k, r.keys, s.k_dim) for k, r, s in zip(pool.keys, pool.ranges, shapes, strict=True)]
        values = [decode(v, r.values, s.v_dim) for v, r, s in zip(pool.values, pool.ranges, shapes, strict=True)]
        return [each.flatten(0, 1) for each in (*keys, *values)]

    before = numbers()
    source, target = torch.tensor([3, 4, 9, 17]), torch.tensor([4, 3, 17, 12])
    angles = torch.tensor(np.random.default_rng(0).normal(size=(4, 4)), dtype=torch.float32)
    pool.move_tokens(source, target, [Turn(angles), None])
    after = numbers()
    spread = hadamard(12, CPU) if bits == 4 else torch.eye(12)
    moved = before[0][source] @ spread
    pairs = torch.complex(moved[..., :4], moved[..., 4:8])
    turned = pairs * torch.polar(torch.ones(4, 4), angles)[:, None]
    whole = torch.cat([turned.real, turned.imag, moved[..., 8:]], -1) @ spread
    step = (whole.amax(-1) - whole.amin(-1)) / (2**bits - 1)
    assert ((after[0][target] - whole).abs() <= 0.55 * step.unsqueeze(-1)).all()
    untouched = torch.tensor([at for at in range(20) if at not in target.tolist()])
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(old[untouched], new[untouched])
        assert place == 0 or torch.equal(new[target], old[source])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_moved_tokens(dtype: torch.dtype) -> None:
    """Targets that overlap sources, unturned layers, partial rotation, every KV type."""
    generator = torch.Generator().manual_seed(0)
    pool = KVPool([KVShape(2, 12, 8), KVShape(1, 8, 8)], num_pages=5, page_size=4, dtype=dtype, device=CPU)
    for cache in (*pool.keys, *pool.values):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    before = [cache.float().clone().flatten(0, 1) for cache in (*pool.keys, *pool.values)]
    source, target = torch.tensor([3, 4, 9, 17]), torch.tensor([4, 3, 17, 12])
    angles = torch.tensor(np.random.default_rng(0).normal(size=(4, 4)), dtype=torch.float32)
    pool.move_tokens(source, target, [Turn(angles), None])
    after = [cache.float().flatten(0, 1) for cache in (*pool.keys, *pool.values)]
    pairs = torch.complex(before[0][source][..., :4], before[0][source][..., 4:8])
    turned = pairs * torch.polar(torch.ones(4, 4), angles)[:, None]
    whole = torch.cat([turned.real, turned.imag, before[0][source][..., 8:]], -1)
    exact = [whole, *(each[source] for each in before[1:])]
    untouched = torch.tensor([at for at in range(20) if at not in target.tolist()])
    for old, new, wanted in zip(before, after, exact, strict=True):
        assert torch.equal(old[untouched], new[untouched])
        assert torch.allclose(new[target], wanted.to(dtype).float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_that_choose_tokens_turn_by_their_own_pairs(interleaved: bool) -> None:
    """A latent's key is behind it, with pairs side by side; the key that is scored turns its first numbers."""
    shape = KVShape(1, 12, 8, latent=True, index=IndexKeys(7, interleaved))
    pool = KVPool([shape], num_pages=5, page_size=4, dtype=torch.float32, device=CPU)
    index = pool.index[0]
    assert index is not None
    assert pool.caches(slice(None)) == [pool.keys[0], index]
    assert sum(store.nbytes for store in pool.stores) == 5 * 4 * 4 * shape.kept == 5 * 4 * 4 * 19
    generator = torch.Generator().manual_seed(0)
    for cache in (pool.keys[0], index):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    before = [cache.clone().flatten(0, 2) for cache in (pool.keys[0], index)]
    source, target = torch.tensor([3, 4, 9, 17]), torch.tensor([4, 3, 17, 12])
    angles = torch.tensor(np.random.default_rng(0).normal(size=(4, 2)), dtype=torch.float32)
    pool.move_tokens(source, target, [Turn(angles, interleaved=True)])
    latents, keys = (cache.flatten(0, 2)[target] for cache in (pool.keys[0], index))
    turn = torch.polar(torch.ones(4, 2), angles)

    def turned(numbers: torch.Tensor, side_by_side: bool) -> torch.Tensor:
        halves = (numbers[:, 0::2], numbers[:, 1::2]) if side_by_side else numbers.chunk(2, -1)
        pairs = torch.complex(halves[0].contiguous(), halves[1].contiguous()) * turn
        parts = (pairs.real, pairs.imag)
        return torch.stack(parts, -1).flatten(1) if side_by_side else torch.cat(parts, -1)

    was = [each[source] for each in before]
    assert torch.allclose(latents, torch.cat((was[0][:, :8], turned(was[0][:, 8:], True)), 1))
    assert torch.allclose(keys, torch.cat((turned(was[1][:, :4], interleaved), was[1][:, 4:]), 1))
