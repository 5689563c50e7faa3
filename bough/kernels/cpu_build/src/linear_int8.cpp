// x W^T with activations rounded to 8 bits, a scale for each 32 of them; integer dot products, floats across blocks.
//
// A token's few activations that are far larger than its others are not rounded: a block's scale would be theirs, and little of
// the 8 bits would be left for the other 31. They are set to zero for the integer products, and multiplied in floats.

#include <algorithm>
#include <cmath>

#include "linear.h"
#include "parallel.h"

namespace bough {
namespace {

// Activations of MT tokens, a block of 32 columns after the other. For each: the quants, the scales, the scaled sums of
// the quants (for minima), and what the weights' offset adds to the integer sums of the two halves.
template <int MT>
struct ActBlock {
  int8_t q[MT][kBlock];
  float d[MT];
  float dsum[MT];
  int32_t off[2][MT];
};

constexpr size_t act_bytes(int mt) { return size_t(mt) * (kBlock + 16); }

struct Outlier {
  int32_t column;  // negative: a tile has no more
  int32_t token;   // of the tile
  float value;
};

constexpr int kFar = 6;  // times the root mean square of a token's activations

// More of a token's can't be so far.
inline int64_t most_outliers(const Weight& w) { return w.cols / (kFar * kFar); }

// Room for those of a tile, and its end.
inline int64_t outlier_room(const Weight& w, int mt) { return mt * most_outliers(w) + 1; }

inline float root_mean_square(const LinearCall& call, int64_t token) {
  F32 squares{};
  for (int64_t c = 0; c < call.weight->cols; c += 16) {
    const F32 x = load_x(call, token, c);
    squares = fused(x, x, squares);
  }
  return std::sqrt(sum_lanes(squares) / float(call.weight->cols));
}

// Moves up to `most` values above the limit from a block to `out`; returns how many.
inline int take_outliers(F32& lo, F32& hi, float limit, int64_t most, int64_t column, int token, Outlier* out) {
  alignas(64) float x[kBlock];
  store(x, lo);
  store(x + 16, hi);
  int taken = 0;
  for (int c = 0; c < kBlock; c++)
    if (std::fabs(x[c]) > limit && taken < most) {
      out[taken++] = {int32_t(column + c), token, x[c]};
      x[c] = 0;
    }
  lo = load(x);
  hi = load(x + 16);
  return taken;
}

BOUGH_INLINE float largest(F32 lo, F32 hi) { return max_lanes(maximum(absolute(lo), absolute(hi))); }

template <int MT>
void quantise_tile(const LinearCall& call, int64_t first, ActBlock<MT>* out, Outlier* outliers) {
  const Traits& t = kTraits[call.weight->kind];
  const int64_t blocks = num_blocks(*call.weight);
  const int real = int(std::min<int64_t>(MT, call.tokens - first));
  float limit[MT];
  int64_t left[MT];
  for (int i = 0; i < real; i++) {
    limit[i] = kFar * root_mean_square(call, first + i);
    left[i] = most_outliers(*call.weight);
  }
  for (int64_t b = 0; b < blocks; b++) {
    ActBlock<MT>& a = out[b];
    for (int i = 0; i < real; i++) {
      F32 lo = load_x(call, first + i, b * kBlock), hi = load_x(call, first + i, b * kBlock + 16);
      float top = largest(lo, hi);
      if (top > limit[i]) {
        const int taken = take_outliers(lo, hi, limit[i], left[i], b * kBlock, i, outliers);
        outliers += taken;
        left[i] -= taken;
        top = largest(lo, hi);
      }
      const float inverse = top > 0 ? 127.0f / top : 0.0f;
      const I32 qlo = round_to_int(lo * inverse), qhi = round_to_int(hi * inverse);
      store_i8(a.q[i], qlo);
      store_i8(a.q[i] + 16, qhi);
      const int sum = int(sum_lanes(to_float(qlo + qhi))), sum_hi = t.half_blocks ? int(sum_lanes(to_float(qhi))) : 0;
      a.d[i] = top / 127.0f;
      a.dsum[i] = a.d[i] * float(sum);
      a.off[0][i] = -t.offset * (sum - sum_hi);
      a.off[1][i] = -t.offset * sum_hi;
    }
    for (int i = real; i < MT; i++) {
      std::memset(a.q[i], 0, kBlock);
      a.d[i] = a.dsum[i] = 0;
      a.off[0][i] = a.off[1][i] = 0;
    }
  }
  outliers->column = -1;
}

// How many vectors' products of pairs add up to 16 bits: a pair is at most twice the largest quant times 127.
constexpr int short_run(int kind) {
  if (is_bytes(kind)) return 0;
  if (kind == kQ6_K) return 2;
  return kTraits[kind].tile_bytes == 256 && kTraits[kind].offset <= 8 ? 8 : 4;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// As `add_block`, of quants below 64. Pairs of products are added up in 16 bits, where Run vectors fit, then in 32.
template <int MT, bool HasMin, int First, int Count, int Run, int Half>
BOUGH_INLINE void add_small(__m256* acc, const __m256i* w, const __m256* d, const __m256* m, const ActBlock<MT>& a) {
  __m256i sum[MT][2];
#pragma GCC unroll 12
  for (int t = 0; t < MT; t++) sum[t][0] = sum[t][1] = HasMin ? _mm256_setzero_si256() : _mm256_set1_epi32(a.off[Half][t]);
#pragma GCC unroll 8
  for (int run = First; run < First + Count; run += Run) {
    __m256i pairs[MT][2];
#pragma GCC unroll 8
    for (int j = run; j < run + Run; j++) {
      const __m256i lo = _mm256_load_si256(w + 2 * j), hi = _mm256_load_si256(w + 2 * j + 1);
#pragma GCC unroll 12
      for (int t = 0; t < MT; t++) {
        const __m256i x = _mm256_set1_epi32(four_bytes(a.q[t] + 4 * j));
        const __m256i p0 = _mm256_maddubs_epi16(lo, x), p1 = _mm256_maddubs_epi16(hi, x);
        pairs[t][0] = j == run ? p0 : _mm256_add_epi16(pairs[t][0], p0);
        pairs[t][1] = j == run ? p1 : _mm256_add_epi16(pairs[t][1], p1);
        asm("" : "+x"(pairs[t][0]), "+x"(pairs[t][1]));  // added one by one: in another order they would not fit registers
      }
    }
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 12
    for (int t = 0; t < MT; t++) {
      sum[t][0] = _mm256_add_epi32(sum[t][0], _mm256_madd_epi16(pairs[t][0], ones));
      sum[t][1] = _mm256_add_epi32(sum[t][1], _mm256_madd_epi16(pairs[t][1], ones));
    }
  }
#pragma GCC unroll 12
  for (int t = 0; t < MT; t++) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sum[t][h]), d[h]);
      acc[2 * t + h] = _mm256_fmadd_ps(scaled, _mm256_set1_ps(a.d[t]), acc[2 * t + h]);
      if constexpr (HasMin) acc[2 * t + h] = _mm256_fmadd_ps(m[h], _mm256_set1_ps(a.dsum[t]), acc[2 * t + h]);
    }
  }
}
#endif

