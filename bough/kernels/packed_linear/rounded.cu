// A product of tokens that come rounded to e4m3 and an e4m3 weight, with scales of tokens and of rows, or, where GROUP is 128,
// with scales of 128 columns of a token and of 128 columns of some rows: out[T, rows] = x[T, D] @ weight[rows, D].T
//
// SPLIT blocks share a tile of 64 x GROUPS weight rows and all tokens; each takes a part of the columns, and their sums meet in
// the cluster's shared memory (cluster_sums.cuh). PAIR 2: two tiles are a cluster, and each block fetches half of the tokens for
// both. In a block, one thread feeds a ring of stages, from before the launch before has ended, and GROUPS warpgroups multiply.
// Sums are left to the tensor cores; with GROUP only those of a stage, which are scaled and added up in float32. Scales of the
// tokens come with their stage.
//
// Given: BLOCK_T (tokens, a multiple of 16), GROUPS, STAGES, SPLIT (2 or more), PAIR. Of the weight, as in codes.cuh: KIND
// (FLOAT8), GROUP (0 or 128), SCALE_ROWS (a multiple of 64 with GROUP), SCALES.

#include "hopper.cuh"
#include "codes.cuh"
#include "cluster_sums.cuh"

static_assert(KIND == FLOAT8 && (GROUP == 0 || (GROUP == 128 && SCALE_ROWS % 64 == 0)), "what is multiplied here");
static_assert(GROUP == 0 || BLOCK_T <= 128, "registers");
static_assert(BLOCK_T % 16 == 0 && 48 <= BLOCK_T && BLOCK_T <= 208, "products that are written out");

constexpr int VALUES = BLOCK_T / 2;  // of a thread
constexpr int EIGHTS = BLOCK_T / 8;
constexpr int BLOCK_N = 64 * GROUPS;
constexpr int W_BOX = BLOCK_N * 128, T_BOX = BLOCK_T * 128;
constexpr int SCALE_BYTES = GROUP ? BLOCK_T * 4 : 0;             // of the tokens, of a stage
constexpr int STAGE_BYTES = W_BOX + T_BOX + (GROUP ? 1024 : 0);  // of 128 columns; stages begin at multiples of 1,024
constexpr int WORKERS = 128 * GROUPS;
[[maybe_unused]] constexpr bool EARLY = BLOCK_T <= 80;  // there are registers for a stage's scales while it is multiplied
using Sums = ClusterSums<EIGHTS, WORKERS, SPLIT, PAIR>;
static_assert(Sums::BYTES <= STAGES * STAGE_BYTES, "sums take the place of stages");

#define D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define D16 D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define D24 D16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define D32 D24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define D40 D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define D48 D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define D56 D48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define D64 D56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define D72 D64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define D80 D72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define D88 D80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define D96 D88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define D104 D96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define F4(o) "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3])
#define F8(o) F4(o), F4(o + 4)
#define F16(o) F8(o), F8(o + 8)
#define F32(o) F16(o), F16(o + 16)
#define F64(o) F32(o), F32(o + 32)
#define MULTIPLY(n, sums, a, b, p, ...)                                                                        \
  if constexpr (BLOCK_T == n)                                                                                  \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " p ", 0; wgmma.mma_async.sync.aligned.m64n" #n               \
                 "k32.f32.e4m3.e4m3 {" sums "}, " a ", " b ", p, 1, 1; }"                                      \
                 : __VA_ARGS__ : "l"(left), "l"(right), "r"(keep));

