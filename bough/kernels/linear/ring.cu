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
// (of 16 weight rows a warp has), GROUP (whether 128 columns share a scale; else all do), SCALE_ROWS (rows that share one),
// SCALES (their type: 0 float32, 1 bf16, 2 fp16), ZEROS (whether integers have zero points of their own; else 8).

#include "hopper.cuh"

#define FLOATS 0
#define FLOAT8 1
#define INT4 2

constexpr int HALVES = SILU ? 2 : 1;
constexpr int BLOCK_N = 64 * GROUPS * TILES;
constexpr int ROW_BYTES = 128;  // of a tile in shared memory: 64 elements
constexpr int X_BOXES = BLOCK_K / 64;
constexpr int X_BOX = BLOCK_T * ROW_BYTES;
constexpr int W_COLUMNS = KIND == FLOATS ? 64 : 128;  // of a box
constexpr int W_ROW_BYTES = KIND == INT4 ? 64 : 128;
constexpr int W_BOXES = BLOCK_K / W_COLUMNS;
constexpr int W_BOX = BLOCK_N * W_ROW_BYTES;
constexpr int STAGE_BYTES = HALVES * W_BOXES * W_BOX + (NORM ? 0 : X_BOXES * X_BOX);
constexpr int WORKERS = 128 * GROUPS;
constexpr int PARTS = SILU ? 2 : TILES;  // of the sums that a thread has
constexpr int REGS = BLOCK_T / 2;

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
#else
INLINE uint4 shared_16(u32 at) {
  uint4 out;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "r"(at));
  return out;
}

// 16 weight rows x 16 columns x 8 tokens.
INLINE void multiply(float* d, const u32 (&rows)[4], u32 first, u32 second) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(first), "r"(second));
}

INLINE u32 times_plus(u32 two, u32 factor, u32 addend) {
  u32 out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(two), "r"(factor), "r"(addend));
  return out;
}

// Two codes, one in each half, as bf16. e4m3: bits go where those of a bf16 belong, a product mends the exponent's bias.
// Integers: below the exponent of 128 they make 128 + code, `minus` takes away that and the zero point.
INLINE u32 widen_two(u32 halves, u32 minus) {
#if KIND == FLOAT8
  return times_plus((halves & 0x80008000u) | ((halves >> 4) & 0x07f007f0u), 0x7b807b80u, 0x80008000u);  // 2^120, -0
#else
  return times_plus((halves & 0x000f000fu) | 0x43004300u, 0x3f803f80u, minus);
#endif
}

INLINE void widen_four(u32 codes, u32 minus, u32& first, u32& second) {
#if KIND == FLOAT8
  first = widen_two(__byte_perm(codes, 0, 0x1404), minus);
  second = widen_two(__byte_perm(codes, 0, 0x3424), minus);
#else
  first = widen_two(__byte_perm(codes, 0, 0x4140), minus);
  second = widen_two(__byte_perm(codes, 0, 0x4342), minus);
#endif
}

// Adds the products of a box of the weight, from this warp's rows on, and of the tokens' two boxes beside it.
//
// Which columns a step of the tensor cores takes is free, if rows and tokens agree: a thread takes 16 bytes of a row at a time
// and the tokens' values for the same columns, in an order in which no two threads want the same bank. Of FLOAT8, thread q of
// four has columns 32 q .. 32 q + 31. INT4: of 64 columns byte j has column j in its low half and j + 32 in its high half;
// thread q has bytes 16 q .. 16 q + 15.
INLINE void add_box(float (&acc)[TILES][REGS], u32 weight, u32 tokens, const u32 (&minus)[TILES][2]) {
  const int lane = threadIdx.x % 32, row = lane / 4, q = lane % 4;
  const u32 first = weight + row * W_ROW_BYTES, boxes = tokens + q / 2 * X_BOX + row * ROW_BYTES;
  uint4 codes[TILES][2];
#pragma unroll
  for (int turn = 0; turn < 2; turn++) {
    const int own = turn ^ (q >> 1);
    if (KIND == FLOAT8 || turn == 0) {
      const int place = KIND == FLOAT8 ? ((2 * q + own) ^ row) * 16 : q * 16;
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int lower = 0; lower < 2; lower++)
          codes[tile][lower] = shared_16(first + (16 * tile + 8 * lower) * W_ROW_BYTES + place);
    }
    const int chunk = KIND == FLOAT8 ? 4 * (q % 2) + 2 * own : 2 * (q % 2) + 4 * own, shift = 4 * own;
#pragma unroll
    for (int eight = 0; eight < 2; eight++) {
      uint4 values[BLOCK_T / 8];
#pragma unroll
      for (int block = 0; block < BLOCK_T / 8; block++)
        values[block] = shared_16(boxes + block * 8 * ROW_BYTES + ((chunk + eight) ^ row) * 16);
#pragma unroll
      for (int four = 0; four < 2; four++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          u32 rows[4];
#pragma unroll
          for (int lower = 0; lower < 2; lower++) {
            const uint4& from = codes[tile][lower];
            u32 word = eight ? (four ? from.w : from.z) : (four ? from.y : from.x);
            if (KIND == INT4) word >>= shift;
            widen_four(word, minus[tile][lower], rows[lower], rows[2 + lower]);
          }
#pragma unroll
          for (int block = 0; block < BLOCK_T / 8; block++) {
            const uint4& value = values[block];
            multiply(acc[tile] + 4 * block, rows, four ? value.z : value.x, four ? value.w : value.y);
          }
        }
    }
  }
}

