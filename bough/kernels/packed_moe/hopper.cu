// One of the two products of experts in codes, for few tokens of each expert, on Hopper:
// out[pair] = x[pair / per_token] @ weight[expert].T, with biases, and a gate over its halves if HALVES is 2.
//
// Pairs (token, expert) come sorted into batches of BLOCK_T pairs of one expert, those without an expert last. An item of work
// is a batch and BLOCK_N weight rows (of each half); every block of the grid has neighbouring items, of few batches. One thread
// feeds a ring of stages in shared memory through the copy engine, from item to item without a pause; the other warps gather a
// batch's tokens, all of their columns, and multiply.
//
// Given, besides what `codes.cuh` wants: BLOCK_K (columns a step, a multiple of 128), GROUPS (warpgroups), STAGES, HALVES, GATE
// (over them: 1 silu, 2 clamped), BIAS, SORTED (else a batch is a pair).

#include "hopper.cuh"
#include "codes.cuh"

constexpr int BLOCK_N = 64 * GROUPS * TILES;
constexpr int W_BOXES = BLOCK_K / W_COLUMNS;
constexpr int W_BOX = BLOCK_N * W_ROW_BYTES;
constexpr int STAGE_BYTES = HALVES * W_BOXES * W_BOX;
constexpr int WORKERS = 128 * GROUPS;
constexpr int X_BOXES = BLOCK_K / 64;  // of a step

struct Work {
  const u16* x;
  const int *batch_expert, *pairs;
  const u16* bias;  // [experts, HALVES * rows]
  u16* out;         // [num_pairs, rows]
  i64 x_stride;
  int num_pairs, per_token, rows, depth, k_steps, num_batches, experts;
  float alpha, limit;
};

INLINE u16 narrow(float value) {
  u16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
  return out;
}
INLINE float rounded(float value) { return low(narrow(value)); }

// 16 bytes, or zeros.
INLINE void copy16(u32 to, const u16* from, bool is_real) {
  const int bytes = is_real ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"((u64)from), "r"(bytes) : "memory");
}
INLINE void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
INLINE void workers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

