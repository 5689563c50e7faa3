// Attention of decode rows (one query token each) over paged KV, for Hopper, with the rotation and the KV write in it.
//
// Work comes from the plan (plan.py): units (row, KV head) of blocks of 64 KV tokens, cut into chunks; block b takes the
// chunks b, b + gridDim.x, ... One warp feeds a ring of stages (K and V of a block of tokens) through the copy engine. It
// reads what earlier steps wrote, so it starts before the kernel before this one has ended. Eight warps attend: four to
// every second block, each over a quarter of its tokens with a softmax of its own; all put their results together at the end
// of a unit. Queries, the row's newest key and value, and its angles come with the stages, as soon as the kernel before has
// ended; the newest key is rotated and laid into its stage and, with the value, into the cache. A unit cut over several
// chunks is put together by the block that finishes last.
//
// Given: GROUP (query heads of a KV head, at most 8), KV_HEADS, STAGES, NORM (q and k have norms). Heads are 128 wide, bf16.

#include "hopper.cuh"

#define LOWEST (-__int_as_float(0x7f800000))

constexpr int WIDTH = 128, HALF = 64, BLOCK = 64;
constexpr int BOX_BYTES = BLOCK * 128;        // 64 tokens, 64 dimensions
constexpr int TILE_BYTES = 4 * BOX_BYTES;     // K low, K high, V low, V high
constexpr int HEADS = GROUP * KV_HEADS;
constexpr int WARPS = 8, WORKERS = 32 * WARPS;
// What else comes with a stage: queries and angles with the first block of a piece; key, value and angles with the newest.
constexpr int QUERY_BYTES = GROUP * WIDTH * 2, KEY_BYTES = WIDTH * 2, ANGLE_BYTES = WIDTH * 4;
constexpr int ANGLES_AT = 0, KEY_AT = ANGLE_BYTES, VALUE_AT = KEY_AT + KEY_BYTES, QUERIES_AT = VALUE_AT + KEY_BYTES;
constexpr int EXTRA_BYTES = QUERIES_AT + QUERY_BYTES;
// Fields of a tile and of the header, as in plan.py.
enum { START, TOKEN, TOKENS, POSITION, KV_LOW, KV_HIGH, SLOT };
enum { TOTAL, PER_CHUNK, REAL_TOKENS, ALIGNED };
constexpr int PITCH = WIDTH + 8;                // of a row in the workers' exchange: no two rows begin in one bank
constexpr int ROWS = 16;                      // of a partial result, as in plan.py's shape

struct Piece {  // of a unit, what the workers must know of each stage
  int token, kv_head, first_position, kv_high;
  int is_first, is_last, is_newest, half, place, counter, first_chunk, last_chunk;
  int position, pad;
  i64 location;
};

INLINE void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"((u64)from), "r"(bytes), "r"(barrier) : "memory");
}

INLINE float widen(u32 value) { return __uint_as_float(value << 16); }

