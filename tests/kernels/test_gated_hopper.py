"""The door of the Hopper gate/up kernel, without a device: how the product is cut, what is refused, what is kept on disk."""

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from bough.kernels import cuda_source
from bough.kernels.linear import gated_hopper
from bough.kernels.linear.gated_hopper import TILINGS, Tiling, best_tiling, can_serve

SHARED_BYTES_OF_A_BLOCK = 227 * 1024
PAIRS = 66  # of multiprocessors of an H200
shared = st.builds(
    Tiling, st.sampled_from([96, 112, 128]), st.booleans(), st.integers(1, 32), st.integers(0, 2), st.integers(3, 4)
)
high = st.builds(
    Tiling,
    st.sampled_from([80, 88, 96, 104]),
    st.booleans(),
    st.integers(1, 32),
    st.integers(0, 2),
    st.just(3),
    st.just(2),
)
by_turns = st.builds(
    Tiling,
    st.sampled_from([80, 88]),
    st.booleans(),
    st.integers(1, 32),
    st.just(1),
    st.integers(3, 5),
    st.just(2),
    st.just(2),
)
tilings = st.one_of(shared, high, by_turns)


@given(tilings, st.integers(1, 20000), st.integers(1, 30000))
def test_tiles_cover_and_none_is_idle(tiling: Tiling, tokens: int, features: int) -> None:
    t_tiles, f_tiles = tiling.tiles(tokens, features)
    tall = 256 if tiling.parts == 2 and tiling.turns == 1 else 128
    high, wide = (2 * tall, tiling.features) if tiling.pair_along_tokens else (tall, 2 * tiling.features)
    assert (t_tiles - 1) * high < tokens <= t_tiles * high
    assert (f_tiles - 1) * wide < features <= f_tiles * wide


@given(tilings)
def test_a_block_fits_a_multiprocessor(tiling: Tiling) -> None:
    assert tiling.shared_bytes() <= SHARED_BYTES_OF_A_BLOCK


def test_every_macro_of_the_source_is_given() -> None:
    source = gated_hopper.SOURCE.read_text() + "".join(path.read_text() for path in cuda_source._COMMON)
    for name in Tiling().defines():
        assert name in source
    assert f"constexpr int BLOCK_K = FP8 ? 128 : {gated_hopper.DEPTH};" in source
    for tiling in TILINGS:
        assert f"#elif FEATURES == {tiling.features}\n" in source or f"#if FEATURES == {tiling.features}\n" in source


def test_a_ring_is_never_deeper_than_a_tile() -> None:
    """The kernel fills the whole ring from its first tile before it looks at anything else."""
    assert all(tiling.stages <= gated_hopper.LEAST_STEPS for tiling in TILINGS)


def test_a_warpgroup_never_waits_for_more_than_the_ring_holds() -> None:
    assert all(tiling.lag < tiling.stages for tiling in TILINGS if tiling.turns == 1)


@given(tilings, st.integers(1, 5000), st.integers(1, 30000), st.integers(1, 80))
def test_use_is_what_a_schedule_of_tiles_makes_of_it(tiling: Tiling, tokens: int, features: int, pairs: int) -> None:
    left = tiling.tiles(tokens, features)[0] * tiling.tiles(tokens, features)[1]
    slots = 0
    while left > 0:
        slots, left = slots + pairs, left - pairs
    assert tiling.use(tokens, features, pairs) == pytest.approx(
        tokens * features / (slots * 2 * tiling.tokens * tiling.features)
    )
    assert tiling.use(tokens, features, pairs) <= 1.0


@given(st.integers(1, 20000), st.integers(1, 3800).map(lambda n: 8 * n))
def test_the_tiling_is_one_of_the_best_and_only_where_it_pays(tokens: int, features: int) -> None:
    chosen = best_tiling(tokens, features, PAIRS)
    counted = tokens if tokens > 256 else 128 if tokens <= 128 else 256
    best = max(each.use(counted, features, PAIRS) for each in TILINGS)
    if tokens <= 64 or best < gated_hopper.LEAST_USE:
        assert chosen is None
    else:
        assert chosen is not None
        assert chosen.use(counted, features, PAIRS) > best - 0.021
        earlier = TILINGS[: TILINGS.index(chosen)]
        assert all(each.use(counted, features, PAIRS) < best - 0.019 for each in earlier)


