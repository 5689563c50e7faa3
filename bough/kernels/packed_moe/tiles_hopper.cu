// One of the two products of experts in codes, for more than a few tokens of each expert, on Hopper:
// out[pair] = x[pair / per_token] @ weight[expert].T, with biases, and a gate over its halves if HALVES is 2.
//
// Pairs (token, expert) come sorted into batches of BLOCK_T pairs of one expert, those without an expert last. An item of work
// is a batch and 64 * GROUPS_OF_WARPS weight rows, half of them of each half. Weights are what the tensor cores take from
// registers: codes come into shared memory by the copy engine, and become bf16 on the way from there, 64 rows a warpgroup.
// Tokens are what they take from shared memory, where three warps gather them by the list of pairs. Both go through a ring of
// stages of 128 columns, from item to item without a pause. Of the last batch of an expert only a half or a quarter is
// multiplied if it has no more.
//
// A block takes every gridDim.x-th item. With EVENLY, items that would not fill a turn of all blocks, and those of the turn before
// them, are cut into equal shares of columns: of an item that two blocks have, the one that has its first columns adds what the
// other one, which began with it, has left in memory.
//
// In a step of 16 columns a thread has, of rows r and r + 8, columns 2 q and 2 q + 1 of each eight: two bytes at a time. With
// two halves, row r + 8 of a warp is the other half's row r, so that a thread has what is gated together.
//
// With MATRICES a thread has columns 4 q to 4 q + 3 instead, which `ldmatrix` brings for 16 columns at once, and scales come the
// same way. What is multiplied with what is then a matter of the tokens: they are gathered with columns 4 i + 2 and 4 i + 3 of
// 16 behind all others.
//
// Given, besides what `codes.cuh` and `experts.cuh` want: GROUPS_OF_WARPS, STAGES, LAG (stages of tokens that are asked for
// before the first is waited for), HALVES, BIAS, EARLY (as of hopper.cu), EVENLY, CUT_BOXES (boxes that are read in the time in
// which two blocks add up), PRELOADED (whether codes of the next stage are loaded while those of the present one become bf16),
// MATRICES.

#define PAIRED 1
#include "hopper.cuh"
#include "codes.cuh"
#include "experts.cuh"

constexpr int ROWS = 64 * GROUPS_OF_WARPS;         // of an item, of all halves
constexpr int HALF_ROWS = ROWS / HALVES;
constexpr bool STAGED = GROUP == 32;               // scales come through the ring as well
constexpr int TOKEN_BYTES = 2 * X_BOX;
constexpr int W_BOX = HALF_ROWS * W_ROW_BYTES, SCALE_BOX = STAGED ? 4 * HALF_ROWS * 2 : 0;
constexpr int FETCHED = HALVES * (W_BOX + SCALE_BOX);
constexpr int STAGE_BYTES = (TOKEN_BYTES + FETCHED + 1023) / 1024 * 1024;
constexpr int CONSUMERS = 128 * GROUPS_OF_WARPS, GATHERERS = 96, THREADS = CONSUMERS + 128;
constexpr int WORDS = HALF_BYTES ? 2 : 4;          // of four codes at two rows, of 64 columns
constexpr bool SUMMED_TWICE = GROUP == 128;        // groups' sums are scaled
// Results on their way: up to 32 tokens x 64 / HALVES rows of a warpgroup, and 16 bytes so that tokens fall on different banks.
constexpr int OUT_TOKENS = BLOCK_T < 32 ? BLOCK_T : 32, OUT_SEGMENTS = 8 / HALVES, OUT_PITCH = 16 * OUT_SEGMENTS + 16;
constexpr int OUT_BYTES = OUT_TOKENS * OUT_PITCH;
// Registers of a thread by role: what a block is started with, shared out anew.
constexpr int STARTED = 65536 / THREADS / 8 * 8;
constexpr int FETCHING = GROUPS_OF_WARPS > 3 ? 32 : 56;
constexpr bool AHEAD = BLOCK_T < 128;  // codes are loaded before the products that come before theirs have begun
constexpr int MOST_REGISTERS = ((GROUPS_OF_WARPS + 1) * STARTED - FETCHING) / GROUPS_OF_WARPS / 8 * 8;
constexpr int MULTIPLYING = MOST_REGISTERS < 240 ? MOST_REGISTERS : 240;

