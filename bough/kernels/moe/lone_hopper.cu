// The experts' feed-forward for very few tokens, for Hopper, in one launch:
// out[t] = sum over the token's experts e of weight * down_e(silu(gate_e(x[t])) * up_e(x[t])), bf16.
//
// One block a multiprocessor, all at once. Each block has a share of the gate and up rows of all pairs (token, expert) and a
// share of the rows of the result, cut into units of whole weight rows. One warp feeds a ring of slots in shared memory
// through the copy engine, first with gate and up rows, then with down rows, without a pause between them: each of its lanes
// has a slot and fills it as soon as it is empty. The other warps multiply, each a unit of its own at a time. Between the
// two kinds all blocks meet, since a row of `down` needs all of its pair's hidden units; meanwhile the ring fills. A block has
// its rows of the result from all pairs, so it adds them up itself, in the order of the token's choices.
//
// All blocks of a launch must run at once. Launches of one stream don't disturb each other: one has started as a whole before
// the next may. Launches of several streams at a time could take multiprocessors from each other and wait forever.
//
// Given: D, F (multiples of 8), GATED_ROWS (gate rows of a unit, and as many up rows; a divisor of F), DOWN_ROWS (rows of
// `down` in a unit, at most), SLOT_BYTES (holds a unit of either kind), WARPS (that multiply), STREAMS (that have counters).

#include "hopper.cuh"

constexpr int MOST_PAIRS = 32, MOST_SLOTS = 32;  // a lane of the feeding warp each
constexpr int WORKERS = 32 * WARPS;
constexpr int GATED_AT_ONCE = GATED_ROWS > 1 ? 2 : 1;  // gate rows that a warp multiplies together, with their up rows
constexpr int DOWN_AT_ONCE = DOWN_ROWS >= 4 ? 4 : DOWN_ROWS >= 2 ? 2 : 1;

static_assert(D % 8 == 0 && F % 8 == 0, "rows must start at multiples of 16 bytes");
static_assert(F % GATED_ROWS == 0 && GATED_ROWS % GATED_AT_ONCE == 0, "a unit has rows of one pair");
static_assert(SLOT_BYTES % 128 == 0 && SLOT_BYTES >= 4 * D * GATED_ROWS && SLOT_BYTES >= 2 * F * DOWN_ROWS, "a unit fits");

// What a block works off: the units 0 .. units() - 1, gate and up rows first. Pairs that no expert here serves don't count.
struct Share {
  int gated_first, gated;                // units among those of all blocks, their number
  int down_first, down_rows, pieces;     // rows of the result, their number, units of them a pair
  int pairs;

  struct Unit {
    bool is_down;
    int pair, row, rows;                 // place among the pairs that count, first row of the matrix, rows
  };

  INLINE Share(int block, int blocks, int pairs) : pairs(pairs) {
    const int all = pairs * (F / GATED_ROWS);
    gated = all / blocks + (block < all % blocks);
    gated_first = block * (all / blocks) + min(block, all % blocks);
    // The last blocks have a row more here, the first ones a unit more there.
    const int mirrored = blocks - 1 - block;
    down_rows = D / blocks + (mirrored < D % blocks);
    down_first = mirrored * (D / blocks) + min(mirrored, D % blocks);
    pieces = (down_rows + DOWN_ROWS - 1) / DOWN_ROWS;
  }

  INLINE int units() const { return gated + pairs * pieces; }

  INLINE Unit unit(int i) const {
    if (i < gated) {
      const int at = gated_first + i;
      return {false, at / (F / GATED_ROWS), at % (F / GATED_ROWS) * GATED_ROWS, GATED_ROWS};
    }
    const int pair = (i - gated) / pieces, row = (i - gated) % pieces * DOWN_ROWS;
    return {true, pair, down_first + row, min(DOWN_ROWS, down_rows - row)};
  }
};

struct Inputs {
  const u16 *x, *gate_up, *down;
  const float* weights;
  const int* ids;
  u16 *hidden, *out;
  i64 x_stride;
  int tokens, per_token, experts;
  int slots, vector_bytes;  // of the ring; room for x or the hidden units
  int stream;               // which counter is this launch's
};

// Per stream; the highest bit changes when all blocks of a launch have come, the others are zero again then.
__device__ u32 counters[STREAMS];

INLINE float low(u32 two) { return __uint_as_float(two << 16); }
INLINE float high(u32 two) { return __uint_as_float(two & 0xffff0000); }

INLINE u16 narrow(float value) {
  u16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
  return out;
}

INLINE float rounded(float value) { return low(narrow(value)); }

INLINE void copy_rows(u32 to, const u16* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"((u64)from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

// 16 bytes that other blocks or kernels may have written; `copies_wait` for all that the thread has asked for.
INLINE void copy16(u32 to, const u16* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"((u64)from) : "memory");
}
INLINE void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Like `barrier_wait`, but never waits.
INLINE bool has_passed(u32 at, u32 parity) {
  u32 done;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done) : "r"(at), "r"(parity) : "memory");
  return done;
}

