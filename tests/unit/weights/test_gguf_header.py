"""The GGUF header reader against the gguf package, and against broken files."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from hypothesis import given, settings, strategies as st

from bough.config.default_model import default_model_path
from bough.config.gguf_header import BLOCK_SIZES, read_gguf_header
from bough.core.errors import ConfigError


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("a.count", 7)
    writer.add_float32("a.real", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "grün ✓")
    writer.add_array("a.words", ["x", "", "längeres Wort"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_tensor("dense", np.ones((3, 5), np.float32))
    blocks = quantize(np.ones((2, 64), np.float32), GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", blocks, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_small_file(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(small)
    header = read_gguf_header(path)
    assert header.metadata["a.count"] == 7
    assert header.metadata["a.real"] == 0.5
    assert header.metadata["a.flag"] is True
    assert header.metadata["a.text"] == "grün ✓"
    assert header.metadata["a.words"] == ["x", "", "längeres Wort"]
    assert header.metadata["a.numbers"] == [1, -2, 3]
    assert header.tensors["dense"].shape == (3, 5)
    assert header.tensors["packed"].shape == (2, 64)
    assert header.tensors["packed"].kind == "Q8_0"


def test_default_model_reads_as_the_gguf_package_reads_it_but_quickly() -> None:
    path = default_model_path()
    took_s = float("inf")
    for _ in range(5):
        start = time.thread_time()
        header = read_gguf_header(path)
        took_s = min(took_s, time.thread_time() - start)
    start = time.thread_time()
    reader = GGUFReader(path)
    package_took_s = time.thread_time() - start
    print(f"{took_s * 1e3:.1f} ms, the package {package_took_s * 1e3:.1f} ms")
    assert took_s < package_took_s / 4
    assert {field: reader.fields[field].contents() for field in header.metadata} == header.metadata
    assert header.tensors.keys() == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert (info.kind, info.offset, info.nbytes) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)
        assert info.shape == tuple(reversed(tensor.shape.tolist()))


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    assert {kind: GGML_QUANT_SIZES[GGMLQuantizationType[kind]] for kind in BLOCK_SIZES} == BLOCK_SIZES


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_broken_files_are_refused_and_nothing_else(
    small: bytes, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever bytes change or are cut off: a header or a ConfigError, quickly and without large allocations."""
    content = bytearray(small[: data.draw(st.integers(0, len(small)))])
    header_bytes = min(len(content), 700)
    for _ in range(data.draw(st.integers(0, 4)) if header_bytes >= 8 else 0):
        at = data.draw(st.integers(0, header_bytes - 8))
        change = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.just(struct.pack("<Q", 2**63 - 1))))
        content[at : at + len(change)] = change
    path = tmp_path_factory.mktemp("broken") / "x.gguf"
    path.write_bytes(content)
    began_s = time.thread_time()
    try:
        header = read_gguf_header(path)
    except ConfigError:
        return
    finally:
        assert time.thread_time() - began_s < 1
    for info in header.tensors.values():
        assert info.offset + info.nbytes <= len(content)
