// x W^T in fp32, from packed weights.

#include <algorithm>

#include "gemm.h"
#include "linear.h"
#include "parallel.h"

namespace bough {
namespace {

// Sums that don't wait for one another: an addition takes several cycles, and few tokens give few sums.
template <int MT>
constexpr int kChains = MT == 1 ? 4 : MT <= 4 ? 2 : 1;

// acc[chain][token] += 16 rows' weights of one block times MT tokens' activations; x[32][MT].
template <int K, int MT>
BOUGH_INLINE void add_block(F32 (*acc)[MT], const uint8_t* quants, const TileScales& s, const float* x) {
  constexpr Traits t = kTraits[K];
  constexpr int chains = kChains<MT>;
  if constexpr (is_plain(K)) {
    const uint16_t* in = reinterpret_cast<const uint16_t*>(quants);
#pragma GCC unroll 4
    for (int pair = 0; pair < 16; pair++) {
      F32 even, odd;
      if constexpr (K == kF32Weight) {
        even = load(reinterpret_cast<const float*>(quants) + 32 * pair);
        odd = load(reinterpret_cast<const float*>(quants) + 32 * pair + 16);
      } else if constexpr (K == kF16Weight) {
        even = load_half(in + 32 * pair);
        odd = load_half(in + 32 * pair + 16);
      } else {
        const U32 both = *reinterpret_cast<const U32u*>(in + 32 * pair);
        even = (F32)(both << 16);
        odd = (F32)(both & 0xffff0000u);
      }
#pragma GCC unroll 8
      for (int i = 0; i < MT; i++) acc[2 * pair % chains][i] += even * x[2 * pair * MT + i];
#pragma GCC unroll 8
      for (int i = 0; i < MT; i++) acc[(2 * pair + 1) % chains][i] += odd * x[(2 * pair + 1) * MT + i];
    }
  } else {
    U8 v[8];
    unpack_tile<K>(quants, v);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      F32 sum[chains][MT] = {};
      const F32 d = t.half_blocks && half ? s.d2 : s.d;
#pragma GCC unroll 4
      for (int j = 4 * half; j < 4 * half + 4; j++) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          F32 q = to_float((I32)(((U32)v[j] >> (8 * i)) & 255) - t.offset);
          if constexpr (t.has_min) q = d * q + s.m;
#pragma GCC unroll 8
          for (int m = 0; m < MT; m++) sum[i % chains][m] += q * x[(4 * j + i) * MT + m];
        }
      }
#pragma GCC unroll 4
      for (int c = 0; c < chains; c++)
#pragma GCC unroll 8
        for (int m = 0; m < MT; m++) acc[c][m] += t.has_min ? sum[c][m] : sum[c][m] * d;
    }
  }
}

template <int K, int MT>
void group_direct(const LinearCall& call, const float* x, int64_t first, int64_t group) {
  constexpr Traits t = kTraits[K];
  const Weight& w = *call.weight;
  const uint8_t* quants = w.quants + group * group_quants(w);
  F32 acc[kChains<MT>][MT] = {};
  if constexpr (is_plain(K)) {
    for (int64_t b = 0; b < num_blocks(w); b++, quants += t.tile_bytes) {
      expect_weights<t.tile_bytes>(quants);
      add_block<K, MT>(acc, quants, TileScales{}, x + b * kBlock * MT);
    }
  } else {
    ScaleReader<K> scales(w.scales + group * group_scales(w), 0);
    for (int64_t b = 0; b < num_blocks(w); b++, quants += t.tile_bytes) {
      expect_weights<t.tile_bytes>(quants);
      add_block<K, MT>(acc, quants, scales.next(b), x + b * kBlock * MT);
    }
  }
  for (int i = 0; i < MT && first + i < call.tokens; i++) {
    for (int c = 1; c < kChains<MT>; c++) acc[0][i] += acc[c][i];
    write_result(call, first + i, group * kGroup, acc[0][i]);
  }
}

// MT tokens' activations, column after column: out[cols][MT]; missing tokens are zero.
void interleave(const LinearCall& call, int64_t first, int mt, float* out) {
  const int real = int(std::min<int64_t>(mt, call.tokens - first));
  for (int64_t c = 0; c < call.weight->cols; c += 16) {
    for (int i = 0; i < mt; i++) {
      alignas(64) float lanes[16];
      store(lanes, i < real ? load_x(call, first + i, c) : F32{});
      for (int k = 0; k < 16; k++) out[(c + k) * mt + i] = lanes[k];
    }
  }
}

thread_local Scratch x_scratch, panel_scratch, sum_scratch;

