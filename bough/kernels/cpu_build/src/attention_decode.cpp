// One query token: its heads against the keys of one kv head, 64 at a time.

#include <algorithm>

#include "attention.h"
#include "parallel.h"

namespace bough {
namespace {

thread_local Scratch scratch;

// Scores of 16 keys against `heads` queries; HV: vectors of a head's width (0: known at run time only).
template <Dtype D, int HV>
BOUGH_INLINE void score16(const typename Element<D>::type* const* keys, const float* q, int heads, int vectors, float* out) {
  const int n = HV ? HV : vectors;
  F32 part[8][16];
  for (int i = 0; i < 16; i++) {
    F32 key[HV ? HV : 1];
    if constexpr (HV != 0) {
#pragma GCC unroll 8
      for (int c = 0; c < HV; c++) key[c] = load_as<D>(keys[i] + 16 * c);
    }
    for (int g = 0; g < heads; g++) {
      F32 sum{};
#pragma GCC unroll 8
      for (int c = 0; c < n; c++) sum += (HV ? key[HV ? c : 0] : load_as<D>(keys[i] + 16 * c)) * load(q + 16 * (g * n + c));
      part[g][i] = sum;
    }
  }
  for (int g = 0; g < heads; g++) store(out + g * kKvTile, sum_each(part[g]));
}

template <Dtype D, int HV>
BOUGH_INLINE void add_values(const typename Element<D>::type* const* values, const float* weights, int count, int vectors, float* out) {
  if constexpr (HV != 0) {
    F32 acc[HV];
#pragma GCC unroll 8
    for (int c = 0; c < HV; c++) acc[c] = load(out + 16 * c);
    for (int i = 0; i < count; i++) {
#pragma GCC unroll 8
      for (int c = 0; c < HV; c++) acc[c] += load_as<D>(values[i] + 16 * c) * weights[i];
    }
#pragma GCC unroll 8
    for (int c = 0; c < HV; c++) store(out + 16 * c, acc[c]);
  } else {
    for (int c = 0; c < vectors; c++) {
      F32 acc = load(out + 16 * c);
      for (int i = 0; i < count; i++) acc += load_as<D>(values[i] + 16 * c) * weights[i];
      store(out + 16 * c, acc);
    }
  }
}

template <Dtype D, int HV>
void attend(const Step& s, const Layer& l, int32_t row, int32_t kv_head, int32_t first, int32_t last, const Target& target) {
  typedef typename Element<D>::type E;
  const int group = l.heads / l.kv_heads, vectors = l.dim / 16, v_vectors = l.v_dim / 16;
  const int32_t token = s.query_start[row], slot = s.slots[row];
  float* q = scratch.get<float>(group * (l.dim + l.v_dim + kKvTile));
  float *out = q + group * l.dim, *scores = out + group * l.v_dim;
  float top[8], total[8];
  for (int g = 0; g < group; g++) {
    const int64_t at = token * l.q_token + (kv_head * group + g) * l.q_head;
    for (int c = 0; c < vectors; c++) store(q + g * l.dim + 16 * c, read_vector(l.q, at + 16 * c, l.dtype) * l.scale);
    for (int c = 0; c < v_vectors; c++) store(out + g * l.v_dim + 16 * c, F32{});
    top[g] = -1e30f;
    total[g] = 0;
  }
  const E *k_cache = static_cast<const E*>(l.k_cache) + int64_t(kv_head) * l.dim;
  const E *v_cache = static_cast<const E*>(l.v_cache) + int64_t(kv_head) * l.v_dim;
  const int64_t k_step = int64_t(l.kv_heads) * l.dim, v_step = int64_t(l.kv_heads) * l.v_dim;
  for (int32_t p = first; p < last; p += kKvTile) {
    const int count = std::min<int32_t>(kKvTile, last - p), sixteens = (count + 15) / 16;
    const E *keys[kKvTile], *values[kKvTile];
    for (int i = 0; i < 16 * sixteens; i++) {
      const int64_t at = location(s, slot, p + std::min(i, count - 1));
      keys[i] = k_cache + at * k_step;
      values[i] = v_cache + at * v_step;
    }
    for (int b = 0; b < sixteens; b++) score16<D, HV>(keys + 16 * b, q, group, vectors, scores + 16 * b);
    for (int g = 0; g < group; g++) {
      float* score = scores + g * kKvTile;
      if (l.softcap > 0)
        for (int b = 0; b < sixteens; b++)
          store(score + 16 * b, l.softcap * hyperbolic_tangent(load(score + 16 * b) / l.softcap));
      for (int i = count; i < 16 * sixteens; i++) score[i] = -__builtin_inff();
      F32 high = load(score);
      for (int b = 1; b < sixteens; b++) high = maximum(high, load(score + 16 * b));
      const float now = std::max(top[g], max_lanes(high));
      const float shrink = exponential(splat(top[g] - now))[0];
      F32 sum{};
      for (int b = 0; b < sixteens; b++) {
        const F32 weight = exponential(load(score + 16 * b) - now);
        store(score + 16 * b, weight);
        sum += weight;
      }
      total[g] = total[g] * shrink + sum_lanes(sum);
      top[g] = now;
      float* o = out + g * l.v_dim;
      if (p > first)
        for (int c = 0; c < v_vectors; c++) store(o + 16 * c, load(o + 16 * c) * shrink);
      if (HV && l.v_dim == l.dim) add_values<D, HV>(values, score, count, v_vectors, o);
      else add_values<D, 0>(values, score, count, v_vectors, o);
    }
  }
  for (int g = 0; g < group; g++) {
    if (target.part) {
      float* part = target.part + g * target.row_step;
      std::memcpy(part, out + g * l.v_dim, l.v_dim * sizeof(float));
      part[l.v_dim] = top[g];
      part[l.v_dim + 1] = total[g];
    } else {
      const int64_t at = (int64_t(token) * l.heads + kv_head * group + g) * l.v_dim;
      const float inverse = total[g] > 0 ? 1.0f / total[g] : 0.0f;
      for (int c = 0; c < v_vectors; c++)
        write_vector(l.out, at + 16 * c, l.dtype, load(out + g * l.v_dim + 16 * c) * inverse);
    }
  }
}

template <Dtype D>
void by_width(const Step& s, const Layer& l, int32_t row, int32_t kv_head, int32_t first, int32_t last, const Target& target) {
  if (l.dim == 64) attend<D, 4>(s, l, row, kv_head, first, last, target);
  else if (l.dim == 128) attend<D, 8>(s, l, row, kv_head, first, last, target);
  else attend<D, 0>(s, l, row, kv_head, first, last, target);
}

}  // namespace

void attend_decode(const Step& s, const Layer& l, int32_t row, int32_t kv_head, int32_t first, int32_t last,
                   const Target& target) {
  if (l.cache_dtype == kF32) by_width<kF32>(s, l, row, kv_head, first, last, target);
  else if (l.cache_dtype == kBF16) by_width<kBF16>(s, l, row, kv_head, first, last, target);
  else by_width<kF16>(s, l, row, kv_head, first, last, target);
}

}  // namespace bough
