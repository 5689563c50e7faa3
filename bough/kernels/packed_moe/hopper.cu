// One of the two products of experts in codes, for few tokens of each expert, on Hopper:
// out[pair] = x[pair / per_token] @ weight[expert].T, with biases, and a gate over its halves if HALVES is 2.
//
// Pairs (token, expert) come sorted into batches of BLOCK_T pairs of one expert, those without an expert last. An item of work
// is a batch and ITEM_ROWS weight rows (of each half); every block of the grid has neighbouring items, of few batches. One thread
// feeds a ring of stages in shared memory through the copy engine, from item to item without a pause; the other warps gather a
// batch's tokens, all of their columns, and multiply. Of a stage a warp has 16 rows of each half and a slice of 128 columns; the
// slices' sums meet in shared memory at an item's end. In this way many warps work on little memory, and a few tokens' items are
// small enough to be spread evenly.
//
// Given, besides what `codes.cuh` wants: ROW_TILES (of 16 rows, of an item), SLICES (of 128 columns, of a stage), STAGES, HALVES,
// GATE (over them: 1 silu, 2 clamped), BIAS, SORTED (else a batch is a pair), EARLY (whether the choice of experts was made before
// the kernel before this one had begun: its weights can be asked for at once), SUMS (places for the slices' sums, 1 or 2).

#define PAIRED 1
#include "hopper.cuh"
#include "codes.cuh"
#include "experts.cuh"

static_assert(TILES == 1, "a warp has 16 rows");
constexpr int ITEM_ROWS = 16 * ROW_TILES;
constexpr int W_BOX = ITEM_ROWS * W_ROW_BYTES;
constexpr bool STAGED = GROUP == 32;                                      // scales come through the ring as well
constexpr int SCALE_BOX = STAGED ? 4 * SLICES * ITEM_ROWS * 2 : 0;        // of a half
constexpr int CODE_BYTES = HALVES * SLICES * W_BOX;
constexpr int STAGE_BYTES = CODE_BYTES + HALVES * SCALE_BOX;
constexpr int WARPS = ROW_TILES * SLICES, WORKERS = 32 * WARPS;
// A lone token's values are those of all tokens of the tensor cores' product, of which one is kept.
constexpr int HELD_TOKENS = SORTED ? BLOCK_T : 1, HELD_BOX = HELD_TOKENS * ROW_BYTES;
constexpr int OWNERS = SORTED ? 32 * ROW_TILES * REGS : ITEM_ROWS;        // sums of an item's half
constexpr int SUM_FLOATS = SLICES * HALVES * OWNERS;
constexpr int NEAR_BATCHES = 64;                                          // whose experts are kept in shared memory

static_assert(KIND != FLOAT4 || SCALED_ONCE || GROUP == 0, "scales in bf16");

INLINE void workers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