INLINE void workers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

// The feeding warp says which pairs count, and goes on; the workers wait for it.
INLINE void say_pairs() { asm volatile("bar.arrive 2, %0;" ::"n"(WORKERS + 32) : "memory"); }
INLINE void hear_pairs() { asm volatile("bar.sync 2, %0;" ::"n"(WORKERS + 32) : "memory"); }

// By one thread of each block: what the blocks wrote before it is seen by all after it.
INLINE void blocks_meet(u32* counter) {
  const u32 step = blockIdx.x ? 1 : 0x80000000u - (gridDim.x - 1);
  u32 before, now;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(step) : "memory");
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  } while (!((before ^ now) >> 31));
}

// The products of ROWS rows with a vector, all in shared memory: the one of row r goes to the lanes r * 32 / ROWS and on.
template <int ROWS, int LENGTH> INLINE float dot(const unsigned char* (&row)[ROWS], const unsigned char* vector) {
  const int lane = threadIdx.x % 32;
  float even[ROWS] = {}, odd[ROWS] = {};
  auto add = [&](int at) {
    const uint4 v = *(const uint4*)(vector + at);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const uint4 w = *(const uint4*)(row[r] + at);
      even[r] += low(w.x) * low(v.x), odd[r] += high(w.x) * high(v.x);
      even[r] += low(w.y) * low(v.y), odd[r] += high(w.y) * high(v.y);
      even[r] += low(w.z) * low(v.z), odd[r] += high(w.z) * high(v.z);
      even[r] += low(w.w) * low(v.w), odd[r] += high(w.w) * high(v.w);
    }
  };
#pragma unroll 4
  for (int i = 0; i < LENGTH / 256; i++) add(512 * i + 16 * lane);
  if (LENGTH % 256 != 0 && lane < LENGTH % 256 / 8) add(512 * (LENGTH / 256) + 16 * lane);
  __syncwarp();
  float sum[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) sum[r] = even[r] + odd[r];
#pragma unroll
  for (int width = 16, left = ROWS; width > 0; width /= 2) {
    if (left > 1) {
      left /= 2;
#pragma unroll
      for (int r = 0; r < left; r++) {
        const bool upper = lane & width;
        const float mine = upper ? sum[r + left] : sum[r], other = upper ? sum[r] : sum[r + left];
        sum[r] = mine + __shfl_xor_sync(~0u, other, width);
      }
    } else {
      sum[0] += __shfl_xor_sync(~0u, sum[0], width);
    }
  }
  return sum[0];
}

// Hidden units of a pair, `to` where they are kept.
INLINE void multiply_gated(const unsigned char* slot, const unsigned char* x, u16* to) {
  constexpr int ROWS = 2 * GATED_AT_ONCE, LANES = 32 / ROWS;
  const int lane = threadIdx.x % 32;
  for (int first = 0; first < GATED_ROWS; first += GATED_AT_ONCE) {
    const unsigned char* row[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) row[r] = slot + (r % 2 * GATED_ROWS + first + r / 2) * (2 * D);
    const float product = dot<ROWS, D>(row, x);
    // Rounded as the two halves would be if they were stored.
    const float gate = rounded(product), up = rounded(__shfl_xor_sync(~0u, product, LANES));
    if (lane % (2 * LANES) == 0) to[first + lane / (2 * LANES)] = narrow(gate / (1.0f + __expf(-gate)) * up);
  }
}

// What a pair adds to rows of the result, not yet weighed.
INLINE void multiply_down(const unsigned char* slot, int rows, const unsigned char* hidden, float* to) {
  constexpr int LANES = 32 / DOWN_AT_ONCE;
  const int lane = threadIdx.x % 32;
  for (int first = 0; first < rows; first += DOWN_AT_ONCE) {
    const unsigned char* row[DOWN_AT_ONCE];
#pragma unroll
    for (int r = 0; r < DOWN_AT_ONCE; r++) row[r] = slot + min(first + r, rows - 1) * (2 * F);
    const float product = dot<DOWN_AT_ONCE, F>(row, hidden);
    const int mine = first + lane / LANES;
    if (lane % LANES == 0 && mine < rows) to[mine] = rounded(product);
  }
}

struct Pairs {
  int count;
  u32 real;  // bit p: pair p counts
  int place[MOST_PAIRS], expert[MOST_PAIRS];  // of those that count, one after the other
};