static_assert(GROUPS_OF_WARPS > 1 && TILES == 1 && (KIND != FLOAT4 || SCALED_ONCE || GROUP == 0), "");
static_assert(!MATRICES || BLOCK_T <= 32, "more tokens take longer to gather in pairs");
static_assert(LAG < STAGES, "what is waited for must have been announced");

#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define SIXTEEN(i) EIGHT(i), EIGHT(i + 8)
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                                                     \
  NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51"    \
           ", %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PRODUCT(tokens, names, a, b, c, e, x, more, ...)                                                             \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " more ", 0;\n"                                                 \
               "wgmma.mma_async.sync.aligned.m64n" tokens "k16.f32.bf16.bf16 {" names "}, {" a ", " b ", " c ", " e  \
               "}, " x ", add, 1, 1, 0;\n}"                                                                          \
               : __VA_ARGS__                                                                                         \
               : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "l"(tokens_at), "r"(add))

// d = (add ? d : 0) + 64 weight rows x as many tokens over 16 columns.
INLINE void product_of(float (&d)[8], const u32 (&rows)[4], u64 tokens_at, u32 add) {
  PRODUCT("16", NAMES_8, "%8", "%9", "%10", "%11", "%12", "%13", EIGHT(0));
}
INLINE void product_of(float (&d)[16], const u32 (&rows)[4], u64 tokens_at, u32 add) {
  PRODUCT("32", NAMES_16, "%16", "%17", "%18", "%19", "%20", "%21", SIXTEEN(0));
}
INLINE void product_of(float (&d)[32], const u32 (&rows)[4], u64 tokens_at, u32 add) {
  PRODUCT("64", NAMES_32, "%32", "%33", "%34", "%35", "%36", "%37", SIXTEEN(0), SIXTEEN(16));
}
INLINE void product_of(float (&d)[64], const u32 (&rows)[4], u64 tokens_at, u32 add) {
  PRODUCT("128", NAMES_64, "%64", "%65", "%66", "%67", "%68", "%69", SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48));
}

// Values that a product may still read or write are not touched before this.
template <int COUNT> INLINE void settled(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}
INLINE void settled(u32 (&rows)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; i++) asm volatile("" : "+r"(rows[i / 4][i % 4])::"memory");
}

INLINE void meet(int name, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }

INLINE u32 shared_2(u32 at) {
  u16 out;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(out) : "r"(at));
  return out;
}

struct Turn {
  int slot = 0;
  u32 parity = 0;
  INLINE void next() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

// Of a batch: how many pairs it has. By all lanes of a warp.
INLINE int live_pairs(const Work& work, const int* pairs) {
  int live = 0;
#pragma unroll
  for (int i = threadIdx.x % 32; i < (BLOCK_T + 31) / 32 * 32; i += 32)
    live += __popc(__ballot_sync(~0u, i < BLOCK_T && __ldcg(pairs + i) < work.num_pairs));
  return live;
}

// How many of a batch's tokens are multiplied. (A choice among products of 128 tokens takes registers that three warpgroups
// don't have.)
constexpr bool HALVED = BLOCK_T >= 32 && (BLOCK_T < 128 || GROUPS_OF_WARPS < 3), QUARTERED = BLOCK_T == 64;
INLINE int multiplied(int live) {
  if (QUARTERED && live <= BLOCK_T / 4) return BLOCK_T / 4;
  if (HALVED && live <= BLOCK_T / 2) return BLOCK_T / 2;
  return BLOCK_T;
}

// What a thread's two rows have of 128 columns besides codes.
struct Besides {
  float scales[2];
  u32 zeros[2];

