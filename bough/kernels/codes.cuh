// Weights in codes of 8 or 4 bits, multiplied by the tensor cores' product that takes weights from registers: codes become bf16
// on the way from shared memory, a quarter of the issue slots at memory's pace.
//
// Given before it is included: KIND (what a weight's value is: FLOATS, for which nothing here is meant, FLOAT8 e4m3, INT4, or
// FLOAT4 e2m1), BLOCK_T (tokens), TILES (of 16 weight rows a warp has), GROUP (columns that share a scale: 128, of FLOAT4 32;
// 0: all do), SCALE_ROWS (rows that share one), SCALES (their type: 0 float32, 1 bf16, 2 fp16), ZEROS (whether integers have
// zero points of their own; else 8). PAIRED (else 0): of four neighbouring columns the tokens' values come in the order 0 2 1 3,
// in which a word's codes are spread without moving bytes; sums of e2m1 with scales of groups are then LEFT times what they mean.

#define FLOATS 0
#define FLOAT8 1
#define INT4 2
#define FLOAT4 3

#ifndef PAIRED
#define PAIRED 0
#endif

constexpr bool HALF_BYTES = KIND == INT4 || KIND == FLOAT4;
constexpr int ROW_BYTES = 128;                         // of the tokens' boxes in shared memory: 64 elements, swizzled
constexpr int X_BOX = BLOCK_T * ROW_BYTES;
constexpr int W_COLUMNS = KIND == FLOATS ? 64 : 128;   // of a weight's box
constexpr int W_ROW_BYTES = HALF_BYTES ? 64 : 128;     // those of 64 are not swizzled
constexpr int REGS = BLOCK_T / 2;                      // sums of a thread, of 16 rows
constexpr bool SCALED_ONCE = PAIRED && KIND == FLOAT4 && GROUP == 32;
constexpr float LEFT = SCALED_ONCE ? 0x1p-60f : 1.0f;

// What a weight has besides codes. Scales and zero points have `groups` first, `width` of each.
struct Coded {
  const void* scales;
  const float* row_scales;
  const unsigned char* zeros;
  int width, groups;

