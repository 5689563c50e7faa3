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
// With EXPERTS, x is first added to the residual stream and normed, and the experts are chosen by a router's product with that:
// every block norms all tokens for itself, has the router's rows of a few experts, which the ring brings before all else, says
// their logits to all blocks, and chooses for itself by all of them. A logit is its own sign that it was said: the words that
// carry them are zero between launches.
//
// All blocks of a launch must run at once. Launches of one stream don't disturb each other: one has started as a whole before
// the next may. Launches of several streams at a time could take multiprocessors from each other and wait forever.
//
// Given: D, F (multiples of 8), GATED_ROWS (gate rows of a unit, and as many up rows; a divisor of F), DOWN_ROWS (rows of
// `down` in a unit, at most), SLOT_BYTES (holds a unit of any kind), WARPS (that multiply), STREAMS (that have counters),
// EXPERTS (rows of the router; 0: the choice is given).

#include "hopper.cuh"

constexpr int MOST_PAIRS = 32, MOST_SLOTS = 32;  // a lane of the feeding warp each
constexpr int MOST_LOGITS = 512;                 // of all tokens
constexpr int WORKERS = 32 * WARPS;
constexpr int GATED_AT_ONCE = GATED_ROWS > 1 ? 2 : 1;  // gate rows that a warp multiplies together, with their up rows
constexpr int DOWN_AT_ONCE = DOWN_ROWS >= 4 ? 4 : DOWN_ROWS >= 2 ? 2 : 1;

static_assert(D % 8 == 0 && F % 8 == 0, "rows must start at multiples of 16 bytes");
static_assert(F % GATED_ROWS == 0 && GATED_ROWS % GATED_AT_ONCE == 0, "a unit has rows of one pair");
static_assert(EXPERTS <= MOST_LOGITS, "said by a word each");
static_assert(SLOT_BYTES % 128 == 0 && SLOT_BYTES >= 4 * D * GATED_ROWS && SLOT_BYTES >= 2 * F * DOWN_ROWS, "a unit fits");

// What a block works off: the units 0 .. units() - 1, rows of the router first, then gate and up rows, then those of `down`.
// Pairs that no expert here serves don't count.
struct Share {
  enum Kind { ROUTER, GATED, DOWN };

  int block, blocks, pairs;
  int routed;                            // experts whose logits it makes, a unit each
  int gated_first, gated;                // units among those of all blocks, their number
  int down_first, down_rows, pieces;     // rows of the result, their number, units of them a pair

  struct Unit {
    Kind kind;
    int pair, row, rows;                 // place among the pairs that count, first row of the matrix, rows
  };

  INLINE Share(int block, int blocks, int pairs) : block(block), blocks(blocks), pairs(pairs) {
    routed = EXPERTS / blocks + (block < EXPERTS % blocks);
    const int all = pairs * (F / GATED_ROWS);
    gated = all / blocks + (block < all % blocks);
    gated_first = block * (all / blocks) + min(block, all % blocks);
    // The last blocks have a row more here, the first ones a unit more there.
    const int mirrored = blocks - 1 - block;
    down_rows = D / blocks + (mirrored < D % blocks);
    down_first = mirrored * (D / blocks) + min(mirrored, D % blocks);
    pieces = (down_rows + DOWN_ROWS - 1) / DOWN_ROWS;
  }

  INLINE int before_down() const { return routed + gated; }
  INLINE int units() const { return before_down() + pairs * pieces; }
  INLINE int expert(int i) const { return block + i * blocks; }

  INLINE Unit unit(int i) const {
    if (i < routed) return {ROUTER, 0, expert(i), 1};
    if (i < before_down()) {
      const int at = gated_first + i - routed;
      return {GATED, at / (F / GATED_ROWS), at % (F / GATED_ROWS) * GATED_ROWS, GATED_ROWS};
    }
    const int pair = (i - before_down()) / pieces, row = (i - before_down()) % pieces * DOWN_ROWS;
    return {DOWN, pair, down_first + row, min(DOWN_ROWS, down_rows - row)};
  }
};

struct Inputs {
  const u16 *x, *gate_up, *down;
  const float* weights;                      // of the choice, where it is given
  const int* ids;
  Normed normed;                             // where it is not
  const u16* router;
  int renormalise;
  u16 *hidden, *out;
  i64 x_stride;
  int tokens, per_token, experts;
  int slots, vector_bytes;  // of the ring; room for x or the hidden units
  int stream;               // which counter is this launch's
};

