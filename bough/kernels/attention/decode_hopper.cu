// Attention of decode rows (one query token each) over paged KV, for Hopper, with the rotation and the KV write in it.
//
// Work comes from the plan (plan.py): units (row, KV head) of blocks of 64 KV tokens, cut into chunks. Keys and values come
// through the copy engine. They are what earlier steps wrote, so they are asked for before the kernel before this one has
// ended. The row's newest key is rotated, laid over what was fetched for its place and, with the value, into the cache. A
// unit cut over several chunks is put together by the block that finishes last.
//
// There are two ways. `decode` is for few units: block b takes the chunks b, b + gridDim.x, ... One warp feeds a ring of
// stages (K and V of a block of tokens), eight attend, four to every second block, each over a quarter of its tokens with a
// softmax of its own; all put their results together at the end of a unit. Queries, newest keys and values, and angles come
// with the stages. `decode_many` is for units enough to keep the memory busy without working together: each warp takes a
// chunk at a time, through a small ring of its own, and while one looks up its next chunk the others' fetches are on their way.
//
// A cache of 8-bit floats is read as it is: all of them are numbers of fp16, into which pairs are turned on their way to the
// tensor cores. Which dimension stands where within a product is free if both sides agree, so keys are taken four neighbours
// at a time. Values come transposed by pairs of dimensions, whose bytes are put in order.
//
// With a window, rows begin with the block that has its first token; what lies before that in the block is neither weighed nor
// a number that can be relied on.
//
// Given: GROUP (query heads of a KV head, at most 8), KV_HEADS, NORM (q and k have norms), STAGES (of the ring), KV (what caches
// hold: BF16, E4M3 or E5M2), WIDTH of a head (128, or 64 of BF16), SINKS (each head has a logit without a value), WINDOWED, and
// for the second way MANY_WARPS, MANY_STAGES and MANY_TOKENS (of a stage, 16 or 32). Queries, and keys and values that come,
// are bf16.

#include "hopper.cuh"

#define LOWEST (-__int_as_float(0x7f800000))
#define BF16 0
#define E4M3 1
#define E5M2 2

constexpr int HALF = WIDTH / 2, BLOCK = 64;
constexpr int STEPS = WIDTH / 16, EIGHTS = WIDTH / 8;  // products of a head's dimensions
constexpr int SLICE = 16;                     // tokens that a warp attends to at once
constexpr int ROW_BYTES = 128;                // of a token in a box
constexpr int ITEM = KV == BF16 ? 2 : 1;      // bytes of a number in the cache
constexpr int BOXES = WIDTH * ITEM / ROW_BYTES;  // of keys, and of values: the first has the lower dimensions
constexpr int BOX_BYTES = BLOCK * ROW_BYTES;
constexpr int TILE_BYTES = 2 * BOXES * BOX_BYTES;  // a stage: K, then V
constexpr int MANY_BOX_BYTES = MANY_TOKENS * ROW_BYTES;  // the same in `decode_many`
constexpr int MANY_TILE_BYTES = 2 * BOXES * MANY_BOX_BYTES;
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

// Which partial result a chunk leaves of a unit whose first chunk is `first`: it may have the end of one and begin another.
INLINE int part_of(int chunk, int first) { return 2 * chunk + (chunk == first); }

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

// Two numbers as the tensor cores take them beside those of the cache.
INLINE u32 operand_of(float low, float high) {
#if KV == BF16
  return pack(low, high);
#else
  u32 out;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
#endif
}

#if KV == E4M3
#define EIGHT "e4m3x2"
#else
#define EIGHT "e5m2x2"
#endif

// Four numbers of the cache, two by two.
INLINE void widen_four(u32 four, u32& first, u32& second) {
  asm("{ .reg .b16 lower, upper; mov.b32 {lower, upper}, %2; cvt.rn.f16x2." EIGHT " %0, lower; cvt.rn.f16x2." EIGHT
      " %1, upper; }" : "=r"(first), "=r"(second) : "r"(four));
}

INLINE u32 narrow_four(const float (&x)[4]) {
  u32 out;
  asm("{ .reg .b16 lower, upper; cvt.rn.satfinite." EIGHT ".f32 lower, %2, %1; cvt.rn.satfinite." EIGHT
      ".f32 upper, %4, %3; mov.b32 %0, {lower, upper}; }" : "=r"(out) : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
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
#if KV == BF16
#define TYPES "f32.bf16.bf16.f32"
#else
#define TYPES "f32.f16.f16.f32"
#endif
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col." TYPES " {%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1));
}

