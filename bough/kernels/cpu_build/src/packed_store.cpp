// Weights from their form in a file to packed weights, and back to floats.

#include <algorithm>

#include "packed.h"
#include "parallel.h"

namespace bough {
namespace {

struct Unpacked {  // up to 256 columns of one row, as the file means them
  uint8_t q[256];  // unsigned quants
  uint8_t scale[16], min[16];
  uint16_t d, m;
};

void k_scales(const uint8_t* s, Unpacked& out) {  // eight 6-bit scales and minima in 12 bytes
  for (int j = 0; j < 8; j++) {
    if (j < 4) {
      out.scale[j] = s[j] & 63;
      out.min[j] = s[j + 4] & 63;
    } else {
      out.scale[j] = uint8_t((s[j + 4] & 15) | (s[j - 4] >> 6 << 4));
      out.min[j] = uint8_t((s[j + 4] >> 4) | (s[j] >> 6 << 4));
    }
  }
}

void nibbles(const uint8_t* qs, uint8_t* q) {  // 16 bytes: columns 0..15 in the low halves, 16..31 in the high
  for (int i = 0; i < 16; i++) q[i] = qs[i] & 15, q[i + 16] = qs[i] >> 4;
}

void fifth_bits(const uint8_t* qh, uint8_t* q) {
  uint32_t bits;
  std::memcpy(&bits, qh, 4);
  for (int i = 0; i < 32; i++) q[i] |= (bits >> i & 1) << 4;
}

uint16_t u16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

template <int K>
void read_block(const uint8_t* p, Unpacked& u) {
  if constexpr (kTraits[K].coded) {
    std::memcpy(u.q, p, kBlock);
    return;
  }
  u.d = u16(p);
  if constexpr (K == kQ4_0) {
    nibbles(p + 2, u.q);
  } else if constexpr (K == kQ4_1) {
    u.m = u16(p + 2);
    nibbles(p + 4, u.q);
  } else if constexpr (K == kQ5_0) {
    nibbles(p + 6, u.q);
    fifth_bits(p + 2, u.q);
  } else if constexpr (K == kQ5_1) {
    u.m = u16(p + 2);
    nibbles(p + 8, u.q);
    fifth_bits(p + 4, u.q);
  } else if constexpr (K == kQ8_0) {
    for (int i = 0; i < 32; i++) u.q[i] = uint8_t(p[2 + i] ^ 0x80);
  } else if constexpr (K == kQ4_K || K == kQ5_K) {
    u.m = u16(p + 2);
    k_scales(p + 4, u);
    const uint8_t* qs = p + (K == kQ4_K ? 16 : 48);
    for (int c = 0; c < 4; c++)
      for (int i = 0; i < 32; i++) {
        u.q[64 * c + i] = qs[32 * c + i] & 15;
        u.q[64 * c + 32 + i] = qs[32 * c + i] >> 4;
      }
    if constexpr (K == kQ5_K)
      for (int c = 0; c < 8; c++)
        for (int i = 0; i < 32; i++) u.q[32 * c + i] |= (p[16 + i] >> c & 1) << 4;
  } else if constexpr (K == kQ6_K) {
    const uint8_t *ql = p, *qh = p + 128;
    u.d = u16(p + 208);
    std::memcpy(u.scale, p + 192, 16);
    for (int half = 0; half < 2; half++, ql += 64, qh += 32)
      for (int i = 0; i < 32; i++) {
        uint8_t* q = u.q + 128 * half + i;
        q[0] = (ql[i] & 15) | (qh[i] & 3) << 4;
        q[32] = (ql[i + 32] & 15) | (qh[i] >> 2 & 3) << 4;
        q[64] = ql[i] >> 4 | (qh[i] >> 4 & 3) << 4;
        q[96] = ql[i + 32] >> 4 | (qh[i] >> 6) << 4;
      }
  }
}

// Columns 32 b .. of 16 rows into one tile.
template <int K>
void write_tile(const Unpacked* rows, int first, uint8_t* tile) {
  alignas(64) uint32_t bytes[8][16];
  for (int r = 0; r < 16; r++)
    for (int j = 0; j < 8; j++) std::memcpy(&bytes[j][r], rows[r].q + first + 4 * j, 4);
  const uint8_t* v = reinterpret_cast<const uint8_t*>(bytes);
  if constexpr (is_bytes(K)) {
    std::memcpy(tile, v, 512);
    return;
  }
  for (int i = 0; i < 256; i++) tile[i] = uint8_t((v[i] & 15) | v[256 + i] << 4);
  if constexpr (K == kQ5_0 || K == kQ5_1 || K == kQ5_K) {
    for (int i = 0; i < 64; i++) {
      uint8_t bits = 0;
      for (int b = 0; b < 8; b++) bits |= (v[8 * i + b] >> 4 & 1) << b;
      tile[256 + i] = bits;
    }
  }
  if constexpr (K == kQ6_K) {
    for (int m = 0; m < 2; m++)
      for (int i = 0; i < 64; i++) {
        uint8_t bits = 0;
        for (int f = 0; f < 4; f++) bits |= (v[64 * (4 * m + f) + i] >> 4) << 2 * f;
        tile[256 + 64 * m + i] = bits;
      }
  }
}

template <int K>
void pack_group(const Weight& w, const uint8_t* raw, int64_t group, uint8_t* quants, uint8_t* scales) {
  constexpr Traits t = kTraits[K];
  const int64_t row_bytes = w.cols / t.raw_block * t.raw_bytes;
  const int tiles = t.raw_block / kBlock;
  Unpacked rows[kGroup];
  std::memset(rows, 0, sizeof rows);
  for (int64_t b = 0; b < w.cols / t.raw_block; b++) {
    for (int r = 0; r < kGroup && group * kGroup + r < w.rows; r++)
      read_block<K>(raw + (group * kGroup + r) * row_bytes + b * t.raw_bytes, rows[r]);
    if constexpr (t.coded) {  // its scales were laid out before
      write_tile<K>(rows, 0, quants);
      quants += t.tile_bytes;
      continue;
    }
    uint16_t* head = reinterpret_cast<uint16_t*>(scales);
    for (int r = 0; r < kGroup; r++) {
      head[r] = rows[r].d;
      if (t.has_min) head[16 + r] = rows[r].m;
    }
    scales += t.header_bytes ? t.header_bytes : t.scale_bytes;
    for (int i = 0; i < tiles; i++, quants += t.tile_bytes) {
      write_tile<K>(rows, kBlock * i, quants);
      if (!t.header_bytes) continue;
      for (int r = 0; r < kGroup; r++) {
        scales[r] = rows[r].scale[t.half_blocks ? 2 * i : i];
        scales[16 + r] = t.half_blocks ? rows[r].scale[2 * i + 1] : rows[r].min[i];
      }
      scales += t.scale_bytes;
    }
  }
}

template <typename E>
void pack_group_plain(const Weight& w, const uint8_t* raw, int64_t group, uint8_t* quants) {
  const E* in = reinterpret_cast<const E*>(raw);
  E* out = reinterpret_cast<E*>(quants);
  for (int r = 0; r < kGroup; r++) {
    const int64_t row = group * kGroup + r;
    for (int64_t c = 0; c < w.cols; c++) {
      const E value = row < w.rows ? in[row * w.cols + c] : E(0);
      const int64_t pair = c / 2 * 32, odd = c % 2;
      out[w.kind == kBF16Weight ? pair + 2 * r + odd : pair + 16 * odd + r] = value;
    }
  }
}

// One block of columns of all rows of a group: out[32][16].
template <int K>
BOUGH_INLINE void dequantise_tile(const uint8_t* quants, const TileScales& s, const float* table, float* out) {
  U8 v[8];
  unpack_tile<K>(quants, v);
#pragma GCC unroll 8
  for (int j = 0; j < 8; j++)
#pragma GCC unroll 4
    for (int c = 4 * j; c < 4 * j + 4; c++) store(out + 16 * c, column_of<K>(table, v[j], s, c));
}

void dequantise_tile_plain(int kind, const uint8_t* quants, int64_t block, float* out) {
  if (kind == kF32Weight) {
    std::memcpy(out, quants + block * 2048, 2048);
    return;
  }
  const uint16_t* in = reinterpret_cast<const uint16_t*>(quants) + block * kBlock * kGroup;
  for (int pair = 0; pair < 16; pair++, in += 32, out += 32) {
    if (kind == kF16Weight) {
      store(out, load_half(in));
      store(out + 16, load_half(in + 16));
    } else {
      U32 both = *reinterpret_cast<const U32u*>(in);
      store(out, (F32)(both << 16));
      store(out + 16, (F32)(both & 0xffff0000u));
    }
  }
}

// The same of rows as a checkpoint has them; of rows past the last, that one again.
template <Dtype D>
void turn_tile(const Weight& w, int64_t group, int64_t block, float* out) {
  typedef typename Element<D>::type E;
  const E* rows = reinterpret_cast<const E*>(w.quants) + block * kBlock;
  for (int r = 0; r < kGroup; r++) {
    const E* row = rows + std::min(group * kGroup + r, w.rows - 1) * w.cols;
    alignas(64) float values[kBlock];
    store(values, load_as<D>(row));
    store(values + 16, load_as<D>(row + 16));
    for (int c = 0; c < kBlock; c++) out[16 * c + r] = values[c];
  }
}

}  // namespace

// Columns [32 first, 32 last) of the 16 rows of a group, without their row scales: out[32 * (last - first)][16].
void dequantise_panel(const Weight& w, int64_t group, int64_t first, int64_t last, float* out) {
  if (is_rows(w.kind)) {
    for (int64_t b = first; b < last; b++, out += 512) {
      if (w.kind == kRowsF32) turn_tile<kF32>(w, group, b, out);
      else if (w.kind == kRowsBF16) turn_tile<kBF16>(w, group, b, out);
      else turn_tile<kF16>(w, group, b, out);
    }
    return;
  }
  const uint8_t* quants = w.quants + group * group_quants(w);
  if (is_plain(w.kind)) {
    for (int64_t b = first; b < last; b++, out += 512) dequantise_tile_plain(w.kind, quants, b, out);
    return;
  }
  for_kind(w.kind, [&]<int K>() {
    ScaleReader<K> reader(w, group, first);
    float* at = out;
    for (int64_t b = first; b < last; b++, at += 512)
      dequantise_tile<K>(quants + b * kTraits[K].tile_bytes, reader.next(b), w.table, at);
  });
}

}  // namespace bough