template <int COUNT> INLINE void multiply_rows(float (&d)[COUNT], u64 left, u64 right, int keep) {
#if BLOCK_T == 48
  MULTIPLY(48, D24, "%24", "%25", "%26", F16(0), F8(16))
#endif
#if BLOCK_T == 64
  MULTIPLY(64, D32, "%32", "%33", "%34", F32(0))
#endif
#if BLOCK_T == 80
  MULTIPLY(80, D40, "%40", "%41", "%42", F32(0), F8(32))
#endif
#if BLOCK_T == 96
  MULTIPLY(96, D48, "%48", "%49", "%50", F32(0), F16(32))
#endif
#if BLOCK_T == 112
  MULTIPLY(112, D56, "%56", "%57", "%58", F32(0), F16(32), F8(48))
#endif
#if BLOCK_T == 128
  MULTIPLY(128, D64, "%64", "%65", "%66", F64(0))
#endif
#if BLOCK_T == 144
  MULTIPLY(144, D72, "%72", "%73", "%74", F64(0), F8(64))
#endif
#if BLOCK_T == 160
  MULTIPLY(160, D80, "%80", "%81", "%82", F64(0), F16(64))
#endif
#if BLOCK_T == 176
  MULTIPLY(176, D88, "%88", "%89", "%90", F64(0), F16(64), F8(80))
#endif
#if BLOCK_T == 192
  MULTIPLY(192, D96, "%96", "%97", "%98", F64(0), F32(64))
#endif
#if BLOCK_T == 208
  MULTIPLY(208, D104, "%104", "%105", "%106", F64(0), F32(64), F8(96))
#endif
}

INLINE u16 narrow(float value) {
  u16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
  return out;
}

// The columns of the tokens' rows from `row` on, into this block and the other one of the pair.
INLINE void fetch_for_pair(u32 to, const TensorMap& map, int column, int row, u32 barrier, u16 blocks, u64 held) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(blocks), "l"(held) : "memory");
}

// Neighbours in memory.
INLINE void fetch_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier) : "memory");
}

INLINE float2 shared_pair(u32 at) {
  float2 out;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(out.x), "=f"(out.y) : "r"(at));
  return out;
}

