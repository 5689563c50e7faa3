// Weights kept in few bits, interleaved for SIMD.
//
// Rows come in groups of 16, columns in blocks of 32. A tile (one group, one block) holds eight 64-byte vectors once
// unpacked: byte 4r + i of vector j is column 4j + i of row r, so that a 32-bit lane of an integer dot product is a row.
// Stored, vectors j and j + 4 share bytes (low and high nibble); what doesn't fit four bits follows. Scales lie apart, 16
// rows side by side. Plain floats hold, for each pair of columns, 16 rows' pairs (BF16) or two runs of 16 rows (F16,
// F32).
//
// Kinds up to F32 are GGUF's. Those after it are "coded": the weights of any other quantised checkpoint, given as one code per
// weight and a scale for every `scale_blocks` blocks of columns (for half a block in kFloat4Halves). A weight is worth
// (code - 8) * scale in kInt4, (code - zero) * scale where there are zero points, table[code] * scale in kTable4, and a float
// of 4 or 8 bits times its scale otherwise.
//
// The last kinds are not packed at all: rows of floats one after the other, as a checkpoint has them.
#pragma once

#include "simd.h"

namespace bough {

enum Kind : int32_t {
  kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K, kF16Weight, kBF16Weight, kF32Weight,
  kInt4, kInt4Zero, kInt8, kInt8Zero, kFloat4, kFloat4Halves, kTable4, kFloat8,
  kRowsF16, kRowsBF16, kRowsF32, kNumKinds
};

struct Weight {  // mirrored by a ctypes structure
  int32_t kind;
  int32_t scale_dtype;  // of a coded weight, as are the following ones
  int64_t rows, cols;
  const uint8_t* quants;
  const uint8_t* scales;  // for each group of rows and each scale: 16 scales (twice for half blocks), 16 bytes of zero points
  int64_t scale_blocks;
  const float* row_scale;  // multiplies a row's results, or null
  const float* table;      // [16]
};

constexpr int kGroup = 16;  // rows
constexpr int kBlock = 32;  // columns

struct Traits {
  int raw_block;      // columns of a block in the file
  int raw_bytes;      // its bytes
  int tile_bytes;     // quants of a tile
  int scale_bytes;    // scales of a tile
  int header_bytes;   // scales once every 8 tiles
  int offset;         // what is subtracted from the unsigned quant
  bool has_min;       // weight = scale * quant + min
  bool half_blocks;   // scales for 16 columns each
  bool coded;         // scales as `Weight` describes them
};

constexpr Traits kTraits[kNumKinds] = {
    {32, 18, 256, 32, 0, 8, false, false},     // Q4_0
    {32, 20, 256, 64, 0, 0, true, false},      // Q4_1
    {32, 22, 320, 32, 0, 16, false, false},    // Q5_0
    {32, 24, 320, 64, 0, 0, true, false},      // Q5_1
    {32, 34, 512, 32, 0, 128, false, false},   // Q8_0
    {256, 144, 256, 32, 64, 0, true, false},   // Q4_K
    {256, 176, 320, 32, 64, 0, true, false},   // Q5_K
    {256, 210, 384, 32, 32, 32, false, true},  // Q6_K
    {32, 64, 1024, 0, 0, 0, false, false},     // F16
    {32, 64, 1024, 0, 0, 0, false, false},     // BF16
    {32, 128, 2048, 0, 0, 0, false, false},    // F32
    {32, 32, 256, 0, 0, 8, false, false, true},    // kInt4
    {32, 32, 256, 0, 0, 0, true, false, true},     // kInt4Zero
    {32, 32, 512, 0, 0, 128, false, false, true},  // kInt8
    {32, 32, 512, 0, 0, 0, true, false, true},     // kInt8Zero
    {32, 32, 256, 0, 0, 12, false, false, true},   // kFloat4: its values are halves of integers from -12 to 12
    {32, 32, 256, 0, 0, 12, false, true, true},    // kFloat4Halves
    {32, 32, 256, 0, 0, 0, false, false, true},    // kTable4
    {32, 32, 512, 0, 0, 0, false, false, true},    // kFloat8
    {32, 64, 1024, 0, 0, 0, false, false},     // kRowsF16
    {32, 64, 1024, 0, 0, 0, false, false},     // kRowsBF16
    {32, 128, 2048, 0, 0, 0, false, false},    // kRowsF32
};

constexpr bool is_plain(int kind) { return kind >= kF16Weight && kind <= kF32Weight; }
constexpr bool is_rows(int kind) { return kind >= kRowsF16; }
constexpr bool is_bytes(int kind) { return kind == kQ8_0 || kind == kInt8 || kind == kInt8Zero || kind == kFloat8; }
constexpr bool has_zeros(int kind) { return kind == kInt4Zero || kind == kInt8Zero; }
// Whether a weight is an integer times a scale, so that integer products serve it.
constexpr bool is_integer(int kind) { return !is_plain(kind) && !is_rows(kind) && kind != kTable4 && kind != kFloat8; }

inline int64_t num_groups(const Weight& w) { return (w.rows + kGroup - 1) / kGroup; }
inline int64_t num_blocks(const Weight& w) { return w.cols / kBlock; }
inline int64_t group_quants(const Weight& w) { return num_blocks(w) * kTraits[w.kind].tile_bytes; }
inline int64_t scale_stride(const Weight& w) {  // bytes, of a coded weight
  const Traits& t = kTraits[w.kind];
  return kGroup * ((w.scale_dtype == kF32 ? 4 : 2) * (t.half_blocks ? 2 : 1) + (has_zeros(w.kind) ? 1 : 0));
}
inline int64_t group_scales(const Weight& w) {
  const Traits& t = kTraits[w.kind];
  if (t.coded) return (num_blocks(w) + w.scale_blocks - 1) / w.scale_blocks * scale_stride(w);
  return num_blocks(w) * t.scale_bytes + (t.header_bytes ? num_blocks(w) / 8 * t.header_bytes : 0);
}

// One of the eight vectors of a tile.
template <int K>
BOUGH_INLINE U8 unpack_vector(const uint8_t* q, int j) {
  if constexpr (is_bytes(K)) return load_bytes(q + 64 * j);
  U8 out = shift_right(load_bytes(q + j % 4 * 64), j / 4 * 4, 15);
  if constexpr (K == kQ5_0 || K == kQ5_1 || K == kQ5_K) out = or_where(out, q + 256 + 8 * j, 16);
  if constexpr (K == kQ6_K) {
    const U8 top = load_bytes(q + 256 + j / 4 * 64);
    const int right = j % 4 * 2 - 4;
    out |= right > 0 ? shift_right(top, right, 0x30) : shift_left(top, -right, 0x30);
  }
  if constexpr (K == kFloat4 || K == kFloat4Halves) {  // twice the value, and 12
    static constexpr uint8_t kTwice[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    out = look_up_bytes(kTwice, out);
  }
  return out;
}

// All of them.
template <int K>
BOUGH_INLINE void unpack_tile(const uint8_t* q, U8* out) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (kTraits[K].tile_bytes == 256 && K != kFloat4 && K != kFloat4Halves) {  // two quants a byte, as they are
    const __m256i low = _mm256_set1_epi8(15);
    __m256i* to = reinterpret_cast<__m256i*>(out);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q) + i);
      to[i] = _mm256_and_si256(v, low);
      to[i + 8] = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
    }
    return;
  }