INLINE u32 pack(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

INLINE float rounded(float value) { return widen(pack(value, 0.0f) & 0xffff); }

INLINE void load4(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

INLINE void load4_transposed(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

// Query rows 8 to 15 do not exist: their part of A is zero.
INLINE void multiply(float (&d)[4], u32 a0, u32 a2, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1));
}

INLINE void workers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

// Where 16 bytes of a token lie in a box: rows of 128 bytes, swizzled.
INLINE u32 place_of(int token, int sixteen) { return token * 128 + ((sixteen ^ (token & 7)) << 4); }

struct Inputs {
  const u16 *q, *k, *v;
  const u16 *q_norm, *k_norm;
  const float* cos_sin;
  const i64 *positions, *locations;
  u16 *k_cache, *v_cache, *out;
  const int *page_table, *tiles, *header, *chunk_tile;
  int* counters;
  float *partial, *stats;
  i64 table_stride;
  int q_token, k_token, v_token;
  int tile_room, page_size, num_tokens;
  float scale_log2, eps, offset;
};

struct Ring {
  u32 stages, extras, full, empty;
  Piece* pieces;
  int slot = 0, filled = 0;
  u32 parity = 0;
  INLINE void next() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

INLINE void feed(const Inputs& in, Ring& ring, const TensorMap& k_map, const TensorMap& v_map) {
  const int lane = threadIdx.x % 32;
  const int total = in.header[TOTAL], per_chunk = in.header[PER_CHUNK], aligned = in.header[ALIGNED];
  const int chunks = (total + per_chunk - 1) / per_chunk;
  // What the kernel before this one writes.
  auto ask_fresh = [&](int slot) {
    const Piece& piece = ring.pieces[slot];
    const u32 to = ring.extras + slot * EXTRA_BYTES, barrier = ring.full + 8 * slot;
    const i64 token = piece.token;
    if (piece.is_first || piece.is_newest)
      copy_bytes(to + ANGLES_AT, in.cos_sin + (i64)piece.position * WIDTH, ANGLE_BYTES, barrier);
    if (piece.is_first)
      copy_bytes(to + QUERIES_AT, in.q + token * in.q_token + piece.kv_head * (GROUP * WIDTH), QUERY_BYTES, barrier);
    if (piece.is_newest) {
      copy_bytes(to + KEY_AT, in.k + token * in.k_token + piece.kv_head * WIDTH, KEY_BYTES, barrier);
      copy_bytes(to + VALUE_AT, in.v + token * in.v_token + piece.kv_head * WIDTH, KEY_BYTES, barrier);
    }
  };
  bool is_early = true;
  auto end_early = [&] {
    if (!is_early) return;
    is_early = false;
    wait_for_kernel_before();
    for (int slot = 0; slot < min(ring.filled, STAGES); slot++) ask_fresh(slot);
  };
  auto take_slot = [&] {
    if (ring.filled >= STAGES) {
      end_early();
      barrier_wait(ring.empty + 8 * ring.slot, ring.parity ^ 1);
    }
    ring.filled++;
  };
  // Where a chunk, or the rest of it from `at` on, begins in the work of a tile.
  struct Span {
    int tile, start, token, low, high, slot, position;
    i64 location;
    int kv_head, from, until, blocks, first, last;
  };
  auto read_tile = [&](Span& span) {
    auto field = [&](int name) { return in.tiles[name * in.tile_room + span.tile]; };
    span.start = field(START), span.token = field(TOKEN), span.low = field(KV_LOW), span.high = field(KV_HIGH);
    span.slot = field(SLOT);
    span.position = (int)in.positions[span.token], span.location = in.locations[span.token];
  };
  auto place_span = [&](Span& span, int at, int end) {
    span.blocks = max((span.high - span.low + BLOCK - 1) / BLOCK, 1);
    const int room = aligned ? (span.blocks + per_chunk - 1) / per_chunk * per_chunk : span.blocks;
    span.kv_head = (at - span.start) / room;
    const int head_start = span.start + span.kv_head * room;
    span.from = at - head_start, span.until = min(span.blocks, span.from + end - at);
    span.first = head_start / per_chunk, span.last = (head_start + span.blocks - 1) / per_chunk;
  };
  // The page of the block that lies `lane` after `b`.
  auto find_page = [&](const Span& span, int b) {
    if (b + lane >= span.until || span.high <= span.low) return 0;
    return in.page_table[span.slot * in.table_stride + (span.low + (b + lane) * BLOCK) / in.page_size];
  };
  for (int base = blockIdx.x; base < chunks; base += 32 * gridDim.x) {
    // Each lane looks up one of the next 32 chunks.
    Span found = {};
    const int looked_up = base + lane * gridDim.x;
    if (looked_up < chunks) {
      found.tile = in.chunk_tile[looked_up];
      read_tile(found);
      place_span(found, looked_up * per_chunk, min((looked_up + 1) * per_chunk, total));
    }
    auto span_of = [&](int each) {
      Span span;
      const int* from = (const int*)&found;
      int* to = (int*)&span;
#pragma unroll
      for (int i = 0; i < (int)(sizeof(Span) / 4); i++) to[i] = __shfl_sync(~0u, from[i], each);
      return span;
    };
    Span next = span_of(0);
    int next_page = find_page(next, next.from);
    for (int each = 0; each < 32; each++) {
      const int chunk = base + each * gridDim.x;
      if (chunk >= chunks) break;
      Span span = next;
      int page = next_page;
      next = span_of(min(each + 1, 31));
      next_page = find_page(next, next.from);  // on its way while this chunk's blocks are asked for
      int at = chunk * per_chunk;
      const int end = min(at + per_chunk, total);
      while (true) {
        for (int b = span.from; b < span.until; b += 32) {
          if (b > span.from) page = find_page(span, b);
          const int count = min(32, span.until - b);
          for (int i = 0; i < count; i++) {
            const int n = span.low + (b + i) * BLOCK;
            const int row = __shfl_sync(~0u, page, i) * in.page_size + n % in.page_size;
            if (lane == 0) {
              take_slot();
              Piece& piece = ring.pieces[ring.slot];
              piece.token = span.token, piece.kv_head = span.kv_head, piece.first_position = n, piece.kv_high = span.high;
              piece.is_first = b + i == span.from, piece.is_last = b + i == span.until - 1;
              piece.is_newest = b + i == span.blocks - 1 && span.high > span.low, piece.half = (b + i - span.from) & 1;
              piece.place = 2 * chunk + (chunk == span.first), piece.counter = span.tile * KV_HEADS + span.kv_head;
              piece.first_chunk = span.first, piece.last_chunk = span.last;
              piece.position = span.position, piece.location = span.location;
              const u32 to = ring.stages + ring.slot * TILE_BYTES, barrier = ring.full + 8 * ring.slot;
              barrier_expect(barrier, TILE_BYTES + (piece.is_first ? QUERY_BYTES : 0) +
                                        (piece.is_newest ? 2 * KEY_BYTES : 0) +
                                        (piece.is_first || piece.is_newest ? ANGLE_BYTES : 0));
              const int column = span.kv_head * WIDTH;
              fetch(to, k_map, column, row, barrier);
              fetch(to + BOX_BYTES, k_map, column + 64, row, barrier);
              fetch(to + 2 * BOX_BYTES, v_map, column, row, barrier);
              fetch(to + 3 * BOX_BYTES, v_map, column + 64, row, barrier);
              if (!is_early) ask_fresh(ring.slot);
              ring.next();
            }
          }
        }
        at += span.until - span.from;
        if (aligned || at >= end) break;
        if (span.kv_head == KV_HEADS - 1 && span.until == span.blocks) {
          span.tile++;
          read_tile(span);
        }
        place_span(span, at, end);
        page = find_page(span, span.from);
      }
    }
  }
  if (lane == 0) {
    end_early();
    take_slot();
    ring.pieces[ring.slot].token = -1;
    barrier_arrive(ring.full + 8 * ring.slot);
  }
}

// The rotated queries as A of a product: per 16 dimensions, those of (lane / 4) at lane % 4 * 2 and 8 further.
INLINE void load_queries(const Inputs& in, const unsigned char* extra, u32 (&q)[8][2]) {
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
  float x[8][4];
  const bool real = row < GROUP;
  const u16* from = (const u16*)(extra + QUERIES_AT) + (real ? row * WIDTH : 0) + column;
  const float* angles = (const float*)(extra + ANGLES_AT) + column;
#pragma unroll
  for (int step = 0; step < 8; step++) {
    const u32 a = real ? *(const u32*)(from + 16 * step) : 0, b = real ? *(const u32*)(from + 16 * step + 8) : 0;
    x[step][0] = widen(a & 0xffff), x[step][1] = widen(a >> 16), x[step][2] = widen(b & 0xffff), x[step][3] = widen(b >> 16);
  }
#if NORM
  float square = 0.0f;
#pragma unroll
  for (int step = 0; step < 8; step++)
#pragma unroll
    for (int i = 0; i < 4; i++) square += x[step][i] * x[step][i];
  square += __shfl_xor_sync(~0u, square, 1);
  square += __shfl_xor_sync(~0u, square, 2);
  const float scale = rsqrtf(square / WIDTH + in.eps);
#pragma unroll
  for (int step = 0; step < 8; step++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float weight = widen(in.q_norm[16 * step + column + (i & 1) + (i & 2) * 4]) + in.offset;
      x[step][i] = rounded(x[step][i] * (scale * weight));
    }
#endif
#pragma unroll
  for (int step = 0; step < 4; step++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int dim = 16 * step + (i & 1) + (i & 2) * 4;
      const float cos = angles[dim], sin = angles[HALF + dim];
      const float a = x[step][i], b = x[step + 4][i];
      x[step][i] = a * cos - b * sin;
      x[step + 4][i] = b * cos + a * sin;
    }
  }
#pragma unroll
  for (int step = 0; step < 8; step++) {
    q[step][0] = pack(x[step][0], x[step][1]);
    q[step][1] = pack(x[step][2], x[step][3]);
  }
}

// Lays the newest token's key and value into the stage and the cache; rows of V after it become zero, whatever they hold.
INLINE void add_newest(
    const Inputs& in, const Piece& piece, const unsigned char* extra, u32 stage, int row, int slice_end) {
  const int lane = threadIdx.x % 32, dim = lane * 4;
  const uint2 raw = *(const uint2*)(extra + KEY_AT + 2 * dim), value = *(const uint2*)(extra + VALUE_AT + 2 * dim);
  float x[4] = {widen(raw.x & 0xffff), widen(raw.x >> 16), widen(raw.y & 0xffff), widen(raw.y >> 16)};
#if NORM
  float square = x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) square += __shfl_xor_sync(~0u, square, step);
  const float scale = rsqrtf(square / WIDTH + in.eps);
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = rounded(x[i] * (scale * (widen(in.k_norm[dim + i]) + in.offset)));
#endif
  const float* angles = (const float*)(extra + ANGLES_AT) + dim % HALF;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float other = __shfl_xor_sync(~0u, x[i], 16);
    const float cos = angles[i], sin = angles[HALF + i];
    x[i] = lane < 16 ? x[i] * cos - other * sin : x[i] * cos + other * sin;
  }
  const uint2 key = make_uint2(pack(x[0], x[1]), pack(x[2], x[3]));
  auto put = [&](u32 box, int token, uint2 what) {
    const u32 at = stage + (box + dim / 64) * BOX_BYTES + place_of(token, dim % 64 / 8) + (dim & 4) * 2;
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(what.x), "r"(what.y) : "memory");
  };
  put(0, row, key);
  put(2, row, value);
  for (int token = row + 1; token < slice_end; token++) put(2, token, make_uint2(0, 0));
  if (piece.location >= 0) {
    const i64 to = (piece.location * KV_HEADS + piece.kv_head) * WIDTH + dim;
    *(uint2*)(in.k_cache + to) = key;
    *(uint2*)(in.v_cache + to) = value;
  }
  // The copy engine writes here next.
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
}

