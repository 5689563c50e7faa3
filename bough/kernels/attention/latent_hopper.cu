// Attention of decode rows (one query token each, at most 16 heads) over paged latents, for Hopper. A latent is 576 numbers of
// bf16, one of each token for all heads; its first 512 are the value.
//
// Work comes from the plan (plan.py): rows of blocks of 64 KV tokens, cut into chunks, each the work of a cluster of CLUSTER
// thread blocks: block i of a chunk is that of thread block i % CLUSTER. One warp feeds a ring of stages through the copy
// engine. Latents that earlier steps wrote are asked for before the kernel before this one has ended; the block with a row's
// newest token after it.
//
// Tokens are the rows of the tensor cores' products, and heads their columns, so that 16 heads waste nothing. Of a stage, each
// of two warpgroups scores all tokens with one half of the dimensions; 16 threads then weigh the tokens of a head; and each
// warpgroup adds up one half of the values' dimensions, reading the same stage with rows and columns exchanged.
//
// At the end of what a chunk has of a row, thread blocks share their sums through each other's shared memory: each puts
// together its part of the dimensions. A row cut over several chunks is put together by the clusters that finish last, again
// each thread block for its dimensions: one alone would read 32 KB of every chunk.
//
// Given: HEADS (at most 16), CLUSTER (1, 2 or 4), STAGES of the ring.

#include "hopper.cuh"

#define LOWEST (-__int_as_float(0x7f800000))

constexpr int WIDTH = 576, RANK = 512, BLOCK = 64, ROWS = 16;
constexpr int HALF = BLOCK / 2;  // tokens that are fetched together: of one page
constexpr int ROW_BYTES = 128, BOXES = WIDTH * 2 / ROW_BYTES, BOX_BYTES = BLOCK * ROW_BYTES, STAGE_BYTES = BOXES * BOX_BYTES;
constexpr int QUERY_BOX_BYTES = ROWS * ROW_BYTES, QUERY_BYTES = BOXES * QUERY_BOX_BYTES, QUERIES = 2;
constexpr int WARPS = 8, WORKERS = 32 * WARPS;
constexpr int HALF_STEPS = WIDTH / 16 / 2;  // products of 16 dimensions that a warpgroup scores with
constexpr int VALUE_BOXES = RANK / 64 / 2;  // of a warpgroup
constexpr int SCORE_PITCH = BLOCK + 4, SUM_PITCH = RANK + 4;  // neighbouring heads begin four banks apart
constexpr int PART = RANK / CLUSTER, FOURS = PART / 4 / 16;  // dimensions that a thread block puts together; of a thread
// Fields of a tile and of the header, as in plan.py.
enum { START, TOKEN, TOKENS, POSITION, KV_LOW, KV_HIGH, SLOT };
enum { TOTAL, PER_CHUNK, REAL_TOKENS, ALIGNED };

#define F4(o) "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3])

// d = (keep ? d : 0) + 64 rows x 16 columns over 16 numbers of each. Both operands have those side by side.
INLINE void multiply(float (&d)[8], u64 rows, u64 columns, u32 keep) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %10, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16"
      " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 0, 0; }"
      : F4(0), F4(4) : "l"(rows), "l"(columns), "r"(keep));
}

// d += the same, where the first operand has its 64 rows side by side.
INLINE void multiply_transposed(float (&d)[8], u64 rows, u64 columns) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, 1, 0;"
      : F4(0), F4(4) : "l"(rows), "l"(columns));
}

INLINE void all_products(float (&d)[8]) { asm volatile("wgmma.wait_group.sync.aligned 0;" : F4(0), F4(4)::"memory"); }

INLINE void workers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

// Where 16 bytes of a row lie in a box, which is swizzled.
INLINE u32 place_of(int row, int sixteen) { return row * ROW_BYTES + ((sixteen ^ (row & 7)) << 4); }

// Which partial result a chunk leaves of a row whose first chunk is `first`: it may have the end of one and begin another.
INLINE int part_of(int chunk, int first) { return 2 * chunk + (chunk == first); }

// Between the thread blocks of a cluster ----------------------------------------------------------------------------------

