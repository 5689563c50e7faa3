// x W^T for BF16 weights, with activations rounded to BF16 and sums in fp32, where the processor multiplies such pairs.

#include <algorithm>

#include "linear.h"
#include "parallel.h"

namespace bough {

#if defined(__AVX512BF16__)
namespace {

typedef uint32_t Pair;  // two neighbouring columns

thread_local Scratch act_scratch;

// MT tokens' activations, pair of columns after pair: out[cols / 2][MT].
template <int MT>
void round_tile(const LinearCall& call, int64_t first, Pair* out) {
  for (int i = 0; i < MT; i++) {
    const bool real = first + i < call.tokens;
    for (int64_t c = 0; c < call.weight->cols; c += 32) {
      alignas(64) Pair pairs[16] = {};
      if (real) {
        const __m512 lo = (__m512)load_x(call, first + i, c), hi = (__m512)load_x(call, first + i, c + 16);
        _mm512_store_si512(pairs, (__m512i)_mm512_cvtne2ps_pbh(hi, lo));
      }
      for (int k = 0; k < 16; k++) out[(c / 2 + k) * MT + i] = pairs[k];
    }
  }
}

// MT tokens against two groups of rows.
template <int MT>
void two_groups(const LinearCall& call, const Pair* x, int64_t first, int64_t group) {
  const Weight& w = *call.weight;
  const bool second = group + 1 < num_groups(w);
  const uint8_t *a = w.quants + group * group_quants(w), *b = second ? a + group_quants(w) : a;
  __m512 sum[MT][2];
#pragma GCC unroll 12
  for (int t = 0; t < MT; t++) sum[t][0] = sum[t][1] = _mm512_setzero_ps();
  for (int64_t pair = 0; pair < w.cols / 2; pair++, a += 64, b += 64, x += MT) {
    const __m512bh wa = (__m512bh)_mm512_loadu_si512(a), wb = (__m512bh)_mm512_loadu_si512(b);
#pragma GCC unroll 12
    for (int t = 0; t < MT; t++) {
      const __m512bh both = (__m512bh)_mm512_set1_epi32(int(x[t]));
      sum[t][0] = _mm512_dpbf16_ps(sum[t][0], wa, both);
      sum[t][1] = _mm512_dpbf16_ps(sum[t][1], wb, both);
    }
  }
  for (int t = 0; t < MT && first + t < call.tokens; t++) {
    write_result(call, first + t, group * kGroup, (F32)sum[t][0]);
    if (second) write_result(call, first + t, (group + 1) * kGroup, (F32)sum[t][1]);
  }
}

template <int MT>
void in_tiles(const LinearCall& call, int threads) {
  const Weight& w = *call.weight;
  const int64_t tiles = (call.tokens + MT - 1) / MT, pairs = (num_groups(w) + 1) / 2, width = w.cols / 2 * MT;
  Pair* x = act_scratch.get<Pair>(tiles * width);
  for_each(threads, tiles, 1, [&](int64_t i) { round_tile<MT>(call, i * MT, x + i * width); });
  const int64_t chunk = std::max<int64_t>(1, (512 << 10) / int64_t(width * sizeof(Pair)));
  const int64_t chunks = (tiles + chunk - 1) / chunk;
  for_each(threads, chunks * pairs, 1, [&](int64_t item) {
    const int64_t begin = item / pairs * chunk;
    for (int64_t i = begin; i < std::min(tiles, begin + chunk); i++)
      two_groups<MT>(call, x + i * width, i * MT, item % pairs * 2);
  });
}

}  // namespace

bool linear_bf16(const LinearCall& call, int threads) {
  if (call.tokens == 1) in_tiles<1>(call, threads);
  else if (call.tokens <= 4) in_tiles<4>(call, threads);
  else if (call.tokens <= 2 * kFewTokens) in_tiles<kFewTokens>(call, threads);
  else in_tiles<kMaxTokens>(call, threads);
  return true;
}

#else

bool linear_bf16(const LinearCall&, int) { return false; }

#endif

}  // namespace bough