// Adds one block to the results of MT tokens. Run: as `short_run` says of the weights' kind.
template <int MT, bool HasMin, bool Halves, int Run>
BOUGH_INLINE void add_block(F32* acc, const U8* w, const TileScales& s, const ActBlock<MT>& a) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (Run > 0) {
    constexpr int kFirst = Halves ? 4 : 8, kRun = Run < kFirst ? Run : kFirst;
    __m256* out = reinterpret_cast<__m256*>(acc);
    const __m256i* quants = reinterpret_cast<const __m256i*>(w);
    const __m256* minima = reinterpret_cast<const __m256*>(&s.m);
    add_small<MT, HasMin, 0, kFirst, kRun, 0>(out, quants, reinterpret_cast<const __m256*>(&s.d), minima, a);
    if constexpr (Halves)
      add_small<MT, false, 4, 4, kRun, 1>(out, quants, reinterpret_cast<const __m256*>(&s.d2), minima, a);
    return;
  }
#endif
  I32 sum[MT];
#pragma GCC unroll 12
  for (int t = 0; t < MT; t++) sum[t] = HasMin ? I32{} : splat_int(a.off[0][t]);
#pragma GCC unroll 8
  for (int j = 0; j < (Halves ? 4 : 8); j++) {
    const U8 v = w[j];
#pragma GCC unroll 12
    for (int t = 0; t < MT; t++) sum[t] = dot4(sum[t], v, four_bytes(a.q[t] + 4 * j));
  }