INLINE int rank_in_cluster() {
  u32 rank = 0;
  if (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

INLINE u32 address_at(u32 at, int rank) {
  u32 there = at;
  if (CLUSTER > 1) asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}

INLINE void arrive_at(u32 barrier, int rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_at(barrier, rank)) : "memory");
}

INLINE void cluster_wait(u32 at, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(at), "r"(parity) : "memory");
  } while (!done);
}

INLINE float4 four_at(u32 at) {
  float4 out;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(out.x), "=f"(out.y), "=f"(out.z), "=f"(out.w) : "r"(at) : "memory");
  return out;
}

INLINE float one_at(u32 at) {
  float out;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(out) : "r"(at) : "memory");
  return out;
}

// The plan ----------------------------------------------------------------------------------------------------------------

struct Inputs {
  u16* out;  // [T, HEADS, RANK]
  const int *page_table, *tiles, *header, *chunk_tile;
  int* counters;          // [rows, CLUSTER]: zero between launches
  float *partial, *stats;  // [parts, ROWS, RANK]; [parts, CLUSTER, 2, ROWS]
  i64 table_stride;
  int tile_room, page_size, num_tokens;
  float scale_log2;
};

// What a chunk, or the rest of it from `at` on, has of a row: the blocks from .. until.
struct Span {
  int tile, start, token, position, low, high, slot;
  int from, until, blocks, first, last;  // all blocks of the row, the chunks that have them
  int at, end;                           // in the stream
  int mine;                              // the first block of this thread block
};

struct Work {
  const Inputs& in;
  const int total, per_chunk, aligned, chunks, rank;

  INLINE Work(const Inputs& in)
      : in(in), total(in.header[TOTAL]), per_chunk(in.header[PER_CHUNK]), aligned(in.header[ALIGNED]),
        chunks((total + per_chunk - 1) / per_chunk), rank(rank_in_cluster()) {}

  INLINE void read_tile(Span& span) const {
    auto field = [&](int name) { return in.tiles[name * in.tile_room + span.tile]; };
    span.start = field(START), span.token = field(TOKEN), span.position = field(POSITION);
    span.low = field(KV_LOW), span.high = field(KV_HIGH), span.slot = field(SLOT);
  }

  INLINE void place(Span& span) const {
    span.blocks = max((span.high - span.low + BLOCK - 1) / BLOCK, 1);
    span.from = span.at - span.start, span.until = min(span.blocks, span.from + span.end - span.at);
    span.first = span.start / per_chunk, span.last = (span.start + span.blocks - 1) / per_chunk;
    span.mine = span.from + (rank + CLUSTER - span.at % per_chunk % CLUSTER) % CLUSTER;
  }

  INLINE Span first_of(int chunk) const {
    Span span;
    span.tile = in.chunk_tile[chunk], span.at = chunk * per_chunk, span.end = min(span.at + per_chunk, total);
    read_tile(span);
    place(span);
    return span;
  }

  // What follows in the same chunk, if anything does.
  INLINE bool go_on(Span& span) const {
    span.at += span.until - span.from;
    if (aligned || span.at >= span.end) return false;
    span.tile++;  // a chunk ends within a row, or with it
    read_tile(span);
    place(span);
    return true;
  }

  // The page of a half of a block: every two lanes have a block, of those from `b` on that are this thread block's.
  INLINE int page(const Span& span, int b) const {
    b += threadIdx.x % 32 / 2 * CLUSTER;
    const int n = span.low + b * BLOCK + threadIdx.x % 2 * HALF;
    if (b >= span.until || n >= span.high) return 0;
    return in.page_table[span.slot * in.table_stride + n / in.page_size];
  }
};

// Where everything lies in shared memory.
struct Room {
  u32 stages, query, weights, full, empty, query_full, query_empty, ready, read;
};