INLINE void workers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

// Where 16 bytes of a token lie in a box, which is swizzled.
INLINE u32 place_of(int token, int sixteen) { return token * ROW_BYTES + ((sixteen ^ (token & 7)) << 4); }

struct Inputs {
  const u16 *q, *k, *v;
  const u16 *q_norm, *k_norm;
  const float* cos_sin;
  const i64 *positions, *locations;
  void *k_cache, *v_cache;
  u16* out;
  const int *page_table, *tiles, *header, *chunk_tile;
  int* counters;
  float *partial, *stats;
  int* queue;  // for `decode_many`: chunks taken after the first of each warp, blocks that are done; zero between launches
  i64 table_stride;
  int q_token, k_token, v_token;
  const float* sinks;  // [heads]
  int tile_room, page_size, num_tokens, window;
  float scale_log2, eps, offset;
  float k_inverse, v_inverse, v_scale;  // of a cache of 8-bit floats; the scale of keys is in that of scores
};

// The sum of weights, and what a head's sink adds to it.
INLINE float with_sink(const Inputs& in, int head, float high, float norm) {
  if (!SINKS || norm == 0.0f) return norm;
  return norm + exp2_(__ldg(in.sinks + head) * 1.4426950408889634f - high);
}

// A row without KV has weighed nothing; what isn't a number stays so.
INLINE float weighed(const Inputs& in, float sum, float norm) {
  const float out = norm == 0.0f ? 0.0f : sum / norm;
  return KV == BF16 ? out : out * in.v_scale;
}

// Keys and values of tokens, of one head.
template <int BOX> INLINE void fetch_tokens(
    u32 to, const TensorMap& k_map, const TensorMap& v_map, int kv_head, int row, u32 barrier) {
  const int column = kv_head * WIDTH;
#pragma unroll
  for (int box = 0; box < BOXES; box++) fetch(to + box * BOX, k_map, column + 64 * box, row, barrier);
#pragma unroll
  for (int box = 0; box < BOXES; box++) fetch(to + (BOXES + box) * BOX, v_map, column + 64 * box, row, barrier);
}

struct Ring {
  u32 stages, extras, full, empty;
  Piece* pieces;
  int slot = 0, filled = 0;
  u32 parity = 0;
  INLINE void next() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

// What a chunk, or the rest of it from `at` on, has of a unit: the blocks from .. until.
struct Span {
  int tile, start, token, low, high, slot, position;
  i64 location;
  int kv_head, from, until, blocks, first, last;  // all blocks of the unit, the chunks that have them
  int at, end;                                    // in the stream
};

// The plan's stream of blocks.
struct Work {
  const Inputs& in;
  const int total, per_chunk, aligned, chunks;

  INLINE Work(const Inputs& in)
      : in(in), total(in.header[TOTAL]), per_chunk(in.header[PER_CHUNK]), aligned(in.header[ALIGNED]),
        chunks((total + per_chunk - 1) / per_chunk) {}

  INLINE void read_tile(Span& span) const {
    auto field = [&](int name) { return in.tiles[name * in.tile_room + span.tile]; };
    span.start = field(START), span.token = field(TOKEN), span.low = field(KV_LOW), span.high = field(KV_HIGH);
    span.slot = field(SLOT);
    span.position = (int)in.positions[span.token], span.location = in.locations[span.token];
  }

  INLINE void place(Span& span) const {
    span.blocks = max((span.high - span.low + BLOCK - 1) / BLOCK, 1);
    const int room = aligned ? (span.blocks + per_chunk - 1) / per_chunk * per_chunk : span.blocks;
    span.kv_head = (span.at - span.start) / room;
    const int head_start = span.start + span.kv_head * room;
    span.from = span.at - head_start, span.until = min(span.blocks, span.from + span.end - span.at);
    span.first = head_start / per_chunk, span.last = (head_start + span.blocks - 1) / per_chunk;
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
    if (span.kv_head == KV_HEADS - 1 && span.until == span.blocks) {
      span.tile++;
      read_tile(span);
    }
    place(span);
    return true;
  }

