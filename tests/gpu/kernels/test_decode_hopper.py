"""Decode rows on Hopper: the kernel that rotates, writes and attends gives what the portable kernels give, and writes it."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from triton_cases.bed import Bed, pairwise
from triton_cases.layers import attention_inputs, layer_of

from bough.kernels.attention import decode_hopper
from bough.kernels.attention.decode_hopper import Layer
from bough.kernels.attention.inputs import AttentionInputs
from bough.kernels.attention.triton_backend import TritonAttention
from bough.kernels.cuda_source import cached_cubin

pytestmark = pytest.mark.usefixtures("hopper")

PAGES = (64, 128, 256)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CONTEXTS = [
    [0],
    [1, 62, 63, 64, 65, 127, 128],
    [300, 5, 1000, 0, 383, 384, 385],
    [5000],
    [20000, 3, 64],
    [1023] * 40,
    [random.Random(row).randrange(0, 900) for row in range(200)],
    [random.Random(row).randrange(0, 300) for row in range(600)],
]


@pytest.fixture(params=["together", "alone"])
def suited(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[bool]:
    """What `suits` said, call by call; the portable kernels serve while the list has `PORTABLE`. Warps attend to rows
    together, or each to its own, whatever is faster."""
    said: list[bool] = []
    real = decode_hopper.suits

    def watch(*args: object) -> bool:
        said.append(real(*args))  # type: ignore[arg-type]
        return said[-1] and PORTABLE not in said

    monkeypatch.setattr(decode_hopper, "suits", watch)
    per_sm = 1 << 20 if request.param == "together" else 0
    wanted = {"few_per_sm": per_sm, "few_per_sm_of_few_heads": per_sm}
    forms = {dtype: form._replace(**wanted) for dtype, form in decode_hopper.FORMS.items()}
    monkeypatch.setattr(decode_hopper, "FORMS", forms)
    monkeypatch.setattr(decode_hopper, "NARROW", decode_hopper.NARROW._replace(**wanted))
    monkeypatch.setattr(decode_hopper, "is_slower", lambda *_: False)
    return said


PORTABLE = "portable"


def _tensors(inputs: AttentionInputs, heads: int, kv_heads: int, norm: bool, width: int = 128) -> dict[str, object]:
    tokens = inputs.num_tokens
    product = torch.randn(tokens, (heads + 2 * kv_heads) * width, device="cuda").bfloat16()
    q, k, v = product.split([heads * width, kv_heads * width, kv_heads * width], 1)
    positions = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    lengths = inputs.kv_len_R[inputs.kv_len_R > 0].long()
    positions[: len(lengths)] = lengths - 1
    angles = torch.rand(32768, width // 2, device="cuda") * 6.28
    weights = [torch.randn(width, device="cuda").bfloat16() if norm else None for _ in range(2)]
    return {
        "q_TNH": q.unflatten(1, (heads, width)),
        "k_TKH": k.unflatten(1, (kv_heads, width)),
        "v_TKH": v.unflatten(1, (kv_heads, width)),
        "positions_T": positions,
        "cos_sin_PR": torch.cat([angles.cos(), angles.sin()], 1),
        "q_norm": weights[0],
        "k_norm": weights[1],
        "eps": 1e-6,
    }


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (28, 4), (16, 2), (8, 8), (8, 1), (16, 16)])
@pytest.mark.parametrize("contexts", CONTEXTS, ids=lambda rows: f"{len(rows)} rows to {max(rows)}")
def test_gives_what_the_portable_kernels_give(
    contexts: list[int], heads: int, kv_heads: int, norm: bool, suited: list[object]
) -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    bed = Bed(torch.device("cuda"), True, random.Random(7))
    spec = layer_of(heads, kv_heads, 128)
    page_size = PAGES[len(contexts) % len(PAGES)]
    inputs = attention_inputs(bed, [(1, n) for n in contexts], spec, page_size, torch.bfloat16)
    inputs.k_caches[0].view(-1)[::977] = float("nan")  # what a free page may hold
    inputs.v_caches[0].view(-1)[::977] = float("nan")
    for row, length in enumerate(contexts):  # but nothing that a row attends to
        slot = int(inputs.slots_R[row])
        for at in range(0, length, page_size):
            page = int(inputs.page_table[slot, at // page_size])
            for cache in (*inputs.k_caches, *inputs.v_caches):
                cache[page, : min(page_size, length - at)].nan_to_num_(0.5)
    given = _tensors(inputs, heads, kv_heads, norm)
    caches = ([each.clone() for each in inputs.k_caches], [each.clone() for each in inputs.v_caches])
    other = replace(inputs, k_caches=caches[0], v_caches=caches[1])

    backend = TritonAttention(torch.device("cuda"))
    backend.prepare(inputs)
    out = backend.forward_rope(spec, **given)
    assert suited == [True]
    again = backend.forward_rope(spec, **given)
    assert torch.equal(out, again)
    suited.append(PORTABLE)
    backend.prepare(other)
    expected = backend.forward_rope(spec, **given)
    real = len(contexts)
    assert out.isfinite().all()
    error = (out[:real].double() - expected[:real].double()).norm() / expected[:real].double().norm()
    assert error < 6e-3, float(error)
    assert out[real:].count_nonzero() == 0
    for mine, theirs in zip((*inputs.k_caches, *inputs.v_caches), (*other.k_caches, *other.v_caches), strict=True):
        close = torch.isclose(mine.float(), theirs.float(), rtol=1e-2, atol=1e-2, equal_nan=True)
        assert close.all(), "the caches differ"


LAYERS = {
    "gpt-oss": Layer(torch.bfloat16, 64, 8, 8, sinks=True),
    "gpt-oss, window": Layer(torch.bfloat16, 64, 8, 8, sinks=True, windowed=True),
    "narrow": Layer(torch.bfloat16, 64, 7, 2, norm=True),
    "wide, window": Layer(torch.bfloat16, 128, 4, 2, norm=True, windowed=True),
}


@pytest.fixture(scope="module")
def _compiled() -> None:
    """All at once: one after the other takes seconds each."""
    with ThreadPoolExecutor(len(LAYERS)) as pool:
        list(
            pool.map(
                lambda each: cached_cubin(decode_hopper.SOURCE, "sm_90a", decode_hopper.defines(each, each.form)),
                LAYERS.values(),
            )
        )


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize(
    ("number", "name", "most_seen"), pairwise(range(1, len(CONTEXTS)), list(LAYERS), [1, 100, 128, 700])
)
def test_windows_sinks_and_narrow_heads(number: int, name: str, most_seen: int, suited: list[object]) -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    bed = Bed(torch.device("cuda"), True, random.Random(7))
    contexts, layer = CONTEXTS[number], LAYERS[name]
    heads, window = (layer.group * layer.kv_heads, layer.kv_heads), most_seen if layer.windowed else None
    sinks = 2 * bed.normal(heads[0]) if layer.sinks else None
    spec = layer_of(*heads, layer.width, window=window, sinks=sinks)
    page_size = PAGES[number % len(PAGES)]
    inputs = attention_inputs(bed, [(1, n) for n in contexts], spec, page_size, torch.bfloat16)
    caches = ([each.clone() for each in inputs.k_caches], [each.clone() for each in inputs.v_caches])
    other = replace(inputs, k_caches=caches[0], v_caches=caches[1])
    for cache in (*inputs.k_caches, *inputs.v_caches):  # NaN wherever a row does not attend
        seen = torch.zeros(cache.shape[:2], dtype=torch.bool)
        for row, context in enumerate(contexts):
            places = torch.arange(0 if window is None else max(0, context + 1 - window), context + 1)
            pages = inputs.page_table[int(inputs.slots_R[row])].cpu()[places // page_size].long()
            seen[pages, places % page_size] = True
        cache[~seen.to(cache.device)] = float("nan")
    given = _tensors(inputs, *heads, layer.norm, layer.width)

    backend = TritonAttention(torch.device("cuda"))
    backend.prepare(inputs)
    out = backend.forward_rope(spec, **given)
    assert suited == [True]
    assert torch.equal(out, backend.forward_rope(spec, **given))
    suited.append(PORTABLE)
    backend.prepare(other)
    expected = backend.forward_rope(spec, **given)
    real = len(contexts)
    error = (out[:real].double() - expected[:real].double()).norm() / expected[:real].double().norm()
    assert error < 6e-3, float(error)
    assert out[real:].count_nonzero() == 0
    at = inputs.loc_T[:real]
    for mine, theirs in zip((*inputs.k_caches, *inputs.v_caches), (*other.k_caches, *other.v_caches), strict=True):
        close = torch.isclose(mine.flatten(0, 1)[at].float(), theirs.flatten(0, 1)[at].float(), rtol=1e-2, atol=1e-2)
        assert close.all(), "the newest tokens differ"


@pytest.mark.parametrize(("rows", "most"), [(24, 3000), (160, 700)], ids=["few", "more than warps at once"])
def test_one_graph_serves_any_lengths(rows: int, most: int, suited: list[object]) -> None:
    bed = Bed(torch.device("cuda"), True, random.Random(9))
    spec = layer_of(32, 8, 128)
    page_size = PAGES[0]
    longest = attention_inputs(bed, [(1, most)] * rows, spec, page_size, torch.bfloat16, pad_rows=0, pad_tokens=0)
    fixed = replace(longest, host=None)
    given = _tensors(fixed, 32, 8, False)
    backend = TritonAttention(torch.device("cuda"))

    def step() -> torch.Tensor:
        backend.prepare(fixed)
        backend.forward_rope(spec, **given)
        return backend.forward_rope(spec, **given)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    assert all(suited)
    for seed in range(6):
        draw = random.Random(seed)
        lengths = [draw.choice((1, draw.randrange(1, 400), draw.randrange(1, most + 1))) for _ in range(rows)]
        real = draw.choice((rows, draw.randrange(1, rows + 1)))
        positions = [lengths[row] - 1 if row < real else 0 for row in range(rows)]
        slots, table = fixed.slots_R.tolist(), fixed.page_table.tolist()
        places = [
            table[slots[row]][at // page_size] * page_size + at % page_size if row < real else -1
            for row, at in enumerate(positions)
        ]
        fixed.kv_len_R.copy_(torch.tensor([n if row < real else 0 for row, n in enumerate(lengths)]))
        fixed.query_start_R1.copy_(torch.tensor([min(row, real) for row in range(rows + 1)]))
        fixed.loc_T.copy_(torch.tensor(places))
        given["positions_T"].copy_(torch.tensor(positions))  # type: ignore[attr-defined]
        out.fill_(float("nan"))
        graph.replay()
        got = out.clone()
        suited.append(PORTABLE)
        backend.prepare(fixed)
        expected = backend.forward_rope(spec, **given)
        suited.remove(PORTABLE)
        error = (got[:real].double() - expected[:real].double()).norm() / expected[:real].double().norm()
        assert error < 6e-3, float(error)
        assert got[real:].count_nonzero() == 0


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (28, 4), (8, 1), (16, 16)])
@pytest.mark.parametrize(("dtype", "scales"), [(E4M3, (1.0, 1.0)), (E4M3, (0.04, 0.6)), (E5M2, (1.0, 1.0))])
@pytest.mark.parametrize("contexts", CONTEXTS[1:], ids=lambda rows: f"{len(rows)} rows to {max(rows)}")
def test_reads_and_writes_eight_bits(
    contexts: list[int],
    dtype: torch.dtype,
    scales: tuple[float, float],
    heads: int,
    kv_heads: int,
    norm: bool,
    suited: list[object],
) -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    bed = Bed(torch.device("cuda"), True, random.Random(7))
    spec = layer_of(heads, kv_heads, 128)
    page_size = PAGES[len(contexts) % len(PAGES)]
    inputs = attention_inputs(bed, [(1, n) for n in contexts], spec, page_size, dtype)
    inputs = replace(inputs, k_scales=[scales[0]], v_scales=[scales[1]])
    for cache in (*inputs.k_caches, *inputs.v_caches):  # no row has page 0
        cache[0].view(torch.uint8).fill_(0x7F)
    given = _tensors(inputs, heads, kv_heads, norm)
    caches = ([each.clone() for each in inputs.k_caches], [each.clone() for each in inputs.v_caches])
    other = replace(inputs, k_caches=caches[0], v_caches=caches[1])

    backend = TritonAttention(torch.device("cuda"))
    backend.prepare(inputs)
    out = backend.forward_rope(spec, **given)
    assert suited == [True]
    assert torch.equal(out, backend.forward_rope(spec, **given))
    suited.append(PORTABLE)
    backend.prepare(other)
    expected = backend.forward_rope(spec, **given)
    real = len(contexts)
    error = (out[:real].double() - expected[:real].double()).norm() / expected[:real].double().norm()
    assert error < 6e-3, float(error)
    assert out[real:].count_nonzero() == 0
    step = 2.0**-3 if dtype == E4M3 else 2.0**-2
    for mine, theirs in zip((*inputs.k_caches, *inputs.v_caches), (*other.k_caches, *other.v_caches), strict=True):
        # A key that is turned by another order of sums may be rounded to the next number, seldom.
        near = torch.isclose(mine.float(), theirs.float(), rtol=1.01 * step, atol=2.0**-9, equal_nan=True)
        assert near.all(), "the caches differ"
        differ = (mine.view(torch.uint8) != theirs.view(torch.uint8)).sum()
        assert differ <= max(2, 0.01 * real * kv_heads * 128)
