// Sixteen lanes at a time, on any instruction set. The compiler lowers the vector types to what the machine has; only the
// few operations it would lower badly are written out for AVX-512 and AVX2.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bough {

typedef float F32 __attribute__((vector_size(64), may_alias));
typedef float F32u __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t I32 __attribute__((vector_size(64), may_alias));
typedef uint32_t U32 __attribute__((vector_size(64), may_alias));
typedef uint32_t U32u __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t U16x32 __attribute__((vector_size(64), may_alias));
typedef uint8_t U8 __attribute__((vector_size(64), may_alias));
typedef uint8_t U8u __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint16_t U16x16u __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint8_t U8x16u __attribute__((vector_size(16), aligned(1), may_alias));

#define BOUGH_INLINE inline __attribute__((always_inline))
#define BOUGH_EXPORT extern "C" __attribute__((visibility("default")))

// Registers of 64 bytes, 32 of them; elsewhere tiles are smaller.
#if defined(__AVX512F__)
constexpr bool kWide = true;
#else
constexpr bool kWide = false;
#endif

enum Dtype : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

BOUGH_INLINE F32 load(const float* p) { return *reinterpret_cast<const F32u*>(p); }
BOUGH_INLINE void store(float* p, F32 v) { *reinterpret_cast<F32u*>(p) = v; }
BOUGH_INLINE U8 load_bytes(const uint8_t* p) { return *reinterpret_cast<const U8u*>(p); }
BOUGH_INLINE F32 splat(float x) { return F32{} + x; }
BOUGH_INLINE F32 to_float(I32 v) { return __builtin_convertvector(v, F32); }
BOUGH_INLINE I32 splat_int(int32_t x) { return I32{} + x; }

// ---- integers of other widths (compilers convert these vectors lane by lane) ----------------------------------------

BOUGH_INLINE I32 load_u8(const uint8_t* p) {
#if defined(__AVX512F__)
  return (I32)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256i halves[2] = {_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))};
  I32 out;
  std::memcpy(&out, halves, 64);
  return out;
#else
  return __builtin_convertvector(*reinterpret_cast<const U8x16u*>(p), I32);
#endif
}

BOUGH_INLINE I32 load_i8(const uint8_t* p) { return (load_u8(p) ^ 128) - 128; }

BOUGH_INLINE U32 load_u16(const uint16_t* p) {
#if defined(__AVX512F__)
  return (U32)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  const __m128i* at = reinterpret_cast<const __m128i*>(p);
  const __m256i halves[2] = {_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), _mm256_cvtepu16_epi32(_mm_loadu_si128(at + 1))};
  U32 out;
  std::memcpy(&out, halves, 64);
  return out;
#else
  return __builtin_convertvector(*reinterpret_cast<const U16x16u*>(p), U32);
#endif
}

BOUGH_INLINE void store_i8(int8_t* p, I32 v) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
#else
  for (int i = 0; i < 16; i++) p[i] = int8_t(v[i]);
#endif
}

BOUGH_INLINE void store_u16(uint16_t* p, U32 v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)v));
#else
  for (int i = 0; i < 16; i++) p[i] = uint16_t(v[i]);
#endif
}

// ---- 16-bit floats ------------------------------------------------------------------------------------------------

BOUGH_INLINE float half_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff, bits;
  if (rest >= 0x7c00) {
    bits = 0x7f800000 | ((rest & 0x3ff) << 13);
  } else if (rest >= 0x400) {
    bits = (rest << 13) + 0x38000000;
  } else {
    float small = float(rest) * 5.9604644775390625e-8f;  // 2^-24
    std::memcpy(&bits, &small, 4);
  }
  bits |= sign;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
#endif
}