struct State {
  float acc[16][4];
  float high, norm;
};

// A warp's 16 tokens of a stage, `seen` of which count.
INLINE void attend_slice(
    const Inputs& in, State& state, const u32 (&q)[8][2], u32 stage, int slice, int seen) {
  const int lane = threadIdx.x % 32;
  float score[2][4] = {};
#pragma unroll
  for (int tile = 0; tile < 2; tile++) {
    const int token = slice + tile * 8 + lane % 8;
#pragma unroll
    for (int step = 0; step < 8; step += 2) {
      u32 k[4];  // dimensions 16 * step .. + 32
      load4(k, stage + (step / 4) * BOX_BYTES + place_of(token, step % 4 * 2 + lane / 8));
      multiply(score[tile], q[step][0], q[step][1], k[0], k[1]);
      multiply(score[tile], q[step + 1][0], q[step + 1][1], k[2], k[3]);
    }
  }
  float top = LOWEST;
#pragma unroll
  for (int tile = 0; tile < 2; tile++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int token = tile * 8 + lane % 4 * 2 + i;
      score[tile][i] = token < seen ? score[tile][i] * in.scale_log2 : LOWEST;
      top = fmaxf(top, score[tile][i]);
    }
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  const float high = fmaxf(state.high, top), shrink = exp2_(state.high - high);
  float weight[2][2], sum = 0.0f;
#pragma unroll
  for (int tile = 0; tile < 2; tile++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      weight[tile][i] = exp2_(score[tile][i] - high);
      sum += weight[tile][i];
    }
  state.high = high;
  state.norm = state.norm * shrink + sum;  // of this lane's columns; the four lanes of a row are added at the end
  const u32 p0 = pack(weight[0][0], weight[0][1]), p1 = pack(weight[1][0], weight[1][1]);
#pragma unroll
  for (int part = 0; part < 8; part++) {  // 16 dimensions each
    u32 v[4];
    load4_transposed(
        v, stage + (2 + part / 4) * BOX_BYTES + place_of(slice + lane % 16, part % 4 * 2 + lane / 16));
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
      float(&d)[4] = state.acc[2 * part + tile];
      d[0] *= shrink, d[1] *= shrink;
      multiply(d, p0, p1, v[2 * tile], v[2 * tile + 1]);
    }
  }
}

