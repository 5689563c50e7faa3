// A register tile of a matrix product in fp32.
#pragma once

#include "simd.h"

namespace bough {

// acc[m][n] += sum over k of a(m, k) * b(k, 16 n ..), for MT rows and NV vectors of columns, k after k.
// a(m, k) is a[m * AM + k * AK]; row k of vector n of b is b + k * b_step + n * b_vector.
template <int MT, int NV, int AM, int AK>
BOUGH_INLINE void accumulate(int64_t depth, const float* a, const float* b, int64_t b_step, int64_t b_vector, F32 (*acc)[NV]) {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  for (int n = 0; n < NV; n++) {  // the compiler would keep vectors of two registers in memory
    __m256 sum[MT][2];
#pragma GCC unroll 12
    for (int m = 0; m < MT; m++) std::memcpy(sum[m], &acc[m][n], 64);
    for (int64_t k = 0; k < depth; k++) {
      const float* row = b + k * b_step + n * b_vector;
      const __m256 low = _mm256_loadu_ps(row), high = _mm256_loadu_ps(row + 8);
#pragma GCC unroll 12
      for (int m = 0; m < MT; m++) {
        const __m256 x = _mm256_broadcast_ss(a + m * AM + k * AK);
        sum[m][0] = _mm256_fmadd_ps(low, x, sum[m][0]);
        sum[m][1] = _mm256_fmadd_ps(high, x, sum[m][1]);
      }
    }
#pragma GCC unroll 12
    for (int m = 0; m < MT; m++) std::memcpy(&acc[m][n], sum[m], 64);
  }
#else
  for (int64_t k = 0; k < depth; k++) {
    F32 row[NV];
#pragma GCC unroll 4
    for (int n = 0; n < NV; n++) row[n] = load(b + k * b_step + n * b_vector);
#pragma GCC unroll 12
    for (int m = 0; m < MT; m++) {
      const float x = a[m * AM + k * AK];
#pragma GCC unroll 4
      for (int n = 0; n < NV; n++) acc[m][n] += row[n] * x;
    }
  }
#endif
}

// c[m][16 n ..] (+)= that sum.
template <int MT, int NV, int AM, int AK>
BOUGH_INLINE void multiply(int64_t depth, const float* a, const float* b, int64_t b_step, int64_t b_vector, float* c,
                           int64_t c_step, bool add) {
  F32 acc[MT][NV];
#pragma GCC unroll 12
  for (int m = 0; m < MT; m++)
#pragma GCC unroll 4
    for (int n = 0; n < NV; n++) acc[m][n] = add ? load(c + m * c_step + 16 * n) : F32{};
  accumulate<MT, NV, AM, AK>(depth, a, b, b_step, b_vector, acc);
#pragma GCC unroll 12
  for (int m = 0; m < MT; m++)
#pragma GCC unroll 4
    for (int n = 0; n < NV; n++) store(c + m * c_step + 16 * n, acc[m][n]);
}

}  // namespace bough
