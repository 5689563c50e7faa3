// Logits to token ids. Random numbers and filters are those of the reference; the vocabulary is never sorted as a whole.

#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace bough {

struct Draw {  // mirrored by a ctypes structure
  const void* logits;  // [rows, vocab]
  const float *temperature, *top_p, *min_p;
  const int64_t *top_k, *seeds, *counters;
  int64_t* out;
  int64_t rows, vocab, step;
  int32_t dtype;
};

namespace {

thread_local Scratch scaled_scratch, mass_scratch;

struct Candidate {
  float logit;
  int32_t token;
};
thread_local std::vector<Candidate> candidates;

float product(float a, float b) {  // rounded by itself, as torch does
  volatile float out = a * b;
  return out;
}

template <Dtype D>
void read_row(const typename Element<D>::type* logits, int64_t vocab, float* out) {
  int64_t i = 0;
  for (; i + 16 <= vocab; i += 16) store(out + i, load_as<D>(logits + i));
  for (; i < vocab; i++) out[i] = get_as<D>(logits + i);
}

// The first largest entry; a NaN counts as largest.
int64_t first_largest(const float* x, int64_t count) {
  F32 high = splat(-__builtin_inff());
  I32 strange{};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const F32 v = load(x + i);
    strange |= (I32)(v != v);
    high = maximum(high, v);
  }
  float top = max_lanes(high);
  bool nan = false;
  for (int lane = 0; lane < 16; lane++) nan |= strange[lane] != 0;
  for (; i < count; i++) {
    nan |= x[i] != x[i];
    top = std::max(top, x[i]);
  }
  for (i = 0; i < count; i++)
    if (nan ? x[i] != x[i] : x[i] == top) return i;
  return 0;
}

struct Noise {
  uint32_t key[2], counter[2];

  Noise(int64_t seed, int64_t at)
      : key{uint32_t(seed), uint32_t(uint64_t(seed) >> 32)}, counter{uint32_t(at), uint32_t(uint64_t(at) >> 32)} {}

  // Philox with ten rounds: the four words of a block of four tokens.
  void words(uint32_t block, uint32_t out[4]) const {
    uint32_t c0 = block, c1 = counter[0], c2 = counter[1], c3 = 0, k0 = key[0], k1 = key[1];
    for (int i = 0; i < 10; i++) {
      const uint64_t a = uint64_t(c0) * 0xD2511F53u, b = uint64_t(c2) * 0xCD9E8D57u;
      c0 = uint32_t(b >> 32) ^ c1 ^ k0;
      c2 = uint32_t(a >> 32) ^ c3 ^ k1;
      c1 = uint32_t(b);
      c3 = uint32_t(a);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
  }

  // The words of eight blocks, in order.
  void words8(uint32_t block, uint32_t out[32]) const {
#if defined(__AVX512F__)
    const __m512i low = _mm512_set1_epi64(0xFFFFFFFF), m0 = _mm512_set1_epi64(0xD2511F53u), m1 = _mm512_set1_epi64(0xCD9E8D57u);
    __m512i c0 = _mm512_add_epi64(_mm512_set1_epi64(block), _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
    __m512i c1 = _mm512_set1_epi64(counter[0]), c2 = _mm512_set1_epi64(counter[1]), c3 = _mm512_setzero_si512();
    uint32_t k0 = key[0], k1 = key[1];
    for (int i = 0; i < 10; i++) {
      const __m512i a = _mm512_mul_epu32(c0, m0), b = _mm512_mul_epu32(c2, m1);
      c0 = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(b, 32), c1), _mm512_set1_epi64(k0));
      c2 = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(a, 32), c3), _mm512_set1_epi64(k1));
      c1 = _mm512_and_si512(b, low);
      c3 = _mm512_and_si512(a, low);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    const __m512i first = _mm512_or_si512(c0, _mm512_slli_epi64(c1, 32)), second = _mm512_or_si512(c2, _mm512_slli_epi64(c3, 32));
    alignas(64) uint64_t pairs[2][8];
    _mm512_store_si512(pairs[0], first);
    _mm512_store_si512(pairs[1], second);
    for (int i = 0; i < 8; i++) {
      std::memcpy(out + 4 * i, &pairs[0][i], 8);
      std::memcpy(out + 4 * i + 2, &pairs[1][i], 8);
    }
#else
    for (int i = 0; i < 8; i++) words(block + i, out + 4 * i);
#endif
  }
};

float gumbel(uint32_t bits) {
  const float u = std::min(float(bits) * 0x1p-32f + 0x1p-33f, 1.0f - 0x1p-24f);
  const float e = u < 1e-3f ? u * (1.0f + u * (0.5f + u * (1.0f / 3.0f))) : -std::log(1.0f - u);
  return -std::log(e);
}

// The draw among all tokens: those whose noise can't lift them above the best so far are passed over by comparing bits.
int64_t draw_from_all(const float* scaled, int64_t vocab, int64_t likeliest, const Noise& noise) {
  uint32_t bits[32];
  noise.words(uint32_t(likeliest / 4), bits);
  float best = scaled[likeliest] + gumbel(bits[likeliest % 4]);
  int64_t chosen = likeliest;
  for (int64_t base = 0; base < vocab; base += 32) {
    noise.words8(uint32_t(base / 4), bits);
    for (int64_t half = base; half < std::min(vocab, base + 32); half += 16) {
      alignas(64) float at[16];
      for (int i = 0; i < 16; i++) at[i] = half + i < vocab ? scaled[half + i] : -__builtin_inff();
      const F32 room = exponential(load(at) - best) * 1.001f + 1e-9f;
      const F32 u = __builtin_convertvector(*reinterpret_cast<const U32u*>(bits + (half - base)), F32) * 0x1p-32f;
      const I32 maybe = (I32)(u < room);
#if defined(__AVX512F__)
      if (!_mm512_movepi32_mask((__m512i)maybe)) continue;
#endif
      for (int i = 0; i < 16; i++) {
        if (!maybe[i] || half + i >= vocab) continue;
        const float score = scaled[half + i] + gumbel(bits[half - base + i]);
        if (score > best || (score == best && half + i < chosen)) best = score, chosen = half + i;
      }
    }
  }
  return chosen;
}