  INLINE void load(const Coded& coded, const i64 (&rows)[2], int box) {
#pragma unroll
    for (int lower = 0; lower < 2; lower++) {
      const i64 row = rows[lower] / SCALE_ROWS;
      scales[lower] = 1.0f;
      zeros[lower] = 0xc308c308u;  // -(128 + 8)
      if (GROUP == 128) scales[lower] = coded.scale((i64)box * coded.width + row);
      if (KIND == INT4 && ZEROS) {
        const float zero = -128.0f - (float)__ldg(coded.zeros + (i64)(GROUP ? box : 0) * coded.width + row);
        zeros[lower] = both(zero, zero);
      }
    }
  }
};

// Codes of 64 columns, two rows, as they were stored: of each word bytes 0 and 2 belong to the first eight of 16 columns.
INLINE void load_words(u32 (&words)[2][WORDS], u32 at, u32 apart, int chunk) {
#pragma unroll
  for (int w = 0; w < WORDS; w++) {
    const u32 from = at ^ ((chunk * WORDS + w) * 16);
#pragma unroll
    for (int lower = 0; lower < 2; lower++)
      words[lower][w] = __byte_perm(shared_2(from + lower * apart), shared_2(from + lower * apart + 8), 0x5140);
  }
}

// The same by `ldmatrix`. at: of this lane's row and piece, where those of the second row come from the upper 16 lanes if codes
// are halves of bytes.
INLINE void load_words_as_matrices(u32 (&words)[2][WORDS], u32 at, u32 apart, int chunk) {
  u32 found[2][4];
#pragma unroll
  for (int i = 0; i < WORDS / 2; i++)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found[i][0]), "=r"(found[i][1]), "=r"(found[i][2]), "=r"(found[i][3])
                 : "r"((at ^ (chunk * WORDS * 16)) + i * apart));
#pragma unroll
  for (int lower = 0; lower < 2; lower++)
#pragma unroll
    for (int w = 0; w < WORDS; w++)
      words[lower][w] = __byte_perm(HALF_BYTES ? found[0][2 * lower + w] : found[lower][w % 4], 0, 0x3120);
}

// `scale_and_bias` in one instruction: 66 is added to the exponent. 0 and what is below the least normal number become 2^-127 to
// 2^-126, which adds nothing that a sum could hold.
INLINE u32 raised(u32 scale) { return scale * 0x10001u + 0x21002100u; }

// Scales of 64 columns, two rows: [row][32 columns]. at: of eight rows' scales, of the first 32 columns in even lanes and of the
// others in odd ones; those of the second rows come from lanes 8 to 15.
INLINE void load_scales_as_matrices(u32 (&more)[2][2], u32 at) {
  u32 found[2];
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(found[0]), "=r"(found[1]) : "r"(at));
#pragma unroll
  for (int lower = 0; lower < 2; lower++) {
    const u32 both = found[lower] + 0x21002100u;
    more[lower][0] = __byte_perm(both, 0, 0x1010);
    more[lower][1] = __byte_perm(both, 0, 0x3232);
  }
}

// [step of 16 columns][as the tensor cores want them].
INLINE void widen(u32 (&rows)[4][4], const u32 (&words)[2][WORDS], const u32 (&more)[2][2]) {
#pragma unroll
  for (int lower = 0; lower < 2; lower++)
#pragma unroll
    for (int k = 0; k < 4; k++) {
#if KIND == FLOAT4
      // As `widen_four`, with the shift by four in the product.
      constexpr u32 KEPT = 0x81c081c0u;
      const u32 by = k < 2 ? 0x1040u : 0x0104u, mask = k < 2 ? 0x000f000fu : 0x00f000f0u;
      const u32 stored = words[lower][k % WORDS], factor = SCALED_ONCE ? more[lower][k / 2] : 0x7e807e80u;
      rows[k][lower] = times_plus(((stored & mask) * by) & KEPT, factor, 0x80008000u);
      rows[k][2 + lower] = times_plus((((stored >> 8) & mask) * by) & KEPT, factor, 0x80008000u);
#else
      const u32 word = words[lower][k % WORDS];
      widen_four(HALF_BYTES ? word >> (k / 2 * 4) : word, more[lower][0], rows[k][lower], rows[k][2 + lower]);
#endif
    }
}

struct Shared {
  u32 stages, full, empty, out;
};

// Columns of an item that a block has, in boxes.
struct Part {
  int item, first, end;
};

// All that a block has of `items`, one part after the other.
struct Share {
  int boxes, next, cut, at, end;

  // `cut`: the first item of those that are cut; at, end: of their boxes. Every block has as many as an item at least, so that no
  // item falls to more than two.
  INLINE Share(int items, int boxes) : boxes(boxes), next(blockIdx.x), cut(items), at(0), end(0) {
    const int blocks = gridDim.x, turns = items / blocks, idle = (turns + 1) * blocks - items;
    if (EVENLY && turns > 0 && idle < blocks && idle * boxes > CUT_BOXES * blocks) {
      cut = (turns - 1) * blocks;
      at = (items - cut) * boxes * (int)blockIdx.x / blocks;
      end = (items - cut) * boxes * ((int)blockIdx.x + 1) / blocks;
    }
  }