#endif
#pragma GCC unroll 8
  for (int j = 0; j < 8; j++) out[j] = unpack_vector<K>(q, j);
}

// Scales of one tile, of 16 rows each: d (twice for kinds with half blocks) and m. Where there are zero points, d2 is them.
struct TileScales {
  F32 d, d2, m;
};

// A column of a tile, 16 rows' weights, from the vector that holds it.
BOUGH_INLINE F32 column_of(const Traits& t, U8 vector, const TileScales& s, int column) {
  const F32 q = to_float((I32)(((U32)vector >> (column % 4 * 8)) & 255) - t.offset);
  const F32 d = t.half_blocks && column >= 16 ? s.d2 : s.d;
  return t.has_min ? d * q + s.m : d * q;
}

// The same for a kind known at compile time.
template <int K>
BOUGH_INLINE F32 column_of(const float* table, U8 vector, const TileScales& s, int column) {
  const U32 code = ((U32)vector >> (column % 4 * 8)) & 255;
  if constexpr (K == kFloat8) return float8_to_float(code) * s.d;
  if constexpr (K == kTable4) return look_up_floats(table, code) * s.d;
  if constexpr (has_zeros(K)) return (to_float((I32)code) - s.d2) * s.d;
  return column_of(kTraits[K], vector, s, column);
}

// Reads the scales of a group's tiles in order, from any tile on.
template <int K>
struct ScaleReader {
  static constexpr Traits t = kTraits[K];
  const uint8_t* at;
  F32 d{}, m{};
  // Of a coded weight:
  const Weight* weight{};
  TileScales coded{};
  int64_t left = 0;  // blocks of the scales in `coded`