BOUGH_INLINE uint16_t float_to_half(float x) {
#if defined(__F16C__)
  return _cvtss_sh(x, 0);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint16_t sign = uint16_t((bits >> 16) & 0x8000);
  uint32_t rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return sign | 0x7e00;
  if (rest >= 0x477ff000) return sign | 0x7c00;
  if (rest < 0x38800000) {  // subnormal half: let float arithmetic round it
    float magic = 0.5f, shifted;
    std::memcpy(&shifted, &rest, 4);
    shifted += magic;
    uint32_t out;
    std::memcpy(&out, &shifted, 4);
    return sign | uint16_t(out - 0x3f000000);
  }
  rest += 0xfff + ((rest >> 13) & 1);
  return sign | uint16_t((rest - 0x38000000) >> 13);
#endif
}

BOUGH_INLINE float bfloat_to_float(uint16_t b) {
  uint32_t bits = uint32_t(b) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

BOUGH_INLINE uint16_t float_to_bfloat(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

BOUGH_INLINE F32 load_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return (F32)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
#if defined(__F16C__)
  const __m128i* at = reinterpret_cast<const __m128i*>(p);
  const __m256 halves[2] = {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
  F32 out;
  std::memcpy(&out, halves, 64);
  return out;
#else
  F32 out;
  for (int i = 0; i < 16; i++) out[i] = half_to_float(p[i]);
  return out;
#endif
#endif
}

BOUGH_INLINE F32 load_bfloat(const uint16_t* p) { return (F32)(load_u16(p) << 16); }

BOUGH_INLINE void store_bfloat(uint16_t* p, F32 v) {
  const U32 bits = (U32)v;
  const U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const U32 is_nan = (U32)((bits & 0x7fffffff) > 0x7f800000);
  store_u16(p, (rounded & ~is_nan) | (((bits >> 16) | 0x40) & is_nan));
}

BOUGH_INLINE void store_half(uint16_t* p, F32 v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, 0));
#else
  for (int i = 0; i < 16; i++) p[i] = float_to_half(v[i]);
#endif
}

template <Dtype D>
struct Element {
  typedef uint16_t type;
};
template <>
struct Element<kF32> {
  typedef float type;
};

template <Dtype D>
BOUGH_INLINE F32 load_as(const typename Element<D>::type* p) {
  if constexpr (D == kF32) return load(p);
  else if constexpr (D == kBF16) return load_bfloat(p);
  else return load_half(p);
}
template <Dtype D>
BOUGH_INLINE void store_as(typename Element<D>::type* p, F32 v) {
  if constexpr (D == kF32) store(p, v);
  else if constexpr (D == kBF16) store_bfloat(p, v);
  else store_half(p, v);
}
template <Dtype D>
BOUGH_INLINE float get_as(const typename Element<D>::type* p) {
  if constexpr (D == kF32) return *p;
  else if constexpr (D == kBF16) return bfloat_to_float(*p);
  else return half_to_float(*p);
}
template <Dtype D>
BOUGH_INLINE void put_as(typename Element<D>::type* p, float v) {
  if constexpr (D == kF32) *p = v;
  else if constexpr (D == kBF16) *p = float_to_bfloat(v);
  else *p = float_to_half(v);
}

// ---- across lanes -------------------------------------------------------------------------------------------------

BOUGH_INLINE float sum_lanes(F32 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s[16];
  store(s, v);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) s[i] += s[i + n];
  return s[0];
#endif
}

BOUGH_INLINE F32 maximum(F32 a, F32 b) {
#if defined(__AVX512F__)
  return (F32)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}
BOUGH_INLINE F32 minimum(F32 a, F32 b) {
#if defined(__AVX512F__)
  return (F32)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}
BOUGH_INLINE F32 absolute(F32 a) { return (F32)((U32)a & 0x7fffffffu); }

BOUGH_INLINE float max_lanes(F32 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float s[16];
  store(s, v);
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) s[i] = s[i] > s[i + n] ? s[i] : s[i + n];
  return s[0];
#endif
}

