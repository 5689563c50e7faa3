"""The Triton kernels on a GPU: the table of tests/kernels with large shapes, and what only a GPU can show."""

import random

import pytest
import torch
from triton_cases.bed import Bed, close
from triton_cases.layers import attention_inputs, layer_of
from triton_cases.table import OPS, run

from bough.kernels.attention import reference as attention_reference
from bough.kernels.attention.inputs import AttentionInputs
from bough.kernels.attention.triton_backend import TritonAttention
from bough.kernels.moe import triton as moe
from bough.kernels.sampling import triton as sampling

PARTS = {
    "attention": 25, "latent": 6, "tail": 6, "rope": 6, "shared": 7, "packed": 11, "packed_moe": 9, "segments": 7, "gguf": 6,
    "sparse": 6, "states": 6, "moe": 5, "linear": 5, "rotary": 3, "plan": 2,
}  # fmt: skip
"""Most of the time goes into compiling: what is compiled side by side is done sooner. Operations with the longest parts come
first, all others are one part."""


def _parts() -> list[tuple[str, int]]:
    named = [*PARTS, *(op for op in OPS if op not in PARTS)]
    return [(op, part) for op in named for part in range(PARTS.get(op, 1))]


@pytest.mark.parametrize(("op", "part"), _parts())
def test_agrees_with_its_reference(op: str, part: int) -> None:
    """Every two of an operation's shapes, dtypes and options together at least once. All combinations, for half an hour:
    `python -m triton_cases OP SEED all`."""
    seed = random.SystemRandom().randrange(2**31)
    assert run(op, torch.device("cuda"), seed, part, PARTS.get(op, 1), amount="pairs") > 0


def test_one_graph_serves_any_rows() -> None:
    """A captured attention gives the eager result for other rows written into the same buffers."""
    bed = Bed(torch.device("cuda"), True, random.Random(5))
    spec = layer_of(32, 8, 128)
    dtype = torch.bfloat16
    mixtures = [
        [(1, n) for n in (5, 700, 64, 1, 2000, 33, 90)] + [(40, 500)],
        [(3, 10), (1, 3000), (30, 0), (1, 17)],
        [(1, 4000)],
    ]
    tokens, room = 64, 16
    everything = [attention_inputs(bed, rows, spec, 64, dtype, pad_rows=room - len(rows)) for rows in mixtures]
    widest = max(inputs.page_table.shape[1] for inputs in everything)
    most_pages = max(inputs.k_caches[0].shape[0] for inputs in everything)

    def padded(inputs: object) -> list[torch.Tensor]:
        loc = torch.full((tokens,), -1, dtype=torch.int64, device="cuda")
        loc[: inputs.loc_T.shape[0]] = inputs.loc_T  # type: ignore[attr-defined]
        table = torch.zeros((32, widest), dtype=torch.int32, device="cuda")
        table[: inputs.page_table.shape[0], : inputs.page_table.shape[1]] = inputs.page_table  # type: ignore[attr-defined]
        return [inputs.query_start_R1, inputs.kv_len_R, inputs.slots_R, table, loc]  # type: ignore[attr-defined]

    static = [tensor.clone() for tensor in padded(everything[0])]
    shape = (most_pages, 64, 8, 128)
    fixed = AttentionInputs(
        *static,
        page_size=64,
        max_query=tokens,
        max_kv=5000,
        k_caches=[torch.randn(shape, dtype=dtype, device="cuda")],
        v_caches=[torch.randn(shape, dtype=dtype, device="cuda")],
    )
    q = torch.randn(tokens, 32, 128, dtype=dtype, device="cuda")
    k, v = (torch.randn(tokens, 8, 128, dtype=dtype, device="cuda") for _ in range(2))
    runner = TritonAttention(torch.device("cuda"))

    def step() -> torch.Tensor:
        runner.prepare(fixed)
        runner.forward(spec, q, k, v)
        return runner.forward(spec, q, k, v)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for inputs in [*everything, everything[0]]:
        for target, source in zip(static, padded(inputs), strict=True):
            target.copy_(source)
        out.fill_(float("nan"))
        graph.replay()
        close(out, attention_reference.forward(spec, fixed, q, k, v), dtype)


def test_nothing_waits_for_the_device() -> None:
    bed = Bed(torch.device("cuda"), True, random.Random(6))
    spec = layer_of(32, 8, 128)
    inputs = attention_inputs(bed, [(1, 100), (3000, 0), (200, 300)], spec, 16, torch.bfloat16, pad_rows=0)
    q = bed.normal(inputs.num_tokens, 32, 128, dtype=torch.bfloat16)
    kv = bed.normal(inputs.num_tokens, 8, 128, dtype=torch.bfloat16)
    runner = TritonAttention(torch.device("cuda"))
    logits = bed.normal(8, 1000)
    ones = torch.ones(8, device="cuda")
    ids = torch.arange(8, device="cuda")
    x = bed.normal(9, 256, dtype=torch.bfloat16)
    gate_up, down = bed.normal(16, 256, 256, dtype=torch.bfloat16), bed.normal(16, 256, 128, dtype=torch.bfloat16)

    def everything() -> torch.Tensor:
        runner.prepare(inputs)
        out = runner.forward(spec, q, kv, kv)
        sampling.sample(logits, ones, ids, ones * 0.5, ones * 0.0, ids, ids)
        weights, chosen = moe.topk_softmax(bed.normal(9, 16), 4, True)
        moe.fused_experts(x, gate_up, down, weights, chosen)
        return out

    everything()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    close(got, attention_reference.forward(spec, inputs, q, kv, kv), torch.bfloat16)