  INLINE bool take(Part& part) {
    if (next < cut) {
      part = {next, 0, boxes};
      next += gridDim.x;
      return true;
    }
    if (!EVENLY || at >= end) return false;
    part.item = cut + at / boxes;
    part.first = at % boxes;
    part.end = min(boxes, part.first + end - at);
    at += part.end - part.first;
    return true;
  }
};

// Sums of a warp that another block's warp adds: in memory, with a flag that is zero between launches.
struct Handed {
  float* sums;
  int* flags;

  INLINE Handed(float* partial, int* flags, int block)
      : sums(partial + (i64)block * (BLOCK_T / 2 * CONSUMERS) + threadIdx.x),
        flags(flags + block * (CONSUMERS / 32) + threadIdx.x / 32) {}

  template <int COUNT> INLINE void leave(const float (&d)[COUNT]) const {
#pragma unroll
    for (int i = 0; i < COUNT; i++) __stcg(sums + i * CONSUMERS, d[i]);
    __threadfence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) asm volatile("st.release.gpu.s32 [%0], 1;" ::"l"(flags) : "memory");
  }

  template <int COUNT> INLINE void add_to(float (&d)[COUNT]) const {
    if (threadIdx.x % 32 == 0) {
      int there;
      do asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(there) : "l"(flags) : "memory");
      while (!there);
      *flags = 0;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < COUNT; i++) d[i] += __ldcg(sums + i * CONSUMERS);
  }
};

template <int LIVE>
INLINE void multiply_item(const Work& work, const Coded& coded, const Shared& shared, Turn& turn, int expert, int tile,
                          const Part& part, const int* owners, float* partial, int* flags) {
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, q = lane % 4;
  const int first = HALVES == 2 ? 32 * group + 8 * warp + lane / 4 : 64 * group + 16 * warp + lane / 4;
  const int swizzle = HALF_BYTES ? first / 2 % 4 : first % 8;
  const u32 codes_at = TOKEN_BYTES + first * W_ROW_BYTES + swizzle * 16 + 2 * q;
  const u32 scales_at = TOKEN_BYTES + HALVES * W_BOX + 2 * first;
  // Of the matrices that this lane names a row of.
  const int named = first - lane / 4 + lane % 8, piece = HALF_BYTES ? lane / 8 % 2 : lane / 8;
  constexpr u32 CODES_APART = HALVES == 2 ? W_BOX : 8 * W_ROW_BYTES, SCALES_APART = HALVES == 2 ? SCALE_BOX : 16;
  const u32 matrices_at = TOKEN_BYTES + named * W_ROW_BYTES + ((piece ^ (HALF_BYTES ? named / 2 % 4 : named % 8)) * 16) +
                          (HALF_BYTES ? lane / 16 * CODES_APART : 0);
  const u32 scale_matrices_at = TOKEN_BYTES + HALVES * W_BOX + 2 * (first - lane / 4) + lane / 8 % 2 * SCALES_APART +
                                lane % 2 * (2 * HALF_ROWS);
  const int n = tile * HALF_ROWS + first;  // of a half
  const i64 above = (i64)expert * (HALVES * work.rows);
  const i64 rows_of[2] = {above + n, above + n + (HALVES == 2 ? work.rows : 8)};
  const bool is_real[2] = {n < work.rows, n + (HALVES == 2 ? 0 : 8) < work.rows};

  float bias[2] = {}, last[2] = {};
  Besides besides;
  const i64 known[2] = {is_real[0] ? rows_of[0] : above, is_real[1] ? rows_of[1] : above};
#pragma unroll
  for (int lower = 0; lower < 2; lower++) {
    last[lower] = (1.0f / LEFT) * coded.last_scale(known[lower]);
    if (BIAS) bias[lower] = low(__ldg(work.bias + known[lower]));
  }
  besides.load(coded, known, part.first);

  float d[LIVE / 2], sums[SUMMED_TWICE ? LIVE / 2 : 1];
#pragma unroll
  for (int i = 0; i < (SUMMED_TWICE ? LIVE / 2 : 1); i++) sums[i] = 0.0f;
  u32 rows[2][4][4], words[2][2][WORDS], more[2][2][2];
  const auto load = [&](int chunk, u32 from, const Besides& of) {
    if (MATRICES) load_words_as_matrices(words[chunk], from + matrices_at, CODES_APART, chunk);
    else load_words(words[chunk], from + codes_at, CODES_APART, chunk);
    if (MATRICES && STAGED)
      load_scales_as_matrices(more[chunk], from + scale_matrices_at + 2 * chunk * (2 * HALF_ROWS));
    else
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int lower = i / 2, half = i % 2;
        more[chunk][lower][half] =
            STAGED ? raised(shared_2(from + scales_at + lower * SCALES_APART + (2 * chunk + half) * (2 * HALF_ROWS)))
                   : of.zeros[lower];
      }
  };
  int before = 0;
  if (PRELOADED) {
    barrier_wait(shared.full + 8 * turn.slot, turn.parity);
    load(0, shared.stages + turn.slot * STAGE_BYTES, besides);
    load(1, shared.stages + turn.slot * STAGE_BYTES, besides);
  }
