// x W^T for few tokens and weights as a checkpoint has them: rows of floats, each read once.

#include <algorithm>

#include "linear.h"
#include "parallel.h"
#include "simd.h"

namespace bough {
namespace {

struct RowsCall {
  const void *x, *weight, *bias;
  void* out;
  int64_t tokens, rows, cols, x_step, weight_step;
  float* floats = nullptr;  // results go there instead, `float_step` apart, with a bias of floats
  const float* float_bias = nullptr;
  int64_t float_step = 0;
};

constexpr int kRows = 4;

// kRows rows against MT tokens whose activations are floats already.
template <Dtype D, int MT>
void four_rows(const RowsCall& c, const float* x, int64_t first) {
  typedef typename Element<D>::type E;
  const E* w = static_cast<const E*>(c.weight);
  const E* rows[kRows];
  for (int r = 0; r < kRows; r++) rows[r] = w + std::min(first + r, c.rows - 1) * c.weight_step;
  F32 acc[kRows][MT] = {};
  const int64_t whole = c.cols / 16 * 16;
  for (int64_t k = 0; k < whole; k += 16) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      const F32 v = load_as<D>(rows[r] + k);
#pragma GCC unroll 4
      for (int t = 0; t < MT; t++) acc[r][t] += v * load(x + t * c.cols + k);
    }
  }
  for (int r = 0; r < kRows && first + r < c.rows; r++)
    for (int t = 0; t < MT; t++) {
      float sum = sum_lanes(acc[r][t]);
      for (int64_t k = whole; k < c.cols; k++) sum += get_as<D>(rows[r] + k) * x[t * c.cols + k];
      if (c.floats) {
        c.floats[t * c.float_step + first + r] = sum + (c.float_bias ? c.float_bias[first + r] : 0.0f);
        continue;
      }
      if (c.bias) sum += get_as<D>(static_cast<const E*>(c.bias) + first + r);
      put_as<D>(static_cast<E*>(c.out) + t * c.rows + first + r, sum);
    }
}

thread_local Scratch x_scratch;

template <Dtype D>
void all_rows(const RowsCall& c) {
  typedef typename Element<D>::type E;
  float* x = x_scratch.get<float>(c.tokens * c.cols);
  for (int64_t t = 0; t < c.tokens; t++)
    for (int64_t k = 0; k < c.cols; k++) x[t * c.cols + k] = get_as<D>(static_cast<const E*>(c.x) + t * c.x_step + k);
  const int64_t blocks = (c.rows + kRows - 1) / kRows;
  const int threads = c.tokens * c.rows * c.cols < 30000 ? 1 : usable_threads();
  const int64_t step = std::max<int64_t>(1, std::min<int64_t>(64, blocks / (4 * threads)));
  for_each(threads, blocks, step, [&](int64_t b) {
    switch (c.tokens) {
      case 1: four_rows<D, 1>(c, x, b * kRows); break;
      case 2: four_rows<D, 2>(c, x, b * kRows); break;
      case 3: four_rows<D, 3>(c, x, b * kRows); break;
      default: four_rows<D, 4>(c, x, b * kRows);
    }
  });
}

template <Dtype D>
void tiles_of_rows(const LinearCall& call, int threads) {
  const Weight& w = *call.weight;
  const float* x = static_cast<const float*>(call.x);
  const int64_t blocks = (w.rows + kRows - 1) / kRows;
  for_each(threads, blocks, 16, [&](int64_t b) {
    for (int64_t t = 0; t < call.tokens; t += 4) {
      RowsCall c{nullptr, w.quants, nullptr, nullptr, std::min<int64_t>(4, call.tokens - t), w.rows, w.cols, w.cols, w.cols};
      c.floats = static_cast<float*>(call.out) + t * call.out_stride;
      c.float_bias = call.bias;
      c.float_step = call.out_stride;
      const float* from = x + t * call.x_stride;
      switch (c.tokens) {
        case 1: four_rows<D, 1>(c, from, b * kRows); break;
        case 2: four_rows<D, 2>(c, from, b * kRows); break;
        case 3: four_rows<D, 3>(c, from, b * kRows); break;
        default: four_rows<D, 4>(c, from, b * kRows);
      }
    }
  });
}

}  // namespace

// Floats in, floats out; a token's activations lie `cols` apart.
void linear_rows(const LinearCall& call, int threads) {
  if (call.weight->kind == kRowsF32) tiles_of_rows<kF32>(call, threads);
  else if (call.weight->kind == kRowsBF16) tiles_of_rows<kBF16>(call, threads);
  else tiles_of_rows<kF16>(call, threads);
}

}  // namespace bough

using namespace bough;

// At most 4 tokens. bias [rows] may be null.
BOUGH_EXPORT void bough_linear_rows(const void* x, const void* weight, const void* bias, void* out, int64_t tokens, int64_t rows,
                                    int64_t cols, int64_t x_step, int64_t weight_step, int32_t dtype) {
  const RowsCall c{x, weight, bias, out, tokens, rows, cols, x_step, weight_step};
  if (dtype == kF32) all_rows<kF32>(c);
  else if (dtype == kBF16) all_rows<kBF16>(c);
  else all_rows<kF16>(c);
}