def test_tilings_of_a_llama_8b_on_an_h200() -> None:
    """Tiles of 112 features cut 14336 into 128, which 66 pairs take in two turns where they do 256 tokens at once."""
    large, by_turns = TILINGS[:2]
    narrow, beside = Tiling(112, True, 8), Tiling(112, False, 16)
    wanted = {
        65: beside,
        128: beside,
        129: narrow,
        256: narrow,
        384: beside,
        512: by_turns,
        1024: by_turns,
        2048: by_turns,
    }
    wanted |= dict.fromkeys((8192, 8704), large)
    assert {tokens: best_tiling(tokens, 14336, PAIRS) for tokens in wanted} == wanted
    assert best_tiling(64, 14336, PAIRS) is None
    assert best_tiling(300, 14336, PAIRS) is None, "a third of the last tiles would be empty"


def test_only_what_the_copy_engine_reads_is_served() -> None:
    def matrix(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype)

    weight = matrix(64, 1024)
    assert can_serve(matrix(3, 1024), weight)
    assert can_serve(matrix(3, 2048)[:, :1024], weight)
    assert not can_serve(matrix(3, 1024, torch.float16), weight)
    assert not can_serve(matrix(3, 1028)[:, :1024], weight), "rows must start at multiples of 16 bytes"
    assert not can_serve(matrix(3, 1040)[:, 1:1025], weight), "the first row too"
    assert not can_serve(matrix(1024, 3).t(), weight)
    assert not can_serve(matrix(3, 1024), matrix(2 * 12, 1024)), "nor may rows of the result start elsewhere"
    assert not can_serve(matrix(3, 256), matrix(64, 256)), "too shallow for the ring"
    assert not can_serve(matrix(0, 1024), weight)


def test_the_launch_structures_have_the_drivers_layout() -> None:
    assert ctypes.sizeof(cuda_source._Attribute) == 72
    assert cuda_source._Attribute.value.offset == 8
    assert cuda_source._LaunchConfig.stream.offset == 32
    assert cuda_source._LaunchConfig.attributes.offset == 40
    assert ctypes.sizeof(cuda_source._LaunchConfig) == 56


def test_a_missing_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    cuda_source._nvrtc.cache_clear()
    with pytest.raises(cuda_source.CudaSourceError, match=r"libnvrtc\.so\.99"):
        cuda_source.compile_cubin("", "sm_90a", {})
    cuda_source._nvrtc.cache_clear()


def test_compiled_code_is_kept_by_all_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: list[tuple[str, str, dict[str, int]]] = []

    def compiled(source: str, architecture: str, defines: dict[str, int]) -> bytes:
        asked.append((source, architecture, defines))
        return f"code {len(asked)}".encode()

    monkeypatch.setattr(cuda_source, "compile_cubin", compiled)
    source = tmp_path / "kernel.cu"
    source.write_text("one")
    assert cuda_source.cached_cubin(source, "sm_90a", {"A": 1}) == b"code 1"
    assert cuda_source.cached_cubin(source, "sm_90a", {"A": 1}) == b"code 1"
    assert cuda_source.cached_cubin(source, "sm_90a", {"A": 2}) == b"code 2"
    assert cuda_source.cached_cubin(source, "sm_100a", {"A": 1}) == b"code 3"
    source.write_text("two")
    assert cuda_source.cached_cubin(source, "sm_90a", {"A": 1}) == b"code 4"
    assert len(asked) == 4
    common = tmp_path / "common.cuh"
    common.write_text("shared")
    monkeypatch.setattr(cuda_source, "_COMMON", (common,))
    assert cuda_source.cached_cubin(source, "sm_90a", {"A": 1}) == b"code 5"


def test_code_is_compiled_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text("one")
    monkeypatch.setattr(cuda_source, "compile_cubin", lambda *_: b"code")

    def nowhere() -> Path:
        raise PermissionError("everything is read-only")

    monkeypatch.setattr(cuda_source, "cache_directory", nowhere)
    assert cuda_source.cached_cubin(source, "sm_90a", {}) == b"code"

    def is_full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(cuda_source, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(cuda_source.os, "replace", is_full)
    assert cuda_source.cached_cubin(source, "sm_90a", {}) == b"code"
    assert list((tmp_path / "kernels").iterdir()) == []