#pragma unroll 1
  for (int step = part.first; step < part.end; step++) {
    const u32 from = shared.stages + turn.slot * STAGE_BYTES;
    const bool is_last = step + 1 == part.end;
    const Besides now = besides;
    if (SUMMED_TWICE && !is_last) besides.load(coded, known, step + 1);
    Turn after = turn;
    after.next();
    const u32 next_from = shared.stages + after.slot * STAGE_BYTES;
    if (!PRELOADED) {
      barrier_wait(shared.full + 8 * turn.slot, turn.parity);
      load(0, from, now);
      if (AHEAD) load(1, from, now);
    }
#pragma unroll
    for (int chunk = 0; chunk < 2; chunk++) {
      if (!PRELOADED && !AHEAD && chunk == 1) load(1, from, now);
      widen(rows[chunk], words[chunk], more[chunk]);
      const u64 tokens = operand(from + chunk * X_BOX);
      products_begin();
#pragma unroll
      for (int k = 0; k < 4; k++)
        product_of(d, rows[chunk][k], tokens + 2 * k, chunk | k ? 1u : SUMMED_TWICE ? 0u : (u32)(step - part.first));
      products_commit();
      if (PRELOADED && !is_last) {
        if (chunk == 0) barrier_wait(shared.full + 8 * after.slot, after.parity);
        load(chunk, next_from, besides);
      }
      if (!SUMMED_TWICE) {
        products_wait<1>();
        settled(rows[chunk ^ 1]);
        if (chunk == 0 && step > part.first && lane == 0) barrier_arrive(shared.empty + 8 * before);
      }
    }
    if (SUMMED_TWICE) {
      products_wait<0>();
      settled(d);
      settled(rows[0]);
      settled(rows[1]);
      if (lane == 0) barrier_arrive(shared.empty + 8 * turn.slot);
#pragma unroll
      for (int i = 0; i < LIVE / 2; i++) sums[SUMMED_TWICE ? i : 0] += d[i] * now.scales[i / 2 % 2];
    }
    before = turn.slot;
    turn = after;
  }
  if (!SUMMED_TWICE) {
    products_wait<0>();
    settled(d);
    settled(rows[1]);
    if (lane == 0) barrier_arrive(shared.empty + 8 * before);
  }
  if (EVENLY && part.first > 0) {
    const Handed handed(partial, flags, blockIdx.x);
    if constexpr (SUMMED_TWICE) handed.leave(sums);
    else handed.leave(d);
    return;
  }
  if (EVENLY && part.end < work.boxes) {
    const Handed handed(partial, flags, blockIdx.x + 1);
    if constexpr (SUMMED_TWICE) handed.add_to(sums);
    else handed.add_to(d);
  }

  // A token's results lie together on their way to memory.
  const auto value = [&](int i) {
    const int lower = i / 2 % 2;
    float found = (SUMMED_TWICE ? sums[SUMMED_TWICE ? i : 0] : d[i]) * last[lower];
    // Rounded as it would be if it were stored.
    if (HALVES > 1) found = rounded(found);
    if (BIAS) found += bias[lower];
    return BIAS && HALVES > 1 ? rounded(found) : found;
  };
  const u32 out = shared.out + group * OUT_BYTES;