#pragma GCC unroll 12
  for (int t = 0; t < MT; t++) acc[t] += to_float(sum[t]) * s.d * a.d[t];
  if constexpr (HasMin) {
#pragma GCC unroll 12
    for (int t = 0; t < MT; t++) acc[t] += s.m * a.dsum[t];
  }
  if constexpr (Halves) {
#pragma GCC unroll 12
    for (int t = 0; t < MT; t++) sum[t] = splat_int(a.off[1][t]);
#pragma GCC unroll 4
    for (int j = 4; j < 8; j++) {
      const U8 v = w[j];
#pragma GCC unroll 12
      for (int t = 0; t < MT; t++) sum[t] = dot4(sum[t], v, four_bytes(a.q[t] + 4 * j));
    }
#pragma GCC unroll 12
    for (int t = 0; t < MT; t++) acc[t] += to_float(sum[t]) * s.d2 * a.d[t];
  }
}

// Adds a tile's outliers and writes its results. column(c): 16 rows' weights.
template <int MT, typename Column>
BOUGH_INLINE void finish(const LinearCall& call, const F32* acc, const Outlier* outliers, int64_t first, int64_t group,
                         const Column& column) {
  F32 sums[MT];  // apart from acc, which is to stay in registers
#pragma GCC unroll 12
  for (int i = 0; i < MT; i++) sums[i] = acc[i];
  F32 weights{};
  for (int32_t have = -1; outliers->column >= 0; outliers++) {  // tokens often share a column
    if (outliers->column != have) weights = column(have = outliers->column);
    add_product(&sums[outliers->token], weights, outliers->value);
  }
#pragma GCC unroll 1
  for (int i = 0; i < MT && first + i < call.tokens; i++) write_result(call, first + i, group * kGroup, sums[i]);
}

// One group of rows, few tokens: weights go from memory through registers, once.
template <int K, int MT>
void group_direct(const LinearCall& call, const ActBlock<MT>* act, const Outlier* outliers, int64_t first, int64_t group) {
  constexpr Traits t = kTraits[K];
  const Weight& w = *call.weight;
  const uint8_t* group_start = w.quants + group * group_quants(w);
  const uint8_t* quants = group_start;
  ScaleReader<K> scales(w, group, 0);
  F32 acc[MT] = {};
  for (int64_t b = 0; b < num_blocks(w); b++, quants += t.tile_bytes) {
    U8 v[8];
    unpack_tile<K>(quants, v);
    expect_weights<t.tile_bytes>(quants);
    add_block<MT, t.has_min, t.half_blocks, short_run(K)>(acc, v, scales.next(b), act[b]);
  }
  finish<MT>(call, acc, outliers, first, group, [&](int column) {
    const int64_t b = column / kBlock;
    const U8 v = unpack_vector<K>(group_start + b * t.tile_bytes, column % kBlock / 4);
    return column_of(t, v, ScaleReader<K>(w, group, b).next(b), column % kBlock);
  });
}

// One group of rows unpacked once, then used for many tiles of tokens.
struct Panel {
  U8* quants;          // [blocks][8]
  TileScales* scales;  // [blocks]
};

template <int K>
void unpack_group(const Weight& w, int64_t group, const Panel& out) {
  const uint8_t* quants = w.quants + group * group_quants(w);
  ScaleReader<K> scales(w, group, 0);
  for (int64_t b = 0; b < num_blocks(w); b++) {
    unpack_tile<K>(quants + b * kTraits[K].tile_bytes, out.quants + 8 * b);
    out.scales[b] = scales.next(b);
  }
}

template <int MT, bool HasMin, bool Halves, int Run>
void tile_from_panel(const LinearCall& call, const Panel& panel, const ActBlock<MT>* act, const Outlier* outliers, int64_t first,
                     int64_t group) {
  F32 acc[MT] = {};
  const int64_t blocks = num_blocks(*call.weight);
  for (int64_t b = 0; b < blocks; b++) add_block<MT, HasMin, Halves, Run>(acc, panel.quants + 8 * b, panel.scales[b], act[b]);
  finish<MT>(call, acc, outliers, first, group, [&](int column) {
    const Traits t{.offset = HasMin ? 0 : kTraits[call.weight->kind].offset, .has_min = HasMin, .half_blocks = Halves};
    return column_of(t, panel.quants[column / 4], panel.scales[column / kBlock], column % kBlock);
  });
}

