# mypy: disable-error-code="no-untyped-call"
"""Times each GPU kernel against its reference and against the floor its bytes or FLOPs set.

    python -m bough.bench.kernels [op ...] [--json PATH]

Every case runs from a CUDA graph, over enough distinct buffers that L2 holds none of them. An operation that fails prints
its error and the others go on. `tune` (not run by default) measures the linear configurations and saves the table.
"""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.bench.kernel_inputs import LLAMA_8B, decode_inputs, equal_spans, extend_inputs, layer_of, share_spans
from bough.config.command_line import CommandParser
from bough.kernels.activation import reference as activation_reference, silu_mul
from bough.kernels.attention import triton_backend
from bough.kernels.attention.fresh import attend_fresh
from bough.kernels.attention.plan import Shape
from bough.kernels.linear import linear, linear_after_norm, linear_silu_mul
from bough.kernels.linear.table import TOKEN_BUCKETS, early
from bough.kernels.linear.tuning import LinearShape, candidates, measure, time_us, tune
from bough.kernels.moe import Routing, fused_experts, routed_experts, topk_softmax
from bough.kernels.norm import add_rms_norm, reference as norm_reference
from bough.kernels.rotary import reference as rotary_reference, rope_and_write
from bough.kernels.sampling import argmax, reference as sampling_reference, sample
from bough.kernels.segment_attention import reference as segment_reference, triton as segments
from bough.kernels.step_start import SlotState, reference as start_reference, start_step

BANDWIDTH = 4.2e12
"""Bytes per second that an H200 reads; minimum times are computed with it."""
MATRIX_RATE = 8.0e14
_COLD = 192 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case. `floor_us`: what its bytes or FLOPs take at the device's ceiling."""

    op: str
    case: str
    us: float
    floor_us: float
    reference_us: float | None = None
    note: str = ""

    def line(self) -> str:
        reference = f"{self.reference_us:10.1f}" if self.reference_us else " " * 10
        share = 100 * self.floor_us / self.us
        return (
            f"{self.op:10s} {self.case:44s} {self.us:10.1f} {reference} {self.floor_us:9.1f} {share:5.0f}%  {self.note}"
        )


Report = Iterator[Row]


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=cuda()) * scale


def cold(num_bytes: int, most: int = 32) -> range:
    """As many turns as it takes to read more than L2 holds."""
    return range(max(2, min(most, math.ceil(_COLD / num_bytes))))


def over(function: Callable[..., object], sets: Sequence[tuple[object, ...]]) -> float:
    return time_us([partial(function, *each) for each in sets])


def bench_norm() -> Report:
    weight = random(4096)
    for tokens in (1, 64, 256, 8192):
        num_bytes = tokens * 4096 * 2 * 4
        sets = [(random(tokens, 4096), random(tokens, 4096), weight, 1e-5) for _ in cold(num_bytes)]
        took, reference = over(add_rms_norm, sets), over(norm_reference.add_rms_norm, sets)
        yield Row("norm", f"add_rms_norm {tokens} x 4096", took, num_bytes / BANDWIDTH * 1e6, reference)


def bench_activation() -> Report:
    for tokens in (64, 256, 8192):
        num_bytes = tokens * 14336 * 2 * 3
        sets = [(random(tokens, 28672),) for _ in cold(num_bytes)]
        took, reference = over(silu_mul, sets), over(activation_reference.silu_mul, sets)
        yield Row("activation", f"silu_mul {tokens} x 14336", took, num_bytes / BANDWIDTH * 1e6, reference)


