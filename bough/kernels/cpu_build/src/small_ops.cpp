// The small operations between matrix products: norms, rotary embedding, gated activations. Arithmetic is fp32.

#include <cmath>

#include "exports.h"
#include "parallel.h"
#include "simd.h"

namespace bough {
namespace {

template <typename Fn>
void for_dtype(int32_t dtype, const Fn& fn) {
  if (dtype == kF32) fn.template operator()<kF32>();
  else if (dtype == kBF16) fn.template operator()<kBF16>();
  else fn.template operator()<kF16>();
}

int threads_for(int64_t elements) { return elements >= 65536 ? usable_threads() : 1; }

float weight_at(const void* weight, int32_t dtype, int64_t i) {
  if (dtype == kF32) return static_cast<const float*>(weight)[i];
  const uint16_t raw = static_cast<const uint16_t*>(weight)[i];
  return dtype == kBF16 ? bfloat_to_float(raw) : half_to_float(raw);
}

BOUGH_INLINE F32 weights_at(const void* weight, int32_t dtype, int64_t i) {
  if (dtype == kF32) return load(static_cast<const float*>(weight) + i);
  const uint16_t* raw = static_cast<const uint16_t*>(weight) + i;
  return dtype == kBF16 ? load_bfloat(raw) : load_half(raw);
}

template <Dtype D>
void norm_row(const typename Element<D>::type* x, const void* weight, int32_t weight_dtype, typename Element<D>::type* out,
              int64_t width, float eps, float offset) {
  const int64_t whole = width / 16 * 16;
  F32 squares{};
  for (int64_t i = 0; i < whole; i += 16) {
    const F32 v = load_as<D>(x + i);
    squares += v * v;
  }
  float sum = sum_lanes(squares);
  for (int64_t i = whole; i < width; i++) sum += get_as<D>(x + i) * get_as<D>(x + i);
  const float inverse = 1.0f / std::sqrt(sum / float(width) + eps);
  for (int64_t i = 0; i < whole; i += 16)
    store_as<D>(out + i, load_as<D>(x + i) * inverse * (weights_at(weight, weight_dtype, i) + offset));
  for (int64_t i = whole; i < width; i++)
    put_as<D>(out + i, get_as<D>(x + i) * inverse * (weight_at(weight, weight_dtype, i) + offset));
}

template <Dtype D>
void add_row(const typename Element<D>::type* x, const typename Element<D>::type* y, typename Element<D>::type* out, int64_t width) {
  const int64_t whole = width / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16) store_as<D>(out + i, load_as<D>(x + i) + load_as<D>(y + i));
  for (int64_t i = whole; i < width; i++) put_as<D>(out + i, get_as<D>(x + i) + get_as<D>(y + i));
}

template <Dtype D>
void rotate_head(const typename Element<D>::type* in, typename Element<D>::type* out, const float* cos_sin, const Rope& r) {
  typedef typename Element<D>::type E;
  const int half = r.rotated / 2;
  const float *cosine = cos_sin, *sine = cos_sin + half;
  if (r.interleaved) {
    for (int i = 0; i < half; i++) {
      const float a = get_as<D>(in + 2 * i), b = get_as<D>(in + 2 * i + 1);
      put_as<D>(out + 2 * i, a * cosine[i] - b * sine[i]);
      put_as<D>(out + 2 * i + 1, b * cosine[i] + a * sine[i]);
    }
  } else {
    int i = 0;
    for (; i + 16 <= half; i += 16) {
      const F32 a = load_as<D>(in + i), b = load_as<D>(in + half + i), c = load(cosine + i), s = load(sine + i);
      store_as<D>(out + i, a * c - b * s);
      store_as<D>(out + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
      const float a = get_as<D>(in + i), b = get_as<D>(in + half + i);
      put_as<D>(out + i, a * cosine[i] - b * sine[i]);
      put_as<D>(out + half + i, b * cosine[i] + a * sine[i]);
    }
  }
  if (r.rotated < r.dim && in != out) std::memcpy(out + r.rotated, in + r.rotated, (r.dim - r.rotated) * sizeof(E));
}

template <Dtype D>
void rope_token(const Rope& r, int64_t t) {
  typedef typename Element<D>::type E;
  const float* cos_sin = r.cos_sin + r.positions[t] * r.rotated;
  for (int side = 0; side < 2; side++) {
    const int count = side ? r.kv_heads : r.heads;
    const E* from = static_cast<const E*>(side ? r.k : r.q) + t * (side ? r.k_token : r.q_token);
    E* to = static_cast<E*>(side ? r.k_out : r.q_out) + t * count * r.dim;
    const void* norm = side ? r.k_norm : r.q_norm;
    for (int h = 0; h < count; h++) {
      const E* in = from + h * (side ? r.k_head : r.q_head);
      E* out = to + int64_t(h) * r.dim;
      if (norm) {
        norm_row<D>(in, norm, r.norm_dtype, out, r.dim, r.eps, r.offset);
        rotate_head<D>(out, out, cos_sin, r);
      } else {
        rotate_head<D>(in, out, cos_sin, r);
      }
    }
  }
}

template <Dtype D, bool Silu>
void gated_row(const typename Element<D>::type* x, typename Element<D>::type* out, int64_t width) {
  auto gate = [](F32 v) {
    if constexpr (Silu) return v * sigmoid(v);
    else return v * sigmoid(v * (1.5957691216057308f + 0.07135481282552f * v * v));  // 2 sqrt(2 / pi) (v + 0.044715 v^3)
  };
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) store_as<D>(out + i, gate(load_as<D>(x + i)) * load_as<D>(x + width + i));
  for (; i < width; i++) put_as<D>(out + i, gate(splat(get_as<D>(x + i)))[0] * get_as<D>(x + width + i));
}

}  // namespace
}  // namespace bough