  // The page of the block that lies `lane` after `b`.
  INLINE int page(const Span& span, int b) const {
    const int lane = threadIdx.x % 32;
    if (b + lane >= span.until || span.high <= span.low) return 0;
    return in.page_table[span.slot * in.table_stride + (span.low + (b + lane) * BLOCK) / in.page_size];
  }
};

INLINE void feed(const Inputs& in, Ring& ring, const TensorMap& k_map, const TensorMap& v_map) {
  const int lane = threadIdx.x % 32;
  const Work work(in);
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
  for (int base = blockIdx.x; base < work.chunks; base += 32 * gridDim.x) {
    // Each lane looks up one of the next 32 chunks.
    Span found = {};
    const int looked_up = base + lane * gridDim.x;
    if (looked_up < work.chunks) found = work.first_of(looked_up);
    auto span_of = [&](int each) {
      Span span;
      const int* from = (const int*)&found;
      int* to = (int*)&span;
#pragma unroll
      for (int i = 0; i < (int)(sizeof(Span) / 4); i++) to[i] = __shfl_sync(~0u, from[i], each);
      return span;
    };
    Span next = span_of(0);
    int next_page = work.page(next, next.from);
    for (int each = 0; each < 32; each++) {
      const int chunk = base + each * gridDim.x;
      if (chunk >= work.chunks) break;
      Span span = next;
      int page = next_page;
      next = span_of(min(each + 1, 31));
      next_page = work.page(next, next.from);  // on its way while this chunk's blocks are asked for
      while (true) {
        for (int b = span.from; b < span.until; b += 32) {
          if (b > span.from) page = work.page(span, b);
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
              piece.place = part_of(chunk, span.first), piece.counter = span.tile * KV_HEADS + span.kv_head;
              piece.first_chunk = span.first, piece.last_chunk = span.last;
              piece.position = span.position, piece.location = span.location;
              const u32 barrier = ring.full + 8 * ring.slot;
              barrier_expect(barrier, TILE_BYTES + (piece.is_first ? QUERY_BYTES : 0) +
                                        (piece.is_newest ? 2 * KEY_BYTES : 0) +
                                        (piece.is_first || piece.is_newest ? ANGLE_BYTES : 0));
              fetch_tokens<BOX_BYTES>(ring.stages + ring.slot * TILE_BYTES, k_map, v_map, span.kv_head, row, barrier);
              if (!is_early) ask_fresh(ring.slot);
              ring.next();
            }
          }
        }
        if (!work.go_on(span)) break;
        page = work.page(span, span.from);
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

// Of 16 dimensions, where the first two of this lane stand in a product, and how much further the next two: for 8-bit floats
// four neighbours, which one word of a key has.
constexpr int LANE_STEP = KV == BF16 ? 2 : 4, PAIR_STEP = KV == BF16 ? 8 : 2;

// The rotated queries of head lane / 4 as A of a product.
INLINE void load_queries(const Inputs& in, const u16* queries, const float* angles, u32 (&q)[STEPS][2]) {
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * LANE_STEP;
  float x[STEPS][4];
  const bool real = row < GROUP;
  const u16* from = queries + (real ? row * WIDTH : 0) + column;
  angles += column;
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const u32 a = real ? *(const u32*)(from + 16 * step) : 0, b = real ? *(const u32*)(from + 16 * step + PAIR_STEP) : 0;
    x[step][0] = widen(a & 0xffff), x[step][1] = widen(a >> 16), x[step][2] = widen(b & 0xffff), x[step][3] = widen(b >> 16);
  }
#if NORM
  float square = 0.0f;
#pragma unroll
  for (int step = 0; step < STEPS; step++)
#pragma unroll
    for (int i = 0; i < 4; i++) square += x[step][i] * x[step][i];
  square += __shfl_xor_sync(~0u, square, 1);
  square += __shfl_xor_sync(~0u, square, 2);
  const float scale = rsqrtf(square / WIDTH + in.eps);
#pragma unroll
  for (int step = 0; step < STEPS; step++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float weight = widen(in.q_norm[16 * step + column + (i & 1) + i / 2 * PAIR_STEP]) + in.offset;
      x[step][i] = rounded(x[step][i] * (scale * weight));
    }
#endif
#pragma unroll
  for (int step = 0; step < STEPS / 2; step++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int dim = 16 * step + (i & 1) + i / 2 * PAIR_STEP;
      const float cos = angles[dim], sin = angles[HALF + dim];
      const float a = x[step][i], b = x[step + STEPS / 2][i];
      x[step][i] = a * cos - b * sin;
      x[step + STEPS / 2][i] = b * cos + a * sin;
    }
  }
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    q[step][0] = operand_of(x[step][0], x[step][1]);
    q[step][1] = operand_of(x[step][2], x[step][3]);
  }
}

