// One query token: its heads against its keys, 64 at a time.

#include <algorithm>

#include "attention.h"
#include "parallel.h"

namespace bough {
namespace {

thread_local Scratch scratch;

// Rows of keys or values that lie in pages: where each of up to 64 positions begins.
template <typename E>
struct Rows {
  const E* at[kKvTile];

  void find(const Step& s, int32_t slot, int32_t first, int count, const E* cache, int64_t step) {
    const int padded = (count + 15) / 16 * 16;
    for (int i = 0; i < padded; i++) at[i] = cache + location(s, slot, first + std::min(i, count - 1)) * step;
  }
};

// Asks for a row that is needed soon: pages lie anywhere, and the heads of a token side by side, so that the processor
// does not see what comes next.
template <typename E>
BOUGH_INLINE void expect(const E* row, int width) {
  for (int c = 0; c < width; c += 64 / int(sizeof(E))) __builtin_prefetch(row + c);
}

// Scores of 16 keys against `heads` queries; HV: vectors of a head's width (0: known at run time only).
template <Dtype D, int HV>
BOUGH_INLINE void score16(const typename Element<D>::type* const* keys, const typename Element<D>::type* const* next,
                          int64_t offset, const float* q, int heads, int vectors, float* out) {
  const int n = HV ? HV : vectors;
  F32 part[8][16];
  for (int i = 0; i < 16; i++) {
    if (next) expect(next[i] + offset, 16 * n);
    const typename Element<D>::type* row = keys[i] + offset;
    F32 key[HV ? HV : 1];
    if constexpr (HV != 0) {
#pragma GCC unroll 8
      for (int c = 0; c < HV; c++) key[c] = load_as<D>(row + 16 * c);
    }
    for (int g = 0; g < heads; g++) {
      F32 sum{};
#pragma GCC unroll 8
      for (int c = 0; c < n; c++) sum += (HV ? key[HV ? c : 0] : load_as<D>(row + 16 * c)) * load(q + 16 * (g * n + c));
      part[g][i] = sum;
    }
  }
  for (int g = 0; g < heads; g++) store(out + g * kKvTile, sum_each(part[g]));
}

template <Dtype D, int HV>
BOUGH_INLINE void add_values(const typename Element<D>::type* const* values, int64_t offset, const float* weights, int count,
                             int vectors, float* out) {
  if constexpr (HV != 0) {
    F32 acc[HV];
#pragma GCC unroll 8
    for (int c = 0; c < HV; c++) acc[c] = load(out + 16 * c);
    for (int i = 0; i < count; i++) {
#pragma GCC unroll 8
      for (int c = 0; c < HV; c++) acc[c] += load_as<D>(values[i] + offset + 16 * c) * weights[i];
    }
#pragma GCC unroll 8
    for (int c = 0; c < HV; c++) store(out + 16 * c, acc[c]);
  } else {
    for (int c = 0; c < vectors; c++) {
      F32 acc = load(out + 16 * c);
      for (int i = 0; i < count; i++) acc += load_as<D>(values[i] + offset + 16 * c) * weights[i];
      store(out + 16 * c, acc);
    }
  }
}

// What the query heads of the row have gathered so far.
struct Gathered {
  float *q, *out;       // [heads][dim], [heads][v_dim]
  float *top, *total;   // [heads]
};

// Takes one tile of keys and values into the heads that read kv head `kv`.
template <Dtype D, int HV>
BOUGH_INLINE void take_tile(const Layer& l, const Rows<typename Element<D>::type>& keys, const Rows<typename Element<D>::type>& values,
                            const Rows<typename Element<D>::type>* next, int after, int count, int group, bool is_first,
                            int64_t k_offset, int64_t v_offset, const Gathered& state, float* scores) {
  typedef typename Element<D>::type E;
  const int vectors = l.dim / 16, v_vectors = l.v_dim / 16, sixteens = (count + 15) / 16;
  for (int b = 0; b < sixteens; b++)
    score16<D, HV>(keys.at + 16 * b, 16 * b < after ? next[0].at + 16 * b : nullptr, k_offset, state.q, group, vectors,
                   scores + 16 * b);
  for (int i = 0; i < after; i++) expect<E>(next[1].at[i] + v_offset, l.v_dim);
  for (int g = 0; g < group; g++) {
    float* score = scores + g * kKvTile;
    if (l.softcap > 0)
      for (int b = 0; b < sixteens; b++)
        store(score + 16 * b, l.softcap * hyperbolic_tangent(load(score + 16 * b) / l.softcap));
    for (int i = count; i < 16 * sixteens; i++) score[i] = -__builtin_inff();
    F32 high = load(score);
    for (int b = 1; b < sixteens; b++) high = maximum(high, load(score + 16 * b));
    const float now = std::max(state.top[g], max_lanes(high));
    const float shrink = exponential(splat(state.top[g] - now))[0];
    F32 sum{};
    for (int b = 0; b < sixteens; b++) {
      const F32 weight = exponential(load(score + 16 * b) - now);
      store(score + 16 * b, weight);
      sum += weight;
    }
    state.total[g] = state.total[g] * shrink + sum_lanes(sum);
    state.top[g] = now;
    float* o = state.out + g * l.v_dim;
    if (!is_first)
      for (int c = 0; c < v_vectors; c++) store(o + 16 * c, load(o + 16 * c) * shrink);
    if (HV && l.v_dim == l.dim) add_values<D, HV>(values.at, v_offset, score, count, v_vectors, o);
    else add_values<D, 0>(values.at, v_offset, score, count, v_vectors, o);
  }
}

void finish(const Layer& l, int32_t token, int head, const Gathered& state, const Target& target, int number) {
  if (target.part) {
    float* part = target.part + number * target.row_step;
    std::memcpy(part, state.out, l.v_dim * sizeof(float));
    part[l.v_dim] = *state.top;
    part[l.v_dim + 1] = *state.total;
    return;
  }
  const int64_t at = (int64_t(token) * l.heads + head) * l.v_dim;
  const float inverse = *state.total > 0 ? 1.0f / *state.total : 0.0f;
  for (int c = 0; c < l.v_dim; c += 16) write_vector(l.out, at + c, l.dtype, load(state.out + c) * inverse);
}

// Tile by tile, and all the heads for each: the heads of a token lie side by side in memory.
template <Dtype D, int HV>
void attend(const Step& s, const Layer& l, const DecodePiece& piece, const Target& target) {
  typedef typename Element<D>::type E;
  const int group = l.heads / l.kv_heads, kv_heads = piece.kv_last - piece.kv_first, heads = kv_heads * group;
  const int first_head = piece.kv_first * group;
  const int32_t token = s.query_start[piece.row], slot = s.slots[piece.row];
  float* q = scratch.get<float>(heads * (l.dim + l.v_dim + 2) + group * kKvTile + 64);
  const Gathered all{q, q + heads * l.dim, q + heads * (l.dim + l.v_dim), q + heads * (l.dim + l.v_dim + 1)};
  float* scores = all.total + (heads + 15) / 16 * 16;
  for (int h = 0; h < heads; h++) {
    const int64_t at = token * l.q_token + (first_head + h) * l.q_head;
    for (int c = 0; c < l.dim; c += 16) store(q + h * l.dim + c, read_vector(l.q, at + c, l.dtype) * l.scale);
    for (int c = 0; c < l.v_dim; c += 16) store(all.out + h * l.v_dim + c, F32{});
    all.top[h] = -1e30f;
    all.total[h] = 0;
  }
  const E *k_cache = static_cast<const E*>(l.k_cache), *v_cache = static_cast<const E*>(l.v_cache);
  Rows<E> rows[2][2];  // keys and values, of this tile and of the next
  auto find = [&](Rows<E>* found, int32_t p) {
    const int count = std::min<int32_t>(kKvTile, piece.last - p);
    found[0].find(s, slot, p, count, k_cache, int64_t(l.kv_heads) * l.dim);
    found[1].find(s, slot, p, count, v_cache, int64_t(l.kv_heads) * l.v_dim);
  };
  find(rows[0], piece.first);
  int at = 0;
  for (int32_t p = piece.first; p < piece.last; p += kKvTile, at ^= 1) {
    const int count = std::min<int32_t>(kKvTile, piece.last - p);
    const int after = std::max<int32_t>(0, std::min<int32_t>(kKvTile, piece.last - p - kKvTile));
    if (after) find(rows[at ^ 1], p + kKvTile);
    for (int kv = 0; kv < kv_heads; kv++) {
      const int h = kv * group;
      const Gathered state{q + h * l.dim, all.out + h * l.v_dim, all.top + h, all.total + h};
      take_tile<D, HV>(l, rows[at][0], rows[at][1], rows[at ^ 1], after, count, group, p == piece.first,
                       int64_t(piece.kv_first + kv) * l.dim, int64_t(piece.kv_first + kv) * l.v_dim, state, scores);
    }
  }
  for (int h = 0; h < heads; h++)
    finish(l, token, first_head + h, {nullptr, all.out + h * l.v_dim, all.top + h, all.total + h}, target, h);
}

template <Dtype D>
void by_width(const Step& s, const Layer& l, const DecodePiece& piece, const Target& target) {
  if (l.dim == 64) attend<D, 4>(s, l, piece, target);
  else if (l.dim == 128) attend<D, 8>(s, l, piece, target);
  else attend<D, 0>(s, l, piece, target);
}

}  // namespace

void attend_decode(const Step& s, const Layer& l, const DecodePiece& piece, const Target& target) {
  if (l.cache_dtype == kF32) by_width<kF32>(s, l, piece, target);
  else if (l.cache_dtype == kBF16) by_width<kBF16>(s, l, piece, target);
  else by_width<kF16>(s, l, piece, target);
}

}  // namespace bough