INLINE void feed(const Inputs& in, Pairs& pairs, u32 slots, u32 full, u32 empty) {
  const u64 once = held_shorter();
  const int lane = threadIdx.x % 32, all = in.tokens * in.per_token;
  Share share(blockIdx.x, gridDim.x, all);  // its divisions needn't wait
  wait_for_kernel_before();
  const int expert = lane < all ? __ldcg(in.ids + lane) : -1;
  const bool is_real = (u32)expert < (u32)in.experts;
  const u32 real = __ballot_sync(~0u, is_real);
  if (is_real) {
    const int at = __popc(real & ((1u << lane) - 1));
    pairs.place[at] = lane, pairs.expert[at] = expert;
  }
  if (lane == 0) pairs.count = __popc(real), pairs.real = real;
  __syncwarp();
  say_pairs();
  if (__popc(real) != all) share = Share(blockIdx.x, gridDim.x, __popc(real));
  if (lane >= in.slots) return;
  const u32 to = slots + lane * SLOT_BYTES, barrier = full + 8 * lane;
  u32 parity = 1;  // nobody has to empty a slot the first time
  int i = lane;
  while (i < share.units()) {
    if (has_passed(empty + 8 * lane, parity)) {
      const Share::Unit unit = share.unit(i);
      const i64 chosen = pairs.expert[unit.pair];
      if (unit.is_down) {
        const u32 bytes = unit.rows * (2 * F);
        barrier_expect(barrier, bytes);
        copy_rows(to, in.down + (chosen * D + unit.row) * F, bytes, barrier, once);
      } else {
        constexpr u32 BYTES = GATED_ROWS * (2 * D);
        const u16* gate = in.gate_up + (chosen * (2 * F) + unit.row) * D;
        barrier_expect(barrier, 2 * BYTES);
        copy_rows(to, gate, BYTES, barrier, once);
        copy_rows(to + BYTES, gate + (i64)F * D, BYTES, barrier, once);
      }
      i += in.slots, parity ^= 1;
    }
  }
}

INLINE void work(
    const Inputs& in, const Pairs& pairs, const unsigned char* slots, const unsigned char* vector, float* parts,
    float* weights, u32 full, u32 empty) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 vector_at = (u32)__cvta_generic_to_shared(vector);
  wait_for_kernel_before();
  for (int i = threadIdx.x * 8; i < in.tokens * D; i += WORKERS * 8)
    copy16(vector_at + 2 * i, in.x + i / D * in.x_stride + i % D);
  if (threadIdx.x < in.tokens * in.per_token) weights[threadIdx.x] = __ldcg(in.weights + threadIdx.x);
  copies_wait();
  hear_pairs();

  const Share share(blockIdx.x, gridDim.x, pairs.count);
  // A slot is always the same warp's: it can't take one use of it for another.
  int round = 0, slot = warp, i = warp < in.slots ? warp : share.units();
  auto leave = [&] {
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + 8 * slot);
    slot += WARPS;
    if (slot >= in.slots) slot = warp, round++;
    i = round * in.slots + slot;
  };
  while (i < share.gated) {
    const Share::Unit unit = share.unit(i);
    const int token = pairs.place[unit.pair] / in.per_token;
    barrier_wait(full + 8 * slot, round & 1);
    multiply_gated(slots + slot * SLOT_BYTES, vector + token * (2 * D), in.hidden + unit.pair * F + unit.row);
    leave();
  }

  workers_meet();
  if (threadIdx.x == 0) blocks_meet(counters + in.stream);
  workers_meet();
  for (int at = threadIdx.x * 8; at < share.pairs * F; at += WORKERS * 8)
    copy16(vector_at + 2 * at, in.hidden + at);
  copies_wait();
  workers_meet();
  while (i < share.units()) {
    const Share::Unit unit = share.unit(i);
    float* to = parts + pairs.place[unit.pair] * share.down_rows + unit.row - share.down_first;
    barrier_wait(full + 8 * slot, round & 1);
    multiply_down(slots + slot * SLOT_BYTES, unit.rows, vector + unit.pair * (2 * F), to);
    leave();
  }

  workers_meet();
  for (int at = threadIdx.x; at < in.tokens * share.down_rows; at += WORKERS) {
    const int token = at / share.down_rows, row = at % share.down_rows;
    float sum = 0.0f;
    for (int choice = 0; choice < in.per_token; choice++) {
      const int pair = token * in.per_token + choice;
      if (pairs.real >> pair & 1) sum += parts[pair * share.down_rows + row] * weights[pair];
    }
    in.out[token * D + share.down_first + row] = narrow(sum);
  }
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32, 1) lone_experts(const __grid_constant__ Inputs in) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ u64 barriers[2 * MOST_SLOTS];
  __shared__ Pairs pairs;
  __shared__ float weights[MOST_PAIRS];
  let_kernel_after_start();
  const u32 full = (u32)__cvta_generic_to_shared(barriers), empty = full + 8 * MOST_SLOTS;
  if (threadIdx.x == 0) {
    for (int i = 0; i < in.slots; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= WORKERS) {
    feed(in, pairs, (u32)__cvta_generic_to_shared(memory), full, empty);
    return;
  }
  unsigned char* vector = memory + in.slots * SLOT_BYTES;
  work(in, pairs, memory, vector, (float*)(vector + in.vector_bytes), weights, full, empty);
}