// Per stream; the highest bit changes when all blocks of a launch have come, the others are zero again then.
__device__ u32 counters[STREAMS];

// Per stream: logits of each token, as `said` makes them.
__device__ u32 said_logits[EXPERTS ? STREAMS : 1][MOST_LOGITS];

INLINE u16 narrow(float value) {
  u16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
  return out;
}

INLINE float rounded(float value) { return low(narrow(value)); }

// A logit as it would be stored, in a word that isn't zero.
INLINE u32 said(float logit) { return (u32)narrow(logit) << 16 | 1; }
INLINE float meant(u32 word) { return high(word); }

INLINE void say(u32* at, u32 word) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(word) : "memory"); }
INLINE u32 hear(const u32* at) {
  u32 word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(at) : "memory");
  return word;
}

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

// What workers and the feeding warp tell each other of the choice.
struct Choice {
  Pairs pairs;
  float logits[EXPERTS ? MOST_LOGITS : 1];
  float weights[MOST_PAIRS];
  float squares[EXPERTS ? MOST_PAIRS : 1][WARPS];  // of a token, summed by each warp
};

// By the feeding warp: the experts of all tokens, once all logits are said, that of pair p in lane p; -1 beyond the last one.
INLINE int choose(const Inputs& in, float* logits) {
  constexpr int A_LANE = EXPERTS > 0 ? (EXPERTS + 31) / 32 : 1;
  const int lane = threadIdx.x % 32;
  int found = -1;
  for (int token = 0; token < in.tokens; token++) {
    const u32* words = said_logits[in.stream] + token * EXPERTS;
    u32 key[A_LANE];
    bool silent;
    do {
      silent = false;
#pragma unroll
      for (int i = 0; i < A_LANE; i++) {
        const int expert = 32 * i + lane;
        key[i] = expert < EXPERTS ? hear(words + expert) : 0;
        silent |= expert < EXPERTS && key[i] == 0;
      }
    } while (silent);
    __syncwarp();
    // Keys are in the order of the choice: the larger logit first, of equal ones the lower expert.
#pragma unroll
    for (int i = 0; i < A_LANE; i++) {
      const int expert = 32 * i + lane;
      if (expert >= EXPERTS) break;
      const float logit = meant(key[i]) + 0.0f;  // there is one zero
      const u32 bits = __float_as_uint(logit);
      logits[token * EXPERTS + expert] = logit;
      key[i] = ((bits >> 31 ? ~bits : bits | 0x80000000u) & 0xffff0000u) | (0xffff - expert);
    }
    for (int choice = 0; choice < in.per_token; choice++) {
      u32 best = key[0];
#pragma unroll
      for (int i = 1; i < A_LANE; i++) best = max(best, key[i]);
      best = __reduce_max_sync(~0u, best);
#pragma unroll
      for (int i = 0; i < A_LANE; i++)
        if (key[i] == best) key[i] = 0;
      if (lane == token * in.per_token + choice) found = 0xffff - (best & 0xffff);
    }
  }
  return found;
}

// By a warp: the weights of a token's experts, the softmax over all of the router's.
INLINE void weigh(const Inputs& in, Choice& choice, int token) {
  const int lane = threadIdx.x % 32;
  const float* logits = choice.logits + token * EXPERTS;
  const int* experts = choice.pairs.expert + token * in.per_token;
  const float best = logits[experts[0]];
  float total = 0.0f;
  for (int expert = lane; expert < EXPERTS; expert += 32) total += __expf(logits[expert] - best);
  total = sum_over_warp(total);
  float weight = lane < in.per_token ? __expf(logits[experts[lane]] - best) / total : 0.0f;
  if (in.renormalise) weight /= sum_over_warp(weight);
  if (lane < in.per_token) choice.weights[token * in.per_token + lane] = weight;
}

