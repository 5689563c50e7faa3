// A product of few tokens with a weight matrix, for Hopper: out[T, rows] = x[T, D] @ weight[rows, D].T
//
// All (tile of weight rows, step along D) pairs form one stream, cut into equal chunks, one a block. One thread feeds a ring
// of stages in shared memory through the copy engine; it asks for the first weight tiles before the kernel before this one
// has ended, since no kernel writes weights. The other warps multiply: weight rows are M of the tensor-core product, tokens N.
// A tile cut over several chunks is summed, in their order, by the block that finishes last.
//
// A weight in codes of 8 or 4 bits (KIND) is read as it is stored, and turned into bf16 on its way to the tensor cores, whose
// smaller product takes it from registers: a quarter of the issue slots go into that, at memory's pace.
//
// With NORM, x is first added to the residual stream and normed: every block does so for itself, while its weights arrive, and
// keeps all of it.
//
// Given: BLOCK_T (tokens, 8 .. 64), BLOCK_K (columns a step, a multiple of 64), GROUPS (warpgroups of 64 weight rows),
// STAGES, SILU (two halves of the weight, joined by the activation), FP16 (else bf16), NORM (D, where a norm comes first, of
// at most 8 tokens in bf16; else 0). KIND (what a weight's value is: FLOATS as x, FLOAT8 or INT4); of codes, with bf16: TILES
// (of 16 weight rows a warp has), GROUP (columns that share a scale, 128; 0: all do), SCALE_ROWS (rows that share one), SCALES
// (their type: 0 float32, 1 bf16, 2 fp16), ZEROS (whether integers have zero points of their own; else 8).

#include "hopper.cuh"
#include "codes.cuh"

constexpr int HALVES = SILU ? 2 : 1;
constexpr int BLOCK_N = 64 * GROUPS * TILES;
constexpr int X_BOXES = BLOCK_K / 64;
constexpr int W_BOXES = BLOCK_K / W_COLUMNS;
constexpr int W_BOX = BLOCK_N * W_ROW_BYTES;
constexpr int STAGE_BYTES = HALVES * W_BOXES * W_BOX + (NORM ? 0 : X_BOXES * X_BOX);
constexpr int WORKERS = 128 * GROUPS;
constexpr int PARTS = SILU ? 2 : TILES;  // of the sums that a thread has

static_assert(!NORM || (BLOCK_T == 8 && !FP16), "what is normed here");
static_assert(KIND == FLOATS ? TILES == 1 : !SILU && !FP16, "what codes are multiplied with");

#if KIND == FLOATS
#if FP16
#define TYPES "f32.f16.f16"
#else
#define TYPES "f32.bf16.bf16"
#endif
#define F4(o) "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3])
#define F16(o) F4(o), F4(o + 4), F4(o + 8), F4(o + 12)
#define MULTIPLY(shape, operands, a, b, p, ...)                                              \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " p ", 0; wgmma.mma_async.sync.aligned." shape \
               "." TYPES " {" operands "}, " a ", " b ", p, 1, 1, 0, 0; }"                    \
               : __VA_ARGS__ : "l"(left), "l"(right), "r"(keep))

INLINE void multiply(float (&d)[REGS], u64 left, u64 right, int keep) {
#if BLOCK_T == 8
  MULTIPLY("m64n8k16", "%0, %1, %2, %3", "%4", "%5", "%6", F4(0));
#elif BLOCK_T == 16
  MULTIPLY("m64n16k16", "%0, %1, %2, %3, %4, %5, %6, %7", "%8", "%9", "%10", F4(0), F4(4));
#elif BLOCK_T == 32
  MULTIPLY("m64n32k16", "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15", "%16", "%17", "%18",
           F16(0));
#else
  MULTIPLY("m64n64k16",
           "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
           "%23, %24, %25, %26, %27, %28, %29, %30, %31", "%32", "%33", "%34", F16(0), F16(16));
#endif
}
#endif

INLINE u16 narrow(float value) {
  u16 out;
#if FP16
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
#endif
  return out;
}

INLINE float widen(u16 value) {
#if FP16
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value));
  return out;
#else
  return __uint_as_float((u32)value << 16);
#endif
}

INLINE void workers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

extern "C" __global__ void __launch_bounds__(WORKERS + 32) ring(
    const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, const u16* bias, u16* out, float* partial,
    int* counters, int T, int rows, int out_stride, int per_chunk, int total, int k_steps,
    const __grid_constant__ Normed normed, const __grid_constant__ Coded coded) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES];
  __shared__ int arrived;
  let_kernel_after_start();
  const u32 stages = ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
  const u32 kept = stages + STAGES * STAGE_BYTES;  // all of x, in boxes
  const u32 full = (u32)__cvta_generic_to_shared(barriers), empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4 * GROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  const int chunk = blockIdx.x, start = chunk * per_chunk, depth = k_steps * BLOCK_K;
  const int steps = min(per_chunk, total - start);
  int tile = start / k_steps, k = (start - tile * k_steps) * BLOCK_K;

  if (threadIdx.x >= WORKERS) {
    if (threadIdx.x > WORKERS) return;
    const u64 once = held_shorter(), often = held_longer();
    auto ask_weight = [&](int slot) {
      const u32 to = stages + slot * STAGE_BYTES, barrier = full + 8 * slot;
      barrier_expect(barrier, STAGE_BYTES);
#pragma unroll
      for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int box = 0; box < W_BOXES; box++)
          fetch_held(to + (half * W_BOXES + box) * W_BOX, weight, (k + W_COLUMNS * box) / (HALF_BYTES ? 2 : 1),
                     half * rows + tile * BLOCK_N, barrier, once);
    };
    auto ask_x = [&](int slot, int column) {
      if (NORM) return;
      const u32 to = stages + slot * STAGE_BYTES + HALVES * W_BOXES * W_BOX;
#pragma unroll
      for (int box = 0; box < X_BOXES; box++) fetch_held(to + box * X_BOX, x, column + 64 * box, 0, full + 8 * slot, often);
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
      ask_weight(slot);
      ask_x(slot, k);
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    return;
  }