using namespace bough;

BOUGH_EXPORT int64_t bough_packed_quant_bytes(const Weight* w) { return num_groups(*w) * group_quants(*w); }
BOUGH_EXPORT int64_t bough_packed_scale_bytes(const Weight* w) { return num_groups(*w) * group_scales(*w); }

BOUGH_EXPORT void bough_pack(const Weight* weight, const uint8_t* raw) {
  const Weight w = *weight;
  for_each(usable_threads(), num_groups(w), 4, [&](int64_t g) {
    uint8_t* quants = const_cast<uint8_t*>(w.quants) + g * group_quants(w);
    uint8_t* scales = const_cast<uint8_t*>(w.scales) + g * group_scales(w);
    if (w.kind == kF32Weight) pack_group_plain<uint32_t>(w, raw, g, quants);
    else if (is_plain(w.kind)) pack_group_plain<uint16_t>(w, raw, g, quants);
    else for_kind(w.kind, [&]<int K>() { pack_group<K>(w, raw, g, quants, scales); });
  });
}

// Rows of the weight as floats: out[n][cols] = weight[ids[n]].
BOUGH_EXPORT void bough_packed_rows(const Weight* weight, const int64_t* ids, int64_t count, void* out, int32_t dtype) {
  const Weight w = *weight;
  for_each(count >= 8 ? usable_threads() : 1, count, 4, [&](int64_t n) {
    alignas(64) float tile[512];
    const int64_t group = ids[n] / kGroup, lane = ids[n] % kGroup;
    for (int64_t b = 0; b < num_blocks(w); b++) {
      dequantise_panel(w, group, b, b + 1, tile);
      if (w.row_scale)
        for (int c = 0; c < kBlock; c++) tile[16 * c + lane] *= w.row_scale[ids[n]];
      const int64_t at = n * w.cols + b * kBlock;
      if (dtype == kF32)
        for (int c = 0; c < kBlock; c++) static_cast<float*>(out)[at + c] = tile[16 * c + lane];
      else if (dtype == kBF16)
        for (int c = 0; c < kBlock; c++) static_cast<uint16_t*>(out)[at + c] = float_to_bfloat(tile[16 * c + lane]);
      else
        for (int c = 0; c < kBlock; c++) static_cast<uint16_t*>(out)[at + c] = float_to_half(tile[16 * c + lane]);
    }
  });
}

BOUGH_EXPORT void bough_dequantise(const Weight* weight, float* out) {
  const Weight w = *weight;
  for_each(usable_threads(), num_groups(w), 1, [&](int64_t g) {
    alignas(64) float tile[512];
    for (int64_t b = 0; b < num_blocks(w); b++) {
      dequantise_panel(w, g, b, b + 1, tile);
      for (int64_t r = 0; r < kGroup && g * kGroup + r < w.rows; r++) {
        const float factor = w.row_scale ? w.row_scale[g * kGroup + r] : 1.0f;
        for (int c = 0; c < kBlock; c++) out[(g * kGroup + r) * w.cols + b * kBlock + c] = tile[16 * c + r] * factor;
      }
    }
  });
}