INLINE void feed(const Inputs& in, const Room& room, const TensorMap& q_map, const TensorMap& kv_map) {
  const int lane = threadIdx.x % 32, clusters = gridDim.x / CLUSTER;
  const Work work(in);
  int slot = 0, filled = 0, queries = 0, owed = -1;  // a token whose queries are asked for when they have been written
  u32 parity = 0;
  bool is_early = true;
  auto ask_query = [&](int token) {
    const int place = queries % QUERIES;
    const u32 barrier = room.query_full + 8 * place;
    barrier_wait(room.query_empty + 8 * place, (queries / QUERIES & 1) ^ 1);
    queries++;
    barrier_expect(barrier, QUERY_BYTES);
#pragma unroll
    for (int box = 0; box < BOXES; box++)
      fetch(room.query + place * QUERY_BYTES + box * QUERY_BOX_BYTES, q_map, box * 64, token * HEADS, barrier);
  };
  auto end_early = [&] {
    if (!is_early) return;
    is_early = false;
    wait_for_kernel_before();
    if (owed >= 0) ask_query(owed);
  };
  for (int chunk = blockIdx.x / CLUSTER; chunk < work.chunks; chunk += clusters) {
    Span span = work.first_of(chunk);
    do {
      if (lane == 0 && span.mine < span.until) {
        if (is_early && owed < 0) {
          owed = span.token;
        } else {
          end_early();
          ask_query(span.token);
        }
      }
      for (int b = span.mine; b < span.until; b += 16 * CLUSTER) {
        const int page = work.page(span, b), count = min(16, (span.until - b + CLUSTER - 1) / CLUSTER);
        for (int i = 0; i < count; i++) {
          const int n = span.low + (b + i * CLUSTER) * BLOCK;
          const int first = __shfl_sync(~0u, page, 2 * i) * in.page_size + n % in.page_size;
          const int second = __shfl_sync(~0u, page, 2 * i + 1) * in.page_size + (n + HALF) % in.page_size;
          if (lane == 0) {
            if (n + BLOCK > span.position) end_early();  // the newest token
            if (filled >= STAGES) {
              end_early();
              barrier_wait(room.empty + 8 * slot, parity ^ 1);
            }
            filled++;
            const u32 barrier = room.full + 8 * slot, to = room.stages + slot * STAGE_BYTES;
            const bool whole = n + HALF < span.high;  // of tokens that don't exist nothing is fetched
            barrier_expect(barrier, whole ? STAGE_BYTES : STAGE_BYTES / 2);
#pragma unroll
            for (int box = 0; box < BOXES; box++) fetch(to + box * BOX_BYTES, kv_map, box * 64, first, barrier);
            if (whole)
#pragma unroll
              for (int box = 0; box < BOXES; box++)
                fetch(to + box * BOX_BYTES + BOX_BYTES / 2, kv_map, box * 64, second, barrier);
            if (++slot == STAGES) slot = 0, parity ^= 1;
          }
          __syncwarp();
        }
      }
    } while (work.go_on(span));
  }
  if (lane == 0) end_early();
}

// The working warps -------------------------------------------------------------------------------------------------------

struct Worker {
  const Inputs& in;
  const Room& room;
  float (*scores)[ROWS][SCORE_PITCH];  // [halves of the dimensions], a line for each head
  float (*sums)[SUM_PITCH], (*sum_stats)[ROWS], *shrinks;
  int* arrived;
  const int warp, lane, rank;
  int slot = 0, queries = 0, exchanges = 0;
  u32 parity = 0;

  // Of 64 dimensions each: this thread has the dimensions of two rows of its warp's 16, for heads lane % 4 * 2 and the next,
  // and for those 8 further on.
  float acc[VALUE_BOXES][8];
  float high, norm;  // of head threadIdx.x / 16; the norm of this thread's tokens

  INLINE void clear() {
#pragma unroll
    for (int i = 0; i < VALUE_BOXES; i++)
#pragma unroll
      for (int j = 0; j < 8; j++) acc[i][j] = 0.0f;
    high = LOWEST, norm = 0.0f;
  }

  // Waits for a row's queries. They stay where they are until `leave_queries`.
  INLINE u32 take_queries() {
    const int place = queries % QUERIES;
    barrier_wait(room.query_full + 8 * place, queries / QUERIES & 1);
    return room.query + place * QUERY_BYTES;
  }

  INLINE void leave_queries() {
    __syncwarp();
    if (lane == 0) barrier_arrive(room.query_empty + 8 * (queries % QUERIES));
    queries++;
  }