  INLINE float scale(i64 at) const {
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

  // What all columns of a row have in common.
  INLINE float last_scale(i64 row) const {
    return (GROUP ? 1.0f : scale(row / SCALE_ROWS)) * (row_scales ? __ldg(row_scales + row) : 1.0f);
  }
};

#if KIND != FLOATS
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

// Two codes, one in each half, as bf16. Floats: bits go where those of a bf16 belong, a product mends the exponent's bias;
// e2m1 is scaled at once, by `more`, which is exact if scales are powers of two. Integers: below the exponent of 128 they make
// 128 + code, and `more` takes away that and the zero point.
INLINE u32 widen_two(u32 halves, u32 more) {
  constexpr u32 MINUS_ZERO = 0x80008000u;
#if KIND == FLOAT8
  return times_plus((halves & 0x80008000u) | ((halves >> 4) & 0x07f007f0u), 0x7b807b80u, MINUS_ZERO);  // 2^120
#elif KIND == INT4
  return times_plus((halves & 0x000f000fu) | 0x43004300u, 0x3f803f80u, more);
#else
  const u32 bits = ((halves << 12) & 0x80008000u) | ((halves << 6) & 0x01c001c0u);
  const u32 value = times_plus(bits, 0x7e807e80u, MINUS_ZERO);  // 2^126
  return GROUP ? times_plus(value, more, MINUS_ZERO) : value;
#endif
}

// Of e2m1 whose groups have scales: what codes are multiplied by, once: the scale, the exponent's bias and LEFT, in both halves.
// A product of both factors would overflow with any scale above 1; with LEFT up to 2^61 are served.
INLINE u32 scale_and_bias(u32 scale) {
  return times_plus(__byte_perm(scale, 0, 0x1010), 0x60806080u, 0x80008000u);  // 2^66
}

#if PAIRED
// Codes 0 and 2 of the word, and 1 and 3. Half bytes: those in the low halves.
INLINE void widen_four(u32 codes, u32 more, u32& first, u32& second) {
  constexpr u32 MINUS_ZERO = 0x80008000u;
#if KIND == FLOAT8
  constexpr u32 SIGNS = 0x80008000u, REST = 0x07f007f0u, FACTOR = 0x7b807b80u;  // 2^120
  first = times_plus(((codes << 8) & SIGNS) | ((codes << 4) & REST), FACTOR, MINUS_ZERO);
  second = times_plus((codes & SIGNS) | ((codes >> 4) & REST), FACTOR, MINUS_ZERO);
#elif KIND == INT4
  first = times_plus((codes & 0x000f000fu) | 0x43004300u, 0x3f803f80u, more);
  second = times_plus(((codes >> 8) & 0x000f000fu) | 0x43004300u, 0x3f803f80u, more);
#else
  // A product moves the sign and the rest to two places each, of which one is kept.
  constexpr u32 KEPT = 0x81c081c0u;
  const u32 factor = SCALED_ONCE ? more : 0x7e807e80u;  // 2^126
  first = times_plus(((codes & 0x000f000fu) * 0x1040u) & KEPT, factor, MINUS_ZERO);
  second = times_plus((((codes >> 8) & 0x000f000fu) * 0x1040u) & KEPT, factor, MINUS_ZERO);
#endif
}
#else
INLINE void widen_four(u32 codes, u32 more, u32& first, u32& second) {
  first = widen_two(__byte_perm(codes, 0, HALF_BYTES ? 0x4140 : 0x1404), more);
  second = widen_two(__byte_perm(codes, 0, HALF_BYTES ? 0x4342 : 0x3424), more);
}
#endif

// What a thread's rows have of the BOXES boxes of a step besides codes.
template <int BOXES> struct Groups {
  static constexpr int TURNS = GROUP == 32 ? 2 : 1;
  float scales[GROUP == 128 ? BOXES : 1][TILES][2];
  u32 more[BOXES][TILES][2][TURNS];

  INLINE void load(const Coded& coded, i64 first_row, int step) {
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int box = 0; box < BOXES; box++)
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
          const i64 row = (first_row + 16 * tile + 8 * lower) / SCALE_ROWS;
          const int place = step * BOXES + box;
          if (GROUP == 128) scales[box][tile][lower] = coded.scale((i64)place * coded.width + row);
#pragma unroll
          for (int turn = 0; turn < TURNS; turn++) {
            u32& value = more[box][tile][lower][turn];
            value = 0xc308c308u;  // -(128 + 8)
            if (GROUP == 32) {
              const int group = 4 * place + 2 * (q >> 1) + (turn ^ (q >> 1));
              const float scale = group < coded.groups ? coded.scale((i64)group * coded.width + row) : 0.0f;
              value = both(scale, scale);
            } else if (ZEROS) {
              const float zero = -128.0f - (float)__ldg(coded.zeros + (i64)(GROUP ? place : 0) * coded.width + row);
              value = both(zero, zero);
            }
          }
        }
  }

  // The same of e2m1 with scales in bf16 that lie in shared memory, [4 groups a box, `pitch` rows], from this warp's rows on.
  INLINE void load_shared(u32 at, int pitch) {
    const int q = threadIdx.x % 4, row = threadIdx.x % 32 / 4;
#pragma unroll
    for (int box = 0; box < BOXES; box++)
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int lower = 0; lower < 2; lower++)
#pragma unroll
          for (int turn = 0; turn < TURNS; turn++) {
            const int group = 4 * box + 2 * (q >> 1) + (turn ^ (q >> 1));
            u16 scale;
            asm volatile("ld.shared.u16 %0, [%1];" : "=h"(scale) : "r"(at + 2 * (group * pitch + 16 * tile + 8 * lower + row)));
            more[box][tile][lower][turn] = scale_and_bias(scale);
          }
  }

  // Adds the products of a box of the weight, from this warp's rows on, and of the tokens' two boxes beside it.
  INLINE void add_box(float (&acc)[TILES][REGS], int box, u32 weight, u32 tokens) const {
    if (GROUP != 128) return products(acc, box, weight, tokens);
    float sums[TILES][REGS] = {};
    products(sums, box, weight, tokens);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int r = 0; r < REGS; r++) acc[tile][r] += sums[tile][r] * scales[GROUP == 128 ? box : 0][tile][r / 2 % 2];
  }

  // Which columns a step of the tensor cores takes is free, if rows and tokens agree: a thread takes 16 bytes of a row at a time
  // and the tokens' values for the same columns, in an order in which no two threads want the same bank. Of 8 bits, thread q of
  // four has columns 32 q .. 32 q + 31. Of 4 bits, byte j of 64 columns has column j in its low half and j + 32 in its high
  // half; thread q has bytes 16 q .. 16 q + 15.
  INLINE void products(float (&acc)[TILES][REGS], int box, u32 weight, u32 tokens) const {
    const int lane = threadIdx.x % 32, row = lane / 4, q = lane % 4;
    const u32 first = weight + row * W_ROW_BYTES, boxes = tokens + q / 2 * X_BOX + row * ROW_BYTES;
    uint4 codes[TILES][2];
#pragma unroll
    for (int turn = 0; turn < 2; turn++) {
      const int own = turn ^ (q >> 1);
      if (!HALF_BYTES || turn == 0) {
        const int place = HALF_BYTES ? q * 16 : ((2 * q + own) ^ row) * 16;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
          for (int lower = 0; lower < 2; lower++)
            codes[tile][lower] = shared_16(first + (16 * tile + 8 * lower) * W_ROW_BYTES + place);
      }
      const int chunk = HALF_BYTES ? 2 * (q % 2) + 4 * own : 4 * (q % 2) + 2 * own, shift = 4 * own;
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
              if (HALF_BYTES) word >>= shift;
              widen_four(word, more[box][tile][lower][TURNS > 1 ? turn : 0], rows[lower], rows[2 + lower]);
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
};
#endif