using namespace bough;

// out = norm(x), or, with a residual: total = x + residual, out = norm(total).
BOUGH_EXPORT void bough_rms_norm(const void* x, int64_t x_step, const void* residual, int64_t residual_step, const void* weight,
                                 void* out, void* total, int64_t rows, int64_t width, float eps, float offset, int32_t dtype,
                                 int32_t weight_dtype) {
  for_dtype(dtype, [&]<Dtype D>() {
    typedef typename Element<D>::type E;
    for_each(threads_for(rows * width), rows, 16, [&](int64_t r) {
      const E* in = static_cast<const E*>(x) + r * x_step;
      if (residual) {
        E* sum = static_cast<E*>(total) + r * width;
        add_row<D>(in, static_cast<const E*>(residual) + r * residual_step, sum, width);
        in = sum;
      }
      norm_row<D>(in, weight, weight_dtype, static_cast<E*>(out) + r * width, width, eps, offset);
    });
  });
}

BOUGH_EXPORT void bough_rope(const Rope* call) {
  const Rope r = *call;
  for_dtype(r.dtype, [&]<Dtype D>() {
    for_each(threads_for(r.tokens * (r.heads + r.kv_heads) * r.dim), r.tokens, 16, [&](int64_t t) { rope_token<D>(r, t); });
  });
}

BOUGH_EXPORT void bough_gated(const void* x, int64_t x_step, void* out, int64_t rows, int64_t width, int32_t dtype, int32_t silu) {
  for_dtype(dtype, [&]<Dtype D>() {
    typedef typename Element<D>::type E;
    for_each(threads_for(rows * width), rows, 8, [&](int64_t r) {
      const E* in = static_cast<const E*>(x) + r * x_step;
      E* to = static_cast<E*>(out) + r * width;
      if (silu) gated_row<D, true>(in, to, width);
      else gated_row<D, false>(in, to, width);
    });
  });
}