// A lane's dimensions of a row's newest key and value, and of its angles.
struct Newest {
  static constexpr int MINE = WIDTH / 32;  // four, or two
  u32 key[MINE / 2], value[MINE / 2];
  float cos[MINE], sin[MINE];

  INLINE void load(const u16* keys, const u16* values, const float* angles) {
    const int dim = threadIdx.x % 32 * MINE;
#if WIDTH == 128
    *(uint2*)key = *(const uint2*)(keys + dim), *(uint2*)value = *(const uint2*)(values + dim);
    *(float4*)cos = *(const float4*)(angles + dim % HALF), *(float4*)sin = *(const float4*)(angles + HALF + dim % HALF);
#else
    *key = *(const u32*)(keys + dim), *value = *(const u32*)(values + dim);
    *(float2*)cos = *(const float2*)(angles + dim % HALF), *(float2*)sin = *(const float2*)(angles + HALF + dim % HALF);
#endif
  }
};

// Lays the newest token's key and value into the stage and the cache; rows of V after it become zero, whatever they hold.
template <int BOX> INLINE void add_newest(
    const Inputs& in, const Newest& newest, int kv_head, i64 location, u32 stage, int row, int slice_end) {
  constexpr int MINE = Newest::MINE, WORDS = MINE * ITEM / 4;
  const int lane = threadIdx.x % 32, dim = lane * MINE;
  float x[MINE];
#pragma unroll
  for (int i = 0; i < MINE; i++) x[i] = widen(i % 2 ? newest.key[i / 2] >> 16 : newest.key[i / 2] & 0xffff);
#if NORM
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < MINE; i++) square += x[i] * x[i];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) square += __shfl_xor_sync(~0u, square, step);
  const float scale = rsqrtf(square / WIDTH + in.eps);
#pragma unroll
  for (int i = 0; i < MINE; i++) x[i] = rounded(x[i] * (scale * (widen(in.k_norm[dim + i]) + in.offset)));
#endif
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    const float other = __shfl_xor_sync(~0u, x[i], 16);
    x[i] = lane < 16 ? x[i] * newest.cos[i] - other * newest.sin[i] : x[i] * newest.cos[i] + other * newest.sin[i];
  }
  u32 key[WORDS], kept[WORDS];
#if KV == BF16
#pragma unroll
  for (int i = 0; i < WORDS; i++) key[i] = pack(x[2 * i], x[2 * i + 1]), kept[i] = newest.value[i];
#else
  float y[MINE];
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    y[i] = widen(i % 2 ? newest.value[i / 2] >> 16 : newest.value[i / 2] & 0xffff) * in.v_inverse;
    x[i] = rounded(x[i]) * in.k_inverse;
  }
  key[0] = narrow_four(x), kept[0] = narrow_four(y);
#endif
  auto put = [&](u32 box, int token, const u32 (&words)[WORDS]) {
    const int byte = dim * ITEM;
    const u32 at = stage + (box + byte / ROW_BYTES) * BOX + place_of(token, byte % ROW_BYTES / 16) + byte % 16;
#pragma unroll
    for (int i = 0; i < WORDS; i++) asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + 4 * i), "r"(words[i]) : "memory");
  };
  put(0, row, key);
  put(BOXES, row, kept);
  const u32 nothing[WORDS] = {};
  for (int token = row + 1; token < slice_end; token++) put(BOXES, token, nothing);
  if (location >= 0) {
    const i64 to = ((location * KV_HEADS + kv_head) * WIDTH + dim) * ITEM / (4 * WORDS);
#if KV == BF16 && WIDTH == 128
    ((uint2*)in.k_cache)[to] = make_uint2(key[0], key[1]);
    ((uint2*)in.v_cache)[to] = make_uint2(kept[0], kept[1]);
#else
    ((u32*)in.k_cache)[to] = key[0];
    ((u32*)in.v_cache)[to] = kept[0];
#endif
  }
  // The copy engine writes here next.
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
}

// Values of the tokens from `first` on, which no query sees, become zero, whatever they hold.
template <int BOX> INLINE void hide_values(u32 stage, int first, int count) {
  for (int token = first; token < first + count; token++)
#pragma unroll
    for (int box = BOXES; box < 2 * BOXES; box++)
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(stage + box * BOX + token * ROW_BYTES + threadIdx.x % 32 * 4), "r"(0) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
}