  // A block of tokens, of which `seen` count.
  INLINE void attend(int seen, u32 query) {
    const u32 stage = room.stages + slot * STAGE_BYTES;
    const int half = warp / 4, row = lane / 4, column = lane % 4 * 2;
    barrier_wait(room.full + 8 * slot, parity);
    float score[8];
    products_begin();
#pragma unroll
    for (int i = 0; i < HALF_STEPS; i++) {  // four whole boxes, then half of the last one
      const int box = i < 16 ? half * 4 + i / 4 : 8, part = i < 16 ? i % 4 : half * 2 + i - 16;
      multiply(score, operand(stage + box * BOX_BYTES) + 2 * part, operand(query + box * QUERY_BOX_BYTES) + 2 * part, i);
    }
    products_commit();
    all_products(score);
#pragma unroll
    for (int i = 0; i < 8; i++)
      scores[half][i / 4 * 8 + column + i % 2][warp % 4 * 16 + row + i / 2 % 2 * 8] = score[i];
    workers_meet();

    // Each thread weighs four tokens for one head.
    const int head = threadIdx.x / 16, token = threadIdx.x % 16 * 4;
    const float4 one = *(const float4*)&scores[0][head][token], other = *(const float4*)&scores[1][head][token];
    float x[4] = {one.x + other.x, one.y + other.y, one.z + other.z, one.w + other.w}, top = LOWEST;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[i] = token + i < seen ? x[i] * in.scale_log2 : LOWEST;
      top = fmaxf(top, x[i]);
    }
#pragma unroll
    for (int width = 1; width < 16; width *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, width));
    const float new_high = fmaxf(high, top), anchor = new_high == LOWEST ? 0.0f : new_high;
    const float shrink = exp2_(high - anchor);
    high = new_high;
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = exp2_(x[i] - anchor);
    norm = norm * shrink + (x[0] + x[1]) + (x[2] + x[3]);
    const u32 weights_at = room.weights + place_of(head, token / 8) + token % 8 * 2;
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(weights_at), "r"(both(x[0], x[1])), "r"(both(x[2], x[3])) : "memory");
    if (token == 0) shrinks[head] = shrink;
    if (seen < BLOCK)  // what follows the last token may not be a number; all scores have been computed
      for (int i = max(seen, 0) * 64 + threadIdx.x; i < BLOCK * 64; i += WORKERS) {
        const u32 at = stage + i % 64 / 8 * BOX_BYTES + i / 64 * ROW_BYTES + i % 8 * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
      }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the tensor cores read here next, and the copy engine writes
    workers_meet();

    const float2 low_heads = *(const float2*)&shrinks[column], high_heads = *(const float2*)&shrinks[column + 8];
#pragma unroll
    for (int i = 0; i < VALUE_BOXES; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        acc[i][2 * r] *= low_heads.x, acc[i][2 * r + 1] *= low_heads.y;
        acc[i][4 + 2 * r] *= high_heads.x, acc[i][4 + 2 * r + 1] *= high_heads.y;
      }
    products_begin();
#pragma unroll
    for (int sixteen = 0; sixteen < BLOCK / 16; sixteen++)
#pragma unroll
      for (int i = 0; i < VALUE_BOXES; i++)
        multiply_transposed(acc[i], operand(stage + (half * VALUE_BOXES + i) * BOX_BYTES + sixteen * 16 * ROW_BYTES),
                            operand(room.weights) + 2 * sixteen);
    products_commit();