INLINE void ask_for_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// Adds the products of a box of each half of the weight, `apart` from each other, from this warp's rows on, and of the tokens'
// two boxes beside it. As `Groups::add_box`, with both halves at once, so that tokens are loaded once and sums of the one are
// made while those of the other are on their way.
INLINE void add_boxes(float (&acc)[HALVES][1][REGS], const Groups<1> (&groups)[HALVES], u32 weight, u32 apart, u32 tokens) {
  const int lane = threadIdx.x % 32, row = lane / 4, q = lane % 4, token = SORTED ? row : 0;
  const u32 first = weight + row * W_ROW_BYTES, boxes = tokens + q / 2 * HELD_BOX + token * ROW_BYTES;
  float sums[HALVES][REGS];
#pragma unroll
  for (int half = 0; half < HALVES; half++)
#pragma unroll
    for (int r = 0; r < REGS; r++) sums[half][r] = GROUP == 128 ? 0.0f : acc[half][0][r];
  uint4 codes[HALVES][2];
#pragma unroll
  for (int turn = 0; turn < 2; turn++) {
    const int own = turn ^ (q >> 1);
    if (!HALF_BYTES || turn == 0) {
      const int place = HALF_BYTES ? q * 16 : ((2 * q + own) ^ row) * 16;
#pragma unroll
      for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int lower = 0; lower < 2; lower++)
          codes[half][lower] = shared_16(first + half * apart + 8 * lower * W_ROW_BYTES + place);
    }
    const int chunk = HALF_BYTES ? 2 * (q % 2) + 4 * own : 4 * (q % 2) + 2 * own;
#pragma unroll
    for (int eight = 0; eight < 2; eight++) {
      uint4 values[BLOCK_T / 8];
#pragma unroll
      for (int block = 0; block < BLOCK_T / 8; block++)
        values[block] = shared_16(boxes + block * 8 * ROW_BYTES + ((chunk + eight) ^ token) * 16);
#pragma unroll
      for (int four = 0; four < 2; four++)
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
          u32 rows[4];
#pragma unroll
          for (int lower = 0; lower < 2; lower++) {
            const uint4& from = codes[half][lower];
            const u32 word = eight ? (four ? from.w : from.z) : (four ? from.y : from.x);
            const u32 more = groups[half].more[0][0][lower][Groups<1>::TURNS > 1 ? turn : 0];
#if KIND == FLOAT4
            // As `widen_four`, with the shift to one half of a byte in the product.
            constexpr u32 KEPT = 0x81c081c0u;
            const u32 by = own ? 0x0104u : 0x1040u, mask = own ? 0x00f000f0u : 0x000f000fu;
            const u32 factor = SCALED_ONCE ? more : 0x7e807e80u;  // 2^126
            rows[lower] = times_plus(((word & mask) * by) & KEPT, factor, 0x80008000u);
            rows[2 + lower] = times_plus((((word >> 8) & mask) * by) & KEPT, factor, 0x80008000u);
#else
            widen_four(HALF_BYTES ? word >> (4 * own) : word, more, rows[lower], rows[2 + lower]);
#endif
          }
#pragma unroll
          for (int block = 0; block < BLOCK_T / 8; block++) {
            const uint4& value = values[block];
            multiply(sums[half] + 4 * block, rows, four ? value.z : value.x, four ? value.w : value.y);
          }
        }
    }
  }
#pragma unroll
  for (int half = 0; half < HALVES; half++)
#pragma unroll
    for (int r = 0; r < REGS; r++)
      acc[half][0][r] = GROUP == 128 ? acc[half][0][r] + sums[half][r] * groups[half].scales[0][0][r / 2 % 2] : sums[half][r];
}