// Puts the warps' results of a piece together, and those of all pieces of a unit where it was cut.
INLINE void finish(
    const Inputs& in, State& state, const Piece& piece, float* shared_acc, float* shared_stats, int* arrived) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
  state.norm += __shfl_xor_sync(~0u, state.norm, 1);
  state.norm += __shfl_xor_sync(~0u, state.norm, 2);
  if (row < GROUP) {
#pragma unroll
    for (int part = 0; part < 16; part++)
      *(float2*)(shared_acc + (warp * GROUP + row) * PITCH + part * 8 + column) =
          make_float2(state.acc[part][0], state.acc[part][1]);
    if (lane % 4 == 0) {
      shared_stats[warp * GROUP + row] = state.high;
      shared_stats[(WARPS + warp) * GROUP + row] = state.norm;
    }
  }
  workers_meet();
  // A thread has one dimension of every second row.
  constexpr int MINE = (GROUP + 1) / 2;
  const int dim = threadIdx.x % WIDTH, first_row = threadIdx.x / WIDTH;
  float acc[MINE], high[MINE], norm[MINE];
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    const int r = min(first_row + 2 * i, GROUP - 1);
    high[i] = LOWEST;
#pragma unroll
    for (int w = 0; w < WARPS; w++) high[i] = fmaxf(high[i], shared_stats[w * GROUP + r]);
    acc[i] = norm[i] = 0.0f;
    const float anchor = high[i] == LOWEST ? 0.0f : high[i];  // a row without KV
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float share = exp2_(shared_stats[w * GROUP + r] - anchor);
      acc[i] += share * shared_acc[(w * GROUP + r) * PITCH + dim];
      norm[i] += share * shared_stats[(WARPS + w) * GROUP + r];
    }
  }
  bool is_done = true;
  if (piece.first_chunk != piece.last_chunk) {
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      const int r = first_row + 2 * i;
      if (r >= GROUP) break;
      __stcg(in.partial + ((i64)piece.place * ROWS + r) * WIDTH + dim, acc[i]);
      if (dim == 0) __stcg(in.stats + piece.place * 2 * ROWS + r, high[i]);
      if (dim == 0) __stcg(in.stats + piece.place * 2 * ROWS + ROWS + r, norm[i]);
    }
    __threadfence();
    workers_meet();
    if (threadIdx.x == 0) *arrived = atomicAdd(in.counters + piece.counter, 1);
    workers_meet();
    is_done = *arrived == piece.last_chunk - piece.first_chunk;
    if (is_done) {
      __threadfence();
      if (threadIdx.x == 0) in.counters[piece.counter] = 0;
#pragma unroll
      for (int i = 0; i < MINE; i++) acc[i] = norm[i] = 0.0f, high[i] = LOWEST;
      for (int chunk = piece.first_chunk; chunk <= piece.last_chunk; chunk++) {
        const int place = 2 * chunk + (chunk == piece.first_chunk);
#pragma unroll
        for (int i = 0; i < MINE; i++) {
          const int r = min(first_row + 2 * i, GROUP - 1);
          const float part_high = __ldcg(in.stats + place * 2 * ROWS + r);
          const float part_norm = __ldcg(in.stats + place * 2 * ROWS + ROWS + r);
          const float part = __ldcg(in.partial + ((i64)place * ROWS + r) * WIDTH + dim);
          const float top = fmaxf(high[i], part_high);
          const float old_share = exp2_(high[i] - top), new_share = exp2_(part_high - top);
          acc[i] = acc[i] * old_share + part * new_share;
          norm[i] = norm[i] * old_share + part_norm * new_share;
          high[i] = top;
        }
      }
    }
  }
  if (is_done) {
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      const int r = first_row + 2 * i;
      if (r < GROUP)
        in.out[((i64)piece.token * HEADS + piece.kv_head * GROUP + r) * WIDTH + dim] =
            (u16)(pack(norm[i] > 0.0f ? acc[i] / norm[i] : 0.0f, 0.0f) & 0xffff);
    }
  }
  workers_meet();
}

