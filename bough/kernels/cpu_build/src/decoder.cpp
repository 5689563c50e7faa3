// A stack of decoder blocks in one call: what Python would do between the kernels costs more than some of them.

#include <cstring>
#include <algorithm>

#include "exports.h"
#include "linear.h"
#include "parallel.h"

namespace bough {

constexpr int kMostPieces = 3;

struct Matrix {  // mirrored by a ctypes structure; pieces lie on top of one another
  const Weight* pieces[kMostPieces];
  const float* bias;  // or null
  int32_t count, exact;
};

struct Block {  // mirrored by a ctypes structure; norms are fp32, those that may be missing are null
  Matrix qkv, out, gate_up, down;
  const float *attn_norm, *after_attn_norm, *ffn_norm, *after_ffn_norm, *q_norm, *k_norm;
  const float* cos_sin;  // null: no rotation
  void *k_cache, *v_cache;
  uint32_t *k_ranges, *v_ranges;  // null: the caches hold floats
  int32_t heads, kv_heads, dim, window, rotated, silu, cache_dtype, line;  // line: which of the steps it belongs to
  float scale, softcap, eps, offset, head_eps, head_offset;
};

namespace {

struct Buffers {
  float *stream, *added, *normed, *qkv, *attended, *wide, *gated;
};

thread_local Scratch scratch;

int64_t rows_of(const Matrix& m) {
  int64_t rows = 0;
  for (int i = 0; i < m.count; i++) rows += m.pieces[i]->rows;
  return rows;
}

Buffers divide(const Block* blocks, int64_t count, int64_t tokens, int64_t width) {
  int64_t qkv = 0, attended = 0, wide = 0;
  for (int64_t i = 0; i < count; i++) {
    qkv = std::max(qkv, rows_of(blocks[i].qkv));
    attended = std::max<int64_t>(attended, int64_t(blocks[i].heads) * blocks[i].dim);
    wide = std::max(wide, rows_of(blocks[i].gate_up));
  }
  float* at = scratch.get<float>(tokens * (width + qkv + attended + wide + wide / 2) + 5 * 16);
  auto take = [&](int64_t n) {
    float* p = at;
    at += (tokens * n + 15) / 16 * 16;
    return p;
  };
  return {nullptr, nullptr, take(width), take(qkv), take(attended), take(wide), take(wide / 2)};
}

void multiply(const Matrix& m, const float* x, int64_t tokens, float* out) {
  const int64_t rows = rows_of(m);
  int64_t at = 0;
  for (int i = 0; i < m.count; i++) {
    const Weight* w = m.pieces[i];
    bough_packed_linear(w, x, out + at, m.bias ? m.bias + at : nullptr, tokens, w->cols, rows, kF32, kF32, m.exact);
    at += w->rows;
  }
}

// Tells idle threads which matrix is next: between two of them, memory has nothing else to do.
void foresee(const Matrix& m) {
  const Weight& w = *m.pieces[0];
  expect_spans(usable_threads(), w.quants, num_groups(w) * group_quants(w));
}

void norm(const Block& b, const float* x, const float* weight, float* out, int64_t tokens, int64_t width) {
  bough_rms_norm(x, width, nullptr, 0, weight, out, nullptr, tokens, width, b.eps, b.offset, kF32, kF32);
}

void attend(const Block& b, const Step& step, const int64_t* positions, int64_t tokens, const Buffers& buffers) {
  const int64_t row = int64_t(b.heads + 2 * b.kv_heads) * b.dim;
  float *q = buffers.qkv, *k = q + int64_t(b.heads) * b.dim, *v = k + int64_t(b.kv_heads) * b.dim;
  Layer l{};
  l.q = q, l.k = k, l.v = v, l.out = buffers.attended, l.k_cache = b.k_cache, l.v_cache = b.v_cache;
  l.k_ranges = b.k_ranges, l.v_ranges = b.v_ranges;
  l.q_token = l.k_token = l.v_token = row;
  l.q_head = l.k_head = l.v_head = b.dim;
  l.heads = b.heads, l.kv_heads = b.kv_heads, l.dim = l.v_dim = b.dim;
  l.window = b.window, l.causal = 1, l.dtype = kF32, l.cache_dtype = b.cache_dtype, l.scale = b.scale, l.softcap = b.softcap;
  if (!b.cos_sin) {
    bough_attention(&step, &l);
    return;
  }
  Rope r{};
  r.q = q, r.k = k, r.positions = positions, r.cos_sin = b.cos_sin, r.q_norm = b.q_norm, r.k_norm = b.k_norm;
  r.tokens = tokens, r.q_token = r.k_token = row, r.q_head = r.k_head = b.dim;
  r.heads = b.heads, r.kv_heads = b.kv_heads, r.dim = b.dim, r.rotated = b.rotated, r.dtype = r.norm_dtype = kF32;
  r.eps = b.head_eps, r.offset = b.head_offset;
  bough_attention_rope(&step, &l, &r);
}

void run_block(const Block& b, const Block* next, const Step& step, const int64_t* positions, int64_t tokens, int64_t width,
               bool first, const Buffers& buffers) {
  const bool streams = tokens <= kFewTokens;  // weights pass by once; more tokens have more to compute than to read
  auto add_and_norm = [&](const float* weight) {
    bough_rms_norm(buffers.added, width, buffers.stream, width, weight, buffers.normed, buffers.stream, tokens, width, b.eps,
                   b.offset, kF32, kF32);
  };
  if (first) norm(b, buffers.stream, b.attn_norm, buffers.normed, tokens, width);
  else add_and_norm(b.attn_norm);
  multiply(b.qkv, buffers.normed, tokens, buffers.qkv);
  if (streams) foresee(b.out);
  attend(b, step, positions, tokens, buffers);
  multiply(b.out, buffers.attended, tokens, buffers.added);
  if (streams) foresee(b.gate_up);
  if (b.after_attn_norm) norm(b, buffers.added, b.after_attn_norm, buffers.added, tokens, width);
  add_and_norm(b.ffn_norm);
  multiply(b.gate_up, buffers.normed, tokens, buffers.wide);
  if (streams) foresee(b.down);
  const int64_t inner = rows_of(b.gate_up) / 2;
  bough_gated(buffers.wide, 2 * inner, buffers.gated, tokens, inner, kF32, b.silu);
  multiply(b.down, buffers.gated, tokens, buffers.added);
  if (streams && next) foresee(next->qkv);
  if (b.after_ffn_norm) norm(b, buffers.added, b.after_ffn_norm, buffers.added, tokens, width);
}

}  // namespace
}  // namespace bough

using namespace bough;

// From x: what the last block adds, and the stream it is added to. All [tokens, width], fp32. steps: by line of the KV cache.
BOUGH_EXPORT void bough_decoder_stack(const Block* blocks, int64_t count, const Step* const* steps, const int64_t* positions,
                                      const float* x, float* added, float* stream, int64_t tokens, int64_t width) {
  Buffers buffers = divide(blocks, count, tokens, width);
  buffers.stream = stream;
  buffers.added = added;
  std::memcpy(stream, x, sizeof(float) * tokens * width);
  for (int64_t i = 0; i < count; i++)
    run_block(blocks[i], i + 1 < count ? &blocks[i + 1] : nullptr, *steps[blocks[i].line], positions, tokens, width, i == 0, buffers);
}