template <typename Fn>
void for_any_kind(int kind, const Fn& fn) {
  if (kind == kF16Weight) fn.template operator()<kF16Weight>();
  else if (kind == kBF16Weight) fn.template operator()<kBF16Weight>();
  else if (kind == kF32Weight) fn.template operator()<kF32Weight>();
  else for_kind(kind, fn);
}

template <int K, int MT>
void few_tokens(const LinearCall& call, int threads) {
  const Weight& w = *call.weight;
  const int64_t tiles = (call.tokens + MT - 1) / MT;
  float* x = x_scratch.get<float>(tiles * MT * w.cols);
  for (int64_t i = 0; i < tiles; i++) interleave(call, i * MT, MT, x + i * MT * w.cols);
  share_groups(w, threads, [&](int64_t g) {
    for (int64_t i = 0; i < tiles; i++) group_direct<K, MT>(call, x + i * MT * w.cols, i * MT, g);
  });
}

constexpr int64_t kPanelBlocks = 64;  // columns of a panel, in blocks: 2048 x 32 rows of floats are 256 KiB

void many_tokens(const LinearCall& call, int threads) {
  const Weight& w = *call.weight;
  const int64_t blocks = num_blocks(w), pairs = (num_groups(w) + 1) / 2;
  const int64_t num_tiles = (call.tokens + kMaxTokens - 1) / kMaxTokens;
  float* x = x_scratch.get<float>(num_tiles * kMaxTokens * w.cols);
  const int64_t chunk = std::min<int64_t>(num_tiles, 32), chunks = (num_tiles + chunk - 1) / chunk;
  for_each(threads, num_tiles, 1,
           [&](int64_t i) { interleave(call, i * kMaxTokens, kMaxTokens, x + i * kMaxTokens * w.cols); });
  for_each(threads, chunks * pairs, 1, [&](int64_t item) {
    const int64_t pair = item % pairs, first = item / pairs * chunk, last = std::min(num_tiles, first + chunk);
    const bool second = 2 * pair + 1 < num_groups(w);
    float* panel = panel_scratch.get<float>(2 * kPanelBlocks * kBlock * kGroup);
    float* sums = sum_scratch.get<float>(chunk * kMaxTokens * 2 * kGroup);
    for (int64_t b = 0; b < blocks; b += kPanelBlocks) {
      const int64_t end = std::min(blocks, b + kPanelBlocks), depth = (end - b) * kBlock;
      dequantise_panel(w, 2 * pair, b, end, panel);
      if (second) dequantise_panel(w, 2 * pair + 1, b, end, panel + depth * kGroup);
      for (int64_t i = first; i < last; i++)
        multiply<kMaxTokens, 2, 1, kMaxTokens>(depth, x + (i * w.cols + b * kBlock) * kMaxTokens, panel, kGroup,
                                               second ? depth * kGroup : 0, sums + (i - first) * kMaxTokens * 2 * kGroup,
                                               2 * kGroup, b > 0);
    }
    for (int64_t t = first * kMaxTokens; t < std::min(last * kMaxTokens, call.tokens); t++) {
      const float* sum = sums + (t - first * kMaxTokens) * 2 * kGroup;
      write_result(call, t, 2 * pair * kGroup, load(sum));
      if (second) write_result(call, t, (2 * pair + 1) * kGroup, load(sum + kGroup));
    }
  });
}

}  // namespace

void linear_exact(const LinearCall& call, int threads) {
  if (call.tokens > 2 * kFewTokens) {
    many_tokens(call, threads);
    return;
  }
  for_any_kind(call.weight->kind, [&]<int K>() {
    if (call.tokens == 1) few_tokens<K, 1>(call, threads);
    else if (call.tokens <= 4) few_tokens<K, 4>(call, threads);
    else few_tokens<K, kFewTokens>(call, threads);
  });
}

}  // namespace bough

using namespace bough;

BOUGH_EXPORT void bough_packed_linear(const Weight* weight, const void* x, void* out, const float* bias, int64_t tokens,
                                      int64_t x_stride, int64_t out_stride, int32_t x_dtype, int32_t out_dtype,
                                      int32_t exact) {
  const LinearCall call{weight, x, out, bias, tokens, x_stride, out_stride, x_dtype, out_dtype};
  const double work = double(tokens) * double(weight->rows) * double(weight->cols);
  const int threads = work < 30000 ? 1 : usable_threads();
  if (!exact && !is_plain(weight->kind)) linear_int8(call, threads);
  else if (exact || weight->kind != kBF16Weight || tokens <= 4 || !linear_bf16(call, threads)) linear_exact(call, threads);
}