// By all workers: a batch's tokens, in boxes of 64 columns, swizzled; of four columns in the order 0 2 1 3. Columns beyond the
// depth, and tokens that are not there, are zero.
INLINE void gather(const Work& work, const int* batch_pairs, u32 tokens) {
  constexpr int AT_ONCE = 4;
  const int all = HELD_TOKENS * (work.boxes * 16);
  for (int begin = threadIdx.x; begin < all; begin += AT_ONCE * WORKERS) {
    uint4 value[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int at = begin + i * WORKERS, column = at / HELD_TOKENS * 8;
      const int pair = at < all ? batch_pairs[at % HELD_TOKENS] : work.num_pairs;
      value[i] = make_uint4(0, 0, 0, 0);
      if (pair < work.num_pairs && column < work.depth)
        value[i] = __ldcg((const uint4*)(work.x + (i64)(pair / work.per_token) * work.x_stride + column));
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int at = begin + i * WORKERS, column = at / HELD_TOKENS * 8, token = at % HELD_TOKENS;
      if (at >= all) break;
      const uint4 v = value[i];
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(
                       tokens + column / 64 * HELD_BOX + token * ROW_BYTES + ((column / 8 % 8) ^ (token % 8)) * 16),
                   "r"(__byte_perm(v.x, v.y, 0x5410)), "r"(__byte_perm(v.x, v.y, 0x7632)),
                   "r"(__byte_perm(v.z, v.w, 0x5410)), "r"(__byte_perm(v.z, v.w, 0x7632)) : "memory");
    }
  }
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32, 1) coded_experts(
    const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap scales, const __grid_constant__ Coded coded,
    const __grid_constant__ Work work) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES];
  __shared__ int batch_pairs[BLOCK_T];
  __shared__ int num_real;
  __shared__ int near_experts[NEAR_BATCHES];
  const u32 base = (u32)__cvta_generic_to_shared(memory), stages = (base + 1023) & ~1023u;
  const u32 tokens = stages + STAGES * STAGE_BYTES;
  float* const sums = (float*)(memory + (tokens - base) + work.boxes * (2 * HELD_BOX));
  const u32 full = (u32)__cvta_generic_to_shared(barriers), empty = full + 8 * STAGES;
  if (EARLY) let_kernel_after_start();
  if (threadIdx.x == WORKERS) {
    ask_for_map(weight);
    if (STAGED) ask_for_map(scales);
  }
  if (threadIdx.x == 0) {
    num_real = 0;
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (!EARLY) {
    wait_for_kernel_before();
    let_kernel_after_start();  // the kernel after this one may read the choice at once
  }
  for (int i = threadIdx.x; i < work.num_batches; i += WORKERS + 32) {
    const int expert = __ldcg(work.batch_expert + i);
    if (i < NEAR_BATCHES) near_experts[i] = expert;
    if ((u32)expert < (u32)work.experts) atomicMax(&num_real, i + 1);
  }
  __syncthreads();
  const auto expert_of = [&](int batch) { return batch < NEAR_BATCHES ? near_experts[batch] : __ldcg(work.batch_expert + batch); };
  const int tiles = work.rows / ITEM_ROWS, steps = (work.boxes + SLICES - 1) / SLICES;
  const i64 items = (i64)num_real * tiles;
  const int first_item = items * blockIdx.x / gridDim.x, last_item = items * (blockIdx.x + 1) / gridDim.x;
  int slot = 0;
  u32 parity = 0;

  if (threadIdx.x >= WORKERS) {
    if (threadIdx.x > WORKERS) return;
    const u64 once = held_shorter();
    int filled = 0, batch = -1, expert = -1;
    for (int item = first_item; item < last_item; item++) {
      if (item / tiles != batch) batch = item / tiles, expert = expert_of(batch);
      if ((u32)expert >= (u32)work.experts) continue;
      const int row = expert * (HALVES * work.rows) + item % tiles * ITEM_ROWS;
      for (int step = 0; step < steps; step++) {
        if (filled >= STAGES) barrier_wait(empty + 8 * slot, parity ^ 1);
        const u32 to = stages + slot * STAGE_BYTES, barrier = full + 8 * slot;
        const int boxes = min(SLICES, work.boxes - step * SLICES);
        barrier_expect(barrier, HALVES * (boxes * W_BOX + SCALE_BOX));
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
          const int first = row + half * work.rows;
          for (int box = 0; box < boxes; box++)
            fetch_held(to + (half * SLICES + box) * W_BOX, weight, (step * SLICES + box) * (HALF_BYTES ? 64 : 128), first, barrier,
                       once);
          if (STAGED) fetch_held(to + CODE_BYTES + half * SCALE_BOX, scales, first, step * (4 * SLICES), barrier, once);
        }
        filled++;
        if (++slot == STAGES) slot = 0, parity ^= 1;
      }
    }
    return;
  }

  if (EARLY) wait_for_kernel_before();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slice = warp / ROW_TILES, first_row = warp % ROW_TILES * 16;
  int gathered = -1, expert = -1, place = 0;
  for (int item = first_item; item < last_item; item++) {
    const int batch = item / tiles, tile = item % tiles;
    if (batch != gathered) {
      expert = expert_of(batch);
      if ((u32)expert >= (u32)work.experts) continue;
      gathered = batch;
      workers_meet();  // the last batch's tokens have been read
      if (threadIdx.x < BLOCK_T) {
        const int alone = threadIdx.x == 0 ? batch : work.num_pairs;
        batch_pairs[threadIdx.x] = SORTED ? __ldcg(work.pairs + batch * BLOCK_T + threadIdx.x) : alone;
      }
      workers_meet();
      gather(work, batch_pairs, tokens);
      workers_meet();
    }
    const i64 row = (i64)expert * (HALVES * work.rows) + tile * ITEM_ROWS + first_row + lane / 4;
    float acc[HALVES][1][REGS] = {};
    Groups<1> groups[HALVES];
    if (!STAGED && slice < work.boxes)
#pragma unroll
      for (int half = 0; half < HALVES; half++) groups[half].load(coded, row + (i64)half * work.rows, slice);
    for (int step = 0; step < steps; step++) {
      const int box = step * SLICES + slice;
      const u32 from = stages + slot * STAGE_BYTES;
      Groups<1> now[HALVES];
      if (!STAGED) {
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
          now[half] = groups[half];
          if (box + SLICES < work.boxes) groups[half].load(coded, row + (i64)half * work.rows, box + SLICES);
        }
      }
      barrier_wait(full + 8 * slot, parity);
      if (box < work.boxes) {
        if (STAGED)
#pragma unroll
          for (int half = 0; half < HALVES; half++)
            now[half].load_shared(from + CODE_BYTES + half * SCALE_BOX + 2 * (slice * 4 * ITEM_ROWS + first_row), ITEM_ROWS);
        add_boxes(acc, now, from + slice * W_BOX + first_row * W_ROW_BYTES, SLICES * W_BOX, tokens + 2 * box * HELD_BOX);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + 8 * slot);
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }

    // Sums of a slice lie as its threads have them: [slice, half, sum of a thread, row tile, lane]; of a lone token, by rows.
    float* const meet = sums + place * SUM_FLOATS;
    if (SUMS > 1) place ^= 1;
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
      for (int r = 0; r < REGS; r++) {
        if (SORTED)
          meet[((slice * HALVES + half) * REGS + r) * (32 * ROW_TILES) + first_row * 2 + lane] = acc[half][0][r];
        else if (r % 2 == 0 && r < 4 && lane % 4 == 0)
          meet[(slice * HALVES + half) * OWNERS + first_row + lane / 4 + 4 * r] = acc[half][0][r];
      }
    workers_meet();
    for (int at = threadIdx.x; at < OWNERS; at += WORKERS) {
      const int r = at / (32 * ROW_TILES), of_row = at % (32 * ROW_TILES) / 32, of_lane = at % 32;
      const int pair = SORTED ? batch_pairs[r / 4 * 8 + of_lane % 4 * 2 + (r & 1)] : batch;
      const int n = tile * ITEM_ROWS + (SORTED ? 16 * of_row + of_lane / 4 + (r & 2) * 4 : at);
      if (pair >= work.num_pairs) continue;
      float value[HALVES];
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < SLICES; s++) sum += meet[(s * HALVES + half) * OWNERS + at];
        const i64 of = (i64)expert * (HALVES * work.rows) + half * work.rows + n;
        value[half] = sum * (1.0f / LEFT) * coded.last_scale(of);
        // Rounded as it would be if it were stored.
        if (HALVES > 1) value[half] = rounded(value[half]);
        if (BIAS) value[half] += low(__ldg(work.bias + of));
        if (BIAS && HALVES > 1) value[half] = rounded(value[half]);
      }
      work.out[(i64)pair * work.rows + n] = narrow(HALVES > 1 ? gated(value[0], value[HALVES - 1], work) : value[0]);
    }
    if (SUMS == 1) workers_meet();
  }
}