constexpr int kBins = 1024;  // of 1/32 in the scaled logit, below the largest; the last takes the rest

// Tokens down to where top_k or top_p cuts for certain, and the cut itself: the least logit that is kept.
float find_cut(const float* logits, const float* scaled, int64_t vocab, float top, int64_t top_k, double top_p) {
  float* mass = mass_scratch.get<float>(vocab + 16);
  int64_t count[kBins] = {};
  double weight[kBins] = {}, total = 0;
  for (int64_t i = 0; i < vocab; i += 16) store(mass + i, exponential(load(scaled + i) - top));
  auto bin_of = [&](int64_t i) {
    const float below = (top - scaled[i]) * 32.0f;
    return below < float(kBins - 1) ? int(below) : kBins - 1;
  };
  for (int64_t i = 0; i < vocab; i++) {
    const int bin = bin_of(i);
    count[bin]++;
    weight[bin] += mass[i];
  }
  for (double w : weight) total += w;
  int last = 0;
  int64_t seen = 0;
  double sum = 0;
  for (; last < kBins - 1; last++) {
    seen += count[last];
    sum += weight[last];
    if (seen >= top_k || sum >= top_p * total * (1 + 1e-6)) break;
  }
  candidates.clear();
  for (int64_t i = 0; i < vocab; i++)
    if (bin_of(i) <= last) candidates.push_back({logits[i], int32_t(i)});
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
  });
  const int64_t n = int64_t(candidates.size());
  double before = 0;
  int64_t i = 0;
  while (i < n) {  // equal logits stand or fall together
    if (i >= top_k || (top_p < 1.0 && i > 0 && before / total >= top_p)) break;
    int64_t next = i;
    for (; next < n && candidates[next].logit == candidates[i].logit; next++) before += mass[candidates[next].token];
    i = next;
  }
  candidates.resize(i);
  return i ? candidates[i - 1].logit : top;
}

int64_t draw_row(const Draw& d, int64_t row, const float* logits) {
  const int64_t likeliest = first_largest(logits, d.vocab);
  const float temperature = d.temperature[row];
  if (temperature == 0 || logits[likeliest] != logits[likeliest]) return likeliest;
  const Noise noise(d.seeds[row], d.counters[row]);
  const float inverse = 1.0f / std::max(temperature, 1e-10f);
  float* scaled = scaled_scratch.get<float>(d.vocab + 16);
  for (int64_t i = 0; i < d.vocab; i += 16)
    store(scaled + i, i + 16 <= d.vocab ? load(logits + i) * inverse : splat(-__builtin_inff()));
  for (int64_t i = d.vocab / 16 * 16; i < d.vocab; i++) scaled[i] = product(logits[i], inverse);
  const int64_t top_k = d.top_k[row] < 1 ? d.vocab : d.top_k[row];
  const float top = scaled[likeliest];
  if (top_k >= d.vocab && d.top_p[row] >= 1.0f && d.min_p[row] <= 0.0f)
    return draw_from_all(scaled, d.vocab, likeliest, noise);
  if (top_k >= d.vocab && d.top_p[row] >= 1.0f) {
    const float least = top + std::log(d.min_p[row]) - 1e-3f;
    candidates.clear();
    for (int64_t i = 0; i < d.vocab; i++)
      if (scaled[i] >= least) candidates.push_back({logits[i], int32_t(i)});
  } else {
    find_cut(logits, scaled, d.vocab, top, top_k, d.top_p[row] >= 1.0f ? 2.0 : double(d.top_p[row]));
  }
  int64_t chosen = likeliest;
  float best = -__builtin_inff();
  for (const Candidate& c : candidates) {
    if (std::exp(double(scaled[c.token] - top)) < double(d.min_p[row])) continue;
    uint32_t bits[4];
    noise.words(uint32_t(c.token / 4), bits);
    const float score = scaled[c.token] + gumbel(bits[c.token % 4]);
    if (score > best || (score == best && c.token < chosen)) best = score, chosen = c.token;
  }
  return chosen;
}

thread_local Scratch logits_scratch;

template <Dtype D>
void draw_rows(const Draw& d, bool greedy) {
  typedef typename Element<D>::type E;
  for_each(d.rows > 1 ? usable_threads() : 1, d.rows, 1, [&](int64_t row) {
    const E* in = static_cast<const E*>(d.logits) + row * d.step;
    const float* logits;
    if constexpr (D == kF32) {
      logits = in;
    } else {
      float* copy = logits_scratch.get<float>(d.vocab + 16);
      read_row<D>(in, d.vocab, copy);
      logits = copy;
    }
    d.out[row] = greedy ? first_largest(logits, d.vocab) : draw_row(d, row, logits);
  });
}

}  // namespace
}  // namespace bough

using namespace bough;

// temperature null: the argmax of every row.
BOUGH_EXPORT void bough_sample(const Draw* draw) {
  const bool greedy = draw->temperature == nullptr;
  if (draw->dtype == kF32) draw_rows<kF32>(*draw, greedy);
  else if (draw->dtype == kBF16) draw_rows<kBF16>(*draw, greedy);
  else draw_rows<kF16>(*draw, greedy);
}