INLINE void feed(const Inputs& in, Choice& choice, u32 slots, u32 full, u32 empty) {
  const u64 once = held_shorter();
  const int lane = threadIdx.x % 32, all = in.tokens * in.per_token;
  const u32 to = slots + lane * SLOT_BYTES, barrier = full + 8 * lane;
  Pairs& pairs = choice.pairs;
  Share share(blockIdx.x, gridDim.x, all);  // its divisions needn't wait
  u32 parity = 1;  // no slot has to be emptied the first time
  int i = lane;
  if (i < min(share.routed, in.slots)) {  // there are as many slots; no kernel writes weights
    barrier_expect(barrier, 2 * D);
    copy_rows(to, in.router + (i64)share.expert(i) * D, 2 * D, barrier, once);
    i += in.slots, parity ^= 1;
  }
  wait_for_kernel_before();
  int expert;
  if constexpr (EXPERTS > 0) expert = choose(in, choice.logits);
  else expert = lane < all ? __ldcg(in.ids + lane) : -1;
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
  while (i < share.units()) {
    if (has_passed(empty + 8 * lane, parity)) {
      const Share::Unit unit = share.unit(i);
      const i64 chosen = pairs.expert[unit.pair];
      if (unit.kind == Share::DOWN) {
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
    const Inputs& in, Choice& choice, const unsigned char* slots, unsigned char* vector, float* parts, u32 full, u32 empty) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, all = in.tokens * in.per_token;
  const u32 vector_at = (u32)__cvta_generic_to_shared(vector);
  const Pairs& pairs = choice.pairs;
  Share share(blockIdx.x, gridDim.x, all);
  // A slot is always the same warp's: it can't take one use of it for another.
  int round = 0, slot = warp, i = warp < in.slots ? warp : 1 << 30;
  auto leave = [&] {
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + 8 * slot);
    slot += WARPS;
    if (slot >= in.slots) slot = warp, round++;
    i = round * in.slots + slot;
  };
  if constexpr (EXPERTS > 0) {
    auto place = [&](int token, int column) { return (uint4*)(vector + (token * D + column) * 2); };
    norm_tokens<D, WORKERS>(in.normed, in.tokens, choice.squares, place, [] { workers_meet(); });
    workers_meet();
    while (i < share.routed) {
      barrier_wait(full + 8 * slot, round & 1);
      const unsigned char* row[1] = {slots + slot * SLOT_BYTES};
      for (int token = 0; token < in.tokens; token++) {
        const float logit = dot<1, D>(row, vector + token * (2 * D));
        if (lane == 0) say(said_logits[in.stream] + token * EXPERTS + share.expert(i), said(logit));
      }
      leave();
    }
    hear_pairs();
  } else {
    wait_for_kernel_before();
    for (int at = threadIdx.x * 8; at < in.tokens * D; at += WORKERS * 8)
      copy16(vector_at + 2 * at, in.x + at / D * in.x_stride + at % D);
    if (threadIdx.x < all) choice.weights[threadIdx.x] = __ldcg(in.weights + threadIdx.x);
    copies_wait();
    hear_pairs();
    if (pairs.count != all) share = Share(blockIdx.x, gridDim.x, pairs.count);
  }
  while (i < share.before_down()) {
    const Share::Unit unit = share.unit(i);
    const int token = pairs.place[unit.pair] / in.per_token;
    barrier_wait(full + 8 * slot, round & 1);
    multiply_gated(slots + slot * SLOT_BYTES, vector + token * (2 * D), in.hidden + unit.pair * F + unit.row);
    leave();
  }

  workers_meet();
  if (threadIdx.x == 0) blocks_meet(counters + in.stream);
  if constexpr (EXPERTS > 0)
    for (int token = warp - 1; 0 <= token && token < in.tokens; token += WARPS - 1) weigh(in, choice, token);
  workers_meet();
  for (int at = threadIdx.x; at < in.tokens * share.routed; at += WORKERS)  // all blocks have chosen
    say(said_logits[in.stream] + at / share.routed * EXPERTS + share.expert(at % share.routed), 0);
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
    for (int place = 0; place < in.per_token; place++) {
      const int pair = token * in.per_token + place;
      if (pairs.real >> pair & 1) sum += parts[pair * share.down_rows + row] * choice.weights[pair];
    }
    in.out[token * D + share.down_first + row] = narrow(sum);
  }
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32, 1) lone_experts(const __grid_constant__ Inputs in) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ u64 barriers[2 * MOST_SLOTS];
  __shared__ Choice choice;
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
    feed(in, choice, (u32)__cvta_generic_to_shared(memory), full, empty);
    return;
  }
  unsigned char* vector = memory + in.slots * SLOT_BYTES;
  work(in, choice, memory, vector, (float*)(vector + in.vector_bytes), full, empty);
}
