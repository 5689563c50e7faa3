// Many query rows over the same keys: a flash-style pass in register tiles of some rows by 64 keys.

#include <algorithm>

#include "attention.h"
#include "gemm.h"
#include "parallel.h"

namespace bough {
namespace {

thread_local Scratch scratch;

struct Tiles {  // memory of one call
  float* q;       // [row tiles][dim][rows of a tile]
  float* keys;    // [dim][64]
  float* values;  // [64][v_dim]
  float* opened;  // [16][dim]: keys of a cache of codes, on their way
  float* scores;  // [rows of a tile][64]
  float* out;     // [rows][v_dim]
  float* top;     // [row tiles][16]: the largest scores so far
  float* total;   // [rows][16]: sums of weights, by lane
};

Tiles divide(const Layer& l, int tiles) {
  const size_t rows = size_t(tiles) * kRowTile;
  float* at = scratch.get<float>(rows * (l.dim + l.v_dim + 16) + size_t(tiles) * 16 + size_t(kKvTile) * (l.dim + l.v_dim + kRowTile) + 64 +
                                   size_t(16) * l.dim);
  Tiles t;
  auto take = [&](size_t n) {
    float* p = at;
    at += n;
    return p;
  };
  t.keys = take(size_t(l.dim) * kKvTile);
  t.values = take(size_t(l.v_dim) * kKvTile);
  t.scores = take(kRowTile * kKvTile);
  t.q = take(rows * l.dim);
  t.out = take(rows * l.v_dim);
  t.top = take(size_t(tiles) * 16);
  t.total = take(rows * 16);
  t.opened = take(size_t(16) * l.dim);
  return t;
}

void gather_queries(const Layer& l, const QueryRow* rows, int count, int tiles, const Tiles& t) {
  for (int i = 0; i < tiles * kRowTile; i++) {
    float* column = t.q + int64_t(i / kRowTile) * l.dim * kRowTile + i % kRowTile;
    const int64_t at = i < count ? rows[i].token * l.q_token + rows[i].head * l.q_head : 0;
    for (int d = 0; d < l.dim; d++) column[d * kRowTile] = i < count ? read_value(l.q, at + d, l.dtype) * l.scale : 0.0f;
  }
}

void clear_sums(const Layer& l, int tiles, const Tiles& t) {
  for (int i = 0; i < tiles; i++) store(t.top + 16 * i, splat(-1e30f));
  std::memset(t.total, 0, sizeof(float) * tiles * kRowTile * kLanes);
  std::memset(t.out, 0, sizeof(float) * tiles * kRowTile * l.v_dim);
}

// Keys of 64 positions column by column, values row by row; zeros beyond `count`. Instead of those before `lowest`, that one.
template <Dtype D>
void gather_keys(const Step& s, const Layer& l, int32_t slot, int32_t kv_head, int32_t first, int count, int32_t lowest,
                 const Tiles& t) {
  typedef typename Element<D>::type E;
  const E *k_cache = static_cast<const E*>(l.k_cache) + int64_t(kv_head) * l.dim;
  const E *v_cache = static_cast<const E*>(l.v_cache) + int64_t(kv_head) * l.v_dim;
  for (int base = 0; base < kKvTile; base += 16) {
    const E* keys[16];
    for (int i = 0; i < 16; i++) {
      const int64_t at = base + i < count ? location(s, slot, std::max(lowest, first + base + i)) : -1;
      keys[i] = at < 0 ? nullptr : k_cache + at * l.kv_heads * l.dim;
      if (at >= 0)
        for (int c = 0; c < l.v_dim; c += 16)
          store(t.values + (base + i) * l.v_dim + c, load_as<D>(v_cache + at * l.kv_heads * l.v_dim + c));
    }
    for (int d = 0; d < l.dim; d += 16) {
      F32 square[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) square[i] = keys[i] ? load_as<D>(keys[i] + d) : F32{};
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) store(t.keys + (d + i) * kKvTile + base, square[i]);
    }
  }
}

// The same of a cache of codes.
void gather_codes(const Step& s, const Layer& l, int32_t slot, int32_t kv_head, int32_t first, int count, int32_t lowest,
                  const Tiles& t) {
  for (int base = 0; base < kKvTile; base += 16) {
    for (int i = 0; i < 16; i++) {
      float* key = t.opened + i * l.dim;
      if (base + i >= count) {
        std::memset(key, 0, sizeof(float) * l.dim);
        continue;
      }
      const int64_t place = location(s, slot, std::max(lowest, first + base + i)) * l.kv_heads + kv_head;
      open_codes(l, static_cast<const uint8_t*>(l.k_cache) + place * code_bytes(l, l.dim), l.k_ranges[place], l.dim, key);
      open_codes(l, static_cast<const uint8_t*>(l.v_cache) + place * code_bytes(l, l.v_dim), l.v_ranges[place], l.v_dim,
                 t.values + (base + i) * l.v_dim);
    }
    for (int d = 0; d < l.dim; d += 16) {
      F32 square[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) square[i] = load(t.opened + i * l.dim + d);
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) store(t.keys + (d + i) * kKvTile + base, square[i]);
    }
  }
}