INLINE void attend(
    const Inputs& in, Ring& ring, const unsigned char* extras, float* shared_acc, float* shared_stats, int* arrived) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = warp / 4, slice = warp % 4 * 16;
  u32 q[8][2];
  State state;
  for (;; ring.next()) {
    barrier_wait(ring.full + 8 * ring.slot, ring.parity);
    const Piece piece = ring.pieces[ring.slot];
    if (piece.token < 0) break;
    const unsigned char* extra = extras + ring.slot * EXTRA_BYTES;
    if (piece.is_first) {
      load_queries(in, extra, q);
#pragma unroll
      for (int part = 0; part < 16; part++)
#pragma unroll
        for (int i = 0; i < 4; i++) state.acc[part][i] = 0.0f;
      state.high = LOWEST, state.norm = 0.0f;
    }
    const u32 stage = ring.stages + ring.slot * TILE_BYTES;
    const int seen = piece.kv_high - piece.first_position - slice;  // of this warp's tokens, and those after
    if (piece.half == half && seen > 0) {
      if (seen <= 16) add_newest(in, piece, extra, stage, slice + seen - 1, slice + 16);
      attend_slice(in, state, q, stage, slice, seen);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.empty + 8 * ring.slot);
    if (piece.is_last) finish(in, state, piece, shared_acc, shared_stats, arrived);
  }
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32, 1) decode(
    const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map, const __grid_constant__ Inputs in) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES];
  __shared__ Piece pieces[STAGES];
  __shared__ float shared_acc[WARPS * GROUP * PITCH], shared_stats[2 * WARPS * GROUP];
  __shared__ int arrived;
  let_kernel_after_start();
  Ring ring;
  const u32 start = (u32)__cvta_generic_to_shared(memory);
  ring.stages = (start + 1023) & ~1023u;
  ring.extras = ring.stages + STAGES * TILE_BYTES;
  ring.full = (u32)__cvta_generic_to_shared(barriers), ring.empty = ring.full + 8 * STAGES;
  ring.pieces = pieces;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(ring.full + 8 * i, 1);
      barrier_init(ring.empty + 8 * i, WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= WORKERS) {
    feed(in, ring, k_map, v_map);
    return;
  }
  wait_for_kernel_before();
  // Tokens that belong to no row.
  for (int token = in.header[REAL_TOKENS] + blockIdx.x; token < in.num_tokens; token += gridDim.x)
    for (int i = threadIdx.x * 8; i < HEADS * WIDTH; i += WORKERS * 8)
      *(uint4*)(in.out + (i64)token * HEADS * WIDTH + i) = make_uint4(0, 0, 0, 0);
  attend(in, ring, memory + (ring.extras - start), shared_acc, shared_stats, &arrived);
}
