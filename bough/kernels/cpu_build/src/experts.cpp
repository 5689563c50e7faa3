// A layer's experts: tokens are gathered by expert, each expert's two products run on its tokens, and every token adds up what
// its experts gave, in the order in which it chose them.
//
// Work is handed out in pieces of (expert, some rows), three times: gate and up with the activation, down, the sums. So a
// decode step with few experts keeps all threads busy, and threads meet three times a layer however many experts there are.

#include <algorithm>
#include <cmath>
#include <vector>

#include "linear.h"
#include "parallel.h"

namespace bough {

struct Experts {  // mirrored by a ctypes structure
  const Weight* const* gate_up;  // [experts], gate above up: 2 * inner rows
  const Weight* const* down;     // [experts], [width, inner]
  const float* gate_up_bias;     // [experts, 2 * inner] or null
  const float* down_bias;        // [experts, width] or null
  const int64_t* gate_up_order;  // [experts, its columns] or null: which input each column multiplies; below 0: none
  const int64_t* down_order;
  int64_t experts, width, inner;
  int32_t activation;  // 0: silu, 1: tanh gelu, 2: clamped
  int32_t exact;
  float alpha, limit;  // of the clamped one
};

namespace {

struct Chosen {  // an expert that some token has chosen
  int64_t expert, first, count;  // its pairs
};

// Rows [16 from, 16 to) of a weight, as a weight.
Weight rows_of(const Weight& w, int64_t from, int64_t to) {
  Weight part = w;
  part.quants += from * group_quants(w);
  part.scales = w.scales ? w.scales + from * group_scales(w) : nullptr;
  part.row_scale = w.row_scale ? w.row_scale + from * kGroup : nullptr;
  part.rows = std::min(w.rows, to * kGroup) - from * kGroup;
  return part;
}

// out[tokens][stride] = x[tokens][cols] times some groups of rows; floats in, floats out.
void multiply_rows(const Weight& w, int64_t from, int64_t to, const float* x, float* out, const float* bias, int64_t tokens,
                   int64_t out_stride, bool exact) {
  const Weight part = rows_of(w, from, to);
  const LinearCall call{&part, x, out, bias ? bias + from * kGroup : nullptr, tokens, w.cols, out_stride, kF32, kF32};
  linear_any(call, 1, exact);
}

BOUGH_INLINE F32 activated(const Experts& e, F32 gate, F32 up) {
  if (e.activation == 0) return gate * sigmoid(gate) * up;
  if (e.activation == 1) return gate * sigmoid(gate * (1.5957691216057308f + 0.07135481282552f * gate * gate)) * up;
  const F32 limit = splat(e.limit);
  gate = minimum(gate, limit);
  up = maximum(minimum(up, limit), -limit);
  return (up + 1.0f) * gate * sigmoid(gate * e.alpha);
}

thread_local Scratch x_scratch, inner_scratch, order_scratch, part_scratch, slice_scratch;

struct Piece {
  int32_t chosen;
  int32_t from, to;  // groups of rows
};

// Groups of rows of all chosen experts, in pieces of about the same work, the largest experts first.
std::vector<Piece> pieces_of(const std::vector<Chosen>& chosen, int64_t groups, int threads) {
  int64_t tokens = 0;
  for (const Chosen& c : chosen) tokens += c.count;
  std::vector<Piece> pieces;
  const int64_t least = std::min<int64_t>(groups, 8);  // 128 rows: rounding activations once more costs little of that
  const double share = double(tokens * groups) / (4.0 * threads);
  for (size_t i = 0; i < chosen.size(); i++) {
    const int64_t step = std::max<int64_t>(least, int64_t(std::ceil(share / double(chosen[i].count))));
    for (int64_t from = 0; from < groups; from += step)
      pieces.push_back({int32_t(i), int32_t(from), int32_t(std::min(groups, from + step))});
  }
  return pieces;
}

// One token's inputs as floats, in the order in which a weight's columns want them.
void gather(const void* x, int32_t dtype, int64_t step, int64_t token, const int64_t* order, int64_t width, float* out) {
  auto copy = [&]<Dtype D>() {
    const auto* in = static_cast<const typename Element<D>::type*>(x) + token * step;
    int64_t i = 0;
    if (order) {
      for (; i < width; i++) out[i] = order[i] < 0 ? 0.0f : get_as<D>(in + order[i]);
      return;
    }
    for (; i + 16 <= width; i += 16) store(out + i, load_as<D>(in + i));
    for (; i < width; i++) out[i] = get_as<D>(in + i);
  };
  if (dtype == kF32) copy.template operator()<kF32>();
  else if (dtype == kBF16) copy.template operator()<kBF16>();
  else copy.template operator()<kF16>();
}

void write_token(const float* sum, int64_t width, int32_t dtype, void* out, int64_t at) {
  for (int64_t i = 0; i < width; i += 16) {
    const int64_t left = width - i;
    if (left >= 16) {
      const F32 v = load(sum + i);
      if (dtype == kF32) store(static_cast<float*>(out) + at + i, v);
      else if (dtype == kBF16) store_bfloat(static_cast<uint16_t*>(out) + at + i, v);
      else store_half(static_cast<uint16_t*>(out) + at + i, v);
      continue;
    }
    for (int64_t r = i; r < width; r++) {
      if (dtype == kF32) static_cast<float*>(out)[at + r] = sum[r];
      else if (dtype == kBF16) static_cast<uint16_t*>(out)[at + r] = float_to_bfloat(sum[r]);
      else static_cast<uint16_t*>(out)[at + r] = float_to_half(sum[r]);
    }
  }
}

}  // namespace
}  // namespace bough