// What one query row sees of the tile's scores.
BOUGH_INLINE void mask_row(const Layer& l, const QueryRow& row, int32_t first, int count, F32* v) {
  const I32 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  if (l.softcap > 0)
    for (int c = 0; c < 4; c++) v[c] = l.softcap * hyperbolic_tangent(v[c] / l.softcap);
  if (l.slopes)
    for (int c = 0; c < 4; c++) v[c] = v[c] + l.slopes[row.head] * positions_from(first + 16 * c);
  const int lo = row.lo - first, hi = std::min(count, row.hi - first);
  const int gap_lo = row.gap_lo - first, gap_hi = row.gap_hi - first;
  if (lo > 0 || hi < kKvTile || (gap_lo < kKvTile && gap_hi > 0)) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      const I32 at = lane + 16 * c, seen = (at >= lo) & (at < hi) & ((at < gap_lo) | (at >= gap_hi));
      v[c] = (F32)(((I32)v[c] & seen) | ((I32)splat(-__builtin_inff()) & ~seen));
    }
  }
  if (row.tail >= first + kKvTile) return;
  for (int at = std::max(0, row.tail - first); at < kKvTile; at++) {
    const int place = first + at - row.tail;
    if (place >= 64 || !(row.seen >> place & 1)) v[at / 16][at % 16] = -__builtin_inff();
  }
}

// By how much the largest score of a tile, and the largest one before, fall behind the larger of the two: 16 rows each.
struct Shrinks {
  alignas(64) float before[16], more[16];
};

// Scores become weights, whose sums are folded into those so far.
BOUGH_INLINE void soften(const Layer& l, const QueryRow* rows, int real, int32_t first, int count, float* scores, float* top,
                         float* total, Shrinks& shrinks) {
  F32 highest[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) highest[i] = splat(-1e30f);
  for (int i = 0; i < real; i++) {
    float* score = scores + i * kKvTile;
    F32 v[4] = {load(score), load(score + 16), load(score + 32), load(score + 48)};
    mask_row(l, rows[i], first, count, v);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) store(score + 16 * c, v[c]);
    highest[i] = maximum(maximum(v[0], v[1]), maximum(v[2], v[3]));
  }
  alignas(64) float own[16];
  const F32 before = load(top), mine = maximum(max_each(highest), splat(-1e30f)), after = maximum(before, mine);
  store(own, mine);
  store(shrinks.before, exponential(before - after));
  store(shrinks.more, exponential(mine - after));
  store(top, after);
  for (int i = 0; i < real; i++) {
    float* score = scores + i * kKvTile;
    F32 sum{};
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      const F32 weight = exponential(load(score + 16 * c) - own[i]);
      store(score + 16 * c, weight);
      sum += weight;
    }
    store(total + 16 * i, fold(load(total + 16 * i), shrinks.before[i], sum, shrinks.more[i]));
  }
  for (int i = real; i < kRowTile; i++) std::memset(scores + i * kKvTile, 0, sizeof(float) * kKvTile);
}

// Values by their weights, NV vectors of their columns, folded into what was summed so far.
template <int NV>
BOUGH_INLINE void add_values(const Layer& l, int keys, const float* weights, const float* values, const Shrinks& shrinks, float* out) {
  F32 acc[kRowTile][NV] = {};
  accumulate<kRowTile, NV, kKvTile, 1>(keys, weights, values, l.v_dim, 16, acc);
#pragma GCC unroll 12
  for (int m = 0; m < kRowTile; m++)
#pragma GCC unroll 2
    for (int n = 0; n < NV; n++) {
      float* at = out + m * l.v_dim + 16 * n;
      store(at, fold(load(at), shrinks.before[m], acc[m][n], shrinks.more[m]));
    }
}