#pragma unroll
  for (int begin = 0; begin < LIVE; begin += OUT_TOKENS) {
    meet(1 + group, 128);  // what lay there has been stored
#pragma unroll
    for (int t = 0; t < OUT_TOKENS && begin + t < LIVE; t += 16) {
      const int i = (begin + t) / 2;  // four sums of each eight tokens
      if (HALVES == 2) {
        u32 two[2];
#pragma unroll
        for (int j = 0; j < 2; j++)
          two[j] = both(gated(value(i + 4 * j), value(i + 4 * j + 2), work), gated(value(i + 4 * j + 1), value(i + 4 * j + 3), work));
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(
                         out + (t + lane % 16) * OUT_PITCH + 16 * warp), "r"(two[0]), "r"(two[1]) : "memory");
      } else {
        u32 four[4];
#pragma unroll
        for (int j = 0; j < 4; j++) four[j] = both(value(i + 2 * j), value(i + 2 * j + 1));
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         out + (t + lane / 16 * 8 + lane % 8) * OUT_PITCH + 32 * warp + lane / 8 % 2 * 16),
                     "r"(four[0]), "r"(four[1]), "r"(four[2]), "r"(four[3]) : "memory");
      }
    }
    meet(1 + group, 128);
    for (int at = threadIdx.x % 128; at < OUT_TOKENS * OUT_SEGMENTS; at += 128) {
      const int token = at / OUT_SEGMENTS, segment = at % OUT_SEGMENTS;
      const int to = tile * HALF_ROWS + group * (64 / HALVES) + 8 * segment;
      if (begin + token >= LIVE) break;
      const int owner = owners[begin + token];
      if (owner >= work.num_pairs || to >= work.rows) continue;
      *(uint4*)(work.out + (i64)owner * work.rows + to) = shared_16(out + token * OUT_PITCH + 16 * segment);
    }
  }
}