// Sums of values. A product's column n is dimension n of eight, or of 8-bit floats dimension 2 n, or 2 n + 1, of sixteen.
struct State {
  float acc[EIGHTS][4];
  float high, norm;

  // What this lane has of its row: EIGHTS pairs of neighbouring dimensions.
  INLINE float& of(int pair, int i) { return KV == BF16 ? acc[pair][i] : acc[pair / 2 * 2 + i][pair % 2]; }
  INLINE static int dim(int pair) {
    const int q = threadIdx.x % 4;
    return KV == BF16 ? pair * 8 + q * 2 : pair / 2 * 16 + q * 4 + pair % 2 * 2;
  }

  INLINE void clear() {
#pragma unroll
    for (int part = 0; part < EIGHTS; part++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[part][i] = 0.0f;
    high = LOWEST, norm = 0.0f;
  }

  // Adds what the four lanes of a row have.
  INLINE void add_norms() {
    norm += __shfl_xor_sync(~0u, norm, 1);
    norm += __shfl_xor_sync(~0u, norm, 2);
  }
};

// Keys of eight tokens and the queries of a row of heads.
template <int BOX> INLINE void score_eight(float (&score)[4], const u32 (&q)[STEPS][2], u32 stage, int first) {
  const int lane = threadIdx.x % 32, token = first + lane % 8;
#if KV == BF16
#pragma unroll
  for (int step = 0; step < STEPS; step += 2) {
    u32 k[4];  // dimensions 16 * step .. + 32
    load4(k, stage + (step / 4) * BOX + place_of(token, step % 4 * 2 + lane / 8));
    multiply(score, q[step][0], q[step][1], k[0], k[1]);
    multiply(score, q[step + 1][0], q[step + 1][1], k[2], k[3]);
  }
#else
#pragma unroll
  for (int step = 0; step < STEPS; step += 4) {
    u32 k[4];  // dimensions 16 * step .. + 64
    load4(k, stage + place_of(token, step + lane / 8));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 first, second;
      widen_four(k[i], first, second);
      multiply(score, q[step + i][0], q[step + i][1], first, second);
    }
  }
#endif
}

// Adds the values of 16 tokens, weighed by p0 and p1.
template <int BOX> INLINE void add_values(State& state, u32 p0, u32 p1, u32 stage, int first) {
  const int lane = threadIdx.x % 32, token = first + lane % 16;
#if KV == BF16
#pragma unroll
  for (int part = 0; part < STEPS; part++) {  // 16 dimensions each
    u32 v[4];
    load4_transposed(v, stage + (BOXES + part / 4) * BOX + place_of(token, part % 4 * 2 + lane / 16));
    multiply(state.acc[2 * part], p0, p1, v[0], v[1]);
    multiply(state.acc[2 * part + 1], p0, p1, v[2], v[3]);
  }
#else
#pragma unroll
  for (int part = 0; part < 8; part += 2) {
    u32 v[4];  // of 16 dimensions eight tokens and the eight after them, then of the next 16
    load4_transposed(v, stage + BOX + place_of(token, part + lane / 16));
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 even[2], odd[2];
#pragma unroll
      for (int eight = 0; eight < 2; eight++)  // a word has two dimensions of a token, then the same of the next one
        widen_four(__byte_perm(v[2 * i + eight], 0, 0x3120), even[eight], odd[eight]);
      multiply(state.acc[2 * (part + i)], p0, p1, even[0], even[1]);
      multiply(state.acc[2 * (part + i) + 1], p0, p1, odd[0], odd[1]);
    }
  }
#endif
}

// TOKENS of a stage, of which those from `hidden` up to `seen` count.
template <int BOX, int TOKENS> INLINE void attend_slice(
    const Inputs& in, State& state, const u32 (&q)[STEPS][2], u32 stage, int slice, int seen, int hidden) {
  if (WINDOWED && hidden > 0) hide_values<BOX>(stage, slice, hidden);
  constexpr int TILES = TOKENS / 8;
  const int lane = threadIdx.x % 32;
  float score[TILES][4] = {};
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) score_eight<BOX>(score[tile], q, stage, slice + tile * 8);
  float top = LOWEST;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int token = tile * 8 + lane % 4 * 2 + i;
      const bool counts = token < seen && (!WINDOWED || token >= hidden);
      score[tile][i] = counts ? score[tile][i] * in.scale_log2 : LOWEST;
      top = fmaxf(top, score[tile][i]);
    }
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  const float high = fmaxf(state.high, top), shrink = exp2_(state.high - high);
  float weight[TILES][2], sum = 0.0f;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      weight[tile][i] = exp2_(score[tile][i] - high);
      sum += weight[tile][i];
    }
  state.high = high;
  state.norm = state.norm * shrink + sum;  // of this lane's columns; the four lanes of a row are added at the end
