// A product of tokens with a weight in codes, on the tensor cores' 8-bit floats: out[T, rows] = x[T, D] @ weight[rows, D].T
//
// Weights are not widened. A bf16 token has 8 significant bits, an e4m3 value has 4: with a power of two as scale, a token is
// the sum of two such values, and the tensor cores take both as if they were two tokens. e4m3 weights go there from shared
// memory as they are stored. Codes of 4 bits go through registers: as a byte, a code of 0 .. 15 is the e4m3 value code / 512
// (values below 1 / 32 are evenly spaced), and zero points are taken off the sums, with the tokens' sums.
//
// Blocks, chunks and stages are those of `linear/ring.cu`. Between the thread that feeds the ring and the warps that multiply,
// other warps split the tokens of a stage, in place: a token's values are read and its terms written by one warp.
// The tensor cores keep some 14 bits of a sum of 8-bit floats, so that sums of 128 or 256 columns are added up in float32.
//
// Given: BLOCK_T (tokens), BLOCK_K (columns a step, a multiple of 256), GROUPS (warpgroups of 64 weight rows), STAGES, SPLITTERS
// (warps that split), AT_ONCE (tokens that such a warp splits together), CLUSTER (above 1: blocks that share a tile's columns;
// their sums meet in shared memory, and no chunks are cut), FETCHED (whether scales and zero points of 4-bit codes come through
// the copy engine, with the stage; boxes of codes then have 256 columns). Of the weight, as in codes.cuh: KIND (FLOAT8 or INT4),
// GROUP, SCALE_ROWS, SCALES, ZEROS.

#include "hopper.cuh"
#include "codes.cuh"
#include "cluster_sums.cuh"

static_assert(KIND == FLOAT8 || KIND == INT4, "what is multiplied here");

// A box of 4-bit codes is multiplied while the sums of the one before are scaled. Outside clusters that is mostly slower.
#define OVERLAPPED (FETCHED && CLUSTER > 1 && BLOCK_T == 8)

constexpr int N = 2 * BLOCK_T;                  // columns of the tensor cores' product
constexpr int SUMS = N / 2;                     // of them, in a thread
constexpr int VALUES = BLOCK_T / 2;             // of a thread
constexpr int BLOCK_N = 64 * GROUPS;
constexpr int BOXES = BLOCK_K / 128;            // of the weight, and of terms
constexpr int W_LINE = FETCHED ? 128 : W_ROW_BYTES;  // of a row in a box of the weight
constexpr int W_BOX = BLOCK_N * W_LINE;
constexpr int W_BOX_COLUMNS = FETCHED ? 256 : 128;
constexpr int W_BYTES = BLOCK_K / W_BOX_COLUMNS * W_BOX;
constexpr int T_BOX = N * 128;                  // of terms; of bf16 values too, in two boxes of 64 columns
constexpr int STAGE_BYTES = W_BYTES + BOXES * T_BOX;
constexpr int SCALE_BYTES = FETCHED ? BOXES * BLOCK_N * 2 : 0;  // of a stage, behind all stages
constexpr int ZERO_BYTES = FETCHED && ZEROS ? BOXES * BLOCK_N : 0;
constexpr int BESIDES_BYTES = SCALE_BYTES + ZERO_BYTES;
constexpr int WORKERS = 128 * GROUPS;
constexpr int BLOCKS = BLOCK_K / 256;            // of 256 columns, which have one scale
constexpr int ADDED = KIND == INT4 || GROUP == 128 ? 1 : 2;  // boxes that the tensor cores add up
constexpr int EACH = (BLOCKS * BLOCK_T + SPLITTERS - 1) / SPLITTERS;
constexpr int TOGETHER = AT_ONCE < EACH ? AT_ONCE : EACH;
static_assert(!FETCHED || (KIND == INT4 && GROUP == 128 && SCALES > 0 && SCALE_ROWS == 1), "scales that are fetched");
constexpr bool AHEAD = BLOCK_T <= 16;           // codes of 4 bits are expanded while those before are multiplied
constexpr float LOW_TERM = 1.0f / 16.0f;