def bench_rotary() -> Report:
    cos_sin = torch.randn(16384, 128, device=cuda())
    for tokens in (1, 64, 256, 8192):
        caches = [random(tokens // 16 + 1, 16, 8, 128) for _ in range(2)]
        loc = torch.randperm(tokens, device=cuda())
        positions = torch.randint(0, 16384, (tokens,), device=cuda())
        num_bytes = tokens * (48 + 48 + 8) * 128 * 2
        sets = []
        for _ in cold(num_bytes):
            q, k, v = random(tokens, 48, 128).split([32, 8, 8], 1)
            sets.append((q, k, v, positions, cos_sin, *caches, loc))
        took = over(rope_and_write, sets)
        q, k, v, *_ = sets[0]
        reference = over(rotary_reference.apply_rope, [(q, k, positions, cos_sin)])
        yield Row("rotary", f"rope_and_write {tokens}", took, num_bytes / BANDWIDTH * 1e6, reference)


def _linear_shapes() -> dict[str, LinearShape]:
    return {
        "qkv": LinearShape("linear", 6144, 4096),
        "o": LinearShape("linear", 4096, 4096),
        "gate_up": LinearShape("silu_mul", 28672, 4096),
        "down": LinearShape("linear", 4096, 14336),
        "head": LinearShape("linear", 128256, 4096),
    }


def bench_linear() -> Report:
    for tokens in (1, 16, 64):
        step, library_step, floor_step = 0.0, 0.0, 0.0
        for name, shape in _linear_shapes().items():
            rule = next(candidates(shape.operation, tokens, hopper=True))
            found = measure(shape, tokens, cuda(), [rule, replace(rule, tma=False), early(shape.operation)])
            floor = shape.rows * shape.depth * 2 / BANDWIDTH * 1e6
            times = 1 if name == "head" else 32
            step, library_step = step + times * found.all_us[rule], library_step + times * found.library_us
            floor_step += times * floor
            others = " ".join(f"{us:.1f}" for us in found.all_us.values())
            yield Row(
                "linear",
                f"{name} T={tokens}",
                found.all_us[rule],
                floor,
                found.library_us,
                f"tma, not, early: {others}",
            )
        yield Row("linear", f"step of Llama-3.1-8B T={tokens}", step, floor_step, library_step)
    weights = [random(28672, 4096, scale=0.02) for _ in range(2)]
    for tokens in (128, 256, 512, 2048, 8192):
        x = random(tokens, 4096)
        took = time_us([partial(linear_silu_mul, x, weight) for weight in weights])
        library = time_us([partial(_library_silu_mul, x, weight) for weight in weights])
        floor = max(28672 * 4096 * 2 / BANDWIDTH, 2 * tokens * 28672 * 4096 / MATRIX_RATE) * 1e6
        yield Row("linear", f"gate_up and activation T={tokens}", took, floor, library)

    norm, weights = random(4096), [random(6144, 4096, scale=0.02) for _ in range(8)]
    for tokens in (1, 2):
        sets = [(random(tokens, 4096), random(tokens, 4096), norm, 1e-5, weight) for weight in weights]
        took, apart = over(linear_after_norm, sets), over(_norm_and_linear, sets)
        floor = 6144 * 4096 * 2 / BANDWIDTH * 1e6
        yield Row("linear", f"norm and qkv T={tokens}", took, floor, apart, "two launches as the reference")


def _norm_and_linear(x: Tensor, residual: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    return linear(add_rms_norm(x, residual, norm, eps)[0], weight)


def _library_silu_mul(x: Tensor, weight: Tensor) -> Tensor:
    return silu_mul(F.linear(x, weight))


def bench_tune() -> Report:
    cases = [(shape, bucket) for bucket in TOKEN_BUCKETS for shape in _linear_shapes().values()]
    for found in chain.from_iterable(tune([shape], cuda(), buckets=(b,), again=True) for shape, b in cases):
        floor = found.shape.rows * found.shape.depth * 2 / BANDWIDTH * 1e6
        case = f"{found.shape.operation} {found.shape.rows}x{found.shape.depth} T={found.tokens}"
        ranked = sorted(found.all_us.items(), key=lambda item: item[1])[:4]
        note = " | ".join(f"{us:.1f} {_short(asdict(config))}" for config, us in ranked)
        yield Row("tune", case, found.best_us, floor, found.library_us, note)


def _short(config: dict[str, int | bool]) -> str:
    return ",".join(str(int(value)) for value in config.values())


DECODES = ("FEW_DECODE", "DECODE", "MANY_DECODE")
DECODE_SHAPES = (
    Shape(16, 64, 2, 2, 4),
    Shape(16, 64, 4, 3, 2),
    Shape(16, 64, 4, 3, 3),
    Shape(16, 64, 4, 2, 3),
    Shape(16, 64, 4, 4, 2),
    Shape(16, 32, 4, 4, 3),
    Shape(16, 32, 2, 4, 4),
    Shape(16, 128, 4, 3, 1),
    Shape(16, 128, 8, 2, 2),
)


def bench_decode() -> Report:
    for page_size in (64, 16):
        for batch, low, high in (
            (1, 128, 400),
            (8, 128, 400),
            (64, 128, 400),
            (256, 128, 400),
            (1, 8192, 8192),
            (16, 8192, 8192),
        ):
            setup = decode_inputs(batch, low, high, page_size, LLAMA_8B, cuda(), copies=8 if batch < 16 else 1)
            timed: dict[Shape, float] = {}
            for shape in DECODE_SHAPES if batch in (1, 256) else DECODE_SHAPES[:3]:
                timed[shape] = _with_shape(DECODES, shape, setup.layers)
            best = min(timed, key=lambda shape: timed[shape])
            note = " ".join(f"{_short(asdict(shape))}:{us:.1f}" for shape, us in timed.items())
            case = f"decode {batch} x {low}-{high} page {page_size}"
            floor = setup.kv_bytes / BANDWIDTH * 1e6
            yield Row("decode", case, timed[best], floor, None, note)
            own, portable = (time_us(setup.whole_layers(hopper=hopper)) for hopper in (True, False))
            yield Row("decode", f"{case}, with rotation", own, floor, portable, "portable kernels as the reference")


def _with_shape(names: Sequence[str], shape: Shape, layers: Callable[[], list[Callable[[], object]]]) -> float:
    """Times a step with some of the backend's shapes replaced."""
    before = {name: vars(triton_backend)[name] for name in names}
    for name in names:
        setattr(triton_backend, name, shape)
    try:
        return time_us(layers())
    finally:
        for name in names:
            setattr(triton_backend, name, before[name])


PREFILL_SHAPES = (
    Shape(128, 64, 8, 3, 1),
    Shape(128, 64, 8, 2, 1),
    Shape(128, 128, 8, 2, 1),
    Shape(64, 64, 4, 3, 2),
    Shape(128, 64, 4, 3, 1),
)


def bench_prefill() -> Report:
    cases = (
        ("1 x 2048", [(2048, 0)]),
        ("1 x 8192", [(8192, 0)]),
        ("8 x 1024", [(1024, 0)] * 8),
        ("2048 after 6144", [(2048, 6144)]),
        ("64 x 128 after 2048", [(128, 2048)] * 64),
    )
    for page_size in (64, 16):
        for name, rows in cases:
            setup = extend_inputs(rows, page_size, LLAMA_8B, cuda())
            timed = {shape: _with_shape(["PREFILL"], shape, setup.layers) for shape in PREFILL_SHAPES}
            best = min(timed, key=lambda shape: timed[shape])
            floor = setup.flops / MATRIX_RATE * 1e6
            note = " ".join(f"{_short(asdict(shape))}:{us:.0f}" for shape, us in timed.items())
            rate = f"{setup.flops / timed[best] / 1e6:.0f} TFLOP/s; "
            yield Row("prefill", f"{name} page {page_size}", timed[best], floor, None, rate + note)
    for length in (2048, 8192):
        q, k, v = random(length, 32, 128), random(length, 8, 128), random(length, 8, 128)
        took = time_us([partial(attend_fresh, q, k, v, [(0, length)], 0.09, torch.empty_like(q))] * 2)
        flops = 2 * length * length * 32 * 128
        yield Row(
            "prefill", f"fresh {length}", took, flops / MATRIX_RATE * 1e6, None, f"{flops / took / 1e6:.0f} TFLOP/s"
        )


SEGMENT_TILINGS = (
    segments.SHORT,
    segments.LONG,
    segments.SegmentTiling(128, 64, 4),
    segments.SegmentTiling(128, 128, 8),
    segments.SegmentTiling(64, 128, 4),
)


def bench_segments() -> Report:
    """Towers' attention: an image of 6,256 patches whole and in windows, and eight tiles of 1,024."""
    for head_dim in (80, 72, 64, 128):
        for name, lengths in (("6256", [6256]), ("windows", [64] * 88 + [32] * 19 + [16]), ("8 x 1024", [1024] * 8)):
            q, k, v = random(sum(lengths), 48, head_dim).split(16, 1)
            timed = {
                tiling: time_us([partial(segments.attend, q, k, v, tuple(lengths), 0.1, tiling)] * 2)
                for tiling in (SEGMENT_TILINGS if head_dim == 80 else SEGMENT_TILINGS[:2])
            }
            library = time_us([partial(segment_reference.attend_segments, q, k, v, lengths, 0.1)] * 2)
            took = timed[segments.tiling_for(max(lengths))]
            flops = 4 * 16 * head_dim * sum(length**2 for length in lengths)
            floor = max(flops / MATRIX_RATE, 4 * q.numel() * 2 / BANDWIDTH) * 1e6
            note = " ".join(f"{_short(asdict(tiling))}:{us:.0f}" for tiling, us in timed.items())
            yield Row(
                "segments", f"{name} of {head_dim}", took, floor, library, f"{flops / took / 1e6:.0f} TFLOP/s; {note}"
            )


SPAN_SHAPES = (Shape(64, 64, 4, 3, 2), Shape(64, 64, 4, 2, 3), Shape(128, 64, 8, 3, 1), Shape(32, 64, 4, 3, 2))
SPAN_CASES: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = (
    (4, ((2, 1024),)),
    (16, ((8, 1024),)),
    (16, ((4, 4096),)),
    (64, ((1, 512),)),
    (64, ((32, 1024),)),
    (128, ((1, 2048), (32, 1024))),
    (256, ((1, 960),)),
    (256, ((16, 1856),)),
    (256, ((1, 960), (16, 896))),
    (256, ((1, 960), (16, 896), (64, 256))),
    (256, ((128, 1024),)),
    (512, ((8, 2048),)),
)
"""Rows, and (spans, tokens of each) by level."""


def bench_shared() -> Report:
    """Rotation, KV write and attention of decode rows that share spans, beside the same rows read one by one and what
    `span_costs` says both take: its constants come from here."""
    for spec in (LLAMA_8B, layer_of(32, 4, 128), layer_of(32, 32, 128)):
        for rows, levels in SPAN_CASES if spec is LLAMA_8B else SPAN_CASES[1:8:3]:
            spans = equal_spans(levels, rows)
            shared_tokens = spans[-1][2]
            setup = decode_inputs(rows, shared_tokens + 64, shared_tokens + 192, 64, spec, cuda(), copies=2)
            apart = time_us(setup.whole_layers(hopper=True))
            share_spans(setup.inputs, spans)
            costs = triton_backend.span_costs(spec, 2)
            saved = rows * shared_tokens * costs.per_row_token(1) - costs.fixed_ns
            for _, first, last, members in spans:
                count = len(members)
                saved -= (last - first) * costs.per_span_token(count) + costs.per_span(count)
            token_bytes = spec.num_kv_heads * spec.head_dim * 4
            read = setup.kv_bytes - token_bytes * (
                rows * shared_tokens - sum(last - first for _, first, last, _ in spans)
            )
            shapes = SPAN_SHAPES if spec is LLAMA_8B else SPAN_SHAPES[:1]
            timed = {
                shape: _with_shape(["SHARED"], shape, partial(setup.whole_layers, hopper=True)) for shape in shapes
            }
            note = " ".join(f"{_short(asdict(shape))}:{us:.1f}" for shape, us in timed.items())
            case = f"{rows} rows, {spec.num_kv_heads} KV heads, " + " ".join(f"{n} x {t}" for n, t in levels)
            took = timed[SPAN_SHAPES[0]]
            expected = f"saves {apart - took:.1f} us, expected {saved / 1e3:.1f}; "
            yield Row("shared", case, took, read / BANDWIDTH * 1e6, apart, expected + note)


FILTERS = (("plain", -1, 1.0, 0.0), ("top_p 0.95", -1, 0.95, 0.0), ("top_k 50", 50, 1.0, 0.0), ("all", 50, 0.9, 0.02))


def bench_sampling() -> Report:
    for rows in (1, 64, 256):
        for name, scale in (("flat", 1.0), ("peaked", 6.0)):
            sets = [random(rows, 128256, scale=scale) for _ in cold(rows * 128256 * 2, most=8)]
            full = partial(torch.full, (rows,), device=cuda())
            seeds = torch.arange(rows, device=cuda())
            floor = rows * 128256 * 2 / BANDWIDTH * 1e6
            if name == "flat":
                plain = [(logits,) for logits in sets]
                library = over(torch.Tensor.argmax, [(*logits, -1) for logits in plain])
                yield Row("sampling", f"argmax {rows}", over(argmax, plain), floor, library)
            for case, k, p, m in FILTERS:
                tail = (full(0.8), full(k), full(p), full(m), seeds, seeds)
                took = over(sample, [(logits, *tail) for logits in sets])
                reference = over(sampling_reference.sample, [(sets[0], *tail)]) if rows == 64 else None
                yield Row("sampling", f"{name} {case} {rows}", took, floor, reference)


def bench_start() -> Report:
    for rows in (1, 64, 256):
        state = SlotState.make(1024, 1024, cuda())
        places = torch.randperm(state.page_table.numel(), device=cuda())[:rows]
        slots = torch.randperm(1024, device=cuda())[:rows]
        tokens = {name: torch.zeros_like(slots) for name in ("positions_T", "loc_T", "counter_L")}
        inputs = SimpleNamespace(
            table_at_U=places,
            table_pages_U=places.to(torch.int32),
            derived=torch.full((3,), rows, dtype=torch.int32, device=cuda()),
            ids_T=torch.full_like(slots, -1),
            token_slots_T=slots,
            kv_len_R=torch.ones_like(slots, dtype=torch.int32),
            slots_R=slots.to(torch.int32),
            sample_slots_L=slots,
            **tokens,
        )
        sets = [(state, inputs, 64)] * 8
        took, reference = over(start_step, sets), over(start_reference.start_step, sets)
        yield Row("start", f"table writes, ids and places of {rows} rows", took, 0.1, reference)


def bench_moe() -> Report:
    experts, width, inner, per_token = 128, 2048, 768, 8
    gate_up, down = random(experts, 2 * inner, width, scale=0.02), random(experts, width, inner, scale=0.02)
    for tokens in (1, 8, 64, 512, 4096):
        sets, touched = [], 0
        for _ in range(4):
            weights, ids = topk_softmax(random(tokens, experts), per_token, True)
            touched = ids.unique().numel()
            sets.append((random(tokens, width), gate_up, down, weights, ids))
        read = touched * 3 * inner * width * 2 / BANDWIDTH * 1e6
        compute = tokens * per_token * 6 * inner * width / MATRIX_RATE * 1e6
        yield Row(
            "moe", f"experts T={tokens}", over(fused_experts, sets), max(read, compute), None, f"{touched} experts"
        )
    norm, router = random(width), random(experts, width, scale=width**-0.5)
    routing = Routing(norm, 1e-6, 0.0, router, per_token, True)
    lone = [(random(1, width), random(1, width), routing, gate_up, down) for _ in range(4)]
    read = per_token * 3 * inner * width * 2 / BANDWIDTH * 1e6
    yield Row("moe", "norm, router, experts T=1", over(routed_experts, lone), read)
    logits = random(64, experts)
    yield Row("moe", "topk_softmax T=64", over(topk_softmax, [(logits, per_token, True)] * 4), 0.1)


def bench_experts() -> Report:
    from bough.bench.kernel_experts import parts, prepare, ways

    prepare(cuda())
    even = [(tokens, False) for tokens in (16384, 8192, 4096, 2048, 1024, 512, 256, 128)]
    for tokens, skewed in (*even, (16384, True)):
        for timed in ways(cuda(), tokens, skewed=skewed, compare=tokens in (16384, 1024)):
            rate = f"{timed.flops / timed.us / 1e6:.0f} TFLOP/s, error {timed.error:.1e}"
            yield Row("experts", timed.case, timed.us, timed.flops / MATRIX_RATE * 1e6, None, rate)
    for timed in chain(parts(cuda(), 16384), parts(cuda(), 1024)):
        yield Row("experts", timed.case, timed.us, timed.flops / MATRIX_RATE * 1e6)


def bench_packed() -> Report:
    from bough.bench.kernel_packed import dense, experts, products

    for timed in chain(dense(cuda()), products(cuda()), experts(cuda())):
        yield Row("packed", timed.case, timed.us, timed.num_bytes / BANDWIDTH * 1e6, timed.plain_us)


def bench_lora() -> Report:
    from bough.bench.kernel_lora import layers

    for timed in layers(cuda()):
        floor = max(timed.num_bytes / BANDWIDTH, timed.flops / MATRIX_RATE) * 1e6
        yield Row("lora", timed.case, timed.us, floor)


def bench_step() -> Report:
    from bough.bench.kernel_step import decode_step

    for batch in (1, 8, 64, 256):
        for skinny, fused in ((False, False), (True, False), (True, True)):
            took, floor = decode_step(batch, cuda(), skinny=skinny, pdl=fused)
            case = f"Llama-3.1-8B decode {batch}, " + ("skinny" if skinny else "library") + (" + PDL" if fused else "")
            yield Row("step", case, took, floor)


BENCHES: dict[str, Callable[[], Report]] = {
    "norm": bench_norm,
    "activation": bench_activation,
    "rotary": bench_rotary,
    "linear": bench_linear,
    "decode": bench_decode,
    "prefill": bench_prefill,
    "segments": bench_segments,
    "shared": bench_shared,
    "sampling": bench_sampling,
    "moe": bench_moe,
    "experts": bench_experts,
    "packed": bench_packed,
    "lora": bench_lora,
    "start": bench_start,
    "step": bench_step,
    "tune": bench_tune,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("op", nargs="*", choices=[*BENCHES, []], help="default: all but tune")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: no CUDA device\n  why: these are GPU kernels\n  fix: run on a machine with one")
        return 2
    torch.manual_seed(0)
    names = options.op or [name for name in BENCHES if name != "tune"]
    print(f"{'op':10s} {'case':44s} {'us':>10s} {'reference':>10s} {'floor':>9s} {'of it':>6s}")
    rows: list[Row] = []
    failed: list[str] = []
    for name in names:
        begin = time.perf_counter()
        try:
            for row in BENCHES[name]():
                rows.append(row)
                print(row.line(), flush=True)
        except Exception:
            failed.append(name)
            print(f"{name}: failed\n{traceback.format_exc()[-1500:]}", flush=True)
        print(f"# {name} took {time.perf_counter() - begin:.1f} s", flush=True)
        torch.cuda.empty_cache()
        if options.json:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if failed:
        print("failed: " + ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