template <int N>
struct Interleave;  // lane order that swaps groups of N lanes between two vectors
template <>
struct Interleave<8> {
  static constexpr I32 low = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
  static constexpr I32 high = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
};
template <>
struct Interleave<4> {
  static constexpr I32 low = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
  static constexpr I32 high = {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31};
};
template <>
struct Interleave<2> {
  static constexpr I32 low = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
  static constexpr I32 high = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
};
template <>
struct Interleave<1> {
  static constexpr I32 low = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
  static constexpr I32 high = {1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31};
};

template <int N>
BOUGH_INLINE void exchange(F32& a, F32& b) {
  F32 x = __builtin_shuffle(a, b, Interleave<N>::low), y = __builtin_shuffle(a, b, Interleave<N>::high);
  a = x;
  b = y;
}

template <int N>
BOUGH_INLINE void exchange_all(F32* v) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++)
    if (!(i & N)) exchange<N>(v[i], v[i + N]);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
BOUGH_INLINE void transpose8(const float* in, float* out) {  // 8 x 8, rows 16 apart
  __m256 r[8], t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(in + 16 * i);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(out + 16 * i, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(out + 16 * (i + 4), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
#endif

BOUGH_INLINE void transpose(F32* v) {  // 16 x 16, in place
#if defined(__AVX2__) && !defined(__AVX512F__)
  alignas(64) float in[256], out[256];
  std::memcpy(in, v, sizeof in);
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 2; j++) transpose8(in + 128 * i + 8 * j, out + 128 * j + 8 * i);
  std::memcpy(v, out, sizeof out);
#else
  exchange_all<8>(v);
  exchange_all<4>(v);
  exchange_all<2>(v);
  exchange_all<1>(v);
#endif
}

// Columns that load_columns takes at a time: where vectors are wide, 16 bytes of each row.
template <Dtype D>
constexpr int kColumns = !kWide ? 16 : D == kF32 ? 4 : 8;

// A few columns of 16 rows: lane i of v[c] is rows[i][offset + c].
template <Dtype D>
BOUGH_INLINE void load_columns(const typename Element<D>::type* const* rows, int64_t offset, F32* v) {
#if defined(__AVX512F__)
  auto quarter = [&](int i) { return _mm_loadu_ps(reinterpret_cast<const float*>(rows[i] + offset)); };
  __m512 four[4];  // rows i, i + 4, i + 8, i + 12
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    four[i] = _mm512_insertf32x4(_mm512_castps128_ps512(quarter(i)), quarter(i + 4), 1);
    four[i] = _mm512_insertf32x4(_mm512_insertf32x4(four[i], quarter(i + 8), 2), quarter(i + 12), 3);
  }
  const __m512d a = (__m512d)_mm512_unpacklo_ps(four[0], four[1]), b = (__m512d)_mm512_unpackhi_ps(four[0], four[1]);
  const __m512d x = (__m512d)_mm512_unpacklo_ps(four[2], four[3]), y = (__m512d)_mm512_unpackhi_ps(four[2], four[3]);
  const __m512i columns[4] = {(__m512i)_mm512_unpacklo_pd(a, x), (__m512i)_mm512_unpackhi_pd(a, x),
                              (__m512i)_mm512_unpacklo_pd(b, y), (__m512i)_mm512_unpackhi_pd(b, y)};
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    if constexpr (D == kF32) {
      v[c] = (F32)columns[c];
    } else if constexpr (D == kBF16) {
      v[2 * c] = (F32)_mm512_slli_epi32(columns[c], 16);
      v[2 * c + 1] = (F32)((U32)columns[c] & 0xffff0000u);
    } else {
      v[2 * c] = (F32)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(columns[c]));
      v[2 * c + 1] = (F32)_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(columns[c], 16)));
    }
  }
#else
  for (int i = 0; i < 16; i++) v[i] = load_as<D>(rows[i] + offset);
  transpose(v);
#endif
}

template <int N>
BOUGH_INLINE F32 fold_max(F32 a, F32 b) {
  return maximum(__builtin_shuffle(a, b, Interleave<N>::low), __builtin_shuffle(a, b, Interleave<N>::high));
}