struct TokenTile {
  int64_t first;
  int size;
  uint8_t* act;
  Outlier* outliers;
};

thread_local Scratch act_scratch, outlier_scratch, panel_scratch;

template <int K, int MT>
void few_tokens(const LinearCall& call, int threads) {
  const Weight& w = *call.weight;
  const int64_t blocks = num_blocks(w), tiles = (call.tokens + MT - 1) / MT;
  ActBlock<MT>* act = act_scratch.get<ActBlock<MT>>(tiles * blocks);
  const int64_t room = outlier_room(w, MT);
  Outlier* outliers = outlier_scratch.get<Outlier>(tiles * room);
  for (int64_t i = 0; i < tiles; i++) quantise_tile<MT>(call, i * MT, act + i * blocks, outliers + i * room);
  share_groups(w, threads, 1, [&](int64_t g) {
    for (int64_t i = 0; i < tiles; i++) group_direct<K, MT>(call, act + i * blocks, outliers + i * room, i * MT, g);
  });
}

void many_tokens(const LinearCall& call, int threads) {
  const Weight& w = *call.weight;
  const int64_t blocks = num_blocks(w), groups = num_groups(w);
  // Tiles of tokens, in chunks whose activations stay in the second-level cache while all rows pass by.
  const int64_t num_tiles = (call.tokens + kMaxTokens - 1) / kMaxTokens;
  const size_t tile_bytes = act_bytes(kMaxTokens) * blocks;
  uint8_t* act = act_scratch.get<uint8_t>(num_tiles * tile_bytes);
  const int64_t room = outlier_room(w, kMaxTokens);
  Outlier* outliers = outlier_scratch.get<Outlier>(num_tiles * room);
  const int64_t chunk = std::max<int64_t>(1, std::min<int64_t>(num_tiles, (512 << 10) / int64_t(tile_bytes)));
  const int64_t chunks = (num_tiles + chunk - 1) / chunk;
  auto tile = [&](int64_t i) {
    return TokenTile{i * kMaxTokens, tile_tokens(call.tokens - i * kMaxTokens), act + i * tile_bytes, outliers + i * room};
  };
  for_each(threads, num_tiles, 1, [&](int64_t i) {
    const TokenTile t = tile(i);
    for_tile(t.size, [&]<int MT>() { quantise_tile<MT>(call, t.first, reinterpret_cast<ActBlock<MT>*>(t.act), t.outliers); });
  });
  for_each(threads, chunks * groups, 1, [&](int64_t item) {
    const int64_t group = item % groups, first = item / groups * chunk;
    uint8_t* memory = panel_scratch.get<uint8_t>(blocks * (512 + sizeof(TileScales)));
    const Panel panel{reinterpret_cast<U8*>(memory), reinterpret_cast<TileScales*>(memory + 512 * blocks)};
    for_integer_kind(w.kind, [&]<int K>() {
      unpack_group<K>(w, group, panel);
      for (int64_t i = first; i < std::min(num_tiles, first + chunk); i++) {
        const TokenTile t = tile(i);
        for_tile(t.size, [&]<int MT>() {
          tile_from_panel<MT, kTraits[K].has_min, kTraits[K].half_blocks, short_run(K)>(
              call, panel, reinterpret_cast<const ActBlock<MT>*>(t.act), t.outliers, t.first, group);
        });
      }
    });
  });
}

}  // namespace

void linear_int8(const LinearCall& call, int threads) {
  if (call.tokens > 2 * kFewTokens) {
    many_tokens(call, threads);
    return;
  }
  for_integer_kind(call.weight->kind, [&]<int K>() {
    if (call.tokens == 1) few_tokens<K, 1>(call, threads);
    else if (kWide && call.tokens == 2) few_tokens<K, kWide ? 2 : 1>(call, threads);
    else if (call.tokens <= 4) few_tokens<K, 4>(call, threads);
    else few_tokens<K, kFewTokens>(call, threads);
  });
}

}  // namespace bough