// Eight of a token's columns, in pairs. bytes: of a pair that are there.
INLINE void copy_pairs(u32 at, const uint4* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%2], 4, %3;\n"
               "cp.async.ca.shared.global [%1], [%2 + 4], 4, %3;\n"
               "cp.async.ca.shared.global [%0 + 4], [%2 + 8], 4, %3;\n"
               "cp.async.ca.shared.global [%1 + 4], [%2 + 12], 4, %3;" ::"r"(at), "r"(at ^ 16), "l"(from), "r"(bytes));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) coded_tiles(
    const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap scales, const __grid_constant__ Coded coded,
    const __grid_constant__ Work work, float* partial, int* flags) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES];
  __shared__ int owners[2][GROUPS_OF_WARPS][BLOCK_T];
  __shared__ int num_real;
  const u32 base = (u32)__cvta_generic_to_shared(memory);
  Shared shared;
  shared.stages = (base + 1023) & ~1023u;
  shared.out = shared.stages + STAGES * STAGE_BYTES;
  shared.full = (u32)__cvta_generic_to_shared(barriers);
  asm volatile("" : "+r"(shared.stages), "+r"(shared.full));  // held, not computed anew for every stage
  shared.empty = shared.full + 8 * STAGES;
  if (EARLY) let_kernel_after_start();
  if (threadIdx.x == 0) {
    num_real = 0;
    for (int i = 0; i < STAGES; i++) {
      barrier_init(shared.full + 8 * i, 1 + GATHERERS / 32);
      barrier_init(shared.empty + 8 * i, CONSUMERS / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (!EARLY) {
    wait_for_kernel_before();
    let_kernel_after_start();  // the kernel after this one may read the choice at once
  }
  for (int i = threadIdx.x; i < work.num_batches; i += THREADS)
    if ((u32)__ldcg(work.batch_expert + i) < (u32)work.experts) atomicMax(&num_real, i + 1);
  __syncthreads();
  const int tiles = (work.rows + HALF_ROWS - 1) / HALF_ROWS, items = num_real * tiles;
  Turn turn;
  Share share(items, work.boxes);
  Part part;

  if (threadIdx.x >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FETCHING));
    int filled = 0;
    if (threadIdx.x >= CONSUMERS + GATHERERS) {
      if (threadIdx.x > CONSUMERS + GATHERERS) return;
      while (share.take(part)) {
        const int row = __ldcg(work.batch_expert + part.item / tiles) * (HALVES * work.rows) + part.item % tiles * HALF_ROWS;
        for (int step = part.first; step < part.end; step++) {
          if (filled >= STAGES) barrier_wait(shared.empty + 8 * turn.slot, turn.parity ^ 1);
          const u32 to = shared.stages + turn.slot * STAGE_BYTES + TOKEN_BYTES, barrier = shared.full + 8 * turn.slot;
          barrier_expect(barrier, FETCHED);
#pragma unroll
          for (int half = 0; half < HALVES; half++) {
            const int first = row + half * work.rows;
            fetch(to + half * W_BOX, weight, step * W_ROW_BYTES, first, barrier);
            if (STAGED) fetch(to + HALVES * W_BOX + half * SCALE_BOX, scales, first, 4 * step, barrier);
          }
          filled++;
          turn.next();
        }
      }
      return;
    }

    if (EARLY) wait_for_kernel_before();
    // A thread has the same 16 bytes of every twelfth token, of both halves of a stage; where tokens lie it keeps for an item.
    constexpr int EACH = (BLOCK_T + GATHERERS / 8 - 1) / (GATHERERS / 8);
    static_assert(GATHERERS / 8 == 12, "every second token of a thread has the same swizzle");
    const int thread = threadIdx.x - CONSUMERS, chunk = thread % 8, first = thread / 8, lane = threadIdx.x % 32;
    // With MATRICES eight columns go to two places: pairs of them in turns to the first and the second half of 16.
    const int place = MATRICES ? chunk & 6 : chunk;
    const u32 even = first * ROW_BYTES + (place ^ (first % 8)) * 16 + (MATRICES ? chunk % 2 * 8 : 0), odd = even ^ 64;
    constexpr int COPIED = MATRICES ? 4 : 16;
    Turn announced;
    const auto announce = [&] {
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (lane == 0) barrier_arrive(shared.full + 8 * announced.slot);
      announced.next();
    };
    while (share.take(part)) {
      const int* const pairs = work.pairs + (i64)(part.item / tiles) * BLOCK_T;
      const int live = live_pairs(work, pairs), tokens = multiplied(live);
      u32 places[EACH];  // in units of 16 bytes
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int token = first + 12 * i, pair = token < live ? __ldcg(pairs + token) : 0;
        places[i] = (u32)(pair / work.per_token) * (u32)(work.x_stride / 8);
      }
      for (int step = part.first; step < part.end; step++) {
        if (filled >= STAGES) barrier_wait(shared.empty + 8 * turn.slot, turn.parity ^ 1);
        const int column = step * 128 + chunk * 8;
        const u32 to = shared.stages + turn.slot * STAGE_BYTES;
        const uint4* const x = (const uint4*)work.x + column / 8;
        const int one = column < work.depth ? COPIED : 0, other = column + 64 < work.depth ? COPIED : 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
          const int token = first + 12 * i;
          if (token < tokens) {
            const u32 at = to + (i % 2 ? odd : even) + i * (12 * ROW_BYTES);
            const uint4* const from = x + places[i];
            if (MATRICES) {
              copy_pairs(at, from, token < live ? one : 0);
              copy_pairs(at + X_BOX, from + 8, token < live ? other : 0);
              continue;
            }
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(token < live ? one : 0));
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at + X_BOX), "l"(from + 8),
                         "r"(token < live ? other : 0));
          }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        turn.next();
        if (++filled > LAG) {
          asm volatile("cp.async.wait_group %0;" ::"n"(LAG) : "memory");
          announce();
        }
      }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    for (int left = min(filled, LAG); left > 0; left--) announce();
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLYING));
  if (EARLY) wait_for_kernel_before();
  for (int place = 0; share.take(part); place ^= 1) {
    const int batch = part.item / tiles, tile = part.item % tiles, expert = __ldcg(work.batch_expert + batch);
    const int* const pairs = work.pairs + (i64)batch * BLOCK_T;
    const int tokens = multiplied(live_pairs(work, pairs));
    int* const owned = owners[place][threadIdx.x / 128];  // the other one may still be read
    if (threadIdx.x % 128 < BLOCK_T) owned[threadIdx.x % 128] = __ldcg(pairs + threadIdx.x % 128);
    if (QUARTERED && tokens == BLOCK_T / 4)
      multiply_item<(QUARTERED ? BLOCK_T / 4 : BLOCK_T)>(work, coded, shared, turn, expert, tile, part, owned, partial, flags);
    else if (HALVED && tokens == BLOCK_T / 2)
      multiply_item<(HALVED ? BLOCK_T / 2 : BLOCK_T)>(work, coded, shared, turn, expert, tile, part, owned, partial, flags);
    else
      multiply_item<BLOCK_T>(work, coded, shared, turn, expert, tile, part, owned, partial, flags);
  }
}