// x_scales: [T], or with GROUP [k_steps, BLOCK_T].
extern "C" __global__ void
__cluster_dims__(SPLIT * PAIR, 1, 1)
__launch_bounds__(WORKERS + 32, 1) rounded(
    const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, const float* x_scales, const u16* bias,
    u16* out, int T, int out_stride, int k_steps, const __grid_constant__ Coded coded) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES];
  let_kernel_after_start();
  const u32 stages = ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
  const u32 full = (u32)__cvta_generic_to_shared(barriers), empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4 * GROUPS * PAIR);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (PAIR > 1) cluster_arrive();
  // Of a cluster's blocks, neighbours are a pair: `half` says which one, `part` which of the parts of the columns.
  const int rank = (int)rank_in_cluster(), half = rank % PAIR, part = rank / PAIR;
  const int tile = blockIdx.x / (SPLIT * PAIR) * PAIR + half;
  const int start = k_steps * part / SPLIT, steps = k_steps * (part + 1) / SPLIT - start;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (warp == 4 * GROUPS) {
    if (lane > 0) {
      if (PAIR > 1) cluster_wait();
      return;
    }
    const u64 once = held_shorter(), often = held_longer();
    auto ask_weight = [&](int slot, int step) {
      const u32 to = stages + slot * STAGE_BYTES, barrier = full + 8 * slot;
      barrier_expect(barrier, W_BOX + T_BOX + SCALE_BYTES);
      fetch_held(to, weight, (start + step) * 128, tile * BLOCK_N, barrier, once);
    };
    auto ask_x = [&](int slot, int step) {
      const u32 to = stages + slot * STAGE_BYTES + W_BOX, barrier = full + 8 * slot;
      const int column = (start + step) * 128;
      if (PAIR > 1)
        fetch_for_pair(to + half * (T_BOX / 2), x, column, half * (BLOCK_T / 2), barrier, (u16)(3 << (rank - half)), often);
      else
        fetch_held(to, x, column, 0, barrier, often);
      if (GROUP) fetch_bytes(to + T_BOX, x_scales + (i64)(start + step) * BLOCK_T, SCALE_BYTES, barrier);
    };
    const int early = min(steps, STAGES);
    for (int i = 0; i < early; i++) ask_weight(i, i);
    if (PAIR > 1) cluster_wait();
    wait_for_kernel_before();
    for (int i = 0; i < early; i++) ask_x(i, i);
    int slot = 0;
    u32 parity = 0;
    for (int i = early; i < steps; i++) {
      barrier_wait(empty + 8 * slot, parity);
      ask_weight(slot, i);
      ask_x(slot, i);
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    return;
  }

  if (PAIR > 1) cluster_wait();
  auto leave = [&](int slot) {
    if (lane > 0) return;
    barrier_arrive(empty + 8 * slot);
    if (PAIR > 1) barrier_arrive_at(empty + 8 * slot, rank ^ 1);
  };
  const int row = tile * BLOCK_N + warp * 16 + lane / 4;
  float value[VALUES];
  int slot = 0;
  u32 parity = 0;
#if GROUP
  // Lanes have the scales of 32 steps, of the 64 rows of their warpgroup. Weights are there before the launch before has ended.
  const i64 row_block = (tile * BLOCK_N + warp / 4 * 64) / SCALE_ROWS;
  float of_steps = 0.0f, stage_sums[VALUES];
#pragma unroll
  for (int r = 0; r < VALUES; r++) value[r] = 0.0f;
#pragma unroll 1
  for (int i = 0; i < steps; i++) {
    if (i % 32 == 0) of_steps = i + lane < steps ? coded.scale((i64)(start + i + lane) * coded.width + row_block) : 0.0f;
    const float of_rows = __shfl_sync(~0u, of_steps, i % 32);
    barrier_wait(full + 8 * slot, parity);
    const u32 from = stages + slot * STAGE_BYTES;
    products_begin();
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++)
      multiply_rows(stage_sums, operand(from + warp / 4 * 64 * 128) + 2 * quarter, operand(from + W_BOX) + 2 * quarter, quarter);
    products_commit();
    auto of_tokens = [&](int eight) { return shared_pair(from + W_BOX + T_BOX + (eight * 8 + lane % 4 * 2) * 4); };
    float2 early[EARLY ? EIGHTS : 1];
#pragma unroll
    for (int eight = 0; eight < (EARLY ? EIGHTS : 0); eight++) early[eight] = of_tokens(eight);
    products_wait<0>();
#pragma unroll
    for (int r = 0; r < VALUES; r++) asm volatile("" : "+f"(stage_sums[r]));  // none is read before the wait
    if (EARLY) __syncwarp(), leave(slot);
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++) {
      const float2 by = EARLY ? early[EARLY ? eight : 0] : of_tokens(eight);
      const float even = by.x * of_rows, odd = by.y * of_rows;
#pragma unroll
      for (int r = 0; r < 4; r++) value[4 * eight + r] += stage_sums[4 * eight + r] * (r & 1 ? odd : even);
    }
    if (!EARLY) __syncwarp(), leave(slot);
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
#else
  int before = 0;
  for (int i = 0; i < steps; i++) {
    barrier_wait(full + 8 * slot, parity);
    const u32 from = stages + slot * STAGE_BYTES;
    products_begin();
#pragma unroll
    for (int quarter = 0; quarter < 4; quarter++)
      multiply_rows(value, operand(from + warp / 4 * 64 * 128) + 2 * quarter, operand(from + W_BOX) + 2 * quarter, i | quarter);
    products_commit();
    products_wait<1>();
    if (i > 0) leave(before);
    before = slot;
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
  products_wait<0>();
  leave(before);
#pragma unroll
  for (int r = 0; r < VALUES; r++) asm volatile("" : "+f"(value[r]));  // none is read before the wait
#endif

  wait_for_kernel_before();
  const float row_scales[2] = {coded.last_scale(row), coded.last_scale(row + 8)};
  float biases[2] = {0.0f, 0.0f};
  if (bias) biases[0] = low(bias[row]), biases[1] = low(bias[row + 8]);
  auto write = [&](int eight, int r, float sum) {
    const int token = eight * 8 + lane % 4 * 2 + (r & 1);
    if (token >= T) return;
    const float result = sum * row_scales[r / 2] * (GROUP ? 1.0f : __ldcg(x_scales + token)) + biases[r / 2];
    out[(u64)token * out_stride + row + r / 2 * 8] = narrow(result);
  };
  Sums::exchange(stages, value);
#pragma unroll 2
  for (int mine = 0; mine < Sums::MINE; mine++) {
    const int eight = part * Sums::MINE + mine;
    if (eight >= EIGHTS) break;
    const float4 sum = Sums::sum(stages, mine);
    write(eight, 0, sum.x), write(eight, 1, sum.y), write(eight, 2, sum.z), write(eight, 3, sum.w);
  }
}
