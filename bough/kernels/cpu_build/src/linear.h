// What the linear kernels share: activations in, a small tile of results out.
//
// A token's results are the same bits in any company: every sum goes over the columns in order, by itself, however many tokens
// and rows are taken side by side.
#pragma once

#include "packed.h"
#include "parallel.h"
#include "simd.h"

namespace bough {

struct LinearCall {
  const Weight* weight;
  const void* x;      // [tokens, cols]
  void* out;          // [tokens, rows]
  const float* bias;  // [rows] or null
  int64_t tokens, x_stride, out_stride;
  int32_t x_dtype, out_dtype;
};

constexpr int kMaxTokens = kWide ? 12 : 4;  // of a register tile
constexpr int kFewTokens = kWide ? 8 : 4;    // of a tile that weights pass by in registers, straight from memory

// Tokens of the next register tile: as many as are left, in sizes that kernels exist for.
inline int tile_tokens(int64_t left) {
  for (int size : {1, 2, 4, 8})
    if (left <= size && size < kMaxTokens) return size;
  return kMaxTokens;
}

constexpr int64_t kSmallMatrix = 16 << 20;  // bytes

// body(i) for all groups of rows, or for all runs of `side_by_side` groups, whose weights pass by once. A thread takes
// few enough at a time to share the work evenly, and enough to stream from memory. Of a small matrix, every thread reads a span of
// its own; of a large one, all threads stay close together, since what is left of it in the shared cache lies in one piece.
template <typename Body>
inline void share_groups(const Weight& w, int threads, int64_t side_by_side, const Body& body) {
  const int64_t runs = (num_groups(w) + side_by_side - 1) / side_by_side, most = 64 / side_by_side;
  const int64_t even = runs / (8 * threads), step = even < 1 ? 1 : even > most ? most : even;
  if (num_groups(w) * group_quants(w) <= kSmallMatrix) for_spans(threads, runs, step, body);
  else for_each(threads, runs, step, body);
}

// fn.template operator()<MT>() for a tile size at run time.
template <typename Fn>
BOUGH_INLINE void for_tile(int mt, const Fn& fn) {
  if (mt == kMaxTokens) fn.template operator()<kMaxTokens>();
  else if (mt == 1) fn.template operator()<1>();
  else if (mt == 2) fn.template operator()<2>();
  else if constexpr (kWide) {
    if (mt == 4) fn.template operator()<4>();
    else fn.template operator()<8>();
  }
}

constexpr int kAhead = 4096;  // bytes

// Asks for weights before they are needed, a tile at a time. Wider tiles are sequential enough for the processor's own
// foresight, which this would only disturb.
template <int Bytes>
BOUGH_INLINE void expect_weights(const uint8_t* tile) {
  if constexpr (Bytes < 512)
    for (int line = 0; line < Bytes; line += 64) __builtin_prefetch(tile + kAhead + line);
}

BOUGH_INLINE F32 load_x(const LinearCall& call, int64_t token, int64_t col) {
  const int64_t at = token * call.x_stride + col;
  if (call.x_dtype == kF32) return load(static_cast<const float*>(call.x) + at);
  if (call.x_dtype == kBF16) return load_bfloat(static_cast<const uint16_t*>(call.x) + at);
  return load_half(static_cast<const uint16_t*>(call.x) + at);
}

// Sixteen results of one token, rows from `row` on.
BOUGH_INLINE void write_result(const LinearCall& call, int64_t token, int64_t row, F32 v) {
  const int64_t rows = call.weight->rows, at = token * call.out_stride + row;
  if (call.weight->row_scale) v *= load(call.weight->row_scale + row);
  if (row + kGroup <= rows) {
    if (call.bias) v += load(call.bias + row);
    if (call.out_dtype == kF32) store(static_cast<float*>(call.out) + at, v);
    else if (call.out_dtype == kBF16) store_bfloat(static_cast<uint16_t*>(call.out) + at, v);
    else store_half(static_cast<uint16_t*>(call.out) + at, v);
    return;
  }
  for (int64_t r = 0; r < rows - row; r++) {
    const float y = v[r] + (call.bias ? call.bias[row + r] : 0.0f);
    if (call.out_dtype == kF32) static_cast<float*>(call.out)[at + r] = y;
    else if (call.out_dtype == kBF16) static_cast<uint16_t*>(call.out)[at + r] = float_to_bfloat(y);
    else static_cast<uint16_t*>(call.out)[at + r] = float_to_half(y);
  }
}

void dequantise_panel(const Weight& w, int64_t group, int64_t first, int64_t last, float* out);
void linear_int8(const LinearCall& call, int threads);
void linear_exact(const LinearCall& call, int threads);
// False where the processor can't.
bool linear_bf16(const LinearCall& call, int threads);
// For weights that are rows of floats, and few tokens.
void linear_rows(const LinearCall& call, int threads);
// By the kernel for the weight's kind. `exact`: activations are not rounded.
void linear_any(const LinearCall& call, int threads, bool exact);

}  // namespace bough