#pragma unroll
  for (int part = 0; part < EIGHTS; part++) state.acc[part][0] *= shrink, state.acc[part][1] *= shrink;
#pragma unroll
  for (int tile = 0; tile < TILES; tile += 2)
    add_values<BOX>(state, operand_of(weight[tile][0], weight[tile][1]), operand_of(weight[tile + 1][0], weight[tile + 1][1]),
                    stage, slice + tile * 8);
}

// Puts the warps' results of a piece together, and those of all pieces of a unit where it was cut.
INLINE void finish(
    const Inputs& in, State& state, const Piece& piece, float* shared_acc, float* shared_stats, int* arrived) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4;
  state.add_norms();
  if (row < GROUP) {
#pragma unroll
    for (int pair = 0; pair < EIGHTS; pair++)
      *(float2*)(shared_acc + (warp * GROUP + row) * PITCH + State::dim(pair)) =
          make_float2(state.of(pair, 0), state.of(pair, 1));
    if (lane % 4 == 0) {
      shared_stats[warp * GROUP + row] = state.high;
      shared_stats[(WARPS + warp) * GROUP + row] = state.norm;
    }
  }
  workers_meet();
  // A thread has one dimension of every second row, or of every fourth.
  constexpr int APART = WORKERS / WIDTH, MINE = (GROUP + APART - 1) / APART;
  const int dim = threadIdx.x % WIDTH, first_row = threadIdx.x / WIDTH;
  float acc[MINE], high[MINE], norm[MINE];
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    const int r = min(first_row + APART * i, GROUP - 1);
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
      const int r = first_row + APART * i;
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
      // Several at a time, so that they are all on their way before the first has come.
      constexpr int BATCH = MINE >= 4 ? 4 : 8;
      for (int base = piece.first_chunk; base <= piece.last_chunk; base += BATCH) {
        float part_high[BATCH][MINE], part_norm[BATCH][MINE], part[BATCH][MINE];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
          const bool real = base + b <= piece.last_chunk;
          const int place = part_of(min(base + b, piece.last_chunk), piece.first_chunk);
#pragma unroll
          for (int i = 0; i < MINE; i++) {
            const int r = min(first_row + APART * i, GROUP - 1);
            part_high[b][i] = real ? __ldcg(in.stats + place * 2 * ROWS + r) : LOWEST;
            part_norm[b][i] = real ? __ldcg(in.stats + place * 2 * ROWS + ROWS + r) : 0.0f;
            part[b][i] = real ? __ldcg(in.partial + ((i64)place * ROWS + r) * WIDTH + dim) : 0.0f;
          }
        }
#pragma unroll
        for (int i = 0; i < MINE; i++) {
          float top = high[i];
#pragma unroll
          for (int b = 0; b < BATCH; b++) top = fmaxf(top, part_high[b][i]);
          const float old_share = exp2_(high[i] - top);
          acc[i] *= old_share, norm[i] *= old_share, high[i] = top;
#pragma unroll
          for (int b = 0; b < BATCH; b++) {
            const float share = exp2_(part_high[b][i] - top);
            acc[i] += part[b][i] * share, norm[i] += part_norm[b][i] * share;
          }
        }
      }
    }
  }
  if (is_done) {
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      const int r = first_row + APART * i, head = piece.kv_head * GROUP + r;
      if (r < GROUP)
        in.out[((i64)piece.token * HEADS + head) * WIDTH + dim] =
            (u16)(pack(weighed(in, acc[i], with_sink(in, head, high[i], norm[i])), 0.0f) & 0xffff);
    }
  }
  workers_meet();
}

// Of tokens that belong to no row: those from `real_tokens` on.
template <int THREADS> INLINE void zero_padding(const Inputs& in, int real_tokens) {
  for (int token = real_tokens + blockIdx.x; token < in.num_tokens; token += gridDim.x)
    for (int i = threadIdx.x * 8; i < HEADS * WIDTH; i += THREADS * 8)
      *(uint4*)(in.out + (i64)token * HEADS * WIDTH + i) = make_uint4(0, 0, 0, 0);
}