BOUGH_INLINE F32 max_each(F32* v) {  // lane i of the result: the largest of v[i]'s lanes; v is used up
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) v[i] = fold_max<8>(v[i], v[i + 8]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) v[i] = fold_max<4>(v[i], v[i + 4]);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) v[i] = fold_max<2>(v[i], v[i + 2]);
  return fold_max<1>(v[0], v[1]);
}

// ---- integer products ---------------------------------------------------------------------------------------------

// Each 32-bit lane: acc + the dot product of its four unsigned bytes with the four signed bytes of `four`.
BOUGH_INLINE I32 dot4(I32 acc, U8 w, int32_t four) {
#if defined(__AVX512VNNI__)
  return (I32)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(four));
#elif defined(__AVX512BW__)
  __m512i a = _mm512_set1_epi32(four), x = (__m512i)w;
  __m512i even = _mm512_madd_epi16(_mm512_and_si512(x, _mm512_set1_epi16(255)), _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8));
  __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(x, 8), _mm512_srai_epi16(a, 8));
  return acc + (I32)even + (I32)odd;
#elif defined(__AVX2__)
  __m256i a = _mm256_set1_epi32(four), half[2], sum[2];
  __m256i a_even = _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8), a_odd = _mm256_srai_epi16(a, 8);
  std::memcpy(half, &w, 64);
  for (int i = 0; i < 2; i++)
    sum[i] = _mm256_add_epi32(_mm256_madd_epi16(_mm256_and_si256(half[i], _mm256_set1_epi16(255)), a_even),
                              _mm256_madd_epi16(_mm256_srli_epi16(half[i], 8), a_odd));
  I32 out;
  std::memcpy(&out, sum, 64);
  return acc + out;
#else
  U32 x = (U32)w;
  for (int i = 0; i < 4; i++) acc += (I32)((x >> (8 * i)) & 255) * int32_t(int8_t(uint32_t(four) >> (8 * i)));
  return acc;
#endif
}

// table[code] for each byte; codes below 16.
BOUGH_INLINE U8 look_up_bytes(const uint8_t* table, U8 codes) {
#if defined(__AVX512BW__)
  const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (U8)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(row), (__m512i)codes);
#elif defined(__AVX2__)
  const __m256i row = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  __m256i half[2];
  std::memcpy(half, &codes, 64);
  for (int i = 0; i < 2; i++) half[i] = _mm256_shuffle_epi8(row, half[i]);
  U8 out;
  std::memcpy(&out, half, 64);
  return out;
#else
  U8 out;
  for (int i = 0; i < 64; i++) out[i] = table[codes[i]];
  return out;
#endif
}

// table[code] for each lane; codes below 16.
BOUGH_INLINE F32 look_up_floats(const float* table, U32 codes) {
#if defined(__AVX512F__)
  return (F32)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
  const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
  __m256i half[2];
  __m256 found[2];
  std::memcpy(half, &codes, 64);
  for (int i = 0; i < 2; i++)
    found[i] = _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, half[i]), _mm256_permutevar8x32_ps(high, half[i]),
                                _mm256_castsi256_ps(_mm256_slli_epi32(half[i], 28)));  // bit 3 becomes the sign
  F32 out;
  std::memcpy(&out, found, 64);
  return out;
#else
  F32 out;
  for (int i = 0; i < 16; i++) out[i] = table[codes[i]];
  return out;
#endif
}

// Floats of 8 bits (4 of them exponent, biased by 7; no infinities) to floats of 32. Exact, subnormal ones too.
BOUGH_INLINE F32 float8_to_float(U32 code) {
  const F32 scaled = (F32)((code & 128) << 24 | (code & 127) << 20);
  return scaled * 0x1p120f;
}