  BOUGH_INLINE ScaleReader() : at(nullptr) {}
  BOUGH_INLINE ScaleReader(const Weight& w, int64_t group, int64_t block) : weight(&w) {
    const uint8_t* start = w.scales + group * group_scales(w);
    if constexpr (t.coded) {
      at = start + block / w.scale_blocks * scale_stride(w);
    } else {
      at = start + block * t.scale_bytes + block / 8 * t.header_bytes;
      if (t.header_bytes && block % 8) read_header(at - block % 8 * t.scale_bytes);
    }
  }

  BOUGH_INLINE F32 read_scales() {
    const uint8_t* from = at;
    at += weight->scale_dtype == kF32 ? 64 : 32;
    if (weight->scale_dtype == kF32) return load(reinterpret_cast<const float*>(from));
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(from);
    return weight->scale_dtype == kF16 ? load_half(halves) : load_bfloat(halves);
  }

  BOUGH_INLINE void read_coded() {
    constexpr float unit = K == kFloat4 || K == kFloat4Halves ? 0.5f : 1.0f;
    coded.d = read_scales() * unit;
    if constexpr (t.half_blocks) coded.d2 = read_scales() * unit;
    if constexpr (has_zeros(K)) {
      coded.d2 = to_float(load_u8(at));
      coded.m = -(coded.d * coded.d2);
      at += kGroup;
    }
  }

  BOUGH_INLINE void read_header(const uint8_t* header) {
    d = load_half(reinterpret_cast<const uint16_t*>(header));
    if constexpr (t.has_min) m = -load_half(reinterpret_cast<const uint16_t*>(header + 32));
    at += t.header_bytes;
  }

  BOUGH_INLINE TileScales next(int64_t block) {
    if constexpr (t.coded) {
      if (left == 0) {
        read_coded();
        left = weight->scale_blocks - block % weight->scale_blocks;
      }
      left--;
      return coded;
    }
    TileScales s{};
    if constexpr (t.header_bytes == 0) {
      s.d = load_half(reinterpret_cast<const uint16_t*>(at));
      if constexpr (t.has_min) s.m = load_half(reinterpret_cast<const uint16_t*>(at + 32));
    } else {
      if (block % 8 == 0) read_header(at);
      if constexpr (t.has_min) {
        s.d = d * to_float(load_u8(at));
        s.m = m * to_float(load_u8(at + 16));
      } else {
        s.d = d * to_float(load_i8(at));
        s.d2 = d * to_float(load_i8(at + 16));
      }
    }
    at += t.scale_bytes;
    return s;
  }
};

// fn.template operator()<kind>() for the kind at run time; GGUF's kinds for integer products only.
template <typename Fn>
inline void for_gguf_kind(int kind, const Fn& fn) {
  switch (kind) {
    case kQ4_0: fn.template operator()<kQ4_0>(); break;
    case kQ4_1: fn.template operator()<kQ4_1>(); break;
    case kQ5_0: fn.template operator()<kQ5_0>(); break;
    case kQ5_1: fn.template operator()<kQ5_1>(); break;
    case kQ8_0: fn.template operator()<kQ8_0>(); break;
    case kQ4_K: fn.template operator()<kQ4_K>(); break;
    case kQ5_K: fn.template operator()<kQ5_K>(); break;
    case kQ6_K: fn.template operator()<kQ6_K>(); break;
  }
}

// The same for all kinds for integer products.
template <typename Fn>
inline void for_integer_kind(int kind, const Fn& fn) {
  switch (kind) {
    case kInt4: fn.template operator()<kInt4>(); break;
    case kInt4Zero: fn.template operator()<kInt4Zero>(); break;
    case kInt8: fn.template operator()<kInt8>(); break;
    case kInt8Zero: fn.template operator()<kInt8Zero>(); break;
    case kFloat4: fn.template operator()<kFloat4>(); break;
    case kFloat4Halves: fn.template operator()<kFloat4Halves>(); break;
    default: for_gguf_kind(kind, fn);
  }
}

// The same for all kinds but plain floats.
template <typename Fn>
inline void for_kind(int kind, const Fn& fn) {
  if (kind == kTable4) fn.template operator()<kTable4>();
  else if (kind == kFloat8) fn.template operator()<kFloat8>();
  else for_integer_kind(kind, fn);
}

}  // namespace bough
