"""Sums over ranks that read one another's memory: the CUDA source itself, compiled for the host, with threads of the CPU as
the threads of its blocks. What only a GPU shows (`tests/gpu/test_peer_sum.py`) is the order in which it sees memory."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bough.distributed.collectives import ordered_sum
from bough.kernels import peer_sum
from bough.kernels.norm import reference
from bough.kernels.peer_sum import shots
from bough.kernels.peer_sum.cuda import MEMORY_BYTES, MOST_RANKS

SOURCE = Path(peer_sum.__file__).with_name("cuda.cu")
THREADS, BLOCKS, HALF_BYTES = 32, 2, 1 << 16
ROOM = 2 * BLOCKS * MOST_RANKS * 4 + BLOCKS * 4 + 128 + 4 * HALF_BYTES
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

BEFORE = r"""
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>
using std::min;
#define ON_HOST
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
struct uint4 { unsigned x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct Index { int x; };
static thread_local Index threadIdx, blockIdx;
struct Block { std::barrier<> all{THREADS}; float values[THREADS]; };
static thread_local Block* block;
static void __syncthreads() { block->all.arrive_and_wait(); }
static float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
static unsigned __float_as_uint(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
static float rsqrtf(float value) { return 1 / sqrtf(value); }
static void raise_flag(unsigned* at, unsigned value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
static unsigned read_flag(unsigned* at) { std::this_thread::yield(); return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
#if DTYPE == 1
static float from_half(unsigned bits) { return __uint_as_float(bits << 16); }
static unsigned to_half(float value) {
  const unsigned bits = __float_as_uint(value);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#else
static float from_half(unsigned bits) { _Float16 half; memcpy(&half, &bits, 2); return half; }
static unsigned to_half(float value) { _Float16 half = value; unsigned bits = 0; memcpy(&bits, &half, 2); return bits; }
#endif
static float over_block(float value) {
  block->values[threadIdx.x] = value;
  __syncthreads();
  float total = 0;
  for (float each : block->values) total += each;
  __syncthreads();
  return total;
}
"""
AFTER = r"""
extern "C" void run(int which, void** memory, uint4** in, uint4** out, uint4* residual, uint4* weight, uint4** total,
                    int vectors, int rows, int width, float eps, float offset) {
  Peers peers;
  for (int rank = 0; rank < RANKS; ++rank) peers.at[rank] = (u8*)memory[rank];
  Block blocks[RANKS][BLOCKS];
  std::vector<std::thread> threads;
  for (int rank = 0; rank < RANKS; ++rank)
    for (int at = 0; at < BLOCKS * THREADS; ++at)
      threads.emplace_back([&, rank, at] {
        blockIdx.x = at / THREADS;
        threadIdx.x = at % THREADS;
        block = &blocks[rank][blockIdx.x];
        if (which == 0) one_shot(peers, in[rank], out[rank], rank, vectors);
        if (which == 1) two_shot(peers, in[rank], out[rank], rank, vectors);
        if (which == 2)
          one_shot_norm(peers, in[rank], residual, weight, out[rank], total[rank], rank, rows, width, Norm{eps, offset});
      });
  for (auto& each : threads) each.join();
}
"""


def built(folder: Path, ranks: int, dtype: torch.dtype) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source, library = folder / "host.cpp", folder / "host.so"
    source.write_text(BEFORE + SOURCE.read_text() + AFTER)
    sizes = {"RANKS": ranks, "THREADS": THREADS, "BLOCKS": BLOCKS, "DTYPE": DTYPES[dtype], "HALF_BYTES": HALF_BYTES}
    defines = [f"-D{name}={value}" for name, value in sizes.items()]
    flags = ["-O1", "-w", "-std=c++20", "-pthread", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, *defines, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*[each.data_ptr() for each in tensors])


@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float32), (3, torch.bfloat16)])
def test_calls_of_all_kinds_in_any_order(ranks: int, dtype: torch.dtype, tmp_path: Path) -> None:
    library, lanes, rng = built(tmp_path, ranks, dtype), 16 // dtype.itemsize, random.Random(ranks)
    memory = [torch.zeros(ROOM, dtype=torch.uint8) for _ in range(ranks)]
    eps, offset = ctypes.c_float(1e-5), ctypes.c_float(1.0)
    for _ in range(12):
        which = rng.randrange(3)
        if which < 2:
            count = rng.choice([1, 3, 31, 33, 64, 65, 200])
            parts = [torch.randn(count * lanes).to(dtype) for _ in range(ranks)]
            expected = ordered_sum(parts)
            given = addresses(parts)
            library.run(which, addresses(memory), given, given, None, None, None, count, 0, 0, eps, offset)
            assert all(torch.equal(each, expected) for each in parts), "the bits of an ordered sum, on all ranks"
            continue
        rows, width = rng.choice([1, 2, 5]), rng.choice([1, 4, 33, 100, 128])
        parts = [torch.randn(rows, width * lanes).to(dtype) for _ in range(ranks)]
        residual, weight = torch.randn(rows, width * lanes).to(dtype), torch.randn(width * lanes).to(dtype)
        normed, total = ([torch.empty_like(each) for each in parts] for _ in range(2))
        library.run(
            2, addresses(memory), addresses(parts), addresses(normed), ctypes.c_void_p(residual.data_ptr()),
            ctypes.c_void_p(weight.data_ptr()), addresses(total), 0, rows, width, eps, offset,
        )  # fmt: skip
        expected, summed = reference.add_rms_norm(ordered_sum(parts), residual, weight, 1e-5, offset=1.0)
        assert all(torch.equal(each, summed) for each in total)
        assert all(torch.equal(each, normed[0]) for each in normed)
        torch.testing.assert_close(normed[0], expected)


def test_a_message_is_read_twice_once_that_is_shorter() -> None:
    assert {shots(2, size) for size in (16, 1 << 20, 8 << 20)} == {"one"}, "two ranks read as much either way"
    assert [shots(8, size) for size in (16, 64 << 10, 256 << 10, 8 << 20)] == ["one", "one", "two", "two"]
    assert shots(4, 9 << 20) is None
    assert MEMORY_BYTES > 4 * (8 << 20)