BOUGH_INLINE int32_t four_bytes(const int8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

// Each byte: w | (bit ? value : 0), for the 64 bits at p.
BOUGH_INLINE U8 or_where(U8 w, const uint8_t* p, uint8_t value) {
#if defined(__AVX512BW__)
  uint64_t bits;
  std::memcpy(&bits, p, 8);
  return (U8)_mm512_or_si512((__m512i)w, _mm512_maskz_set1_epi8(bits, char(value)));
#else
  U8 out = w;
  for (int i = 0; i < 64; i++) out[i] |= (p[i / 8] >> (i % 8) & 1) ? value : 0;
  return out;
#endif
}

BOUGH_INLINE U8 shift_right(U8 v, int n, uint8_t keep) { return (U8)((U16x32)v >> n) & keep; }
BOUGH_INLINE U8 shift_left(U8 v, int n, uint8_t keep) { return (U8)((U16x32)v << n) & keep; }

// ---- one rounding -------------------------------------------------------------------------------------------------

// x y + z with one rounding where the machine has such an instruction. Of a sum of two products, the compiler would choose
// which one is not rounded, and not everywhere the same.
BOUGH_INLINE F32 fused(F32 x, F32 y, F32 z) {
#if defined(__AVX512F__)
  return (F32)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__FMA__)
  __m256 a[2], b[2], c[2];
  std::memcpy(a, &x, 64);
  std::memcpy(b, &y, 64);
  std::memcpy(c, &z, 64);
  for (int i = 0; i < 2; i++) c[i] = _mm256_fmadd_ps(a[i], b[i], c[i]);
  std::memcpy(&z, c, 64);
  return z;
#elif defined(__FP_FAST_FMAF)
  for (int i = 0; i < 16; i++) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
  return z;
#else
  return x * y + z;
#endif
}

// *sum += x * y.
BOUGH_INLINE void add_product(F32* sum, const F32& x, float y) {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  __m256* out = reinterpret_cast<__m256*>(sum);
  const __m256* in = reinterpret_cast<const __m256*>(&x);
  const __m256 factor = _mm256_set1_ps(y);
  out[0] = _mm256_fmadd_ps(in[0], factor, out[0]);
  out[1] = _mm256_fmadd_ps(in[1], factor, out[1]);
#else
  *sum = fused(x, splat(y), *sum);
#endif
}

// ---- functions ----------------------------------------------------------------------------------------------------

// Nearest integer of each lane, for |x| < 2^22.
BOUGH_INLINE I32 round_to_int(F32 x) { return (I32)(x + 12582912.0f) - 0x4b400000; }

// e^x to about 1 unit in the last place; 0 below -87 (or where it would be denormal), e^88 above 88.
BOUGH_INLINE F32 exponential(F32 x) {
#if defined(__AVX512F__)
  const __m512 low = _mm512_min_ps((__m512)x, _mm512_set1_ps(88.0f));
  const F32 n = (F32)_mm512_roundscale_ps(_mm512_mul_ps(low, _mm512_set1_ps(1.44269504088896341f)), 0);
  F32 r = (F32)low - n * 0.693145751953125f;
#else
  const I32 alive = (I32)(x > -87.0f);
  x = minimum(maximum(x, splat(-87.0f)), splat(88.0f));
  const F32 shifted = x * 1.44269504088896341f + 12582912.0f;
  const F32 n = shifted - 12582912.0f;
  F32 r = x - n * 0.693145751953125f;
#endif
  r = r - n * 1.42860677e-6f;
  F32 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
#if defined(__AVX512F__)
  const __mmask16 alive = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_GT_OQ);
  return (F32)_mm512_maskz_scalef_ps(alive, (__m512)p, (__m512)n);
#else
  const I32 power = ((I32)shifted - 0x4b400000) << 23;
  return (F32)(((I32)p + power) & alive);
#endif
}

BOUGH_INLINE F32 hyperbolic_tangent(F32 x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); }
BOUGH_INLINE F32 sigmoid(F32 x) { return 1.0f / (1.0f + exponential(-x)); }

}  // namespace bough
