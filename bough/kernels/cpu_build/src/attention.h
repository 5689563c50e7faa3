// Attention of a step's queries over paged keys and values.
//
// A query's result does not depend on how the step was cut. Its keys come in tiles of 64, cut where positions are multiples
// of 64. What a tile gathers depends on the tile alone: scores add the products of a head's columns in order; its own largest
// score makes them weights; sums add values in order. Tiles are folded one after the other, from the first. Both kernels
// do this, and so does the code that merges parts.
#pragma once

#include <cstdint>

#include <algorithm>

#include "simd.h"

namespace bough {

struct Step {  // mirrored by a ctypes structure
  const int32_t* query_start;   // [rows + 1]
  const int32_t* kv_len;        // [rows]
  const int32_t* slots;         // [rows]
  const int32_t* page_table;    // [slots, table_stride]
  const int64_t* loc;           // [tokens]
  const int32_t* group_rows;    // rows of the groups that share a leading span, or null
  const int32_t* group_start;   // [groups + 1]
  const int32_t* group_tokens;  // [groups]
  const int64_t* seen;          // [tokens] bits of keys from `tail` on that each token sees, or null: those up to its own
  const int32_t* tail;          // [tokens]: keys before it are seen
  const int64_t* positions;     // [tokens], for windows
  const int32_t* gaps;          // [tokens, 2]: positions that a token does not see, or null
  int64_t table_stride;
  int32_t rows, tokens, page_size, groups;
};

struct Layer {  // mirrored by a ctypes structure
  const void *q, *k, *v;
  void *k_cache, *v_cache, *out;  // caches: [locations, kv heads, width]; out: [tokens, heads, v width]
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;  // strides
  const float *sinks, *slopes;  // [heads] each, or null: a logit beside the scores; what a key's position adds to them
  int32_t heads, kv_heads, dim, v_dim, window, causal, dtype, cache_dtype, chunk, reserved;
  float scale, softcap;
  uint32_t *k_ranges, *v_ranges;  // [locations, kv heads]: of caches that hold codes
};

constexpr int kKvTile = 64;               // keys at a time
constexpr int kRowTile = kWide ? 12 : 4;  // query rows of a register tile

// One query head of one token, and the keys it may see: positions lo .. hi - 1 but gap_lo .. gap_hi - 1, from `tail` on those
// whose bits are set.
struct QueryRow {
  int32_t token, head, lo, hi, tail = INT32_MAX, gap_lo = 0, gap_hi = 0;
  uint64_t seen = 0;
};

// Where a stretch of attention leaves its result: the output itself, or a part to be merged: v_dim sums, the sums of weights
// by lane, the largest score.
struct Target {
  float* part;        // null: write the output
  int64_t row_step;   // between the parts of neighbouring query rows
  int64_t tile_step;  // between the parts of neighbouring tiles; 0: one part of all tiles
};

inline int64_t location(const Step& s, int32_t slot, int64_t position) {
  const int32_t page = s.page_table[slot * s.table_stride + position / s.page_size];
  return int64_t(page) * s.page_size + position % s.page_size;
}

constexpr int kLanes = 16;

// ---- caches of codes: number = code * step + low, by token and head (kernels/kv_codes.py) --------------------------------

constexpr int32_t kCodes8 = 3, kCodes4 = 4;  // values of cache_dtype, besides those of Dtype

inline bool is_coded(const Layer& l) { return l.cache_dtype == kCodes8 || l.cache_dtype == kCodes4; }

inline int64_t code_bytes(const Layer& l, int width) { return l.cache_dtype == kCodes4 ? width / 2 : width; }

BOUGH_INLINE float upper_half(uint32_t range) {
  range &= 0xffff0000u;
  float out;
  std::memcpy(&out, &range, 4);
  return out;
}

// The numbers of one vector. Its width is a multiple of 16, or of 32 where codes have 4 bits.
BOUGH_INLINE void open_codes(const Layer& l, const uint8_t* codes, uint32_t range, int width, float* out) {
  const F32 step = splat(upper_half(range)), low = splat(upper_half(range << 16));
  if (l.cache_dtype == kCodes8) {
    for (int c = 0; c < width; c += 16) store(out + c, fused(to_float(load_u8(codes + c)), step, low));
    return;
  }
  for (int c = 0; c < width / 2; c += 16) {
    const I32 pair = load_u8(codes + c);
    store(out + c, fused(to_float(pair & 15), step, low));
    store(out + width / 2 + c, fused(to_float(pair >> 4), step, low));
  }
}

inline int64_t part_floats(const Layer& l) { return l.v_dim + 2 * kLanes; }

inline int32_t tile_start(int32_t position) { return position / kKvTile * kKvTile; }

// before: what was gathered so far; more: what another tile adds, whose largest score was smaller or larger by so much.
BOUGH_INLINE F32 fold(F32 before, float shrink, F32 more, float shrink_more) {
  return fused(more, splat(shrink_more), before * shrink);
}

// The positions first .. first + 15.
BOUGH_INLINE F32 positions_from(int32_t first) {
  return F32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + float(first);
}

inline float read_value(const void* p, int64_t at, int32_t dtype) {
  if (dtype == kF32) return static_cast<const float*>(p)[at];
  const uint16_t raw = static_cast<const uint16_t*>(p)[at];
  return dtype == kBF16 ? bfloat_to_float(raw) : half_to_float(raw);
}

inline F32 read_vector(const void* p, int64_t at, int32_t dtype) {
  if (dtype == kF32) return load(static_cast<const float*>(p) + at);
  const uint16_t* raw = static_cast<const uint16_t*>(p) + at;
  return dtype == kBF16 ? load_bfloat(raw) : load_half(raw);
}

inline void write_vector(void* p, int64_t at, int32_t dtype, F32 v) {
  if (dtype == kF32) store(static_cast<float*>(p) + at, v);
  else if (dtype == kBF16) store_bfloat(static_cast<uint16_t*>(p) + at, v);
  else store_half(static_cast<uint16_t*>(p) + at, v);
}

// Sums, the sums of weights behind them and the largest score become a query head's output.
BOUGH_INLINE void write_output(const Layer& l, int64_t token, int64_t head, const float* sums, F32 totals, float top) {
  float total = sum_lanes(totals);
  if (l.sinks && total > 0) total += exponential(F32{std::min(l.sinks[head] - top, 80.0f)})[0];
  const float inverse = total > 0 ? 1.0f / total : 0.0f;
  for (int c = 0; c < l.v_dim; c += 16) write_vector(l.out, (token * l.heads + head) * l.v_dim + c, l.dtype, load(sums + c) * inverse);
}

inline void write_part(const Layer& l, float* part, const float* sums, F32 totals, float top) {
  std::memcpy(part, sums, l.v_dim * sizeof(float));
  store(part + l.v_dim, totals);
  part[l.v_dim + kLanes] = top;
}

// Positions first .. last - 1 of a decode row, for kv heads kv_first .. kv_last - 1. Only the row's first may lie within a tile.
struct DecodePiece {
  int32_t row, kv_first, kv_last, first, last;
};

// Attention of one decode row, by vectors. At most 8 query heads may share a kv head.
void attend_decode(const Step& s, const Layer& l, const DecodePiece& piece, const Target& target);

// Attention of many query rows that read the same pages, by register tiles. Positions before `first` are not read.
void attend_tiles(const Step& s, const Layer& l, const QueryRow* rows, int count, int32_t slot, int32_t kv_head, int32_t first,
                  int32_t last, const Target& target);

}  // namespace bough
