// The functions that Python calls, for other kernels that call them too.
#pragma once

#include "attention.h"
#include "packed.h"
#include "simd.h"

namespace bough {

struct Rope {  // mirrored by a ctypes structure
  const void *q, *k;
  void *q_out, *k_out;  // [tokens, heads, dim]
  const int64_t* positions;
  const float* cos_sin;  // [positions, rotated]
  const void *q_norm, *k_norm;  // or null
  int64_t tokens, q_token, q_head, k_token, k_head;
  int32_t heads, kv_heads, dim, rotated, interleaved, dtype, norm_dtype;
  float eps, offset;
};

}  // namespace bough

BOUGH_EXPORT void bough_rms_norm(const void* x, int64_t x_step, const void* residual, int64_t residual_step, const void* weight,
                                 void* out, void* total, int64_t rows, int64_t width, float eps, float offset, int32_t dtype,
                                 int32_t weight_dtype);
BOUGH_EXPORT void bough_rope(const bough::Rope* call);
BOUGH_EXPORT void bough_gated(const void* x, int64_t x_step, void* out, int64_t rows, int64_t width, int32_t dtype, int32_t silu);
BOUGH_EXPORT void bough_packed_linear(const bough::Weight* weight, const void* x, void* out, const float* bias, int64_t tokens,
                                      int64_t x_stride, int64_t out_stride, int32_t x_dtype, int32_t out_dtype,
                                      int32_t exact);
BOUGH_EXPORT void bough_attention(const bough::Step* step, const bough::Layer* layer);
BOUGH_EXPORT void bough_attention_rope(const bough::Step* step, const bough::Layer* layer, const bough::Rope* rope);
