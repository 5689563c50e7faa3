// x W^T with activations rounded to 8 bits, a scale for each 32 of them; integer dot products, floats across blocks.

#include <algorithm>

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

template <int MT>
void quantise_tile(const LinearCall& call, int64_t first, ActBlock<MT>* out) {
  const Traits& t = kTraits[call.weight->kind];
  const int64_t blocks = num_blocks(*call.weight);
  const int real = int(std::min<int64_t>(MT, call.tokens - first));
  for (int64_t b = 0; b < blocks; b++) {
    ActBlock<MT>& a = out[b];
    for (int i = 0; i < real; i++) {
      const F32 lo = load_x(call, first + i, b * kBlock), hi = load_x(call, first + i, b * kBlock + 16);
      const float top = max_lanes(maximum(absolute(lo), absolute(hi)));
      const float inverse = top > 0 ? 127.0f / top : 0.0f;
      const I32 qlo = round_to_int(lo * inverse), qhi = round_to_int(hi * inverse);
      store_i8(a.q[i], qlo);
      store_i8(a.q[i] + 16, qhi);
      const int sum_lo = int(sum_lanes(to_float(qlo))), sum_hi = int(sum_lanes(to_float(qhi)));
      a.d[i] = top / 127.0f;
      a.dsum[i] = a.d[i] * float(sum_lo + sum_hi);
      a.off[0][i] = -t.offset * (t.half_blocks ? sum_lo : sum_lo + sum_hi);
      a.off[1][i] = -t.offset * sum_hi;
    }
    for (int i = real; i < MT; i++) {
      std::memset(a.q[i], 0, kBlock);
      a.d[i] = a.dsum[i] = 0;
      a.off[0][i] = a.off[1][i] = 0;
    }
  }
}

// Adds one block to the results of MT tokens.
template <int MT, bool HasMin, bool Halves>
BOUGH_INLINE void add_block(F32* acc, const U8* w, const TileScales& s, const ActBlock<MT>& a) {
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

// One group of rows, few tokens: weights go from memory through registers, once.
template <int K, int MT>
void group_direct(const LinearCall& call, const ActBlock<MT>* act, int64_t first, int64_t group) {
  constexpr Traits t = kTraits[K];
  const Weight& w = *call.weight;
  const uint8_t* quants = w.quants + group * group_quants(w);
  ScaleReader<K> scales(w.scales + group * group_scales(w), 0);
  F32 acc[MT] = {};
  for (int64_t b = 0; b < num_blocks(w); b++, quants += t.tile_bytes) {
    U8 v[8];
    unpack_tile<K>(quants, v);
    expect_weights<t.tile_bytes>(quants);
    add_block<MT, t.has_min, t.half_blocks>(acc, v, scales.next(b), act[b]);
  }
  for (int i = 0; i < MT && first + i < call.tokens; i++) write_result(call, first + i, group * kGroup, acc[i]);
}

// One group of rows unpacked once, then used for many tiles of tokens.
struct Panel {
  U8* quants;          // [blocks][8]
  TileScales* scales;  // [blocks]
};

template <int K>
void unpack_group(const Weight& w, int64_t group, const Panel& out) {
  const uint8_t* quants = w.quants + group * group_quants(w);
  ScaleReader<K> scales(w.scales + group * group_scales(w), 0);
  for (int64_t b = 0; b < num_blocks(w); b++) {
    unpack_tile<K>(quants + b * kTraits[K].tile_bytes, out.quants + 8 * b);
    out.scales[b] = scales.next(b);
  }
}

template <int MT, bool HasMin, bool Halves>
void tile_from_panel(const LinearCall& call, const Panel& panel, const ActBlock<MT>* act, int64_t first, int64_t group) {
  F32 acc[MT] = {};
  const int64_t blocks = num_blocks(*call.weight);
  for (int64_t b = 0; b < blocks; b++) add_block<MT, HasMin, Halves>(acc, panel.quants + 8 * b, panel.scales[b], act[b]);
  const int real = int(std::min<int64_t>(MT, call.tokens - first));
  for (int i = 0; i < real; i++) write_result(call, first + i, group * kGroup, acc[i]);
}

struct TokenTile {
  int64_t first;
  int size;
  uint8_t* act;
};

thread_local Scratch act_scratch, panel_scratch;

template <int K, int MT>
void few_tokens(const LinearCall& call, int threads) {
  const Weight& w = *call.weight;
  const int64_t blocks = num_blocks(w), tiles = (call.tokens + MT - 1) / MT;
  ActBlock<MT>* act = act_scratch.get<ActBlock<MT>>(tiles * blocks);
  for (int64_t i = 0; i < tiles; i++) quantise_tile<MT>(call, i * MT, act + i * blocks);
  share_groups(w, threads, 1, [&](int64_t g) {
    for (int64_t i = 0; i < tiles; i++) group_direct<K, MT>(call, act + i * blocks, i * MT, g);
  });
}

void many_tokens(const LinearCall& call, int threads) {
  const Weight& w = *call.weight;
  const int64_t blocks = num_blocks(w), groups = num_groups(w);
  // Tiles of tokens, in chunks whose activations stay in the second-level cache while all rows pass by.
  const int64_t num_tiles = (call.tokens + kMaxTokens - 1) / kMaxTokens;
  const size_t tile_bytes = act_bytes(kMaxTokens) * blocks;
  uint8_t* act = act_scratch.get<uint8_t>(num_tiles * tile_bytes);
  const int64_t chunk = std::max<int64_t>(1, std::min<int64_t>(num_tiles, (512 << 10) / int64_t(tile_bytes)));
  const int64_t chunks = (num_tiles + chunk - 1) / chunk;
  auto tile = [&](int64_t i) { return TokenTile{i * kMaxTokens, tile_tokens(call.tokens - i * kMaxTokens), act + i * tile_bytes}; };
  for_each(threads, num_tiles, 1, [&](int64_t i) {
    const TokenTile t = tile(i);
    for_tile(t.size, [&]<int MT>() { quantise_tile<MT>(call, t.first, reinterpret_cast<ActBlock<MT>*>(t.act)); });
  });
  for_each(threads, chunks * groups, 1, [&](int64_t item) {
    const int64_t group = item % groups, first = item / groups * chunk;
    uint8_t* memory = panel_scratch.get<uint8_t>(blocks * (512 + sizeof(TileScales)));
    const Panel panel{reinterpret_cast<U8*>(memory), reinterpret_cast<TileScales*>(memory + 512 * blocks)};
    for_kind(w.kind, [&]<int K>() {
      unpack_group<K>(w, group, panel);
      for (int64_t i = first; i < std::min(num_tiles, first + chunk); i++) {
        const TokenTile t = tile(i);
        for_tile(t.size, [&]<int MT>() {
          tile_from_panel<MT, kTraits[K].has_min, kTraits[K].half_blocks>(
              call, panel, reinterpret_cast<const ActBlock<MT>*>(t.act), t.first, group);
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
  for_kind(call.weight->kind, [&]<int K>() {
    if (call.tokens == 1) few_tokens<K, 1>(call, threads);
    else if (kWide && call.tokens == 2) few_tokens<K, kWide ? 2 : 1>(call, threads);
    else if (call.tokens <= 4) few_tokens<K, 4>(call, threads);
    else few_tokens<K, kFewTokens>(call, threads);
  });
}

}  // namespace bough