#pragma unroll
    for (int i = 0; i < VALUE_BOXES; i++) all_products(acc[i]);
    __syncwarp();
    if (lane == 0) barrier_arrive(room.empty + 8 * slot);
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }

  // Puts together what the thread blocks of the cluster have, and all chunks of a row where it was cut.
  INLINE void finish(const Span& span, int chunk) {
    if (CLUSTER > 1 && exchanges > 0) cluster_wait(room.read, (exchanges - 1) & 1);
#pragma unroll
    for (int width = 1; width < 16; width *= 2) norm += __shfl_xor_sync(~0u, norm, width);
    if (threadIdx.x % 16 == 0) sum_stats[0][threadIdx.x / 16] = high, sum_stats[1][threadIdx.x / 16] = norm;
#pragma unroll
    for (int i = 0; i < VALUE_BOXES; i++)
#pragma unroll
      for (int j = 0; j < 8; j++)
        sums[j / 4 * 8 + lane % 4 * 2 + j % 2][(warp / 4 * VALUE_BOXES + i) * 64 + warp % 4 * 16 + lane / 4 + j / 2 % 2 * 8] = acc[i][j];
    if (CLUSTER > 1) asm volatile("fence.acq_rel.cluster;" ::: "memory");
    workers_meet();
    if (CLUSTER > 1) {
      if (threadIdx.x < CLUSTER) arrive_at(room.ready, threadIdx.x);
      cluster_wait(room.ready, exchanges & 1);
      exchanges++;
    }
    // A thread has FOURS times four dimensions of one row.
    const int mine = threadIdx.x / 16, dim = rank * PART + threadIdx.x % 16 * 4;
    const u32 sums_at = (u32)__cvta_generic_to_shared(&sums[mine][dim]), high_at = (u32)__cvta_generic_to_shared(&sum_stats[0][mine]);
    float part_high[CLUSTER], total_high = LOWEST, total_norm = 0.0f;
    float4 total[FOURS];
#pragma unroll
    for (int i = 0; i < FOURS; i++) total[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int each = 0; each < CLUSTER; each++) {
      part_high[each] = one_at(address_at(high_at, each));
      total_high = fmaxf(total_high, part_high[each]);
    }
    const float anchor = total_high == LOWEST ? 0.0f : total_high;
#pragma unroll
    for (int each = 0; each < CLUSTER; each++) {
      const float share = exp2_(part_high[each] - anchor);
      total_norm += share * one_at(address_at(high_at + ROWS * 4, each));
      const u32 at = address_at(sums_at, each);
#pragma unroll
      for (int i = 0; i < FOURS; i++) add(total[i], four_at(at + i * 256), 1.0f, share);
    }
    if (CLUSTER > 1) {
      workers_meet();
      if (threadIdx.x < CLUSTER) arrive_at(room.read, threadIdx.x);
    }
    bool is_done = true;
    if (span.first != span.last) {
      auto sums_of = [&](int part) { return (float4*)(in.partial + ((i64)part * ROWS + mine) * RANK + dim); };
      auto stats_of = [&](int part) { return in.stats + ((i64)part * CLUSTER + rank) * 2 * ROWS + mine; };
      const int here = part_of(chunk, span.first);
#pragma unroll
      for (int i = 0; i < FOURS; i++) __stcg(sums_of(here) + i * 16, total[i]);
      if (threadIdx.x % 16 == 0) __stcg(stats_of(here), total_high), __stcg(stats_of(here) + ROWS, total_norm);
      __threadfence();
      workers_meet();
      int* counter = in.counters + span.tile * CLUSTER + rank;
      if (threadIdx.x == 0) *arrived = atomicAdd(counter, 1);
      workers_meet();
      is_done = *arrived == span.last - span.first;
      if (is_done) {
        __threadfence();
        if (threadIdx.x == 0) *counter = 0;
        total_high = LOWEST, total_norm = 0.0f;
#pragma unroll
        for (int i = 0; i < FOURS; i++) total[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        // Several at a time, so that they are all on their way before the first has come.
        constexpr int BATCH = 8 / FOURS;
        for (int base = span.first; base <= span.last; base += BATCH) {
          float other[BATCH], other_norm[BATCH], top = total_high;
          float4 part[BATCH][FOURS];
#pragma unroll
          for (int b = 0; b < BATCH; b++) {
            const int place = part_of(min(base + b, span.last), span.first);
            const bool real = base + b <= span.last;
            other[b] = real ? __ldcg(stats_of(place)) : LOWEST;
            other_norm[b] = real ? __ldcg(stats_of(place) + ROWS) : 0.0f;
#pragma unroll
            for (int i = 0; i < FOURS; i++) part[b][i] = __ldcg(sums_of(place) + i * 16);
          }
#pragma unroll
          for (int b = 0; b < BATCH; b++) top = fmaxf(top, other[b]);
          const float anchor = top == LOWEST ? 0.0f : top;
          float old_share = exp2_(total_high - anchor);
          total_norm *= old_share, total_high = top;
#pragma unroll
          for (int b = 0; b < BATCH; b++) {
            const float share = exp2_(other[b] - anchor);
            total_norm += other_norm[b] * share;
#pragma unroll
            for (int i = 0; i < FOURS; i++) add(total[i], part[b][i], old_share, share);
            old_share = 1.0f;
          }
        }
      }
    }
    if (is_done && mine < HEADS) {
      const float inverse = total_norm == 0.0f ? 0.0f : 1.0f / total_norm;  // of a row without KV
      u16* to = in.out + ((i64)span.token * HEADS + mine) * RANK + dim;
#pragma unroll
      for (int i = 0; i < FOURS; i++)
        *(uint2*)(to + i * 64) = make_uint2(both(total[i].x * inverse, total[i].y * inverse), both(total[i].z * inverse, total[i].w * inverse));
    }
    workers_meet();  // `sums` and `arrived` have been read
  }

  INLINE static void add(float4& to, const float4& what, float old_share, float new_share) {
    to.x = to.x * old_share + what.x * new_share, to.y = to.y * old_share + what.y * new_share;
    to.z = to.z * old_share + what.z * new_share, to.w = to.w * old_share + what.w * new_share;
  }

  INLINE void run(const Work& work, Span span) {
    const int clusters = gridDim.x / CLUSTER;
    for (int chunk = blockIdx.x / CLUSTER; chunk < work.chunks; chunk += clusters) {
      if (chunk != blockIdx.x / CLUSTER) span = work.first_of(chunk);
      do {
        clear();
        if (span.mine < span.until) {
          const u32 query = take_queries();
          for (int b = span.mine; b < span.until; b += CLUSTER) attend(span.high - span.low - b * BLOCK, query);
          leave_queries();
        }
        finish(span, chunk);
      } while (work.go_on(span));
    }
    // Others may still read this block's sums.
    if (CLUSTER > 1 && exchanges > 0) cluster_wait(room.read, (exchanges - 1) & 1);
  }
};