INLINE float gated(float gate, float up, const Work& work) {
  if (GATE == 2) {
    gate = fminf(gate, work.limit);
    up = fminf(fmaxf(up, -work.limit), work.limit) + 1.0f;
    return up * gate / (1.0f + __expf(-work.alpha * gate));
  }
  return gate / (1.0f + __expf(-gate)) * up;
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32) coded_experts(
    const __grid_constant__ TensorMap weight, const __grid_constant__ Coded coded, const __grid_constant__ Work work) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES];
  __shared__ int batch_pairs[BLOCK_T];
  __shared__ int num_real;
  let_kernel_after_start();
  const u32 stages = ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
  const u32 tokens = stages + STAGES * STAGE_BYTES;
  const u32 full = (u32)__cvta_generic_to_shared(barriers), empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    num_real = 0;
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4 * GROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  wait_for_kernel_before();
  for (int i = threadIdx.x; i < work.num_batches; i += WORKERS + 32)
    if ((u32)__ldcg(work.batch_expert + i) < (u32)work.experts) atomicMax(&num_real, i + 1);
  __syncthreads();
  const int tiles = work.rows / BLOCK_N;
  const i64 items = (i64)num_real * tiles;
  const int first_item = items * blockIdx.x / gridDim.x, last_item = items * (blockIdx.x + 1) / gridDim.x;
  int slot = 0;
  u32 parity = 0;

  if (threadIdx.x >= WORKERS) {
    if (threadIdx.x > WORKERS) return;
    const u64 once = held_shorter();
    int filled = 0;
    for (int item = first_item; item < last_item; item++) {
      const int expert = __ldcg(work.batch_expert + item / tiles);
      if ((u32)expert >= (u32)work.experts) continue;
      const int row = expert * (HALVES * work.rows) + item % tiles * BLOCK_N;
      for (int step = 0; step < work.k_steps; step++) {
        if (filled >= STAGES) barrier_wait(empty + 8 * slot, parity ^ 1);
        const u32 to = stages + slot * STAGE_BYTES, barrier = full + 8 * slot;
        barrier_expect(barrier, STAGE_BYTES);
#pragma unroll
        for (int half = 0; half < HALVES; half++)
#pragma unroll
          for (int box = 0; box < W_BOXES; box++)
            fetch_held(to + (half * W_BOXES + box) * W_BOX, weight, (step * BLOCK_K + W_COLUMNS * box) / (HALF_BYTES ? 2 : 1),
                       row + half * work.rows, barrier, once);
        filled++;
        if (++slot == STAGES) slot = 0, parity ^= 1;
      }
    }
    return;
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = warp * (16 * TILES);
  int gathered = -1;
  for (int item = first_item; item < last_item; item++) {
    const int batch = item / tiles, tile = item % tiles, expert = __ldcg(work.batch_expert + batch);
    if ((u32)expert >= (u32)work.experts) continue;
    const i64 row = (i64)expert * (HALVES * work.rows) + tile * BLOCK_N + first_row + lane / 4;
    Groups<W_BOXES> coming[HALVES];
#pragma unroll
    for (int half = 0; half < HALVES; half++) coming[half].load(coded, row + (i64)half * work.rows, 0);
    if (batch != gathered) {
      gathered = batch;
      workers_meet();  // the last batch's tokens have been read
      if (threadIdx.x < BLOCK_T) {
        const int alone = threadIdx.x == 0 ? batch : work.num_pairs;
        batch_pairs[threadIdx.x] = SORTED ? __ldcg(work.pairs + batch * BLOCK_T + threadIdx.x) : alone;
      }
      workers_meet();
      for (int at = threadIdx.x; at < BLOCK_T * (work.k_steps * BLOCK_K / 8); at += WORKERS) {
        const int token = at % BLOCK_T, column = at / BLOCK_T * 8, pair = batch_pairs[token];
        const bool is_real = pair < work.num_pairs && column < work.depth;
        const u16* from = work.x + (is_real ? (i64)(pair / work.per_token) * work.x_stride + column : 0);
        copy16(tokens + column / 64 * X_BOX + token * ROW_BYTES + ((column / 8 % 8) ^ (token % 8)) * 16, from, is_real);
      }
      copies_wait();
      workers_meet();
    }

    float acc[HALVES][TILES][REGS] = {};
    for (int step = 0; step < work.k_steps; step++) {
      Groups<W_BOXES> groups[HALVES];
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        groups[half] = coming[half];
        if (step + 1 < work.k_steps) coming[half].load(coded, row + (i64)half * work.rows, step + 1);
      }
      barrier_wait(full + 8 * slot, parity);
      const u32 from = stages + slot * STAGE_BYTES;
#pragma unroll
      for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int box = 0; box < W_BOXES; box++)
          groups[half].add_box(acc[half], box, from + (half * W_BOXES + box) * W_BOX + first_row * W_ROW_BYTES,
                               tokens + (step * X_BOXES + 2 * box) * X_BOX);
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + 8 * slot);
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }

#pragma unroll
    for (int part = 0; part < TILES; part++)
#pragma unroll
      for (int r = 0; r < REGS; r++) {
        const int pair = batch_pairs[r / 4 * 8 + lane % 4 * 2 + (r & 1)];
        const int n = tile * BLOCK_N + first_row + 16 * part + lane / 4 + (r & 2) * 4;
        if (pair >= work.num_pairs) continue;
        float value[HALVES];
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
          const i64 at = (i64)expert * (HALVES * work.rows) + half * work.rows + n;
          value[half] = acc[half][part][r] * coded.last_scale(at);
          // Rounded as it would be if it were stored.
          if (HALVES > 1) value[half] = rounded(value[half]);
          if (BIAS) value[half] += low(__ldg(work.bias + at));
          if (BIAS && HALVES > 1) value[half] = rounded(value[half]);
        }
        work.out[(i64)pair * work.rows + n] = narrow(HALVES > 1 ? gated(value[0], value[HALVES - 1], work) : value[0]);
      }
  }
}
