"""The door of the Hopper gate/up kernel, without a device: how the product is cut, what is refused, what is kept on disk."""

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from bough.kernels import cuda_source
from bough.kernels.linear import gated_hopper
from bough.kernels.linear.gated_hopper import Tiling, can_serve

SHARED_BYTES_OF_A_BLOCK = 227 * 1024
tilings = st.builds(Tiling, st.booleans(), st.integers(1, 32), st.integers(0, 2), st.integers(3, 4))


@given(tilings, st.integers(1, 20000), st.integers(1, 30000))
def test_tiles_cover_and_none_is_idle(tiling: Tiling, tokens: int, features: int) -> None:
    t_tiles, f_tiles = tiling.tiles(tokens, features)
    high, wide = (256, 128) if tiling.pair_along_tokens else (128, 256)
    assert (t_tiles - 1) * high < tokens <= t_tiles * high
    assert (f_tiles - 1) * wide < features <= f_tiles * wide


@given(tilings)
def test_a_block_fits_a_multiprocessor(tiling: Tiling) -> None:
    assert tiling.shared_bytes() <= SHARED_BYTES_OF_A_BLOCK


def test_every_macro_of_the_source_is_given() -> None:
    source = gated_hopper.SOURCE.read_text()
    for name in Tiling().defines():
        assert name in source
    for constant, value in (("FEATURES", gated_hopper.FEATURES), ("BLOCK_K", gated_hopper.DEPTH)):
        assert f"constexpr int {constant} = {value};" in source


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
