// x W^T in fp32, from packed weights.

#include <algorithm>

#include "gemm.h"
#include "linear.h"
#include "parallel.h"

namespace bough {
namespace {

// Groups of rows side by side. Sums that don't wait for one another: an addition takes several cycles, and few tokens give few
// sums.
template <int MT>
constexpr int kSideBySide = MT == 1 ? 4 : MT <= 4 ? 2 : 1;

// acc[group][token] += 16 rows' weights of one block times MT tokens' activations; x[32][MT].
template <int K, int MT, int NG>
BOUGH_INLINE void add_block(F32 (*acc)[MT], const uint8_t* const* quants, const TileScales* s, const float* table,
                            const float* x) {
  auto add = [&](int column, int g, F32 weights) {
#pragma GCC unroll 8
    for (int m = 0; m < MT; m++) acc[g][m] += weights * x[column * MT + m];
  };
  if constexpr (is_plain(K)) {
#pragma GCC unroll 4
    for (int pair = 0; pair < 16; pair++) {
#pragma GCC unroll 4
      for (int g = 0; g < NG; g++) {
        if constexpr (K == kBF16Weight) {
          const U32 both = *reinterpret_cast<const U32u*>(quants[g] + 64 * pair);
          add(2 * pair, g, (F32)(both << 16));
          add(2 * pair + 1, g, (F32)(both & 0xffff0000u));
        } else {
          constexpr Dtype d = K == kF32Weight ? kF32 : kF16;
          const auto* in = reinterpret_cast<const typename Element<d>::type*>(quants[g]) + 32 * pair;
          add(2 * pair, g, load_as<d>(in));
          add(2 * pair + 1, g, load_as<d>(in + 16));
        }
      }
    }
  } else {
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      U8 v[NG];
#pragma GCC unroll 4
      for (int g = 0; g < NG; g++) v[g] = unpack_vector<K>(quants[g], j);
#pragma GCC unroll 4
      for (int c = 4 * j; c < 4 * j + 4; c++)
#pragma GCC unroll 4
        for (int g = 0; g < NG; g++) add(c, g, column_of<K>(table, v[g], s[g], c));
    }
  }
}

// MT tokens against a run of groups. Past the last group, the last one is computed again and its result dropped.
template <int K, int MT>
void groups_direct(const LinearCall& call, const float* x, int64_t first, int64_t start) {
  constexpr Traits t = kTraits[K];
  constexpr int NG = kSideBySide<MT>;
  const Weight& w = *call.weight;
  const int64_t last = num_groups(w) - 1, to_next_run = (NG - 1) * group_quants(w);
  const uint8_t* quants[NG];
  ScaleReader<K> readers[NG];
  for (int g = 0; g < NG; g++) {
    const int64_t group = std::min(start + g, last);
    quants[g] = w.quants + group * group_quants(w);
    readers[g] = ScaleReader<K>(w, group, 0);
  }
  F32 acc[NG][MT] = {};
  for (int64_t b = 0; b < num_blocks(w); b++) {
    TileScales scales[NG] = {};
#pragma GCC unroll 4
    for (int g = 0; g < NG; g++) {
      expect_weights<t.tile_bytes>(quants[g] + ((b + kAhead / t.tile_bytes < num_blocks(w)) ? 0 : to_next_run));
      if constexpr (!is_plain(K)) scales[g] = readers[g].next(b);
    }
    add_block<K, MT, NG>(acc, quants, scales, w.table, x + b * kBlock * MT);
#pragma GCC unroll 4
    for (int g = 0; g < NG; g++) quants[g] += t.tile_bytes;
  }
  for (int g = 0; g < NG && start + g <= last; g++)
    for (int i = 0; i < MT && first + i < call.tokens; i++) write_result(call, first + i, (start + g) * kGroup, acc[g][i]);
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

// All kinds but coded integers, whose exact products are seldom wanted: those pass through panels.
template <typename Fn>
void for_any_kind(int kind, const Fn& fn) {
  if (kind == kF16Weight) fn.template operator()<kF16Weight>();
  else if (kind == kBF16Weight) fn.template operator()<kBF16Weight>();
  else if (kind == kF32Weight) fn.template operator()<kF32Weight>();
  else if (kind == kTable4) fn.template operator()<kTable4>();
  else if (kind == kFloat8) fn.template operator()<kFloat8>();
  else for_gguf_kind(kind, fn);
}

template <int K, int MT>
void few_tokens(const LinearCall& call, int threads) {
  const Weight& w = *call.weight;
  const int64_t tiles = (call.tokens + MT - 1) / MT;
  float* x = x_scratch.get<float>(tiles * MT * w.cols);
  for (int64_t i = 0; i < tiles; i++) interleave(call, i * MT, MT, x + i * MT * w.cols);
  share_groups(w, threads, kSideBySide<MT>, [&](int64_t run) {
    for (int64_t i = 0; i < tiles; i++) groups_direct<K, MT>(call, x + i * MT * w.cols, i * MT, run * kSideBySide<MT>);
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
  const int kind = call.weight->kind;
  if (call.tokens > 2 * kFewTokens || (kTraits[kind].coded && is_integer(kind))) {
    many_tokens(call, threads);
    return;
  }
  for_any_kind(call.weight->kind, [&]<int K>() {
    if (call.tokens == 1) few_tokens<K, 1>(call, threads);
    else if (call.tokens <= 4) few_tokens<K, 4>(call, threads);
    else few_tokens<K, kFewTokens>(call, threads);
  });
}

void linear_any(const LinearCall& call, int threads, bool exact) {
  const int kind = call.weight->kind;
  if (is_rows(kind) && call.tokens <= 2 * kFewTokens) linear_rows(call, threads);
  else if (!exact && is_integer(kind)) linear_int8(call, threads);
  else if (exact || kind != kBF16Weight || !linear_bf16(call, threads)) linear_exact(call, threads);
}

}  // namespace bough

using namespace bough;

BOUGH_EXPORT void bough_packed_linear(const Weight* weight, const void* x, void* out, const float* bias, int64_t tokens,
                                      int64_t x_stride, int64_t out_stride, int32_t x_dtype, int32_t out_dtype,
                                      int32_t exact) {
  const LinearCall call{weight, x, out, bias, tokens, x_stride, out_stride, x_dtype, out_dtype};
  const double work = double(tokens) * double(weight->rows) * double(weight->cols);
  const int threads = work < 30000 ? 1 : usable_threads();
  linear_any(call, threads, exact);
}