void finish(const Layer& l, const QueryRow* rows, int count, const Tiles& t, const Target& target, int64_t number) {
  for (int i = 0; i < count; i++) {
    const float* out = t.out + int64_t(i) * l.v_dim;
    const F32 totals = load(t.total + 16 * i);
    if (!target.part) write_output(l, rows[i].token, rows[i].head, out, totals, t.top[i / kRowTile * 16 + i % kRowTile]);
    else write_part(l, target.part + i * target.row_step + number * target.tile_step, out, totals,
                    t.top[i / kRowTile * 16 + i % kRowTile]);
  }
}

// One tile of keys for a register tile of query rows.
BOUGH_INLINE void take_tile(const Layer& l, const QueryRow* rows, int real, int32_t first, int keys, const float* q, float* out,
                            float* top, float* total, const Tiles& t) {
  for (int n = 0; n < (keys + 31) / 32; n++)
    multiply<kRowTile, 2, 1, kRowTile>(l.dim, q, t.keys + 32 * n, kKvTile, 16, t.scores + 32 * n, kKvTile, false);
  if (keys <= 32)
    for (int i = 0; i < kRowTile; i++) std::memset(t.scores + i * kKvTile + 32, 0, sizeof(float) * 32);
  Shrinks shrinks;
  soften(l, rows, real, first, keys, t.scores, top, total, shrinks);
  int c = 0;
  for (; c + 32 <= l.v_dim; c += 32) add_values<2>(l, keys, t.scores, t.values + c, shrinks, out + c);
  if (c < l.v_dim) add_values<1>(l, keys, t.scores, t.values + c, shrinks, out + c);
}

// Whether no query row sees any of these keys.
bool is_hidden(const QueryRow* rows, int count, int32_t first, int keys) {
  for (int i = 0; i < count; i++)
    if (first < rows[i].gap_lo || first + keys > rows[i].gap_hi) return false;
  return true;
}

template <Dtype D>
void attend(const Step& s, const Layer& l, const QueryRow* rows, int count, int32_t slot, int32_t kv_head, int32_t first,
            int32_t last, const Target& target) {
  const int tiles = (count + kRowTile - 1) / kRowTile;
  const Tiles t = divide(l, tiles);
  gather_queries(l, rows, count, tiles, t);
  clear_sums(l, tiles, t);
  for (int32_t p = tile_start(first); p < last; p += kKvTile) {
    const int keys = std::min<int32_t>(kKvTile, last - p);
    if (s.gaps && is_hidden(rows, count, p, keys)) continue;
    if (is_coded(l)) gather_codes(s, l, slot, kv_head, p, keys, first, t);
    else gather_keys<D>(s, l, slot, kv_head, p, keys, first, t);
    for (int tile = 0; tile < tiles; tile++) {
      const QueryRow* these = rows + tile * kRowTile;
      const int real = std::min(kRowTile, count - tile * kRowTile);
      bool any = false;
      for (int i = 0; i < real; i++) any |= these[i].lo < p + keys && these[i].hi > p;
      if (!any) continue;
      take_tile(l, these, real, p, keys, t.q + int64_t(tile) * l.dim * kRowTile, t.out + int64_t(tile) * kRowTile * l.v_dim,
                t.top + 16 * tile, t.total + 16 * kRowTile * tile, t);
    }
    if (target.tile_step) {
      finish(l, rows, count, t, target, (p - tile_start(first)) / kKvTile);
      clear_sums(l, tiles, t);
    }
  }
  if (!target.tile_step) finish(l, rows, count, t, target, 0);
}

}  // namespace

void attend_tiles(const Step& s, const Layer& l, const QueryRow* rows, int count, int32_t slot, int32_t kv_head, int32_t first,
                  int32_t last, const Target& target) {
  if (l.cache_dtype == kF32 || is_coded(l)) attend<kF32>(s, l, rows, count, slot, kv_head, first, last, target);
  else if (l.cache_dtype == kBF16) attend<kBF16>(s, l, rows, count, slot, kv_head, first, last, target);
  else attend<kF16>(s, l, rows, count, slot, kv_head, first, last, target);
}

}  // namespace bough
