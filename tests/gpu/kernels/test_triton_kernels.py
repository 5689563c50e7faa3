"""The Triton kernels on a GPU: the table of tests/kernels with large shapes, and what only a GPU can show."""

import random
from types import ModuleType

import pytest
import torch

PARTS = {
    "norm": 1,
    "activation": 1,
    "rotary": 2,
    "linear": 3,
    "attention": 16,
    "shared": 2,
    "tail": 1,
    "latent": 4,
    "sparse": 2,
    "moe": 3,
    "packed": 4,
    "packed_moe": 4,
}
PARTS |= {
    "rope": 2,
    "segments": 2,
    "sampling": 1,
    "masks": 1,
    "pages": 1,
    "start": 1,
    "plan": 3,
    "packed": 4,
    "packed_moe": 4,
}
"""Most of the time goes into compiling: what is compiled side by side is done sooner."""


@pytest.mark.parametrize(("op", "part"), [(op, part) for op, parts in PARTS.items() for part in range(parts)])
def test_agrees_with_its_reference(op: str, part: int, cases: ModuleType) -> None:
    seed = random.SystemRandom().randrange(2**31)
    assert cases.run(op, torch.device("cuda"), seed, part, PARTS[op]) > 0


def test_one_graph_serves_any_rows(cases: ModuleType) -> None:
    """A captured attention gives the eager result for other rows written into the same buffers."""
    backend, reference = cases.backend, cases.attention_reference
    bed = cases.Bed(torch.device("cuda"), True, random.Random(5))
    spec = cases.layer_of(32, 8, 128)
    dtype = torch.bfloat16
    mixtures = [
        [(1, n) for n in (5, 700, 64, 1, 2000, 33, 90)] + [(40, 500)],
        [(3, 10), (1, 3000), (30, 0), (1, 17)],
        [(1, 4000)],
    ]
    tokens, room = 64, 16
    everything = [cases.attention_inputs(bed, rows, spec, 64, dtype, pad_rows=room - len(rows)) for rows in mixtures]
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
    fixed = cases.AttentionInputs(
        *static,
        page_size=64,
        max_query=tokens,
        max_kv=5000,
        k_caches=[torch.randn(shape, dtype=dtype, device="cuda")],
        v_caches=[torch.randn(shape, dtype=dtype, device="cuda")],
    )
    q = torch.randn(tokens, 32, 128, dtype=dtype, device="cuda")
    k, v = (torch.randn(tokens, 8, 128, dtype=dtype, device="cuda") for _ in range(2))
    runner = backend.TritonAttention(torch.device("cuda"))

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
        cases.close(out, reference.forward(spec, fixed, q, k, v), dtype)


def test_nothing_waits_for_the_device(cases: ModuleType) -> None:
    bed = cases.Bed(torch.device("cuda"), True, random.Random(6))
    spec = cases.layer_of(32, 8, 128)
    inputs = cases.attention_inputs(bed, [(1, 100), (3000, 0), (200, 300)], spec, 16, torch.bfloat16, pad_rows=0)
    q = bed.normal(inputs.num_tokens, 32, 128, dtype=torch.bfloat16)
    kv = bed.normal(inputs.num_tokens, 8, 128, dtype=torch.bfloat16)
    runner = cases.backend.TritonAttention(torch.device("cuda"))
    logits = bed.normal(8, 1000)
    ones = torch.ones(8, device="cuda")
    ids = torch.arange(8, device="cuda")
    x = bed.normal(9, 256, dtype=torch.bfloat16)
    gate_up, down = bed.normal(16, 256, 256, dtype=torch.bfloat16), bed.normal(16, 256, 128, dtype=torch.bfloat16)

    def everything() -> torch.Tensor:
        runner.prepare(inputs)
        out = runner.forward(spec, q, kv, kv)
        cases.sampling.sample(logits, ones, ids, ones * 0.5, ones * 0.0, ids, ids)
        weights, chosen = cases.moe.topk_softmax(bed.normal(9, 16), 4, True)
        cases.moe.fused_experts(x, gate_up, down, weights, chosen)
        return out

    everything()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    cases.close(got, cases.attention_reference.forward(spec, inputs, q, kv, kv), torch.bfloat16)