INLINE void attend(
    const Inputs& in, Ring& ring, const unsigned char* extras, float* shared_acc, float* shared_stats, int* arrived) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = warp / 4, slice = warp % 4 * SLICE;
  u32 q[STEPS][2];
  State state;
  for (;; ring.next()) {
    barrier_wait(ring.full + 8 * ring.slot, ring.parity);
    const Piece piece = ring.pieces[ring.slot];
    if (piece.token < 0) break;
    const unsigned char* extra = extras + ring.slot * EXTRA_BYTES;
    if (piece.is_first) {
      load_queries(in, (const u16*)(extra + QUERIES_AT), (const float*)(extra + ANGLES_AT), q);
      state.clear();
    }
    const u32 stage = ring.stages + ring.slot * TILE_BYTES;
    const int seen = piece.kv_high - piece.first_position - slice;  // of this warp's tokens, and those after
    const int hidden = WINDOWED ? seen - in.window : 0;  // of them, those before the window
    if (piece.half == half && seen > 0 && (!WINDOWED || hidden < SLICE)) {
      if (seen <= SLICE) {
        Newest newest;
        newest.load(
            (const u16*)(extra + KEY_AT), (const u16*)(extra + VALUE_AT), (const float*)(extra + ANGLES_AT));
        add_newest<BOX_BYTES>(
            in, newest, piece.kv_head, piece.location, stage, slice + seen - 1, slice + SLICE);
      }
      attend_slice<BOX_BYTES, SLICE>(in, state, q, stage, slice, seen, hidden);
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
  const int real_tokens = in.header[REAL_TOKENS];  // read before the wait: the queries wait for nothing after it
  wait_for_kernel_before();
  zero_padding<WORKERS>(in, real_tokens);
  attend(in, ring, memory + (ring.extras - start), shared_acc, shared_stats, &arrived);
}

// The result of a unit that one warp has, put together with those of its other pieces where it was cut.
INLINE void finish_alone(const Inputs& in, State& state, const Span& span, int chunk) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  const bool real = row < GROUP;
  state.add_norms();
  if (span.first != span.last) {
    auto acc_at = [&](int part, int pair) { return in.partial + ((i64)part * ROWS + row) * WIDTH + State::dim(pair); };
    auto stats_at = [&](int part) { return in.stats + part * 2 * ROWS + row; };
    if (real) {
      const int mine = part_of(chunk, span.first);
#pragma unroll
      for (int pair = 0; pair < EIGHTS; pair++)
        __stcg((float2*)acc_at(mine, pair), make_float2(state.of(pair, 0), state.of(pair, 1)));
      if (lane % 4 == 0) __stcg(stats_at(mine), state.high), __stcg(stats_at(mine) + ROWS, state.norm);
    }
    __threadfence();
    __syncwarp();
    int* counter = in.counters + span.tile * KV_HEADS + span.kv_head;
    int arrived = 0;
    if (lane == 0) arrived = atomicAdd(counter, 1);
    if (__shfl_sync(~0u, arrived, 0) != span.last - span.first) return;
    __syncwarp();
    __threadfence();
    if (lane == 0) *counter = 0;
    if (!real) return;
    state.clear();
    for (int each = span.first; each <= span.last; each++) {
      const int other = part_of(each, span.first);
      const float part_high = __ldcg(stats_at(other)), part_norm = __ldcg(stats_at(other) + ROWS);
      const float top = fmaxf(state.high, part_high);
      const float old_share = exp2_(state.high - top), new_share = exp2_(part_high - top);
#pragma unroll
      for (int pair = 0; pair < EIGHTS; pair++) {
        const float2 two = __ldcg((const float2*)acc_at(other, pair));
        state.of(pair, 0) = state.of(pair, 0) * old_share + two.x * new_share;
        state.of(pair, 1) = state.of(pair, 1) * old_share + two.y * new_share;
      }
      state.norm = state.norm * old_share + part_norm * new_share;
      state.high = top;
    }
  }
  if (!real) return;
  const int head = span.kv_head * GROUP + row;
  u16* to = in.out + ((i64)span.token * HEADS + head) * WIDTH;
  const float norm = with_sink(in, head, state.high, state.norm);
#pragma unroll
  for (int pair = 0; pair < EIGHTS; pair++)
    *(u32*)(to + State::dim(pair)) =
        pack(weighed(in, state.of(pair, 0), norm), weighed(in, state.of(pair, 1), norm));
}