INLINE float scale_at(const void* scales, i64 at) {
#if SCALES == 0
  return __ldg((const float*)scales + at);
#else
  const u32 bits = __ldg((const u16*)scales + at);
#if SCALES == 1
  return __uint_as_float(bits << 16);
#else
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"((u16)bits));
  return out;
#endif
#endif
}

// What a thread's rows have of a stage besides codes: the scales of its groups, and what is taken away from 128 + code.
struct Groups {
  float scale[W_BOXES][TILES][2];
  u32 minus[W_BOXES][TILES][2];

  INLINE void load(const void* scales, const unsigned char* zeros, int width, int first_row, int step) {
#pragma unroll
    for (int box = 0; box < W_BOXES; box++)
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
          const i64 at = (i64)(GROUP ? step * W_BOXES + box : 0) * width + (first_row + 16 * tile + 8 * lower) / SCALE_ROWS;
          scale[box][tile][lower] = GROUP ? scale_at(scales, at) : 1.0f;
          minus[box][tile][lower] = 0xc308c308u;  // -(128 + 8)
          if (ZEROS) {
            const float zero = -128.0f - (float)__ldg(zeros + at);
            minus[box][tile][lower] = both(zero, zero);
          }
        }
  }
};
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

struct Coded {
  const void* scales;
  const float* row_scales;
  const unsigned char* zeros;
  int width;  // scales of a group
};

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
          fetch_held(to + (half * W_BOXES + box) * W_BOX, weight, (k + W_COLUMNS * box) / (KIND == INT4 ? 2 : 1),
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
  Groups coming;
  coming.load(coded.scales, coded.zeros, coded.width, tile * BLOCK_N + first_row, k_step);
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
      const Groups groups = coming;
      const bool wraps = k_step + i + 1 == k_steps;
      if (done + i + 1 < steps)
        coming.load(coded.scales, coded.zeros, coded.width, (tile + wraps) * BLOCK_N + first_row, wraps ? 0 : k_step + i + 1);
      barrier_wait(full + 8 * slot, parity);
      const u32 from = stages + slot * STAGE_BYTES;
#pragma unroll
      for (int box = 0; box < W_BOXES; box++) {
        const u32 rows_at = from + box * W_BOX + warp * (16 * TILES) * W_ROW_BYTES;
        const u32 tokens = NORM ? kept + ((k_step + i) * X_BOXES + 2 * box) * X_BOX : from + W_BOXES * W_BOX + 2 * box * X_BOX;
        if (!GROUP) {
          add_box(acc, rows_at, tokens, groups.minus[box]);
          continue;
        }
        float sums[TILES][REGS] = {};
        add_box(sums, rows_at, tokens, groups.minus[box]);
#pragma unroll
        for (int part = 0; part < TILES; part++)
#pragma unroll
          for (int r = 0; r < REGS; r++) acc[part][r] += sums[part][r] * groups.scale[box][part][r / 2 % 2];
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
        if (!GROUP) value *= scale_at(coded.scales, n / SCALE_ROWS);
        if (coded.row_scales) value *= __ldg(coded.row_scales + n);
#endif
        if (bias) value += widen(bias[n]);
        out[(u64)token * out_stride + n] = narrow(value);
      }
  }
}