using namespace bough;

// out [tokens, width] of x [tokens, width]; ids [tokens, per_token] (others than 0 .. experts - 1 add nothing), weights beside
// them. The inner width must be a multiple of 16 and all weights' columns of 32.
BOUGH_EXPORT void bough_experts(const Experts* call, const void* x, int64_t x_step, const int32_t* ids, const float* weights,
                                void* out, int64_t tokens, int64_t per_token, int32_t dtype) {
  const Experts& e = *call;
  const int64_t pairs = tokens * per_token;
  // Pairs sorted by expert; those of one expert keep their order.
  std::vector<int64_t> starts(e.experts + 1, 0), place(pairs, -1), token_of, expert_of;
  for (int64_t p = 0; p < pairs; p++)
    if (ids[p] >= 0 && ids[p] < e.experts) starts[ids[p] + 1]++;
  std::vector<Chosen> chosen;
  for (int64_t i = 0; i < e.experts; i++) {
    if (starts[i + 1]) chosen.push_back({i, starts[i], starts[i + 1]});
    starts[i + 1] += starts[i];
  }
  for (Chosen& c : chosen) c.first = starts[c.expert];
  const int64_t real = starts[e.experts];
  token_of.resize(real);
  expert_of.resize(real);
  for (int64_t p = 0; p < pairs; p++)
    if (ids[p] >= 0 && ids[p] < e.experts) {
      place[p] = starts[ids[p]]++;
      token_of[place[p]] = p / per_token;
      expert_of[place[p]] = ids[p];
    }
  std::stable_sort(chosen.begin(), chosen.end(), [](const Chosen& a, const Chosen& b) { return a.count > b.count; });
  const double work = 3.0 * double(real) * double(e.inner) * double(e.width);
  const int threads = work < 30000 ? 1 : usable_threads();
  if (real == 0) {
    std::memset(out, 0, tokens * e.width * (dtype == kF32 ? 4 : 2));
    return;
  }
  const int64_t cols = e.gate_up[0]->cols, inner_cols = e.down[0]->cols;
  float* gathered = x_scratch.get<float>(real * cols);
  float* inner = inner_scratch.get<float>(real * e.inner);
  float* parts = part_scratch.get<float>(real * e.width);
  float* ordered = e.down_order ? order_scratch.get<float>(real * inner_cols) : inner;
  for_each(threads, real, 16, [&](int64_t i) {
    const int64_t* order = e.gate_up_order ? e.gate_up_order + expert_of[i] * cols : nullptr;
    gather(x, dtype, x_step, token_of[i], order, cols, gathered + i * cols);
  });
  const int64_t inner_groups = e.inner / kGroup, width_groups = (e.width + kGroup - 1) / kGroup;
  const std::vector<Piece> first = pieces_of(chosen, inner_groups, threads);
  for_each(threads, int64_t(first.size()), 1, [&](int64_t i) {
    const Piece& piece = first[i];
    const Chosen& c = chosen[piece.chosen];
    const Weight& w = *e.gate_up[c.expert];
    const float* bias = e.gate_up_bias ? e.gate_up_bias + c.expert * 2 * e.inner : nullptr;
    const int64_t rows = (piece.to - piece.from) * kGroup;
    float* both = slice_scratch.get<float>(2 * c.count * rows);
    const float* in = gathered + c.first * cols;
    multiply_rows(w, piece.from, piece.to, in, both, bias, c.count, rows, e.exact);
    multiply_rows(w, inner_groups + piece.from, inner_groups + piece.to, in, both + c.count * rows, bias, c.count, rows, e.exact);
    for (int64_t t = 0; t < c.count; t++)
      for (int64_t r = 0; r < rows; r += kGroup) {
        const float *gate = both + t * rows + r, *up = gate + c.count * rows;
        store(inner + (c.first + t) * e.inner + piece.from * kGroup + r, activated(e, load(gate), load(up)));
      }
  });
  if (e.down_order)
    for_each(threads, real, 16, [&](int64_t i) {
      gather(inner, kF32, e.inner, i, e.down_order + expert_of[i] * inner_cols, inner_cols, ordered + i * inner_cols);
    });
  const std::vector<Piece> second = pieces_of(chosen, width_groups, threads);
  for_each(threads, int64_t(second.size()), 1, [&](int64_t i) {
    const Piece& piece = second[i];
    const Chosen& c = chosen[piece.chosen];
    const float* bias = e.down_bias ? e.down_bias + c.expert * e.width : nullptr;
    multiply_rows(*e.down[c.expert], piece.from, piece.to, ordered + c.first * inner_cols,
                  parts + c.first * e.width + piece.from * kGroup, bias, c.count, e.width, e.exact);
  });
  for_each(threads, tokens, 8, [&](int64_t t) {
    float* sum = slice_scratch.get<float>(e.width);
    std::fill(sum, sum + e.width, 0.0f);
    for (int64_t k = 0; k < per_token; k++) {
      const int64_t at = place[t * per_token + k];
      if (at < 0) continue;
      const float weight = weights[t * per_token + k];
      const float* part = parts + at * e.width;
      int64_t i = 0;
      for (; i + 16 <= e.width; i += 16) store(sum + i, fused(load(part + i), splat(weight), load(sum + i)));
      for (; i < e.width; i++) sum[i] += part[i] * weight;
    }
    write_token(sum, e.width, dtype, out, t * e.width);
  });
}