extern "C" __global__ void __launch_bounds__(32 * MANY_WARPS, 1) decode_many(
    const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map, const __grid_constant__ Inputs in) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[MANY_WARPS * MANY_STAGES];
  let_kernel_after_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 start = (u32)__cvta_generic_to_shared(memory), full = (u32)__cvta_generic_to_shared(barriers + warp * MANY_STAGES);
  const u32 stages = ((start + 1023) & ~1023u) + warp * (MANY_STAGES * MANY_TILE_BYTES);
  if (lane == 0) {
    for (int i = 0; i < MANY_STAGES; i++) barrier_init(full + 8 * i, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  const Work work(in);
  int slot = 0;  // of the ring: where the next slice is asked for and, since a unit leaves none behind, awaited
  u32 parity = 0;
  auto next = [](int& slot) {
    if (++slot < MANY_STAGES) return false;
    slot = 0;
    return true;
  };
  bool is_early = true;
  const int all_warps = MANY_WARPS * gridDim.x;
  int chunk = blockIdx.x + warp * gridDim.x;
  while (chunk < work.chunks) {
    Span span = work.first_of(chunk);
    do {
      const int begin = span.low + span.from * BLOCK, stop = min(span.high, span.low + span.until * BLOCK);
      const int slices = max(stop - begin + MANY_TOKENS - 1, 0) / MANY_TOKENS;
      int page = work.page(span, span.from), asked = 0, to = slot;
      auto ask = [&] {
        if (asked == slices) return;
        const int n = begin + asked * MANY_TOKENS, block = asked * MANY_TOKENS / BLOCK;
        if (asked > 0 && asked % (32 * BLOCK / MANY_TOKENS) == 0) page = work.page(span, span.from + block);
        const int row = __shfl_sync(~0u, page, block % 32) * in.page_size + n % in.page_size;
        if (lane == 0) {
          barrier_expect(full + 8 * to, MANY_TILE_BYTES);
          fetch_tokens<MANY_BOX_BYTES>(stages + to * MANY_TILE_BYTES, k_map, v_map, span.kv_head, row, full + 8 * to);
        }
        next(to);
        asked++;
      };
#pragma unroll 1
      for (int i = 0; i < MANY_STAGES; i++) ask();
      if (is_early) {
        is_early = false;
        wait_for_kernel_before();
      }
      const i64 token = span.token;
      const float* angles = in.cos_sin + (i64)span.position * WIDTH;
      u32 q[STEPS][2];
      Newest newest;
      if (span.until == span.blocks)
        newest.load(in.k + token * in.k_token + span.kv_head * WIDTH, in.v + token * in.v_token + span.kv_head * WIDTH, angles);
      load_queries(in, in.q + token * in.q_token + span.kv_head * (GROUP * WIDTH), angles, q);
      State state;
      state.clear();
      for (int i = 0; i < slices; i++) {
        const u32 stage = stages + slot * MANY_TILE_BYTES;
        const int seen = span.high - (begin + i * MANY_TOKENS);  // of the slice's tokens, and those after
        barrier_wait(full + 8 * slot, parity);
        if (seen <= MANY_TOKENS)
          add_newest<MANY_BOX_BYTES>(in, newest, span.kv_head, span.location, stage, seen - 1, MANY_TOKENS);
        const int hidden = WINDOWED ? seen - in.window : 0;
        if (!WINDOWED || hidden < MANY_TOKENS)
          attend_slice<MANY_BOX_BYTES, MANY_TOKENS>(in, state, q, stage, 0, seen, hidden);
        __syncwarp();
        if (next(slot)) parity ^= 1;
        ask();
      }
      finish_alone(in, state, span, chunk);
    } while (work.go_on(span));
    if (work.chunks <= all_warps) break;
    if (lane == 0) chunk = all_warps + atomicAdd(in.queue, 1);
    chunk = __shfl_sync(~0u, chunk, 0);
  }
  if (is_early) wait_for_kernel_before();
  zero_padding<32 * MANY_WARPS>(in, in.header[REAL_TOKENS]);
  if (work.chunks <= all_warps) return;
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(in.queue + 1, 1) == gridDim.x - 1) in.queue[0] = in.queue[1] = 0;
}