#if NORM
  __shared__ float squares[BLOCK_T][WORKERS / 32];
  unsigned char* boxes = memory + (kept - (u32)__cvta_generic_to_shared(memory));
  auto place = [&](int token, int column) {  // swizzled as the copy engine does it
    return (uint4*)(boxes + column / 64 * X_BOX + token * ROW_BYTES + (column / 8 % 8 ^ token) * 16);
  };
  norm_tokens<NORM, WORKERS>(normed, T, squares, place, [] { workers_meet(); });
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  workers_meet();
#else
  wait_for_kernel_before();
#endif
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int slot = 0, k_step = k / BLOCK_K;
  u32 parity = 0;
#if KIND != FLOATS
  const int first_row = warp * (16 * TILES) + lane / 4;
  Groups<W_BOXES> coming;
  coming.load(coded, tile * BLOCK_N + first_row, k_step);
#endif
  for (int done = 0; done < steps; tile++, k_step = 0) {
    const int here = min(k_steps - k_step, steps - done);
    float acc[PARTS][REGS];
#if KIND == FLOATS
    int before = slot;
    for (int i = 0; i < here; i++) {
      barrier_wait(full + 8 * slot, parity);
      const u32 from = stages + slot * STAGE_BYTES;
      products_begin();
#pragma unroll
      for (int box = 0; box < X_BOXES; box++)
#pragma unroll
        for (int part = 0; part < 4; part++) {
          const u32 tokens = NORM ? kept + ((k_step + i) * X_BOXES + box) * X_BOX : from + HALVES * W_BOXES * W_BOX + box * X_BOX;
          const u64 right = operand(tokens) + 2 * part;
#pragma unroll
          for (int half = 0; half < HALVES; half++) {
            const u64 left = operand(from + (half * W_BOXES + box) * W_BOX + warp / 4 * 64 * ROW_BYTES) + 2 * part;
            multiply(acc[half], left, right, i | box | part);
          }
        }
      products_commit();
      products_wait<1>();
      if (i > 0 && lane == 0) barrier_arrive(empty + 8 * before);
      before = slot;
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    products_wait<0>();
    if (lane == 0) barrier_arrive(empty + 8 * before);
#else
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
      for (int r = 0; r < REGS; r++) acc[part][r] = 0.0f;
    for (int i = 0; i < here; i++) {
      const Groups<W_BOXES> groups = coming;
      const bool wraps = k_step + i + 1 == k_steps;
      if (done + i + 1 < steps)
        coming.load(coded, (tile + wraps) * BLOCK_N + first_row, wraps ? 0 : k_step + i + 1);
      barrier_wait(full + 8 * slot, parity);
      const u32 from = stages + slot * STAGE_BYTES;
#pragma unroll
      for (int box = 0; box < W_BOXES; box++) {
        const u32 rows_at = from + box * W_BOX + warp * (16 * TILES) * W_ROW_BYTES;
        const u32 tokens = NORM ? kept + ((k_step + i) * X_BOXES + 2 * box) * X_BOX : from + W_BOXES * W_BOX + 2 * box * X_BOX;
        groups.add_box(acc, box, rows_at, tokens);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + 8 * slot);
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }
#endif
    done += here;

    const int first = tile * k_steps / per_chunk, last = (tile * k_steps + k_steps - 1) / per_chunk;
    if (first != last) {
      float* mine = partial + (u64)(2 * chunk + (chunk == first)) * (HALVES * BLOCK_N * BLOCK_T) + threadIdx.x;
#pragma unroll
      for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int r = 0; r < REGS; r++) __stcg(mine + (part * REGS + r) * WORKERS, acc[part][r]);
      __threadfence();
      workers_meet();
      if (threadIdx.x == 0) arrived = atomicAdd(counters + tile, 1);
      workers_meet();
      if (arrived != last - first) continue;
      __threadfence();
      if (threadIdx.x == 0) counters[tile] = 0;
#pragma unroll
      for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int r = 0; r < REGS; r++) acc[part][r] = 0.0f;
      for (int c = first; c <= last; c++) {
        const float* theirs = partial + (u64)(2 * c + (c == first)) * (HALVES * BLOCK_N * BLOCK_T) + threadIdx.x;
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
          for (int r = 0; r < REGS; r++) acc[part][r] += __ldcg(theirs + (part * REGS + r) * WORKERS);
      }
    }
#pragma unroll
    for (int part = 0; part < TILES; part++)
#pragma unroll
      for (int r = 0; r < REGS; r++) {
        const int token = r / 4 * 8 + lane % 4 * 2 + (r & 1);
        const int n = tile * BLOCK_N + (warp * TILES + part) * 16 + lane / 4 + (r & 2) * 4;
        if (token >= T) continue;
        float value = acc[part][r];
#if SILU
        // Rounded as the two halves would be if they were stored.
        const float gate = widen(narrow(value));
        value = gate / (1.0f + __expf(-gate)) * widen(narrow(acc[1][r]));
#endif
#if KIND != FLOATS
        value *= coded.last_scale(n);
#endif
        if (bias) value += widen(bias[n]);
        out[(u64)token * out_stride + n] = narrow(value);
      }
  }
}
