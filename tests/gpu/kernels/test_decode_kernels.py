"""Steps of decode rows on a GPU: the table of tests/kernels with large shapes, and one graph for rows that grow."""

import importlib
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def decode() -> ModuleType:
    place = str(Path(__file__).parents[2] / "kernels")
    sys.path.insert(0, place)
    try:
        return importlib.import_module("decode_cases")
    finally:
        sys.path.remove(place)


PARTS = 6


@pytest.mark.parametrize("part", range(PARTS))
def test_one_pass_gives_what_two_give(part: int, decode: ModuleType) -> None:
    seed = random.SystemRandom().randrange(2**31)
    assert decode.cases.run("decode", torch.device("cuda"), seed, part, PARTS) > 0


@pytest.mark.parametrize("batch", [1, 8, 40])
def test_a_graph_reads_what_its_last_replay_wrote(batch: int, decode: ModuleType) -> None:
    """Rows that grow by a token a replay, over page after page, give what two passes run eagerly give."""
    cases, backend = decode.cases, decode.backend
    bed = cases.Bed(torch.device("cuda"), True, random.Random(batch))
    spec, dtype, page, steps = cases.Layer(32, 8, 128), torch.bfloat16, 16, 40
    starts = [bed.rng.choice((0, 5, 60, 700)) for _ in range(batch)]
    inputs = cases.attention_inputs(bed, [(1, start + steps) for start in starts], spec, page, dtype, pad_tokens=0)
    inputs.host = None
    lengths = bed.ints(starts, torch.int64)
    lines = inputs.slots_R[:batch].long()
    positions = torch.zeros(batch, dtype=torch.int64, device="cuda")
    product = bed.normal(batch, 48, 128, dtype=dtype)
    table = bed.normal(1000, 128)
    theirs = replace(inputs, k_caches=[inputs.k_caches[0].clone()], v_caches=[inputs.v_caches[0].clone()])

    def attend(runner: object, step: object, fused: bool) -> torch.Tensor:
        before, backend.FUSED_DECODE = backend.FUSED_DECODE, fused
        try:
            runner.prepare(step)  # type: ignore[attr-defined]
            q, k, v = product.split([32, 8, 8], 1)
            runner.forward_rope(spec, q, k, v, positions, table)  # type: ignore[attr-defined]
            return runner.forward_rope(spec, q, k, v, positions, table)  # type: ignore[attr-defined]
        finally:
            backend.FUSED_DECODE = before

    def advance() -> None:
        positions.copy_(lengths)
        inputs.kv_len_R[:batch] = (lengths + 1).int()
        pages = inputs.page_table[lines, lengths // page].long()
        inputs.loc_T.copy_(pages * page + lengths % page)
        product.normal_()
        lengths.add_(1)

    captured, eager = (backend.TritonAttention(torch.device("cuda")) for _ in range(2))
    inputs.loc_T.fill_(-1)
    attend(captured, inputs, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(captured, inputs, True)
    for _ in range(steps):
        advance()
        out.fill_(float("nan"))
        graph.replay()
        cases.close(out, attend(eager, theirs, False), dtype)