extern "C" __global__ void __launch_bounds__(WORKERS + 32, 1)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
decode_latents(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap kv_map, const __grid_constant__ Inputs in) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES + 2 * QUERIES + 2];
  __shared__ __align__(16) float scores[2][ROWS][SCORE_PITCH];
  __shared__ __align__(16) float sums[ROWS][SUM_PITCH];
  __shared__ float sum_stats[2][ROWS];
  __shared__ __align__(16) float shrinks[ROWS];
  __shared__ int arrived;
  let_kernel_after_start();
  Room room;
  room.stages = ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
  room.query = room.stages + STAGES * STAGE_BYTES;
  room.full = (u32)__cvta_generic_to_shared(barriers), room.empty = room.full + 8 * STAGES;
  room.weights = room.query + QUERIES * QUERY_BYTES;
  room.query_full = room.empty + 8 * STAGES, room.query_empty = room.query_full + 8 * QUERIES;
  room.ready = room.query_empty + 8 * QUERIES, room.read = room.ready + 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(room.full + 8 * i, 1);
      barrier_init(room.empty + 8 * i, WARPS);
    }
    for (int i = 0; i < QUERIES; i++) {
      barrier_init(room.query_full + 8 * i, 1);
      barrier_init(room.query_empty + 8 * i, WARPS);
    }
    barrier_init(room.ready, CLUSTER);
    barrier_init(room.read, CLUSTER);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
  else __syncthreads();
  if (threadIdx.x >= WORKERS) {
    feed(in, room, q_map, kv_map);
    return;
  }
  // The plan is an input of the step: it is read before the wait.
  const int real_tokens = in.header[REAL_TOKENS], chunk = blockIdx.x / CLUSTER;
  const Work work(in);
  Span span = {};
  if (chunk < work.chunks) span = work.first_of(chunk);
  wait_for_kernel_before();
  for (int token = real_tokens + blockIdx.x; token < in.num_tokens; token += gridDim.x)  // of no row
    for (int i = threadIdx.x * 8; i < HEADS * RANK; i += WORKERS * 8)
      *(uint4*)(in.out + (i64)token * HEADS * RANK + i) = make_uint4(0, 0, 0, 0);
  Worker worker{in, room, scores, sums, sum_stats, shrinks, &arrived, (int)threadIdx.x / 32, (int)threadIdx.x % 32, work.rank};
  worker.run(work, span);
}
