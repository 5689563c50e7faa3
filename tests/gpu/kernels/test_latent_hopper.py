"""Latents of decode rows on Hopper against float32, by clusters of every size."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from triton_cases.bed import Bed, pairwise
from triton_cases.layers import attention_inputs, layer_of

from bough.kernels.attention import latent_hopper, reference
from bough.kernels.attention.inputs import AttentionInputs, AttentionSpec
from bough.kernels.attention.plan import Kind, plan_rows
from bough.kernels.cuda_source import cached_cubin

pytestmark = pytest.mark.usefixtures("hopper")
HEADS = (16, 5)
CONTEXTS = {
    "one": [0],
    "edges": [1, 30, 31, 32, 63, 64, 65],
    "long": [5000, 3, 700],
    "some": [random.Random(row).randrange(0, 900) for row in range(40)],
    "even": [299] * 200,
    "most": [random.Random(row).randrange(0, 400) for row in range(latent_hopper.MOST_ROWS - 3)],
}


def _made(contexts: list[int], heads: int, page_size: int) -> tuple[AttentionSpec, AttentionInputs, torch.Tensor]:
    """A layer, its inputs with padding, and queries. What follows a row's last token in its page is NaN."""
    bed = Bed(torch.device("cuda"), True, random.Random(7))
    spec = layer_of(heads, 1, 576, scale=0.07, v_head_dim=512, latent=True)
    inputs = attention_inputs(bed, [(1, n) for n in contexts], spec, page_size, torch.bfloat16)
    for row, context in enumerate(contexts):
        used = context % page_size + 1
        page = int(inputs.page_table[int(inputs.slots_R[row]), context // page_size])
        inputs.k_caches[0][page, used:] = float("nan")
    return spec, inputs, torch.randn(inputs.num_tokens, heads, 576, device="cuda").bfloat16()


def _assert_close(out: torch.Tensor, expected: torch.Tensor, real: int) -> None:
    error = (out[:real].double() - expected[:real].double()).norm() / expected[:real].double().norm()
    assert error < 6e-3, float(error)
    assert out[real:].count_nonzero() == 0


@pytest.fixture(scope="module")
def _compiled() -> None:
    """All at once: one after the other takes seconds each."""
    wanted = [latent_hopper.defines(heads, cluster) for heads in HEADS for cluster in latent_hopper.SHAPES]
    with ThreadPoolExecutor(len(wanted)) as pool:
        list(pool.map(lambda each: cached_cubin(latent_hopper.SOURCE, "sm_90a", each), wanted))


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize(
    ("cluster", "name", "heads", "page_size"),
    pairwise(list(latent_hopper.SHAPES), list(CONTEXTS), HEADS, [64, 128]),
)
def test_clusters_of_every_size_agree_with_float32(cluster: int, name: str, heads: int, page_size: int) -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    contexts = CONTEXTS[name]
    spec, inputs, q = _made(contexts, heads, page_size)
    assert latent_hopper.suits(spec, inputs, q)
    expected = reference.paged_attention(q, inputs, spec)
    plan = plan_rows(inputs, Kind(heads, 1, None, True), latent_hopper.SHAPES[cluster], most_query=1)
    room = latent_hopper.LatentRoom.make(plan, q.device)
    outs = [torch.full((len(q), heads, 512), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    for out in outs:
        latent_hopper.attend(spec, inputs, plan, room, q, out, after_plan=out is outs[0])
    _assert_close(outs[0], expected, len(contexts))
    assert torch.equal(outs[0], outs[1])
    assert room.counters.count_nonzero() == 0


def test_one_graph_serves_any_lengths() -> None:
    rows, most, page_size = 6, 3000, 64
    bed = Bed(torch.device("cuda"), True, random.Random(9))
    spec = layer_of(16, 1, 576, scale=0.07, v_head_dim=512, latent=True)
    inputs = attention_inputs(bed, [(1, most - 1)] * rows, spec, page_size, torch.bfloat16, pad_rows=0, pad_tokens=0)
    inputs = replace(inputs, host=None)
    q = torch.randn(rows, 16, 576, device="cuda").bfloat16()
    out = torch.empty(rows, 16, 512, device="cuda", dtype=torch.bfloat16)
    shape = latent_hopper.shape_for(inputs)
    room = latent_hopper.LatentRoom.make(plan_rows(inputs, Kind(16, 1, None, True), shape, most_query=1), q.device)

    def step() -> None:
        plan = plan_rows(inputs, Kind(16, 1, None, True), shape, most_query=1)
        latent_hopper.attend(spec, inputs, plan, room, q, out, after_plan=True)
        latent_hopper.attend(spec, inputs, plan, room, q, out, after_plan=False)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(4):
        draw = random.Random(seed)
        real = draw.choice((rows, draw.randrange(1, rows + 1)))
        lengths = [draw.choice((1, draw.randrange(1, 400), draw.randrange(1, most + 1))) for _ in range(rows)]
        inputs.kv_len_R.copy_(torch.tensor([n if row < real else 0 for row, n in enumerate(lengths)]))
        inputs.query_start_R1.copy_(torch.tensor([min(row, real) for row in range(rows + 1)]))
        out.fill_(float("nan"))
        graph.replay()
        _assert_close(out, reference.paged_attention(q, inputs, spec), real)