#define F4(o) "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3])
#define F16(o) F4(o), F4(o + 4), F4(o + 8), F4(o + 12)
#define D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define D16 D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define D24 D16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define D32 D24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FROM_SHARED(shape, sums, a, b, p, ...)                                                \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " p ", 0; wgmma.mma_async.sync.aligned." shape  \
               ".f32.e4m3.e4m3 {" sums "}, " a ", " b ", p, 1, 1; }"                          \
               : __VA_ARGS__ : "l"(left), "l"(right), "r"(keep))
#define FROM_REGISTERS(shape, sums, a, b, p, ...)                                             \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " p ", 0; wgmma.mma_async.sync.aligned." shape  \
               ".f32.e4m3.e4m3 {" sums "}, {" a "}, " b ", p, 1, 1; }"                        \
               : __VA_ARGS__ : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(keep))

#if KIND == FLOAT8
INLINE void multiply_rows(float (&d)[SUMS], u64 left, u64 right, int keep) {
  if constexpr (N == 16) FROM_SHARED("m64n16k32", D8, "%8", "%9", "%10", F4(0), F4(4));
#if BLOCK_T >= 16
  if constexpr (N == 32) FROM_SHARED("m64n32k32", D16, "%16", "%17", "%18", F16(0));
#endif
#if BLOCK_T >= 24
  if constexpr (N == 48) FROM_SHARED("m64n48k32", D24, "%24", "%25", "%26", F16(0), F4(16), F4(20));
#endif
#if BLOCK_T >= 32
  if constexpr (N == 64) FROM_SHARED("m64n64k32", D32, "%32", "%33", "%34", F16(0), F16(16));
#endif
}
#else
INLINE void multiply_rows(float (&d)[SUMS], const u32 (&left)[4], u64 right, int keep) {
  if constexpr (N == 16) FROM_REGISTERS("m64n16k32", D8, "%8, %9, %10, %11", "%12", "%13", F4(0), F4(4));
#if BLOCK_T >= 16
  if constexpr (N == 32) FROM_REGISTERS("m64n32k32", D16, "%16, %17, %18, %19", "%20", "%21", F16(0));
#endif
#if BLOCK_T >= 24
  if constexpr (N == 48)
    FROM_REGISTERS("m64n48k32", D24, "%24, %25, %26, %27", "%28", "%29", F16(0), F4(16), F4(20));
#endif
#if BLOCK_T >= 32
  if constexpr (N == 64) FROM_REGISTERS("m64n64k32", D32, "%32, %33, %34, %35", "%36", "%37", F16(0), F16(16));
#endif
}
#endif

INLINE u16 narrow(float value) {
  u16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
  return out;
}

INLINE void workers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

INLINE void shared_store(u32 at, u32 first, u32 second) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(first), "r"(second) : "memory");
}
INLINE void shared_store(u32 at, u32 value) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory"); }

// What those who multiply need of a step's tokens besides terms: the scale, times what a code of 4 bits lacks, and for each
// 128 columns the sum.
struct Tokens {
  float scale[BLOCKS][BLOCK_T];
  float sum[KIND == INT4 ? BOXES : 1][BLOCK_T];
};

// Two bf16 values as two e4m3 terms each, the second times 16; adds the values to `sum`.
INLINE void split_two(u32 two, u32 factor, u16& upper, u16& lower, float& sum) {
  const u32 scaled = times_plus(two, factor, 0x80008000u);
  const float even = low(scaled), odd = high(scaled);
  if (KIND == INT4) sum += even + odd;
  asm("{\n.reg .b32 h, b;\n"
      "cvt.rn.f16x2.f32 h, %3, %2;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 %0, h;\n"
      "cvt.rn.f16x2.e4m3x2 b, %0;\n"
      "sub.rn.f16x2 b, h, b;\n"
      "mul.rn.f16x2 b, b, %4;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 %1, b;\n}"
      : "=&h"(upper), "=h"(lower) : "f"(even), "f"(odd), "r"(0x4c004c00u));
}

#if FETCHED
INLINE float fetched_scale(u32 at) {
  u16 bits;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(at));
  if (SCALES == 1) return __uint_as_float((u32)bits << 16);
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
  return out;
}
INLINE u32 shared_byte(u32 at) {
  u32 out;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(out) : "r"(at));
  return out;
}
#endif

INLINE u32 pair(u16 first, u16 second) { return (u32)first | (u32)second << 16; }

