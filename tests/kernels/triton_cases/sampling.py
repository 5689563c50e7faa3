"""Draws and masks of logits."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from bough.kernels.masks import cpu as masks_cpu, reference as masks_reference, triton as masks_triton
from bough.kernels.sampling import reference as sampling_reference, triton as sampling
from triton_cases.bed import Bed, Cases, same_twice


def sampling_cases(bed: Bed) -> Cases:
    vocabs = (50, 5000, 128256) if bed.large else (50, 4500, 13_000)
    draws = ((0.5, torch.float32), (4.0, torch.bfloat16))
    if bed.large:
        draws += ((0.5, torch.bfloat16), (4.0, torch.float32))
    for (spread, dtype), vocab in bed.cover(draws, vocabs):
        yield f"sample {vocab} spread {spread} {dtype}", partial(_sample, bed, vocab, spread, dtype)


def _sample(bed: Bed, vocab: int, spread: float, dtype: torch.dtype) -> None:
    rows = 128 if bed.large else 8
    logits = bed.normal(rows, vocab, dtype=dtype, scale=spread)
    logits[:, : vocab // 3] = float("-inf")
    logits[0] = float("-inf")  # nothing is allowed

    def pick(*values: float) -> Tensor:
        return torch.tensor([bed.rng.choice(values) for _ in range(rows)], device=bed.device)

    temperature = pick(0.0, 0.3, 1.0, 1.7)
    top_k, top_p, min_p = pick(-1, 1, 7, 50), pick(1.0, 0.95, 0.4), pick(0.0, 0.0, 0.05)
    temperature[0], top_p[0] = 1.0, 0.95
    seeds = torch.tensor([bed.rng.randrange(-(2**63), 2**63) for _ in range(rows)], device=bed.device)
    counters = torch.tensor([bed.rng.randrange(2**40) for _ in range(rows)], device=bed.device)
    arguments = (logits, temperature, top_k, top_p, min_p, seeds, counters)
    got, want = same_twice(lambda: sampling.sample(*arguments)), sampling_reference.sample(*arguments)
    assert got[0] == want[0]
    differs = int((got != want).sum())
    assert differs <= rows // 50, f"{differs} of {rows} draws differ"
    some = torch.randperm(rows, device=bed.device)[: rows // 2]
    alone = sampling.sample(*(argument[some] for argument in arguments))
    assert torch.equal(alone, got[some]), "a draw depends on its batch"
    ids = torch.randperm(3 * vocab, device=bed.device)[:vocab].sort().values
    among = (logits, ids, 3 * vocab, *arguments[1:])
    got = same_twice(lambda: sampling.sample_among(*among))
    want = sampling_reference.sample_among(*among)
    differs = int((got != want)[1:].sum())  # where nothing is allowed, the first of other tokens
    assert differs <= rows // 50, f"{differs} of {rows} draws among some tokens differ"
    assert torch.isin(got, ids).all()
    logits[0, vocab // 2] = logits[0, vocab - 1] = 100.0
    assert torch.equal(same_twice(lambda: sampling.argmax(logits)), sampling_reference.argmax(logits))
    assert torch.equal(same_twice(lambda: sampling.argmax(logits, ids)), sampling_reference.argmax(logits, ids))
    logits[1] = float("nan")
    assert torch.isin(sampling.argmax(logits, ids)[1], ids), "what is not a number leads out of the vocabulary"


def mask_cases(bed: Bed) -> Cases:
    for dtype in bed.dtypes:
        for vocab in (31, 4096, 49_152, 151_936) if bed.large else (31, 2200):
            yield f"masks {vocab} {dtype}", partial(_mask, bed, vocab, dtype)


def _mask(bed: Bed, vocab: int, dtype: torch.dtype) -> None:
    rows, width = (96, -(-vocab // 32)) if bed.large else (5, -(-vocab // 32))
    logits = bed.normal(rows, vocab + 8, dtype=dtype)[:, :vocab]
    some = torch.randperm(rows, device=bed.device)[: rows // 2 + 1]
    masks = bed.ints(np.random.randint(-(2**31), 2**31, (len(some), width)))
    masks[0] = 0
    masks[-1] = -1
    for given in (masks, masks[:, : max(1, width // 2)]):
        want, got, plain = logits.clone(), logits.clone(), logits.cpu().clone()
        masks_reference.apply_masks(want, some, given)
        masks_triton.apply_masks(got, some, given)
        masks_cpu.apply_masks(plain, some.cpu(), given.cpu().contiguous())
        assert torch.equal(got, want)
        assert torch.equal(plain, want.cpu())
    by_hand = logits.float().cpu().numpy().copy()
    for at, row in enumerate(some.tolist()):
        for token in range(min(vocab, 300)):
            if not int(masks[at, token // 32]) >> (token % 32) & 1:
                by_hand[row, token] = -np.inf
    masks_triton.apply_masks(logits, some, masks)
    assert np.array_equal(logits[:, :300].float().cpu().numpy(), by_hand[:, :300])