// One warp: 256 columns of COUNT tokens, from bf16 to terms, of `first`, `first` + SPLITTERS and so on; those from `end` on are not
// there. Numbers run over blocks of 256 columns, then over tokens. Where a token's values lie in four boxes of 64 columns, its
// terms come to lie in two boxes of 128: the upper ones as row `token`, the lower ones as row BLOCK_T + `token`.
template <int COUNT> INLINE void split_tokens(u32 stage_tokens, int first, int end, Tokens& facts) {
  const int lane = threadIdx.x % 32, own = lane % 16;
  uint4 values[COUNT];
  u32 most[COUNT], exponent[COUNT];
  float sum[COUNT];
  u16 upper[COUNT][4], lower[COUNT][4];
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const int each = first + i * SPLITTERS, block = each % BLOCKS, token = each / BLOCKS;
    values[i] = {};
    if (each < end)
      values[i] = shared_16(stage_tokens + 2 * block * T_BOX + lane / 8 * (BLOCK_T * 128) + token * 128 +
                            (lane % 8 ^ token % 8) * 16);
  }
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    constexpr u32 SIGNLESS = 0x7fff7fffu;
    asm("{\n.reg .b32 a, b;\nmax.u16x2 a, %1, %2;\nmax.u16x2 b, %3, %4;\nmax.u16x2 %0, a, b;\n}"
        : "=r"(most[i])
        : "r"(values[i].x & SIGNLESS), "r"(values[i].y & SIGNLESS), "r"(values[i].z & SIGNLESS), "r"(values[i].w & SIGNLESS));
    most[i] = max(most[i] >> 16, most[i] & 0xffffu);
  }
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("redux.sync.max.u32 %0, %0, 0xffffffff;" : "+r"(most[i]));
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    // The largest becomes 128 .. 256. Below 2^-119 all are as good as zero; what is not finite makes the token's results so.
    exponent[i] = max(most[i] >> 7, 8u);
    const u32 factor = (261u - exponent[i]) << 7;
    sum[i] = 0.0f;
    split_two(values[i].x, factor | factor << 16, upper[i][0], lower[i][0], sum[i]);
    split_two(values[i].y, factor | factor << 16, upper[i][1], lower[i][1], sum[i]);
    split_two(values[i].z, factor | factor << 16, upper[i][2], lower[i][2], sum[i]);
    split_two(values[i].w, factor | factor << 16, upper[i][3], lower[i][3], sum[i]);
  }
  if (KIND == INT4) {
#pragma unroll
    for (int width = 8; width > 0; width /= 2)
#pragma unroll
      for (int i = 0; i < COUNT; i++) sum[i] += __shfl_xor_sync(~0u, sum[i], width);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const int each = first + i * SPLITTERS, block = each % BLOCKS, token = each / BLOCKS, turn = token % 8;
    if (each >= end) break;
    const u32 to = stage_tokens + (2 * block + lane / 16) * T_BOX + token * 128;
    if (KIND == INT4) {
      // Columns in the order in which the threads that multiply have a weight's codes: see `codes_of`.
      const int q = own / 8 * 2 + own / 2 % 2;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int chunk = 2 * (lane % 2 * 2 + half) + own / 4 % 2;
        const u32 place = to + (chunk ^ turn) * 16 + 4 * q;
        shared_store(place, pair(upper[i][2 * half], upper[i][2 * half + 1]));
        shared_store(place + BLOCK_T * 128, pair(lower[i][2 * half], lower[i][2 * half + 1]));
      }
      if (own == 0) facts.sum[KIND == INT4 ? 2 * block + lane / 16 : 0][token] = sum[i];
    } else {
      const u32 place = to + (own / 2 ^ turn) * 16 + own % 2 * 8;
      shared_store(place, pair(upper[i][0], upper[i][1]), pair(upper[i][2], upper[i][3]));
      shared_store(place + BLOCK_T * 128, pair(lower[i][0], lower[i][1]), pair(lower[i][2], lower[i][3]));
    }
    if (lane == 0)
      facts.scale[block][token] = exponent[i] == 255 ? __uint_as_float(0x7fc00000u) : __uint_as_float((exponent[i] - 7u) << 23);
  }
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(WORKERS + 32 * SPLITTERS + 32) terms(
    const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap scales_map,
    const __grid_constant__ TensorMap zeros_map, const u16* bias, u16* out, float* partial, int* counters, int T, int out_stride, int per_chunk, int total, int k_steps,
    const __grid_constant__ Coded coded) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[4 * STAGES];
  __shared__ Tokens facts[STAGES];
  __shared__ int arrived;
  let_kernel_after_start();
  const u32 stages = ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
  const u32 full = (u32)__cvta_generic_to_shared(barriers), empty = full + 8 * STAGES, split = empty + 8 * STAGES;
  const u32 came = split + 8 * STAGES;  // tokens that are split, which come from L2 long before the weight does
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4 * GROUPS);
      barrier_init(split + 8 * i, SPLITTERS);
      barrier_init(came + 8 * i, 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int chunk = blockIdx.x, depth = k_steps * BLOCK_K;
#if CLUSTER > 1
  const int part = rank_in_cluster(), start = chunk / CLUSTER * k_steps + k_steps * part / CLUSTER;
  const int steps = k_steps * (part + 1) / CLUSTER - k_steps * part / CLUSTER;
#else
  const int start = chunk * per_chunk, steps = min(per_chunk, total - start);
#endif
  int tile = start / k_steps, k = (start - tile * k_steps) * BLOCK_K;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (warp == 4 * GROUPS + SPLITTERS) {
    if (lane > 0) return;
    const u64 once = held_shorter(), often = held_longer();
    auto ask_weight = [&](int slot) {
      const u32 to = stages + slot * STAGE_BYTES, barrier = full + 8 * slot;
      barrier_expect(barrier, W_BYTES + BESIDES_BYTES);
#pragma unroll
      for (int box = 0; box < BLOCK_K / W_BOX_COLUMNS; box++)
        fetch_held(to + box * W_BOX, weight, (k + W_BOX_COLUMNS * box) / (HALF_BYTES ? 2 : 1), tile * BLOCK_N, barrier, once);
#if FETCHED
      const u32 besides = stages + STAGES * STAGE_BYTES + slot * BESIDES_BYTES;
      fetch_held(besides, scales_map, tile * BLOCK_N, k / 128, barrier, once);
      if (ZEROS) fetch_held(besides + SCALE_BYTES, zeros_map, tile * BLOCK_N, k / 128, barrier, once);
#endif
    };
    auto ask_x = [&](int slot, int column) {
      const u32 to = stages + slot * STAGE_BYTES + W_BYTES, barrier = came + 8 * slot;
      barrier_expect(barrier, BOXES * T_BOX);
#pragma unroll
      for (int box = 0; box < 2 * BOXES; box++)
        fetch_held(to + box * (BLOCK_T * 128), x, column + 64 * box, 0, barrier, often);
    };
    auto advance = [&] {
      k += BLOCK_K;
      if (k == depth) k = 0, tile++;
    };
    const int early = min(steps, STAGES);
    int column = k;
    for (int i = 0; i < early; i++, advance()) ask_weight(i);
    wait_for_kernel_before();
    for (int i = 0; i < early; i++) {
      ask_x(i, column);
      column += BLOCK_K;
      if (column == depth) column = 0;
    }
    int slot = 0;
    u32 parity = 0;
    for (int i = early; i < steps; i++, advance()) {
      barrier_wait(empty + 8 * slot, parity);
      ask_x(slot, k);
      ask_weight(slot);
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    return;
  }

  int slot = 0;
  u32 parity = 0;
  if (warp >= 4 * GROUPS) {
    for (int i = 0; i < steps; i++) {
      barrier_wait(came + 8 * slot, parity);
      const u32 tokens = stages + slot * STAGE_BYTES + W_BYTES;
      for (int each = warp - 4 * GROUPS; each < BLOCKS * T; each += TOGETHER * SPLITTERS) {
        if (TOGETHER > 1 && each + SPLITTERS < BLOCKS * T)
          split_tokens<TOGETHER>(tokens, each, BLOCKS * T, facts[slot]);
        else
          split_tokens<1>(tokens, each, BLOCKS * T, facts[slot]);
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (lane == 0) barrier_arrive(split + 8 * slot);
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    return;
  }

  const int own_row = warp * 16 + lane / 4;
  int k_step = k / BLOCK_K;
#if (GROUP || KIND == INT4) && !FETCHED
  // Scales and zero points of a step's boxes and a thread's two rows.
  float coming_scales[BOXES][2], coming_zeros[BOXES][2];
  auto load = [&](int at_tile, int step) {
#pragma unroll
    for (int box = 0; box < BOXES; box++)
#pragma unroll
      for (int lower = 0; lower < 2; lower++) {
        const i64 row = (at_tile * BLOCK_N + own_row + 8 * lower) / SCALE_ROWS;
        const i64 at = (i64)(GROUP ? step * BOXES + box : 0) * coded.width + row;
        coming_scales[box][lower] = GROUP ? coded.scale(at) : 1.0f;
        coming_zeros[box][lower] = ZEROS ? (float)__ldg(coded.zeros + at) : 8.0f;
      }
  };
  load(tile, k_step);
#endif
#if KIND == INT4
  // A thread has 16 bytes of each of its rows of a box. Byte j of 64 columns has column j in its low half, j + 32 in its high
  // half: thread q of four has bytes 16 q .. 16 q + 15, and gives four of them, both halves, to a step of the tensor cores.
  auto codes_of = [&](u32 (&codes)[4][4], u32 from, int box) {
    const u32 at = from + (FETCHED ? box / 2 : box) * W_BOX;
    const int chunk = FETCHED ? (box % 2 * 4 + lane % 4) ^ (lane / 4) : lane % 4;
#pragma unroll
    for (int lower = 0; lower < 2; lower++) {
      const uint4 bytes = shared_16(at + (own_row + 8 * lower) * W_LINE + chunk * 16);
      const u32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
      for (int part = 0; part < 4; part++) {
        codes[part][lower] = words[part] & 0x0f0f0f0fu;
        codes[part][2 + lower] = words[part] >> 4 & 0x0f0f0f0fu;
      }
    }
  };
#endif
  wait_for_kernel_before();
  for (int done = 0; done < steps; tile++, k_step = 0) {
    const int here = min(k_steps - k_step, steps - done);
    float value[VALUES];
#pragma unroll
    for (int r = 0; r < VALUES; r++) value[r] = 0.0f;
    for (int i = 0; i < here; i++) {
#if (GROUP || KIND == INT4) && !FETCHED
      float scales[BOXES][2], zeros[BOXES][2];
#pragma unroll
      for (int box = 0; box < BOXES; box++)
#pragma unroll
        for (int lower = 0; lower < 2; lower++)
          scales[box][lower] = coming_scales[box][lower], zeros[box][lower] = coming_zeros[box][lower];
      const bool wraps = k_step + i + 1 == k_steps;
      if (done + i + 1 < steps) load(tile + wraps, wraps ? 0 : k_step + i + 1);
#endif
      barrier_wait(split + 8 * slot, parity);
      const u32 from = stages + slot * STAGE_BYTES, tokens = from + W_BYTES;
      barrier_wait(full + 8 * slot, parity);
      // Adds what the tensor cores have of a box, or two.
      auto add = [&](float (&acc)[SUMS], int box) {
#if FETCHED
        float scales[BOXES][2], zeros[BOXES][2];  // of this box only
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
          const u32 besides = stages + STAGES * STAGE_BYTES + slot * BESIDES_BYTES, at = box * BLOCK_N + own_row + 8 * lower;
          scales[box][lower] = fetched_scale(besides + 2 * at);
          zeros[box][lower] = ZEROS ? (float)shared_byte(besides + SCALE_BYTES + at) : 8.0f;
        }
#endif
#pragma unroll
        for (int r = 0; r < SUMS; r++) asm volatile("" : "+f"(acc[r]));  // none is read before the wait
#pragma unroll
        for (int r = 0; r < VALUES; r++) {
          const int token = r / 4 * 8 + lane % 4 * 2 + (r & 1);
          const float both_terms = acc[r] + acc[r + VALUES] * LOW_TERM, scale = facts[slot].scale[box / 2][token];
#if KIND == INT4
          const float sum = both_terms * 512.0f - zeros[box][r / 2 % 2] * facts[slot].sum[box][token];
          value[r] += sum * (scale * scales[box][r / 2 % 2]);
#elif GROUP
          value[r] += both_terms * (scale * scales[box][r / 2 % 2]);
#else
          value[r] += both_terms * scale;
#endif
        }
      };
#if KIND == INT4
      u32 codes[2][4][4];
#endif
#if OVERLAPPED
      float acc[2][SUMS];
      codes_of(codes[0], from, 0);
#pragma unroll
      for (int box = 0; box < BOXES; box++) {
        products_begin();
#pragma unroll
        for (int part = 0; part < 4; part++)
          multiply_rows(acc[box % 2], codes[box % 2][part], operand(tokens + box * T_BOX) + 2 * part, part);
        products_commit();
        if (box > 0) products_wait<1>();
        if (box + 1 < BOXES) codes_of(codes[(box + 1) % 2], from, box + 1);
        if (box > 0) add(acc[(box + 1) % 2], box - 1);
      }
      products_wait<0>();
      add(acc[(BOXES - 1) % 2], BOXES - 1);
#else
#pragma unroll
      for (int box = 0; box < BOXES; box += ADDED) {
        float acc[SUMS];
#if KIND == INT4
        if (box == 0 || !AHEAD) codes_of(codes[box % 2], from, box);
#endif
        products_begin();
#pragma unroll
        for (int each = 0; each < ADDED; each++)
#pragma unroll
          for (int part = 0; part < 4; part++) {
            const u64 right = operand(tokens + (box + each) * T_BOX) + 2 * part;
#if KIND == INT4
            multiply_rows(acc, codes[box % 2][part], right, part);
#else
            multiply_rows(acc, operand(from + (box + each) * W_BOX + warp / 4 * 64 * 128) + 2 * part, right, each | part);
#endif
          }
        products_commit();
#if KIND == INT4
        if (AHEAD && box + 1 < BOXES) codes_of(codes[(box + 1) % 2], from, box + 1);
#endif
        products_wait<0>();
        add(acc, box);
      }
#endif
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + 8 * slot);
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    done += here;

    const int row = tile * BLOCK_N + own_row;
    const float last_scales[2] = {coded.last_scale(row), coded.last_scale(row + 8)};
    auto write = [&](int eight, int r, float sum) {
      const int token = eight * 8 + lane % 4 * 2 + (r & 1), n = row + (r & 2) * 4;
      if (token >= T) return;
      float result = sum * last_scales[r / 2 % 2];
      if (bias) result += __uint_as_float((u32)bias[n] << 16);
      out[(u64)token * out_stride + n] = narrow(result);
    };
#if CLUSTER > 1
    using Sums = ClusterSums<BLOCK_T / 8, WORKERS, CLUSTER>;
    static_assert(Sums::BYTES <= STAGES * STAGE_BYTES, "sums take the place of stages");
    Sums::exchange(stages, value);
    for (int mine = 0; mine < Sums::MINE; mine++) {
      const int eight = part * Sums::MINE + mine;
      if (eight >= BLOCK_T / 8) break;
      const float4 sum = Sums::sum(stages, mine);
      write(eight, 0, sum.x), write(eight, 1, sum.y), write(eight, 2, sum.z), write(eight, 3, sum.w);
    }
#else
    const int first = tile * k_steps / per_chunk, last = (tile * k_steps + k_steps - 1) / per_chunk;
    if (first != last) {
      float* mine = partial + (u64)(2 * chunk + (chunk == first)) * (BLOCK_N * BLOCK_T) + threadIdx.x;
#pragma unroll
      for (int r = 0; r < VALUES; r++) __stcg(mine + r * WORKERS, value[r]);
      __threadfence();
      workers_meet();
      if (threadIdx.x == 0) arrived = atomicAdd(counters + tile, 1);
      workers_meet();
      if (arrived != last - first) continue;
      __threadfence();
      if (threadIdx.x == 0) counters[tile] = 0;
#pragma unroll
      for (int r = 0; r < VALUES; r++) value[r] = 0.0f;
      for (int c = first; c <= last; c++) {
        const float* theirs = partial + (u64)(2 * c + (c == first)) * (BLOCK_N * BLOCK_T) + threadIdx.x;
#pragma unroll
        for (int r = 0; r < VALUES; r++) value[r] += __ldcg(theirs + r * WORKERS);
      }
    }
#pragma unroll
    for (int r = 0; r < VALUES; r++) write(r / 4, r % 4, value[r]);
#endif
  }
}
